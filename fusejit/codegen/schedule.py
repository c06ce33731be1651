"""Schedule: how a cluster is tiled. A pure choice: any schedule of a cluster is correct.

In: a cluster. Out: the cluster with its axes in the order that memory likes, and a `Schedule`; no measurement, no GPU.

    Schedule(template='reduction_persistent', blocks=(('XBLOCK', 1), ('RBLOCK', 1024)), num_warps=4)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .cluster import Cluster, Load
from .cost import machine
from .layout import permute
from .ops import OPS
from .realize import footprint
from .size import product

MAX_ROW = 32768  # a longer row spills: it is looped over
FILL = 264  # programs that fill an H100 twice


@dataclass(frozen=True, slots=True)
class Schedule:
    """Template, tile sizes in the template's order, warps. Sizes and strides are literals in the kernel, so divisibility is too."""

    template: str
    blocks: tuple[tuple[str, int], ...]
    num_warps: int
    num_stages: int = 1

    def __getitem__(self, name: str) -> int:
        return dict(self.blocks)[name]


@dataclass(frozen=True, slots=True)
class Template:
    """A row of TEMPLATES: the file that owns the control flow, when it applies, and its tiles."""

    name: str
    applies: Callable[[Cluster], bool]
    tile: Callable[[Cluster], Schedule]


def schedule(cluster: Cluster) -> tuple[Cluster, Schedule]:
    """Return the cluster ready to render, and the first template that applies with its tiles."""
    ordered = order(cluster).coalesced
    template = next(t for t in TEMPLATES if t.applies(ordered))
    return ordered, template.tile(ordered)


# -- axes ------------------------------------------------------------------------------------------------------------------------------
def order(cluster: Cluster) -> Cluster:
    """Sort the axes so that the innermost is the one along which the most bytes are neighbours."""
    cost = [_traffic(cluster, axis) for axis in range(len(cluster.axes))]
    split = len(cluster.parallel)
    parallel = sorted(range(split), key=lambda a: cost[a])
    reduce = sorted(range(split, len(cluster.axes)), key=lambda a: cost[a])
    new = [*parallel, *reduce]
    if new == sorted(new):
        return cluster
    axes = cluster.axes
    return cluster.map(permute(axes, new), [axes[a] for a in parallel], [axes[a] for a in reduce])


def _traffic(cluster: Cluster, axis: int) -> tuple[float, ...]:
    """Rank an axis: small strides, weighted by bytes (stores twice), come last."""
    dense, steps = 0.0, 0.0
    for layout, size, weight in _accesses(cluster):
        stride = abs(layout[axis])
        if stride == 1:
            dense += size * weight
        steps -= size * weight * min(stride, 1 << 40) if stride else 0
    return (dense, steps)


def _accesses(cluster: Cluster) -> list[tuple[Any, int, int]]:
    """Return (strides, bytes, weight) of each load and store; the largest store decides ties."""
    found = [(n.layout.strides, footprint(n) * n.dtype.itemsize, 2) for n in cluster.order if isinstance(n, Load)]
    for s in cluster.stores:
        size = product(n for n, stride in zip(cluster.axes, s.layout.strides or (), strict=False) if stride != 0)
        found.append((s.layout.strides, size * s.dtype.itemsize, 3))
    return found


def fast_axis(strides: Any, axes: tuple[int, ...]) -> int | None:
    return next((a for a, s in enumerate(strides or ()) if s == 1 and axes[a] > 1), None)


def full_loads(cluster: Cluster) -> list[Load]:
    """Return the loads that run along a reduce axis, one per buffer and position."""
    split = len(cluster.parallel)
    return [n for n in cluster.order if isinstance(n, Load) and (n.index or any((n.layout.strides or ())[split:]))]


# -- which template --------------------------------------------------------------------------------------------------------------------
def _pointwise(cluster: Cluster) -> bool:
    return not cluster.reduce


def _two_fast_axes(cluster: Cluster) -> bool:
    """Two operands of some size run fastest along different axes, both long enough for a tile."""
    return not cluster.reduce and second_axis(cluster) is not None


def second_axis(cluster: Cluster) -> int | None:
    """Return the axis, other than the innermost, along which an operand of the whole size has stride 1."""
    axes = cluster.axes
    last, total = len(axes) - 1, product(axes)
    if last < 1 or axes[last] < 16:
        return None
    operands: list[Any] = [n.layout.strides for n in cluster.order if isinstance(n, Load) and not n.index]
    operands += [s.layout.strides for s in cluster.stores]
    for strides in operands:
        axis = fast_axis(strides, axes)
        whole = strides is not None and product(n for n, s in zip(axes, strides, strict=True) if s != 0) == total
        if whole and axis not in (None, last) and axes[axis] >= 16 and strides[last] not in (0, 1):
            return axis
    return None


def column_reduction(cluster: Cluster) -> bool:
    """Whether memory runs along the parallel axes: a column reduction."""
    split, axes = len(cluster.parallel), cluster.axes
    votes = 0
    for node in full_loads(cluster):
        axis = fast_axis(node.layout.strides, axes)
        votes += 0 if axis is None else (footprint(node) if axis < split else -footprint(node))
    return votes > 0


def _persistent(cluster: Cluster) -> bool:
    if not cluster.reduce:
        return False
    columns = product(cluster.reduce)
    if column_reduction(cluster):
        return columns <= 64
    return power_of_two(columns) * max(1, cluster.held) <= MAX_ROW


# -- tiles -----------------------------------------------------------------------------------------------------------------------------
def power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def _tile_pointwise(cluster: Cluster) -> Schedule:
    size = product(cluster.axes)
    buffers = len(cluster.reads) + len(cluster.writes)
    block = 1024 if size >= FILL * 1024 and buffers <= 8 else 512 if size >= FILL * 512 else 256
    block = min(block, power_of_two(size))
    return Schedule("pointwise", (("XBLOCK", block),), max(1, block // 256))


def _tile_pointwise_2d(cluster: Cluster) -> Schedule:
    return Schedule("pointwise_2d", (("YBLOCK", 32), ("XBLOCK", 64)), 4)


def _tile_persistent(cluster: Cluster) -> Schedule:
    rows, columns = product(cluster.parallel), power_of_two(product(cluster.reduce))
    across = max(1, 2048 // columns) if not column_reduction(cluster) else max(8, min(64, 4096 // columns))
    across = min(across, power_of_two(rows))
    while across > 1 and rows // across < FILL and not column_reduction(cluster):
        across //= 2
    tile = across * columns
    live = max(1, len({n.buffer for n in full_loads(cluster)}))
    warps = min(16, max(1, power_of_two(tile * min(live, 4) // 1024)))
    return Schedule("reduction_persistent", (("XBLOCK", across), ("RBLOCK", columns)), warps if tile >= 1024 else max(1, tile // 256))


def _tile_mixed(cluster: Cluster) -> Schedule:
    columns, rows = power_of_two(product(cluster.reduce)), product(cluster.parallel)
    across = max(1, min(512 // columns, power_of_two(-(-rows // cluster.programs))))
    warps = min(16, max(1, across * columns // 256))
    if fits_mixed(cluster, machine().mixed_values):
        return Schedule("reduction_mixed", (("XBLOCK", across), ("RBLOCK", columns)), warps, 2)
    return Schedule("reduction_mixed", (("XBLOCK", 1), ("RBLOCK", 4096)), warps, 1)


def fits_mixed(cluster: Cluster, values: int) -> bool:
    """Whether a program of a mixed reduction keeps its row in registers, besides the column sums."""
    return power_of_two(product(cluster.reduce)) * (column_sums(cluster) + cluster.held) <= values


def even_rows(cluster: Cluster) -> bool:
    """Whether every row that is read or written begins at a multiple of 16 bytes."""
    split = len(cluster.parallel)
    strides = [(s, n.dtype.itemsize) for n in full_loads(cluster) for s in (n.layout.strides or ())[:split]]
    strides += [(n, s.dtype.itemsize) for s in cluster.stores for n in (s.layout.strides or ())[:split] if n != 1]
    return all(stride * size % 16 == 0 for stride, size in strides)


def column_sums(cluster: Cluster) -> int:
    return sum(s.mode in OPS for s in cluster.stores)


def _tile_looped(cluster: Cluster) -> Schedule:
    rows, columns = product(cluster.parallel), power_of_two(product(cluster.reduce))
    if column_reduction(cluster):
        across = min(32, power_of_two(rows))
        while across > 8 and rows // across < FILL // 2:
            across //= 2  # 8 columns are the 32 bytes that memory hands out at once
        return Schedule("reduction_looped", (("XBLOCK", across), ("RBLOCK", min(columns, 2048 // across))), 8)
    block = 4096 if len(full_loads(cluster)) <= 3 else 2048
    return Schedule("reduction_looped", (("XBLOCK", 1), ("RBLOCK", min(block, columns))), 8)


# The first row that applies wins.
TEMPLATES = (
    Template("reduction_mixed", lambda cluster: cluster.programs > 0, _tile_mixed),
    Template("pointwise_2d", _two_fast_axes, _tile_pointwise_2d),
    Template("pointwise", _pointwise, _tile_pointwise),
    Template("reduction_persistent", _persistent, _tile_persistent),
    Template("reduction_looped", lambda cluster: True, _tile_looped),
)
