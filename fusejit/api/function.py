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
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.compiler import is_dynamo_compiling

from .. import knobs
from .. import torch_private as private
from ..capture import tracer
from ..capture.guards.guards import key_for
from ..capture.source_lines import error_line
from ..compile_log import Fallback
from ..errors import FusejitError, Unsupported
from ..frontend.capture_ast import call_rewritten
from ..frontend.exclude import Split, SplitReport, hooked, mentions, split
from ..options import Settings
from ..runtime.fast_path import MISS, Call, elsewhere
from ..runtime.unguarded import promised, unguarded
from ..specialise.specialisation import Specialisation
from .bound_method import BoundJitFunction
from .disable import Switch, nesting
from .reports import CacheInfo, cache_info, explained, only_program, summed
from .specialisation_table import BytecodeReader, Entry, Request, with_receiver
from .specialiser import Specialiser, bound

jit_trace = private.get_tracing_state


class JitFunction:
    """A jitted function.

    Attributes:
        __wrapped__: the original.
    """

    def __init__(self, fn: Callable, settings: Settings) -> None:
        name = settings.name or getattr(fn, "__qualname__", type(fn).__name__)
        self.settings = replace(settings, name=name)
        self._specialiser = Specialiser(fn, self.settings)
        self._lock = self._specialiser.lock
        self._hits = 0
        if isinstance(fn, (types.FunctionType, types.MethodType)):
            functools.update_wrapper(self, fn)
        else:
            self.__name__ = self.__qualname__ = name
            self.__doc__ = fn.__doc__
        self.__wrapped__ = fn
        self._split: Split | None = None
        self._may_split = mentions(fn)
        self._look_up()

    def _look_up(self) -> None:
        """Have calls look at the table of the specialiser."""
        self._table = self._specialiser.table
        self._bound = self._table.bindings

    def __repr__(self) -> str:
        return f"<fusejit.jit of {self.settings.name}>"

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else BoundJitFunction(self, instance)

    def __reduce__(self) -> Any:
        """A decorated function is pickled by its name, as functions are; what was jitted elsewhere, by its parts."""
        fn = self.__wrapped__
        owner: Any = sys.modules.get(getattr(fn, "__module__", ""))
        for name in getattr(fn, "__qualname__", "?").split("."):
            owner = getattr(owner, name, None)
        return fn.__qualname__ if owner is self else (type(self), (fn, self.settings))

    def __copy__(self) -> Any:
        shared = isinstance(self.__wrapped__, types.FunctionType)
        return self if shared else type(self)(self.__wrapped__, self.settings)

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
        if is_dynamo_compiling() or jit_trace() is not None:  # they record what is called; programs do not show it
            return self.__wrapped__(*with_receiver(receiver, args), **kwargs)
        if not Switch.off:
            for run in self._bound.runs:
                result = run(receiver, args, kwargs)
                if result is not MISS:
                    self._hits += 1
                    return result
        if Switch.off or elsewhere():
            return self.plain(receiver, args, kwargs)
        if self._may_split and (parts := self.segments()) is not None:
            return parts.run(*with_receiver(receiver, args), **kwargs)
        leaves: list[Any] = []
        key = key_for(receiver, args, kwargs, leaves)
        for entry in self._table.by_key.get(key, ()):
            lifted = entry.specialisation.lifted(leaves)
            if lifted is not None:
                return self.hit(entry, Call(receiver, args, kwargs, leaves, lifted))
        return self.miss(Request(key, receiver, args, kwargs, leaves))

    def hit(self, entry: Entry, call: Call) -> Any:
        """Run the specialisation of a call, and have the next call like it take the hot path."""
        self._hits += 1
        executable = entry.specialisation.executable
        if executable.run is None:
            return self.cold(entry.through, call.receiver, call.args, call.kwargs)
        if executable.body is not None:
            self._bound.add(entry.specialisation, call, self._hits)
        return executable.run(call.leaves, call.lifted)

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
        nested = private.maybe_current_level() is not None
        if self.settings.capture_mode == "ast" and nested and not Switch.off:
            return call_rewritten(bound(self.__wrapped__, receiver), args, kwargs)
        return self.__wrapped__(*args, **kwargs) if receiver is None else self.__wrapped__(receiver, *args, **kwargs)

    def miss(self, request: Request) -> Any:
        """Run a call of new sizes by what holds for many, or capture and compile it."""
        known = self._table.sizes.find(request.key, request.leaves)
        if known is not None:
            return self.hit(known[0], request.call(known[1]))
        if self._table.full(request.receiver):
            return self.plain(request.receiver, request.args, request.kwargs)
        try:
            entry, lifted = self._specialiser.find(request)
        except Unsupported as error:
            return self.fall_back(error, request)
        except FusejitError:
            raise
        except Exception as error:  # the function's own: in Python it comes behind what was changed until then
            if self.settings.fullgraph or knobs.read("strict"):
                raise
            return self.run_again(error, request)
        return self.start(entry, request.call(lifted))

    def start(self, entry: Entry, call: Call) -> Any:
        """Run the call that a specialisation has just been made for."""
        run = entry.specialisation.run
        if run is None:
            return self.cold(entry.through, call.receiver, call.args, call.kwargs)
        return run(call.leaves, call.lifted)

    def cold(self, through: BytecodeReader | None, receiver: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run a call that has no graph of its own: by the graphs that Dynamo makes of it, or as plain Python."""
        if through is not None:
            return through.call(with_receiver(receiver, args), kwargs)
        return self.plain(receiver, args, kwargs)

    def fall_back(self, error: Unsupported, request: Request) -> Any:
        """Run what cannot be captured by its bytecode where that pays, or else eagerly; remember that, or raise."""
        self._specialiser.refuse(error)
        specialisation = self._specialiser.eagerly(error, request)
        through = self._specialiser.instead(error, request)
        result = self.cold(through, request.receiver, request.args, request.kwargs)
        if through is not None and not through.compiles:
            reasons = "; ".join(through.reasons) or "no op stands between the breaks"
            tried = Fallback("capture_mode 'bytecode', tried next", f"compiled nothing: {reasons}")
            specialisation, through = specialisation.noting(tried), None
        self._specialiser.remember(request, specialisation, through)
        return result

    def run_again(self, error: Exception, request: Request) -> Any:
        """Run a call whose capture raised, as plain Python, which raises the same; remember where it does not."""
        result = self.plain(request.receiver, request.args, request.kwargs)
        reason = f"raised while it was captured, and not in Python: {error}"
        refused = Unsupported(type(error).__name__, reason, error_line(error), False)
        self._specialiser.remember(request, self._specialiser.eagerly(refused, request))
        return result

    def specialisation(self, *args: Any, **kwargs: Any) -> Specialisation:
        """Return the specialisation of a call, made now if there is none, without running it."""
        return self.entry_for(None, args, kwargs).specialisation

    def entry_for(self, receiver: Any, args: tuple, kwargs: dict[str, Any]) -> Entry:
        return self._specialiser.entry_for(receiver, args, kwargs)

    def entries_for(self, receiver: Any, args: tuple, kwargs: dict[str, Any]) -> list[Entry]:
        """The entries that make up a call: of each graph that it is cut into."""
        return self._specialiser.entries_for(receiver, args, kwargs)

    def program(self, *args: Any, **kwargs: Any) -> Any:
        """Return the forward `Program` of a call (its `.source` is Python text); raises where nothing, or more than
        one, is compiled.
        """
        return self.program_for(None, args, kwargs)

    def program_for(self, receiver: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        return only_program(self.entries_for(receiver, args, kwargs), self.settings.name)

    def explain(self, *args: Any, **kwargs: Any) -> Any:
        """Return the `Report` of a call: kernels, fallbacks, bytes, compile time. Compiles if needed; runs nothing,
        unless Dynamo reads the function (`capture_mode="bytecode"`), which finds a graph only by running up to it.
        """
        return self.explain_for(None, args, kwargs)

    def explain_for(self, receiver: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        from ..report.report import joined  # it reads the back end, which a call on the eager backend never loads

        name = self.settings.name
        if (cut := self.segments()) is not None:
            return SplitReport(name, cut, tuple(report for part in cut.segments for report in part.reports()))
        return joined(explained(self.entries_for(receiver, args, kwargs), name, self._bound.unbound), name)

    def reports(self) -> list[Any]:
        """The report of each specialisation that there is."""
        return explained(self._table.entries, self.settings.name, self._bound.unbound)

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
        specialisation = self.entry_for(receiver, args, kwargs).specialisation
        leaves: list[Any] = []
        key = key_for(receiver, args, kwargs, leaves)
        lifted = specialisation.lifted(leaves)
        if specialisation.run is None or lifted is None:
            return guarded
        call = Call(receiver, args, kwargs, leaves, lifted)
        run = unguarded(specialisation, call)
        if not knobs.read("debug"):
            return run
        return promised(run, specialisation, call, key, self._table.names(receiver is not None))

    def cache_info(self) -> CacheInfo:
        """Return how many specialisations there are and why, and how many calls found one."""
        if self._split is not None:
            return summed([part.cache_info() for part in self._split.segments])
        return cache_info(self._specialiser.entries, self._hits, self._specialiser.misses)

    def cache_clear(self) -> None:
        """Forget all specialisations."""
        with self._lock:
            self._specialiser.clear()
            self._look_up()
            for part in self._split.segments if self._split is not None else ():
                part.cache_clear()
