"""Control flow on tensors under torch.func: values, first and second gradients, row by row against plain Python."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing import assert_close

import fusejit
from fusejit import jit

D = torch.float64


@pytest.fixture(params=["eager", "interpret"])
def backend(request: Any) -> str:
    return request.param


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
    return first + (torch.stack([infinite(row) for row in x]) if fn is two_maps else torch.stack([infinite(row) for row in x.t()], 1))
