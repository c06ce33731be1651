"""Every variant of one case, timed in turns: eager, torch.compile twice, fusejit twice, and a copy of the same bytes.

In: a `Case` of cases.py and a `Machine`. Out: `Measured`: microseconds, error and failure of each variant.

    >>> found = measure(CASES[0], gpu())
    >>> statistics.median(found.us["fusejit-O2"]), found.errors["fusejit-O2"], found.bytes_minimum
    (..., ..., 402685952)

`rehearsal()` is the same on a machine without a GPU: small shapes, Triton's interpreter, Dynamo without Inductor, a
clock that counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from cases import Case
from torch import Tensor

import fusejit
from fusejit.tools.bench import call_of, difference, in_turns, tangents, widened

BUDGET_S = 0.15  # for all repetitions of one variant


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a case runs: device, fusejit's backend there, what torch.compile hands its graphs to, which shapes, which
    timer.
    """

    device: str
    backend: str
    peer: str
    small: bool
    timer: Any = None


class Counter:
    """A timer that runs nothing: the k-th call that it is given takes k microseconds."""

    def __init__(self) -> None:
        self.calls = 0

    def wait(self) -> None:
        return None

    def queue(self, call: Callable[[], Any], host_s: float) -> Callable[[], float]:
        self.calls += 1
        time = float(self.calls)
        return lambda: time


def gpu() -> Machine:
    return Machine("cuda", "triton", "inductor", False)


def rehearsal() -> Machine:
    return Machine("cpu", "interpret", "aot_eager", True, Counter())


@dataclass(slots=True)
class Measured:
    """By variant: microseconds of each repetition, the largest error against float64, why it could not run. `wrong`:
    fusejit's variants with an output further from float64 than twice eager's error and two ulp.
    """

    bytes_minimum: int
    shape: tuple[int, ...]
    us: dict[str, list[float]] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)


def _compiled(mode: str | None) -> Callable[[Callable, Machine], Callable]:
    def build(fn: Callable, machine: Machine) -> Callable:
        return torch.compile(fn, backend=machine.peer, **({"mode": mode} if machine.peer == "inductor" else {}))

    return build


def _fused(level: str) -> Callable[[Callable, Machine], Callable]:
    return lambda fn, machine: fusejit.jit(fn, jit_level=level, backend=machine.backend)


VARIANTS: dict[str, Callable[[Callable, Machine], Callable] | None] = {
    "eager": lambda fn, machine: fn,
    "torch.compile": _compiled(None),
    "torch.compile-max-autotune": _compiled("max-autotune-no-cudagraphs"),
    "fusejit-O2": _fused("O2"),
    "fusejit-O3": _fused("O3"),
    "copy": None,  # of the bytes of the case: it has no function
}


def measure(
    case: Case, machine: Machine, variants: Iterable[str] = tuple(VARIANTS), budget_s: float = BUDGET_S
) -> Measured:
    """Build every variant of a case, compare its results with float64, then time all of them in turns."""
    fn, args = case.family.block.fn, case.make(machine.device, small=machine.small)
    with torch.set_grad_enabled(case.pass_ != "forward"):
        outputs = fn(*args)
        given = tangents(outputs) if case.pass_ != "forward" else []
        plain = [o.detach() for o in torch.utils._pytree.tree_leaves(outputs)]
        del outputs
        found = Measured(case.bytes_minimum(args, plain), case.small if machine.small else case.shape)
        truth = call_of(fn, widened(args), case.pass_, widened(given))()
        truth = [t.detach() for t in truth]
    torch._dynamo.reset()  # what earlier cases compiled would count against the limit of recompilations
    calls, distances = {}, {}
    for name in variants:
        build = VARIANTS[name]
        if build is None:
            calls[name] = copy_of(found.bytes_minimum, machine.device)
            continue
        try:
            calls[name], distances[name] = _ready(build(fn, machine), case, args, given, truth)
        except Exception as error:  # a compiler may raise anything, and one variant must not hide the others
            calls.pop(name, None)
            found.failed[name] = (
                f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
            )
    del truth
    found.errors = {name: max(distance) for name, distance in distances.items()}
    found.wrong = [
        n for n in distances if n.startswith("fusejit") and not _right(distances[n], distances.get("eager"), plain)
    ]
    found.us = dict(zip(calls, in_turns(list(calls.values()), budget_s, machine.timer), strict=True))
    return found


def _ready(
    fn: Callable, case: Case, args: Any, given: list[Tensor], truth: list[Tensor]
) -> tuple[Callable, list[float]]:
    """Compile and run one variant: its call, and how far each result is from float64."""
    # a backward that runs again and again must keep what torch.compile would otherwise overwrite in its first run
    with torch._functorch.config.patch(donated_buffer=case.pass_ != "backward"):
        call = call_of(fn, args, case.pass_, given)
        got = call()
    return call, [difference(g.detach(), t) for g, t in zip(got, truth, strict=True)]


def _right(ours: list[float], eager: list[float] | None, outputs: list[Tensor]) -> bool:
    eps = torch.finfo(outputs[0].dtype).eps if outputs[0].is_floating_point() else 0.0
    return eager is not None and all(o <= 2 * e + 2 * eps for o, e in zip(ours, eager, strict=True))


def copy_of(count: int, device: str) -> Callable[[], Tensor]:
    """A call that reads and writes `count` bytes together."""
    source = torch.empty(max(count // 2, 1), dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)
