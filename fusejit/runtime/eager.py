"""Running a captured graph through torch eager: native autograd, native random stream, native aliasing and in-place
changes.

In: the graph of a capture. Out: a function of its input tensors that returns the tuple of its outputs.

    >>> run = eager(captured.graph)
    >>> run(x, weight)
    (tensor([...]),)
"""

from __future__ import annotations

from collections.abc import Callable
from operator import getitem
from typing import Any

import torch

from .. import torch_private as private
from ..capture.regions.extract import Region
from ..torch_private import LazyGraphModule as _LazyGraphModule
from .aten_bindings import direct


def eager(graph: torch.fx.GraphModule) -> Callable[..., Any]:
    """Return the graph as a plain Python function.

    A graph that enters autocast or switches gradients on and off puts both back when an op in it raises.
    """
    module = direct(graph)
    if isinstance(module, _LazyGraphModule):
        module.real_recompile()
    function = type(module).forward.__get__(module)
    if not switches(graph):
        return function

    def guarded(*inputs: torch.Tensor) -> Any:
        grad, nesting = torch.is_grad_enabled(), autocast_state()
        try:
            return function(*inputs)
        except BaseException:
            private.set_grad_enabled(grad)
            restore_autocast(nesting)
            raise

    return guarded


def switches(graph: torch.fx.GraphModule) -> bool:
    """Whether anything in a graph, or in a region that it calls, may change the state of torch."""
    targets = {node.target for node in graph.graph.nodes if node.op == "call_function"}
    return any(
        switches(target.graph)
        if isinstance(target, Region)
        else not isinstance(target, private.OpOverload) and target is not getitem
        for target in targets
    )


def autocast_state() -> list[tuple[str, bool, torch.dtype]]:
    return [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]


def restore_autocast(state: list[tuple[str, bool, torch.dtype]]) -> None:
    for kind, enabled, dtype in state:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)
    torch.clear_autocast_cache()
