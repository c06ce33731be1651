"""One specialisation: a captured function, its guards, and what runs it on a backend.

In: a capture and the options of `jit`. Out: a `Specialisation`: `lifted(leaves)` says whether it still holds,
`run(...)` runs it;
`record` keeps every stage for explain().

    >>> found = specialise(fn, args, kwargs, leaves, options)
    >>> sorted(found.record)
    ['backward', 'capture', 'forward', 'joint']
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import knobs
from ..capture.freeze import constants
from ..capture.guards.guards import Guards
from ..capture.memory_pattern import memory_pattern
from ..capture.refused import DATA_DEPENDENT, explain_error
from ..capture.regions.detect import Regions
from ..capture.shapes.symbols import Symbols
from ..capture.source_lines import refusal_lines
from ..capture.state.reads import Effect
from ..capture.state.writes import left
from ..capture.tracer import LOCK, Captured, capture
from ..codegen.graph.fast_math import algebra
from ..errors import CaptureError, CompileError, FusejitError, Unsupported
from ..frontend.capture_ast import capture_rewritten
from ..frontend.operators import Outcome
from ..options import Settings
from ..runtime.eager import eager
from ..runtime.frame_stack import roomy
from ..runtime.prefer_eager import choose, measurable
from .build import build_programs, check_devices, larger, resolve
from .dump import dump

Tensor = torch.Tensor
CARRIED = "a graph would repeat one call's value; keep it in a tensor, such as a buffer"
TINY = "a program of one or two launches"


@dataclass(frozen=True, slots=True)
class Fallback:
    """Something that runs in eager (or through torch's own wrappers) instead of compiled, and why."""

    op: str
    reason: str
    line: str = ""

    def __str__(self) -> str:
        return f"{self.op}: {self.reason}" + (f" ({self.line})" if self.line else "")


@dataclass(slots=True)
class Specialisation:
    """A captured and compiled function for one kind of call.

    Attributes:
        run: (leaves, lifted tensors) to the function's result; None where the function runs as plain eager Python.
        lifted: the guards' check: leaves to lifted tensors, or None.
        backend: what runs it; record: stage name to value; compile_ms: milliseconds by stage.
        forward: the forward Program, or None; fallbacks, effects, control: see there.
        differentiable: for each input of the graph, whether it requires grad.
        why: what made it necessary (see capture/guards/recompile_reasons.py); through: what reads the function by its
            bytecode instead, or
        None. inlined: blocks that were captured in place though marked or repeated, each with the reason.
        body: the graph as a function of its inputs, given one by one where `spread`, as a list that it may clear
            otherwise; what the hot
            path calls (runtime/fast_path.py), None where that leaves the call alone. result: from the body's results to
            the user's.
        rewrites: what was computed another way than written, and why.
        pattern: how the inputs share memory, where that matters. entry: of the hot path; unbound: why that leaves it
        alone. dynamic: what is said of its sizes: which are symbols and why, which could not be; symbols: those, or
            None.
    """

    backend: str
    lifted: Callable[[list[Any]], list[Tensor] | None]
    run: Callable[[list[Any], list[Tensor]], Any] | None = None
    record: dict[str, Any] = field(default_factory=dict)
    compile_ms: dict[str, float] = field(default_factory=dict)
    fallbacks: list[Fallback] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)
    control: list[Outcome] = field(default_factory=list)
    forward: Any = None
    built: Any = None
    captured: Captured | None = None
    guards: Guards | None = None
    pins: Any = None
    differentiable: tuple[bool, ...] = ()
    why: str = ""
    through: Any = None
    inlined: list[tuple[str, str]] = field(default_factory=list)
    body: Callable[..., Any] | None = None
    spread: bool = False
    result: Callable[[Sequence[Any]], Any] | None = None
    pattern: tuple | None = None
    entry: Any = None
    dynamic: list[str] = field(default_factory=list)
    symbols: Symbols | None = None
    unbound: str = ""
    rewrites: list[str] = field(default_factory=list)

    @property
    def backward(self) -> Any:
        """The backward Program (compiled now if no backward has run yet), or None."""
        if self.built is None or self.backend == "eager":
            return None
        start = time.perf_counter()
        found = self.built.backward()
        self.compile_ms.setdefault("backward", (time.perf_counter() - start) * 1e3)
        return getattr(found, "first", found)

    @property
    def stages_ms(self) -> dict[str, float]:
        """Milliseconds of capture, joint, forward and backward, and of their parts: "forward.lower",
        "backward.kernels".
        """
        found = dict(self.compile_ms)
        for half, program in (("forward", self.forward), ("backward", self.backward)):
            found |= {f"{half}.{stage}": ms for stage, ms in getattr(program, "compile_ms", {}).items()}
        return found


@contextlib.contextmanager
def unhooked() -> Iterator[None]:
    """Hide what is saved while capturing and differentiating from the caller's hooks: a checkpoint counts what a call
    saves.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
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
    start = time.perf_counter()
    watch = () if receiver is None else (receiver,)
    control: list[Outcome] = []
    whole = (
        settings.fast_math or settings.constants or settings.apart
    )  # what looks at, or differentiates, the graph as a whole
    if symbols is not None:
        refuse_symbols(symbols, settings, whole, leaves)
    regions = Regions if settings.regions and not whole else None
    given = (fn, args, kwargs, settings.name, watch)
    if settings.capture_mode == "ast":
        captured, control = capture_rewritten(*given, regions, symbols)
    else:
        captured = capture(*given, regions=regions, symbols=symbols)
    if captured.moving:
        refuse_moving(
            captured,
            leaves,
            lambda: capture_rewritten(*given)[0] if settings.capture_mode == "ast" else capture(*given),
        )
    if settings.fast_math:
        captured.graph = algebra(captured.graph)
    if settings.constants:
        captured.met, captured.lifted = captured.lifted, constants(captured)
    guards = Guards(captured)
    tensors = [leaves[position] for position in captured.positions] + list(captured.lifted)
    found = Specialisation(
        resolve(settings, tensors),
        guards.lifted,
        captured=captured,
        guards=guards,
        pins=(receiver, leaves_without_tensors(leaves)),
    )
    found.effects, found.control = list(captured.effects), control
    found.inlined += captured.regions.inlined if captured.regions else ()
    found.differentiable = tuple(tensor.requires_grad for tensor in tensors) + (False,) * len(
        symbols.names if symbols is not None else ()
    )
    found.record["capture"] = captured.graph
    dump("capture", captured.graph)
    found.compile_ms["capture"] = (time.perf_counter() - start) * 1e3
    positions, unflatten = captured.positions, result_builder(captured)
    plain = found.backend == "eager" or settings.jit_level == "O0"
    if plain and not settings.apart and not larger(captured.graph, settings.most_at_once):
        set_eager_run(found, eager(captured.graph), positions, unflatten)
    else:
        compile_into(found, tensors, settings, None if symbols is None else symbols.inputs(tensors))
    if symbols is not None:
        hold_for_sizes(found, symbols, tensors)
    return found


def refuse_symbols(symbols: Symbols, settings: Settings, whole: bool, leaves: list[Any]) -> None:
    """Refuse what holds for one shape, or for one value of a number, only.

    Raises:
        Unsupported: says which option asks for that.
    """
    if whole:
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


def hold_for_sizes(found: Specialisation, symbols: Symbols, tensors: list[Tensor]) -> None:
    """Let a specialisation hold for all sizes that its symbols' check takes; they are the last inputs of its graph.

    Raises:
        Unsupported: it could not be compiled with symbols, or tensors share memory in a way that one shape alone tells.
    """
    if "error" in found.record:
        raise Unsupported("dynamic sizes", str(found.fallbacks[-1]))
    if found.built is not None and found.built.mutates and memory_pattern(tensors):
        raise Unsupported("dynamic sizes", "tensors that the function changes share memory")
    _ = found.backward  # now: a backward that cannot be compiled with symbols is still to be had for one shape
    check, lifted = symbols.check(), found.lifted

    def with_sizes(leaves: list[Any]) -> list[Any] | None:
        sizes = check(leaves)
        inputs = None if sizes is None else lifted(leaves)
        return None if inputs is None else [*inputs, *sizes]  # type: ignore[misc]

    found.lifted, found.symbols = with_sizes, symbols
    found.record["sizes"] = symbols.source()


def eager_specialisation(error: Unsupported, name: str, receiver: Any, leaves: list[Any]) -> Specialisation:
    """What remembers that a call runs as plain Python, guarded by what the failed capture had read."""
    lifted: Callable[[list[Any]], Any] = lambda leaves: []  # noqa: E731
    recorder, guards = getattr(error, "recorder", None), None
    if recorder is not None:
        empty = torch.fx.GraphModule(torch.nn.Module(), torch.fx.Graph())
        guards = Guards(Captured(empty, (), (), (), None, [], [], recorder, name))
        lifted = guards.lifted
    found = Specialisation("eager", lifted, guards=guards, pins=(receiver, leaves_without_tensors(leaves)))
    found.fallbacks.append(Fallback(error.op, error.reason, " → ".join(refusal_lines(error))))
    return found


def refusal(error: Unsupported, name: str) -> BaseException:
    """The error that `fullgraph=True` raises: torch's own where the call itself is wrong, `CaptureError` otherwise."""
    cause = error.__cause__
    if cause is not None and type(cause) in (RuntimeError, IndexError, TypeError, ValueError):
        if error.line:
            cause.add_note(f"while capturing {name!r} at {' → '.join(refusal_lines(error))}")
        return cause
    lines = refusal_lines(error)
    where = f" ({' → '.join(lines)})" if lines else ""
    made = CaptureError(f"cannot capture {name!r}{where}: {error.op}: {error.reason}", lines)
    made.__cause__ = error
    return made


def leaves_without_tensors(leaves: list[Any]) -> list[Any]:
    """The Python arguments, which the key knows by identity and which must therefore stay alive."""
    return [leaf for leaf in leaves if not isinstance(leaf, Tensor)]


def result_builder(captured: Captured) -> Callable[[Sequence[Any]], Any]:
    """The function from the graph's outputs to the user's result; the common shapes without a walk."""
    if captured.bare:
        return lambda results: results[0]
    if not captured.plain:
        return captured.unflatten
    kind = captured.structure[0] if captured.structure is not None else None
    flat = kind in (tuple, list) and all(child is None for child in captured.structure[1])
    if flat and captured.outputs == tuple(range(len(captured.graph.graph.output_node().args[0]))):  # type: ignore[arg-type]
        return kind  # type: ignore[return-value]
    return captured.unflatten


def set_eager_run(found: Specialisation, run: Callable, positions: tuple[int, ...], unflatten: Callable) -> None:
    def runner(leaves: list[Any], lifted: list[Tensor]) -> Any:
        return unflatten(run(*[leaves[position] for position in positions], *lifted))

    found.run, found.body, found.spread, found.result = runner, run, True, unflatten


def compile_into(
    found: Specialisation, tensors: list[Tensor], settings: Settings, fakes: list[Any] | None = None
) -> None:
    """Compile the captured graph; on failure leave the captured graph running eagerly, recorded. `fakes` have the
    symbolic sizes.
    """
    captured = found.captured
    assert captured is not None
    positions, unflatten = captured.positions, result_builder(captured)
    try:
        check_devices(found.backend, tensors)
        found.built = built = build_programs(found, captured.graph, tensors if fakes is None else fakes, settings)
    except Exception as error:
        fail_compile(found, error, settings)
        set_eager_run(found, eager(captured.graph), positions, unflatten)
        return
    found.forward = None if found.backend == "eager" else getattr(built.forward, "first", built.forward)
    found.record.update(built.graphs)
    for stage, graph in built.graphs.items():
        dump(stage, graph)
    found.fallbacks += [Fallback(op, reason) for op, reason in built.notes]
    pattern = memory_pattern(tensors) if built.mutates else None
    run = built.run

    def runner(leaves: list[Any], lifted: list[Tensor]) -> Any:
        inputs = [leaves[position] for position in positions]
        inputs += lifted
        return unflatten(run(inputs))

    found.run, found.result, found.pattern = runner, unflatten, pattern
    found.body, found.spread = built.body()
    if settings.jit_level == "O3" and fakes is None and not knobs.read("strict") and measurable(found.forward, tensors):
        keep_quicker(found, tensors, positions, unflatten)
    if pattern is not None:
        check = found.lifted

        def lifted_where_same(leaves: list[Any]) -> list[Tensor] | None:
            lifted = check(leaves)
            same = (
                lifted is not None and memory_pattern([leaves[position] for position in positions] + lifted) == pattern
            )
            return lifted if same else None

        found.lifted = lifted_where_same


def keep_quicker(found: Specialisation, tensors: list[Tensor], positions: tuple[int, ...], unflatten: Callable) -> None:
    """Measure a tiny Program against the captured graph in eager, and keep that where it is quicker (see
    runtime/prefer_eager.py).
    """
    assert found.captured is not None
    program, run, compiled = found.forward, eager(found.captured.graph), found.built.run
    choice = choose(tuple(k.name for k in program.kernels), lambda: compiled(list(tensors)), lambda: run(*tensors))
    if choice.eager:
        set_eager_run(found, run, positions, unflatten)
        found.backend, found.forward, found.built, found.pattern = "eager", None, None, None
        found.fallbacks.append(Fallback(TINY, choice.why))
    else:
        program = getattr(program, "program", program)
        program.tuned = (*program.tuned, f"the whole: {choice.why}")


def fail_compile(found: Specialisation, error: Exception, settings: Settings) -> None:
    """Record a failed compilation, or raise it where the user wants no fallback."""
    if (
        type(error).__name__ in DATA_DEPENDENT
    ):  # a gradient or a decomposition can depend on values where the function does not
        error = explain_error(error)  # type: ignore[assignment]
    if isinstance(error, Unsupported):
        fallback = Fallback(error.op, error.reason, error.line)
    else:
        fallback = Fallback(f"compiling for backend {found.backend!r}", f"{type(error).__name__}: {error}")
    if isinstance(error, FusejitError) and getattr(error, "final", False):
        raise error
    if settings.fullgraph or knobs.read("strict"):
        if isinstance(error, FusejitError):
            raise error
        raise CompileError(f"cannot compile {settings.name!r}: {fallback.reason}") from error
    found.fallbacks.append(fallback)
    found.backend = "eager"
    found.record["error"] = error
