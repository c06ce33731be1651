"""Fast math: rewrites that hold for real numbers and not for floats at their edges; only with `fast_math=True`.

In: the graph of a capture. Out: a new graph in which each pattern of `RULES` is its right-hand side; the input is not
changed.

    y / y                  → 1                  eager: nan at 0 and inf
    y - y                  → 0                  eager: nan at inf
    log(exp(a) + exp(b))   → logaddexp(a, b)    eager: inf where exp overflows
    log(exp(a))            → a                  eager: inf where exp overflows

Nothing is rewritten across an in-place change: the operands could be other values by then. Source of the idea: the
arithmetic passes that MegEngine's graph compiler runs before its code generator.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import Graph, GraphModule, Node

from ... import torch_private as private
from ..ir.effects import in_turn

aten = torch.ops.aten
Rule = Callable[[Graph, Node], "Node | None"]


def floating(node: Node) -> bool:
    return bool(node.meta["val"].dtype.is_floating_point)


def same_operands(node: Node) -> bool:
    one, other = node.args[:2]
    return isinstance(one, Node) and one is other and bool(node.kwargs.get("alpha", 1) == 1) and floating(node)


def filled(value: float) -> Rule:
    """The rule that an op of one value with itself is a constant."""

    def rule(graph: Graph, node: Node) -> Node | None:
        if not same_operands(node):
            return None
        return graph.call_function(aten.full_like.default, (node.args[0], value), {"dtype": node.meta["val"].dtype})

    return rule


def of_exp(value: object) -> Node | None:
    """The operand of an exp of floats, or None."""
    if not isinstance(value, Node) or value.target is not aten.exp.default:
        return None
    operand = value.args[0]
    return operand if isinstance(operand, Node) and floating(operand) else None


def log(graph: Graph, node: Node) -> Node | None:
    inner = node.args[0]
    if not isinstance(inner, Node):
        return None
    dtype = node.meta["val"].dtype  # autocast may have made it another than the operands'
    if (operand := of_exp(inner)) is not None:
        return graph.call_function(aten.clone.default, (operand,)) if operand.meta["val"].dtype == dtype else None
    if inner.target is not aten.add.Tensor or inner.kwargs.get("alpha", 1) != 1:
        return None
    a, b = of_exp(inner.args[0]), of_exp(inner.args[1])
    if a is None or b is None or torch.promote_types(a.meta["val"].dtype, b.meta["val"].dtype) != dtype:
        return None
    return graph.call_function(aten.logaddexp.default, (a, b))


RULES: dict[object, Rule] = {
    aten.div.Tensor: filled(1),
    aten.true_divide.Tensor: filled(1),
    aten.sub.Tensor: filled(0),
    aten.log.default: log,
}
"""Op at the root of a pattern → (graph, node) to what replaces it, or None."""


def algebra(module: GraphModule) -> GraphModule:
    """Return the graph with every pattern of the table rewritten; nodes need `meta["val"]`."""
    graph = Graph()
    new: dict[Node, Node] = {}
    for node in module.graph.nodes:
        made = new[node] = graph.node_copy(node, new.__getitem__)
        made.meta = dict(node.meta)
        if is_change(made):  # what was computed before it is out of every later pattern's reach
            for old in graph.nodes:
                old.meta["fusejit_changed"] = True
            continue
        rule = RULES.get(made.target)
        if rule is None or any(near.meta.get("fusejit_changed") for near in pattern(made)):
            continue
        replacement = rule(graph, made)
        if replacement is not None:
            replacement.meta = dict(made.meta)
            new[node] = replacement
    for node in graph.nodes:
        node.meta.pop("fusejit_changed", None)
    graph.eliminate_dead_code(
        lambda n: (
            n.op in ("placeholder", "output")
            or not isinstance(n.target, private.OpOverload)
            or is_change(n)
            or in_turn(n)
        )
    )
    return GraphModule(module, graph)


def is_change(node: Node) -> bool:
    return isinstance(node.target, private.OpOverload) and node.target._schema.is_mutable


def pattern(node: Node, depth: int = 2) -> list[Node]:
    """The computed operands that a rule looks at."""
    found: list[Node] = []
    level = [node]
    for _ in range(depth):
        level = [operand for one in level for operand in one.all_input_nodes if operand.op == "call_function"]
        found += level
    return found
