"""Pointwise: one tile of neighbours a program, over all elements.

In: a cluster without a reduction. Out: one schedule, whose tile keeps the device full.

    1,048,576 elements of two buffers on 132 multiprocessors  ->  XBLOCK 1024, 4 warps
"""

from __future__ import annotations

from ..codegen.ir.analysis import power_of_two
from ..codegen.ir.cluster import Cluster
from ..codegen.ir.size import product
from ..codegen.schedule.choice import Schedule
from ..codegen.schedule.device import Device


def pointwise(cluster: Cluster) -> bool:
    return not cluster.reduce


def tile_pointwise(cluster: Cluster, device: Device) -> list[Schedule]:
    size = product(cluster.axes)
    buffers = len(cluster.reads) + len(cluster.writes)
    full = 2 * device.sms
    block = 1024 if size >= full * 1024 and buffers <= 8 else 512 if size >= full * 512 else 256
    block = min(block, power_of_two(size))
    return [Schedule("pointwise", (("XBLOCK", block),), max(1, block // 256))]
