"""Every block fused against unfused, and transformers' blocks under the default backend against eager.

With a GPU: device time of eager, fusejit-O0 (captured, not fused), fusejit-O2, torch.compile with --peer, and a copy of
the least bytes. Without one the default backend runs the captured graph through torch: host time at the small shapes,
which is what a CPU user pays.
"""

from __future__ import annotations

import pytest
import torch
from models import MODELS, REAL, make

import fusejit
from fusejit.tools.bench import PASSES, call_of, errors, tangents
from fusejit.tools.blocks import BLOCKS

CASES = [(name, pass_) for name, block in BLOCKS.items() for pass_ in PASSES if pass_ == "forward" or block.grad]
VARIANTS = ("eager", "fusejit-O0", "fusejit-O2", "torch.compile", "copy")
CPU_VARIANTS = ("eager", "fusejit-O2")


def variant_of(name, fn):
    if name == "torch.compile":
        torch._dynamo.reset()
        return torch.compile(fn)
    return fn if name == "eager" else fusejit.jit(fn, jit_level=name.removeprefix("fusejit-"))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("name", "pass_"), CASES)
def test_block(name, pass_, variant, measure, gpu, benchmark):
    if not gpu and variant not in CPU_VARIANTS:
        pytest.skip("needs a GPU")
    block, device = BLOCKS[name], "cuda" if gpu else "cpu"
    shape = block.real if gpu else block.small
    benchmark.group = f"{name} {pass_}"
    args = block.make(shape, device)
    with torch.set_grad_enabled(pass_ == "both"):
        report = fusejit.jit(block.fn, backend="triton" if gpu else "interpret").explain(*args)
    error = None
    if variant == "copy":
        source = torch.empty(max(report.bytes_minimum // 2, 1), dtype=torch.int8, device=device)
        target = torch.empty_like(source)
        call = lambda: target.copy_(source)  # noqa: E731
    else:
        given = [] if pass_ == "forward" else tangents(block.fn(*args))
        call = call_of(variant_of(variant, block.fn), args, pass_, given)
        if variant == "fusejit-O2":
            error = errors(block, pass_, backend="triton" if gpu else "interpret", device=device)[0]
    measure(
        call, case=name, dtype=str(block.dtype).removeprefix("torch."), shape=list(shape), variant=variant, error=error,
        bytes_minimum=report.bytes_minimum, **{"pass": pass_},
    )  # fmt: skip


@pytest.mark.parametrize("variant", CPU_VARIANTS)
@pytest.mark.parametrize("name", MODELS)
def test_model(name, variant, measure, gpu, benchmark):
    """Forward and backward of a block from transformers under the default backend: on a CPU at most 1.1 times
    eager's.
    """
    module, inputs = make(name, **REAL.get(name, {}))
    device = "cuda" if gpu else "cpu"
    module, inputs = module.to(device), [t.detach().to(device).requires_grad_(t.requires_grad) for t in inputs]
    call = module if variant == "eager" else fusejit.jit(module)
    tangent = torch.ones_like(module(*inputs))
    wanted = [inputs[0], *module.parameters()]
    benchmark.group = f"{name} both"
    measure(
        lambda: torch.autograd.grad(call(*inputs), wanted, tangent),
        rounds=15 if name in REAL else 300,
        case=name,
        dtype="float32",
        shape=list(inputs[0].shape),
        variant=variant,
        **{"pass": "both"},
    )
