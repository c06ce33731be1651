"""Rows that begin at odd addresses: groups of 16 bytes and two ends. Right numbers through the interpreter, wide loads
for an H100.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from test_codegen import fused
from test_reduction_templates import BF16, F16, F32, compare, for_h100, layer_norm, meta, rms_norm, row_and_column

import fusejit
from fusejit.codegen.schedule.unaligned_rows import peel, tile_columns

FUNCTIONS = {
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "var_mean": lambda x: torch.var_mean(x, -1),
    "extremes": lambda x: (x.amax(-1), x.amin(-1), x.argmax(-1), x.argmin(-1)),
    "any_all": lambda x: ((x > 3).any(-1), (x > -9).all(-1), x.abs().clamp(0.99, 1.01).prod(-1)),
    "place": lambda x: (x * torch.arange(x.shape[-1])).sum(-1),
}


def rows(shape, dtype=F32, grad=False):
    x = torch.randn(shape)
    return (x + 30).to(dtype).requires_grad_(grad)


def groups(jitted, *args):
    """The elements of a group in each kernel of the forward, 0 where rows are not cut."""
    return [k.schedule.peel for k in jitted.program(*args).kernels]


@pytest.mark.parametrize("dtype, group", [(F32, 4), (F16, 8)], ids=str)
@pytest.mark.parametrize("columns", [257, 1023])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_row_and_its_ends(name, columns, dtype, group):
    x = rows((9, columns), dtype)  # 9 rows: every place within a group
    jitted = compare(FUNCTIONS[name], (x,))
    assert group in groups(jitted, x)


@pytest.mark.parametrize("name", ["softmax", "normalize"])
def test_gradients_of_odd_rows(name):
    jitted = compare(FUNCTIONS[name], (rows((9, 515), grad=True),), [torch.randn(9, 515)])
    assert jitted.explain(rows((9, 515), grad=True)).backward.launches == 1


@pytest.mark.parametrize("name", ["softmax", "extremes", "logsumexp"])
def test_infinity_and_nan_at_the_ends(name):
    x = torch.randn(8, 301)
    x[0], x[1, 0], x[2, -1], x[3, 1:], x[4, 0], x[5, -1] = (
        -float("inf"),
        float("nan"),
        float("nan"),
        -float("inf"),
        float("inf"),
        9.0,
    )
    compare(FUNCTIONS[name], (x,))


@pytest.mark.parametrize("first", [1, 4, 7])
def test_a_slice_begins_at_an_odd_address_in_every_row(first):
    """The row stride is even, the offset is not; with both even nothing is cut."""
    x = torch.randn(6, 512)
    jitted = compare(lambda x: x[:, first : first + 400].softmax(-1), (x,))
    assert groups(jitted, x) == [0 if first == 4 else 4]


@pytest.mark.parametrize("programs", [8, 12, 10])
@pytest.mark.parametrize("columns", [389, 257])  # one more than a tile
def test_columns_of_odd_rows_stay_where_they_are(columns, programs, monkeypatch):
    """Rows of one program 8 or 12 apart begin at the same place within a group of 4, and their columns add up; not so
    10 apart.
    """
    monkeypatch.setattr("fusejit.codegen.passes.row_column.programs_for", lambda mixed, device: programs)
    x, y = torch.randn(77, columns), torch.randn(77, columns)
    jitted = compare(row_and_column, (x, y))
    mixed = jitted.program(x, y).kernels[0]
    assert mixed.template == "reduction_mixed" and mixed.schedule.peel == (0 if programs == 10 else 4)


@pytest.mark.parametrize("f", [layer_norm, rms_norm], ids=["layer_norm", "rms_norm"])
def test_norm_backward_of_odd_rows(f, monkeypatch):
    monkeypatch.setattr("fusejit.codegen.passes.row_column.programs_for", lambda mixed, device: 8)
    weights = [torch.randn(389).requires_grad_() for _ in range(2 if f is layer_norm else 1)]
    compare(f, [torch.randn(77, 389).requires_grad_(), *weights], [torch.randn(77, 389)])


@pytest.fixture
def looped(monkeypatch):
    """Every row reduction is looped over in tiles of 128 columns."""
    from fusejit.codegen.schedule.choice import Schedule
    from fusejit.templates import table

    class Looped(type(table.named("reduction_looped"))):
        def tiles(self, cluster, device):
            found = peel(cluster)
            return [Schedule(self.name, (("XBLOCK", 1), ("RBLOCK", 128)), 4, 2, peel=found.group if found else 0)]

    kept = {n: t for n, t in table.TEMPLATES.items() if n != "reduction_persistent"}
    monkeypatch.setattr(table, "TEMPLATES", kept | {"reduction_looped": Looped()})


@pytest.mark.parametrize("columns", [257, 1023])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_looped_row_and_its_ends(looped, name, columns):
    x = rows((5, columns))
    jitted = compare(FUNCTIONS[name], (x,))
    assert 4 in groups(jitted, x)


@pytest.mark.parametrize("case", ["far", "outlier", "nan", "infinite"])
def test_a_looped_variance_or_softmax_of_odd_rows_loses_nothing(looped, case):
    x = torch.randn(4, 1001)
    x = {
        "far": x + 1e4,
        "outlier": x.index_fill(1, torch.tensor(0), 1e4),
        "nan": x.index_fill(1, torch.tensor(1000), float("nan")),
        "infinite": x.index_fill(1, torch.arange(3, 1000), -float("inf")),
    }[case]
    compare(FUNCTIONS["softmax" if case == "infinite" else "var_mean"], (x,))


def test_rows_in_place():
    """What is overwritten has been read by then, the ends too."""

    def f(x):
        return x.copy_(x.softmax(-1))

    x = torch.randn(7, 333)
    right = x.softmax(-1)
    fusejit.jit(f, backend="interpret")(x)
    assert torch.allclose(x, right, atol=1e-6)


# -- what is cut, and what is not --------------------------------------------------------------------------------------
def only(f, *args):
    (cluster,) = fused(f, *args)[0].steps
    return cluster


def test_what_is_cut():
    softmax = FUNCTIONS["softmax"]
    assert peel(only(softmax, torch.empty(64, 1024))) is None
    assert peel(only(softmax, torch.empty(64, 33))) is None  # too short to be worth two tiles
    odd = only(softmax, torch.empty(64, 4097))
    assert peel(odd).group == 4 and tile_columns(odd) == 4096
    assert peel(only(softmax, torch.empty(64, 4097, dtype=BF16))).group == 8
    assert peel(only(lambda x: x.sum(-1), torch.empty(4097, 63).T)) is None  # memory does not run along the rows


# -- for an H100 -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("columns", [1023, 4097, 50_257])
@pytest.mark.parametrize("name", ["softmax", "rms_norm"])
def test_odd_rows_are_read_and_written_wide(name, columns):
    """A load and a store of 16 bytes for each group, element by element only the ends and the weight; no spills."""
    x = meta(1024, columns)
    (k,) = for_h100(rms_norm, x, meta(columns)) if name == "rms_norm" else for_h100(FUNCTIONS["softmax"], x)
    assert k.schedule.peel == 8 and k.n_spills == 0 and k.wide_loads and k.wide_stores
    each = k.schedule["RBLOCK"] // (32 * k.num_warps)
    assert k.ptx.count("st.global.b16") <= 2 and k.wide_stores * 8 == each
