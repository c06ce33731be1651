"""Looped reduction: a row longer than registers hold, tile by tile.

In: a cluster that reduces. Out: schedules whose tiles walk along the row, some with loads under way for later
iterations.

    rows of 262,144 columns  ->  XBLOCK 1 RBLOCK 4096, 16 warps, 2 stages
"""

from __future__ import annotations

from ..codegen.ir.analysis import column_reduction, columns_at_once, full, power_of_two
from ..codegen.ir.cluster import Cluster
from ..codegen.ir.size import product
from ..codegen.schedule.access import crossing
from ..codegen.schedule.choice import Schedule
from ..codegen.schedule.device import Device
from ..codegen.schedule.unaligned_rows import peel
from .reduction_persistent import group_of

STAGED = 65536  # bytes of shared memory for the stages of a loop


def _even_columns(cluster: Cluster) -> bool:
    """Whether a column reduction reads each row from a multiple of 16 bytes on; otherwise each element takes an address
    of its own.
    """
    split = len(cluster.parallel)
    return all(s * n.dtype.itemsize % 16 == 0 for n in full(cluster) for s in (n.layout.strides or ())[split:])


def _even_runs(cluster: Cluster) -> bool:
    """Whether every run of neighbours in a row begins at a multiple of 16 bytes: a copy ahead of any other takes an
    address an element.
    """
    runs = [n for n in full(cluster) if (n.layout.strides or (0,))[-1]]
    return all(s * n.dtype.itemsize % 16 == 0 for n in runs for s in (n.layout.strides or ())[:-1])


def tile_looped(cluster: Cluster, device: Device) -> list[Schedule]:
    rows, columns = product(cluster.parallel), power_of_two(product(cluster.reduce))
    moved = sum(n.dtype.itemsize for n in full(cluster))
    if column_reduction(cluster) or crossing(cluster) > 1:
        across = min(columns_at_once(cluster), power_of_two(rows))
        least = max(8, 32 // max((n.dtype.itemsize for n in full(cluster)), default=4))
        while across > least and rows // across < device.sms:
            across //= 2  # down to the 32 bytes that memory hands out at once
        return [
            Schedule(
                "reduction_looped",
                (("XBLOCK", across), ("RBLOCK", min(columns, tile // across))),
                8 * tile // 4096 or 4,
                stages,
            )
            for tile in ((2048, 4096, 8192) if _even_columns(cluster) else (2048, 4096))
            for stages in (1, 2, 3)
            if stages == 1 or stages * tile * moved <= STAGED
        ]
    whole = power_of_two(cluster.segment[1]) if cluster.segments else 1  # a tile holds whole segments
    sizes = dict.fromkeys(
        (16 if block < whole else warps, max(block, whole))
        for warps, block in ((8, 2048), (8, 4096), (16, 4096), (16, 8192))
    )
    group = group_of(peel(cluster))
    ahead = (1, 2, 3) if group or _even_runs(cluster) else (1,)
    return [
        Schedule(
            "reduction_looped", (("XBLOCK", 1), ("RBLOCK", min(block, max(columns, whole)))), warps, stages, peel=group
        )
        for warps, block in sizes
        for stages in ahead
        if stages == 1 or stages * block * moved <= STAGED
    ]
