"""Calls at the corners of torch's semantics, fused, against eager: each was wrong, or refused, when first met by a
random program.
"""

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
    "comparisons of literals alone": (
        lambda a: F.cross_entropy(a.reshape(-1, 1), a.reshape(-1, 1).argmin(-1), label_smoothing=0.1),
        ROW,
    ),
    "select_scatter into bools": (lambda a: a.select_scatter(a.select(0, 0) * 3, 0, 2).to(torch.float32), ROW > 0),
    "select_scatter of doubles": (lambda a: a.select_scatter(a.select(0, 0).double(), 0, 2) + 1, ROW),
    "flip of a scalar": (lambda a: a.flip(0) * 2 + a.flip(0).cumsum(0), ROW[0]),
    "norm of a scalar": (lambda a: (-a).norm(1, dim=0, keepdim=True) + torch.linalg.vector_norm(a, 2, dim=-1), ROW[0]),
    "a norm of a scan longer than a tile": (
        lambda a: F.layer_norm(a.cumsum(-1), (a.shape[-1],)),
        torch.randn(1, 17000),
    ),
    "roll of nothing": (lambda a: a.roll(1, 0) + 1, ROW[:0]),
}

LOSSES = (F.mse_loss, F.smooth_l1_loss, F.huber_loss)


@pytest.mark.parametrize(
    "x", [torch.tensor([1.0, -float("inf"), float("nan"), 0.25]), torch.ones(0)], ids=["not finite", "nothing"]
)
def test_gradients_of_losses(x):
    """A difference that is not a number has a gradient that is none, and nothing has no gradient."""
    y = torch.where(x == 1, -1.0, x)  # infinity minus infinity
    for function in (lambda a, b, loss=loss: loss(a, b, reduction="sum") for loss in LOSSES):
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        function(a, y).backward()
        fusejit.jit(function, backend="interpret", fullgraph=True)(b, y).backward()
        torch.testing.assert_close(b.grad, a.grad, equal_nan=True)


@pytest.mark.parametrize("case", CORNERS)
def test_corner(case):
    check(*CORNERS[case])


def test_places_beyond_32_bits_of_a_few_elements():
    """What a slice of a huge range counts needs 64 bits, though neither the elements nor the memory do."""
    check(
        lambda a: torch.arange(4, dtype=torch.int64)[:, None] * 2**31 + torch.arange(5, 8) * a,
        torch.ones(1, dtype=torch.int64),
    )
    fused = fusejit.jit(
        lambda a: torch.arange(4 * 2**31).reshape(4, 2**31)[:, 5:8] + a, backend="interpret", fullgraph=True
    )
    wanted = [[row * 2**31 + column + 1 for column in (5, 6, 7)] for row in range(4)]
    assert fused(torch.ones(1, dtype=torch.int64)).tolist() == wanted


def test_a_row_s_operand_is_loaded_by_all_warps_before_one_overwrites_it():
    """The interpreter has no warps: the barrier, or the memory of its own, is seen in the program."""

    def changed(x, t):
        y = (x * t[:, None]).softmax(-1)
        t.mul_(0.9)
        return y

    def reused(x, a, b):
        t = a @ b
        return (x * t[:, None]).sum(1), t * 2

    program = fusejit.jit(changed, backend="interpret").program(torch.randn(64, 300), torch.randn(64))
    *before, store = program.source[: program.source.index("''',")].strip().splitlines()
    assert "out1 + x" in store and before[-1].strip() == "tl.debug_barrier()"
    alone = fusejit.jit(reused, backend="interpret").program(torch.randn(64, 3000), torch.randn(64, 8), torch.randn(8))
    assert "# in place" not in alone.source
