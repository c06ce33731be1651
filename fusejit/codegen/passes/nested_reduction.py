"""Nested reduction: a reduction of the segments of a row and one over their results become one reduction of the row
that still writes the segments'.

In: a cluster (P x S | R) and a cluster (P | S) that adds up what the first one makes. Out: one cluster (P | S x R),
whose stores of segment results are reductions of a segment; what follows along the whole space can then join it.

    dy x       parallel 16 320 | reduce 4096   ->   segment sums of 5120 channels
    sums w     parallel 16 32 | reduce 10      ->   group sums
    both       parallel 16 32 | reduce 10 4096      group sum of dy x w,   store b7  32 10 | 1 0  float32 sum

A sum of segment sums is a sum of the row where it is linear in them: sum(w[s] * sum(t[s, r])) = sum(w[s] * t[s, r]).
"""

from __future__ import annotations

from dataclasses import replace

from ..ir.analysis import fast_axis, footprint, full
from ..ir.cluster import Cluster, Store
from ..ir.expr import (
    Compute,
    Expr,
    Load,
    Reduce,
    children,
    iota,
    load,
    postorder,
    reduction,
    rewrite,
    segment,
    substitute,
)
from ..ir.graph import Refused
from ..ir.layout import Affine, Layout, contiguous, permute
from ..ir.size import product
from ..schedule.device import Device
from .align import align, join
from .schedule import order

LONGEST = 16384  # elements of a segment that one tile holds


def nest(inner: Cluster, outer: Cluster, device: Device) -> Cluster:
    """Return one cluster over the axes of `outer` and the reduce axes of `inner`.

    Raises:
        Refused: they are no such pair, or the sums are not linear in the segments' results.
    """
    results = {s.buffer: s for s in inner.stores if not inner.runs_along(s)}
    _check(inner, outer, results, device)
    copies = [
        Store(name, s.layout, load(f"?{name}", contiguous(inner.parallel), s.dtype), s.dtype)
        for name, s in results.items()
    ]
    flat = [replace(s, layout=Layout(s.layout.dims[: len(inner.parallel)], s.layout.offset)) for s in copies]
    made, upper = align(Cluster(inner.parallel, (), tuple(flat)), outer)
    lower = _turned(inner, made)
    wide = upper.map(_widen(upper, inner.reduce), upper.parallel, (*upper.reduce, *inner.reduce))
    values = {s.buffer: s.value for s in lower.stores if s.buffer in results}
    roots = rewrite(
        [s.value for s in wide.stores], lambda n: values[n.buffer] if isinstance(n, Load) and n.buffer in values else n
    )
    below: dict[Expr, Expr] = {n: n.args[0] for v in values.values() for n in postorder([v]) if isinstance(n, Reduce)}
    sums: dict[Expr, Expr] = {
        n: _of_the_row(n, below)
        for root in roots
        for n in postorder([root])
        if isinstance(n, Reduce) and n not in below
    }
    if any(n in below for n in postorder(roots, lambda n: () if n in sums else children(n))):
        raise Refused("a segment's result is used beside the sum of all")
    stores = [replace(s, value=v) for s, v in zip(wide.stores, substitute(roots, sums), strict=True)]
    segments = [_segment(s) if s.buffer in results else s for s in lower.stores]
    lines = tuple(dict.fromkeys((*inner.lines, *outer.lines)))
    return Cluster(wide.parallel, wide.reduce, (*segments, *stores), lines)


def joined(nested: Cluster, after: Cluster) -> Cluster:
    """Return `nested` with what follows along the whole row, if memory runs within the segments."""
    merged = join(*align(nested, after))
    ordered = order(merged).coalesced
    rows = {fast_axis(n.layout.strides, ordered.axes) for n in full(ordered) if footprint(n) == product(ordered.axes)}
    if rows != {len(ordered.axes) - 1}:
        raise Refused("the elements of a segment do not lie together in memory")
    return merged


def _check(inner: Cluster, outer: Cluster, results: dict[str, Store], device: Device) -> None:
    if product(outer.parallel) * product(outer.reduce) != product(inner.parallel) or product(outer.reduce) == 1:
        raise Refused("the results of one are not what the other adds up")
    if max(inner.levels.values()) > 1 or max(outer.levels.values()) > 1:
        raise Refused("segments of several reductions, one after the other")
    if inner.scatters or outer.scatters:
        raise Refused("a result is scattered")
    if not all(
        isinstance(s.value, Reduce) and len(s.value.args) == 1 and s.value.dtype is s.dtype for s in results.values()
    ):
        raise Refused("a segment's result is more than a reduction")
    if any(s.buffer not in results and inner.levels[s.value] for s in inner.stores):
        raise Refused("a segment is read again after its reduction")
    if any(outer.runs_along(s) for s in outer.stores):
        raise Refused("the sums of the segments are written beside each segment")
    if product(outer.parallel) < device.sms:
        raise Refused(
            f"{product(outer.parallel)} rows of several segments leave multiprocessors idle, {product(inner.parallel)} "
            "do not"
        )
    if product(inner.reduce) > LONGEST:
        raise Refused(f"segments of {product(inner.reduce)} elements, {LONGEST} at most")


def _turned(inner: Cluster, made: Cluster) -> Cluster:
    """Return `inner` with its parallel axes as `made`, whose loads number its rows, has them."""
    numbers = next(n.layout.strides or () for n in made.order if isinstance(n, Load))
    axes = made.axes
    falling = sorted(range(len(axes)), key=lambda a: -numbers[a])
    extents = [axes[a] for a in falling]
    if contiguous(extents).strides != tuple(numbers[a] for a in falling):
        raise Refused("their axes do not nest")
    cut = inner.reshape(extents, inner.reduce)
    rest = range(len(axes), len(axes) + len(inner.reduce))
    turn = permute(cut.axes, [*(falling.index(a) for a in range(len(axes))), *rest])
    return cut.map(turn, made.parallel, (*made.reduce, *inner.reduce))


def _widen(upper: Cluster, reduce: tuple[int, ...]) -> Affine:
    return Affine((*upper.axes, *reduce), tuple((0, ((d, 1),)) for d in range(len(upper.axes))))


def _segment(store: Store) -> Store:
    assert isinstance(store.value, Reduce)
    return replace(store, value=segment(store.value.op, store.value.args[0], iota(store.layout), store.dtype))


def _of_the_row(node: Reduce, below: dict[Expr, Expr]) -> Expr:
    """Return a reduction of segment results as one of the elements of all segments."""
    added = [n.op for n in postorder(node.args) if isinstance(n, Reduce)]
    if {node.op, *added} == {"sum"} and _linear(node.args[0], below):
        return reduction("sum", *substitute([node.args[0]], below), dtype=node.dtype)
    raise Refused(f"a {node.op} of segments that is not linear in their sums")


# op -> the degrees of its operands for which its result is linear in the segments' sums
LINEAR: dict[str, set[tuple[int, ...]]] = {
    "add": {(1, 1)},
    "sub": {(1, 1)},
    "mul": {(1, 0), (0, 1)},
    "div": {(1, 0)},
    "neg": {(1,)},
    "cast": {(1,)},
}


def _linear(arg: Expr, below: dict[Expr, Expr]) -> bool:
    """Whether `arg` is a sum of products of one segment result each with what is the same for a segment."""
    degree: dict[Expr, int] = {}
    for node in postorder([arg], lambda n: () if n in below else children(n)):
        found = tuple(degree[c] for c in children(node)) if node not in below else ()
        if node in below:
            degree[node] = 1
        elif not any(found):
            degree[node] = 0
        else:
            exact = isinstance(node, Compute) and node.dtype.is_floating_point and node.dtype.itemsize >= 4
            degree[node] = 1 if isinstance(node, Compute) and exact and found in LINEAR.get(node.op, ()) else 2
    return degree[arg] == 1
