"""Which merges are worth it: registers and times by the model, and what ptxas makes of the kernels that are left."""

from __future__ import annotations

import pytest
import torch
from test_codegen import fused, lowered

import fusejit
from fusejit.codegen.passes.fuse import fuse
from fusejit.codegen.schedule.device import machine
from fusejit.codegen.schedule.registers import at_once


def across(*xs):
    """A softmax over tensors instead of over an axis: every one is held until the last is read."""
    top = xs[0]
    for x in xs[1:]:
        top = torch.maximum(top, x)
    powers = [(x - top).exp() for x in xs]
    return tuple(p / sum(powers[1:], powers[0]) for p in powers)


def chain(*xs):
    total = xs[0]
    for x in xs[1:]:
        total = total + x
    return total


@pytest.mark.parametrize("count, most", [(2, 4), (12, 14), (19, 21)])
def test_values_at_once(count, most):
    """A sum of many needs two at a time, a softmax over them all of them."""
    xs = [torch.empty(64) for _ in range(count)]
    (cluster,) = fused(across, *xs)[0].steps
    assert count < at_once(cluster) <= most
    (cluster,) = fused(chain, *xs)[0].steps
    assert at_once(cluster) == 2


def test_what_would_spill_stays_apart():
    """23 tensors at once would take more registers than a thread has; what is left spills nothing, and explain() has
    the reason.
    """
    xs = [torch.empty(256, 1024) for _ in range(23)]
    program, refused = fuse(lowered(across, *xs), device=machine("sm_90"))
    assert len(program.steps) > 1 and any("would spill" in u.reason for u in refused)
    kernels = fusejit.compile_for(across, tuple(xs), target="sm_90").kernels
    assert len(kernels) == len(program.steps) and not any(k.n_spills for k in kernels)


def test_many_tensors_few_at_once_are_one_kernel():
    xs = [torch.empty(64) for _ in range(40)]
    assert len(fused(chain, *xs)[0].steps) == 1


def two_softmaxes(x, y, shift):
    return (x + shift).softmax(-1), (y + shift).softmax(-1)


def two_of_one(x, shift):
    return (x + shift).softmax(-1), (x * 2).softmax(-1)


@pytest.mark.parametrize("columns, kernels", [(1024, 1), (32_768, 2)])
def test_rows_that_would_leave_the_registers_stay_apart(columns, kernels):
    """Two rows that share a vector: one kernel while both fit in registers, two where each would have to be read
    twice.
    """
    x, y, shift = (torch.empty(n, dtype=torch.bfloat16) for n in ((2048, columns), (2048, columns), columns))
    program, refused = fuse(lowered(two_softmaxes, x, y, shift), device=machine("sm_90"))
    assert len(program.steps) == kernels
    assert kernels == 1 or any("one kernel takes" in u.reason for u in refused)


def test_a_read_saved_is_worth_a_second_pass_out_of_l2():
    x, shift = torch.empty(2048, 32_768, dtype=torch.bfloat16), torch.empty(32_768, dtype=torch.bfloat16)
    assert len(fuse(lowered(two_of_one, x, shift), device=machine("sm_90"))[0].steps) == 1


def scaled_together(x, y):
    """Neither scaled row can be written before both sums are known."""
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + y.square().mean(-1, keepdim=True))
    return x * scale, y * scale


def test_what_stood_between_may_have_joined():
    """Each sum feeds both results: a pair that could not merge at first does so when what stood between them is in one
    of the two.
    """
    x = torch.randn(16, 64)
    (cluster,) = fused(scaled_together, x, x.clone())[0].steps
    assert len(cluster.stores) == 2 and len(cluster.reads) == 2
    args = torch.randn(16, 64), torch.randn(16, 64)
    for got, want in zip(fusejit.jit(scaled_together, backend="interpret")(*args), scaled_together(*args), strict=True):
        torch.testing.assert_close(got, want)
