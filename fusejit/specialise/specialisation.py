"""One specialisation: a captured function, the guards under which it holds, what runs it, and what is said of it.

In: what `specialise` captured and built. Out: frozen values: an `Executable`, and the `Specialisation` that holds it.

    >>> lifted = specialisation.lifted(leaves)          # None where it does not hold for a call
    >>> specialisation.run(leaves, lifted)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ..capture.guards.guards import Guards
from ..capture.shapes.symbols import Symbols
from ..capture.source_lines import refusal_lines
from ..capture.tracer import Captured
from ..compile_log import Fallback, Notes
from ..errors import CaptureError, Unsupported

if TYPE_CHECKING:
    from ..autodiff.built import Built
    from ..codegen.emit.program import Program

Tensor = torch.Tensor
Check = Callable[[list[Any]], list[Any] | None]
"""From a call's leaves to the tensors and sizes that the graph takes besides; None where the graph does not hold."""


@dataclass(frozen=True, slots=True, eq=False)
class Executable:
    """What runs a captured graph.

    Attributes:
        backend: what it runs on.
        run: (leaves, lifted tensors) to the function's result; None where the function runs as plain eager Python.
        body: the graph as a function of its inputs; None where the hot path (runtime/fast_path.py) leaves it alone.
        spread: `body` takes its inputs one by one, and not as one list that it may clear.
        result: from the body's results to the function's.
        pattern: how the inputs share memory, where that matters.
        built: the graph's two halves, differentiated; None where the graph runs eagerly. forward: its forward Program.
    """

    backend: str
    run: Callable[[list[Any], list[Any]], Any] | None = None
    body: Callable[..., Any] | None = None
    spread: bool = False
    result: Callable[[Sequence[Any]], Any] | None = None
    pattern: tuple | None = None
    built: Built | None = None
    forward: Program | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Specialisation:
    """A captured and compiled function for one kind of call.

    Attributes:
        executable: what runs it. lifted: the check of its guards, its sizes and its shared memory.
        notes: what is said of it; `explained` adds what was noted since, when a backward was compiled.
        captured, guards: None where the capture was refused.
        symbols: the sizes that vary, or None. resized: which change of size made it necessary, or "".
        differentiable: for each input of the graph, whether it requires grad.
        pins: objects that the key knows by identity, and which therefore stay alive.
    """

    executable: Executable
    lifted: Check
    notes: Notes
    captured: Captured | None = None
    guards: Guards | None = None
    symbols: Symbols | None = None
    resized: str = ""
    differentiable: tuple[bool, ...] = ()
    pins: tuple[Any, ...] = ()

    def noting(self, *fallbacks: Fallback, dynamic: Sequence[str] = ()) -> Specialisation:
        """The same with more fallbacks, and more said of its sizes."""
        return replace(self, notes=self.notes + Notes(fallbacks=fallbacks, dynamic=tuple(dynamic)))

    @property
    def backend(self) -> str:
        return self.executable.backend

    @property
    def run(self) -> Callable[[list[Any], list[Any]], Any] | None:
        return self.executable.run

    @property
    def built(self) -> Built | None:
        return self.executable.built

    @property
    def forward(self) -> Program | None:
        return self.executable.forward

    @property
    def backward(self) -> Program | None:
        """The backward Program (compiled now if no backward has run yet), or None."""
        if self.built is None or self.backend == "eager":
            return None
        program = self.built.backward()
        return getattr(program, "first", program)

    @property
    def explained(self) -> Notes:
        """The notes, with those of Programs that were compiled since."""
        return self.notes if self.built is None else self.notes + self.built.log.notes()

    @property
    def record(self) -> Mapping[str, Any]:
        return self.explained.record

    @property
    def fallbacks(self) -> tuple[Fallback, ...]:
        return self.notes.fallbacks

    @property
    def effects(self) -> tuple[Any, ...]:
        return self.notes.effects

    @property
    def control(self) -> tuple[Any, ...]:
        return self.notes.control

    @property
    def dynamic(self) -> tuple[str, ...]:
        return self.explained.dynamic

    @property
    def compile_ms(self) -> dict[str, float]:
        """Milliseconds by stage."""
        spent = dict(self.explained.compile_ms)
        if self.built is not None and self.built.backward_ms is not None and self.backend != "eager":
            spent.setdefault("backward", self.built.backward_ms)
        return spent

    @property
    def stages_ms(self) -> dict[str, float]:
        """Milliseconds of capture, joint, forward and backward, and of their parts, such as "forward.lower"."""
        halves = (("forward", self.forward), ("backward", self.backward))
        spent = self.compile_ms
        for half, program in halves:
            spent |= {f"{half}.{stage}": ms for stage, ms in getattr(program, "compile_ms", {}).items()}
        return spent


def eager_specialisation(
    error: Unsupported, name: str, receiver: Any, leaves: list[Any], *more: Fallback
) -> Specialisation:
    """What remembers that a call runs as plain Python, guarded by what the failed capture had read."""
    check: Check = lambda leaves: []  # noqa: E731
    recorder, guards = getattr(error, "recorder", None), None
    if recorder is not None:
        empty = torch.fx.GraphModule(torch.nn.Module(), torch.fx.Graph())
        guards = Guards(Captured(empty, (), (), (), None, [], [], recorder, name))
        check = guards.lifted
    refused = Fallback(error.op, error.reason, " → ".join(refusal_lines(error)))
    pins = (receiver, leaves_without_tensors(leaves))
    return Specialisation(Executable("eager"), check, Notes(fallbacks=(refused, *more)), guards=guards, pins=pins)


def refusal(error: Unsupported, name: str) -> BaseException:
    """The error that `fullgraph=True` raises: torch's own where the call itself is wrong, `CaptureError` otherwise."""
    cause = error.__cause__
    if cause is not None and type(cause) in (RuntimeError, IndexError, TypeError, ValueError):
        if error.line:
            cause.add_note(f"while capturing {name!r} at {' → '.join(refusal_lines(error))}")
        return cause
    lines = refusal_lines(error)
    where = f" ({' → '.join(lines)})" if lines else ""
    raised = CaptureError(f"cannot capture {name!r}{where}: {error.op}: {error.reason}", lines)
    raised.__cause__ = error
    return raised


def leaves_without_tensors(leaves: list[Any]) -> list[Any]:
    """The Python arguments, which the key knows by identity and which must therefore stay alive."""
    return [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
