"""Scalar index: indexing by a place that is a tensor: `x[i]` and `x[i] = y` where `i` is an integer tensor without
dimensions.

In: the call of `Tensor.__getitem__` or `__setitem__`. Out: its result, by a gather or a scatter; torch itself would ask
for the value of `i`, which a graph does not know.

    x[i], x[i, :, 2]     i: int64 tensor of shape ()     ->     aten.index(x, [i]), aten.index(x, [i, None, 2])

In eager such an `x[i]` is a view, here it is a copy: changing it in place is refused.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import torch_private as private
from ..errors import Unsupported

Tensor = torch.Tensor
NO_CHANGES = ("__invert__", "__index__", "__int__")
GET, SET = Tensor.__getitem__, Tensor.__setitem__


def is_place(item: Any) -> bool:
    """Whether part of an index is a place whose value is not known."""
    if (
        not isinstance(item, Tensor)
        or item.dim()
        or item.dtype is torch.bool
        or getattr(item, "constant", None) is not None
    ):
        return False
    return not item.is_floating_point() and not item.is_complex()


def places(key: Any) -> tuple[Any, ...] | None:
    """The parts of an index if one of them is such a place and the others are places, ints or `:`; None otherwise."""
    items = key if isinstance(key, tuple) else (key,)
    plain = all(is_place(item) or type(item) is int or type(item) is slice and item == slice(None) for item in items)
    return items if plain and any(map(is_place, items)) else None


class Picked:
    """The results of such indexing in one capture, which are copies here."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def index(self, func: Any, args: tuple) -> tuple[Any, bool]:
        """Return (result, True) of an index by a place, (None, False) for anything else."""
        items = places(args[1])
        if items is None:
            return None, False
        source = args[0]
        given = [
            None if type(i) is slice else torch.full((), i, device=source.device) if type(i) is int else i
            for i in items
        ]
        if func is GET:
            self.kept.append(torch.ops.aten.index.Tensor(source, given))
            return self.kept[-1], True
        value = (
            args[2]
            if isinstance(args[2], Tensor)
            else torch.full((), args[2], dtype=source.dtype, device=source.device)
        )
        torch.ops.aten.index_put_.default(source, given, value.to(source.dtype))
        return None, True

    def refuse_change(self, func: Any, args: tuple, line: str) -> None:
        """Raise for an op that changes such a copy, or a view of one, in place."""
        name = getattr(func, "__name__", "")
        changes = (
            name.startswith("__i")
            and name not in NO_CHANGES
            or name == "__setitem__"
            or name.endswith("_")
            and not name.endswith("__")
        )
        if (
            changes
            and args
            and isinstance(args[0], Tensor)
            and any(memory(args[0]) == memory(value) for value in self.kept)
        ):
            reason = "the place is a tensor, so that it is a copy in a graph; write `x[i] = new`"
            raise Unsupported("an in-place change of `x[i]`", reason, line)


def memory(value: Tensor) -> int:
    while private.is_functorch_wrapped_tensor(value):
        value = private.get_unwrapped(value)
    return value.untyped_storage()._cdata
