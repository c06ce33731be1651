"""The graph that runs through torch's bindings dispatches what the captured graph dispatches: the same ops, numbers and
tensors.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from fusejit import jit
from fusejit.runtime.aten_bindings import Heard, direct
from fusejit.tools.blocks import BLOCKS

FUNCTIONS = {
    "arithmetic": lambda x: (x * 0.5 + x - 2) / (x.abs() + 1) ** 2,
    "numbers without dims": lambda x: x * x.sum() + x.pow(x.mean()) + torch.where(x > 0, x, 1.5),
    "views": lambda x: (
        x.reshape(-1).view(3, 8).transpose(0, 1)[1:, ::2].expand(2, 7, 2).flatten(1).unsqueeze(-1).permute(2, 0, 1)
    ),
    "in place": lambda x: x.clone().add_(1).mul_(x).clamp_(min=0.1).sqrt_(),
    "reductions": lambda x: (
        x.sum(0),
        x.sum((0, 1), keepdim=True),
        x.mean(-1),
        x.max(1).values,
        x.var(0),
        x.logsumexp(1),
        x.amax(),
    ),
    "sorting": lambda x: (x.sort(1).indices, x.topk(2).values, x.argmax(1), x.cumsum(0)),
    "casts": lambda x: (x.to(torch.float64), x.half().float(), x.long().bool(), x.to(torch.float32)),
    "networks": lambda x: (
        F.gelu(F.layer_norm(F.hardswish(x) @ x.t(), (4,))) + F.silu(F.softmax(x @ x.t(), -1)) + F.elu(x[:, :4])
    ),
    "joining": lambda x: (
        torch.cat([x, torch.stack([x[0], x[1]])], 0).split(2)[1] + torch.einsum("ij,kj->ik", x, x)[:2, :1]
    ),
    "factories": lambda x: (
        x + torch.ones(6) + torch.zeros_like(x) + torch.arange(6, dtype=x.dtype) + torch.full((6,), 2.0)
    ),
    "complex": lambda x: torch.fft.rfft(x).abs() + torch.complex(x, x)[:, :4].real,
    "indexing": lambda x: (
        x[torch.tensor([0, 2])].gather(1, torch.tensor([[1], [0]])).index_fill(0, torch.tensor([1]), 7.0)
    ),
    "random": lambda x: F.dropout(x, 0.5) + torch.rand_like(x) * torch.bernoulli(x.sigmoid()),
}


def dispatched(run, inputs):
    """What a graph dispatches, and its results, from one seed."""
    torch.manual_seed(3)
    with Heard() as mode:
        results = run(*inputs)
    return mode.lines, results


def agree(graph, inputs):
    plain, fast = (
        dispatched(type(module).forward.__get__(module), [t.clone() for t in inputs])
        for module in (graph, direct(graph))
    )
    assert plain[0] == fast[0] and plain[0]
    assert_close(fast[1], plain[1], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    x = torch.randn(4, 6)
    jitted = jit(FUNCTIONS[name], backend="eager", fullgraph=True)
    jitted(x)
    found = jitted.specialisation(x)
    agree(found.record["capture"], [x, *found.captured.lifted])


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks(name):
    block = BLOCKS[name]
    args = block.make(block.small)
    with torch.no_grad():
        found = jit(block.fn, backend="eager").specialisation(*args)
        tensors = [leaf for leaf in torch.utils._pytree.tree_leaves((args, {})) if isinstance(leaf, torch.Tensor)]
        agree(found.record["capture"], [t.detach() for t in tensors] + list(found.captured.lifted))


def code(f, *args):
    return direct(jit(f, backend="eager", fullgraph=True).specialisation(*args).record["capture"]).code


def test_what_is_called():
    x = torch.randn(4, 6)
    assert "torch.ops.aten" not in code(lambda x: F.gelu(x * 0.5 + x.sum(0)).reshape(-1), x)
    assert "torch.ops.aten" not in code(lambda x: x.clone().add_(1), x)


def test_what_a_binding_would_not_do_stays():
    """An overload that the binding never chooses, and ops that make tensors: their bindings obey `with
    torch.device(...)`.
    """
    x = torch.randn(4)
    assert "torch.ops.aten.mul.Scalar" in code(lambda x: torch.ops.aten.mul.Scalar(x, 2.0), x)
    for name, f in (("ones", lambda x: x + torch.ones(4)), ("rand_like", lambda x: torch.rand_like(x) + x)):
        assert f"torch.ops.aten.{name}" in code(f, x)
    graph = direct(jit(lambda x: x + torch.ones(4), backend="eager").specialisation(x).record["capture"])
    with torch.device("meta"):
        assert graph(x)[0].device.type == "cpu"


def test_gradients_autocast_and_vmap():
    def f(x, w):
        return F.gelu(x @ w).square().sum(-1)

    jitted = jit(f, backend="eager", fullgraph=True)
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    for context in (torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", torch.bfloat16, enabled=False)):
        with context:
            got, wanted = jitted(x, w), f(x, w)
        assert got.dtype is wanted.dtype
        assert_close(got, wanted, rtol=0, atol=0)
        one, other = (torch.autograd.grad(out.float().sum(), (x, w)) for out in (got, wanted))
        assert_close(one, other, rtol=0, atol=0)
    xs = torch.randn(2, 3, 4)
    assert_close(torch.func.vmap(jitted, (0, None))(xs, w.detach()), torch.stack([f(x, w.detach()) for x in xs]))
