"""Built: what differentiating a graph returns: its runner, its graphs, its Programs.

In: callables and graphs of the routes through autograd (joint.py). Out: `Built`, and what every route does to graphs
and calls.

    >>> built.run([x, weight])
    [tensor([...], grad_fn=<FusedBackward>)]
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import torch_private as private
from ..compile_log import CompileLog
from ..runtime.torch_private import apply_of
from .autograd_function import Differentiable

Compiler = Callable[[torch.fx.GraphModule, Sequence[Any], str], Any]
"""(functional graph, fake inputs, "forward" or "backward") -> Program."""


@dataclass(slots=True)
class Built:
    """What `build` returns.

    Attributes:
        run: list of input tensors (cleared) to the sequence of outputs.
        graphs: stage name to graph: joint, forward, backward.
        forward: the forward Program; differentiable: its gradients, or None.
        notes: what runs another way than compiled, and why.
        mutates: the graph changes some of its inputs.
        regions: the compiled regions that the Programs call (see region_ops.py), kept alive.
        log: what is noted of Programs that are compiled when they are first needed.
        backward_ms: milliseconds that the first request for the backward took, None before it.
    """

    run: Callable[[list[Any]], Sequence[Any]]
    graphs: dict[str, Any]
    forward: Any = None
    differentiable: Differentiable | None = None
    wrapped_backward: Any = None
    notes: list[tuple[str, str]] = field(default_factory=list)
    mutates: bool = False
    regions: list[Any] = field(default_factory=list)
    log: CompileLog = field(default_factory=CompileLog)
    backward_ms: float | None = None

    def backward(self) -> Any:
        """The backward Program, compiled now for tangents as traced if it was not needed yet; None without
        gradients.
        """
        start = time.perf_counter()
        program = self.wrapped_backward if self.differentiable is None else self.differentiable.backward_program()
        if self.backward_ms is None:
            self.backward_ms = (time.perf_counter() - start) * 1e3
        return program

    def body(self) -> tuple[Callable[..., Any], bool]:
        """`run` for calls outside autocast and torch.func, as short as it gets; and whether it takes its inputs one by
        one.
        """
        if self.differentiable is not None and self.run == self.differentiable.apply:
            return apply_of(self.differentiable.function), True
        program = getattr(self.run, "program", None)
        return (self.run, False) if program is None else (getattr(program, "call", program), False)


def flat_graph(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A graph with positional inputs and a flat tuple of outputs, whatever pytree calling convention it carried."""
    graph = module.graph
    graph.set_codegen(torch.fx.graph.CodeGen())
    output = graph.output_node()
    output.args = (tuple(output.args[0]),)  # type: ignore[arg-type]
    module.recompile()
    return module


def placeholder_values(module: torch.fx.GraphModule) -> list[Any]:
    """The fake tensors of a graph's inputs; None for a number."""
    return [node.meta.get("val") for node in module.graph.nodes if node.op == "placeholder"]


def outside_autocast(program: Callable[[list[Any]], Sequence[Any]]) -> Callable[[list[Any]], Sequence[Any]]:
    """Run a program without ambient autocast: the casts that it asked for are in the graph already."""

    def run(inputs: list[Any]) -> Sequence[Any]:
        if not private.is_any_autocast_enabled():
            return program(inputs)
        with private.DisableAutocast():
            return program(inputs)

    run.program = program  # type: ignore[attr-defined]
    return run
