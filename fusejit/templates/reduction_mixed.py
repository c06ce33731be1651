"""Mixed reduction: a fixed number of programs walk over rows, reduce each, and add up columns on the way.

In: a cluster of row and column reductions (passes/row_column.py). Out: schedules that hold a row and its column sums in
registers.

    layer norm backward, 16,384 rows of 4,096 columns  ->  XBLOCK 1 RBLOCK 4096, 16 warps, 2 stages, 264 programs
"""

from __future__ import annotations

from typing import Any

from ..codegen.ir.analysis import full, power_of_two
from ..codegen.ir.cluster import Cluster
from ..codegen.ir.size import AnySize, hint, product
from ..codegen.schedule.access import crossing
from ..codegen.schedule.choice import Schedule
from ..codegen.schedule.device import Device
from ..codegen.schedule.registers import column_sums
from ..codegen.schedule.unaligned_rows import peel, tile_columns
from .base import Body, Reducing
from .reduction_persistent import fits_kept, group_of

WALKED = 4096  # columns of a tile that 16 warps walk with
WALKED_BYTES = {16: 32768, 8: 65536}  # {warps: bytes of a row that they read twice without spills}
HELD_BYTES = 163840  # bytes of such a row and of its column sums together


def tile_mixed(cluster: Cluster, device: Device) -> list[Schedule]:
    columns, rows, group = power_of_two(tile_columns(cluster)), product(cluster.parallel), group_of(peel(cluster))
    if fits_mixed(cluster, device.mixed_values):
        most, warps = (
            power_of_two(-(-rows // cluster.programs)),
            8 if group else 16,
        )  # the ends of a row take registers of their own
        rows_at_once = dict.fromkeys(
            1 if group else max(crossing(cluster), min(tile // columns, most)) for tile in (512, 1024, 2048)
        )
        return [
            Schedule(
                "reduction_mixed",
                (("XBLOCK", n), ("RBLOCK", columns)),
                min(warps, max(1, n * columns // 256)),
                stages,
                peel=group,
            )
            for n in rows_at_once
            for stages in (2, 1)
        ]
    if fits_kept(cluster, device.mixed_values):
        return [Schedule("reduction_mixed", (("XBLOCK", 1), ("RBLOCK", columns)), 16, keep=True)]
    # fewer threads have fewer addresses beside the sums; a row that is too long for them is refused later
    walks = [warps for warps, most in WALKED_BYTES.items() if _row_bytes(cluster) <= most] or [min(WALKED_BYTES)]
    return [Schedule("reduction_mixed", (("XBLOCK", 1), ("RBLOCK", WALKED * warps // 16)), warps) for warps in walks]


def fits_mixed(cluster: Cluster, values: int) -> bool:
    """Whether a program of a mixed reduction keeps its row in registers, besides the column sums."""
    return (
        power_of_two(tile_columns(cluster)) * crossing(cluster) * max(1, column_sums(cluster) + cluster.held) <= values
    )


def even_rows(cluster: Cluster) -> bool:
    """Whether every row that is read or written begins at a multiple of 16 bytes."""
    split = len(cluster.parallel)
    strides = [(s, n.dtype.itemsize) for n in full(cluster) for s in (n.layout.strides or ())[:split]]
    strides += [(n, s.dtype.itemsize) for s in cluster.stores for n in (s.layout.strides or ())[:split] if n != 1]
    return all(stride * size % 16 == 0 for stride, size in strides)


def refused_walk(cluster: Cluster, values: int) -> str:
    """Return why no program of a mixed reduction can walk over these rows, "" if one can: once in registers, or twice
    in a few tiles.
    """
    columns, sums = product(cluster.reduce), column_sums(cluster)
    if fits_mixed(cluster, values) or fits_kept(cluster, values):
        return ""
    if crossing(cluster) > 1:
        return (
            f"an operand crosses rows of {columns}: of {crossing(cluster)} of them and their column sums no program "
            "keeps a tile"
        )
    if power_of_two(columns) * sums > values:
        return f"{sums} column sums of rows of {columns} do not fit in the registers of a program"
    if _row_bytes(cluster) > max(WALKED_BYTES.values()) or _row_bytes(cluster) + 4 * columns * sums > HELD_BYTES:
        return f"rows of {columns} leave a program that keeps their column sums no registers to read them with"
    if not even_rows(cluster):
        return f"rows of {columns} that begin at odd addresses take too many registers, read once and summed both ways"
    return ""


def _row_bytes(cluster: Cluster) -> int:
    return product(cluster.reduce) * max(n.dtype.itemsize for n in full(cluster))


class ReductionMixed(Reducing):
    name, prefix = "reduction_mixed", "both"
    begins = {"x": "first", "r": "@ * RBLOCK"}

    def applies(self, cluster: Cluster) -> bool:
        return cluster.programs > 0

    def tiles(self, cluster: Cluster, device: Device) -> list[Schedule]:
        return tile_mixed(cluster, device)

    def in_passes(self, columns: AnySize, tiles: Schedule) -> bool:
        return columns > tiles["RBLOCK"]

    def grid(self, cluster: Cluster, tiles: Schedule) -> tuple[int, int, int]:
        return (hint(cluster.programs), 1, 1)

    def fields(self, body: Body) -> dict[str, Any]:
        return body.walk()


TEMPLATE = ReductionMixed()
