"""Tape: the statements of a kernel, one for each node of its expressions.

In: nodes in an order in which operands come first. Out: lines of Triton, and the name that each node has in them.

    tmp0 = tl.load(in0 + (x), x < 1000)
    tmp1 = fj.maximum(tmp0, 0)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..ir.analysis import power_of_two
from ..ir.cluster import Store
from ..ir.expr import Compute, Const, Expr, Iota, Load, Random, Reduce, Scan, Segment, children, postorder, reduction
from ..ir.layout import Layout, strided
from ..ir.size import Size, product
from ..ops.table import INDEX_IDENTITY, OPS, STORAGE, cast_spelling, fill_of
from ..passes.online import Shifted, shifted
from ..schedule.cost_model import adds_tiles_up
from ..schedule.registers import needed_beside
from .philox_tiles import lanes

INDEX_OPS = {"index_div", "index_mod"}
SCAN_COMBINES = {"cumsum": "sum", "cumprod": "prod", "cummax": "amax", "cummin": "amin", "logcumsumexp": "logaddexp"}
COMPARISONS = {"lt", "le", "gt", "ge", "eq", "ne"}


class Tape:
    """Names of the values computed so far; a tape inside a loop sees the names outside it."""

    def __init__(self, writer: Any, outside: Tape | None = None) -> None:
        self.writer = writer
        self.names: dict[Expr, str] = dict(outside.names) if outside else {}
        self.counter: list[int] = outside.counter if outside else [0]
        self.narrow: set[Expr] = set(outside.narrow) if outside else set()
        self.policies: dict[Expr, str] = {}
        self.again = False  # whether a kept row was read by a pass before
        self.slots: dict[Expr, str] = {}  # the accumulator of a reduction, while its loop runs
        self.scanned: dict[tuple, list[str]] = {}  # the names of scans that give several values
        self.carries: list[str] = []  # statements before the loop: what scans hand on from tile to tile
        self.begins: dict[str, str] = {}  # where a tile begins, if not where the template says
        self.quads: set[str] = set()  # statements that every fourth index has already

    def fresh(self) -> str:
        self.counter[0] += 1
        return f"tmp{self.counter[0] - 1}"

    def text(self, node: Expr, literal: bool = False, index: bool = False) -> str:
        if isinstance(node, Const):
            return (
                _literal(node)
                if index or (literal and not isinstance(node.value, Size))
                else f"tl.full((), {_literal(node)}, {STORAGE[node.dtype].compute})"
            )
        name = self.names[node]
        name = f"{name}.to(tl.int64)" if node in self.narrow and not index and node.dtype is torch.int64 else name
        spread = node in self.writer.cluster.by_segment and self.writer.column != "s"
        return f"fj.along({name}, {self.writer.padded})" if spread else name

    def statement(self, node: Expr) -> list[str]:
        """Return the statements that compute a node, and give it a name."""
        if isinstance(node, Const) or node in self.names or node in self.writer.rounded:
            return []
        if node in self.writer.cluster.by_segment and not isinstance(node, Segment):
            return self.of_segments(lambda: self.made(node))
        return self.made(node)

    def of_segments(self, write: Callable[[], list[str]]) -> list[str]:
        """Return statements whose tiles have one value a segment."""
        row = self.writer
        self.writer = row.segments or row
        lines = write()
        self.writer = row
        return lines

    def made(self, node: Expr) -> list[str]:
        """Return the statements that compute a node and name it."""
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
            case Scan():
                return self._scan(node)
            case Segment():
                value = self._segment(node)
            case Random():
                lines, value = self._random(node)
            case _:
                raise TypeError(node)
        name = self.names[node] = self.fresh()
        lines.append(f"{name} = {value}")
        if isinstance(node, Compute) and node.op == "checked_probability":
            lines.append(f"fj.check_probability({name}, {self._checked(node) or 'None'})")
        if isinstance(node, Compute) and node.op in ("checked_index", "checked_place"):
            mask = self._checked(node) or "None"
            lines.append(f"fj.check_index({name}, {self.text(node.args[1])}, {mask})")
            if not self.writer.wide:  # in bounds, so 32 bits hold it: half the registers of a long row of indices
                lines.append(f"{name} = {name}.to(tl.int32)")
                self.narrow.add(node)
        return lines

    def _checked(self, node: Expr) -> str:
        """Return where a check counts; a scalar of a row is checked once and not in each column."""
        rows = self.writer.tiles.template == "pointwise_row"
        return (
            self.writer.mask(self.runs_along([node])) if rows else self.writer.mask([], columns=self.writer.full[node])
        )

    def runs_along(self, roots: Iterable[Expr]) -> list[Layout]:
        """Return layouts with the axes along which expressions run: a reduction has one value a row, whatever it was
        made of.
        """
        cluster = self.writer.cluster
        row = strided(cluster.axes, [1] * len(cluster.parallel) + [0] * len(cluster.reduce))
        found = postorder(roots, lambda n: () if isinstance(n, Reduce) else children(n))
        return [row if isinstance(n, Reduce) else n.layout for n in found if isinstance(n, (Load, Iota, Reduce))]

    def _iota(self, node: Iota) -> list[str]:
        offset = self.writer.offset(node.layout)
        name = self.names[node] = self.fresh()
        if not any(node.layout.strides or ()):
            return [f"{name} = tl.full((), {offset}, {STORAGE[node.dtype].compute})"]
        self.narrow.add(node)
        return [f"{name} = {offset}"]

    def keep(self, node: Load, name: str) -> list[str]:
        """Return the statement that loads what all passes over the row share."""
        return [f"{name} = {self._access(node)}"]

    def _load(self, node: Load) -> str:
        name = self.writer.kept.get(node)
        value = self._access(node) if name is None else f"fj.again({name})" if self.again else name
        value = STORAGE[node.dtype].load.format(value)
        return f"({value} != 0)" if node.dtype is torch.bool else value

    def _access(self, node: Load) -> str:
        offset = self._place(node.layout, node.index)
        extra = self.text(node.mask) if node.mask is not None else ""
        along, tested = (
            self.runs_along(e for e, _ in node.index),
            self.runs_along([node.mask] if node.mask is not None else []),
        )
        mask = self.writer.mask([node.layout, *along, *tested], extra)
        if tested and not self.writer.some_axis((node.layout, *along)):
            # one element, masked by a tile: Triton wants a tile of pointers
            offset += f" + 0 * {self.writer.some_axis(tested) or '0'}"
        more = (f", {mask}" if mask else "") + (
            f", other={fill_of(node.fill, node.dtype)}" if node.mask is not None else ""
        )
        more += f', eviction_policy="{self.policies[node]}"' if node in self.policies else ""
        return f"tl.load({self.writer.pointers[node.buffer]} + ({offset}){more})"

    def _place(self, layout: Layout, index: tuple[tuple[Expr, int], ...]) -> str:
        offset = self.writer.address(layout)
        terms = [
            f"{stride} * {self.text(e, index=True)}" if stride != 1 else self.text(e, index=True) for e, stride in index
        ]
        return " + ".join([offset, *terms])

    def _compute(self, node: Compute) -> str:
        if node.op == "cast":
            return cast_spelling(node.args[0].dtype, node.dtype, implicit=not self.writer.exact).format(
                self.text(node.args[0])
            )
        row = OPS[node.op]
        numbers = all(isinstance(a, Const) for a in node.args)  # of literals alone Python would make a Python value
        small = node.op in INDEX_OPS | COMPARISONS and all(self._is_index(a) for a in node.args) and not numbers
        if small:
            if node.op in INDEX_OPS:
                self.narrow.add(node)
            return row.text(*(self.text(a, literal=True, index=True) for a in node.args))
        plain = row.literals and not numbers
        text = row.text(
            *(self.text(a, literal=plain and a.dtype is not torch.float64) for a in node.args), exact=self.writer.exact
        )
        rounds = (
            STORAGE[node.dtype].round if (self.writer.exact or node.op == "rounded") and node.dtype in STORAGE else ""
        )
        return rounds.format(text) if rounds else text

    def _is_index(self, node: Expr) -> bool:
        if isinstance(node, Const) and isinstance(node.value, Size):
            return node.dtype is torch.int64
        return node in self.narrow or (
            isinstance(node, Const) and node.dtype is torch.int64 and abs(node.value) < 2**31
        )

    def _random(self, node: Random) -> tuple[list[str], str]:
        found = lanes(self.writer, node, self.begins)
        if found is None:
            return [], f"fj.{node.kind}({self.text(node.seed)}, {self.text(node.offset)})"
        before, counters = found
        new = [line for line in before if line not in self.quads]
        self.quads |= set(new)
        return new, f"fj.{node.kind}_tile({self.text(node.seed)}, {counters})"

    def _scan(self, node: Scan) -> list[str]:
        """Scan a row that is in registers at once, and a longer one tile by tile with a carry; values and places in one
        go.
        """
        op = node.op.removesuffix("_at")
        names, lines = self.scanned.get((op, node.source, node.place), []), []
        if not names:
            row, pair = OPS[SCAN_COMBINES[op]], op in ("cummax", "cummin")
            first = row.identity(node.source.dtype) if row.identity else -math.inf
            start, values = [_number(first)], [self._tile(node.source)]
            if pair:
                start, values = (
                    [*start, "0"],
                    [*values, f"tl.broadcast_to({self.text(node.place, index=True)}, [XBLOCK, RBLOCK])"],
                )
            if self.writer.masked("r"):
                values = [f"tl.where(rmask, {v}, {i})" for v, i in zip(values, start, strict=True)]
            names = self.scanned[op, node.source, node.place] = [self.fresh() for _ in values]
            given = [f"{n}_in" for n in names]
            lines = [f"{n} = {v}" for n, v in zip(given, values, strict=True)]
            lines.append(f"{', '.join(names)} = fj.{op}({', '.join(given)}, 1, {node.reverse})")
            if self.writer.tiles["RBLOCK"] < product(self.writer.cluster.reduce):
                types = [STORAGE[node.source.dtype].compute, "tl.int64" if self.writer.wide else "tl.int32"]
                carries = [f"{n}_carry" for n in names]
                self.carries += [
                    f"{c} = tl.full([XBLOCK, 1], {i}, {t})" for c, i, t in zip(carries, start, types, strict=False)
                ]
                lines.append(f"{', '.join(names)} = fj.{op}_combine({', '.join((*carries, *names))})")
                ends = [f"{n}_end" for n in names]
                lines.append(f"{', '.join(ends)} = {self.whole(op, given)}")
                lines.append(f"{', '.join(carries)} = fj.{op}_combine({', '.join((*carries, *ends))})")
        self.names[node] = f"{names[-1]}.to(tl.int64)" if node.op.endswith("_at") else names[0]
        return lines

    def whole(self, op: str, given: list[str]) -> str:
        """Return what a scan of a tile comes to at its end."""
        if len(given) == 1:
            return f"fj.{SCAN_COMBINES[op].replace('logaddexp', 'logaddexp_reduce')}({given[0]}, 1)[:, None]"
        return f"fj.{op}_whole({', '.join(given)}, 1)"

    # -- reductions
    def _reduce(self, node: Reduce) -> str:
        """Reduce a whole row that is in registers."""
        total = self._finish(node, self.guarded(node))
        found = self.uncentred(node)
        return self.recentred(self.rest(found), total) if found else total

    def guarded(self, node: Reduce) -> list[str]:
        """Return the operands of a reduction as tiles, their masked places neutral."""
        column = self.writer.column
        args = [self._tile(a) for a in node.args]
        if self.writer.masked(column):
            args = [f"tl.where({column}mask, {a}, {i})" for a, i in zip(args, _identities(node), strict=True)]
        return args

    def uncentred(self, node: Reduce) -> Shifted | None:
        """Return what a sum of squares about a rounded mean is about; of a piece of a row its reader gets what is left
        of x - mean too.
        """
        found = shifted(node)
        if (
            found is None
            or found.kind == "exp"
            or reduction("sum", found.deviation, dtype=node.dtype) in self.writer.levels
        ):
            return None
        return found

    def rest(self, found: Shifted) -> str:
        """Return what is left of x - mean along the tile: it adds up to `count` times the error of the mean."""
        rest, column = self._tile(found.deviation), self.writer.column
        rest = f"tl.where({column}mask, {rest}, 0.0)" if self.writer.masked(column) else rest
        return self.row(f"fj.sum({rest}, 1)", "sum")

    def recentred(self, rest: str, squares: str) -> str:
        count = product(self.writer.cluster.reduce)
        return f"fj.shifted_squares({rest}, {squares}, {float(count) if isinstance(count, int) else f'({count})'})"

    def _finish(self, node: Reduce, args: list[str]) -> str:
        value = self.row(f"fj.{node.op}({', '.join(args)}, 1)", node.op)
        return f"{value}.to(tl.int64)" if len(args) == 2 else value

    def row(self, reduced: str, op: str) -> str:
        """Return a reduction of each row of the tile as one value a row.

        Of the one row of a peeled tile it is a scalar: as a tile it would lend the middle's layout to the ends, 8
        elements a thread.
        """
        scalar = self.writer.peel and self.writer.tiles["XBLOCK"] == 1
        return f"{reduced}[:, None]" if not scalar else f"fj.{op.replace('arg', 'a')}({reduced}, 0)"

    def _tile(self, node: Expr) -> str:
        """Return a value as a whole tile, even if it is the same for all columns."""
        if self.writer.full[node] and (
            self.writer.rows[node] or self.writer.tiles["XBLOCK"] == 1 and not self.writer.tiles.buckets
        ):
            return self.text(node)
        return f"tl.broadcast_to({self.text(node)}, [XBLOCK, {self.writer.width}])"

    def accumulate(
        self, node: Reduce, outside: Tape, ends: Tape | None = None
    ) -> tuple[list[str], list[str], list[str]]:
        """Return the statements before, inside and after the loop that reduces a row; `ends` has what of the row no
        loop runs over.
        """
        if self.writer.tiles.keep:  # the tile is the whole row
            value = self._reduce(node)
            name = outside.names[node] = self.names[node] = self.fresh()
            return [], [f"{name} = {value}"], []
        if node in self.writer.online:
            return self.accumulate_shifted(self.writer.online[node], outside, ends)
        names = [self.fresh() for _ in node.args]
        types = [STORAGE[a.dtype].compute for a in node.args]
        if adds_tiles_up(self.writer.cluster, self.writer.tiles) and len(names) == 1 and not self.writer.online:
            name = outside.names[node] = self.names[node] = names[0]
            (value,), (first,), (kind,) = self.guarded(node), _identities(node), types
            body = [f"{name} = fj.{node.op}_combine({name}, {self._finish(node, [value])})"]
            return [f"{name} = tl.full([XBLOCK, 1], {first}, {kind})"], body, []
        start = [
            f"{n} = tl.full([XBLOCK, RBLOCK], {i}, {t})"
            for n, i, t in zip(names, _identities(node), types, strict=True)
        ]
        values = [self._tile(a) for a in node.args]
        together = f"fj.{node.op}_combine({', '.join((*names, *values))})"
        if not self.writer.masked("r"):
            body = [f"{', '.join(names)} = {together}"]
        else:
            new = [f"new{n}" for n in names]
            body = [
                f"{', '.join(new)} = {together}",
                *(f"{n} = tl.where(rmask, {m}, {n})" for n, m in zip(names, new, strict=True)),
            ]
        whole = self._finish(node, names)
        more, whole = ends.together(node, whole, names, outside) if ends else ([], whole)
        name = outside.names[node] = self.names[node] = self.fresh()
        self.slots[node] = names[0]
        return start, body, [*more, f"{name} = {whole}"]

    def together(self, node: Reduce, whole: str, tiles: list[str], outside: Tape) -> tuple[list[str], str]:
        """Return the statements of the ends of a row, and its reduction: `whole`, of the middle's `tiles`, and that of
        the ends.
        """
        self.names.update((n, name) for n, name in outside.names.items() if not self.writer.full[n])
        lines = [line for n in self.writer.inside(list(node.args)) for line in self.statement(n)]
        return lines, self.of_both(node, whole, tiles, self._finish(node, self.guarded(node)), self.guarded(node))

    def of_both(self, node: Reduce, whole: str, tiles: list[str], other: str, others: list[str]) -> str:
        """Return the text of a reduction from those of two parts; an arg-reduction compares the values, the first of
        the tiles.
        """
        if len(node.args) == 1:
            return f"fj.{node.op}_combine({whole}, {other})"
        value = node.op.replace("arg", "a")
        best, second = (self.row(f"fj.{value}({tile}, 1)", value) for tile in (tiles[0], others[0]))
        return f"fj.{node.op}_combine({best}, {whole}, {second}, {other})[1]"

    def accumulate_shifted(
        self, found: Shifted, outside: Tape, ends: Tape | None
    ) -> tuple[list[str], list[str], list[str]]:
        """As `accumulate`, for a sum whose shift is not known yet: each place of the tile keeps its own and is
        corrected at the end.
        """
        value, masked = self._tile(found.value), self.writer.masked("r")
        names = [self.fresh() for _ in range(1 if found.kind == "exp" else 2)]
        start = [f"{n} = tl.full([XBLOCK, RBLOCK], 0.0, tl.float32)" for n in names]
        maxima = "" if found.kind == "square" else self.slots[found.about or found.bases[0]]
        if found.kind == "exp":
            news = [f"fj.online_exp({maxima}, {names[0]}, {value})"]
            end = self.row("fj.sum(fj.online_exp_sum({0}, {1}, {2}), 1)", "sum")
        elif found.kind == "linear":
            weight = " * ".join(self.text(w) if isinstance(w, Const) else self._tile(w) for w in found.weights) or "1.0"
            news = [f"fj.online_linear({maxima}, {', '.join(names)}, {value}, {weight})", f"{names[1]} + {weight}"]
            away = " - ".join(["fj.finite_or_zero({0})", *(f"{{{3 + i}}}" for i in range(len(found.shifts)))])
            end = self.row(f"fj.sum({{1}} + ({away}) * {{2}}, 1)", "sum")
        else:
            near, lines = self.mean_of_first_tile(found, outside)
            start += lines
            news = [f"{names[0]} + ({value} - {near})", f"{names[1]} + ({value} - {near}) * ({value} - {near})"]
            sums = [self.row(f"fj.sum({{{i}}}, 1)", "sum") for i in range(2)]
            more, parts = ends.about(near, found) if ends else ([], [])
            sums = [f"{one} + {part}" for one, part in zip(sums, parts, strict=True)] if ends else sums
            end = f"fj.shifted_squares({', '.join(sums)}, {float(product(self.writer.cluster.reduce))})"
        guard = "{0} = tl.where(rmask, {1}, {0})" if masked else "{0} = {1}"
        body = [guard.format(name, new) for name, new in zip(names, news, strict=True)]
        shifts = postorder(found.shifts, lambda n: () if isinstance(n, Reduce) else children(n))
        finish = [line for n in shifts for line in outside.statement(n)]
        result = outside.names[found.node] = self.names[found.node] = self.fresh()
        kept = [maxima, *names] if maxima else names
        whole = end.format(*kept, *map(outside.text, found.shifts))
        if ends and maxima:
            more, whole = ends.together(found.node, whole, names, outside)
        return start, body, [*finish, *(more if ends else []), f"{result} = {whole}"]

    def about(self, near: str, found: Shifted) -> tuple[list[str], list[str]]:
        """Return the statements of the ends of a row, and the sums of what is left of their values without `near`, and
        of its squares.
        """
        lines = [line for n in self.writer.inside([found.value]) for line in self.statement(n)]
        left, name = f"tl.where(emask, {self._tile(found.value)} - {near}, 0.0)", self.fresh()
        sums = [self.row(f"fj.sum({text}, 1)", "sum") for text in (name, f"{name} * {name}")]
        return [*lines, f"{name} = {left}"], sums

    def mean_of_first_tile(self, found: Shifted, outside: Tape) -> tuple[str, list[str]]:
        """Return the name of a number near the row's mean, and its statements: squares about it lose nothing to
        cancellation.
        """
        ahead, name = Tape(self.writer, outside), self.fresh()
        ahead.begins["r"] = "0"
        lines = [line for n in self.writer.inside([found.value]) for line in ahead.statement(n)]
        value = ahead._tile(found.value)
        value = f"tl.where(rmask, {value}, 0.0)" if self.writer.masked("r") else value
        many, each = self.writer.cluster.segment
        tile = self.writer.tiles["RBLOCK"]
        whole = min(many, tile // power_of_two(each)) * each if self.writer.cluster.segments else min(many * each, tile)
        count = f"tl.minimum({self.writer.middle}, RBLOCK)" if self.writer.peel else str(float(whole))
        return name, [*self.writer.tile(0), *lines, f"{name} = {self.row(f'fj.sum({value}, 1)', 'sum')} / {count}"]

    def column(self, store: Store, name: str) -> list[str]:
        """Return the statements that add a row to a column sum, or its result to that of all rows; "@": the number of
        the tile.
        """
        along = self.writer.runs(store)
        value, total = (self._tile(store.value), f"{name}_@") if along else (self.text(store.value), name)
        together = f"fj.{store.mode}_combine({total}, {value})"
        if not self.writer.masked("x"):
            return [f"{total} = {together}"]  # what is masked along the row is not written in the end
        return [f"new{name} = {together}", f"{total} = tl.where(xmask, new{name}, {total})"]

    def partial(self, store: Store, name: str) -> tuple[list[str], list[str]]:
        """Return the statements that begin a column sum, and those that write what this program's rows came to."""
        row, dtype, writer = OPS[store.mode], store.value.dtype, self.writer
        assert row.identity is not None
        if not writer.runs(store):
            start = f"{name} = tl.full([XBLOCK, 1], {_number(row.identity(dtype))}, {STORAGE[dtype].compute})"
            total = f"fj.{store.mode}(fj.{store.mode}({name}, 1), 0)"
            return [start], [
                f"tl.store({writer.pointers[store.buffer]} + program, {STORAGE[store.dtype].store.format(total)})"
            ]
        start = (
            f"{name}_@ = tl.full([XBLOCK, {writer.width}], {_number(row.identity(dtype))}, {STORAGE[dtype].compute})"
        )
        total = f"fj.{store.mode}({name}_@, 0)[None, :]" if writer.tiles["XBLOCK"] > 1 else f"{name}_@"
        place = f"program * {product(writer.cluster.reduce)} + {writer.offset(store.layout)}"
        mask = f", {writer.column}mask" if writer.masked(writer.column) else ""
        return [start], [
            f"tl.store({writer.pointers[store.buffer]} + ({place}), {STORAGE[store.dtype].store.format(total)}{mask})"
        ]

    def _segment(self, node: Segment) -> str:
        """Reduce each segment of the rows of a tile, in which every segment is whole."""
        row, value, segments = OPS[node.op], self._tile(node.source), self.writer.segments
        assert row.identity is not None and segments is not None
        if self.writer.masked("r"):
            value = f"tl.where(rmask, {value}, {_number(row.identity(node.source.dtype))})"
        return f"fj.{node.op}(tl.reshape({value}, [XBLOCK, {segments.width}, {segments.padded}]), 2)"

    def store(self, store: Store) -> list[str]:
        if self.writer.cluster.one_a_segment(store) and self.writer.column != "s":
            return self.of_segments(lambda: self.store(store))
        writer = self.writer
        offset = self._place(store.layout, store.index)
        strides = store.layout.strides or ()
        columns = writer.runs(store)
        still = "0 * " if store.index else ""
        for variable, axes in writer.groups.items():  # a group of one element still gives the pointers their tile shape
            if not any(strides[a] for a in axes) and (variable != writer.column or columns and bool(store.mode)):
                offset += f" + {still}{variable}"
        target = writer.buffers[store.buffer].written_to or store.buffer
        value = STORAGE[store.dtype].store.format(self.text(writer.rounded.get(store.value, store.value)))
        mask = writer.mask([store.layout], columns=columns)
        word = "fj.atomic_add" if store.mode == "atomic_add" else "tl.store"
        first = ["tl.debug_barrier()"] if needed_beside(store, target, writer.cluster) else []
        return [
            *first,
            f"{word}({writer.pointers[target]} + ({offset}), "
            f"{value}{', ' + mask if mask else ', None' * bool(store.mode)})",
        ]


def _identities(node: Reduce) -> list[str]:
    row = OPS[node.op]
    assert row.identity is not None
    first = row.identity(node.args[0].dtype)
    text = _number(first)
    return [text] if len(node.args) == 1 else [text, str(INDEX_IDENTITY)]


def _literal(node: Const) -> str:
    return _number(node.value)


def _number(value: bool | int | float | Size) -> str:
    if isinstance(value, Size):
        return f"{value}"
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, float) and not value and math.copysign(1.0, value) < 0:
        return "(tl.full((), 0.0, tl.float32) * -1.0)"  # Triton makes +0.0 of a literal -0.0
    return repr(value)
