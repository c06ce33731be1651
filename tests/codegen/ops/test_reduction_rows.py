"""One row says all of a reduction: a toy one is lowered, fused, looped over, split, scanned and differentiated."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fusejit
from fusejit.codegen.ir import reductions
from fusejit.codegen.ir.reductions import Reduction, Running
from fusejit.codegen.ops import rules, table


@torch.library.custom_op("fusejit_toy::abs_sum", mutates_args=())
def abs_sum(x: Tensor, dims: list[int], keepdim: bool = False) -> Tensor:
    return x.abs().sum(dims, keepdim)


@torch.library.custom_op("fusejit_toy::abs_cumsum", mutates_args=())
def abs_cumsum(x: Tensor, dim: int) -> Tensor:
    return x.abs().cumsum(dim)


abs_sum.register_fake(lambda x, dims, keepdim=False: x.sum(dims, keepdim))
abs_cumsum.register_fake(lambda x, dim: torch.empty_like(x))
abs_sum.register_autograd(
    lambda ctx, g: ((g if ctx.kept else g.unsqueeze(ctx.dim)) * ctx.saved_tensors[0].sign(), None, None),
    setup_context=lambda ctx, inputs, output: (
        ctx.save_for_backward(inputs[0]),
        setattr(ctx, "dim", inputs[1][0]),
        setattr(ctx, "kept", inputs[2]),
    ),
)

ROW = Reduction(
    "abs_sum",
    lambda dtype: 0,
    along="fusejit_toy.abs_sum",
    dtypes="float",
    spelling="fj.sum(tl.abs({0}), {axis})",
    combining="({0} + tl.abs({1}))",
    scan=Running(
        "abs_cumsum",
        along="fusejit_toy.abs_cumsum",
        spelling="fj.cumsum(tl.abs({0}), {axis}, {reverse})",
        combining="({0} + {1})",
    ),
)


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    for rows in (reductions.REDUCTIONS, table.OPS, rules.RULES, rules.CHECKS):
        for name in ("abs_sum", "fusejit_toy.abs_sum.default", "fusejit_toy.abs_cumsum.default"):
            monkeypatch.setitem(rows, name, None)  # what the row adds is taken away again
            del rows[name]
    rules.register(ROW)


def run(f, *args, grad=False):
    """The kernels of `f`, whose results, and gradients, are those of eager."""
    jitted = fusejit.jit(f, backend="interpret")
    ours = [a.clone().requires_grad_(grad) for a in args]
    theirs = [a.clone().requires_grad_(grad) for a in args]
    result, expected = jitted(*ours), f(*theirs)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
    if grad:
        result.sum().backward()
        expected.sum().backward()
        torch.testing.assert_close([a.grad for a in ours], [a.grad for a in theirs])
    return jitted, jitted.program(*ours)


@pytest.mark.parametrize("shape", [(5, 7), (3, 1000), (1, 1), (64, 33)])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_it_is_fused(shape, dim):
    _, program = run(lambda x: abs_sum(x * 2 + 1, [dim], True) * x.sin(), torch.randn(shape))
    assert program.launches == 1 and not program.externs
    assert 1 in shape or "tl.abs" in program.kernels[0].source


def test_a_long_row_is_looped_over(monkeypatch):
    monkeypatch.setattr("fusejit.codegen.passes.rfactor._pieces", lambda *args: 0)
    _, program = run(lambda x: abs_sum(x.sin(), [1]), torch.randn(3, 70_001))
    (kernel,) = program.kernels
    assert "for start in" in kernel.source and "+ tl.abs(" in kernel.source


def test_a_long_row_is_split():
    _, program = run(lambda x: abs_sum(x.sin(), [1]) + 1, torch.randn(2, 300_000))
    assert program.launches == 2 and all("tl.abs" in k.source for k in program.kernels)


def test_a_long_column_is_split():
    _, program = run(lambda x: abs_sum(x.sin(), [0]), torch.randn(30_000, 8))
    assert program.launches == 2


def test_rows_at_odd_addresses_are_combined():
    _, program = run(lambda x: x / abs_sum(x, [1], True), torch.randn(9, 517))
    assert "emask" in program.kernels[0].source


@pytest.mark.parametrize("columns", [100, 9000])
def test_it_is_scanned(columns, monkeypatch):
    if columns == 9000:
        from fusejit.templates import reduction_persistent

        monkeypatch.setattr(reduction_persistent, "persistent", lambda cluster: False)
    _, program = run(lambda x: abs_cumsum(x + 1, 1) * 2, torch.randn(3, columns))
    assert program.launches == 1 and not program.externs and "fj.cumsum(tl.abs(" in program.kernels[0].source
    assert ("_carry" in program.kernels[0].source) == (columns == 9000)


@pytest.mark.parametrize("shape", [(5, 7), (3, 1000)])
def test_it_is_differentiated(shape):
    jitted, program = run(lambda x: abs_sum(x.tanh() * 3, [1]) * 2, torch.randn(shape), grad=True)
    assert program.launches == 1 and not program.externs


def test_it_is_row_local():
    from fusejit.autodiff.chunked import row_local

    assert row_local.reduces("fusejit_toy.abs_sum.default") and row_local.runs("fusejit_toy.abs_cumsum.default")
