"""Rows that are kept as they were loaded: read once, widened again by each pass, right numbers through the
interpreter.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from test_reduction_templates import (
    BF16,
    F16,
    F32,
    compare,
    for_h100,
    layer_norm,
    meta,
    norm_backward,
    rms_backward,
    rms_norm,
    row_and_column,
)

import fusejit
from fusejit.codegen.schedule.registers import kept, kept_values
from fusejit.templates import reduction_mixed, reduction_persistent


@pytest.fixture
def short_rows(monkeypatch):
    """A program keeps 256 values: rows of 256 columns stand for those of 32,768."""
    monkeypatch.setattr(reduction_persistent, "MAX_ROW", 256)


FUNCTIONS = {
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "normalize": lambda x: F.normalize(x, dim=-1),
}


@pytest.mark.parametrize("columns", [256, 250])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_of_kept_rows(short_rows, name, dtype, columns):
    x = torch.randn(5, columns).to(dtype).requires_grad_()
    jitted = compare(FUNCTIONS[name], (x,), [torch.randn(5, columns).to(dtype)])
    sources = [k.source for k in jitted.explain(x).backward.kernels]
    assert any("fj.again(row0)" in source for source in sources) and not any(
        "for start in" in source for source in sources
    )


@pytest.mark.parametrize("f", [layer_norm, rms_norm], ids=["layer_norm", "rms_norm"])
def test_the_columns_of_kept_rows(f, monkeypatch):
    """Rows and column sums of one read: what is too wide in float32 is kept in 16 bits."""
    monkeypatch.setattr("fusejit.codegen.passes.row_column.programs_for", lambda mixed, device: 8)
    monkeypatch.setattr(reduction_mixed, "fits_mixed", lambda cluster, values: False)
    weights = [torch.randn(200).to(BF16).requires_grad_() for _ in range(2 if f is layer_norm else 1)]
    args = [torch.randn(40, 200).to(BF16).requires_grad_(), *weights]
    jitted = compare(f, args, [torch.randn(40, 200).to(BF16)])
    assert "fj.again(row0)" in jitted.explain(*args).backward.kernels[0].source


def test_float32_rows_are_kept_too(monkeypatch):
    monkeypatch.setattr("fusejit.codegen.passes.row_column.programs_for", lambda mixed, device: 8)
    monkeypatch.setattr(reduction_mixed, "fits_mixed", lambda cluster, values: False)
    compare(
        lambda x, y: (row_and_column(x, y), (x * y / (x * y).sum(-1, keepdim=True)))[1],
        (torch.rand(40, 200), torch.rand(40, 200)),
    )


def test_what_is_kept():
    """Rows, not the weight; not what only the last pass reads."""
    x, w, row = meta(64, 4096), meta(4096), meta(64, 1, dtype=F32)
    (mixed, *_) = for_h100(rms_backward, meta(8192, 4096), meta(8192, 4096), w, meta(8192, 1, dtype=F32))
    assert len(kept(mixed.cluster)) == 2 and kept_values(mixed.cluster) == 1.0
    (k,) = for_h100(FUNCTIONS["softmax"], x)
    assert len(kept(k.cluster)) == 1 and row.numel() == 64


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_two_rows_of_32k_are_read_once(name):
    """dy and y of a softmax backward, 128 KB a row: one pass, no spills."""
    aten = {"softmax": torch.ops.aten._softmax_backward_data, "log_softmax": torch.ops.aten._log_softmax_backward_data}[
        name
    ]
    (k,) = for_h100(lambda dy, y: aten(dy, y, -1, BF16), meta(2048, 32_768), meta(2048, 32_768))
    assert k.schedule.keep and k.n_spills == 0
    assert k.ptx.count("ld.global.v4") == k.wide_loads == 2 * 32_768 // (8 * 32 * k.num_warps)


@pytest.mark.parametrize("rows, columns", [(16384, 16384), (2048, 32_768)])
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_norm_backward_of_long_rows_spills_nothing(norm, rows, columns):
    """Up to 16,384 columns rows and columns of one launch; beyond it the column sums leave no registers, and two
    launches read the rows.
    """
    x, w, row = meta(rows, columns), meta(columns), meta(rows, 1, dtype=F32)
    kernels = (
        for_h100(norm_backward, x, x, w, row, row, w) if norm == "layer_norm" else for_h100(rms_backward, x, x, w, row)
    )
    assert all(k.n_spills == 0 for k in kernels)
    assert ("reduction_mixed" in [k.template for k in kernels]) == (columns <= 16384)


def test_float32_rows_of_16k_keep_one_column_sum():
    """A row of 64 KB and its column sum are walked over by 8 warps, two sums leave no registers."""
    dy, x, w, row = (meta(*shape, dtype=F32) for shape in ((4096, 16384), (4096, 16384), (16384,), (4096, 1)))
    one, two = for_h100(rms_backward, dy, x, w, row), for_h100(norm_backward, dy, x, w, row, row, w)
    assert not any(k.n_spills for k in (*one, *two))
    assert one[0].template == "reduction_mixed" and one[0].num_warps == 8
    assert "reduction_mixed" not in [k.template for k in two]


def test_a_row_that_stands_for_two_is_no_row_kept():
    """dy is x: fewer values, but beside the column sum the weight in float32 leaves no registers."""
    x, w, row = meta(4096, 16384, dtype=F32), meta(16384, dtype=F32), meta(4096, 1, dtype=F32)
    assert not any(k.n_spills for k in for_h100(rms_backward, x, x, w, row))


# -- random numbers, and several rows that are written -----------------------------------------------------------------
def dropped_norm(x, residual, w, b):
    """Residual, dropout and layer norm: two rows written forward, two backward, where the mask is drawn again."""
    stream = residual + F.dropout(x, 0.25)
    return layer_norm(stream, w, b), stream


@pytest.mark.full
@pytest.mark.parametrize("columns, warps", [(8192, 16), (16384, 8)])
def test_dropout_in_front_of_a_norm_spills_nothing(columns, warps, spilled):
    """Backward: 8,192 columns stay in registers as they were loaded; 16,384 are walked over by few threads of many
    registers.
    """
    from fusejit import compile_for

    args = [
        torch.empty(n, dtype=BF16, device="meta", requires_grad=True)
        for n in ((4096, columns), (4096, columns), columns, columns)
    ]
    found = compile_for(dropped_norm, args, target="sm_90")
    (mixed,) = [k for k in found.backward.kernels if k.template == "reduction_mixed"]
    assert all(k.n_spills <= spilled for k in (*found.forward.kernels, *found.backward.kernels))
    assert mixed.num_warps == warps and mixed.schedule.keep == (columns == 8192) and "rand_tile" in mixed.source


def masks(monkeypatch, fits):
    monkeypatch.setattr("fusejit.codegen.passes.row_column.programs_for", lambda mixed, device: 8)
    monkeypatch.setattr(reduction_mixed, "fits_mixed", lambda cluster, values: fits)
    torch.manual_seed(5)
    args = [torch.randn(n).to(BF16).requires_grad_() for n in ((40, 256), (40, 256), 256, 256)]
    jitted = fusejit.jit(dropped_norm, backend="interpret", fullgraph=True)
    normed, stream = jitted(*args)
    gradients = torch.autograd.grad(normed.float().sum() + stream.float().sin().sum(), args)
    kernels = jitted.explain(*args).backward.kernels
    return [normed, stream, *gradients], next(k for k in kernels if k.template == "reduction_mixed")


def test_a_kept_row_with_dropout_has_the_same_gradients(monkeypatch):
    """The mask is drawn in the pass that writes; both rows that are written come from the same numbers as before."""
    plain, one = masks(monkeypatch, True)
    kept_row, other = masks(monkeypatch, False)
    assert not one.schedule.keep and other.schedule.keep
    assert all(torch.allclose(a.float(), b.float(), atol=0.02, rtol=0.02) for a, b in zip(plain, kept_row, strict=True))


def test_what_would_be_drawn_twice_is_not_kept():
    """Forward, both passes over the row need the mask: it is drawn once, and the row stays as it is computed with."""
    x, w = meta(2048, 16384), meta(16384)
    (k, *_) = for_h100(lambda x, r, w, b: dropped_norm(x, r, w, b), x, x, w, w)
    assert not k.schedule.keep and k.source.count("rand_tile") == 1
