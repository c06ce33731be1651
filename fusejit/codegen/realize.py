"""Realize: which values of a graph must become buffers, and why.

In: a functional ATen graph. Out: {node: reason}; every other value lives only in registers.

    {add_3: "read by the extern call mm", relu: "an output"}
"""

from __future__ import annotations

import operator

from torch.fx import Graph, Node

from .cluster import Compute, Expr, Load, Random, Reduce, Scan, Segment, postorder
from .decompose import short
from .ops import OPS
from .size import product
from .views import ALIASES, SPLITS

# A kernel holds at most 200 ops: beyond that, compile time grows faster than what fusion saves.
MAX_WEIGHT = 200
# A value of this weight is stored rather than computed again by a second reader.
RECOMPUTE_WEIGHT = 64


def realize(graph: Graph, fused: set[Node]) -> dict[Node, str]:
    """Return the nodes that need a buffer. `fused` are the nodes that lowering can express in a kernel; all others are extern calls."""
    reasons: dict[Node, str] = {}
    for node in graph.nodes:
        if node.op == "output":
            for operand in node.all_input_nodes:
                reasons.setdefault(base(operand), "an output")
        elif node.op == "call_function" and node not in fused:
            for operand in node.all_input_nodes:
                reasons.setdefault(base(operand), f"read by the extern call {short(node.target)}")
    return reasons


def base(node: Node) -> Node:
    """Return the node whose memory `node` shares: itself, or what its chain of views starts from."""
    while is_alias(node):
        (node,) = node.args[:1]  # type: ignore[assignment]
    return node


def is_alias(node: Node) -> bool:
    """Whether a node only looks at the memory of its first argument; a piece of a split does."""
    if node.op != "call_function":
        return False
    piece = node.target is operator.getitem and any(short(n.target) in SPLITS for n in node.all_input_nodes)
    return piece or short(node.target) in (*ALIASES, *SPLITS, "as_strided.default")


def worth_a_buffer(value: Expr, shape: tuple[int, ...], readers: int) -> str:
    """Return why a value should be stored, or "": stored, its readers move n_reads + 1 + readers units instead of readers * n_reads."""
    if isinstance(value, Load):
        return ""
    nodes = postorder([value])
    size = weight(nodes)
    if size > MAX_WEIGHT // 2:
        return f"{size} ops in one expression"
    if readers < 2:
        return ""
    if size > RECOMPUTE_WEIGHT or any(isinstance(n, Compute) and OPS[n.op].expensive for n in nodes):
        return f"{size} ops, read {readers} times"
    total = product(shape)
    full = {n.buffer for n in nodes if isinstance(n, Load) and (n.index or footprint(n) == total)}
    if readers * (len(full) - 1) > len(full) + 1:
        return f"{readers} readers of {len(full)} inputs"
    return ""


def footprint(node: Load) -> int:
    """Return how many different elements a load reads (its axes of stride 0 read the same ones)."""
    return product(mode.extent for dim in node.layout.dims for mode in dim if mode.stride != 0)


def weight(nodes: list[Expr] | tuple[Expr, ...]) -> int:
    """Return the size of a kernel body: one per cheap op, more for special functions and random numbers."""
    return sum(OPS[n.op].weight if isinstance(n, (Compute, Reduce, Segment)) else 8 * isinstance(n, (Random, Scan)) for n in nodes)
