"""Peeled tape: the statements of a peeled row that is in registers, once for its middle and once for its two ends.

In: nodes in an order in which operands come first. Out: lines of Triton; a reduction is that of the middle and of the
ends together.

    tmp0 = tl.load(in0 + ((4097 * x + 7) // 8 * 8 + k), rmask)      16 bytes at a time
    tmp1 = tl.load(in0 + (4097 * x + e), emask)                     at most 7 elements on each side
    tmp2 = fj.sum_combine(fj.sum(tl.where(rmask, tmp0, 0), 1)[:, None], fj.sum(tl.where(emask, tmp1, 0), 1)[:, None])
"""

from __future__ import annotations

from ..ir.cluster import Store
from ..ir.expr import Expr, Reduce
from .index import IndexSpace
from .loop_tape import LoopTape


class PeeledTape:
    """A tape for each of the two; what is one value a row is computed once."""

    def __init__(self, index: IndexSpace) -> None:
        assert index.ends is not None
        self.facts = index.facts
        self.middle = LoopTape(index)
        self.ends = LoopTape(index.ends, self.middle)

    def statement(self, node: Expr) -> list[str]:
        full = self.facts.full[node]
        lines = self._reduction(node) if isinstance(node, Reduce) else self.middle.statement(node)
        if full:
            return lines + self.ends.statement(node)
        if node in self.middle.names:
            self.ends.names[node] = self.middle.names[node]
            self.ends.narrow |= {node} & self.middle.narrow
        return lines

    def _reduction(self, node: Reduce) -> list[str]:
        whole = self.middle.finish(node, self.middle.guarded(node))
        lines, text = self.ends.together(node, whole, self.middle.guarded(node), self.middle)
        found = self.middle.uncentred(node)
        if found:
            text = self.middle.recentred(f"{self.middle.rest(found)} + {self.ends.rest(found)}", text)
        name = self.middle.names[node] = self.middle.fresh()
        return [*lines, f"{name} = {text}"]

    def store(self, store: Store) -> list[str]:
        facts = self.facts
        along = any((store.layout.strides or ())[facts.split :]) or facts.full[store.value]
        return self.middle.store(store) + (self.ends.store(store) if along else [])

    def column(self, store: Store, name: str) -> list[str]:
        ends = self.ends.column(store, f"end{name}") if self.facts.runs(store) else []
        return self.middle.column(store, name) + ends

    def partial(self, store: Store, name: str) -> tuple[list[str], list[str]]:
        """Return the statements that begin a column sum, and those that write it."""
        if not self.facts.runs(store):
            return self.middle.partial(store, name)
        first, last = self.middle.partial(store, name)
        first_end, last_end = self.ends.partial(store, f"end{name}")
        return first + first_end, last + last_end
