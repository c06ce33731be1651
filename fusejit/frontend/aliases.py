"""Aliases: a variable that an `if` made a new tensor, changed in place although it may stand for one that others see.

In: a captured graph and the tensors that stand for others. Out: nothing, or `Unsupported` where the change would be
lost; the capture then runs once more with `Ties`, which repeat such a change where Python would have made it.

    y = x if x.sum() > 0 else z      # a select: new memory
    y += 1                           # in Python it changes x or z: x = where(t, y, x), z = where(t, z, y)
    return x + y

What came to be inside an arm or in a loop, and what is there under torch.func, stays refused where it is read again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..capture import pytree as tree
from ..capture.scalar_tensors import node_of
from ..errors import Unsupported
from .predicate import Arm, memory_of

Tensor = torch.Tensor
WHAT = "an in-place change of a variable that an `if` on a tensor chose"
MOST = 64
"""The most writes that one change in place may bring with it."""
WAY_OUT = "write `y = y + 1` instead of `y += 1`, or `y = y.clone()` before it"


def roots_of(graph: torch.fx.Graph) -> tuple[dict[Any, Any], dict[Any, list[int]]]:
    """Return whose memory each node looks at, and for each such node the places where it is changed."""
    roots: dict[Any, Any] = {}
    changed: dict[Any, list[int]] = {}
    for place, node in enumerate(graph.nodes):
        roots[node] = node
        schema = getattr(node.target, "_schema", None)
        if schema is None or not node.args or not isinstance(node.args[0], torch.fx.Node):
            continue
        aliased = any(result.alias_info is not None for result in schema.returns)
        if aliased or schema.is_mutable:
            roots[node] = roots[node.args[0]]
        if schema.is_mutable:
            changed.setdefault(roots[node], []).append(place)
    return roots, changed


def stand_ins(
    made: Any, values: Sequence[Any], origins: Sequence[Callable[[Tensor], Sequence[Tensor]]]
) -> list[tuple[Tensor, Any]]:
    """Return the tensors in a merged value that stand for others, each with those.

    Args:
        values: what was merged, one for each arm. origins: for each arm, the tensors from outside whose memory a tensor
            of it has.
    """
    leaves = leaves_of(made)
    found: dict[int, dict[int, Tensor]] = {}
    for value, origin in zip(values, origins):
        for leaf, one in zip(leaves, leaves_of(value)):
            if isinstance(leaf, Tensor) and isinstance(one, Tensor):
                found.setdefault(id(leaf), {}).update({id(other): other for other in origin(one) if other is not leaf})
    tensors = {id(leaf): leaf for leaf in leaves}
    return [(tensors[place], tuple(others.values())) for place, others in found.items() if others]


def leaves_of(value: Any) -> list[Any]:
    leaves: list[Any] = []
    tree.flatten(value, leaves)
    return leaves


@dataclass(frozen=True, slots=True)
class Shared:
    """A tensor that stands for others since a node of the graph (outside of a capture: since their versions, its own
    first).

    Attributes:
        line: of the statement that chose it.
    """

    made: Tensor
    originals: tuple[Tensor, ...]
    line: str
    since: Any


@dataclass(frozen=True, slots=True)
class Tie:
    """A tensor that an `if` made, and the one that it is, in Python, where the test turned out as `taken` says."""

    made: Tensor
    original: Tensor
    test: Tensor
    taken: bool
    line: str

    def holds(self) -> Tensor:
        return self.test if self.taken else self.test.logical_not()


class Ties:
    """Repeats changes in place of one such tensor on the other, where both are one in Python.

    y = x if t else z; y += 1        # then x = where(t, y, x), z = where(t, z, y)
    """

    def __init__(self) -> None:
        self.ties: list[Tie] = []
        self.loose: set[Any] = set()  # memory of tensors that may also look at others in a way that no tie follows

    def tie(self, made: Any, values: Sequence[Any], arms: Sequence[Arm], test: Tensor, line: str) -> None:
        """Note what a merged value may be, if the arms hold it as it came from outside."""
        kept = test.clone()  # it may itself be changed later
        for place, (value, arm) in enumerate(zip(values, arms)):
            for leaf, one in zip(leaves_of(made), leaves_of(value)):
                origins = (
                    arm.origins(one) if isinstance(leaf, Tensor) and isinstance(one, Tensor) and leaf is not one else ()
                )
                if len(origins) == 1 and origins[0] is one:
                    self.ties.append(Tie(leaf, one, kept, place == 0, line))
                elif origins:  # a view that was made in the arm
                    self.loose.add(memory_of(leaf))

    def near(self, memories: set[Any]) -> tuple[list[Tie], bool]:
        """The ties that changes of some memory may go along, the nearest first, and whether each leads to a tensor of
        its own.
        """
        found: list[Tie] = []
        met, tree = set(memories), True
        left = self.ties
        while reached := next((t for t in left if memory_of(t.made) in met or memory_of(t.original) in met), None):
            ends = {memory_of(reached.made), memory_of(reached.original)}
            tree = tree and not ends <= met
            met |= ends
            found.append(reached)
            left = [tie for tie in left if tie is not reached]
        return found, tree

    def follow(self, changed: Sequence[Tensor]) -> None:
        """Bring what is tied to changed tensors up to date: each where it is one of them, by the tests of this run."""
        reached: dict[Any, Tensor | None] = {memory_of(value): None for value in changed}
        ties, tree = self.near(set(reached))
        if any(memory_of(tie.made) in reached and memory_of(tie.original) in reached for tie in ties):
            raise Unsupported(WHAT, WAY_OUT, ties[0].line)  # one call changes both
        rounds = 1 if tree else len({memory_of(value) for tie in ties for value in (tie.made, tie.original)}) - 1
        if rounds * len(ties) > MOST:
            raise Unsupported(WHAT, WAY_OUT, ties[0].line)
        for tie in ties * rounds:
            for source, target in ((tie.made, tie.original), (tie.original, tie.made)):
                come, gone = memory_of(source), memory_of(target)
                if come not in reached or gone in reached and (tree or reached[gone] is None):
                    continue
                if source.requires_grad and not target.requires_grad:
                    raise Unsupported(WHAT, WAY_OUT, tie.line)  # Python's tensor has no gradient
                way, known = reached[come], reached.get(gone)
                where = tie.holds() if way is None else tie.holds() & way
                where = where if known is None else where & ~known
                target.copy_(torch.where(where, source, target))
                reached[gone] = where if known is None else known | where

    def kept(self, shared: Sequence[Shared]) -> list[Shared]:
        """The tensors that stand for others which no tie keeps up to date."""
        left = []
        for entry in shared:
            near = {memory_of(entry.made)}
            for _ in self.ties:
                near |= {memory_of(tie.original) for tie in self.ties if memory_of(tie.made) in near - self.loose}
            others = tuple(value for value in entry.originals if memory_of(value) not in near)
            if others:
                left.append(replace(entry, originals=others))
        return left


def origins_in(arm: Arm, shared: Sequence[Shared]) -> Callable[[Tensor], Sequence[Tensor]]:
    """Return a function that finds the tensors from outside of an arm that one of it is, looks at, or stands for."""

    def origins(value: Tensor) -> list[Tensor]:
        found = list(arm.origins(value))
        for entry in shared:
            if memory_of(entry.made) == memory_of(value):
                found += entry.originals
        return found

    return origins


def relatives(value: Tensor, shared: Sequence[Shared]) -> list[Any]:
    """The memory of a tensor, of those it may stand for, and of those that may stand for it."""
    own = memory_of(value)
    found = [own]
    for entry in shared:
        made, *others = map(memory_of, (entry.made, *entry.originals))
        if made == own:
            found += others
        elif own in others:
            found.append(made)
    return found


def refuse_other_names(arm: Arm, shared: Sequence[Shared], line: str) -> None:
    """Raise where an arm changes a tensor in place and reads one that may be the same: it would see the old values."""
    for original, _ in arm.changed if shared else ():
        known = relatives(original, shared)
        if any(value is not original and memory_of(value) in known for value in arm.entered):
            raise Unsupported(WHAT, WAY_OUT, line)


def check_versions(shared: Sequence[Shared]) -> None:
    """As `check_aliases`, where there is no graph that says who reads: raise where either of both was changed in place
    at all.
    """
    for entry in shared:
        if [tensor._version for tensor in (entry.made, *entry.originals)] != entry.since:
            raise Unsupported(WHAT, WAY_OUT, entry.line)


def check_aliases(
    graph: torch.fx.Graph, shared: Sequence[Shared], cut: Collection[torch.fx.Node] = (), result: Any = None
) -> None:
    """Raise where a tensor stands for another, one of both is changed in place, and the other is read later, or lives
    outside.

    Args:
        cut: the nodes that are about to become a piece of their own, () for the whole graph, whose outside are its
            inputs.
        result: what the whole function returns: its tensors are read at the end.
    """
    if not shared:
        return
    roots, changed = roots_of(graph)
    if not changed:
        return
    places = {node: place for place, node in enumerate(graph.nodes)}
    returned = {roots.get(node_of(leaf)) for leaf in leaves_of(result) if hasattr(leaf, "fake_mode")}

    def read_after(root: Any, place: int) -> bool:
        return root in returned or any(
            places[user] > place for other, its in roots.items() if its is root for user in other.users
        )

    for entry in shared:
        node = node_of(entry.made)
        if node not in roots or cut and node not in cut:  # in a piece, which was checked when it was cut out
            continue
        made = roots[node]
        start = places.get(entry.since, places[node])
        first = next((place for place in changed.get(made, ()) if place > start), None)
        for original in map(node_of, entry.originals):
            root = roots.get(original)
            if root is None or root is made:
                continue
            later = next((place for place in changed.get(root, ()) if place > start), None)
            outer = root not in cut if cut else root.op == "placeholder"
            lost = first is not None and (outer or read_after(root, first))
            if lost or later is not None and read_after(made, later):
                raise Unsupported(WHAT, WAY_OUT, entry.line)
