"""Compile log: what capture and compilation note for people while they run, and the same frozen.

In: stages, milliseconds, refusals as they come. Out: `Notes`, which explain() shows.

    >>> log = CompileLog(); log.fallbacks.append(Fallback("aten.foo", "no kernel for it")); log.close().fallbacks
    (Fallback(op='aten.foo', reason='no kernel for it', line=''),)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from .capture.state.reads import Effect
from .frontend.operators import Outcome


@dataclass(frozen=True, slots=True)
class Fallback:
    """Something that runs in eager (or through torch's own wrappers) instead of compiled, and why."""

    op: str
    reason: str
    line: str = ""

    def __str__(self) -> str:
        return f"{self.op}: {self.reason}" + (f" ({self.line})" if self.line else "")


@dataclass(frozen=True, slots=True)
class Notes:
    """What is said of one specialisation.

    Attributes:
        record: stage name to value, such as "forward.clusters"; compile_ms: milliseconds by stage.
        fallbacks: what runs in eager instead. effects: attribute writes that capture put back.
        control: what each statement on a tensor became.
        inlined: (block, reason) of blocks captured in place though marked or repeated.
        rewrites: what is computed another way than written, and why.
        dynamic: which sizes are symbols and why, and which could not be.
    """

    record: Mapping[str, Any] = field(default_factory=dict)
    compile_ms: Mapping[str, float] = field(default_factory=dict)
    fallbacks: tuple[Fallback, ...] = ()
    effects: tuple[Effect, ...] = ()
    control: tuple[Outcome, ...] = ()
    inlined: tuple[tuple[str, str], ...] = ()
    rewrites: tuple[str, ...] = ()
    dynamic: tuple[str, ...] = ()

    def __add__(self, later: Notes) -> Notes:
        """These notes and later ones, milliseconds of one stage added up."""
        spent = dict(self.compile_ms)
        for stage, milliseconds in later.compile_ms.items():
            spent[stage] = spent.get(stage, 0.0) + milliseconds
        return Notes(
            {**self.record, **later.record},
            spent,
            self.fallbacks + later.fallbacks,
            self.effects + later.effects,
            self.control + later.control,
            self.inlined + later.inlined,
            self.rewrites + later.rewrites,
            self.dynamic + later.dynamic,
        )


@dataclass(slots=True)
class CompileLog:
    """Notes in the making; see `Notes` for the fields. One log serves a capture and the compilers of its halves."""

    record: dict[str, Any] = field(default_factory=dict)
    compile_ms: dict[str, float] = field(default_factory=dict)
    fallbacks: list[Fallback] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)
    control: list[Outcome] = field(default_factory=list)
    inlined: list[tuple[str, str]] = field(default_factory=list)
    rewrites: list[str] = field(default_factory=list)
    dynamic: list[str] = field(default_factory=list)

    def spend(self, stage: str, milliseconds: float) -> None:
        """Add milliseconds to those of a stage."""
        self.compile_ms[stage] = self.compile_ms.get(stage, 0.0) + milliseconds

    def notes(self) -> Notes:
        """What stands in the log now."""
        return Notes(
            dict(self.record),
            dict(self.compile_ms),
            tuple(self.fallbacks),
            tuple(self.effects),
            tuple(self.control),
            tuple(self.inlined),
            tuple(self.rewrites),
            tuple(self.dynamic),
        )

    def close(self) -> Notes:
        """Take the notes out; the log goes on empty, for a backward that is compiled when it is first needed."""
        notes = self.notes()
        for item in fields(self):
            getattr(self, item.name).clear()
        return notes
