"""Scatter: lowering rules of writes at places that data gives: stores with computed coordinates, that replace an
element or are added to it.

In: a node like scatter_add, index_put or index_copy. Out: its value, in a buffer that one kernel begins and another one
changes.

    index_add(x (4,6), 0, i (9,), y (9,6))
        ->  store b1 = x,  then  atomic_add b2, the memory of b1, at  6 * checked(load i) + column
    cache.index_copy_(1, i, y)  ->  store b1, the memory of cache,
        at ...: an input that only this op reads is changed at once

Half types are added up in float32 and rounded once, as in eager's embedding and index_put; or, as in its index_add and
scatter_add, each addition is rounded: graph/scatter_dtype.py chooses. 8- and 16-bit integers are added up in 32 bits
and wrap.

Additions of floats come in any order, so that equal calls may differ in the last bits; of several elements put in one
place, as in eager, any may be the one that stays. Under torch.use_deterministic_algorithms(True) both are torch's
calls, as `refused` says; integer sums stay.
"""

# fx types the arguments of a node as one wide union; here an op's schema says which member each one is

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from ... import torch_private as private
from ..ir.cluster import Cluster, Store
from ..ir.expr import Expr, Load, cast, compute, const, view
from ..ir.layout import Affine, strided
from ..ir.size import hint, product
from .builder import Lowering, Rule
from .decompositions import short
from .gather import INDEX, arguments, indexed, one_number_by_mask, one_write_a_line, put_by_line, put_by_mask
from .views import base

SUMS = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.int8: torch.int32, torch.uint8: torch.int32,
        torch.int16: torch.int32}  # fmt: skip
ADDED = (*SUMS, torch.float32, torch.float64, torch.int32, torch.int64)
FEW = 2
"""Sums in another dtype pay while their elements are at most so many times those that are added: they are written and
read once more.
"""


def scattered(
    low: Lowering,
    node: Node,
    start: Expr,
    places: dict[int, Expr],
    kept: dict[int, int],
    value: Expr,
    shape: tuple[int, ...],
    check: str = "checked_place",
    mode: str = "atomic_add",
) -> Expr:
    """Return `start`, of the node's shape, with `value` over `shape` added or put: dimension d at `places[d]`, or along
    axis kept[d].

    `check`: "checked_index" lets negative places count from the end, "checked_place" refuses them. `mode`: as of
    `Store`.
    """
    out = node.meta["val"]
    if not product(shape):
        return start
    inner = summed(node) if mode else out.dtype
    onto = _begun(low, node, start, inner)
    made = replace(low.buffers[onto], name=f"b{len(low.buffers)}", written_to=low.buffers[onto].written_to or onto)
    low.buffers[made.name] = made
    low.reasons[made.name] = "written at places that data gives"
    steps = [0] * len(shape)
    for d, axis in kept.items():
        steps[axis] += made.strides[d]
    index = tuple(
        (compute(check, cast(e, INDEX), const(out.shape[d], INDEX), dtype=INDEX), made.strides[d])
        for d, e in places.items()
    )
    store = Store(made.name, strided(shape, steps), cast(value, inner), inner, mode, index, onto)
    low.steps.append(Cluster.build(shape, (), [store], low.lines(node)))
    if inner is out.dtype:
        low.owned.add(node)
    return cast(low.whole(made), out.dtype)


def _begun(low: Lowering, node: Node, start: Expr, dtype: torch.dtype) -> str:
    """Return the buffer that is changed: an input, or what an earlier op of the kind made, that nobody else reads; or a
    new one.
    """
    target, out = node.args[0], node.meta["val"]
    if dtype is out.dtype and _changes_input(low, node):
        return target.name
    again = (
        isinstance(start, Load)
        and start is low.values.get(target)
        and len(target.users) == 1
        and target.op == "call_function"
    )
    if again and short(target.target) in SCATTERS and low.buffers[start.buffer].written_to and start.dtype is dtype:
        return start.buffer
    begun = low.buffer(out.shape, out.stride(), dtype, out.device)
    low.reasons[begun.name] = "the elements that data gives no new value"
    value = Store(begun.name, begun.layout, cast(start, dtype), dtype)
    low.steps.append(Cluster.build(begun.shape, (), [value], low.lines(node)))
    return begun.name


def _changes_input(low: Lowering, node: Node) -> bool:
    """Whether a node is the new value of an input that nothing else reads, and no result itself: the input may change
    before the end.
    """
    target = node.args[0]
    if target.op != "placeholder" or sum(n is target for n in private.tree_leaves((node.args, node.kwargs))) > 1:
        return False
    others = [n for n in target.users if n is not node]
    changed = len(others) == 1 and short(others[0].target) == "copy_.default" and others[0].args[:2] == (target, node)
    results = {base(n) for n in node.graph.output_node().all_input_nodes}
    own = low.buffers[target.name]
    return (
        changed
        and node not in results
        and not any(s == 0 and n != 1 for n, s in zip(own.shape, own.strides, strict=True))
    )


def _scatter_add(low: Lowering, node: Node) -> Expr:
    """Element p of `source` is added where p stands, with index[p] as its coordinate along `dim`; `source` may be
    larger than `index`.
    """
    target, dim, index, source = arguments(node)[:4]
    shape = tuple(index.meta["val"].shape)
    dim %= len(shape)
    (value,) = view([low.values[source]], Affine(shape, tuple((0, ((d, 1),)) for d in range(len(shape)))))
    kept = {d: d for d in range(len(shape)) if d != dim}
    return scattered(low, node, low.values[target], {dim: low.values[index]}, kept, value, shape)


def _scatter(low: Lowering, node: Node) -> Expr:
    """As scatter_add, in place of what was there; one number for all is a source too."""
    if one_write_a_line(node):
        return put_by_line(low, node)
    target, dim, index, source = arguments(node)[:4]
    shape, dtype = tuple(index.meta["val"].shape), node.meta["val"].dtype
    dim %= len(shape)
    whole = low.values[source] if isinstance(source, Node) else const(source, dtype)
    (value,) = view([whole], Affine(shape, tuple((0, ((d, 1),)) for d in range(len(shape)))))
    kept = {d: d for d in range(len(shape)) if d != dim}
    return scattered(low, node, low.values[target], {dim: low.values[index]}, kept, value, shape, mode="")


def _index_copy(low: Lowering, node: Node) -> Expr:
    target, dim, index, source = arguments(node)[:4]
    shape = tuple(source.meta["val"].shape)
    dim %= len(shape)
    (place,) = view([low.expr(index, (shape[dim],))], Affine(shape, ((0, ((dim, 1),)),)))
    kept = {d: d for d in range(len(shape)) if d != dim}
    return scattered(low, node, low.values[target], {dim: place}, kept, low.values[source], shape, mode="")


def _index_add(low: Lowering, node: Node) -> Expr:
    target, dim, index, source = arguments(node)[:4]
    shape, alpha, dtype = tuple(source.meta["val"].shape), node.kwargs.get("alpha", 1), node.meta["val"].dtype
    dim %= len(shape)
    (place,) = view([low.expr(index, (shape[dim],))], Affine(shape, ((0, ((dim, 1),)),)))
    value = low.values[source]
    if alpha != 1:
        inner = SUMS.get(dtype, dtype)  # eager rounds the product, and then the sum
        value = compute("mul", cast(value, inner), const(alpha, inner), dtype=inner)
    return scattered(
        low, node, low.values[target], {dim: place}, {d: d for d in range(len(shape)) if d != dim}, value, shape
    )


def _index_put(low: Lowering, node: Node) -> Expr:
    target, indices, value = arguments(node)[:3]
    if one_number_by_mask(node):
        return put_by_mask(low, node)
    shape, places, kept = indexed(low, tuple(target.meta["val"].shape), list(indices))
    mode = "atomic_add" if _adds(node) else ""
    return scattered(low, node, low.values[target], places, kept, low.expr(value, shape), shape, "checked_index", mode)


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


# -- which calls -------------------------------------------------------------------------------------------------------
def summed(node: Node) -> torch.dtype:
    """Return the dtype that a node's results are added up in."""
    dtype = node.meta["val"].dtype
    return node.meta.get("sums", SUMS.get(dtype, dtype))


def _adds(node: Node) -> bool:
    if short(node.target).startswith(("index_put", "_unsafe_index_put")):
        return bool(node.kwargs.get("accumulate") or (len(node.args) > 3 and node.args[3]))
    return not short(node.target).startswith(("scatter.", "index_copy"))


def _updates(node: Node) -> Any:
    """Return the operand whose elements are added, or as many as there are."""
    given = arguments(node)
    if short(node.target) == "embedding_dense_backward.default":
        return given[0].meta["val"]
    return given[2 if short(node.target).startswith("index_put") else 3].meta["val"]


def refused(node: Node) -> str:
    """Return why torch is called instead, "" where a kernel writes."""
    out, name, adds = node.meta["val"], short(node.target), _adds(node)
    deterministic = torch.are_deterministic_algorithms_enabled()
    put = "index_put" in name
    if put and one_number_by_mask(node) or name.startswith("scatter.") and one_write_a_line(node):
        return ""
    if out.dim() == 0 or not out.numel():
        return "a result without dimensions, or without elements"
    if (
        not put
        and not name.startswith("embedding")
        and any(v.meta["val"].dim() == 0 for v in arguments(node)[2:4] if isinstance(v, Node))
    ):
        return "an index or a source without dimensions"
    if put and not all(i is None or i.meta["val"].dtype in (torch.int64, torch.int32) for i in arguments(node)[1]):
        return "how many elements a mask selects is known only when it runs"
    if name.startswith("scatter.") and (len(node.args) > 4 or node.kwargs):
        return "a scatter with another reduction than a sum"
    if name.startswith("scatter_reduce") and (arguments(node)[4] != "sum" or not _includes_itself(node)):
        return f"no sum: {arguments(node)[4]}"
    if name.startswith("embedding") and arguments(node)[4]:
        return "gradients are scaled by how often an index occurs"
    if not adds:
        return (
            "torch.use_deterministic_algorithms is on, and a kernel puts elements in any order" if deterministic else ""
        )
    if out.dtype not in ADDED:
        return f"no GPU adds {str(out.dtype).removeprefix('torch.')} to memory"
    if out.dtype.is_floating_point and deterministic:
        return "torch.use_deterministic_algorithms is on, and a kernel adds in any order"
    if summed(node) is not out.dtype and hint(product(out.shape)) > FEW * hint(product(_updates(node).shape)):
        size = "x".join(str(hint(n)) for n in out.shape)
        return f"{size} sums in {str(SUMS[out.dtype]).removeprefix('torch.')} move more than what is added"
    return ""


def _includes_itself(node: Node) -> bool:
    return bool(node.args[5] if len(node.args) > 5 else node.kwargs.get("include_self", True))


SCATTERS: dict[str, Rule] = {
    "scatter_add.default": _scatter_add,
    "scatter_reduce.two": _scatter_add,
    "index_add.default": _index_add,
    "scatter.src": _scatter,
    "scatter.value": _scatter,
    "index_copy.default": _index_copy,
    "index_put.default": _index_put,
    "_unsafe_index_put.default": _index_put,
    "embedding_dense_backward.default": _embedding_backward,
}
SCATTER_CHECKS: dict[str, Callable[[Node], bool]] = {name: lambda node: not refused(node) for name in SCATTERS}

__all__ = ["SCATTERS", "SCATTER_CHECKS", "SUMS", "refused"]
