"""Split: a reduction with few results and many elements becomes two, so that the whole device works on it.

In: fused clusters. Out: the same program; a split cluster reduces pieces into a small buffer of partial results, then those.
Deterministic: no atomics, the pieces are combined in a fixed order.

    parallel 1 | reduce 1048576   ->   parallel 256 | reduce 4096,  then  parallel 1 | reduce 256
"""

from __future__ import annotations

from dataclasses import replace

from .cluster import Cluster, Expr, Load, Reduce, Store, load, reduction, rewrite, view
from .layout import Affine, contiguous, strided
from .lower import Buffer, Extern, Lowered
from .schedule import FILL, column_reduction
from .size import product

ENOUGH = FILL // 4  # programs below which splitting pays for a second launch
LONG = {True: 2048, False: 16384}  # elements a result, from which it pays: {column reduction: rows, row reduction: columns}
SPLITTABLE = {"sum", "prod", "amax", "amin", "any", "all"}


def split(lowered: Lowered) -> Lowered:
    """Return the program with every reduction split that has too few programs for its length."""
    buffers = dict(lowered.buffers)
    steps: list[Cluster | Extern] = []
    for step in lowered.steps:
        pieces = _pieces(step) if isinstance(step, Cluster) else 0
        steps += _two_steps(step, pieces, buffers) if isinstance(step, Cluster) and pieces > 1 else [step]
    return replace(lowered, buffers=buffers, steps=tuple(steps))


def _pieces(cluster: Cluster) -> int:
    """Return into how many pieces the reduction is cut, 0 or 1 for not at all."""
    rows, columns = product(cluster.parallel), product(cluster.reduce)
    reduces = [n for n in cluster.order if isinstance(n, Reduce)]
    if not reduces or any(n.op not in SPLITTABLE for n in reduces) or max(cluster.levels.values()) > 1:
        return 0
    if any(any((s.layout.strides or ())[len(cluster.parallel) :]) or s.index or cluster.full[s.value] for s in cluster.stores):
        return 0  # a result as long as the row keeps the row in one program
    upright = column_reduction(cluster)
    programs = rows // 8 if upright else rows
    if programs >= ENOUGH or columns < LONG[upright]:
        return 0
    wanted = min(FILL // max(1, programs), columns // (LONG[upright] // 8))
    return max((d for d in range(1, wanted + 1) if columns % d == 0), default=1)


def _two_steps(cluster: Cluster, pieces: int, buffers: dict[str, Buffer]) -> list[Cluster]:
    rows, columns = product(cluster.parallel), product(cluster.reduce)
    # after build, an axis that the cut crosses is split wherever every operand allows it and computed elsewhere
    wide = cluster.reshape(cluster.parallel, (pieces, columns // pieces))
    device = next(buffers[s.buffer].device for s in cluster.stores)
    partial: dict[Expr, tuple[Buffer, Reduce]] = {}
    for node in wide.order:
        if isinstance(node, Reduce):
            buffer = Buffer(f"b{len(buffers)}", (pieces, rows), (rows, 1), node.dtype, device)
            buffers[buffer.name] = buffer
            partial[node] = buffer, node
    at = strided(
        (*wide.parallel, *wide.reduce),
        [*(contiguous(wide.parallel).strides or ()), rows, 0],
    )
    first = [Store(b.name, at, node, node.dtype) for b, node in partial.values()]
    one = Cluster.build((*wide.parallel, pieces), wide.reduce[1:], first, cluster.lines)
    return [one, combined(wide, partial, pieces, cluster.lines)]


def combined(wide: Cluster, partial: dict[Expr, tuple[Buffer, Reduce]], pieces: int, lines: tuple[str, ...]) -> Cluster:
    """Return the cluster that reduces the partial results and computes what followed the reduction.

    Args:
        wide: the cluster as it was, its results along the parallel axes. partial: for each Reduce in it, a buffer (pieces, rows).
    """
    rank = len(wide.parallel)
    here = [*(contiguous(wide.parallel).strides or ()), *(0 for _ in wide.reduce)]
    operations = {b.name: node.op for b, node in partial.values()}

    def take(node: Expr) -> Expr:
        if node not in partial:
            return node
        return load(partial[node][0].name, strided(wide.axes, here), node.dtype)

    def combine(node: Expr) -> Expr:
        if not isinstance(node, Load) or node.buffer not in operations:
            return node
        rows = product(wide.parallel)
        spread = strided((*wide.parallel, pieces), [*(contiguous(wide.parallel).strides or ()), rows])
        return reduction(operations[node.buffer], load(node.buffer, spread, node.dtype), dtype=node.dtype)

    values = rewrite([s.value for s in wide.stores], take)
    drop = Affine((*wide.parallel, pieces), tuple((0, ((d, 1),)) if d < rank else (0, ()) for d in range(len(wide.axes))))
    values = rewrite(view(values, drop), combine)
    stores = [
        replace(s, value=v, layout=strided((*wide.parallel, pieces), [*(s.layout.strides or ())[:rank], 0], s.layout.offset))
        for s, v in zip(wide.stores, values, strict=True)
    ]
    return Cluster.build(wide.parallel, (pieces,), stores, lines)
