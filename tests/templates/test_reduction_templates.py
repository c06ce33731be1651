"""Every reduction template: right numbers through the interpreter against float64, and machine code for an H100 that
reads once.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fusejit
from fusejit.codegen.emit.memory_plan import Alloc
from fusejit.codegen.emit.writer import render
from fusejit.codegen.passes.rfactor import split
from fusejit.codegen.passes.schedule import schedule
from fusejit.codegen.schedule.device import machine

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def wide(t):
    return (
        t.detach().double().requires_grad_(t.requires_grad)
        if isinstance(t, torch.Tensor) and t.is_floating_point()
        else t
    )


def results(f, args, tangents=None):
    """Outputs, then gradients of the inputs that want one."""
    inputs = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    out = f(*args)
    out = list(out) if isinstance(out, tuple) else [out]
    if not inputs:
        return out
    made = [o for o in out if o.requires_grad]
    given = [
        torch.ones_like(o) if tangents is None else t.to(o.dtype) for o, t in zip(made, tangents or made, strict=True)
    ]
    return [o.detach() for o in out] + list(torch.autograd.grad(made, inputs, given))


def compare(f, args, tangents=None):
    """Fused results are as near float64 as twice eager's, plus 2 ulp of the largest value; NaN and infinity stand where
    eager has them.
    """
    jitted = fusejit.jit(f, backend="interpret")
    fused, eager = results(jitted, args, tangents), results(f, args, tangents)
    exact = results(f, [wide(a) for a in args], tangents)
    for one, two, right in zip(fused, eager, exact, strict=True):
        assert one.shape == two.shape and one.dtype == two.dtype and one.stride() == two.stride()
        if not one.is_floating_point():
            assert torch.equal(one, two)
            continue
        assert torch.equal(one.isnan(), two.isnan()) and torch.equal(one.isinf(), two.isinf())
        top = right.nan_to_num(0, 0, 0).abs().max().item() if right.numel() else 0.0
        error, allowed = (
            (t.double() - right).nan_to_num(0, 0, 0).abs().max().item() if t.numel() else 0.0 for t in (one, two)
        )
        assert error <= 2 * allowed + 2 * torch.finfo(one.dtype).eps * top, (
            f"{error} against eager's {allowed}, values up to {top}"
        )
    return jitted


def forward_templates(jitted, *args):
    return [k.template for k in jitted.program(*args).kernels]


def for_h100(f, *args):
    return fusejit.compile_for(f, args, target="sm_90").kernels


def meta(*shape, dtype=BF16):
    return torch.empty(shape, dtype=dtype)


# -- mixed: rows and columns of one read -------------------------------------------------------------------------------
def layer_norm(x, w, b):
    return F.layer_norm(x, (x.shape[-1],), w, b)


def rms_norm(x, w):
    return F.rms_norm(x, (x.shape[-1],), w)


def softmax_with_bias(x, b):
    return (x + b).softmax(-1)


def row_and_column(x, y):
    return (x * y).sum(-1), (x * y).sum(0), (x.abs() * y).amax(0)


def column_of_a_row_result(x):
    y = x - x.amax(-1, keepdim=True)
    return y, y.sum(0)


def norm_backward(dy, x, w, mean, rstd, b):
    return torch.ops.aten.native_layer_norm_backward(dy, x, [x.shape[-1]], mean, rstd, w, b, [True, True, True])


def rms_backward(dy, x, w, rstd):
    grad = (dy * w).float()
    normed = x.float() * rstd
    dx = (grad - normed * (grad * normed).mean(-1, keepdim=True)) * rstd
    return dx.to(x.dtype), (dy.float() * normed).sum(0).to(w.dtype)


MIXED = [
    (layer_norm, (600, 64), F32),
    (layer_norm, (2, 151, 20), F32),
    (layer_norm, (601, 37), BF16),
    (layer_norm, (257, 1), F32),
    (rms_norm, (301, 37), F32),
    (rms_norm, (270, 1023), F32),
    (rms_norm, (2, 301, 20), F16),
    (softmax_with_bias, (301, 65), F32),
]


@pytest.mark.parametrize("f, shape, dtype", MIXED, ids=lambda value: getattr(value, "__name__", str(value)))
def test_rows_and_columns_of_one_read(f, shape, dtype):
    weights = 2 if f is layer_norm else 1
    args = [torch.randn(shape), *(torch.randn(shape[-1]) for _ in range(weights))]
    args = [a.to(dtype).requires_grad_() for a in args]
    jitted = compare(f, args, [torch.randn(shape).to(dtype)])
    if shape[-1] > 1 and dtype is F32:
        report = jitted.explain(*args)
        assert report.backward.launches <= 3


@pytest.mark.parametrize("f", [row_and_column, column_of_a_row_result])
def test_a_row_result_may_feed_the_columns(f):
    x, y = torch.randn(401, 65), torch.randn(401, 65)
    args = (x, y) if f is row_and_column else (x,)
    jitted = compare(f, args)
    assert forward_templates(jitted, *args)[0] == "reduction_mixed"


def test_rows_that_need_the_columns_stay_apart():
    jitted = compare(lambda x: (x - x.sum(0)).softmax(-1), (torch.randn(600, 48),))
    assert "reduction_mixed" not in forward_templates(jitted, torch.randn(600, 48))


def test_the_columns_of_a_strided_input_and_of_nan():
    x = torch.randn(700, 128)[:, ::2]
    compare(row_and_column, (x, torch.randn(700, 64)))
    x = torch.randn(700, 64)
    x[3, 5], x[9, 1], x[11, 7] = float("nan"), float("inf"), -float("inf")
    compare(row_and_column, (x, torch.ones(700, 64)))


def test_mixed_is_deterministic():
    x, y = torch.randn(401, 65), torch.randn(401, 65)
    jitted = fusejit.jit(row_and_column, backend="interpret")
    assert all(torch.equal(a, b) for a, b in zip(jitted(x, y), jitted(x, y), strict=True))


@pytest.mark.parametrize(
    "rows, columns", [(8192, 8192), (2048, 8192), (32768, 4096), (16384, 16384), (8192, 1000), (8192, 4097)]
)
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_norm_backward_reads_x_and_dy_once(norm, rows, columns):
    """The rows and columns of norm backward, for an H100: two launches, x and dy read once, no spills."""
    x, w, row = meta(rows, columns), meta(columns), meta(rows, 1, dtype=F32)
    mixed, small = (
        for_h100(norm_backward, x, x, w, row, row, w) if norm == "layer_norm" else for_h100(rms_backward, x, x, w, row)
    )
    assert mixed.template == "reduction_mixed" and mixed.grid[0] >= 132
    assert mixed.bytes_read <= 2 * 2 * rows * columns + 2 * columns + 8 * rows
    sums = 2 if norm == "layer_norm" else 1
    assert mixed.bytes_written == 2 * rows * columns + sums * 4 * mixed.grid[0] * columns
    assert small.bytes_read == sums * 4 * mixed.grid[0] * columns
    assert mixed.n_spills == small.n_spills == 0
    assert mixed.wide_loads >= 2 or columns % 8


@pytest.mark.parametrize(
    "rows, columns, most", [(8192, 4096, 132), (32768, 4096, 264), (262_144, 256, 528), (4096, 1024, 528)]
)
def test_partial_results_are_few(rows, columns, most):
    """As many programs as keep the memory busy, and no more: their partial results are a small part of what the rows
    move.
    """
    x, w, row = meta(rows, columns), meta(columns), meta(rows, 1, dtype=F32)
    mixed, small = for_h100(norm_backward, x, x, w, row, row, w)
    assert 132 <= mixed.grid[0] <= most and small.bytes_read == 8 * mixed.grid[0] * columns
    assert small.bytes_read <= (0.3 if rows * columns < 2**24 else 0.05) * 3 * 2 * rows * columns


def test_mixed_is_refused_where_partial_results_cost_more():
    """160 rows: 132 programs would write almost as much as they save."""
    x = meta(160, 4096)
    kernels = for_h100(rms_backward, x, x, meta(4096), meta(160, 1, dtype=F32))
    assert "reduction_mixed" not in [k.template for k in kernels]


# -- columns -----------------------------------------------------------------------------------------------------------
def gelu_backward_bias(g, x):
    grad = torch.ops.aten.gelu_backward(g, x, approximate="tanh")
    return grad, grad.sum(0)


@pytest.mark.parametrize("rows, columns", [(8192, 4096), (4096, 16_384), (262_144, 256), (8192, 4097)])
@pytest.mark.parametrize("f", [lambda g, x: x.sum(0), gelu_backward_bias], ids=["column_sum", "bias_gradient"])
def test_columns_for_h100(f, rows, columns):
    """A line of the cache of each row, a full device, no spills; with few columns pieces of the rows and a small second
    kernel.
    """
    x = meta(rows, columns)
    kernels = for_h100(f, meta(rows, columns), x)
    first = kernels[0]
    assert dict(first.constants)["XBLOCK"] * 2 == 128 and first.grid[0] >= 132 and first.n_spills == 0
    assert first.wide_loads or columns % 8
    assert len(kernels) == 1 + (columns < 64 * 132) and sum(k.bytes_read for k in kernels[1:]) < 0.01 * first.bytes_read


@pytest.mark.parametrize("shape", [(4100, 24), (5000, 7), (4099, 24)], ids=str)
def test_what_is_written_beside_a_column_sum(shape):
    """Pieces of the rows write it; where the last piece is shorter, a kernel of its own does."""
    compare(gelu_backward_bias, (torch.randn(shape), torch.randn(shape)))


# -- nested: segments of a row, the row, and what follows, of one read -------------------------------------------------
def group_norm_silu(x, w, b, groups):
    return F.silu(F.group_norm(x, groups, w, b))


NESTED = [
    ((17, 32, 64), 8),
    ((17, 48, 5, 7), 8),
]  # (shape, groups): segments that fill a tile, and odd ones, of two axes


@pytest.mark.full
@pytest.mark.parametrize("shape, groups", NESTED, ids=str)
def test_segments_and_rows_of_one_read(shape, groups):
    """Group norm's backward: sums of each channel and of each group, and the gradient of x, in one kernel; a small one
    for the weights.
    """
    args = [torch.randn(n).requires_grad_() for n in (shape, shape[1], shape[1])]
    jitted = compare(lambda x, w, b: group_norm_silu(x, w, b, groups), args, [torch.randn(shape)])
    assert jitted.explain(*args).backward.launches == 2


def test_rows_that_fill_no_device_keep_their_segments():
    """24 groups of 3 channels are fewer programs than 72 channels: the segments stay a kernel of their own, and
    explain() says so.
    """
    args = [torch.randn(n).requires_grad_() for n in ((12, 6, 64), 6, 6)]
    jitted = compare(lambda x, w, b: group_norm_silu(x, w, b, 2), args, [torch.randn(12, 6, 64)])
    report = jitted.explain(*args)
    assert report.backward.launches > 2 and "24 rows of several segments leave multiprocessors idle" in str(report)


@pytest.mark.parametrize("form", ["weighted", "beside another", "with a constant", "squared", "negated"])
def test_sums_that_are_linear_in_the_segments_join(form):
    """A weighted sum of segment sums is one of the row; a constant added to each, or a square, is not."""

    def f(x, w, v):
        parts = x.view(-1, 3, 33)
        a, b = (parts * v).sum(-1), parts.sum(-1)
        total = {
            "weighted": lambda: (a * w - b / (w + 3)).sum(-1),
            "beside another": lambda: ((a + b) * w * 2).sum(-1) + b.sum(-1),
            "with a constant": lambda: (a * w + 1).sum(-1),
            "squared": lambda: (a * b).sum(-1),
            "negated": lambda: (-a).sum(-1),
        }[form]()
        return parts * total[:, None, None], a

    args = torch.randn(140, 99), torch.randn(3).abs(), torch.randn(33)
    jitted = compare(f, args)
    assert (jitted.program(*args).launches == 1) == (form not in ("with a constant", "squared"))


@pytest.mark.parametrize(
    "batch, channels, size, template", [(16, 320, 4096, "looped"), (512, 256, 512, "persistent")], ids=str
)
def test_group_norm_backward_for_h100(batch, channels, size, template):
    """Two launches, dy and x read once, no spills; forward is one."""
    x, w, row = meta(batch, channels, size), meta(channels), meta(batch, 32, dtype=F32)
    whole, small = for_h100(
        lambda dy, x, w, mean, rstd: torch.ops.aten.native_group_norm_backward(
            dy, x, mean, rstd, w, batch, channels, size, 32, [True, True, True]
        ), meta(batch, channels, size), x, w, row, row,
    )  # fmt: skip
    assert whole.template == f"reduction_{template}" and whole.grid[0] == 32 * batch
    moved = x.numel() * (2 + 2 + 4)  # from float32 statistics torch makes a float32 gradient
    assert moved <= whole.bytes_read + whole.bytes_written <= 1.01 * moved and small.bytes_read < 0.02 * moved
    assert whole.n_spills == 0 and whole.wide_loads and whole.wide_stores
    (forward,) = for_h100(lambda x, w, b: group_norm_silu(x, w, b, 32), x, w, w)
    assert forward.bytes_read + forward.bytes_written <= 2 * x.numel() * 2 + 4 * channels and forward.n_spills == 0


# -- split: few rows, long ones ----------------------------------------------------------------------------------------
LONG = 40_000
FEW_ROWS = {
    "softmax": (lambda x: x.softmax(-1), 3),
    "log_softmax": (lambda x: x.log_softmax(-1), 3),
    "logsumexp": (lambda x: x.logsumexp(-1), 2),
    "argmax": (lambda x: x.argmax(-1), 2),
    "max": (lambda x: tuple(x.max(-1)), 2),
    "var_mean": (lambda x: torch.var_mean(x, -1), 2),
    "var": (lambda x: x.var(-1), 2),
    "layer_norm": (lambda x: F.layer_norm(x, x.shape[-1:]), 3),
    "share": (lambda x: x / x.sum(), 3),
    "norm": (lambda x: x.norm(dim=-1), 2),
    "softmax_of_softmax": (lambda x: (x.softmax(-1) * 100).softmax(-1), 5),
}


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
@pytest.mark.parametrize("name", FEW_ROWS)
def test_few_long_rows_take_steps_that_fill_the_device(name, dtype):
    """An even number of pieces takes one pass to reduce, whatever follows what: a softmax is three launches."""
    f, launches = FEW_ROWS[name]
    x = (torch.randn(3, LONG) + (30 if name in ("var_mean", "layer_norm") else 0)).to(dtype)
    jitted = compare(f, (x,))
    assert jitted.program(x).launches <= launches


@pytest.mark.parametrize("name", ["softmax", "argmax", "var_mean", "norm"])
def test_a_row_that_no_piece_divides(name):
    """40,009 is a prime: the last piece is shorter, and nothing behind the end of a row is read or counted."""
    f, _ = FEW_ROWS[name]
    jitted = compare(f, (torch.randn(2, 40_009) - 5,))
    assert jitted.program(torch.randn(2, 40_009)).kernels[0].grid[0] > 16


@pytest.mark.parametrize("name", ["softmax", "logsumexp", "argmax", "var"])  # eager's mean of a row of -inf is NaN
def test_pieces_of_infinity_and_nan(name):
    f, _ = FEW_ROWS[name]
    x = torch.randn(5, LONG)
    x[0], x[1, 5], x[2, 7], x[3, 9000:] = -float("inf"), float("nan"), float("inf"), -float("inf")
    compare(f, (x,))


@pytest.mark.parametrize("name, launches", [("logsumexp", 2), ("var_mean", 2), ("layer_norm", 3), ("softmax", 3)])
@pytest.mark.parametrize("rows, columns", [(16, 50_257), (16, 131_072), (64, 262_144)])
def test_pieces_of_few_long_rows_are_read_once(name, launches, rows, columns):
    """Each piece stays in registers: one read of the row for its maximum and sum, its mean and squares, and one for
    what is written.
    """
    from test_codegen import fused

    device = machine("sm_90")
    program = split(fused(FEW_ROWS[name][0], meta(rows, columns))[0], device)
    kernels = [render(*schedule(s, device), program.buffers) for s in program.steps]
    if len(kernels) == 1:  # left whole: too little to read for another launch to pay
        assert rows * columns < 2**20 and name in ("logsumexp", "var_mean")
        return
    assert len(kernels) == launches
    pieces, *_, last = kernels
    assert pieces.template == "reduction_persistent" and pieces.grid[0] >= 132
    moved = 2 * rows * columns
    assert pieces.bytes_read == moved and (
        last.template != "pointwise" or last.bytes_read + last.bytes_written < 2.01 * moved
    )


def test_a_piece_of_several_axes():
    """Four channels of a batch: a piece is two images of the eight, and what is written runs along all of them."""
    w, b = torch.randn(4), torch.randn(4)
    x = torch.randn(8, 4, 4096) + 3
    jitted = compare(lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), (x, w, b))
    assert jitted.program(x, w, b).launches == 3


def test_ties_go_to_the_first_place():
    x = torch.zeros(2, LONG)
    x[0, [700, 30_000, 39_999]] = 4.0
    assert fusejit.jit(lambda x: x.argmax(-1), backend="interpret")(x).tolist() == [700, 0]


def test_a_mean_far_from_zero_keeps_its_variance():
    compare(FEW_ROWS["var_mean"][0], (torch.randn(2, LONG) + 1e4,))


@pytest.mark.parametrize("rows", [16, 64])
def test_softmax_of_few_rows_for_h100(rows):
    pieces, whole, rest = for_h100(FEW_ROWS["softmax"][0], meta(rows, 131_072))
    assert pieces.grid[0] >= 132 and rest.grid[0] >= 132 and not max(k.n_spills for k in (pieces, whole, rest))
    assert pieces.bytes_read == rest.bytes_written == 2 * rows * 131_072
    assert pieces.wide_loads and rest.wide_loads and rest.wide_stores


# -- looped: rows that registers do not hold ---------------------------------------------------------------------------
@pytest.fixture
def looped(monkeypatch):
    """Every row reduction is looped over, in tiles of 256 columns whose loads are ahead, and none is split."""
    from fusejit.codegen.passes import rfactor
    from fusejit.codegen.schedule.choice import Schedule
    from fusejit.templates import table

    class Looped(type(table.named("reduction_looped"))):
        def tiles(self, cluster, device):
            return [Schedule(self.name, (("XBLOCK", 2), ("RBLOCK", 256)), 4, num_stages=2)]

    rows = {n: t for n, t in table.TEMPLATES.items() if n != "reduction_persistent"}
    monkeypatch.setattr(table, "TEMPLATES", rows | {"reduction_looped": Looped()})
    monkeypatch.setattr(rfactor, "_pieces", lambda *args: 0)


LOOPED = [*FEW_ROWS, "batch_norm"]


def reused(jitted, *args):
    """{result: the operand whose memory it takes}"""
    return {s.buffer.name: s.reuse for s in jitted.program(*args).steps if isinstance(s, Alloc) and s.reuse}


def test_a_loop_takes_over_what_it_reads_no_more(looped):
    """The last pass over a row may write where it reads; an earlier pass must leave the row to those after it."""
    x, w = torch.randn(5, 8), torch.randn(8, 700)
    jitted = compare(lambda x, w: (x @ w).softmax(-1), (x, w))
    assert len(reused(jitted, x, w)) == 1

    def early_and_late(x, w):
        scores = x @ w
        return scores * 2, scores.softmax(-1)

    jitted = compare(early_and_late, (x, w))
    (taken,) = reused(jitted, x, w).items()
    assert taken[0] == jitted.program(x, w).outputs[1].buffer


def test_a_walk_takes_over_the_rows_that_it_keeps():
    """A mixed reduction whose row is in registers may write it where it was read."""
    x, w = torch.randn(300, 8), torch.randn(8, 65)

    def f(x, w):
        y = (x @ w).softmax(-1)
        return y, y.sum(0)

    jitted = compare(f, (x, w))
    assert forward_templates(jitted, x, w)[0] == "reduction_mixed" and len(reused(jitted, x, w)) == 1


@pytest.mark.full
def test_segments_in_a_loop(looped):
    """Three segments of 100 elements in tiles of two: the last tile is half empty."""
    args = [torch.randn(n).requires_grad_() for n in ((70, 6, 100), 6, 6)]
    jitted = compare(lambda x, w, b: group_norm_silu(x, w, b, 2), args, [torch.randn(70, 6, 100)])
    whole = jitted.explain(*args).backward.kernels[0]
    assert whole.template == "reduction_looped" and "smask" in whole.source


@pytest.mark.parametrize("each", [64, 100])
def test_weights_of_channels_in_a_loop(looped, each):
    """Loaded once a channel where a tile holds whole ones, powers of two; the mean of the first tile stands before the
    loop.
    """
    args = [torch.randn(n) for n in ((40, 6, each), 6, 6)]
    jitted = compare(lambda x, w, b: group_norm_silu(x, w, b, 2), args)
    (kernel,) = jitted.program(*args).kernels
    assert kernel.template == "reduction_looped" and ("fj.along" in kernel.source) == (each == 64)


@pytest.mark.full
def test_long_segments_in_a_loop_are_added_up_tile_by_tile(looped, monkeypatch):
    """Beside many elements a thread has no room for as many sums: one for each row of the tile, in the same loop."""
    monkeypatch.setattr("fusejit.templates.reduction_looped.LONG_TILE", 1)
    args = [torch.randn(n).requires_grad_() for n in ((70, 6, 100), 6, 6)]
    jitted = compare(lambda x, w, b: group_norm_silu(x, w, b, 2), args, [torch.randn(70, 6, 100)])
    source = jitted.explain(*args).backward.kernels[0].source
    assert "tl.full([XBLOCK, 1], 0, tl.float32)" in source and "tl.full([XBLOCK, RBLOCK]" not in source


@pytest.mark.parametrize("columns", [1024, 1023], ids=str)
@pytest.mark.parametrize("name", LOOPED)
def test_a_looped_row(looped, name, columns):
    """The maximum and the sum about it, or a mean and the squares about it, come from one pass over the row."""
    if name == "batch_norm":
        w, b = torch.randn(6), torch.randn(6)
        compare(lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), (torch.randn(3, 6, columns), w, b))
        return
    f, _ = FEW_ROWS[name]
    x = torch.randn(5, columns) + (30 if name in ("var_mean", "layer_norm") else 0)
    jitted = compare(f, (x,))
    passes = jitted.program(x).kernels[0].source.count("for start in")
    assert passes == {"softmax_of_softmax": 4, "softmax": 2, "log_softmax": 2, "layer_norm": 2, "share": 2}.get(name, 1)


def pick(x, i):
    """The share of one column, as the gradient of a loss spells it, and the place of the largest."""
    columns = torch.arange(x.shape[-1], dtype=torch.int64)
    return x.softmax(-1) * (columns == i), x.argmax(-1), F.pad(x, (3, 2)).cumsum(-1)


@pytest.mark.parametrize("columns", [1024, 1001])
def test_indices_beside_loads_that_are_ahead(looped, columns):
    x, i = torch.randn(5, columns), torch.randint(0, columns, (5, 1))
    sources = [k.source for k in compare(pick, (x, i)).program(x, i).kernels]
    assert any("here = start" in source for source in sources)


@pytest.mark.parametrize("name", ["softmax", "logsumexp", "log_softmax", "var"])
def test_a_looped_row_of_infinity_and_nan(looped, name):
    f, _ = FEW_ROWS[name]
    x = torch.randn(6, 2000)
    x[0], x[1, 5], x[2, 7], x[3, 300:], x[4, :600] = (
        -float("inf"),
        float("nan"),
        float("inf"),
        -float("inf"),
        -float("inf"),
    )
    compare(f, (x,))


@pytest.mark.parametrize("case", ["far", "outlier", "two levels"])
def test_a_looped_variance_loses_nothing(looped, case):
    x = torch.randn(4, 5000)
    x = {"far": x + 1e4, "outlier": x.index_fill(1, torch.tensor(0), 1e4), "two levels": x + torch.arange(5000) / 50}[
        case
    ]
    compare(FEW_ROWS["var_mean"][0], (x,))


# -- for an H100: every norm and softmax -------------------------------------------------------------------------------
ROWS = [(131_072, 256), (8192, 8192), (2048, 32_768), (512, 131_072)]


@pytest.mark.parametrize("shape", ROWS, ids=str)
@pytest.mark.parametrize("name", ["softmax", "layer_norm"])
def test_rows_for_h100(name, shape):
    """One kernel that reads and writes everything once, 16 bytes at a time, without spills, and with programs for 132
    multiprocessors.
    """
    rows, columns = shape
    f = FEW_ROWS["softmax"][0] if name == "softmax" else layer_norm
    args = (meta(*shape),) if name == "softmax" else (meta(*shape), meta(columns), meta(columns))
    (k,) = for_h100(f, *args)
    assert k.bytes_written == 2 * rows * columns and k.bytes_read == 2 * rows * columns + (
        4 * columns if name == "layer_norm" else 0
    )
    assert k.n_spills == 0 and k.grid[0] >= 132 and k.wide_loads and k.wide_stores
    passes = 1 if columns <= 32_768 else 2
    assert k.source.count("tl.load(in0 ") == passes + (
        name == "layer_norm" and passes == 2
    )  # a mean begins near its first tile's


@pytest.mark.parametrize("columns", [1023, 4097, 50_257])
def test_odd_rows_for_h100(columns):
    """Rows that begin at odd addresses are read in groups of 16 bytes (test_unaligned_rows.py), pointwise kernels run
    over all rows as over one.
    """
    (k,) = for_h100(FEW_ROWS["softmax"][0], meta(1024, columns))
    assert k.n_spills == 0 and k.wide_loads and k.wide_stores
    (loss,) = for_h100(
        lambda x, i: x.softmax(-1) * (torch.arange(columns) == i), meta(1024, columns), meta(1024, 1, dtype=torch.int64)
    )
    assert loss.n_spills == 0 and loss.source.count("here = start") == (
        columns > 32768
    )  # indices are not handed on from the loads
    (flat,) = for_h100(lambda x: x * 2, meta(1024, columns))
    assert flat.wide_loads and flat.wide_stores  # a pointwise kernel is one axis, odd rows or not
