"""Seams: at O3 the last ops of a block and the first of the next are one kernel, and the numbers stay eager's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusejit
from fusejit.autodiff.move_across_regions import join_seams
from fusejit.capture.regions.detect import Regions
from fusejit.capture.regions.extract import Region
from fusejit.capture.tracer import capture
from fusejit.codegen.ops import decompositions
from fusejit.codegen.schedule.device import machine

WIDTH = 16


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def mlp(self, h: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(h)))


class Before(Base):
    """Norms before: the residual addition and the next block's norm meet at the seam."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.first(x)).tanh()
        return x + self.mlp(self.second(x))


class After(Base):
    """Norms behind: the next block begins with a product, nothing meets."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x + self.mix(x).tanh())
        return self.second(x + self.mlp(x))


class Drawn(Base):
    """Random numbers behind the last product: they stay, and with them what only they hand on."""

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.mlp(self.first(x).relu()), 0.5) * 2.0


class Counted(Base):
    """A tensor of its own changed in place between."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.mlp(self.first(x))
        h.mul_(2.0)
        return x + h.tanh()


class Several(Base):
    """Two results, one also read by an early op; a view goes into the product."""

    def forward(self, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        h = self.first(x) * scale
        y = self.mlp(h.view(-1, WIDTH)).view(x.shape)
        return (y + x).tanh(), (scale * 1.5).sigmoid()


class Chain(nn.Module):
    def __init__(self, kind: type[nn.Module], count: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([kind() for _ in range(count)])
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, *values: Tensor) -> Any:
        for block in self.blocks:
            values = block(*values)
            values = values if isinstance(values, tuple) else (values,)
        return self.norm(values[0]), *values[1:]


@pytest.fixture(autouse=True)
def _marked(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (Before, After, Drawn, Counted, Several):
        monkeypatch.setattr(kind, "_fusejit_lazy_inline", fusejit.capture.regions.detect.Mark(), raising=False)


def given(kind: type) -> tuple[Tensor, ...]:
    x = torch.randn(2, 3, WIDTH, requires_grad=True)
    return (x, torch.rand(WIDTH, requires_grad=True)) if kind is Several else (x,)


def joined(kind: type) -> tuple[torch.fx.GraphModule, list[str]]:
    with torch.no_grad():
        module = capture(Chain(kind), given(kind), {}, regions=Regions).graph
        assert any(isinstance(node.target, Region) for node in module.graph.nodes)
        return join_seams(module, decompositions.table(), machine("sm_90"))


def ops(graph: torch.fx.Graph) -> list[str]:
    return [str(node.target).split(".")[-2] for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]


# kind: (ops between two calls, ops that stay inside), or None where nothing moves
MOVED: dict[type, tuple[str, str] | None] = {
    Before: ("add layer_norm", "linear tanh add layer_norm linear gelu linear"),
    After: None,
    Drawn: None,
    Counted: None,
    Several: ("view add tanh mul sigmoid layer_norm mul", "view linear gelu linear"),
}


@pytest.mark.parametrize("kind", MOVED)
def test_what_moves_is_what_memory_need_not_hold(kind: type) -> None:
    module, told = joined(kind)
    expected = MOVED[kind]
    assert bool(told) == (expected is not None)
    if expected is None:
        return
    calls = [node for node in module.graph.nodes if isinstance(node.target, Region)]
    assert len({node.target for node in calls}) == 1 and len(calls) == 4
    inside = ops(calls[0].target.graph.graph)
    nodes = list(module.graph.nodes)
    between = [
        n for n in nodes[nodes.index(calls[1]) : nodes.index(calls[2])] if isinstance(n.target, torch._ops.OpOverload)
    ]
    assert sorted(str(n.target).split(".")[-2] for n in between) == sorted(expected[0].split())
    assert inside == expected[1].split()
    assert "test_move_across_regions.py" in told[0]


def grads(run: Callable, model: nn.Module, args: tuple[Tensor, ...]) -> list[Tensor]:
    torch.manual_seed(1)
    out = run(*args)
    sum((o * torch.linspace(0, 1, o.numel()).view_as(o)).sum() for o in out).backward()
    found = [*(o.detach() for o in out), *(t.grad.clone() for t in (*args, *model.parameters()) if t.grad is not None)]
    for t in (*args, *model.parameters()):
        t.grad = None
    return found


@pytest.mark.parametrize("kind", [Before, Several])
def test_numbers_and_gradients_stay(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "fusejit.autodiff.move_across_regions._pays", lambda link, device: True
    )  # small tensors are not worth it
    torch.manual_seed(0)
    model, args = Chain(kind, 3), given(kind)
    jitted = fusejit.jit(model, backend="interpret", jit_level="O3", fullgraph=True)
    found, wanted = grads(jitted, model, args), grads(model, model, args)
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)
    assert any("fused across its boundary" in line for line in jitted.explain(*args).rewrites)


@torch.no_grad()
def test_a_launch_and_a_read_less_each_block() -> None:
    model, args = Chain(Before, 4), given(Before)
    joined, apart = (
        fusejit.jit(model, backend="interpret", jit_level=level, fullgraph=True).explain(*args)
        for level in ("O3", "O2")
    )
    assert apart.launches - joined.launches == 4 and not apart.rewrites
    assert apart.bytes_fused - joined.bytes_fused >= 3 * args[0].nbytes


@pytest.mark.parametrize(("rows", "moves"), [(2**10, False), (2**18, True)])
def test_gradients_want_tensors_worth_a_launch(rows: int, moves: bool) -> None:
    """A kernel more of the backward sums columns, and a second step of it each."""
    x = torch.randn(1, WIDTH, requires_grad=True).expand(rows, WIDTH)
    module = capture(Chain(Before), (x,), {}, regions=Regions).graph
    assert bool(join_seams(module, decompositions.table(), machine("sm_90"))[1]) == moves
