"""Arguments and results as flat lists: a small, fast pytree with hashable structure.

In: any nesting of tuples, lists, dicts, named tuples, dataclasses and pytree-registered classes. Out: its leaves, in
order, and a hashable structure that puts them back together.

    >>> leaves = []; structure = flatten({"a": 1, "b": (2, None)}, leaves); leaves
    [1, 2, None]
    >>> unflatten(structure, iter(leaves))
    {'a': 1, 'b': (2, None)}
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..torch_private import pytree as _pytree
from .mutable import Mutable, Varying

LEAF = None
"""The structure of a leaf."""
KEYED = "keyed"
"""What marks the structure of a call with keyword arguments: (KEYED, structure of (args, kwargs)); other calls have
that of args.
"""

ATOMS = frozenset(
    {
        torch.Tensor,
        torch.nn.Parameter,
        int,
        float,
        bool,
        str,
        type(None),
        torch.dtype,
        torch.device,
        torch.Size,
        complex,
    }
)


class Registered:
    """A pytree-registered class and its (perhaps unhashable) state; equal when both are."""

    __slots__ = ("cls", "state")

    def __init__(self, cls: type, state: Any) -> None:
        self.cls, self.state = cls, state

    def __hash__(self) -> int:
        return hash(self.cls)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Registered) and self.cls is other.cls and bool(self.state == other.state)


def is_dataclass_value(value: Any) -> bool:
    """Whether value is an instance of a dataclass whose fields hold all its state."""
    if not dataclasses.is_dataclass(value) or isinstance(value, (type, torch.nn.Module)):
        return False
    return getattr(value, "__dict__", {}).keys() <= value.__dataclass_fields__.keys()


def flatten(value: Any, leaves: list[Any]) -> Any:
    """Append the leaves of `value` to `leaves` and return its structure (hashable)."""
    kind = type(value)
    if kind in ATOMS:
        leaves.append(value)
        return LEAF
    if kind is tuple or kind is list:
        return (kind, tuple([flatten(item, leaves) for item in value]))
    if kind is dict or kind is OrderedDict:
        return (kind, tuple(value), tuple([flatten(item, leaves) for item in value.values()]))
    if kind is defaultdict:
        return (kind, value.default_factory, tuple(value), tuple([flatten(item, leaves) for item in value.values()]))
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return (kind, tuple([flatten(item, leaves) for item in value]))
    if kind in _pytree.SUPPORTED_NODES:
        children, state = _pytree.SUPPORTED_NODES[kind].flatten_fn(value)
        return (Registered(kind, state), tuple([flatten(item, leaves) for item in children]))
    if isinstance(value, Mutable):
        return value.take_apart(leaves, flatten)
    if is_dataclass_value(value):
        names = tuple(field.name for field in dataclasses.fields(value))
        return (Fields(kind, names), tuple([flatten(getattr(value, name, None), leaves) for name in names]))
    leaves.append(value)
    return LEAF


@dataclasses.dataclass(frozen=True, slots=True)
class Fields:
    """A dataclass and the names of its fields."""

    cls: type
    names: tuple[str, ...]


def unflatten(structure: Any, leaves: Iterator[Any]) -> Any:
    """Build the value that `flatten` took apart, from an iterator over (new) leaves."""
    if structure is LEAF:
        return next(leaves)
    kind, children = structure[0], structure[-1]
    values = [unflatten(child, leaves) for child in children]
    if kind is tuple or kind is list:
        return kind(values)
    if kind is dict or kind is OrderedDict:
        return kind(zip(structure[1], values))
    if kind is defaultdict:
        return defaultdict(structure[1], zip(structure[2], values))
    if isinstance(kind, Varying):
        return kind.build(values)
    if isinstance(kind, Registered):
        return _pytree.SUPPORTED_NODES[kind.cls].unflatten_fn(values, kind.state)
    if isinstance(kind, Fields):
        made: Any = object.__new__(kind.cls)
        for name, value in zip(kind.names, values):
            object.__setattr__(made, name, value)
        return made
    return kind(*values)


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Replace the tensors among the arguments of a call to torch: plain tuples, lists and dicts are looked into,
    nothing else.
    """
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return function(value)
    if kind is tuple or kind is list:
        return kind([map_tensors(function, item) for item in value])
    if kind is dict:
        return {name: map_tensors(function, item) for name, item in value.items()}
    return value


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors among the arguments of a call to torch."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        yield value
    elif kind is tuple or kind is list or kind is dict:
        for item in value.values() if kind is dict else value:
            yield from tensors(item)


def paths(structure: Any, prefix: str = "") -> list[str]:
    """Name each leaf, for messages: ``args[0]['mask'][1]``."""
    if structure is LEAF:
        return [prefix]
    kind, children = structure[0], structure[-1]
    if kind in (dict, OrderedDict, defaultdict):
        names = [f"[{key!r}]" for key in structure[-2]]
    elif isinstance(kind, Fields):
        names = [f".{name}" for name in kind.names]
    else:
        names = [f"[{number}]" for number in range(len(children))]
    return [path for name, child in zip(names, children) for path in paths(child, prefix + name)]
