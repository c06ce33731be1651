"""The seed's figure for select instead of if: 100 tensor `if`s, rewritten, against the same function through `torch.cond`; at least 3.08x.

Each round captures, compiles and runs once, from nothing; `test_run` times a call of the finished program. The branches of
`torch.cond` are captured by the same front end, because torch's own refuses them outside of torch.compile; the variant
"torch.compile" is that function through torch's compiler (backend "aot_eager", which needs no GPU).
"""

from __future__ import annotations

import pytest
import torch

import fusejit

STEPS = 100


def rewritten(x, y):
    out = x
    for _ in range(STEPS):
        if x.sum() < y.sum():
            x = x * 0.5 + y
        else:
            x = x * 0.5 - y
        out = out + x
    return out


def conditional(x, y):
    out = x
    for _ in range(STEPS):
        x = torch.cond(x.sum() < y.sum(), lambda x, y: x * 0.5 + y, lambda x, y: x * 0.5 - y, (x, y))
        out = out + x
    return out


VARIANTS = {
    "fusejit-select": lambda: fusejit.jit(lambda x, y: rewritten(x, y), fullgraph=True),
    "fusejit-cond": lambda: fusejit.jit(lambda x, y: conditional(x, y), fullgraph=True),
    "torch.compile-cond": lambda: torch.compile(conditional, backend="aot_eager", fullgraph=True),
    "eager": lambda: rewritten,
}


@pytest.fixture
def inputs(gpu):
    device = "cuda" if gpu else "cpu"
    return torch.randn(64, device=device), torch.randn(64, device=device)


@pytest.mark.parametrize("variant", VARIANTS)
def test_compile_and_run(variant, benchmark, origin, inputs):
    x, y = inputs
    torch.testing.assert_close(VARIANTS[variant]()(x, y), rewritten(x, y))

    def once():
        torch._dynamo.reset()
        with torch.no_grad():
            return VARIANTS[variant]()(x, y)

    benchmark.pedantic(once, rounds=1 if variant.startswith("torch") else 3)  # torch.compile takes most of a minute
    benchmark.extra_info.update(origin | {"case": "100 ifs", "variant": variant, "pass": "compile and run", "shape": list(x.shape)})


@pytest.mark.parametrize("variant", VARIANTS)
def test_run(variant, measure, inputs):
    x, y = inputs
    call = VARIANTS[variant]()
    with torch.no_grad():
        call(x, y)
        measure(lambda: call(x, y), case="100 ifs", variant=variant, shape=list(x.shape), **{"pass": "run"})
