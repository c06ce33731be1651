"""Unaligned rows: rows that begin at odd addresses are cut into whole groups of 16 bytes and the few elements around
those.

In: a row reduction. Out: `Peel`, how such a row is cut, or None where nothing is gained.

    x of 1024 x 4097 bfloat16; row 1 begins 1 element behind a group of 8
      -> 7 elements  |  4088 in 511 groups, read and written 16 bytes at a time  |  2 elements

Triton makes a wide access only of addresses that it can prove to be multiples of 16 bytes, under a mask that is
constant over the group. So the row's address is rounded up to a group in the text of the kernel, the mask counts
groups, and what lies before and behind them (at most 7 elements each) is a second, small tile of the same statements.
Nothing outside the row is touched. An operand whose rows stand otherwise within a group (a weight, which begins at the
same place for every row) is read element by element as before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ..ir.cluster import Cluster, analysis
from ..ir.expr import Load, Random, Scan
from ..ir.layout import Layout
from ..ir.size import product
from .access import crossing

GROUP_BYTES = 16
LEAST = 32  # groups a row, from which the second tile costs little


@dataclass(frozen=True, slots=True)
class Peel:
    """`group`: elements of a group; `rows`: the layout whose rows give the groups their place."""

    group: int
    rows: Layout

    def follows(self, layout: Layout, parallel: int) -> bool:
        """Whether the rows of `layout` stand within a group as those of `rows` do, for every row."""
        strides, axes = layout.strides, layout.shape
        if strides is None or not is_flat(strides[parallel:], axes[parallel:]) or strides[-1] != 1:
            return False
        return min(*strides, layout.offset) >= 0 and place(layout, parallel, self.group) == place(
            self.rows, parallel, self.group
        )


@analysis
def peel(cluster: Cluster) -> Peel | None:
    """Return how the rows of `cluster` are cut: where most of what runs along them begins at odd addresses."""
    parallel, columns = len(cluster.parallel), product(cluster.reduce)
    if not cluster.reduce or cluster.segments or cluster.varies:
        return None
    if any(s.index for s in cluster.stores) or crossing(cluster) > 1 or not _combined_by_parts(cluster):
        return None
    accesses = {
        (n.buffer, n.layout, n.dtype.itemsize): None
        for n in cluster.order
        if isinstance(n, Load) and not n.index and not n.mask
    }
    accesses |= {(s.buffer, s.layout, s.dtype.itemsize): None for s in cluster.stores if not s.mode}
    along = [(lay, size) for _, lay, size in accesses if any((lay.strides or ())[parallel:])]
    group = max((GROUP_BYTES // max(2, size) for _, size in along), default=0)
    flat = [lay for lay, _ in along if Peel(group, lay).follows(lay, parallel)]
    if not flat or columns < LEAST * group:
        return None
    where, count = max(
        Counter(place(lay, parallel, group) for lay in flat).items(), key=lambda found: (found[1], any(found[0]))
    )
    if not any(where) or 2 * count < len(along):
        return None
    found = Peel(group, next(lay for lay in flat if place(lay, parallel, group) == where))
    return found if not cluster.programs or _stands_still(found, cluster) else None


def tile_columns(cluster: Cluster) -> int:
    """Return how many columns the tile of a whole row needs."""
    columns, found = product(cluster.reduce), peel(cluster)
    return columns // found.group * found.group if found else columns


def is_flat(strides: Sequence[int], extents: Sequence[int]) -> bool:
    """Whether several axes are one in memory: each stride is that of the next axis times its extent."""
    return all(a == b * n for a, b, n in zip(strides, strides[1:], extents[1:], strict=False))


def place(layout: Layout, parallel: int, group: int) -> tuple[int, ...]:
    """Return what decides where within a group a row begins."""
    return (*(stride % group for stride in (layout.strides or ())[:parallel]), layout.offset % group)


def _combined_by_parts(cluster: Cluster) -> bool:
    # those are drawn four at a time, or handed on, along a whole tile
    return not any(isinstance(n, (Random, Scan)) for n in cluster.order)


def _stands_still(found: Peel, cluster: Cluster) -> bool:
    """Whether all rows of a program begin at the same place within a group: its column sums stay where they are
    then.
    """
    strides = (found.rows.strides or ())[: len(cluster.parallel)]
    return len(strides) == 1 and strides[0] * cluster.programs % found.group == 0
