"""Realize: which values of a graph must become buffers, and why.

In: a functional ATen graph. Out: {node: reason}; every other value lives only in registers.

    {add_3: "read by the extern call mm", relu: "an output"}
"""

from __future__ import annotations

from torch.fx import Graph, Node

from ..ir.analysis import footprint
from ..ir.expr import Compute, Expr, Load, Random, Reduce, Scan, Segment, postorder
from ..ir.size import product
from ..ops.decompositions import short
from ..ops.table import OPS
from ..ops.views import base

# A kernel holds at most 200 ops: beyond that, compile time grows faster than what fusion saves.
MAX_WEIGHT = 200
# A value of this weight is stored rather than computed again by a second reader.
RECOMPUTE_WEIGHT = 64


def realize(graph: Graph, fused: set[Node]) -> dict[Node, str]:
    """Return the nodes that need a buffer. `fused` are the nodes that lowering can express in a kernel; all others are
    extern calls.
    """
    reasons: dict[Node, str] = {}
    for node in graph.nodes:
        if node.op == "output":
            for operand in node.all_input_nodes:
                reasons.setdefault(base(operand), "an output")
        elif node.op == "call_function" and node not in fused:
            for operand in node.all_input_nodes:
                reasons.setdefault(base(operand), f"read by the extern call {short(node.target)}")
    return reasons


def worth_a_buffer(value: Expr, shape: tuple[int, ...], readers: int) -> str:
    """Return why a value should be stored, or "": stored, its readers move n_reads + 1 + readers units instead of
    readers * n_reads.
    """
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


def weight(nodes: list[Expr] | tuple[Expr, ...]) -> int:
    """Return the size of a kernel body: one per cheap op, more for special functions and random numbers."""
    return sum(
        OPS[n.op].weight if isinstance(n, (Compute, Reduce, Segment)) else 8 * isinstance(n, (Random, Scan))
        for n in nodes
    )
