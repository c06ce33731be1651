"""Column tape: what a walk over rows adds up in registers, for each column or for all of them.

In: a store that reduces rows, and the name of its sum. Out: the statements that begin it, add a row, and write it.

    sum0_0 = tl.full([XBLOCK, RBLOCK], 0, tl.float32)
    sum0_0 = fj.sum_combine(sum0_0, tmp4)
    tl.store(out1 + (program * 4096 + r), fj.sum(sum0_0, 0)[None, :])
"""

from __future__ import annotations

from ..ir.cluster import Store
from ..ir.reductions import row_of
from ..ir.size import product
from ..ops.table import STORAGE
from .row_tape import RowTape
from .tape import number


class ColumnTape(RowTape):
    """A tape that adds up columns, or everything, from row to row."""

    def column(self, store: Store, name: str) -> list[str]:
        """Return the statements that add a row to a column sum, or its result to that of all rows; "@": the number of
        the tile.
        """
        along = self.facts.runs(store)
        value, total = (self.tile(store.value), f"{name}_@") if along else (self.text(store.value), name)
        together = row_of(store.mode).combined(total, value)
        if not self.index.masked("x"):
            return [f"{total} = {together}"]  # what is masked along the row is not written in the end
        return [f"{name}_next = {together}", f"{total} = tl.where(xmask, {name}_next, {total})"]

    def partial(self, store: Store, name: str) -> tuple[list[str], list[str]]:
        """Return the statements that begin a column sum, and those that write what this program's rows came to."""
        row, dtype = row_of(store.mode), store.value.dtype
        if not self.facts.runs(store):
            start = f"{name} = tl.full([XBLOCK, 1], {number(row.identity(dtype))}, {STORAGE[dtype].compute})"
            total = row.reduced(row.reduced(name, axis=1), axis=0)
            return [start], [
                f"tl.store({self.facts.pointers[store.buffer]} + program, {STORAGE[store.dtype].store.format(total)})"
            ]
        start = (
            f"{name}_@ = tl.full([XBLOCK, {self.index.width}], {number(row.identity(dtype))}, {STORAGE[dtype].compute})"
        )
        total = f"{row.reduced(f'{name}_@', axis=0)}[None, :]" if self.facts.tiles["XBLOCK"] > 1 else f"{name}_@"
        place = f"program * {product(self.facts.cluster.reduce)} + {self.index.offset(store.layout)}"
        mask = f", {self.index.column}mask" if self.index.masked(self.index.column) else ""
        pointer, value = self.facts.pointers[store.buffer], STORAGE[store.dtype].store.format(total)
        return [start], [f"tl.store({pointer} + ({place}), {value}{mask})"]
