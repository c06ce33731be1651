"""`jit_class`: the samples of the page, inheritance, nesting, and its errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import fusejit
from fusejit import jit_class


@pytest.fixture(params=["eager", "interpret"])
def backend(request: Any) -> str:
    return request.param


@pytest.fixture(params=["ast", "trace", "off"])
def run(request: Any, backend: str):
    """jit in each mode, and switched off."""
    with fusejit.disable_jit(request.param == "off"):
        yield lambda net: fusejit.jit(
            net, capture_mode="ast" if request.param == "off" else request.param, backend=backend, fullgraph=True
        )


@jit_class
class Holds:
    value = torch.tensor([1, 2, 3])


@jit_class
class Inner:
    def __init__(self):
        self.value = torch.tensor([1, 2, 3])


@jit_class
class Outer:
    def __init__(self):
        self.inner = Inner()


@jit_class
class Act:
    def __init__(self, val):
        self.number = val

    def act(self, x, y):
        return self.number * (x + y)


@jit_class
class Adds:
    def __init__(self, val):
        self.number = val + 3


@jit_class
class Called:
    def __init__(self, number):
        self.number = number

    def __call__(self, x, y):
        return self.number * (x + y)


class Net(nn.Module):
    def __init__(self, body, **parts):
        super().__init__()
        self.body = body
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args):
        return self.body(self, *args)


def test_case_57(run):
    x, y = torch.tensor(2, dtype=torch.int32), torch.tensor(3, dtype=torch.int32)
    for net, args, wanted in (
        (Net(lambda self: Holds().value), (), [1, 2, 3]),
        (Net(lambda self: Holds.value), (), [1, 2, 3]),
        (Net(lambda self: self.inner_net.inner.value, inner_net=Outer()), (), [1, 2, 3]),
        (Net(lambda self, x, y: self.inner_net.number + self.inner_net.act(x, y), inner_net=Act(2)), (x, y), 12),
        (Net(lambda self: Adds(2).number), (), 5),
        (Net(lambda self, x, y: Called(2)(x, y), ), (x, y), 10),
    ):  # fmt: skip
        jitted = run(net)
        for _ in range(2):
            result = jitted(*args)
            assert (result.tolist() if isinstance(result, torch.Tensor) else result) == wanted
            assert not isinstance(result, torch.Tensor) or not args or result.dtype is torch.int32


def test_case_57_errors(backend):
    with pytest.raises(TypeError, match="cannot be used for nn.Module: Net"):
        jit_class(Net)
    for wrong in (3, lambda x: x, torch.ones(1)):
        with pytest.raises(TypeError, match="jit_class can only be used for class type"):
            jit_class(wrong)
    net = Net(lambda self, x: Adds(2)(x))
    for fullgraph in (True, False):
        with pytest.raises(ValueError, match="'Adds' has no __call__ function"):
            fusejit.jit(net, backend=backend, fullgraph=fullgraph)(torch.ones(2))
    with pytest.raises(TypeError, match="'Adds' object is not callable"), fusejit.disable_jit():
        fusejit.jit(net)(torch.ones(2))
    with pytest.raises(TypeError, match="'Adds' object is not callable"):
        Adds(2)(torch.ones(2))


def test_methods_are_jitted_and_guarded():
    runs = []

    @jit_class(backend="interpret")
    class Scale:
        factor = 2

        def __init__(self, by):
            self.by = by

        def times(self, x):
            runs.append(1)
            return self._helper(x) * self.by + self.factor

        def _helper(self, x):
            return x + 1

        @staticmethod
        def double(x):
            return x * 2

        @classmethod
        def shifted(cls, x):
            return x + cls.factor

        @property
        def twice(self):
            return self.by * 2

    one, two, x = Scale(3), Scale(5), torch.ones(2)
    assert [one.times(x)[0], two.times(x)[0], one.times(x)[0], Scale.times(two, x)[0]] == [8, 12, 8, 12]
    assert runs == [1, 1, 1, 1]  # the bodies ran on fake tensors only; each call repeats what they do to a list
    one.by = 10
    assert one.times(x)[0] == 22 and one.twice == 20
    assert Scale.double(x)[0] == 2 and one.shifted(x)[0] == 3 and one.times.explain(x).launches == 1
    Scale.factor = 7
    assert one.times(x)[0] == 27 and Scale.shifted(x)[0] == 8
    assert isinstance(Scale.__dict__["times"], fusejit.JitFunction) and not isinstance(
        Scale.__dict__["_helper"], fusejit.JitFunction
    )
    runs.clear()
    with fusejit.disable_jit():
        one.times(x)
    assert runs == [1]


def test_inheritance_and_gradients(backend):
    registered = []

    @jit_class(backend=backend)
    class Base:
        def __init_subclass__(cls, tag="", **more):
            registered.append((cls.__name__, tag))

        def __init__(self, w):
            self.w = w

        def f(self, x):
            return self.g(x) * self.w

        def g(self, x):
            return x + 1

    class Child(Base, tag="child"):
        def g(self, x):
            return super().g(x) * 2

        def only_here(self, x):
            return x.exp()

    assert registered == [("Child", "child")]
    assert all(isinstance(Child.__dict__[name], fusejit.JitFunction) for name in ("g", "only_here"))
    w, x = torch.ones(2, requires_grad=True), torch.ones(2)
    child = Child(w)
    assert child.f(x).tolist() == [4, 4] and Base(w).f(x).tolist() == [2, 2]
    child.f(x).sum().backward()
    assert w.grad.tolist() == [4, 4]
    assert_close(child.only_here(x), x.exp())

    @fusejit.jit(backend=backend, fullgraph=True)
    def outside(x):
        return Child(w).f(x).sum() + child.only_here(x).sum()

    assert_close(outside(x), torch.tensor(8.0) + 2 * torch.tensor(1.0).exp())
    assert outside.explain(x).launches <= 2
