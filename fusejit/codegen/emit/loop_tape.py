"""Loop tape: the statements of a reduction whose row is taken tile by tile.

In: a reduction. Out: lines before the loop, inside it and after it; a shifted sum is corrected as its shift moves.

    tmp1 = tl.full([XBLOCK, RBLOCK], 0, tl.float32)
    for start in range(0, 50257, RBLOCK):
        tmp1 = tl.where(rmask, fj.sum_combine(tmp1, tmp0), tmp1)
    tmp2 = fj.sum(tmp1, 1)[:, None]
"""

from __future__ import annotations

from ..ir.analysis import power_of_two
from ..ir.expr import Const, Expr, Reduce, children, postorder
from ..ir.reductions import row_of
from ..ir.size import product
from ..ops.table import STORAGE
from ..passes.online import Shifted
from .column_tape import ColumnTape
from .index import IndexSpace
from .row_tape import identities
from .tape import Tape


class LoopTape(ColumnTape):
    """A tape inside a loop over the row, or of the ends that no loop runs over."""

    def __init__(self, index: IndexSpace, outside: Tape | None = None) -> None:
        super().__init__(index, outside)
        self.slots: dict[Expr, str] = {}  # the accumulator of a reduction, while its loop runs

    def accumulate(
        self, node: Reduce, outside: LoopTape, ends: LoopTape | None = None
    ) -> tuple[list[str], list[str], list[str]]:
        """Return the statements before, inside and after the loop that reduces a row; `ends` has what of the row no
        loop runs over.
        """
        if self.facts.tiles.keep:  # the tile is the whole row
            value = self.reduced(node)
            name = outside.names[node] = self.names[node] = self.fresh()
            return [], [f"{name} = {value}"], []
        if node in self.facts.online:
            return self.accumulate_shifted(self.facts.online[node], outside, ends)
        names = [self.fresh() for _ in node.args]
        types = [STORAGE[a.dtype].compute for a in node.args]
        if (
            self.facts.template.adds_tiles_up(self.facts.cluster, self.facts.tiles)
            and len(names) == 1
            and not self.facts.online
        ):
            name = outside.names[node] = self.names[node] = names[0]
            (value,), (first,), (kind,) = self.guarded(node), identities(node), types
            body = [f"{name} = {row_of(node.op).combined(name, self.finish(node, [value]))}"]
            return [f"{name} = tl.full([XBLOCK, 1], {first}, {kind})"], body, []
        start = [
            f"{n} = tl.full([XBLOCK, RBLOCK], {i}, {t})" for n, i, t in zip(names, identities(node), types, strict=True)
        ]
        values = [self.tile(a) for a in node.args]
        together = row_of(node.op).combined(*names, *values)
        if not self.index.masked("r"):
            body = [f"{', '.join(names)} = {together}"]
        else:
            new = [f"{n}_next" for n in names]
            body = [
                f"{', '.join(new)} = {together}",
                *(f"{n} = tl.where(rmask, {m}, {n})" for n, m in zip(names, new, strict=True)),
            ]
        whole = self.finish(node, names)
        more, whole = ends.together(node, whole, names, outside) if ends else ([], whole)
        name = outside.names[node] = self.names[node] = self.fresh()
        self.slots[node] = names[0]
        return start, body, [*more, f"{name} = {whole}"]

    def together(self, node: Reduce, whole: str, tiles: list[str], outside: LoopTape) -> tuple[list[str], str]:
        """Return the statements of the ends of a row, and its reduction: `whole`, of the middle's `tiles`, and that of
        the ends.
        """
        self.names.update((n, name) for n, name in outside.names.items() if not self.facts.full[n])
        lines = [line for n in self.facts.inside(list(node.args)) for line in self.statement(n)]
        return lines, self.of_both(node, whole, tiles, self.finish(node, self.guarded(node)), self.guarded(node))

    def of_both(self, node: Reduce, whole: str, tiles: list[str], other: str, others: list[str]) -> str:
        """Return the text of a reduction from those of two parts; an arg-reduction compares the values, the first of
        the tiles.
        """
        if len(node.args) == 1:
            return row_of(node.op).combined(whole, other)
        row = row_of(node.op)
        best, second = (self.row(row_of(row.place_of), tile) for tile in (tiles[0], others[0]))
        return f"{row.combined(best, whole, second, other)}[1]"

    def accumulate_shifted(
        self, found: Shifted, outside: LoopTape, ends: LoopTape | None
    ) -> tuple[list[str], list[str], list[str]]:
        """As `accumulate`, for a sum whose shift is not known yet: each place of the tile keeps its own and is
        corrected at the end.
        """
        value, masked = self.tile(found.value), self.index.masked("r")
        names = [self.fresh() for _ in range(1 if found.kind == "exp" else 2)]
        start = [f"{n} = tl.full([XBLOCK, RBLOCK], 0.0, tl.float32)" for n in names]
        maxima = "" if found.kind == "square" else self.slots[found.about or found.bases[0]]
        if found.kind == "exp":
            news = [f"fj.online_exp({maxima}, {names[0]}, {value})"]
            end = self.row_sum("fj.online_exp_sum({0}, {1}, {2})")
        elif found.kind == "linear":
            weight = " * ".join(self.text(w) if isinstance(w, Const) else self.tile(w) for w in found.weights) or "1.0"
            news = [f"fj.online_linear({maxima}, {', '.join(names)}, {value}, {weight})", f"{names[1]} + {weight}"]
            away = " - ".join(["fj.finite_or_zero({0})", *(f"{{{3 + i}}}" for i in range(len(found.shifts)))])
            end = self.row_sum(f"{{1}} + ({away}) * {{2}}")
        else:
            near, lines = self.mean_of_first_tile(found, outside)
            start += lines
            news = [f"{names[0]} + ({value} - {near})", f"{names[1]} + ({value} - {near}) * ({value} - {near})"]
            sums = [self.row_sum(f"{{{i}}}") for i in range(2)]
            more, parts = ends.about(near, found) if ends else ([], [])
            sums = [f"{one} + {part}" for one, part in zip(sums, parts, strict=True)] if ends else sums
            end = f"fj.shifted_squares({', '.join(sums)}, {float(product(self.facts.cluster.reduce))})"
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
        lines = [line for n in self.facts.inside([found.value]) for line in self.statement(n)]
        left, name = f"tl.where(emask, {self.tile(found.value)} - {near}, 0.0)", self.fresh()
        sums = [self.row_sum(text) for text in (name, f"{name} * {name}")]
        return [*lines, f"{name} = {left}"], sums

    def mean_of_first_tile(self, found: Shifted, outside: LoopTape) -> tuple[str, list[str]]:
        """Return the name of a number near the row's mean, and its statements: squares about it lose nothing to
        cancellation.
        """
        ahead, name = LoopTape(self.index, outside), self.fresh()
        ahead.begins["r"] = "0"
        lines = [line for n in self.facts.inside([found.value]) for line in ahead.statement(n)]
        value = ahead.tile(found.value)
        value = f"tl.where(rmask, {value}, 0.0)" if self.index.masked("r") else value
        many, each = self.facts.cluster.segment
        tile = self.facts.tiles["RBLOCK"]
        whole = min(many, tile // power_of_two(each)) * each if self.facts.cluster.segments else min(many * each, tile)
        count = f"tl.minimum({self.index.middle}, RBLOCK)" if self.facts.peel else str(float(whole))
        return name, [*self.index.tile(0), *lines, f"{name} = {self.row_sum(value)} / {count}"]
