"""Writer: a scheduled cluster becomes the text of one Triton kernel.

In: a cluster and a schedule. Out: `Kernel`, whose source is a pure function of the two.

    tmp0 = tl.load(in0 + (x), x < 1000)
    tmp1 = fj.maximum(tmp0, 0)
    tl.store(out0 + (x), tmp1, x < 1000)
"""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Iterable
from functools import cache
from typing import Any

from ...templates.pointwise_2d import second_axis
from ...templates.table import TEMPLATE
from ..ir.analysis import along_row, power_of_two
from ..ir.cluster import Cluster, Store
from ..ir.concretize import hinted, hinted_buffers, hinted_most, narrow, symbolic
from ..ir.expr import Compute, Expr, Iota, Load, Reduce, Scan, Segment, children
from ..ir.graph import Buffer, Foreach
from ..ir.layout import Layout, permute, reach
from ..ir.size import AnySize, divide, hint, product, scope, scope_names
from ..ops.table import OPS, STORAGE
from ..passes.block_reduction import numbered
from ..passes.hazards import reads
from ..passes.online import Shifted, in_one_pass
from ..schedule.choice import Schedule
from ..schedule.registers import kept
from ..schedule.unaligned_rows import is_flat, peel, tile_columns
from .kernel import Kernel, bytes_written, reads_of
from .peeled_tape import PeeledTape
from .pipelining import again, ahead, policies
from .tape import Tape

INDEX_OPS = {"index_div", "index_mod"}
COMPARISONS = {"lt", "le", "gt", "ge", "eq", "ne"}


def render(cluster: Cluster, tiles: Schedule, buffers: dict[str, Buffer], numerics: str = "fast") -> Kernel:
    """Return the kernel of a cluster that `schedule` made ready."""
    if tiles.template == "pointwise_2d":
        cluster = _second_axis_last_but_one(cluster)
    cluster = numbered(cluster, tiles)
    loaded = tuple(cluster.reads)
    # an input that is overwritten in place is one pointer, read and written
    writes = tuple(dict.fromkeys(buffers[s.buffer].written_to or s.buffer for s in cluster.stores))
    names = {b: f"in{i}" for i, b in enumerate(loaded)} | {b: f"out{i}" for i, b in enumerate(w for w in writes)}
    arguments = tuple(dict.fromkeys((*loaded, *writes)))
    writer = Writer(cluster, tiles, buffers, names, numerics)
    extents = writer.extents() if symbolic(cluster) else ()
    return finish(cluster, tiles, writer.write(), buffers, arguments, writer.grid(), numerics, extents)


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
    body = _template(tiles.template).render(name="NAME", **fields)
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
    name = f"{_kernel_name(order, tiles)}_{hashlib.sha256(repr((body, tiles, pointers)).encode()).hexdigest()[:8]}"
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
def _template(name: str) -> Any:
    import jinja2  # only when something is compiled

    loader = jinja2.PackageLoader("fusejit", "templates")
    environment = jinja2.Environment(
        loader=loader, keep_trailing_newline=True, undefined=jinja2.StrictUndefined, autoescape=False
    )
    return environment.get_template(f"{name}.py.jinja")


def _kernel_name(order: tuple[Expr, ...], tiles: Schedule) -> str:
    silent = ("cast", "rounded", "checked_", *INDEX_OPS)
    words = [n.op for n in order if isinstance(n, (Compute, Reduce, Scan, Segment)) and not n.op.startswith(silent)]
    short = {
        "reduction_persistent": "row",
        "reduction_mixed": "both",
        "reduction_looped": "loop",
        "pointwise_2d": "tile",
        "pointwise_row": "line",
        "pointwise": "flat",
        "foreach": "each",
        "foreach_reduction": "each",
    }[tiles.template]
    return "_".join([short, *list(dict.fromkeys(words))[:6]]) if words else f"{short}_copy"


def _rounded(cluster: Cluster) -> dict[Expr, Expr]:
    """Return {value: what it rounds} of the values that are only stored, in the dtype that they are rounded to: a store
    rounds too.
    """
    read = {c for n in cluster.order for c in children(n)} | {e for s in cluster.stores for e, _ in s.index}
    read |= {s.value for s in cluster.stores if s.mode or s.value.dtype is not s.dtype}
    stored = [s.value for s in cluster.stores if STORAGE[s.dtype].round and s.value not in read]
    casts = {n: n.args[0] for n in stored if isinstance(n, Compute) and n.op in ("cast", "rounded")}
    return {
        value: source
        for value, source in casts.items()
        if STORAGE[source.dtype].compute == STORAGE[value.dtype].compute
    }


def _second_axis_last_but_one(cluster: Cluster) -> Cluster:
    axis = second_axis(hinted(cluster))
    assert axis is not None
    rank = len(cluster.axes)
    new = [*(a for a in range(rank) if a not in (axis, rank - 1)), axis, rank - 1]
    return cluster.map(permute(cluster.axes, new), [cluster.axes[a] for a in new], [])


# -- the text ----------------------------------------------------------------------------------------------------------
class Writer:
    """Writes the statements of one kernel. `level` of a node: how many reductions lie below it, one above the other.

    `column` is the index variable along a row and `width` the tile's; of a peeled row, `ends` writes what is not in
    whole groups, and
    `segments` what is one value a segment.
    """

    column, width = "r", "RBLOCK"
    ends: Writer | None = None
    segments: Writer | None = None

    def __init__(
        self, cluster: Cluster, tiles: Schedule, buffers: dict[str, Buffer], names: dict[str, str], numerics: str
    ) -> None:
        self.cluster, self.tiles, self.buffers, self.pointers = cluster, tiles, buffers, names
        self.exact = numerics == "eager"
        self.split = len(cluster.parallel)
        rows = hinted_most(cluster) if tiles.peel else cluster
        self.peel = peel(rows) if tiles.peel else None
        self.levels, self.full = cluster.levels, cluster.full
        self.kept: dict[Load, str] = {n: f"row{i}" for i, n in enumerate(kept(cluster))} if tiles.keep else {}
        self.online: dict[Expr, Shifted] = {}
        length = product(cluster.reduce)
        whole = tile_columns(rows) if tiles.peel else length
        fixed = isinstance(length, int)  # of a row whose length varies nobody knows how many tiles it has
        self.tiles_a_row = -(-whole // tiles["RBLOCK"]) if cluster.reduce and fixed else 1
        looped = tiles.template == "reduction_looped" and fixed  # a pass more where the length varies
        if looped or (cluster.programs and self.tiles_a_row > 1):
            self.levels, self.online = in_one_pass(cluster, self.exact)
        self.rows: dict[Expr, bool] = {}  # whether a value has a row for each row of the tile
        for node in cluster.order:
            runs = isinstance(node, (Load, Iota)) and any((node.layout.strides or ())[: self.split])
            self.rows[node] = isinstance(node, Reduce) or runs or any(self.rows[c] for c in children(node))
        self.rounded = _rounded(cluster)
        self.groups = self._groups()
        # bytes bound offsets, negative ones too
        places = (reach(n.layout) for n in cluster.order if isinstance(n, Iota))
        self.wide = any(n >= 2**31 for n in (product(cluster.axes), *places, *(buffers[n].bytes for n in names)))
        self.ends = self._ends() if self.peel else None
        self.segments = self._segments() if cluster.segments else None

    def _groups(self) -> dict[str, list[int]]:
        """Return the axes behind each index variable."""
        rank = len(self.cluster.axes)
        if self.tiles.template in ("pointwise_2d", "pointwise_row"):
            return {"y": list(range(rank - 1)), "x": [rank - 1]}
        return (
            {"x": list(range(self.split)), "r": list(range(self.split, rank))}
            if self.cluster.reduce
            else {"x": list(range(rank))}
        )

    def _ends(self) -> Writer:
        """Return the writer of what lies before and behind the whole groups of a row."""
        assert self.peel is not None
        ends = copy.copy(self)
        ends.column, ends.width = "e", str(2 * self.peel.group)
        ends.groups = {"x": self.groups["x"], "e": self.groups["r"]}
        return ends

    def _segments(self) -> Writer:
        """Return the writer of what has one value a segment."""
        found, rows = copy.copy(self), self.groups["r"]
        found.column, found.width = "s", f"RBLOCK // {self.padded}"
        found.groups = {"x": self.groups["x"], "s": rows[: self.cluster.segments]}
        return found

    @property
    def padded(self) -> int:
        """How many places of a tile a segment takes."""
        return power_of_two(self.cluster.segment[1])

    @property
    def middle(self) -> str:
        """How many elements of a peeled row are in whole groups."""
        assert self.peel is not None
        return f"({product(self.cluster.reduce)} - head) // {self.peel.group} * {self.peel.group}"

    def grid(self) -> tuple[int, int, int]:
        if self.cluster.programs:
            return (hint(self.cluster.programs), 1, 1)
        sizes = {v: product(self.cluster.axes[a] for a in axes) for v, axes in self.groups.items()}
        if self.tiles.template == "pointwise_row":
            return (sizes["y"] * self.tiles_of_a_line, 1, 1)
        count = lambda v: -(-hint(sizes[v]) // self.tiles[f"{v.upper()}BLOCK"]) if v in sizes else 1  # noqa: E731
        return (count("x") * count("y"), 1, 1)

    @property
    def tiles_of_a_line(self) -> int:
        return -(-self.cluster.axes[-1] // self.tiles["XBLOCK"])

    def begins(self) -> dict[str, str]:
        """Return where a tile begins along each index variable, as the template's row says."""
        words = {
            "wide": ".to(tl.int64)" if self.wide else "",
            "across": f"(({self.extent('x')} + XBLOCK - 1) // XBLOCK)",
        }
        row = TEMPLATE.get(self.tiles.template)
        return {variable: begin.format(**words) for variable, begin in row.begins.items()} if row else {}

    @property
    def backwards(self) -> str:
        """Where a tile begins in a loop that takes a row from its end on, "" in all others."""
        last = (product(self.cluster.reduce) - 1) // self.tiles["RBLOCK"] * self.tiles["RBLOCK"]
        return f"{last} - start" if any(isinstance(n, Scan) and n.reverse for n in self.cluster.order) else ""

    # -- index variables
    def coordinates(self, variable: str, begin: str = "start") -> list[str]:
        """Return the statements that split an index variable into its axes, and its mask; a loop's tile begins at
        `begin`, "" is 0.
        """
        axes = self.groups[variable]
        if variable == "r" and self.uneven:
            return self.digits(axes) + self.numbers(begin)
        lines: list[str] = self.shifted(variable)
        inner: AnySize = 1
        for place in reversed(range(len(axes))):
            n = self.cluster.axes[axes[place]]
            if len(axes) > 1:
                text = f"{variable} // {inner}" if inner != 1 else variable
                lines.append(f"{variable}{place} = {text} % {n}" if place else f"{variable}{place} = {text}")
            inner *= n
        if self.peel and variable != "x":
            return lines
        if self.masked(variable):
            lines.append(f"{variable}mask = {variable} < {inner}")
        if variable == "r" and self.segments:
            return lines + self.numbers(begin)
        if self.peel:
            rows, group = self.offset(self.peel.rows, self.groups["x"]), self.peel.group
            assert self.ends is not None
            lines += [f"head = ({group} - ({rows}) % {group}) % {group}", *self.ends.coordinates("e")]
        return lines

    @property
    def uneven(self) -> bool:
        """Whether segments are padded: places of the tile are no places of the row then."""
        return self.segments is not None and self.padded != self.cluster.segment[1]

    def digits(self, axes: list[int]) -> list[str]:
        """Return the statements that split `r` into segments, each padded to a power of two, and what is in them."""
        cut, (many, each) = self.cluster.segments, self.cluster.segment
        lines = [f"rs = r // {self.padded}", f"ri = r % {self.padded}"]
        for word, places in (("rs", range(cut)), ("ri", range(cut, len(axes)))):
            inner = 1
            for place in reversed(places):
                text = f"{word} // {inner}" if inner > 1 else word
                n = self.cluster.axes[axes[place]]
                lines.append(f"r{place} = {text} % {n}" if place != places[0] else f"r{place} = {text}")
                inner *= n
        return lines + ([f"rmask = (rs < {many}) & (ri < {each})"] if self.masked("r") else [])

    def numbers(self, begin: str) -> list[str]:
        """Return the statements that number the segments of a tile."""
        assert self.segments is not None
        first = f"{begin} // {self.padded} + " if begin and self.tiles.template == "reduction_looped" else ""
        return [f"s = ({first}tl.arange(0, {self.segments.width}))[None, :]", *self.segments.coordinates("s")]

    def shifted(self, variable: str) -> list[str]:
        """Return the statements that place the columns of a peeled row, with their masks: whole groups, or the two
        ends.
        """
        if not self.peel or variable == "x":
            return []
        group, columns = self.peel.group, product(self.cluster.reduce)
        if variable == "r":
            return ["k = r", "r = head + k", f"rmask = k // {group} < ({columns} - head) // {group}"]
        return [
            f"e = tl.arange(0, {2 * group})[None, :]" + (".to(tl.int64)" if self.wide else ""),
            f"e = tl.where(e < {group}, e, e + {columns - 2 * group})",
            f"emask = (e < head) | (e >= {columns} - ({columns} - head) % {group})",
        ]

    def masked(self, variable: str) -> bool:
        if variable in ("r", "s") and self.cluster.segments:
            many, each = self.cluster.segment
            return self.uneven or many * each % self.tiles["RBLOCK"] != 0
        if self.peel and variable != "x":
            return True
        if variable == "y" and self.tiles.template == "pointwise_row":
            return False
        return bool(self.tiles.buckets) or divide(self.extent(variable), self.tiles[f"{variable.upper()}BLOCK"]) is None

    def extent(self, variable: str) -> AnySize:
        """How many values an index variable has."""
        return product(self.cluster.axes[a] for a in self.groups[variable])

    def extents(self) -> tuple[AnySize, ...]:
        """Return how many values x, y and r have; x has a tile for each of the programs that share the rows."""
        found = tuple(self.extent(v) if v in self.groups else 1 for v in "xyr")
        return (self.cluster.programs * self.tiles["XBLOCK"], *found[1:]) if self.cluster.programs else found

    def axis(self, number: int) -> str:
        for variable, axes in self.groups.items():
            if number in axes:
                return variable if len(axes) == 1 else f"{variable}{axes.index(number)}"
        raise KeyError(number)

    def some_axis(self, layouts: Iterable[Layout]) -> str:
        """Return an index variable, of those that are a tile, along which one of the layouts runs; "" if none does."""
        scalar = self.groups["y"] if self.tiles.template == "pointwise_row" else ()
        runs = (a for lay in layouts for a, stride in enumerate(lay.strides or ()) if stride != 0 and a not in scalar)
        return next((self.axis(a) for a in runs), "")

    def offset(self, layout: Layout, among: list[int] | None = None) -> str:
        """Return an offset as text, or the part of it along some axes (and its constant)."""
        strides, axes = layout.strides or (), self.cluster.axes
        terms = []
        for variable, group in self.groups.items():
            own = [strides[a] for a in group] if strides and (among is None or group == among) else []
            padded = variable == "r" and self.uneven  # its digits are no digits of the row
            if not padded and len(own) > 1 and own[-1] and is_flat(own, [axes[a] for a in group]):
                names = [(variable, own[-1])]  # one run of memory: neighbours stay neighbours in the text
            else:
                names = [(self.axis(a), stride) for a, stride in zip(group, own, strict=False)]
            terms += [name if stride == 1 else f"{stride} * {name}" for name, stride in names if stride != 0]
        if layout.offset != 0:
            terms.append(str(layout.offset))
        return " + ".join(terms) or "0"

    def address(self, layout: Layout) -> str:
        """Return the offset of an access, of a peeled row as whole groups."""
        if self.column != "r" or not self.peel or not self.peel.follows(layout, self.split):
            return self.offset(layout)
        group = self.peel.group
        return f"({self.offset(layout, self.groups['x'])} + {group - 1}) // {group} * {group} + k"

    def mask(self, layouts: list[Layout], extra: str = "", columns: bool | None = None) -> str:
        """Return the mask of an access: the tile's borders along the variables that it uses, and its own."""
        used = {v for v, axes in self.groups.items() if any((lay.strides or ())[a] for lay in layouts for a in axes)}
        if columns is not None:
            along = {self.column} & self.groups.keys()
            used = (used | {"x"} | ({"y"} if "y" in self.groups else set())) - along | (along if columns else set())
        parts = [f"{v}mask" for v in self.groups if v in used and self.masked(v)] + ([extra] if extra else [])
        return " & ".join(parts)

    # -- statements
    def note(self, lines: tuple[str, ...]) -> str:
        """Return the ATen ops of a kernel, for its first line."""
        return ("; ".join(dict.fromkeys(line.split("  ")[0] for line in lines)) or "copy")[:160]

    def write(self) -> dict[str, Any]:
        wide = ".to(tl.int64)" if self.wide else ""
        fields: dict[str, Any] = {
            "note": self.note(self.cluster.lines),
            "params": ", ".join(self.pointers.values()),
            "wide": wide,
            "axes": [],
            "columns": [],
            "begin": self.begins(),
        }
        for variable in self.groups:
            fields["columns" if variable == "r" else "axes"] += self.coordinates(variable)
        if self.tiles.template == "reduction_looped":
            many, each = self.cluster.segment
            steps = f"0, {many * power_of_two(each) if self.cluster.segments else many * each}, RBLOCK"
            if self.backwards:
                fields["columns"].insert(0, f"r = ({self.backwards} + tl.arange(0, RBLOCK))[None, :]{wide}")
            return fields | {"passes": self.passes(), "span": self.loop(steps), "rows": []}
        if self.tiles.template == "reduction_mixed":
            return fields | self.walk()
        if self.tiles.template == "pointwise_row":
            fields["tiles"] = self.tiles_of_a_line
        if self.tiles.keep:
            return fields | {"rows": [self.kept_row()]}
        tape = self.tape()
        lines = [line for node in self.cluster.order for line in tape.statement(node)]
        lines += [line for store in self.cluster.stores for line in tape.store(store)]
        return fields | {"rows": [lines]}

    def kept_row(self, sums: dict[str, str] | None = None) -> list[str]:
        """Return the statements of a row that is loaded once, and then gone over as often as there are reductions one
        above the other.
        """
        lines = [line for n, name in self.kept.items() for line in Tape(self).keep(n, name)]
        return [
            *lines,
            *(
                line
                for level in self.passes(sums)
                for part in ("rows", "start", "body", "finish")
                for line in level[part]
            ),
        ]

    def tape(self) -> Tape | PeeledTape:
        return PeeledTape(self) if self.peel else Tape(self)

    def walk(self) -> dict[str, Any]:
        """Return the statements of a walk over rows: before the loop, inside, and after it, where the column results
        are written.
        """
        sums = [s for s in self.cluster.stores if s.mode in OPS]
        names = {s.buffer: f"sum{i}" for i, s in enumerate(sums)}
        tiles = range(self.tiles_a_row)
        start, body, finish = [], [], []
        if self.tiles.keep:
            body = [line.replace("@", "0") for line in self.kept_row(names)]
        elif len(tiles) == 1:
            tape = self.tape()
            if isinstance(tape, Tape):
                tape.begins["r"] = "0"
            body = self.tile(0) if self.peel else []
            body += [line for node in self.cluster.order for line in tape.statement(node)]
            body += [line for s in self.cluster.stores if s not in sums for line in tape.store(s)]
            body += [line.replace("@", "0") for s in sums for line in tape.column(s, names[s.buffer])]
        else:  # the row is read again, out of L1 or L2, rather than kept: only its column sums stay in registers
            for number, level in enumerate(self.passes(names)):
                body += level["rows"] + level["start"]
                body += ["tl.debug_barrier()"] if not number else []  # loads of the next row, begun early, would spill
                for t in tiles if level["body"] else ():
                    body += [line.replace("@", str(t)) for line in (*self.tile(t), *level["body"])]
                body += level["finish"]
        for t in tiles:
            again = self.tile(t) if len(tiles) > 1 else []
            for s in (s for s in sums if not t or self.runs(s)):
                first, last = self.tape().partial(s, names[s.buffer])
                start += [line.replace("@", str(t)) for line in first]
                finish += [line.replace("@", str(t)) for line in (*again, *last)]
        if self.peel:  # every row of a program begins where its first one does
            finish = ["x = (program + tl.arange(0, 1))[:, None]", *self.coordinates("x"), *self.tile(0), *finish]
        programs = self.cluster.programs if isinstance(self.cluster.programs, int) else "tl.num_programs(0)"
        steps = f"program * XBLOCK, {product(self.cluster.parallel)}, {programs} * XBLOCK"
        columns = [] if len(tiles) > 1 or self.peel else self.tile(0)
        return {"start": columns + start, "rows": [body], "finish": finish, "span": self.loop(steps)}

    def loop(self, steps: str) -> str:
        """Return what a loop runs over; with stages, loads of later iterations are under way while one is computed."""
        return (
            f"tl.range({steps}, num_stages={self.tiles.num_stages})" if self.tiles.num_stages > 1 else f"range({steps})"
        )

    def tile(self, number: int) -> list[str]:
        """Return the statements that set the column index to one tile of the row."""
        first = f"{number} * RBLOCK + " if number else ""
        wide = ".to(tl.int64)" if self.wide else ""
        begin = f"{number} * RBLOCK" if number else ""
        return [f"r = ({first}tl.arange(0, RBLOCK))[None, :]{wide}", *self.coordinates("r", begin)]

    def passes(self, sums: dict[str, str] | None = None) -> list[dict[str, list[str]]]:
        """Return one pass over the row per level: what it accumulates and stores needs only reductions of the passes
        before.

        Stores whose buffer is in `sums` are added to the column sum of that name instead.
        """
        top = max(self.levels.values(), default=0)
        tape = Tape(self)
        result: list[dict[str, list[str]]] = []
        rows = [n for n in self.cluster.order if not self.full[n] and not isinstance(n, Reduce)]
        written = lambda tape, s: tape.column(s, sums[s.buffer]) if sums and s.buffer in sums else tape.store(s)  # noqa: E731
        kinds = policies(self, top)
        for level in range(top + 1):
            made = [n for n in self.cluster.order if isinstance(n, Reduce) and self.levels[n] == level + 1]
            stores = [s for s in self.cluster.stores if self.stored_at(s, top) == level]
            head = [line for n in rows if self.levels[n] == level for line in tape.statement(n)]
            wide = [s for s in stores if self.runs(s) or self.full.get(s.value, False)]
            narrow = [line for s in stores if s not in wide for line in written(tape, s)]
            inner = Tape(self, tape)
            inner.begins["r"] = self.backwards
            inner.policies = {} if sums or self.kept else kinds[level]  # a walk reads its one row again out of L1
            inner.again = level > 0
            roots = [a for n in made for a in self.inputs(n)] + [
                r for s in wide for r in (s.value, *(e for e, _ in s.index))
            ]
            early, rest = ahead(inner, self.inside(roots), roots)
            body = [line for n in rest for line in inner.statement(n)]
            start: list[str] = list(inner.carries)
            finish: list[str] = []
            steps: list[str] = []
            ends = Tape(self.ends, tape) if self.ends else None
            for node in made:
                begin, step, end = inner.accumulate(node, tape, ends)
                start += begin
                steps = [*step, *steps]  # a shifted sum needs its maximum as it was before
                finish += end
            body += steps
            body += [line for s in wide for line in written(inner, s)]
            body = [*early, *again(self), *body] if early else body
            if ends and wide:
                ends.names.update((n, name) for n, name in tape.names.items() if not self.full[n])
                outer = self.inside([r for s in wide for r in (s.value, *(e for e, _ in s.index))])
                finish += [line for n in outer for line in ends.statement(n)] + [
                    line for s in wide for line in ends.store(s)
                ]
            result.append(
                {"rows": head + narrow, "start": start, "body": body if made or wide else [], "finish": finish}
            )
        return result

    def runs(self, store: Store) -> bool:
        """Whether a store is made for each element of the row: places differ, or all of them are added to one."""
        places = any((store.layout.strides or ())[self.split :]) or any(self.full[e] for e, _ in store.index)
        return places or bool(store.mode) and self.full[store.value]

    def inputs(self, node: Reduce) -> tuple[Expr, ...]:
        """Return what a loop reads to reduce: a shifted sum needs the values that are shifted, not the shift."""
        return self.online[node].reads if node in self.online else node.args

    def stored_at(self, store: Store, top: int) -> int:
        # what is overwritten in place must have been read by every pass before
        return top if self.buffers[store.buffer].written_to else self.levels[store.value]

    def inside(self, roots: list[Expr]) -> list[Expr]:
        """Return the nodes that vary along the row, down to what was computed outside the loop."""
        return along_row(roots, self.cluster)
