"""A value has one rounding: what compares a half-type value sees the bits that everybody else sees, saved, recomputed
or returned.

The law: a jitted function returns y and what it decided on y; eager, asked about the very y that was returned, decides
the same. And the gradient of a maximum goes to the elements that equal the maximum, all of it.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

STEPS = {
    "exp": torch.exp,
    "gelu": F.gelu,
    "softmax": lambda x: x.softmax(-1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "affine": lambda x: x * 1.7 + 0.3,
    "tanh": lambda x: (x * 3).tanh(),
    "centred": lambda x: x - x.mean(-1, keepdim=True),
    "abs": lambda x: x.abs() * 0.37,
    "view": lambda x: (x.t().contiguous() * 1.1).t(),
    "relu": lambda x: (x * 1.3 - 0.2).relu(),
    "wide": lambda x: (x.float().sin() * 1.37).to(x.dtype),
    "gate": lambda x: x.sigmoid() * x,
}
DECISIONS = {
    "equal": lambda y: (y == y.amax(-1, keepdim=True)).sum(-1),
    "least": lambda y: (y == y.amin()).sum(),
    "above": lambda y: y > 0.3,
    "at most": lambda y: y.abs() <= y.mean(-1, keepdim=True).abs(),
    "argmax": lambda y: y.argmax(-1),
    "argmin": lambda y: y.argmin(0),
    "places": lambda y: y.max(0).indices,
    "round": lambda y: y.round(),
    "floor": lambda y: y.floor() - y.ceil() + y.trunc(),
    "sign": lambda y: y.sign(),
    "int": lambda y: (y.to(torch.int32), y.bool()),
    "where": lambda y: torch.where(y == y.amax(), 1, 2),
    "sorted": lambda y: y.sort(dim=-1, stable=True).indices,
    "sorted values": lambda y: y.sort(-1).values == y,
    "running": lambda y: y.cummax(-1).values == y,
    "neighbours": lambda y: y[:, 1:] >= y[:, :-1],
    "finite": lambda y: (y * 1.0).isfinite().all(),
}
HALVES = (torch.bfloat16, torch.float16)


def chain(names: tuple[str, ...], autocast: torch.dtype | None, weight: torch.Tensor):
    """The steps in turn; under autocast after a product in the half type, so that float32 and halves mix."""

    def y_of(x):
        if autocast is not None:
            with torch.autocast("cpu", autocast):
                x = F.linear(x, weight)
                return run(x)
        return run(x)

    def run(x):
        for name in names:
            x = STEPS[name](x)
        return x

    return y_of


def operands(dtype: torch.dtype, mixed: bool, shape: tuple[int, int], seed: int):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    weight = torch.randn(shape[1], shape[1], generator=generator) / shape[1] ** 0.5
    return (x, weight, dtype) if mixed else (x.to(dtype), weight, None)


programs = given(
    names=st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=4).map(tuple),
    dtype=st.sampled_from(HALVES),
    mixed=st.booleans(),
    shape=st.sampled_from([(8, 64), (5, 37), (64, 8)]),
    seed=st.integers(0, 99),
    which=st.lists(st.sampled_from(sorted(DECISIONS)), min_size=1, max_size=3, unique=True),
    returned=st.booleans(),
)
quick = settings(
    max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), phases=[Phase.generate]
)


@programs
@quick
def test_decisions_are_those_of_the_returned_value(fuse, names, dtype, mixed, shape, seed, which, returned):
    x, weight, autocast = operands(dtype, mixed, shape, seed)
    y_of = chain(names, autocast, weight)
    decided = lambda y: [DECISIONS[name](y) for name in which]  # noqa: E731
    y, results = fuse(lambda x: (lambda y: (y, decided(y)))(y_of(x)), fullgraph=True)(x)
    for name, one, other in zip(which, results, decided(y), strict=True):
        torch.testing.assert_close(
            one, other, rtol=0, atol=0, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
        )
    if not returned:  # what nobody keeps decides the same
        alone = fuse(lambda x: decided(y_of(x)), fullgraph=True)(x)
        torch.testing.assert_close(alone, results, rtol=0, atol=0, equal_nan=True)


MAXIMA = {
    "amax": lambda y: y.amax(-1),
    "amin": lambda y: y.amin(-1),
    "max": lambda y: torch.stack([row.max() for row in y]),
    "values": lambda y: y.max(-1).values,
    "norm": lambda y: torch.linalg.vector_norm(y, float("inf"), -1),
}


@programs
@settings(quick, max_examples=10)
def test_the_gradient_of_a_maximum_goes_to_what_equals_it(fuse, names, dtype, mixed, shape, seed, which, returned):
    x, weight, autocast = operands(dtype, mixed, (4, shape[1]), seed)
    y_of, kind = chain(names, autocast, weight), sorted(MAXIMA)[seed % len(MAXIMA)]

    def fn(x, more):
        y = y_of(x) + more
        return (MAXIMA[kind](y), y) if returned else MAXIMA[kind](y)

    x, more = x.clone().requires_grad_(), torch.zeros_like(x, dtype=y_of(x).dtype).requires_grad_()
    out = fuse(fn, fullgraph=True)(x, more)
    m, y = out if returned else (out, None)
    m.backward(torch.ones_like(m))
    assert not x.grad.isnan().any() and not more.grad.isnan().any()
    total = more.grad.double().abs().sum(-1)
    zero = m.detach() == 0  # the norm has no slope there
    torch.testing.assert_close(torch.where(zero, 1.0, total), torch.ones_like(total), rtol=0.02, atol=0.0)
    if returned and kind != "norm" and kind != "values":
        assert torch.equal(more.grad != 0, y.detach() == m.detach()[:, None])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    ("name", "kind"), [("layer_norm", "amax"), ("exp", "amin"), ("gelu", "max"), ("softmax", "norm")]
)
def test_no_nan_where_eager_has_none(fuse, name, kind, dtype):
    fn = lambda x: MAXIMA[kind](STEPS[name](x))  # noqa: E731
    x = torch.randn(8, 64).to(dtype).requires_grad_()
    out = fuse(fn, fullgraph=True)(x)
    out.sum().backward()
    assert not x.grad.isnan().any() and x.grad.any()


def test_a_maximum_that_only_shifts_is_no_comparison(sm_90):
    x = torch.empty(512, 1024, dtype=torch.bfloat16)
    for fn in (lambda x: x.mul(2).exp().softmax(-1), lambda x: x.mul(2).exp().logsumexp(-1)):
        assert not any("fj.from_bf16(fj.to_bf16(" in kernel.source for kernel in sm_90(fn, (x,)).kernels)
    compared = sm_90(lambda x: x.mul(2).exp().gt(0.3), (x,)).kernels
    assert any("fj.from_bf16(fj.to_bf16(" in kernel.source for kernel in compared)
