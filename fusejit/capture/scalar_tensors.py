"""Scalar tensors: tensors without dimensions that stand for a Python number which an `if` or a loop could not know.

In: such a tensor. Out: whether it is one, also after arithmetic with other numbers: `n += 1` must not change it in
place, as it would a tensor, because another variable may hold the same number.

    n = 1 if x.sum() > 0 else 2      # a tensor, marked
    m = n; n += 1                    # m stays
"""

from __future__ import annotations

from typing import Any

import torch

from .. import torch_private as private

Tensor = torch.Tensor
MARK = "fusejit_number"


def node_of(value: Tensor) -> torch.fx.Node | None:
    """The node of the graph being captured that makes a tensor."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

    mode: Any = get_proxy_mode()
    slot: Any = get_proxy_slot(value, mode.tracer, None) if mode is not None else None
    return None if slot is None else slot.proxy.node


def mark_number(value: Tensor) -> Tensor:
    """Say that a tensor stands for a number."""
    setattr(value, MARK, True)
    if hasattr(value, "fake_mode") and (node := node_of(value)) is not None:
        node.meta[MARK] = True
    return value


def is_number(value: Tensor) -> bool:
    if hasattr(value, MARK):
        return True
    if not hasattr(value, "fake_mode"):
        return not value.is_floating_point()  # a batch of torch.vmap has no graph to look at
    node = node_of(value)
    return node is not None and made_of_numbers(node)


def made_of_numbers(node: torch.fx.Node) -> bool:
    """Whether every tensor that a node was computed from stands for a number."""
    if MARK in node.meta:
        return True
    sources = node.all_input_nodes
    return bool(sources) and isinstance(node.target, private.OpOverload) and all(map(made_of_numbers, sources))
