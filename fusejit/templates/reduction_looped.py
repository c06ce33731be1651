"""Looped reduction: a row longer than registers hold, tile by tile.

In: a cluster that reduces. Out: schedules whose tiles walk along the row, some with loads under way for later
iterations.

    rows of 262,144 columns  ->  XBLOCK 1 RBLOCK 4096, 16 warps, 2 stages
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..codegen.ir.analysis import column_reduction, columns_at_once, full, power_of_two
from ..codegen.ir.cluster import Cluster
from ..codegen.ir.size import AnySize, most, product
from ..codegen.schedule.access import crossing
from ..codegen.schedule.choice import Schedule
from ..codegen.schedule.device import Device
from ..codegen.schedule.unaligned_rows import peel
from .base import PROGRAM, Body, Reducing
from .reduction_persistent import group_of

STAGED = 65536  # bytes of shared memory for the stages of a loop
LONG_TILE = 32  # elements of a thread from which a loop over segments keeps one sum for all of them
LONG_LOOP = 1024  # what a loop whose length varies is tiled for, at least


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


class ReductionLooped(Reducing):
    name, prefix = "reduction_looped", "loop"
    begins = {"x": PROGRAM, "r": "start"}
    loops = True

    def applies(self, cluster: Cluster) -> bool:
        return True

    def tiles(self, cluster: Cluster, device: Device) -> list[Schedule]:
        return tile_looped(cluster, device)

    def varying(self, model: Cluster, length: AnySize, device: Device) -> Schedule:
        if isinstance(length, int):
            return self.choose(model, device)
        known = max(product(model.reduce), min(LONG_LOOP, most(length)))  # as for longer ones
        return self.choose(replace(model, reduce=(known, *(1 for _ in model.reduce[1:]))), device)

    def adds_tiles_up(self, cluster: Cluster, tiles: Schedule) -> bool:
        """Whether segments are long: beside so many elements a thread has no room for their sums."""
        return cluster.segments > 0 and tiles["RBLOCK"] >= LONG_TILE * 32 * tiles.num_warps

    def in_passes(self, columns: AnySize, tiles: Schedule) -> bool:
        return True

    def fields(self, body: Body) -> dict[str, Any]:
        many, each = body.cluster.segment
        columns = many * power_of_two(each) if body.cluster.segments else many * each
        return {"passes": body.passes(), "span": body.loop(f"0, {columns}, RBLOCK"), "rows": []}


TEMPLATE = ReductionLooped()
