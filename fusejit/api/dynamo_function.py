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

from ..errors import FusejitError
from ..options import Settings
from ..runtime.fast_path import elsewhere
from ..specialise.specialise import Fallback, Specialisation
from .disable import Switch
from .function import CacheInfo, JitFunction


class BytecodeFunction(JitFunction):
    """See `JitFunction`; calls that find a graph count as hits, those that make one as misses."""

    def call(self, receiver: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if is_dynamo_compiling():
            return (
                self.__wrapped__(*args, **kwargs) if receiver is None else self.__wrapped__(receiver, *args, **kwargs)
            )
        if Switch.off or elsewhere():
            return self.plain(receiver, args, kwargs)
        reader = self._reader or self.reader()
        before = reader.count
        result = reader.call(args if receiver is None else (receiver, *args), kwargs)
        if reader.count == before:
            self._hits += 1
        else:
            self._misses += 1
        return result

    def specialisation_for(self, receiver: Any, args: tuple, kwargs: dict[str, Any]) -> Specialisation:
        """The one specialisation of a call that is one graph."""
        found = self.specialisations_for(receiver, args, kwargs)
        if len(found) != 1:
            raise FusejitError(
                f"{self.settings.name} is cut into {len(found)} graphs; explain(...).graphs has them all"
            )
        return found[0]

    def bind_for(self, receiver: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Dynamo's guards stay: they are what finds the graphs."""
        return lambda *args, **kwargs: self.call(receiver, args, kwargs)

    def specialisations_for(self, receiver: Any, args: tuple, kwargs: dict[str, Any]) -> list[Specialisation]:
        reader = self.reader()
        found = reader.observe(args if receiver is None else (receiver, *args), kwargs)
        if not found:
            reasons = [
                Fallback("capture_mode 'bytecode'", reason)
                for reason in reader.reasons or ["there is no op to compile"]
            ]
            return [Specialisation("eager", lambda leaves: [], fallbacks=[*reasons, *reader.stopped])]
        return found

    def cache_info(self) -> CacheInfo:
        held = self._reader.specialisations if self._reader is not None else []
        fallbacks = sum(bool(found.fallbacks) for found in held) + (
            len(self._reader.stopped) if self._reader is not None else 0
        )
        return CacheInfo(len(held), self._hits, self._misses, fallbacks, tuple(found.why for found in held))


def jit_function(fn: Any, settings: Settings) -> JitFunction:
    """Return the jitted function of a callable, by its capture mode."""
    return (BytecodeFunction if settings.capture_mode == "bytecode" else JitFunction)(fn, settings)
