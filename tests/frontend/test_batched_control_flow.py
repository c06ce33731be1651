"""Control flow on tensors under torch.func: values, first and second gradients, row by row against plain Python."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from front import infinite, no_round, roots, two_names
from test_convert import aliased
from torch.testing import assert_close

import fusejit
from fusejit import jit

D = torch.float64


@pytest.fixture(params=["eager", "interpret"])
def backend(request: Any) -> str:
    return request.param


def two_maps(x):
    return fusejit.vmap(roots)(x) * 2 + fusejit.vmap(infinite)(x)


def two_maps_of_torch(x):
    return torch.func.vmap(infinite, in_dims=1, out_dims=1)(x) + torch.vmap(roots)(x)


ROWS = torch.tensor([[-1.0, 2, 3], [1.0, 2, 3], [0.0, 1, 60]])


@pytest.mark.parametrize("fn", [two_maps, two_maps_of_torch])
def test_two_maps_in_one_function(fn, backend):
    jitted = jit(fn, backend=backend, fullgraph=True)
    found = []
    for call in (jitted, lambda x: plain(fn, x)):
        x = ROWS.clone().requires_grad_()
        with torch.no_grad():
            value = call(x)
        out = call(x)
        found.append((value, out, torch.autograd.grad(out.sum(), x)))
    assert_close(*found)


def plain(fn, x):
    first = torch.stack([roots(row) for row in x]) * (2 if fn is two_maps else 1)
    return first + (
        torch.stack([infinite(row) for row in x])
        if fn is two_maps
        else torch.stack([infinite(row) for row in x.t()], 1)
    )


# Loops: each row goes round until its own test fails.


def grows(x):
    n = 0
    while x.abs().sum() < 20:
        x = x * 1.5
        n += 1
        if n > 6:
            break
    return x * n


def leaks(x):
    y = x
    while y.sum() > 1:
        y = torch.sqrt(y.sum() - 1) * x / (x.norm() + 1)
    return torch.where(y > 0, y, x) * x


def in_an_arm(x):
    if x.sum() > 0:
        while x.sum() < 9:
            x = x * 2
    else:
        x = x - 1
    return x


def nested(x):
    total, i = x * 0, 0
    while i < x[0]:
        j = 0
        while j < i:
            total = total + x / (j + 1.0)
            j = j + 1
        i = i + 1
    return total


C = torch.tensor([0.5, 0.25, 0.125], dtype=D, requires_grad=True)


def closed_over(x):
    k = 3
    while x.max() < 10:
        if x[0] > k:
            x = x + C * k
            continue
        x = x * 2 + C.exp()
    return x / C


def broken_out(x):
    y = x.clone()
    while y.sum() > 1:
        y = torch.sqrt((y * y).sum() - 1) * x / (x.norm() * 1.5)
        if y.sum() < 2:
            y += 0.25
            break
    else:
        y = y + 100
    return y * x


def by_hand(x):
    def step(y, k):
        if y.sum() > 40:
            return y * 0.1, k + 1
        return y * y.abs().sum(), k + 1

    y, k = fusejit.while_loop(lambda y, k: k < x[0] + 2, step, (x, 0))
    return y * k


def returned(x):
    while x.sum() < 5:
        if x[0] > 3:
            return x * 100
        x = x + x.detach().abs() + 1
    return x


LOOPS = [grows, leaks, in_an_arm, nested, closed_over, broken_out, by_hand, returned]
CASES = [(fn, "eager") for fn in LOOPS] + [(fn, "interpret") for fn in (grows, in_an_arm, closed_over)]
STARTS = torch.tensor([[1.0, 2, 3], [-1, -2, -3], [4, 5, 0.6], [0.3, 0.2, 0.1], [3, 2, 10]], dtype=D)


def squared(fn):
    return lambda row: (fn(row) ** 2).sum()


def row_by_row(fn):
    """Values, first gradients of the squared sum, and gradients of their sum, by plain Python."""
    found = []
    for start in STARTS:
        row = start.clone().requires_grad_()
        out = fn(row)
        (first,) = torch.autograd.grad((out**2).sum(), row, create_graph=True, materialize_grads=True)
        second = (
            torch.autograd.grad(first.sum(), row, allow_unused=True, materialize_grads=True)[0]
            if first.requires_grad
            else row * 0
        )
        found.append((out, first, second))
    return [torch.stack(values).detach() for values in zip(*found)]


@pytest.mark.parametrize(("fn", "backend"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_a_while_under_transforms(fn, backend):
    values, first, second = row_by_row(fn)
    kinds = {
        "vmap": (lambda x: torch.vmap(fn)(x), values),
        "vmap twice": (lambda x: fusejit.vmap(fusejit.vmap(fn))(x[None])[0], values),
        "vmap of grad": (lambda x: fusejit.vmap(fusejit.grad(squared(fn)))(x), first),
        "grad of vmap": (lambda x: fusejit.grad(lambda x: (torch.vmap(fn)(x) ** 2).sum())(x), first),
    }
    if backend == "eager" or fn is grows:
        kinds["grad of grad"] = (
            lambda x: fusejit.vmap(fusejit.grad(lambda r: fusejit.grad(squared(fn))(r).sum()))(x),
            second,
        )
    for name, (call, wanted) in kinds.items():
        found = jit(call, backend=backend, fullgraph=True)(STARTS)
        assert_close(found, wanted, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(("fn", "backend"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_gradients_from_outside_of_a_while_under_vmap(fn, backend):
    _, first, second = row_by_row(fn)
    x = STARTS.clone().requires_grad_()
    out = jit(lambda x: torch.vmap(fn)(x), backend=backend, fullgraph=True)(x)
    (found,) = torch.autograd.grad((out**2).sum(), x, create_graph=backend == "eager")
    assert_close(found.detach(), first)
    if backend == "eager" and found.requires_grad:
        assert_close(torch.autograd.grad(found.sum(), x, materialize_grads=True)[0], second)
    mapped = jit(lambda x: fusejit.vmap(fusejit.grad(squared(fn)))(x), backend=backend, fullgraph=True)
    found = mapped(x)
    assert_close(found.detach(), first)
    if found.requires_grad:
        assert_close(torch.autograd.grad(found.sum(), x, materialize_grads=True)[0], second)


@pytest.mark.parametrize(("fn", "backend"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_a_while_in_forward_mode(fn, backend):
    """Against plain Python under the same transforms, which need no graph there."""
    start, tangent = STARTS[0], torch.tensor([1.0, -0.5, 2.0], dtype=D)
    kinds = {"jvp": lambda x: torch.func.jvp(fn, (x,), (tangent,))}
    if backend == "eager":
        kinds["jacfwd"] = lambda x: torch.func.jacfwd(fn)(x)
        kinds["jvp of grad"] = lambda x: torch.func.jvp(torch.func.grad(squared(fn)), (x,), (tangent,))
    if fn in (grows, closed_over):
        kinds["grad of jvp"] = lambda x: torch.func.grad(lambda x: torch.func.jvp(fn, (x,), (tangent,))[1].sum())(x)
    for name, call in kinds.items():
        found = jit(call, backend=backend, fullgraph=True)(start)
        assert_close(found, call(start), msg=lambda text, name=name: f"{name}: {text}")
    wanted = torch.stack([torch.func.jvp(fn, (row,), (tangent,))[1] for row in STARTS])
    mapped = jit(
        lambda x: torch.vmap(lambda row: torch.func.jvp(fn, (row,), (tangent,))[1])(x), backend=backend, fullgraph=True
    )
    assert_close(mapped(STARTS), wanted)


def assigned_in_the_test(x):
    n = 0
    while (n := n + 1) < x.sum():
        x = x * 0.9
    return x * n


@pytest.mark.parametrize("call", [assigned_in_the_test, lambda x: torch.vmap(assigned_in_the_test)(x[None])[0]])
def test_a_test_that_assigns_is_refused(call):
    with pytest.raises(
        fusejit.CaptureError, match=r"while \(n := n \+ 1\) < x.sum\(\):.*`n` is assigned in its test.*in the body"
    ):
        jit(call, fullgraph=True)(torch.tensor([1.0, 4.0]))
    assert_close(jit(assigned_in_the_test)(torch.tensor([1.0, 4.0])), assigned_in_the_test(torch.tensor([1.0, 4.0])))


# The spellings of torch, made inside and outside of the jitted function.

MAPPED, SLOPE = torch.vmap(roots), torch.func.grad(squared(infinite))
SPELLINGS = {
    "vmap outside": (lambda x: MAPPED(x), lambda x: torch.stack([roots(row) for row in x])),
    "grad outside": (lambda x: SLOPE(x[0]), lambda x: slope(infinite, x[0])),
    "grad": (lambda x: torch.func.grad(squared(roots))(x[1]), lambda x: slope(roots, x[1])),
    "grad of vmap": (
        lambda x: torch.func.grad(squared(MAPPED))(x),
        lambda x: torch.stack([slope(roots, row) for row in x]),
    ),
    "vmap of grad": (
        lambda x: torch.vmap(torch.func.grad(squared(roots)))(x),
        lambda x: torch.stack([slope(roots, row) for row in x]),
    ),
    "grad and value": (lambda x: torch.func.grad_and_value(squared(roots))(x[0])[0], lambda x: slope(roots, x[0])),
    "jacrev": (lambda x: torch.func.jacrev(roots)(x[1]), lambda x: torch.autograd.functional.jacobian(roots, x[1])),
    "jacfwd": (lambda x: torch.func.jacfwd(roots)(x[1]), lambda x: torch.autograd.functional.jacobian(roots, x[1])),
    "hessian": (
        lambda x: torch.func.hessian(squared(infinite))(x[0]),
        lambda x: torch.autograd.functional.hessian(squared(infinite), x[0]),
    ),
    "vjp": (lambda x: torch.func.vjp(squared(roots), x[0])[1](x.sum() * 0 + 1)[0], lambda x: slope(roots, x[0])),
    "jvp": (lambda x: torch.func.jvp(squared(roots), (x[0],), (x[1],))[1], lambda x: slope(roots, x[0]) @ x[1]),
}


def slope(fn, row):
    return torch.autograd.grad((fn(row := row.detach().clone().requires_grad_()) ** 2).sum(), row)[0]


@pytest.mark.parametrize("name", SPELLINGS)
def test_torchs_spellings(name):
    call, wanted = SPELLINGS[name]
    for backend in ("eager", "interpret") if name in ("grad outside", "vmap of grad") else ("eager",):
        x = ROWS.double()
        assert_close(jit(call, backend=backend, fullgraph=True)(x), wanted(x))


def test_a_transform_itself_is_jitted(backend):
    x = ROWS.double()
    assert_close(jit(torch.func.grad(squared(roots)), backend=backend, fullgraph=True)(x[1]), slope(roots, x[1]))
    assert_close(
        jit(torch.vmap(grows), backend=backend, fullgraph=True)(STARTS), torch.stack([grows(row) for row in STARTS])
    )


# What would give a wrong number is refused.


@pytest.mark.parametrize("fn", [aliased, no_round, two_names], ids=lambda fn: fn.__name__)
def test_changes_in_place_that_another_name_would_miss(fn):
    rows = torch.tensor([[1.0, 2, 3], [-1, -2, -3]])
    line = {aliased: "if x.sum() > 0:", no_round: "while y.sum() < 1:", two_names: "while y.sum() < 5:"}[fn]
    for call in (lambda x: torch.vmap(fn)(x), lambda x: torch.func.grad(lambda x: fn(x).sum())(x[0])):
        with pytest.raises(fusejit.CaptureError) as caught:
            jit(call, fullgraph=True)(rows)
        assert line in str(caught.value) and "in place" in str(caught.value).replace("in-place", "in place")
    if fn is not two_names:
        with pytest.raises(fusejit.FusejitError, match="in-place change"):
            torch.vmap(jit(fn))(rows)


def test_jitted_functions_under_torchs_own_transforms():
    """Outside of any jitted function: the rewritten Python runs under the transform."""
    x = ROWS.double()
    jitted = jit(roots)
    assert_close(torch.vmap(jitted)(x), torch.stack([roots(row) for row in x]))
    assert_close(torch.vmap(torch.func.grad(squared(jitted)))(x), torch.stack([slope(roots, row) for row in x]))
    looped = jit(grows)
    assert_close(torch.vmap(looped, in_dims=1)(STARTS.t()), torch.stack([grows(row) for row in STARTS]))
    with fusejit.disable_jit(), pytest.raises(RuntimeError, match="data-dependent"):
        torch.vmap(jitted)(x)


# Places that are tensors.


def picks(x, i):
    y = x[i] * x[i, 0] + x[:, i].sum()
    out = x * 1
    out[i] = y
    out[i, 1] = 5
    return out


def picks_by_value(x):
    return x[x.sum(1).argmax()] * 2


def test_a_tensor_as_a_place(backend):
    for place in (0, 2, -1):
        x, i = torch.randn(3, 3, requires_grad=True), torch.tensor(place)
        jitted = jit(picks, backend=backend, fullgraph=True)
        found, wanted = jitted(x, i), picks(x, i)
        assert_close(found, wanted)
        assert_close(torch.autograd.grad(found.sin().sum(), x), torch.autograd.grad(wanted.sin().sum(), x))
    assert_close(jit(picks_by_value, backend=backend, fullgraph=True)(x), picks_by_value(x))
    rows = torch.randn(4, 3, 3)
    assert_close(
        jit(torch.vmap(picks_by_value), backend=backend, fullgraph=True)(rows),
        torch.stack([picks_by_value(row) for row in rows]),
    )
    with pytest.raises(IndexError):
        jit(picks_by_place, backend=backend, fullgraph=True)(x, torch.tensor(3))


def picks_by_place(x, i):
    return x[i] + 1


def changes_a_place(x, i):
    x = x * 1
    x[i] += 1
    return x


def test_a_place_is_no_view():
    x, i = torch.randn(3, 3), torch.tensor(1)
    with pytest.raises(fusejit.CaptureError, match=r"x\[i\] \+= 1.*in-place change of `x\[i\]`.*write `x\[i\] = new`"):
        jit(changes_a_place, fullgraph=True)(x, i)
    assert_close(jit(changes_a_place)(x, i), changes_a_place(x, i))
