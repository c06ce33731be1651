"""`torch.utils.checkpoint` inside a jitted function: what it does not keep, a Program does not keep."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import fusejit

PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


class Block(nn.Module):
    def __init__(self, width: int = 32, drop: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(drop)

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        made = torch.tanh(self.down(self.drop(nn.functional.gelu(self.up(x)))))
        return made if shift is None else made + shift


def blocks(count: int = 3, drop: float = 0.0) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList([Block(drop=drop) for _ in range(count)])


def selected(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


KINDS: dict[str, Callable] = {
    "reentrant": lambda block, x: checkpoint(block, x, use_reentrant=True),
    "plain": lambda block, x: checkpoint(block, x, use_reentrant=False),
    "keywords": lambda block, x: checkpoint(block, x, shift=x, use_reentrant=False),
    "nested": lambda block, x: checkpoint(
        lambda y: checkpoint(block, y, use_reentrant=False) * 2, x, use_reentrant=False
    ),
    "selective": lambda block, x: checkpoint(
        block, x, use_reentrant=False, context_fn=functools.partial(create_selective_checkpoint_contexts, selected)
    ),
    "listed": lambda block, x: checkpoint(
        block,
        x,
        use_reentrant=False,
        context_fn=functools.partial(create_selective_checkpoint_contexts, list(PRODUCTS)),
    ),
}


def model(kind: str, drop: float = 0.0) -> tuple[nn.ModuleList, Callable[[Tensor], Tensor]]:
    parts, call = blocks(drop=drop), KINDS[kind]

    def loss(x: Tensor) -> Tensor:
        for block in parts:
            x = call(block, x)
        return x.sum()

    return parts, loss


def kept(fn: Callable[[Tensor], Tensor], x: Tensor, parts: nn.Module) -> tuple[int, Tensor]:
    """The bytes that a call keeps for its backward, parameters and the argument aside."""
    own = {value.untyped_storage()._cdata for value in (x, *parts.parameters())}
    found: dict[int, Tensor] = {}

    def pack(value: Tensor) -> Tensor:
        if value.untyped_storage()._cdata not in own:
            found[value.untyped_storage()._cdata] = value
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        made = fn(x)
    return sum(value.untyped_storage().nbytes() for value in found.values()), made


@pytest.mark.parametrize("mode", ["ast", "trace", "bytecode"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept(kind: str, mode: str) -> None:
    parts, loss = model(kind)
    x, y = [torch.linspace(-1, 1, 64 * 32).reshape(64, 32).requires_grad_() for _ in range(2)]
    most, wanted = kept(loss, x, parts)
    wanted.backward()
    gradients = [value.grad.clone() for value in (x, *parts.parameters())]
    parts.zero_grad()
    jitted = fusejit.jit(loss, backend="interpret", capture_mode=mode, fullgraph=True)
    jitted(y)
    count, made = kept(jitted, y, parts)
    made.backward()
    torch.testing.assert_close(made, wanted)
    torch.testing.assert_close([value.grad for value in (y, *parts.parameters())], gradients)
    products = 3 * 64 * 5 * 32 * 4  # what both products of three blocks return
    assert count <= most + (products if kind in ("selective", "listed") else 0)
    assert not jitted.explain(y).fallbacks


def test_a_policy_is_asked() -> None:
    counts = {}
    for kind in ("plain", "selective"):
        parts, loss = model(kind)
        x = torch.ones(64, 32, requires_grad=True)
        jitted = fusejit.jit(loss, backend="interpret")
        jitted(x)
        counts[kind] = kept(jitted, x, parts)[0]
    assert counts["selective"] == counts["plain"] + 3 * 64 * 5 * 32 * 4 or counts["selective"] > counts["plain"]


@pytest.mark.parametrize("drop", [0.5])
def test_random_numbers_are_the_same_when_computed_again(drop: float) -> None:
    parts, loss = model("plain", drop)
    x = torch.ones(64, 32, requires_grad=True)
    jitted = fusejit.jit(lambda x: loss(x) * 1, backend="interpret")
    torch.manual_seed(1)
    jitted(x).backward()
    step = 1e-2 * x.grad.sign()
    with torch.no_grad():
        change = []
        for value in (x + step, x - step):
            torch.manual_seed(1)
            change.append(jitted(value).item())
    assert (change[0] - change[1]) / 2 == pytest.approx((x.grad * step).sum().item(), rel=0.05)


def test_a_block_that_checkpoints_itself() -> None:
    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + checkpoint(super().forward, x, use_reentrant=False)

    torch.manual_seed(0)
    parts = nn.Sequential(*[Own() for _ in range(6)])
    x, y = [torch.ones(64, 32, requires_grad=True) for _ in range(2)]
    most, wanted = kept(lambda x: parts(x).sum(), x, parts)
    wanted.backward()
    jitted = fusejit.jit(lambda x: parts(x).sum(), backend="interpret", fullgraph=True)
    jitted(y)
    count, made = kept(jitted, y, parts)
    made.backward()
    torch.testing.assert_close(y.grad, x.grad)
    assert count <= most


def test_sequential() -> None:
    torch.manual_seed(0)
    parts = nn.Sequential(*[Block() for _ in range(4)])
    fn = lambda x: checkpoint_sequential(parts, 2, x, use_reentrant=False).sum()  # noqa: E731
    x, y = [torch.ones(64, 32, requires_grad=True) for _ in range(2)]
    most, wanted = kept(fn, x, parts)
    wanted.backward()
    jitted = fusejit.jit(fn, backend="interpret", fullgraph=True)
    jitted(y)
    count, made = kept(jitted, y, parts)
    made.backward()
    torch.testing.assert_close(y.grad, x.grad)
    assert count <= most


def test_contexts_of_another_kind_fall_back() -> None:
    import contextlib

    block = Block()
    fn = lambda x: checkpoint(  # noqa: E731
        block, x, use_reentrant=False, context_fn=lambda: (contextlib.nullcontext(), contextlib.nullcontext())
    ).sum()
    jitted = fusejit.jit(fn, backend="interpret", capture_mode="trace")
    x, y = [torch.ones(4, 32, requires_grad=True) for _ in range(2)]
    jitted(x).backward()
    fn(y).backward()
    torch.testing.assert_close(x.grad, y.grad)
    assert "contexts of its own" in str(jitted.explain(x).fallbacks[0])


def test_a_reentrant_one_without_moving_arguments_gives_no_gradient() -> None:
    block = Block()
    fn = lambda x: checkpoint(block, x, use_reentrant=True)  # noqa: E731
    jitted = fusejit.jit(fn, backend="interpret")
    with pytest.warns(UserWarning, match="None of the inputs have requires_grad"):
        assert not fn(torch.ones(4, 32)).requires_grad
    assert not jitted(torch.ones(4, 32)).requires_grad
