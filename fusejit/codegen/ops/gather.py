"""Gather: lowering rules of indexing by data: loads at computed coordinates, and writes that a `where` expresses.

In: a node like index, gather or scatter. Out: its value; the indices are checked where they are used.

    gather(x (4,6), 1, i (4,2))  ->  load x at  6 * row + checked_index(load i, 6)
"""

# fx types the arguments of a node as one wide union; here an op's schema says which member each one is

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from ..ir.expr import Expr, Iota, Load, cast, compute, const, iota, leaves, load, rewrite, view
from ..ir.layout import Affine, apply, strided
from ..ir.size import hint, product
from .builder import Lowering, Rule

INDEX = torch.int64


def place(shape: Sequence[int], dim: int) -> Expr:
    """Return the coordinate along `dim`."""
    return iota(strided(shape, [int(d == dim) for d in range(len(shape))]), INDEX)


def arguments(node: Node) -> tuple[Any, ...]:
    """The call's arguments, of which torch.fx says only that they are something."""
    return node.args


def _gathered(
    low: Lowering,
    source: Node,
    places: dict[int, Expr],
    kept: dict[int, int],
    shape: tuple[int, ...],
    check: str = "checked_place",
) -> Expr:
    """Return source[...] over `shape`: dimension d is at data-dependent `places[d]`, or runs along the result's axis
    kept[d].

    `check`: "checked_index" lets negative places count from the end, as only x[...] does; "checked_place" refuses them.
    """
    old = tuple(source.meta["val"].shape)
    checked = {d: compute(check, cast(e, INDEX), const(old[d], INDEX), dtype=INDEX) for d, e in places.items()}
    change = Affine(shape, tuple((0, ((kept[d], 1),)) if d in kept else (0, ()) for d in range(len(old))))
    value = low.values[source]
    grows = not isinstance(value, Load) and hint(product(shape)) > hint(product(old))
    if grows or not _follows(value, places):
        value = low.store(value, source.meta["val"], source, "indexed by data")

    # an index along which nothing moves (an expanded dimension) still has to be in bounds: its term stays, with a
    # stride of 0
    found = [leaf for leaf in leaves([value]) if isinstance(leaf, Load)]
    unmoved = {d for d in places if all(leaf.layout.dims[d][0].stride == 0 for leaf in found)}

    def visit(leaf: Expr) -> Expr:
        """Let a leaf of the source stand at the data-dependent coordinates."""
        if not isinstance(leaf, (Load, Iota)):
            return leaf
        layout, rest = apply(leaf.layout, change)
        assert not rest
        terms = tuple(
            (e, leaf.layout.dims[d][0].stride)
            for d, e in checked.items()
            if d in unmoved or leaf.layout.dims[d][0].stride != 0
        )
        if isinstance(leaf, Load):
            return load(leaf.buffer, layout, leaf.dtype, terms)
        number = iota(layout, leaf.dtype)
        for e, stride in terms:
            scaled = compute("mul", cast(e, leaf.dtype), const(stride, leaf.dtype), dtype=leaf.dtype)
            number = compute("add", number, scaled, dtype=leaf.dtype)
        return number

    return rewrite([value], visit)[0]


def _follows(value: Expr, places: dict[int, Expr]) -> bool:
    """Whether every leaf of an expression has one stride along each gathered dimension, and no computed coordinate of
    its own.
    """
    found = leaves([value])
    if not any(isinstance(leaf, Load) for leaf in found):
        return False  # a constant: without a load there is nothing to check the index with
    for leaf in found:
        if any(len(leaf.layout.dims[d]) > 1 for d in places):
            return False
        if isinstance(leaf, Load) and (leaf.index or leaf.mask is not None):
            return False
    return True


def indexed(
    low: Lowering, old: Sequence[int], indices: Sequence[Node | None]
) -> tuple[tuple[int, ...], dict[int, Expr], dict[int, int]]:
    """Return the shape of x[indices], x of shape `old`; the place of each indexed dimension over it; and the axes of
    the others.
    """
    rank = len(old)
    used = [d for d, i in enumerate(indices) if i is not None]
    block = torch.broadcast_shapes(*(indices[d].meta["val"].shape for d in used))
    together = used == list(range(used[0], used[-1] + 1))
    first = used[0] if together else 0
    kept: dict[int, int] = {}
    axis = 0
    for d in range(rank):
        if d in used:
            axis = max(axis, first + len(block)) if together and d == used[0] else axis
            continue
        if not together and not kept:
            axis = len(block)
        kept[d] = axis
        axis += 1
    axes = {axis: old[d] for d, axis in kept.items()} | {first + a: n for a, n in enumerate(block)}
    shape = tuple(axes[a] for a in range(len(axes)))
    change = Affine(shape, tuple((0, ((first + a, 1),)) for a in range(len(block))))
    places = {}
    for d in used:
        (places[d],) = view([low.expr(indices[d], block)], change)
    return shape, places, kept


def _index(low: Lowering, node: Node) -> Expr:
    source, indices = arguments(node)[:2]
    shape, places, kept = indexed(low, tuple(source.meta["val"].shape), list(indices))
    return _gathered(low, source, places, kept, shape, "checked_index")


def _gather(low: Lowering, node: Node) -> Expr:
    source, dim, index = arguments(node)[:3]
    rank = source.meta["val"].dim()
    dim = dim % rank
    kept = {d: d for d in range(rank) if d != dim}
    return _gathered(low, source, {dim: low.values[index]}, kept, tuple(node.meta["val"].shape))


def _index_select(low: Lowering, node: Node) -> Expr:
    source, dim, index = arguments(node)[:3]
    shape, rank = tuple(node.meta["val"].shape), source.meta["val"].dim()
    dim = dim % rank
    (place,) = view([low.expr(index, (shape[dim],))], Affine(shape, ((0, ((dim, 1),)),)))
    return _gathered(low, source, {dim: place}, {d: d for d in range(rank) if d != dim}, shape)


def _embedding(low: Lowering, node: Node) -> Expr:
    table, index = arguments(node)[:2]
    shape = tuple(node.meta["val"].shape)
    (place,) = view([low.values[index]], Affine(shape, tuple((0, ((d, 1),)) for d in range(len(shape) - 1))))
    return _gathered(low, table, {0: place}, {1: len(shape) - 1}, shape)


def put_by_line(low: Lowering, node: Node) -> Expr:
    """One write per line: the result is `source` where the coordinate is the index, `self` elsewhere."""
    target, dim, index, source = arguments(node)[:4]
    out = node.meta["val"]
    shape, dtype, dim = tuple(out.shape), out.dtype, dim % out.dim()
    checked = compute("checked_place", cast(low.expr(index, shape), INDEX), const(shape[dim], INDEX), dtype=INDEX)
    here = compute("eq", place(shape, dim), checked, dtype=torch.bool)
    value = cast(low.expr(source, shape), dtype) if isinstance(source, Node) else const(source, dtype)
    return compute("where", here, value, low.values[target], dtype=dtype)


def put_by_mask(low: Lowering, node: Node) -> Expr:
    """x[mask] = number."""
    target, (mask,), value = arguments(node)[:3]
    out = node.meta["val"]
    shape = tuple(out.shape)
    change = Affine(shape, tuple((0, ((d, 1),)) for d in range(mask.meta["val"].dim())))
    (where,) = view([low.values[mask]], change)
    return compute("where", where, cast(low.expr(value, shape), out.dtype), low.values[target], dtype=out.dtype)


def one_number_by_mask(node: Node) -> bool:
    indices, value = arguments(node)[1:3]
    more = node.kwargs.get("accumulate") or (len(node.args) > 3 and node.args[3])
    if more or len(indices) != 1 or indices[0] is None or value.meta["val"].dim():
        return False
    mask = indices[0].meta["val"]
    return mask.dtype is torch.bool and mask.dim() > 0 and node.meta["val"].numel() > 0


def one_write_a_line(node: Node) -> bool:
    target, dim, index, source = arguments(node)[:4]
    shape, written = tuple(target.meta["val"].shape), tuple(index.meta["val"].shape)
    if (
        not shape
        or len(node.args) > 4
        or node.kwargs
        or (isinstance(source, Node) and tuple(source.meta["val"].shape) != written)
    ):
        return False
    return written == (*shape[: dim % len(shape)], 1, *shape[dim % len(shape) + 1 :])


def _by_integers(node: Node) -> bool:
    return node.meta["val"].numel() > 0 and all(
        i is None or i.meta["val"].dtype in (torch.int64, torch.int32) for i in arguments(node)[1]
    )


def _from_lines(node: Node) -> bool:
    return arguments(node)[0].meta["val"].dim() > 0 and node.meta["val"].numel() > 0


INDEXING: dict[str, Rule] = {
    "index.Tensor": _index,
    "_unsafe_index.Tensor": _index,
    "gather.default": _gather,
    "index_select.default": _index_select,
    "embedding.default": _embedding,
}
INDEXING_CHECKS: dict[str, Callable[[Node], bool]] = {
    "index.Tensor": _by_integers, "_unsafe_index.Tensor": _by_integers,
    "gather.default": _from_lines, "index_select.default": _from_lines,
    "embedding.default": lambda n: n.meta["val"].numel() > 0 and not any(n.args[3:]),
}  # fmt: skip

__all__ = [
    "INDEX",
    "INDEXING",
    "INDEXING_CHECKS",
    "arguments",
    "indexed",
    "one_number_by_mask",
    "one_write_a_line",
    "place",
    "put_by_line",
    "put_by_mask",
]
