"""Functions for use inside generated kernels, imported there as `fj`: one name, right in both of Triton's worlds.

In: Triton values in their compute types (half types are held in float32). Out: Triton values.

    y = fj.to_bf16(fj.tanh(x))          # rounded once, to be stored
    s = fj.sum(fj.exp(x - m), 1)        # reduces axis 1 of a tile

Here are storage types, indices, reductions and random numbers; the pointwise functions are math.py's. Compiled, both
import only Triton (a compile worker has no torch).
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton.language as tl

from .math import *  # noqa: F403 - kernels reach every function through this module
from .math import cos, exp, jit, log, logaddexp, maximum, minimum, sin, twin


# -- storage types -----------------------------------------------------------------------------------------------------
@twin
def to_bf16(x):
    return x.to(tl.bfloat16)


@twin
def from_bf16(x):
    return x.to(tl.float32)


# fp8 numbers are bytes here. A GPU of sm_89 or later converts them itself; for an older one, integers do what torch's
# conversion does.
@tl.core.builtin
def converts_fp8(_semantic=None):
    """Whether the GPU that is compiled for converts fp8 itself."""
    return tl.constexpr("fp8e4nv" in _semantic.builder.options.supported_fp8_dtypes)


@jit
def fp8_bits(x, mantissa: tl.constexpr, bias: tl.constexpr, most: tl.constexpr, over: tl.constexpr):
    """float32 as a byte of `mantissa` bits, rounded half to even: `over` where it rounds beyond `most`, 0x7F where it
    is NaN.
    """
    bits = x.to(tl.int32, bitcast=True)
    size, sign = bits & 0x7FFFFFFF, (bits >> 24) & 0x80
    shift: tl.constexpr = 23 - mantissa
    odd = (size >> shift) & 1
    normal = (size + ((1 << (shift - 1)) - 1) + odd - ((127 - bias) << 23)) >> shift
    # adding a power of two whose last bit is the smallest number's rounds to a multiple of that
    anchor: tl.constexpr = (127 + 1 - bias - mantissa + 23) << 23
    small = (size.to(tl.float32, bitcast=True) + tl.full((), anchor, tl.int32).to(tl.float32, bitcast=True)).to(
        tl.int32, bitcast=True
    ) - anchor
    result = tl.where(size < ((128 - bias) << 23), small, normal)
    result = tl.where(size > most, over, result)
    return (tl.where(size > 0x7F800000, 0x7F, result) | sign).to(tl.uint8)


@jit
def fp8_value(x, mantissa: tl.constexpr, bias: tl.constexpr):
    """A byte of an fp8 number that is not infinite or NaN as float32."""
    bits = x.to(tl.int32)
    size, shift = bits & 0x7F, 23 - mantissa
    small: tl.constexpr = 2.0 ** (1 - bias - mantissa)
    value = tl.where(
        size < (1 << mantissa),
        size.to(tl.float32) * small,
        ((size << shift) + ((127 - bias) << 23)).to(tl.float32, bitcast=True),
    )
    return tl.where(bits > 0x7F, -value, value)


@twin
def from_e4m3(x):
    if converts_fp8():
        result = x.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        result = tl.where((x & 0x7F) == 0x7F, float("nan"), fp8_value(x, 3, 7))
    return result


@twin
def from_e5m2(x):
    if converts_fp8():
        result = x.to(tl.float8e5, bitcast=True).to(tl.float32)
    else:
        special = tl.where((x & 3) != 0, float("nan"), tl.where(x > 0x7F, float("-inf"), float("inf")))
        result = tl.where((x & 0x7F) >= 0x7C, special, fp8_value(x, 2, 15))
    return result


@twin
def to_e4m3(x):
    # saturates, infinities too
    if converts_fp8():
        result = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        result = fp8_bits(x, 3, 7, 0x43E80000, 0x7E)
    return result


@twin
def to_e4m3_nan(x):
    # as torch before 2.12: what rounds beyond 448, from over 464 on, is NaN
    if converts_fp8():
        bits = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        result = tl.where(tl.abs(x) > 464.0, bits | 0x7F, bits).to(tl.uint8)
    else:
        result = fp8_bits(x, 3, 7, 0x43E80000, 0x7F)
    return result


@twin
def to_e5m2(x):
    # the hardware conversion saturates, torch's overflows to infinity from half way between 57344 and 65536, 61440, on
    if converts_fp8():
        bits = x.to(tl.float8e5).to(tl.uint8, bitcast=True)
        result = tl.where(tl.abs(x) >= 61440.0, tl.where(x < 0, 0xFC, 0x7C), bits).to(tl.uint8)
    else:
        result = fp8_bits(x, 2, 15, 0x476FFFFF, 0x7C)
    return result


@twin
def to_int(x, dtype: tl.constexpr):
    # narrow integers wrap as torch's do, by way of a wider one
    if dtype == tl.uint8:
        result = x.to(tl.int64).to(tl.uint8)
    else:
        if dtype.primitive_bitwidth < 32:
            result = x.to(tl.int32).to(dtype)
        else:
            result = x.to(dtype)
    return result


# -- indices -----------------------------------------------------------------------------------------------------------
@jit
def wrap(i, n):
    """A negative index counts from the end of n."""
    return tl.where(i < 0, i + n, i)


@twin
def check_index(i, n, mask):
    """Stop the program unless 0 <= i < n where the mask holds (needs the launch option debug=True on a GPU)."""
    tl.device_assert((i >= 0) & (i < n), "index out of bounds", mask)


@twin
def check_probability(p, mask):
    """Stop the program unless 0 <= p <= 1 where the mask holds (needs the launch option debug=True on a GPU)."""
    tl.device_assert((p >= 0) & (p <= 1), "a probability outside [0, 1]", mask)


@twin
def again(x):
    """The same value, of which the compiler does not know that: what is made of it is made anew instead of being
    kept.
    """
    pack: tl.constexpr = 32 // x.dtype.primitive_bitwidth
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=pack)


# -- results that several elements add to ------------------------------------------------------------------------------
@twin
def atomic_add(place, x, mask):
    """Add `x` to what is in memory; in any order, and before the kernel ends."""
    tl.atomic_add(place, x, mask, sem="relaxed")


@jit
def along(x, each: tl.constexpr):
    """One value a segment, (rows, segments), at each of the `each` places of its segment: (rows, segments * each)."""
    wide = tl.broadcast_to(x[:, :, None], [x.shape[0], x.shape[1], each])
    return tl.reshape(wide, [x.shape[0], x.shape[1] * each])


# -- reductions over one axis of a tile, and their elementwise accumulation --------------------------------------------
@jit
def sum_combine(a, b):
    return a + b


@jit
def prod_combine(a, b):
    return a * b


@jit
def amax_combine(a, b):
    return maximum(a, b) if a.dtype != tl.int1 else a | b


@jit
def amin_combine(a, b):
    return minimum(a, b) if a.dtype != tl.int1 else a & b


@jit
def any_combine(a, b):
    return a | b


@jit
def all_combine(a, b):
    return a & b


@jit
def argmax_combine(a, i, b, j):
    """The larger value with its index; NaN is larger than anything, and of equals the smaller index wins."""
    first = (a > b) | ((a != a) & (b == b)) | (((a == b) | ((a != a) & (b != b))) & (i < j))
    return tl.where(first, a, b), tl.where(first, i, j)


@jit
def argmin_combine(a, i, b, j):
    """The smaller value with its index; NaN is smaller than anything, and of equals the smaller index wins."""
    first = (a < b) | ((a != a) & (b == b)) | (((a == b) | ((a != a) & (b != b))) & (i < j))
    return tl.where(first, a, b), tl.where(first, i, j)


@jit
def online_exp(m, s, x):
    """One more value of a sum of exponentials about a running maximum `m`, before `m` takes it in: one exponential a
    value.
    """
    above = tl.where(x == m, 0.0, x - m)  # equal infinities are no distance apart
    scale = exp(tl.abs(above) * -1.0)
    return tl.where(above > 0, s * scale + 1.0, s + scale)


@jit
def online_exp_sum(m, s, shift):
    """Sums of exponentials about their own maxima, as they are about `shift`; a place that saw nothing has s = 0."""
    return s * exp(m - shift)


@jit
def finite_or_zero(m):
    """A maximum that values can be about: those of a place of -inf only stay -inf about zero."""
    return tl.where(m == float("-inf"), 0.0, m)


@jit
def online_linear(m, s, w, x, weight):
    """One more value of a sum of weighted distances to a running maximum `m`, before `m` takes it in; `w`: the weights
    so far.
    """
    new = finite_or_zero(maximum(m, x))
    return s + (finite_or_zero(m) - new) * w + weight * (x - new)


@jit
def shifted_squares(total, squares, count):
    """`total` and `squares` of x - near, as the sum of the squares of x - mean; little cancels where near is near the
    mean.
    """
    overflown = (squares == float("inf")) & (
        tl.abs(total) < float("inf")
    )  # of finite x, as against an x that is infinite
    return tl.where(overflown, squares, squares - total * (total / count))


@twin
def sum(x, axis: tl.constexpr):
    return tl.reduce(x, axis, sum_combine)


@twin
def prod(x, axis: tl.constexpr):
    return tl.reduce(x, axis, prod_combine)


@twin
def any(x, axis: tl.constexpr):
    return tl.reduce(x.to(tl.int32), axis, any_combine) != 0


@twin
def amax(x, axis: tl.constexpr):
    if x.dtype == tl.int1:
        result = any(x, axis)
    else:
        result = tl.reduce(x, axis, amax_combine)
    return result


@twin
def all(x, axis: tl.constexpr):
    return tl.reduce(x.to(tl.int32), axis, all_combine) != 0


@twin
def amin(x, axis: tl.constexpr):
    if x.dtype == tl.int1:
        result = all(x, axis)
    else:
        result = tl.reduce(x, axis, amin_combine)
    return result


@twin
def argmax(v, i, axis: tl.constexpr):
    return tl.reduce((v, i), axis, argmax_combine)[1]


@twin
def argmin(v, i, axis: tl.constexpr):
    return tl.reduce((v, i), axis, argmin_combine)[1]


# -- scans along one axis of a tile, from the end with `reverse`; what two pieces come to, one after the other ---------
@jit
def logaddexp_combine(a, b):
    return logaddexp(a, b)


@jit
def cummax_combine(a, i, b, j):
    """The larger value with its place; NaN is larger than anything, and of equals the later one wins."""
    later = (b >= a) | (b != b)
    return tl.where(later, b, a), tl.where(later, j, i)


@jit
def cummin_combine(a, i, b, j):
    """The smaller value with its place; NaN is smaller than anything, and of equals the later one wins."""
    later = (b <= a) | (b != b)
    return tl.where(later, b, a), tl.where(later, j, i)


cumsum_combine, cumprod_combine, logcumsumexp_combine = sum_combine, prod_combine, logaddexp_combine


@twin
def cumsum(x, axis: tl.constexpr, reverse: tl.constexpr):
    return tl.associative_scan(x, axis, sum_combine, reverse)


@twin
def cumprod(x, axis: tl.constexpr, reverse: tl.constexpr):
    return tl.associative_scan(x, axis, prod_combine, reverse)


@twin
def logcumsumexp(x, axis: tl.constexpr, reverse: tl.constexpr):
    return tl.associative_scan(x, axis, logaddexp_combine, reverse)


@twin
def cummax(v, i, axis: tl.constexpr, reverse: tl.constexpr):
    return tl.associative_scan((v, i), axis, cummax_combine, reverse)


@twin
def cummin(v, i, axis: tl.constexpr, reverse: tl.constexpr):
    return tl.associative_scan((v, i), axis, cummin_combine, reverse)


@twin
def logaddexp_reduce(x, axis: tl.constexpr):
    return tl.reduce(x, axis, logaddexp_combine)


@twin
def cummax_whole(v, i, axis: tl.constexpr):
    best, place = tl.reduce((v, i), axis, cummax_combine)
    return best[:, None], place[:, None]


@twin
def cummin_whole(v, i, axis: tl.constexpr):
    best, place = tl.reduce((v, i), axis, cummin_combine)
    return best[:, None], place[:, None]


# -- random numbers: element k of a stream is lane k % 4 of Philox at counter k // 4 -----------------------------------
@twin
def philox(seed, counter):
    low = counter.to(tl.uint32)
    if counter.dtype == tl.int32:
        high = low * 0
    else:
        high = (counter >> 32).to(tl.uint32)
    return tl.philox(seed, low, high, low * 0, low * 0)


@twin
def interleave4(a, b, c, d, axis: tl.constexpr):
    """a0 b0 c0 d0 a1 b1 ... along one axis of a tile."""
    four = tl.join(tl.join(a, c), tl.join(b, d))
    if len(a.shape) == 1:
        result = four.reshape([a.shape[0] * 4])
    else:
        if axis == 1:
            result = four.reshape([a.shape[0], a.shape[1] * 4])
        else:
            result = tl.permute(four, (0, 2, 3, 1)).reshape([a.shape[0] * 4, a.shape[1]])
    return result


@jit
def _lane(offset, a, b, c, d):
    lane = offset & 3
    return tl.where(lane == 0, a, tl.where(lane == 1, b, tl.where(lane == 2, c, d)))


@jit
def _unit(bits):
    """Bits to [0, 1): the upper 24 of them."""
    return (bits >> 8).to(tl.float32) * 5.9604644775390625e-08


@jit
def _normal_radius(bits):
    return tl.sqrt(-2.0 * log(((bits >> 8) + 1).to(tl.float32) * 5.9604644775390625e-08))


@jit
def _angle(bits):
    return (bits >> 8).to(tl.float32) * (5.9604644775390625e-08 * 6.283185307179586)


@jit
def random_bits(seed, offset):
    """32 random bits of stream `seed` at element `offset` (int64), as int64."""
    a, b, c, d = philox(seed, offset >> 2)
    return _lane(offset, a, b, c, d).to(tl.int64)


@jit
def rand(seed, offset):
    """Uniform float32 in [0, 1) of stream `seed` at element `offset` (int64)."""
    a, b, c, d = philox(seed, offset >> 2)
    return _unit(_lane(offset, a, b, c, d))


@jit
def randn(seed, offset):
    """Normal float32 of stream `seed` at element `offset` (int64), by Box and Muller."""
    a, b, c, d = philox(seed, offset >> 2)
    upper = (offset & 2) != 0
    radius, angle = _normal_radius(tl.where(upper, c, a)), _angle(tl.where(upper, d, b))
    return radius * tl.where((offset & 1) != 0, sin(angle), cos(angle))


@jit
def random_bits_tile(seed, counters, axis: tl.constexpr):
    """random_bits at four elements for each counter, from one Philox call: elements 4 * counter to 4 * counter + 3,
    along `axis`.
    """
    a, b, c, d = philox(seed, counters)
    return interleave4(a, b, c, d, axis).to(tl.int64)


@jit
def rand_tile(seed, counters, axis: tl.constexpr):
    """rand at four elements for each counter, as random_bits_tile."""
    a, b, c, d = philox(seed, counters)
    return _unit(interleave4(a, b, c, d, axis))


@jit
def randn_tile(seed, counters, axis: tl.constexpr):
    """randn at four elements for each counter, as random_bits_tile."""
    a, b, c, d = philox(seed, counters)
    r, s, t, u = _normal_radius(a), _normal_radius(c), _angle(b), _angle(d)
    return interleave4(r * cos(t), r * sin(t), s * cos(u), s * sin(u), axis)
