"""Persistent reduction: a program holds whole rows in registers, and reads each of them once.

In: a cluster that reduces rows which registers hold, or short columns. Out: schedules by rows a program and warps.

    softmax over 8,192 columns  ->  XBLOCK 1 RBLOCK 8192, 8 warps
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..codegen.ir.analysis import MAX_ROW, column_reduction, full, power_of_two, scans, used_again
from ..codegen.ir.cluster import Cluster
from ..codegen.ir.expr import Random, Scan
from ..codegen.ir.size import AnySize, product
from ..codegen.schedule.access import at_least, crossing
from ..codegen.schedule.choice import Schedule
from ..codegen.schedule.device import Device
from ..codegen.schedule.registers import column_sums, kept_values
from ..codegen.schedule.unaligned_rows import Peel, peel, tile_columns
from .base import PROGRAM, Body, Reducing

WARP_VALUES = 32 * 4  # a tile that gives each lane of a warp 16 bytes of float32


def persistent(cluster: Cluster) -> bool:
    if not cluster.reduce:
        return False
    columns = product(cluster.reduce)
    if column_reduction(cluster):
        return columns <= 64 or kept_upright(cluster)
    return in_registers(cluster)


def kept_upright(cluster: Cluster) -> bool:
    """Whether the columns of a column reduction are read more than once, and a sector of each row of them fits in
    registers.
    """
    if scans(cluster) or cluster.segments:
        return False
    along = any(cluster.levels[s.value] and cluster.full[s.value] for s in cluster.stores)
    tile = power_of_two(product(cluster.reduce)) * least_columns(cluster) * max(1, cluster.held)
    return (along or max(cluster.levels.values()) > 1) and tile <= MAX_ROW // 2


def least_columns(cluster: Cluster) -> int:
    """Return how many columns of a column reduction a program reads at least."""
    return at_least(min((n.dtype.itemsize for n in full(cluster)), default=4), cluster, MAX_ROW // 2)


def in_registers(cluster: Cluster) -> bool:
    """Whether a program holds a row, as it is computed with or as it was loaded."""
    return _fits(cluster) or fits_kept(cluster, MAX_ROW)


def row_tile(cluster: Cluster) -> int:
    """Return the elements of a tile that holds a row: its whole groups if it is peeled, each of its segments padded to
    a power of two.
    """
    many, each = cluster.segment
    return power_of_two(many) * power_of_two(each) if cluster.segments else power_of_two(tile_columns(cluster))


def _fits(cluster: Cluster) -> bool:
    columns = row_tile(cluster)
    held = max(
        2 if scans(cluster) else 1, cluster.held
    )  # a scan keeps its row besides what it makes of it; in a loop it reads it once too
    columns *= crossing(cluster)
    return columns * held <= MAX_ROW and columns * _loaded(cluster) <= 1.5 * MAX_ROW


def _loaded(cluster: Cluster) -> float:
    """Return how many 32-bit values a column takes while everything that differs from row to row is being loaded.

    What is one value for a run of neighbours is loaded where it is used.
    """
    split = len(cluster.parallel)
    strides = [(n, n.layout.strides or ()) for n in full(cluster)]
    rows = {(n.buffer, n.layout): n for n, steps in strides if any(steps[:split]) and (n.index or steps[-1])}
    return sum(n.dtype.itemsize for n in rows.values()) / 4


def fits_kept(cluster: Cluster, values: int) -> bool:
    """Whether a row fits in registers as it was loaded, beside its column sums; what several passes need is not drawn
    again for each.
    """
    if (
        cluster.segments
        or cluster.varies
        or peel(cluster)
        or crossing(cluster) > 1
        or any(isinstance(n, Scan) for n in cluster.order)
    ):
        return False
    if any(isinstance(n, Random) for n in used_again(cluster)):
        return False
    split = len(cluster.parallel)
    written = [s.dtype.itemsize / 4 for s in cluster.stores if not s.reduces and any((s.layout.strides or ())[split:])]
    sums, columns = column_sums(cluster), power_of_two(product(cluster.reduce))
    # beside column sums all that is read along the row has to find registers, too; so has a row that waits while
    # another is written
    each = (sums + _read(cluster) if sums else kept_values(cluster)) + sum(sorted(written)[:-1])
    return columns * each <= (1.25 if sums else 1) * values and columns * _loaded(cluster) <= 1.5 * values


def _read(cluster: Cluster) -> float:
    """Return how many 32-bit values a column takes as it was loaded, what is the same for all rows included."""
    return sum(n.dtype.itemsize for n in {(n.buffer, n.layout): n for n in full(cluster)}.values()) / 4


def group_of(found: Peel | None) -> int:
    return found.group if found else 0


def tile_persistent(cluster: Cluster, device: Device) -> list[Schedule]:
    rows, columns = product(cluster.parallel), row_tile(cluster)
    if column_reduction(cluster):
        columns = columns if cluster.segments else power_of_two(product(cluster.reduce))
        if columns > 64:
            return [_tile_upright(cluster, columns, rows, device)]
        across = _columns_a_program(min(max(8, min(64, 4096 // columns)), power_of_two(rows)), rows, device)
        warps = min(16, max(1, across * columns * min(4, max(1, len(full(cluster)))) // 1024))
        return [Schedule("reduction_persistent", (("XBLOCK", across), ("RBLOCK", columns)), power_of_two(warps))]
    found, group = [], group_of(peel(cluster))
    if not _fits(cluster):
        return [Schedule("reduction_persistent", (("XBLOCK", 1), ("RBLOCK", columns)), 16, keep=True)]
    if (least := crossing(cluster)) > 1:
        return _tiles_crossed(columns, least, MAX_ROW // max(1, cluster.held))
    for across in (1 << n for n in range(7)):
        small = across * columns <= WARP_VALUES  # less would leave lanes of the one warp without a value
        if across > 1 and (
            across * columns > 4096 or across > power_of_two(rows) or (rows // across < 2 * device.sms and not small)
        ):
            break
        for warps in (1, 2, 4, 8, 16):
            each = across * columns // (32 * warps)
            if 4 <= each <= 32 or (warps == 1 and each < 4) or (warps == 16 and each > 32):
                found.append(
                    Schedule("reduction_persistent", (("XBLOCK", across), ("RBLOCK", columns)), warps, peel=group)
                )
    return found


def _tile_upright(cluster: Cluster, columns: int, rows: int, device: Device) -> Schedule:
    least = least_columns(cluster)
    room = max(1, MAX_ROW // 2 // (columns * max(1, cluster.held)))
    most = min(64, power_of_two(rows), max(least, 1 << room.bit_length() - 1))
    across = _columns_a_program(most, rows, device)
    return Schedule(
        "reduction_persistent", (("XBLOCK", across), ("RBLOCK", columns)), max(1, min(16, across * columns // 1024))
    )


def _tiles_crossed(columns: int, least: int, values: int) -> list[Schedule]:
    """Return tiles of several whole rows, read along the columns and along the rows."""
    found = []
    for across in (least, 2 * least, 4 * least):
        if across > least and across * columns > values // 2:
            break
        warps = [w for w in (1, 2, 4, 8, 16) if 8 <= across * columns // (32 * w) <= 32] or [
            16 if across * columns > 1024 else 1
        ]
        found += [Schedule("reduction_persistent", (("XBLOCK", across), ("RBLOCK", columns)), w) for w in warps]
    return found


def _columns_a_program(most: int, rows: int, device: Device) -> int:
    """Return how many columns a program of a column reduction takes: fewer, where the device would not be full."""
    while most > 8 and rows // most < device.sms:
        most //= 2  # 8 columns are the 32 bytes that memory hands out at once
    return most


class ReductionPersistent(Reducing):
    name, prefix = "reduction_persistent", "row"
    begins = {"x": PROGRAM, "r": "0"}

    def applies(self, cluster: Cluster) -> bool:
        return persistent(cluster)

    def tiles(self, cluster: Cluster, device: Device) -> list[Schedule]:
        return tile_persistent(cluster, device)

    def varying(self, model: Cluster, length: AnySize, device: Device) -> Schedule:
        """Return a schedule with a bucket for each power of two that the length of a row may fall under."""
        tiles = self.choose(model, device)
        if isinstance(length, int):
            return tiles
        longest = 1 << (MAX_ROW // max(1, model.held)).bit_length() - 1
        if length > longest:  # not in this call; from now on an assumption
            raise AssertionError("a persistent reduction was chosen for a row that is too long")
        buckets = []
        for limit in (1 << n for n in range(longest.bit_length())):
            other = replace(model, reduce=(limit, *(1 for _ in model.reduce[1:])))
            buckets.append((limit, replace(self.choose(other, device), choice=None)))
        return replace(tiles, buckets=tuple(buckets))

    def fields(self, body: Body) -> dict[str, Any]:
        return {"rows": [body.kept_row()]} if body.tiles.keep else super().fields(body)


TEMPLATE = ReductionPersistent()
