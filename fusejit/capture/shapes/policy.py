"""Policy: which sizes of a function's arguments, and which Python numbers among them, may vary; the specialisations
that hold for many.

In: the keys of calls that no specialisation was found for, one after the other. Out: the `Symbols` of the next capture,
or none; and for later calls of other sizes, the specialisation whose check they pass.

    >>> sizes = Dynamic(None, "f")
    >>> sizes.symbols(key_of_first_call, leaves, name)     # None: the first call specialises on its sizes
    >>> sizes.symbols(key_of_second_call, leaves, name)    # the dimension that changed is s0 from now on

`dynamic=None` generalises what changed, True every size and int at once (floats when they change), False nothing. What
a body needs the value of becomes fixed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import torch

from ...codegen.ir.size import LARGEST
from ...errors import CaptureError
from ..memory_pattern import memory_pattern
from .symbols import VALUE, Axis, Symbols

Tensor = torch.Tensor
PLAIN = (torch.Tensor, torch.nn.Parameter)
VARIES = -1
"""Stands for a size or a stride that has had several values."""


class Checked(Protocol):
    """What is kept for a family of calls: `lifted` says whether it holds for one of them."""

    @property
    def lifted(self) -> Callable[[list[Any]], list[Any] | None]: ...


Kept = TypeVar("Kept", bound=Checked)


@dataclass(slots=True)
class Family(Generic[Kept]):
    """The calls that differ in nothing but sizes, strides and Python numbers.

    Attributes:
        sizes, strides: for each leaf, the value of each axis, or VARIES; of a number, its key (see `guards.value_key`).
        apart: axes that share no symbol, because one of those that did was needed as a number.
        fixed: axes that stay numbers, each with the reason; `refused`: why there are no symbols at all.
        kept: the specialisations that hold for several sizes, newest first.
    """

    sizes: dict[int, list[Any]] = field(default_factory=dict)
    strides: dict[int, list[int]] = field(default_factory=dict)
    apart: set[Axis] = field(default_factory=set)
    fixed: dict[Axis, str] = field(default_factory=dict)
    refused: str = ""
    kept: list[Kept] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Choice:
    """What `Dynamic.choose` decided: the symbols of a capture, or None; `why` for people; `strict`: axes that the user
    marked.
    """

    symbols: Symbols | None
    why: str = ""
    strict: frozenset[Axis] = frozenset()


def varies(entry: Any) -> bool:
    """Whether an entry of a key is a tensor whose sizes may vary: a plain strided one with dimensions."""
    return len(entry) == 6 and entry[0] in PLAIN and len(entry[2]) > 0 and isinstance(entry[3], tuple)


def scalar(entry: Any) -> bool:
    """Whether an entry of a key is a Python number that may vary: an int from 2 on, a finite float other than zero."""
    if len(entry) != 2 or entry[0] is not int and entry[0] is not float:
        return False
    return 2 <= entry[1] <= LARGEST if entry[0] is int else entry[1] not in ("0.0", "-0.0", "inf", "-inf", "nan")


def without_sizes(key: tuple) -> tuple:
    """A call's key without the sizes and strides of its tensors, and without its Python numbers."""
    pattern, *entries = key[2]
    rest = tuple(
        [(e[0], e[1], len(e[2]), None, e[4], e[5]) if varies(e) else (e[0],) if scalar(e) else e for e in entries]
    )
    return (key[0], key[1], (pattern, *rest), key[3])


class Dynamic(Generic[Kept]):
    """The families of one jitted function."""

    def __init__(self, setting: bool | None) -> None:
        self.setting = setting
        self.families: dict[tuple, Family[Kept]] = {}

    def find(self, key: tuple, leaves: list[Any]) -> tuple[Kept, list[Any]] | None:
        """The specialisation of several sizes that holds for a call, and what its check returned."""
        if not self.families:
            return None
        family = self.families.get(without_sizes(key))
        for kept in family.kept if family is not None else ():
            lifted = kept.lifted(leaves)
            if lifted is not None:
                return kept, lifted
        return None

    def choose(self, key: tuple, leaves: list[Any], name: Callable[[Any, int], str]) -> Choice:
        """Decide which sizes of a call become symbols; remembers the call's sizes."""
        if self.setting is False:
            return Choice(None)
        family = self.families.setdefault(without_sizes(key), Family())
        changed = self.note(family, key)
        strict: set[Axis] = set()
        asked: set[Axis] = set()
        varying: dict[int, frozenset[int]] = {}
        scalars = self.scalars(family, key)
        for number, entry in enumerate(key[2][1:]):
            if varies(entry):
                marked = marks(leaves[number], "_dynamo_dynamic_indices")
                axes = self.axes(family, number, leaves[number], marked)
                strict |= {Axis(number, axis) for axis in marked & axes}
                asked |= {Axis(number, axis) for axis in marks(leaves[number], "_dynamo_weak_dynamic_indices") | marked}
                if axes or self.free_strides(family, number):
                    varying[number] = axes
        if not (varying or any(scalars.values())) or family.refused:
            return Choice(None, family.refused)
        tensors = list({id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}.values())
        if memory_pattern([tensor for tensor in tensors if tensor.layout is torch.strided]):
            return Choice(None, "arguments share memory")
        # a tensor that keeps its sizes in this call may have others in the next one: its numbers are part of the check
        for number, entry in enumerate(key[2][1:]):
            if varies(entry):
                varying.setdefault(number, frozenset())
        free = frozenset((n, axis) for n in family.strides for axis in self.free_strides(family, n))
        symbols = Symbols(leaves, varying, free, frozenset(family.apart), scalars)
        if not symbols.ints:
            return Choice(None)
        return Choice(symbols, "; ".join(self.reasons(symbols, key, (changed, asked), name)), frozenset(strict))

    def scalars(self, family: Family, key: tuple) -> dict[int, bool]:
        """The Python numbers of a call that calls of its family have others of, and whether each becomes a symbol."""
        found = {}
        for number, entry in enumerate(key[2][1:]):
            if scalar(entry):
                asked = family.sizes[number] == [VARIES] or self.setting is True and entry[0] is int
                found[number] = asked and Axis(number, VALUE) not in family.fixed
        return found

    def note(self, family: Family, key: tuple) -> dict[Axis, Any]:
        """Compare a call's sizes with those before; returns what changed now and its value before."""
        changed: dict[Axis, Any] = {}
        for number, entry in enumerate(key[2][1:]):
            if scalar(entry):
                (before,) = seen = family.sizes.setdefault(number, [entry[1]])
                if before not in (entry[1], VARIES):
                    changed[Axis(number, VALUE)], seen[0] = before, VARIES
            if not varies(entry):
                continue
            for table, values, stride in ((family.sizes, entry[2], False), (family.strides, literal(entry), True)):
                before = table.setdefault(number, list(values))
                for axis, (old, new) in enumerate(zip(before, values)):
                    if old != new and old != VARIES:
                        changed[Axis(number, axis, stride)] = old
                        before[axis] = VARIES
        return changed

    def axes(self, family: Family, number: int, leaf: Tensor, marked: set[int]) -> frozenset[int]:
        """The axes of one tensor that become symbols, sizes 0 and 1 left out."""
        static = marks(leaf, "_dynamo_static_indices")
        asked = marked | marks(leaf, "_dynamo_weak_dynamic_indices")
        found = set()
        for axis, (size, seen) in enumerate(zip(leaf.shape, family.sizes[number])):
            automatic = (seen == VARIES or self.setting is True) and axis not in static
            if size > 1 and (automatic or axis in asked) and (axis in marked or Axis(number, axis) not in family.fixed):
                found.add(axis)
        return frozenset(found)

    def free_strides(self, family: Family, number: int) -> list[int]:
        return [axis for axis, value in enumerate(family.strides[number]) if value == VARIES]

    def reasons(
        self, symbols: Symbols, key: tuple, known: tuple[dict[Axis, Any], set[Axis]], name: Callable[[Any, int], str]
    ) -> list[str]:
        """Say of each symbol why it is one."""
        lines, (changed, asked) = [], known
        for axes in symbols.axes.values():
            for axis in axes:
                what, entry = title(axis, name(key[0], axis.leaf)), key[2][1 + axis.leaf]
                if axis in changed:
                    now = entry[1] if axis.scalar else entry[3 if axis.stride else 2][axis.number]
                    lines.append(f"{what} changed: {changed[axis]} → {now}, now dynamic")
                elif self.setting is True:
                    lines.append(f"{what} is dynamic")
                else:
                    lines.append(
                        f"{what} is marked dynamic" if axis in asked else f"{what} has changed before and is dynamic"
                    )
        return lines

    def settle(self, key: tuple, choice: Choice, name: Callable[[Any, int], str]) -> list[str]:
        """After a capture: keep as numbers what became one, and say so.

        Raises:
            CaptureError: an axis that the user marked dynamic became a number.
        """
        assert choice.symbols is not None
        family = self.families[without_sizes(key)]
        lines = []
        for item in choice.symbols.specialised():
            if item.shared:
                family.apart.add(item.axis)
            else:
                family.fixed[item.axis] = str(item)
            what = title(item.axis, name(key[0], item.axis.leaf))
            if item.axis in choice.strict:
                way_out = "torch._dynamo.maybe_mark_dynamic allows that; or compute with tensor ops"
                raise CaptureError(f"{what} is marked dynamic, but {item}: {way_out}")
            lines.append(f"{what} is not dynamic: {item}")
        return lines

    def fix(self, key: tuple, choice: Choice, reason: str) -> bool:
        """Keep the Python numbers of a failed capture with symbols as numbers from now on; whether there were any."""
        assert choice.symbols is not None
        numbers = [Axis(leaf, VALUE) for leaf in choice.symbols.scalars]
        self.families[without_sizes(key)].fixed.update(dict.fromkeys(numbers, reason))
        return bool(numbers)

    def fixed(self, key: tuple, name: Callable[[Any, int], str]) -> list[str]:
        """Why Python numbers among the arguments of such calls do not vary."""
        family = self.families.get(without_sizes(key), Family())
        return [
            f"{title(axis, name(key[0], axis.leaf))} is not dynamic: {why}"
            for axis, why in family.fixed.items()
            if axis.scalar
        ]

    def add(self, key: tuple, kept: Kept) -> None:
        """Keep a specialisation for calls of other sizes."""
        self.families[without_sizes(key)].kept.insert(0, kept)

    def refuse(self, key: tuple, reason: str) -> None:
        """No symbols for calls of this kind from now on."""
        self.families[without_sizes(key)].refused = reason

    def forget(self, key: tuple, kept: Kept) -> None:
        """Drop a specialisation that is kept no longer."""
        family = self.families.get(without_sizes(key))
        if family is not None:
            family.kept = [other for other in family.kept if other is not kept]


def title(axis: Axis, name: str) -> str:
    """What a symbol stands for, of the argument `name`."""
    return f"argument {name}" if axis.scalar else f"{'stride' if axis.stride else 'dimension'} {axis.number} of {name}"


def marks(leaf: Tensor, attribute: str) -> set[int]:
    """What `torch._dynamo.mark_dynamic` and its kin noted on a tensor; a mark of -1 counts from the end."""
    found: Iterable[int] = getattr(leaf, attribute, ())
    return {axis % leaf.dim() for axis in found}


def literal(entry: tuple) -> list[int]:
    """The strides of a tensor where they do not follow from its sizes, 0 elsewhere."""
    shape, strides = entry[2], entry[3]
    found, step = [0] * len(shape), 1
    for axis in sorted(range(len(shape)), key=lambda a: (strides[a], shape[a])):
        if strides[axis]:
            found[axis] = strides[axis] if strides[axis] != step else 0
            step = strides[axis] * shape[axis] if shape[axis] != 1 else step
    return found
