"""Pointwise functions for use inside generated kernels; kernels reach them through device.py, as `fj`.

In: Triton values in their compute types (half types are held in float32). Out: Triton values.

    y = fj.tanh(x)                      # libdevice on a GPU, torch's tanh under TRITON_INTERPRET=1

Two worlds from one source: `jit` functions are the same text in both (plain Python on values under the interpreter,
which is much faster there); what is marked `twin` or comes from libdevice has its interpreter version in
interpreter.py.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

INTERPRETED: bool = triton.knobs.runtime.interpret
_twins: dict[str, Callable[..., Any]] = {}
if INTERPRETED:
    from fusejit.runtime.kernels.interpreter import TWINS as _twins
else:
    from triton.language.extra.cuda import libdevice


def jit(function: Callable[..., Any]) -> Any:
    """A device function: compiled by Triton; plain Python on values under the interpreter (which is much faster
    there).
    """
    return function if INTERPRETED else triton.jit(function)


def twin(function: Callable[..., Any]) -> Any:
    """A device function whose interpreter version is its namesake in interpreter.py."""
    return _twins[function.__name__] if INTERPRETED else triton.jit(function)


def _library(name: str, libdevice_name: str) -> Any:
    return _twins[name] if INTERPRETED else getattr(libdevice, libdevice_name)


# -- maths of libdevice (float32 and float64) --------------------------------------------------------------------------
exp = _library("exp", "exp")
exp2 = _library("exp2", "exp2")
expm1 = _library("expm1", "expm1")
log = _library("log", "log")
log2 = _library("log2", "log2")
log10 = _library("log10", "log10")
log1p = _library("log1p", "log1p")
sin = _library("sin", "sin")
cos = _library("cos", "cos")
tan = _library("tan", "tan")
asin = _library("asin", "asin")
acos = _library("acos", "acos")
atan = _library("atan", "atan")
sinh = _library("sinh", "sinh")
cosh = _library("cosh", "cosh")
tanh = _library("tanh", "tanh")
asinh = _library("asinh", "asinh")
acosh = _library("acosh", "acosh")
atanh = _library("atanh", "atanh")
atan2 = _library("atan2", "atan2")
erf = _library("erf", "erf")
erfc = _library("erfc", "erfc")
erfcx = _library("erfcx", "erfcx")
erfinv = _library("erfinv", "erfinv")
lgamma = _library("lgamma", "lgamma")
i0 = _library("i0", "cyl_bessel_i0")
i1 = _library("i1", "cyl_bessel_i1")
bessel_j0 = _library("bessel_j0", "j0")
bessel_j1 = _library("bessel_j1", "j1")
bessel_y0 = _library("bessel_y0", "y0")
bessel_y1 = _library("bessel_y1", "y1")
ndtri = _library("ndtri", "normcdfinv")
normcdf = _library("normcdf", "normcdf")
hypot = _library("hypot", "hypot")
nextafter = _library("nextafter", "nextafter")
copysign = _library("copysign", "copysign")
pow = _library("pow", "pow")
float_fmod = _library("float_fmod", "fmod")
trunc = _library("trunc", "trunc")
round = _library("round", "rint")
rsqrt = _library("rsqrt", "rsqrt")


# -- arithmetic --------------------------------------------------------------------------------------------------------
@jit
def neg(x):
    if x.dtype.is_floating():
        result = x * -1.0  # tl's unary minus is 0 - x, which loses the sign of zero
    else:
        result = -x
    return result


@jit
def bitwise_not(x):
    return x ^ -1 if x.dtype.is_int_signed() else x ^ ((1 << x.dtype.primitive_bitwidth) - 1)


@jit
def sign(x):
    return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)


@jit
def signbit(x):
    if x.dtype == tl.float64:
        result = x.to(tl.int64, bitcast=True) < 0
    else:
        result = x.to(tl.int32, bitcast=True) < 0
    return result


@twin
def fma(x, y, z):
    return tl.fma(x, y, z)


@jit
def div_rn(x, y):
    if x.dtype == tl.float64:
        result = x / y
    else:
        result = tl.div_rn(x, y)
    return result


@jit
def sqrt_rn(x):
    if x.dtype == tl.float64:
        result = tl.sqrt(x)
    else:
        result = tl.sqrt_rn(x)
    return result


@jit
def reciprocal_rn(x):
    if x.dtype == tl.float64:
        result = 1.0 / x
    else:
        result = tl.div_rn(1.0, x)
    return result


@jit
def fmod(x, y):
    if x.dtype.is_floating():
        result = float_fmod(x, y)
    else:
        result = x % y  # Triton's % of integers has the sign of x, as C's
    return result


@jit
def remainder(x, y):
    m = fmod(x, y)
    if x.dtype.is_floating() or x.dtype.is_int_signed():
        m = tl.where((m != 0) & ((m < 0) != (y < 0)), m + y, m)
    return m


@jit
def trunc_div(x, y):
    if x.dtype.is_floating():
        result = trunc(div_rn(x, y))
    else:
        result = x // y  # truncates, as C's
    return result


@jit
def floor_div(x, y):
    if x.dtype.is_floating():
        m = float_fmod(x, y)
        q = div_rn(x - m, y)
        q = tl.where((m != 0) & ((m < 0) != (y < 0)), q - 1.0, q)
        low = tl.floor(q)
        low = tl.where(q - low > 0.5, low + 1.0, low)
        ratio = div_rn(x, y)
        result = tl.where(y == 0, ratio, tl.where(q == 0, copysign(q * 0.0, ratio), low))
    else:
        result = x // y
        if x.dtype.is_int_signed():
            result = tl.where((result * y != x) & ((x < 0) != (y < 0)), result - 1, result)
    return result


@jit
def int_pow(x, n):
    base = x + (n & 0)  # of the shape of both
    result = base * 0 + 1
    left = n + (x & 0)
    for _ in range(x.dtype.primitive_bitwidth):
        result = tl.where((left & 1) != 0, result * base, result).to(x.dtype)
        base = (base * base).to(x.dtype)
        left = (left >> 1).to(n.dtype)
    if x.dtype.is_int_signed():
        odd = (n & 1) != 0
        inverse = tl.where(x == 1, 1, tl.where(x == -1, tl.where(odd, -1, 1), 0)).to(x.dtype)
        result = tl.where(n < 0, inverse, result)
    return result


@jit
def lshift(x, n):
    bits = x.dtype.primitive_bitwidth
    inside = (n >= 0) & (n < bits)
    return tl.where(inside, x << tl.where(inside, n, 0).to(x.dtype), 0).to(x.dtype)


@jit
def rshift(x, n):
    # a shift by too much leaves the sign; one bit less than the width does that for signed types
    bits = x.dtype.primitive_bitwidth
    inside = (n >= 0) & (n < bits)
    if x.dtype.is_int_signed():
        result = x >> tl.where(inside, n, bits - 1).to(x.dtype)
    else:
        result = tl.where(inside, x >> tl.where(inside, n, 0).to(x.dtype), 0)
    return result.to(x.dtype)


@jit
def maximum(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@jit
def minimum(x, y):
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)


@twin
def fmax(x, y):
    return tl.maximum(x, y)


@twin
def fmin(x, y):
    return tl.minimum(x, y)


@jit
def relu(x):
    return tl.where(x <= 0, 0, x).to(x.dtype)  # NaN <= 0 is false: NaN stays


# -- compositions ------------------------------------------------------------------------------------------------------
@jit
def sigmoid(x):
    return 1.0 / (1.0 + exp(neg(x)))


@jit
def sigmoid_rn(x):
    return reciprocal_rn(1.0 + exp(neg(x)))


@jit
def softplus(x):
    return tl.where(x > 20.0, x, log1p(exp(x)))


@jit
def logaddexp(x, y):
    m = maximum(x, y)
    return tl.where((x == y) & (tl.abs(x) == float("inf")), x, m + log1p(exp(neg(tl.abs(x - y)))))


@jit
def logaddexp2(x, y):
    m = maximum(x, y)
    return tl.where((x == y) & (tl.abs(x) == float("inf")), x, m + log1p(exp2(neg(tl.abs(x - y)))) * 1.4426950408889634)


@jit
def xlogy(x, y):
    return tl.where(y != y, y, tl.where(x == 0, x * 0.0, x * log(y)))


@jit
def xlog1py(x, y):
    return tl.where(y != y, y, tl.where(x == 0, x * 0.0, x * log1p(y)))


@jit
def entr(x):
    return tl.where(x > 0, neg(x * log(x)), tl.where(x == 0, 0.0, tl.where(x < 0, -float("inf"), x))).to(x.dtype)


@jit
def sinc(x):
    t = x * 3.141592653589793
    return tl.where(t == 0, 1.0, div_rn(sin(t), t)).to(x.dtype)


@jit
def spherical_bessel_j0(x):
    s = x * x
    series = 1.0 + s * (
        -1.0 / 6 + s * (1.0 / 120 + s * (-1.0 / 5040 + s * (1.0 / 362880 + s * (-1.0 / 39916800 + s / 6227020800.0))))
    )
    return tl.where(tl.abs(x) == float("inf"), 0.0, tl.where(tl.abs(x) < 0.5, series, sin(x) / x)).to(x.dtype)


@jit
def ndtr(x):
    return 0.5 * erfc(x * -0.7071067811865476)


@jit
def log_ndtr(x):
    t = x * 0.7071067811865476
    return tl.where(x < -1.0, log(erfcx(neg(t)) * 0.5) - t * t, log1p(neg(erfc(t)) * 0.5))


@jit
def digamma(x):
    # reflect x <= 0, step up to x >= 10, then the asymptotic series
    negative = x < 0
    fraction = x - round(x)  # within a half of the nearest pole, so that tan is accurate on both sides
    reflected = tl.where(fraction == 0, float("nan"), -3.141592653589793 / tan(fraction * 3.141592653589793))
    z = tl.where(negative, 1.0 - x, x).to(x.dtype)
    result = z * 0.0
    for _ in tl.static_range(10):
        small = z < 10.0
        result = tl.where(small, result - 1.0 / z, result).to(x.dtype)
        z = tl.where(small, z + 1.0, z).to(x.dtype)
    w = 1.0 / (z * z)
    series = w * (
        1.0 / 12
        - w * (1.0 / 120 - w * (1.0 / 252 - w * (1.0 / 240 - w * (1.0 / 132 - w * (691.0 / 32760 - w / 12.0)))))
    )
    result = tl.where(z == 10.0, result + 2.251752589066721, result + log(z) - 0.5 / z - series)
    result = tl.where(negative, result + reflected, result)
    result = tl.where(x == 0, copysign(x * 0.0 + float("inf"), neg(x)), result)
    return tl.where(x == float("inf"), x, result).to(x.dtype)


@jit
def trigamma(x):
    low = x < 0.5
    s = sin(x * 3.141592653589793)
    z = tl.where(low, 1.0 - x, x).to(x.dtype)
    result = 1.0 / (z * z)
    z = z + 1.0
    for _ in tl.static_range(5):
        result = result + 1.0 / (z * z)
        z = z + 1.0
    w = 1.0 / (z * z)
    result = result + (1.0 + 0.5 / z + w * (1.0 / 6 - w * (1.0 / 30 - w * (1.0 / 42)))) / z
    return tl.where(low, 9.869604401089358 / (s * s) - result, result).to(x.dtype)


@jit
def _scaled_bessel_i(x, four_nu_squared: tl.constexpr):
    # exp(-x) I_nu(x) for large x: the asymptotic series, nested from its tenth term
    u = 0.125 / x
    series = u * 0.0 + 1.0
    for j in tl.static_range(10):
        series = 1.0 + series * u * (((19 - 2 * j) * (19 - 2 * j) - four_nu_squared) / (10 - j))
    return series * 0.3989422804014327 / tl.sqrt(x)


@jit
def i0e(x):
    z = tl.abs(x)
    return tl.where(z < 60.0, i0(x) * exp(neg(z)), _scaled_bessel_i(z, 0))


@jit
def i1e(x):
    z = tl.abs(x)
    return tl.where(z < 60.0, i1(x) * exp(neg(z)), copysign(_scaled_bessel_i(z, 4), x))
