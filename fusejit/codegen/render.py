"""Render: a scheduled cluster becomes the text of one Triton kernel.

In: a cluster and a schedule. Out: `Kernel`, whose source is a pure function of the two.

    tmp0 = tl.load(in0 + (x), x < 1000)
    tmp1 = fj.maximum(tmp0, 0)
    tl.store(out0 + (x), tmp1, x < 1000)
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch

from ..errors import Unsupported
from .cluster import Cluster, Compute, Const, Expr, Iota, Load, Random, Reduce, Store, children, postorder
from .kernel import Kernel, bytes_written, reads_of
from .layout import Layout, permute
from .lower import Buffer
from .online import Shifted, in_one_pass
from .ops import INDEX_IDENTITY, OPS, STORAGE, cast_spelling
from .schedule import Schedule, second_axis
from .size import product

INDEX_OPS = {"index_div", "index_mod"}
COMPARISONS = {"lt", "le", "gt", "ge", "eq", "ne"}


def render(cluster: Cluster, tiles: Schedule, buffers: dict[str, Buffer], numerics: str = "fast") -> Kernel:
    """Return the kernel of a cluster that `schedule` made ready."""
    if tiles.template == "pointwise_2d":
        cluster = _second_axis_last_but_one(cluster)
    reads = tuple(cluster.reads)
    # an input that is overwritten in place is one pointer, read and written
    writes = tuple(dict.fromkeys(buffers[s.buffer].written_to or s.buffer for s in cluster.stores))
    names = {b: f"in{i}" for i, b in enumerate(reads)} | {b: f"out{i}" for i, b in enumerate(w for w in writes)}
    arguments = tuple(dict.fromkeys((*reads, *writes)))
    writer = _Writer(cluster, tiles, buffers, names, numerics)
    fields = writer.write()
    body = _template(tiles.template).render(name="NAME", params=", ".join(names[a] for a in arguments), **fields)
    pointers = tuple(STORAGE[buffers[a].dtype].pointer for a in arguments)
    # the text alone does not tell float32 from float64, nor one tile size from another
    name = f"{_kernel_name(cluster, tiles)}_{hashlib.sha256(repr((body, tiles, pointers)).encode()).hexdigest()[:8]}"
    return Kernel(
        name=name, template=tiles.template, source=body.replace("NAME", name, 1), params=pointers,
        constants=tiles.blocks, grid=writer.grid(), num_warps=tiles.num_warps, num_stages=tiles.num_stages, debug=writer.asserts,
        fp_fusion=numerics == "fast", arguments=arguments, ops=cluster.lines, bytes_read=sum(reads_of(cluster, buffers).values()),
        bytes_written=bytes_written(cluster, buffers), cluster=cluster, schedule=tiles,
    )  # fmt: skip


@cache
def _template(name: str) -> Any:
    import jinja2  # only when something is compiled

    loader = jinja2.PackageLoader("fusejit", "templates")
    environment = jinja2.Environment(loader=loader, keep_trailing_newline=True, undefined=jinja2.StrictUndefined, autoescape=False)
    return environment.get_template(f"{name}.py.jinja")


def _kernel_name(cluster: Cluster, tiles: Schedule) -> str:
    words = [n.op for n in cluster.order if isinstance(n, (Compute, Reduce)) and n.op not in ("cast", *INDEX_OPS, "checked_index")]
    short = {
        "reduction_persistent": "row",
        "reduction_mixed": "both",
        "reduction_looped": "loop",
        "pointwise_2d": "tile",
        "pointwise": "flat",
    }[tiles.template]
    return "_".join([short, *list(dict.fromkeys(words))[:6]]) if words else f"{short}_copy"


def _second_axis_last_but_one(cluster: Cluster) -> Cluster:
    axis = second_axis(cluster)
    assert axis is not None
    rank = len(cluster.axes)
    new = [*(a for a in range(rank) if a not in (axis, rank - 1)), axis, rank - 1]
    return cluster.map(permute(cluster.axes, new), [cluster.axes[a] for a in new], [])


# -- the text --------------------------------------------------------------------------------------------------------------------------
class _Writer:
    """Writes the statements of one kernel. `level` of a node: how many reductions lie below it, one above the other."""

    def __init__(self, cluster: Cluster, tiles: Schedule, buffers: dict[str, Buffer], names: dict[str, str], numerics: str) -> None:
        self.cluster, self.tiles, self.buffers, self.pointers = cluster, tiles, buffers, names
        self.exact = numerics == "eager"
        self.split = len(cluster.parallel)
        self.asserts = False
        self.levels, self.full = cluster.levels, cluster.full
        self.online: dict[Expr, Shifted] = {}
        if tiles.template == "reduction_looped" or (cluster.programs and product(cluster.reduce) > tiles["RBLOCK"]):
            self.levels, self.online = in_one_pass(cluster)
        self.rows: dict[Expr, bool] = {}  # whether a value has a row for each row of the tile
        for node in cluster.order:
            runs = isinstance(node, (Load, Iota)) and any((node.layout.strides or ())[: self.split])
            self.rows[node] = isinstance(node, Reduce) or runs or any(self.rows[c] for c in children(node))
        self.groups = self._groups()
        self.wide = max([product(cluster.axes), *(buffers[n].bytes for n in names)]) >= 2**31  # bytes bound offsets, negative ones too

    def _groups(self) -> dict[str, list[int]]:
        """Return the axes behind each index variable."""
        rank = len(self.cluster.axes)
        if self.tiles.template == "pointwise_2d":
            return {"y": list(range(rank - 1)), "x": [rank - 1]}
        return {"x": list(range(self.split)), "r": list(range(self.split, rank))} if self.cluster.reduce else {"x": list(range(rank))}

    def grid(self) -> tuple[int, int, int]:
        if self.cluster.programs:
            return (self.cluster.programs, 1, 1)
        sizes = {v: product(self.cluster.axes[a] for a in axes) for v, axes in self.groups.items()}
        count = lambda v: -(-sizes[v] // self.tiles[f"{v.upper()}BLOCK"]) if v in sizes else 1  # noqa: E731
        y = count("y") if "y" in sizes else 1
        if y > 65535:
            raise Unsupported("a 2-D tile", f"{y} tiles along the second grid axis, 65535 at most")
        return (count("x"), y, 1)

    # -- index variables
    def coordinates(self, variable: str) -> list[str]:
        """Return the statements that split an index variable into its axes, and its mask."""
        axes = self.groups[variable]
        lines, inner = [], 1
        for place in reversed(range(len(axes))):
            n = self.cluster.axes[axes[place]]
            if len(axes) > 1:
                text = f"{variable} // {inner}" if inner > 1 else variable
                lines.append(f"{variable}{place} = {text} % {n}" if place else f"{variable}{place} = {text}")
            inner *= n
        if self.masked(variable):
            lines.append(f"{variable}mask = {variable} < {inner}")
        return lines

    def masked(self, variable: str) -> bool:
        return product(self.cluster.axes[a] for a in self.groups[variable]) % self.tiles[f"{variable.upper()}BLOCK"] != 0

    def axis(self, number: int) -> str:
        for variable, axes in self.groups.items():
            if number in axes:
                return variable if len(axes) == 1 else f"{variable}{axes.index(number)}"
        raise KeyError(number)

    def some_axis(self, layouts: Iterable[Layout]) -> str:
        """Return an index variable along which one of the layouts runs; "0" if none does."""
        runs = (a for lay in layouts for a, stride in enumerate(lay.strides or ()) if stride != 0)
        return next((self.axis(a) for a in runs), "0")

    def offset(self, layout: Layout) -> str:
        terms = []
        for number, stride in enumerate(layout.strides or ()):
            if stride != 0:
                name = self.axis(number)
                terms.append(name if stride == 1 else f"{stride} * {name}")
        if layout.offset != 0:
            terms.append(str(layout.offset))
        return " + ".join(terms) or "0"

    def mask(self, layouts: list[Layout], extra: str = "", columns: bool | None = None) -> str:
        """Return the mask of an access: the tile's borders along the variables that it uses, and its own."""
        used = {v for v, axes in self.groups.items() if any((lay.strides or ())[a] for lay in layouts for a in axes)}
        if columns is not None:
            used = (used | {"x"} | ({"y"} if "y" in self.groups else set())) - {"r"} | ({"r"} if columns and "r" in self.groups else set())
        parts = [f"{v}mask" for v in self.groups if v in used and self.masked(v)] + ([extra] if extra else [])
        return " & ".join(parts)

    # -- statements
    def write(self) -> dict[str, Any]:
        note = "; ".join(dict.fromkeys(line.split("  ")[0] for line in self.cluster.lines)) or "copy"
        wide = ".to(tl.int64)" if self.wide else ""
        fields: dict[str, Any] = {"note": note[:160], "wide": wide, "axes": [], "columns": []}
        for variable in self.groups:
            fields["columns" if variable == "r" else "axes"] += self.coordinates(variable)
        if self.tiles.template == "reduction_looped":
            steps = f"0, {product(self.cluster.reduce)}, RBLOCK"
            return fields | {"passes": self.passes(), "span": self.loop(steps), "rows": []}
        if self.tiles.template == "reduction_mixed":
            return fields | self.walk()
        tape = _Tape(self)
        lines = [line for node in self.cluster.order for line in tape.statement(node)]
        lines += [line for store in self.cluster.stores for line in tape.store(store)]
        return fields | {"rows": [lines]}

    def walk(self) -> dict[str, Any]:
        """Return the statements of a walk over rows: before the loop, inside, and after it, where the column results are written."""
        sums = [s for s in self.cluster.stores if s.mode in OPS]
        names = {s.buffer: f"sum{i}" for i, s in enumerate(sums)}
        tiles = range(-(-product(self.cluster.reduce) // self.tiles["RBLOCK"]))
        start, body, finish = [], [], []
        if len(tiles) == 1:
            tape = _Tape(self)
            body = [line for node in self.cluster.order for line in tape.statement(node)]
            body += [line for s in self.cluster.stores if s not in sums for line in tape.store(s)]
            body += [line.replace("@", "0") for s in sums for line in tape.column(s, names[s.buffer])]
        else:  # the row is read again, out of L1 or L2, rather than kept: only its column sums stay in registers
            for level in self.passes(names):
                body += level["rows"] + level["start"]
                for t in tiles if level["body"] else ():
                    body += [line.replace("@", str(t)) for line in (*self.tile(t), *level["body"])]
                body += level["finish"]
        for t in tiles:
            again = self.tile(t) if len(tiles) > 1 else []
            for s in sums:
                first, last = _Tape(self).partial(s, names[s.buffer])
                start.append(first.replace("@", str(t)))
                finish += [line.replace("@", str(t)) for line in (*again, last)]
        steps = f"program * XBLOCK, {product(self.cluster.parallel)}, {self.grid()[0]} * XBLOCK"
        columns = [] if len(tiles) > 1 else self.tile(0)
        return {"start": columns + start, "rows": [body], "finish": finish, "span": self.loop(steps)}

    def loop(self, steps: str) -> str:
        """Return what a loop runs over; with stages, loads of later iterations are under way while one is computed."""
        return f"tl.range({steps}, num_stages={self.tiles.num_stages})" if self.tiles.num_stages > 1 else f"range({steps})"

    def tile(self, number: int) -> list[str]:
        """Return the statements that set the column index to one tile of the row."""
        first = f"{number} * RBLOCK + " if number else ""
        wide = ".to(tl.int64)" if self.wide else ""
        return [f"r = ({first}tl.arange(0, RBLOCK))[None, :]{wide}", *self.coordinates("r")]

    def passes(self, sums: dict[str, str] | None = None) -> list[dict[str, list[str]]]:
        """Return one pass over the row per level: what it accumulates and stores needs only reductions of the passes before.

        Stores whose buffer is in `sums` are added to the column sum of that name instead.
        """
        top = max(self.levels.values(), default=0)
        tape = _Tape(self)
        result: list[dict[str, list[str]]] = []
        rows = [n for n in self.cluster.order if not self.full[n] and not isinstance(n, Reduce)]
        policies = self.policies(top)
        for level in range(top + 1):
            made = [n for n in self.cluster.order if isinstance(n, Reduce) and self.levels[n] == level + 1]
            stores = [s for s in self.cluster.stores if self._stored_at(s, top) == level]
            head = [line for n in rows if self.levels[n] == level for line in tape.statement(n)]
            wide = [s for s in stores if any((s.layout.strides or ())[self.split :]) or self.full.get(s.value, False)]
            narrow = [line for s in stores if s not in wide for line in tape.store(s)]
            inner = _Tape(self, tape)
            inner.policies = {} if sums else policies[level]  # a walk reads its one row again out of L1
            roots = [a for n in made for a in self.inputs(n)] + [r for s in wide for r in (s.value, *(e for e, _ in s.index))]
            body = [line for n in self.inside(roots) for line in inner.statement(n)]
            start: list[str] = []
            finish: list[str] = []
            steps: list[str] = []
            for node in made:
                begin, step, end = inner.accumulate(node, tape)
                start += begin
                steps = [*step, *steps]  # a shifted sum needs its maximum as it was before
                finish += end
            body += steps
            body += [line for s in wide for line in (inner.column(s, sums[s.buffer]) if sums and s.buffer in sums else inner.store(s))]
            result.append({"rows": head + narrow, "start": start, "body": body if made or wide else [], "finish": finish})
        return result

    def inputs(self, node: Reduce) -> tuple[Expr, ...]:
        """Return what a loop reads to reduce: a shifted sum needs the values that are shifted, not the shift."""
        return (self.online[node].value,) if node in self.online else node.args

    def policies(self, top: int) -> list[dict[Expr, str]]:
        """Return, for each pass, how L2 should treat what it loads: kept for the next pass, or let go of after the last one."""
        used: list[set[Load]] = []
        for level in range(top + 1):
            made = [a for n in self.cluster.order if isinstance(n, Reduce) and self.levels[n] == level + 1 for a in self.inputs(n)]
            stored = [s.value for s in self.cluster.stores if self._stored_at(s, top) == level]
            used.append({n for n in self.inside([*made, *stored]) if isinstance(n, Load) and not n.index})
        result: list[dict[Expr, str]] = []
        for level, loads in enumerate(used):
            later = set().union(*used[level + 1 :])
            before = set().union(*used[:level])
            shared = {n for n in loads if self.cluster.parallel and not any((n.layout.strides or ())[: self.split])}
            result.append({n: "evict_last" if n in later | shared else "evict_first" for n in loads & (later | shared | before)})
        return result

    def _stored_at(self, store: Store, top: int) -> int:
        # what is overwritten in place must have been read by every pass before
        return top if self.buffers[store.buffer].written_to else self.levels[store.value]

    def inside(self, roots: list[Expr]) -> list[Expr]:
        """Return the nodes that vary along the row, down to what was computed outside the loop."""
        return [n for n in postorder(roots, lambda n: () if isinstance(n, Reduce) else children(n)) if self.full[n]]


class _Tape:
    """Names of the values computed so far; a tape inside a loop sees the names outside it."""

    def __init__(self, writer: _Writer, outside: _Tape | None = None) -> None:
        self.writer = writer
        self.names: dict[Expr, str] = dict(outside.names) if outside else {}
        self.counter: list[int] = outside.counter if outside else [0]
        self.narrow: set[Expr] = set(outside.narrow) if outside else set()
        self.policies: dict[Expr, str] = {}
        self.slots: dict[Expr, str] = {}  # the accumulator of a reduction, while its loop runs

    def fresh(self) -> str:
        self.counter[0] += 1
        return f"tmp{self.counter[0] - 1}"

    def text(self, node: Expr, literal: bool = False, index: bool = False) -> str:
        if isinstance(node, Const):
            return _literal(node) if literal or index else f"tl.full((), {_literal(node)}, {STORAGE[node.dtype].compute})"
        name = self.names[node]
        return f"{name}.to(tl.int64)" if node in self.narrow and not index and node.dtype is torch.int64 else name

    def statement(self, node: Expr) -> list[str]:
        """Return the statements that compute a node, and give it a name."""
        if isinstance(node, Const) or node in self.names:
            return []
        if isinstance(node, Iota):
            return self._iota(node)
        lines: list[str] = []
        match node:
            case Load():
                value = self._load(node)
            case Compute():
                value = self._compute(node)
            case Reduce():
                value = self._reduce(node)
            case Random():
                value = f"fj.{node.kind}({self.text(node.seed)}, {self.text(node.offset)})"
            case _:
                raise TypeError(node)
        name = self.names[node] = self.fresh()
        lines.append(f"{name} = {value}")
        if isinstance(node, Compute) and node.op == "checked_index":
            self.writer.asserts = True
            mask = self.writer.mask([], columns=self.writer.full[node]) or "None"
            lines.append(f"fj.check_index({name}, {self.text(node.args[1])}, {mask})")
            if not self.writer.wide:  # in bounds, so 32 bits hold it: half the registers of a long row of indices
                lines.append(f"{name} = {name}.to(tl.int32)")
                self.narrow.add(node)
        return lines

    def _iota(self, node: Iota) -> list[str]:
        offset = self.writer.offset(node.layout)
        name = self.names[node] = self.fresh()
        if not any(node.layout.strides or ()):
            return [f"{name} = tl.full((), {offset}, {STORAGE[node.dtype].compute})"]
        self.narrow.add(node)
        return [f"{name} = {offset}"]

    def _load(self, node: Load) -> str:
        offset = self._place(node.layout, node.index)
        extra = self.text(node.mask) if node.mask is not None else ""
        along, tested = _layouts(e for e, _ in node.index), _layouts([node.mask] if node.mask is not None else [])
        mask = self.writer.mask([node.layout, *along, *tested], extra)
        if tested and not any(any(lay.strides or ()) for lay in (node.layout, *along)):
            offset += f" + 0 * {self.writer.some_axis(tested)}"  # one element, masked by a tile: Triton wants a tile of pointers
        more = (f", {mask}" if mask else "") + (f", other={node.fill}" if node.mask is not None else "")
        more += f', eviction_policy="{self.policies[node]}"' if node in self.policies else ""
        value = f"tl.load({self.writer.pointers[node.buffer]} + ({offset}){more})"
        value = STORAGE[node.dtype].load.format(value)
        return f"({value} != 0)" if node.dtype is torch.bool else value

    def _place(self, layout: Layout, index: tuple[tuple[Expr, int], ...]) -> str:
        offset = self.writer.offset(layout)
        terms = [f"{stride} * {self.text(e, index=True)}" if stride != 1 else self.text(e, index=True) for e, stride in index]
        return " + ".join([offset, *terms])

    def _compute(self, node: Compute) -> str:
        if node.op == "cast":
            return cast_spelling(node.args[0].dtype, node.dtype, implicit=not self.writer.exact).format(self.text(node.args[0]))
        row = OPS[node.op]
        small = node.op in INDEX_OPS | COMPARISONS and all(self._is_index(a) for a in node.args)
        if small:
            if node.op in INDEX_OPS:
                self.narrow.add(node)
            return row.text(*(self.text(a, literal=True, index=True) for a in node.args))
        plain = row.literals and not all(isinstance(a, Const) for a in node.args)
        text = row.text(*(self.text(a, literal=plain and a.dtype is not torch.float64) for a in node.args), exact=self.writer.exact)
        rounds = STORAGE[node.dtype].round if self.writer.exact and node.dtype in STORAGE else ""
        return rounds.format(text) if rounds else text

    def _is_index(self, node: Expr) -> bool:
        return node in self.narrow or (isinstance(node, Const) and node.dtype is torch.int64 and abs(node.value) < 2**31)

    # -- reductions
    def _reduce(self, node: Reduce) -> str:
        """Reduce a whole row that is in registers."""
        masked = self.writer.masked("r")
        args = [self._tile(a) for a in node.args]
        if masked:
            args = [f"tl.where(rmask, {a}, {i})" for a, i in zip(args, _identities(node), strict=True)]
        return self._finish(node, args)

    def _finish(self, node: Reduce, args: list[str]) -> str:
        value = f"fj.{node.op}({', '.join(args)}, 1)[:, None]"
        return f"{value}.to(tl.int64)" if len(args) == 2 else value

    def _tile(self, node: Expr) -> str:
        """Return a value as a whole tile, even if it is the same for all columns."""
        if self.writer.full[node] and (self.writer.rows[node] or self.writer.tiles["XBLOCK"] == 1):
            return self.text(node)
        return f"tl.broadcast_to({self.text(node)}, [XBLOCK, RBLOCK])"

    def accumulate(self, node: Reduce, outside: _Tape) -> tuple[list[str], list[str], list[str]]:
        """Return the statements before, inside and after the loop that reduces a row."""
        if node in self.writer.online:
            return self.accumulate_shifted(self.writer.online[node], outside)
        names = [self.fresh() for _ in node.args]
        types = [STORAGE[a.dtype].compute for a in node.args]
        start = [f"{n} = tl.full([XBLOCK, RBLOCK], {i}, {t})" for n, i, t in zip(names, _identities(node), types, strict=True)]
        values = [self._tile(a) for a in node.args]
        together = f"fj.{node.op}_combine({', '.join((*names, *values))})"
        if not self.writer.masked("r"):
            body = [f"{', '.join(names)} = {together}"]
        else:
            new = [f"new{n}" for n in names]
            body = [f"{', '.join(new)} = {together}", *(f"{n} = tl.where(rmask, {m}, {n})" for n, m in zip(names, new, strict=True))]
        name = outside.names[node] = self.names[node] = self.fresh()
        self.slots[node] = names[0]
        return start, body, [f"{name} = {self._finish(node, names)}"]

    def accumulate_shifted(self, found: Shifted, outside: _Tape) -> tuple[list[str], list[str], list[str]]:
        """As `accumulate`, for a sum whose shift is not known yet: each place of the tile keeps its own and is corrected at the end."""
        value, masked = self._tile(found.value), self.writer.masked("r")
        names = [self.fresh() for _ in range(1 if found.kind == "exp" else 2)]
        start = [f"{n} = tl.full([XBLOCK, RBLOCK], 0.0, tl.float32)" for n in names]
        if found.kind == "exp":
            maxima = self.slots[found.bases[0]]
            news = [f"fj.online_exp({maxima}, {names[0]}, {value})"]
            end = "fj.sum(fj.online_exp_sum({0}, {1}, {2}), 1)[:, None]"
        else:
            near, lines = self.mean_of_first_tile(found, outside)
            start += lines
            news = [f"{names[0]} + ({value} - {near})", f"{names[1]} + ({value} - {near}) * ({value} - {near})"]
            count = product(self.writer.cluster.reduce)
            end = f"fj.shifted_squares(fj.sum({{0}}, 1)[:, None], fj.sum({{1}}, 1)[:, None], {float(count)})"
        guard = "{0} = tl.where(rmask, {1}, {0})" if masked else "{0} = {1}"
        body = [guard.format(name, new) for name, new in zip(names, news, strict=True)]
        shift = postorder([found.shift], lambda n: () if isinstance(n, Reduce) else children(n))
        finish = [line for n in shift for line in outside.statement(n)]
        result = outside.names[found.node] = self.names[found.node] = self.fresh()
        kept = [maxima, *names] if found.kind == "exp" else names
        return start, body, [*finish, f"{result} = {end.format(*kept, outside.text(found.shift))}"]

    def mean_of_first_tile(self, found: Shifted, outside: _Tape) -> tuple[str, list[str]]:
        """Return the name of a number near the row's mean, and its statements: squares about it lose nothing to cancellation."""
        ahead, name = _Tape(self.writer, outside), self.fresh()
        lines = [line for n in self.writer.inside([found.value]) for line in ahead.statement(n)]
        value = ahead._tile(found.value)
        value = f"tl.where(rmask, {value}, 0.0)" if self.writer.masked("r") else value
        count = min(product(self.writer.cluster.reduce), self.writer.tiles["RBLOCK"])
        return name, [*self.writer.tile(0), *lines, f"{name} = fj.sum({value}, 1)[:, None] / {float(count)}"]

    def column(self, store: Store, name: str) -> list[str]:
        """Return the statements that add a row to a column sum; "@" stands for the number of the tile."""
        value = self._tile(store.value)
        together = f"fj.{store.mode}_combine({name}_@, {value})"
        if not self.writer.masked("x"):
            return [f"{name}_@ = {together}"]
        return [f"new{name} = {together}", f"{name}_@ = tl.where(xmask, new{name}, {name}_@)"]

    def partial(self, store: Store, name: str) -> tuple[str, str]:
        """Return the statement that begins a column sum, and the one that writes what this program's rows came to."""
        row, dtype, writer = OPS[store.mode], store.value.dtype, self.writer
        assert row.identity is not None
        start = f"{name}_@ = tl.full([XBLOCK, RBLOCK], {_number(row.identity(dtype))}, {STORAGE[dtype].compute})"
        total = f"fj.{store.mode}({name}_@, 0)[None, :]" if writer.tiles["XBLOCK"] > 1 else f"{name}_@"
        place = f"program * {product(writer.cluster.reduce)} + {writer.offset(store.layout)}"
        mask = ", rmask" if writer.masked("r") else ""
        return start, f"tl.store({writer.pointers[store.buffer]} + ({place}), {STORAGE[store.dtype].store.format(total)}{mask})"

    def store(self, store: Store) -> list[str]:
        writer = self.writer
        offset = self._place(store.layout, store.index)
        strides = store.layout.strides or ()
        columns = any(strides[writer.split :])
        for variable, axes in writer.groups.items():  # a group of one element still gives the pointers their tile shape
            if not any(strides[a] for a in axes) and (variable != "r"):
                offset += f" + {variable}"
        target = writer.buffers[store.buffer].written_to or store.buffer
        value = STORAGE[store.dtype].store.format(self.text(store.value))
        mask = writer.mask([store.layout], columns=columns)
        return [f"tl.store({writer.pointers[target]} + ({offset}), {value}{', ' + mask if mask else ''})"]


def _layouts(roots: Iterable[Expr]) -> list[Layout]:
    return [n.layout for n in postorder(roots) if isinstance(n, (Load, Iota))]


def _identities(node: Reduce) -> list[str]:
    row = OPS[node.op]
    assert row.identity is not None
    first = row.identity(node.args[0].dtype)
    text = _number(first)
    return [text] if len(node.args) == 1 else [text, str(INDEX_IDENTITY)]


def _literal(node: Const) -> str:
    return _number(node.value)


def _number(value: bool | int | float) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return repr(value)
