"""Analysis: what schedules, templates and passes ask of a cluster, beyond what the cluster says of itself.

In: a cluster. Out: its loads by axis and by pass, the bytes that it moves, whether memory runs along its columns,
whether scans fit it.

    >>> column_reduction(cluster), columns_at_once(cluster)
    (True, 32)

Pure functions of clusters, each asked once of a cluster (`analysis`): no device, no schedule, no op table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Set
from typing import Any

from .cluster import Cluster, Store, analysis
from .expr import Expr, Iota, Load, Reduce, Scan, children, leaves, postorder
from .layout import Layout, contiguous, strided
from .size import product

LINE = 128  # bytes of a line of the cache
SECTOR = 32  # bytes that memory hands out at once
MAX_ROW = 32768  # elements of a tile that is kept in registers; more spill


@analysis
def row_operands(cluster: Cluster) -> Set[Load]:
    """Return the loads of a pointwise cluster that have one value for all of the innermost axis, and several for the
    others.
    """
    found = [(n, n.layout.strides or (1,)) for n in loads_of(cluster) if not n.index]
    return (
        {n for n, strides in found if not strides[-1] and any(strides)}
        if len(cluster.axes) > 1 and not cluster.reduce
        else set()
    )


@analysis
def traffic(cluster: Cluster) -> tuple[int, int]:
    """Return the bytes of one launch, each element of each operand once, and the bytes of its rows, which a looped
    kernel reads again.
    """
    rows = sum(
        span(n.layout, cluster) * n.dtype.itemsize
        for n in {(n.buffer, n.layout): n for n in loads_of(cluster)}.values()
    )
    written = sum(
        span(s.layout, cluster) * s.dtype.itemsize * (cluster.programs or 1 if s.reduces else 1) for s in cluster.stores
    )
    again = (
        sum(span(n.layout, cluster) * n.dtype.itemsize for n in full(cluster))
        if max(cluster.levels.values(), default=0)
        else 0
    )
    return rows + written, again


@analysis
def loads_of(cluster: Cluster) -> tuple[Load, ...]:
    return tuple(n for n in cluster.order if isinstance(n, Load))


def span(layout: Layout, cluster: Cluster) -> int:
    return product(n for n, stride in zip(cluster.axes, layout.strides or (), strict=False) if stride != 0)


def widest(cluster: Cluster) -> int:
    return max((n.dtype.itemsize for n in loads_of(cluster)), default=4)


@analysis
def full(cluster: Cluster) -> Set[Load]:
    """Return the loads that run along a reduce axis, one per buffer and position."""
    split = len(cluster.parallel)
    return {n for n in cluster.order if isinstance(n, Load) and (n.index or any((n.layout.strides or ())[split:]))}


def power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def fast_axis(strides: Any, axes: tuple[int, ...]) -> int | None:
    return next((a for a, s in enumerate(strides or ()) if s == 1 and axes[a] > 1), None)


@analysis
def operands(cluster: Cluster) -> tuple[Load | Store, ...]:
    """Return what has an element for each of the whole space: what is read at no computed place, and what is written
    at any.
    """
    axes = cluster.axes
    candidates: list[Load | Store] = [*(n for n in loads_of(cluster) if not n.index), *cluster.stores]
    return tuple(
        operand
        for operand in candidates
        if operand.layout.strides is not None
        and all(along for n, along in zip(axes, spanned(operand), strict=True) if n > 1)
    )


def spanned(operand: Load | Store) -> list[bool]:
    """Return along which axes an operand, or the place that data gives it, runs."""
    found = [operand.layout, *(leaf.layout for leaf in leaves(e for e, _ in operand.index))]
    return [
        any(layout.dims[axis][0].stride != 0 or len(layout.dims[axis]) > 1 for layout in found)
        for axis in range(len(found[0].dims))
    ]


def along_row(roots: Iterable[Expr], cluster: Cluster) -> list[Expr]:
    """Return the nodes that vary along the row, down to the reductions that they need."""
    return [n for n in postorder(roots, lambda n: () if isinstance(n, Reduce) else children(n)) if cluster.full[n]]


@analysis
def by_pass(cluster: Cluster) -> tuple[list[Expr], ...]:
    """Return what varies along the row and is needed in each pass over it: of its reductions and of its stores."""
    roots: dict[int, list[Expr]] = {}
    for node in cluster.order:
        if isinstance(node, Reduce):
            roots.setdefault(cluster.levels[node] - 1, []).extend(node.args)
    for store in cluster.stores:
        roots.setdefault(cluster.levels[store.value], []).extend([store.value, *(e for e, _ in store.index)])
    return tuple(along_row(roots.get(level, ()), cluster) for level in range(max(roots, default=-1) + 1))


@analysis
def used_again(cluster: Cluster) -> Set[Expr]:
    """Return what several passes over the row need."""
    seen = Counter(node for nodes in by_pass(cluster) for node in nodes)
    return {node for node, count in seen.items() if count > 1}


def footprint(node: Load) -> int:
    """Return how many different elements a load reads (its axes of stride 0 read the same ones)."""
    return product(mode.extent for dim in node.layout.dims for mode in dim if mode.stride != 0)


@analysis
def scans(cluster: Cluster) -> tuple[Scan, ...]:
    return tuple(n for n in cluster.order if isinstance(n, Scan))


@analysis
def out_of_order(cluster: Cluster) -> str:
    """Return why a cluster's scans cannot run in one kernel, or ""."""
    found = scans(cluster)
    if not found:
        return ""
    if len({n.reverse for n in found}) > 1:
        return "scans from both ends of a row"
    wanted = strided(cluster.axes, [*(0 for _ in cluster.parallel), *(contiguous(cluster.reduce).strides or ())])
    if any(
        not isinstance(n.place, Iota) or _steps(n.place.layout.strides, cluster) != _steps(wanted.strides, cluster)
        for n in found
    ):
        return "a scan needs its row in order"
    return "a scan does not run over segments" if cluster.segments else ""


def _steps(strides: Any, cluster: Cluster) -> tuple[int, ...] | None:
    return None if strides is None else tuple(s for s, n in zip(strides, cluster.axes, strict=True) if n != 1)


@analysis
def column_reduction(cluster: Cluster) -> bool:
    """Whether memory runs along the parallel axes: a column reduction."""
    split, axes = len(cluster.parallel), cluster.axes
    votes = 0
    for node in full(cluster):
        axis = fast_axis(node.layout.strides, axes)
        votes += 0 if axis is None else (footprint(node) if axis < split else -footprint(node))
    return votes > 0


def columns_at_once(cluster: Cluster) -> int:
    """Return how many columns a program of a column reduction reads of each row: 128 bytes, a whole line of the
    cache.
    """
    return max(8, 128 // min((n.dtype.itemsize for n in full(cluster)), default=4))
