"""Quantisation as users write it: bits as eager's, scales against float64, one kernel that reads its input once, codes
of every GPU.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fusejit
from fusejit.runtime.launch import kernel

E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16
FP8 = (E4M3, E5M2)
BACKENDS = ("eager", "interpret")


def code(t):
    """A tensor as bytes that can be compared, all NaNs alike."""
    if t.dtype not in FP8:
        return t
    return torch.where(t.float().isnan(), 0x7F, t.view(torch.uint8).int())


def meta(*shape, dtype=BF16):
    return torch.empty(shape, dtype=dtype)


def for_h100(f, *args, target="sm_90", numerics="fast"):
    return fusejit.compile_for(f, args, target=target, numerics=numerics)


# -- rounding ----------------------------------------------------------------------------------------------------------
def every_bfloat16():
    return torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(BF16)


def awkward():
    """float32 at and next to every number half way between two of fp8, large ones, tiny ones."""
    parts = []
    for dtype in FP8:
        numbers = torch.arange(127, dtype=torch.uint8).view(dtype).float()
        middle = (numbers[1:] + numbers[:-1]) / 2
        middle = middle[middle.isfinite()]
        up, down = (middle.nextafter(torch.tensor(v)) for v in (float("inf"), 0.0))
        parts += [numbers, middle, up, down]
    parts.append(
        torch.tensor(
            [463.9, 464.0, 464.1, 480.0, 61439.9, 61440.0, 1e30, 3.4e38, 1e-30, 1e-45, float("inf"), float("nan")]
        )
    )
    found = torch.cat(parts)
    return torch.cat([found, -found])


@pytest.mark.parametrize("dtype", FP8, ids=str)
@pytest.mark.parametrize("numerics", ["fast", "eager"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_number_rounds_as_eager(dtype, numerics, backend):
    """Each bfloat16, and float32 about the middles: stored as fp8, and handed on as fp8 within a kernel."""

    def f(x):
        q = x.float().neg().to(dtype)
        return q, q.float() * 0.5

    jitted = fusejit.jit(f, backend=backend, numerics=numerics)
    for x in (every_bfloat16(), awkward()):
        (q, half), (right, right_half) = jitted(x), f(x)
        assert q.dtype is dtype and torch.equal(code(q), code(right))
        assert torch.equal(half.nan_to_num(7e9), right_half.nan_to_num(7e9))


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_every_code_is_read_as_eager_reads_it(dtype):
    def f(q):
        return q.float() * 2, q.to(BF16) + 1

    q = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)
    for ours, right in zip(fusejit.jit(f, backend="interpret", numerics="eager")(q), f(q), strict=True):
        assert torch.equal(ours.float().nan_to_num(7e9), right.float().nan_to_num(7e9))


INTEGER = {  # dtype: (mantissa, bias, largest float32 that does not overflow, what does)
    E4M3: (3, 7, 0x43E80000, 0x7E if torch.tensor(1e6).to(E4M3).float() == 448 else 0x7F),
    E5M2: (2, 15, 0x476FFFFF, 0x7C),
}


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_integers_round_as_the_conversion_that_old_gpus_lack(dtype):
    """What runs on a GPU before sm_89, through the interpreter, against torch's own conversion."""
    mantissa, bias, most, over = INTEGER[dtype]
    source = f"""@triton.jit
def k(x, o, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(o + i, fj.fp8_bits(tl.load(x + i), {mantissa}, {bias}, {most}, {over}))
"""
    for x in (every_bfloat16().float(), F.pad(awkward(), (0, 65536 - len(awkward())))):
        out = torch.empty(65536, dtype=torch.uint8)
        kernel(source, name="k", params=["*fp32", "*u8"], constants={"N": 65536})(x, out)
        assert torch.equal(code(out.view(dtype)), code(x.to(dtype)))
    finite = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    source = f"""@triton.jit
def k(x, o, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(o + i, fj.fp8_value(tl.load(x + i), {mantissa}, {bias}))
"""
    out = torch.empty(256)
    kernel(source, name="k", params=["*u8", "*fp32"], constants={"N": 256})(finite, out)
    right = finite.view(dtype).float()
    assert torch.equal(out[right.isfinite()], right[right.isfinite()]) and right.isfinite().sum() > 240


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_machine_code_of_new_and_old_gpus(dtype):
    """sm_90 converts by itself, saturating, so that what overflows in eager is put right; sm_80 takes integers. Both at
    16 bytes a load.
    """

    def f(x):
        return (x * 2.5).to(dtype)

    word = "e4m3x2" if dtype is E4M3 else "e5m2x2"
    (new,), (old,) = (for_h100(f, meta(1 << 20, dtype=torch.float32), target=t).kernels for t in ("sm_90", "sm_80"))
    assert new.source == old.source and new.n_spills == old.n_spills == 0
    assert f"cvt.rn.satfinite.{word}.f32" in new.ptx and "satfinite" not in old.ptx
    assert new.wide_loads > 0 and old.wide_loads > 0
    # 61440 is half way between e5m2's largest number and the next one
    assert ("0f47700000" in new.ptx) == (dtype is E5M2)


# -- quantisers --------------------------------------------------------------------------------------------------------
def rms_norm(x, weight):
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight


def blocks(y, dtype, size=128, most=448.0):
    """Each block of `size` columns by its own scale: (quantised, scales)."""
    parts = y.float().reshape(y.shape[0], -1, size)
    scale = parts.abs().amax(-1, keepdim=True).clamp(min=1e-12) * (1 / most)
    return (parts / scale).to(dtype).reshape(y.shape), scale.squeeze(-1)


def rows(y):
    """Each row as int8 by its own scale."""
    wide = y.float()
    scale = wide.abs().amax(-1, keepdim=True).clamp(min=1e-8) * (1 / 127)
    return torch.round(wide / scale).clamp(-128, 127).to(torch.int8), scale


def squares(y, size=128):
    parts = y.float().reshape(y.shape[0] // size, size, y.shape[1] // size, size)
    scale = parts.abs().amax((1, 3), keepdim=True).clamp(min=1e-12) * (1 / 448)
    return (parts / scale).to(E4M3).reshape(y.shape), scale.reshape(y.shape[0] // size, -1)


def whole(y):
    scale = y.abs().amax().float().clamp(min=1e-12) * (1 / 448)
    return (y.float() / scale).to(E4M3), scale


def residual_layer_norm(x, residual, weight, bias):
    stream = x + residual
    return F.layer_norm(stream.float(), stream.shape[-1:], weight.float(), bias.float()), stream


def norm_then_blocks(x, w):
    return blocks(rms_norm(x, w), E4M3)


def norm_then_small_blocks(x, w):
    q, scale = blocks(rms_norm(x, w), E5M2, 12, 57344.0)
    return q, scale, 1 / scale


def norm_then_int8(x, w):
    return rows(rms_norm(x, w))


def stream_then_blocks(x, residual, w, b):
    y, stream = residual_layer_norm(x, residual, w, b)
    return *blocks(y, E4M3, 64), stream


def silu_then_int8(g, u):
    return rows(F.silu(g.float()) * u.float())


def gelu_then_blocks(x):
    return blocks(F.gelu(x.float(), approximate="tanh"), E4M3)


def scales_in_columns(x, w):
    """Scales transposed, as block-scaled matrix products take them."""
    q, scale = blocks(rms_norm(x, w), E4M3)
    return q, scale.t().contiguous()


def norm_of_blocks(q, scale, w):
    """Dequantised on the way in, quantised again on the way out."""
    parts = q.float().reshape(q.shape[0], -1, 128) * scale[..., None]
    return blocks(rms_norm(parts.reshape(q.shape), w), E4M3)


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[0])).to(BF16)


def weight(n):
    return normal(n) * 0.1 + 1


def quantised(*shape):
    return blocks(normal(*shape), E4M3)


# name: (function, its arguments, reductions without a kernel of their own, wholly bit-equal to eager)
FORMS = {
    "norm_then_blocks": (norm_then_blocks, lambda: (normal(6, 512), weight(512))),
    "norm_then_small_blocks": (norm_then_small_blocks, lambda: (normal(6, 60), weight(60))),
    "norm_then_int8": (norm_then_int8, lambda: (normal(6, 100), weight(100))),
    "stream_then_blocks": (stream_then_blocks, lambda: (normal(6, 320), normal(6, 320) * 2, weight(320), normal(320))),
    "silu_then_int8": (silu_then_int8, lambda: (normal(5, 96), normal(5, 96) * 3)),
    "gelu_then_blocks": (gelu_then_blocks, lambda: (normal(5, 384),)),
    "squares": (squares, lambda: (normal(256, 384),)),
    "whole": (whole, lambda: (normal(6, 96),)),
    "scales_in_columns": (scales_in_columns, lambda: (normal(6, 512), weight(512))),
    "norm_of_blocks": (norm_of_blocks, lambda: (*quantised(6, 512), weight(512))),
}


@pytest.mark.parametrize("numerics", ["fast", "eager"])
@pytest.mark.parametrize("name", FORMS)
def test_one_kernel_with_scales_and_codes(name, numerics):
    """With numerics "eager" codes and scales are eager's; "fast" keeps what is between them in float32, so that codes
    move by a step.
    """
    f, make = FORMS[name]
    args = make()
    jitted = fusejit.jit(f, backend="interpret", numerics=numerics)
    ours, eager = jitted(*args), f(*args)
    assert jitted.explain(*args).launches == 1 and not jitted.program(*args).externs
    q, scale, *rest = ours
    for one, two in zip(ours, eager, strict=True):
        assert one.dtype is two.dtype and one.shape == two.shape and one.stride() == two.stride()
    if numerics == "eager":
        # a sum of a row may be taken in another order: its last bit moves a code that stands on a border
        differ = (code(q) != code(eager[0])).float().mean().item()
        assert differ == 0 if "norm" not in name and "stream" not in name else differ < 0.01
    torch.testing.assert_close(scale, eager[1], rtol=1e-2 if numerics == "fast" else 2e-6, atol=0)
    for one, two in zip(rest, eager[2:], strict=True):
        torch.testing.assert_close(one, two, rtol=1e-2, atol=1e-2)
    step = {E4M3: 2**-3, E5M2: 2**-2, torch.int8: 1.0}[q.dtype]
    wide, other = q.float(), eager[0].float()
    assert ((wide - other).abs() <= step * torch.maximum(wide.abs(), other.abs()).clamp(min=2**-6) + 2).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FORMS)
def test_float64_stands_behind_the_scales(name, backend):
    f, make = FORMS[name]
    args = make()
    exact = f(*[a.double().float() for a in args])  # the same without bfloat16 in between
    scale = fusejit.jit(f, backend=backend)(*args)[1]
    torch.testing.assert_close(scale.double(), exact[1].double(), rtol=1e-2, atol=0)


# -- what is moved, and how --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("columns", [512, 4096, 5120, 16384])
def test_norm_and_blocks_move_the_least(columns):
    """2 bytes read and 1 written an element, 4 a block, the weight once; 16 bytes at a time, nothing spilled."""
    rows = 16384
    (k,) = for_h100(norm_then_blocks, meta(rows, columns), meta(columns)).kernels
    assert (
        k.bytes_read == 2 * rows * columns + 2 * columns
        and k.bytes_written == rows * columns + 4 * rows * columns // 128
    )
    assert k.template == "reduction_persistent" and k.n_spills == 0
    assert k.wide_loads > 0 and k.wide_stores > 0 and "ld.global.b16" not in k.ptx and "st.global.b8" not in k.ptx


@pytest.mark.parametrize(
    "f, shape, launches", [(silu_then_int8, (4096, 4096), 1), (squares, (4096, 4096), 1), (whole, (4096, 4096), 3)]
)
def test_others_move_the_least(f, shape, launches):
    """One scale of everything is known after a first read: partial results, the scale, then the codes."""
    args = [meta(*shape) for _ in range(2 if f is silu_then_int8 else 1)]
    found = for_h100(f, *args)
    assert found.forward.launches == launches and all(k.n_spills == 0 and k.wide_loads > 0 for k in found.kernels)
    elements, reads = shape[0] * shape[1], 2 if f is whole else len(args)
    moved = sum(k.bytes_read + k.bytes_written for k in found.kernels)
    assert elements * (2 * reads + 1) <= moved < 1.01 * elements * (2 * reads + 1)


def test_scales_of_blocks_are_loaded_once_a_block():
    """32 elements a thread come with one or two loads of a scale, not with 32."""

    def f(q, scale, w):
        parts = q.float().reshape(q.shape[0], -1, 128) * scale[..., None]
        return rms_norm(parts.reshape(q.shape).to(BF16), w)

    (k,) = for_h100(f, meta(4096, 4096, dtype=E4M3), meta(4096, 32, dtype=torch.float32), meta(4096)).kernels
    assert k.n_spills == 0 and k.ptx.count("ld.global.b32") <= 4 and k.wide_loads >= 6
    assert "fj.along" in k.source and k.bytes_read == 4096 * (4096 + 32 * 4) + 2 * 4096


def test_columns_that_no_program_holds_stay_apart():
    """A row of 131,072 is looped over, and its blocks are a kernel of their own, which explain() says."""
    args = meta(256, 131072), meta(131072)
    found = for_h100(norm_then_blocks, *args)
    assert found.forward.launches >= 2 and any(
        "do not stay in registers" in str(pair) for pair in found.forward.unfused
    )


def test_blocks_of_several_lengths_stay_apart():
    def f(x):
        mean = x.float().mean(-1, keepdim=True)
        return blocks(x - mean, E4M3, 128), blocks(x - mean, E4M3, 64)

    x = normal(6, 256)
    jitted = fusejit.jit(f, backend="interpret", numerics="eager")
    for ours, eager in zip(sum(jitted(x), ()), sum(f(x), ()), strict=True):
        assert (code(ours) != code(eager)).float().mean() < 0.01 if ours.dtype is E4M3 else torch.allclose(ours, eager)
    report = jitted.explain(x)
    assert report.launches == 2 and "blocks of several lengths in one row" in str(report)


def test_rows_that_vary():
    """From the second number of rows on, one program for all of them: still one kernel."""
    jitted, w = fusejit.jit(norm_then_blocks, backend="interpret", numerics="eager"), weight(256)
    for rows in (6, 9, 4, 17):
        x = normal(rows, 256)
        (q, scale), (right, right_scale) = jitted(x, w), norm_then_blocks(x, w)
        torch.testing.assert_close(scale, right_scale, rtol=2e-6, atol=0)
        assert (code(q) != code(right)).float().mean() < 0.01
    assert jitted.explain(x, w).launches == 1


# -- blocks in general -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("op", ["sum", "amax", "amin", "prod", "mean", "softmax", "any", "two in a row"])
@pytest.mark.parametrize("size", [16, 12])
def test_every_reduction_of_blocks_beside_one_of_the_row(op, size):
    """A row's maximum, and of each block whatever reduces; NaN where eager has it."""

    def f(x):
        y = x - x.amax(-1, keepdim=True)
        parts = y.reshape(x.shape[0], -1, size)
        made = {
            "any": lambda: (parts < -1).any(-1, keepdim=True) & (parts < 0),
            "softmax": lambda: parts.softmax(-1),
            "two in a row": lambda: (
                (parts - parts.amin(-1, keepdim=True)).square().sum(-1, keepdim=True).sqrt() + parts
            ),
        }.get(op, lambda: getattr(parts, op)(-1, keepdim=True) * parts)
        result = made()
        return result.reshape(x.shape), y

    x = torch.randn(5, 8 * size)
    x[2, 3] = float("nan")
    jitted = fusejit.jit(f, backend="interpret")
    ours, eager = jitted(x), f(x)
    torch.testing.assert_close(ours, eager, equal_nan=True)
    assert (
        jitted.explain(x).launches == 1
        and ".reshape" in (text := jitted.program(x).kernels[0].source)
        and "fj.along" in text
    )


def test_places_in_blocks_stay_apart():
    def f(x):
        y = x - x.mean(-1, keepdim=True)
        return y.reshape(x.shape[0], -1, 16).argmax(-1)

    x = torch.randn(5, 64)
    jitted = fusejit.jit(f, backend="interpret")
    assert torch.equal(jitted(x), f(x)) and jitted.explain(x).launches == 2


def test_a_sum_of_the_codes_in_the_same_kernel():
    """The row is reduced after its blocks: what was quantised is added up."""

    def f(x):
        q, scale = blocks(x, E4M3)
        return q, scale, q.float().sum(-1)

    x = normal(6, 256)
    jitted = fusejit.jit(f, backend="interpret", numerics="eager")
    ours, eager = jitted(x), f(x)
    assert torch.equal(code(ours[0]), code(eager[0])) and jitted.explain(x).launches == 1
    torch.testing.assert_close(ours[2], eager[2])


# -- gradients, views, and what no kernel takes ------------------------------------------------------------------------
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_gradients_through_a_cast_are_eager_s(backend, dtype):
    """Eager's backward of a cast to fp8 casts the gradient back, first to fp8; what is kept for it may be fp8."""

    def f(x, w):
        scale = x.detach().abs().amax(-1, keepdim=True) / 4
        q = (x / scale).to(dtype)
        return (q.float() * scale * w).tanh(), q

    def gradients(g):
        x, w = normal(5, 64).float().requires_grad_(), weight(64).float().requires_grad_()
        out, q = g(x, w)
        made = [
            torch.autograd.grad(v, [x, w], torch.ones_like(v), retain_graph=True, allow_unused=True) for v in (out, q)
        ]
        return [out.detach(), q.float().detach(), *made[0], made[1][0]]

    for ours, eager in zip(gradients(fusejit.jit(f, backend=backend, numerics="eager")), gradients(f), strict=True):
        torch.testing.assert_close(ours, eager, rtol=2e-2, atol=1e-6)
        assert (ours != eager).float().mean() < 0.05 or backend == "interpret"


@pytest.mark.parametrize("backend", BACKENDS)
def test_views_and_pieces_of_fp8(backend):
    def f(q, scale):
        wide = q.t().float() * scale
        padded = F.pad(q.float(), (1, 2), value=1.5)
        return (
            wide.contiguous(),
            q[1:3, ::2].float() * 2,
            padded,
            torch.cat([q, q], 1),
            q.t().contiguous(),
            q.view(torch.uint8) + 1,
        )

    q, scale = torch.randn(8, 16).to(E4M3), torch.rand(8)
    for ours, eager in zip(fusejit.jit(f, backend=backend)(q, scale), f(q, scale), strict=True):
        assert ours.dtype is eager.dtype and torch.equal(ours.float(), eager.float())


@pytest.mark.parametrize("fill", [1.0, -2.5, 448.0])
def test_padding_of_fp8_itself(fill):
    """What is read where there is nothing is the byte of a number, not its value."""

    def f(q):
        return F.pad(q.view(torch.uint8), (2, 1), value=0).view(E4M3).float() + 1, torch.constant_pad_nd(
            q.float(), (2, 1), fill
        ).to(E4M3)

    q = torch.randn(4, 10).to(E4M3)
    for ours, eager in zip(fusejit.jit(f, backend="interpret")(q), f(q), strict=True):
        assert torch.equal(ours.float(), eager.float())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu], ids=str)
def test_kinds_that_no_kernel_holds_run_eagerly(dtype):
    """Their casts are torch's own, around kernels for the rest, and explain() says why."""

    def f(x):
        scale = x.float().abs().amax(-1, keepdim=True)
        return (x.float() / scale * 2).to(dtype), scale

    x = normal(6, 96)
    jitted = fusejit.jit(f, backend="interpret", numerics="eager")
    for ours, eager in zip(jitted(x), f(x), strict=True):
        assert torch.equal(ours.view(torch.uint8), eager.view(torch.uint8))
    text = str(jitted.explain(x))
    assert f"no kernel reads or writes {str(dtype).removeprefix('torch.')}" in text and "test_quantisation.py" in text


@pytest.mark.parametrize("backend", BACKENDS)
def test_arithmetic_on_fp8_is_eager_s_error(backend):
    with pytest.raises(NotImplementedError, match="Float8_e4m3fn"):
        fusejit.jit(lambda q: (q.float() * 2, q * 2), backend=backend)(torch.randn(4, 4).to(E4M3))


def test_a_product_of_what_was_quantised():
    """fp8 buffers go to torch's scaled product, which no kernel replaces; what is around it is two kernels."""

    def f(x, w, scale):
        q, own = whole(x)
        return torch._scaled_mm(q, w.t(), own, scale, out_dtype=BF16) * 2

    args = normal(32, 64), normal(48, 64).to(E4M3), torch.tensor(0.5)
    jitted = fusejit.jit(f, backend="interpret", numerics="eager")
    assert torch.equal(jitted(*args), f(*args))
    report = jitted.explain(*args)
    assert report.launches == 2 and [call.target for call in report.externs] == ["aten._scaled_mm.default"]


def test_integers_of_every_size():
    """Float to int8 and uint8: half to even by torch.round, clamped; what wraps wraps as on a CPU."""

    def f(x):
        return (
            torch.round(x).clamp(-128, 127).to(torch.int8),
            x.to(torch.int8),
            torch.round(x).clamp(0, 255).to(torch.uint8),
            x.abs().to(torch.uint8),
        )

    x = torch.cat(
        [torch.arange(-300, 300) / 2, torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.5, -128.5, 1000.0])]
    )
    for ours, eager in zip(fusejit.jit(f, backend="interpret")(x), f(x), strict=True):
        assert torch.equal(ours, eager)


# -- one scale, known before: the largest value for the next step comes from the same read -----------------------------
def norm_then_known_scale(x, w, scale):
    y = rms_norm(x, w).float()
    return (y / scale).clamp(-448, 448).to(E4M3), y.abs().amax()


def test_known_scale_moves_the_least():
    found = for_h100(norm_then_known_scale, meta(16384, 4096), meta(4096), torch.ones(())).forward
    moved = sum(k.bytes_read + k.bytes_written for k in found.kernels)
    assert 3 * 2**26 <= moved < 1.01 * 3 * 2**26 and all(k.n_spills == 0 for k in found.kernels)
    found = for_h100(lambda x, scale: norm_then_known_scale(x, 1, scale), meta(16384, 4096), torch.ones(())).forward
    assert sum(k.bytes_read + k.bytes_written for k in found.kernels) < 1.01 * 3 * 2**26


@pytest.mark.parametrize("shape", [(300, 128), (6, 64)], ids=str)
def test_known_scale(shape):
    """Many rows give a partial result each; few are one program's."""
    args = normal(*shape), weight(shape[1]), torch.tensor(0.01)
    jitted = fusejit.jit(norm_then_known_scale, backend="interpret", numerics="eager")
    (q, most), (right, right_most) = jitted(*args), norm_then_known_scale(*args)
    assert (code(q) != code(right)).float().mean() < 0.01
    torch.testing.assert_close(most, right_most, rtol=1e-2, atol=0)
    names = [k.cluster.reads.keys() for k in jitted.program(*args).kernels]
    assert sum("arg0_1" in reads for reads in names) == 1, "x is read once"


@pytest.mark.parametrize(
    "form", ["sums", "of what was quantised", "two results", "needed first", "squares about the mean"]
)
def test_reductions_of_everything_beside_rows(form):
    """Of what rows make: in the rows' kernel; what the rows wait for, or what takes two passes over all, is not."""

    def f(x):
        p = x.softmax(-1)
        if form == "needed first":
            top = x.abs().amax()
            return (x / top).softmax(-1), top
        if form == "squares about the mean":
            return p, p.var()
        if form == "of what was quantised":
            q, scale = rows(p)
            return q, scale, (q.float() * scale).sum()
        return p, p.amax() * 2, *((p.mean(), p.square().sum()) if form == "two results" else ())

    x = torch.randn(400, 96)
    jitted = fusejit.jit(f, backend="interpret")
    for ours, eager in zip(jitted(x), f(x), strict=True):
        torch.testing.assert_close(ours, eager, atol=2e-6 if ours.is_floating_point() else 1, rtol=1e-5)
    reads = sum("arg0_1" in k.cluster.reads for k in jitted.program(x).kernels)
    assert reads == (1 if form not in ("needed first", "squares about the mean") else reads) and reads <= 3
