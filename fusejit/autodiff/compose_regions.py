"""Compose regions: the forward and backward of a graph of region calls, written down instead of traced.

In: a captured graph with calls of `Region`s. Out: `Built`, as `joint.build` gives it, or None where the graph has to be
traced whole.

    forward  %region = region([%x, %w0], 'c04f..', 0) | %region_1 = region([%item, %w1], 'c04f..', 1) |
        return (item_1, x, w0, item, w1)
    backward  %grad = region_backward([%item, %w1], [%tangent], ...) |
        %grad_1 = region_backward([%x, %w0], [%item_2], ...) | ...

What stands between two calls becomes a region of its own (equal ones are shared too). Then every step has a forward and
a backward
Program, and the chain rule over the steps is all that is left: backwards through them, adding gradients that meet.
Tracing the same through AOTAutograd costs time for every tensor of every call, 30 to 150 ms a block; this costs one.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ..capture.regions.extract import Region, Spec
from ..codegen.graph.simplify import unwritten
from ..codegen.ir.effects import first_in_turn
from .autograd_function import Differentiable
from .built import Built, Compiler, outside_autocast, placeholder_values
from .joint import lift_constants, with_constants
from .output_views import split_views, with_views
from .partition import Halves
from .region_ops import BACKWARD, FORWARD, Compiled, Toolchain, compiled, laid

Tensor = torch.Tensor


@dataclass(slots=True, eq=False)
class Step:
    """One call: of which Programs, with which values of the forward graph, giving which; `grad` says which results
    require grad.
    """

    known: Compiled
    inputs: list[Node]
    made: list[Node]
    number: int

    @property
    def grad(self) -> tuple[bool, ...]:
        gradient = self.known.gradient
        return (False,) * self.known.results if gradient is None else gradient.requires_grad


class Composed:
    """The forward graph while it is written."""

    def __init__(self, values: Sequence[Tensor], grad: Sequence[bool]) -> None:
        self.graph = Graph()
        self.steps: list[Step] = []
        self.inputs = [
            value_node(self.graph.placeholder(f"input_{place}"), value) for place, value in enumerate(values)
        ]
        self.differentiable = {node for node, own in zip(self.inputs, grad, strict=True) if own}

    def call(self, known: Compiled, inputs: list[Node]) -> list[Node]:
        """Write a call; returns the nodes of its results."""
        number = len(self.steps)
        called = value_node(self.graph.call_function(FORWARD, (list(inputs), known.key, number)), tuple(known.outputs))
        made = [
            value_node(self.graph.call_function(operator.getitem, (called, place)), value)
            for place, value in enumerate(known.outputs)
        ]
        step = Step(known, inputs, made, number)
        self.steps.append(step)
        self.differentiable |= {node for node, grad in zip(made, step.grad) if grad}
        return made[: known.results]


def value_node(node: Node, value: Any) -> Node:
    node.meta["val"] = value
    return node


def compose(module: GraphModule, inputs: Sequence[Tensor], tools: Toolchain, compiler: Compiler) -> Built | None:
    """Write the forward and backward of a captured graph that calls regions, and compile the forward.

    Args:
        module: of a capture; inputs: its input tensors. tools: compile the regions; compiler: the two graphs of their
            calls.

    Returns:
        None where a value crosses the boundary of a region in a way that only a trace of the whole gets right (views,
        in-place changes), and where an op has an effect.
    """
    core, views = split_views(module)
    core, constants = lift_constants(core)
    if first_in_turn(core.graph.nodes) is not None:
        return None
    values = [node.meta["val"] for node in core.graph.nodes if node.op == "placeholder"]
    made = Composed(values, [value.requires_grad for value in (*inputs, *constants)])
    notes = len(tools.notes)
    results = write_forward(made, core, tools)
    if results is None:
        del tools.notes[notes:]
        return None
    built = finish(made, results, compiler)
    built.regions = [step.known for step in made.steps]
    if constants:
        built.run = with_constants(built.run, constants)
    if views is not None:
        built.run = with_views(built.run, type(views).forward.__get__(views))
    return built


# Forward.


def write_forward(made: Composed, core: GraphModule, tools: Toolchain) -> list[Node] | None:
    """Write each region call, and what stands between two as a call of its own; returns the results."""
    placeholders = [node for node in core.graph.nodes if node.op == "placeholder"]
    names: dict[Node, Node] = dict(zip(placeholders, made.inputs, strict=True))
    between: list[Node] = []
    for node in core.graph.nodes:
        if node.op == "placeholder" or node.target is operator.getitem and isinstance(node.args[0].target, Region):
            continue
        if node.op == "call_function" and not isinstance(node.target, Region):
            between.append(node)
            continue
        if node.op not in ("call_function", "output") or not write_between(made, core, between, names, tools):
            return None
        between = []
        if node.op == "output":
            break
        known = compiled(node.target, tools)
        if known is None or any(
            names[value] in made.differentiable and not spec[4] for value, spec in zip(node.args, node.target.inputs)
        ):
            return None
        results = made.call(known, [names[value] for value in node.args])
        names |= {user: results[user.args[1]] for user in node.users}
    results = [names[value] for value in core.graph.output_node().args[0]]  # type: ignore[union-attr,index]
    return None if any(node in made.inputs for node in results) else results


def write_between(
    made: Composed, core: GraphModule, nodes: list[Node], names: dict[Node, Node], tools: Toolchain
) -> bool:
    """Write the ops between two calls as one call of a region made of them; False where they cannot stand apart."""
    own = set(nodes)
    given = list(dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in own))
    wanted = [node for node in nodes if any(user not in own for user in node.users)]
    if not wanted:
        return True
    if not given or any(not isinstance(node.meta.get("val"), Tensor) for node in (*given, *wanted)):
        return False
    region = Region("outside", True)
    region.grad = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    graph = Graph()
    copies = {node: graph.placeholder(f"x{place}") for place, node in enumerate(given)}
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in wanted))
    region.graph = GraphModule(torch.nn.Module(), graph)
    region.inputs = [spec(names[node], made) for node in given]
    region.outputs = [
        (v.dtype, tuple(v.shape), tuple(v.stride()), v.device, False) for v in (node.meta["val"] for node in wanted)
    ]
    region.key = region.digest()
    known = compiled(region, tools)
    if known is None:
        return False
    names |= dict(zip(wanted, made.call(known, [names[node] for node in given]), strict=True))
    return True


def spec(node: Node, made: Composed) -> Spec:
    value = node.meta["val"]
    return (value.dtype, tuple(value.shape), tuple(value.stride()), value.device, node in made.differentiable)


# Backward.


class Backward:
    """The backward graph while it is written: gradients by the forward's nodes, and which of those it reads."""

    def __init__(self, made: Composed, results: list[Node]) -> None:
        self.graph = Graph()
        self.saved: dict[Node, Node] = {}
        self.gradients: dict[Node, Node] = {}
        self.anchor = self.graph.call_function(operator.getitem, ((), 0))  # saved tensors go before it, all else behind
        self.made = made
        tangents = [node for node in results if node in made.differentiable]
        for place, node in enumerate(tangents):
            value = node.meta["val"]
            like = torch.empty_strided(value.shape, laid(value.shape, value.stride()), dtype=value.dtype, device="meta")
            with value.fake_mode:
                fake = torch.empty_strided(like.shape, like.stride(), dtype=value.dtype, device=value.device)
            self.add(node, value_node(self.graph.placeholder(f"tangent_{place}"), fake))

    def keep(self, node: Node) -> Node:
        """The saved tensor of a forward's node."""
        if node not in self.saved:
            with self.graph.inserting_before(self.anchor):
                self.saved[node] = value_node(self.graph.placeholder(f"saved_{len(self.saved)}"), node.meta["val"])
        return self.saved[node]

    def add(self, node: Node, gradient: Node) -> None:
        """Add to the gradient of a forward's node."""
        if node in self.gradients:
            both = self.graph.call_function(torch.ops.aten.add.Tensor, (self.gradients[node], gradient))
            gradient = value_node(both, gradient.meta["val"])
        self.gradients[node] = gradient

    def step(self, step: Step) -> None:
        """Write the backward of one call."""
        known, gradient = step.known, step.known.gradient
        if gradient is None:
            return
        found = [self.gradients.get(node) for node, grad in zip(step.made, step.grad) if grad]
        given = [node for node in found if node is not None]
        if not given:
            return
        places = {"input": step.inputs, "result": step.made, "made": step.made}
        saved = [self.keep(places[how][place]) for how, place in known.saved]
        pattern = "".join("0" if node is None else "1" for node in found)
        values = tuple(node.meta["val"] for node in gradient.halves.backward.graph.output_node().args[0])  # type: ignore[union-attr,misc]
        called = value_node(
            self.graph.call_function(BACKWARD, (saved, given, f"{known.key}|{pattern}", step.number)), values
        )
        there = [number for number, node in enumerate(found) if node is not None]
        for node, place in zip(step.inputs, gradient.halves.gradients, strict=True):
            if place is not None and node in self.made.differentiable and gradient.reached(place, there):
                self.add(node, value_node(self.graph.call_function(operator.getitem, (called, place)), values[place]))


def finish(made: Composed, results: list[Node], compiler: Compiler) -> Built:
    """Write the backward, close both graphs and compile the forward."""
    requires_grad = [node in made.differentiable for node in results]
    if not any(requires_grad):
        made.graph.output(tuple(results))
        forward = unwritten(made.graph)
        program = compiler(forward, placeholder_values(forward), "forward")
        return Built(outside_autocast(program), {"forward": forward}, program)
    back = Backward(made, results)
    for step in reversed(made.steps):
        back.step(step)
    back.graph.erase_node(back.anchor)
    gradients = [back.gradients.get(node) if node in made.differentiable else None for node in made.inputs]
    kept = [node for node in gradients if node is not None]
    back.graph.output(tuple(kept))
    made.graph.output((*results, *back.saved))
    forward, backward = unwritten(made.graph), unwritten(back.graph)
    order = iter(range(len(kept)))
    places = tuple(None if node is None else next(order) for node in gradients)
    halves = Halves(forward, backward, len(results), len(back.saved), places)
    program = compiler(forward, placeholder_values(forward), "forward")
    gradient = Differentiable(halves, program, compiler, requires_grad)
    return Built(gradient.apply, {"forward": forward, "backward": backward}, program, gradient)
