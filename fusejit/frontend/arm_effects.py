"""Effects of an arm: what an arm of an `if` could change besides its variables, although its test may not hold.

In: the variables that the arms see. Out: `check(site)`, which puts changes back and refuses them by name.

    >>> around = Surroundings({"outs": cell}); outs.append(y); around.check(site)
    Unsupported: changing a list (`outs`) in an `if` that depends on a tensor: ...

Everything that the arms can reach from their variables is followed, however deep: what containers and objects hold,
closures, bound methods, iterators. What the capture has met of arguments, modules and globals its recorder knows.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import operator
import re
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ..capture import tracer
from ..capture.source_lines import kind
from ..capture.state.global_names import full, users_class
from ..capture.state.iterators import is_iterator
from ..capture.state.reads import CONTAINERS, MISSING, Contents, contents, copied, refill
from ..errors import Unsupported
from .convert import Site

WAY_OUT = "both arms run while capturing; assign a variable in the arms, and change what is shared behind the `if`"
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
NAMES: dict[type, str] = {types.CellType: "variable", type: "class"}
SYSTEM = ("torch", "fusejit", "logging", "threading", "contextvars", "weakref", "enum", "typing", "abc")
"""Packages whose objects are none of the user's state; torch's modules and tensors, and what is derived from any,
are.
"""


class Kept(NamedTuple):
    """A thing that may change, what it held, the variable through which it was found, and what it is to the user."""

    holder: Any
    before: Sequence[Any]
    name: str
    what: str = ""


class Surroundings:
    """What is reachable before an arm runs.

    Args:
        cells: the variables by name; own: names of those that are assigned by the arms, which whoever runs them puts
            back.
    """

    def __init__(self, cells: dict[str, types.CellType], own: Iterable[str] = ()) -> None:
        self.kept: list[Kept] = []
        self.met: dict[int, Any] = {}
        self.recorder = tracer.recorder() if tracer.active() else None
        self.known = len(self.recorded())
        with self.unseen():
            self.follow(
                [*self.written(), *((cell, name) for name, cell in cells.items())], {name: cells[name] for name in own}
            )

    def recorded(self) -> list[tuple[Any, Any, str]]:
        """What the capture has met: (holder, what it held then, whose it is)."""
        return [] if self.recorder is None else self.recorder.snapshots

    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        """Look at things without a record that they were read."""
        if self.recorder is None:
            yield
            return
        self.recorder.silent += 1
        try:
            yield
        finally:
            self.recorder.silent -= 1

    def written(self) -> list[tuple[Any, str]]:
        """Keep what the capture has met, and return what it put there itself, of which it has no record."""
        found = []
        for holder, before, owner in self.recorded():
            self.keep(holder, owner)
            if isinstance(holder, dict):
                found += [(value, owner) for name, value in holder.items() if before.get(name) is not value]
        return found

    def follow(self, rest: list[tuple[Any, str]], own: dict[str, types.CellType]) -> None:
        """Keep all that can be reached; of `own` variables what they hold, but not that they hold it."""
        for name, cell in own.items():
            self.met[id(cell)] = cell
            rest += [(value, name) for value in state(cell)]
        while rest:
            value, name = rest.pop()
            if type(value) in ATOMS or id(value) in self.met:
                continue
            self.keep(value, name)
            if isinstance(value, types.FunctionType):
                rest += cells_of(value)
            if (table := attributes(value)) is not None and id(table) not in self.met:
                self.keep(table, name, type(value).__name__)
                rest += [(part, name) for part in table.values()]
            rest += [(part, name) for part in parts(value) if type(part) not in ATOMS]

    def keep(self, holder: Any, name: str, what: str = "") -> None:
        self.met[id(holder)] = holder
        before = state(holder)
        if before or isinstance(holder, CHANGING):
            self.kept.append(Kept(holder, before, name, what or NAMES.get(type(holder), type(holder).__name__)))

    def check(self, site: Site) -> None:
        """Put changes back and raise for the first."""
        with self.unseen():
            late = [
                Kept(holder, flat(before), owner, type(holder).__name__)
                for holder, before, owner in self.recorded()[self.known :]
            ]  # first met in an arm
            changed = [kept for kept in (*self.kept, *late) if not same(state(kept.holder), kept.before)]
            for kept in changed:
                put_back(kept.holder, kept.before)
        if changed:
            article = "an" if site.kind[0] in "aeiou" else "a"
            what = (
                f"changing a {changed[0].what} (`{changed[0].name}`) in {article} `{site.kind}` that depends on a "
                "tensor"
            )
            raise Unsupported(what, WAY_OUT, site.line)

    def checked(self, run: Callable[[], Any], site: Site) -> Callable[[], Any]:
        """A function that is checked after each call."""

        def checked() -> Any:
            found = run()
            self.check(site)
            return found

        return checked


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


@functools.cache
def slots(cls: Any) -> tuple[Any, ...]:
    """The members of a class that its instances keep outside of a `__dict__`."""
    bases = [base for base in cls.__mro__ if users_class(base) and base.__module__ not in sys.builtin_module_names]
    return tuple(item for base in bases for item in vars(base).values() if isinstance(item, types.MemberDescriptorType))


# What a thing leads to.


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
