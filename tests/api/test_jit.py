"""jit: functions, methods and modules, options, errors, threads."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
from front import leaf

import fusejit
from fusejit import jit


@pytest.fixture(params=["eager", "interpret"])
def backend(request: Any) -> str:
    return request.param


def test_method(backend):
    class A:
        def __init__(s, k):
            s.k = k

        @jit(backend=backend)
        def f(s, x, y=2):
            return x * s.k * y

        @staticmethod
        @jit(backend=backend)
        def g(x):
            return x + 1

    a, b = A(1), A(3)
    x = torch.ones(2)
    assert a.f(x)[0] == 2 and b.f(x)[0] == 6 and a.f(x, y=5)[0] == 5 and A.g(x)[0] == 2
    a.k = 4
    assert a.f(x)[0] == 8

    class C:
        def __call__(s, x):
            return x * 2

    assert jit(C(), backend=backend)(x)[0] == 2
    m = torch.nn.Linear(2, 2)
    torch.testing.assert_close(jit(m.forward, backend=backend)(x), m(x))


def test_nested_and_threads(backend):
    inner = jit(lambda x: x * 2, backend=backend)
    outer = jit(lambda x: inner(x) + 1, backend=backend)
    assert outer(torch.ones(2))[0] == 3

    j = jit(lambda x: (x * 2).sum(), backend=backend)
    out = []

    def work(n):
        for i in range(5):
            x = torch.full((n,), float(i), requires_grad=True)
            y = j(x)
            y.backward()
            out.append((y.item(), n * i * 2, x.grad[0].item()))

    ts = [threading.Thread(target=work, args=(k % 3 + 1,)) for k in range(6)]
    [t.start() for t in ts]
    [t.join() for t in ts]
    assert len(out) == 30 and all(a == b and c == 2 for a, b, c in out)


def test_sharing(backend):
    m = torch.nn.Linear(4, 4)
    j, k = jit(m, backend=backend), jit(m, backend=backend)
    x = torch.randn(2, 4)
    j(x)
    k(x)
    assert k.cache_info().misses == 1
    c = copy.deepcopy(j)
    torch.testing.assert_close(c(x), m(x))
    p = pickle.loads(pickle.dumps(j))
    torch.testing.assert_close(p(x), m(x))
    n = torch.nn.Sequential(j, torch.nn.ReLU())
    assert list(n.state_dict()) == ["0.weight", "0.bias"]
    n.load_state_dict(n.state_dict())
    n.half()
    assert m.weight.dtype == torch.half


def test_errors(backend, caplog):
    def f(x):
        if x.sum().item() > 0:
            return x
        return -x

    j = jit(f, backend=backend)
    x = torch.ones(3)
    assert torch.equal(j(x), x)
    assert torch.equal(j(-x), x)
    assert j.cache_info().fallbacks, j.cache_info()
    with pytest.raises(fusejit.CaptureError, match="if x.sum\\(\\).item\\(\\) > 0:"):
        jit(f, backend=backend, fullgraph=True)(x)
    k = KeyError("z")

    def g(x, flag=False):
        if flag:
            raise k
        return x @ x

    j = jit(g, backend=backend)
    with pytest.raises(KeyError) as e:
        j(torch.ones(2, 2), True)
    assert e.value is k
    assert j(torch.ones(2, 2)) is not None
    with pytest.raises(RuntimeError):
        j(torch.ones(2, 3))
    assert j(torch.ones(2, 2)).sum() == 8
    jf = jit(g, backend=backend, fullgraph=True)
    with pytest.raises(RuntimeError):
        jf(torch.ones(2, 3))


def test_hooks(backend):
    x = leaf(3, 4)
    m = torch.nn.Linear(4, 4)
    seen = []
    x.register_hook(lambda g: seen.append("x"))
    m.weight.register_hook(lambda g: seen.append("w"))
    j = jit(m, backend=backend)
    j.register_forward_hook(lambda *a: seen.append("f"))
    j(x).sum().backward()
    assert sorted(seen) == ["f", "w", "x"]
    m.register_forward_hook(lambda m, i, o: o * 2)
    y = j(x)
    torch.testing.assert_close(y, m(x))


def test_compile_for():
    m = torch.nn.MultiheadAttention(64, 4, batch_first=True)
    x = torch.randn(2, 16, 64)
    p = fusejit.compile_for(lambda x: m(x, x, x, need_weights=False)[0], (x,))
    names = [call.target for half in (p.forward, p.backward) for call in half.externs if "attention" in call.target]
    assert names == [
        "aten._scaled_dot_product_efficient_attention.default",
        "aten._scaled_dot_product_efficient_attention_backward.default",
    ], names
    q = torch.randn(2, 4, 16, 16, requires_grad=True)
    strided = (
        q.transpose(1, 2).contiguous().transpose(1, 2)
    )  # a layout that attention on the CPU and on a GPU do not keep alike
    for given in (q, strided):

        def attend(q):
            return (
                torch.nn.functional.scaled_dot_product_attention(q, q, q).permute(2, 0, 1, 3).contiguous().view(32, 64)
            )

        assert fusejit.compile_for(attend, (given,)).backward is not None
    with pytest.raises(fusejit.FusejitError, match="CUDA"):
        jit(torch.sin, backend="triton")(x)
    with pytest.raises(ValueError, match="'O0'"):
        jit(torch.sin, jit_level="O9")


def test_arguments():
    import numpy

    with pytest.raises(TypeError, match=r"args\[1\] is a numpy array: pass torch.from_numpy"):
        jit(lambda x, y: x)(torch.ones(2), numpy.ones(2))
    with pytest.raises(TypeError, match="mask is an iterator"):
        jit(lambda x, mask: x)(torch.ones(2), mask=iter([1]))
    with pytest.raises(TypeError, match=r"args\[0\]\['a'\]"):
        jit(lambda d: d["b"])({"a": numpy.ones(2), "b": torch.ones(2)})
    with pytest.raises(TypeError, match="not 3"):
        jit(3)


def test_options():
    for wrong in (
        {"capture_mode": "x"},
        {"jit_level": 2},
        {"backend": "cuda"},
        {"numerics": "slow"},
        {"fullgraph": 1},
        {"dynamic": 2},
    ):
        with pytest.raises(ValueError, match="choose one of"):
            jit(torch.sin, **wrong)


def test_disable(monkeypatch):
    calls = []

    def f(x):
        calls.append(1)
        return x + 1

    jitted, x = jit(f), torch.ones(2)
    with fusejit.disable_jit():
        jitted(x), jitted(x)
    assert len(calls) == 2 and jitted.cache_info().misses == 0


def test_strict(monkeypatch):
    monkeypatch.setenv("FUSEJIT_STRICT", "1")
    with pytest.raises(fusejit.CaptureError, match="item"):
        jit(lambda x: x.sum().item())(torch.ones(2))


def test_failed_compile(monkeypatch):
    import fusejit.compile

    def broken(*args, **kwargs):
        raise fusejit.CompileError("no kernel")

    good = fusejit.compile.compile_graph
    monkeypatch.setattr(fusejit.compile, "compile_graph", broken)
    x, jitted, full = (
        torch.ones(2),
        jit(lambda x: x + 1, backend="interpret"),
        jit(lambda x: x + 1, backend="interpret", fullgraph=True),
    )
    assert jitted(x)[0] == 2 and "no kernel" in str(jitted.specialisation(x).fallbacks[0])
    with pytest.raises(fusejit.CompileError):
        full(x)
    monkeypatch.setattr(fusejit.compile, "compile_graph", good)
    assert full(x)[0] == 2 and not full.specialisation(x).fallbacks


def test_an_op_that_reads_the_grad_mode_keeps_its_gradients():
    """torch's LSTM on CPUs makes what its backward needs only where autograd records, and a Program runs where it does
    not.
    """
    torch.manual_seed(0)
    lstm, x = torch.nn.LSTM(4, 8), torch.randn(5, 3, 4)
    expected = torch.autograd.grad(lstm(x)[0].sum(), tuple(lstm.parameters()))
    jitted = fusejit.jit(lstm, backend="interpret")
    for got, want in zip(torch.autograd.grad(jitted(x)[0].sum(), tuple(lstm.parameters())), expected, strict=True):
        torch.testing.assert_close(got, want)
    with torch.no_grad():
        torch.testing.assert_close(jitted(x)[0], lstm(x)[0])
