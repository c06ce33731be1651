"""Writer: a scheduled cluster becomes the text of one Triton kernel.

In: a cluster and a schedule. Out: `Kernel`, whose source is a pure function of the two.

    tmp0 = tl.load(in0 + (x), x < 1000)
    tmp1 = fj.maximum(tmp0, 0)
    tl.store(out0 + (x), tmp1, x < 1000)
"""

from __future__ import annotations

import hashlib
import re
from functools import cache
from typing import Any

from ...templates.table import named
from ..ir.cluster import Cluster
from ..ir.concretize import hinted, hinted_buffers, narrow, symbolic
from ..ir.expr import Compute, Expr, Reduce, Scan, Segment
from ..ir.graph import Buffer, Foreach
from ..ir.size import AnySize, product, scope, scope_names
from ..ops.table import STORAGE
from ..passes.block_reduction import numbered
from ..passes.hazards import reads
from ..schedule.choice import Schedule
from .facts import Facts
from .index import IndexSpace
from .kernel import Kernel, bytes_written, reads_of
from .loop_tape import LoopTape
from .peeled_tape import PeeledTape
from .pipelining import again, ahead, policies
from .tape import INDEX_OPS


def render(cluster: Cluster, tiles: Schedule, buffers: dict[str, Buffer], numerics: str = "fast") -> Kernel:
    """Return the kernel of a cluster that `schedule` made ready."""
    template = named(tiles.template)
    cluster = numbered(template.arranged(cluster), tiles)
    loaded = tuple(cluster.reads)
    # an input that is overwritten in place is one pointer, read and written
    writes = tuple(dict.fromkeys(buffers[s.buffer].written_to or s.buffer for s in cluster.stores))
    names = {b: f"in{i}" for i, b in enumerate(loaded)} | {b: f"out{i}" for i, b in enumerate(w for w in writes)}
    arguments = tuple(dict.fromkeys((*loaded, *writes)))
    writer = Writer(cluster, tiles, buffers, names, numerics)
    extents = writer.index.extents() if symbolic(cluster) else ()
    grid = template.grid(cluster, tiles)
    return finish(cluster, tiles, writer.write(), buffers, arguments, grid, numerics, extents)


def finish(
    step: Cluster | Foreach,
    tiles: Schedule,
    fields: dict[str, Any],
    buffers: dict[str, Buffer],
    arguments: tuple[str, ...],
    grid: tuple[int, int, int],
    numerics: str,
    extents: tuple[AnySize, ...] = (),
) -> Kernel:
    """Fill the template, and name the kernel after its text."""
    sizes = tuple(name for name in (scope_names() if extents else ()) if re.search(rf"\b{name}\b", repr(fields)))
    fields["params"] = ", ".join([fields["params"], *sizes]) if sizes else fields["params"]
    template = named(tiles.template)
    body = jinja_template(template.text).render(name="NAME", **fields)
    pointers = tuple(STORAGE[buffers[a].dtype].pointer for a in arguments)
    wide = bool(fields.get("wide")) or bool(sizes) and isinstance(step, Cluster) and not all(map(narrow, step.order))
    pointers += tuple("fp64" if name in scope().floats else "i64" if wide else "i32" for name in sizes)
    model, now = (
        (hinted(step), hinted_buffers(buffers, (*reads(step), *step.writes)))
        if isinstance(step, Cluster)
        else (step, buffers)
    )
    order = step.order if isinstance(step, Cluster) else step.rows[0].body(2).order
    # the text alone does not tell float32 from float64, nor one tile size from another
    digest = hashlib.sha256(repr((body, tiles, pointers)).encode()).hexdigest()[:8]
    name = f"{_kernel_name(order, template.prefix)}_{digest}"
    return Kernel(
        name=name,
        template=tiles.template,
        source=body.replace("NAME", name, 1),
        params=pointers,
        constants=tiles.blocks,
        grid=grid,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        debug="fj.check_" in body,
        fp_fusion=numerics == "fast",
        arguments=arguments,
        ops=step.lines,
        bytes_read=sum(reads_of(model, now).values()),
        bytes_written=bytes_written(model, now),
        cluster=step,
        schedule=tiles,
        sizes=sizes,
        extents=extents,
    )


@cache
def jinja_template(text: str) -> Any:
    import jinja2  # only when something is compiled

    return jinja2.Template(text, keep_trailing_newline=True, undefined=jinja2.StrictUndefined, autoescape=False)


def _kernel_name(order: tuple[Expr, ...], short: str) -> str:
    words = [
        n.op
        for n in order
        if isinstance(n, (Compute, Reduce, Scan, Segment))
        and not n.op.startswith(("cast", "rounded", "checked_", *INDEX_OPS))
    ]
    return "_".join([short, *list(dict.fromkeys(words))[:6]]) if words else f"{short}_copy"


def note(lines: tuple[str, ...]) -> str:
    """Return the ATen ops of a kernel, for its first line."""
    return ("; ".join(dict.fromkeys(line.split("  ")[0] for line in lines)) or "copy")[:160]


# -- the text ----------------------------------------------------------------------------------------------------------
class Writer:
    """Writes the statements of one kernel, as its template asks for them."""

    def __init__(
        self, cluster: Cluster, tiles: Schedule, buffers: dict[str, Buffer], pointers: dict[str, str], numerics: str
    ) -> None:
        self.facts = Facts(cluster, tiles, buffers, pointers, numerics)
        self.index = IndexSpace(self.facts)

    @property
    def cluster(self) -> Cluster:
        return self.facts.cluster

    @property
    def tiles(self) -> Schedule:
        return self.facts.tiles

    def write(self) -> dict[str, Any]:
        """Return what the template's text takes: its parameters, index variables with their masks, and statements."""
        index, wide = self.index, self.facts.widening
        columns = [f"r = ({index.backwards} + tl.arange(0, RBLOCK))[None, :]{wide}"] if index.backwards else []
        return {
            "note": note(self.cluster.lines),
            "params": ", ".join(self.facts.pointers.values()),
            "wide": wide,
            "axes": [line for v in index.groups if v != "r" for line in index.coordinates(v)],
            "columns": columns + (index.coordinates("r") if "r" in index.groups else []),
            "begin": index.begins(),
            **self.facts.template.fields(self),
        }

    def statements(self) -> list[str]:
        tape = self.tape()
        lines = [line for node in self.cluster.order for line in tape.statement(node)]
        return lines + [line for store in self.cluster.stores for line in tape.store(store)]

    def kept_row(self, sums: dict[str, str] | None = None) -> list[str]:
        """Return the statements of a row that is loaded once, and then gone over as often as there are reductions one
        above the other.
        """
        lines = [line for n, name in self.facts.kept.items() for line in LoopTape(self.index).keep(n, name)]
        return [
            *lines,
            *(
                line
                for level in self.passes(sums)
                for part in ("rows", "start", "body", "finish")
                for line in level[part]
            ),
        ]

    def tape(self) -> LoopTape | PeeledTape:
        return PeeledTape(self.index) if self.facts.peel else LoopTape(self.index)

    def walk(self) -> dict[str, Any]:
        """Return the statements of a walk over rows: before the loop, inside, and after it, where the column results
        are written.
        """
        sums = [s for s in self.facts.cluster.stores if s.reduces]
        names = {s.buffer: f"sum{i}" for i, s in enumerate(sums)}
        tiles = range(self.facts.tiles_a_row)
        start, body, finish = [], [], []
        if self.facts.tiles.keep:
            body = [line.replace("@", "0") for line in self.kept_row(names)]
        elif len(tiles) == 1:
            tape = self.tape()
            if isinstance(tape, LoopTape):
                tape.begins["r"] = "0"
            body = self.index.tile(0) if self.facts.peel else []
            body += [line for node in self.facts.cluster.order for line in tape.statement(node)]
            body += [line for s in self.facts.cluster.stores if s not in sums for line in tape.store(s)]
            body += [line.replace("@", "0") for s in sums for line in tape.column(s, names[s.buffer])]
        else:  # the row is read again, out of L1 or L2, rather than kept: only its column sums stay in registers
            for number, level in enumerate(self.passes(names)):
                body += level["rows"] + level["start"]
                body += ["tl.debug_barrier()"] if not number else []  # loads of the next row, begun early, would spill
                for t in tiles if level["body"] else ():
                    body += [line.replace("@", str(t)) for line in (*self.index.tile(t), *level["body"])]
                body += level["finish"]
        for t in tiles:
            again = self.index.tile(t) if len(tiles) > 1 else []
            for s in (s for s in sums if not t or self.facts.runs(s)):
                first, last = self.tape().partial(s, names[s.buffer])
                start += [line.replace("@", str(t)) for line in first]
                finish += [line.replace("@", str(t)) for line in (*again, *last)]
        if self.facts.peel:  # every row of a program begins where its first one does
            finish = [
                "x = (program + tl.arange(0, 1))[:, None]",
                *self.index.coordinates("x"),
                *self.index.tile(0),
                *finish,
            ]
        programs = self.facts.cluster.programs if isinstance(self.facts.cluster.programs, int) else "tl.num_programs(0)"
        steps = f"program * XBLOCK, {product(self.facts.cluster.parallel)}, {programs} * XBLOCK"
        columns = [] if len(tiles) > 1 or self.facts.peel else self.index.tile(0)
        return {"start": columns + start, "rows": [body], "finish": finish, "span": self.loop(steps)}

    def loop(self, steps: str) -> str:
        """Return what a loop runs over; with stages, loads of later iterations are under way while one is computed."""
        return (
            f"tl.range({steps}, num_stages={self.facts.tiles.num_stages})"
            if self.facts.tiles.num_stages > 1
            else f"range({steps})"
        )

    def passes(self, sums: dict[str, str] | None = None) -> list[dict[str, list[str]]]:
        """Return one pass over the row per level: what it accumulates and stores needs only reductions of the passes
        before.

        Stores whose buffer is in `sums` are added to the column sum of that name instead.
        """
        top = max(self.facts.levels.values(), default=0)
        tape = LoopTape(self.index)
        result: list[dict[str, list[str]]] = []
        rows = [n for n in self.facts.cluster.order if not self.facts.full[n] and not isinstance(n, Reduce)]
        written = lambda tape, s: tape.column(s, sums[s.buffer]) if sums and s.buffer in sums else tape.store(s)  # noqa: E731
        kinds = policies(self.facts, top)
        for level in range(top + 1):
            made = [n for n in self.facts.cluster.order if isinstance(n, Reduce) and self.facts.levels[n] == level + 1]
            stores = [s for s in self.facts.cluster.stores if self.facts.stored_at(s, top) == level]
            head = [line for n in rows if self.facts.levels[n] == level for line in tape.statement(n)]
            wide = [s for s in stores if self.facts.runs(s) or self.facts.full.get(s.value, False)]
            narrow = [line for s in stores if s not in wide for line in written(tape, s)]
            inner = LoopTape(self.index, tape)
            inner.begins["r"] = self.index.backwards
            inner.policies = {} if sums or self.facts.kept else kinds[level]  # a walk reads its one row again out of L1
            inner.again = level > 0
            roots = [a for n in made for a in self.facts.inputs(n)] + [
                r for s in wide for r in (s.value, *(e for e, _ in s.index))
            ]
            early, rest = ahead(inner, self.facts.inside(roots), roots)
            body = [line for n in rest for line in inner.statement(n)]
            start: list[str] = list(inner.carries)
            finish: list[str] = []
            steps: list[str] = []
            ends = LoopTape(self.index.ends, tape) if self.index.ends else None
            for node in made:
                begin, step, end = inner.accumulate(node, tape, ends)
                start += begin
                steps = [*step, *steps]  # a shifted sum needs its maximum as it was before
                finish += end
            body += steps
            body += [line for s in wide for line in written(inner, s)]
            body = [*early, *again(self.index), *body] if early else body
            if ends and wide:
                ends.names.update((n, name) for n, name in tape.names.items() if not self.facts.full[n])
                outer = self.facts.inside([r for s in wide for r in (s.value, *(e for e, _ in s.index))])
                finish += [line for n in outer for line in ends.statement(n)] + [
                    line for s in wide for line in ends.store(s)
                ]
            result.append(
                {"rows": head + narrow, "start": start, "body": body if made or wide else [], "finish": finish}
            )
        return result
