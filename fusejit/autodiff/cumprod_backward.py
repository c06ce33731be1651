"""The gradient of cumprod as scans: torch's own formula, traced, takes a step for each element of the row.

In: a captured graph. Out: the same graph, its cumprods calls that trace to scans in the backward; the graph itself if
there are none.

    x, out, g  ->  reverse_cumsum(out * g) / x  before a row's first zero;
        there, the same of the row without that zero; 0 after it
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, GraphModule

Tensor = torch.Tensor
CUMPROD = torch.ops.aten.cumprod.default


def scan_cumprods(module: GraphModule) -> GraphModule:
    if not any(node.target is CUMPROD for node in module.graph.nodes):
        return module
    graph = Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in graph.nodes:
        if node.target is CUMPROD:
            node.target = cumprod
    return GraphModule(module, graph)


def cumprod(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """torch.cumprod, differentiable by scans."""
    if dtype is not None:
        x = x.to(dtype)
    if not (x.requires_grad and torch.is_grad_enabled() and x.dim() and x.is_floating_point()):
        return CUMPROD(x, dim, dtype=dtype)  # without one, integers would widen again
    return Cumprod.apply(x, dim)  # type: ignore[no-untyped-call,no-any-return]


def reverse_cumsum(x: Tensor, dim: int) -> Tensor:
    return x.flip(dim).cumsum(dim).flip(dim)


class Cumprod(torch.autograd.Function):
    """Seen only while tracing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        out = CUMPROD(x, dim)
        ctx.save_for_backward(x, out)
        ctx.dim = dim
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x, out), dim = ctx.saved_tensors, ctx.dim
        zero = x == 0
        zeros = zero.cumsum(dim)
        first = zero & (zeros == 1)
        without = CUMPROD(torch.where(first, 1.0, x), dim)
        before = reverse_cumsum(out * gradient, dim) / x
        there = reverse_cumsum(torch.where(zeros == 1, without * gradient, 0.0), dim)
        return torch.where(zeros == 0, before, torch.where(first, there, 0.0)), None
