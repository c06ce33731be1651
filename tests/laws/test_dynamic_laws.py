"""Laws of dynamic sizes: random programs whose ops fit every size, compiled once, are exact for sizes that they were
not compiled for.

Values are small whole numbers held in float32, so that any order of summation is exact.
"""

from __future__ import annotations

import random

import pytest
import torch

from fusejit import jit
from fusejit.codegen.ir.size import Scope, atom, divide, evaluate, hint, spell, symbol

SIZES = (2, 3, 5, 7, 16, 17, 31, 32, 48)


def small(x: torch.Tensor) -> torch.Tensor:
    return torch.remainder(x, 7) - 3


OPS = {
    "relu": lambda x: torch.relu(x) + 1,
    "size": lambda x: small(x * x.shape[0] + x.shape[-1]),
    "numel": lambda x: small(x + x.numel()),
    "sum": lambda x: small(x + x.sum(0, keepdim=True)),
    "last": lambda x: small(x - x.sum(-1, keepdim=True)),
    "amax": lambda x: x - x.amax(-1, keepdim=True),
    "argmax": lambda x: x + small(x.argmax(-1, keepdim=True).float()),
    "transpose": lambda x: x.transpose(0, -1),
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(1, 0),
    "cut": lambda x: x[1:] if x.shape[0] > 2 else x,
    "every": lambda x: x[::2] + 1,
    "stack": lambda x: torch.stack([x, small(x + 1)], 1).flatten(0, 1),
    "cat": lambda x: torch.cat([x, x[:1], small(x * 2)], 0),
    "pad": lambda x: torch.nn.functional.pad(x, (2, 1), value=2.0),
    "fold": lambda x: x.reshape(-1, x.shape[-1]) * 2,
    "flat": lambda x: small(x.reshape(-1).cumsum(0)).reshape(x.shape),
    "outer": lambda x: small(x.sum(-1)[:, None] * x[:1] + x),
    "arange": lambda x: small(x + torch.arange(x.shape[-1])),
    "triangle": lambda x: x.masked_fill(torch.ones(x.shape[0], x.shape[-1]).triu(1).bool(), 1.0),
    "index": lambda x: x.index_select(0, torch.arange(x.shape[0] - 1, -1, -1)),
    "gather": lambda x: x.gather(-1, x.argmax(-1, keepdim=True).expand(x.shape)),
    "mean": lambda x: small((x - x).mean(-1, keepdim=True) + x),
    "repeat": lambda x: x.repeat(2, 1),
    "mm": lambda x: small(x @ x.transpose(0, 1) @ x),
}


def program(rng: random.Random) -> tuple[list[str], object]:
    names = [rng.choice(list(OPS)) for _ in range(rng.randrange(2, 6))]

    def run(x: torch.Tensor) -> torch.Tensor:
        for name in names:
            x = OPS[name](x)
        return x

    return names, run


@pytest.mark.parametrize("seed", range(8))
def test_a_random_program_is_exact_for_every_size(seed):
    rng = random.Random(seed)
    names, run = program(rng)
    jitted = jit(run, backend="interpret", dynamic=True)
    for _ in range(5):
        n, m = rng.choice(SIZES[:6]), rng.choice(SIZES[:6])
        x = torch.randint(-3, 4, (n, m)).float()
        assert torch.equal(jitted(x), run(x)), (names, n, m)
    info = jitted.cache_info()
    found = jitted.specialisation(x)
    assert info.fallbacks == 0 and info.specialisations <= 5, (names, info)
    assert not any("all sizes are numbers" in line for line in found.dynamic), (names, found.dynamic)


@pytest.mark.parametrize("seed", range(4))
def test_gradients_of_a_random_program(seed):
    rng = random.Random(100 + seed)
    chosen = [
        rng.choice(("sum", "transpose", "flip", "roll", "cut", "stack", "cat", "pad", "fold", "mm2", "outer2", "amax"))
        for _ in range(3)
    ]
    more = {"mm2": lambda x: x @ x.transpose(0, 1) @ x / 8, "outer2": lambda x: x.sum(-1)[:, None] * x[:1] + x,
            "sum": lambda x: x + x.sum(0, keepdim=True), "stack": lambda x: torch.stack([x, x * 3], 1).flatten(0, 1),
            "cat": lambda x: torch.cat([x, x[:1], x * 2], 0)}  # fmt: skip

    def run(x):
        for name in chosen:
            x = (more.get(name) or OPS[name])(x)
        return x * 2

    jitted = jit(run, backend="interpret", dynamic=True)
    for _ in range(4):
        n, m = rng.choice(SIZES[:5]), rng.choice(SIZES[:5])
        x = torch.randint(-3, 4, (n, m)).double() + torch.arange(n * m).reshape(n, m) / 64
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        got, want = jitted(ours), run(theirs)
        torch.testing.assert_close(got, want)
        for weight in (torch.ones(()).expand(want.shape), torch.randn(want.shape, dtype=want.dtype)):
            (a,), (b,) = torch.autograd.grad(got, ours, weight, True), torch.autograd.grad(want, theirs, weight, True)
            torch.testing.assert_close(a, b, msg=lambda text: f"{chosen} {n} {m}: {text}")  # noqa: B023


# -- sizes


def polynomial(rng: random.Random, names: tuple) -> object:
    total = rng.randrange(-3, 4)
    for _ in range(rng.randrange(1, 4)):
        term = rng.randrange(-4, 5)
        for _ in range(rng.randrange(3)):
            term = term * rng.choice(names)
        total = total + term
    return total


def test_sizes_are_what_their_values_are():
    rng = random.Random(0)
    names = (symbol("s0"), symbol("s1"))
    for _ in range(400):
        a, b = polynomial(rng, names), polynomial(rng, names)
        values = {"s0": rng.randrange(2, 9), "s1": rng.randrange(2, 9)}
        with Scope(values) as scope:
            x, y = hint(a), hint(b)
            quotient = divide(a * b, b)
            if b != 0:
                assert quotient == a, (a, b)
            assert (a < b, a <= b, a > b, a >= b) == (x < y, x <= y, x > y, x >= y)
            if y > 0:
                assert hint(atom("floordiv", a, b)) == x // y and hint(atom("mod", a, b)) == x % y
            assert hint(atom("max", a, b)) == max(x, y) and hint(atom("min", a, b)) == min(x, y)
        # what was assumed is true of these sizes, and where it is true of others the answers are the same
        made: dict = {}
        exec("\n    ".join(["def holds(s0, s1):", *scope.steps, "return True"]), made)
        assert made["holds"](**values)
        for _ in range(8):
            other = {"s0": rng.randrange(2, 40), "s1": rng.randrange(2, 40)}
            if made["holds"](**other):
                assert (evaluate(a, other) < evaluate(b, other)) == (x < y)


def test_a_product_that_vanishes_only_for_some_sizes_is_an_assumption():
    with Scope({"s0": 5}) as scope:
        assert bool(symbol("s0") * 3) and not scope.guards
        assert symbol("s0") - 2 and list(scope.guards) == ["(-2 + s0) != 0"]
        assert int(symbol("s0")) == 5 and "s0 == 5" in scope.guards
        assert max(symbol("s0"), 4) == symbol("s0") and len(scope.guards) == 3
    with pytest.raises(TypeError, match="outside of a compilation"):
        bool(symbol("s0"))


def test_torch_s_expressions_are_spelt():
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    env = ShapeEnv()
    value = env.create_unbacked_symint()
    name = str(value.node.expr)
    assert spell(value.node.expr, {name: "n"}) == "n"


def test_an_index_is_checked_where_it_is_used():
    def f(x):
        y = x.index_select(0, torch.arange(x.shape[0] - 1, -1, -1))
        return torch.cat([y, y[:1], y * 2], 0)

    for dynamic in (False, True):
        jitted = jit(f, backend="interpret", dynamic=dynamic)
        for n in (17, 5):
            x = torch.randn(n, 7)
            assert torch.equal(jitted(x), f(x))
