"""`trace`: MegEngine's spelling of a jitted function, and what only it has: symbolic traces, constants, a replay beside
the Python.

In: a function. Out: a `TraceFunction`, a `JitFunction` of capture mode "trace" with these options.

    >>> @fusejit.trace(symbolic=True)
    ... def step(x, *, net):
    ...     return net(x).relu()
    >>> step(torch.ones(3), net=model)

With `without_host=False` each later call runs the Python again, beside the recorded program, and raises where the two
part:

    TraceError: operator mismatch in step: recorded aten.add.Tensor (model.py:5: return a + b + c),
    now aten.sub.Tensor (model.py:6: return a + b - c)
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..capture import pytree
from ..capture.compare_traces import divergence
from ..capture.guards.guards import key_of, state_key, tensor_key
from ..capture.memory_pattern import memory_pattern
from ..capture.tracer import Captured, capture
from ..errors import TraceError, Unsupported
from ..options import BACKENDS, NUMERICS, Settings
from ..runtime.fast_path import Call, elsewhere
from ..specialise.specialisation import Specialisation
from .disable import Switch
from .function import JitFunction
from .specialisation_table import Entry
from .specialiser import bound

LATER = "belongs to the memory optimisations, which are not there yet: leave it out"


STATIC = "all sizes are numbers: without_host=False compares each call with what was recorded for its sizes"


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """What a `TraceFunction` has beyond the `Settings` of a `JitFunction`."""

    symbolic: bool = False
    without_host: bool = True
    record_only: bool = False
    profiling: bool = False


class TraceFunction(JitFunction):
    """A traced function; see `trace`. `explain`, `program` and `cache_info` are those of every `JitFunction`."""

    def __init__(
        self, fn: Callable, settings: Settings, options: TraceOptions = TraceOptions(), part: bool = False
    ) -> None:
        super().__init__(fn, settings)
        self.options, self.part = options, part
        self._watched = options.profiling or options.record_only or not options.without_host or settings.constants
        if not (options.without_host or options.record_only):
            self._specialiser.said_of_sizes = (STATIC,)
        self._recorded: dict[Any, tuple[Specialisation, tuple]] = {}
        self._runs: list[float] = []

    def __repr__(self) -> str:
        return f"<fusejit.trace of {self.settings.name}>"

    def segment(self, fn: Callable, part: Any) -> JitFunction:
        settings = replace(self.settings, name=f"{self.settings.name}[{part.first}-{part.last}]")
        return TraceFunction(fn, settings, replace(self.options, record_only=False, profiling=False), part=True)

    def __reduce__(self) -> Any:
        return (TraceFunction, (self.__wrapped__, self.settings, self.options))

    def call(self, receiver: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if not self._watched:
            return super().call(receiver, args, kwargs)
        if Switch.off or elsewhere():
            return self.plain(receiver, args, kwargs)
        if self.settings.constants and not self.part:
            check_tensors(args)
        if not self.options.profiling:
            return self.dispatch(receiver, args, kwargs)
        start = time.perf_counter()
        result = self.dispatch(receiver, args, kwargs)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self._runs.append((time.perf_counter() - start) * 1e3)
        return result

    def dispatch(self, receiver: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if self.options.record_only:
            self.entry_for(receiver, args, kwargs)
            return None
        if self.options.without_host or self.segments() is not None:
            return super().call(receiver, args, kwargs)
        return self.replay(receiver, args, kwargs)

    def start(self, entry: Entry, call: Call) -> Any:
        return (
            super().start(entry, call) if self.options.symbolic else self.plain(call.receiver, call.args, call.kwargs)
        )

    def replay(self, receiver: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run the Python on fake tensors, compare it with what was recorded for such arguments, and run the recorded
        program.
        """
        leaves: list[Any] = []
        structure = pytree.flatten((args, kwargs), leaves)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        key = (structure, state_key(), key_of(leaves), id(receiver), memory_pattern(tensors))
        if key not in self._recorded:
            return self.record(key, receiver, args, kwargs, leaves)
        specialisation, lifted_as = self._recorded[key]
        captured, run = specialisation.captured, specialisation.run
        if run is None or captured is None:
            return self.plain(receiver, args, kwargs)
        watched = () if receiver is None else (receiver,)
        try:
            now = capture(bound(self.__wrapped__, receiver), args, kwargs, self.settings.name, watched)
        except Unsupported as error:
            raise TraceError(
                f"{self.settings.name} was recorded as a graph, and now does what none can hold: {error}"
            ) from error
        lifted = list(now.lifted)
        parted = divergence(captured, now)
        if not parted and tuple(map(tensor_key, lifted)) != lifted_as:
            parted = (
                "tensors not equals: a closed-over tensor has another dtype, shape, strides or device than when it "
                "was recorded"
            )
        if parted:
            raise TraceError(parted.replace(":", f" in {self.settings.name}:", 1))
        self._hits += 1
        return run(leaves, list(captured.lifted) if self.settings.constants else lifted)

    def record(self, key: Any, receiver: Any, args: tuple, kwargs: dict[str, Any], leaves: list[Any]) -> Any:
        """The first call with such arguments."""
        specialisation = self.entry_for(receiver, args, kwargs).specialisation
        captured, run = specialisation.captured, specialisation.run
        lifted = () if captured is None else tuple(map(tensor_key, met(captured)))
        self._recorded[key] = (specialisation, lifted)
        if run is None or captured is None or not self.options.symbolic:
            return self.plain(receiver, args, kwargs)
        return run(leaves, list(captured.lifted))

    def cache_clear(self) -> None:
        super().cache_clear()
        self._recorded = {}

    def get_profile(self) -> dict[str, Any]:
        """Milliseconds of each call so far, and of the stages of each compilation; JSON compatible. Needs
        `profiling=True`.
        """
        if not self.options.profiling:
            raise ValueError("get_profile() needs fusejit.trace(..., profiling=True)")
        compiled = [entry.specialisation.stages_ms for entry in self._table.entries]
        return {"name": self.settings.name, "calls_ms": list(self._runs), "compile_ms": compiled}


def met(captured: Captured) -> tuple[torch.Tensor, ...]:
    """The tensors that a capture met outside the arguments, before they became constants."""
    return captured.met or captured.lifted


def check_tensors(args: tuple) -> None:
    for number, arg in enumerate(args):
        if not isinstance(arg, torch.Tensor):
            raise TypeError(
                f"Only support tensor type args when capture_as_const is enabled: args[{number}] is a "
                f"{type(arg).__name__}; "
                "pass torch.tensor(...), or give it by keyword, which is then a constant of the program"
            )


def trace(
    fn: Callable | None = None,
    *,
    symbolic: bool = False,
    capture_as_const: bool = False,
    record_only: bool = False,
    sublinear_memory_config: Any = None,
    dtr_config: Any = None,
    profiling: bool = False,
    opt_level: int = 2,
    graph_opt_config: Any = None,
    symbolic_shape: bool = True,
    without_host: bool = True,
    backend: str = "auto",
    numerics: str = "fast",
    fast_math: bool = False,
    name: str | None = None,
) -> Any:
    """Trace a function when it is called, and run the program from then on; also a decorator. Returns a
    `TraceFunction`.

    Args:
        fn: a function, method or callable object. Positional arguments are its inputs, keyword arguments its nets,
            optimizers and options; both may be any nesting of tensors and Python values.
        symbolic: False: the first call with such arguments runs as plain Python, beside which the program is made; a
            function that reads a tensor's values stays plain Python (see `explain()`). True: the program runs from the
            first call on; reading is an error.
        capture_as_const: closed-over tensors are constants with their first values and no gradients; positional
            arguments are tensors.
        record_only: a call makes the program and runs nothing: it returns None.
        profiling: keep the time of each call for `get_profile()`; waits for the GPU after each.
        opt_level: 0 to 3, the `jit_level` O0 to O3 of `fusejit.jit`.
        symbolic_shape: True: sizes and numbers that change are inputs of the program (`dynamic=None` of `fusejit.jit`;
            not with `without_host=False`); False: every shape has a program of its own. No shape ever fails.
        without_host: True: later calls check guards and run the program. False: they run the Python too, on fake
            tensors, compare it op by op and constant by constant with what was recorded, and then run the recorded
            program.
        backend, numerics, fast_math, name: see `fusejit.jit`.

    Raises:
        ValueError, TypeError, NotImplementedError: an option is none of its choices, `fn` not callable, an option not
            there yet. TraceError (from a call): the function no longer does what was recorded (without_host=False); the
            next call that does runs. CaptureError (from a call): the function cannot be captured (symbolic=True).
    """
    refuse_later(
        sublinear_memory_config=sublinear_memory_config, dtr_config=dtr_config, graph_opt_config=graph_opt_config
    )
    check_flags(symbolic=symbolic, capture_as_const=capture_as_const, record_only=record_only, profiling=profiling)
    check_flags(symbolic_shape=symbolic_shape, without_host=without_host, fast_math=fast_math)
    check_choice("opt_level", opt_level, (0, 1, 2, 3))
    check_choice("backend", backend, BACKENDS)
    check_choice("numerics", numerics, NUMERICS)
    settings = Settings(
        "trace",
        f"O{opt_level}",
        symbolic,
        backend,
        numerics,
        name or "",
        fast_math=fast_math,
        constants=capture_as_const,
        regions=without_host,
        dynamic=None if symbolic_shape and without_host else False,
    )
    options = TraceOptions(symbolic, without_host, record_only, profiling)
    return functools.partial(make, settings=settings, options=options) if fn is None else make(fn, settings, options)


def partial_trace(fn: Callable | None = None, **options: Any) -> Any:
    """Trace forward and backward apart: two programs on every backend, the backward's made at the first backward.

    Args:
        fn, options: as for `trace`.

    Results and gradients equal eager's. Raises (at backward) where a gradient is to be differentiated again.
    """
    if fn is None:
        return functools.partial(partial_trace, **options)
    traced = trace(fn, **options)
    return TraceFunction(traced.__wrapped__, replace(traced.settings, apart=True), traced.options)


def refuse_later(**options: Any) -> None:
    for option, value in options.items():
        if value is not None:
            way = "opt_level says what is optimised: leave it out" if option == "graph_opt_config" else LATER
            raise NotImplementedError(f"trace({option}=...): {way}")


def check_flags(**options: Any) -> None:
    for option, value in options.items():
        check_choice(option, value, (True, False))


def check_choice(option: str, value: Any, choices: tuple) -> None:
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        raise ValueError(f"{option}={value!r}: choose one of {', '.join(map(repr, choices))}")


def make(fn: Any, settings: Settings, options: TraceOptions) -> Any:
    if isinstance(fn, JitFunction):
        fn = fn.__wrapped__
    if isinstance(fn, (staticmethod, classmethod)):
        return type(fn)(make(fn.__func__, settings, options))
    if not callable(fn) or isinstance(fn, type):
        raise TypeError(f"fusejit.trace takes a function, a method or a callable object, not {fn!r}")
    return TraceFunction(fn, settings, options)
