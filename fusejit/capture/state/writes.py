"""What a captured function wrote outside itself: attributes, items of containers, globals, closure variables.

In: a recorder after the body has run, its objects as the body left them. Out: `changes(recorder)`; of those, tensors
that the graph makes are results of the graph, which each call stores again (`Store`); the rest is put back and reported
(`restore`).

    >>> [str(change.effect) for change in changes(recorder)]
    ['Net.hidden was set at model.py:9: self.hidden = y', 'Net.calls was set at model.py:10: self.calls += 1']

Python values are not stored by later calls. Where what a call computes depends on what the call before has left in
them, there is no graph
(`differs`): `x * self.calls`.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import pytree
from ..outputs import OUTPUT_VALUES, Constant
from .global_names import full
from .reads import DEPTH, MISSING, Effect, copied, refill, same_items

Tensor = torch.Tensor
PLAIN = (torch._ops.OpOverload, torch._ops.HigherOrderOperator, types.FunctionType, types.BuiltinFunctionType)


@dataclass(frozen=True, slots=True)
class Change:
    """What one place held before the body ran, and holds now; `name` is None for a whole list or set."""

    holder: Any
    name: Any
    before: Any
    after: Any
    effect: Effect

    def put(self, value: Any) -> None:
        """Let the place hold a value."""
        if self.name is None:
            refill(self.holder, value)
        elif isinstance(self.holder, types.CellType):
            self.holder.cell_contents = value
        elif not isinstance(self.holder, dict):  # a class, or the member of a class that is a slot
            self.put_attribute(value)
        elif value is MISSING:
            dict.pop(self.holder, self.name, None)
        else:
            dict.__setitem__(self.holder, self.name, value)

    def put_attribute(self, value: Any) -> None:
        write, delete = (
            (type.__setattr__, type.__delattr__)
            if isinstance(self.holder, type)
            else (object.__setattr__, object.__delattr__)
        )
        if value is not MISSING:
            write(self.holder, self.name, value)
        elif getattr(self.holder, self.name, MISSING) is not MISSING:
            delete(self.holder, self.name)


@dataclass(frozen=True, slots=True)
class Store:
    """What each call puts into one place: tensors among the graph's results, and constants around them."""

    change: Change
    structure: Any
    leaves: tuple[int | Constant, ...]

    def repeat(self, results: Sequence[Any]) -> None:
        leaves = [leaf.value if isinstance(leaf, Constant) else results[leaf] for leaf in self.leaves]
        self.change.put(pytree.unflatten(self.structure, iter(leaves)))


def changes(recorder: Any) -> list[Change]:
    """Return every write that was seen, in the order in which their objects were met."""
    return [change for change in every_change(recorder) if recorder.twins.get(id(change.before)) is not change.after]


def every_change(recorder: Any) -> Iterator[Change]:
    """As `changes`, a tensor's stand-in for the tensor itself included: what `self.total += 1` leaves there."""
    for holder, before, owner in old_snapshots(recorder):
        if not same_items(holder, before):
            yield from held(recorder, holder, before, owner)
    yield from attributes(recorder)
    for cell, value in {
        id(cell): (cell, value) for cell, value in reversed(recorder.cells)
    }.values():  # as each was met first
        if cell.cell_contents is not value:
            yield Change(cell, "cell_contents", value, cell.cell_contents, Effect("a closure variable", "set"))
    for scope, name, value in recorder.stores.values():
        if scope.get(name, MISSING) is not value:
            yield Change(scope, name, value, scope.get(name, MISSING), Effect(f"the global {name}", "set"))


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
    """What changed in a container: each name of a dict, or all of a list or set."""
    if not isinstance(holder, dict):
        what = f"a {owner}" if owner == type(holder).__name__ else owner
        yield Change(holder, None, before, holder.copy(), Effect(what, "changed"))
        return
    lines = {name: line for (_, name), line in recorder.writes.items()}
    now = copied(holder)
    for name in dict.fromkeys([*before, *now]):
        old, new = before.get(name, MISSING), now.get(name, MISSING)
        if new is not old:
            action = "deleted" if new is MISSING else "set"
            yield Change(holder, name, old, new, Effect(f"{owner}.{name}", action, lines.get(name, "")))


def stores(recorder: Any, tracker: Any, tensors: list[Tensor]) -> list[Store]:
    """Return what each call has to store; the tensors of it that are not among the graph's results yet are added to
    `tensors`.

    Args:
        tracker: the trace's tensors; one that it does not know (of a transform that has ended, of another thread) is
            none of the graph's.
    """
    found: list[Store] = []
    places = {id(value): place for place, value in reversed([*enumerate(tensors)])}
    for change in changes(recorder):
        if change.name is None or change.after is MISSING:
            continue
        leaves: list[Any] = []
        structure = pytree.flatten(change.after, leaves)
        made = [
            leaf
            for leaf in leaves
            if isinstance(leaf, Tensor) and tracker.get(leaf) is not None and type(leaf) is not torch.nn.Parameter
        ]
        if not made or any(not isinstance(leaf, (Tensor, *OUTPUT_VALUES)) for leaf in leaves):
            continue
        if any(isinstance(leaf, Tensor) and is_fake(leaf) and tracker.get(leaf) is None for leaf in leaves):
            continue
        for leaf in made:
            if id(leaf) not in places:
                places[id(leaf)] = len(tensors)
                tensors.append(leaf)
        own = {id(leaf) for leaf in made}
        found.append(
            Store(change, structure, tuple(places[id(leaf)] if id(leaf) in own else Constant(leaf) for leaf in leaves))
        )
    return found


def is_fake(value: Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(value, FakeTensor) or torch._C._functorch.is_functorch_wrapped_tensor(value)


def restore(recorder: Any, stored: Sequence[Store]) -> list[Change]:
    """Undo every write that was seen; return those that later calls do not repeat."""
    repeated = {(id(store.change.holder), store.change.name) for store in stored}
    made, found = list(every_change(recorder)), changes(recorder)
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
    return [change for change in found if (id(change.holder), change.name) not in repeated]


# What later calls would compute.


def carried(recorder: Any, lost: Sequence[Change]) -> list[Change]:
    """Return the changes of places that the function also reads: the next call finds there what this one has left."""
    read = {(id(read.table), read.name) for read in recorder.reads.values()}
    by_name = (
        recorder.tables
        | {id(scope) for scope, _, _ in recorder.stores.values()}
        | {id(obj) for obj, *_ in recorder.slots}
    )
    named = {name for _, name in recorder.writes} | {
        name for _, name, _ in recorder.stores.values()
    }  # not so what is set in `vars(obj)`
    return [c for c in lost if id(c.holder) not in by_name or c.name not in named or (id(c.holder), c.name) in read]


@contextlib.contextmanager
def left(lost: Sequence[Change]) -> Iterator[None]:
    """Let every place hold what the function left there, inside the block."""
    try:
        for change in lost:
            change.put(pytree.map_tensors(real, change.after) if change.after is not MISSING else MISSING)
        yield
    finally:
        for change in reversed(lost):
            change.put(change.before)


def real(value: Tensor) -> Tensor:
    """A tensor with values in the place of one that only the trace knows."""
    if not is_fake(value) or torch._C._functorch.is_functorch_wrapped_tensor(value):
        return value
    made = torch.empty_strided(
        [int(n) for n in value.shape], [int(n) for n in value.stride()], dtype=value.dtype, device=value.device
    )
    return made.zero_().requires_grad_(value.requires_grad)


def differs(one: Any, other: Any) -> bool:
    """Whether two captures compute something else."""
    if one.structure != other.structure or one.outputs != other.outputs or one.positions != other.positions:
        return True
    if len(one.lifted) != len(other.lifted) or any(a is not b for a, b in zip(one.lifted, other.lifted)):
        return True
    return spelled(one.graph) != spelled(other.graph)


def spelled(module: torch.fx.GraphModule) -> list[tuple]:
    """A graph's nodes, without their names."""
    numbers = {node: number for number, node in enumerate(module.graph.nodes)}
    place = lambda node: f"%{numbers[node]}"  # noqa: E731
    found: list[tuple] = []
    for node in module.graph.nodes:
        target: Any = str(node.target) if node.op != "call_function" else spelled_target(node.target)
        if node.op == "get_attr" and isinstance(constant := getattr(module, target, None), Tensor):
            target = (constant.dtype, constant.shape, repr(constant.tolist()))
        elif node.op == "get_attr" and isinstance(constant, torch.fx.GraphModule):
            target = repr(spelled(constant))
        elif node.op == "placeholder":
            target = ""
        found.append((node.op, target, repr(torch.fx.map_arg((node.args, node.kwargs), place))))
    return found


def spelled_target(target: Any) -> Any:
    """What a node calls: an op is itself, a branch or a loop of a graph's own is its graphs."""
    graphs = [] if isinstance(target, PLAIN) else graphs_in(target)
    return (type(target).__name__, repr([spelled(graph) for graph in graphs])) if graphs else target


def graphs_in(value: Any, depth: int = DEPTH) -> list[torch.fx.GraphModule]:
    """The graphs that an object of ours holds: in its attributes, and in what its functions close over."""
    if isinstance(value, torch.fx.GraphModule) or not depth:
        return [value] if isinstance(value, torch.fx.GraphModule) else []
    if isinstance(value, types.FunctionType):
        held: Any = [cell.cell_contents for cell in value.__closure__ or () if full(cell)]
    elif isinstance(value, types.MethodType):
        held = [value.__self__]
    elif isinstance(value, (list, tuple)):
        held = value
    else:
        held = (
            vars(value).values() if type(value).__module__.startswith("fusejit.") and hasattr(value, "__dict__") else ()
        )
    return [graph for item in held for graph in graphs_in(item, depth - 1)]
