"""Python numbers among the arguments: constants in the first program, inputs of the program from the second value
on.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_fast_path import entries, general

from fusejit import jit
from fusejit.runtime.fast_path import MISS

BACKENDS = ("eager", "interpret")
X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


def check(jitted, *args):
    """Compare results, their dtypes and gradients with eager; each call three times, the last of them on the short
    way.
    """
    for _ in range(3):
        ours, theirs = (
            [a.detach().clone().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a for a in args]
            for _ in "12"
        )
        got, want = jitted(*ours), jitted.__wrapped__(*theirs)
        torch.testing.assert_close(got, want, equal_nan=True)
        pairs = list(zip(got, want, strict=True)) if isinstance(want, tuple) else [(got, want)]
        assert all(
            one.dtype == other.dtype and torch.equal(one.isnan() | one.signbit(), other.isnan() | other.signbit())
            for one, other in pairs
        )
        if any(other.requires_grad for _, other in pairs):
            sum(one.sum() for one, _ in pairs).backward()
            sum(other.sum() for _, other in pairs).backward()
        for one, other in zip(ours, theirs, strict=True):
            if isinstance(one, torch.Tensor) and one.requires_grad:
                torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("grad", [False, True])
def test_a_learning_rate_that_decays_compiles_twice(backend, grad, monkeypatch):
    def step(p, g, lr, decay=0.5):
        return p - lr * g * decay, (p * lr).sum() * lr, -lr * 2.0 * p / 3 + lr

    jitted, p = jit(step, backend=backend), X.clone().requires_grad_(grad)
    for n in range(4):
        check(jitted, p, X + 1, 0.1 / (n + 1))
    ways = general(monkeypatch)
    for n in range(20):
        jitted(p, X, 3.7 / (n + 1))
    info = jitted.cache_info()
    assert not ways.calls and info.specialisations == info.misses == 2
    assert info.reasons[1] == "argument lr changed: 0.1 → 0.05, now dynamic"
    assert info.reasons[1] in str(jitted.explain(p, X, 0.3))
    check(jitted, p, X, 0.25, 0.75)  # the other number changes for the first time
    check(jitted, p, X, 0.5, 0.125)
    check(jitted, p, X, 0.1, 0.2)
    assert jitted.cache_info().specialisations == 4


def test_one_launcher_serves_every_value():
    jitted = jit(lambda x, lr: x * lr, backend="interpret")
    for n in range(40):
        jitted(X, 0.1 + n)
    (kernel,) = jitted.program(X, 0.5).kernels
    launcher = jitted.program(X, 0.5).call.__globals__[kernel.name]
    assert kernel.params[-1] == "fp64" and len(launcher.kept) == len(launcher.launchers) == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_no_symbol_has_its_own_program(backend):
    jitted = jit(lambda x, a: x * a, backend=backend)
    for value in (0.5, 0.25, math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, 3, 4, 5, True, 1, 0, -3, -2.5, 1e-300):
        check(jitted, X, value)
    run = entries(jitted)[-1].run
    for value in (math.nan, math.inf, 0.0, -0.0, 3, True, None):
        assert run(None, (X, value), {}) is MISS or value == 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_ints(backend):
    def f(i, k):
        return i * k + k * k // 3, i.float() * (k % 5), torch.arange(6) * k

    jitted = jit(f, backend=backend)
    for k in (3, 5, 7, 100_000, 2**29, 2**30 + 1, 12):
        check(jitted, torch.arange(6), k)
    assert jitted.cache_info().specialisations == 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_ints_as_sizes(backend):
    def f(x, k):
        return x[:, :k] * 2, x.new_ones(k, 2) + k, x.repeat(k, 1)

    jitted = jit(f, backend=backend)
    for k in (2, 3, 4, 5):
        check(jitted, X, k)
    assert jitted.cache_info().specialisations <= 3


def test_true_makes_ints_symbols_at_once():
    jitted = jit(lambda x, k, a: x * k + a, dynamic=True)
    for k in (3, 4, 5):
        check(jitted, X, k, 0.5)
    assert jitted.cache_info().specialisations == 1
    fixed = jit(lambda x, k: x * k, dynamic=False)
    for k in (3, 4, 5):
        check(fixed, X, k)
    assert fixed.cache_info().specialisations == 3


def loops(x, k):
    for _ in range(k):
        x = x + 1
    return x


def formats(x, k):
    return x + len(f"{k}") + {3: 1}.get(k, 5)


def kinds(x, k):
    return x + 1 if type(k) is int else x - 1


def roots(x, k):
    return x * math.sqrt(k)


def computed(x, k):
    return x + 1 if k * 0.3 > 1.0 else x - 1


@pytest.mark.parametrize(
    ("target", "values", "reason"),
    [
        (loops, (2, 3, 4), "its value 3 is needed at test_dynamic_numbers.py"),
        (formats, (2, 3, 4), "its value 3 is needed at test_dynamic_numbers.py"),
        (kinds, (2, 3, 4), "calls type(...)"),
        (roots, (2.5, 3.5, 4.5), "its value 3.5 is needed at test_dynamic_numbers.py"),
        (computed, (2.5, 3.5, 4.5), "decides by what it computes from a float argument"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_value_that_the_body_needs_is_said(target, values, reason):
    jitted = jit(target)
    for k in values:
        check(jitted, X, k)
    assert jitted.cache_info()[:4:2] == (3, 3)
    assert "argument k is not dynamic: " in (text := str(jitted.explain(X, values[-1]))) and reason in text
    assert jitted.specialisation(X, values[1]).symbols is None  # compiled for the value, with all that one shape allows


@pytest.mark.parametrize("backend", BACKENDS)
def test_conditions_on_a_number_are_guards(backend):
    def f(x, a, k):
        y = x + 1 if a > 0.5 else x - 1
        return y * 2 if k % 4 == 0 else y

    jitted = jit(f, backend=backend)
    for a, k in ((0.1, 4), (0.2, 8), (0.9, 8), (0.7, 9), (0.5, 12), (0.500001, 7), (0.3, 6)):
        check(jitted, X, a, k)
    assert jitted.cache_info().specialisations <= 6


def test_numbers_look_like_numbers():
    def f(x, k):
        match k:
            case int():
                y = x + 1
            case float():
                y = x + 2
            case _:
                y = x
        return y * (2 if isinstance(k, (str, float)) else 3) * k

    jitted = jit(f)
    for k in (2, 3, 4, 0.5, 0.25, 0.75):
        check(jitted, X, k)
    assert jitted.cache_info().specialisations == 4
    assert "__getattribute__" not in torch.SymInt.__dict__ and "__hash__" in torch.SymInt.__dict__


def test_numbers_in_containers_and_beside_sizes():
    def f(x, options):
        return x * options["scale"] + options["shifts"][1] + x.shape[0]

    jitted = jit(f)
    for n, (scale, shift) in enumerate(((0.5, 2), (0.25, 2), (0.75, 3), (0.3, 4), (0.2, 9))):
        check(jitted, torch.randn(4 + n % 3, 2), {"scale": scale, "shifts": [1, shift]})
    info = jitted.cache_info()
    assert info.specialisations <= 4 and "options['scale'] changed: 0.5 → 0.25" in info.reasons[1]


def test_modules_and_states(monkeypatch):
    layer = torch.nn.Linear(6, 3)
    jitted = jit(lambda x, p: torch.nn.functional.leaky_relu(layer(x), p) * p)
    for p in (0.1, 0.2, 0.3):
        check(jitted, X, p)
    assert jitted.cache_info().specialisations == 2
    layer.weight.data = layer.weight.data.double()
    layer.bias.data = layer.bias.data.double()
    check(jitted, X.double(), 0.4)


NUMBERS = st.one_of(
    st.integers(-2, 40), st.sampled_from([0.0, -0.0, 1.0, 0.5, math.inf, math.nan]), st.floats(-9, 9, width=32)
)


@pytest.mark.full
@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=3, max_size=8), st.sampled_from([None, True]))
def test_any_sequence_of_numbers(calls, dynamic):
    def f(x, a, b):
        y = x * a - b
        return (y / 2 if b > 3 else y + a), x + b

    jitted = jit(f, dynamic=dynamic)
    for a, b in calls:
        check(jitted, X, a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64], ids=str)
@pytest.mark.parametrize("numerics", ["fast", "eager"])
def test_a_varying_number_computes_what_a_constant_does(dtype, numerics):
    def f(x, a):
        return (
            x * a,
            a - x,
            x + a,
            x > a,
            x <= -a,
            torch.where(x > 0, x, a),
            torch.full_like(x, a),
            torch.add(x, x, alpha=2) * a,
        )

    x = (X * 3).to(dtype)
    varying, fixed = (jit(f, backend="interpret", numerics=numerics, dynamic=dynamic) for dynamic in (None, False))
    for a in (0.3, 0.7, 1.1, -3.7):
        for got, want, eager in zip(varying(x, a), fixed(x, a), f(x, a), strict=True):
            assert got.dtype == eager.dtype and torch.equal(got, want)
    assert varying.cache_info().specialisations == (2 if numerics == "fast" else 4)
    if numerics == "eager":
        assert "argument a is not dynamic: dynamic numbers: numerics='eager'" in str(varying.explain(x, 0.7))


def test_comparisons_with_sizes_and_numbers():
    jitted = jit(lambda x, k, a: (x > x.shape[0], x >= k, x < a, x == k * a), backend="interpret")
    for n, (k, a) in enumerate(((2, 0.5), (3, 1.5), (4, 2.5), (2, 3.0))):
        for x in (torch.arange(8 + n), torch.arange(8.0 + n)):
            check(jitted, x, k, a)
    assert jitted.cache_info().fallbacks == 0
