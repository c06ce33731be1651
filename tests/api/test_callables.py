"""Jitted things in the hands of others: torch.jit.trace, wrappers of `forward`, caches and partials of what is not a
function.
"""

from __future__ import annotations

import functools
import subprocess
import sys
import types

import pytest
import torch
from torch import nn

import fusejit

TRACED = """
import torch, fusejit
m = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
f = lambda x, k=2: x * k
x = torch.ones(2, 4)
for fn in (m, f):
    for warm in (False, True):
        jitted = fusejit.jit(fn)
        for _ in range(3 * warm):
            jitted(x)
        traced = torch.jit.trace(jitted, x)
        assert torch.allclose(traced(x - 3), fn(x - 3)), (fn, warm)
        assert torch.allclose(jitted(x - 3), fn(x - 3))
print("traced")
"""


def test_torch_jit_trace_sees_what_is_called():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", TRACED], capture_output=True, text=True, timeout=300
    )  # it crashed
    assert done.returncode == 0 and "traced" in done.stdout, done.stderr[-2000:]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).relu()


def plus_one(fn):
    @functools.wraps(fn)
    def inner(*args, **kwargs):
        return fn(*args, **kwargs) + 1

    return inner


@pytest.mark.parametrize("times", [1, 3])
def test_a_forward_may_be_wrapped(times):
    net, x = Net(), torch.randn(2, 4)
    jitted = fusejit.jit(net)
    original = jitted.forward
    for _ in range(times):
        jitted.forward = plus_one(jitted.forward)
    torch.testing.assert_close(jitted(x), net(x) + times)
    assert jitted.cache_info().specialisations == 1
    jitted.forward = original
    torch.testing.assert_close(jitted(x), net(x))
    del jitted.forward
    torch.testing.assert_close(jitted(x), net(x))


def test_a_forward_may_be_wrapped_as_accelerate_does():
    net, x = Net(), torch.randn(2, 4)
    jitted = fusejit.jit(net)
    inner = jitted.forward.__func__
    jitted.forward = types.MethodType(torch.autocast("cpu", dtype=torch.bfloat16)(inner), jitted)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted = net(x)
    made = jitted(x)
    assert made.dtype is torch.bfloat16
    torch.testing.assert_close(made, wanted)
    jitted.train()
    jitted(x).float().sum().backward()
    assert net.linear.weight.grad is not None


class Slots:
    __slots__ = ("k",)

    def __init__(self):
        self.k = 3

    def __call__(self, x):
        return x * self.k

    def method(self, x):
        return x * self.k


class Rich:
    k = 2

    def __call__(self, x):
        return x * self.k

    partial = functools.partialmethod(lambda self, x, n: x * n, n=5)

    @functools.singledispatchmethod
    def dispatched(self, x):
        return x * 4


@functools.singledispatch
def dispatched(value):
    return value * 7


def scaled(x, k=2):
    return x * k


SLOTS, RICH = Slots(), Rich()
CACHES = {
    "partial": functools.lru_cache(functools.partial(lambda a, b: a + b, 1)),
    "method": functools.lru_cache(SLOTS.method),
    "type": functools.lru_cache(int),
    "cache": functools.lru_cache(functools.lru_cache(lambda a: a + 1)),
    "object": functools.cache(RICH),
    "partial of a partial": functools.lru_cache(functools.partial(functools.partial(max, 1))),
}
CALLABLES = {
    "object with slots": SLOTS,
    "method with slots": SLOTS.method,
    "object": RICH,
    "partialmethod": RICH.partial,
    "singledispatch": dispatched,
    "singledispatchmethod": RICH.dispatched,
    "partial": functools.partial(scaled, k=3),
    "wraps": plus_one(plus_one(scaled)),
    "wrapped object": plus_one(SLOTS),
    "builtin": torch.sin,
    "method of Tensor": torch.Tensor.relu,
}


@pytest.mark.parametrize("mode", ["ast", "trace"])
@pytest.mark.parametrize("name", CACHES)
def test_caches_of_what_is_no_function(name, mode):
    cached = CACHES[name]
    jitted = fusejit.jit(lambda x: x * cached(2), capture_mode=mode, fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(jitted(torch.ones(3)), torch.ones(3) * cached(2))


@pytest.mark.parametrize("name", CALLABLES)
def test_callables(name):
    fn, x = CALLABLES[name], torch.linspace(-1, 1, 5)
    jitted = fusejit.jit(fn)
    for _ in range(2):
        torch.testing.assert_close(jitted(x), fn(x))
