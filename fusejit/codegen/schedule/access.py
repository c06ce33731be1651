"""Access: how many rows a tile needs so that what crosses the rows is read a line at a time.

In: a cluster that reduces rows. Out: the rows that a sector of memory holds of an operand which crosses them.

    norm(x.transpose(1,2) + y)  load x  1 | 1024,  load y  1024 |
        1  XBLOCK 16 RBLOCK 1024: x is read 32 bytes at a time, not 2

Within a kernel a tile changes its layout in shared memory; Triton does that where each access has the layout in which
it is contiguous.
"""

from __future__ import annotations

from ..ir.analysis import MAX_ROW, SECTOR, fast_axis, operands, power_of_two, scans
from ..ir.cluster import Cluster, analysis
from ..ir.size import product


@analysis
def crossing(cluster: Cluster) -> int:
    """Return how many rows of a row reduction a tile needs at least: 1, or those that a sector holds of an operand that
    crosses them.

    Half of them where that lets a row stay in registers: the other half of the sector is in L2 when the next program
    reads it.
    """
    split, axes = len(cluster.parallel), cluster.axes
    if not split or not cluster.reduce or axes[split - 1] < 2 or cluster.segments or scans(cluster):
        return 1
    crossed = [o.dtype.itemsize for o in operands(cluster) if fast_axis(o.layout.strides, axes) == split - 1]
    return min(at_least(min(crossed), cluster, MAX_ROW), power_of_two(axes[split - 1])) if crossed else 1


def at_least(size: int, cluster: Cluster, most: int) -> int:
    """Return how many neighbours of `size` bytes are read at once: a sector's, or half as many if a tile of `most`
    elements has no room.
    """
    row, whole = power_of_two(product(cluster.reduce)) * max(1, cluster.held), SECTOR // size
    return whole if row * whole <= most or row * (whole // 2) > most else max(1, whole // 2)
