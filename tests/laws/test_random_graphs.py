"""Random graphs of pointwise ops, views, reductions, pieces and indexing: fused equals eager, whatever is merged with
what.

Values are small integers held in float32, so that any order of summation is exact and results must be equal to the bit.
"""

from __future__ import annotations

import random

import pytest
import torch

import fusejit
from fusejit.codegen.ir.analysis import power_of_two
from fusejit.codegen.ir.size import product
from fusejit.codegen.passes import schedule
from fusejit.codegen.schedule.choice import Schedule


def small(x: torch.Tensor) -> torch.Tensor:
    """Keep values small whole numbers."""
    return torch.remainder(x, 7) - 3


def grow(rng: random.Random, values: list[torch.Tensor], plan: list) -> None:
    """Choose one op that fits the values so far, note it in `plan` as a function of the list, and append its result."""
    i = rng.randrange(len(values))
    x = values[i]
    kind = rng.choice(
        (
            "add",
            "mul",
            "where",
            "sum",
            "amax",
            "permute",
            "reshape",
            "slice",
            "flip",
            "cat",
            "pad",
            "expand",
            "index",
            "roll",
            "stack",
            "chunk",
            "wide",
        )
    )
    dim = rng.randrange(x.dim()) if x.dim() else 0
    op = None
    if kind in ("add", "mul", "where"):
        fits = [j for j, y in enumerate(values) if broadcasts(x, y)]
        j = rng.choice(fits)
        op = {
            "add": lambda v: small(v[i] + v[j]), "mul": lambda v: small(v[i] * v[j]),
            "where": lambda v: torch.where(v[i] > v[j], v[i], -v[j]),
        }[kind]  # fmt: skip
    elif x.dim() == 0:
        op = lambda v: small(v[i] * 2 + 1)  # noqa: E731
    elif kind == "sum":
        keep = rng.random() < 0.5
        op = lambda v: small(v[i].sum(dim, keepdim=keep))  # noqa: E731
    elif kind == "amax":
        op = lambda v: v[i] - v[i].amax(dim, keepdim=True)  # noqa: E731
    elif kind == "permute":
        order = rng.sample(range(x.dim()), x.dim())
        op = lambda v: v[i].permute(order)  # noqa: E731
    elif kind == "reshape":
        new = regroup(rng, x.numel())
        op = lambda v: v[i].reshape(new)  # noqa: E731
    elif kind == "slice" and x.shape[dim] > 1:
        start, step = rng.randrange(x.shape[dim] - 1), rng.choice((1, 1, 2))
        op = lambda v: v[i][(slice(None),) * dim + (slice(start, None, step),)]  # noqa: E731
    elif kind == "flip":
        op = lambda v: v[i].flip(dim)  # noqa: E731
    elif kind in ("cat", "stack"):
        op = lambda v: (torch.cat if kind == "cat" else torch.stack)([v[i], small(v[i] + 1)], dim)  # noqa: E731
    elif kind == "pad":
        op = lambda v: torch.nn.functional.pad(v[i], (1, 2), value=5.0)  # noqa: E731
    elif kind == "expand":
        op = lambda v: v[i].unsqueeze(0).expand(2, *v[i].shape)  # noqa: E731
    elif kind == "index":
        places = torch.tensor([rng.randrange(-x.shape[dim], x.shape[dim]) for _ in range(3)])
        op = lambda v: v[i].index_select(dim, places % v[i].shape[dim])  # noqa: E731
    elif kind == "roll":
        op = lambda v: v[i].roll(2, dim)  # noqa: E731
    elif kind == "chunk" and x.shape[dim] % 2 == 0:
        op = lambda v: small(v[i].chunk(2, dim)[0] + v[i].chunk(2, dim)[1])  # noqa: E731
    elif kind == "wide":
        op = lambda v: v[i] - small(v[i].sum(dim, keepdim=True))  # noqa: E731
    if op is not None:
        made = op(values)
        if 0 < made.numel() <= 600:
            values.append(made)
            plan.append(op)


def broadcasts(x: torch.Tensor, y: torch.Tensor) -> bool:
    try:
        return product(torch.broadcast_shapes(x.shape, y.shape)) <= 600
    except RuntimeError:
        return False


def regroup(rng: random.Random, n: int) -> tuple[int, ...]:
    shape = []
    while n > 1:
        shape.append(rng.choice([d for d in range(2, n + 1) if n % d == 0]))
        n //= shape[-1]
    return tuple(shape)


def random_function(seed: int):
    """(function, inputs): a graph of about twelve ops with three outputs."""
    rng = random.Random(seed)
    shapes = rng.choice([((4, 6), (6,)), ((2, 3, 4), (3, 1)), ((5, 8), (5, 8)), ((2, 4, 6), (4, 6))])
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randint(-3, 4, s, generator=generator).float() for s in shapes]
    values, plan = list(inputs), []
    for _ in range(14):
        grow(rng, values, plan)
    chosen = sorted({len(inputs) + rng.randrange(len(plan)) for _ in range(2)} | {len(values) - 1})

    def f(*args):
        made = list(args)
        for op in plan:
            made.append(op(made))
        return tuple(made[k] for k in chosen)

    return f, inputs


def check(seed: int) -> None:
    f, inputs = random_function(seed)
    fused = fusejit.jit(f, backend="interpret", fullgraph=True)
    for got, wanted in zip(fused(*inputs), f(*inputs), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0, msg=lambda m: f"seed {seed}: {m}")
        assert got.is_contiguous() or not wanted.is_contiguous()


@pytest.mark.parametrize(
    "seed", [*range(40), 213, 313, 406, 432]
)  # the last four: data-dependent indices into what a view computes
def test_fused_equals_eager(seed, monkeypatch):
    monkeypatch.setenv("FUSEJIT_DEBUG", "1")
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40, 600))
def test_more_graphs(seed, monkeypatch):
    monkeypatch.setenv("FUSEJIT_DEBUG", "1")
    check(seed)


@pytest.mark.parametrize("seed", range(8))
def test_any_schedule_is_correct(seed, monkeypatch):
    """A schedule is a pure choice: tiles of a few elements and loops over every row change nothing."""

    def tiny(cluster, device):
        ordered = schedule.order(cluster).coalesced
        if ordered.programs:
            return schedule.schedule(cluster, device)
        rng = random.Random(seed)
        if not ordered.reduce:
            lines = len(ordered.axes) > 1 and all(
                (s.layout.strides or (0,))[-1] and not (s.index or s.mode) for s in ordered.stores
            )
            return ordered, Schedule(
                rng.choice(("pointwise", "pointwise_row")[: 1 + lines]), (("XBLOCK", rng.choice((4, 64))),), 1
            )
        rows = power_of_two(product(ordered.reduce))
        name, block = rng.choice((("reduction_looped", 2), ("reduction_looped", 8), ("reduction_persistent", rows)))
        return ordered, Schedule(
            name, (("XBLOCK", rng.choice((1, 4))), ("RBLOCK", block)), 1, 2 if name == "reduction_looped" else 1
        )

    monkeypatch.setattr("fusejit.compile.schedule", tiny)
    check(seed + 1000)
