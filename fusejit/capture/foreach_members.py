"""Members: an in-place op on a list of tensors that share memory, as the calls of one tensor at a time that eager makes
of it.

In: a `torch._foreach_*_` op and its arguments. Out: the arguments of one call for each member, in order; None where all
may change at once.

    torch._foreach_add_([a, a], 1.0)  ->  torch._foreach_add_([a], 1.0); torch._foreach_add_([a], 1.0)
"""

from __future__ import annotations

import math
from typing import Any

import torch

Tensor = torch.Tensor


def one_by_one(func: Any, args: tuple, kwargs: dict[str, Any]) -> list[tuple[tuple, dict[str, Any]]] | None:
    """Return the arguments of a call for each member of a list that an op changes, where members share memory; None
    otherwise.
    """
    changed = args[0] if args else None
    if (
        not isinstance(changed, (list, tuple))
        or not func._schema.name.startswith("aten::_foreach_")
        or not func._schema.is_mutable
    ):
        return None
    if not crossing(changed, [*args, *kwargs.values()]):
        return None

    def member(value: Any, place: int) -> Any:
        return value[place : place + 1] if isinstance(value, (list, tuple)) else value

    return [
        (
            tuple([member(value, place) for value in args]),
            {name: member(value, place) for name, value in kwargs.items()},
        )
        for place in range(len(changed))
    ]


def crossing(changed: Any, values: list[Any]) -> bool:
    """Whether a member that is changed shares memory with something that another member reads or changes."""
    groups: dict[int, list[tuple[tuple[int, float], int, bool]]] = {}
    for value in values:
        for place, tensor in enumerate(value if isinstance(value, (list, tuple)) else ()):
            if isinstance(tensor, Tensor):
                groups.setdefault(tensor.untyped_storage()._cdata, []).append((span(tensor), place, value is changed))
    for group in groups.values():
        group.sort()
        for number, ((_, end), place, written) in enumerate(group):
            for (start, _), other, changes in group[number + 1 :]:
                if start >= end:
                    break
                if other != place and (written or changes):
                    return True
    return False


def span(tensor: Tensor) -> tuple[int, float]:
    """The bytes of its storage that a tensor reaches from and to: all, where sizes vary."""
    reach = [(n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride())]
    start, size = tensor.storage_offset(), tensor.element_size()
    if type(start) is not int or any(type(n) is not int for n in reach):
        return 0, math.inf
    return (start * size, (start + sum(reach) + 1) * size) if tensor.numel() else (0, 0)


__all__ = ["one_by_one"]
