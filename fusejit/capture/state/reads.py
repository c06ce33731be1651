"""What a capture read and wrote: the records of both, and containers as they were.

In: a value that the function read. Out: a `Read` with a frozen copy of it, against which a guard compares later.

    >>> freeze({"width": [1, 2]})
    {'width': [1, 2]}
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from ...errors import Unsupported

DEPTH = 4
"""How deep lists, tuples, dicts and sets are followed and compared."""
WIDTH = 1000
"""The most elements of one container that are followed."""
BYTES = 1 << 20
"""The most bytes of a numpy array (or the like) that are compared at each call."""
CONTAINERS = (list, tuple, dict, set, frozenset, deque)


class _Missing:
    def __repr__(self) -> str:
        return "<missing>"


MISSING = _Missing()


@dataclass(slots=True)
class Read:
    """One value that the capture read.

    `how`: item (`table[name]`), absent (`name not in table`), entry (`table[section][name]`), attribute, cell, call
    (`table()`), element (`table` is the read of a container, `name` the keys that lead into it). `written`: the capture
    itself had put the value there, which only the calls of one capture can tell apart (see capture/regions/detect.py).
    """

    how: str
    table: Any
    name: str
    value: Any
    section: str = ""
    snapshot: Any = None
    written: bool = False


@dataclass(frozen=True, slots=True)
class Effect:
    """A write that the captured function makes each time in eager and that the captured graph does not make."""

    target: str
    action: str
    line: str = ""

    def __str__(self) -> str:
        return f"{self.target} was {self.action}" + (f" at {self.line}" if self.line else "")


@dataclass(frozen=True, slots=True)
class Contents:
    """The bytes of a numpy array, `bytearray` or `array`, as they were."""

    layout: Any
    data: bytes


def contents(value: Any) -> Contents | None:
    """The bytes of a Python object that holds numbers and may change in place; None for any other.

    Raises:
        Unsupported: they are more than `BYTES`, too many to be compared at each call.
    """
    cls, layout = type(value), None
    if cls is bytearray:
        size = len(value)
    elif cls is array:
        layout, size = value.typecode, len(value) * value.itemsize
    elif cls.__module__ == "numpy" and cls.__name__ == "ndarray":
        layout, size = (value.dtype, value.shape), value.nbytes
    else:
        return None
    if size > BYTES:
        raise Unsupported(
            f"a {cls.__name__} of {size} bytes", "its numbers would be constants of the graph; pass it as a tensor"
        )
    return Contents(layout, bytes(value) if cls is bytearray else value.tobytes())


def freeze(value: Any, depth: int = DEPTH, before: Mapping[int, Any] = MappingProxyType({})) -> Any:
    """Copy containers to the stated depth, so that a later change shows; everything else is kept as it is.

    `before` gives, by id, the old contents of containers that have been changed since.
    """
    if not depth or not isinstance(value, CONTAINERS):
        found = contents(value)
        return value if found is None else found
    value = before.get(id(value), value)
    if isinstance(value, dict):
        return {key: freeze(item, depth - 1, before) for key, item in copied(value).items()}
    if isinstance(value, (set, frozenset)):
        return frozenset(value)
    return [freeze(item, depth - 1, before) for item in value]


def tensors_within(frozen: Any, keys: tuple = ()) -> Iterator[tuple[tuple, torch.Tensor]]:
    """The tensors of a container that was frozen, each with the keys that lead to it."""
    if isinstance(frozen, torch.Tensor):
        yield keys, frozen
    elif len(keys) >= DEPTH:
        return
    elif isinstance(frozen, dict):
        for key, item in frozen.items():
            if type(key) in (str, int):
                yield from tensors_within(item, (*keys, key))
    elif isinstance(frozen, list):
        for number, item in enumerate(frozen):
            yield from tensors_within(item, (*keys, number))


def same_items(holder: Any, before: Any) -> bool:
    """Whether a container holds the very same objects as before."""
    if len(holder) != len(before):
        return False
    if isinstance(holder, dict):
        return all(
            dict.get(holder, name, MISSING) is value for name, value in dict.items(before)
        )  # a subclass may have a `get` of its own
    if isinstance(holder, set):
        return bool(holder == before)
    return all(one is other for one, other in zip(holder, before))


def copied(holder: Any) -> Any:
    """A copy of what a container holds. A dict's `copy`, `update` and `__getitem__` may be the user's own, and are not
    called.
    """
    if type(holder) is dict or not isinstance(holder, dict):
        return holder.copy()
    return {name: dict.__getitem__(holder, name) for name in base_of(holder).__iter__(holder)}


def base_of(holder: dict) -> type[dict]:
    return OrderedDict if isinstance(holder, OrderedDict) else dict


def refill(holder: Any, before: Any) -> None:
    """Give a container its old contents back, in place."""
    if isinstance(holder, dict):
        base = base_of(holder)
        base.clear(holder)
        for name, value in before.items():
            base.__setitem__(holder, name, value)
        return
    kind: Any = (
        list if isinstance(holder, list) else deque if isinstance(holder, deque) else set
    )  # whose methods are nobody's own
    kind.clear(holder)
    (kind.update if kind is set else kind.extend)(holder, before)
