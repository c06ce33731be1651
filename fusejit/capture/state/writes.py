"""What a captured function wrote outside itself: attributes, items of containers, globals, closure variables.

In: a recorder after the body has run, its objects as the body left them. Out: `stores(recorder, recipes)`: what each
call has to write again, in order; what a call cannot write again is refused, with the user's line. `restore` puts
everything back.

    >>> [str(change.effect) for change in changes(recorder)]
    ['Net.hidden was set at model.py:9: self.hidden = y',
        'Net.losses was changed at model.py:10: self.losses.append(loss)']

What a call leaves behind follows from what guards compare: a container that it changes is compared as a whole, and
found again by the read that led to it. Where it is only added to (blind.py), a call adds to whatever is there.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...errors import Unsupported
from ..outputs import Constant
from .blind import ADDED
from .global_names import class_table, full, item_line
from .reach import put_back
from .reads import CONTAINERS, DEPTH, MISSING, Contents, Effect, Read, base_of, contents, copied, refill, same_items
from .recipes import Call, Element, Place, Recipes, Unrepeatable, containers_in

Tensor = torch.Tensor
REPEAT = "a graph does not do that again at each call"


@dataclass(frozen=True, slots=True)
class Change:
    """What one place held before the body ran, and holds now; `name` is None for all of a container."""

    holder: Any
    name: Any
    before: Any
    after: Any
    effect: Effect

    def put(self, value: Any, holder: Any = MISSING) -> None:
        """Let the place, or the same one of another holder, hold a value."""
        holder = self.holder if holder is MISSING else holder
        if isinstance(value, Contents):
            put_back(holder, (value,))
        elif self.name is None:
            refill(holder, value)
        elif isinstance(holder, types.CellType):
            if value is not MISSING:
                holder.cell_contents = value
            elif full(holder):
                del holder.cell_contents
        elif not isinstance(holder, dict):  # a class, or the member of a class that is a slot
            put_attribute(holder, self.name, value)
        elif value is MISSING:
            dict.pop(holder, self.name, None)
        else:
            base_of(holder).__setitem__(holder, self.name, value)


def put_attribute(holder: Any, name: str, value: Any) -> None:
    write, delete = (
        (type.__setattr__, type.__delattr__) if isinstance(holder, type) else (object.__setattr__, object.__delattr__)
    )
    if value is not MISSING:
        write(holder, name, value)
    elif getattr(holder, name, MISSING) is not MISSING:
        delete(holder, name)


@dataclass(frozen=True, slots=True)
class Delta:
    """A number that is added to what is there."""

    number: int


@dataclass(frozen=True, slots=True)
class Items:
    """What a container holds afterwards: the first `kept` of what it held (None: all), then others."""

    kept: int | None
    others: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Store:
    """What each call writes to one place: `holder`, or what stands at its `Place`; `value` is a recipe, `Items`, a
    `Delta` or MISSING.
    """

    change: Change
    holder: Any
    value: Any

    def prepare(self, call: Call) -> tuple[Any, Any]:
        """The holder and the value of a call, before anything is written."""
        holder = call.make(self.holder) if isinstance(self.holder, Place) else self.holder
        if isinstance(self.value, Items):
            return holder, [call.make(item) for item in self.value.others]
        if self.value is MISSING or isinstance(self.value, Delta):
            return holder, self.value
        return holder, call.make(self.value)

    def write(self, holder: Any, value: Any) -> None:
        if isinstance(self.value, Items):
            refill_behind(holder, self.value.kept, value)
        elif isinstance(value, Delta):
            self.change.put(holder[self.change.name] + value.number, holder)
        else:
            self.change.put(value, holder)


def refill_behind(holder: Any, kept: int | None, others: list[Any]) -> None:
    """Put items behind the first ones of a container."""
    if isinstance(holder, dict):
        refill(holder, dict(zip(others[::2], others[1::2])))
    elif kept == 0 or not isinstance(holder, (list, deque)):
        refill(holder, others)
    else:
        base: Any = list if isinstance(holder, list) else deque
        while kept is not None and len(holder) > kept:
            base.pop(holder)
        base.extend(holder, others)


def repeat(stores: Sequence[Store], call: Call) -> None:
    """Write what a call leaves behind."""
    for store, given in [(store, store.prepare(call)) for store in stores]:
        store.write(*given)


def changes(recorder: Any) -> list[Change]:
    """Return every write that was seen, in the order in which their objects were met."""
    return [change for change in every_change(recorder) if not stands_in(recorder, change.before, change.after)]


def stands_in(recorder: Any, before: Any, after: Any) -> bool:
    """Whether the body left what was there, or only the stand-ins of tensors: `self.total += 1`, which the graph
    does.
    """
    if isinstance(before, (list, deque)) and type(before) is type(after):
        return len(before) == len(after) and all(stays(recorder, one, other) for one, other in zip(before, after))
    return stays(recorder, before, after)


def stays(recorder: Any, before: Any, after: Any) -> bool:
    return before is after or after is not None and recorder.twins.get(id(before)) is after


def every_change(recorder: Any) -> Iterator[Change]:
    """As `changes`, a tensor's stand-in for the tensor itself included."""
    for holder, before, owner in old_snapshots(recorder):
        if not same_items(holder, before):
            yield from held(recorder, holder, before, owner)
    yield from attributes(recorder)
    for cell, value in {
        id(cell): (cell, value) for cell, value in reversed(recorder.cells)
    }.values():  # as each was met first
        now = cell.cell_contents if full(cell) else MISSING
        if now is not value:
            yield Change(
                cell, "cell_contents", value, now, Effect("a closure variable", "deleted" if now is MISSING else "set")
            )
    for scope, name, value in recorder.stores.values():
        if scope.get(name, MISSING) is not value:
            yield Change(scope, name, value, scope.get(name, MISSING), Effect(f"the global {name}", "set"))
    for read in list(recorder.reads.values()):
        if isinstance(read.snapshot, Contents) and (now := contents(read.value)) != read.snapshot:
            yield Change(read.value, None, read.snapshot, now, Effect(f"a {type(read.value).__name__}", "changed"))


def attributes(recorder: Any) -> Iterator[Change]:
    """What changed in slots and in classes."""
    for obj, name, member, before in recorder.slots:
        try:
            now = member.__get__(obj)
        except AttributeError:
            now = MISSING
        if now is not before:
            line = recorder.writes.get((id(obj), name), "")
            yield Change(
                obj,
                name,
                before,
                now,
                Effect(f"{type(obj).__name__}.{name}", "deleted" if now is MISSING else "set", line),
            )
    for cls, values in recorder.classes.items():
        for name in dict.fromkeys([*values, *cls.__dict__]):
            old, now = values.get(name, MISSING), cls.__dict__.get(name, MISSING)
            if now is not old and not name.startswith("__"):
                yield Change(
                    cls,
                    name,
                    old,
                    now,
                    Effect(f"the class attribute {cls.__name__}.{name}", "deleted" if now is MISSING else "set"),
                )


def old_snapshots(recorder: Any) -> list[tuple[Any, Any, str]]:
    """The snapshots of what was there before the body ran."""
    made = of_the_body(recorder)
    return [snapshot for snapshot in recorder.snapshots if id(snapshot[0]) not in made]


def of_the_body(recorder: Any) -> set[int]:
    """What holds the attributes of objects that the body made, such as a slice of a `ModuleList`: by id."""
    return {id(held) for obj in recorder.born.values() for held in (vars(obj), *vars(obj).values())}


def held(recorder: Any, holder: Any, before: Any, owner: str) -> Iterator[Change]:
    """What changed in a container: each name of a dict, or all of it."""
    now = copied(holder)
    obj = recorder.attributes.get(id(holder), MISSING)
    if not isinstance(holder, dict) or obj is MISSING and not in_order(before, now):
        what = f"a {owner}" if owner == type(holder).__name__ else owner
        yield Change(holder, None, before, now, Effect(what, "changed", recorder.lines.get(id(holder), "")))
        return
    for name in dict.fromkeys([*before, *now]):
        old, new = before.get(name, MISSING), now.get(name, MISSING)
        if new is not old:
            action = "deleted" if new is MISSING else "set"
            line = recorder.writes.get((id(obj), name), "") or recorder.lines.get(id(holder), "")
            yield Change(
                holder,
                name,
                old,
                new,
                Effect(f"{owner}.{name}" if type(name) is str else f"{owner}[{name!r}]", action, line),
            )


def in_order(before: dict, now: dict) -> bool:
    """Whether a dict's keys stand as they do where each was deleted or set once."""
    return [*now] == [*(key for key in before if key in now), *(key for key in now if key not in before)]


# What calls write again.


def stores(recorder: Any, recipes: Recipes) -> tuple[Store, ...]:
    """Return what each call has to write.

    Raises:
        Unsupported: a call cannot write it; names the user's line.
    """
    found = []
    for change in map(functools.partial(with_line, recorder), changes(recorder)):
        try:
            found.append(store_of(recorder, recipes, change))
        except Unrepeatable as error:
            effect = change.effect
            seen = id(change.holder) not in recorder.functions and not isinstance(change.holder, deque)
            raise Unsupported(
                effect.target, f"{effect.action} by each call, {error}: {REPEAT}", effect.line, seen
            ) from None
    return tuple(found)


def shared(recorder: Any) -> frozenset[int]:
    """By id: the containers that were there before, and those that the body has left somewhere."""
    found: dict[int, Any] = {}
    for change in changes(recorder):
        containers_in(change.after, found)
    mutable = {identity for identity, value in found.items() if not isinstance(value, (tuple, frozenset))}
    return frozenset(mutable | {id(holder) for holder, _, _ in old_snapshots(recorder)})


def with_line(recorder: Any, change: Change) -> Change:
    """A change with the line that made it, where neither a call nor an attribute has shown it: `self.counts["a"] +=
    1`.
    """
    if change.effect.line:
        return change
    return replace(change, effect=replace(change.effect, line=item_line(recorder.codes, str(change.name or ""))))


def store_of(recorder: Any, recipes: Recipes, change: Change) -> Store:
    if isinstance(change.before, Contents):
        raise Unrepeatable("whose numbers change in place")
    container = id(change.holder) in recorder.before and id(change.holder) not in {
        *recorder.attributes,
        *recorder.functions,
    }
    if not container:
        compare(recorder, change)
        return Store(change, change.holder, delta(recorder, change) or value_of(recipes, change.after))
    place = recipes.place_of(change.holder)
    keep_apart(recorder, recipes, place, change.holder)
    if change.name is not None:
        return Store(change, place, value_of(recipes, change.after))
    return Store(change, place, items_of(recorder, recipes, place, change))


def value_of(recipes: Recipes, after: Any) -> Any:
    return MISSING if after is MISSING else recipes.of(after)


def items_of(recorder: Any, recipes: Recipes, place: Place, change: Change) -> Items:
    """All that a container holds: what it held already, found in it, and the rest."""
    before, after = change.before, change.after
    if isinstance(after, dict):
        return Items(0, tuple(part for key, item in after.items() for part in (Constant(key), recipes.of(item))))
    if isinstance(after, set):
        return Items(0, tuple(map(recipes.of, after)))
    entry = recorder.blind.get((id(place.read.table), place.read.how, place.read.name))
    blind = entry is not None and not place.keys
    old, now = [*before], [*after]
    kept = 0
    while (
        kept < min(len(old), len(now)) and stays(recorder, old[kept], now[kept]) and not (blind and "clear" in entry[1])
    ):  # type: ignore[index]
        kept += 1
    if blind and "clear" not in entry[1]:  # type: ignore[index]
        return Items(None, tuple(map(recipes.of, now[kept:])))
    numbers = {
        id(item): number
        for number, item in enumerate(old)
        if isinstance(item, Tensor) and sum(item is other for other in old) == 1
    }
    numbers = {} if blind else numbers
    return Items(
        kept,
        tuple(Element(place, numbers[id(item)]) if id(item) in numbers else recipes.of(item) for item in now[kept:]),
    )


def delta(recorder: Any, change: Change) -> Delta | None:
    """What is added to a number that nothing else reads."""
    entry = recorder.blind.get((id(change.holder), "item", change.name))
    plain = type(change.before) is int and type(change.after) is int
    if entry is None or not plain or ADDED not in entry[1]:
        return None
    return Delta(change.after - change.before)


def compare(recorder: Any, change: Change) -> None:
    """Compare what a place held that was written in a way that shows no read: what a call leaves there may follow from
    it.
    """
    holder, name, before = change.holder, change.name, change.before
    if isinstance(holder, types.CellType):
        if before is not MISSING and not any(read.table is holder for read in known(recorder)):
            recorder.compare("cell", holder, name, before)
    elif isinstance(holder, type):
        recorder.compare("absent" if before is MISSING else "item", class_table(holder), name, before)
    elif not isinstance(holder, dict):
        if (id(holder), name) not in recorder.writes and before is not MISSING:
            recorder.compare("attribute", holder, name, before)
    elif id(holder) in recorder.before:
        obj = recorder.attributes.get(id(holder))
        if (id(obj), name) not in recorder.writes and type(name) is str:
            recorder.compare("absent" if before is MISSING else "item", holder, name, before)


def known(recorder: Any) -> list[Read]:
    return [*recorder.reads.values(), *(read for read, _ in recorder.blind.values())]


def keep_apart(recorder: Any, recipes: Recipes, place: Place, holder: Any) -> None:
    """Have the guards compare the type of a container that calls change, and which other places hold the same one."""
    others = [
        (other, value is holder)
        for value, found in list(recipes.places.values())
        for other in found
        if other is not place and type(value) is type(holder)
    ]
    recorder.reads[id(holder), "holder", ""] = Read("holder", place, "", holder, snapshot=others)


def restore(recorder: Any) -> None:
    """Undo every write that was seen."""
    made = list(every_change(recorder))
    kept = {id(holder) for holder, _, _ in recorder.snapshots}
    for holder, before, _ in old_snapshots(recorder):
        if not same_items(holder, before):
            refill(holder, before)  # as a whole, in its old order
    for change in made:
        if id(change.holder) not in kept:
            change.put(change.before)
    made_here = of_the_body(recorder)
    recorder.reads = {
        key: read for key, read in recorder.reads.items() if id(read.table) not in made_here
    }  # each call makes its own
    recorder.born.clear()


# What the next call finds.


def moving(recorder: Any, found: Sequence[Store]) -> list[Change]:
    """The changes after which the guards would not hold: of Python values that are compared."""
    compared = {(id(read.table), read.name) for read in recorder.reads.values()} | {
        id(read.table) for read in recorder.reads.values()
    }
    changed = []
    for store in found:
        change = store.change
        if isinstance(store.holder, Place):
            blind = not any(read is store.holder.read for read in recorder.reads.values())
        else:
            table = class_table(change.holder) if isinstance(change.holder, type) else change.holder
            cell = isinstance(change.holder, types.CellType) and id(table) in compared
            blind = isinstance(store.value, Delta) or not cell and (id(table), change.name) not in compared
        if not blind and not alike(change.before, change.after):
            changed.append(change)
    return changed


def alike(one: Any, other: Any, depth: int = DEPTH) -> bool:
    """Whether a guard that compares the one holds for the other; any tensor does for another."""
    if isinstance(one, Tensor) or not isinstance(one, CONTAINERS):
        if isinstance(one, Tensor) or one is other:
            return one is other or isinstance(other, Tensor)
        return (
            type(one) is type(other) and isinstance(one, (int, float, str, bytes, complex, torch.Size)) and one == other
        )
    if not isinstance(other, CONTAINERS) or len(one) != len(other) or not depth:
        return False
    if isinstance(one, dict):
        return (
            isinstance(other, dict)
            and [*one] == [*other]
            and all(alike(one[key], other[key], depth - 1) for key in one)
        )
    if isinstance(one, (set, frozenset)):
        return bool(one == other)
    return not isinstance(other, (dict, set, frozenset)) and all(alike(a, b, depth - 1) for a, b in zip(one, other))


@contextlib.contextmanager
def left(captured: Any, arguments: Sequence[Tensor]) -> Iterator[None]:
    """Let every place hold what a call would leave there, inside the block; of tensors, such with other values."""
    nodes = captured.graph.graph.output_node().args[0]
    inputs = [node for node in captured.graph.graph.nodes if node.op == "placeholder"]
    given = dict(zip(inputs, (*arguments, *captured.lifted)))
    results = [given[node] if node in given else stand_in(node.meta["val"]) for node in nodes]
    before = captured.recorder.before
    call = Call(results)
    prepared = [(store, *store.prepare(call)) for store in captured.stores]
    try:
        for store, holder, value in prepared:
            store.write(holder, value)
        yield
    finally:
        for store, holder, _ in reversed(prepared):
            if isinstance(store.holder, Place):
                refill(holder, before[id(holder)])
            else:
                store.change.put(store.change.before)


def stand_in(value: Any) -> Any:
    """A tensor with values in the place of one that only the trace knows."""
    made = torch.empty_strided(
        [int(n) for n in value.shape], [int(n) for n in value.stride()], dtype=value.dtype, device=value.device
    )
    return made.zero_().requires_grad_(value.requires_grad)
