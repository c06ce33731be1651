"""Guards: a changed value that the capture read recompiles; nothing is stale."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from fusejit import jit


@pytest.fixture(params=["eager", "interpret"])
def backend(request: Any) -> str:
    return request.param


def test_guards(backend):
    class M(torch.nn.Module):
        def __init__(s):
            super().__init__()
            s.value = 5
            s.w = torch.nn.Parameter(torch.ones(3))
            s.cfg = {"a": [1, 2]}

        def forward(s, x):
            return x * s.value + s.w * s.cfg["a"][0]

    m = M()
    j = jit(m, backend=backend)
    x = torch.ones(3)
    for step in range(8):
        if step == 1:
            m.value = 1
        if step == 2:
            m.w.data = torch.full((3,), 2.0)
        if step == 3:
            m.w = torch.nn.Parameter(torch.full((3,), 3.0))
        if step == 4:
            m.cfg["a"][0] = 7
        if step == 5:
            m.w.requires_grad_(False)
        if step == 6:
            m.forward = lambda x: x
        if step == 7:
            del m.forward
            M.forward = lambda s, x: x * 100
        torch.testing.assert_close(j(x), m(x))
        assert j(x).requires_grad == m(x).requires_grad


GLOB = 2.0


def glob(x):
    return x * GLOB


def test_global(backend):
    global GLOB
    j = jit(glob, backend=backend)
    x = torch.ones(2)
    assert j(x)[0] == 2
    GLOB = 3.0
    assert j(x)[0] == 3
    GLOB = 2.0
    assert j(x)[0] == 2
    assert j.cache_info().misses == 2
    c = 1

    def f(x):
        return x * c

    j = jit(f, backend=backend)
    assert j(x)[0] == 1
    c = 5
    assert j(x)[0] == 5


def test_tied(backend):
    class M(torch.nn.Module):
        def __init__(s):
            super().__init__()
            s.a = torch.nn.Linear(4, 4, bias=False)
            s.b = torch.nn.Linear(4, 4, bias=False)
            s.b.weight = s.a.weight

        def forward(s, x):
            return s.b(s.a(x).relu())

    m = M()
    e = copy.deepcopy(m)
    j = jit(m, backend=backend)
    x = torch.randn(2, 4)
    j(x).sum().backward()
    e(x).sum().backward()
    torch.testing.assert_close(m.a.weight.grad, e.a.weight.grad)
    m.b.weight = torch.nn.Parameter(torch.zeros(4, 4))
    assert j(x).abs().sum() == 0


def test_functional_call(backend):
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    names = [name for name, _ in module.named_parameters()]

    def f(x, *weights):
        return torch.func.functional_call(module, dict(zip(names, weights)), (x,))

    j = jit(f, backend=backend)
    own = list(module.parameters())
    for _ in range(3):
        args = [torch.randn(4, 3), *[torch.randn_like(weight).requires_grad_() for weight in own]]
        torch.testing.assert_close(j(*args), f(*args))
        torch.testing.assert_close(
            torch.autograd.grad(j(*args).sum(), args[1:]), torch.autograd.grad(f(*args).sum(), args[1:])
        )
        assert all(one is other for one, other in zip(own, module.parameters()))
    assert j.cache_info()[:3] == (1, 5, 1) and not j.cache_info().fallbacks
    assert not j.specialisation(*args).effects


SCRATCH = {"n": 1}


def test_reads_of_what_the_function_wrote(backend):
    class M(torch.nn.Module):
        def __init__(s):
            super().__init__()
            s.n, s.log = 2, [1]

        def forward(s, x):
            s.n = s.n + 3
            s.log.append(4)
            SCRATCH["n"] = 6
            return x * s.n + s.log[-1] + len(s.log) + SCRATCH["n"]

    m = M()
    j = jit(m, backend=backend)
    x = torch.ones(2)
    assert [j(x)[0].item() for _ in range(3)] == [
        17,
        21,
        25,
    ]  # as in eager: what a call leaves behind is what the next computes with
    assert (m.n, m.log, SCRATCH["n"]) == (11, [1, 4, 4, 4], 6)
    assert "the next one computes with it" in str(j.specialisation(x).fallbacks[0]) and j.cache_info().fallbacks


def test_a_function_that_writes_its_own_attributes(backend):
    def counts(x):
        counts.calls = getattr(counts, "calls", 0) + 1
        return x * counts.scale

    counts.scale = 2
    jitted, x = jit(counts, backend=backend), torch.ones(2)
    assert jitted(x)[0] == jitted(x)[0] == 2 and counts.calls == 2
    assert "calls" in str(jitted.specialisation(x).fallbacks[0])
    counts.scale = 3
    assert jitted(x)[0] == 3 and counts.calls == 3
