"""Phi: the values of a variable after both arms of an `if` become one value.

In: a predicate and two values: tensors, numbers, containers of them. Out: one value; or `Mismatch`, which says in what
they differ.

    >>> pick = Where(pred)
    >>> merge(torch.ones(2), torch.zeros(2), pick)      # tensors: where
    >>> merge(1, 1, pick)                               # equal: as it is
    1
    >>> merge(1, 2, pick)                               # numbers: a tensor without dimensions, as torch.where makes it
    >>> merge("a", "b", pick)
    Mismatch: is 'a' in one and 'b' in the other
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..capture import pytree
from ..capture.scalar_tensors import is_number, mark_number

Tensor = torch.Tensor
NUMBERS = (bool, int, float)
Pick = Callable[[Tensor, Tensor], Tensor]


class Where:
    """Chooses between two tensors by a predicate."""

    def __init__(self, pred: Tensor) -> None:
        self.pred = pred

    def __call__(self, one: Tensor, other: Tensor) -> Tensor:
        return torch.where(self.pred, one, other)

    def alone(self, value: Any, place: int) -> Any:
        """A value that only the first or the second arm has."""
        return value


class _Missing:
    def __repr__(self) -> str:
        return "<not bound>"


MISSING = _Missing()
"""The content of a variable that is not bound."""


class Mismatch(Exception):
    """Two values that no graph can choose between; the text says in what they differ."""


def merge(one: Any, other: Any, pick: Pick) -> Any:
    """Return one value for two; `pick` chooses between two tensors of the same dtype, device and shape.

    Raises:
        Mismatch: they differ in more than the numbers they hold.
    """
    if one is other:
        return one
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return merge_tensors(one, other, pick)
    if type(one) in NUMBERS and type(other) in NUMBERS:
        return merge_numbers(one, other, pick)
    ones: list[Any] = []
    others: list[Any] = []
    structure = pytree.flatten(one, ones)
    if structure is pytree.LEAF and pytree.flatten(other, others) is pytree.LEAF:
        if type(one) is type(other) and equal(one, other):
            return one
        raise Mismatch(f"is {shown(one)} in one and {shown(other)} in the other")
    others.clear()
    if pytree.flatten(other, others) != structure:
        raise Mismatch(f"is {shown(one)} in one and {shown(other)} in the other: they are not built alike")
    return pytree.unflatten(structure, iter([merge(a, b, pick) for a, b in zip(ones, others)]))


def equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except (RuntimeError, TypeError, ValueError):
        return False


def merge_numbers(one: Any, other: Any, pick: Pick) -> Any:
    if type(one) is type(other) and repr(one) == repr(other):
        return one
    if bool in (type(one), type(other)) and type(one) is not type(other):
        raise Mismatch(f"is {shown(one)} in one and {shown(other)} in the other")
    return mark_number(pick(*(torch.full((), number, dtype=number_dtype(one, other)) for number in (one, other))))


def number_dtype(*numbers: Any) -> torch.dtype:
    """The dtype that torch.where gives Python numbers."""
    if all(type(number) is bool for number in numbers):
        return torch.bool
    return torch.get_default_dtype() if any(type(number) is float for number in numbers) else torch.int64


def merge_tensors(one: Any, other: Any, pick: Pick) -> Tensor:
    tensor, second = (one, other) if isinstance(one, Tensor) else (other, one)
    if not isinstance(second, Tensor):
        if type(second) not in NUMBERS:
            raise Mismatch(f"is a tensor in one and {shown(second)} in the other")
        if not fits(second, tensor.dtype):
            raise Mismatch(f"is {shown(one)} in one and {shown(other)} in the other")
        number = torch.full(tensor.shape, second, dtype=tensor.dtype, device=tensor.device)
        made = pick(*((tensor, number) if tensor is one else (number, tensor)))
        return mark_number(made) if tensor.dim() == 0 and is_number(tensor) else made
    for what, a, b in (
        ("dtype", one.dtype, other.dtype),
        ("shape", one.shape, other.shape),
        ("device", one.device, other.device),
    ):
        if a != b:
            raise Mismatch(f"has {what} {plain(a)} in one and {plain(b)} in the other")
    made = pick(one, other)
    return mark_number(made) if one.dim() == 0 and is_number(one) and is_number(other) else made


def fits(number: Any, dtype: torch.dtype) -> bool:
    """Whether a Python number leaves a tensor's dtype as it is."""
    if type(number) is bool or dtype is torch.bool:
        return type(number) is bool and dtype is torch.bool
    return type(number) is int or dtype.is_floating_point or dtype.is_complex


def plain(value: Any) -> str:
    return str(tuple(value)) if isinstance(value, torch.Size) else str(value)


def shown(value: Any) -> str:
    """A value as a message shows it."""
    if value is MISSING:
        return "not bound"
    if isinstance(value, Tensor):
        return f"a {plain(value.dtype)} tensor of shape {plain(value.shape)}"
    leaves: list[Any] = []
    if pytree.flatten(value, leaves) is not pytree.LEAF:
        return f"a {type(value).__name__} of {len(leaves)}"
    text = repr(value)
    return text if len(text) < 60 else f"a {type(value).__name__}"
