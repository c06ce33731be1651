"""Recipes: how each call makes anew, or finds again, a value that the captured body has left behind or returned.

In: a value as the body left it: Python values, tensors of the trace, containers and objects, new ones and ones that
were there before.
Out: a recipe, which a call builds from the graph's results.

    >>> recipes.of({"loss": fake, "step": 3})
    Fresh(dict, (Result(2), Constant(3)))

A new container is built once a call, wherever it is met again; one that was there before is found at its place: by the
read that led to it and the keys into what that gives. What cannot be told how to make is refused: `Unrepeatable`.
"""

from __future__ import annotations

import enum
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ... import torch_private as private
from ...torch_private import pytree as _pytree
from ..outputs import OUTPUT_VALUES, Constant
from .global_names import users_class
from .reach import CHANGING, slots_of
from .reads import CONTAINERS, DEPTH, Read

Tensor = torch.Tensor
SEQUENCES = (list, tuple, set, frozenset)
MAPPINGS = (dict, OrderedDict, Counter)


class Unrepeatable(Exception):
    """A value that no call can make again."""


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where something is found at each call: a read, and keys into the containers that it gives."""

    read: Read
    keys: tuple[Any, ...] = ()

    def find(self) -> Any:
        value = read_now(self.read)
        for key in self.keys:
            value = dict.__getitem__(value, key) if isinstance(value, dict) else value[key]
        return value


@dataclass(frozen=True, slots=True)
class Result:
    """One of the graph's results."""

    number: int


@dataclass(frozen=True, slots=True)
class Element:
    """What a container held at a place before the call changed it."""

    owner: Any
    number: int


@dataclass(frozen=True, slots=True, eq=False)
class Fresh:
    """A container or an object that each call makes: `build` of its parts."""

    kind: type
    parts: tuple[Any, ...]
    build: Callable[[list[Any]], Any]


RECIPES = (Place, Result, Element, Fresh)


class Call:
    """What one call has found and made so far."""

    def __init__(self, results: Sequence[Any]) -> None:
        self.results = results
        self.known: dict[Any, Any] = {}

    def make(self, recipe: Any) -> Any:
        kind = type(recipe)
        if kind is Constant:
            return recipe.value
        if kind is Result:
            return self.results[recipe.number]
        if kind is Element:
            return self.make(recipe.owner)[recipe.number]
        if recipe not in self.known:
            made = recipe.find() if kind is Place else recipe.build([self.make(part) for part in recipe.parts])
            self.known[recipe] = made
        return self.known[recipe]


def read_now(read: Read) -> Any:
    """Make a read again."""
    if read.how == "cell":
        return read.table.cell_contents
    if read.how == "attribute":
        return getattr(read.table, read.name)
    return read.table[read.section][read.name] if read.how == "entry" else read.table[read.name]


class Recipes:
    """The recipes of one capture.

    Args:
        recorder: what was there before. twin: of a real tensor its stand-in in the trace, which makes it an input of
        the graph. tracker: the trace's tensors. tensors: the graph's results; those that recipes need are added.
    """

    def __init__(self, recorder: Any, twin: Callable[[Tensor], Tensor], tracker: Any, tensors: list[Tensor]) -> None:
        self.recorder, self.twin, self.tracker, self.tensors = recorder, twin, tracker, tensors
        self.numbers = {id(value): number for number, value in reversed([*enumerate(tensors)])}
        self.made: dict[int, tuple[Any, Fresh]] = {}
        self.open: set[int] = set()
        recorder.blind = {key: entry for key, entry in recorder.blind.items() if key not in recorder.reads}
        self.places = places(recorder)

    def of(self, value: Any) -> Any:
        """The recipe of a value.

        Raises:
            Unrepeatable: there is none; says of what.
        """
        kind = type(value)
        if isinstance(value, Tensor):
            return self.of_tensor(value)
        if isinstance(value, (torch.SymInt, torch.SymFloat)):
            return Constant(int(value) if isinstance(value, torch.SymInt) else float(value))  # it is fixed by that
        if id(value) in self.made:
            return self.made[id(value)][1]
        if isinstance(value, CHANGING) and id(value) in self.recorder.before:
            return self.place_of(value)
        if isinstance(value, (*OUTPUT_VALUES, enum.Enum, range)) or id(value) in self.recorder.met or importable(value):
            return Constant(value)
        if id(value) in self.open:
            raise Unrepeatable(f"a {kind.__name__} that holds itself")
        self.open.add(id(value))
        parts, build = taken_apart(value)
        made = Fresh(kind, tuple([self.of(part) for part in parts]), build)
        self.open.discard(id(value))
        self.made[id(value)] = value, made
        return made

    def of_tensor(self, value: Tensor) -> Result:
        from ...torch_private import FakeTensor

        if not isinstance(value, FakeTensor) and not private.is_functorch_wrapped_tensor(value):
            value = self.twin(value)
        if (
            self.tracker.get(value) is None
            or type(value) is torch.nn.Parameter
            and id(value) not in map(id, self.recorder.twins.values())
        ):
            raise Unrepeatable("a tensor that is no result of the graph")
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.tensors)
            self.tensors.append(value)
        return Result(self.numbers[id(value)])

    def place_of(self, value: Any) -> Place:
        """Where a container that was there before is found again."""
        if id(value) not in self.places:
            found = in_tables(self.recorder, value)
            if not found:
                raise Unrepeatable(f"a {type(value).__name__} that is reached in a way that is not followed")
            self.places[id(value)] = value, found
        return self.places[id(value)][1][0]


def taken_apart(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The parts of a new container or object, and what builds another one of such parts.

    Raises:
        Unrepeatable: its class keeps more than its parts.
    """
    kind: Any = type(value)
    if kind in SEQUENCES:
        return [*value], kind
    if kind is deque:
        return [*value], lambda parts, most=value.maxlen: deque(parts, most)
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return [*value], kind._make
    if kind in MAPPINGS or kind is defaultdict:
        if any(isinstance(key, Tensor) for key in value):
            raise Unrepeatable(f"a {kind.__name__} with a tensor as a key")
        keys, empty = [*value], (lambda: defaultdict(value.default_factory)) if kind is defaultdict else kind
        return [*value.values()], lambda parts: filled(empty(), keys, parts)
    if kind in _pytree.SUPPORTED_NODES:
        children, state = _pytree.SUPPORTED_NODES[kind].flatten_fn(value)
        return list(children), lambda parts: _pytree.SUPPORTED_NODES[kind].unflatten_fn(parts, state)
    if plain_object(value):
        names = [*vars(value)]
        return [*vars(value).values()], lambda parts: object_with(kind, names, parts)
    raise Unrepeatable(f"a new {kind.__module__}.{kind.__qualname__}")


def filled(made: Any, keys: list[Any], parts: list[Any]) -> Any:
    base: Any = OrderedDict if isinstance(made, OrderedDict) else dict
    for key, part in zip(keys, parts):
        base.__setitem__(made, key, part)
    return made


def object_with(cls: type, names: list[str], parts: list[Any]) -> Any:
    made: Any = object.__new__(cls)
    vars(made).update(zip(names, parts))
    return made


def plain_object(value: Any) -> bool:
    """Whether an object is all that its attributes hold."""
    cls = type(value)
    plain = users_class(cls) and cls.__new__ is object.__new__ and type(getattr(value, "__dict__", None)) is dict
    return plain and not slots_of(cls) and not isinstance(value, (torch.nn.Module, BaseException, type))


def importable(value: Any) -> bool:
    """Whether a function or module is the one that is found under its own name."""
    if isinstance(value, types.ModuleType):
        return sys.modules.get(value.__name__) is value
    if not isinstance(value, (types.FunctionType, types.BuiltinFunctionType)):
        return False
    found: Any = sys.modules.get(value.__module__ or "")
    for part in value.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is value


# Results.


class Shared:
    """In a result: a container that is one object with what the call leaves behind."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def marked(out: Any, shared: frozenset[int]) -> Any:
    """A result with `Shared` in the place of containers that are to be the very ones that the user holds elsewhere."""
    if id(out) in shared:
        return Shared(out)
    if type(out) in (list, tuple):
        return type(out)([marked(item, shared) for item in out])
    return {key: marked(item, shared) for key, item in out.items()} if type(out) is dict else out


def containers_in(value: Any, found: dict[int, Any]) -> None:
    """Collect the new containers and objects inside a value that the body has left behind."""
    if isinstance(value, Tensor) or id(value) in found or not (isinstance(value, CONTAINERS) or plain_object(value)):
        return
    found[id(value)] = value
    held: Any = value if isinstance(value, CONTAINERS) else vars(value)
    for item in list(held.values() if isinstance(held, dict) else held):
        containers_in(item, found)


# Places.


def places(recorder: Any) -> dict[int, tuple[Any, list[Place]]]:
    """The containers that guards know, by id, and where each was before the body ran."""
    found: dict[int, tuple[Any, list[Place]]] = {}
    for read in recorder.reads.values():
        if (
            read.how in ("item", "entry", "cell", "attribute")
            and isinstance(read.value, CONTAINERS)
            and not read.written
        ):
            for keys, value in within(recorder, read.value):
                found.setdefault(id(value), (value, []))[1].append(Place(read, keys))
    for read, _ in recorder.blind.values():
        if isinstance(read.value, CHANGING):
            found.setdefault(id(read.value), (read.value, []))[1].append(Place(read))
    return found


def within(recorder: Any, value: Any, keys: tuple = ()) -> Iterator[tuple[tuple, Any]]:
    """The containers in a container that a guard compares, itself included, each with the keys that lead to it."""
    if isinstance(value, CHANGING):
        yield keys, value
    if len(keys) + 1 >= DEPTH or isinstance(value, (set, frozenset)):
        return
    held = recorder.before.get(id(value), value)
    for key, item in held.items() if isinstance(held, dict) else enumerate(held):
        if isinstance(item, CONTAINERS):
            yield from within(recorder, item, (*keys, key))


def in_tables(recorder: Any, value: Any) -> list[Place]:
    """Where a container is that only `vars(obj)` or the like has led to: an attribute, which is compared from now
    on.
    """
    for table, before, _ in list(recorder.snapshots):
        if id(table) in recorder.attributes and isinstance(before, dict):
            for name, held in before.items():
                if held is value and type(name) is str:
                    return [Place(recorder.compare("item", table, name, value))]
    for obj, name, _, held in recorder.slots:
        if held is value:
            return [Place(recorder.compare("attribute", obj, name, value))]
    return []
