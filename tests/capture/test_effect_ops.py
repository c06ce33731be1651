"""Effects in their order where a graph has branches and loops: prints, assignments to parameters, and what an `assert`
checks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checked import asserted, in_arms, in_parts, positive, read
from torch.testing import assert_close

import fusejit


@pytest.fixture(params=["eager", "interpret"])
def backend(request: Any) -> str:
    return request.param


# In branches and loops that are graphs of their own.


def both(fn, jitted, args, capsys):
    """What a function and its jitted twin return, print, raise, and give as gradients."""
    found = []
    for run in (fn, jitted):
        values = [arg.clone().requires_grad_() for arg in args]
        raised = out = None
        try:
            out = run(*values)
            out.sum().backward()
        except AssertionError as failed:
            raised = (AssertionError, str(failed))
        grads = [torch.zeros_like(value) if value.grad is None else value.grad for value in values]
        found.append((out, grads, raised, capsys.readouterr().out))
    assert_close(found[1][:2], found[0][:2])
    assert found[1][2:] == found[0][2:]
    return found[0][2:]


def in_a_branch(x, w):
    fusejit.print("first")
    if x.sum() > 0:
        fusejit.print("taken", x)
        y = x @ w
        if y.sum() > 10:
            fusejit.print("large {total:.2f}", total=y.sum())
            y = y @ w
        fusejit.print("then", y)
    else:
        y = fusejit.depend(x.exp() @ w, x.sum())
    fusejit.print("last", y.sum())
    return y * 2


def in_the_first_arm(x, w):
    if x.sum() > 0:
        fusejit.print("taken")
        y = x @ w
    else:
        y = x - 1
    return y


def in_a_loop(x, w):
    n = 0
    while x.sum() < 100:
        x = (x @ w).abs() + 1
        n += 1
        fusejit.print("round", n, [n], x.sum())
        fusejit.print("{n} and {total:.1f}", n=n, total=x.sum())
    fusejit.print("done", n)
    return x


def by_hand(x, w):
    return fusejit.cond(
        x.sum() > 0, lambda x: (fusejit.print("yes"), x @ w)[1], lambda x: (fusejit.print("no"), x - 1)[1], (x,)
    )


@pytest.mark.parametrize("fn", [in_a_branch, in_the_first_arm, in_a_loop, by_hand])
def test_prints_in_branches_and_loops_of_the_graph_keep_their_place(fn, backend, capsys):
    jitted = fusejit.jit(fn, backend=backend, fullgraph=True)
    w = torch.full((2, 2), 0.9)
    told = [both(fn, jitted, (x, w), capsys) for x in (torch.ones(2, 2), torch.full((2, 2), 9.0), -torch.ones(2, 2))]
    assert told[0] != told[1] or fn is not in_a_branch
    assert told[0][1] and jitted.cache_info().misses == 1
    jitted = fusejit.jit(fn, backend=backend, fullgraph=True)
    with torch.no_grad():
        for x in (torch.ones(2, 2), -torch.ones(2, 2)):
            fn(x, w)
            wanted = capsys.readouterr().out
            jitted(x, w)
            assert capsys.readouterr().out == wanted


def test_a_parameter_assigned_in_a_branch(backend):
    """What the branch reads of it afterwards has its gradient; the assignment itself has none."""
    w = torch.nn.Parameter(torch.zeros(2, 2))

    def f(x):
        if x.sum() > 0:
            fusejit.assign(w, x * 2)
            y = x @ w
        else:
            y = x - w
        return y * 2

    jitted = fusejit.jit(f, backend=backend, fullgraph=True)
    for sign in (1, -1):
        found = []
        for run in (f, jitted):
            w.grad = None
            fusejit.assign(w, torch.arange(4.0).reshape(2, 2))
            x = torch.full((2, 2), 3.0 * sign, requires_grad=True)
            y = run(x)
            y.sum().backward()
            found.append((y, x.grad, w.grad, w.detach().clone()))
        assert_close(found[1], found[0])


def test_prints_that_no_graph_can_order_are_refused(backend):
    def tested(x):
        while (fusejit.print("testing"), x.sum() < 9)[1]:
            x = x + 1
        return x

    def rows(x):
        while x.sum() < 9:
            x = x + 1
            fusejit.print(x)
        return x

    with pytest.raises(
        fusejit.CaptureError, match=r"test_effect_ops.py.*its test prints, checks or waits; do that in the body"
    ):
        fusejit.jit(tested, backend=backend, fullgraph=True)(torch.ones(2))
    with pytest.raises(fusejit.CaptureError, match=r"while x.sum\(\) < 9.*no order; do it behind the loop"):
        fusejit.jit(fusejit.vmap(rows), backend=backend, fullgraph=True)(torch.ones(2, 2))


# What an `assert` checks.


VALUES = [
    torch.ones(2, 2),
    -torch.ones(2, 2),
    torch.tensor([[9.0, 1.0], [1.0, 1.0]]),
    torch.tensor([[-9.0, 1.0], [1.0, 1.0]]),
    torch.tensor([[1.0, 0.0], [-900.0, 0.0]]),
]


@pytest.mark.parametrize("fn", [positive, in_arms, in_parts])
def test_an_assert_on_a_tensor_is_checked_on_every_call(fn, backend, capsys):
    jitted = fusejit.jit(fn, backend=backend, fullgraph=True)
    raised = [both(fn, jitted, (x,), capsys)[0] is not None for x in VALUES]
    assert True in raised and False in raised
    assert jitted.cache_info().misses == 1
    kinds = {outcome.kind: outcome.became for outcome in jitted.explain(torch.ones(2, 2, requires_grad=True)).control}
    assert kinds["assert"] == "a check of the graph"


def test_an_assert_under_transforms(backend):
    twin = fusejit.jit(fusejit.vmap(in_arms), backend=backend, fullgraph=True)
    rows = torch.stack(VALUES[:2])
    assert_close(twin(rows), torch.stack([in_arms(row) for row in rows]))
    for value, text in ((VALUES[2], "too large"), (VALUES[3], "")):
        with pytest.raises(AssertionError) as failed:
            twin(torch.stack([VALUES[0], value]))
        assert str(failed.value) == text
    grad = fusejit.jit(torch.func.grad(lambda x: positive(x).sum()), backend=backend, fullgraph=True)
    assert_close(grad(VALUES[0]), 2 * (VALUES[0] * 2).exp())
    with pytest.raises(AssertionError, match="min -1.00"):
        grad(VALUES[1])
    with pytest.raises(AssertionError, match=r"min \[1.00, -1.00\]"):
        fusejit.jit(fusejit.vmap(positive), backend=backend, fullgraph=True)(rows)


def test_a_check_of_torch_in_an_arm(backend):
    closed = torch.tensor(True)

    def f(x):
        if x.sum() > 0:
            torch._assert_async((x > 0).all(), "mixed")
            y = x * 2
        else:
            y = x - 1
        torch._assert_async(closed)
        return y

    jitted = fusejit.jit(f, backend=backend, fullgraph=True)
    for x in (torch.ones(2), -torch.ones(2)):
        assert_close(jitted(x), f(x))
    with pytest.raises(RuntimeError, match="^mixed$"):
        jitted(torch.tensor([3.0, -1.0]))


def test_messages_that_cannot_be_made_in_advance(backend):
    jitted = fusejit.jit(read, backend=backend, fullgraph=True)
    with pytest.raises(AssertionError, match=r"checked.py:\d+: assert \(x > 0\).all\(\)"):
        jitted(-torch.ones(2))
    assert "its message cannot be made in advance" in str(jitted.explain(torch.ones(2)))


@pytest.mark.parametrize("mode", ["ast", "trace", "bytecode"])
def test_torchs_own_checks_are_kept(backend, mode):
    """Also what Dynamo makes of an `assert`, which raises an AssertionError as Python does."""

    def checked(x):
        torch._assert_async((x > 0).all(), "not positive")
        return x * 2

    for fn in (checked, asserted)[: 1 if mode == "trace" else 2]:
        jitted = fusejit.jit(fn, backend=backend, capture_mode=mode, fullgraph=True)
        assert_close(jitted(torch.ones(2)), torch.full((2,), 2.0))
        with pytest.raises(RuntimeError if fn is checked else AssertionError, match="^not positive$"):
            jitted(-torch.ones(2))
