"""Pointwise: one tile of neighbours a program, over all elements.

In: a cluster without a reduction. Out: one schedule, whose tile keeps the device full.

    1,048,576 elements of two buffers on 132 multiprocessors  ->  XBLOCK 1024, 4 warps
"""

from __future__ import annotations

from dataclasses import replace

from ..codegen.ir.analysis import power_of_two, row_operands
from ..codegen.ir.cluster import Cluster
from ..codegen.ir.expr import Expr
from ..codegen.ir.size import AnySize, product
from ..codegen.schedule.choice import Schedule
from ..codegen.schedule.device import Device
from .base import PROGRAM, Template


def tile_pointwise(cluster: Cluster, device: Device) -> list[Schedule]:
    size = product(cluster.axes)
    buffers = len(cluster.reads) + len(cluster.writes)
    full = 2 * device.sms
    block = 1024 if size >= full * 1024 and buffers <= 8 else 512 if size >= full * 512 else 256
    block = min(block, power_of_two(size))
    return [Schedule("pointwise", (("XBLOCK", block),), max(1, block // 256))]


class Pointwise(Template[Cluster]):
    name, prefix = "pointwise", "flat"
    begins, sides = {"x": PROGRAM}, {"x": ""}

    def applies(self, cluster: Cluster) -> bool:
        return not cluster.reduce

    def tiles(self, cluster: Cluster, device: Device) -> list[Schedule]:
        return tile_pointwise(cluster, device)

    def single(self, cluster: Cluster) -> set[Expr]:
        return super().single(cluster) | set(row_operands(cluster))  # a tile crosses rows

    def varying(self, model: Cluster, length: AnySize, device: Device) -> Schedule:
        tiles = self.choose(model, device)
        block = max(256, tiles["XBLOCK"])  # a block for this call alone would be a small one
        return replace(tiles, blocks=(("XBLOCK", block),), num_warps=block // 256)


TEMPLATE = Pointwise()
