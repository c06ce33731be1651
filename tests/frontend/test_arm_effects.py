"""What an arm of an `if` on a tensor changes besides its variables: both arms run while capturing, so it is refused,
never half done.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import types

import numpy as np
import pytest
import torch

import fusejit


class Plain:
    registry: list[int] = []

    def __init__(self, a):
        self.a = a

    def step(self):
        self.a = self.a - 1


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self, a):
        self.a = a

    def step(self):
        self.a = self.a - 1
        self.b = 1


@dataclasses.dataclass
class Record:
    a: object
    n: int = 0


class Named(dict):
    pass


SHARED: list[int] = []


def appends_to_a_global():
    SHARED.append(1)


def an_attribute(x):
    p = Plain(x)
    if x.sum() > 0:
        p.step()
    return p.a


def a_slot(x):
    p = Slotted(x)
    if x.sum() > 0:
        p.step()
    return p.a + hasattr(p, "b")


def an_attribute_of_a_record_in_a_list(x):
    d = [Record(Record(x))]
    if x.sum() > 0:
        d[0].a.n += 3
    return x + d[0].a.n


def an_attribute_by_name(x):
    d = types.SimpleNamespace(n=0)
    if x.sum() > 0:
        setattr(d, "n", 3)  # noqa: B010
        del d.n
    return x + hasattr(d, "n")


def an_attribute_of_a_dict(x):
    d = Named()
    d.n = 0
    if x.sum() > 0:
        d.n = 3
    return x + d.n


def an_attribute_of_a_class(x):
    class Local:
        n = 0

    if x.sum() > 0:
        Local.n = 3
        Local.m = 1
    return x + Local.n + hasattr(Local, "m")


def an_attribute_of_a_function(x):
    def g():
        pass

    g.n = 0
    if x.sum() > 0:
        g.n = 3
    return x + g.n


def an_attribute_of_a_tensor(x):
    y = x + 1
    y.n = 0
    if x.sum() > 0:
        y.n = 3
    return x + y.n


def an_attribute_of_a_module(x):
    m = torch.nn.Identity()
    m.n = 0
    if x.sum() > 0:
        m.n = 3
    return x + m.n


def a_list_of_a_class(x):
    p = Plain(x)
    if x.sum() > 0:
        p.registry.append(1)
    found = len(Plain.registry)
    Plain.registry.clear()
    return x + found


def a_closure_variable(x):
    n = 0

    def more():
        nonlocal n
        n = n + 1

    if x.sum() > 0:
        more()
    return x + n


def a_list_in_a_closure(x):
    r = []

    def more():
        r.append(x)

    if x.sum() > 0:
        more()
    return x + len(r)


def a_default(x):
    def more(r=[]):  # noqa: B006
        r.append(1)
        return r

    if x.sum() > 0:
        more()
    return x + len(more())


def a_bound_method_of_a_list(x):
    r = []
    more = r.append
    if x.sum() > 0:
        more(x)
    return x + len(r)


def a_bound_method(x):
    p = Plain(x)
    step = p.step
    if x.sum() > 0:
        step()
    return p.a


def a_partial_function(x):
    r = []
    more = functools.partial(r.append, x)
    if x.sum() > 0:
        more()
    return x + len(r)


def a_counter(x):
    r = collections.Counter()
    if x.sum() > 0:
        r["x"] += 1
    return x + r["x"]


def a_missing_item(x):
    r = collections.defaultdict(int)
    if x.sum() > 0:
        r["x"]
    return x + len(r)


def an_iterator(x):
    numbers = iter([1, 2, 3])
    if x.sum() > 0:
        next(numbers)
    return x + next(numbers)


def an_iterator_in_another(x):
    numbers = enumerate(zip([1, 2, 3], [4, 5, 6]))
    if x.sum() > 0:
        next(numbers)
    return x + next(numbers)[0]


def a_count(x):
    numbers = itertools.count()
    if x.sum() > 0:
        next(numbers)
    return x + next(numbers)


def a_generator(x):
    numbers = (k for k in range(4))
    if x.sum() > 0:
        next(numbers)
    return x + next(numbers)


def an_array(x):
    d = np.zeros(3)
    if x.sum() > 0:
        d[0] = 3
    return x + float(d[0])


def bytes_of_numbers(x):
    d = bytearray(3)
    if x.sum() > 0:
        d[0] = 3
    return x + d[0]


def a_list_by_and(x):
    r = []
    (x.sum() > 0) and (r.append(1) is None)
    return x + len(r)


def an_attribute_by_a_conditional_expression(x):
    d = types.SimpleNamespace(n=0)
    setattr(d, "n", 2) if x.sum() > 0 else None
    return x + d.n


def an_attribute_in_a_loop(x):
    p = Plain(x)
    while p.a.sum() > 0:
        p.step()
    return p.a


def an_attribute_there_and_back_in_a_loop(x):
    d = types.SimpleNamespace(odd=False)
    while x.sum() > 0:
        x = x - 1
        d.odd = not d.odd
    return x + d.odd


def a_global(x):
    if x.sum() > 0:
        appends_to_a_global()
    found = len(SHARED)
    SHARED.clear()
    return x + found


CHANGES = [fn for name, fn in list(globals().items()) if name.startswith(("a_", "an_", "bytes_"))]


@pytest.mark.parametrize("fn", CHANGES, ids=lambda fn: fn.__name__)
def test_what_an_arm_changes_is_not_half_done(fn):
    jitted = fusejit.jit(fn, backend="eager")
    for sign in (1, -1):
        x = sign * torch.ones(3)
        torch.testing.assert_close(jitted(x), fn(x))
    assert jitted.cache_info().fallbacks == 1
    with pytest.raises(
        fusejit.CaptureError, match=r"test_arm_effects\.py:\d+: .*changing a .* that depends on a tensor"
    ) as caught:
        fusejit.jit(fn, backend="eager", fullgraph=True)(x)
    assert "assign a variable in the arms" in str(caught.value)
    torch.testing.assert_close(fn(x), fn(x))  # and the failed capture left nothing behind


def made_in_the_arm(x):
    if x.sum() > 0:
        p = Plain(x)
        p.step()
        r = [p.a]
        r.append(x)
        y = sum(r)
    else:
        y = x * 2
    return y


def assigned_in_a_closure(x):
    n = 0

    def seen():
        return n

    if x.sum() > 0:
        n = 1
    return x + seen()


def looked_at(x):
    d, numbers, p = {"k": [x, 2]}, range(3), Plain(x)
    if x.sum() > 0:
        y = p.a + d["k"][1] + sum(numbers) + len(Plain.registry)
    else:
        y = x
    return y


@pytest.mark.parametrize("fn", [made_in_the_arm, assigned_in_a_closure, looked_at], ids=lambda fn: fn.__name__)
def test_what_an_arm_makes_or_only_looks_at_is_its_own(fn):
    jitted = fusejit.jit(fn, backend="eager", fullgraph=True)
    for sign in (1, -1):
        x = sign * torch.ones(3)
        torch.testing.assert_close(jitted(x), fn(x))


@pytest.mark.parametrize(
    "fn", [an_attribute, a_list_by_and, a_generator, an_attribute_in_a_loop], ids=lambda fn: fn.__name__
)
def test_the_same_under_vmap(fn):
    with pytest.raises(fusejit.CaptureError, match="changing a .* that depends on a tensor"):
        fusejit.jit(fusejit.vmap(fn), backend="eager", fullgraph=True)(torch.ones(4, 3))
