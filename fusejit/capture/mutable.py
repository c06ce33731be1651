"""`mutable`: Python arguments that vary without making a new program: their numbers become tensors that the program
reads.

In: a number, list, tuple or dict. Out: the same value, marked; where it meets a jitted function its numbers are inputs
of the graph.

    >>> scaled = fusejit.jit(lambda x, factor: x * factor)
    >>> for factor in (2.0, 3.0):
    ...     scaled(x, fusejit.mutable(factor))
    >>> scaled.cache_info().specialisations
    1
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Varying:
    """The structure of a marked container: its class, the keys of a dict, and whether other lengths belong to the same
    program.
    """

    cls: type
    keys: tuple[Any, ...] = ()
    any_length: bool = True

    def build(self, values: list[Any]) -> Any:
        return dict(zip(self.keys, values)) if self.cls is dict else self.cls(values)


class Mutable:
    """What the marked classes share; each is the class that it marks in every other respect."""

    def take_apart(self, leaves: list[Any], flatten: Callable[[Any, list[Any]], Any]) -> Any:
        """Append tensors for the numbers inside to `leaves`, and return the structure."""
        raise NotImplementedError


class MutableInt(Mutable, int):
    def take_apart(self, leaves: list[Any], flatten: Callable) -> Any:
        leaves.append(torch.tensor(int(self)))
        return None


class MutableFloat(Mutable, float):
    def take_apart(self, leaves: list[Any], flatten: Callable) -> Any:
        leaves.append(
            torch.tensor(float(self), dtype=torch.float64)
        )  # as exact as Python's; beside float tensors it takes their dtype
        return None


class Container(Mutable):
    plain: type
    any_length = True

    def take_apart(self, leaves: list[Any], flatten: Callable) -> Any:
        items: Any = self.values() if isinstance(self, dict) else self
        children = []
        for item in items:
            child = mark(item)
            if isinstance(child, Container):
                child.any_length = self.any_length
            children.append(flatten(child, leaves))
        return (Varying(self.plain, tuple(self) if isinstance(self, dict) else (), self.any_length), tuple(children))


class MutableList(Container, list):
    plain = list


class MutableTuple(Container, tuple):
    plain = tuple


class MutableDict(Container, dict):
    plain = dict


MARKED: dict[type, type] = {
    int: MutableInt,
    float: MutableFloat,
    list: MutableList,
    tuple: MutableTuple,
    dict: MutableDict,
}


def mark(value: Any) -> Any:
    """Mark what can be marked, and leave the rest (tensors, strings, None, bools) as it is."""
    made = MARKED.get(type(value))
    return value if made is None else made(value)


def mutable(value: Any, dynamic_len: bool = True) -> Any:
    """Mark a Python argument as varying, so that another value does not make another program.

    Args:
        value: an int, a float, or a list, tuple or dict, nested as you like, of these and tensors.
        dynamic_len: whether containers of other lengths belong to the same program too.

    Inside the jitted function a marked int is a 0-d int64 tensor and a marked float a 0-d float64 tensor, which beside
    float tensors take on the others' dtype as Python's numbers do (beside integer tensors the result is float64); they
    work wherever torch takes a tensor, and cannot decide an `if`, a shape or an index of Python's. Everywhere else the
    value is what it was: an int, a list.

    A container's length is part of the program, which unrolls what loops over it. With `dynamic_len` the first length
    that is compiled stays the only one: a call with another runs eagerly, with that reason in `explain()`; without it,
    each length compiles.

    Raises:
        TypeError: the value cannot be marked; a tensor needs no mark.
    """
    if type(value) not in MARKED:
        reason = "a tensor varies without it" if isinstance(value, torch.Tensor) else "it chooses between programs"
        raise TypeError(
            f"fusejit.mutable takes an int, float, list, tuple or dict, not {type(value).__name__}: {reason}"
        )
    made = mark(value)
    if isinstance(made, Container) and not dynamic_len:
        made.any_length = False
    return made


def family(structure: Any) -> Any:
    """A structure without the lengths that `mutable` has marked: equal for calls that one program would have to
    serve.
    """
    if not isinstance(structure, tuple):
        return structure
    if structure and isinstance(structure[0], Varying) and structure[0].any_length:
        return (structure[0].cls, "of any length")
    return tuple([family(item) for item in structure])
