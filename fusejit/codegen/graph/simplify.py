"""Simplify: dead code and repeated nodes leave the graph before anything is lowered.

In: a functional ATen graph. Out: a new graph module with the same results; the input is not changed.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, GraphModule, Node

from ... import torch_private as private
from ..ir.effects import alive, effect
from ..ops.views import base


def simplify(module: GraphModule) -> GraphModule:
    """Return the graph without dead and repeated nodes. What has an effect is never merged; see effect.py for what is
    never dropped.
    """
    graph = Graph()
    new: dict[Node, Node] = {}
    # results that eager would make apart must not share memory, even where they are equal
    results = {base(operand) for operand in module.graph.output_node().all_input_nodes}
    seen: dict[object, Node] = {}
    for node in module.graph.nodes:
        made = graph.node_copy(node, new.__getitem__)
        made.meta = dict(node.meta)
        key = None if node in results else _key(made)
        only = None if node in results else _only_choice(made)
        if only is not None:
            graph.erase_node(made)
            new[node] = only
            continue
        if key is not None and key in seen:
            graph.erase_node(made)
            made = seen[key]
        elif key is not None:
            seen[key] = made
        new[node] = made
    graph.eliminate_dead_code(alive)
    return unwritten(graph, module)


def unwritten(graph: Graph, root: torch.nn.Module | None = None) -> GraphModule:
    """A graph's module whose Python is written only if somebody runs or prints it: fx takes longer for it than all
    passes together.
    """
    from ...torch_private import LazyGraphModule as _LazyGraphModule  # absent from torch.fx's own names in 2.11 to 2.13

    return _LazyGraphModule(torch.nn.Module() if root is None else root, graph)


def _key(node: Node) -> object | None:
    """Return what makes two pure calls the same, or None where they must stay apart."""
    if node.op != "call_function" or not isinstance(node.target, private.OpOverload):
        return None
    if effect(node.target) is not None or "empty" in str(node.target):
        return None
    return (node.target, _frozen(node.args), _frozen(node.kwargs))


def _only_choice(node: Node) -> Node | None:
    """Return what a `where` chooses whatever its condition says: a guard of gradients (frontend/predicate.py) where
    none are asked for.
    """
    if node.target is not torch.ops.aten.where.self:
        return None
    one, other = node.args[1:]
    if not isinstance(one, Node) or not isinstance(other, Node) or _itself(one) is not _itself(other):
        return None
    kept, result = one.meta["val"], node.meta["val"]
    return one if kept.shape == result.shape and kept.dtype is result.dtype else None


def _itself(node: Node) -> Node:
    """The node behind ops that only give a tensor another object."""
    while node.target in (torch.ops.aten.alias.default, torch.ops.aten.detach.default):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _frozen(value: object) -> object:
    if isinstance(value, (tuple, list)):
        return tuple(_frozen(v) for v in value)
    if isinstance(value, dict):
        return tuple((k, _frozen(v)) for k, v in value.items())
    return (type(value), repr(value)) if isinstance(value, (bool, int, float)) else value
