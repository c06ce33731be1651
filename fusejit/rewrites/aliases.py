"""Aliases: a variable that an `if` made a new tensor, changed in place although it may stand for one that others see.

In: a captured graph and the tensors that stand for others. Out: nothing, or `Unsupported` where the change would be lost.

    y = x if x.sum() > 0 else z      # a select: new memory
    y += 1                           # in Python it changes x or z; refused, because x is read again
    return x + y
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..capture import tree
from ..errors import Unsupported
from .arms import Arm, memory_of
from .numbers import node_of

Tensor = torch.Tensor
WHAT = "an in-place change of a variable that an `if` on a tensor chose"
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


def stand_ins(made: Any, values: Sequence[Any], origins: Sequence[Callable[[Tensor], Sequence[Tensor]]]) -> list[tuple[Tensor, Any]]:
    """Return the tensors in a merged value that stand for others, each with those.

    Args:
        values: what was merged, one for each arm. origins: for each arm, the tensors from outside whose memory a tensor of it has.
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
    """A tensor that stands for others since a node of the graph (outside of a capture: since their versions, its own first).

    Attributes:
        line: of the statement that chose it.
    """

    made: Tensor
    originals: tuple[Tensor, ...]
    line: str
    since: Any


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
    """As `check_aliases`, where there is no graph that says who reads: raise where either of both was changed in place at all."""
    for entry in shared:
        if [tensor._version for tensor in (entry.made, *entry.originals)] != entry.since:
            raise Unsupported(WHAT, WAY_OUT, entry.line)


def check_aliases(graph: torch.fx.Graph, shared: Sequence[Shared], cut: Collection[torch.fx.Node] = ()) -> None:
    """Raise where a tensor stands for another, one of both is changed in place, and the other is read later, or lives outside.

    Args:
        cut: the nodes that are about to become a piece of their own, () for the whole graph, whose outside are its inputs.
    """
    if not shared:
        return
    roots, changed = roots_of(graph)
    if not changed:
        return
    places = {node: place for place, node in enumerate(graph.nodes)}

    def read_after(root: Any, place: int) -> bool:
        return any(places[user] > place for other, its in roots.items() if its is root for user in other.users)

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
