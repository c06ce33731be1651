"""Acceptance cases 19 to 41 (25 belongs to dynamic shapes), under the numbers they are known by.

Kernel counts are upper bounds. Each case runs fused and compares with eager; what speaks of kernels asks `explain()`.
"""

from __future__ import annotations

import functools
import operator
import time

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

import fusejit

INPUTS = 4  # bytes of a float32


@pytest.fixture
def check(fuse):
    """`check(f, *args)` compares fused with eager and returns the report; with `grad`, it compares the gradients
    too.
    """

    def run(f, *args, grad=False, **tolerance):
        fused = fuse(f)
        got, wanted = fused(*args), f(*args)
        assert_close(got, wanted, equal_nan=True, **tolerance)
        if grad:
            leaves = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
            outputs = got if isinstance(got, tuple) else (got,)
            expected = wanted if isinstance(wanted, tuple) else (wanted,)
            tangents = [torch.randn_like(o) for o in expected]
            assert_close(
                torch.autograd.grad(outputs, leaves, tangents),
                torch.autograd.grad(expected, leaves, tangents),
                equal_nan=True,
                **tolerance,
            )
        return fused.explain(*args)

    return run


def test_case_19(check, device):
    a, b, c, d = (torch.randn(s, device=device) for s in ((3, 3), (3, 1), (1, 1), (3, 1)))
    assert check(lambda a, b, c, d: a * b + c * a + d + d + d, a, b, c, d).launches <= 2


def test_case_20(check, device):
    def total(*inputs):
        return functools.reduce(operator.add, inputs)

    check(total, *(torch.randn(4, 5, device=device) for _ in range(120)))


def test_case_21(check, device):
    x = torch.randn(6, 7, device=device)
    report = check(lambda x: (x**2 + 1) / (torch.sin(x) + 1.2) * 0.3, x)
    assert report.launches == 1
    assert report.kernels[0].bytes_read == x.numel() * INPUTS


def test_case_22(check, device):
    def f(y):
        for _ in range(32):
            y = y * y + y
        return y

    start = time.perf_counter()
    report = check(f, -torch.rand(8, 8, device=device))
    assert report.launches == 1
    assert len(report.kernels[0].source) < 20_000
    assert time.perf_counter() - start < 30


def test_case_23(check, device):
    def f(a, b, c):
        return torch.sin(a + 1), torch.cos(b + 1), torch.sin(c + 1)

    report = check(f, *(torch.randn(33, device=device) for _ in range(3)))
    assert len({kernel.source for kernel in report.kernels}) <= 2


def test_case_24(fuse, device):
    def f(x, w):
        return (x * w).softmax(-1).sum(0), x.exp()

    x, w = torch.randn(6, 20, device=device), torch.randn(20, device=device)
    sources = set()
    for _ in range(4):
        sources.add(tuple(kernel.source for kernel in fuse(lambda x, w: f(x, w)).explain(x, w).kernels))
    assert len(sources) == 1


def test_case_26(check, device):
    def f(x):
        y = x[:, 1:3]
        return torch.sin(y) * y

    x = torch.randn(5, 8, device=device)
    report = check(f, x)
    assert report.launches == 1 and not report.externs
    assert report.kernels[0].bytes_read == 5 * 2 * INPUTS


def _positive(f):
    return lambda *a: f(*(x.abs() + 0.1 for x in a))


def _within_one(f):
    return lambda *a: f(*(x.tanh() * 0.9 for x in a))


# The modes of the first system's code generator, each over its number of operands.
MODES = {
    1: {
        "relu": torch.relu,
        "abs": torch.abs,
        "acos": _within_one(torch.acos),
        "asin": _within_one(torch.asin),
        "ceil": torch.ceil,
        "cos": torch.cos,
        "exp": torch.exp,
        "expm1": torch.expm1,
        "floor": torch.floor,
        "log": _positive(torch.log),
        "log1p": _positive(torch.log1p),
        "negate": torch.neg,
        "sigmoid": torch.sigmoid,
        "sin": torch.sin,
        "tanh": torch.tanh,
        "fast_tanh": lambda x: x * (27 + x * x) / (27 + 9 * x * x),
        "round": torch.round,
        "erf": torch.erf,
        "erfc": torch.erfc,
        "erfinv": _within_one(torch.erfinv),
        "h_swish": F.hardswish,
        "silu": F.silu,
        "gelu": F.gelu,
    },
    2: {
        "add": torch.add,
        "sub": torch.sub,
        "mul": torch.mul,
        "true_div": lambda a, b: a / (b.abs() + 1),
        "max": torch.maximum,
        "min": torch.minimum,
        "mod": lambda a, b: torch.fmod(a, b.abs() + 1),
        "floor_div": lambda a, b: torch.floor(a / (b.abs() + 1)),
        "pow": lambda a, b: (a.abs() + 0.5) ** b,
        "atan2": torch.atan2,
        "log_sum_exp": torch.logaddexp,
        "switch_gt0": lambda a, b: torch.where(a > 0, b, 0),
        "abs_grad": lambda a, b: a.sign() * b,
        "sigmoid_grad": lambda y, g: y * (1 - y) * g,
        "tanh_grad": lambda y, g: (1 - y * y) * g,
        "lt": lambda a, b: (a < b) * a,
        "leq": lambda a, b: (a <= b) * b,
        "eq": lambda a, b: (a == b) * a,
        "add_relu": lambda a, b: F.relu(a + b),
        "add_sigmoid": lambda a, b: torch.sigmoid(a + b),
        "add_tanh": lambda a, b: torch.tanh(a + b),
    },
    3: {"cond_leq_mov": lambda a, b, c: torch.where(a <= b, c, 0), "mul_add": lambda a, b, c: a * b + c},
}
SHAPES_27 = ((9, 12, 7), (9, 1, 7), (1, 12, 7), (9, 12, 1))
CASES_27 = [(name, arity) for arity, modes in MODES.items() for name in modes]


def test_case_27_has_45_modes():
    assert len(CASES_27) >= 45


@pytest.mark.parametrize(("name", "arity"), CASES_27, ids=[name for name, _ in CASES_27])
def test_case_27(check, device, name, arity):
    """Each mode over every pair of broadcasts at once, forward and gradient; the outputs are fused together."""
    mode = MODES[arity][name]

    def f(*tensors):
        return tuple(mode(*(tensors[(i + k) % len(tensors)] for k in range(arity))) for i in range(len(tensors)))

    tensors = [torch.randn(s, device=device, requires_grad=True) for s in SHAPES_27]
    check(f, *tensors, grad=True, rtol=1e-4, atol=1e-4)


def test_case_28(check, device):
    def f(half, single):
        return half.float() * 2, single.half() + half, (half + single.half()).float().half()

    half, single = (
        torch.randn(4, 7, 99, 1, device=device, dtype=t, requires_grad=True) for t in (torch.float16, torch.float32)
    )
    check(f, half, single, grad=True, rtol=2e-3, atol=2e-3)


REDUCTIONS = {
    "sum": torch.sum, "sumsq": lambda x, *d: torch.sum(x * x, *d),
    "max": torch.amax, "min": torch.amin, "prod": torch.prod, "mean": torch.mean,
}  # fmt: skip


@pytest.mark.parametrize("name", REDUCTIONS)
def test_case_29(check, device, name):
    reduce = REDUCTIONS[name]

    def f(x):
        return tuple(torch.sigmoid(reduce(x, *d)) * 2 + 1 for d in ((), (0,), (1,), (2,)))

    check(f, torch.randn(5, 6, 7, device=device, requires_grad=True), grad=True, rtol=1e-4, atol=1e-4)


def test_case_30(fuse, device):
    def f(x, weight, bias):
        mean = x.mean((0, 2, 3), keepdim=True)
        variance = (x - mean).square().mean((0, 2, 3), keepdim=True)
        return (x - mean) / (variance + 1e-5).sqrt() * weight + bias

    args = [torch.randn(s, device=device, requires_grad=True) for s in ((4, 3, 8, 8), (1, 3, 1, 1), (1, 3, 1, 1))]
    got, wanted = fuse(f)(*args), f(*args)
    assert_close(got, wanted, rtol=3e-5, atol=3e-5)
    tangent = torch.randn_like(wanted)
    assert_close(
        torch.autograd.grad(got, args, tangent), torch.autograd.grad(wanted, args, tangent), rtol=3e-4, atol=3e-4
    )


def test_case_31(check, device):
    x, weight = torch.randn(2, 3, 6, 6, device=device), torch.randn(4, 3, 3, 3, device=device)
    report = check(lambda x, w: F.conv2d(x, w).relu().permute(0, 2, 3, 1).half(), x, weight)
    assert report.launches == 1 and len(report.externs) == 1
    check(lambda x: x.relu().permute(0, 4, 2, 1, 3) + 1, torch.randn(2, 3, 2, 3, 2, device=device))
    check(lambda x: (x + 1).permute(1, 0), torch.randn(3, 4, device=device))


def test_case_32(check, device):
    a = torch.randn(6, 7, device=device, requires_grad=True)
    report = check(lambda a: torch.exp(a + 1), a, grad=True)
    assert report.launches == 2
    assert sum("exp(" in kernel.source or "exp2(" in kernel.source for kernel in report.kernels) == 1


def test_case_33(check, device):
    def f(a, b, c, d, e):
        return a + torch.maximum(b, c) + torch.maximum(d, e)

    shapes = ((23, 42), (1, 42), (23, 1), (23, 42), (1, 1))
    args = [torch.randn(s, device=device) for s in shapes]
    report = check(f, *args)
    assert report.launches == 1
    assert report.kernels[0].bytes_read == sum(a.numel() for a in args) * INPUTS
    on_cpu = [a.cpu() for a in args]
    assert_close(fusejit.jit(f)(*on_cpu), f(*on_cpu))


def test_case_34(check, device):
    report = check(lambda a, b: a + b, torch.empty(3, 0, 5, device=device), torch.empty(3, 1, 5, device=device))
    assert report.launches == 0


def test_case_35(check, device):
    x = torch.randn(3, 4, device=device, dtype=torch.complex64)
    report = check(lambda x: (x * x.conj() + 1).abs(), x)
    assert report.fallbacks or report.externs


def test_case_36(check, device):
    def f(x):
        wide = x.float()
        return wide.sum(0), wide.sum(1)

    check(f, torch.randn(9, 13, device=device, dtype=torch.float16))


def test_case_37(check, device):
    def f(x, z):
        scaled = x.expand(4, 4) / z
        return -x, scaled, scaled.sum(1)

    assert check(f, torch.randn(4, 1, device=device), torch.rand(4, 4, device=device) + 1).launches <= 2


def test_case_38(fuse, device):
    def step(parameters, moments, squares, grad, t):
        for p, m, v in zip(parameters, moments, squares, strict=True):
            m.mul_(0.9).add_(grad, alpha=0.1)
            v.mul_(0.999).addcmul_(grad, grad, value=0.001)
            p.sub_(0.01 * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8))

    def state():
        generator = torch.Generator().manual_seed(0)
        return [[torch.rand(4, 5, generator=generator).to(device) for _ in range(7)] for _ in range(3)]

    grad, mine, eager = torch.randn(4, 5, device=device), state(), state()
    fused = fuse(step)
    for t in (1, 2):
        fused(*mine, grad, t)
        step(*eager, grad, t)
    assert_close(mine, eager)


def test_case_39(check, device):
    def f(x):
        p1 = x
        p2 = p1
        return x + p1 + p2

    check(f, torch.tensor(3.0, device=device))


def test_case_40(check, device):
    check(lambda x: torch.sqrt((x**2).sum(-1)), torch.randn(32, 2, device=device, requires_grad=True), grad=True)


def test_case_41(check, device):
    x = torch.tensor([float("inf"), 0.0, -1.0, float("nan"), 5.0], device=device)
    check(lambda x: (x.amax(), x[:3].amax(), x[1:3].amax(0)), x)
    assert_close(fusejit.jit(lambda x: x.amax())(x.cpu()), x.cpu().amax(), equal_nan=True)
