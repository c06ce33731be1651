"""One specialisation: a captured function, its guards, and what runs it on a backend.

In: a capture and the options of `jit`. Out: a `Specialisation`: `lifted(leaves)` says whether it still holds, `run(...)` runs it;
`record` keeps every stage for explain().

    >>> found = specialise(fn, args, kwargs, leaves, options)
    >>> sorted(found.record)
    ['backward', 'capture', 'forward', 'joint']
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from . import config
from .capture import tree
from .capture.constants import constants
from .capture.cut import Region
from .capture.guards import Guards, memory_pattern
from .capture.lines import refusal_lines
from .capture.reads import Effect
from .capture.regions import Regions
from .capture.symbols import Symbols
from .capture.trace import DATA_DEPENDENT, Captured, capture, explain_error
from .codegen.algebra import algebra
from .errors import CaptureError, CompileError, FusejitError, Unsupported
from .rewrites.capture import capture_rewritten
from .rewrites.control import Outcome
from .runtime.eager import eager

Tensor = torch.Tensor
BACKENDS = ("auto", "triton", "interpret", "eager")
LEVELS = ("O0", "O1", "O2", "O3")
MODES = ("ast", "trace", "bytecode")
NUMERICS = ("fast", "eager")


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of one jitted function (see `fusejit.jit` and `fusejit.trace`).

    `target`: a GPU architecture to compile for without one. `constants`: closed-over tensors keep the values that they have at
    capture. `apart`: forward and backward are two programs on every backend, also on "eager". `regions`: equal blocks are captured once.
    `dynamic`: see `fusejit.jit`.
    """

    capture_mode: str = "ast"
    jit_level: str = "O2"
    fullgraph: bool = False
    backend: str = "auto"
    numerics: str = "fast"
    name: str = ""
    target: str | None = None
    fast_math: bool = False
    constants: bool = False
    apart: bool = False
    regions: bool = True
    dynamic: bool | None = False


def check(name: str, value: Any, choices: tuple) -> None:
    """Refuse an option that is none of its choices, by listing them; True is not 1 here."""
    if not any(value is choice or type(value) is type(choice) and value == choice for choice in choices):
        raise ValueError(f"{name}={value!r}: choose one of {', '.join(map(repr, choices))}")


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
        why: what made it necessary (see capture/reasons.py); through: what reads the function by its bytecode instead, or None.
        inlined: blocks that were captured in place though marked or repeated, each with the reason.
        body: the graph as a function of its inputs, given one by one where `spread`, as a list that it may clear otherwise; what the hot
            path calls (runtime/bind.py), None where that leaves the call alone. result: from the body's results to the user's.
        pattern: how the inputs share memory, where that matters. unbound: why the hot path leaves it alone.
        dynamic: what is said of its sizes: which are symbols and why, which could not be.
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
    dynamic: list[str] = field(default_factory=list)
    unbound: str = ""

    @property
    def backward(self) -> Any:
        """The backward Program (compiled now if no backward has run yet), or None."""
        if self.built is None or self.backend == "eager":
            return None
        start = time.perf_counter()
        found = self.built.backward()
        self.compile_ms.setdefault("backward", (time.perf_counter() - start) * 1e3)
        return found

    @property
    def stages_ms(self) -> dict[str, float]:
        """Milliseconds of capture, joint, forward and backward, and of their parts: "forward.lower", "backward.kernels"."""
        found = dict(self.compile_ms)
        for half, program in (("forward", self.forward), ("backward", self.backward)):
            found |= {f"{half}.{stage}": ms for stage, ms in getattr(program, "compile_ms", {}).items()}
        return found


@contextlib.contextmanager
def unhooked() -> Iterator[None]:
    """Hide what is saved while capturing and differentiating from the caller's hooks: a checkpoint counts what a call saves."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        yield
        return
    with torch.autograd.graph.saved_tensors_hooks(lambda value: value, lambda value: value):
        yield


@unhooked()
def specialise(
    fn: Callable, args: tuple, kwargs: dict, leaves: list[Any], settings: Settings, receiver: Any = None, symbols: Symbols | None = None
) -> Specialisation:
    """Capture a call and compile it for the backend of its tensors; with `symbols`, for all sizes that pass their check.

    Raises:
        Unsupported: it cannot be captured, or not with symbols. CompileError: it cannot be compiled, and `settings.fullgraph` is set.
    """
    start = time.perf_counter()
    watch = () if receiver is None else (receiver,)
    control: list[Outcome] = []
    whole = settings.fast_math or settings.constants or settings.apart  # what looks at, or differentiates, the graph as a whole
    if symbols is not None and whole:
        raise Unsupported("dynamic sizes", "fast_math, frozen constants and separate halves look at one shape")
    regions = Regions if settings.regions and not whole and symbols is None else None
    if settings.capture_mode == "ast":
        captured, control = capture_rewritten(fn, args, kwargs, settings.name, watch, regions, symbols)
    else:
        captured = capture(fn, args, kwargs, settings.name, watch, regions=regions, symbols=symbols)
    if settings.fast_math:
        captured.graph = algebra(captured.graph)
    if settings.constants:
        captured.met, captured.lifted = captured.lifted, constants(captured)
    guards = Guards(captured)
    tensors = [leaves[position] for position in captured.positions] + list(captured.lifted)
    found = Specialisation(
        resolve(settings, tensors), guards.lifted, captured=captured, guards=guards, pins=(receiver, leaves_without_tensors(leaves))
    )
    found.effects, found.control = list(captured.effects), control
    found.inlined += captured.regions.inlined if captured.regions else ()
    found.differentiable = tuple(tensor.requires_grad for tensor in tensors) + (False,) * len(symbols.names if symbols is not None else ())
    found.record["capture"] = captured.graph
    found.compile_ms["capture"] = (time.perf_counter() - start) * 1e3
    positions, unflatten = captured.positions, result_builder(captured)
    if (found.backend == "eager" or settings.jit_level == "O0") and not settings.apart:
        set_eager_run(found, eager(captured.graph), positions, unflatten)
    else:
        compile_into(found, tensors, settings, None if symbols is None else symbols.inputs(tensors))
    if symbols is not None:
        hold_for_sizes(found, symbols, tensors)
    return found


def hold_for_sizes(found: Specialisation, symbols: Symbols, tensors: list[Tensor]) -> None:
    """Let a specialisation hold for all sizes that its symbols' check takes; they are the last inputs of its graph.

    Raises:
        Unsupported: it could not be compiled with symbols, or tensors share memory in a way that one shape alone tells.
    """
    if "error" in found.record:
        raise Unsupported("dynamic sizes", str(found.fallbacks[-1]))
    if found.built is not None and found.built.mutates and memory_pattern(tensors):
        raise Unsupported("dynamic sizes", "tensors that the function changes share memory")
    check, lifted = symbols.check(), found.lifted

    def with_sizes(leaves: list[Any]) -> list[Any] | None:
        sizes = check(leaves)
        inputs = None if sizes is None else lifted(leaves)
        return None if inputs is None else [*inputs, *sizes]  # type: ignore[misc]

    found.lifted = with_sizes
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
    if captured.structure is None and captured.outputs == (0,):
        return lambda results: results[0]
    kind = captured.structure[0] if captured.structure is not None else None
    flat = kind in (tuple, list) and all(child is None for child in captured.structure[1])
    if flat and captured.outputs == tuple(range(len(captured.graph.graph.output_node().args[0]))):  # type: ignore[arg-type]
        return kind  # type: ignore[return-value]
    return captured.unflatten


def set_eager_run(found: Specialisation, run: Callable, positions: tuple[int, ...], unflatten: Callable) -> None:
    def runner(leaves: list[Any], lifted: list[Tensor]) -> Any:
        return unflatten(run(*[leaves[position] for position in positions], *lifted))

    found.run, found.body, found.spread, found.result = runner, run, True, unflatten


def compile_into(found: Specialisation, tensors: list[Tensor], settings: Settings, fakes: list[Any] | None = None) -> None:
    """Compile the captured graph; on failure leave the captured graph running eagerly, recorded. `fakes` have the symbolic sizes."""
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
    found.forward = None if found.backend == "eager" else built.forward
    found.record.update(built.graphs)
    found.fallbacks += [Fallback(op, reason) for op, reason in built.notes]
    pattern = memory_pattern(tensors) if built.mutates else None
    run = built.run

    def runner(leaves: list[Any], lifted: list[Tensor]) -> Any:
        inputs = [leaves[position] for position in positions]
        inputs += lifted
        return unflatten(run(inputs))

    found.run, found.result, found.pattern = runner, unflatten, pattern
    found.body, found.spread = built.body()
    if pattern is not None:
        check = found.lifted

        def lifted_where_same(leaves: list[Any]) -> list[Tensor] | None:
            lifted = check(leaves)
            same = lifted is not None and memory_pattern([leaves[position] for position in positions] + lifted) == pattern
            return lifted if same else None

        found.lifted = lifted_where_same


def build_programs(found: Specialisation, graph: torch.fx.GraphModule, tensors: Sequence[Tensor], settings: Settings) -> Any:
    """Trace the joint graph and compile it with fusejit's own back end."""
    from .autodiff.attention import retarget_attention
    from .autodiff.compose import compose
    from .autodiff.joint import build
    from .autodiff.region import Toolchain, call_regions
    from .codegen import decompose, random
    from .compile import Options, compile_graph, dump

    prepare_interpreter(found.backend)
    plain = found.backend == "eager" or settings.jit_level == "O0"
    if plain:
        found.backend = "eager"
    options = Options(backend=found.backend, jit_level=settings.jit_level, numerics=settings.numerics, target=settings.target)

    def compiler(module: torch.fx.GraphModule, inputs: Sequence[Any], stage: str) -> Any:
        start = time.perf_counter()

        def record(name: str, value: Any) -> None:
            found.record[f"{stage}.{name}"] = value
            dump(f"{stage}.{name}", value)

        program = eager_program(module) if plain else compile_graph(module, inputs, options, record=record)
        spent = (time.perf_counter() - start) * 1e3
        found.compile_ms[stage] = found.compile_ms.get(stage, 0.0) + spent
        return program

    start = time.perf_counter()
    elsewhere = settings.target is not None and not any(tensor.is_cuda for tensor in tensors)
    rewrite = retarget_attention if elsewhere else lambda module: module
    flavour = "/".join(map(str, (options.backend, options.jit_level, options.numerics, options.target, plain)))
    decompositions = {} if plain else random.with_draws(decompose.table(), settings.numerics)
    tools = Toolchain(region_compiler(options), decompositions, rewrite, flavour)
    graph = rewrite(graph)
    calls = any(isinstance(node.target, Region) for node in graph.graph.nodes)
    built = compose(graph, tensors, tools, compiler) if calls else None
    if built is None:
        graph, regions = call_regions(graph, tools)
        built = build(graph, tensors, compiler, tools.decompositions)
        built.regions = regions
    found.inlined += tools.notes
    found.compile_ms["regions"] = tools.spent_ms
    found.compile_ms["joint"] = (time.perf_counter() - start) * 1e3 - sum(
        found.compile_ms.get(stage, 0.0) for stage in ("forward", "backward", "regions")
    )
    return built


def eager_program(module: torch.fx.GraphModule) -> Callable[[list[Any]], Sequence[Any]]:
    """A functional graph as something that is called like a Program, and runs op by op."""
    run = eager(module)

    def program(inputs: list[Any]) -> Sequence[Any]:
        given = tuple(inputs)
        inputs.clear()
        return run(*given)

    return program


def region_compiler(options: Any) -> Callable[[torch.fx.GraphModule, Sequence[Any], str], Any]:
    """The compiler of regions, which outlive the specialisation that needs them first and therefore know nothing of it."""
    from .compile import compile_graph, dump

    def compiler(module: torch.fx.GraphModule, inputs: Sequence[Any], stage: str) -> Any:
        return compile_graph(module, inputs, options, record=lambda name, value: dump(f"{stage}.{name}", value))

    return compiler


def fail_compile(found: Specialisation, error: Exception, settings: Settings) -> None:
    """Record a failed compilation, or raise it where the user wants no fallback."""
    if type(error).__name__ in DATA_DEPENDENT:  # a gradient or a decomposition can depend on values where the function does not
        error = explain_error(error)  # type: ignore[assignment]
    if isinstance(error, Unsupported):
        fallback = Fallback(error.op, error.reason, error.line)
    else:
        fallback = Fallback(f"compiling for backend {found.backend!r}", f"{type(error).__name__}: {error}")
    if isinstance(error, FusejitError) and getattr(error, "final", False):
        raise error
    if settings.fullgraph or config.read("strict"):
        if isinstance(error, FusejitError):
            raise error
        raise CompileError(f"cannot compile {settings.name!r}: {fallback.reason}") from error
    found.fallbacks.append(fallback)
    found.backend = "eager"
    found.record["error"] = error


class BackendError(FusejitError):
    """A backend that cannot run here at all; never a fallback."""

    final = True


def resolve(settings: Settings, tensors: Sequence[Tensor]) -> str:
    """Decide the backend of a call from the option, the environment and the tensors' devices."""
    backend = settings.backend
    if backend == "auto":
        backend = config.read("backend")
        if backend not in BACKENDS:
            raise ValueError(f"FUSEJIT_BACKEND={backend!r}: choose one of {', '.join(BACKENDS)}")
    if backend == "auto":
        backend = "triton" if any(tensor.is_cuda for tensor in tensors) else "eager"
    if settings.target is None and tensors and backend == "triton" and not any(tensor.is_cuda for tensor in tensors):
        raise BackendError(
            "backend='triton' needs CUDA tensors, and all of these are on the CPU: use backend='auto' (eager on the CPU), "
            "'interpret' (the same kernels, slowly, on the CPU), or fusejit.compile_for(...) to compile without a GPU"
        )
    return backend


def check_devices(backend: str, tensors: Sequence[Tensor]) -> None:
    """Refuse tensors of several devices in one graph, Python-number-like CPU tensors aside."""
    devices = {tensor.device for tensor in tensors if tensor.dim() or tensor.device.type != "cpu"}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise Unsupported("tensors on several devices", f"{names}: one graph runs on one device")
    if backend == "interpret" and any(device.type != "cpu" for device in devices):
        raise BackendError("backend='interpret' runs on CPU tensors: use backend='triton' for CUDA ones")


def prepare_interpreter(backend: str) -> None:
    """Switch Triton's interpreter on, which works only before Triton is imported."""
    if backend != "interpret" or os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        return
    if "triton" in sys.modules:
        raise BackendError(
            "backend='interpret' needs TRITON_INTERPRET=1 before triton is imported, and it is imported already: "
            "set TRITON_INTERPRET=1 in the environment of the process"
        )
    os.environ["TRITON_INTERPRET"] = "1"


@dataclass(frozen=True, slots=True)
class Programs:
    """What `compile_for` returns: the forward Program and, where something requires grad, the backward one.

    Attributes:
        kernels: those of both; `.ptx`, `.cubin`, `.n_regs`, `.n_spills`, `.shared` and `.wide_loads` of each are there.
        source: of both, as one Python text. compile_ms: milliseconds by stage. specialisation: the graphs of each stage.
    """

    forward: Any
    backward: Any
    specialisation: Specialisation

    @property
    def compile_ms(self) -> dict[str, float]:
        return self.specialisation.stages_ms

    @property
    def kernels(self) -> list[Any]:
        halves = [program for program in (self.forward, self.backward) if program is not None]
        return [kernel for half in halves for program in (half, *half.called) for kernel in program.kernels]

    @property
    def source(self) -> str:
        return "\n\n".join(program.source for program in (self.forward, self.backward) if program is not None)


def compile_for(
    fn: Callable,
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    *,
    target: str = "sm_90",
    jit_level: str = "O2",
    numerics: str = "fast",
    name: str | None = None,
) -> Programs:
    """Compile a function for a GPU without running it, and without the GPU.

    Args:
        fn: function or `nn.Module`; args, kwargs: of one call. Tensors may be on the CPU, or fake; their values do not matter.
        target: the GPU's architecture: "sm_80", "sm_90", ...

    Raises:
        CaptureError: the function cannot be captured. CompileError: a kernel cannot be compiled.
    """
    fn = getattr(fn, "__wrapped__", fn) if hasattr(type(fn), "explain") else fn  # of a jitted function, the original
    name = name or str(getattr(fn, "__qualname__", type(fn).__name__))
    settings = Settings(jit_level=jit_level, fullgraph=True, backend="triton", numerics=numerics, name=name, target=target)
    leaves: list[Any] = []
    tree.flatten((tuple(args), kwargs or {}), leaves)
    try:
        found = specialise(fn, tuple(args), kwargs or {}, leaves, settings)
    except Unsupported as error:
        raise CaptureError(f"cannot capture {name!r}: {error}") from error
    return Programs(found.forward, found.backward, found)
