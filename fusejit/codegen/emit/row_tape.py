"""Row tape: the statements of what is made of a whole row that is in registers: reductions, segments and scans.

In: nodes in an order in which operands come first. Out: lines of Triton; a longer row is scanned with a carry.

    tmp1 = fj.sum(tl.where(rmask, tmp0, 0), 1)[:, None]
    tmp2 = fj.cumsum(tmp0_in, 1, False)
"""

from __future__ import annotations

from ..ir.expr import Expr, Reduce, Scan, Segment, reduction
from ..ir.reductions import INDEX_IDENTITY, Reduction, row_of, scanned_by
from ..ir.size import product
from ..ops.table import STORAGE
from ..passes.online import Shifted, shifted
from .index import IndexSpace
from .tape import Tape, number


class RowTape(Tape):
    """A tape with the values of whole rows."""

    def __init__(self, index: IndexSpace, outside: Tape | None = None) -> None:
        super().__init__(index, outside)
        self.scanned: dict[tuple, list[str]] = {}  # the names of scans that give several values
        self.carries: list[str] = []  # statements before the loop: what scans hand on from tile to tile

    def along_row(self, node: Expr) -> list[str]:
        match node:
            case Scan():
                return self._scan(node)
            case Reduce():
                value = self.reduced(node)
            case Segment():
                value = self._segment(node)
            case _:
                raise TypeError(node)
        name = self.names[node] = self.fresh()
        return [f"{name} = {value}"]

    def _scan(self, node: Scan) -> list[str]:
        """Scan a row that is in registers at once, and a longer one tile by tile with a carry; values and places in one
        go.
        """
        op = node.op.removesuffix("_at")
        names, lines = self.scanned.get((op, node.source, node.place), []), []
        if not names:
            row = scanned_by(op)
            scan = row.scan
            assert scan is not None
            start, values = [number(row.identity(node.source.dtype))], [self.tile(node.source)]
            if scan.places:
                start, values = (
                    [*start, "0"],
                    [*values, f"tl.broadcast_to({self.text(node.place, index=True)}, [XBLOCK, RBLOCK])"],
                )
            if self.index.masked("r"):
                values = [f"tl.where(rmask, {v}, {i})" for v, i in zip(values, start, strict=True)]
            names = self.scanned[op, node.source, node.place] = [self.fresh() for _ in values]
            given = [f"{n}_in" for n in names]
            lines = [f"{n} = {v}" for n, v in zip(given, values, strict=True)]
            lines.append(f"{', '.join(names)} = {scan.text(given, node.reverse)}")
            if self.facts.tiles["RBLOCK"] < product(self.facts.cluster.reduce):
                types = [STORAGE[node.source.dtype].compute, "tl.int64" if self.facts.wide else "tl.int32"]
                carries = [f"{n}_carry" for n in names]
                self.carries += [
                    f"{c} = tl.full([XBLOCK, 1], {i}, {t})" for c, i, t in zip(carries, start, types, strict=False)
                ]
                lines.append(f"{', '.join(names)} = {scan.combined(*carries, *names)}")
                ends = [f"{n}_end" for n in names]
                lines.append(f"{', '.join(ends)} = {self.whole(row, given)}")
                lines.append(f"{', '.join(carries)} = {scan.combined(*carries, *ends)}")
        self.names[node] = f"{names[-1]}.to(tl.int64)" if node.op.endswith("_at") else names[0]
        return lines

    def whole(self, row: Reduction, given: list[str]) -> str:
        """Return what a scan of a tile comes to at its end."""
        if len(given) == 1:
            return f"{row.reduced(*given, axis=1)}[:, None]"
        assert row.scan is not None
        return f"fj.{row.scan.name}_whole({', '.join(given)}, 1)"

    def reduced(self, node: Reduce) -> str:
        """Reduce a whole row that is in registers."""
        total = self.finish(node, self.guarded(node))
        found = self.uncentred(node)
        return self.recentred(self.rest(found), total) if found else total

    def guarded(self, node: Reduce) -> list[str]:
        """Return the operands of a reduction as tiles, their masked places neutral."""
        column = self.index.column
        args = [self.tile(a) for a in node.args]
        if self.index.masked(column):
            args = [f"tl.where({column}mask, {a}, {i})" for a, i in zip(args, identities(node), strict=True)]
        return args

    def uncentred(self, node: Reduce) -> Shifted | None:
        """Return what a sum of squares about a rounded mean is about; of a piece of a row its reader gets what is left
        of x - mean too.
        """
        found = shifted(node)
        if (
            found is None
            or found.kind == "exp"
            or reduction("sum", found.deviation, dtype=node.dtype) in self.facts.levels
        ):
            return None
        return found

    def rest(self, found: Shifted) -> str:
        """Return what is left of x - mean along the tile: it adds up to `count` times the error of the mean."""
        rest, column = self.tile(found.deviation), self.index.column
        rest = f"tl.where({column}mask, {rest}, 0.0)" if self.index.masked(column) else rest
        return self.row_sum(rest)

    def recentred(self, rest: str, squares: str) -> str:
        count = product(self.facts.cluster.reduce)
        return f"fj.shifted_squares({rest}, {squares}, {float(count) if isinstance(count, int) else f'({count})'})"

    def finish(self, node: Reduce, args: list[str]) -> str:
        value = self.row(row_of(node.op), *args)
        return f"{value}.to(tl.int64)" if len(args) == 2 else value

    def row_sum(self, tile: str) -> str:
        return self.row(row_of("sum"), tile)

    def row(self, row: Reduction, *tiles: str) -> str:
        """Return a reduction of each row of the tile as one value a row.

        Of the one row of a peeled tile it is a scalar: as a tile it would lend the middle's layout to the ends, 8
        elements a thread.
        """
        scalar = self.facts.peel and self.facts.tiles["XBLOCK"] == 1
        reduced = row.reduced(*tiles, axis=1)
        return f"{reduced}[:, None]" if not scalar else row_of(row.place_of or row.name).reduced(reduced, axis=0)

    def tile(self, node: Expr) -> str:
        """Return a value as a whole tile, even if it is the same for all columns."""
        if self.facts.full[node] and (
            self.facts.rows[node] or self.facts.tiles["XBLOCK"] == 1 and not self.facts.tiles.buckets
        ):
            return self.text(node)
        return f"tl.broadcast_to({self.text(node)}, [XBLOCK, {self.index.width}])"

    def _segment(self, node: Segment) -> str:
        """Reduce each segment of the rows of a tile, in which every segment is whole."""
        row, value, segments = row_of(node.op), self.tile(node.source), self.index.segments
        assert segments is not None
        if self.index.masked("r"):
            value = f"tl.where(rmask, {value}, {number(row.identity(node.source.dtype))})"
        return row.reduced(f"tl.reshape({value}, [XBLOCK, {segments.width}, {segments.padded}])", axis=2)


def identities(node: Reduce) -> list[str]:
    """Return what changes nothing in a reduction: of its value, and of its place."""
    text = number(row_of(node.op).identity(node.args[0].dtype))
    return [text] if len(node.args) == 1 else [text, str(INDEX_IDENTITY)]
