"""What Triton's interpreter lacks: NumPy and torch (CPU) versions of device functions, on the interpreter's values.

In: tl.tensor values whose handles hold NumPy arrays. Out: the same. Only used with TRITON_INTERPRET=1, where libdevice
fails, bfloat16 rounding truncates and reductions with a combine function take 0.3 s per 1,024 elements.

    >>> TWINS["tanh"](x)        # torch.tanh of x's array: what eager computes on a CPU
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import TensorHandle, _get_np_dtype

from fusejit.errors import KernelAssertion

_TORCH = {
    tl.float32: torch.float32,
    tl.float64: torch.float64,
    tl.float16: torch.float16,
    tl.int1: torch.bool,
    tl.int8: torch.int8,
    tl.int16: torch.int16,
    tl.int32: torch.int32,
    tl.int64: torch.int64,
    tl.uint8: torch.uint8,
}


def value(data: np.ndarray, dtype: tl.dtype, block: bool) -> tl.tensor:
    """Return an interpreter value of element type `dtype`; without `block` it is a scalar, held in an array of one
    element.
    """
    data = np.asarray(data, dtype=_get_np_dtype(dtype))
    if not block:
        return tl.tensor(TensorHandle(data.reshape(1), dtype), dtype)
    return tl.tensor(TensorHandle(data, dtype), tl.block_type(dtype, list(data.shape)))


def array(x: tl.tensor) -> torch.Tensor:
    """Return the value's data as a CPU tensor of its own dtype."""
    return torch.from_numpy(np.array(x.handle.data, dtype=_get_np_dtype(x.dtype)))


def _is_block(*xs: tl.tensor) -> bool:
    return any(x.type.is_block() for x in xs)


def _elementwise(function: Callable[..., torch.Tensor], result: tl.dtype | None = None) -> Callable[..., tl.tensor]:
    def twin(*xs: tl.tensor) -> tl.tensor:
        return value(function(*(array(x) for x in xs)).numpy(), result or xs[0].dtype, _is_block(*xs))

    return twin


def to_int(x: tl.tensor, dtype: tl.dtype) -> tl.tensor:
    """Float to integer as torch converts it: toward zero, wrapping where the integer is narrow."""
    return value(array(x).to(_TORCH[dtype]).numpy(), dtype, _is_block(x))


def to_bf16(x: tl.tensor) -> tl.tensor:
    """Round to bfloat16, half to even."""
    bits = array(x).to(torch.float32).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    return value(bits, tl.bfloat16, _is_block(x))


def from_bf16(x: tl.tensor) -> tl.tensor:
    """bfloat16 as float32."""
    wide = x.handle.data.astype(np.uint32) << np.uint32(16)
    return value(wide.view(np.float32), tl.float32, _is_block(x))


def _to_fp8(kind: torch.dtype) -> Callable[[tl.tensor], tl.tensor]:
    return lambda x: value(array(x).to(torch.float32).to(kind).view(torch.uint8).numpy(), tl.uint8, _is_block(x))


def _from_fp8(kind: torch.dtype) -> Callable[[tl.tensor], tl.tensor]:
    return lambda x: value(array(x).view(kind).to(torch.float32).numpy(), tl.float32, _is_block(x))


def fma(x: tl.tensor, y: tl.tensor, z: tl.tensor) -> tl.tensor:
    """x * y + z, rounded once: the product of two float32 numbers is exact in float64."""
    a, b, c = (array(v).double() for v in (x, y, z))
    return value((a * b + c).to(_TORCH[x.dtype]).numpy(), x.dtype, _is_block(x, y, z))


def _reduce(function: Callable[..., torch.Tensor]) -> Callable[[tl.tensor, int], tl.tensor]:
    def twin(x: tl.tensor, axis: int) -> tl.tensor:
        result = function(array(x), int(axis))
        return value(result.numpy(), x.dtype, result.dim() > 0)

    return twin


def _arg_reduce(best: Callable[..., Any]) -> Callable[[tl.tensor, tl.tensor, int], tl.tensor]:
    def twin(v: tl.tensor, i: tl.tensor, axis: int) -> tl.tensor:
        values, indices = np.broadcast_arrays(v.handle.data, i.handle.data)
        winner = best(values, axis=int(axis), keepdims=True)  # NaN where there is one
        wins = (values == winner) | ((values != values) & (winner != winner))
        result = np.where(wins, indices, np.iinfo(indices.dtype).max).min(axis=int(axis))
        return value(result, i.dtype, result.ndim > 0)

    return twin


def _scan(function: Callable[..., torch.Tensor]) -> Callable[[tl.tensor, int, bool], tl.tensor]:
    def twin(x: tl.tensor, axis: int, reverse: bool) -> tl.tensor:
        data = array(x).flip(int(axis)) if reverse else array(x)
        result = function(data, int(axis))
        return value((result.flip(int(axis)) if reverse else result).numpy(), x.dtype, True)

    return twin


def _scan_place(function: Callable[..., Any], whole: bool) -> Callable[..., tuple[tl.tensor, tl.tensor]]:
    """Running maximum or minimum with places, or where it ends; the places along the row are those of the tile."""

    def twin(v: tl.tensor, i: tl.tensor, axis: int, reverse: bool = False) -> tuple[tl.tensor, tl.tensor]:
        values, places = function(array(v), int(axis))
        places = torch.gather(array(i), int(axis), places)
        if whole:
            values, places = values[:, -1:], places[:, -1:]
        return value(values.numpy(), v.dtype, True), value(places.numpy(), i.dtype, True)

    return twin


def check_index(i: tl.tensor, n: int | tl.tensor, mask: tl.tensor | None = None) -> None:
    """Raise IndexError unless 0 <= i < n wherever the mask holds."""
    size = int(n.handle.data.item()) if isinstance(n, tl.tensor) else int(n)
    data = i.handle.data
    bad = (data < 0) | (data >= size)
    if mask is not None:
        bad = bad & mask.handle.data
    if bad.any():
        wrong = np.broadcast_to(data, bad.shape)[bad].ravel()[0]
        raise IndexError(f"index {wrong} is out of bounds for dimension with size {size}")


def atomic_add(place: tl.tensor, x: tl.tensor, mask: tl.tensor | None) -> None:
    """Add to memory, one element after the other, in their dtype; Triton's own reads past what is broadcast, and has no
    bfloat16.
    """
    shape = place.handle.data.shape
    wanted = np.broadcast_to(mask.handle.data if mask is not None else True, shape)
    places, added = (np.broadcast_to(v.handle.data, shape)[wanted] for v in (place, x))
    if not places.size:
        return
    first, last = int(places.min()), int(places.max())
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * (last - first + added.itemsize)).from_address(first)).view(
        added.dtype
    )
    which = torch.from_numpy(((places - places.min()) // added.itemsize).astype(np.int64))
    kind = torch.bfloat16 if x.dtype == tl.bfloat16 else _TORCH[x.dtype]
    bits = (
        np.int16 if x.dtype == tl.bfloat16 else added.dtype
    )  # torch has no name for NumPy's uint16 that stands for bfloat16
    torch.from_numpy(memory.view(bits)).view(kind).index_add_(0, which, torch.from_numpy(added.view(bits)).view(kind))


def philox(seed: tl.tensor, offset: tl.tensor) -> tuple[tl.tensor, ...]:
    """Four uint32 values: ten Philox rounds on the counter `offset` with key `seed`, as tl.philox computes them."""
    key, counter = (np.asarray(v.handle.data).astype(np.int64).view(np.uint64) for v in (seed, offset))
    low = np.uint64(0xFFFFFFFF)
    k0, k1 = key & low, key >> np.uint64(32)
    c0, c1 = counter & low, counter >> np.uint64(32)
    c2 = c3 = np.zeros_like(c0)
    for _ in range(10):
        a, b = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (b >> np.uint64(32)) ^ c1 ^ k0, b & low, (a >> np.uint64(32)) ^ c3 ^ k1, a & low
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    return tuple(value(c.astype(np.uint32), tl.uint32, _is_block(seed, offset)) for c in (c0, c1, c2, c3))


def check_probability(p: tl.tensor, mask: tl.tensor | None = None) -> None:
    """Raise KernelAssertion, a RuntimeError, unless 0 <= p <= 1 wherever the mask holds."""
    bad = ~((p.handle.data >= 0) & (p.handle.data <= 1))
    if mask is not None:
        bad = bad & mask.handle.data
    if bad.any():
        raise KernelAssertion(
            f"{np.broadcast_to(p.handle.data, bad.shape)[bad].ravel()[0]} is no probability: 0 <= p <= 1 is expected"
        )


def interleave4(a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor, axis: int) -> tl.tensor:
    """a0 b0 c0 d0 a1 b1 ... along one axis of four blocks."""
    blocks = [x.handle.data for x in (a, b, c, d)]
    axis = int(axis) if blocks[0].ndim > 1 else 0
    shape = [n * 4 if k == axis else n for k, n in enumerate(blocks[0].shape)]
    data = np.stack(blocks, axis=axis + 1).reshape(shape)
    return value(data, a.dtype, True)


_s = torch.special
_POINTWISE: dict[str, Callable[..., torch.Tensor]] = {
    "exp": torch.exp,
    "exp2": torch.exp2,
    "expm1": torch.expm1,
    "log": torch.log,
    "log2": torch.log2,
    "log10": torch.log10,
    "log1p": torch.log1p,
    "sin": torch.sin,
    "cos": torch.cos,
    "tan": torch.tan,
    "asin": torch.asin,
    "acos": torch.acos,
    "atan": torch.atan,
    "sinh": torch.sinh,
    "cosh": torch.cosh,
    "tanh": torch.tanh,
    "asinh": torch.asinh,
    "acosh": torch.acosh,
    "atanh": torch.atanh,
    "atan2": torch.atan2,
    "erf": torch.erf,
    "erfc": torch.erfc,
    "erfcx": _s.erfcx,
    "erfinv": torch.erfinv,
    "lgamma": torch.lgamma,
    "i0": torch.i0,
    "i1": _s.i1,
    "bessel_j0": _s.bessel_j0,
    "bessel_j1": _s.bessel_j1,
    "bessel_y0": _s.bessel_y0,
    "bessel_y1": _s.bessel_y1,
    "ndtri": _s.ndtri,
    "hypot": torch.hypot,
    "nextafter": torch.nextafter,
    "copysign": torch.copysign,
    "pow": torch.pow,
    "float_fmod": torch.fmod,
    "trunc": torch.trunc,
    "round": torch.round,
    "normcdf": lambda x: 0.5 * (1.0 + torch.erf(x * 0.7071067811865476)),
    "rsqrt": torch.rsqrt,
    "fmax": torch.fmax,
    "fmin": torch.fmin,
}

TWINS: dict[str, Callable[..., Any]] = {
    **{name: _elementwise(function) for name, function in _POINTWISE.items()},
    "again": lambda x: x,
    "fma": fma,
    "to_int": to_int,
    "to_bf16": to_bf16,
    "from_bf16": from_bf16,
    "to_e4m3": _to_fp8(torch.float8_e4m3fn),
    "to_e4m3_nan": _to_fp8(torch.float8_e4m3fn),
    "to_e5m2": _to_fp8(torch.float8_e5m2),
    "from_e4m3": _from_fp8(torch.float8_e4m3fn),
    "from_e5m2": _from_fp8(torch.float8_e5m2),
    "sum": _reduce(lambda x, axis: x.sum(axis, dtype=x.dtype)),
    "prod": _reduce(lambda x, axis: x.prod(axis, dtype=x.dtype)),
    "amax": _reduce(torch.amax),
    "amin": _reduce(torch.amin),
    "any": _reduce(torch.any),
    "all": _reduce(torch.all),
    "argmax": _arg_reduce(np.max),
    "argmin": _arg_reduce(np.min),
    "cumsum": _scan(lambda x, axis: x.cumsum(axis, dtype=x.dtype)),
    "cumprod": _scan(lambda x, axis: x.cumprod(axis, dtype=x.dtype)),
    "logcumsumexp": _scan(torch.logcumsumexp),
    "logaddexp_reduce": _reduce(torch.logsumexp),
    "cummax": _scan_place(torch.cummax, False),
    "cummin": _scan_place(torch.cummin, False),
    "cummax_whole": _scan_place(torch.cummax, True),
    "cummin_whole": _scan_place(torch.cummin, True),
    "check_index": check_index,
    "check_probability": check_probability,
    "atomic_add": atomic_add,
    "philox": philox,
    "interleave4": interleave4,
}
