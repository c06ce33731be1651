"""The figures that the seeds published for their language features, measured again: medians, all variants of a
comparison in turns.

In: nothing; `PERF_REHEARSE=1` takes the smallest sizes and one round. Out: a row of pytest-benchmark's JSON for each
variant, with its `nodes`, `launches` and `ratio` (how many times fusejit's time it takes); on fusejit's rows `figures`:
what the seed reached, what we did. Nothing here asserts a time; `perf/lib/figures.py` prints the figures of a JSON, and
of a run at its end.

    feature                 figure                                                 target       here
    select instead of if    compile and run, fusejit's own capture of torch.cond   >= 3.08      ...
"""

from __future__ import annotations

import functools
import gc
import operator
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_compile import empty
from torch import Tensor, nn
from torch.testing import assert_close

import fusejit
from fusejit import HyperMap, MultitypeFuncGraph
from fusejit.tools.bench import in_turns as in_turns_on_device


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many tensor `if`s, rows, blocks and tensors; how often what compiles is measured, and what runs."""

    ifs: int
    rows: int
    blocks: tuple[int, ...]
    tensors: int
    compiles: int
    runs: int


REHEARSED = os.environ.get("PERF_REHEARSE") == "1"
SIZES = Sizes(3, 4, (1, 3), 4, 1, 2) if REHEARSED else Sizes(100, 100, (1, 12, 48), 200, 3, 30)


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of ours beside the seed's: `bound` is "at least" or "at most", `target` None where the seed published
    none.
    """

    feature: str
    text: str
    ours: float
    target: float | None = None
    bound: str = "at least"


@dataclass(slots=True)
class Found:
    """By variant: microseconds of each round, and what else is known of it. The figures are fusejit's."""

    us: dict[str, list[float]]
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    figures: tuple[Figure, ...] = ()

    def ratio(self, other: str, ours: str = "fusejit") -> float:
        return statistics.median(self.us[other]) / statistics.median(self.us[ours])


@dataclass(frozen=True, slots=True)
class Machine:
    """Where it is measured: the device, and `cold`, which empties the caches of compiled kernels."""

    device: str
    cold: Callable[[], None]


def in_turns(
    calls: dict[str, Callable[[], Any]],
    rounds: int,
    repeat: dict[str, int] | None = None,
    limit: dict[str, int] | None = None,
    before: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Microseconds of host time of a call, work of the device included; one variant after the other, so that all see
    the same machine.

    Args:
        repeat: calls a round, 1 unless named. limit: rounds of a variant that takes too long for all of them. before:
            runs before each.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        for name, call in calls.items():
            if number >= (limit or {}).get(name, rounds):
                continue
            count = (repeat or {}).get(name, 1)
            before()
            start = time.perf_counter()
            for _ in range(count):
                call()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times[name].append((time.perf_counter() - start) / count * 1e6)
    return times


def nodes_of(*graphs: torch.fx.GraphModule) -> int:
    """Ops and calls of regions or branches; inputs and the parts of a tuple aside."""
    return sum(
        n.op == "call_function" and n.target is not operator.getitem for graph in graphs for n in graph.graph.nodes
    )


# -- select instead of if ----------------------------------------------------------------------------------------------
SELECT = 3.08
"""Of the seed: 2.191 s with `if`, 0.712 s with select, compiling included."""


def rewritten(x: Tensor, y: Tensor, steps: int) -> Tensor:
    out = x
    for _ in range(steps):
        if x.sum() < y.sum():
            x = x * 0.5 + y
        else:
            x = x * 0.5 - y
        out = out + x
    return out


def conditional(x: Tensor, y: Tensor, steps: int) -> Tensor:
    out = x
    for _ in range(steps):
        x = torch.cond(x.sum() < y.sum(), lambda x, y: x * 0.5 + y, lambda x, y: x * 0.5 - y, (x, y))
        out = out + x
    return out


IFS: dict[str, Callable[[int], Callable]] = {
    "fusejit": lambda steps: fusejit.jit(lambda x, y: rewritten(x, y, steps), fullgraph=True),
    "fusejit-cond": lambda steps: fusejit.jit(lambda x, y: conditional(x, y, steps), fullgraph=True),
    "torch.compile-cond": lambda steps: torch.compile(
        lambda x, y: conditional(x, y, steps), backend="aot_eager", fullgraph=True
    ),
    "eager": lambda steps: lambda x, y: rewritten(x, y, steps),
}
"""Two peers: torch.cond in a graph that fusejit captures, and the same function through torch.compile, whose
"aot_eager" needs no GPU.
"""


def select(machine: Machine) -> dict[str, Found]:
    """Each round captures, compiles and runs once, from nothing; then the finished programs run. Imports are done
    before.
    """
    x, y = torch.randn(64, device=machine.device), torch.randn(64, device=machine.device)
    made: dict[str, Callable] = {}

    def once(name: str) -> Callable[[], Any]:
        def call() -> None:
            made[name] = IFS[name](SIZES.ifs)
            assert_close(made[name](x, y), wanted)

        return call

    with torch.no_grad():
        wanted = rewritten(x, y, SIZES.ifs)
        for build in IFS.values():
            build(1)(x, y)
        compiled = [name for name in IFS if name != "eager"]
        # torch.compile takes most of a minute
        both = Found(in_turns({name: once(name) for name in compiled}, SIZES.compiles, limit={"torch.compile-cond": 1}))
        once("eager")()
        run = Found(in_turns({name: functools.partial(fn, x, y) for name, fn in made.items()}, SIZES.runs))
    for name in ("fusejit", "fusejit-cond"):
        both.facts[name] = {"nodes": nodes_of(made[name].specialisation(x, y).record["capture"])}
    peers = {
        "fusejit-cond": "torch.cond as fusejit captures it",
        "torch.compile-cond": "torch.cond through torch.compile(aot_eager)",
    }
    feature = f"select instead of {SIZES.ifs} ifs"
    both.figures = tuple(
        Figure(feature, f"compile and run: {text}", both.ratio(name), SELECT) for name, text in peers.items()
    )
    run.figures = tuple(Figure(feature, f"run: {text}", run.ratio(name)) for name, text in peers.items())
    return {"ifs, compile and run": both, "ifs, run": run}


# -- vmap --------------------------------------------------------------------------------------------------------------
VMAP = 33
"""Of the seed: 1.928 s for the loop, 0.0577 s for vmap."""


def loop_of_rows(x: Tensor) -> Tensor:
    return torch.stack([F.hardswish(x[row]) for row in range(x.shape[0])])


ROWS: dict[str, Callable[[], Callable]] = {
    "fusejit": lambda: fusejit.jit(fusejit.vmap(F.hardswish), fullgraph=True),
    "torch.vmap": lambda: torch.vmap(F.hardswish),
    "loop": lambda: loop_of_rows,
}


def vmap(machine: Machine) -> dict[str, Found]:
    x = torch.randn(SIZES.rows, 2, device=machine.device) * 100
    calls = {name: functools.partial(build(), x) for name, build in ROWS.items()}
    with torch.no_grad():
        for call in calls.values():
            assert_close(call(), loop_of_rows(x))
        found = Found(in_turns(calls, SIZES.runs, repeat={"fusejit": 100, "torch.vmap": 100, "loop": 3}))
    found.figures = (Figure("vmap", f"{SIZES.rows} rows of hswish, a Python loop / vmap", found.ratio("loop"), VMAP),)
    return {"hswish of rows": found}


# -- lazy inline -------------------------------------------------------------------------------------------------------
LAZY, GROWTH = 9, 1.5
"""Of the seed, a model of 13 billion parameters: 3 hours to 20 minutes. 48 equal blocks may take 1.5 times as long as
one.
"""
WIDTH, HEADS = 64, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.attention = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH), Attention()
        self.gate, self.up, self.down = (
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(3 * WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        h = self.second(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class With(Block):
    """Found and kept apart by itself."""


@fusejit.lazy_inline(policy="front")
class Without(Block):
    """Captured in place."""


KINDS = {"fusejit": With, "in place": Without}


def lazy(machine: Machine) -> dict[str, Found]:
    """Forward and backward, from Python to cubins for an H100; Triton's cache and fusejit's compiled regions are empty
    in every round.
    """
    x = torch.randn(2, 32, WIDTH, requires_grad=True)
    facts: dict[tuple[int, str], dict[str, Any]] = {}

    def compiled(count: int, kind: str) -> Callable[[], None]:
        model = nn.Sequential(*[KINDS[kind]() for _ in range(count)])

        def call() -> None:
            program = fusejit.compile_for(model, (x,), target="sm_90")
            captured = program.specialisation.captured
            stages = {stage: round(ms) for stage, ms in program.compile_ms.items() if "." not in stage}
            graphs = captured.graph, *(region.graph for region in captured.regions.found)
            facts[count, kind] = {"nodes": nodes_of(*graphs), "kernels": len(program.kernels), "stages_ms": stages}

        return call

    def before() -> None:
        gc.collect()  # a region that nothing holds is compiled again
        machine.cold()

    calls = {(count, kind): compiled(count, kind) for count in SIZES.blocks for kind in KINDS}
    once = {key: 1 for key in calls if key[0] > 12}
    calls[SIZES.blocks[0], "fusejit"]()  # its imports
    times = in_turns(calls, SIZES.compiles, limit=once, before=before)
    found = {}
    for count in SIZES.blocks:
        one = found[f"blocks, {count}"] = Found(
            {k: times[count, k] for k in KINDS}, {k: facts[count, k] for k in KINDS}
        )
        most = count == SIZES.blocks[-1]
        nodes = one.facts["in place"]["nodes"] / one.facts["fusejit"]["nodes"]
        texts = {"nodes": nodes, "compile seconds": one.ratio("in place")}
        text = "{} of {} blocks, in place / lazy inline"
        one.figures = tuple(
            Figure("lazy inline", text.format(k, count), v, LAZY if most else None) for k, v in texts.items()
        )
    growth = statistics.median(times[count, "fusejit"]) / statistics.median(times[SIZES.blocks[0], "fusejit"])
    text = f"compile seconds, {count} blocks / {SIZES.blocks[0]} block"
    one.figures += (Figure("lazy inline", text, growth, GROWTH, "at most"),)
    return found


# -- HyperMap ----------------------------------------------------------------------------------------------------------
LAYER = [
    (768,),
    (768,),
    (768, 2304),
    (2304,),
    (768, 768),
    (768,),
    (768,),
    (768,),
    (768, 3072),
    (3072,),
    (3072, 768),
    (768,),
]
REAL = ([(50257, 768), (1024, 768)] + LAYER * 17)[: SIZES.tensors]  # a GPT-2 of 124M parameters, and some more
SMALL = [tuple(n // 64 + 1 for n in shape) for shape in REAL]

adamw = MultitypeFuncGraph("adamw")


@adamw.register("Tensor", "Tensor", "Tensor", "Tensor", "Tensor", "Tensor")
def _(lr, step, p, g, m, v):
    p.mul_(1 - lr * 0.01)
    m.lerp_(g, 0.1)
    v.mul_(0.999).addcmul_(g, g, value=0.001)
    p.sub_(lr * (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8))


def mapped(params, grads, moments, squares, lr, step):
    HyperMap(functools.partial(adamw, lr, step))(params, grads, moments, squares)


def loop(params, grads, moments, squares, lr, step):
    for row in zip(params, grads, moments, squares, strict=True):
        adamw(lr, step, *row)


def arguments(shapes, device):
    lists = [[torch.rand(shape, device=device) for shape in shapes] for _ in range(4)]
    return (*lists, torch.tensor(1e-3, device=device), torch.tensor(3.0, device=device))


def fused_by_torch(params, grads, moments, squares, lr, step):
    steps = [step.clone() for _ in params]
    options = {"amsgrad": False, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8, "maximize": False}
    return lambda: torch._fused_adamw_(params, grads, moments, squares, [], steps, lr=1e-3, **options)


def copy_of(count, device):
    source = torch.empty(count // 2, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


STEPS = ("fusejit", "fusejit-O0", "fusejit-loop", "loop", "torch-fused", "copy")


def hypermap(machine: Machine) -> dict[str, Found]:
    """Kernels, launches and bytes of the compiled step, its error against the loop in float64, and the time of a step.

    With a GPU that is device time at the sizes of GPT-2. Without one the default backend runs the captured graph
    through torch, so the time is that of small tensors on the host, and launches and bytes are those of the program in
    Triton's interpreter.
    """
    gpu = machine.device == "cuda"
    shapes = REAL if gpu else SMALL
    args = arguments(SMALL, machine.device)
    exact = tuple([t.double() for t in a] if isinstance(a, list) else a.double() for a in args)
    fused = fusejit.jit(mapped, backend="triton" if gpu else "interpret", fullgraph=True)
    fused(*args)
    loop(*exact)
    error = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(args[0], exact[0], strict=True))
    args = arguments(shapes, machine.device)
    report = fused.explain(*args)
    calls: dict[str, Callable[[], Any]] = {"loop": functools.partial(loop, *args)}
    for name, fn, level in (("fusejit", mapped, "O2"), ("fusejit-O0", mapped, "O0"), ("fusejit-loop", loop, "O2")):
        calls[name] = functools.partial(fusejit.jit(fn, jit_level=level, fullgraph=True), *args)
    for call in calls.values():
        call()
    if gpu:
        calls |= {"torch-fused": fused_by_torch(*args), "copy": copy_of(report.bytes_minimum, machine.device)}
        times = dict(zip(calls, in_turns_on_device(list(calls.values())), strict=True))
    else:
        times = in_turns(calls, SIZES.runs)
    unfused, ours = (
        {"launches": len(report.eager)},
        {"launches": report.launches, "bytes_moved": report.bytes_fused, "error": error},
    )
    ours["compile_ms"] = {stage: round(ms) for stage, ms in report.compile_ms.items()}
    facts = {"loop": unfused, "fusejit-O0": unfused, "fusejit": ours, "fusejit-loop": ours, "copy": {"launches": 1}}
    found = Found(times, {name: facts.get(name, {}) | {"bytes_minimum": report.bytes_minimum} for name in STEPS})
    step = f"AdamW over {SIZES.tensors} tensors"
    found.figures = (
        Figure(
            "HyperMap", f"{step}: launches (a loop: {len(report.eager)})", report.launches, SIZES.tensors - 1, "at most"
        ),
        Figure("HyperMap", f"{step}: time, a loop / HyperMap", found.ratio("loop")),
    )
    return {"AdamW": found}


# -- the run -----------------------------------------------------------------------------------------------------------
COMPILED = tuple(name for name in IFS if name != "eager")
CASES: dict[str, tuple[Callable[[Machine], dict[str, Found]], tuple[str, ...]]] = {
    "ifs, compile and run": (select, COMPILED),
    "ifs, run": (select, tuple(IFS)),
    "hswish of rows": (vmap, tuple(ROWS)),
    "AdamW": (hypermap, STEPS),
    **{f"blocks, {count}": (lazy, tuple(KINDS)) for count in SIZES.blocks},
}
COUNTS = {"ifs": SIZES.ifs, "hswish of rows": SIZES.rows, "AdamW": SIZES.tensors}


@pytest.fixture(scope="module")
def measured(gpu, tmp_path_factory):
    """`measured(case)`: what the measurement that the case belongs to finds; each is made once."""
    done: dict[str, Found] = {}
    with pytest.MonkeyPatch.context() as patch:
        cold = (lambda: None) if REHEARSED else lambda: empty(patch, tmp_path_factory.mktemp("cache"))
        machine = Machine("cuda" if gpu else "cpu", cold)

        def run(case: str) -> Found:
            if case not in done:
                torch.manual_seed(0)
                done.update(CASES[case][0](machine))
            return done[case]

        yield run


@pytest.mark.parametrize(
    ("case", "variant"), [(case, variant) for case, (_, variants) in CASES.items() for variant in variants]
)
def test_seed(case, variant, measured, record, benchmark):
    found = measured(case)
    if variant not in found.us:
        pytest.skip("needs a GPU")
    name, _, part = case.partition(", ")
    count = int(part) if part.isdigit() else COUNTS[name]
    benchmark.group = case
    figures = [asdict(figure) for figure in found.figures] if variant == "fusejit" else None
    record(
        found.us[variant],
        case=case,
        dtype="float32",
        variant=variant,
        count=count,
        ratio=found.ratio(variant),
        figures=figures,
        synthetic=REHEARSED or None,
        **{"pass": "both" if name == "blocks" else "forward"},
        **found.facts.get(variant, {}),
    )
