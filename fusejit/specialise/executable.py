"""Executable: what runs a captured graph on its backend: its two halves compiled, or op by op.

In: a capture and its real inputs. Out: `Executable`; what was compiled and what was not is noted in the log.

    >>> eager_executable(captured, "eager").run(leaves, lifted)
    tensor([2., 2., 2.])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import knobs
from ..capture.memory_pattern import memory_pattern
from ..capture.refused import DATA_DEPENDENT, explain_error
from ..capture.shapes.symbols import Symbols
from ..capture.tracer import Captured
from ..compile_log import CompileLog, Fallback
from ..errors import CompileError, FusejitError, Unsupported
from ..options import Settings
from ..runtime.eager import eager
from ..runtime.prefer_eager import choose, measurable
from .build import build_programs, check_devices, effective, prepare_interpreter
from .dump import dump
from .specialisation import Executable

Tensor = torch.Tensor
TINY = "a program of one or two launches"


@dataclass(frozen=True, slots=True)
class Request:
    """A capture that is to be compiled: for which tensors, sizes and options, on which backend."""

    captured: Captured
    tensors: list[Tensor]
    settings: Settings
    backend: str
    symbols: Symbols | None

    @property
    def inputs(self) -> Sequence[Any]:
        """What the graph is compiled for: the tensors, or fakes that have the symbolic sizes."""
        return self.tensors if self.symbols is None else self.symbols.inputs(self.tensors)


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


def eager_executable(captured: Captured, backend: str) -> Executable:
    """Run the captured graph op by op."""
    body, result, positions = eager(captured.graph), result_builder(captured), captured.positions

    def run(leaves: list[Any], lifted: list[Any]) -> Any:
        return result(body(*[leaves[position] for position in positions], *lifted))

    return Executable(backend, run, body, True, result)


def compiled_executable(request: Request, log: CompileLog) -> Executable:
    """Compile the captured graph; on failure run it op by op, and note why.

    Raises:
        CompileError: it cannot be compiled, and the options allow nothing else.
    """
    captured, settings, backend = request.captured, request.settings, request.backend
    try:
        check_devices(backend, request.tensors)
        prepare_interpreter(backend)
        backend = effective(backend, settings)
        built = build_programs(captured.graph, request.inputs, settings, backend, log)
    except Exception as error:
        fail_compile(error, settings, backend, log)
        return eager_executable(captured, "eager")
    log.record.update(built.graphs)
    for stage, graph in built.graphs.items():
        dump(stage, graph)
    log.fallbacks += [Fallback(op, reason) for op, reason in built.notes]
    forward = None if backend == "eager" else getattr(built.forward, "first", built.forward)
    quicker = settings.jit_level == "O3" and request.symbols is None and not knobs.read("strict")
    if quicker and measurable(forward, request.tensors) and prefers_eager(request, built, forward, log):
        return eager_executable(captured, "eager")
    compiled, result, positions = built.run, result_builder(captured), captured.positions

    def run(leaves: list[Any], lifted: list[Any]) -> Any:
        inputs = [leaves[position] for position in positions]
        inputs += lifted
        return result(compiled(inputs))

    body, spread = built.body()
    pattern = memory_pattern(request.tensors) if built.mutates else None
    return Executable(backend, run, body, spread, result, pattern, built, forward)


def prefers_eager(request: Request, built: Any, program: Any, log: CompileLog) -> bool:
    """Whether a tiny Program, measured against the captured graph op by op, is the slower one (see
    runtime/prefer_eager.py).
    """
    run, compiled, tensors = eager(request.captured.graph), built.run, request.tensors
    choice = choose(tuple(k.name for k in program.kernels), lambda: compiled(list(tensors)), lambda: run(*tensors))
    if choice.eager:
        log.fallbacks.append(Fallback(TINY, choice.why))
    else:
        program = getattr(program, "program", program)
        program.tuned = (*program.tuned, f"the whole: {choice.why}")
    return choice.eager


def fail_compile(error: Exception, settings: Settings, backend: str, log: CompileLog) -> None:
    """Note a failed compilation, or raise it where the user wants no fallback."""
    if type(error).__name__ in DATA_DEPENDENT:  # of a gradient or a decomposition, where the function itself has none
        error = explain_error(error)  # type: ignore[assignment]
    if isinstance(error, Unsupported):
        fallback = Fallback(error.op, error.reason, error.line)
    else:
        fallback = Fallback(f"compiling for backend {backend!r}", f"{type(error).__name__}: {error}")
    if isinstance(error, FusejitError) and getattr(error, "final", False):
        raise error
    if settings.fullgraph or knobs.read("strict"):
        if isinstance(error, FusejitError):
            raise error
        raise CompileError(f"cannot compile {settings.name!r}: {fallback.reason}") from error
    log.fallbacks.append(fallback)
    log.record["error"] = error
