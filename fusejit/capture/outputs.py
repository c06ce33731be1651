"""What a captured function returns, leaf by leaf: tensors of the graph, and constants.

In: the flattened result of the body. Out: for each leaf, its place among the graph's outputs, or a `Constant`.

    >>> sort_outputs([fake, 3])
    (0, Constant(value=3))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..errors import Unsupported
from . import pytree

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Constant:
    """A leaf of the result that is no tensor."""

    value: Any


OUTPUT_VALUES = (
    int,
    float,
    bool,
    str,
    bytes,
    complex,
    type(None),
    torch.dtype,
    torch.device,
    torch.Size,
    slice,
    type(Ellipsis),
    type,
)


def sort_outputs(flat: list[Any], recipe: tuple[type, ...] = ()) -> tuple[Any, ...]:
    """Give each leaf of the result its place among the graph's outputs, or keep it as a constant; a `recipe` stays as
    it is.
    """
    found: list[Any] = []
    count = 0
    for item in flat:
        if isinstance(item, Tensor):
            found.append(count)
            count += 1
        elif isinstance(item, torch.SymInt | torch.SymFloat):
            found.append(Constant(int(item) if isinstance(item, torch.SymInt) else float(item)))  # it is fixed by that
        elif isinstance(item, (torch.Size, slice)):
            found.append(Constant(fixed(item)))
        elif isinstance(item, recipe):
            found.append(item)
        elif isinstance(item, OUTPUT_VALUES) or callable(item) or not hasattr(item, "__dict__"):
            found.append(Constant(item))
        else:
            cls = type(item)
            reason = (
                "return tensors, Python values, or a class registered with torch.utils._pytree.register_pytree_node"
            )
            raise Unsupported(f"a result of type {cls.__module__}.{cls.__qualname__}", reason)
    return tuple(found)


def fixed(value: Any) -> Any:
    """A size or a slice with numbers in the place of symbols, which are fixed by that."""
    number = lambda item: int(item) if isinstance(item, torch.SymInt) else item  # noqa: E731
    if isinstance(value, slice):
        return slice(number(value.start), number(value.stop), number(value.step))
    return torch.Size([number(item) for item in value])


def check_unchanged(now: Any, structure: Any, values: list[Any]) -> None:
    """Refuse a body that changed a container among its arguments: the caller would not see it."""
    leaves: list[Any] = []
    plain = pytree.flatten(pytree.unflatten(structure, iter(values)), [])  # what is marked `mutable` is plain inside
    same = pytree.flatten(now, leaves) == plain and len(leaves) == len(values)
    if not same or any(one is not other for one, other in zip(leaves, values)):
        raise Unsupported(
            "changing a list, dict or dataclass that is an argument", "the caller would not see it; return the new one"
        )
