"""Align: two clusters over the same axes, in the same order, so that one kernel can hold both.

In: two clusters. Out: the same two with equal (parallel, reduce), every value that one hands to the other standing
where it is read.

    parallel 4096 | reduce 768   and   parallel 3145728 |      ->   both  parallel 4096 | reduce 768
"""

from __future__ import annotations

from collections.abc import Iterable

from ..ir.cluster import Cluster
from ..ir.expr import Expr, Load, cast, compute, const
from ..ir.graph import Refused
from ..ir.layout import Affine, permute
from ..ir.size import divide, hint, product

ORDERS = "they read what they share in different orders"


def align(a: Cluster, b: Cluster, slices: bool = False) -> tuple[Cluster, Cluster]:
    """Return both clusters over the same parallel and reduce axes, in the same order.

    `slices`: it is enough that they read different slices of one buffer, and share a launch.

    Raises:
        Refused: their iteration spaces differ, or no order makes a value that one writes stand where the other reads
            it.
    """
    swap = bool(b.reduce) and not a.reduce
    wide, other = (b, a) if swap else (a, b)
    last: Refused | None = None
    for arrange in (_as_they_are, _by_strides):
        try:
            one, two = _common(*arrange(*_spaces(wide, other), a, b))
            pair = (two, one) if swap else (one, two)
            _same_places(*pair, slices)
            return pair
        except Refused as refusal:
            last = last or refusal
    assert last is not None
    raise last


def _spaces(wide: Cluster, other: Cluster) -> tuple[Cluster, Cluster]:
    """Give `other` the same number of parallel and reduce elements as `wide`."""
    rows, columns = product(wide.parallel), product(wide.reduce)
    if bool(other.reduce) == bool(wide.reduce):
        if (product(other.parallel), product(other.reduce)) != (rows, columns):
            raise Refused(f"iteration spaces differ: {space(wide)} and {space(other)}")
        return wide, other
    size = product(other.parallel)
    if size == rows * columns:
        return wide, other  # its parallel axes are cut into rows and columns by _common
    if size == rows:
        return wide, other.map(_widen(other.parallel, wide.reduce), other.parallel, wide.reduce)
    raise Refused(f"iteration spaces differ: {space(wide)} and {space(other)}")


def _widen(parallel: tuple[int, ...], reduce: tuple[int, ...]) -> Affine:
    return Affine((*parallel, *reduce), tuple((0, ((d, 1),)) for d in range(len(parallel))))


def space(cluster: Cluster) -> str:
    rows = "x".join(map(str, cluster.parallel)) or "1"
    return rows + (" | " + "x".join(map(str, cluster.reduce)) if cluster.reduce else "")


def _as_they_are(wide: Cluster, other: Cluster, a: Cluster, b: Cluster) -> tuple[Cluster, Cluster]:
    return wide, other


def _by_strides(wide: Cluster, other: Cluster, a: Cluster, b: Cluster) -> tuple[Cluster, Cluster]:
    """Sort the axes of both by their strides in the buffers that they share, rows before columns."""
    shared = sorted({*a.reads, *a.writes} & {*b.reads, *b.writes})
    wide, other = by_rank(wide, shared, None), other
    if wide.reduce and not other.reduce:
        # an axis of the pointwise cluster is a column where everything that the reduction makes is constant along it
        results = [name for name in shared if name in wide.writes] or shared
        keys = _keys(other, results)
        columns = [axis for axis in range(len(other.parallel)) if all(k == 0 for k in keys[axis])] if results else []
        if product(other.parallel[axis] for axis in columns) != product(wide.reduce):
            columns = _columns_by_reads(wide, other, shared)
        return wide, by_rank(other, shared, columns)
    return wide, by_rank(other, shared, None)


def _columns_by_reads(wide: Cluster, other: Cluster, shared: list[str]) -> list[int]:
    """Return the axes of `other` whose strides in shared buffers are those of the reduction's columns."""
    theirs = set(_keys(wide, shared)[len(wide.parallel) :])
    keys = _keys(other, shared)
    return [axis for axis in range(len(other.parallel)) if keys[axis] in theirs]


def _keys(cluster: Cluster, shared: Iterable[str]) -> list[tuple[int, ...]]:
    """Return, for each axis, its strides in the shared buffers."""
    layouts = []
    for name in shared:
        found = (
            cluster.writes[name].layout
            if name in cluster.writes
            else cluster.reads[name][0].layout
            if name in cluster.reads
            else None
        )
        layouts.append(found)
    return [
        tuple(0 if lay is None or lay.strides is None else lay.strides[axis] for lay in layouts)
        for axis in range(len(cluster.axes))
    ]


def by_rank(cluster: Cluster, shared: list[str], columns: list[int] | None) -> Cluster:
    """Return the cluster with parallel axes sorted by falling strides in `shared`, and `columns` of them (if given) at
    the end.
    """
    keys = _keys(cluster, shared)
    split = len(cluster.parallel)
    rank = lambda axis: tuple(-abs(hint(k)) for k in keys[axis])  # noqa: E731
    chosen = set(columns or ())
    parallel = sorted((x for x in range(split) if x not in chosen), key=rank) + sorted(chosen, key=rank)
    order = parallel + sorted(range(split, len(cluster.axes)), key=rank)
    axes = cluster.axes
    return cluster.map(permute(axes, order), [axes[x] for x in parallel], [axes[x] for x in order[split:]])


def _common(wide: Cluster, other: Cluster) -> tuple[Cluster, Cluster]:
    """Split the axes of both at each other's boundaries; the columns of `wide` divide the parallel axes of a pointwise
    `other`.
    """
    columns = product(wide.reduce)
    if wide.reduce and not other.reduce:
        inner = _nest(wide.reduce, other.parallel, columns)
        outer = _nest(wide.parallel, above(other.parallel, columns), product(wide.parallel))
        return wide.reshape(outer, inner), _recut(other, outer, inner)
    parallel = _nest(wide.parallel, other.parallel, product(wide.parallel))
    reduce = _nest(wide.reduce, other.reduce, columns)
    return wide.reshape(parallel, reduce), other.reshape(parallel, reduce)


def _recut(cluster: Cluster, parallel: tuple[int, ...], reduce: tuple[int, ...]) -> Cluster:
    return Cluster(parallel, reduce, cluster.reshape((*parallel, *reduce), ()).stores, cluster.lines)


def above(extents: tuple[int, ...], columns: int) -> tuple[int, ...]:
    """Return the extents above the innermost `columns` elements."""
    rest, count = list(extents), columns
    while rest and count != 1:
        n = rest.pop()
        inner, outer = divide(count, n), divide(n, count)
        if inner is not None:
            count = inner
        elif outer is not None:
            rest.append(outer)
            count = 1
        else:
            raise Refused("their axes do not nest")
    return tuple(rest)


def _nest(one: tuple[int, ...], two: tuple[int, ...], total: int) -> tuple[int, ...]:
    """Return extents whose boundaries are those of both, up to `total` elements from the inside."""
    boundaries = {1, total}
    for extents in (one, two):
        size = 1
        for n in reversed(extents):
            size *= n
            if hint(size) < hint(total):
                boundaries.add(size)
    chain = sorted(boundaries, key=lambda size: (hint(size), str(size)))
    parts = []
    for a, b in zip(chain, chain[1:], strict=False):
        if (part := divide(b, a)) is None:
            raise Refused("their axes do not nest")
        parts.append(part)
    return tuple(reversed(parts))


def _same_places(a: Cluster, b: Cluster, slices: bool) -> None:
    """Refuse unless every value that a hands to b is read where it was written, and a shared read is one read."""
    gain = False
    for name, store in a.writes.items():
        for node in b.reads.get(name, ()):
            if node.index or node.layout != store.layout or store.index or store.mode:
                raise Refused(f"{name} is read at other positions than it is written")
            gain = True
    if not gain:
        places = _steps if slices else _access
        same = (set(map(places, a.reads[n])) & set(map(places, b.reads[n])) for n in a.reads.keys() & b.reads.keys())
        if not any(same):
            raise Refused(ORDERS)


def _access(node: Load) -> tuple:
    return node.layout, node.index


def _steps(node: Load) -> tuple:
    return node.layout.dims, node.index


def join(a: Cluster, b: Cluster) -> Cluster:
    """Return one cluster with the stores of both; b takes a's values from registers."""
    made: dict[str, Expr] = {s.buffer: s.value for s in a.stores}

    def visit(node: Expr) -> Expr:
        if not isinstance(node, Load) or node.buffer not in made:
            return node
        value = cast(made[node.buffer], node.dtype)
        return (
            value
            if node.mask is None
            else compute("where", node.mask, value, const(node.fill, node.dtype), dtype=node.dtype)
        )

    stores = (*a.stores, *b.rewritten(visit).stores)
    return Cluster(a.parallel, a.reduce, stores, tuple(dict.fromkeys((*a.lines, *b.lines))))
