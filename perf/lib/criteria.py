"""What the kernels of a case have to meet, read off their text, their PTX and their launch: no device is needed.

In: a case's kernels. Out: `violations`, one line for each thing that is not met.

    >>> violations(kernels, sms=132)
    ['flat_mul_0f3a: in0 is read 2.0 times, 1 pass']

Each access of the PTX is traced back to the kernel's parameter, through every instruction that computes its address. So
it shows which input a load belongs to, how many bytes a thread loads of it, and how many at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

from cases import Case

from fusejit.codegen.emit.kernel import Kernel
from fusejit.codegen.ir.analysis import fast_axis
from fusejit.codegen.ir.cluster import Cluster, Store
from fusejit.codegen.ir.expr import Load, Segment
from fusejit.codegen.ir.size import product
from fusejit.codegen.schedule import registers as registers_module
from fusejit.codegen.schedule.choice import MEMORY_WAIT
from fusejit.codegen.schedule.device import machine
from fusejit.codegen.schedule.unaligned_rows import is_flat, peel

WIDE = 16
LONGEST = 32768  # columns that one pass has to be enough for
KEPT_BYTES = (
    131072  # of a row's operands, half the registers of a multiprocessor: beyond it a second pass reads them out of L2
)
FULL = 0.95  # of the multiprocessors: programs come in powers of two, 128 are as near to 132 as they get
SLACK = 0.3  # of a read: the ends of a peeled row, an element a thread
_WIDTH = re.compile(r"\.(?:v(\d))?\.?(?:[bsuf]|bf)(\d+)(x2)?$")


@dataclass(slots=True)
class Access:
    """What one thread loads, or stores, through one parameter: {bytes of an instruction: instructions}."""

    by_width: dict[int, int] = field(default_factory=dict)

    def add(self, width: int) -> None:
        self.by_width[width] = self.by_width.get(width, 0) + 1

    @property
    def bytes(self) -> int:
        return sum(width * count for width, count in self.by_width.items())

    @property
    def wide(self) -> float:
        """The share of the bytes that move 16 at a time."""
        return WIDE * self.by_width.get(WIDE, 0) / self.bytes if self.bytes else 0.0


@cache
def accesses(ptx: str) -> tuple[dict[int, Access], dict[int, Access]]:
    """Return loads and stores of global memory by the position of the kernel's parameter."""
    of: dict[str, int] = {}  # register -> parameter
    loads: dict[int, Access] = {}
    stores: dict[int, Access] = {}
    for line in re.sub(r"/\*.*?\*/|//[^\n]*", "", ptx).split(";"):
        found = re.match(r"\s*(?:@!?%\w+\s+)?([a-z][\w.:]*)\s+(.*)", line.strip().split("\n")[-1].strip(), re.DOTALL)
        if not found:
            continue
        op, rest = found.groups()
        if op.startswith("ld.param"):
            target, number = re.match(r"(%\w+), \[\w+_param_(\d+)\]", rest).groups()  # type: ignore[union-attr]
            of[target] = int(number)
        elif op.startswith(("ld.global", "st.global", "atom.global", "red.global")):
            address = re.search(r"\[\s*(%\w+)", rest)
            if address and address[1] in of:
                (loads if op.startswith("ld") else stores).setdefault(of[address[1]], Access()).add(_width(op))
        elif op.startswith("cp.async") and ".shared.global" in op:
            source, size = re.search(r",\s*\[\s*(%\w+)[^\]]*\],\s*(0x[0-9a-f]+|\d+)", rest).groups()  # type: ignore[union-attr]
            if source in of:
                loads.setdefault(of[source], Access()).add(int(size, 0))
        else:
            registers = re.findall(r"%\w+", rest)
            known = [of[r] for r in registers[1:] if r in of]
            if registers and known:
                of[registers[0]] = known[0]
    return loads, stores


def _width(op: str) -> int:
    vector, bits, pair = _WIDTH.search(op).groups()  # type: ignore[union-attr]
    return int(vector or 1) * int(bits) // 8 * (2 if pair else 1)


# -- one case ----------------------------------------------------------------------------------------------------------
SUMMED = ("embedding_norm", "scatter_add")
LIMIT = 1.05  # times the least, and times what the first row of EXTRA that applies allows beyond it
WIDE_SUM = 4  # bytes of what half types are added up in
PART = 2**30  # bytes of the logits that one part of them holds at most


def _elements(case: Case) -> int:
    return product(case.shape[:2])


def parts(case: Case) -> int:
    """In how many parts of its logits a case is computed: each launches what torch.compile launches once, for all of
    them.
    """
    if case.name != "linear_cross_entropy":
        return 1
    rows, _, classes = case.shape
    return -(-rows * classes * case.dtype.itemsize // PART)


def in_parts(case: Case, read: int) -> int:
    """What kernels move beyond the least where logits are computed a part at a time; what the products read and write
    is not theirs.
    """
    rows, width, classes = case.shape
    size, table, hidden = case.dtype.itemsize, classes * width, rows * width
    logits = rows * classes * size
    if case.pass_ == "forward":
        return logits - read  # read once
    count = parts(case)
    added = (
        count * (size + 2 * WIDE_SUM) - WIDE_SUM if _half(case) else (count - 1) * 3 * size
    )  # a part's gradient into the sum of all
    rounded = WIDE_SUM + size if _half(case) else 0
    scaled = 2 * size * (table + hidden)  # by the loss' gradient, once that is known
    moved = 2 * logits + table * (added + rounded) + scaled + 2 * size * hidden  # last: rows that are ignored get zeros
    return moved - read - size * (table + hidden)


def sums(case: Case) -> int:
    """A table's sums are begun (written) and added to (read); an embedding's are wide, so written and read once more to
    be rounded.
    """
    adds = case.name == "scatter_add" or case.pass_ != "forward"
    wide = _half(case) and case.name == "embedding_norm"
    return adds * (4 * WIDE_SUM if wide else 2 * case.dtype.itemsize) * (_elements(case) // 8)


def column_sums(case: Case) -> int:
    """Each program writes its part of up to two column sums, which another kernel reads; a group's parts are those of
    its channels.
    """
    columns = case.shape[1]
    many = next((k for limit, k in machine().mixed_programs if columns <= limit), 1)
    programs = case.shape[0] if case.name == "group_norm" else many * machine().sms
    return 2 * 2 * WIDE_SUM * columns * programs


def _few(case: Case) -> bool:
    rows = case.shape[1] if case.name == "batch_norm" else product(case.shape) // case.length
    return rows < 132 and case.length > LONGEST


# What a case may move beyond the least, in bytes, given what it has to read. The first row that applies; a row says
# why.
EXTRA: tuple[tuple[str, Callable[[Case], bool], Callable[[Case, int], float]], ...] = (
    (
        "logits, a part of them at a time, are no part of the least",
        lambda c: c.name == "linear_cross_entropy",
        in_parts,
    ),
    (
        "gradients are read for their norm, then to scale them",
        lambda c: c.name == "clip_grad_norm",
        lambda c, read: read,
    ),
    (
        "sums are begun and added to; those of an embedding are rounded from float32",
        lambda c: c.name in SUMMED,
        lambda c, _: sums(c),
    ),
    (
        "the largest of all values is known after a first read",
        lambda c: c.name == "quant_per_tensor",
        lambda c, read: read,
    ),
    (
        "few rows of logits are read once a pass",
        lambda c: c.name in ("cross_entropy", "weighted_cross_entropy"),
        lambda c, _: 0,
    ),
    (
        "probabilities of few rows are summed, in pieces, before their gradient",
        lambda c: c.name == "soft_cross_entropy" and _few(c),
        lambda c, _: c.dtype.itemsize * _elements(c) * (c.pass_ != "forward"),
    ),
    ("few long rows are reduced in pieces, then read again", _few, lambda c, read: read),
    (
        "column sums of rows this long leave no registers: two kernels read the row and its gradient",
        lambda c: _norm(c) and c.name not in ("group_norm", "batch_norm") and _row(c) > LONGEST,
        lambda c, _: 2 * c.dtype.itemsize * product(c.shape),
    ),
    ("each program writes its part of the column sums", lambda c: _norm(c), lambda c, _: column_sums(c)),
    ("", lambda c: True, lambda c, _: 0),
)


def _row(case: Case) -> int:
    return case.length * case.dtype.itemsize


def _half(case: Case) -> bool:
    return case.dtype.itemsize == 2


def _norm(case: Case) -> bool:
    return "_norm" in case.name and case.name != "l2_norm" and case.pass_ != "forward"


def of_case(case: Case, kernels: Sequence[Kernel], read: int, written: int) -> list[str]:
    """Return what the kernels of a case do not meet; `read`, `written`: the bytes that have to be."""
    reason, _, extra = next(row for row in EXTRA if row[1](case))
    least = read + written
    limit = LIMIT * (least + extra(case, read)) / least
    moved = sum(k.bytes_read + k.bytes_written for k in kernels) / least
    found = violations(kernels)
    if moved > limit:
        found.append(f"moves {moved:.2f} times the least, {limit:.2f} allowed{': ' * bool(reason)}{reason}")
    return found


# -- one kernel --------------------------------------------------------------------------------------------------------
def violations(kernels: Sequence[Kernel], sms: int = 132) -> list[str]:
    """Return what a program's kernels do not meet."""
    return [
        f"{k.name}: {text}"
        for k in {k.name: k for k in kernels}.values()
        for text in (*_resources(k, sms), *_traffic(k))
    ]


def _resources(k: Kernel, sms: int) -> Iterator[str]:
    if k.n_spills:
        yield f"{k.n_spills} bytes spilled"
    programs = product(k.grid)
    each = max(k.bytes_read, k.bytes_written) / programs
    device = machine()
    if (
        programs < FULL * sms and each > device.in_flight * device.launch_us / MEMORY_WAIT
    ):  # less is not worth a launch more
        yield f"{programs} programs of {each / 1e3:.0f} KB each, {sms} multiprocessors"


def _traffic(k: Kernel) -> Iterator[str]:
    device = machine()
    alone = product(k.grid) == 1 and k.bytes_read + k.bytes_written <= device.in_flight * device.launch_us / MEMORY_WAIT
    if (
        not isinstance(k.cluster, Cluster) or alone
    ):  # what one program does within the time of a launch is no matter of bandwidth
        return
    loads, stores = accesses(k.ptx)
    for number, name in enumerate(k.arguments):
        reads = [n for n in k.cluster.reads.get(name, ()) if _whole(n, k.cluster)]
        if reads and number not in loads:
            yield f"argument {number} ({name}): no load of it in the PTX"
        elif reads:
            times, allowed = _times(k, reads, loads[number]), passes(k)
            if times > allowed * len({n.layout for n in reads}) + SLACK:
                yield f"argument {number} ({name}) is read {times:.1f} times, {allowed} pass{'es' * (allowed > 1)}"
            if all(_can_be_wide(n, k) for n in reads) and loads[number].wide < 0.5:
                yield f"argument {number} ({name}) is loaded {_spelled(loads[number])} at a time"
        written = k.cluster.writes.get(name)
        whole = written is not None and _whole(written, k.cluster) and not written.mode and number in stores
        if whole and _can_be_wide(written, k) and stores[number].wide < 0.5:
            yield f"argument {number} ({name}) is stored {_spelled(stores[number])} at a time"


def _spelled(access: Access) -> str:
    return " and ".join(f"{width} bytes" for width in sorted(access.by_width))


def _whole(access: Load | Store, cluster: Cluster) -> bool:
    """Whether an operand has an element for each of the space's (or a row of it for each), and is no computed place."""
    strides = access.layout.strides
    return (
        strides is not None
        and not access.index
        and all(s != 0 for s, n in zip(strides, cluster.axes, strict=True) if n > 1)
    )


def _times(k: Kernel, reads: Sequence[Load], access: Access) -> float:
    """How often a thread loads its part of the tile: a loop's loads count once, whatever is under way for later
    iterations not at all.
    """
    tile = product(dict(k.constants).values())
    if k.cluster.programs and not k.schedule.keep:
        tile *= -(-product(k.cluster.reduce) // dict(k.constants)["RBLOCK"]) if not k.schedule.peel else 1
    threads = 32 * k.num_warps
    least = WIDE / reads[0].dtype.itemsize if tile >= threads else tile  # a small tile stands in several threads
    part = max(tile / threads, least) * reads[0].dtype.itemsize
    ahead = (
        k.num_stages + 1 if re.search(r"cp\.async\S*\.shared\.global", k.ptx) else 1
    )  # a loop's prologue has copies of its loads
    return access.bytes / part / ahead


def passes(k: Kernel) -> int:
    """How often a kernel may go over its rows: once, if they fit."""
    cluster = k.cluster
    if not cluster.reduce or k.template == "reduction_persistent":
        return 1
    columns = product(cluster.reduce)
    whole = [n for loads in cluster.reads.values() for n in loads if _whole(n, cluster)]
    row = columns * sum(n.dtype.itemsize for n in {(n.buffer, n.layout): n for n in whole}.values())
    sums = 4 * columns * (registers_module.column_sums(cluster) + sum(isinstance(n, Segment) for n in cluster.order))
    levels = max(cluster.levels.values())
    upright = any(fast_axis(n.layout.strides, cluster.axes) in range(len(cluster.parallel)) for n in whole)
    if k.template == "reduction_looped" and (columns > LONGEST or upright):
        near = "fj.shifted_squares" in k.source  # a variance begins near the mean of its first tile
        return k.source.count("for start in") + near
    return levels + 1 if row + sums > KEPT_BYTES else 1


def _can_be_wide(access: Load | Store, k: Kernel) -> bool:
    """Whether an operand's strides let 16 bytes of it be moved at once: its rows begin at multiples of 16 bytes, or are
    peeled.
    """
    cluster, layout = k.cluster, access.layout
    strides, split = layout.strides or (), len(cluster.parallel)
    each = WIDE // access.dtype.itemsize
    tile = product(dict(k.constants).values()) // (32 * k.num_warps)
    if access.dtype.itemsize * tile < WIDE or getattr(access, "mask", None) is not None:
        return False
    fast = fast_axis(strides, cluster.axes)
    if fast is None:
        return False
    if k.template == "pointwise_2d":
        block = {len(strides) - 1: "XBLOCK", len(strides) - 2: "YBLOCK"}.get(fast)
        outer = (*(s for a, s in enumerate(strides) if a != fast), layout.offset, cluster.axes[fast])
        return block is not None and dict(k.constants)[block] >= each and all(s % each == 0 for s in outer)
    if k.schedule.peel:
        return bool(peel(cluster) and peel(cluster).follows(layout, split))  # type: ignore[union-attr]
    group = range(split) if fast < split else range(split, len(strides))
    if fast != max(group):
        return False
    group = range(fast, split) if k.template == "pointwise_row" else group
    if is_flat([strides[a] for a in group], [cluster.axes[a] for a in group]):
        outer = [s for a, s in enumerate(strides) if a not in group]
    else:
        outer = [s for a, s in enumerate(strides) if a != fast] + [cluster.axes[fast]]
    block = "XBLOCK" if fast < split else "RBLOCK"
    return (
        all(s % each == 0 for s in (*outer, layout.offset))
        and dict(k.constants)[block] >= each
        and not _partial_masks(k, fast, each)
    )


def _partial_masks(k: Kernel, fast: int, each: int) -> bool:
    """Whether the end of the tiles along the fast axis cuts a group: Triton then masks element by element."""
    group = (
        range(len(k.cluster.parallel))
        if fast < len(k.cluster.parallel)
        else range(len(k.cluster.parallel), len(k.cluster.axes))
    )
    return product(k.cluster.axes[a] for a in group) % each != 0


__all__ = ["Access", "EXTRA", "accesses", "of_case", "parts", "passes", "violations"]
