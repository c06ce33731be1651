"""Specialiser: makes the specialisations of one jitted function, and keeps them.

In: a call that no specialisation was found for. Out: the entry of the table that runs it; nothing runs here.

    >>> entry, lifted = specialiser.find(request)
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable
from typing import Any

import torch

from .. import knobs
from ..capture import tracer
from ..capture.guards.guards import key_for
from ..errors import Unsupported
from ..fork_locks import renewed
from ..options import Settings
from ..specialise.build import resolve
from ..specialise.dynamic import specialise_sizes
from ..specialise.specialisation import Specialisation, eager_specialisation, refusal
from ..specialise.specialise import specialise
from .disable import nesting
from .dynamo_backend import Reader
from .messages import Messages
from .specialisation_table import TOO_MANY, Entry, Request, SpecialisationTable, with_receiver


def bound(fn: Callable, receiver: Any) -> Callable:
    return fn if receiver is None else types.MethodType(fn, receiver)


class Specialiser:
    """See above.

    Attributes:
        table: what there is. misses: how many calls were captured, or refused.
        said_of_sizes: what explain() says of the sizes of each specialisation.
    """

    def __init__(self, fn: Callable, settings: Settings) -> None:
        self.fn, self.settings, self.messages = fn, settings, Messages(settings.name)
        self.lock = renewed(threading.RLock())
        self.misses = 0
        self.said_of_sizes: tuple[str, ...] = ()
        self.clear()

    def clear(self) -> None:
        """Forget all specialisations."""
        self.table = SpecialisationTable(self.fn, self.settings, self.messages)
        self.graphs: Reader | None = None

    def find(self, request: Request) -> tuple[Entry, list[Any]]:
        """Return the entry of a call, made now if there is none; `Unsupported` comes out."""
        with self.lock:
            known = self.table.find(request.key, request.leaves)  # another thread may have made it meanwhile
            if known is not None:
                return known
            self.misses += 1
            self.table.refuse_length(request.key)
            with nesting(self.settings):
                specialisation = self.make(request)
            lifted = specialisation.lifted(request.leaves)
            if lifted is None:
                raise Unsupported(self.settings.name, "something that it reads changes while it is captured")
            return self.remember(request, specialisation), lifted

    def make(self, request: Request) -> Specialisation:
        """Capture a call and compile it, for many sizes where they vary."""
        key, receiver, args, kwargs, leaves = request
        again = functools.partial(specialise, bound(self.fn, receiver), args, kwargs, leaves, self.settings, receiver)
        names = self.table.names(receiver is not None)
        specialisation = specialise_sizes(self.table.sizes, key, leaves, names, again)
        return specialisation.noting(dynamic=self.said_of_sizes)

    def remember(self, request: Request, specialisation: Specialisation, through: Reader | None = None) -> Entry:
        """Keep a specialisation, and say what it does not do."""
        with self.lock, tracer.LOCK:  # a fork waits until the tables are whole
            entry = self.table.add(request.key, specialisation, request.leaves, through)
        self.messages.tell(specialisation, through is not None)
        return entry

    def refuse(self, error: Unsupported) -> None:
        """Raise where the user wants no fallback."""
        if self.settings.fullgraph or knobs.read("strict"):
            raise refusal(error, self.settings.name)

    def eagerly(self, error: Unsupported, request: Request) -> Specialisation:
        """What remembers that such calls run as plain Python."""
        return eager_specialisation(error, self.settings.name, request.receiver, request.leaves)

    def instead(self, error: Unsupported, request: Request) -> Reader | None:
        """What reads a function by its bytecode that cannot be captured, where that is worth its seconds: mode "ast", a
        compiling backend, a refusal of Python, not of tensors.

        Mode "trace" promises that the Python is traced as it is, and falls to eager.
        """
        if self.settings.capture_mode != "ast" or self.settings.jit_level == "O0" or not error.in_python:
            return None
        tensors = [leaf for leaf in request.leaves if isinstance(leaf, torch.Tensor)]
        return self.reader() if resolve(self.settings, tensors) != "eager" else None

    def reader(self) -> Reader:
        """What reads the function by its bytecode; one for all calls."""
        if self.graphs is None:
            self.graphs = Reader(self.fn, self.settings, self.messages.tell)
        return self.graphs

    def entry_for(self, receiver: Any, args: tuple, kwargs: dict[str, Any]) -> Entry:
        """The entry of a call, made now if there is none; one that is refused is not kept."""
        leaves: list[Any] = []
        request = Request(key_for(receiver, args, kwargs, leaves), receiver, args, kwargs, leaves)
        if (known := self.table.find(request.key, leaves)) is not None:
            return known[0]
        if self.table.full(receiver):
            many = TOO_MANY.format(knobs.read("specialisations"))
            error = Unsupported(many, "new kinds of calls run eagerly (FUSEJIT_SPECIALISATIONS)")
            return Entry(request.key, self.eagerly(error, request))
        try:
            return self.find(request)[0]
        except Unsupported as error:
            self.refuse(error)
            return Entry(request.key, self.eagerly(error, request), through=self.instead(error, request))

    def entries_for(self, receiver: Any, args: tuple, kwargs: dict[str, Any]) -> list[Entry]:
        """The entries that make up a call: one, and where Dynamo cuts the function, which it has to run for that, each
        graph's.
        """
        entry = self.entry_for(receiver, args, kwargs)
        if entry.through is None:
            return [entry]
        return [entry, *entry.through.observe(with_receiver(receiver, args), kwargs)]

    @property
    def entries(self) -> list[Entry]:
        """All entries, those of Dynamo's graphs included."""
        return [*self.table.entries, *(() if self.graphs is None else self.graphs.entries)]
