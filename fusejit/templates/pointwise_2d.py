"""Pointwise in two dimensions: tiles for operands that run in different directions.

In: a cluster without a reduction, two of whose operands run fastest along different axes. Out: a tile of whole lines in
both directions.

    x (8192,8192).t() -> y  load x  1 8192,  store y  8192 1  YBLOCK 64 XBLOCK 64: each side moves runs of 128 bytes
"""

from __future__ import annotations

from ..codegen.ir.analysis import LINE, fast_axis, operands, power_of_two
from ..codegen.ir.cluster import Cluster
from ..codegen.ir.concretize import hinted
from ..codegen.ir.layout import permute
from ..codegen.ir.size import product
from ..codegen.schedule.choice import Schedule
from ..codegen.schedule.device import Device
from .base import COLUMN, ROW, Template, lines_and_columns

ELEMENTS = 512  # of a tile, for each warp: 16 a thread


def second_axis(cluster: Cluster) -> int | None:
    """Return the axis, other than the innermost, along which an operand of the whole size has stride 1."""
    axes = cluster.axes
    last = len(axes) - 1
    if last < 1 or axes[last] < 16:
        return None
    for operand in operands(cluster):
        strides = operand.layout.strides or ()
        axis = fast_axis(strides, axes)
        if axis not in (None, last) and axes[axis] >= 16 and strides[last] != 1:
            return axis
    return None


def _run(cluster: Cluster, axis: int) -> int:
    """Return how many elements along `axis` are a line of the narrowest operand that runs there."""
    sizes = [o.dtype.itemsize for o in operands(cluster) if fast_axis(o.layout.strides, cluster.axes) == axis]
    return LINE // min(sizes, default=4)


def tiles_2d(cluster: Cluster, device: Device) -> list[Schedule]:
    """Return a tile of whole lines in both directions; smaller ones where the device would not be full."""
    axes, last = cluster.axes, len(cluster.axes) - 1
    second = second_axis(cluster)
    assert second is not None
    rows, columns = product(axes) // axes[last], axes[last]
    y = min(128, _run(cluster, second), power_of_two(axes[second]))
    x = min(128, max(64, _run(cluster, last)), power_of_two(columns))
    while max(x, y) > 32 and -(-rows // y) * -(-columns // x) < 2 * device.sms:
        x, y = (x // 2, y) if x > y else (x, y // 2)
    return [Schedule("pointwise_2d", (("YBLOCK", y), ("XBLOCK", x)), max(1, min(8, x * y // ELEMENTS)))]


class Pointwise2d(Template[Cluster]):
    name, prefix = "pointwise_2d", "tile"
    begins = {
        "y": "(tl.program_id(0) // {across}){wide} * YBLOCK",
        "x": "(tl.program_id(0) % {across}){wide} * XBLOCK",
    }
    sides = {"y": COLUMN, "x": ROW}

    def applies(self, cluster: Cluster) -> bool:
        """Two operands of some size run fastest along different axes, both long enough for a tile."""
        return not cluster.reduce and second_axis(cluster) is not None

    def tiles(self, cluster: Cluster, device: Device) -> list[Schedule]:
        return tiles_2d(cluster, device)

    def groups(self, cluster: Cluster) -> dict[str, list[int]]:
        return lines_and_columns(cluster)

    def arranged(self, cluster: Cluster) -> Cluster:
        """Return the cluster with the second axis last but one."""
        axis, rank = second_axis(hinted(cluster)), len(cluster.axes)
        assert axis is not None
        new = [*(a for a in range(rank) if a not in (axis, rank - 1)), axis, rank - 1]
        return cluster.map(permute(cluster.axes, new), [cluster.axes[a] for a in new], [])


TEMPLATE = Pointwise2d()
