"""Foreach reduction: the same reduction of many tensors in one launch.

In: a group of clusters of one pattern that reduces. Out: one schedule, whose programs loop over a chunk of a tensor.

    100 tensors of 1,000,000 float32  ->  XBLOCK 1 RBLOCK 4096, 8 warps
"""

from __future__ import annotations

from typing import Any

from ..codegen.ir.graph import Foreach
from ..codegen.ir.size import AnySize
from ..codegen.schedule.choice import Schedule
from ..codegen.schedule.device import Device
from .base import Body, Template


class ForeachReduction(Template[Foreach]):
    name, prefix, takes = "foreach_reduction", "each", Foreach
    begins = {"r": "start"}
    loops = True

    def applies(self, group: Foreach) -> bool:
        return group.chunk > 0

    def tiles(self, group: Foreach, device: Device) -> list[Schedule]:
        block = min(2048 if sum(s != 0 for s in group.rows[0].strides) > 2 else 4096, max(16, group.chunk))
        return [Schedule("foreach_reduction", (("XBLOCK", 1), ("RBLOCK", block)), max(1, block // 512))]

    def in_passes(self, columns: AnySize, tiles: Schedule) -> bool:
        return True

    def fields(self, body: Body) -> dict[str, Any]:
        return {"passes": body.passes()}


TEMPLATE = ForeachReduction()
