"""Partition: the joint graph cut into a forward and a backward graph.

In: the joint graph of `joint.py`. Out: `Halves`: forward (results, then saved tensors), backward (saved tensors and
tangents to gradients). What is cheap is recomputed in the backward instead of saved: torch's min-cut partitioner
decides.

    >>> halves = partition(joint, inputs, 1, 3)
    >>> halves.saved
    2
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..capture.checkpoints import decide
from ..codegen.ir.effects import in_their_half, told_apart

GraphModule = torch.fx.GraphModule
FLOAT = "fusejit_float"
"""Where a node keeps its float while torch's partitioner sees a tensor."""


@dataclass(frozen=True, slots=True)
class Halves:
    """A forward and a backward graph.

    Attributes:
        forward: inputs to (results..., saved tensors...).
        backward: (saved tensors..., tangents...) to the gradients that exist.
        results: number of results; saved: number of saved tensors.
        sizes: how many of these, the first ones, are numbers.
        gradients: for each input of the forward, the index of its gradient among the backward's outputs, or None.
    """

    forward: GraphModule
    backward: GraphModule
    results: int
    saved: int
    gradients: tuple[int | None, ...]
    sizes: int = 0


def partition(joint: GraphModule, inputs: object, results: int) -> Halves:
    """Cut the joint graph; `inputs` are its example inputs and `results` the number of forward results."""
    with floats_as_tensors(joint):
        forward, backward = halved(joint, inputs, num_fwd_outputs=results)
    for half in (forward, backward):
        restore_floats(half)
    sizes = save_in_order(forward, backward, results)
    outputs = forward.graph.output_node().args[0]
    keep_mutated(forward, results)
    gradients: list[int | None] = []
    kept: list[torch.fx.Node] = []
    output = backward.graph.output_node()
    for value in output.args[0]:  # type: ignore[union-attr]
        gradients.append(len(kept) if isinstance(value, torch.fx.Node) else None)
        if isinstance(value, torch.fx.Node):
            kept.append(value)
    output.args = (tuple(kept),)
    backward.recompile()
    return Halves(forward, backward, results, len(outputs) - results, tuple(gradients), sizes)  # type: ignore[arg-type]


def halved(joint: GraphModule, inputs: object, **options: Any) -> tuple[GraphModule, GraphModule]:
    """Let torch cut a joint graph; what has an effect stays in its half, once."""
    from ..torch_private import min_cut_rematerialization_partition  # costs seconds of import: only when compiling

    decide(joint.graph)
    with in_their_half(joint):
        halves = min_cut_rematerialization_partition(joint, inputs, **options)
    told_apart(joint, *halves)
    return halves  # type: ignore[no-any-return]


@contextlib.contextmanager
def floats_as_tensors(joint: GraphModule) -> Iterator[None]:
    """Let torch's partitioner take floats that vary for tensors of one element: it saves none of the former for the
    backward.
    """
    changed = [node for node in joint.graph.nodes if isinstance(node.meta.get("val"), torch.SymFloat)]
    for node in changed:
        node.meta |= {FLOAT: node.meta["val"], "val": torch.empty((), dtype=torch.float64, device="meta")}
    try:
        yield
    finally:
        restore_floats(joint)


def restore_floats(module: GraphModule) -> None:
    for node in module.graph.nodes:
        if FLOAT in node.meta:
            node.meta = {name: value for name, value in node.meta.items() if name != FLOAT} | {"val": node.meta[FLOAT]}


def save_in_order(forward: GraphModule, backward: GraphModule, results: int) -> int:
    """Let the forward return what it saves in the backward's order, in which sizes come first; returns their number."""
    output = forward.graph.output_node()
    values = list(output.args[0])  # type: ignore[arg-type]
    saved = {value.name: value for value in values[results:] if isinstance(value, torch.fx.Node)}
    inputs = [node for node in backward.graph.nodes if node.op == "placeholder"][: len(values) - results]
    numbers = [node for node in inputs if isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat)]
    sizes = len(numbers)
    if sizes:
        for number in reversed(numbers):
            next(iter(backward.graph.nodes)).prepend(number)
        inputs = [*numbers, *(node for node in inputs if node not in numbers)]
        output.args = ((*values[:results], *(saved[node.name] for node in inputs)),)
    return sizes


def keep_mutated(forward: GraphModule, results: int) -> None:
    """Save copies of inputs that the forward itself overwrites: the backward was traced with their old values."""
    graph = forward.graph
    written = {node.args[0] for node in graph.nodes if node.target is torch.ops.aten.copy_.default}
    output = graph.output_node()
    values = list(output.args[0])  # type: ignore[arg-type]
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for number in range(results, len(values)):
        value = values[number]
        if value in written and isinstance(value, torch.fx.Node) and value.op == "placeholder":
            with graph.inserting_before(first):
                values[number] = graph.call_function(torch.ops.aten.clone.default, (value,))
            values[number].meta.update(value.meta)
    output.args = (tuple(values),)
    forward.recompile()
