"""Capture modes: equal results in all three, and options that say their choices. Cases 52 and 54 of the seeds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from front import leaf, prepare, same
from torch import nn
from torch.utils._pytree import tree_leaves

import fusejit
from fusejit import jit
from fusejit.options import BACKENDS, LEVELS, MODES, NUMERICS


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.norm, self.up, self.down, self.scale = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4), 0.5

    def forward(self, x):
        return x + self.scale * self.down(F.gelu(self.up(self.norm(x))))


class Statistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.mean.mul_(0.9).add_(x.detach().mean(0) * 0.1)
        return x - self.mean


def unrolled(x, n=3):
    for i in range(n):
        x = x * (i + 1) + 1
    return x


def nested(x):
    return {"sum": x.sum(0), "parts": [x[:1], (x * 2, None, 3)]}


def in_place(x, b):
    b.add_(1)
    return (x * b).relu_()


def attention(x):
    return F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None])[0, 0]


def keywords(x, *, factor=2.0, mask=None):
    return x * factor if mask is None else torch.where(mask, x, factor)


CASES: dict[str, tuple[Any, list[Any]]] = {
    "pointwise": (lambda x: (x.sin() + x * 2).tanh(), [leaf(3, 4)]),
    "broadcast": (lambda x, y: (x + y).softmax(-1), [leaf(3, 4), leaf(4)]),
    "reduction": (lambda x: (x * x).mean(1, keepdim=True).rsqrt() * x, [leaf(3, 4)]),
    "matmul": (lambda x: (x @ x.t()).exp().sum(), [leaf(3, 4)]),
    "module": (Residual(), [leaf(3, 4)]),
    "sequential": (nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), [leaf(3, 4)]),
    "unrolled": (unrolled, [leaf(3, 4)]),
    "nested": (nested, [leaf(3, 4)]),
    "in_place": (in_place, [leaf(3, 4), torch.ones(4)]),
    "attention": (attention, [leaf(3, 4)]),
    "keywords": (keywords, [leaf(3, 4)]),
    "views": (lambda x: (x.t().reshape(2, 6)[:, 1:].flip(0), x.unfold(1, 2, 1).sum(-1)), [leaf(3, 4)]),
    "integers": (lambda x: (torch.arange(4) * 2 + x.int()).float() * x, [leaf(3, 4)]),
    "indexing": (lambda x: x.index_select(0, torch.tensor([2, 0])) * x[1:, None, 0], [leaf(3, 4)]),
}


def run(call: Any, args: list[Any]) -> Any:
    leaves, given = prepare(args)
    out = call(*given)
    results = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor) and x.requires_grad]
    if results:
        sum((x.float() ** 2).sum() for x in results).backward()
    return out, given, [x.grad for x in leaves if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize("backend", ("eager", "interpret"))
@pytest.mark.parametrize("name", CASES)
def test_case_52_modes_agree(name, backend):
    fn, args = CASES[name]
    wanted = run(fn, args)
    for mode in MODES:
        jitted = jit(fn, capture_mode=mode, backend=backend, fullgraph=True)
        for _ in range(2):
            same(wanted, run(jitted, args))


def test_case_52_statistics_are_kept():
    modules = [Statistics() for _ in range(4)]
    calls = [
        modules[0],
        *[jit(module, capture_mode=mode, backend="interpret") for mode, module in zip(MODES, modules[1:])],
    ]
    for _ in range(3):
        x = torch.randn(3, 4)
        found = [call(x) for call in calls]
        for other, module in zip(found, modules):
            torch.testing.assert_close(other, found[0])
            torch.testing.assert_close(module.mean, modules[0].mean)


WRONG = {
    "capture_mode": (("x", "AST", 1, None), MODES),
    "jit_level": (("O9", 2, "o2"), LEVELS),
    "backend": (("cuda", 0, None), BACKENDS),
    "numerics": (("slow", True), NUMERICS),
    "fullgraph": ((1, 0, "yes", None), (False, True)),
    "dynamic": ((2, 1, 0, "auto"), (None, False, True)),
}


@pytest.mark.parametrize("name", WRONG)
def test_case_52_options_list_their_choices(name):
    values, choices = WRONG[name]
    for value in values:
        with pytest.raises(ValueError, match="choose one of") as raised:
            jit(torch.sin, **{name: value})
        assert f"{name}={value!r}" in str(raised.value)
        assert all(repr(choice) in str(raised.value) for choice in choices)
    for choice in choices:
        jit(torch.sin, **{name: choice})
    with pytest.raises(TypeError):
        jit(torch.sin, no_such_option=1)


@pytest.mark.parametrize("mode", MODES)
def test_case_54_what_jit_takes(mode):
    options: dict[str, Any] = {"capture_mode": mode, "backend": "eager"}
    x = torch.ones(3)

    @jit(**options)
    def function(x):
        return x + 1

    class Plain:
        def __init__(self, k):
            self.k = k

        @jit(**options)
        def method(self, x):
            return x * self.k

        @staticmethod
        @jit(**options)
        def static(x):
            return x - 1

        @jit(**options)
        @classmethod
        def of_class(cls, x):
            return x - 2

        def __call__(self, x):
            return x / self.k

    assert function(x)[0] == 2 and jit(lambda x: x * 5, **options)(x)[0] == 5
    plain = Plain(4)
    assert (
        plain.method(x)[0] == 4
        and Plain(3).method(x)[0] == 3
        and Plain.static(x)[0] == 0
        and Plain.of_class(x)[0] == -1
    )
    assert jit(plain, **options)(x)[0] == 0.25 and jit(plain.__call__, **options)(x)[0] == 0.25
    with pytest.raises(TypeError, match="callable"):
        jit(3, **options)

    @jit(**options)
    class Jitted(nn.Module):
        def __init__(self, k):
            super().__init__()
            self.weight = nn.Parameter(torch.full((3,), float(k)))

        def forward(self, x):
            return x * self.weight

    assert isinstance(Jitted, type) and issubclass(Jitted, nn.Module)
    nets = Jitted(2), Jitted(3)
    assert [net(x)[0].item() for net in nets] == [2, 3] and isinstance(nets[0], Jitted)
    nets[0](x).sum().backward()
    assert nets[0].weight.grad.tolist() == [1, 1, 1] and list(nets[0].state_dict()) == ["weight"]

    @jit(**options)
    class Callable:
        k = 7

        def __call__(self, x):
            return x * self.k

    assert Callable()(x)[0] == 7
    Callable.k = 8
    assert Callable()(x)[0] == 8
    with pytest.raises(TypeError, match="cannot be called"):
        jit(type("Silent", (), {}), **options)


@pytest.mark.parametrize("mode", MODES)
def test_case_54_a_module_twice_compiles_once(mode):
    net, x = nn.Linear(3, 2), torch.ones(2, 3)
    one, other = jit(net, capture_mode=mode), jit(net, capture_mode=mode)
    one(x), other(x), jit(one, capture_mode=mode)(x)
    assert other.cache_info()[:3] == (1, 2, 1)
    assert jit(net, capture_mode=mode, jit_level="O1").cache_info().specialisations == 0


def test_calls_that_look_alike_are_told_apart():
    def f(p, q=None, a=0):
        return p[0] * 2 if q is not None else p[0] * a

    x = (torch.ones(2),)
    for mode in MODES:
        jitted = jit(f, capture_mode=mode)
        for _ in range(2):
            assert jitted(x, {"a": 3})[0] == 2 and jitted(x, a=3)[0] == 3


def test_fullgraph_in_each_mode():
    def f(x):
        return x * x.sum().item()

    for mode in MODES:
        with pytest.raises(fusejit.CaptureError, match=r"test_modes.py:\d+: return x \* x.sum\(\).item\(\)"):
            jit(f, capture_mode=mode, fullgraph=True)(torch.ones(2))
        assert jit(f, capture_mode=mode)(torch.ones(2))[0] == 2
