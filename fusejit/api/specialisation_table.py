"""Specialisation table: the specialisations of one jitted function, why each was needed, and how many there may be.

In: the key and the leaves of a call. Out: the `Entry` that holds for it, with what its guards found, or None.

    >>> entry, lifted = table.find(key, leaves)
    >>> entry.why
    'shape of argument x changed from (3,) to (5,)'
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from .. import knobs
from ..capture.guards.recompile_reasons import Difference, differences, named
from ..capture.mutable import family
from ..capture.shapes.policy import Dynamic
from ..errors import CaptureError, Unsupported
from ..options import Settings
from ..runtime.fast_path import Bindings, Call
from ..specialise.specialisation import Check, Specialisation
from .messages import Messages

RECEIVERS = 16
"""Of how many objects a decorated method keeps all specialisations that the limit allows; beyond, the oldest go."""
CHANGING = 3
"""How many new values of a Python argument recompile before a warning."""
TOO_MANY = "more than {} specialisations, so new kinds of calls run eagerly"
OTHER_LENGTH = "one length is compiled, and this is another; fusejit.mutable(..., dynamic_len=False) compiles each"


class BytecodeReader(Protocol):
    """What reads a function by its bytecode (see dynamo_backend.py)."""

    @property
    def compiles(self) -> bool: ...
    @property
    def reasons(self) -> list[str]: ...
    @property
    def entries(self) -> list[Entry]: ...
    def call(self, args: tuple, kwargs: dict[str, Any]) -> Any: ...
    def observe(self, args: tuple, kwargs: dict[str, Any]) -> list[Entry]: ...


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """A specialisation in a table.

    Attributes:
        key: (structure, state, arguments, receiver) of the call that it was made for.
        why: what made it necessary. through: what reads the function by its bytecode instead of it, or None.
    """

    key: tuple
    specialisation: Specialisation
    why: str = ""
    through: BytecodeReader | None = None

    @property
    def lifted(self) -> Check:
        return self.specialisation.lifted


class Request(NamedTuple):
    """A call that no specialisation was found for."""

    key: tuple
    receiver: Any
    args: tuple
    kwargs: dict[str, Any]
    leaves: list[Any]

    def call(self, lifted: list[Any]) -> Call:
        return Call(self.receiver, self.args, self.kwargs, self.leaves, lifted)


def with_receiver(receiver: Any, args: tuple) -> tuple:
    """The arguments of a call as the function in its class takes them."""
    return args if receiver is None else (receiver, *args)


class SpecialisationTable:
    """See above.

    Attributes:
        by_key: the entries of each kind of call, the newest first; entries: all, in the order of their making.
        sizes: those that hold for many sizes. bindings: the hot path of calls that they were found for.
    """

    def __init__(self, fn: Callable, settings: Settings, messages: Messages) -> None:
        self.fn, self.name, self.messages = fn, settings.name, messages
        self.bindings = Bindings()
        self.by_key: dict[tuple, tuple[Entry, ...]] = {}
        self.entries: list[Entry] = []
        self.sizes: Dynamic[Entry] = Dynamic(settings.dynamic)
        self._lengths: dict[Any, Any] = {}
        self._held: dict[int, int] = {}
        self._changing: dict[str, int] = {}

    def find(self, key: tuple, leaves: list[Any]) -> tuple[Entry, list[Any]] | None:
        """The entry that holds for a call, and the tensors and sizes that its guards found."""
        for entry in self.by_key.get(key, ()):
            lifted = entry.lifted(leaves)
            if lifted is not None:
                return entry, lifted
        return self.sizes.find(key, leaves)

    def names(self, receiver: bool) -> Callable[[Any, int], str]:
        """(structure of a call, number of a leaf) to the argument's name."""
        return named(self.fn, receiver)

    def refuse_length(self, key: tuple) -> None:
        """Refuse a mutable argument of another length than the one that is compiled.

        Raises:
            Unsupported: says how each length is compiled.
        """
        if self._lengths.get(family(key[0]), key[0]) != key[0]:
            raise Unsupported("a mutable argument of another length", OTHER_LENGTH)

    def full(self, receiver: Any) -> bool:
        """Whether calls of new kinds run eagerly, because the limit of specialisations is reached; says so once."""
        limit = knobs.read("specialisations")
        if self._held.get(id(receiver), 0) < limit:
            return False
        if knobs.read("strict"):
            raise CaptureError(f"{self.name!r} has {limit} specialisations already (FUSEJIT_SPECIALISATIONS)")
        last = self.entries[-1].why
        self.messages.say(logging.WARNING, f"{TOO_MANY.format(limit)}; the last one was made because: {last}")
        return True

    def add(
        self, key: tuple, specialisation: Specialisation, leaves: list[Any], through: BytecodeReader | None = None
    ) -> Entry:
        """Keep a specialisation, with the reason why the ones there are did not do."""
        known = [(entry.key, entry.specialisation.guards) for entry in self.entries]
        changes = differences(key, leaves, known, self.names(key[3] != id(None)))
        why = specialisation.resized or "; ".join(map(str, changes[:3]))
        entry = Entry(key, specialisation, why, through)
        self.by_key[key] = (entry, *self.by_key.get(key, ()))
        self.entries.append(entry)
        self._held[key[3]] = self._held.get(key[3], 0) + 1
        if specialisation.symbols is not None:
            self.sizes.add(key, entry)
        if specialisation.run is not None and (kin := family(key[0])) != key[0]:
            self._lengths[kin] = key[0]
        if len(self.entries) > RECEIVERS * knobs.read("specialisations"):  # of many objects: the oldest go
            self.drop_oldest()
        self.warn(changes)
        return entry

    def drop_oldest(self) -> None:
        oldest = self.entries.pop(0)
        key, receiver = oldest.key, oldest.key[3]
        self.bindings.forget(oldest.specialisation)
        self.sizes.forget(key, oldest)
        self.by_key[key] = tuple(entry for entry in self.by_key[key] if entry is not oldest)
        if not self.by_key[key]:
            del self.by_key[key]
        self._held[receiver] -= 1
        if not self._held[receiver]:
            del self._held[receiver]

    def warn(self, changes: Iterable[Difference]) -> None:
        """Say which Python argument keeps changing, once it has made several specialisations."""
        for name in {change.value for change in changes if change.value}:
            self._changing[name] = self._changing.get(name, 0) + 1
            if self._changing[name] == CHANGING:
                way_out = (
                    f"pass a tensor, or wrap it in fusejit.mutable, so that `{name}` may vary without a new program"
                )
                text = f"argument {name} keeps changing, and each value recompiles: {way_out}"
                self.messages.say(logging.WARNING, text)
