"""Foreach: the same pointwise ops on many tensors in one launch.

In: a group of clusters of one pattern. Out: one schedule, whose programs take many elements each: a program first walks
through all rows of its kernel.

    200 tensors of 4,096 float32  ->  XBLOCK 2048, 4 warps
"""

from __future__ import annotations

from ..codegen.ir.analysis import power_of_two
from ..codegen.ir.graph import Foreach
from ..codegen.schedule.choice import Schedule
from ..codegen.schedule.device import Device
from .base import Template

MANY = 8  # tensors a row, from which a program takes fewer elements of each


class ForeachTensor(Template[Foreach]):
    name, prefix, takes = "foreach", "each", Foreach

    def applies(self, group: Foreach) -> bool:
        return not group.chunk

    def tiles(self, group: Foreach, device: Device) -> list[Schedule]:
        total = sum(row.size for row in group.rows)
        tensors = sum(s != 0 for s in group.rows[0].strides)
        sizes = ((2048,) if tensors <= MANY else ()) + (1024, 512)
        block = next((b for b in sizes if total >= 2 * device.sms * b), 256)
        block = max(16, min(block, power_of_two(max(row.size for row in group.rows))))
        return [Schedule("foreach", (("XBLOCK", block),), max(1, block // 512))]


TEMPLATE = ForeachTensor()
