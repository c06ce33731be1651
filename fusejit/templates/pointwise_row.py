"""Pointwise by rows: operands with one value for each row are read once a program, as a scalar.

In: a cluster without a reduction that has such operands, over rows of some length. Out: a tile that divides a row with
little waste.

    x (4096, 3072) * scale (4096, 1)   ->  XBLOCK 1024: three programs a row, each reads its scale once
"""

from __future__ import annotations

from typing import Any

from ..codegen.ir.analysis import row_operands
from ..codegen.ir.cluster import Cluster
from ..codegen.ir.size import AnySize
from ..codegen.schedule.choice import Schedule
from ..codegen.schedule.device import Device
from . import pointwise
from .base import Body, Template, lines_and_columns

WASTE = 4  # the last tile of a row may stand over its end by one part in so many


def rows_of_one_value(cluster: Cluster) -> bool:
    """Operands with one value for each row, and rows long enough for programs of their own that read and check it once,
    as a scalar.
    """
    even = bool(row_operands(cluster)) and cluster.axes[-1] % 8 == 0  # rows of whole groups keep wide loads
    return (
        even
        and bool(_parts(cluster.axes[-1]))
        and all((s.layout.strides or (0,))[-1] and not (s.index or s.mode) for s in cluster.stores)
    )


def tile_row(cluster: Cluster, device: Device) -> list[Schedule]:
    return [Schedule("pointwise_row", (("XBLOCK", n),), n // 256) for n in _parts(cluster.axes[-1])[:1]]


def _parts(columns: int) -> list[int]:
    """Return the tiles, largest first, that a row is cut into without much standing over its end."""
    return [n for n in (1024, 512) if -columns % n * WASTE <= columns]


class PointwiseRow(Template[Cluster]):
    name, prefix = "pointwise_row", "line"
    begins, sides = {"x": "first"}, {"x": ""}
    scalars = frozenset("y")

    def applies(self, cluster: Cluster) -> bool:
        return rows_of_one_value(cluster)

    def tiles(self, cluster: Cluster, device: Device) -> list[Schedule]:
        return tile_row(cluster, device)

    def varying(self, model: Cluster, length: AnySize, device: Device) -> Schedule:
        return pointwise.TEMPLATE.varying(model, length, device)  # a row may come to end within a tile

    def groups(self, cluster: Cluster) -> dict[str, list[int]]:
        return lines_and_columns(cluster)

    def fields(self, body: Body) -> dict[str, Any]:
        return super().fields(body) | {"tiles": self.count("x", body.cluster, body.tiles)}


TEMPLATE = PointwiseRow()
