"""Topological sort: put a graph that was just traced into the order in which it is called.

In: the module of a trace, and the nodes of the tensors that it met on the way. Out: the same module: first the
arguments, then those tensors, then ops, without switches of gradients that change nothing.

    order_graph(module, [lifted_0])
    # graph(%x, %lifted_0): %add = aten.add.Tensor(%x, %lifted_0)
"""

from __future__ import annotations

import torch

from .. import torch_private as private
from ..errors import Unsupported
from .source_lines import user_line

Tensor = torch.Tensor


def order_graph(module: torch.fx.GraphModule, lifted: list[torch.fx.Node]) -> None:
    """Put lifted inputs behind the arguments, drop switches of gradients without effect, refuse tensors that lost their
    origin.
    """
    from ..torch_private import FakeTensor

    graph = module.graph
    names = {node.name for node in lifted}
    inputs = [node for node in graph.nodes if node.op == "placeholder" and node.name not in names]
    moved = [node for node in graph.nodes if node.op == "placeholder" and node.name in names]
    anchor = next(node for node in graph.nodes if node not in inputs and node not in moved)
    for node in (*inputs, *moved):
        anchor.prepend(node)
    for node in graph.nodes:
        value = getattr(module, str(node.target)) if node.op == "get_attr" else None
        if isinstance(value, FakeTensor) or isinstance(value, Tensor) and private.is_functorch_wrapped_tensor(value):
            reason = "a tensor made there cannot be followed through the graph"
            raise Unsupported(
                "a step outside torch's tracing",
                reason,
                next((line for user in node.users if (line := user_line(user))), ""),
            )
    drop_switches(graph, torch.is_grad_enabled() and not torch.is_inference_mode_enabled())
    graph.lint()
    module.recompile()


def drop_switches(graph: torch.fx.Graph, current: bool) -> None:
    """Drop switches of gradients on and off that change nothing, from a graph that starts in the state `current`."""
    pending = None
    for node in list(graph.nodes):
        if node.target is private.set_grad_enabled:
            if pending is not None:
                graph.erase_node(pending)
            pending = node
        elif pending is not None and (node.op == "call_function" or node.op == "output"):
            if pending.args[0] is current:
                graph.erase_node(pending)
            else:
                current = pending.args[0]
            pending = None
