"""Reports: what explain(), program() and cache_info() say of the specialisations that make up a call.

In: entries of a table (specialisation_table.py). Out: `Report`, `Program`, `CacheInfo`.

    >>> cache_info(table.entries, hits=2, misses=1)
    CacheInfo(specialisations=1, hits=2, misses=1, fallbacks=0, reasons=('first call',))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import FusejitError
from .specialisation_table import Entry

if TYPE_CHECKING:
    from ..report.report import Report


class CacheInfo(NamedTuple):
    """How often a jitted function was captured and found again, and why each capture was necessary, in their order."""

    specialisations: int
    hits: int
    misses: int
    fallbacks: int
    reasons: tuple[str, ...] = ()


def cache_info(entries: Sequence[Entry], hits: int, misses: int, stopped: int = 0) -> CacheInfo:
    """Count entries; `stopped`: fallbacks that belong to none of them."""
    fallbacks = sum(bool(entry.specialisation.fallbacks) for entry in entries) + stopped
    return CacheInfo(len(entries), hits, misses, fallbacks, tuple(entry.why for entry in entries))


def summed(parts: Sequence[CacheInfo]) -> CacheInfo:
    """The counts of a function in segments."""
    reasons = tuple(reason for part in parts for reason in part.reasons)
    return CacheInfo(*(sum(part[number] for part in parts) for number in range(4)), reasons)  # type: ignore[arg-type,call-arg,misc]


def explained(entries: Sequence[Entry], name: str, unbound: Mapping[Any, str]) -> list[Report]:
    """The report of each entry; `unbound`: why calls of a specialisation go the general way."""
    from ..report.report import report  # it reads the back end, which a call on the eager backend never loads

    parts = [(entry.specialisation, entry.why) for entry in entries]
    return [report(part, name, why, unbound.get(part, "")) for part, why in parts]


def only_program(entries: Sequence[Entry], name: str) -> Any:
    """The forward Program of a call.

    Raises:
        FusejitError: nothing, or more than one, is compiled; says why.
    """
    parts = [entry.specialisation for entry in entries]
    programs = [part.forward for part in parts if part.forward is not None]
    if len(programs) == 1:
        return programs[0]
    reasons = "; ".join(str(fallback) for part in parts for fallback in part.fallbacks)
    if programs:
        raise FusejitError(f"{name} is cut into {len(programs)} programs; explain(...).graphs has them all: {reasons}")
    backend = parts[-1].backend if parts else "eager"
    reasons = reasons or "use backend='triton' or 'interpret'"
    raise FusejitError(f"{name} runs on backend {backend!r}, which has no program: {reasons}")
