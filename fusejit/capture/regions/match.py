"""Match: what the capture of one block read, found again on another block of the same structure.

In: the reads of a block's first call (`Window`) and the roots of another call. Out: which object of the new block
stands where which of the old one stood (`Pairs`), or None where anything that the first call read differs.

    >>> pairs = relocate(window.reads, recorder, [(first_block, second_block)])
    >>> pairs.of(first_block.linear.weight) is second_block.linear.weight
    True

Nothing is compared by name or by printed arguments: each attribute, global, closure cell and container that the first
call looked at is read again, at the place in the new block that it has in the old one. An object met on the way must
have the type of its twin, be reached by a read that can be repeated, and keep the same twin everywhere.
"""

from __future__ import annotations

import enum
import types
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from ... import torch_private as private
from ..guards.guards import VALUES, equal, tensor_key
from ..state.global_names import followable
from ..state.reads import CONTAINERS, MISSING, Read, freeze, same_items
from ..state.recorder import Recorder
from ..state.writes import held

Tensor = torch.Tensor


class Window:
    """While a block is captured: every read is noted anew, what the block itself changes is found.

    Attributes:
        reads: of the block, in order, those included that the caller had made before.
        change: what the block changed outside itself ("Block.count was set"), or "".
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.reads: dict[tuple[int, str, str], Read] = {}
        self.change = ""

    def __enter__(self) -> Window:
        recorder = self.recorder
        self.outer = (recorder.reads, recorder.codes, recorder.watched, recorder.window)
        self.copies = [(holder, holder.copy(), owner) for holder, _, owner in recorder.snapshots]
        self.contents = [(cell, contents(cell)) for cell, _ in recorder.cells]
        self.globals = [(scope, name, scope.get(name, MISSING)) for scope, name, _ in recorder.stores.values()]
        recorder.reads, recorder.codes, recorder.watched, recorder.window = self.reads, {}, {}, True
        return self

    def __exit__(self, *error: object) -> None:
        recorder = self.recorder
        codes, watched = recorder.codes, recorder.watched
        recorder.reads, recorder.codes, recorder.watched, recorder.window = self.outer
        recorder.codes |= codes
        for name, value in watched.items():
            recorder.watched.setdefault(name, value)
        for read in self.reads.values():
            keep_read(recorder, read)
        self.change = self.find_change()

    def find_change(self) -> str:
        recorder = self.recorder
        met = recorder.snapshots[len(self.copies) :]
        for holder, before, owner in [*self.copies, *met]:
            if not same_items(holder, before):
                return str(next(held(recorder, holder, before, owner)).effect)
        for cell, value in [*self.contents, *recorder.cells[len(self.contents) :]]:
            if contents(cell) is not value:
                return "a closure variable was set"
        known = {(id(scope), name) for scope, name, _ in self.globals}
        late = [item for key, item in recorder.stores.items() if key not in known]
        for scope, name, value in [*self.globals, *late]:
            if scope.get(name, MISSING) is not value:
                return f"the global {name} was set"
        return ""


def contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def keep_read(recorder: Recorder, read: Read) -> None:
    """Give a read to the enclosing capture: a guard at the outermost, something to compare in a block."""
    key = (id(read.table), read.section or read.how, read.name)
    if key in recorder.reads:
        return
    recorder.watched.setdefault(id(read.table), read.table)
    if isinstance(read.value, Tensor):
        recorder.sources.setdefault(id(read.value), read)
    if recorder.window:
        recorder.reads[key] = read
    elif not read.written:
        recorder.reads[key] = replace(read, snapshot=freeze(read.value, before=recorder.before))


class Pairs:
    """Which object of a new block stands where which of the old one stood: one to one."""

    def __init__(self) -> None:
        self.forward: dict[int, Any] = {}
        self.backward: dict[int, Any] = {}

    def of(self, old: Any) -> Any:
        """The twin of an object of the old block; MISSING where it has none."""
        return self.forward.get(id(old), MISSING)

    def add(self, old: Any, new: Any) -> bool:
        """Pair two objects, the dictionaries of their attributes and what they close over; False where one of them has
        another twin.
        """
        if id(old) in self.forward or id(new) in self.backward:
            return self.forward.get(id(old)) is new
        self.forward[id(old)], self.backward[id(new)] = new, old
        for cell, twin in zip(getattr(old, "__closure__", None) or (), getattr(new, "__closure__", None) or ()):
            if not self.add(cell, twin):
                return False
        one, other = getattr(old, "__dict__", None), getattr(new, "__dict__", None)
        if type(one) is dict and type(other) is dict:
            self.forward[id(one)], self.backward[id(other)] = other, one
        return True

    def match(self, old: Any, new: Any) -> bool:
        """Whether a value that was read is the same, or is the new block's twin of it."""
        if isinstance(old, Tensor):
            return isinstance(new, Tensor) and tensor_key(old) == tensor_key(new) and self.add(old, new)
        if isinstance(old, (*VALUES, enum.Enum)):
            return equal(new, old)
        if old is new:
            return self.add(old, new)
        if type(old) is not type(new):
            return False
        if type(old) is types.MethodType:
            return old.__func__ is new.__func__ and self.match(old.__self__, new.__self__)
        return followed(old) and self.add(old, new)

    def match_container(self, old: Any, frozen: Any, new: Any) -> bool:
        """Whether a container holds what the old one held when it was read (`frozen`), element by element."""
        if not isinstance(old, CONTAINERS):
            return self.match(old, new)
        if type(old) is not type(new) or not isinstance(old, (tuple, frozenset)) and not self.add(old, new):
            return False
        if isinstance(old, (set, frozenset)):
            return bool(new == frozen)
        if len(new) != len(frozen) or isinstance(old, dict) and list(new) != list(frozen):
            return False
        items = (
            [(frozen[name], dict.__getitem__(new, name)) for name in frozen]
            if isinstance(new, dict)
            else list(zip(frozen, new))
        )
        return all(self.match_item(then, now) for then, now in items)

    def match_item(self, then: Any, now: Any) -> bool:
        """One element: what was a container is a frozen copy of it."""
        if isinstance(now, (list, tuple, deque)) and isinstance(then, list):
            return len(now) == len(then) and all(map(self.match_item, then, now))
        if isinstance(now, dict) and isinstance(then, dict):
            return list(now) == list(then) and all(self.match_item(then[name], now[name]) for name in then)
        if isinstance(now, (set, frozenset)):
            return bool(now == then)
        return not isinstance(now, CONTAINERS) and self.match(then, now)


def followed(value: Any) -> bool:
    """Whether every attribute of an object that a function reads is seen."""
    if isinstance(value, torch.nn.Module):
        return True
    cls = type(value)
    return (
        followable(cls)
        and type(getattr(value, "__dict__", None)) is dict
        and not isinstance(value, (type, types.FunctionType))
    )


def read_again(read: Read, table: Any) -> Any:
    """The value at a read's place in another table; MISSING where there is none."""
    try:
        if read.how == "entry":
            return table[read.section][read.name]
        if read.how == "cell":
            return table.cell_contents
        if read.how == "attribute":
            return getattr(table, read.name)
        return table[read.name]
    except (KeyError, AttributeError, ValueError):
        return MISSING


def relocate(reads: Iterable[Read], recorder: Recorder, roots: Iterable[tuple[Any, Any]]) -> Pairs | None:
    """Find the reads of a block on another one and give them to the recorder; None where the two differ.

    Args:
        reads: of the first block's capture, in their order. roots: (object of the first call, object of this call).
    """
    pairs = Pairs()
    if not all(pairs.add(old, new) for old, new in roots):
        return None
    found = []
    recorder.silent += 1
    try:
        with private.DisableTorchFunction():  # reading a tensor's dtype is no part of the capture
            for read in reads:
                table = table_of(read, pairs, recorder)
                if table is MISSING:
                    return None
                value = None if read.how == "absent" else read_again(read, table)
                if read.how == "absent":
                    if read.name in table:
                        return None
                elif value is MISSING or not pairs.match_container(read.value, read.snapshot, value):
                    return None
                if table is not read.table or recorder.window:
                    found.append((read, table, value))
    finally:
        recorder.silent -= 1
    for read, table, value in found:
        key = (id(table), read.section or read.how, read.name)
        if key not in recorder.reads:
            written = recorder.written(read.how, table, read.name, value, read.section)
            keep_read(recorder, Read(read.how, table, read.name, value, read.section, freeze(value), written))
    return pairs


def table_of(read: Read, pairs: Pairs, recorder: Recorder) -> Any:
    """Where a read is made again: the twin of its table, or the table itself if every block has the same; MISSING when
    that is unknown.
    """
    table = pairs.of(read.table)
    if table is MISSING:
        shared = (
            read.how == "cell" or isinstance(read.table, types.MappingProxyType) or id(read.table) in recorder.scopes
        )
        return read.table if shared else MISSING
    return table
