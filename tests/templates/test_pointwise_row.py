"""Operands with one value for each row: read once for a program, as a scalar, by pointwise kernels and their checks."""

from __future__ import annotations

import pytest
import torch
from criteria import accesses
from test_reduction_templates import for_h100, meta

import fusejit


def scaled(x, b, scale):
    return (x + b) * scale


def one_hot_loss(x, target, scale):
    """What a cross-entropy's backward is: an index for each row, compared with the columns."""
    columns = torch.arange(x.shape[-1], device=x.device)
    return (x.exp() - (columns == target[:, None]).to(x.dtype)) * scale


def picked(table, rows, scale):
    """Rows of a table, chosen by an index that is checked, one for each row."""
    return table[rows] * scale


def masked(x, keep, scale):
    """A mask of both, and a value of the row under it."""
    return torch.where(keep, x, scale) + torch.where(x > 0, scale, 0.0)


def arguments(name, rows=5, columns=1024):
    x, scale = torch.randn(rows, columns), torch.rand(rows, 1)
    return {
        "scaled": (scaled, x, torch.randn(columns), scale),
        "one_hot_loss": (one_hot_loss, x, torch.randint(columns, (rows,)), scale),
        "picked": (picked, torch.randn(7, columns), torch.randint(7, (rows,)), scale),
        "masked": (masked, x, torch.rand(rows, columns) > 0.5, scale),
        "channels": (scaled, torch.randn(2, 3, 8, columns), torch.randn(3, 1, 1), torch.randn(2, 1, 1, 1)),
    }[name]


@pytest.mark.parametrize("columns", [1024, 1000, 2040, 512])
@pytest.mark.parametrize("name", ["scaled", "one_hot_loss", "picked", "masked", "channels"])
def test_lines_are_right(name, columns):
    """Whole tiles, and rows whose last tile stands over the end."""
    f, *args = arguments(name, columns=columns)
    jitted = fusejit.jit(f, backend="interpret", fullgraph=True)
    torch.testing.assert_close(jitted(*args), f(*args))
    assert [k.template for k in jitted.program(*args).kernels] == ["pointwise_row"]


def test_odd_rows_and_short_ones_stay_flat():
    """A row of 1,001 would lose its wide accesses, one of 768 a third of its last tile, and one of 64 is too short for
    a program.
    """
    for columns in (1001, 768, 64):
        f, *args = arguments("scaled", columns=columns)
        assert [k.template for k in fusejit.jit(f, backend="interpret").program(*args).kernels] == ["pointwise"]


def test_an_index_out_of_bounds_is_an_error():
    f, table, rows, scale = arguments("picked")
    rows[3] = 7
    with pytest.raises(IndexError, match="index 7 is out of bounds"):
        fusejit.jit(f, backend="interpret", fullgraph=True)(table, rows, scale)


def test_random_numbers_are_those_of_flat_tiles():
    """A number's place in the stream is the element's, whatever the tile."""

    def dropped(x):
        return torch.nn.functional.dropout(x, 0.5)

    def scaled_and_dropped(x, scale):
        return torch.nn.functional.dropout(x * scale, 0.5)

    x = torch.rand(4, 1024) + 1
    masks = []
    for f, args in ((dropped, (x,)), (scaled_and_dropped, (x, torch.ones(4, 1)))):
        jitted = fusejit.jit(f, backend="interpret", fullgraph=True)
        torch.manual_seed(3)
        masks.append(jitted(*args) != 0)
        kernels = jitted.program(*args).kernels
    assert kernels[-1].template == "pointwise_row" and torch.equal(*masks) and 0.4 < masks[0].float().mean() < 0.6


def test_sizes_that_vary_stay_flat():
    jitted = fusejit.jit(scaled, backend="interpret", dynamic=True)
    for rows, columns in ((4, 1024), (6, 1032), (3, 1001)):
        args = torch.randn(rows, columns), torch.randn(columns), torch.rand(rows, 1)
        torch.testing.assert_close(jitted(*args), scaled(*args))


def test_a_program_reads_the_value_of_its_row_once():
    """The rest of its loads and its stores move 16 bytes at a time."""
    (kernel,) = for_h100(scaled, meta(8192, 4096), meta(4096), meta(8192, 1))
    assert kernel.template == "pointwise_row" and kernel.grid == (8192 * 4, 1, 1) and not kernel.n_spills
    loads, stores = accesses(kernel.ptx)
    assert [loads[i].by_width for i in range(3)] == [{16: 1}, {16: 1}, {2: 1}] and stores[3].by_width == {16: 1}


def test_axes_that_are_one_in_memory_stay_one():
    """A bias of channels does not tear the height from the width."""
    (kernel,) = for_h100(lambda x, b: x + b, meta(64, 256, 56, 56), meta(256, 1, 1))
    assert kernel.template == "pointwise_row" and "3136 * y + x" in kernel.source
