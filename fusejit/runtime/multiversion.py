"""Multiversion: the Programs of one graph whose sizes vary, each for the sizes of which its assumptions are true.

In: where a graph's inputs hold its sizes, and how it is compiled for the sizes of one call. Out: something that is
called like a Program.

    >>> variants = Variants((("s0", 0, -1),), compile_for, {"s0": 64}, plain)
    >>> variants([128, x]); variants.programs
    [('s0*4 < 2147483648', Program(...))]

Most graphs have one: its kernels take the sizes as numbers. A size beyond 32-bit offsets, or a row too long to stay in
registers, breaks an assumption and has a variant of its own, compiled when it is met. Beyond MOST of them the graph
runs op by op.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from ..capture.tracer import LOCK
from ..codegen.emit.program import Program
from ..codegen.graph.bind_sizes import Bound
from ..codegen.ir.size import Scope
from ..fork_locks import renewed

MOST = 8
Compiled = tuple[Program, Scope]


class Variants:
    """See the module.

    Attributes:
        first: the Program of the call that the graph was traced with. programs: (assumptions, Program), newest first.
        notes: (op, reason) of calls that run op by op.
    """

    def __init__(
        self,
        known: Bound,
        compiler: Callable[[dict[str, int]], Compiled],
        hints: dict[str, int],
        plain: Callable[[list[Any]], Sequence[Any]],
    ) -> None:
        self.known, self.compiler, self.plain = known, compiler, plain
        self.checks: list[tuple[Callable[..., bool], Callable[[list[Any]], Sequence[Any]]]] = []
        self.programs: list[tuple[str, Program]] = []
        self.notes: list[tuple[str, str]] = []
        self.lock = renewed(threading.Lock())
        self.first = self.add(hints)

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        return self.dispatch(args)

    def other(self, args: list[Any]) -> Sequence[Any]:
        """Run a call that no variant is known for."""
        return self.more([args[number] if axis < 0 else args[number].shape[axis] for _, number, axis in self.known])(
            args
        )

    def add(self, hints: dict[str, int]) -> Program:
        """Compile for the sizes of one call."""
        program, scope = self.compiler(hints)
        self.checks.insert(0, (self.check(scope), program))
        self.programs.insert(0, (" and ".join(scope.guards), program))
        self.dispatch = self.chain()
        return program

    def more(self, sizes: list[int]) -> Callable[[list[Any]], Sequence[Any]]:
        """Compile a variant, or run op by op where that does not help."""
        with LOCK, self.lock:  # torch's arithmetic on symbols sees the tracer of any thread
            for holds, program in self.checks:  # another thread may have made it meanwhile
                if holds(*sizes):
                    return program
            if len(self.programs) >= MOST:
                self.notes.append((f"more than {MOST} variants for sizes", "other sizes run op by op"))
            else:
                try:
                    return self.add({name: size for (name, _, _), size in zip(self.known, sizes, strict=True)})
                except Exception as error:  # the call has its inputs and its gradient to give: op by op, and said so
                    self.notes.append((f"compiling for sizes {sizes}", f"{type(error).__name__}: {error}"))
            self.checks.append((lambda *sizes: True, self.plain))
            self.dispatch = self.chain()
            return self.plain

    def chain(self) -> Callable[[list[Any]], Sequence[Any]]:
        """Write what runs the first variant that holds: sizes are read once, and most variants hold for all."""
        names = ", ".join(name for name, _, _ in self.known)
        reads = [
            f"{name} = args[{number}]" + (f".shape[{axis}]" if axis >= 0 else "") for name, number, axis in self.known
        ]
        runs = [f"if holds_{n}({names}): return program_{n}(args)" for n in range(len(self.checks))]
        made: dict[str, Any] = {"other": self.other}
        for n, (holds, program) in enumerate(self.checks):
            made |= {f"holds_{n}": holds, f"program_{n}": getattr(program, "call", program)}
        exec("\n    ".join(["def dispatch(args):", *reads, *runs, "return other(args)"]), made)
        return made["dispatch"]  # type: ignore[no-any-return]

    def check(self, scope: Scope) -> Callable[..., bool]:
        """Return what says of sizes whether a variant holds for them."""
        names = ", ".join(name for name, _, _ in self.known)
        last = max((number for number, step in enumerate(scope.steps) if step.startswith("if ")), default=-1)
        made: dict[str, Any] = {}
        exec("\n    ".join([f"def holds({names}):", *scope.steps[: last + 1], "return True"]), made)
        return made["holds"]  # type: ignore[no-any-return]
