"""`JitFunction`: a function with its specialisations: looked up, captured when there is none, run.

In: a callable and `Settings`. Out: what a call runs: a specialisation, or the plain Python where nothing can be captured.

    >>> f = JitFunction(lambda x: x + 1, Settings())
    >>> f(torch.ones(3)); f.cache_info()
    CacheInfo(specialisations=1, hits=0, misses=1, fallbacks=0)

A call is looked up by its arguments and torch's state, then by the guards of each specialisation; what matches runs, what does
not is captured. Calls take no lock; captures do.
"""

from __future__ import annotations

import functools
import logging
import threading
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from . import config
from .capture import trace, tree
from .capture.guards import Guards, key_of, state_key
from .capture.trace import Captured
from .errors import CaptureError, FusejitError, Unsupported
from .specialise import Fallback, Settings, Specialisation, specialise

log = logging.getLogger("fusejit")
LIMIT = 64
"""The most specialisations a function keeps; the oldest goes first."""


class Switch:
    """Whether jitted functions run as plain Python."""

    off: bool = bool(config.read("disable"))


class disable_jit:
    """Run every jitted function as plain eager Python: `disable_jit()` from now on, `with disable_jit():` for a while.

    `disable_jit(False)` switches compilation on again.
    """

    def __init__(self, disable: bool = True) -> None:
        self.before, Switch.off = Switch.off, disable

    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        Switch.off = self.before


class CacheInfo(NamedTuple):
    """How often a jitted function was captured and found again."""

    specialisations: int
    hits: int
    misses: int
    fallbacks: int


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
        self._lock = threading.RLock()
        self._misses = self._hits = 0
        self._told: set[str] = set()
        if isinstance(fn, (types.FunctionType, types.MethodType)):
            functools.update_wrapper(self, fn)
        else:
            self.__name__ = self.__qualname__ = name
            self.__doc__ = fn.__doc__
        self.__wrapped__ = fn

    def __repr__(self) -> str:
        return f"<fusejit.jit of {self.settings.name}>"

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else BoundJitFunction(self, instance)

    def __reduce__(self) -> Any:
        return (JitFunction, (self.__wrapped__, self.settings))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(None, args, kwargs)

    def call(self, receiver: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call the function; `receiver` is the object of a decorated method."""
        if Switch.off or elsewhere():
            return self.plain(receiver, args, kwargs)
        leaves: list[Any] = []
        structure = tree.flatten((args, kwargs) if kwargs else args, leaves)
        key = (structure, state_key(), key_of(leaves), id(receiver))
        for found in self._table.get(key, ()):
            lifted = found.lifted(leaves)
            if lifted is not None:
                self._hits += 1
                if found.run is None:
                    return self.plain(receiver, args, kwargs)
                return found.run(leaves, lifted)
        return self.miss(key, receiver, args, kwargs, leaves)

    def plain(self, receiver: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run the original Python."""
        if trace.active():
            rewrite = trace.recorder().rewrite
            trace.recorder().watch(self.__wrapped__)
            if rewrite is not None:
                fn = rewrite(self.__wrapped__)
                return fn(*args, **kwargs) if receiver is None else fn(receiver, *args, **kwargs)
        return self.__wrapped__(*args, **kwargs) if receiver is None else self.__wrapped__(receiver, *args, **kwargs)

    def bound(self, receiver: Any) -> Callable:
        return self.__wrapped__ if receiver is None else types.MethodType(self.__wrapped__, receiver)

    def miss(self, key: Any, receiver: Any, args: tuple, kwargs: dict[str, Any], leaves: list[Any]) -> Any:
        """Capture and compile this call, then run it."""
        try:
            found, lifted = self.find(key, receiver, args, kwargs, leaves)
        except Unsupported as error:
            return self.fall_back(error, key, receiver, args, kwargs, leaves)
        assert found.run is not None
        return found.run(leaves, lifted)

    def find(self, key: Any, receiver: Any, args: tuple, kwargs: dict[str, Any], leaves: list[Any]) -> tuple[Specialisation, list[Any]]:
        """Return the specialisation of a call, made now if there is none; `Unsupported` comes out."""
        with self._lock:
            for found in self._table.get(key, ()):  # another thread may have made it meanwhile
                lifted = found.lifted(leaves)
                if lifted is not None and found.run is not None:
                    return found, lifted
            self._misses += 1
            found = specialise(self.bound(receiver), args, kwargs, leaves, self.settings, receiver)
            lifted = found.lifted(leaves)
            if lifted is None:
                raise Unsupported(self.settings.name, "something that it reads changes while it is captured")
            self.remember(key, found)
            self.tell(found)
            return found, lifted

    def remember(self, key: Any, found: Specialisation) -> None:
        self._table[key] = (found, *self._table.get(key, ()))
        self._order.append((key, found))
        if len(self._order) > LIMIT:
            old_key, old = self._order.pop(0)
            self._table[old_key] = tuple(item for item in self._table[old_key] if item is not old)
            if not self._table[old_key]:
                del self._table[old_key]
            self.say(logging.WARNING, f"{self.settings.name} has more than {LIMIT} specialisations; the oldest are dropped")

    def fall_back(self, error: Unsupported, key: Any, receiver: Any, args: tuple, kwargs: dict[str, Any], leaves: list[Any]) -> Any:
        """Run eagerly what cannot be captured, and remember that; or raise where the user wants no fallback."""
        if self.settings.fullgraph or config.read("strict"):
            raise self.explain_error(error)
        result = self.plain(receiver, args, kwargs)
        found = self.eager_specialisation(error, receiver, leaves)
        with self._lock:
            self.remember(key, found)
        self.tell(found)
        return result

    def eager_specialisation(self, error: Unsupported, receiver: Any, leaves: list[Any]) -> Specialisation:
        """What remembers that a call runs as plain Python, guarded by what the failed capture had read."""
        lifted: Callable[[list[Any]], Any] = lambda leaves: []  # noqa: E731
        recorder = getattr(error, "recorder", None)
        if recorder is not None:
            empty = torch.fx.GraphModule(torch.nn.Module(), torch.fx.Graph())
            lifted = Guards(Captured(empty, (), (), (), None, [], [], recorder, self.settings.name)).lifted
        found = Specialisation("eager", lifted, pins=(receiver, [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]))
        found.fallbacks.append(Fallback(error.op, error.reason, error.line))
        return found

    def explain_error(self, error: Unsupported) -> BaseException:
        """The error that `fullgraph=True` raises: torch's own where the call itself is wrong, `CaptureError` otherwise."""
        cause = error.__cause__
        if cause is not None and type(cause) in (RuntimeError, IndexError, TypeError, ValueError):
            if error.line:
                cause.add_note(f"while capturing {self.settings.name!r} at {error.line}")
            return cause
        where = f" ({error.line})" if error.line else ""
        made = CaptureError(f"cannot capture {self.settings.name!r}{where}: {error.op}: {error.reason}")
        made.__cause__ = error
        return made

    def tell(self, found: Specialisation) -> None:
        """Log what a new specialisation does not do as compiled code; each thing once."""
        for fallback in found.fallbacks:
            expected = fallback.op == "torch's runtime wrappers"
            self.say(logging.INFO if expected else logging.WARNING, f"{self.settings.name}: eager fallback: {fallback}")
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
        structure = tree.flatten((args, kwargs) if kwargs else args, leaves)
        key = (structure, state_key(), key_of(leaves), id(receiver))
        try:
            return self.find(key, receiver, args, kwargs, leaves)[0]
        except Unsupported as error:
            if self.settings.fullgraph or config.read("strict"):
                raise self.explain_error(error) from error
            return self.eager_specialisation(error, receiver, leaves)

    def program(self, *args: Any, **kwargs: Any) -> Any:
        """Return the forward `Program` of a call (its `.source` is Python text); raises where nothing is compiled."""
        return self.program_for(None, args, kwargs)

    def program_for(self, receiver: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        found = self.specialisation_for(receiver, args, kwargs)
        if found.forward is None:
            reasons = "; ".join(map(str, found.fallbacks)) or "use backend='triton' or 'interpret'"
            raise FusejitError(f"{self.settings.name} runs on backend {found.backend!r}, which has no program: {reasons}")
        return found.forward

    def explain(self, *args: Any, **kwargs: Any) -> Any:
        """Return the `Report` of a call: kernels, fallbacks, bytes, compile time. Runs nothing; compiles if needed."""
        return self.explain_for(None, args, kwargs)

    def explain_for(self, receiver: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        from .explain import report  # the report reads the back end, which a call on the eager backend never loads

        return report(self.specialisation_for(receiver, args, kwargs), self.settings.name)

    def cache_info(self) -> CacheInfo:
        """Return how many specialisations there are, and how many calls found one."""
        held = [found for _, found in self._order]
        return CacheInfo(len(held), self._hits, self._misses, sum(bool(found.fallbacks) for found in held))

    def cache_clear(self) -> None:
        """Forget all specialisations."""
        with self._lock:
            self._table, self._order = {}, []


class BoundJitFunction:
    """A jitted method together with its object."""

    __slots__ = ("function", "receiver", "__weakref__")

    def __init__(self, function: JitFunction, receiver: Any) -> None:
        self.function, self.receiver = function, receiver

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function.call(self.receiver, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.function, name)

    @property
    def __wrapped__(self) -> Any:
        return types.MethodType(self.function.__wrapped__, self.receiver)

    @property
    def __self__(self) -> Any:
        return self.receiver

    def explain(self, *args: Any, **kwargs: Any) -> Any:
        return self.function.explain_for(self.receiver, args, kwargs)

    def program(self, *args: Any, **kwargs: Any) -> Any:
        return self.function.program_for(self.receiver, args, kwargs)

    def specialisation(self, *args: Any, **kwargs: Any) -> Specialisation:
        return self.function.specialisation_for(self.receiver, args, kwargs)


def elsewhere() -> bool:
    """Whether this call happens inside another transformation (a capture, torch.func, a dispatch mode), which sees plain Python."""
    if trace.active() or torch._C._functorch.maybe_current_level() is not None or torch._C._len_torch_dispatch_stack():
        return True
    depth = torch._C._len_torch_function_stack()
    if depth:
        from torch.utils._device import DeviceContext

        return any(not isinstance(torch._C._get_function_stack_at(level), DeviceContext) for level in range(depth))
    return False
