"""Output views: results that are only views of inputs or of other results, and are replayed natively.

In: the graph of a capture. Out: its core, which returns no view, and an epilogue that makes the views of what the core
returns.

    core(x) -> relu        epilogue(x, relu) -> relu, relu.view(4, 2)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import torch_private as private
from ..codegen.ir.effects import alive_before

Tensor = torch.Tensor


def is_view(node: Any) -> bool:
    """Whether a node only looks at its first argument's memory."""
    if not isinstance(node, torch.fx.Node) or not isinstance(node.target, private.OpOverload):
        return False
    schema = node.target._schema
    returns = schema.returns[0].alias_info if len(schema.returns) == 1 else None
    if returns is None or schema.is_mutable or "*" in returns.after_set or not isinstance(node.args[0], torch.fx.Node):
        return False
    made, source = node.meta.get("val"), node.args[0].meta.get("val")
    if not (isinstance(made, Tensor) and isinstance(source, Tensor)):
        return True
    # what may be a view is none here where it copied: a cast, a reshape or a `contiguous` that had to move something
    return made.untyped_storage()._cdata == source.untyped_storage()._cdata


def split_views(module: torch.fx.GraphModule) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule | None]:
    """Take results that are views of inputs, of each other, or the same twice, out of a graph.

    Returns the core graph and a graph (inputs..., core results...) -> all results; None when nothing had to be taken
    out.
    """
    graph = module.graph
    outputs = list(graph.output_node().args[0])  # type: ignore[arg-type]
    if any(node.target is private.set_grad_enabled for node in graph.nodes):
        return module, None
    roots: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in graph.nodes:
        roots[node] = (
            roots[node.args[0]] if is_view(node) else roots.get(node.args[0], node) if is_inplace(node) else node
        )
    changed = {roots[node.args[0]] for node in graph.nodes if is_inplace(node)}
    groups: dict[torch.fx.Node, int] = {}
    for value in outputs:
        groups[roots[value]] = groups.get(roots[value], 0) + 1
    taken = {
        value
        for value in outputs
        if roots[value] not in changed and (roots[value].op == "placeholder" or groups[roots[value]] > 1)
    }
    if not taken:
        return module, None
    core_outputs = dict.fromkeys(value for value in outputs if value not in taken)
    core_outputs |= dict.fromkeys(
        roots[value] for value in outputs if value in taken and roots[value].op != "placeholder"
    )
    return core_graph(module, list(core_outputs)), epilogue(module, outputs, list(core_outputs), taken)


def is_inplace(node: torch.fx.Node) -> bool:
    return (
        isinstance(node.target, private.OpOverload)
        and node.target._schema.is_mutable
        and bool(node.args)
        and isinstance(node.args[0], torch.fx.Node)
    )


def core_graph(module: torch.fx.GraphModule, outputs: list[torch.fx.Node]) -> torch.fx.GraphModule:
    """Copy a graph with other outputs."""
    copied = torch.fx.Graph()
    names: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in module.graph.nodes:
        if node.op != "output":
            names[node] = copied.node_copy(node, names.__getitem__)
    copied.output(tuple(names[value] for value in outputs))
    copied.eliminate_dead_code(alive_before)
    return torch.fx.GraphModule(module, copied)


def epilogue(module: torch.fx.GraphModule, outputs: list, core: list, taken: set) -> torch.fx.GraphModule:
    """The graph that replays views from the inputs and the core's results."""
    made = torch.fx.Graph()
    names: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in module.graph.nodes:
        if node.op == "placeholder":
            names[node] = made.placeholder(node.name)
    for number, node in enumerate(core):
        names[node] = made.placeholder(f"result_{number}")

    def copy(node: torch.fx.Node) -> torch.fx.Node:
        chain = []
        while node not in names:
            chain.append(node)
            node = node.args[0]  # type: ignore[assignment]
        for link in reversed(chain):
            names[link] = made.node_copy(link, names.__getitem__)
        return names[chain[0]] if chain else names[node]

    made.output(tuple(copy(value) for value in outputs))
    return torch.fx.GraphModule(torch.nn.Module(), made)


def with_views(run: Callable, replay: Callable) -> Callable:
    def run_with_views(inputs: list[Any]) -> Sequence[Any]:
        kept = tuple(inputs)
        return replay(*kept, *run(inputs))

    return run_with_views
