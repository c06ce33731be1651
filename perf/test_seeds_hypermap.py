"""HyperMap AdamW over 200 parameters: launches, bytes and time against a Python loop over the same tensors.

With a GPU: device time of one step at the sizes of a 124M-parameter GPT-2, and torch's own fused AdamW. Without one the default backend
runs the captured graph through torch, so the host time is that of small tensors; launches and bytes come from the compiled program.
"""

from __future__ import annotations

import functools

import pytest
import torch

import fusejit
from fusejit import HyperMap, MultitypeFuncGraph

COUNT = 200
LAYER = [(768,), (768,), (768, 2304), (2304,), (768, 768), (768,), (768,), (768,), (768, 3072), (3072,), (3072, 768), (768,)]
REAL = ([(50257, 768), (1024, 768)] + LAYER * 17)[:COUNT]
SMALL = [tuple(n // 64 + 1 for n in shape) for shape in REAL]
VARIANTS = ("loop", "fusejit-O0", "fusejit-O2", "fusejit-O2-loop", "torch-fused", "copy")

adamw = MultitypeFuncGraph("adamw")


@adamw.register("Tensor", "Tensor", "Tensor", "Tensor", "Tensor", "Tensor")
def _(lr, step, p, g, m, v):
    p.mul_(1 - lr * 0.01)
    m.lerp_(g, 0.1)
    v.mul_(0.999).addcmul_(g, g, value=0.001)
    p.sub_(lr * (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8))


def mapped(params, grads, moments, squares, lr, step):
    HyperMap(functools.partial(adamw, lr, step))(params, grads, moments, squares)


def loop(params, grads, moments, squares, lr, step):
    for row in zip(params, grads, moments, squares, strict=True):
        adamw(lr, step, *row)


def arguments(shapes, device):
    lists = [[torch.rand(shape, device=device) for shape in shapes] for _ in range(4)]
    return (*lists, torch.tensor(1e-3, device=device), torch.tensor(3.0, device=device))


def fused_by_torch(params, grads, moments, squares, lr, step):
    steps = [step.clone() for _ in params]
    options = {"amsgrad": False, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8, "maximize": False}
    return lambda: torch._fused_adamw_(params, grads, moments, squares, [], steps, lr=1e-3, **options)


@pytest.fixture(scope="module")
def compiled(gpu):
    """The explained program and its largest error against the loop in float64, at the shapes that this machine runs."""
    backend, device = ("triton", "cuda") if gpu else ("interpret", "cpu")
    args = arguments(SMALL, device)
    exact = tuple([t.double() for t in a] if isinstance(a, list) else a.double() for a in args)
    fused = fusejit.jit(mapped, backend=backend, fullgraph=True)
    fused(*args)
    loop(*exact)
    error = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(args[0], exact[0], strict=True))
    return fused.explain(*(arguments(REAL, device) if gpu else args)), error


@pytest.mark.parametrize("variant", VARIANTS)
def test_hypermap_adamw(variant, measure, gpu, benchmark, compiled):
    if not gpu and variant in ("torch-fused", "copy"):
        pytest.skip("needs a GPU")
    report, error = compiled
    assert report.launches <= 4
    device, shapes = ("cuda", REAL) if gpu else ("cpu", SMALL)
    args = arguments(shapes, device)
    launches = {"loop": len(report.eager), "fusejit-O0": len(report.eager), "torch-fused": None, "copy": 1}.get(variant, report.launches)
    benchmark.group = f"adamw over {COUNT} tensors"
    if variant == "copy":
        source = torch.empty(report.bytes_minimum // 2, dtype=torch.int8, device=device)
        target = torch.empty_like(source)
        call = lambda: target.copy_(source)  # noqa: E731
    elif variant == "torch-fused":
        call = fused_by_torch(*args)
    else:
        fn = loop if variant in ("loop", "fusejit-O2-loop") else mapped
        run = fn if variant == "loop" else fusejit.jit(fn, jit_level=variant.split("-")[1], fullgraph=True)
        call = lambda: run(*args)  # noqa: E731
    fused = variant.startswith("fusejit-O2")
    measure(
        call, case="hypermap_adamw", dtype="float32", shape=[COUNT], variant=variant, launches=launches, bytes_minimum=report.bytes_minimum,
        bytes_moved=report.bytes_fused if fused else None, error=error if fused else None,
        compile_ms={k: round(ms) for k, ms in report.compile_ms.items()} if fused else None, **{"pass": "forward"},
    )  # fmt: skip
