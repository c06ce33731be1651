"""Blocks that are captured once, in a model whose sizes vary: one graph for all blocks and for all sizes."""

from __future__ import annotations

import pytest
import torch

import fusejit
import fusejit.runtime.multiversion
from fusejit import jit, lazy_inline


class Block(torch.nn.Module):
    """A gated product, mixed along the sequence by the sequence's own weights."""

    def __init__(self, width=16):
        super().__init__()
        self.norm, self.gate = torch.nn.LayerNorm(width), torch.nn.Linear(width, 2 * width)

    def forward(self, x):
        batch, length, width = x.shape
        gate, value = self.gate(self.norm(x)).view(batch * length, 2, width).unbind(1)
        mixed = (torch.nn.functional.silu(gate) * value).view(batch, length, width)
        return x + torch.softmax(mixed * length**-0.5, 1) * mixed.cumsum(1)


class Stack(torch.nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.blocks = torch.nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x * 2


def check(jitted, model, *args, rtol=1e-4, atol=1e-5):
    """Compare results and gradients with eager."""
    given = [a.detach().requires_grad_() for a in args]
    inputs = [*given, *model.parameters()]
    found = []
    for run in (jitted, model):
        y = run(*given)
        found.append([y, *torch.autograd.grad(y, inputs, torch.ones_like(y), allow_unused=True)])
    torch.testing.assert_close(*found, rtol=rtol, atol=atol)


@pytest.mark.full
@pytest.mark.parametrize("backend", ["eager", "interpret"])
def test_equal_blocks_are_captured_once_for_all_sizes(backend):
    model = Stack(*(Block() for _ in range(3)))
    jitted = jit(model, backend=backend, dynamic=True)
    sizes = [(2, 5), (3, 9), (2, 40)] if backend == "interpret" else [(2, 5), (3, 9), (1, 7), (2, 1), (0, 3)]
    for batch, length in sizes:
        check(jitted, model, torch.randn(batch, length, 16))
    x = torch.randn(2, 5, 16, requires_grad=True)
    report = jitted.explain(x)
    assert [(region.name, region.calls) for region in report.regions] == [("Block_0", 3)]
    assert jitted.cache_info().fallbacks == 0 and not any("all sizes are numbers" in line for line in report.dynamic)
    if backend == "interpret":
        forward = jitted.specialisation(x).forward
        assert len({id(step.program) for step in forward.calls}) == 1 and len(forward.calls) == 3
        assert "s0 = " in forward.source and forward.source.count("def Block_0_forward(") == 1
    with torch.no_grad():
        torch.testing.assert_close(jitted(x), model(x))


class Pair(torch.nn.Module):
    """Takes tensors whose sizes vary apart."""

    @lazy_inline
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(6))

    def forward(self, a, b):
        return (a * self.weight).sum(0) * b.shape[0] + torch.relu(b * a.shape[0]).mean(0) - b.shape[0] * a.shape[0]


def test_blocks_whose_arguments_change_places(backend="interpret"):
    class Both(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.three = Pair(), Pair(), Pair()

        def forward(self, a, b):
            return self.one(a, b) + self.two(b, a) * 2 + self.three(a, b) * 3

    model = Both()
    jitted = jit(model, backend=backend, dynamic=True)
    for n, m in ((4, 7), (7, 4), (5, 5), (3, 50), (1, 2), (50, 3)):
        check(jitted, model, torch.randn(n, 6), torch.randn(m, 6))


def test_a_size_that_a_block_gets_another_way_keeps_it_in_place(backend="interpret"):
    class Holder:
        size = 0

    holder = Holder()

    class Scale(torch.nn.Module):
        @lazy_inline
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(6))

        def forward(self, x):
            return torch.sigmoid(x * self.weight) * holder.size

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList(Scale() for _ in range(4))

        def forward(self, x, y):
            for number, block in enumerate(self.blocks):
                holder.size = (x, y)[number % 2].shape[0]
                x = block(x)
            return x

    model = Model()
    jitted = jit(model, backend=backend, dynamic=True)
    for n, m in ((4, 7), (3, 9), (8, 2)):
        check(jitted, model, torch.randn(n, 6), torch.randn(m, 6))


class Rows(torch.nn.Module):
    @lazy_inline
    def __init__(self, results=1):
        super().__init__()
        self.weight, self.results = torch.nn.Parameter(torch.randn(())), results

    def forward(self, x):
        y = torch.softmax(x * self.weight, -1) + x
        return y if self.results == 1 else (y, y.amax(-1, keepdim=True))


def test_assumptions_of_a_block_are_those_of_the_whole(monkeypatch):
    """A row too long for registers has a variant of the whole, and what has none runs op by op."""
    model = Stack(Rows(), Rows(), Rows())
    jitted = jit(model, backend="interpret", dynamic=True)
    for n in (40, 33000, 7):
        check(jitted, model, torch.randn(2, n))
    variants = jitted.specialisation(torch.randn(2, 7, requires_grad=True)).built.forward
    assert len(variants.programs) == 2 and all(len(program.calls) == 3 for _, program in variants.programs)
    assert "< s1" in variants.programs[1][0] and "< s1" not in variants.programs[0][0]
    monkeypatch.setattr(fusejit.runtime.multiversion, "MOST", 1)
    model = Stack(Rows(), Rows(), Rows())
    other = jit(model, backend="interpret", dynamic=True)
    for n in (40, 33000, 7):
        check(other, model, torch.randn(2, n))
    assert "other sizes run op by op" in str(other.explain(torch.randn(2, 7, requires_grad=True)))


def test_blocks_of_several_results_stay_in_place():
    class Model(Stack):
        def forward(self, x):
            for block in self.blocks:
                x, top = block(x)
            return x + top

    model = Model(Rows(2), Rows(2), Rows(2))
    jitted = jit(model, backend="interpret", dynamic=True)
    for n in (5, 9, 2):
        check(jitted, model, torch.randn(3, n))
    assert "some of its results may have no gradient" in str(jitted.explain(torch.randn(3, 5, requires_grad=True)))
    assert not any("all sizes are numbers" in line for line in jitted.specialisation(torch.randn(3, 5)).dynamic)


def test_random_numbers_of_each_block_and_call_are_new():
    class Dropped(torch.nn.Module):
        @lazy_inline
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(8))

        def forward(self, x):
            return torch.nn.functional.dropout(x * self.weight, 0.5) * 0.5 + x * 0

    class Model(Stack):
        def forward(self, x):
            return torch.stack([block(x) for block in self.blocks])

    jitted = jit(Model(Dropped(), Dropped(), Dropped()), backend="interpret", dynamic=True)
    for n in (40, 64):
        x = torch.ones(n, 8, requires_grad=True)
        y, again = jitted(x), jitted(x)
        assert set(y.unique().tolist()) == {0.0, 1.0} and not torch.equal(y, again)
        assert not torch.equal(y[0], y[1]) and not torch.equal(y[1], y[2])
        (grad,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(grad, y.sum(0).detach())  # the backward drops what the forward dropped
    assert [region.calls for region in jitted.explain(x).regions] == [3]
