"""Aliases: a variable that an `if` made a new tensor, changed in place although it may stand for one that others see.

In: a captured graph and the tensors that stand for others. Out: nothing, or `Unsupported` where the change would be lost.

    y = x if x.sum() > 0 else z      # a select: new memory
    y += 1                           # in Python it changes x or z; refused, because x is read again
    return x + y
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import Unsupported
from .numbers import node_of

WAY_OUT = "write `y = y + 1` instead of `y += 1`, or `y = y.clone()` before it"


def roots_of(graph: torch.fx.Graph) -> tuple[dict[Any, Any], dict[Any, int]]:
    """Return whose memory each node looks at, and for each such node where it is first changed."""
    roots: dict[Any, Any] = {}
    changed: dict[Any, int] = {}
    for place, node in enumerate(graph.nodes):
        roots[node] = node
        schema = getattr(node.target, "_schema", None)
        if schema is None or not node.args or not isinstance(node.args[0], torch.fx.Node):
            continue
        aliased = any(result.alias_info is not None for result in schema.returns)
        if aliased or schema.is_mutable:
            roots[node] = roots[node.args[0]]
        if schema.is_mutable:
            changed.setdefault(roots[node], place)
    return roots, changed


def check_aliases(graph: torch.fx.Graph, shared: Sequence[tuple[torch.Tensor, tuple[torch.Tensor, ...], str]]) -> None:
    """Raise where a tensor that stands for another is changed in place and the other is an input, or is read later."""
    if not shared:
        return
    roots, changed = roots_of(graph)
    if not changed:
        return
    places = {node: place for place, node in enumerate(graph.nodes)}
    for made, originals, line in shared:
        node = node_of(made)
        first = changed.get(roots.get(node))
        if first is None:
            continue
        for original in map(node_of, originals):
            root = roots.get(original)
            if root is None:
                continue
            seen = any(places[user] > first for other, its in roots.items() if its is root for user in other.users)
            if seen or root.op == "placeholder":
                raise Unsupported("an in-place change of a variable that an `if` on a tensor chose", WAY_OUT, line)
