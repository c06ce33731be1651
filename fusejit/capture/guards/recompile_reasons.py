"""Why a call needed a specialisation of its own: what differs from the nearest one that exists.

In: the key of a call, its leaves, and the keys and guards of the specialisations there are. Out: `Difference`s, most
telling first.

    >>> [str(item) for item in differences(key, leaves, known, named(fn))]
    ['shape of argument x changed from (3,) to (5,)']

Only ever asked when a call is captured: never on the way of a call that finds its specialisation.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import pytree
from ..state.reads import MISSING, Read
from .guards import Guards, tensor_key

STATE = (
    "grad mode",
    "inference mode",
    "the default dtype",
    "deterministic algorithms",
    "global module hooks",
    "the default device",
    "autocast on the CPU",
    "autocast on CUDA",
)
"""What each entry of `guards.state_key()` is."""
TENSOR = ("type", "dtype", "shape", "strides", "device", "requires_grad")
"""What each entry of `guards.tensor_key()` is."""
FIRST = "first call"


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that changed. `value` names the argument when that is a Python value."""

    text: str
    value: str = ""

    def __str__(self) -> str:
        return self.text


def differences(
    key: tuple, leaves: list[Any], known: Sequence[tuple[tuple, Guards | None]], name: Callable[[Any, int], str]
) -> list[Difference]:
    """Compare a call with the specialisation that differs least from it; of equals, the newest.

    Args:
        key: (structure, state, arguments, receiver) of the call; known: such keys, and the guards that hold with them.
        name: (structure, number of a leaf) to the argument's name.
    """
    known = [(other, guards) for other, guards in known if other[3] == key[3]]
    if not known:
        return [Difference(FIRST)]
    best: list[Difference] | None = None
    alike: list[str] = []
    nearest: tuple[float, int] = (math.inf, 0)
    least: tuple[bool, int] = (True, len(key[2]) + len(STATE) + 1)
    for other, guards in reversed(known):
        found = between(other, key, name)
        if not found and guards is not None:
            read = changed(guards, leaves)
            distance = (
                len(read),
                -guards.count,
            )  # of two with one change each, the one that reads more of what is the same
            if read and distance < nearest:
                alike, nearest = read, distance
        if found and (weight := (other[0] != key[0], len(found))) < least:
            best, least = found, weight
    if alike:  # the same kind of call: what it reads has changed; the first only, for what follows may depend on it
        return [Difference(alike[0])]
    return best or [Difference("something that the function reads changed")]


def between(old: tuple, new: tuple, name: Callable[[Any, int], str]) -> list[Difference]:
    """What differs between two keys."""
    if old[0] != new[0]:
        return [Difference("the arguments have another structure: other containers, lengths or names")]
    found = []
    states = [*old[1], *[None] * (len(STATE) - len(old[1]))], [*new[1], *[None] * (len(STATE) - len(new[1]))]
    for what, before, now in zip(STATE, *states):
        if before != now:
            found.append(Difference(f"{what} changed from {shown(before)} to {shown(now)}"))
    if old[2][0] != new[2][0]:
        found.append(Difference("other arguments are one and the same tensor"))
    for number, (before, now) in enumerate(zip(old[2][1:], new[2][1:])):
        if before != now:
            found.append(argument(name(new[0], number), before, now))
    return found


def argument(name: str, before: tuple, now: tuple) -> Difference:
    """How one argument differs, from the two entries of the keys."""
    if len(before) == len(now) == len(TENSOR):
        for what, old, new in zip(TENSOR[1:], before[1:], now[1:]):
            if old != new:
                return Difference(f"{what} of argument {name} changed from {shown(old)} to {shown(new)}")
    if before[0] is not now[0]:
        return Difference(f"type of argument {name} changed from {before[0].__name__} to {now[0].__name__}")
    if len(now) == 2 and not by_identity(now):
        return Difference(f"argument {name} changed from {shown(before[1])} to {shown(now[1])}", name)
    return Difference(f"argument {name} is another {now[0].__name__}", name)


def by_identity(entry: tuple) -> bool:
    """Whether a key's entry stands for an object that is told apart by identity (see `guards.value_key`)."""
    return type(entry[1]) is int and entry[0] is not int


def shown(value: Any) -> str:
    if isinstance(value, torch.Size):
        return str(tuple(value))
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# The guards.


def changed(guards: Guards, leaves: list[Any]) -> list[str]:
    """Say which read values are no longer what they were, in the order in which they were read."""
    found: list[str] = []
    writer = guards.writer
    owners = {id(holder): owner for holder, _, owner in writer.captured.recorder.snapshots}
    scope = {**writer.scope, "leaves": leaves}
    for text, read in writer.guarded:
        if not holds(text, scope):
            found.append(f"{title(read, owners)} changed{values(read, evaluate(writer.expression(read), scope))}")
    for number, value in enumerate(writer.captured.lifted):
        source = writer.captured.recorder.sources.get(id(value))
        if source is None:
            continue
        now = evaluate(writer.expression(source), scope)
        if not isinstance(now, torch.Tensor):
            found.append(f"{title(source, owners)} changed{values(source, now)}")
            continue
        for what, old, new in zip(TENSOR, writer.keys[number], tensor_key(now)):
            if old != new:
                found.append(f"{what} of {title(source, owners)} changed from {shown(old)} to {shown(new)}")
    return found


def holds(text: str, scope: dict[str, Any]) -> bool:
    """Whether a condition of the guards is true now; one that cannot be asked is not."""
    return bool(evaluate(text, scope) not in (False, MISSING))


def evaluate(text: str, scope: dict[str, Any]) -> Any:
    try:
        return eval(text, scope)
    except (LookupError, AttributeError, ValueError, TypeError):  # what the check itself takes for "changed"
        return MISSING


def title(read: Read, owners: dict[int, str]) -> str:
    """Name what was read: ``attribute Net.flag``, ``global SCALE``, ``closure variable c``."""
    if read.how == "element":
        return f"{title(read.table, owners)}{''.join(f'[{key!r}]' for key in read.name)}"
    if read.how == "holder":
        return f"what holds {title(read.table.read, owners)}"  # type: ignore[attr-defined]
    if read.how == "cell":
        return f"closure variable {read.name}"
    if read.how == "call":
        return f"torch.{read.name}()"
    if read.how == "attribute":
        holder = getattr(read.table, "__name__", None) or type(read.table).__name__
        return f"attribute {holder}.{read.name}"
    owner = owners.get(id(read.table))
    if owner is not None:
        what = {"_parameters": "parameter", "_buffers": "buffer", "_modules": "submodule"}.get(
            read.section, "attribute"
        )
        return f"{what} {owner}.{read.name}"
    if isinstance(read.table, dict) and "__name__" in read.table and "__builtins__" in read.table:
        return f"global {read.name}"
    return f"class attribute {read.name}" if not isinstance(read.table, dict) else f"attribute {read.name}"


def values(read: Read, now: Any) -> str:
    if read.how == "absent":
        return ": the object has one of its own now"
    if now is MISSING:
        return ": it is gone"
    before = read.snapshot if read.snapshot is not None else read.value
    plain = (int, float, bool, str, type(None), list, dict, tuple, torch.dtype)
    if isinstance(before, plain) and isinstance(now, plain) and repr(before) != repr(now):
        return f" from {shown(before)} to {shown(now)}"
    return ""


# Names of arguments.


def named(fn: Callable, skip: int = 0) -> Callable[[Any, int], str]:
    """Return (structure, number of a leaf) to the name of the argument; `skip` parameters are bound already."""
    return functools.partial(argument_name, parameters(fn)[skip:])


def parameters(fn: Callable) -> list[str]:
    target = fn.forward if isinstance(fn, torch.nn.Module) else fn
    try:
        found = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return []
    return [item.name for item in found if item.kind in (item.POSITIONAL_ONLY, item.POSITIONAL_OR_KEYWORD)]


def argument_name(names: list[str], structure: Any, number: int) -> str:
    keyed = structure[0] == pytree.KEYED
    path = pytree.paths(structure[1] if keyed else structure)[number]
    if keyed and path.startswith("[1]"):
        keyword, _, rest = path[4:].partition("]")
        return keyword.strip("'\"") + rest
    place, _, rest = (path[3:] if keyed else path)[1:].partition("]")
    return (names[int(place)] if place.isdigit() and int(place) < len(names) else f"args[{place}]") + rest
