"""`exclude_from_trace`: blocks that stay Python inside a captured function, on every call."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from front import leaf
from torch.testing import assert_close

import fusejit
from fusejit import exclude_from_trace


@pytest.fixture(params=["eager", "interpret"])
def backend(request: Any) -> str:
    return request.param


MODES = ("ast", "trace", "bytecode")
i = 0


def sample(x):
    x += 1
    with fusejit.exclude_from_trace():
        if i % 2 == 0:
            x += 1
    return x


@pytest.mark.parametrize("mode", [*MODES, "fusejit.trace", "off", "plain"])
def test_case_03(backend, mode, monkeypatch, capsys):
    if mode in MODES:
        f = fusejit.jit(sample, capture_mode=mode, backend=backend)
    else:
        f = {"fusejit.trace": fusejit.trace(sample, backend=backend), "off": fusejit.jit(sample), "plain": sample}[mode]
    with fusejit.disable_jit(mode == "off"):
        for step in range(3):
            monkeypatch.setitem(globals(), "i", step)
            print(f(torch.tensor([1])))
    assert capsys.readouterr().out == "tensor([3])\ntensor([2])\ntensor([3])\n"


def everything(x, n=2, *rest, w, **more):
    """A doc string, loops, early returns, values in and out."""
    seen = []
    y = x * w + n
    for k in range(n):
        y = y + k
        if k == 5:
            continue
        with fusejit.exclude_from_trace():
            seen.append(float(y.sum()))
            if seen[-1] > 1e6:
                return seen, None
        z = y * 2
        y = z - rest[0] if rest else z
    with exclude_from_trace(), torch.no_grad():
        inside = y * 3
        with exclude_from_trace():
            flag = bool(inside.sum() > 0)
    if flag:
        y, last = (y + more.get("b", 1)).relu(), 1
    else:
        y, last = y.neg(), 2
    try:
        if last == 2 and n == 3:
            return seen, y
        y = y.exp()
    finally:
        with exclude_from_trace():
            seen.append(last)
    return seen, y + inside.detach(), [a.sum() for a in (x, y)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("n", "sign", "extra"), [(2, 1, ()), (3, -1, ()), (2, -1, (0.5,)), (2, 1e6, ()), (0, 1, ())])
def test_values_flow_in_and_out(backend, mode, n, sign, extra):
    x, w = leaf(3), leaf(3)
    f = fusejit.jit(everything, capture_mode=mode, backend=backend, fullgraph=False)
    for _ in range(2):
        got, wanted = (
            f(x * x * sign, n, *extra, w=w.abs() + 1, b=2),
            everything(x * x * sign, n, *extra, w=w.abs() + 1, b=2),
        )
        assert len(got) == len(wanted) and got[0] == pytest.approx(wanted[0])
        if wanted[1] is not None:
            assert_close(got[1:], wanted[1:])
            assert_close(torch.autograd.grad(got[1].sum(), (x, w)), torch.autograd.grad(wanted[1].sum(), (x, w)))
    kept = [fallback for fallback in f.explain(x).fallbacks if "handed on" not in fallback.op]
    assert f.cache_info().hits and not kept


def test_the_block_runs_each_time_and_the_rest_once(backend):
    ran, traced = [], []

    @fusejit.jit(backend=backend)
    def f(x):
        traced.append(1)
        y = x * 2 + 1
        with exclude_from_trace():
            ran.append(y.tolist())
        return y.sin() * 3

    for value in (1.0, 2.0, 3.0):
        assert_close(f(torch.full((1,), value)), (torch.full((1,), value) * 2 + 1).sin() * 3)
    assert ran == [[3.0], [5.0], [7.0]] and traced == [1, 1, 1]
    report = f.explain(torch.ones(1))
    text = str(report)
    assert "with exclude_from_trace():  runs in Python" in text and "2 segments" in text
    if backend == "interpret":
        assert [k.template for k in report.kernels] == ["pointwise", "pointwise"]
    assert f.cache_info()[:3] == (2, 4, 2)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.shift = 1.0

    def forward(self, x):
        y = self.linear(x).relu() + self.shift
        with exclude_from_trace():
            self.seen = y.detach().sum().item()
        return self.top(y) * 2

    def top(self, y):
        return y + 1


class Sub(Net):
    def forward(self, x):
        with exclude_from_trace():
            x = x + torch.from_numpy(torch.ones(4).numpy())
        y = super().forward(x * 2)
        return y - 1


class Plain:
    def __init__(self, by):
        self.__by = by

    @fusejit.jit
    def method(self, x):
        x = x * self.__by
        with exclude_from_trace():
            self.last = x.tolist()
        return x + self.__by


def test_modules_methods_and_private_names(backend):
    net, x = Net(), torch.randn(3, 4)
    jitted = fusejit.jit(net, backend=backend)
    for shift in (1.0, 1.0, 5.0):
        net.shift = shift
        assert_close(jitted(x), net(x))
        seen, net.seen = net.seen, None
        jitted(x)
        assert net.seen == pytest.approx(seen)
    jitted(x).sum().backward()
    assert net.linear.weight.grad is not None
    hook = net.register_forward_hook(lambda module, inputs, output: output * 10)
    assert_close(jitted(x), net(x))
    hook.remove()
    one, two = Plain(2), Plain(3)
    assert [one.method(torch.ones(1))[0], two.method(torch.ones(1))[0]] == [4, 6] and two.last == [3]
    sub = Sub()
    assert_close(fusejit.jit(sub, backend=backend)(x), sub(x))


def called(x):
    with exclude_from_trace():
        return x * x.sum().item()


def test_in_a_called_function_all_runs_eagerly_and_says_so(backend):
    f = fusejit.jit(lambda x: called(x) + 1, backend=backend)
    for value in (1.0, 2.0):
        assert f(torch.full((2,), value)).tolist() == [2 * value * value + 1] * 2
    assert "exclude_from_trace" in str(f.explain(torch.ones(2)).fallbacks[0])
    with pytest.raises(fusejit.CaptureError, match=r"with exclude_from_trace\(\):"):
        fusejit.jit(lambda x: called(x) + 1, backend=backend, fullgraph=True)(torch.ones(2))
    scope: dict[str, Any] = {"exclude_from_trace": exclude_from_trace}
    exec("def f(x):\n    with exclude_from_trace():\n        return x.tolist()", scope)
    assert fusejit.jit(scope["f"], backend=backend)(torch.ones(1)) == [1.0]


def test_what_cannot_be_outlined_stays_python(backend):
    @fusejit.jit(backend=backend)
    def f(x, flag):
        if flag:
            late = x * 5

        def inner(a):
            return a + offset

        offset = x.sum() * 2
        with exclude_from_trace():
            pass
        y = inner(x) * 2
        if flag:
            y = y + late
        return y

    x = leaf(3)
    for flag in (True, False):
        wanted = (x + x.sum() * 2) * 2 + (x * 5 if flag else 0)
        assert_close(f(x, flag), wanted)
        assert_close(torch.autograd.grad(f(x, flag).sum(), x), torch.autograd.grad(wanted.sum(), x))
    assert "late may have no value yet" in str(f.explain(x, True))


def test_containers_stay_the_ones_they_are(backend):
    @fusejit.jit(backend=backend)
    def f(x):
        kept = [x * 2]
        both = kept
        with exclude_from_trace():
            both.append(x)
        return kept[0] + len(kept), kept

    total, kept = f(torch.ones(2))
    assert total.tolist() == [4, 4] and len(kept) == 2


class Programs:
    """Random functions of tensors `a`, `b` and numbers `n`, `m`: nests of if, for, while, try and return with excluded
    blocks.
    """

    def __init__(self, seed: int, changes: bool) -> None:
        self.random = random.Random(seed)
        self.fresh = 0
        self.changes = ["a += {k}", "b.mul_({k} / 2)", "b[0] = n"] if changes else []

    def text(self) -> str:
        body = self.block(1, 3, loop=False)
        return "def f(a, b, n, m, seen):\n" + "\n".join(body) + "\n    return a, b, n, m\n"

    def block(self, depth: int, budget: int, loop: bool) -> list[str]:
        return [line for _ in range(self.random.randint(2, 4)) for line in self.statement(depth, budget, loop)]

    def statement(self, depth: int, budget: int, loop: bool) -> list[str]:
        pad, pick = "    " * depth, self.random.choice
        simple = [
            "a = a / {k} + b",
            "b = b - a.sin()",
            "a, b = b, a + {k}",
            "n = n + 1",
            "m = (m * 3 + n) % 7",
            "b = (a @ a.t()).cos()",
            "c = a * 2; b = b + c",
            "d = [a, b]; a = d[0] + d[1]",
            *self.changes,
        ]
        if budget == 0 or self.random.random() < 0.45:
            return [pad + pick(simple).replace("{k}", str(self.random.randint(1, 3)))]
        kind = pick(["exclude", "exclude", "if", "if", "for", "while", "try", "return", "jump"])
        inner = lambda again=loop: self.block(depth + 1, budget - 1, again)  # noqa: E731
        if kind == "exclude":
            copied = "b = torch.from_numpy(b.detach().numpy().copy()) + b"
            extra = pick(["seen.append(float(a.sum()))", "n = int(b.sum() > 0) + n", copied, "pass"])
            return [pad + "with exclude_from_trace():", pad + "    " + extra, *inner()]
        if kind == "if":
            other = [pad + "else:", *inner()] if self.random.random() < 0.5 else []
            return [pad + f"if {pick(['n > m', 'm % 2', 'n < 3 and m', 'not n'])}:", *inner(), *other]
        if kind == "for":
            self.fresh += 1
            name = f"i{self.fresh}"
            return [
                pad + f"for {name} in range({self.random.randint(0, 2)}):",
                *inner(True),
                f"{pad}    n = n + {name}",
            ]
        if kind == "while":
            self.fresh += 1
            name = f"w{self.fresh}"
            return [f"{pad}{name} = 0", f"{pad}while {name} < 2:", f"{pad}    {name} += 1", *inner(True)]
        if kind == "try":
            return [pad + "try:", *inner(), pad + "finally:", pad + "    m = m + 1"]
        if kind == "jump" and loop:
            return [pad + "if m % 3 == 1:", pad + "    " + pick(["break", "continue"])]
        return [pad + f"if m == {self.random.randint(0, 6)}:", pad + "    return b, n, a"]


@pytest.mark.parametrize("seed", range(24))
def test_random_programs(seed, tmp_path):
    """Equal results, and gradients where nothing is changed in place."""
    changes = bool(seed % 2)
    text = Programs(seed, changes).text()
    path = tmp_path / f"program_{seed}.py"
    path.write_text(f"import torch\nfrom fusejit import exclude_from_trace\n\n\n{text}")
    scope: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), scope)
    jitted = fusejit.jit(scope["f"])
    for n, m in ((0, 1), (2, 4), (3, 0)):
        found = []
        for run in (scope["f"], jitted, jitted):
            torch.manual_seed(n)
            x, y, seen = torch.randn(3, 3, requires_grad=not changes), torch.randn(3, 3, requires_grad=not changes), []
            results = run(x * 1, y * 1, n, m, seen)
            loss = sum((item.sin().sum() for item in results if isinstance(item, torch.Tensor)), torch.zeros(()))
            gradients = () if changes else torch.autograd.grad(loss, (x, y), allow_unused=True)
            found.append((results, seen, [torch.zeros(3, 3) if g is None else g for g in gradients]))
        for again in found[1:]:
            assert_close(again, found[0], msg=lambda told: f"{told}\n{text}")
    assert "exclude_from_trace" not in text or jitted.segments() is not None
