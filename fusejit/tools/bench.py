"""`fusejit bench`: every block, eager against fused, as one table.

In: names of blocks (all if none). Out: `Row`s, printed as a table and, on request, written as JSON; an exit code.

With a GPU the times are measured: medians of CUDA events, the L2 cache flushed before each call, next to a device copy
in the same run. Without one nothing is timed on a device: kernels and bytes come from `explain()` at the real shapes,
the time is the roofline's (bytes over the copy bandwidth of an H100), the kernels are compiled for sm_90, and the error
is found by running them in Triton's interpreter at small shapes.

    block                pass     kernels        bytes (MB)       roofline (us) ...
    bias_gelu            forward   2 ->  1     268.5 -> 134.2       89.5 -> 44.7
"""

from __future__ import annotations

import contextlib
import json
import math
import platform
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from .. import knobs
from .. import torch_private as private
from ..api.compile_for import compile_for
from ..api.jit import jit
from ..errors import FusejitError
from ..report.report import Report
from ..torch_private import pytree as pytree
from .blocks import BLOCKS, Block

H100_COPY = 3.0e12  # bytes a second that a device copy reads and writes on an H100
FLUSH_BYTES = 256 << 20  # several times the L2 cache of any current GPU
PASSES = ("forward", "both")


@dataclass(frozen=True, slots=True)
class Row:
    """One block in one pass. Times in microseconds; None: this machine cannot tell.

    `kernels*` and `bytes_*` leave out the `calls` that both sides make alike; `bytes_minimum` and `gb_s` are None where
    there are any.
    """

    block: str
    pass_: str
    shape: tuple[int, ...]
    dtype: str
    kernels_eager: int
    kernels: int
    calls: int
    bytes_eager: int
    bytes_fused: int
    bytes_minimum: int | None
    error: float
    error_eager: float
    right: bool
    compile_ms: float | None = None
    regs: int | None = None
    spills: int | None = None
    us_eager: float | None = None
    us: float | None = None
    measured: bool = False
    fallbacks: tuple[str, ...] = ()

    @property
    def ratio(self) -> float | None:
        return self.us_eager / self.us if self.us and self.us_eager else None

    @property
    def gb_s(self) -> float | None:
        """The bytes that have to move, over the measured time."""
        return self.bytes_minimum / self.us / 1e3 if self.us and self.measured and self.bytes_minimum else None


@dataclass(frozen=True, slots=True)
class Result:
    device: str
    versions: dict[str, str]
    commit: str
    copy_gb_s: float | None
    seconds: float
    rows: tuple[Row, ...]
    failed: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        rows = [asdict(row) | {"pass": row.pass_, "ratio": row.ratio, "gb_s": row.gb_s} for row in self.rows]
        for row in rows:
            del row["pass_"]
        return json.dumps(asdict(self) | {"rows": rows}, indent=1)


# ---------------------------------------------------------------------------------------------------------------- what
# is measured


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def tangents(outputs: Any) -> list[Tensor]:
    """Seeded normal gradients for the differentiable outputs."""
    made = []
    for o in (o for o in tensors(outputs) if o.requires_grad):
        generator = torch.Generator(o.device).manual_seed(1)
        made.append(torch.randn(o.shape, generator=generator, device=o.device).to(o.dtype))
    return made


def call_of(
    fn: Callable[..., Any], args: Sequence[Any], pass_: str, given: Sequence[Tensor] = ()
) -> Callable[[], list[Tensor]]:
    """Return a function without arguments that runs one pass of `fn(*args)`.

    Args:
        pass_: "forward" gives the outputs; "backward" the gradients of the differentiable arguments, for a forward that
            ran before; "both" outputs and gradients.
        given: the gradients of the differentiable outputs.
    """
    wanted = [a for a in tensors(args) if a.requires_grad]

    def forward() -> list[Tensor]:
        with torch.no_grad():
            return tensors(fn(*args))

    def both() -> list[Tensor]:
        outputs = tensors(fn(*args))
        return outputs + list(torch.autograd.grad([o for o in outputs if o.requires_grad], wanted, list(given)))

    if pass_ != "backward":
        return forward if pass_ == "forward" else both
    leaves = [o for o in tensors(fn(*args)) if o.requires_grad]
    return lambda: list(torch.autograd.grad(leaves, wanted, list(given), retain_graph=True))


def widened(values: Sequence[Any]) -> tuple[Any, ...]:
    """Return the values with floating tensors in float64, apart from the graph of the originals."""
    return tuple(
        v.detach().double().requires_grad_(v.requires_grad) if isinstance(v, Tensor) and v.is_floating_point() else v
        for v in values
    )


def errors(
    block: Block,
    pass_: str,
    *,
    backend: str,
    device: str,
    dtype: torch.dtype | None = None,
    shape: Sequence[int] = (),
    **options: Any,
) -> tuple[float, float, bool]:
    """Run a block at a shape (its small one if none is given), fused and eager, and compare both with float64.

    Returns: (fused, eager, right): the largest difference as a fraction of the largest value of that output or
    gradient, and whether each fused one is at most twice eager's plus two ulp. `options` go to `jit`.
    """
    args = block.make(tuple(shape) or block.small, device, dtype)
    given = [] if pass_ == "forward" else tangents(block.fn(*args))
    wide, wide_given = widened(args), widened(given)

    def compare(fn: Callable[..., Any]) -> list[tuple[float, float]]:
        got = call_of(fn, args, pass_, given)()
        reference = block.reference
        wanted = call_of(block.fn if reference is None else lambda *a: reference(got, *a), wide, pass_, wide_given)()
        return [
            (difference(g, w), torch.finfo(g.dtype).eps if g.is_floating_point() else 0.0)
            for g, w in zip(got, wanted, strict=True)
        ]

    fused, eager = compare(jit(block.fn, backend=backend, name=block.name, **options)), compare(block.fn)
    right = all(f <= 2 * e + 2 * eps for (f, eps), (e, _) in zip(fused, eager, strict=True))
    return max(f for f, _ in fused), max(e for e, _ in eager), right


def difference(got: Tensor, wanted: Tensor) -> float:
    """Largest |got - wanted| over the largest |wanted|; infinite where one is NaN and the other is not, and between
    unequal integers.
    """
    if got.shape != wanted.shape or not torch.equal(got.isnan(), wanted.isnan()):
        return math.inf
    if not got.is_floating_point():
        return 0.0 if torch.equal(got, wanted) else math.inf
    if not wanted.numel():
        return 0.0
    right = wanted.detach().double()  # fp8 has no arithmetic
    largest = float(right.abs().nan_to_num().max())
    return float((got.detach().double() - right).abs().nan_to_num().max()) / (largest or 1.0)


def shared(report: Report) -> tuple[int, int]:
    """Count the calls that eager and the fused program make alike (matmuls, attention), and the bytes that they
    move.
    """
    calls = Counter(call.target for call in report.externs) & Counter(name for name, _ in report.eager)
    moved = {name: sorted((size for op, size in report.eager if op == name), reverse=True) for name in calls}
    return calls.total(), sum(sum(moved[name][:count]) for name, count in calls.items())


# -------------------------------------------------------------------------------------------------------------- one row


def row(block: Block, pass_: str, copy: float | None) -> Row:
    """Measure one block in one pass; `copy` is the device's copy bandwidth in bytes a second, None without a GPU."""
    grad = contextlib.nullcontext() if pass_ == "both" else torch.no_grad()
    with grad:
        args = block.make(block.real, "cuda") if copy else block.make_untouched(block.real)
        report = jit(block.fn, backend="triton" if copy else "interpret", name=block.name).explain(*args)
        compiled = {} if copy else _compiled(block, args)
    calls, moved = shared(report)
    eager, fused = report.bytes_eager - moved, report.bytes_fused - moved
    times = _timed(block, args, pass_) if copy else (eager / H100_COPY * 1e6, fused / H100_COPY * 1e6)
    del args
    backend, device = ("triton", "cuda") if copy else ("interpret", "cpu")
    error, error_eager, right = errors(block, pass_, backend=backend, device=device)
    return Row(
        block=block.name,
        pass_=pass_,
        shape=block.real,
        dtype=str(block.dtype).removeprefix("torch."),
        kernels_eager=len(report.eager) - calls,
        kernels=report.launches + len(report.externs) - calls,
        calls=calls,
        bytes_eager=eager,
        bytes_fused=fused,
        bytes_minimum=None if calls else report.bytes_minimum,
        error=error,
        error_eager=error_eager,
        right=right,
        us_eager=times[0],
        us=times[1],
        measured=copy is not None,
        fallbacks=tuple(map(str, report.fallbacks)),
        **compiled,
    )


def _compiled(block: Block, args: Sequence[Any]) -> dict[str, Any]:
    start = time.perf_counter()
    program = compile_for(block.fn, tuple(args), target="sm_90")
    elapsed = (time.perf_counter() - start) * 1e3
    kernels = program.kernels
    regs, spills = max((k.n_regs for k in kernels), default=0), max((k.n_spills for k in kernels), default=0)
    return {"compile_ms": elapsed, "regs": regs, "spills": spills}


def _timed(block: Block, args: Sequence[Any], pass_: str) -> tuple[float, float]:
    """Median microseconds (eager, fused)."""
    given = [] if pass_ == "forward" else tangents(block.fn(*args))
    fused = jit(block.fn, backend="triton", name=block.name)
    eager, ours = (
        statistics.median(t) for t in in_turns([call_of(fn, args, pass_, given) for fn in (block.fn, fused)])
    )
    return eager, ours


class DeviceTimer:
    """Device time of calls by CUDA events, their inputs out of the L2 cache."""

    def __init__(self) -> None:
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")

    def wait(self) -> None:
        torch.cuda.synchronize()

    def queue(self, call: Callable[[], Any], host_s: float) -> Callable[[], float]:
        """Launch a call and return what gives its microseconds after `wait`; `host_s`: the seconds that its launches
        take on the host.
        """
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        private.sleep(
            int(2e9 * 1.5 * host_s)
        )  # the device waits (cycles at 2 GHz or less) until the host has launched it all
        self._flush.zero_()
        before.record()
        call()
        after.record()
        return lambda: before.elapsed_time(after) * 1e3


def in_turns(calls: Sequence[Callable[[], Any]], budget_s: float = 0.4, timer: Any = None) -> list[list[float]]:
    """Time each call 10 to 200 times, one after the other in turns, so that all of them see the same clocks.

    Args:
        budget_s: seconds for all repetitions of one call.
        timer: what measures, with the methods of `DeviceTimer` (which it is by default, and which needs a GPU).

    Returns: for each call its times in microseconds.
    """
    timer = timer or DeviceTimer()
    host, longest = [], 1e-5
    for call in calls:
        for _ in range(3):
            call()
        timer.wait()
        start = time.perf_counter()
        call()
        host.append(time.perf_counter() - start)
        timer.wait()
        longest = max(longest, time.perf_counter() - start)
    count = max(10, min(200, int(budget_s / longest)))
    queued = [[timer.queue(call, seconds) for call, seconds in zip(calls, host, strict=True)] for _ in range(count)]
    timer.wait()
    return [[turn[i]() for turn in queued] for i in range(len(calls))]


def device_us(call: Callable[[], Any], budget_s: float = 0.4) -> list[float]:
    """Device time of each of 10 to 200 calls in microseconds, their inputs out of the L2 cache; needs a GPU."""
    return in_turns([call], budget_s)[0]


def median_us(call: Callable[[], Any]) -> float:
    """The median of `device_us`."""
    return statistics.median(device_us(call))


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a device copy of 1 GiB."""
    source = torch.empty(1 << 30, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / (median_us(lambda: target.copy_(source)) * 1e-6)


# ----------------------------------------------------------------------------------------------------------------------
# the command


@contextlib.contextmanager
def progress(stream: TextIO) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows one line, rewritten in place; silent unless `stream` is a terminal."""
    shown = stream.isatty()

    def show(text: str) -> None:
        if shown:
            stream.write("\r\x1b[2K" + text)
            stream.flush()

    yield show
    show("")


def bench(names: Sequence[str] = (), *, stream: TextIO | None = None) -> Result:
    """Measure the named blocks (all if none) and return their rows; an error of one block is kept in `failed` and does
    not stop the others.

    Raises:
        KeyError: a name that is no block.
    """
    unknown = [name for name in names if name not in BLOCKS]
    if unknown:
        raise KeyError(f"no block named {', '.join(unknown)}; there are {', '.join(BLOCKS)}")
    start = time.perf_counter()
    gpu = torch.cuda.is_available()
    work = [(BLOCKS[n], p) for n in (names or BLOCKS) for p in PASSES if p == "forward" or BLOCKS[n].grad]
    rows, failed = [], {}
    with progress(stream or sys.stderr) as show:
        show("measuring a device copy" if gpu else "starting")
        copy = copy_bandwidth() if gpu else None
        for number, (block, pass_) in enumerate(work, 1):
            show(f"[{number}/{len(work)}] {block.name}, {pass_}")
            try:
                rows.append(row(block, pass_, copy))
            except (FusejitError, RuntimeError, AssertionError) as error:
                failed[f"{block.name}, {pass_}"] = (
                    f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
                )
    device = torch.cuda.get_device_name() if gpu else f"{platform.machine()} CPU, no GPU"
    return Result(
        device, versions(), commit(), copy / 1e9 if copy else None, time.perf_counter() - start, tuple(rows), failed
    )


def versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for package in ("fusejit", "torch", "triton"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found | {"torch": torch.__version__}


def commit() -> str:
    """The commit of the source tree, "+" appended when it has changes; FUSEJIT_COMMIT where there is no git; "unknown"
    otherwise.
    """
    here = Path(__file__).resolve().parent
    try:
        text = subprocess.run(
            ["git", "-C", str(here), "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"],
            capture_output=True, text=True, timeout=10, check=True,
        ).stdout.strip()  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        text = ""
    return text or knobs.read("commit") or "unknown"


# ------------------------------------------------------------------------------------------------------------ the table


def table(result: Result) -> str:
    """The rows as text."""
    measured = result.copy_gb_s is not None
    columns = _MEASURED if measured else _PREDICTED
    lines = [[title for title, _ in columns]] + [[str(cell(r, result)) for _, cell in columns] for r in result.rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    text = [
        "  ".join(c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths))).rstrip()
        for line in lines
    ]
    text.insert(1, "  ".join("-" * w for w in widths))
    notes = [
        f"{result.device}; "
        + ", ".join(f"{k} {v}" for k, v in result.versions.items())
        + f"; commit {result.commit}; {result.seconds:.0f} s"
    ]
    notes += _LEGEND_MEASURED if measured else _LEGEND_PREDICTED
    notes += [f"FAILED {name}: {reason}" for name, reason in result.failed.items()]
    notes += [
        f"WRONG {r.block}, {r.pass_}: error {r.error:.1e}, eager's {r.error_eager:.1e}"
        for r in result.rows
        if not r.right
    ]
    notes += [f"fallback in {r.block}, {r.pass_}: {text}" for r in result.rows for text in r.fallbacks]
    return "\n".join(text + [""] + notes)


def _mb(count: int) -> str:
    return f"{count / 1e6:.1f}"


_COMMON: tuple[tuple[str, Callable[[Row, Result], str]], ...] = (
    ("block", lambda r, _: r.block),
    ("pass", lambda r, _: r.pass_),
    ("kernels", lambda r, _: f"{r.kernels_eager} -> {r.kernels}"),
    ("MB moved", lambda r, _: f"{_mb(r.bytes_eager)} -> {_mb(r.bytes_fused)}"),
)
_ERROR: tuple[tuple[str, Callable[[Row, Result], str]], ...] = (
    ("error (eager's)", lambda r, _: f"{r.error:.1e} ({r.error_eager:.1e})"),
)
_PREDICTED = (
    *_COMMON,
    ("least MB", lambda r, _: _mb(r.bytes_minimum) if r.bytes_minimum else "-"),
    ("H100 roofline us", lambda r, _: f"{r.us_eager:.1f} -> {r.us:.1f}"),
    ("ratio", lambda r, _: f"{r.ratio:.2f}x" if r.ratio else "-"),
    ("compile ms", lambda r, _: f"{r.compile_ms:.0f}"),
    ("regs", lambda r, _: str(r.regs)),
    ("spills", lambda r, _: str(r.spills)),
    *_ERROR,
)
_MEASURED = (
    *_COMMON,
    ("us", lambda r, _: f"{r.us_eager:.1f} -> {r.us:.1f}"),
    ("ratio", lambda r, _: f"{r.ratio:.2f}x" if r.ratio else "-"),
    ("GB/s", lambda r, _: f"{r.gb_s:.0f}" if r.gb_s else "-"),
    ("% of copy", lambda r, result: f"{100 * r.gb_s / result.copy_gb_s:.0f}" if r.gb_s and result.copy_gb_s else "-"),
    *_ERROR,
)
_LEGEND_PREDICTED = [
    "eager -> fused. Nothing was timed on a GPU: the time is bytes moved over 3.0 TB/s (a device copy on an H100), "
    "without matmuls and",
    "attention, which both sides call alike. Registers and spills: the worst kernel, compiled for sm_90. Error: "
    "kernels run in Triton's",
    "interpreter at small shapes against float64, as a fraction of the largest value; in brackets eager's in the same "
    "dtype.",
]
_LEGEND_MEASURED = [
    "eager -> fused. Times: medians of CUDA events with a cold L2 cache, matmuls and attention included. GB/s: the "
    "least bytes that have",
    "to move over the fused time; % of a device copy in the same run. Error: at small shapes against float64, as a "
    "fraction of the largest",
    "value; in brackets eager's in the same dtype.",
]
