"""Operands that run in different directions: transposes, permutes before reductions, channels_last, pieces; against
eager, and kernels.
"""

from __future__ import annotations

from dataclasses import replace

import criteria
import pytest
import torch
import torch.nn.functional as F
from test_reduction_templates import for_h100, meta
from test_scatter import assert_as_eager, numbers, places

import fusejit

BF16, F32 = torch.bfloat16, torch.float32


def rotated(x):
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def qkv_rope(qkv, cos, sin, heads):
    """qkv (batch, length, 3 * heads * width): queries and keys turned, values laid out as they are."""
    q, k, v = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    return q * cos + rotated(q) * sin, k * cos + rotated(k) * sin, v.contiguous()


def windows(x, size, shift):
    """Swin: (batch, height, width, channels), rolled, to (batch * windows, size * size, channels)."""
    b, h, w, c = x.shape
    x = x.roll((-shift, -shift), (1, 2)).view(b, h // size, size, w // size, size, c)
    return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, size * size, c)


def windows_back(x, shape, size, shift):
    b, h, w, c = shape
    x = x.view(b, h // size, w // size, size, size, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
    return x.roll((shift, shift), (1, 2))


def relative_shift(x):
    """Transformer-XL: entry (i, j) of the result is (i, n - 1 - i + j) of x."""
    b, h, q, k = x.shape
    return F.pad(x, (1, 0)).view(b, h, k + 1, q)[:, :, 1:].reshape(b, h, q, k)


def layer_norm_2d(x, w, b):
    return F.layer_norm(x.permute(0, 2, 3, 1), w.shape, w, b).permute(0, 3, 1, 2).contiguous()


def last(*shape, grad=False):
    return numbers(*shape).to(memory_format=torch.channels_last).requires_grad_(grad)


CASES = {
    "transpose": (lambda x: x.t().contiguous(), lambda: (numbers(33, 70, grad=True),), 1),
    "cast_transpose": (lambda x: x.to(BF16).t().contiguous(), lambda: (numbers(130, 67),), 1),
    "cast_alone": (lambda x: x.double().t(), lambda: (numbers(20, 30),), 1),
    "transpose_both": (lambda x: (F.gelu(x), F.gelu(x).t().contiguous()), lambda: (numbers(65, 33, grad=True),), 1),
    "permute_add": (
        lambda x, y: x.transpose(1, 2) + y,
        lambda: (numbers(3, 17, 40, grad=True), numbers(3, 40, 17, grad=True)),
        1,
    ),
    "many_rows": (lambda x: (x * 2).transpose(1, 2).contiguous(), lambda: (numbers(37, 20, 16),), 1),
    "permute_sum": (lambda x: x.permute(0, 2, 1).sum(-1), lambda: (numbers(3, 100, 35, grad=True),), 1),
    "permute_softmax": (lambda x: x.transpose(1, 2).softmax(-1), lambda: (numbers(3, 100, 35, grad=True),), 1),
    "layer_norm_2d": (
        layer_norm_2d,
        lambda: (numbers(2, 70, 5, 7, grad=True), numbers(70, grad=True), numbers(70, grad=True)),
        1,
    ),
    "permute_add_norm": (
        lambda x, y, w: F.rms_norm(x.transpose(1, 2) + y, w.shape, w),
        lambda: (numbers(2, 65, 30, grad=True), numbers(2, 30, 65, grad=True), numbers(65, grad=True)),
        1,
    ),
    "permute_add_long": (
        lambda x, y: (x.t() + y).logsumexp(-1),
        lambda: (numbers(5000, 9, grad=True), numbers(9, 5000, grad=True)),
        1,
    ),
    "norm_then_transpose": (lambda x: x.softmax(-1).t().contiguous(), lambda: (numbers(50, 90, grad=True),), 1),
    "channels_last": (lambda x, y: F.relu(x + y), lambda: (last(2, 33, 5, 7, grad=True), last(2, 33, 5, 7)), 1),
    "channels_last_and_first": (
        lambda x, y: F.relu(x + y),
        lambda: (last(2, 33, 5, 7, grad=True), numbers(2, 33, 5, 7, grad=True)),
        1,
    ),
    "to_channels_last": (
        lambda x: (x * 2).contiguous(memory_format=torch.channels_last),
        lambda: (numbers(2, 33, 5, 7, grad=True),),
        1,
    ),
    "qkv_rope": (
        lambda a, c, s: qkv_rope(a, c, s, 3),
        lambda: (numbers(2, 5, 3 * 3 * 8, grad=True), numbers(5, 8), numbers(5, 8)),
        1,
    ),
    "windows": (lambda x: windows(x * 2, 4, 2), lambda: (numbers(2, 8, 12, 5, grad=True),), 1),
    "windows_back": (
        lambda x, y: windows_back(x, y.shape, 4, 2) + y,
        lambda: (numbers(12, 16, 5, grad=True), numbers(2, 8, 12, 5, grad=True)),
        1,
    ),
    "relative_shift": (lambda x: relative_shift(x) * 0.5, lambda: (numbers(2, 3, 6, 6, grad=True),), 1),
    "pad_roll": (
        lambda x: F.pad(x.roll((3, 5), (1, 2)), (0, 0, 1, 2, 2, 1)).relu(),
        lambda: (numbers(2, 7, 9, 3, grad=True),),
        1,
    ),
    "split_cat": (
        lambda a, b: torch.cat([F.silu(a.chunk(2, 1)[0]) * a.chunk(2, 1)[1], b], 1),
        lambda: (numbers(6, 14, grad=True), numbers(6, 3, grad=True)),
        1,
    ),
    "embedding": (
        lambda i, t, p: F.layer_norm(F.embedding(i, t) + p, (24,)),
        lambda: (places(9, 3, 5), numbers(9, 24), numbers(5, 24)),
        1,
    ),
    "gather": (lambda x, i: x.gather(-1, i).exp() * 2, lambda: (numbers(6, 20).t(), places(6, 20, 4)), 1),
}


@pytest.mark.parametrize("backend", ["eager", "interpret"])
@pytest.mark.parametrize("name", CASES)
def test_as_eager(name, backend):
    fn, make, launches = CASES[name]
    report = assert_as_eager(fn, make(), backend, 2e-5)
    if backend == "interpret":
        assert not report.externs and report.forward.launches == launches, report


@pytest.mark.parametrize(
    "fn", [CASES["permute_add"][0], lambda x, y: (x.transpose(1, 2) + y).softmax(-1)], ids=["add", "softmax"]
)
def test_sizes_that_change(fn):
    jitted = fusejit.jit(fn, backend="interpret", fullgraph=True, dynamic=True)
    for b, n, m in ((3, 20, 33), (2, 70, 40), (5, 17, 18)):
        x, y = numbers(b, n, m), numbers(b, m, n)
        torch.testing.assert_close(jitted(x, y), fn(x, y), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("wrong", [9, -1])
def test_an_index_out_of_bounds_names_the_line(wrong):
    fn, make, _ = CASES["embedding"]
    i, table, p = make()
    i[2, 3] = wrong
    with pytest.raises(IndexError):
        fn(i, table, p)
    with pytest.raises(IndexError, match="out of bounds for dimension with size 9") as found:
        fusejit.jit(fn, backend="interpret", fullgraph=True)(i, table, p)
    assert "test_access.py:" in "\n".join(found.value.__notes__)


# -- the kernels -------------------------------------------------------------------------------------------------------
def kernels_of(fn, *args):
    """The kernels for an H100, none of which breaks a rule."""
    found = for_h100(fn, *args)
    assert criteria.violations(found) == []
    return found


def widths(kernel):
    """Bytes of every access, loads and stores, by operand."""
    return [access.by_width.keys() for side in criteria.accesses(kernel.ptx) for _, access in sorted(side.items())]


WIDE = {
    "cast_transpose": (lambda x: x.float().t().contiguous(), [(8192, 8192)], "pointwise_2d"),
    "cast_transpose_fp8": (
        lambda x: (x * 0.5).to(torch.float8_e4m3fn).t().contiguous(),
        [(8192, 8192)],
        "pointwise_2d",
    ),
    "transpose_both": (lambda x: (F.gelu(x), F.gelu(x).t().contiguous()), [(8192, 8192)], "pointwise_2d"),
    "permute_add": (lambda x, y: x.transpose(1, 2) + y, [(16, 1024, 2048), (16, 2048, 1024)], "pointwise_2d"),
    "channels_last_and_first": (
        lambda x, y: F.relu(x.permute(0, 3, 1, 2) + y),
        [(16, 56, 56, 64), (16, 64, 56, 56)],
        "pointwise_2d",
    ),
    "permute_softmax": (lambda x: x.transpose(1, 2).softmax(-1), [(16, 1024, 1024)], "reduction_persistent"),
    "permute_add_out": (
        lambda x, y: (x.transpose(1, 2) + y).softmax(-1),
        [(16, 1024, 1024)] * 2,
        "reduction_persistent",
    ),
    "norm_then_transpose": (lambda x: x.softmax(-1).t().contiguous(), [(32768, 1024)], "reduction_persistent"),
}


@pytest.mark.parametrize("name", WIDE)
def test_both_sides_are_wide_and_go_through_shared_memory(name):
    fn, shapes, template = WIDE[name]
    args = [meta(*shape) for shape in shapes]
    (kernel,) = kernels_of(fn, *args)
    assert kernel.template == template and kernel.n_spills == 0 and kernel.shared > 0
    assert widths(kernel) == [{16}] * len(kernel.arguments)
    outputs = torch.utils._pytree.tree_leaves(fn(*(a.to("meta") for a in args)))
    assert kernel.bytes_read == sum(a.numel() * 2 for a in args)
    assert kernel.bytes_written == sum(o.numel() * o.dtype.itemsize for o in outputs)


def test_a_narrow_side_is_seen():
    (kernel,) = kernels_of(lambda x: x.t().contiguous(), meta(8192, 8192))
    for word in ("ld.global.v4.b32", "st.global.v4.b32"):
        assert word in kernel.ptx
        narrow = replace(
            kernel, compiled=replace(kernel.compiled, ptx=kernel.ptx.replace(word, word.replace("v4.b32", "b16")))
        )
        assert any("2 bytes at a time" in text for text in criteria.violations([narrow]))


def test_more_tiles_than_a_grid_has_rows():
    """10 million columns in tiles of 64: 65,535 programs is the most along the second and third axis of a grid."""
    for shape in ((10_000_000, 16), (16, 10_000_000), (70_000, 40_000)):  # the last with offsets of 64 bits
        (kernel,) = for_h100(lambda x: x.t().contiguous(), meta(*shape))
        assert kernel.template == "pointwise_2d" and kernel.grid[1:] == (1, 1) and kernel.grid[0] > 65535


def test_pieces_are_one_kernel_with_wide_loads():
    for fn, shape in (
        (lambda x: windows(x, 8, 4), (64, 64, 64, 192)),
        (lambda x: F.pad(x.roll((3, 5), (1, 2)), (0, 0, 1, 1, 1, 1)).relu(), (16, 256, 256, 64)),
    ):
        (kernel,) = kernels_of(fn, meta(*shape))
        assert widths(kernel) == [{16}, {16}] and kernel.bytes_read == meta(*shape).numel() * 2
