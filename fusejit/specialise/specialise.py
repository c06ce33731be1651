"""Specialise: capture a call and compile it for its backend: Captured, then an Executable, then a Specialisation.

In: a call and the options of `jit`. Out: a `Specialisation`: `lifted(leaves)` says whether it still holds, `run(...)`
runs it, `notes` says what was done.

    >>> sorted(specialise(fn, args, kwargs, leaves, settings).record)
    ['backward', 'capture', 'forward', 'joint']
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from .. import torch_private as private
from ..capture.freeze import constants
from ..capture.guards.guards import Guards
from ..capture.memory_pattern import memory_pattern
from ..capture.regions.detect import Regions
from ..capture.shapes.symbols import Symbols
from ..capture.state.writes import left
from ..capture.tracer import LOCK, Captured, capture
from ..codegen.graph.fast_math import algebra
from ..compile_log import CompileLog
from ..errors import Unsupported
from ..frontend.capture_ast import capture_rewritten
from ..frontend.operators import Outcome
from ..options import Settings
from ..runtime.frame_stack import roomy
from .build import larger, resolve
from .dump import dump
from .executable import Request, compiled_executable, eager_executable
from .specialisation import Check, Executable, Specialisation, leaves_without_tensors

Tensor = torch.Tensor
CARRIED = "a graph would repeat one call's value; keep it in a tensor, such as a buffer"


@contextlib.contextmanager
def unhooked() -> Iterator[None]:
    """Hide what is saved while capturing and differentiating from the caller's hooks: a checkpoint counts what a call
    saves.
    """
    if private.top_saved_tensors_default_hooks(True) is None:
        yield
        return
    with torch.autograd.graph.saved_tensors_hooks(lambda value: value, lambda value: value):
        yield


@roomy
@unhooked()
def specialise(
    fn: Callable,
    args: tuple,
    kwargs: dict,
    leaves: list[Any],
    settings: Settings,
    receiver: Any = None,
    symbols: Symbols | None = None,
) -> Specialisation:
    """Capture a call and compile it for the backend of its tensors; with `symbols`, for all sizes that pass their
    check.

    Raises:
        Unsupported: it cannot be captured, or not with symbols. CompileError: it cannot be compiled, and
            `settings.fullgraph` is set.
    """
    log, start = CompileLog(), time.perf_counter()
    if symbols is not None:
        refuse_symbols(symbols, settings, leaves)
    watched = () if receiver is None else (receiver,)
    captured = Capture(fn, args, kwargs, leaves, settings, watched, symbols)(log)
    guards = Guards(captured)
    tensors = [leaves[position] for position in captured.positions] + list(captured.lifted)
    backend = resolve(settings, tensors)
    log.record["capture"] = captured.graph
    dump("capture", captured.graph)
    log.spend("capture", (time.perf_counter() - start) * 1e3)
    plain = backend == "eager" or settings.jit_level == "O0"
    if plain and not settings.apart and not larger(captured.graph, settings.most_at_once):
        executable = eager_executable(captured, backend)
    else:
        executable = compiled_executable(Request(captured, tensors, settings, backend, symbols), log)
    check = where_same_memory(guards.lifted, captured, executable)
    if symbols is not None:
        refuse_sizes(executable, tensors, log)
        check = with_sizes(check, symbols)
        log.record["sizes"] = symbols.source()
    sized = (False,) * len(symbols.names if symbols is not None else ())
    return Specialisation(
        executable,
        check,
        log.close(),
        captured,
        guards,
        symbols,
        differentiable=tuple(tensor.requires_grad for tensor in tensors) + sized,
        pins=(receiver, leaves_without_tensors(leaves)),
    )


@dataclass(frozen=True, slots=True)
class Capture:
    """How a call is captured, once or, to see whether calls repeat, again."""

    fn: Callable
    args: tuple
    kwargs: dict
    leaves: list[Any]
    settings: Settings
    watched: tuple
    symbols: Symbols | None

    def __call__(self, log: CompileLog) -> Captured:
        """Capture the call, with its regions and symbols, and make of the graph what the options ask for."""
        settings = self.settings
        captured, control = self.trace(Regions if settings.regions and not whole(settings) else None, self.symbols)
        if captured.moving:
            refuse_moving(captured, self.leaves, lambda: self.trace()[0])
        if settings.fast_math:
            captured = replace(captured, graph=algebra(captured.graph))
        if settings.constants:
            captured = replace(captured, met=captured.lifted, lifted=constants(captured))
        log.effects += captured.effects
        log.control += control
        log.inlined += captured.regions.inlined if captured.regions else ()
        return captured

    def trace(
        self, regions: type[Regions] | None = None, symbols: Symbols | None = None
    ) -> tuple[Captured, list[Outcome]]:
        call = (self.fn, self.args, self.kwargs, self.settings.name, self.watched)
        if self.settings.capture_mode == "ast":
            return capture_rewritten(*call, regions, symbols)
        return capture(*call, regions=regions, symbols=symbols), []


def whole(settings: Settings) -> bool:
    """Whether something looks at, or differentiates, the graph as a whole."""
    return settings.fast_math or settings.constants or settings.apart


def refuse_symbols(symbols: Symbols, settings: Settings, leaves: list[Any]) -> None:
    """Refuse what holds for one shape, or for one value of a number, only.

    Raises:
        Unsupported: says which option asks for that.
    """
    if whole(settings):
        raise Unsupported("dynamic sizes", "fast_math, frozen constants and separate halves look at one shape")
    exact = settings.numerics == "eager" and settings.jit_level != "O0"
    if (
        symbols.scalars
        and exact
        and resolve(settings, [leaf for leaf in leaves if isinstance(leaf, Tensor)]) != "eager"
    ):
        reason = "numerics='eager' rounds as eager does, whose kernels choose by a number's value (x ** 2.0, x / 3.0)"
        raise Unsupported("dynamic numbers", reason)


def refuse_moving(captured: Captured, leaves: list[Any], again: Callable[[], Captured]) -> None:
    """Refuse a function that leaves other Python values at each call where the next one looks: each call would need a
    graph of its own.

    Captured `again`, as the second call would find things, it has to leave them as the first one did.

    Raises:
        Unsupported: it does not; names what it changes.
    """
    with LOCK, left(captured, [leaves[position] for position in captured.positions]):
        try:
            second = again()
        except Exception:  # then it is the second call that runs eagerly, or raises
            return
    if second.moving:
        change = second.moving[0]
        what = change.effect
        seen = id(change.holder) not in captured.recorder.functions and not isinstance(change.holder, deque)
        raise Unsupported(
            what.target, f"{what.action} by each call, and the next one computes with it: {CARRIED}", what.line, seen
        )


def where_same_memory(check: Check, captured: Captured, executable: Executable) -> Check:
    """The guards' check, and that the inputs share memory as they did, where that matters."""
    pattern, positions = executable.pattern, captured.positions
    if pattern is None:
        return check

    def lifted_where_same(leaves: list[Any]) -> list[Tensor] | None:
        lifted = check(leaves)
        same = lifted is not None and memory_pattern([leaves[position] for position in positions] + lifted) == pattern
        return lifted if same else None

    return lifted_where_same


def refuse_sizes(executable: Executable, tensors: list[Tensor], log: CompileLog) -> None:
    """Refuse to let a specialisation hold for many sizes where one shape alone could be compiled.

    Raises:
        Unsupported: it could not be compiled with symbols, or tensors share memory in a way that one shape alone tells.
    """
    if "error" in log.record:
        raise Unsupported("dynamic sizes", str(log.fallbacks[-1]))
    built = executable.built
    if built is not None and built.mutates and memory_pattern(tensors):
        raise Unsupported("dynamic sizes", "tensors that the function changes share memory")
    if built is not None and executable.backend != "eager":
        built.backward()  # now: a backward that cannot be compiled with symbols is still to be had for one shape


def with_sizes(check: Check, symbols: Symbols) -> Check:
    """The check of all sizes that the symbols take; they are the last inputs of the graph."""
    sizes_of = symbols.check()

    def lifted_with_sizes(leaves: list[Any]) -> list[Any] | None:
        sizes = sizes_of(leaves)
        inputs = None if sizes is None else check(leaves)
        return None if inputs is None else [*inputs, *sizes]  # type: ignore[misc]

    return lifted_with_sizes
