"""Calls at the corners of torch's semantics, fused, against eager: each was wrong, or refused, when first met by a random program."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fusejit


def check(function, *inputs, **options):
    fused = fusejit.jit(function, backend="interpret", fullgraph=True, **options)
    wanted, got = function(*(x.clone() for x in inputs)), fused(*(x.clone() for x in inputs))
    for x, y in zip(*((v if isinstance(v, tuple) else (v,)) for v in (got, wanted)), strict=True):
        torch.testing.assert_close(x, y, equal_nan=True)


ROW, BLOCK = torch.randn(3), torch.randn(7, 3, 4, 5)
CORNERS = {
    "an index that a reduction gives": (lambda a, b: a[b.argmin(1, True) % 3], ROW, BLOCK),
    "comparisons of literals alone": (lambda a: F.cross_entropy(a.reshape(-1, 1), a.reshape(-1, 1).argmin(-1), label_smoothing=0.1), ROW),
    "select_scatter into bools": (lambda a: a.select_scatter(a.select(0, 0) * 3, 0, 2).to(torch.float32), ROW > 0),
    "select_scatter of doubles": (lambda a: a.select_scatter(a.select(0, 0).double(), 0, 2) + 1, ROW),
    "flip of a scalar": (lambda a: a.flip(0) * 2 + a.flip(0).cumsum(0), ROW[0]),
    "norm of a scalar": (lambda a: (-a).norm(1, dim=0, keepdim=True) + torch.linalg.vector_norm(a, 2, dim=-1), ROW[0]),
    "roll of nothing": (lambda a: a.roll(1, 0) + 1, ROW[:0]),
}


@pytest.mark.parametrize("case", CORNERS)
def test_corner(case):
    check(*CORNERS[case])
