"""Crossing: which way memory runs in each operand, and tiles for operands that run in different directions.

In: a cluster. Out: its second fast axis, 2-D tiles, and how many rows a tile needs so that what crosses the rows is read a line at a time.

    x (8192,8192).t() -> y         load x  1 8192,  store y  8192 1        YBLOCK 64 XBLOCK 64: each side moves runs of 128 bytes
    norm(x.transpose(1,2) + y)     load x  1 | 1024,  load y  1024 | 1     XBLOCK 16 RBLOCK 1024: x is read 32 bytes at a time, not 2

Within a kernel a tile changes its layout in shared memory; Triton does that where each access has the layout in which it is contiguous.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .cluster import Cluster, Load, Store, leaves
from .cost import Device, Schedule
from .scans import scans
from .size import product

LINE = 128  # bytes of a line of the cache
SECTOR = 32  # bytes that memory hands out at once
MAX_ROW = 32768  # elements of a tile that is kept in registers; more spill
ELEMENTS = 512  # of a tile, for each warp: 16 a thread


def power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def fast_axis(strides: Any, axes: tuple[int, ...]) -> int | None:
    return next((a for a, s in enumerate(strides or ()) if s == 1 and axes[a] > 1), None)


def _operands(cluster: Cluster) -> Iterator[Load | Store]:
    """What has an element for each of the whole space: what is read at no computed place, and what is written at any."""
    axes = cluster.axes
    found: list[Load | Store] = [*(n for n in cluster.order if isinstance(n, Load) and not n.index), *cluster.stores]
    for operand in found:
        if operand.layout.strides is not None and all(along for n, along in zip(axes, spanned(operand), strict=True) if n > 1):
            yield operand


def spanned(operand: Load | Store) -> list[bool]:
    """Return along which axes an operand, or the place that data gives it, runs."""
    found = [operand.layout, *(leaf.layout for leaf in leaves(e for e, _ in operand.index))]
    return [any(layout.dims[axis][0].stride != 0 or len(layout.dims[axis]) > 1 for layout in found) for axis in range(len(found[0].dims))]


def second_axis(cluster: Cluster) -> int | None:
    """Return the axis, other than the innermost, along which an operand of the whole size has stride 1."""
    axes = cluster.axes
    last = len(axes) - 1
    if last < 1 or axes[last] < 16:
        return None
    for operand in _operands(cluster):
        strides = operand.layout.strides or ()
        axis = fast_axis(strides, axes)
        if axis not in (None, last) and axes[axis] >= 16 and strides[last] != 1:
            return axis
    return None


def _run(cluster: Cluster, axis: int) -> int:
    """Return how many elements along `axis` are a line of the narrowest operand that runs there."""
    sizes = [o.dtype.itemsize for o in _operands(cluster) if fast_axis(o.layout.strides, cluster.axes) == axis]
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


def crossing(cluster: Cluster) -> int:
    """Return how many rows of a row reduction a tile needs at least: 1, or those that a sector holds of an operand that crosses them.

    Half of them where that lets a row stay in registers: the other half of the sector is in L2 when the next program reads it.
    """
    split, axes = len(cluster.parallel), cluster.axes
    if not split or not cluster.reduce or axes[split - 1] < 2 or cluster.segments or scans(cluster):
        return 1
    crossed = [o.dtype.itemsize for o in _operands(cluster) if fast_axis(o.layout.strides, axes) == split - 1]
    return min(at_least(min(crossed), cluster, MAX_ROW), power_of_two(axes[split - 1])) if crossed else 1


def at_least(size: int, cluster: Cluster, most: int) -> int:
    """Return how many neighbours of `size` bytes are read at once: a sector's, or half as many if a tile of `most` elements has no room."""
    row, whole = power_of_two(product(cluster.reduce)) * max(1, cluster.held), SECTOR // size
    return whole if row * whole <= most or row * (whole // 2) > most else max(1, whole // 2)
