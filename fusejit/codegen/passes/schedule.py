"""Schedule: how a cluster is tiled. A pure choice: any schedule of a cluster is correct.

In: a cluster. Out: the cluster with its axes in the order that memory likes, and a `Schedule`; no measurement, no GPU.

    Schedule(template='reduction_persistent', blocks=(('XBLOCK', 1), ('RBLOCK', 1024)), num_warps=4)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...templates.base import Template
from ...templates.table import for_any_length, template_for
from ..ir.analysis import column_reduction, footprint, scans, spanned
from ..ir.cluster import Cluster, analysis
from ..ir.concretize import hinted
from ..ir.expr import Iota, Load, Segment
from ..ir.layout import permute
from ..ir.size import AnySize, hint, most, product
from ..schedule.choice import Choice, Schedule
from ..schedule.device import Device, machine

ADDING = (
    16  # bytes that additions in memory weigh: neighbours of one thread are one of them, half types alone a loop each
)
MANY_ROWS = (
    4096  # what rows that are shared by programs are tiled for, where their number varies and the device was not full
)


def schedule(cluster: Cluster, device: Device | None = None) -> tuple[Cluster, Schedule]:
    """Return the cluster ready to render, and of the first template that applies the tiles that cost least."""
    return scheduled(cluster, device or machine())


@analysis
def scheduled(cluster: Cluster, device: Device) -> tuple[Cluster, Schedule]:
    """As `schedule`, for a device."""
    ordered = order(
        cluster.coalesced
    ).coalesced  # joined first: axes that are one in memory are not torn apart for a small operand
    model = hinted(ordered)
    template = template_for(model)
    if model is not ordered:
        return ordered, varying(ordered, model, template, device)
    return ordered, template.choose(ordered, device)


def microseconds(cluster: Cluster, device: Device) -> float:
    """Return what a cluster's kernel takes, by the cost model."""
    return costs(cluster, device).costs[0].us


def costs(cluster: Cluster, device: Device) -> Choice:
    """Return how the tiles of a cluster were chosen, the cheapest first."""
    choice = schedule(hinted(cluster), device)[1].choice
    assert choice is not None
    return choice


def varying(cluster: Cluster, model: Cluster, template: Template[Any], device: Device) -> Schedule:
    """Return the schedule of a cluster whose sizes vary: good for larger ones too, and right for all."""
    columns = product(cluster.reduce)
    if cluster.programs:
        by = taller(product(cluster.parallel), device)
        model = tall(replace(model, programs=most(cluster.programs)), by)
    # of few rows of one pass none gains from registers, and each may be long: pieces of one that was split are such
    # rows
    few = isinstance(product(cluster.parallel), int) and product(cluster.parallel) <= 2 * device.sms and not model.held
    if not isinstance(columns, int) and (column_reduction(model) or few and model.reduce):
        template = for_any_length()
    return template.varying(model, columns, device)


def taller(rows: AnySize, device: Device) -> int:
    """Return how many times as many rows tiles are chosen for as the call has that is compiled for: a number that
    varies may grow.
    """
    return 1 if isinstance(rows, int) or hint(rows) >= device.sms else -(-MANY_ROWS // hint(rows))


def tall(model: Cluster, by: int) -> Cluster:
    """Return a cluster with so many times as many rows."""
    return replace(model, parallel=(by * model.parallel[0], *model.parallel[1:])) if by > 1 else model


# -- axes --------------------------------------------------------------------------------------------------------------
@analysis
def order(cluster: Cluster) -> Cluster:
    """Sort the axes so that the innermost is the one along which the most bytes are neighbours."""
    model = hinted(cluster)
    cost = [_traffic(model, axis) for axis in range(len(cluster.axes))]
    split = len(cluster.parallel)
    parallel = sorted(range(split), key=lambda a: cost[a])
    runs = [
        n.number.layout.strides or () for n in cluster.order if isinstance(n, Segment) and isinstance(n.number, Iota)
    ]
    reduce = sorted(range(split, len(cluster.axes)), key=lambda a: (not any(strides[a] for strides in runs), cost[a]))
    reduce = sorted(reduce) if scans(cluster) else reduce
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
    """Return (strides, bytes, weight) of each load and store; the largest store decides ties, and what is added to
    decides.
    """
    found = [(n.layout.strides, footprint(n) * n.dtype.itemsize, 2) for n in cluster.order if isinstance(n, Load)]
    for s in cluster.stores:
        size = product(n for n, along in zip(cluster.axes, spanned(s), strict=True) if along)
        found.append((s.layout.strides, size * s.dtype.itemsize, ADDING if s.mode == "atomic_add" else 3))
    return found
