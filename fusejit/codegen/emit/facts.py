"""Facts: what all writers of one kernel ask of its cluster, analysed once.

In: a scheduled cluster, its buffers and their pointers. Out: `Facts`.

    facts.levels[node]  how many reductions lie below a value, one above the other: the pass that has it
    facts.rows[node]    whether a value differs from row to row of the tile
"""

from __future__ import annotations

from collections.abc import Iterable

from ...templates.table import named
from ..ir.analysis import along_row
from ..ir.cluster import Cluster, Store
from ..ir.concretize import hinted_most
from ..ir.expr import Compute, Expr, Iota, Load, Reduce, children
from ..ir.graph import Buffer
from ..ir.layout import reach
from ..ir.size import product
from ..ops.table import STORAGE
from ..passes.online import Shifted, in_one_pass
from ..schedule.choice import Schedule
from ..schedule.registers import kept
from ..schedule.unaligned_rows import peel, tile_columns


class Facts:
    """A cluster, how it is tiled, and what the statements of its kernel depend on.

    Attributes:
        pointers: {buffer: the parameter that points to it}. exact: whether every op rounds as eager's does.
        peel: how rows at odd addresses are cut. tiles_a_row: how many tiles a row of fixed length has.
        levels, full: of each value, the reductions below it, and whether it varies along the row.
        kept: {load of a row that stays in registers: its name}. online: sums whose shift is not known yet.
        rows: whether a value has a row for each row of the tile. rounded: values that their store rounds.
        wide: whether offsets need 64 bits.
    """

    def __init__(
        self, cluster: Cluster, tiles: Schedule, buffers: dict[str, Buffer], pointers: dict[str, str], numerics: str
    ) -> None:
        self.cluster, self.tiles, self.buffers, self.pointers = cluster, tiles, buffers, pointers
        self.template = named(tiles.template)
        self.exact = numerics == "eager"
        self.split = len(cluster.parallel)
        sized = hinted_most(cluster) if tiles.peel else cluster
        self.peel = peel(sized) if tiles.peel else None
        self.levels, self.full = cluster.levels, cluster.full
        self.kept: dict[Load, str] = {n: f"row{i}" for i, n in enumerate(kept(cluster))} if tiles.keep else {}
        self.online: dict[Expr, Shifted] = {}
        length = product(cluster.reduce)
        columns = tile_columns(sized) if tiles.peel else length
        fixed = isinstance(length, int)  # of a row whose length varies nobody knows how many tiles it has
        self.tiles_a_row = -(-columns // tiles["RBLOCK"]) if cluster.reduce and fixed else 1
        if cluster.reduce and fixed and self.template.in_passes(columns, tiles):  # a pass more where the length varies
            self.levels, self.online = in_one_pass(cluster, self.exact)
        self.rows: dict[Expr, bool] = {}
        for node in cluster.order:
            runs = isinstance(node, (Load, Iota)) and any((node.layout.strides or ())[: self.split])
            self.rows[node] = isinstance(node, Reduce) or runs or any(self.rows[c] for c in children(node))
        self.rounded = _rounded(cluster)
        # bytes bound offsets, negative ones too
        places = (reach(n.layout) for n in cluster.order if isinstance(n, Iota))
        self.wide = any(n >= 2**31 for n in (product(cluster.axes), *places, *(buffers[n].bytes for n in pointers)))

    @property
    def widening(self) -> str:
        return ".to(tl.int64)" if self.wide else ""

    def runs(self, store: Store) -> bool:
        """Whether a store is made for each element of the row: places differ, or all of them are added to one."""
        places = any((store.layout.strides or ())[self.split :]) or any(self.full[e] for e, _ in store.index)
        return places or bool(store.mode) and self.full[store.value]

    def inputs(self, node: Reduce) -> tuple[Expr, ...]:
        """Return what a loop reads to reduce: a shifted sum needs the values that are shifted, not the shift."""
        return self.online[node].reads if node in self.online else node.args

    def stored_at(self, store: Store, top: int) -> int:
        """Return the pass that stores: what is overwritten in place must have been read by every pass before."""
        return top if self.buffers[store.buffer].written_to else self.levels[store.value]

    def inside(self, roots: Iterable[Expr]) -> list[Expr]:
        """Return the nodes that vary along the row, down to what was computed outside the loop."""
        return along_row(list(roots), self.cluster)


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
