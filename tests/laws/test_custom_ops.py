"""Ops of the user's own that change their operands in place are calls of a Program, between kernels, in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fusejit

LOG: list[str] = []


@torch.library.custom_op("custom_ops_test::scale", mutates_args=("x",))
def scale(x: Tensor, by: float) -> None:
    LOG.append("scale")
    x.mul_(by)


@torch.library.custom_op("custom_ops_test::both", mutates_args=("out", "count"))
def both(x: Tensor, out: Tensor, count: Tensor) -> Tensor:
    LOG.append("both")
    out.copy_(x + count)
    count.add_(1)
    return x * 3


both.register_fake(lambda x, out, count: torch.empty_like(x))


@torch.library.custom_op("custom_ops_test::each", mutates_args=("values",))
def each(values: list[Tensor], by: Tensor | None = None) -> None:
    LOG.append("each")
    for value in values:
        value.mul_(2 if by is None else by)


@torch.library.custom_op("custom_ops_test::pieces", mutates_args=("x",))
def pieces(x: Tensor) -> list[Tensor]:
    LOG.append("pieces")
    x.add_(1)
    return [x * 2, x * 3]


pieces.register_fake(lambda x: [torch.empty_like(x), torch.empty_like(x)])


def of_a_value(x):
    y = x.sin().clone()
    scale(y, 2.0)
    return y.exp()


def of_an_argument(x):
    scale(x, 2.0)
    z = x + 1
    scale(x, 3.0)
    return z * x


def of_views(x):
    y = (x * 2).view(2, -1)
    scale(y[:, 1:], 5.0)
    scale(y[0], 2.0)
    scale(y.t(), 1.5)
    return y.sum(1), y


def of_two(x):
    out, count = torch.empty_like(x), x.cos()
    result = both(x, out, count)
    return out + result, count


def of_a_list(x):
    a, b = x * 2, x + 3
    each([a, b])
    each([a], x)
    return a * b


def of_a_copy_expanded(x):
    y = (x * 2).view(2, -1).t()
    z = y.expand(3, *y.shape).contiguous()
    scale(z, 2.0)
    scale(y, 3.0)
    return z + y


def of_overlapping_views(x):
    y = x * 2
    a, b = y[:3], y[1:]
    scale(a, 2.0)
    scale(b, 3.0)
    return a + b, y


def unread(x):
    y = x + 1
    scale(y, 2.0)
    return x.exp()


def in_an_arm(x):
    if x.sum() > 0:
        scale(x, 2.0)
        y = x + 1
    else:
        y = x - 1
    return y, x * 1


def in_a_loop(x):
    while x.abs().sum() < 100:
        x = x * 2
        scale(x, 1.5)
    return x


def behind_gradients(x):
    y = (x * 2).detach()
    scale(y, 2.0)
    return (x.sin() * y).sum()


def without_gradients(x):
    h = x.cos()
    with torch.no_grad():
        state = h * 2
        scale(state, 0.5)
        both(state, torch.empty_like(state), state.clone())
    return (h * state).exp().sum()


FUNCTIONS = (
    of_a_value,
    of_an_argument,
    of_views,
    of_two,
    of_a_list,
    of_a_copy_expanded,
    of_overlapping_views,
    unread,
    in_an_arm,
    in_a_loop,
)
GRADIENTS = (behind_gradients, without_gradients)


def results_of(fn: Callable, x: Tensor) -> tuple[tuple[Tensor, ...], list[str]]:
    LOG.clear()
    made = fn(x)
    return made if isinstance(made, tuple) else (made,), list(LOG)


def check(jitted: Any, fn: Callable, value: Tensor) -> None:
    one, other = value.clone(), value.clone()
    (made, calls), (wanted, asked) = results_of(jitted, one), results_of(fn, other)
    for left, right in zip((*made, one), (*wanted, other), strict=True):
        torch.testing.assert_close(left, right)
        assert left.stride() == right.stride()
    assert calls == asked


@pytest.mark.parametrize("mode", ["ast", "bytecode"])
@pytest.mark.parametrize("backend", ["interpret", "auto"])
@pytest.mark.parametrize("fn", FUNCTIONS)
def test_changes_in_place_are_calls(fn: Callable, backend: str, mode: str) -> None:
    if fn is in_a_loop and mode == "bytecode":
        return  # Dynamo's to cut, see test_dynamo_backend.py
    fullgraph = mode == "ast" or fn is not in_an_arm
    jitted = fusejit.jit(fn, backend=backend, capture_mode=mode, fullgraph=fullgraph)
    for value in (torch.arange(1.0, 5), -torch.arange(1.0, 5), torch.arange(1.0, 5)):
        check(jitted, fn, value)
    if fullgraph:
        assert not jitted.explain(torch.arange(1.0, 5)).fallbacks


def test_kernels_stand_around_them() -> None:
    program = fusejit.jit(of_a_value, backend="interpret").program(torch.ones(4))
    assert program.launches == 2 and [call.target for call in program.externs] == [
        "higher_order.auto_functionalized_v2"
    ]


@pytest.mark.parametrize("fn", GRADIENTS)
def test_gradients_around_them(fn: Callable) -> None:
    jitted = fusejit.jit(fn, backend="interpret", fullgraph=True)
    for _ in range(2):
        one, other = [torch.arange(4.0).requires_grad_() for _ in range(2)]
        jitted(one).backward()
        fn(other).backward()
        torch.testing.assert_close(one.grad, other.grad)


def test_sizes_that_vary() -> None:
    jitted = fusejit.jit(of_a_value, backend="interpret", dynamic=True)
    for size in (3, 5, 9, 16):
        check(jitted, of_a_value, torch.linspace(-1, 1, size))


def test_a_list_of_results_falls_back_with_its_line() -> None:
    def fn(x):
        y = x * 2
        one, two = pieces(y)
        return one + two + y

    jitted = fusejit.jit(fn, backend="interpret")
    check(jitted, fn, torch.arange(4.0))
    (fallback,) = jitted.explain(torch.arange(4.0)).fallbacks
    assert "custom_ops_test::pieces" in str(fallback) and "test_custom_ops.py" in str(fallback)  # torch's own words
