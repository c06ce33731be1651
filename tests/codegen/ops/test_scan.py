"""Scans along a row: values and gradients against eager and float64, one tile and several, from both ends, fused with
their neighbours.
"""

from __future__ import annotations

import math

import pytest
import torch

from fusejit import compile_for
from fusejit.templates import reduction_persistent

OPS = ("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin")


@pytest.fixture(params=[32768, 8], ids=["one tile", "tiles"])
def rows(request, monkeypatch):
    """Row lengths, in registers and looped over."""
    monkeypatch.setattr(reduction_persistent, "MAX_ROW", request.param)
    return 41 if request.param > 8 else 2053


def first(value):
    return value[0] if isinstance(value, tuple) else value


def close(ours, right, scale=1.0):
    """To a few units of the running magnitude: sums are taken in another order than one after the other."""
    tolerance = 30 * torch.finfo(ours.dtype).eps * max(1.0, float(right.abs().amax())) * scale
    torch.testing.assert_close(ours.double(), right, rtol=0, atol=tolerance)


def gradient(fn, x, tangent):
    x = x.detach().clone().requires_grad_()
    first(fn(x)).backward(tangent.to(x.dtype))
    return x.grad


@pytest.mark.parametrize("dim", [-1, 0, 1])
@pytest.mark.parametrize("op", OPS)
def test_against_float64(op, dim, rows, fuse, device):
    shape = {-1: (2, 3, rows), 0: (rows, 3, 2), 1: (2, rows, 3)}[dim]
    x = torch.randn(shape, device=device) if op != "cumprod" else torch.rand(shape, device=device) * 0.2 + 0.9
    fn = lambda x: getattr(torch, op)(x, dim)  # noqa: E731
    fused = fuse(fn, fullgraph=True)
    ours, right = fused(x), fn(x.double())
    close(first(ours), first(right))
    if op in ("cummax", "cummin"):
        assert torch.equal(ours[1], fn(x)[1])
    tangent = torch.randn(shape, device=device)
    wanted = gradient(fn, x.double(), tangent)
    close(gradient(fused, x, tangent), wanted, 4.0)
    kernels = fused.program(x).kernels
    assert len(kernels) == 1 and not fused.program(x).externs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64, torch.bool])
@pytest.mark.parametrize("op", OPS)
def test_dtypes(op, dtype, fuse, device):
    if op == "logcumsumexp" and not dtype.is_floating_point:
        pytest.skip("eager has it for floats only")
    x = (torch.randn(4, 33, device=device).abs() + 0.5).to(dtype)
    fn = lambda x: getattr(torch, op)(x, -1)  # noqa: E731
    ours, eager = fuse(fn)(x), fn(x)
    assert first(ours).dtype is first(eager).dtype
    wide = 2e-2 if dtype in (torch.bfloat16, torch.float16) else 1e-9
    torch.testing.assert_close(first(ours), first(eager), rtol=wide, atol=0)
    if isinstance(eager, tuple):
        assert torch.equal(ours[1], eager[1])


@pytest.mark.parametrize("op", OPS)
def test_special_values(op, rows, fuse, device):
    x = torch.randn(6, rows, device=device)
    x[0, 5], x[1, 3], x[1, 9], x[2, 4], x[3, 7:12] = math.nan, math.inf, -math.inf, -math.inf, 0.0
    x[4] = -math.inf if op != "cumprod" else 0
    x[5, ::2] = 1.0  # ties
    fn = lambda x: getattr(torch, op)(x, -1)  # noqa: E731
    ours, eager = fuse(fn)(x), fn(x)
    torch.testing.assert_close(first(ours), first(eager), equal_nan=True, rtol=1e-3, atol=1e-4)
    if isinstance(eager, tuple):
        assert torch.equal(ours[1], eager[1])


def test_cumprod_with_zeros(rows, fuse, device):
    x = torch.rand(6, rows, device=device) * 0.2 + 0.9
    x[0, 3] = x[1, 0] = x[2, -1] = x[3, 5] = x[3, 9] = x[4, 2] = x[4, 3] = 0
    tangent = torch.randn_like(x)
    fn = lambda x: x.cumprod(-1)  # noqa: E731
    close(gradient(fuse(fn, fullgraph=True), x, tangent), gradient(fn, x.double(), tangent), 10.0)


NEIGHBOURS = {
    "prologue and epilogue": (lambda x: (x * 2 - 1).cumsum(-1).tanh() + x, 1),
    "of a softmax": (lambda x: x.softmax(-1).cumsum(-1), 1),
    "before a norm": (lambda x: torch.nn.functional.layer_norm(x.cumsum(-1) * 0.1, x.shape[-1:]), 1),
    "two of one row": (lambda x: x.cumsum(-1) + x.exp().cumsum(-1), 1),
    "from the end": (lambda x: x.flip(-1).cumsum(-1).flip(-1) * x, 1),
    "both ways": (lambda x: x.flip(-1).cumsum(-1).flip(-1) + x.cumsum(-1), 2),
    "flipped only before": (lambda x: x.flip(-1).cumsum(-1) * 2, 2),
    "one after the other": (lambda x: x.cumsum(-1).mul(0.01).cumsum(-1), 1),
    "over columns, then a sum over rows": (lambda x: x.cumsum(0).sum(1), 2),
    "and a column sum": (lambda x: (x.cumsum(1), x.sum(0)), 2),
    "of a view": (lambda x: x.reshape(3, 2, -1).transpose(0, 2).cumsum(0), 1),
    "of several dimensions": (lambda x: x.cumsum(0).cumsum(1), 2),
    "broadcast": (lambda x: x[:, :1].expand_as(x).cumsum(-1), 1),
    "sliced": (lambda x: x[:, 1:-3].cumsum(-1)[:, ::2], 1),
}


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_neighbours(name, rows, fuse, device):
    fn, launches = NEIGHBOURS[name]
    x = torch.randn(6, rows - 1, device=device)
    fused = fuse(fn, fullgraph=True)
    for ours, right in zip(*((v if isinstance(v, tuple) else (v,)) for v in (fused(x), fn(x.double()))), strict=True):
        close(ours, right)
    wide = first(fn(x.double()))
    tangent = torch.randn(wide.shape, device=device)
    close(gradient(fused, x, tangent), gradient(fn, x.double(), tangent), 4.0)
    assert fused.program(x).launches <= launches, fused.explain(x)


def test_backward_of_a_cumsum_is_one_pass(fuse, device):
    """Its flips are no copies: one kernel that reads the tangent and writes the gradient, forwards through memory."""
    x = torch.randn(64, 256, device=device, requires_grad=True)
    report = fuse(lambda x: x.cumsum(-1)).explain(x)
    (kernel,) = report.backward.kernels
    assert kernel.bytes_read + kernel.bytes_written == 2 * 4 * x.numel()
    assert all((n.layout.strides or ())[-1] == 1 for n in (*kernel.cluster.reads["tangents_1"], *kernel.cluster.stores))


def test_edges(fuse, device):
    for shape in ((3, 1), (3, 0), (0, 3), ()):
        x = torch.randn(shape, device=device)
        for op in OPS:
            dim = -1
            torch.testing.assert_close(
                first(fuse(lambda x, op=op, dim=dim: getattr(torch, op)(x, dim))(x)), first(getattr(torch, op)(x, dim))
            )
    with pytest.raises(IndexError):
        fuse(lambda x: x.cumsum(5), fullgraph=True)(torch.randn(3, 4, device=device))


@pytest.mark.parametrize("columns", [4096, 8192, 32768, 131072])
def test_kernels_for_sm_90(columns, sm_90):
    x = torch.empty(2**24 // columns, columns, dtype=torch.bfloat16, requires_grad=True)
    programs = sm_90(lambda x: x.cumsum(-1), (x,))
    assert len(programs.kernels) == 2
    for kernel in programs.kernels:
        assert kernel.n_spills == 0 and kernel.wide_loads and kernel.wide_stores
        assert kernel.bytes_read + kernel.bytes_written == 4 * x.numel()


@pytest.mark.parametrize("op", ["cummax", "logcumsumexp", "cumprod"])
def test_other_scans_compile_for_sm_90(op):
    x = torch.empty(2048, 8192)
    for kernel in compile_for(lambda x: getattr(torch, op)(x, -1), (x,)).kernels:
        assert kernel.n_spills == 0 and kernel.wide_loads
