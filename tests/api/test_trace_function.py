"""`fusejit.trace`, `partial_trace`, `mutable` and `fast_math`: the cases of the trace page, and what their options
promise.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import fusejit


@pytest.fixture(params=["eager", "interpret"])
def backend(request: Any) -> str:
    return request.param


@pytest.fixture(params=[False, True], ids=["values", "symbolic"])
def symbolic(request: Any) -> bool:
    return request.param


def nested(a):
    if isinstance(a, dict):
        return {name: nested(item) for name, item in a.items()}
    return type(a)(map(nested, a)) if isinstance(a, (list, tuple)) else a.tolist()


def test_case_01(backend, symbolic):
    x = torch.tensor([1.0, -2.0])
    for wrap, wanted in (
        (lambda y: y, [-1.0, 2.0]), (lambda y: (y,), ([-1.0, 2.0],)), (lambda y: [y, y], [[-1.0, 2.0]] * 2),
        (lambda y: {"a": y, "b": (y, [y])}, {"a": [-1.0, 2.0], "b": ([-1.0, 2.0], [[-1.0, 2.0]])}),
    ):  # fmt: skip
        traced = fusejit.trace(lambda x, wrap=wrap: wrap(-x), symbolic=symbolic, backend=backend)
        for _ in range(4):
            assert nested(traced(x)) == wanted
        assert traced.cache_info().misses == 1


def loss_of(weights, x, label):
    return F.cross_entropy((x @ weights[0]).relu() @ weights[1], label)


def test_case_02(backend):
    """A train step of SGD with momentum, traced whole: equal losses, symbolic or not, and equal to torch's own
    optimizer.
    """

    def step(x, label, *, weights, momenta):
        gradients, loss = torch.func.grad_and_value(loss_of)(weights, x, label)
        for weight, momentum, gradient in zip(weights, momenta, gradients):
            momentum.mul_(0.9).add_(gradient)
            weight.sub_(0.1 * momentum)
        return loss

    x, label = torch.randn(6, 8), torch.randint(4, (6,))
    start = [torch.randn(8, 16) * 0.3, torch.randn(16, 4) * 0.3]
    losses = []
    for symbolic in (True, False):
        traced = fusejit.trace(step, symbolic=symbolic, backend=backend)
        weights, momenta = [w.clone() for w in start], [torch.zeros_like(w) for w in start]
        losses.append(torch.stack([traced(x, label, weights=weights, momenta=momenta) for _ in range(3)]))
        assert traced.cache_info()[:3] == (1, 2, 1) and not traced.cache_info().fallbacks
    parameters = [w.clone().requires_grad_() for w in start]
    optimizer, wanted = torch.optim.SGD(parameters, 0.1, momentum=0.9), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = loss_of(parameters, x, label)
        loss.backward()
        optimizer.step()
        wanted.append(loss.detach())
    assert_close(losses[0], torch.stack(wanted))
    assert_close(losses[1], torch.stack(wanted))


def test_case_04(backend):
    def f(x):
        return x * x.sum().item()

    traced = fusejit.trace(f, backend=backend)
    for value in (1.0, 2.0, 3.0):
        assert_close(traced(torch.full((2,), value)), torch.full((2,), 2 * value * value))
    assert "item" in str(traced.explain(torch.ones(2)).fallbacks[0])
    with pytest.raises(fusejit.CaptureError, match=r"x \* x.sum\(\).item\(\)"):
        fusejit.trace(f, symbolic=True, backend=backend)(torch.ones(2))


MODE = "plus"


def changing(a, b, c):
    y = a + b
    if MODE == "two":
        return y + 2
    if MODE == "one":
        return y + 1
    if MODE == "minus":
        return y - c
    if MODE == "long":
        return (y + c).relu()
    if MODE == "list":
        return [y + c]
    if MODE == "short":
        return y
    if MODE == "table":
        return y + torch.tensor([1.0, 2.0])
    if MODE == "other table":
        return y + torch.tensor([1.0, 3.0])
    if MODE == "other operand":
        return y + b
    return y + c


@pytest.mark.parametrize(
    ("first", "then", "message"),
    [
        ("plus", "minus", r"operator mismatch in changing: recorded aten.add.\w+ \(.*: return y \+ c\), now "
                          r"aten.sub.Tensor \(.*y - c\)"),
        ("one", "two", r"tensors not equals in changing: a constant was 1 and is 2: .*return y \+ 1.*return y \+ 2"),
        ("table", "other table", r"tensors not equals.*return y \+ torch.tensor\(\[1.0, 2.0\]\).*return y \+ "
                                 r"torch.tensor\(\[1.0, 3.0\]\)"),
        ("plus", "long", r"too many instructions in changing: 2 were recorded, after .*return y \+ c.*aten.relu.*\(y "
                         r"\+ c\).relu\(\)"),
        ("plus", "short", r"too few instructions in changing: 1 now, after .*y = a \+ b.*return y \+ c"),
        ("plus", "other operand", r"operator mismatch in changing: other operands: .*return y \+ c.*return y \+ b"),
        ("plus", "list", "another result"),
    ],
)  # fmt: skip
def test_case_05(first, then, message, symbolic, monkeypatch):
    a, b, c = torch.ones(3, 2)
    traced = fusejit.trace(changing, symbolic=symbolic, without_host=False)
    monkeypatch.setitem(globals(), "MODE", first)
    good = traced(a, b, c)
    assert_close(traced(a, b, c), good)
    monkeypatch.setitem(globals(), "MODE", then)
    for _ in range(2):
        with pytest.raises(fusejit.TraceError, match=message):
            traced(a, b, c)
    monkeypatch.setitem(globals(), "MODE", first)
    assert_close(traced(a, b, c), good)  # a refused call leaves nothing behind
    assert traced.cache_info()[:3] == (1, 2, 1)


def test_lockstep_reads_closed_over_tensors_anew(backend):
    holder = {"w": torch.ones(3, requires_grad=True)}
    traced = fusejit.trace(lambda x: x * holder["w"], without_host=False, symbolic=True, backend=backend)
    x = torch.ones(3)
    assert traced(x).tolist() == [1, 1, 1]
    holder["w"] = torch.full((3,), 5.0, requires_grad=True)
    traced(x).sum().backward()
    assert traced(x).tolist() == [5, 5, 5] and holder["w"].grad.tolist() == [1, 1, 1]
    holder["w"] = torch.ones(1)
    with pytest.raises(fusejit.TraceError, match="closed-over tensor has another"):
        traced(x)
    reads = fusejit.trace(lambda x: x * x.sum().item(), without_host=False, backend=backend)
    assert [reads(torch.full((1,), v)).item() for v in (1.0, 2.0, 3.0)] == [1, 4, 9]


def test_case_06(backend, symbolic):
    error = KeyError("mine")

    def f(x, fail):
        y = x + 1
        if fail:
            raise error
        return y * 2

    traced = fusejit.trace(f, symbolic=symbolic, backend=backend)
    for fail in (True, False, True, False):
        if fail:
            with pytest.raises(KeyError) as raised:
                traced(torch.ones(2), True)
            assert raised.value is error
        else:
            assert traced(torch.ones(2), False).tolist() == [4, 4]


@pytest.mark.parametrize("without_host", [True, False])
def test_case_07(backend, symbolic, without_host):
    traced = fusejit.trace(lambda a, b: a @ b, symbolic=symbolic, backend=backend, without_host=without_host)
    good = torch.ones(2, 3), torch.ones(3, 4)
    for _ in range(2):
        assert traced(*good).tolist() == [[3] * 4] * 2
        with pytest.raises(RuntimeError):
            traced(torch.ones(2, 3), torch.ones(2, 4))
    assert traced(*good).shape == (2, 4)


def test_case_08(backend, symbolic):
    traced = fusejit.trace(lambda x: x.reshape(x.shape[0], 100) * 2, symbolic=symbolic, backend=backend)
    for batch in (2, 4, 8, 2):
        x = torch.randn(batch, 10, 10)
        assert_close(traced(x), x.reshape(batch, 100) * 2)


@pytest.mark.parametrize("opt_level", [0, 1, 2, 3])
def test_opt_levels(opt_level):
    x = torch.randn(4, 5)
    traced = fusejit.trace(lambda x: (x * 2 + 1).softmax(-1), opt_level=opt_level, backend="interpret", symbolic=True)
    assert_close(traced(x), (x * 2 + 1).softmax(-1))
    assert traced.settings.jit_level == f"O{opt_level}"


def test_case_14(backend):
    def half(x):
        y = 2 * x
        return y / y

    def logs(x, y):
        return torch.log(torch.exp(x) + torch.exp(y))

    zero, large = torch.zeros(3), (torch.full((2,), 1e4), torch.zeros(2))
    for jit in (fusejit.jit, fusejit.trace):
        assert (
            not jit(half, backend=backend)(zero).isfinite().any() and jit(logs, backend=backend)(*large).isinf().all()
        )
    fast = fusejit.jit(half, backend=backend, fast_math=True)
    assert fast(zero).tolist() == [1, 1, 1]
    fast = fusejit.jit(logs, backend=backend, fast_math=True)
    assert fast(*large).tolist() == [1e4, 1e4]
    x, y = torch.randn(2, 5, requires_grad=True).unbind()
    assert_close(fast(x, y), logs(x, y))
    assert_close(torch.autograd.grad(fast(x, y).sum(), (x, y)), torch.autograd.grad(logs(x, y).sum(), (x, y)))


def test_fast_math_keeps_in_place_changes(backend):
    def changed(x):
        e = torch.exp(x)
        e.add_(1)
        return torch.log(e)

    def earlier(x):
        e = torch.exp(x)
        x.zero_()
        return torch.log(e), torch.log(torch.exp(x)).add_(1), x

    for f in (changed, earlier):
        x = torch.randn(4)
        assert_close(fusejit.jit(f, backend=backend, fast_math=True)(x.clone()), f(x.clone()))
    with pytest.raises(ValueError, match="fast_math=1: choose one of"):
        fusejit.jit(changed, fast_math=1)


def test_case_15(backend):
    def f(x, w):
        return (x @ w).tanh().sum()

    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 2, requires_grad=True)
    traced = fusejit.partial_trace(f, symbolic=True, backend=backend)
    for _ in range(2):
        assert_close(traced(x, w), f(x, w))
        assert_close(torch.autograd.grad(traced(x, w), (x, w)), torch.autograd.grad(f(x, w), (x, w)))
    (first,) = torch.autograd.grad(traced(x, w), x, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        first.sum().backward()
    assert {"forward", "backward"} <= traced.explain(x, w).stages.keys() or backend == "eager"
    assert "backward" in traced.specialisation(x, w).record


def test_constants_keep_their_values(backend):
    w = torch.full((2,), 3.0, requires_grad=True)
    traced = fusejit.trace(lambda x, scale=1: x * w * scale, symbolic=True, capture_as_const=True, backend=backend)
    x = torch.ones(2)
    assert traced(x).tolist() == [3, 3] and not traced(x).requires_grad
    with torch.no_grad():
        w.zero_()
    assert traced(x).tolist() == [3, 3] and traced(x, scale=2).tolist() == [0, 0]
    with pytest.raises(
        TypeError, match=r"Only support tensor type args when capture_as_const is enabled: args\[0\] is a int"
    ):
        traced(1)
    with pytest.raises(fusejit.CaptureError, match=r"w.detach\(\).add_\(1\)"):
        fusejit.trace(lambda x: x * w.detach().add_(1), symbolic=True, capture_as_const=True)(x)


def test_record_only_and_profiling(backend):
    ran = []
    traced = fusejit.trace(lambda x: (ran.append(1), x + 1)[1], record_only=True, backend=backend)
    assert traced(torch.ones(2)) is None and not ran and traced.cache_info().specialisations == 1
    timed = fusejit.trace(lambda x: x + 1, profiling=True, backend=backend)
    timed(torch.ones(2)), timed(torch.ones(2))
    assert len(timed.get_profile()["calls_ms"]) == 2 and timed.get_profile()["compile_ms"][0]["capture"] > 0
    with pytest.raises(ValueError, match="profiling=True"):
        traced.get_profile()


def test_options():
    for option in ("sublinear_memory_config", "dtr_config", "graph_opt_config"):
        with pytest.raises(NotImplementedError, match=option):
            fusejit.trace(torch.sin, **{option: object()})
    for wrong in ({"symbolic": 1}, {"opt_level": 4}, {"opt_level": True}, {"backend": "cuda"}, {"without_host": None}):
        with pytest.raises(ValueError, match="choose one of"):
            fusejit.trace(torch.sin, **wrong)
    with pytest.raises(TypeError, match="not 3"):
        fusejit.trace(3)


class Scale:
    def __init__(self, by):
        self.by = by

    @fusejit.trace
    def method(self, x):
        return x * self.by

    @staticmethod
    @fusejit.trace(symbolic=True)
    def plain(x):
        return x + 1


def test_methods_and_switching_off():
    x = torch.ones(2)
    one, two = Scale(2), Scale(3)
    assert [one.method(x)[0], two.method(x)[0], one.method(x)[0], Scale.plain(x)[0]] == [2, 3, 2, 2]
    with fusejit.disable_jit():
        assert fusejit.trace(lambda x: x.tolist(), symbolic=True)(x) == [1, 1]


def test_case_50(caplog):
    class Mul(torch.nn.Module):
        @fusejit.jit
        def forward(self, x):
            x = x * x
            return x * x

    def net(x):
        x = x + x
        x = Mul()(x + x)
        return (x + x) + (x + x)

    assert torch.equal(net(torch.ones(3, 3)), torch.full((3, 3), 1024.0))
    for mode in ("ast", "trace"):
        add = fusejit.jit(lambda x, y: x + y, capture_mode=mode)
        x, y = torch.tensor([1.0, 2.0, 3.0], requires_grad=True), torch.tensor([4.0, 5.0, 6.0], requires_grad=True)
        assert add(x, y).tolist() == [5, 7, 9]
        assert [g.tolist() for g in torch.autograd.grad(add(x, y).sum(), (x, y))] == [[1, 1, 1]] * 2
        caplog.clear()
        jitted = fusejit.jit(sets_a_global, capture_mode=mode)
        for _ in range(2):
            globals()["GLOBAL"] = 5
            assert jitted(x, y).tolist() == [5, 7, 9] and GLOBAL == 1
        assert not caplog.text and jitted.cache_info()[:3] == (1, 1, 1)


GLOBAL = 5


def sets_a_global(x, y):
    global GLOBAL
    GLOBAL = 1
    return x + y


def test_case_55_mutable(backend):
    summed = fusejit.jit(lambda items: sum(item * 2 for item in items), backend=backend)
    for length in (2, 3, 1, 2, 4):
        items = [torch.full((2,), float(n)) for n in range(length)]
        assert_close(summed(fusejit.mutable(items)), torch.full((2,), float(sum(2 * n for n in range(length)))))
    compiled = [entry for entry in summed._table.entries if entry.specialisation.run is not None]
    assert len(compiled) == 1
    reasons = str(summed.explain(fusejit.mutable([torch.ones(2)] * 3)).fallbacks[0])
    assert "another length" in reasons and "dynamic_len=False" in reasons
    fixed = fusejit.jit(lambda items: items[0] + items[-1], backend=backend)
    for length in (2, 3):
        assert fixed(fusejit.mutable([torch.ones(2)] * length, dynamic_len=False)).tolist() == [2, 2]
    assert fixed.cache_info()[:3] == (2, 0, 2) and not fixed.cache_info().fallbacks


def test_mutable_numbers(backend):
    scaled = fusejit.jit(lambda x, s: x * s["a"] + s["b"][0] + s["c"], backend=backend, fullgraph=True)
    for number in range(4):
        for x in (torch.ones(3), torch.ones(3, dtype=torch.float64)):
            given = {"a": 0.1 * number, "b": (number,), "c": x}
            got = scaled(x, fusejit.mutable(given))
            assert got.dtype is x.dtype
            assert_close(got, x * given["a"] + number + x)
    assert scaled.cache_info().specialisations == 2
    with fusejit.disable_jit():
        assert fusejit.jit(lambda n: range(n))(fusejit.mutable(3)) == range(3)
    assert fusejit.mutable([1, 2]) == [1, 2] and fusejit.mutable(2.5) + 1 == 3.5
    for wrong in (torch.ones(1), "text", None, True):
        with pytest.raises(TypeError, match="fusejit.mutable takes"):
            fusejit.mutable(wrong)


def test_case_55_replays_prints_and_refuses_nesting(backend, capsys):
    @fusejit.trace(backend=backend)
    def f(x):
        fusejit.print("first", x)
        y = x * 2
        fusejit.print("second", y)
        return y + 1

    for value in (1, 2, 3):
        f(torch.tensor([value]))
        assert capsys.readouterr().out == f"first tensor([{value}])\nsecond tensor([{2 * value}])\n"
    assert f.cache_info()[:2] == (1, 2)

    @fusejit.jit(capture_mode="trace", backend=backend)
    def inner(x):
        return x + 1

    @fusejit.jit(capture_mode="ast", backend=backend)
    def middle(x):
        return inner(x) * 2

    @fusejit.jit(capture_mode="trace", backend=backend)
    def outer(x):
        return middle(x) * 3

    x = torch.ones(2)
    with pytest.raises(RuntimeError, match="inner has capture mode 'trace'"):
        outer(x)
    assert middle(x).tolist() == [4, 4] and inner(x).tolist() == [2, 2]


@pytest.mark.parametrize("symbolic", [False, True])
def test_shapes_and_numbers_that_change(symbolic, monkeypatch):
    def scaled(x, k=1.0):
        return x * k + x.shape[0]

    ran, plain = [], fusejit.TraceFunction.plain
    monkeypatch.setattr(fusejit.TraceFunction, "plain", lambda self, *args: ran.append(args) or plain(self, *args))
    traced = fusejit.trace(scaled, symbolic=symbolic)
    for n, k in ((3, 0.5), (4, 0.25), (5, 0.75), (6, 0.125), (7, 0.3), (8, 0.2)):
        torch.testing.assert_close(traced(torch.ones(n), k), torch.ones(n) * k + n)
    assert traced.cache_info().specialisations == 2 and len(ran) == (
        0 if symbolic else 2
    )  # a first call runs as Python
    fixed = fusejit.trace(scaled, symbolic=symbolic, symbolic_shape=False)
    for n in (3, 4, 5):
        fixed(torch.ones(n))
    assert fixed.cache_info().specialisations == 3
    beside = fusejit.trace(scaled, symbolic=symbolic, without_host=False)
    for n in (3, 4, 5):
        beside(torch.ones(n))
    assert beside.cache_info().specialisations == 3
    assert "all sizes are numbers: without_host=False" in str(beside.explain(torch.ones(3)))
