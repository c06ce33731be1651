"""Attention for another device: what scaled_dot_product_attention becomes on a GPU, traced without one.

In: a captured graph of CPU tensors that is compiled for a GPU. Out: the same graph, in which attention dispatches to
the CUDA kernels (one extern call forward, one backward) instead of the CPU's.

    >>> [node.target for node in retarget_attention(graph).graph.nodes if node.target is attention]
    [<function attention at ...>]
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor
aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """scaled_dot_product_attention through the op that a GPU would choose: flash for half types without a mask, else
    memory-efficient.
    """
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    size = query.size(-1)
    if (
        query.dim() != 4
        or query.dtype not in (*HALF, torch.float32)
        or size != value.size(-1)
        or size % 8
        or mask is not None
        and mask.requires_grad
    ):
        return aten._scaled_dot_product_attention_math(query, key, value, mask, dropout, causal, scale=scale)[0]
    if mask is None and query.dtype in HALF and size <= 256:
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout, causal, False, scale=scale)[0]
    if mask is not None:
        if mask.dtype is torch.bool:
            mask = torch.where(mask, 0.0, float("-inf")).to(query.dtype)
        mask = mask.expand(query.size(0), query.size(1), query.size(2), key.size(2))
    training = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, training, dropout, causal, scale=scale
    )[0]


def retarget_attention(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Return the graph with its attention nodes calling `attention`; the graph itself where it has none."""
    if not any(node.target is aten.scaled_dot_product_attention.default for node in module.graph.nodes):
        return module
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    made = torch.fx.GraphModule(module, graph)
    for node in made.graph.nodes:
        if node.target is aten.scaled_dot_product_attention.default:
            node.target = attention
        elif node.target is aten.view.default:
            # A `.contiguous()` before it left no node where the CPU's attention gave the right strides; the GPU's are
            # others.
            node.target = aten.reshape.default
    made.recompile()
    return made
