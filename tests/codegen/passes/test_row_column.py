"""What rows give to a reduction of everything, taken by the programs that walk over them: float64's numbers, any number
of rows.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_reduction_templates import compare, for_h100, meta, rms_norm

import fusejit
from fusejit import compile as pipeline
from fusejit.codegen.ir.size import product
from fusejit.codegen.passes import row_column
from fusejit.codegen.schedule.device import machine
from fusejit.templates import reduction_mixed


def quantised(x, w):
    """Codes by a known scale, and the largest value for the next one."""
    normed = rms_norm(x, w).float()
    return (normed * 8).clamp(-127, 127).to(torch.int8), normed.abs().amax()


def of_everything(x, w):
    """Rows that are written, and several reductions of all of them."""
    y = (x * w).softmax(-1)
    return y, (y * y).sum().sqrt(), y.amin(), y.isnan().any()


def row_results(x, w):
    """Results of rows that are wanted themselves."""
    rows = (x.abs() + w).sum(-1)
    return rows, rows.sum(), rows.amax()


@pytest.fixture
def few_programs(monkeypatch):
    """A GPU of one multiprocessor, where results of any number of rows take two steps unless their programs share them
    out.
    """
    monkeypatch.setattr(pipeline, "machine", lambda target=None: replace(machine("sm_90"), sms=1))
    monkeypatch.setattr(row_column, "cut", lambda cluster, device: (cluster, 2, -(-product(cluster.reduce) // 2)))


@pytest.mark.parametrize("shape", [(35, 1032), (33, 1033), (34, 1000)], ids=str)
@pytest.mark.parametrize("f", [quantised, of_everything, row_results])
def test_a_reduction_of_everything_in_shares(f, shape, few_programs):
    x, w = torch.randn(shape), torch.randn(shape[-1])
    jitted = compare(f, (x, w))
    walk, tail = jitted.program(x, w).kernels
    assert walk.template == "reduction_mixed" and 2 * walk.grid[0] <= shape[0] and tail.grid == (1, 1, 1)


def test_shares_of_infinity_and_nan(few_programs):
    x, w = torch.randn(35, 1032), torch.rand(1032)
    x[3, 5], x[30, 9] = -float("inf"), float("inf")
    compare(of_everything, (x, w))
    x[33, 5], x[34, 1031] = float("nan"), float("nan")
    jitted = compare(of_everything, (x, w))
    assert all(torch.equal(a.nan_to_num(9), b.nan_to_num(9)) for a, b in zip(jitted(x, w), jitted(x, w), strict=True))


@pytest.mark.parametrize("values, dtype, again", [(1100, torch.bfloat16, False), (500, torch.float32, True)])
def test_what_is_kept_as_loaded_or_walked_twice_is_shared_out_too(values, dtype, again, few_programs, monkeypatch):
    monkeypatch.setattr(pipeline, "machine", lambda target=None: replace(machine("sm_90"), sms=1, mixed_values=values))
    monkeypatch.setattr(reduction_mixed, "WALKED", 256)
    monkeypatch.setattr(row_column, "microseconds", lambda cluster, device: 0.0)
    x, w = torch.randn(35, 1032, dtype=dtype), torch.randn(1032, dtype=dtype)
    walk, _ = compare(of_everything, (x, w)).program(x, w).kernels
    assert walk.template == "reduction_mixed" and walk.schedule.keep != again and ("2 * RBLOCK" in walk.source) == again


def test_shares_of_any_number_of_rows(few_programs):
    w = torch.randn(1032)
    jitted = fusejit.jit(lambda x: quantised(x, w), backend="interpret", dynamic=True)
    for rows in (35, 3, 50):
        x = torch.randn(rows, 1032)
        assert all(torch.equal(a, b) for a, b in zip(jitted(x), quantised(x, w), strict=True))
    assert [k.template for k in jitted.program(x).kernels][0] == "reduction_mixed"


@pytest.mark.parametrize("rows, columns, shared", [(65_536, 1024, True), (16_384, 4096, False)])
def test_a_largest_value_for_h100(rows, columns, shared):
    """Two launches: so many rows are walked over, the results of fewer are one step."""
    first, last = for_h100(quantised, meta(rows, columns), meta(columns))
    assert (
        (first.template == "reduction_mixed") == shared
        and first.n_spills == 0
        and first.wide_loads
        and last.grid == (1, 1, 1)
    )
    assert first.bytes_read == 2 * rows * columns + 2 * columns and last.bytes_read <= 65_536
