"""Decisions: the half-type values of a graph whose exact bits decide something, and which therefore have one rounding
everywhere.

In: an fx graph, and which of its nodes a kernel may compute. Out: the nodes whose values are rounded where they are
made.

    y = x.exp(); m = y.amax(); return m, (y == m).sum()
        # eq decides: y and what y is made of are rounded, m is a rounded y then

numerics="fast" keeps a chain in float32, and rounds what it stores. A value may be saved by one kernel and computed
again by another, from operands of which some were saved: the bits then differ, which no sum minds, but `==` does. So
what is compared, and every half-type value that it is computed from, back to what is in memory, is rounded at once.
Whoever stores, reads or recomputes it has the same bits.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Container

import torch
from torch.fx import Graph, Node

from ... import torch_private as private
from ..ops.decompositions import short
from ..ops.formulas import HALF
from ..ops.table import POINTWISE, REDUCTIONS
from ..ops.views import SPLITS, VIEWS

COMPARED = "fusejit_compared"
"""In the meta of a node that the joint graph compares, for the forward and the backward cut out of it."""

# Ops that give no floating-point number decide; of those that do, these jump where their operand crosses a bound.
JUMPS = frozenset(
    {
        "floor",
        "ceil",
        "trunc",
        "fix",
        "round",
        "frac",
        "sign",
        "sgn",
        "heaviside",
        "remainder",
        "fmod",
        "floor_divide",
        "hardshrink",
        "threshold",
        "threshold_backward",
        "leaky_relu_backward",
        "hardtanh_backward",
        "hardsigmoid_backward",
        "elu_backward",
        "angle",
    }
)
# Ops beside those of the op table whose results say where something is, or how many.
PLACES = frozenset(
    {
        "max",
        "min",
        "cummax",
        "cummin",
        "sort",
        "topk",
        "kthvalue",
        "median",
        "nanmedian",
        "mode",
        "argsort",
        "msort",
        "searchsorted",
        "bucketize",
        "nonzero",
        "count_nonzero",
        "histc",
        "unique_dim",
        "_unique2",
        "unique_consecutive",
    }
)
# Ops that ask for infinities and NaN alone: no bfloat16 becomes one by rounding alone that matters, and nothing before
# them.
TESTS = frozenset({"isnan", "isinf", "isfinite", "isposinf", "isneginf", "nan_to_num"})
# Ops whose result is one of their operands, or that with another sign, or an integer near it: rounded where the operand
# is.
EXACT = frozenset(
    {
        "neg",
        "negative",
        "abs",
        "absolute",
        "positive",
        "relu",
        "maximum",
        "minimum",
        "fmax",
        "fmin",
        "amax",
        "amin",
        "max",
        "min",
        "sign",
        "sgn",
        "floor",
        "ceil",
        "trunc",
        "fix",
        "copy",
        "cat",
        "stack",
        "gather",
        "index",
        "index_select",
        "embedding",
        "roll",
        "cummax",
        "cummin",
        "lift_fresh_copy",
    }
)


def compared(graph: Graph, inside: Callable[[Node], bool]) -> set[Node]:
    """Return the nodes of half types whose values decide something; `inside`: whether a kernel may compute a node
    beside its readers.
    """
    if not any(dtype in HALF for node in graph.nodes for dtype in dtypes(node)):
        return set()
    found = {node for node in graph.nodes if COMPARED in node.meta}
    waiting: list[Node] = []
    for node in graph.nodes:
        for operand in node.all_input_nodes if decides(node) else ():
            if not _is_float(operand):
                continue
            if not _only_range(node):
                waiting.append(operand)
            elif torch.float16 in dtypes(operand):
                found.add(operand)
    seen: set[Node] = set()
    while waiting:
        node = waiting.pop()
        if node in seen or node.op != "call_function" or not inside(node) or not _is_float(node):
            continue
        seen.add(node)
        waiting += node.all_input_nodes
    return found | {node for node in seen if any(dtype in HALF for dtype in dtypes(node))}


def mark_compared(graph: Graph, rules: Container[str]) -> None:
    """Mark what a joint graph compares, before it is cut: its forward cannot see what its backward asks. `rules`: more
    ops of kernels.
    """
    known = lambda node: short(node.target) in POINTWISE or short(node.target) in VIEWS or short(node.target) in rules  # noqa: E731
    for node in compared(graph, lambda node: node.target is operator.getitem or known(node)):
        node.meta[COMPARED] = True


def decides(node: Node) -> bool:
    """Whether the exact bits of a node's operands decide its result."""
    if node.op != "call_function" or not isinstance(node.target, private.OpOverload):
        return False
    name = short(node.target)
    stem = name.removeprefix("prims.").partition(".")[0]
    if stem in JUMPS or stem in TESTS or node.kwargs.get("rounding_mode") is not None:
        return True
    known = name in POINTWISE or name in REDUCTIONS or stem in PLACES
    return known and any(not dtype.is_floating_point for dtype in dtypes(node))


def exact(node: Node) -> bool:
    """Whether a node's value needs no rounding if its operands have it."""
    stem, name = str(node.target).removeprefix("aten.").partition(".")[0], short(node.target)
    if node.target is operator.getitem:
        return all(exact(source) for source in node.all_input_nodes)
    if stem in EXACT or name in VIEWS or name in SPLITS or name == "where.self":
        kinds = {dtype for operand in node.all_input_nodes for dtype in dtypes(operand) if dtype.is_floating_point}
        return kinds == {dtype for dtype in dtypes(node) if dtype.is_floating_point}
    return False


def _only_range(node: Node) -> bool:
    """Whether a node asks for infinities or NaN alone, as the shift of a logsumexp does, and `x != x`."""
    stem = short(node.target).removeprefix("prims.").partition(".")[0]
    if stem in ("eq", "ne"):
        one, other = node.args[:2]
        return one is other or (isinstance(other, float) and math.isinf(other))
    return stem in TESTS


def _is_float(node: Node) -> bool:
    return any(dtype.is_floating_point for dtype in dtypes(node))


def dtypes(node: Node) -> list[torch.dtype]:
    """The dtypes of what a node gives, tensors alone."""
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else (value,)
    return [v.dtype for v in values if isinstance(v, torch.Tensor)]
