"""Reach: what a value leads to, and what of that may change.

In: any object of the user's. Out: what can be reached from it in one step (`parts`, `attributes`, `cells_of`), what it
holds that may change (`state`), and how to put that back.

    >>> state([1, 2]); put_back(items, state(items))
    [1, 2]

Containers, objects, closures, bound methods, iterators and classes are followed; torch's, fusejit's and Python's own
objects are not.
"""

from __future__ import annotations

import functools
import gc
import operator
import re
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from ..source_lines import kind
from .global_names import full, users_class
from .iterators import is_iterator
from .reads import CONTAINERS, MISSING, Contents, contents, copied, refill

CHANGING = (list, dict, set, deque)
FUNCTIONS = (
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    types.MethodWrapperType,
    functools.partial,
)
WRAPPERS = (staticmethod, classmethod, functools._lru_cache_wrapper)
ATOMS = frozenset(
    {
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
        range,
        slice,
        types.ModuleType,
        types.CodeType,
    }
)
TORCHS = re.compile("_|fake_|fusejit_|(constant|pytype|dispatch_keys|real_tensor)$")
"""Attributes of tensors that are none of the user's."""
MANY = 10_000
"""The most elements of one container that are followed."""
SYSTEM = ("torch", "fusejit", "logging", "threading", "contextvars", "weakref", "enum", "typing", "abc")
"""Packages whose objects are none of the user's state; torch's modules and tensors, and what is derived from any,
are.
"""


def state(value: Any) -> Sequence[Any]:
    """What a thing holds that may change, as objects to be compared by identity; nothing for what cannot change by
    itself.
    """
    if isinstance(value, CONTAINERS):
        return flat(value) if isinstance(value, CHANGING) else ()
    if isinstance(value, types.CellType):
        return (value.cell_contents,) if full(value) else ()
    if isinstance(value, type):
        return (
            [part for name, held in vars(value).items() if not name.startswith("__") for part in (name, held)]
            if users_class(value)
            else ()
        )
    if isinstance(value, types.GeneratorType):
        return (value.gi_frame.f_lasti, *value.gi_frame.f_locals.values()) if value.gi_frame is not None else ()
    if is_iterator(value):
        return (operator.length_hint(value, 0), repr(value), *gc.get_referents(value))
    if (numbers := contents(value)) is not None:
        return (numbers,)
    if isinstance(value, torch.Tensor):
        return [part for pair in vars(value).items() if not TORCHS.match(pair[0]) for part in pair]
    return [held_in(slot, value) for slot in slots(type(value))] if is_object(value) else ()  # type: ignore[arg-type]  # a class has a hash


def held_in(slot: Any, value: Any) -> Any:
    try:
        return slot.__get__(value)
    except AttributeError:
        return MISSING


def flat(holder: Any) -> Sequence[Any]:
    if isinstance(holder, dict):
        return [part for pair in copied(holder).items() for part in pair]
    return list(holder)


def same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two states are of the very same objects; numbers that were made to compare are compared."""
    alike = len(one) == len(other)
    return alike and all(
        a is b or type(a) in (int, str, Contents) and type(b) is type(a) and a == b for a, b in zip(one, other)
    )


def put_back(holder: Any, before: Sequence[Any]) -> None:
    """Give a thing what it held; an iterator stays where it is."""
    if isinstance(holder, dict):
        refill(holder, dict(zip(before[::2], before[1::2])))
    elif isinstance(holder, CHANGING):
        refill(holder, before)
    elif isinstance(holder, types.CellType):
        holder.cell_contents = before[0]
    elif isinstance(holder, (type, torch.Tensor)):
        old, now = dict(zip(before[::2], before[1::2])), state(holder)[::2]
        for name in {*now} - {*old}:
            delattr(holder, name)
        for name, value in old.items():
            setattr(holder, name, value)
    elif before and isinstance(before[0], Contents):
        memoryview(holder).cast("B")[:] = before[0].data
    elif is_object(holder):
        for slot, value in zip(slots(type(holder)), before):  # type: ignore[arg-type]
            if value is not MISSING:
                slot.__set__(holder, value)
            elif held_in(slot, holder) is not MISSING:
                slot.__delete__(holder)


def slots_of(cls: Any) -> tuple[Any, ...]:
    """As `slots`, for a class whose type is known."""
    return slots(cls)


@functools.cache
def slots(cls: Any) -> tuple[Any, ...]:
    """The members of a class that its instances keep outside of a `__dict__`."""
    bases = [base for base in cls.__mro__ if users_class(base) and base.__module__ not in sys.builtin_module_names]
    return tuple(item for base in bases for item in vars(base).values() if isinstance(item, types.MemberDescriptorType))


# What a thing leads to.


def reached(value: Any, met: dict[int, Any]) -> Iterator[tuple[Any, str, Any]]:
    """Everything that can be reached from a value, itself included, and that was not met before.

    Returns:
        The thing, what the user calls it, and the object whose attributes it holds, or None.
    """
    rest: list[tuple[Any, str]] = [(value, "")]
    while rest:
        value, owner = rest.pop()
        if type(value) in ATOMS or id(value) in met or isinstance(value, torch.Tensor):
            continue
        met[id(value)] = value
        yield value, owner, None
        if isinstance(value, types.FunctionType):
            rest += cells_of(value)
        if isinstance(value, CONTAINERS) and len(value) > MANY:
            continue
        if (table := attributes(value)) is not None and id(table) not in met:
            met[id(table)] = table
            name = type(value).__name__
            yield table, name, value
            rest += [(part, f"{name}.{key}") for key, part in list(table.items()) if type(part) not in ATOMS]
        rest += [(part, owner) for part in list(parts(value)) if type(part) not in ATOMS]


def parts(value: Any) -> Iterable[Any]:
    """What can be reached from a thing in one step, besides by its attributes."""
    if isinstance(value, FUNCTIONS):
        return parts_of_function(value)
    if isinstance(value, CONTAINERS):
        return value.values() if isinstance(value, dict) else value
    if isinstance(value, type):
        return [held for held in state(value) if isinstance(held, (*FUNCTIONS, *WRAPPERS, property, *CHANGING))]
    if isinstance(value, property):
        return (value.fget, value.fset, value.fdel)
    if isinstance(value, WRAPPERS):
        return (value.__wrapped__,)
    return (*state(value), type(value)) if is_object(value) else state(value)


def parts_of_function(value: Any) -> Iterable[Any]:
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    if not isinstance(value, types.FunctionType):  # bound: to an object, or to a list
        return (value.__self__, getattr(value, "__func__", None))
    return (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()) if is_users(value) else ()


def cells_of(function: types.FunctionType) -> list[tuple[Any, str]]:
    """The closure of a function, by name; of a library's, only the functions that it wraps: its other cells are caches
    of its own.
    """
    cells = list(zip(function.__closure__ or (), function.__code__.co_freevars))
    if is_users(function):
        return cells
    return [(held, name) for cell, name in cells for held in state(cell) if isinstance(held, FUNCTIONS)]


def attributes(value: Any) -> dict[str, Any] | None:
    """The `__dict__` of a thing, where it is the user's."""
    table = getattr(value, "__dict__", None)
    users = (
        is_users(value)
        if isinstance(value, types.FunctionType)
        else not isinstance(value, torch.Tensor) and is_object(value)
    )
    return table if users and type(table) is dict else None


def is_users(function: types.FunctionType) -> bool:
    return kind(function.__code__.co_filename) == "user"


def is_object(value: Any) -> bool:
    """Whether a value is a plain object, with state of the user's."""
    cls = type(value)
    return (
        getattr(cls, "_holds_user_state", False)
        or cls.__module__.split(".")[0] not in SYSTEM
        or isinstance(value, torch.nn.Module)
    )
