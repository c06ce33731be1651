"""Torch's runtime wrappers around our Programs: in-place changes of inputs that autograd must see.

In: a joint graph with AOTAutograd's metadata. Out: why torch's wrappers have to run it, and `Built` that runs so.

    >>> why_wrapped(joint)
    'an input is changed in place and requires grad'
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..codegen.ir.effects import kept
from ..errors import Unsupported
from ..runtime.torch_private import unread
from .built import Built, Compiler, flat_graph, outside_autocast, placeholder_values
from .partition import halved


def why_wrapped(joint: Any) -> str:
    """Why a graph keeps torch's wrappers; "" when the thin route is right."""
    from ..torch_private import MutationType, OutputType

    metadata = joint._aot_state.fw_metadata
    alone = (OutputType.non_alias, OutputType.unsafe_view_alias)
    if any(getattr(wrapper, "needs_post_compile", False) for wrapper in joint._aot_graph_capture.wrappers):
        if any(
            info.output_type not in alone for info in metadata.output_info
        ):  # torch's wrappers rebuild such a result at a wrong place
            raise Unsupported(
                "a result that is an input's memory", "other inputs share memory and are changed in place"
            )
        return "inputs that share memory are changed in place"
    if any(info.mutation_type is MutationType.MUTATED_OUT_GRAPH for info in metadata.input_info):
        return "an input that requires grad, or its shape, is changed in place"
    if any(info.output_type not in alone for info in metadata.output_info):
        return "a result shares memory with an input or with another result"
    if metadata.num_intermediate_bases:
        return "results share memory"
    if metadata.tokens or metadata.num_backward_tokens:
        return "ops with effects keep their order"
    return "the graph switches gradients on or off for its caller" if metadata.grad_enabled_mutation is not None else ""


def wrapped(joint: Any, compiler: Compiler, graphs: dict[str, Any], reason: str, mutates: bool) -> Built:
    """Compile both halves and run them inside torch's runtime wrappers."""
    from ..torch_private import aot_stage2_compile

    programs: dict[str, Any] = {}

    def compile_half(stage: str) -> Callable:
        def compiled(module: torch.fx.GraphModule, _: Any) -> Boxed:
            module = flat_graph(module)
            if stage == "forward":
                keep_changed(module, joint._aot_state.fw_metadata)
            graphs[stage] = module
            half, restore = drop_none(module)
            programs[stage] = compiler(half, placeholder_values(half), stage)
            return Boxed(programs[stage], restore)

        return compiled

    with kept():
        function, _ = aot_stage2_compile(
            joint._aot_state, joint._aot_graph_capture, halved, compile_half("forward"), compile_half("backward")
        )
    boxed = getattr(function, "_boxed_call", False)
    run = function if boxed else lambda inputs: function(*inputs)
    if not boxed:
        run = lambda inputs: function(inputs)  # noqa: E731
    return Built(
        run,
        graphs,
        programs["forward"],
        None,
        programs.get("backward"),
        [("torch's runtime wrappers", reason)],
        mutates,
    )


def keep_changed(module: torch.fx.GraphModule, metadata: Any) -> None:
    """Save copies of inputs that are changed in place: the wrappers write the new values before the backward reads the
    old ones.
    """
    graph = module.graph
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    changed = {node for node, info in zip(inputs, metadata.input_info) if info.mutates_data}
    output, first = graph.output_node(), next(node for node in graph.nodes if node.op != "placeholder")
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in output.all_input_nodes:
        if node in changed:
            with graph.inserting_before(first):
                copies[node] = graph.call_function(torch.ops.aten.clone.default, (node,))
            copies[node].meta.update(node.meta)
    output.args = torch.fx.node.map_arg(output.args, lambda node: copies.get(node, node))
    module.recompile()


class Boxed:
    """A Program in the calling convention of AOTAutograd: a list that the callee owns, and None among the results."""

    _boxed_call = True

    def __init__(self, program: Any, places: list[int | None]) -> None:
        self.half, self.places = (
            outside_autocast(program),
            places,
        )  # torch's wrappers take attributes over: none that `Built.body` knows

    @unread
    def __call__(self, inputs: list[Any]) -> list[Any]:
        results = self.half(inputs)
        return [None if place is None else results[place] for place in self.places]


def drop_none(module: torch.fx.GraphModule) -> tuple[torch.fx.GraphModule, list[int | None]]:
    """Take what is no tensor out of a graph's output; returns each output's place in the new one."""
    output = module.graph.output_node()
    kept: list[Any] = []
    places: list[int | None] = []
    for value in output.args[0]:  # type: ignore[union-attr]
        places.append(len(kept) if isinstance(value, torch.fx.Node) else None)
        if isinstance(value, torch.fx.Node):
            kept.append(value)
    output.args = (tuple(kept),)
    module.recompile()
    return module, places
