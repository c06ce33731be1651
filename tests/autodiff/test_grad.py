"""Gradients: buffers, absent tangents, second order."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from front import leaf

import fusejit
from fusejit import jit


@pytest.fixture(params=["eager", "interpret"])
def backend(request: Any) -> str:
    return request.param


def test_bn(backend):
    m = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.GELU())
    e = copy.deepcopy(m)
    j = jit(m, backend=backend)
    for mode in (True, True, False, True):
        m.train(mode)
        e.train(mode)
        x = torch.randn(5, 4)
        a = j(x)
        b = e(x)
        torch.testing.assert_close(a, b)
        a.sum().backward()
        b.sum().backward()
        for p, q in zip(m.parameters(), e.parameters()):
            torch.testing.assert_close(p.grad, q.grad)
        for p, q in zip(m.buffers(), e.buffers()):
            torch.testing.assert_close(p, q)
    assert j.cache_info().specialisations == 2, j.cache_info()
    m.half() if False else m.double()
    e.double()
    torch.testing.assert_close(j(x.double()), e(x.double()))
    assert list(j.state_dict()) == list(m.state_dict())
    assert not j.specialisation(x.double()).fallbacks


def test_multi_none(backend):
    def f(x):
        return x.sin(), x.cos() * 3, x.argmax()

    x = leaf(5)
    j = jit(f, backend=backend)
    a, b, c = j(x)
    b.sum().backward()
    torch.testing.assert_close(x.grad, -3 * x.sin())
    x.grad = None
    a, b, c = j(x)
    a.backward(torch.randn(10)[::2])
    assert not c.requires_grad


def test_second(backend):
    x = leaf(5)
    j = jit(lambda x: (x**3).sum(), backend=backend)
    (g,) = torch.autograd.grad(j(x), x, create_graph=True)
    torch.testing.assert_close(g, 3 * x**2)
    if backend == "eager":
        g.sum().backward()
        torch.testing.assert_close(x.grad, 6 * x)
    else:
        with pytest.raises(fusejit.FusejitError, match="eager"):
            g.sum().backward()


def test_without_gradients_there_is_no_backward():
    x = torch.randn(4, 8, requires_grad=True)
    jitted = jit(lambda x: (x * 2).tanh(), backend="interpret")
    for region in (torch.no_grad, torch.inference_mode):
        with region():
            report = jitted.explain(x)
            assert report.forward.launches == 1 and report.backward.launches == 0
            assert not jitted(x).requires_grad
    assert jitted.explain(x).backward.launches == 1


@pytest.mark.parametrize("mode", ["ast", "trace", "bytecode"])
def test_an_input_that_only_unused_results_read_has_no_gradient(backend, mode):
    """As in eager; torch.compile gives zeros there."""

    def f(x, y):
        return x * 2, y * 3, (x * y).sum()

    jitted = fusejit.jit(f, backend=backend, capture_mode=mode, fullgraph=True)
    for used, wanted in (
        ((0,), (2.0, None)),
        ((1,), (None, 3.0)),
        ((0, 1), (2.0, 3.0)),
        ((2,), (5.0, 7.0)),
        ((0, 2), (7.0, 7.0)),
    ):
        x, y = torch.full((3,), 7.0, requires_grad=True), torch.full((3,), 5.0, requires_grad=True)
        results = jitted(x, y)
        sum(results[place].sum() for place in used).backward()
        assert [None if leaf.grad is None else leaf.grad[0].item() for leaf in (x, y)] == list(wanted)


@torch.library.custom_op("fusejit_tests::scaled", mutates_args=())
def scaled(x: torch.Tensor, by: float) -> torch.Tensor:
    return x * by


@scaled.register_fake
def _(x, by):
    return torch.empty_like(x)


def _keep(ctx, inputs, output):
    ctx.save_for_backward(inputs[0])


scaled.register_autograd(lambda ctx, g: (g * 7 * ctx.saved_tensors[0], None), setup_context=_keep)


@pytest.mark.parametrize("mode", ("ast", "trace", "bytecode"))
@pytest.mark.parametrize("backend", ("eager", "interpret"))
def test_an_op_of_the_users_brings_its_backward(mode, backend):
    """`torch.library` makes an autograd.Function of it, and the op in the graph stands for both: it is no Python
    callback that is lost.
    """

    def f(x):
        return (scaled(x.sin(), 2.0) * x).sum()

    jitted = jit(f, capture_mode=mode, backend=backend, fullgraph=True)
    for _ in range(2):
        x = torch.randn(5, requires_grad=True)
        torch.testing.assert_close(jitted(x), f(x))
        torch.testing.assert_close(torch.autograd.grad(jitted(x), x), torch.autograd.grad(f(x), x))
