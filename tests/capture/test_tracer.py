"""Capture: what a graph keeps of a Python function, and what it refuses."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from front import check, leaf

from fusejit import jit
from fusejit.capture.source_lines import user_line
from fusejit.capture.tracer import capture
from fusejit.errors import Unsupported


@pytest.fixture(params=["eager", "interpret"])
def backend(request: Any) -> str:
    return request.param


def test_basic(backend):
    s = check(lambda x, y: {"a": (x + y).relu(), "b": [x * 2, None, 3]}, [leaf(3, 4), leaf(4)], backend)
    assert s.backend == backend and not s.fallbacks


def test_views(backend):
    s = check(lambda x: (x.t(), x[0], x, (x + 1), (x + 1).t()), [leaf(3, 4)], backend)
    assert not s.fallbacks, s.fallbacks

    def f(x):
        y = x + 1
        return y, y.t(), y

    s = check(f, [leaf(3, 4)], backend)
    assert not s.fallbacks


def test_inplace(backend):
    def f(x, b):
        b.add_(1)
        y = x * b
        y.mul_(2)
        return y

    check(f, [leaf(3, 4), torch.ones(4)], backend)

    def f(x):
        x.mul_(2)
        return x.sum()

    check(f, [leaf(3, 4)], backend)

    def f(x):
        x.mul_(2)
        return x

    check(f, [torch.randn(3, 4)], backend)

    def f(x, b):
        y = x * b
        b.add_(1)
        return y

    x = leaf(3)
    b = torch.ones(3)
    with torch.no_grad():
        pass
    j = jit(f, backend=backend)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        j(x, b).sum().backward()


def test_overlap(backend):
    base = torch.arange(12.0)

    def f(a, b):
        a.add_(1)
        return a + b

    for fn in (f, jit(f, backend=backend)):
        base = torch.arange(12.0)
        r = fn(base[:6], base[3:9])
        print(r, base)
    b1 = torch.arange(12.0)
    r1 = f(b1[:6], b1[3:9])
    j = jit(f, backend=backend)
    b2 = torch.arange(12.0)
    r2 = j(b2[:6], b2[3:9])
    assert torch.equal(r1, r2) and torch.equal(b1, b2)
    b1 = torch.arange(12.0)
    r1 = f(b1[:6], b1[:6])
    b2 = torch.arange(12.0)
    r2 = j(b2[:6], b2[:6])
    assert torch.equal(r1, r2) and torch.equal(b1, b2)
    a, b = torch.ones(6), torch.ones(6)
    assert torch.equal(j(a, b), torch.full((6,), 3.0))
    b3 = torch.arange(12.0)
    t = b3[:6]
    r3 = j(t, t)
    b4 = torch.arange(12.0)
    t = b4[:6]
    assert torch.equal(r3, f(t, t))
    x = torch.randn(3, 1).expand(3, 4)
    check(lambda x: x * 2, [x], backend)
    y = torch.randn(10).as_strided((4, 4), (2, 1))
    assert torch.equal(jit(lambda x: x * 2, backend=backend)(y), y * 2)


def test_amp(backend):
    m = torch.nn.Linear(4, 4)

    def f(x):
        return m(x).float().softmax(-1)

    def g(x):
        with torch.autocast("cpu", torch.bfloat16):
            return m(x).float().softmax(-1)

    check(g, [leaf(3, 4)], backend)
    with torch.autocast("cpu", torch.bfloat16):
        s = check(f, [leaf(3, 4)], backend)
        assert not s.fallbacks


def test_nograd(backend):
    m = torch.nn.Linear(4, 4)
    j = jit(m, backend=backend)
    x = torch.randn(2, 4)
    with torch.no_grad():
        assert not j(x).requires_grad
    assert j(x).requires_grad
    with torch.inference_mode():
        y = j(x)
        assert y.is_inference()
        torch.testing.assert_close(y, m(x))
        z = torch.randn(2, 4)
        torch.testing.assert_close(j(z), m(z))

    def f(x):
        with torch.no_grad():
            y = x * 2
        return x * y

    s = check(f, [leaf(3)], backend)
    assert not s.fallbacks

    def f(x):
        with torch.inference_mode():
            y = (x * 2).sum()
        return x * 3, y * 1

    x = leaf(3)
    o = jit(f, backend=backend)(x)
    o[0].sum().backward()
    assert x.grad.tolist() == [3] * 3 and not o[1].requires_grad


def test_const(backend):
    t = torch.tensor([1.0, 2.0, 3.0])
    s = check(lambda x: x * torch.tensor(2.0) + torch.tensor([1.0, 2.0, 3.0]) + t, [leaf(3)], backend)
    assert not s.fallbacks
    j = jit(lambda: torch.arange(3) * 2, backend=backend)
    assert j().tolist() == [0, 2, 4]


def test_dropout(backend):
    check(lambda x: F.dropout(x, 0.5), [leaf(100)], "eager")
    x = torch.ones(1000, requires_grad=True)
    y = jit(lambda x: F.dropout(x, 0.5), backend=backend)(x)
    y.sum().backward()
    assert torch.equal(y, x.grad)


def test_effects(backend):
    class M(torch.nn.Module):
        def forward(s, x):
            s.last, s.shape = x * 2, x.shape
            return x + 1

    m = M()
    j = jit(m, backend=backend)
    for value in range(3):
        j(torch.full((2,), value))
        assert m.last.tolist() == [2 * value] * 2 and m.shape == (2,)
        del m.shape
    assert j.specialisation(torch.full((2,), 0)).notes.effects == () and j.cache_info().misses == 1


def test_vmap(backend):
    j = jit(lambda x: torch.vmap(lambda r: r * r.sum())(x), backend=backend)
    x = torch.randn(3, 4)
    torch.testing.assert_close(j(x), torch.vmap(lambda r: r * r.sum())(x))
    j2 = jit(lambda x: x.sin(), backend=backend)
    torch.testing.assert_close(torch.func.grad(lambda x: j2(x).sum())(x), x.cos())


def raises_inside(x):
    def row(r):
        raise ZeroDivisionError

    return torch.vmap(row)(x)


TRANSFORMS = {
    "nothing": lambda x: torch.vmap(lambda r: r)(x),
    "nested": lambda x: torch.vmap(torch.vmap(lambda r: r.sin()))(x),
    "grad": lambda x: torch.func.grad(lambda r: r.sin().sum())(x),
    "rows": lambda x: torch.vmap(torch.func.grad(lambda r: r.sin().sum()))(x),
    "jvp": lambda x: torch.func.jvp(torch.sin, (x,), (x,))[1],
    "jacrev": lambda x: torch.func.jacrev(torch.sin)(x),
    "jacfwd": lambda x: torch.func.jacfwd(torch.sin)(x),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(backend, name):
    x = torch.randn(2, 3)
    torch.testing.assert_close(jit(TRANSFORMS[name], backend=backend)(x), TRANSFORMS[name](x))
    assert torch._C._functorch.get_dynamic_layer_stack_depth() == 0
    x.requires_grad_()
    torch.testing.assert_close(jit(TRANSFORMS[name], backend=backend)(x), TRANSFORMS[name](x))
    assert torch._C._functorch.get_dynamic_layer_stack_depth() == 0


def test_transforms_left_open(backend):
    """A capture that stops inside a transform leaves torch's stack of transforms as it was."""

    def enters(x):
        torch._C._functorch._vmap_increment_nesting(2, "error")
        raise ZeroDivisionError

    for fn in (raises_inside, enters):
        for args in ((torch.randn(2, 3),), (leaf(2, 3),)):
            with pytest.raises((ZeroDivisionError, Unsupported)):  # torch 2.11 shows the transform before its body runs
                capture(fn, args, {})
            assert torch._C._functorch.get_dynamic_layer_stack_depth() == 0


def test_customfn(backend):
    class Fn(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * 7

    x = leaf(3)
    j = jit(lambda x: Fn.apply(x), backend=backend)
    j(x).sum().backward()
    assert x.grad.tolist() == [7] * 3
    assert j.cache_info().fallbacks == 1


def test_lines():
    def f(x):
        y = x.sin()
        z = y * x.cos()
        return z.sum()

    s = jit(f, backend="interpret").specialisation(leaf(4))
    assert s.backward is not None
    for st in ("capture", "joint", "forward", "backward"):
        for n in s.record[st].graph.nodes:
            if n.op == "call_function":
                print(st, n, user_line(n))
                assert "test_tracer" in user_line(n), (st, n)


def test_garbage_collected_while_tracing():
    """A generator under no_grad that the collector closes in the middle of a trace leaves no mark in the graph."""

    @torch.no_grad()
    def numbers():
        yield from range(5)

    def f(x):
        ring = [numbers()]
        next(ring[0])
        ring.append(ring)
        del ring
        garbage = [[] for _ in range(3000)]  # enough for the collector to run by itself
        for item in garbage:
            item.append(item)
        return x * 2

    jitted, x = jit(f), leaf(3)
    for _ in range(5):
        jitted.cache_clear()
        jitted(x)
        found = jitted.specialisation(x)
        assert not found.fallbacks
        assert [node.op for node in found.record["capture"].graph.nodes] == ["placeholder", "call_function", "output"]


def test_a_seed_set_inside(backend):
    def f(x):
        torch.manual_seed(3)
        return torch.rand(4) + x

    jitted = jit(f, backend=backend)
    torch.testing.assert_close(jitted(torch.zeros(4)), jitted(torch.zeros(4)))
    torch.testing.assert_close(jitted(torch.zeros(4)), f(torch.zeros(4)))
    assert "manual_seed" in jitted.specialisation(torch.zeros(4)).fallbacks[0].op


def never():
    raise AssertionError("the dict was asked for what the function does not use")


class Factory(collections.OrderedDict):
    """A dict that makes what it is asked for, as the activation tables of model libraries do; no copy of it may ask."""

    def __getitem__(self, name):
        return super().__getitem__(name)()

    def __setitem__(self, name, value):
        super().__setitem__(name, value if callable(value) else never)


FACTORY = Factory(silu=torch.nn.SiLU, never=never)


@pytest.mark.parametrize("mode", ("ast", "trace"))
def test_a_dict_that_makes_its_values_is_not_asked(mode):
    jitted = jit(lambda x: FACTORY["silu"](x) * 2, capture_mode=mode, backend="eager", fullgraph=True)
    x = torch.randn(3)
    for _ in range(2):
        torch.testing.assert_close(jitted(x), torch.nn.functional.silu(x) * 2)
    assert jitted.cache_info()[:2] == (1, 1)

    def changes(x):
        FACTORY["relu"] = torch.nn.ReLU
        FACTORY.move_to_end("silu")
        return FACTORY["relu"](x)

    torch.testing.assert_close(jit(changes, capture_mode=mode, backend="eager")(x), x.relu())
    assert list(FACTORY) == ["never", "relu", "silu"]  # as eager leaves it
    try:
        FACTORY["silu"] = torch.nn.ReLU
        torch.testing.assert_close(jitted(x), x.relu() * 2)  # what is read is guarded
    finally:
        FACTORY["silu"] = torch.nn.SiLU


class Pair:
    """A plain object that a function makes and returns."""

    def __init__(self, first, second):
        self.first, self.second, self.notes = first, [second, {"sum": second.sum()}], "kept"


@pytest.mark.parametrize("mode", ("ast", "trace"))
def test_an_object_that_the_function_makes_and_returns(mode, backend):
    def f(x):
        pair = Pair(x + 1, x * 2)
        return pair, {"again": pair.first.exp()}

    jitted = jit(f, backend=backend, capture_mode=mode, fullgraph=True)
    pairs = []
    for _ in range(3):
        x = torch.randn(4, requires_grad=True)
        (got, more), (wanted, _) = jitted(x), f(x)
        assert type(got) is Pair and got.notes == "kept" and list(got.second[1]) == ["sum"]
        torch.testing.assert_close(got.first, wanted.first)
        torch.testing.assert_close(got.second[1]["sum"], wanted.second[1]["sum"])
        torch.testing.assert_close(more["again"], wanted.first.exp())
        (gradient,) = torch.autograd.grad(got.second[1]["sum"], x)
        assert gradient.tolist() == [2.0] * 4
        pairs.append(got)
    assert len({id(pair) for pair in pairs}) == 3 and jitted.cache_info()[:2] == (1, 2)
