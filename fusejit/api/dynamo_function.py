"""`BytecodeFunction`: a jitted function that Dynamo reads, `capture_mode="bytecode"`.

In: a callable and `Settings`. Out: a `JitFunction` whose calls run the graphs that Dynamo makes of it, each compiled by
fusejit.

    >>> f = BytecodeFunction(lambda x: x + 1, Settings(capture_mode="bytecode"))
    >>> f(torch.ones(3)); f.cache_info()
    CacheInfo(specialisations=1, hits=0, misses=1, fallbacks=0, reasons=('first call',))

Dynamo guards what the function reads. At a graph break the Python between two graphs runs as it is; each graph is a
specialisation.
"""

from __future__ import annotations

from typing import Any

from torch.compiler import is_dynamo_compiling

from ..compile_log import Fallback, Notes
from ..errors import FusejitError
from ..options import Settings
from ..runtime.fast_path import elsewhere
from ..specialise.specialisation import Executable, Specialisation
from .disable import Switch
from .function import JitFunction
from .reports import CacheInfo, cache_info
from .specialisation_table import Entry, with_receiver


class BytecodeFunction(JitFunction):
    """See `JitFunction`; calls that find a graph count as hits, those that make one as misses."""

    def call(self, receiver: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if is_dynamo_compiling():
            return (
                self.__wrapped__(*args, **kwargs) if receiver is None else self.__wrapped__(receiver, *args, **kwargs)
            )
        if Switch.off or elsewhere():
            return self.plain(receiver, args, kwargs)
        reader = self._specialiser.reader()
        before = reader.count
        result = reader.call(with_receiver(receiver, args), kwargs)
        if reader.count == before:
            self._hits += 1
        else:
            self._specialiser.misses += 1
        return result

    def entry_for(self, receiver: Any, args: tuple, kwargs: dict[str, Any]) -> Entry:
        """The one specialisation of a call that is one graph."""
        entries = self.entries_for(receiver, args, kwargs)
        if len(entries) != 1:
            raise FusejitError(
                f"{self.settings.name} is cut into {len(entries)} graphs; explain(...).graphs has them all"
            )
        return entries[0]

    def bind_for(self, receiver: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Dynamo's guards stay: they are what finds the graphs."""
        return lambda *args, **kwargs: self.call(receiver, args, kwargs)

    def entries_for(self, receiver: Any, args: tuple, kwargs: dict[str, Any]) -> list[Entry]:
        reader = self._specialiser.reader()
        if entries := reader.observe(with_receiver(receiver, args), kwargs):
            return entries
        reasons = [
            Fallback("capture_mode 'bytecode'", reason) for reason in reader.reasons or ["there is no op to compile"]
        ]
        notes = Notes(fallbacks=(*reasons, *reader.stopped))
        return [Entry((), Specialisation(Executable("eager"), lambda leaves: [], notes))]

    def cache_info(self) -> CacheInfo:
        reader = self._specialiser.graphs
        if reader is None:
            return cache_info([], self._hits, self._specialiser.misses)
        return cache_info(reader.entries, self._hits, self._specialiser.misses, len(reader.stopped))


def jit_function(fn: Any, settings: Settings) -> JitFunction:
    """Return the jitted function of a callable, by its capture mode."""
    return (BytecodeFunction if settings.capture_mode == "bytecode" else JitFunction)(fn, settings)
