"""Before: what was there when a capture began, so that what the body changes is found, and put back.

In: the values that a function can reach. Out: copies of all containers, attributes, slots, closure variables and
classes among them.

    >>> before.reach(cache); before.snapshots
    [({'layers': [...]}, {'layers': [...]}, 'Cache'), ([...], [...], 'Cache.layers'), ...]
"""

from __future__ import annotations

import types
from typing import Any

from .global_names import full, users_class
from .reach import CHANGING, held_in, is_object, reached, slots_of
from .reads import MISSING, copied


class Before:
    """Everything that could be reached before the body ran, as it was.

    Attributes:
        snapshots: (container, copy, what the user calls it); before: the copies by id of the container.
        attributes: by id of an object's `__dict__`: the object. met: all that was reached. silent: no read is recorded
            now.
    """

    def __init__(self) -> None:
        self.snapshots: list[tuple[Any, Any, str]] = []
        self.before: dict[int, Any] = {}
        self.attributes: dict[int, Any] = {}
        self.met: dict[int, Any] = {}
        self.slots: list[tuple[Any, str, Any, Any]] = []
        self.slotted: set[tuple[int, str]] = set()
        self.classes: dict[type, dict[str, Any]] = {}
        self.cells: list[tuple[types.CellType, Any]] = []
        self.silent = 0

    def reach(self, value: Any) -> None:
        """Note all that can be reached from a value as it is now, however deep: what the body changes there is found,
        and put back.
        """
        if id(value) in self.met:
            return
        self.silent += 1
        try:
            for thing, owner, obj in reached(value, self.met):
                if obj is not None:
                    self.attributes[id(thing)] = obj
                if isinstance(thing, CHANGING):
                    self.keep(thing, owner or type(thing).__name__)
                elif isinstance(thing, types.CellType):
                    self.cells.append((thing, thing.cell_contents if full(thing) else MISSING))
                elif isinstance(thing, type):
                    self.keep_class(thing)
                elif is_object(thing):
                    self.keep_class(type(thing))
                    self.keep_slots(thing)
        finally:
            self.silent -= 1

    def keep(self, holder: Any, owner: str) -> None:
        """Copy a container the first time that it is met; a later copy would hold what the capture wrote."""
        if id(holder) not in self.before:
            self.before[id(holder)] = copied(holder)
            self.snapshots.append((holder, self.before[id(holder)], owner))

    def keep_slots(self, obj: Any) -> None:
        """Note what the slots of an object hold; lists and dicts in them are copied."""
        for member in slots_of(type(obj)):
            if (id(obj), member.__name__) not in self.slotted:
                value = held_in(member, obj)
                self.slotted.add((id(obj), member.__name__))
                self.slots.append((obj, member.__name__, member, value))
                if isinstance(value, CHANGING):
                    self.keep(value, f"{type(obj).__name__}.{member.__name__}")

    def keep_class(self, cls: type) -> None:
        """Note what a class of the user's holds, and its bases."""
        for base in cls.__mro__:
            if users_class(base) and base not in self.classes:
                self.classes[base] = dict(base.__dict__)
