"""Select instead of if: values, first and second gradients, under vmap, in classes; what an `if` became; what is
refused and how.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from front import compare, if_net, infinite, leaf, no_round, roots, select_net, two_names
from torch.testing import assert_close

import fusejit
from fusejit import CaptureError, jit
from fusejit.frontend.converted_call import rewritten

F = torch.nn.functional


@pytest.fixture(params=["eager", "interpret"])
def backend(request: Any) -> str:
    return request.param


def test_case_42(backend):
    x, y = torch.tensor([0]), torch.tensor([1])
    for fn in (if_net, select_net):
        jitted = jit(fn, backend=backend, fullgraph=True)
        assert jitted(x, y).item() == fn(x, y).item() == -5050
        found = jitted.specialisation(x, y)
        assert {outcome.became for outcome in found.control} == ({"select"} if fn is if_net else set())
        assert not any("branch" in node.name for node in found.record["capture"].graph.nodes)


def test_case_43():
    assert fusejit.select(torch.tensor([True, False]), torch.tensor([2, 3]), 5).tolist() == [2, 5]
    made = fusejit.select(torch.tensor(True), 2, 3)
    assert isinstance(made, torch.Tensor) and made.item() == 2
    for bad in ((True, 1, 2), (torch.tensor([1]), 1, 2), (torch.tensor(True), "a", 2)):
        with pytest.raises(TypeError, match="select"):
            fusejit.select(*bad)


def test_case_44():
    cond, a = torch.tensor([[True, False], [True, True]]), torch.tensor([[2, 3], [3, 1]])
    mapped = torch.vmap(fusejit.select, in_dims=(0, 0, None))
    for b in (5, torch.tensor(5)):
        assert mapped(cond, a, b).tolist() == [[2, 5], [3, 1]]
        assert jit(lambda cond, a, b: mapped(cond, a, b), fullgraph=True)(cond, a, b).tolist() == [[2, 5], [3, 1]]


# Gradients that must not leak.


def divides(x):
    return 1 / x if x.sum() != 0 else x * 3


def indexed(x):
    place = (x.sum() * 10).long().reshape(1)
    if (place >= 0) and (place < 3):
        return x[place] * x
    return x * 5


def divided(x):
    n = x.sum().long()
    if n != 0:
        return x * (7 // n)
    return -x


LEAKS = {
    divides: ([0.0, 0, 0], [1.0, 2, 3]),
    roots: ([-1.0, 2, 3], [1.0, 2, 3], [0.0, 1, 2]),
    infinite: ([0.5, 0.1, 0.2], [800.0, 1, 2], [3.0, 1, 2]),
    indexed: ([9.0, 9, 9], [0.1, 0.05, 0.06], [-3.0, 1, 1]), divided: ([0.1, 0.2, 0.3], [1.0, 1, 1]),
}  # fmt: skip


def derivatives(fn, values):
    x = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    out = fn(x)
    (first,) = torch.autograd.grad((out**2).sum(), x, create_graph=True)
    second = torch.autograd.grad(first.sum(), x, allow_unused=True)[0] if first.requires_grad else None
    return out.detach(), first.detach(), torch.zeros_like(x) if second is None else second


@pytest.mark.parametrize("fn", LEAKS, ids=lambda fn: fn.__name__)
def test_first_and_second_gradients(fn):
    jitted = jit(fn, backend="eager", fullgraph=True)
    for values in LEAKS[fn]:
        assert_close(derivatives(jitted, values), derivatives(fn, values))
    assert {o.became for o in jitted.specialisation(torch.tensor(LEAKS[fn][0], dtype=torch.float64)).control} <= {
        "select"
    }


@pytest.mark.parametrize("fn", LEAKS, ids=lambda fn: fn.__name__)
def test_gradients_in_kernels(fn):
    jitted = jit(fn, backend="interpret", fullgraph=True)
    for values in LEAKS[fn]:
        x, z = torch.tensor(values, requires_grad=True), torch.tensor(values, requires_grad=True)
        (out := jitted(x)).sum().backward()
        (want := fn(z)).sum().backward()
        assert_close((out, x.grad), (want, z.grad))


@pytest.mark.parametrize("fn", LEAKS, ids=lambda fn: fn.__name__)
def test_under_transforms(fn):
    rows = torch.tensor(LEAKS[fn], dtype=torch.float64)
    twin = rewritten(fn)
    assert_close(torch.vmap(twin)(rows), torch.stack([fn(row) for row in rows]))
    grad = torch.func.grad(lambda x: (twin(x) ** 2).sum())
    wanted = torch.stack([derivatives(fn, values)[1] for values in LEAKS[fn]])
    assert_close(torch.vmap(grad)(rows), wanted)
    assert_close(torch.vmap(torch.vmap(grad))(rows[None]), wanted[None])
    summed = torch.func.grad(lambda x: (torch.vmap(twin)(x) ** 2).sum())(rows)
    assert_close(summed, wanted)
    curved = torch.vmap(torch.func.grad(lambda x: grad(x).sum()))(rows)
    assert_close(curved, torch.stack([derivatives(fn, values)[2] for values in LEAKS[fn]]))
    assert_close(jit(lambda x: torch.vmap(twin)(x), fullgraph=True)(rows), torch.stack([fn(row) for row in rows]))


def scaled_by_sign(x):
    return x * 3 if x.sum() > 0 else x


def mapped(rows):
    return torch.vmap(roots)(rows) * 2 + torch.func.vmap(scaled_by_sign)(rows)


def test_vmap_written_inside(backend):
    rows = torch.tensor(LEAKS[roots])
    wanted = torch.stack([roots(row) * 2 for row in rows]) + torch.stack([scaled_by_sign(row) for row in rows])
    assert_close(jit(mapped, backend=backend, fullgraph=True)(rows), wanted)


# Functions as people write them.


def scaled(fn):
    @functools.wraps(fn)
    def wrapper(*args, **kwargs):
        return fn(*args, **kwargs) * 2 if args[-1].sum() > 0 else fn(*args, **kwargs)

    return wrapper


class Base(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor([1.0, 2.0]))

    def forward(self, x):
        return self.w * x if x.mean() > 0 else x - self.w


class Derived(Base):
    __secret = 3

    def __init__(self):
        super().__init__()
        self.inner = Base()
        self.heads = torch.nn.Sequential(Base(), torch.nn.Tanh())

    @scaled
    def forward(self, x):
        if x[0] > 0:
            y = super().forward(x) * self.__secret
        else:
            y = self.heads(x)
        return self.inner(y)


def check_both(fn, inputs, backend, **options):
    jitted = jit(fn, backend=backend, fullgraph=True, **options)
    parameters = list(getattr(fn, "parameters", list)())
    for values in inputs:
        found = []
        for call in (fn, jitted):
            args = [torch.tensor(value, requires_grad=True) for value in values]
            out = call(*args)
            found.append(
                (out, torch.autograd.grad(out.sum(), [*args, *parameters], allow_unused=True, materialize_grads=True))
            )
        assert_close(found[0], found[1])
    return jitted


TWO = [([1.0, 2.0],), ([-1.0, -2.0],), ([-1.0, 4.0],), ([3.0, -4.0],)]


def test_modules_super_and_decorators(backend):
    jitted = check_both(Derived(), TWO, backend)
    assert jitted.cache_info().misses == 1
    assert len(jitted.specialisation(torch.tensor([1.0, 2.0], requires_grad=True)).control) >= 3


def test_closures_defaults_and_helpers(backend):
    count = torch.tensor([1.0, 3.0])

    def helper(x, *, by=2.0):
        nonlocal count

        def deeper(y):
            return y * by if y.sum() > 1 else y - count

        return deeper(x)

    def fn(x, scale=0.5):
        total = x * 0
        for number, item in enumerate((x, x * 2, x * 3)):
            if item.sum() > 4:
                break
            if item[0] < 0:
                continue
            total += helper(item, by=number + 1.0)
        else:
            total = total * scale
        return functools.partial(helper, by=3.0)(total)

    check_both(fn, TWO, backend)


def doubled(fn):
    @functools.wraps(fn)
    def call(*args): return fn(*args) * 2  # fmt: skip  # noqa: E704

    return call


@doubled
def kept_on_one_line(x): return x if x.sum() > 0 else -x  # fmt: skip  # noqa: E704


def test_decorated_functions_of_one_line(backend):
    check_both(kept_on_one_line, TWO, backend)


def heavy(x):
    w = torch.ones(2, 2) * 0.5
    if x.sum() > 0:
        for _ in range(3):
            x = (w @ x).sin()
            if x[0] > 0.4:
                x = x * 2
    else:
        x = x.cos()
    return x


def test_a_branch_where_arms_are_heavy(backend):
    jitted = check_both(heavy, TWO, backend)
    rows = {
        o.line.partition(": ")[2]: o.became for o in jitted.specialisation(torch.ones(2, requires_grad=True)).control
    }
    assert rows["if x.sum() > 0:"] == "a branch" and rows["if x[0] > 0.4:"] == "select"
    report = str(jitted.explain(torch.ones(2, requires_grad=True)))
    assert "control flow" in report and "test_convert.py" in report and "is no cheap op" in report


def adds(x, y):
    c = x * 2
    if x.sum() > 0:
        return torch.ones(2, 2) @ c
    return (c + y) * 3


def test_gradients_of_a_branch_have_their_own_memory(backend):
    check_both(adds, [(a, [0.5, 0.25]) for (a,) in TWO], backend)


def looped(x):
    n = 0
    while x.abs().sum() < 20:
        x = x * 1.5
        n += 1
        if n > 6:
            break
    return x * n


def test_while(backend):
    jitted = check_both(looped, TWO, backend)
    assert any(
        o.became == "a loop of the graph" for o in jitted.specialisation(torch.ones(2, requires_grad=True)).control
    )


def test_by_hand(backend):
    def fn(x, w):
        y = fusejit.cond(x.sum() > 0, lambda x: x * w, lambda x: x - 1, (x,))
        y = torch.cond(x[0] > 0, lambda x: x.sin(), lambda x: x.cos(), (y,))
        return fusejit.while_loop(lambda y, n: n < 3 + y[0].abs() * 0, lambda y, n: (y * 1.5, n + 1), (y, 0))[0]

    w = [2.0, 3.0]

    def plain(x, w):
        y = x * w if x.sum() > 0 else x - 1
        y = y.sin() if x[0] > 0 else y.cos()
        return y * 1.5**3

    for (x,) in TWO:
        leaves = [[torch.tensor(v, requires_grad=True) for v in (x, w)] for _ in range(3)]
        outs = [call(*args) for call, args in zip((plain, fn, jit(fn, backend=backend, fullgraph=True)), leaves)]
        grads = [torch.autograd.grad(out.sum(), args, allow_unused=True) for out, args in zip(outs, leaves)]
        for out, grad in zip(outs[1:], grads[1:]):
            assert_close(out, outs[0])
            for one, other in zip(grad, grads[0]):
                assert_close(torch.zeros(2) if one is None else one, torch.zeros(2) if other is None else other)


def test_in_place(backend):
    def fn(x, out):
        out = out * 1
        kept = out
        if x.sum() > 0:
            out += x
            out[0] = 7.0
        else:
            out.mul_(2)
        return out + kept

    check_both(fn, [(a, [0.5, 0.25]) for (a,) in TWO], backend)


def rebound_or_changed(x, y):
    a, b, c = x * 1, y * 1, x * 2
    if a.sum() > 0:
        c = c + b
    else:
        c += a
    return a + c


def rebound_or_changed_in_a_branch(x, y):
    c, kept = x * 2, y * 1
    if x.sum() > 0:
        c = torch.ones(2, 2) @ c
        kept += 1
    else:
        c += y
    return c * kept


def returned_or_changed(x, y):
    c = x * 2
    kept = c
    if x.sum() > 0:
        return torch.ones(2, 2) @ c
    else:
        c += y
    c += 1
    return c + kept


def changed_in_a_loop(x, y):
    c, n = x * 2, 0
    while n < 3 and x.sum() < 8:
        n += 1
        if x[0] > 0:
            c += x
        x = x + c * 0.5 + 1
    return c * n


CHANGED = (rebound_or_changed, rebound_or_changed_in_a_branch, returned_or_changed, changed_in_a_loop)


@pytest.mark.parametrize("fn", CHANGED, ids=lambda fn: fn.__name__)
def test_one_arm_changes_what_the_other_binds(fn, backend):
    check_both(fn, [(a, [0.5, 0.25]) for (a,) in TWO], backend)


def test_python_values_stay_python():
    def fn(x, flag, n):
        assert n >= 0, "negative"
        if flag and n > 1:
            y = x
        elif not flag:
            return x * n if n else x
        return y - n

    jitted = jit(fn, fullgraph=True)
    for args in ((True, 2), (False, 0), (False, 3)):
        assert_close(jitted(torch.ones(2), *args), fn(torch.ones(2), *args))
        assert not jitted.specialisation(torch.ones(2), *args).control
    with pytest.raises(NameError, match="y"):
        jitted(torch.ones(2), True, 1)
    with pytest.raises(AssertionError, match="negative"):
        jitted(torch.ones(2), True, -1)


# What is refused.


# What an `if` chose, changed in place: so is what it was chosen from.


def aliased(x):
    z = x * 2
    y = x * 3
    if x.sum() > 0:
        y = z
    y += 1
    return y + z


def aliased_in_a_tuple(x):
    z = x * 2
    pair = (x * 3, z)
    if x.sum() > 0:
        pair = (z, z)
    z += 1
    return pair[0] + z


def rebound(x, c):
    if x.sum() > 0:
        c = c + 1
    c += 1
    return c * x


def rebound_with_another_name(x, c):
    d = c
    if x.sum() > 0:
        c = c + 1
    c.mul_(2)
    d += x
    return c, d


def seen_through_a_view(x, c):
    y = c * 2
    row = y[0]
    if x.sum() > 0:
        y = y + x
    y[1:] += 1
    row *= 3
    return y, row


def twice(x, c):
    y = z = x * 2
    if x.sum() > 0:
        y = c
    if x[0, 0] > 1:
        z = y
    z += 1
    y *= 2
    return x, y, z, c


def both_rebound(x, c):
    one, other = x * 2, x * 3
    if x.sum() > 0:
        one, other = other, one
    one += c
    other.relu_()
    return one - other


def in_a_branch_of_its_own(x, c):
    y = x * 2
    if x.sum() > 0:
        y = x @ x
    torch.nn.functional.relu(y, inplace=True)
    if x[0, 0] > 1:
        c = y
    c.add_(1)
    return y + c


def on_two_ways(x, c):
    y = c
    if x.sum() > 0:
        y = x * 2
    if x[0, 0] > 1:
        y = c
    y += 1
    return y


TIED = [
    aliased,
    aliased_in_a_tuple,
    rebound,
    rebound_with_another_name,
    seen_through_a_view,
    twice,
    both_rebound,
    in_a_branch_of_its_own,
    on_two_ways,
]


@pytest.mark.parametrize("fn", TIED, ids=lambda fn: fn.__name__)
def test_changes_in_place_of_what_an_if_chose(fn, backend):
    """With gradients: where Python's own in-place changes allow one; and what the caller sees of its arguments."""
    one = fn in (aliased, aliased_in_a_tuple)
    for start in ([[1.0, -2], [3, 4]], [[-1.0, 2], [-3, 0.5]], [[1.5, -2], [-3, 0.5]], [[0.5, 2], [3, 4]]):
        x, c = torch.tensor(start), torch.arange(4.0).reshape(2, 2)
        args = (x,) if one else (x, c)
        compare(fn, jit(fn, backend=backend, fullgraph=True), args)
        jitted = jit(fn, backend=backend, fullgraph=True)
        repeated = "-> repeated (it is changed in place behind it" in str(jitted.explain(*args))
        assert repeated is (fn is not both_rebound)  # whose tensors no one reads by another name
    if fn in (rebound, both_rebound, aliased):
        args = tuple(value.requires_grad_() for value in args)
        compare(fn, jit(fn, backend=backend, fullgraph=True), args)


def only_one(x):
    if x.sum() > 0:
        y = x
    return y


def shapes(x):
    if x.sum() > 0:
        y = x
    else:
        y = x[:1]
    return y + 1


def returns(x):
    if x.sum() > 0:
        return x
    return x, x


def appends(x):
    found = []
    if x.sum() > 0:
        found.append(x)
    return found


def raises(x):
    if x.sum() > 0:
        raise ValueError("positive")
    return x


def elements(x):
    if x > 0:
        return x
    return -x


def writes(x):
    if x.sum() > 0:
        STATE["last"] = 3
    return x


def aliased_twice(x):
    z, y = x * 2, x * 3
    if x.sum() > 0:
        if x[0] > 0:
            y = z
        x = x + 1
    y += 1
    return x + y + z


def looks_at(x):
    y = x * 2
    z = y
    if x.sum() > 0:
        y = z.view_as(z)
    y += 1
    return y + z


def viewed(x):
    y = x * 2
    view = y[:1]
    if x.sum() > 0:
        y += 1
        x = x + view
    return x + y


def read_in_the_arm(x):
    z = x * 2
    y = z
    if x.sum() > 0:
        y = x * 3
    if x[0] > 0:
        y += 1
        x = x + z
    return x + y


def changed_in_a_branch(x):
    z, y = x * 2, x * 3
    if x.sum() > 0:
        x = torch.ones(2, 2) @ x
        if x[0] > 0:
            y = z
        y += 1
    return x + y + z


def changing_test(x):
    y = x * 2
    while y.add_(1).sum() < 9:
        x = x + 1
    return x + y


STATE: dict[str, int] = {}
CHOSEN = "an in-place change of a variable"
REFUSED = {
    only_one: ("`y` is bound in only one", "if x.sum() > 0:"),
    shapes: ("`y` has shape", "if x.sum() > 0:"),
    returns: ("a result that depends on a tensor", "if x.sum() > 0:"),
    appends: ("changing a list (`found`)", "if x.sum() > 0:"),
    raises: ("ValueError: positive", "if x.sum() > 0:"),
    elements: ("`.any()` or `.all()`", "if x > 0:"),
    aliased_twice: (CHOSEN, "if x.sum() > 0:"),
    viewed: ("an in-place change of a view", "if x.sum() > 0:"),
    looks_at: (CHOSEN, "if x.sum() > 0:"),
    read_in_the_arm: (CHOSEN, "if x[0] > 0:"),
    changed_in_a_branch: (CHOSEN, "if x[0] > 0:"),
    no_round: (CHOSEN, "while y.sum() < 1:"),
    two_names: ("a tensor in place that has several names", "while y.sum() < 5:"),
    changing_test: ("its test changes a tensor in place", "while y.add_(1).sum() < 9:"),
    writes: ("changing a dict", "if x.sum() > 0:"),
}


@pytest.mark.parametrize("fn", REFUSED, ids=lambda fn: fn.__name__)
def test_refused(fn):
    text, line = REFUSED[fn]
    with pytest.raises(CaptureError) as caught:
        jit(fn, fullgraph=True)(torch.ones(2))
    assert (
        text in str(caught.value)
        and line in str(caught.value)
        and f"{Path(fn.__code__.co_filename).name}:" in str(caught.value)
    )
    STATE.clear()
    if fn is not raises and fn is not elements:  # eager, as Python does it
        assert str(jit(fn)(torch.ones(2))) == str(fn(torch.ones(2)))


def test_generators_and_async_functions_are_refused():
    def yields(x):
        yield x

    with pytest.raises(CaptureError, match="generator"):
        jit(yields, fullgraph=True)(leaf(2))
