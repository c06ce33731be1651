"""The device functions that are no rows of pointwise ops: casts and storage types, reductions, random numbers, index
checks.
"""

from __future__ import annotations

import math

import pytest
import torch
from test_op_table import ALL, evaluate, source_of, values

from fusejit.codegen.ir.expr import load
from fusejit.codegen.ir.reductions import REDUCTIONS
from fusejit.codegen.ops.table import DTYPES, OPS, STORAGE, lower_pointwise
from fusejit.runtime.compile_workers import KernelSpec, compile_kernels
from fusejit.runtime.launch import kernel

STORED = (*ALL, torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.parametrize("source", STORED, ids=str)
def test_casts(source):
    """Every storage type to every other, as torch converts on a CPU."""
    if source.is_floating_point:
        numbers = torch.cat(
            [
                values(torch.float32),
                torch.tensor([448.0, 460.0, 464.0, 57344.0, 61000.0, 65504.0, 65520.0, 1.0 + 2**-8, 3e-5, 1e-8, -1.5]),
            ]
        )
        numbers = numbers.to(source)
    else:
        numbers = values(source)
    for target in STORED:
        x = numbers
        if target in DTYPES["int"] and source.is_floating_point:
            x = x[x.float().isfinite() & (x.float().abs() < 2**31)]  # undefined outside the range
            x = x.abs() if target is torch.uint8 else x
        ours, eager = (
            evaluate(
                lower_pointwise("_to_copy.default", target, [load("x0", None, source)], {"dtype": target}), {"x0": x}
            ),
            x.to(target),
        )
        assert torch.equal(ours.double().nan_to_num(7.25), eager.double().nan_to_num(7.25)), (
            source,
            target,
            ours,
            eager,
        )
        assert torch.equal(ours.double().isnan(), eager.double().isnan()), (source, target)


def reduce_with(name, x, out_dtype, looped):
    """Reduce the rows of a 2-D tensor by one reduction row, whole or in pieces of 8 columns through its combine."""
    rows, columns = x.shape
    storage, arg = STORAGE[x.dtype], name.startswith("arg")
    first = REDUCTIONS[name].identity(x.dtype)
    start = f"float('{first}')" if x.dtype.is_floating_point else repr(first)
    piece = 8 if looped else columns
    step = (
        f"acc, at = fj.{name}_combine(acc, at, v, tl.broadcast_to(c[None, :], [R, C]))"
        if arg
        else f"acc = fj.{name}_combine(acc, v)"
    )
    final = f"fj.{name}(acc, at, 1)" if arg else f"fj.{name}(acc, 1)"
    source = f"""@triton.jit
def k(x, o, R: tl.constexpr, C: tl.constexpr, N: tl.constexpr):
    r = tl.arange(0, R)
    acc = tl.full([R, C], {start}, {storage.compute})
    at = tl.full([R, C], {2**31 - 1}, tl.int32)
    for start in range(0, N, C):
        c = start + tl.arange(0, C)
        v = {storage.load.format("tl.load(x + r[:, None] * N + c[None, :])")}
        {step}
    t = {final}
    tl.store(o + r, {"t.to(tl.int64)" if arg else STORAGE[out_dtype].store.format("t")})
"""
    out = torch.empty(rows, dtype=out_dtype)
    spec = {
        "name": "k",
        "params": [storage.pointer, STORAGE[out_dtype].pointer],
        "constants": {"R": rows, "C": piece, "N": columns},
    }
    kernel(source, **spec)(x, out)
    return out, KernelSpec(source, "k", tuple(spec["params"]), tuple(spec["constants"].items()))


def reduction_input(name, dtype):
    generator = torch.Generator().manual_seed(3)
    if dtype is torch.bool or name in ("any", "all"):
        return torch.rand(8, 32, generator=generator) > (0.05 if name == "all" else 0.95)
    x = torch.randint(0, 5, (8, 32), generator=generator).to(dtype)
    if dtype.is_floating_point:
        x[0] = torch.rand(32, generator=generator).to(dtype)
        if name not in ("sum", "prod"):
            x[1, 5] = x[1, 9] = math.nan
            x[2] = -math.inf
            x[3] = math.inf
            x[4, 3] = -0.0
    return x


EAGER = {
    "sum": lambda x: x.sum(1, dtype=x.dtype),
    "prod": lambda x: x.prod(1, dtype=x.dtype),
    "argmax": None,
    "argmin": None,
}


@pytest.mark.parametrize("name", [row.name for row in REDUCTIONS.values() if row.along])
@pytest.mark.parametrize("looped", [False, True])
def test_reductions(name, looped):
    """Whole and looped, with NaN, infinities and ties."""
    import numpy as np

    for dtype in ALL:
        if not OPS[name].takes(dtype) or (name in ("any", "all") and dtype is not torch.bool):
            continue
        x = reduction_input(name, dtype)
        ours, _ = reduce_with(name, x, torch.int64 if name.startswith("arg") else dtype, looped)
        if name.startswith("arg"):
            wide = x.double().numpy()
            eager = torch.from_numpy(getattr(np, name)(wide, axis=1))  # the first of equals, NaN first
        else:
            eager = EAGER.get(name, lambda x: getattr(torch, name)(x, 1))(x)
        tolerance = {"rtol": 1e-2, "atol": 1e-2} if dtype in (torch.float16, torch.bfloat16) else {}
        torch.testing.assert_close(ours, eager, equal_nan=True, **tolerance)


def test_random_streams():
    """The same element of a stream has the same number however it is computed; the numbers are uniform and normal."""
    n = 4096
    source = """@triton.jit
def k(a, b, c, d, e, N: tl.constexpr):
    i = tl.arange(0, N)
    seed = tl.full((), 12345678901, tl.int64)
    at = i.to(tl.int64)
    counters = tl.arange(0, N // 4)
    tl.store(a + i, fj.rand(seed, at))
    tl.store(b + i, fj.rand_tile(seed, counters, 0))
    tl.store(c + i, fj.randn(seed, at))
    tl.store(d + i, fj.randn_tile(seed, counters, 0))
    tl.store(e + i, fj.random_bits(seed, at))
"""
    outs = [torch.empty(n) for _ in range(4)] + [torch.empty(n, dtype=torch.int64)]
    kernel(source, name="k", params=["*fp32"] * 4 + ["*i64"], constants={"N": n})(*outs)
    a, b, c, d, e = outs
    assert torch.equal(a, b)
    torch.testing.assert_close(c, d)
    assert float(a.min()) >= 0 and float(a.max()) < 1 and abs(float(a.mean()) - 0.5) < 0.02
    assert abs(float(c.mean())) < 0.05 and abs(float(c.std()) - 1) < 0.05
    assert a.unique().numel() > n - 5 and int(e.max()) < 2**32
    assert torch.equal((e >> 8).float() * 2.0**-24, a)
    # the counter-based generator that the compiled kernels call, on the same counters
    import triton.language as tl

    from fusejit.runtime.launch import interpreted

    assert interpreted() and hasattr(tl, "philox")
    reference = torch.empty(n, dtype=torch.int64)
    text = """@triton.jit
def k(o, N: tl.constexpr):
    i = tl.arange(0, N)
    low = (i // 4).to(tl.uint32)
    a, b, c, d = tl.philox(tl.full((), 12345678901, tl.int64), low, low * 0, low * 0, low * 0)
    lane = i % 4
    tl.store(o + i, tl.where(lane == 0, a, tl.where(lane == 1, b, tl.where(lane == 2, c, d))).to(tl.int64))
"""
    kernel(text, name="k", params=["*i64"], constants={"N": n})(reference)
    assert torch.equal(reference, e)


def test_index_checks():
    """An index out of bounds raises IndexError; masked lanes are not looked at; negative ones wrap."""
    source = """@triton.jit
def k(x, o, n: tl.constexpr, M: tl.constexpr):
    i = tl.arange(0, 8)
    at = fj.wrap(tl.load(x + i, mask=i < M, other=99), n)
    fj.check_index(at, n, i < M)
    tl.store(o + i, at, mask=i < M)
"""
    x, out = torch.tensor([0, -1, 4, -5, 2, 99, 0, 0]), torch.zeros(8, dtype=torch.int64)
    kernel(source, name="k", params=["*i64", "*i64"], constants={"n": 5, "M": 5})(x, out)
    assert out.tolist() == [0, 4, 4, 0, 2, 0, 0, 0]
    with pytest.raises(IndexError, match="index 99 is out of bounds for dimension with size 5"):
        kernel(source, name="k", params=["*i64", "*i64"], constants={"n": 5, "M": 6})(x, out)


def test_casts_compile_for_sm_90():
    specs = []
    for source in STORED:
        roots = [
            lower_pointwise("_to_copy.default", target, [load("x0", None, source)])
            for target in STORED
            if target is not source
        ]
        params = (STORAGE[source].pointer, *(STORAGE[r.dtype].pointer for r in roots))
        specs.append(KernelSpec(source_of(roots, ["x0"]), "k", params, (("N", 4096), ("B", 128))))
    text = source_of([load("x0", None, torch.float32)], ["x0"]).replace(
        "tl.store(o0 + i, t0", "tl.store(o0 + i, fj.to_e4m3_nan(t0)"
    )
    specs.append(KernelSpec(text, "k", ("*fp32", "*u8"), (("N", 4096), ("B", 128))))
    assert all(done.n_spills == 0 for done in compile_kernels(specs))


def test_reductions_compile_for_sm_90():
    specs = []
    for name, op in OPS.items():
        if op.reduces and REDUCTIONS[name].along:
            dtypes = (
                [torch.bool]
                if name in ("any", "all")
                else [d for d in (torch.float32, torch.int64, torch.bool) if op.takes(d)]
            )
            specs += [
                reduce_with(name, reduction_input(name, d), torch.int64 if name.startswith("arg") else d, looped)[1]
                for d in dtypes
                for looped in (0, 1)
            ]
    assert all(done.n_spills == 0 for done in compile_kernels(specs))
