"""Lowering rules of results that several elements are added to, at places that data gives: stores with computed coordinates.

In: a node like scatter_add or index_put(accumulate=True). Out: its value, in a buffer that one kernel begins and another one adds to.

    index_add(x (4,6), 0, i (9,), y (9,6))   ->   store b1 = x,   then   atomic_add b2, the memory of b1, at  6 * checked(load i) + column

Half types are added up in float32 and rounded once: more accurate than eager's index_add, which rounds after each addition, and as its
embedding and index_put. 8- and 16-bit integers are added up in 32 bits and wrap.

Additions of floats come in any order, so that equal calls may differ in the last bits. Under torch.use_deterministic_algorithms(True) they
are torch's calls, as `refused` says; integers stay.
"""

# fx types the arguments of a node as one wide union; here an op's schema says which member each one is
# mypy: disable-error-code="union-attr,index,arg-type,operator,assignment,misc,type-var,return-value,dict-item,call-overload,attr-defined"

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from .cluster import Cluster, Expr, Load, Store, cast, compute, const, view
from .decompose import short
from .indexing import INDEX, arguments, indexed, one_number_by_mask, put_by_mask
from .layout import Affine, strided
from .lower import Lowering, Rule
from .size import hint, product

SUMS = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.int8: torch.int32, torch.uint8: torch.int32,
        torch.int16: torch.int32}  # fmt: skip
ADDED = (*SUMS, torch.float32, torch.float64, torch.int32, torch.int64)
FEW = 2
"""Sums in another dtype pay while their elements are at most so many times those that are added: they are written and read once more."""


def scattered(
    low: Lowering, node: Node, base: Expr, places: dict[int, Expr], kept: dict[int, int], value: Expr, shape: tuple[int, ...],
    check: str = "checked_place",
) -> Expr:  # fmt: skip
    """Return `base`, of the node's shape, with `value` over `shape` added: dimension d at `places[d]`, or along axis kept[d].

    `check`: "checked_index" lets negative places count from the end, "checked_place" refuses them.
    """
    out = node.meta["val"]
    if not product(shape):
        return base
    inner = SUMS.get(out.dtype, out.dtype)
    onto = _begun(low, node, base, inner)
    made = replace(low.buffers[onto], name=f"b{len(low.buffers)}", written_to=low.buffers[onto].written_to or onto)
    low.buffers[made.name] = made
    low.reasons[made.name] = "several elements are added to one"
    steps = [0] * len(shape)
    for d, axis in kept.items():
        steps[axis] += made.strides[d]
    index = tuple(
        (compute(check, cast(e, INDEX), const(out.shape[d], INDEX), dtype=INDEX), made.strides[d]) for d, e in places.items()
    )  # fmt: skip
    store = Store(made.name, strided(shape, steps), cast(value, inner), inner, "atomic_add", index, onto)
    low.steps.append(Cluster.build(shape, (), [store], low.lines(node)))
    if inner is out.dtype:
        low.owned.add(node)
    return cast(low.whole(made), out.dtype)


def _begun(low: Lowering, node: Node, base: Expr, dtype: torch.dtype) -> str:
    """Return the buffer that is added to: the sums of an earlier op that nobody else reads, or a new one."""
    target, out = node.args[0], node.meta["val"]
    again = isinstance(base, Load) and base is low.values.get(target) and len(target.users) == 1 and target.op == "call_function"
    if again and short(target.target) in SCATTERS and low.buffers[base.buffer].written_to:
        return base.buffer
    begun = low.buffer(out.shape, out.stride(), dtype, out.device)
    low.reasons[begun.name] = "what is added to"
    value = Store(begun.name, begun.layout, cast(base, dtype), dtype)
    low.steps.append(Cluster.build(begun.shape, (), [value], low.lines(node)))
    return begun.name


def _scatter_add(low: Lowering, node: Node) -> Expr:
    """Element p of `source` is added where p stands, with index[p] as its coordinate along `dim`; `source` may be larger than `index`."""
    target, dim, index, source = arguments(node)[:4]
    shape = tuple(index.meta["val"].shape)
    dim %= len(shape)
    (value,) = view([low.values[source]], Affine(shape, tuple((0, ((d, 1),)) for d in range(len(shape)))))
    kept = {d: d for d in range(len(shape)) if d != dim}
    return scattered(low, node, low.values[target], {dim: low.values[index]}, kept, value, shape)


def _index_add(low: Lowering, node: Node) -> Expr:
    target, dim, index, source = arguments(node)[:4]
    shape, alpha, dtype = tuple(source.meta["val"].shape), node.kwargs.get("alpha", 1), node.meta["val"].dtype
    dim %= len(shape)
    (place,) = view([low.expr(index, (shape[dim],))], Affine(shape, ((0, ((dim, 1),)),)))
    value = low.values[source]
    if alpha != 1:
        inner = SUMS.get(dtype, dtype)
        value = compute("mul", cast(value, inner), const(alpha, inner), dtype=inner)
    return scattered(low, node, low.values[target], {dim: place}, {d: d for d in range(len(shape)) if d != dim}, value, shape)


def _index_put(low: Lowering, node: Node) -> Expr:
    target, indices, value = arguments(node)[:3]
    if not _accumulates(node):
        return put_by_mask(low, node)
    shape, places, kept = indexed(low, tuple(target.meta["val"].shape), list(indices))
    return scattered(low, node, low.values[target], places, kept, low.expr(value, shape), shape, "checked_index")


def _embedding_backward(low: Lowering, node: Node) -> Expr:
    """Row p of the gradient is added to row index[p] of the table's, unless that is the one for padding."""
    grad, index, _, padding = arguments(node)[:4]
    shape, dtype = tuple(grad.meta["val"].shape), node.meta["val"].dtype
    (place,) = view([low.values[index]], Affine(shape, tuple((0, ((d, 1),)) for d in range(len(shape) - 1))))
    value = low.values[grad]
    if hint(padding) >= 0:
        here = compute("eq", cast(place, INDEX), const(padding, INDEX), dtype=torch.bool)
        value = compute("where", here, const(0, value.dtype), value, dtype=value.dtype)
    return scattered(low, node, const(0, dtype), {0: place}, {1: len(shape) - 1}, value, shape)


# -- which calls ---------------------------------------------------------------------------------------------------------------------------
def _accumulates(node: Node) -> bool:
    return bool(node.kwargs.get("accumulate") or (len(node.args) > 3 and node.args[3]))


def _updates(node: Node) -> Any:
    """Return the operand whose elements are added, or as many as there are."""
    given = arguments(node)
    if short(node.target) == "embedding_dense_backward.default":
        return given[0].meta["val"]
    return given[2 if short(node.target).startswith("index_put") else 3].meta["val"]


def refused(node: Node) -> str:
    """Return why torch is called instead, "" where a kernel adds."""
    out, name = node.meta["val"], short(node.target)
    if name.startswith("index_put") and not _accumulates(node):
        return "" if one_number_by_mask(node) else "elements are put at places that data gives"
    if name.startswith("index_put") and not all(i is None or i.meta["val"].dtype in (torch.int64, torch.int32) for i in arguments(node)[1]):
        return "how many elements a mask selects is known only when it runs"
    if out.dtype not in ADDED:
        return f"no GPU adds {str(out.dtype).removeprefix('torch.')} to memory"
    if name.startswith("embedding") and arguments(node)[4]:
        return "gradients are scaled by how often an index occurs"
    if name.startswith("scatter_reduce") and (
        arguments(node)[4] != "sum" or not (list(node.args[5:]) or [node.kwargs.get("include_self", True)])[0]
    ):
        return f"no sum: {arguments(node)[4]}"
    if out.dim() == 0 or not out.numel():
        return "a result without dimensions, or without elements"
    if out.dtype.is_floating_point and torch.are_deterministic_algorithms_enabled():
        return "torch.use_deterministic_algorithms is on, and a kernel adds in any order"
    if out.dtype in SUMS and hint(product(out.shape)) > FEW * hint(product(_updates(node).shape)):
        size = "x".join(str(hint(n)) for n in out.shape)
        return f"{size} sums in {str(SUMS[out.dtype]).removeprefix('torch.')} move more than what is added"
    return ""


SCATTERS: dict[str, Rule] = {
    "scatter_add.default": _scatter_add, "scatter_reduce.two": _scatter_add, "index_add.default": _index_add,
    "index_put.default": _index_put, "_unsafe_index_put.default": _index_put, "embedding_dense_backward.default": _embedding_backward,
}  # fmt: skip
SCATTER_CHECKS: dict[str, Callable[[Node], bool]] = {name: lambda node: not refused(node) for name in SCATTERS}

__all__ = ["SCATTERS", "SCATTER_CHECKS", "refused"]
