"""`JitFunction`: a function with its specialisations: looked up, captured when there is none, run.

In: a callable and `Settings`. Out: what a call runs: a specialisation, or the plain Python where nothing can be
captured.

    >>> f = JitFunction(lambda x: x + 1, Settings())
    >>> f(torch.ones(3)); f.cache_info()
    CacheInfo(specialisations=1, hits=0, misses=1, fallbacks=0, reasons=('first call',))

A call is looked up by its arguments and torch's state, then by the guards of each specialisation; what matches runs,
what does not is captured. Calls take no lock; captures do.
"""

from __future__ import annotations

import copy
import functools
import logging
import sys
import threading
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.compiler import is_dynamo_compiling

from .. import knobs
from ..capture import tracer
from ..capture.guards.guards import key_for
from ..capture.guards.recompile_reasons import differences, named
from ..capture.mutable import family
from ..capture.shapes.policy import Dynamic
from ..capture.source_lines import error_line
from ..errors import CaptureError, FusejitError, Unsupported
from ..fork_locks import renewed
from ..frontend.capture_ast import call_rewritten
from ..frontend.exclude import Split, SplitReport, hooked, mentions, split
from ..options import Settings
from ..runtime.fast_path import MISS, Bindings, Call, elsewhere
from ..runtime.unguarded import promised, unguarded
from ..specialise.build import resolve
from ..specialise.dynamic import specialise_sizes
from ..specialise.specialise import TINY, Fallback, Specialisation, eager_specialisation, refusal, specialise
from .bound_method import BoundJitFunction
from .disable import Switch, nesting
from .dynamo_backend import Reader

log = logging.getLogger("fusejit")
jit_trace = torch._C._get_tracing_state
RECEIVERS = 16
"""Of how many objects a decorated method keeps all specialisations that the limit allows; beyond, the oldest go."""
CHANGING = 3
"""How many new values of a Python argument recompile before a warning."""
TOO_MANY = "more than {} specialisations, so new kinds of calls run eagerly"


class CacheInfo(NamedTuple):
    """How often a jitted function was captured and found again, and why each capture was necessary, in their order."""

    specialisations: int
    hits: int
    misses: int
    fallbacks: int
    reasons: tuple[str, ...] = ()


class JitFunction:
    """A jitted function.

    Attributes:
        __wrapped__: the original.
    """

    def __init__(self, fn: Callable, settings: Settings) -> None:
        name = settings.name or getattr(fn, "__qualname__", type(fn).__name__)
        self.settings = replace(settings, name=name)
        self._table: dict[Any, tuple[Specialisation, ...]] = {}
        self._order: list[Any] = []
        self._lengths: dict[Any, Any] = {}
        self._sizes = Dynamic(settings.dynamic)
        self._lock = renewed(threading.RLock())
        self._held: dict[int, int] = {}
        self._changing: dict[str, int] = {}
        self._reader: Reader | None = None
        self._misses = self._hits = 0
        self._bound = Bindings()
        self._told: set[str] = set()
        if isinstance(fn, (types.FunctionType, types.MethodType)):
            functools.update_wrapper(self, fn)
        else:
            self.__name__ = self.__qualname__ = name
            self.__doc__ = fn.__doc__
        self.__wrapped__ = fn
        self._split: Split | None = None
        self._may_split = mentions(fn)

    def __repr__(self) -> str:
        return f"<fusejit.jit of {self.settings.name}>"

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else BoundJitFunction(self, instance)

    def __reduce__(self) -> Any:
        """A decorated function is pickled as functions are, by its name; what was jitted in another place, by its
        parts.
        """
        fn = self.__wrapped__
        found: Any = sys.modules.get(getattr(fn, "__module__", ""))
        for name in getattr(fn, "__qualname__", "?").split("."):
            found = getattr(found, name, None)
        return fn.__qualname__ if found is self else (type(self), (fn, self.settings))

    def __copy__(self) -> Any:
        return (
            self.__deepcopy__()
            if isinstance(self.__wrapped__, types.FunctionType)
            else type(self)(self.__wrapped__, self.settings)
        )

    def __deepcopy__(self, memo: Any = None) -> Any:
        """Functions are their own copies, programs and all; a copied method or callable object belongs to a copied
        object.
        """
        if isinstance(self.__wrapped__, types.FunctionType):
            return self
        return type(self)(copy.deepcopy(self.__wrapped__, memo), self.settings)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(None, args, kwargs)

    def call(self, receiver: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call the function; `receiver` is the object of a decorated method."""
        if (
            is_dynamo_compiling() or jit_trace() is not None
        ):  # torch.jit.trace records what is called, which programs do not show it
            return (
                self.__wrapped__(*args, **kwargs) if receiver is None else self.__wrapped__(receiver, *args, **kwargs)
            )
        if not Switch.off:
            for entry in self._bound.runs:
                result = entry(receiver, args, kwargs)
                if result is not MISS:
                    self._hits += 1
                    return result
        if Switch.off or elsewhere():
            return self.plain(receiver, args, kwargs)
        if self._may_split and (parts := self.segments()) is not None:
            return parts.run(*args, **kwargs) if receiver is None else parts.run(receiver, *args, **kwargs)
        leaves: list[Any] = []
        key = key_for(receiver, args, kwargs, leaves)
        for found in self._table.get(key, ()):
            lifted = found.lifted(leaves)
            if lifted is not None:
                return self.hit(found, Call(receiver, args, kwargs, leaves, lifted))
        return self.miss(key, receiver, args, kwargs, leaves)

    def hit(self, found: Specialisation, call: Call) -> Any:
        """Run the specialisation of a call, and have the next call like it take the hot path."""
        self._hits += 1
        if found.run is None:
            return self.cold(found, call.receiver, call.args, call.kwargs)
        if found.body is not None:
            self._bound.add(found, call, self._hits)
        return found.run(call.leaves, call.lifted)

    def segments(self) -> Split | None:
        """The function in segments, where blocks of it are excluded; made at the first call."""
        if self._may_split and self._split is None:
            with self._lock:
                self._split = split(self.__wrapped__, self.segment)
                self._may_split = self._split is not None
        return None if hooked(self.__wrapped__) else self._split

    def segment(self, fn: Callable, part: Any) -> JitFunction:
        """A part of this function, jitted by itself."""
        return JitFunction(fn, replace(self.settings, name=f"{self.settings.name}[{part.first}-{part.last}]"))

    def plain(self, receiver: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run the original Python."""
        if tracer.active():
            rewrite = tracer.recorder().rewrite
            tracer.recorder().watch(self.__wrapped__)
            fn = self.__wrapped__ if rewrite is None else rewrite(self.__wrapped__)
            with nesting(self.settings):
                return fn(*args, **kwargs) if receiver is None else fn(receiver, *args, **kwargs)
        if (
            self.settings.capture_mode == "ast"
            and torch._C._functorch.maybe_current_level() is not None
            and not Switch.off
        ):
            return call_rewritten(self.bound(receiver), args, kwargs)
        return self.__wrapped__(*args, **kwargs) if receiver is None else self.__wrapped__(receiver, *args, **kwargs)

    def bound(self, receiver: Any) -> Callable:
        return self.__wrapped__ if receiver is None else types.MethodType(self.__wrapped__, receiver)

    def miss(self, key: Any, receiver: Any, args: tuple, kwargs: dict[str, Any], leaves: list[Any]) -> Any:
        """Run a call of new sizes by what holds for many, or capture and compile it."""
        known = self._sizes.find(key, leaves)
        if known is not None:
            return self.hit(known[0], Call(receiver, args, kwargs, leaves, known[1]))
        if self.full(receiver):
            return self.plain(receiver, args, kwargs)
        try:
            found, lifted = self.find(key, receiver, args, kwargs, leaves)
        except Unsupported as error:
            return self.fall_back(error, key, receiver, args, kwargs, leaves)
        except FusejitError:
            raise
        except (
            Exception
        ) as error:  # the function's own: in Python it comes behind what the function has changed until then
            if self.settings.fullgraph or knobs.read("strict"):
                raise
            return self.run_again(error, key, receiver, args, kwargs, leaves)
        return self.start(found, Call(receiver, args, kwargs, leaves, lifted))

    def start(self, found: Specialisation, call: Call) -> Any:
        """Run the call that a specialisation has just been made for."""
        return (
            self.cold(found, call.receiver, call.args, call.kwargs)
            if found.run is None
            else found.run(call.leaves, call.lifted)
        )

    def cold(self, found: Specialisation, receiver: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run a call that has no graph of its own: by the graphs that Dynamo makes of it, or as plain Python."""
        if found.through is not None:
            return found.through.call(args if receiver is None else (receiver, *args), kwargs)
        return self.plain(receiver, args, kwargs)

    def find(
        self, key: Any, receiver: Any, args: tuple, kwargs: dict[str, Any], leaves: list[Any]
    ) -> tuple[Specialisation, list[Any]]:
        """Return the specialisation of a call, made now if there is none; `Unsupported` comes out."""
        with self._lock:
            for found in self._table.get(key, ()):  # another thread may have made it meanwhile
                lifted = found.lifted(leaves)
                if lifted is not None:
                    return found, lifted
            if (known := self._sizes.find(key, leaves)) is not None:
                return known
            self._misses += 1
            kin = family(key[0])
            length = self._lengths.get(kin, key[0])
            if length != key[0]:
                reason = (
                    "one length is compiled, and this is another; fusejit.mutable(..., dynamic_len=False) compiles each"
                )
                raise Unsupported("a mutable argument of another length", reason)
            with nesting(self.settings):
                fn, name = self.bound(receiver), named(self.__wrapped__, receiver is not None)
                make = functools.partial(specialise, fn, args, kwargs, leaves, self.settings, receiver)
                found = specialise_sizes(self._sizes, key, leaves, name, make)
            lifted = found.lifted(leaves)
            if lifted is None:
                raise Unsupported(self.settings.name, "something that it reads changes while it is captured")
            with tracer.LOCK:  # a fork waits until the tables are whole
                self.remember(key, found, leaves)
            if kin != key[0]:
                self._lengths[kin] = key[0]
            self.tell(found)
            return found, lifted

    def remember(self, key: Any, found: Specialisation, leaves: list[Any]) -> None:
        """Keep a specialisation, with the reason why the ones there are did not do."""
        receiver = key[3]
        known = [(other, item.guards) for other, item in self._order]
        changes = differences(key, leaves, known, named(self.__wrapped__, receiver != id(None)))
        found.why = found.why or "; ".join(map(str, changes[:3]))
        self._table[key] = (found, *self._table.get(key, ()))
        self._order.append((key, found))
        self._held[receiver] = self._held.get(receiver, 0) + 1
        if len(self._order) > RECEIVERS * knobs.read("specialisations"):  # of many objects: the oldest go
            old_key, old = self._order.pop(0)
            self._table[old_key] = tuple(item for item in self._table[old_key] if item is not old)
            self._bound.drop(old)
            self._sizes.forget(old_key, old)
            self._held[old_key[3]] -= 1
            for table, name in ((self._table, old_key), (self._held, old_key[3])):
                if not table[name]:  # type: ignore[index]
                    del table[name]  # type: ignore[attr-defined]
        for name in {change.value for change in changes if change.value}:
            self._changing[name] = self._changing.get(name, 0) + 1
            if self._changing[name] == CHANGING:
                way_out = (
                    f"pass a tensor, or wrap it in fusejit.mutable, so that `{name}` may vary without a new program"
                )
                self.say(
                    logging.WARNING,
                    f"{self.settings.name}: argument {name} keeps changing, and each value recompiles: {way_out}",
                )

    def full(self, receiver: Any) -> bool:
        """Whether calls of new kinds run eagerly, because the limit of specialisations is reached; says so once."""
        limit = knobs.read("specialisations")
        if self._held.get(id(receiver), 0) < limit:
            return False
        if knobs.read("strict"):
            raise CaptureError(f"{self.settings.name!r} has {limit} specialisations already (FUSEJIT_SPECIALISATIONS)")
        last = self._order[-1][1].why
        self.say(
            logging.WARNING, f"{self.settings.name}: {TOO_MANY.format(limit)}; the last one was made because: {last}"
        )
        return True

    def fall_back(
        self, error: Unsupported, key: Any, receiver: Any, args: tuple, kwargs: dict[str, Any], leaves: list[Any]
    ) -> Any:
        """Run what cannot be captured by its bytecode where that pays, or else eagerly, and remember that; or raise
        where that is asked.
        """
        if self.settings.fullgraph or knobs.read("strict"):
            raise refusal(error, self.settings.name)
        found = eager_specialisation(error, self.settings.name, receiver, leaves)
        if self.pays(error, leaves):
            found.through = self.reader()
        result = self.cold(found, receiver, args, kwargs)
        if found.through is not None and not found.through.compiles:
            reasons = "; ".join(found.through.reasons) or "no op stands between the breaks"
            found.fallbacks.append(Fallback("capture_mode 'bytecode', tried next", f"compiled nothing: {reasons}"))
            found.through = None
        with self._lock, tracer.LOCK:
            self.remember(key, found, leaves)
        self.tell(found)
        return result

    def run_again(
        self, error: Exception, key: Any, receiver: Any, args: tuple, kwargs: dict[str, Any], leaves: list[Any]
    ) -> Any:
        """Run a call whose capture raised, as plain Python, which raises the same; remember where it does not."""
        result = self.plain(receiver, args, kwargs)
        refused = Unsupported(
            type(error).__name__, f"raised while it was captured, and not in Python: {error}", error_line(error), False
        )
        found = eager_specialisation(refused, self.settings.name, receiver, leaves)
        with self._lock, tracer.LOCK:
            self.remember(key, found, leaves)
        self.tell(found)
        return result

    def pays(self, error: Unsupported, leaves: list[Any]) -> bool:
        """Whether the next mode, "bytecode", is worth its seconds: mode "ast", a compiling backend, a refusal of
        Python, not of tensors.

        Mode "trace" promises that the Python is traced as it is, and falls to eager.
        """
        if self.settings.capture_mode != "ast" or self.settings.jit_level == "O0" or not error.in_python:
            return False
        return resolve(self.settings, [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]) != "eager"

    def reader(self) -> Reader:
        """What reads the function by its bytecode; one for all calls."""
        if self._reader is None:
            self._reader = Reader(self.__wrapped__, self.settings, self.tell)
        return self._reader

    def tell(self, found: Specialisation) -> None:
        """Log what a new specialisation does not do as compiled code; each thing once."""
        for fallback in found.fallbacks:
            expected = fallback.op in ("torch's runtime wrappers", "graph break", TINY)
            instead = "read by its bytecode instead" if found.through is not None else "eager fallback"
            self.say(logging.INFO if expected else logging.WARNING, f"{self.settings.name}: {instead}: {fallback}")
        for effect in found.effects:
            self.say(logging.WARNING, f"{self.settings.name}: {effect}; compiled calls will not repeat that")

    def say(self, level: int, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            log.log(level, text)

    def specialisation(self, *args: Any, **kwargs: Any) -> Specialisation:
        """Return the specialisation of a call, made now if there is none, without running it."""
        return self.specialisation_for(None, args, kwargs)

    def specialisation_for(self, receiver: Any, args: tuple, kwargs: dict[str, Any]) -> Specialisation:
        leaves: list[Any] = []
        key = key_for(receiver, args, kwargs, leaves)
        for found in self._table.get(key, ()):
            if found.lifted(leaves) is not None:
                return found
        if (known := self._sizes.find(key, leaves)) is not None:
            return known[0]
        if self.full(receiver):
            limit = knobs.read("specialisations")
            error = Unsupported(TOO_MANY.format(limit), "new kinds of calls run eagerly (FUSEJIT_SPECIALISATIONS)")
            return eager_specialisation(error, self.settings.name, receiver, leaves)
        try:
            return self.find(key, receiver, args, kwargs, leaves)[0]
        except Unsupported as error:
            if self.settings.fullgraph or knobs.read("strict"):
                raise refusal(error, self.settings.name) from error
            found = eager_specialisation(error, self.settings.name, receiver, leaves)
            if self.pays(error, leaves):
                found.through = self.reader()
            return found

    def specialisations_for(self, receiver: Any, args: tuple, kwargs: dict[str, Any]) -> list[Specialisation]:
        """The specialisations that make up a call: one, and where Dynamo cuts the function, which it has to run for
        that, each graph's.
        """
        found = self.specialisation_for(receiver, args, kwargs)
        if found.through is None:
            return [found]
        return [found, *found.through.observe(args if receiver is None else (receiver, *args), kwargs)]

    def program(self, *args: Any, **kwargs: Any) -> Any:
        """Return the forward `Program` of a call (its `.source` is Python text); raises where nothing, or more than
        one, is compiled.
        """
        return self.program_for(None, args, kwargs)

    def program_for(self, receiver: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        parts = self.specialisations_for(receiver, args, kwargs)
        programs = [part.forward for part in parts if part.forward is not None]
        if len(programs) == 1:
            return programs[0]
        reasons = "; ".join(str(fallback) for part in parts for fallback in part.fallbacks)
        if programs:
            raise FusejitError(
                f"{self.settings.name} is cut into {len(programs)} programs; explain(...).graphs has them all: "
                f"{reasons}"
            )
        backend = parts[-1].backend if parts else "eager"
        reasons = reasons or "use backend='triton' or 'interpret'"
        raise FusejitError(f"{self.settings.name} runs on backend {backend!r}, which has no program: {reasons}")

    def explain(self, *args: Any, **kwargs: Any) -> Any:
        """Return the `Report` of a call: kernels, fallbacks, bytes, compile time. Compiles if needed; runs nothing,
        unless Dynamo reads the function (`capture_mode="bytecode"`), which finds a graph only by running up to it."""
        return self.explain_for(None, args, kwargs)

    def explain_for(self, receiver: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        from ..report.report import (
            joined,
            report,
        )  # the report reads the back end, which a call on the eager backend never loads

        if (cut := self.segments()) is not None:
            made = [report(found, part.settings.name) for part in cut.segments for _, found in part._order]
            return SplitReport(self.settings.name, cut, tuple(made))
        parts = self.specialisations_for(receiver, args, kwargs)
        return joined([report(part, self.settings.name) for part in parts], self.settings.name)

    def bind(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """Return a callable without guards, for loops whose calls are like this one; compiles if needed, runs nothing.

        Its caller promises that every argument has the type, dtype, shape, strides, alignment to the memory of the
        others, requires_grad and device (Python values: the value) of the one given here, that torch's state is the
        same (gradients, autocast, modes), and that nothing else which the function reads has changed; parameters and
        buffers are the tensors that are there now, which may be changed in place. With FUSEJIT_DEBUG=1, read here, each
        call is checked, and a broken promise raises. Where the function does not run as one graph, calls stay guarded.

        Raises:
            FusejitError: from the returned callable, under FUSEJIT_DEBUG=1, naming what differs.
        """
        return self.bind_for(None, args, kwargs)

    def bind_for(self, receiver: Any, args: tuple, kwargs: dict[str, Any]) -> Callable[..., Any]:
        guarded = lambda *args, **kwargs: self.call(receiver, args, kwargs)  # noqa: E731
        if self.segments() is not None:
            return guarded
        found = self.specialisation_for(receiver, args, kwargs)
        leaves: list[Any] = []
        key = key_for(receiver, args, kwargs, leaves)
        lifted = found.lifted(leaves)
        if found.run is None or lifted is None:
            return guarded
        call = Call(receiver, args, kwargs, leaves, lifted)
        run = unguarded(found, call)
        return (
            promised(run, found, call, key, named(self.__wrapped__, receiver is not None))
            if knobs.read("debug")
            else run
        )

    def cache_info(self) -> CacheInfo:
        """Return how many specialisations there are and why, and how many calls found one."""
        if self._split is not None:
            parts = [part.cache_info() for part in self._split.segments]
            reasons = tuple(reason for part in parts for reason in part.reasons)
            return CacheInfo(*(sum(part[n] for part in parts) for n in range(4)), reasons)  # type: ignore[arg-type,call-arg]
        held = [found for _, found in self._order]
        if self._reader is not None:
            held += self._reader.specialisations
        fallbacks = sum(bool(found.fallbacks) for found in held)
        return CacheInfo(len(held), self._hits, self._misses, fallbacks, tuple(found.why for found in held))

    def cache_clear(self) -> None:
        """Forget all specialisations."""
        with self._lock:
            self._table, self._order, self._held, self._reader, self._lengths, self._bound = (
                {},
                [],
                {},
                None,
                {},
                Bindings(),
            )
            self._sizes = Dynamic(self.settings.dynamic)
            for part in self._split.segments if self._split is not None else ():
                part.cache_clear()
