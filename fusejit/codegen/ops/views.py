"""The table of view ops: each ATen view as a change of layout.

In: an op's input shape and arguments. Out: the `View`s that the layouts of all leaves go through, in order.

    >>> VIEWS["permute.default"]((2, 3), [1, 0])
    (Affine(shape=(3, 2), ...),)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

from torch.fx import Node

from ..ir import layout
from ..ir.layout import Reshape, View
from ..ir.size import AnySize, product
from .decompositions import short

Shape = tuple[int, ...]
Views = tuple[View, ...]


def _reshape(shape: Shape, new: Sequence[int]) -> Views:
    total = product(shape)
    known = product(n for n in new if n != -1)
    return (Reshape(tuple(total // known if n == -1 else n for n in new)),)


def _permute(shape: Shape, order: Sequence[int]) -> Views:
    return (layout.permute(shape, [d % len(shape) for d in order]),)


def _transpose(shape: Shape, a: int, b: int) -> Views:
    order = list(range(len(shape)))
    if order:
        order[a], order[b] = order[b], order[a]
    return _permute(shape, order)


def _expand(shape: Shape, new: Sequence[int], implicit: bool = False) -> Views:
    lead = len(new) - len(shape)
    return (layout.expand(shape, [shape[d - lead] if n == -1 else n for d, n in enumerate(new)]),)


def _unsqueeze(shape: Shape, dim: int) -> Views:
    dim %= len(shape) + 1
    return (Reshape((*shape[:dim], 1, *shape[dim:])),)


def _squeeze(shape: Shape, dims: int | Sequence[int] | None = None) -> Views:
    if dims is None:
        return (Reshape(tuple(n for n in shape if n != 1)),)
    chosen = {d % len(shape) for d in ([dims] if isinstance(dims, int) else dims)} if shape else set()
    return (Reshape(tuple(n for d, n in enumerate(shape) if not (n == 1 and d in chosen))),)


def _slice(shape: Shape, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Views:
    dim %= len(shape)
    begin, stop = (
        within(place, shape[dim]) for place in (0 if start is None else start, shape[dim] if end is None else end)
    )
    length = 0 if stop <= begin else (stop - begin + step - 1) // step
    return (layout.slice_(shape, dim, begin, step, length),)


def within(place: AnySize, length: AnySize) -> AnySize:
    """Return a start or an end of a slice as Python takes it: counted from the end where negative, and inside."""
    place = place + length if place < 0 else place
    return 0 if place < 0 else length if place > length else place


def _select(shape: Shape, dim: int, index: int) -> Views:
    dim %= len(shape)
    return (layout.select(shape, dim, index + shape[dim] if index < 0 else index),)


def _flip(shape: Shape, dims: Sequence[int]) -> Views:
    return (layout.flip(shape, [d % len(shape) for d in dims]),) if shape else ()


def _diagonal(shape: Shape, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Views:
    return (layout.diagonal(shape, offset, dim1 % len(shape), dim2 % len(shape)),)


def _unfold(shape: Shape, dim: int, size: int, step: int) -> Views:
    if not shape:  # a scalar has one window of at most one element
        return (Reshape((size,)),) if size == 1 else ()
    return (layout.unfold(shape, dim % len(shape), size, step),)


def _narrow(shape: Shape, dim: int, start: int, length: int) -> Views:
    return _slice(shape, dim, start, start + length)


def _repeat(shape: Shape, repeats: Sequence[int]) -> Views:
    lead = len(repeats) - len(shape)
    full = (1,) * lead + shape
    pairs = tuple(n for r, s in zip(repeats, full, strict=True) for n in (1, s))
    wide = tuple(n for r, s in zip(repeats, full, strict=True) for n in (r, s))
    final = tuple(r * s for r, s in zip(repeats, full, strict=True))
    return (Reshape(pairs), layout.expand(pairs, wide), Reshape(final))


def _same(shape: Shape, *_: object, **__: object) -> Views:
    return ()


# Results that share memory with their operand: a buffer seen through one of these is still that buffer.
ALIASES: dict[str, Callable[..., Views]] = {
    "view.default": _reshape,
    "_unsafe_view.default": _reshape,
    "reshape.default": _reshape,
    "permute.default": _permute,
    "t.default": lambda shape: _permute(shape, range(len(shape))[::-1]),
    "transpose.int": _transpose,
    "expand.default": _expand,
    "unsqueeze.default": _unsqueeze,
    "squeeze.default": _squeeze,
    "squeeze.dim": _squeeze,
    "squeeze.dims": _squeeze,
    "slice.Tensor": _slice,
    "select.int": _select,
    "diagonal.default": _diagonal,
    "unfold.default": _unfold,
    "narrow.default": _narrow,
    "alias.default": _same,
    "detach.default": _same,
}
# New tensors that only rename positions: read through the layout, a buffer of their own when one is needed.
COPIES: dict[str, Callable[..., Views]] = {
    "clone.default": _same,
    "contiguous.default": _same,
    "lift_fresh_copy.default": _same,
    "lift_fresh.default": _same,
    "flip.default": _flip,
    "repeat.default": _repeat,
    "view_copy.default": _reshape,
    "permute_copy.default": _permute,
    "expand_copy.default": _expand,
    "slice_copy.Tensor": _slice,
    "select_copy.int": _select,
    "transpose_copy.int": _transpose,
    "unsqueeze_copy.default": _unsqueeze,
    "diagonal_copy.default": _diagonal,
    "detach_copy.default": _same,
    "_reshape_copy.default": _reshape,
    "alias_copy.default": _same,
    "squeeze_copy.dims": _squeeze,
    "squeeze_copy.dim": _squeeze,
    "squeeze_copy.default": _squeeze,
    "narrow_copy.default": _narrow,
}
VIEWS = {**ALIASES, **COPIES}
# Their second argument is the result's shape, which may have -1 in it.
GIVES_SHAPE = {
    "view.default",
    "_unsafe_view.default",
    "reshape.default",
    "view_copy.default",
    "_reshape_copy.default",
    "expand.default",
    "expand_copy.default",
}
# Views that come several at a time.
SPLITS = ("split.Tensor", "split_with_sizes.default", "unbind.int")


def base(node: Node) -> Node:
    """Return the node whose memory `node` shares: itself, or what its chain of views starts from."""
    while is_alias(node):
        (node,) = node.args[:1]  # type: ignore[assignment]
    return node


def is_alias(node: Node) -> bool:
    """Whether a node only looks at the memory of its first argument; a piece of a split does."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return any(short(n.target) in SPLITS for n in node.all_input_nodes)
    return short(node.target) in ALIASES or short(node.target) not in COPIES and getattr(node.target, "is_view", False)
