"""Blocks of real models, forward and backward: kernels within 1e-4 of eager in float32, and the default backend equal to eager on a CPU."""

from __future__ import annotations

import pytest
import torch
from models import MODELS, make
from torch.testing import assert_close

import fusejit

pytestmark = pytest.mark.filterwarnings("ignore")


def results(call, module, inputs):
    """The output, the gradient of the first input and of every parameter, for one seeded gradient of the output."""
    out = call(*inputs)
    tangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    wanted = [inputs[0], *module.parameters()]
    return {"out": out.detach(), **dict(zip(["x", *dict(module.named_parameters())], torch.autograd.grad(out, wanted, tangent)))}


@pytest.mark.parametrize("name", MODELS)
def test_kernels_match_eager(name, fuse, device):
    module, inputs = make(name)
    module, inputs = module.to(device), tuple(t.detach().to(device).requires_grad_(t.requires_grad) for t in inputs)
    fused = fuse(module)
    got, wanted = results(fused, module, inputs), results(module, module, inputs)
    for key, value in wanted.items():
        assert_close(got[key], value, rtol=1e-4, atol=1e-4, msg=lambda text, key=key: f"{key}: {text}")
    report = fused.explain(*inputs)
    assert report.kernels and not report.fallbacks


@pytest.mark.parametrize("name", MODELS)
def test_default_backend_is_eager_on_a_cpu(name):
    module, inputs = make(name)
    got, wanted = results(fusejit.jit(module), module, inputs), results(module, module, inputs)
    assert_close(got, wanted, rtol=0, atol=0)
