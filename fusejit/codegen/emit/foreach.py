"""Foreach: the text of one kernel that does the same to many tensors.

In: clusters of one pattern. Out: `Kernel`. The body is written once; each program looks up its tensor in rows of the
text.

    program = tl.program_id(0)
    first, size, in0, in1 = 0, 4096, in0_0, in1_0
    if program >= 2: first, size, in0, in1 = 2, 231, in0_1, in1_1
    x = (program - first) * XBLOCK + tl.arange(0, XBLOCK)
    xmask = x < size
    tl.store(in0 + (x), tl.load(in0 + (x), xmask) - tl.load(in1 + (x), xmask), xmask)

A reduction walks through `chunk` elements in a loop; where a tensor has more, its programs write one partial result
each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ...templates.table import template_for
from ..ir.expr import Load
from ..ir.graph import Buffer, Foreach
from ..schedule.device import Device, machine
from .kernel import Kernel
from .writer import Writer, finish, note

ROWS = 8  # rows of one block: every program tests each block, and each row of its own block
LINE = 120


def render_foreach(
    group: Foreach, buffers: dict[str, Buffer], numerics: str = "fast", device: Device | None = None
) -> Kernel:
    """Return the kernel of a group."""
    tiles = template_for(group).tiles(group, device or machine())[0]
    block, each = tiles.blocks[-1][1], group.chunk or tiles.blocks[-1][1]
    masked = any(row.size % block for row in group.rows)
    body = group.rows[0].body(2 * block + masked)
    names = [s.buffer for s in body.stores] + [n.buffer for n in body.order if isinstance(n, Load)]
    roles = {int(name.lstrip("inout")): name for name in names}
    columns, parameters = _parameters(group, [roles[number] for number in range(len(roles))])
    memory = {roles[number]: buffers[buffer] for number, (buffer, _) in enumerate(group.rows[0].operands)}
    memory = {role: Buffer(role, b.shape, b.strides, b.dtype, b.device) for role, b in memory.items()}
    partial = {s.buffer for s in body.stores} if any(row.size > each for row in group.rows) else set()
    pointers = {role: role + (" + program" if group.chunk and role in partial else "") for role in memory}
    writer = Writer(body, tiles, memory, pointers, numerics)
    table, first = [], 0
    for row in group.rows:
        places = [row.operands[number] for number in columns]
        table.append([first, row.size, *(parameters[buffer] + (f" + {at}" if at else "") for buffer, at in places)])
        first += -(-row.size // each)
    fields = {
        **writer.write(),
        "note": f"{len(group.rows)} tensors: {note(group.lines)}",
        "params": list(_wrapped(parameters.values())),
        "table": _lookup(table, ", ".join(["first", "size", *(roles[number] for number in columns)])),
        "masked": masked,
        "chunk": group.chunk,
    }
    return finish(group, tiles, fields, buffers, tuple(parameters), (first, 1, 1), numerics)


def _parameters(group: Foreach, roles: list[str]) -> tuple[list[int], dict[str, str]]:
    """Return the roles that differ between rows, and {buffer: parameter}: what is the same in all rows is named like
    its role.
    """
    parameters: dict[str, str] = {}
    columns = []
    for number, role in enumerate(roles):
        found = [row.operands[number] for row in group.rows]
        if all(place == (found[0][0], 0) for place in found) and found[0][0] not in parameters:
            parameters[found[0][0]] = role
        else:
            columns.append(number)
    for number in columns:
        for place, row in enumerate(group.rows):
            parameters.setdefault(row.operands[number][0], f"{roles[number]}_{place}")
    return columns, parameters


def _lookup(table: list[list[object]], columns: str) -> list[str]:
    """Return the statements with which a program finds its row: it skips whole blocks of rows, then walks through its
    own.
    """
    lines = [f"{columns} = {', '.join(map(str, table[0]))}"]
    for start in range(0, len(table), ROWS):
        rows = table[start : start + ROWS]
        inner = [f"if program >= {row[0]}: {columns} = {', '.join(map(str, row))}" for row in rows[1:]]
        if start:
            inner.insert(0, f"{columns} = {', '.join(map(str, rows[0]))}")
        tests = [f"program >= {rows[0][0]}"] if start else []
        tests += [f"program < {table[start + ROWS][0]}"] if start + ROWS < len(table) else []
        head = f"if {tests[0]}:" if len(tests) == 1 else f"if ({tests[0]}) & ({tests[1]}):" if tests else ""
        lines += [head, *(f"    {line}" for line in inner)] if head else inner
    return lines


def _wrapped(names: Iterable[str]) -> Iterator[str]:
    """Yield names, comma-separated, in lines of a readable length."""
    line = ""
    for name in names:
        if len(line) + len(name) > LINE:
            yield line
            line = ""
        line += f"{' ' if line else ''}{name},"
    yield line
