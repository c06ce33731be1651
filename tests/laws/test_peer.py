"""No more launches than torch.compile's, forward and backward, for the same function.

The parameters are arguments, as torch.compile lifts them. The numbers are what Inductor of torch 2.13.0 generates for
an H100 with its default options, all inputs and parameters requiring gradients. They count kernels it generates itself;
matmuls, convolutions and attention are calls on both sides.
"""

from __future__ import annotations

import pytest
import torch
from models import REAL, make

import fusejit

# block: (launches forward, launches backward) of torch.compile
PEER = {"llama": (5, 8), "gpt2": (4, 18), "convnext": (4, 14), "vit": (4, 21)}


def lifted(name):
    """(function, arguments): inputs, then parameters, all floating ones requiring gradients."""
    module, inputs = make(name, **REAL[name])
    names = list(dict(module.named_parameters()))

    def call(*flat):
        return torch.func.functional_call(module, dict(zip(names, flat[len(inputs) :])), flat[: len(inputs)])

    return call, [t.detach().requires_grad_() for t in (*inputs, *module.parameters())]


@pytest.mark.parametrize("name", PEER)
def test_launches_are_at_most_the_peers(name):
    call, args = lifted(name)
    report = fusejit.jit(call, backend="interpret", name=name).explain(*args)
    ours = (report.forward.launches, report.backward.launches)
    print(f"{name}: {ours[0]} + {ours[1]} launches, torch.compile {PEER[name][0]} + {PEER[name][1]}")
    assert not report.fallbacks
    assert ours[0] <= PEER[name][0] and ours[1] <= PEER[name][1], f"{ours} against {PEER[name]}\n{report}"
