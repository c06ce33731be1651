"""What a call costs the host, apart from the work: functions and modules with nothing to do, every way to call them,
timed in turns.

In: a `Call` of `CALLS`. Out: by variant, microseconds of host time per call, one number a batch.

    >>> found = measure(CALLS[1])
    >>> statistics.median(found["fusejit"]) - statistics.median(found["bare"])
    1.9...

Variants: `eager`; `bare`: the compiled Program on a ready list, which is its allocations, its externs and its launches;
`fusejit`: the whole call; and with a body that only makes the results, `nothing` (that body), `fusejit-noop` and
`torch.compile-noop` (a backend that compiles nothing): what these two take beyond `nothing` is guards and dispatch.
With a GPU, torch.compile itself in two modes.

Without a GPU the generated Programs run on CPU tensors, and only the last step is replaced: where a launch would ask
the driver for the kernel (`Launcher._elsewhere`), it is given one that returns at once. Externs are torch's own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import fusejit
from fusejit.runtime.launch import Launcher

SHAPE = (64, 64)
BATCH_S = 2e-3
WIDTH = 32


@dataclass(frozen=True, slots=True)
class Call:
    """A function with `inputs` tensors, or a module with `blocks` blocks; `pass_` says whether anything requires grad,
    `dynamic` whether the sizes of the inputs may vary.
    """

    name: str
    pass_: str
    inputs: int = 1
    blocks: int = 0
    dynamic: bool = False

    @property
    def id(self) -> str:
        return f"{self.name}-{self.pass_}"

    @property
    def grad(self) -> bool:
        return self.pass_ == "training"


class Block(nn.Module):
    """A block with 12 parameters and 7 modules inside."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.up, self.down, self.act = nn.Linear(width, width), nn.Linear(width, width), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(self.mix(self.before(x)))
        return x + self.down(self.act(self.up(self.after(x))))


def total(*tensors: Tensor) -> Tensor:
    """One kernel over all of its inputs."""
    return functools.reduce(lambda a, b: a * b + b, tensors, tensors[0])


FUNCTIONS = [Call(f"{n} inputs", pass_, inputs=n) for pass_ in ("inference", "training") for n in (1, 4, 16)]
MODULES = [Call(f"{n} blocks", "inference", blocks=n) for n in (2, 12, 50)]
DYNAMIC = [
    Call(f"{n} inputs of any size", pass_, inputs=n, dynamic=True)
    for pass_ in ("inference", "training")
    for n in (1, 4)
]
CALLS = FUNCTIONS + MODULES + DYNAMIC
VARIANTS = ("eager", "bare", "nothing", "torch.compile-noop", "fusejit-noop", "fusejit")
ON_GPU = ("torch.compile", "torch.compile-reduce-overhead")


def prepare(call: Call, device: str) -> tuple[Callable, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    if call.blocks:
        return nn.Sequential(*(Block() for _ in range(call.blocks))).to(device), (torch.randn(8, WIDTH, device=device),)
    return total, tuple(torch.randn(SHAPE, device=device).requires_grad_(call.grad) for _ in range(call.inputs))


@contextlib.contextmanager
def launching_nothing() -> Iterator[None]:
    """Give every launch on CPU tensors a kernel that returns at once."""

    def given(launcher: Launcher, args: tuple) -> None:
        launcher._loaded = (-1, lambda *everything: None, 0, None)
        touched.append(launcher)
        launcher(*args)

    touched: list[Launcher] = []
    driver = {"_cuda_getDevice": lambda: -1, "_cuda_getCurrentRawStream": lambda device: 0}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(Launcher, "_elsewhere", given))
        for name, answer in driver.items():
            stack.enter_context(mock.patch.object(torch._C, name, answer, create=True))
        try:
            yield
        finally:
            for launcher in touched:
                launcher._loaded = (None, None, None, None)


def variants(call: Call, device: str) -> dict[str, Callable[[], Any]]:
    """Every way to make the call, compiled and run twice."""
    fn, args = prepare(call, device)
    backend = "triton" if device == "cuda" else "interpret"
    whole, empty = (fusejit.jit(f, backend=backend, fullgraph=True, dynamic=call.dynamic) for f in (fn, twin(fn)))
    found = whole.specialisation(*args)
    program, lifted = found.built.forward, found.lifted([*args])
    results = [torch.empty(args[0].shape, device=device)]
    bare = getattr(program, "call", program)
    body = lambda: [torch.empty_like(result) for result in results]  # noqa: E731
    runs: dict[str, Callable[[], Any]] = {
        "eager": lambda: fn(*args),
        "bare": lambda: bare([*args, *lifted]),
        "nothing": body,
        "torch.compile-noop": functools.partial(compiled_to_nothing(fn, call, body), *args),
        "fusejit-noop": functools.partial(jitted_to_nothing(empty, args, call, body), *args),
        "fusejit": functools.partial(whole, *args),
    }
    if device == "cuda":
        for name, mode in zip(ON_GPU, (None, "reduce-overhead")):
            runs[name] = functools.partial(torch.compile(fn, dynamic=call.dynamic, mode=mode), *args)
    for run in (*runs.values(), *runs.values(), *runs.values()):
        run()
    return runs


def twin(fn: Callable) -> Callable:
    """Another object that does the same, since a module has one jitted function."""
    if isinstance(fn, nn.Module):
        return nn.Sequential(*fn)
    return lambda *tensors: fn(*tensors)


def compiled_to_nothing(fn: Callable, call: Call, body: Callable) -> Callable:
    """torch.compile with a backend that compiles nothing, behind AOTAutograd where there are gradients."""
    from torch._dynamo.backends.common import aot_autograd

    def nothing(graph: torch.fx.GraphModule, inputs: Any) -> Callable:
        kept = (
            [node.meta["val"] for node in graph.graph.output_node().args[0][1:] if isinstance(node, torch.fx.Node)]
            if call.grad
            else []
        )
        saved = [
            torch.empty([*map(number, value.shape)]) if isinstance(value, Tensor) else number(value) for value in kept
        ]
        return lambda *args: [*body(), *saved]

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=nothing, bw_compiler=nothing) if call.grad else nothing
    return torch.compile(fn, backend=backend, dynamic=call.dynamic)


def number(size: Any) -> int:
    """The value of a size in the call that was compiled for, read without a guard on it."""
    return size.node.hint if isinstance(size, torch.SymInt) else size


def jitted_to_nothing(jitted: Any, args: tuple, call: Call, body: Callable) -> Callable:
    """A jitted function whose compiled Program is replaced by one that makes its results and no more."""
    found = jitted.specialisation(*args)
    saved = found.built.forward([*args, *found.lifted([*args])])[1:]
    found.forward.__dict__["call"] = lambda inputs: (*body(), *saved)
    if call.dynamic:
        found.built.forward.dispatch = found.built.forward.chain()
    body_of_program, spread = found.built.body()
    executable = dataclasses.replace(found.executable, body=body_of_program, spread=spread)
    object.__setattr__(found, "executable", executable)
    return jitted


def measure(
    call: Call, device: str = "cpu", budget_s: float = 1.5, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Host microseconds of every variant, in turns of about 2 ms, until `budget_s` seconds a variant are spent; device
    work is waited for between the turns, and a turn is too short to fill the queue of launches.
    """
    with torch.set_grad_enabled(call.grad), launching_nothing() if device == "cpu" else contextlib.nullcontext():
        runs = variants(call, device)
        wait = torch.cuda.synchronize if device == "cuda" else lambda: None
        counts = {
            name: max(1, min(200, int(BATCH_S / max(batch(run, 3, clock, wait), 1e-9)))) for name, run in runs.items()
        }
        found: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(max(3, int(budget_s / BATCH_S))):
            for name, run in runs.items():
                found[name].append(batch(run, counts[name], clock, wait) * 1e6)
    return found


def batch(run: Callable[[], Any], count: int, clock: Callable[[], float], wait: Callable[[], None]) -> float:
    """Seconds of one call, over `count` calls."""
    wait()
    start = clock()
    for _ in range(count):
        run()
    spent = clock() - start
    wait()
    return spent / count
