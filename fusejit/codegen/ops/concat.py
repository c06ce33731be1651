"""Concat: a tensor that is put together of others, or that is a part of one, by selects between loads that move.

In: cat, pad, roll, slice_scatter, split and their kin. Out: a value of the graph; no buffer.

    cat([x (4,6), y (4,2)], 1)   ->   where(column < 6, load x, load y  at column - 6), each read where it is taken only
"""

# fx types the arguments of a node as one wide union; here an op's schema says which member each one is

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from ..ir.expr import Compute, Expr, Load, cast, compute, const, load, rewrite, view
from ..ir.layout import Affine, Reshape, select, slice_
from ..ir.size import Size
from .builder import Lowering, Rule
from .gather import INDEX, place
from .views import within as inside

MAX_PIECES = 16  # a cat of more pieces is a chain of selects too long to be worth a kernel


def masked(value: Expr, mask: Expr) -> Expr:
    """Return `value` reading memory only where `mask` holds."""

    def visit(leaf: Expr) -> Expr:
        if isinstance(leaf, Compute) and leaf.op in (
            "checked_index",
            "checked_place",
        ):  # where nothing is read there is nothing to check
            inside = compute("where", mask, leaf.args[0], const(0, INDEX), dtype=INDEX)
            return compute(leaf.op, inside, leaf.args[1], dtype=INDEX)
        if not isinstance(leaf, Load):
            return leaf
        both = mask if leaf.mask is None else compute("logical_and", leaf.mask, mask, dtype=torch.bool)
        return load(leaf.buffer, leaf.layout, leaf.dtype, leaf.index, both, leaf.fill)

    return rewrite([value], visit)[0]


def within(shape: Sequence[int], dim: int, start: int, end: int) -> Expr | None:
    """Return the test start <= coordinate < end, without the sides that always hold."""
    tests = []
    if start > 0:
        tests.append(compute("ge", place(shape, dim), const(start, INDEX), dtype=torch.bool))
    if end < shape[dim]:
        tests.append(compute("lt", place(shape, dim), const(end, INDEX), dtype=torch.bool))
    return compute("logical_and", *tests, dtype=torch.bool) if len(tests) == 2 else tests[0] if tests else None


def shifted(value: Expr, own: Sequence[int], shape: Sequence[int], dim: int, start: int) -> tuple[Expr, Expr | None]:
    """Return `value` moved to `start` along `dim` of `shape`, and where it stands there."""
    (moved,) = view([value], slice_(own, dim, -start, 1, shape[dim]))
    test = within(shape, dim, start, start + own[dim])
    return (masked(moved, test) if test is not None else moved), test


def _cat(low: Lowering, node: Node) -> Expr:
    out, dim = node.meta["val"], (node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0))
    shape, result, start = tuple(out.shape), None, 0
    pieces = [n for n in node.args[0] if tuple(n.meta["val"].shape) != (0,)]
    dim = dim % max(len(shape), 1)
    starts = []
    for piece in pieces:
        starts.append(start)
        start += piece.meta["val"].shape[dim]
    for piece, begin in reversed(list(zip(pieces, starts, strict=True))):
        own = tuple(piece.meta["val"].shape)
        if not own[dim]:
            continue
        value, _ = shifted(cast(low.values[piece], out.dtype), own, shape, dim, begin)
        before = compute("lt", place(shape, dim), const(begin + own[dim], INDEX), dtype=torch.bool)
        result = value if result is None else compute("where", before, value, result, dtype=out.dtype)
    return result if result is not None else const(0, out.dtype)


def _pad(low: Lowering, node: Node) -> Expr:
    source, pads = node.args[0], list(node.args[1])
    fill = node.args[2] if len(node.args) > 2 else node.kwargs.get("value", 0)
    dtype, value = node.meta["val"].dtype, low.values[source]
    own, tests = list(source.meta["val"].shape), []
    final = tuple(node.meta["val"].shape)
    for k in range(len(pads) // 2):
        dim, before = len(own) - 1 - k, pads[2 * k]
        (value,) = view([value], slice_(own, dim, -before, 1, final[dim]))
        test = within(final, dim, before, before + own[dim])
        own[dim] = final[dim]
        tests += [test] if test is not None else []
    if not tests:
        return value
    inside = tests[0]
    for test in tests[1:]:
        inside = compute("logical_and", inside, test, dtype=torch.bool)
    return compute("where", inside, masked(value, inside), const(fill, dtype), dtype=dtype)


def _roll(low: Lowering, node: Node) -> Expr:
    out, value = node.meta["val"], low.values[node.args[0]]
    shape = tuple(out.shape)
    for shift, dim in zip(node.args[1], node.args[2], strict=True):
        dim, n = dim % len(shape), shape[dim % len(shape)]
        shift %= n or 1
        if not shift:
            continue
        (low_part,) = view(
            [value], slice_(shape, dim, n - shift, 1, n)
        )  # reads from n - shift on, for coordinates below shift
        (high_part,) = view([value], slice_(shape, dim, -shift, 1, n))
        wrapped = compute("lt", place(shape, dim), const(shift, INDEX), dtype=torch.bool)
        rest = compute("ge", place(shape, dim), const(shift, INDEX), dtype=torch.bool)
        value = compute("where", wrapped, masked(low_part, wrapped), masked(high_part, rest), dtype=out.dtype)
    return value


def _slice_scatter(low: Lowering, node: Node) -> Expr:
    names = ("dim", "start", "end", "step")
    given = dict(zip(names, node.args[2:], strict=False)) | dict(node.kwargs)
    target, source = node.args[0], node.args[1]
    shape, own = tuple(node.meta["val"].shape), tuple(source.meta["val"].shape)
    dim = given.get("dim", 0) % len(shape)
    start = inside(given.get("start") or 0, shape[dim])
    return _put(low, node, target, low.values[source], own, dim, start)


def _select_scatter(low: Lowering, node: Node) -> Expr:
    target, source, dim, index = node.args
    shape = tuple(node.meta["val"].shape)
    dim = dim % len(shape)
    index = index + shape[dim] if index < 0 else index
    own = (*shape[:dim], 1, *shape[dim + 1 :])
    (value,) = view(
        [low.values[source]], Affine(own, tuple((0, ((d + (d >= dim), 1),)) for d in range(len(shape) - 1)))
    )
    return _put(low, node, target, value, own, dim, index)


def _diagonal_scatter(low: Lowering, node: Node) -> Expr:
    """Row r of the diagonal lies at (r, r + offset): there stands element r of `source`, counted from the first row
    that it has.
    """
    target, source, *rest = node.args
    given = (
        {"offset": 0, "dim1": 0, "dim2": 1}
        | dict(zip(("offset", "dim1", "dim2"), rest, strict=False))
        | dict(node.kwargs)
    )
    out = node.meta["val"]
    shape, offset, rows, columns = (
        tuple(out.shape),
        given["offset"],
        given["dim1"] % out.dim(),
        given["dim2"] % out.dim(),
    )
    others = [d for d in range(len(shape)) if d not in (rows, columns)]
    at = compute("add", place(shape, rows), const(offset, INDEX), dtype=INDEX)
    here = compute("eq", at, place(shape, columns), dtype=torch.bool)
    change = Affine(shape, (*((0, ((d, 1),)) for d in others), (min(offset, 0), ((rows, 1),))))
    (moved,) = view([cast(low.values[source], out.dtype)], change)
    return compute("where", here, masked(moved, here), low.values[target], dtype=out.dtype)


def _put(low: Lowering, node: Node, target: Any, value: Expr, own: Sequence[int], dim: int, start: int) -> Expr:
    """Return `target` with `value` in its place from `start` on along `dim`."""
    dtype, shape = node.meta["val"].dtype, tuple(node.meta["val"].shape)
    if not own[dim]:
        return low.values[target]
    moved, test = shifted(cast(value, dtype), own, shape, dim, start)
    return moved if test is None else compute("where", test, moved, low.values[target], dtype=dtype)


def _as_strided(low: Lowering, node: Node) -> Expr:
    """See a contiguous value's elements, counted in row-major order, through other sizes and strides."""
    source, size, strides, *offset = node.args
    flat = source.meta["val"].numel()
    whole = Affine(tuple(size), ((offset[0] or 0 if offset else 0, tuple(enumerate(strides))),))
    return view(view([low.values[source]], Reshape((flat,))), whole)[0]


def _is_contiguous(node: Node) -> bool:
    source = node.args[0].meta["val"]
    return (
        source.is_contiguous() and not source.storage_offset() and source.numel() > 0 and node.meta["val"].numel() > 0
    )


def _split(low: Lowering, node: Node) -> Any:
    source, sizes = node.args[0], node.args[1]
    shape = tuple(source.meta["val"].shape)
    dim = (node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)) % len(shape)
    if isinstance(sizes, (int, Size)):
        sizes = [v.shape[dim] for v in node.meta["val"]]
    pieces, start = [], 0
    for n in sizes:
        pieces.append(view([low.values[source]], slice_(shape, dim, start, 1, n))[0])
        start += n
    return tuple(pieces)


def _unbind(low: Lowering, node: Node) -> Any:
    source = node.args[0]
    shape = tuple(source.meta["val"].shape)
    dim = (node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)) % len(shape)
    return tuple(view([low.values[source]], select(shape, dim, k))[0] for k in range(len(node.meta["val"])))


def _tensors_small(node: Node) -> bool:
    return len(node.args[0]) <= MAX_PIECES


PIECES: dict[str, Rule] = {
    "cat.default": _cat,
    "constant_pad_nd.default": _pad,
    "roll.default": _roll,
    "slice_scatter.default": _slice_scatter,
    "select_scatter.default": _select_scatter,
    "diagonal_scatter.default": _diagonal_scatter,
    "split_with_sizes.default": _split,
    "split.Tensor": _split,
    "unbind.int": _unbind,
    "as_strided.default": _as_strided,
}
PIECE_CHECKS: dict[str, Callable[[Node], bool]] = {
    "cat.default": _tensors_small, "as_strided.default": _is_contiguous,
    "roll.default": lambda n: len(n.args) > 2 and bool(n.args[2]) and n.meta["val"].numel() > 0,
    "slice_scatter.default": lambda n: (n.kwargs.get("step") or (n.args[5] if len(n.args) > 5 else 1)) == 1,
    "constant_pad_nd.default": lambda n: n.meta["val"].numel() > 0 and min(n.args[1], default=0) >= -(2**31),
}  # fmt: skip
