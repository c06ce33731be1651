"""The front's acceptance cases in every capture mode and on both backends; what a mode cannot capture is still right,
and recorded.

`call` is `fusejit.jit` with a mode and a backend. Details of each case, which do not depend on these, are in the file
of its feature.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from front import if_net, select_net
from torch import nn
from torch.testing import assert_close

import fusejit
from fusejit import HyperMap, MultitypeFuncGraph, grad, jit, jit_class, vmap

MODES = ("ast", "trace", "bytecode")


@pytest.fixture(params=[(mode, backend) for mode in MODES for backend in ("eager", "interpret")], ids="-".join)
def chosen(request: Any) -> tuple[str, str]:
    return request.param


@pytest.fixture
def mode(chosen: tuple[str, str]) -> str:
    return chosen[0]


@pytest.fixture
def call(chosen: tuple[str, str]) -> Any:
    torch._dynamo.reset()
    return functools.partial(jit, capture_mode=chosen[0], backend=chosen[1])


def texts(jitted: Any, *args: Any) -> str:
    """Everything that a call says of what does not run in a graph."""
    return " ".join(map(str, jitted.explain(*args).fallbacks))


STRUCTURES = {
    "value": lambda x: -x,
    "tuple": lambda x: (-x, x + 1),
    "list": lambda x: [-x, -x],
    "dict": lambda x: {"a": -x, "b": (x + 1, [x * 2])},
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_case_01_in_every_mode(call, name):
    f, x = STRUCTURES[name], torch.tensor([1.0, -2.0])
    jitted = call(f, fullgraph=True)
    for number in range(4):
        got, wanted = jitted(x + number), f(x + number)
        assert type(got) is type(wanted)
        assert_close(got, wanted)
    assert jitted.cache_info()[:2] == (1, 3)


def test_case_02_in_every_mode(call):
    """A train step: gradients, momentum and weights, three steps, against the same Python."""

    def step(weight, momentum, x):
        gradient = grad(lambda w: ((x @ w).tanh() - 1).square().mean())(weight)
        momentum.mul_(0.9).add_(gradient)
        weight.sub_(0.1 * momentum)
        return (x @ weight).sum()

    x, start = torch.randn(4, 5), torch.randn(5, 3)
    states = [(start.clone(), torch.zeros(5, 3)) for _ in range(2)]
    jitted = call(step)
    for _ in range(3):
        assert_close(jitted(*states[0], x), step(*states[1], x))
    assert_close(states[0], states[1])


def test_case_04_in_every_mode(call):
    def f(x):
        return x * x.sum().item()

    jitted = call(f)
    for value in (1.0, 2.0, 3.0):
        assert_close(jitted(torch.full((2,), value)), torch.full((2,), 2 * value * value))
    assert "item" in texts(jitted, torch.ones(2))
    with pytest.raises(fusejit.CaptureError, match=r"x \* x.sum\(\).item\(\)"):
        call(f, fullgraph=True)(torch.ones(2))


def test_case_06_in_every_mode(call):
    error = KeyError("mine")

    def f(x, fail):
        y = x + 1
        if fail:
            raise error
        return y * 2

    jitted = call(f)
    for fail in (True, False, True, False):
        if fail:
            with pytest.raises(KeyError) as raised:
                jitted(torch.ones(2), True)
            assert raised.value is error
        else:
            assert jitted(torch.ones(2), False).tolist() == [4, 4]


def test_case_07_in_every_mode(call):
    jitted = call(lambda a, b: a @ b + 1)
    good = torch.ones(2, 3), torch.ones(3, 4)
    for _ in range(2):
        assert jitted(*good).tolist() == [[4] * 4] * 2
        with pytest.raises(RuntimeError, match="mat1 and mat2|size mismatch|shapes"):
            jitted(torch.ones(2, 3), torch.ones(2, 4))
    assert jitted(*good).tolist() == [[4] * 4] * 2


def test_case_08_in_every_mode(call):
    jitted = call(lambda x: x.reshape(x.shape[0], 100) * 2, fullgraph=True)
    for batch in (2, 4, 8, 2):
        x = torch.randn(batch, 10, 10)
        assert_close(jitted(x), x.reshape(batch, 100) * 2)


def test_case_14_in_every_mode(call):
    def half(x):
        y = 2 * x
        return y / y

    zero = torch.zeros(3)
    assert not call(half, fullgraph=True)(zero).isfinite().any()
    assert call(half, fullgraph=True, fast_math=True)(zero).tolist() == [1, 1, 1]


@pytest.mark.parametrize("mode", ("trace", "bytecode"))
@pytest.mark.parametrize("backend", ("eager", "interpret"))
def test_case_42_in_other_modes(mode, backend):
    """Mode "ast" alone makes selects of the `if` (test_convert.py); the others are right, and say where they had to
    stop.
    """
    call = functools.partial(jit, capture_mode=mode, backend=backend)
    x, y = torch.tensor([0]), torch.tensor([1])
    assert call(select_net, fullgraph=True)(x, y).item() == -5050
    with pytest.raises(fusejit.CaptureError, match=r"front.py:\d+: if x < y"):
        call(if_net, fullgraph=True)(x, y)
    jitted = call(if_net)
    assert jitted(x, y).item() == -5050
    assert texts(jitted, x, y)


def test_case_43_in_every_mode(call):
    jitted = call(lambda c, a: (fusejit.select(c, a, 5), fusejit.select(c[0], 2, 3)), fullgraph=True)
    chosen, number = jitted(torch.tensor([True, False]), torch.tensor([2, 3]))
    assert chosen.tolist() == [2, 5] and number.item() == 2


def test_case_44_in_every_mode(call):
    mapped = vmap(fusejit.select, in_axes=(0, 0, None))
    cond, a = torch.tensor([[True, False], [True, True]]), torch.tensor([[2, 3], [3, 1]])
    jitted = call(lambda cond, a: mapped(cond, a, 5), fullgraph=True)
    assert jitted(cond, a).tolist() == [[2, 5], [3, 1]]


def test_case_45_in_every_mode(call):
    x = torch.randn(100, 2) * 100
    assert_close(call(vmap(F.hardswish), fullgraph=True)(x), torch.stack([F.hardswish(row) for row in x]))


def test_case_46_in_every_mode(call):
    x, y, z = torch.tensor([[2], [4], [6]]), torch.tensor([[-3, -2, -1], [3, 2, 1]]), torch.tensor([-1, 3])
    mapped = vmap(lambda x, y, z: x + y + z, in_axes=(0, 1, None), out_axes=1)
    assert call(mapped, fullgraph=True)(x, y, z).tolist() == [[-2, 1, 4], [8, 9, 10]]


def test_case_48_in_every_mode(call):
    def f(a, b):
        return (a.sin() * b).square().sum()

    x, y = torch.randn(3, 5, dtype=torch.float64), torch.randn(3, 5, dtype=torch.float64)
    mapped = vmap(grad(f), in_axes=(1, 1), out_axes=1)
    whole = torch.func.grad(lambda a: torch.func.vmap(f, (1, 1))(a, y).sum())
    assert_close(call(lambda x, y: mapped(x, y), fullgraph=True)(x, y), whole(x))


def test_case_50_in_every_mode(call):
    class Mul(nn.Module):
        def __init__(self):
            super().__init__()
            self.forward = call(self.square_twice)

        def square_twice(self, x):
            x = x * x
            return x * x

    x = torch.ones(3, 3)
    x = Mul()((x + x) + (x + x))
    assert torch.equal((x + x) + (x + x), torch.full((3, 3), 1024.0))
    x, y = torch.tensor([1.0, 2.0, 3.0], requires_grad=True), torch.tensor([4.0, 5.0, 6.0], requires_grad=True)
    add = call(lambda x, y: x + y, fullgraph=True)
    assert add(x, y).tolist() == [5, 7, 9]
    assert [g.tolist() for g in torch.autograd.grad(add(x, y).sum(), (x, y))] == [[1, 1, 1]] * 2


def test_case_51_in_every_mode(call):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.value = 5

        def forward(self, x):
            return x + self.value

    net, x = Net(), torch.tensor([1, 2, 3])
    jitted = call(net, fullgraph=True)
    assert jitted(x).tolist() == [6, 7, 8]
    net.value = 1
    assert jitted(x).tolist() == [2, 3, 4]
    net.value = 5
    assert jitted(x).tolist() == [6, 7, 8]


def prints(x):
    print("in a callee")
    return x + 1


def calls_it(x):
    y = x * 2
    return prints(y)


def test_case_53_in_every_mode(call, mode, capsys):
    with pytest.raises(fusejit.CaptureError, match="print") as error:
        call(calls_it, fullgraph=True)(torch.ones(1))
    text = str(error.value)
    assert 'print("in a callee")' in text and "return prints(y)" in text
    assert text.index("return prints(y)") < text.index('print("in a callee")')
    assert capsys.readouterr().out == ""
    jitted = call(calls_it)
    assert [jitted(torch.ones(1)).item() for _ in range(2)] == [3, 3]
    assert capsys.readouterr().out == "in a callee\n" * 2


class Block(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale, self.line = scale, nn.Linear(4, 4)

    def forward(self, x):
        return x + (self.line(x) * self.scale).tanh()


Lazy = fusejit.lazy_inline(type("Lazy", (Block,), {}))


def test_case_56_in_every_mode(call, mode):
    """Ten equal blocks, one edited after its __init__: right in every mode; regions where Python calls are seen."""
    model = nn.Sequential(*[Lazy(2.0) for _ in range(10)])
    x = torch.randn(3, 4, requires_grad=True)
    jitted = call(model, fullgraph=True)
    assert_close(jitted(x), model(x), rtol=1e-4, atol=1e-4)
    if mode != "bytecode":
        assert [(region.name, region.calls) for region in jitted.explain(x).regions] == [("Lazy_0", 10)]
    model[4].scale = 3.0
    assert_close(jitted(x), model(x), rtol=1e-4, atol=1e-4)


def test_case_57_in_every_mode(call):
    @jit_class
    class Act:
        def __init__(self, number):
            self.number = number

        def __call__(self, x, y):
            return self.number * (x + y)

        def act(self, x, y):
            return self.number * (x * y)

    held = Act(2)
    x, y = torch.tensor(2, dtype=torch.int32), torch.tensor(3, dtype=torch.int32)
    assert call(lambda x, y: held.number + held.act(x, y))(x, y).item() == 14
    assert call(lambda x, y: Act(2)(x, y))(x, y).item() == 10


def test_case_58_in_every_mode(call):
    kinds = MultitypeFuncGraph("kinds")
    kinds.register("Tensor", "Tuple")(lambda x, items: x * 2 + sum(items))
    kinds.register("Tensor", "List")(lambda x, items: x * 3 - sum(items))
    square, by_type = HyperMap(lambda x: x * x), HyperMap(kinds)
    x, y = torch.randn(5), torch.randn(2, 3)
    assert_close(call(lambda v: square(v))(((x, 2), (3, y))), ((x * x, 4), (9, y * y)))
    assert_close(call(lambda a, b: by_type(a, b))((x, y), ((1, 2), [3, 4])), (x * 2 + 3, y * 3 - 7))
