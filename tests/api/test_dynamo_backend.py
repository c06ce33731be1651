"""Mode "bytecode" and torch.compile(backend="fusejit"): Dynamo's graphs become our Programs, and mean what eager
means.
"""

from __future__ import annotations

import copy
import importlib
import pickle
import re
import subprocess
import sys
import threading
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from front import compare, leaf
from models import whole
from torch import nn

import fusejit
from fusejit import jit
from fusejit.api.dynamo_backend import torch_backend

ROOT = Path(__file__).parents[2]


@pytest.fixture(params=["eager", "interpret"])
def backend(request: Any) -> str:
    return request.param


# Graphs and breaks.


def prints(x, k=2):
    y = x.sin() * k
    print("between")
    return y.cos() + 1


def test_a_graph_break_makes_two_graphs(capsys):
    jitted = jit(prints, capture_mode="bytecode", backend="interpret")
    x = leaf(3, 4)
    compare(prints, jitted, [x])
    assert jitted.cache_info()[:4] == (2, 1, 1, 1)
    assert capsys.readouterr().out == "between\n" * 3
    report = jitted.explain(x)
    assert len(report.graphs) == 2 and report.launches == 4 and not report.externs
    assert [part.backend for part in report.graphs] == ["interpret"] * 2 and "in 2 graphs" in str(report)
    (broken,) = report.fallbacks
    assert broken.op == "graph break" and "print" in broken.reason
    assert re.search(r'test_dynamo_backend.py:\d+: print\("between"\)', broken.line)
    lines = [line for kernel in report.kernels for line in kernel.ops]
    assert any("y = x.sin() * k" in line for line in lines)
    assert any("return y.cos() + 1" in line for line in lines)
    with pytest.raises(fusejit.FusejitError, match="2 programs"):
        jitted.program(x)


def inner_print(x):
    print("callee")
    return x * 2


def outer_print(x):
    return inner_print(x + 1)


def test_fullgraph_quotes_the_lines(capsys):
    x = torch.ones(3)
    jitted = jit(prints, capture_mode="bytecode", fullgraph=True)
    for _ in range(2):
        with pytest.raises(fusejit.CaptureError, match=r'test_dynamo_backend.py:\d+: print\("between"\)'):
            jitted(x)
    assert jitted.cache_info().specialisations == 0
    with pytest.raises(
        fusejit.CaptureError, match=r"return inner_print\(x \+ 1\) → .*print\(\"callee\"\)"
    ):  # outer frame first
        jit(outer_print, capture_mode="bytecode", fullgraph=True)(x)
    assert torch.equal(jit(outer_print, capture_mode="bytecode")(x), outer_print(x))


def test_one_graph_has_a_program():
    jitted = jit(lambda x: (x.sin() + 1).sum(), capture_mode="bytecode", backend="interpret", fullgraph=True)
    x = leaf(3, 4)
    assert "row_sin_add_sum" in jitted.program(x).source
    found = jitted.specialisation(x)
    assert found.backward is not None and jitted.explain(x).why == "first call" and not found.fallbacks
    assert jitted.cache_info()[:4] == (1, 0, 0, 0)  # explaining is no call
    jitted(x)
    assert jitted.cache_info()[:4] == (1, 1, 0, 0)
    jitted.cache_clear()
    assert jitted.cache_info()[:4] == (0, 1, 0, 0)
    jitted(x)
    assert jitted.cache_info()[:4] == (1, 1, 1, 0)


def changes_its_input(x, b):
    b.add_(1)
    y = x * b
    y.mul_(2)
    return y


def overlapping(a, b):
    a.add_(1)
    return a + b


def returns_views(x):
    y = x + 1
    return y, y.t(), x[0], x, 3, None


def switches(x):
    with torch.no_grad():
        y = x * 2
    with torch.autocast("cpu", torch.bfloat16):
        z = (x @ x.t()).float()
    return x * y, z, torch.is_grad_enabled()


def reads_a_value(x):
    y = x * 2
    return y * y.sum().item() + 1


def branches(x):
    y = x.cos()
    if y.sum() > 0:
        return y * 2
    return y - 3


def changes_a_list(x):
    found = []
    for i in range(3):
        found.append(x * i)
    return torch.stack(found).sum(0), found


def loops(x):
    while x.sum() < 10:
        x = x * 2 + 1
    return x


def dictionary(x):
    return {"a": x.relu(), "b": [x * 2, (x.sum(), "text")]}


FUNCTIONS = (changes_its_input, returns_views, switches, reads_a_value, branches, changes_a_list, loops, dictionary)


@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_functions(fn, backend):
    args = [leaf(3, 4), torch.ones(4)][: fn.__code__.co_argcount]
    compare(fn, jit(fn, capture_mode="bytecode", backend=backend), args)


def test_memory_that_changed_inputs_share(backend):
    jitted = jit(overlapping, capture_mode="bytecode", backend=backend)
    for offset in (6, 3, 0, 6):
        one, other = torch.arange(12.0), torch.arange(12.0)
        got, wanted = jitted(one[:6], one[offset : offset + 6]), overlapping(other[:6], other[offset : offset + 6])
        assert torch.equal(got, wanted) and torch.equal(one, other)
    held, kept = torch.ones(6), torch.ones(6)
    assert torch.equal(jitted(held, held), overlapping(kept, kept)) and torch.equal(held, kept)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.flag = nn.Linear(4, 4), nn.BatchNorm1d(4), True

    def forward(self, x):
        y = self.norm(self.linear(x))
        return y.relu() if self.flag else y


def test_a_module_trains_as_in_eager(backend):
    plain = Net()
    module = copy.deepcopy(plain)
    jitted = jit(module, capture_mode="bytecode", backend=backend)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (plain, module)]
    for step in range(4):
        plain.flag = module.flag = step < 2
        x = torch.randn(5, 4)
        for call, optimizer in zip((plain, jitted), optimizers):
            optimizer.zero_grad()
            call(x).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(module.state_dict(), plain.state_dict())
    info = jitted.cache_info()
    assert info[:4] == (2, 2, 2, 0) and info.reasons[0] == "first call" and "flag" in info.reasons[1]
    before = copy.deepcopy(module.state_dict())
    jitted.explain(x)  # runs the module to find its graphs, and leaves no trace
    torch.testing.assert_close(module.state_dict(), before)
    with torch.no_grad():
        assert not jitted(x).requires_grad
    jitted.eval()
    torch.testing.assert_close(jitted(x), module(x))


def test_methods_objects_and_nesting(backend):
    class Scale:
        def __init__(self, k):
            self.k = k

        @jit(capture_mode="bytecode", backend=backend)
        def apply(self, x, y=1):
            return x * self.k + y

        def __call__(self, x):
            return x - self.k

    one, other, x = Scale(2), Scale(3), torch.ones(3)
    assert one.apply(x)[0] == 3 and other.apply(x, y=2)[0] == 5
    one.k = 5
    assert one.apply(x)[0] == 6 and "apply" in repr(one.apply.explain(x).name)
    assert jit(one, capture_mode="bytecode", backend=backend)(x)[0] == -4
    assert jit(torch.sin, capture_mode="bytecode", backend=backend)(x)[0] == x.sin()[0]
    inner = jit(lambda x: x * 2, backend=backend)
    for outer_mode in ("bytecode", "ast"):
        outer = jit(lambda x: inner(x.sin()) + 1, capture_mode=outer_mode, backend=backend, fullgraph=True)
        torch.testing.assert_close(outer(x), x.sin() * 2 + 1)
    inside = jit(lambda x: x * 2, capture_mode="bytecode", backend=backend)
    torch.testing.assert_close(jit(lambda x: inside(x) + 1, backend=backend, fullgraph=True)(x), x * 2 + 1)
    torch.testing.assert_close(torch.vmap(inside)(x), x * 2)
    restored = pickle.loads(pickle.dumps(jit(prints, capture_mode="bytecode", backend=backend)))
    assert type(restored) is type(inside) and torch.equal(restored(x), prints(x))
    with fusejit.disable_jit():
        assert inside(x)[0] == 2


def test_errors_are_the_users(backend):
    raised = KeyError("z")

    def fails(x, flag):
        y = x @ x
        if flag:
            raise raised
        return y

    jitted = jit(fails, capture_mode="bytecode", backend=backend)
    with pytest.raises(KeyError) as caught:
        jitted(torch.ones(2, 2), True)
    assert caught.value is raised
    for fullgraph in (False, True):
        jitted = jit(fails, capture_mode="bytecode", backend=backend, fullgraph=fullgraph)
        assert jitted(torch.ones(2, 2), False).sum() == 8
        with pytest.raises(RuntimeError):
            jitted(torch.ones(2, 3), False)
        assert jitted(torch.ones(2, 2), False).sum() == 8


def test_threads(backend):
    jitted, found = jit(lambda x: (x * 2).sum(), capture_mode="bytecode", backend=backend), []

    def work(value):
        x = torch.full((4,), value, requires_grad=True)
        y = jitted(x)
        y.backward()
        found.append((y.item(), 8 * value, x.grad[0].item()))

    threads = [threading.Thread(target=work, args=(float(k),)) for k in range(6)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(found) == 6 and all(one == other and grad == 2 for one, other, grad in found)
    assert jitted.cache_info().specialisations == 1


def test_random_numbers():
    fn = lambda x: nn.functional.dropout(x, 0.5) * torch.rand(4)  # noqa: E731
    compare(fn, jit(fn, capture_mode="bytecode"), [leaf(3, 4)])
    jitted, x = jit(fn, capture_mode="bytecode"), leaf(3, 4)
    torch.manual_seed(3)
    jitted.explain(x)  # draws nothing from the user's stream
    first = jitted(x)
    torch.manual_seed(3)
    assert torch.equal(jitted(x), first)


def test_an_autograd_function_runs_eagerly_and_says_so():
    class Seven(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * 7

    jitted, x = jit(lambda x: Seven.apply(x) + 1, capture_mode="bytecode", backend="interpret"), leaf(3)
    jitted(x).sum().backward()
    assert x.grad.tolist() == [7] * 3
    assert "autograd.Function" in str(jitted.explain(x).fallbacks)


def test_the_limit(monkeypatch, caplog):
    monkeypatch.setenv("FUSEJIT_SPECIALISATIONS", "3")
    jitted = jit(lambda x, k: x * k, capture_mode="bytecode", dynamic=False)
    x = torch.ones(2)
    for k in range(8):
        assert jitted(x, k)[0] == k
    assert jitted.cache_info().specialisations == 3
    assert [
        record.message for record in caplog.records if "more than 3" in record.message and record.name == "fusejit"
    ].__len__() == 1
    assert "more than 3" in str(jitted.explain(x, 7).fallbacks)
    assert jitted(x, 1)[0] == 1 and jitted.cache_info().specialisations == 3  # what there is still runs


def test_minus_zero():
    jitted, x = jit(lambda x, k: x / k, capture_mode="bytecode"), torch.ones(2)
    assert (
        jitted(x, 0.0)[0] == float("inf")
        and jitted(x, -0.0)[0] == -float("inf")
        and jitted(x, k=-0.0)[0] == -float("inf")
    )


@pytest.mark.full
def test_inductor_is_never_imported():
    code = (
        "import sys, torch, fusejit; print('torch._dynamo' in sys.modules); "
        "fusejit.jit(lambda x: x + 1, capture_mode='bytecode', backend='interpret')(torch.ones(3)); "
        "print('torch._inductor.compile_fx' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.stdout.split() == ["False", "False"], done.stdout + done.stderr


# torch.compile(backend="fusejit")


def test_the_entry_point():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["torch_dynamo_backends"]["fusejit"].partition(":")
    assert getattr(importlib.import_module(module), name) is torch_backend


@pytest.fixture
def registered() -> None:
    """What the entry point does after installation."""
    from torch._dynamo.backends import registry

    if "fusejit" not in torch._dynamo.list_backends() or registry._COMPILER_FNS.get("fusejit") is not torch_backend:
        registry._COMPILER_FNS.pop("fusejit", None)
        torch._dynamo.register_backend(torch_backend, name="fusejit")


def sizes(x, s, n):
    return x.view(-1, n).sum(0) * s + x.shape[0] * len(x)


@pytest.mark.usefixtures("registered")
def test_compile_with_varying_shapes_and_numbers(backend):
    torch._dynamo.reset()
    compiled = torch.compile(sizes, backend="fusejit", options={"backend": backend})
    for rows in (6, 8, 10, 12):
        compare(sizes, compiled, [leaf(rows, 4), 1.5 * rows, 2])
    for n in (2, 4, 8):
        compare(sizes, compiled, [leaf(8, 4), 1.5, n])
    compare(sizes, compiled, [torch.randn(8, 4), -2.5, 4])
    marked = torch.compile(
        lambda x: x.sum(1) * x.shape[0], backend="fusejit", dynamic=True, options={"backend": backend}
    )
    for rows in (5, 7, 5):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(marked(x), x.sum(1) * rows)


def test_sizes_and_numbers_vary(backend):
    def f(x, scale):
        return torch.softmax(x * scale, -1) + x.shape[0]

    jitted = jit(f, capture_mode="bytecode", backend=backend)
    for rows in (3, 4, 6, 7, 8, 9, 20, 41):
        compare(f, jitted, [leaf(rows, 5), 0.5 + rows / 64])
    info = jitted.cache_info()
    assert info.specialisations <= 4 and info.fallbacks == 0
    assert "dimension 0 of input 1 of the graph is dynamic" in str(jitted.explain(torch.randn(50, 5), 0.25))
    fixed = jit(f, capture_mode="bytecode", backend=backend, dynamic=False)
    for rows in (3, 4, 6):
        compare(f, fixed, [leaf(rows, 5), 0.5])
    assert fixed.cache_info().specialisations == 3


@pytest.mark.usefixtures("registered")
def test_compile_breaks_and_changes(backend):
    for fn in FUNCTIONS[:6]:
        compiled = torch.compile(fn, backend="fusejit", options={"backend": backend, "jit_level": "O1"})
        compare(fn, compiled, [leaf(3, 4), torch.ones(4)][: fn.__code__.co_argcount])


@pytest.mark.usefixtures("registered")
def test_compile_options():
    x = torch.ones(3)
    for wrong, text in (
        ({"options": {"level": "O1"}}, "'jit_level', 'backend', 'numerics'"),
        ({"options": {"jit_level": "O9"}}, "'O0', 'O1', 'O2', 'O3'"),
        ({"mode": "fastest"}, "'reduce-overhead', 'max-autotune'"),
    ):
        with pytest.raises(Exception, match=f"choose one of.*{text}"):  # Dynamo wraps what a backend raises
            torch.compile(lambda x: x + 1, backend="fusejit", **wrong)(x)
    for right in (
        {"mode": "max-autotune"},
        {"mode": "reduce-overhead"},
        {"options": {"jit_level": "O0", "numerics": "eager"}},
    ):
        assert torch.compile(lambda x: x + 1, backend="fusejit", **right)(x)[0] == 2


# Falling through.


def test_ast_falls_through_to_bytecode(capsys):
    jitted, x = jit(reads_a_value, backend="interpret"), leaf(3, 4)
    compare(reads_a_value, jitted, [x])
    report = jitted.explain(x)
    assert ".item()" in report.fallbacks[0].op and len(report.graphs) == 2 and len(report.kernels) >= 2
    assert any(fallback.op == "graph break" for fallback in report.fallbacks)
    jitted(x)
    assert jitted.cache_info()[:3] == (3, 2, 1)
    compare(prints, jit(prints, backend="interpret"), [x])
    capsys.readouterr()
    jit(prints, backend="interpret")(x)
    assert capsys.readouterr().out == "between\n"


def test_where_falling_through_does_not_pay():
    x = leaf(3, 4)
    for options in (
        {"backend": "eager"},
        {"capture_mode": "trace", "backend": "interpret"},
        {"jit_level": "O0", "backend": "interpret"},
    ):
        jitted = jit(reads_a_value, **options)
        compare(reads_a_value, jitted, [x])
        assert jitted.cache_info()[:4] == (1, 1, 1, 1) and ".item()" in str(jitted.explain(x).fallbacks)
    empty = jit(lambda x: x.tolist(), backend="interpret")  # Dynamo finds no op between the breaks
    assert empty(x) == x.tolist() == empty(x)
    assert (
        "compiled nothing" in str(empty._table.entries[0].specialisation.fallbacks[1]) and empty.cache_info().hits == 1
    )
    with pytest.raises(fusejit.CaptureError, match="y.sum"):
        jit(reads_a_value, backend="interpret", fullgraph=True)(x)


def test_strict(monkeypatch):
    monkeypatch.setenv("FUSEJIT_STRICT", "1")
    with pytest.raises(fusejit.CaptureError, match="item"):
        jit(reads_a_value, backend="interpret")(torch.ones(3))


# Models of Hugging Face, two layers, random weights.


def results(call, module, inputs):
    """The first tensor of the result, and the gradients of its seeded weighting by all parameters that it depends
    on.
    """
    out = call(**inputs)
    out = out[0] if isinstance(out, tuple) else next(iter(out.values()))
    tangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad(out, list(module.parameters()), tangent, allow_unused=True)
    filled = [
        torch.zeros_like(p) if gradient is None else gradient for p, gradient in zip(module.parameters(), gradients)
    ]
    return [out.detach(), *filled]


@pytest.mark.full
@pytest.mark.parametrize("name", ("llama", "bert", "gpt2"))
def test_huggingface_models_are_one_graph(name, backend):
    module, inputs = whole(name)
    jitted = jit(module, capture_mode="bytecode", backend=backend, fullgraph=True)
    wanted, got = results(module, module, inputs), results(jitted, module, inputs)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    assert jitted.cache_info()[:4] == (1, 0, 1, 0)
    if backend == "interpret":
        report = jitted.explain(**inputs)
        assert report.kernels and not report.fallbacks and not report.graphs


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("name", ("convnext", "vit"))
def test_compile_huggingface_models(name, backend):
    module, inputs = whole(name)
    compiled = torch.compile(module, backend="fusejit", options={"backend": backend})
    wanted, got = results(module, module, inputs), results(compiled, module, inputs)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


# torch.cond and torch.while_loop.


def branches(x, w):
    def grown(x):
        fusejit.print("grown", x.sum())
        return torch.cond(x.max() > 5, lambda x: x @ w, lambda x: x.exp(), (x,))

    return torch.cond(x.sum() > 0, grown, lambda x: x - w, (x,)) * 2


def rounds(x, w):
    k = torch.zeros((), dtype=torch.int64)
    k, x = torch.while_loop(lambda k, x: x.sum() < 100, lambda k, x: (k + 1, (x @ w).abs() + 1), (k, x))
    return x * k


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("fn", (branches, rounds))
def test_functions_of_functions(fn, backend, capsys):
    """They become branches and loops of the graph, with gradients, kernels and effects, as the plain Python beside
    them.
    """
    values = ([[1.0, 2.0], [3.0, 0.5]], [[9.0, 2.0], [3.0, 0.5]], [[-1.0, -2.0], [-3.0, 0.5]])
    plain = {branches: plain_branches, rounds: plain_rounds}[fn]
    jitted = jit(fn, capture_mode="bytecode", backend=backend, fullgraph=True)
    compiled = torch.compile(fn, backend="fusejit", fullgraph=True, options={"backend": backend})
    told = []
    for call in (plain, jitted, compiled):
        for value in values:
            x, w = torch.tensor(value, requires_grad=True), torch.full((2, 2), 0.7, requires_grad=True)
            out = call(x, w)
            out.sum().backward()
            grads = [torch.zeros(2, 2) if v.grad is None else v.grad for v in (x, w)]
            told.append((out.detach(), *grads, capsys.readouterr().out))
    for place in range(3, 9):
        torch.testing.assert_close(told[place][:3], told[place % 3][:3])
        assert told[place][3] == told[place % 3][3]


def plain_branches(x, w):
    if x.sum() <= 0:
        return (x - w) * 2
    fusejit.print("grown", x.sum())
    return (x @ w if x.max() > 5 else x.exp()) * 2


def plain_rounds(x, w):
    k = 0
    while x.sum() < 100:
        k, x = k + 1, (x @ w).abs() + 1
    return x * k
