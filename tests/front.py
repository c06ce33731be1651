"""Shared by the tests of the front: a jitted function against eager, on the eager backend and on a stand-in for the
compiler.

Also functions with control flow on tensors, which several files try.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves

from fusejit import jit, select


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def same(one: Any, other: Any) -> None:
    (ones, first), (others, second) = tree_flatten(one), tree_flatten(other)
    assert first == second
    for x, y in zip(ones, others):
        if isinstance(x, torch.Tensor):
            torch.testing.assert_close(x, y, equal_nan=True)
            assert x.requires_grad == y.requires_grad
        else:
            assert x == y


def prepare(args: Any) -> tuple[list, list]:
    """Fresh leaves, and non-leaf copies that may be changed in place."""
    leaves = [x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in args]
    return leaves, [x * 1 if isinstance(x, torch.Tensor) and x.requires_grad else x for x in leaves]


def compare(fn: Callable, call: Callable, args: Any) -> None:
    """Compare results, changed inputs and gradients of two functions; the second is called twice."""
    found = []
    for function in (fn, call, call):
        leaves, given = prepare(args)
        torch.manual_seed(0)
        out = function(*given)
        results = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor) and x.requires_grad]
        if results:
            sum((x.float() ** 2).sum() for x in results).backward()
        found.append((out, given, [x.grad for x in leaves if isinstance(x, torch.Tensor)]))
    same(found[0], found[1])
    same(found[0], found[2])


def check(fn: Callable, args: Any, backend: str) -> Any:
    """Compare fn and jit(fn); returns the specialisation."""
    jitted = jit(fn, backend=backend)
    compare(fn, jitted, args)
    return jitted.specialisation(*prepare(args)[1])


# Functions with control flow on tensors, which several files try.


def if_net(x, y):
    out = 0
    for _ in range(100):
        if x < y:
            x = x - y
        else:
            x = x + y
        out = out + x
    return out


def select_net(x, y):
    out = x
    for _ in range(100):
        cond = x < y
        x = select(cond, x - y, x + y)
        out = out + x
    return out


def roots(x):
    if x.min() > 0:
        return torch.sqrt(x) * torch.log(x)
    return x**2


def infinite(x):
    y = x * 2
    if x.max() < 1:
        y = torch.exp(x) * y
    elif x.max() > 50:
        y = x * 0
    return y


def no_round(x):
    z = x * 2
    y = z
    while y.sum() < 1:
        y = y + 1
    y += 1
    return y + z


def two_names(x):
    z = x * 2
    y = z
    while y.sum() < 5:
        y += 1
        x = x + z
    return x + y
