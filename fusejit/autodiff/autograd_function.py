"""Autograd function: one thin `autograd.Function` over a forward and a backward Program.

In: the two halves of a joint graph and the compiled forward. Out: `Differentiable.apply(inputs)`, whose results carry
gradients.

    >>> results = gradient.apply([x, weight])
    >>> results[0].sum().backward()        # compiles the backward for tangents of stride 0, once

The backward is compiled at the first backward, for the strides that the tangents have; tangents that no one needs
(None) become zeros inside the graph, and an input that only such results read has no gradient (None), as in eager.
Saved tensors are freed as the backward consumes them. Differentiating twice raises.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import Any

import torch

from .. import torch_private as private
from ..errors import CompileError, FusejitError
from ..fork_locks import renewed
from ..runtime.torch_private import unread
from .partition import Halves

Tensor = torch.Tensor
VARIANTS = 8
"""The most stride patterns of tangents that get a backward of their own; others are made contiguous."""

SECOND_ORDER = (
    "a compiled backward cannot be differentiated again (create_graph=True, torch.autograd.grad of a gradient): "
    "use fusejit.jit(..., backend='eager') or fusejit.disable_jit() where second-order gradients are needed"
)


class SecondOrder(torch.autograd.Function):
    """Marks gradients so that differentiating them raises instead of giving zeros."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *gradients: Tensor) -> tuple[Tensor, ...]:
        return tuple(gradient.view_as(gradient) for gradient in gradients)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise FusejitError(SECOND_ORDER)


class Differentiable:
    """A compiled function with gradients.

    Attributes:
        halves: the graphs; forward: the compiled forward Program.
        programs: backward Programs by the strides of their tangents (None for an absent one).
    """

    def __init__(self, halves: Halves, forward: Any, compiler: Callable, requires_grad: Sequence[bool]) -> None:
        self.halves, self.forward, self.compiler = halves, forward, compiler
        self.requires_grad = tuple(requires_grad)
        self.fixed = tuple(number for number, grad in enumerate(requires_grad) if not grad)
        self.values = [node.meta["val"] for node in halves.backward.graph.nodes if node.op == "placeholder"]
        tangents = self.values[halves.saved :]
        self.sized = any(
            isinstance(n, torch.SymInt | torch.SymFloat)
            for value in self.values
            for n in (getattr(value, "shape", None) or (value,))
        )
        self.traced: tuple = () if self.sized else tuple(tuple(value.stride()) for value in tangents)
        self.orders = [dense_order(value) for value in tangents] if self.sized else []
        self.programs: dict[tuple, Any] = {}
        self.gone: dict[tuple, frozenset[int]] = {}
        self.lock = renewed(threading.Lock())
        self.notes: list[tuple[str, str]] = []
        self.function = make_function(self)

    @cached_property
    def leads(self) -> list[frozenset[int]]:
        """For each result of the backward, the numbers of the tangents that lead to it."""
        return leading_to_results(self.halves.backward, self.halves.saved)

    def reached(self, place: int, tangents: Collection[int]) -> bool:
        """Whether a result of the backward is a gradient where there are only some tangents; eager has none (None)
        otherwise.
        """
        return not self.leads[place] or not self.leads[place].isdisjoint(tangents)

    def apply(self, inputs: list[Any]) -> Sequence[Any]:
        """Run the forward; the results are differentiable."""
        if private.is_any_autocast_enabled():
            with private.DisableAutocast():
                results = self.function.apply(*inputs)
        else:
            results = self.function.apply(*inputs)
        inputs.clear()
        return results

    def backward_program(self) -> Any:
        """The backward Program for tangents as traced (contiguous); compiled now if it was not needed yet."""
        return self.program(self.traced)

    def program(self, strides: tuple) -> Any:
        found = self.programs.get(strides)
        if found is None:
            with self.lock:
                found = self.programs.get(strides)
                if found is None:
                    found = self.programs[strides] = self.compile(strides)
        return found

    def compile(self, strides: tuple) -> Any:
        """Compile the backward for the given strides of its tangents; None says that they have to be made as traced."""
        graph, values = self.halves.backward, list(self.values)
        if strides == self.traced:
            return self.compiler(graph, values, "backward")
        if len(self.programs) >= VARIANTS:
            return None
        graph = specialise(graph, self.halves.saved, strides, self.unreached(strides))
        mode = values[-1].fake_mode
        kept = values[: self.halves.saved]
        for value, stride in zip(values[self.halves.saved :], strides):
            if stride is not None:
                with mode:
                    kept.append(torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device))
        try:
            return self.compiler(graph, kept, "backward")
        except (RuntimeError, ValueError) as error:
            if None in strides or isinstance(error, CompileError):
                raise
            self.notes.append(("tangents are copied", f"no backward for strides {strides}: {error}"))
            return None

    def unreached(self, strides: tuple) -> frozenset[int]:
        found = self.gone.get(strides)
        if found is None:
            there = [number for number, stride in enumerate(strides) if stride is not None]
            found = self.gone[strides] = frozenset(
                place for place in range(len(self.leads)) if not self.reached(place, there)
            )
        return found

    def run_backward(self, saved: list[Any], tangents: list[Any], shapes: Sequence[Any] = ()) -> tuple:
        """Gradients of all inputs from saved tensors and tangents (None where no one needs a result, whose shape is in
        `shapes`).
        """
        absent = (
            tuple([None if tangent is None else () for tangent in tangents])
            if self.sized and any(t is None for t in tangents)
            else ()
        )
        if self.sized:
            tangents = [
                in_order(*parts)
                for parts in zip(tangents, shapes, self.orders, self.values[self.halves.saved :], strict=True)
            ]
            strides: tuple = ()
        else:
            strides = tuple([None if tangent is None else tangent.stride() for tangent in tangents])
        program = self.program(strides)
        if program is None:
            tangents = [as_traced(tangent, value) for tangent, value in zip(tangents, self.values[self.halves.saved :])]
            program = self.program(self.traced)
        saved.extend([tangent for tangent in tangents if tangent is not None])
        if private.is_any_autocast_enabled():
            with private.DisableAutocast():
                found = program(saved)
        else:
            found = program(saved)
        strides = absent or strides
        gone = self.unreached(strides) if None in strides else ()
        return tuple([None if place is None or place in gone else found[place] for place in self.halves.gradients])


def dense_order(value: Tensor) -> tuple[int, ...]:
    """The axes of a tangent as traced, outermost in memory first."""
    strides: list[Any] = list(value.stride())
    known = [stride.node.hint if isinstance(stride, torch.SymInt) else stride for stride in strides]
    return tuple(sorted(range(value.dim()), key=lambda axis: (-known[axis], axis)))


def in_order(tangent: Tensor | None, shape: Any, order: tuple[int, ...], value: Tensor) -> Tensor:
    """A tangent of any size, dense in the order of axes that the backward was traced with."""
    if tangent is not None and tangent.permute(order).is_contiguous():
        return tangent
    made = torch.empty_permuted(shape, order, dtype=value.dtype, device=value.device)
    return made.zero_() if tangent is None else made.copy_(tangent)


def as_traced(tangent: Tensor | None, value: Tensor) -> Tensor:
    """A tangent with the strides that the backward was traced with."""
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return made.zero_() if tangent is None else made.copy_(tangent)


LEADS: dict[Any, Callable[[torch.fx.Node], list[set[torch.fx.Node]]]] = {}
"""{op of several results: node -> for each result the operands that lead to it}; of others all do. Filled by
autodiff/region_ops.py.
"""


def leading_to_results(graph: torch.fx.GraphModule, saved: int) -> list[frozenset[int]]:
    """For each result of a backward, the numbers of the tangents that lead to it."""
    known = leading(graph, saved)
    results: Any = graph.graph.output_node().args[0]
    return [known[node] if isinstance(node, torch.fx.Node) else frozenset() for node in results]


def leading(graph: torch.fx.GraphModule, saved: int) -> dict[torch.fx.Node, frozenset[int]]:
    """The numbers of the tangents that lead to each node."""
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    found = {node: frozenset({number}) for number, node in enumerate(inputs[saved:])}
    for node in graph.graph.nodes:
        if node not in found:
            sources: Any = node.all_input_nodes
            if node.target is operator.getitem and node.args[0].target in LEADS:
                sources = LEADS[node.args[0].target](node.args[0])[node.args[1]]
            found[node] = frozenset().union(*(found[source] for source in sources))
    return found


def _only_sum(node: torch.fx.Node, gone: Callable[[torch.fx.Node], bool]) -> torch.fx.Node | None:
    """The one gradient of an fp8 value that there is, where a node adds two: torch adds no fp8 numbers, and eager has
    nothing to add.
    """
    value: Any = node.meta.get("val")
    if node.target is not torch.ops.aten.add.Tensor or not value.dtype.is_floating_point or value.dtype.itemsize > 1:
        return None
    there = [operand for operand in node.all_input_nodes if not gone(operand)]
    return there[0] if len(there) == 1 else None


def specialise(graph: torch.fx.GraphModule, saved: int, strides: tuple, gone: frozenset[int]) -> torch.fx.GraphModule:
    """A copy of the backward graph in which absent tangents are zeros, and what only they lead to is not computed."""
    made = torch.fx.Graph()
    names: dict[torch.fx.Node, torch.fx.Node] = {}
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    absent = {node for node, stride in zip(inputs[saved:], strides) if stride is None}
    known, numbers = leading(graph, saved), {number for number, stride in enumerate(strides) if stride is None}
    zeros = []
    for node in graph.graph.nodes:
        if node in absent:
            zeros.append(node)
            continue
        if zeros and node.op != "placeholder":
            for tangent in zeros:
                value = tangent.meta["val"]
                options = {"dtype": value.dtype, "device": value.device}
                names[tangent] = made.call_function(torch.ops.aten.full.default, (list(value.shape), 0), options)
                names[tangent].meta.update(tangent.meta)
            zeros = []
        if other := _only_sum(node, lambda operand: bool(known[operand]) and known[operand] <= numbers):
            names[node] = names[other]
            continue
        names[node] = made.node_copy(node, names.__getitem__)
    results = made.output_node()
    values: Any = results.args[0]
    results.args = (tuple(None if place in gone else value for place, value in enumerate(values)),)
    return torch.fx.GraphModule(graph, made)


def make_function(owner: Differentiable) -> Any:
    """The `autograd.Function` of one specialisation."""
    halves, forward_program, fixed = owner.halves, owner.forward, owner.fixed
    count, numbers = halves.results, halves.results + halves.sizes

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> tuple:
            results = forward_program(list(inputs))
            ctx.save_for_backward(*results[numbers:])
            if owner.sized:
                ctx.sizes, ctx.shapes = results[count:numbers], [result.shape for result in results[:count]]
            if fixed:
                ctx.mark_non_differentiable(*[results[number] for number in fixed])
            ctx.materialize_grads = False
            return tuple(results[:count])

        @staticmethod
        @unread
        def backward(ctx: Any, *gradients: Any) -> Any:
            tangents = [gradient for gradient, grad in zip(gradients, owner.requires_grad) if grad]
            if all(tangent is None for tangent in tangents):
                return (None,) * len(halves.gradients)
            saved = list(ctx.saved_tensors)
            shapes: list[Any] = []
            if owner.sized:
                saved = [*ctx.sizes, *saved]
                shapes = [shape for shape, grad in zip(ctx.shapes, owner.requires_grad) if grad]
            ctx.maybe_clear_saved_tensors()
            if not torch.is_grad_enabled():
                return owner.run_backward(saved, tangents, shapes)
            with torch.no_grad():
                found = owner.run_backward(saved, tangents, shapes)
            places = [number for number, gradient in enumerate(found) if gradient is not None]
            anchor = torch.zeros((), requires_grad=True)
            marked = dict(zip(places, SecondOrder.apply(anchor, *[found[number] for number in places])))
            return tuple(marked.get(number) for number in range(len(found)))

    return Fused
