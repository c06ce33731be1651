"""What shares memory with what, and what a change in place reaches: as in eager.

Tables of ops that return their operand itself, a view of it or a copy; of results that are equal and apart; of lists
whose members overlap.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusejit

Tensor = torch.Tensor


def storages(tensors: list[Tensor]) -> list[list[bool]]:
    """Which tensors share memory with which."""
    return [[a.untyped_storage()._cdata == b.untyped_storage()._cdata for b in tensors] for a in tensors]


def outcome(fn: Callable, inputs: tuple[Tensor, ...]) -> tuple:
    """Results and inputs after a call; what they share, where they lie, which are the same object, and whose version
    was raised.
    """
    versions = [x._version for x in inputs]
    made = fn(*inputs)
    results = list(made) if isinstance(made, (tuple, list)) else [made]
    every = [*inputs, *results]
    facts = (
        storages(every),
        [(tuple(t.shape), t.stride(), t.storage_offset(), t.dtype) for t in results],
        [[x is t for x in inputs] for t in results],
        [x._version > before for x, before in zip(inputs, versions)],
    )
    return [t.detach().clone() for t in every], facts


def same(fn: Callable, jitted: Callable, inputs: tuple[Tensor, ...], versions: bool = True) -> None:
    """Compare a call of a function with one of the function jitted, on copies."""
    copies = tuple(x.clone() for x in inputs)
    values, facts = outcome(fn, inputs)
    jitted_values, jitted_facts = outcome(jitted, copies)
    assert jitted_facts[:3] == facts[:3]
    assert not versions or jitted_facts[3] == facts[3]
    for value, other in zip(values, jitted_values, strict=True):
        torch.testing.assert_close(other, value, rtol=1e-3, atol=1e-3, equal_nan=True)


MAYBE_ITSELF: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.5, training=False),
    "dropout p=0": lambda x: F.dropout(x, 0.0),
    "dropout p=1": lambda x: F.dropout(x, 1.0, training=False),
    "dropout of a view": lambda x: F.dropout(x.t(), 0.5, training=False),
    "dropout in place": lambda x: F.dropout(x, 0.5, training=False, inplace=True),
    "torch.dropout": lambda x: torch.dropout(x, 0.5, False),
    "native_dropout": lambda x: torch.native_dropout(x, 0.5, False)[0],
    "Dropout(0.)": nn.Dropout(0.0),
    "Dropout.eval": nn.Dropout(0.5).eval(),
    "AlphaDropout.eval": nn.AlphaDropout(0.5).eval(),
    "FeatureAlphaDropout.eval": nn.FeatureAlphaDropout(0.5).eval(),
    "Dropout1d(0.)": nn.Dropout1d(0.0),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, False),
    "feature_dropout": lambda x: torch.feature_dropout(x, 0.5, False),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.5, False),
    "Identity": nn.Identity(),
    "Flatten": nn.Flatten(0),
    "Sequential()": nn.Sequential(),
    "to dtype": lambda x: x.to(torch.float32),
    "to device": lambda x: x.to("cpu"),
    "to other": lambda x: x.to(x),
    "to copy": lambda x: x.to(torch.float32, copy=True),
    "to memory format": lambda x: x.to(memory_format=torch.preserve_format),
    "contiguous": lambda x: x.contiguous(),
    "contiguous of a view": lambda x: x.t().contiguous(),
    "reshape": lambda x: x.reshape(-1),
    "reshape of a view": lambda x: x.t().reshape(-1),
    "expand": lambda x: x.expand(4, 6),
    "expand_as": lambda x: x.expand_as(x),
    "flatten": lambda x: x.flatten(),
    "type_as": lambda x: x.type_as(x),
    "type": lambda x: x.type(torch.float32),
    "float": lambda x: x.float(),
    "half": lambda x: x.half(),
    "cpu": lambda x: x.cpu(),
    "ravel": lambda x: x.ravel(),
    "atleast_1d": torch.atleast_1d,
    "atleast_2d": torch.atleast_2d,
    "atleast_3d": torch.atleast_3d,
    "view_as": lambda x: x.view_as(x),
    "positive": torch.positive,
    "squeeze": lambda x: x.squeeze(),
    "conj": lambda x: x.conj(),
    "resolve_conj": lambda x: x.resolve_conj(),
    "resolve_neg": lambda x: x.resolve_neg(),
    "real": lambda x: x.real,
    "detach": lambda x: x.detach(),
    "broadcast_tensors": lambda x: torch.broadcast_tensors(x)[0],
    "broadcast_to": lambda x: torch.broadcast_to(x, (4, 6)),
    "reshape_as": lambda x: x.reshape_as(x),
    "as_tensor": torch.as_tensor,
    "split": lambda x: x.split(2)[0],
    "unsafe_split": lambda x: x.unsafe_split(2)[0],
    "unsafe_chunk": lambda x: x.unsafe_chunk(2)[1],
    "tensor_split": lambda x: x.tensor_split(3)[1],
    "mT": lambda x: x.mT,
    "unflatten": lambda x: x.unflatten(1, (2, 3)),
    "view dtype": lambda x: x.view(torch.int32).view(torch.float32),
    "as_strided": lambda x: x.as_strided((3, 5), (6, 1), 2),
    "view_as_real": lambda x: torch.view_as_real(torch.view_as_complex(x.view(4, 3, 2))).view(4, 6),
    "diagonal": lambda x: x.diagonal(),
    "unbind": lambda x: x.unbind()[1],
    "sum_to_size": lambda x: x.sum_to_size(4, 6),
    "repeat": lambda x: x.repeat(1, 1),
    "cat of one": lambda x: torch.cat([x]),
    "hstack of one": lambda x: torch.hstack([x]),
    "sum of one": lambda x: x[None].sum(0),
    "clone": torch.clone,
    "roll 0": lambda x: x.roll(0),
    "einsum ij->ji": lambda x: torch.einsum("ij->ji", x),
    "meshgrid": lambda x: torch.meshgrid(x[:, 0], indexing="ij")[0],
    "diff n=0": lambda x: torch.diff(x, n=0),
    "matrix_power 1": lambda x: torch.linalg.matrix_power(x[:4, :4], 1),
}  # fmt: skip


@pytest.mark.parametrize("backend", ["eager", "interpret"])
@pytest.mark.parametrize("name", MAYBE_ITSELF)
def test_change_of_what_may_be_the_input(name: str, backend: str) -> None:
    op = MAYBE_ITSELF[name]

    def changed(x: Tensor) -> tuple[Tensor, Tensor]:
        y = op(x)
        y.add_(1)
        return y, x * 2

    told = not name.startswith("unsafe")  # eager says nothing of such a change to autograd
    same(changed, fusejit.jit(changed, backend=backend), (torch.randn(4, 6),), versions=told)


@pytest.mark.parametrize("mode", ["ast", "trace", "bytecode"])
@pytest.mark.parametrize("dynamic", [None, True])
def test_a_module_in_eval_adds_to_what_dropout_returns(mode: str, dynamic: bool | None) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.dropout = nn.Linear(4, 4), nn.Dropout(0.5)

        def forward(self, h: Tensor) -> Tensor:
            h = self.linear(h)
            x = self.dropout(h)
            x += 1
            return x * h

    layer = Layer().eval()
    jitted = fusejit.jit(layer, capture_mode=mode, backend="interpret", dynamic=dynamic)
    for rows in (3, 5):
        h = torch.randn(rows, 4)
        torch.testing.assert_close(jitted(h), layer(h))
        layer(h).sum().backward()
        expected = layer.linear.weight.grad.clone()
        layer.zero_grad()
        jitted(h).sum().backward()
        torch.testing.assert_close(layer.linear.weight.grad, expected)
        layer.zero_grad()


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


APART: dict[str, Callable[[Tensor], Any]] = {
    "equal products": lambda x: (bits(x * 2), bits(x * 2)),
    "equal matrix products": lambda x: (bits(x @ x), bits(x @ x)),
    "nothing done": lambda x: (bits(x + 0), bits(x * 1), bits(x.clone()), bits(torch.clone(x))),
    "where of one": lambda x: bits(torch.where(x > x, x, x)),
    "where of one, itself": lambda x: torch.where(x > x, x, x),
    "maximum of one": lambda x: (bits(torch.maximum(x, x)), torch.minimum(x, x).view(-1)),
    "constants": lambda x: (bits(torch.zeros(3)), bits(torch.zeros(3)), torch.zeros(3).view(3, 1)),
    "twice relu": lambda x: (bits(x.relu().relu()), bits(x.relu())),
    "scattered into itself": lambda x: (bits(torch.slice_scatter(x, x)), bits(torch.select_scatter(x, x[0], 0, 0))),
    "casts and back": lambda x: bits(x.double().float()),
    "one, seen twice": lambda x: (lambda y: (bits(y), y.view(-1), y[1]))(x * 2),
    "changed behind": lambda x: (lambda a, b: (a.add_(1), b))(x * 2, x * 2),
    "complex": lambda x: (torch.view_as_complex((x * 2).view(-1, 2)), torch.view_as_complex((x * 2).view(-1, 2))),
    "real parts": lambda x: (
        torch.view_as_complex((x * 2).view(-1, 2)).real,
        torch.view_as_complex((x * 2).view(-1, 2)).imag,
    ),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("backend", ["eager", "interpret"])
@pytest.mark.parametrize("name", APART)
def test_equal_results_stay_apart(name: str, backend: str, grad: bool) -> None:
    fn = APART[name]
    same(fn, fusejit.jit(fn, backend=backend), (torch.randn(4, 4).requires_grad_(grad),))


def parts(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.view(-1)[:6], x.view(-1)[2:8]


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.view(-1)[:6], x.view(-1)[6:12]


LISTS: dict[str, Callable[[Tensor], Any]] = {
    "one tensor twice": lambda x: torch._foreach_add_([x, x], 1.0),
    "a copy twice": lambda x: (lambda a: (torch._foreach_add_([a, a], 1.0), a)[1])(x.clone()),
    "numbers of their own": lambda x: torch._foreach_mul_([x, x], [2.0, 3.0]),
    "a tensor without dims": lambda x: torch._foreach_mul_([x, x], torch.tensor(3.0)),
    "overlapping": lambda x: torch._foreach_add_([*parts(x)], 1.0),
    "overlapping, exp": lambda x: torch._foreach_exp_([*parts(x)]),
    "operands of each other": lambda x: (lambda a, b: torch._foreach_add_([a, b], [b, a]))(*halves(x)),
    "lerp of each other": lambda x: (lambda a, b: torch._foreach_lerp_([a, b], [b, a], 0.5))(*halves(x)),
    "addcmul of each other": lambda x: (lambda a, b: torch._foreach_addcmul_([a, b], [b, a], [a, b], value=0.5))(
        *halves(x)
    ),
    "copied to each other": lambda x: (lambda a, b: torch._foreach_copy_([a, b], [b, a]))(*halves(x)),
    "apart": lambda x: torch._foreach_sqrt_([*halves(x)]),
}


@pytest.mark.parametrize("backend", ["eager", "interpret"])
@pytest.mark.parametrize("name", LISTS)
def test_lists_whose_members_overlap(name: str, backend: str) -> None:
    def changed(x: Tensor) -> Tensor:
        made = LISTS[name](x)
        return x * 1 if made is None else made

    same(changed, fusejit.jit(changed, backend=backend), (torch.rand(4, 4),))


@pytest.mark.parametrize("dynamic", [None, True])
def test_lists_of_arguments_that_overlap(dynamic: bool | None) -> None:
    def changed(a: Tensor, b: Tensor) -> Tensor:
        torch._foreach_add_([a, b], 1.0)
        torch._foreach_mul_([a, b], 2.0)
        return a * 1

    jitted = fusejit.jit(changed, backend="interpret", dynamic=dynamic)
    for one, other in (((0, 6), (4, 10)), ((0, 5), (5, 10)), ((0, 10), (0, 10)), ((0, 6), (4, 10)), ((2, 7), (1, 6))):
        x = torch.rand(10)
        y = x.clone()
        expected = changed(x[slice(*one)], x[slice(*other)])
        torch.testing.assert_close(jitted(y[slice(*one)], y[slice(*other)]), expected)
        torch.testing.assert_close(y, x)


def without_grad(b: Tensor) -> Tensor:
    with torch.no_grad():
        b.add_(1)
    return b * 2


def set_first(b: Tensor) -> Tensor:
    b[0] = 3.0
    return b * 1


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "add": lambda b: b.add_(1),
    "nothing added": lambda b: b.add_(0),
    "there and back": lambda b: b.add_(1).sub_(1).sum(),
    "foreach": lambda b: torch._foreach_add_([b], 1.0),
    "item": set_first,
    "slice": lambda b: b[1:].mul_(2).sum(),
    "index_put": lambda b: b.index_put_((torch.tensor([0]),), torch.tensor([2.0])).sum(),
    "index_add": lambda b: b.index_add_(0, torch.tensor([0]), torch.ones(1)).sum(),
    "scatter": lambda b: b.scatter_(0, torch.tensor([0]), 2.0).sum(),
    "copy": lambda b: b.copy_(b * 2).sum(),
    "out": lambda b: torch.exp(b, out=b).sum(),
    "product": lambda b: b.copy_(torch.mv(torch.ones(3, 3), b)).sum(),
    "zero": lambda b: b.zero_().sum(),
    "random": lambda b: b.uniform_().shape[0] * torch.ones(1),
    "cumsum": lambda b: b.cumsum_(0).sum(),
    "sort": lambda b: b.copy_(b.sort()[0]).sum(),
    "view": lambda b: b.view(3, 1).t().add_(1).sum(),
    "detached": lambda b: (b.detach().add_(1), b * 2)[1],
    "without grad": without_grad,
    "nothing": lambda b: b + 1,
}  # fmt: skip


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("backend", ["eager", "interpret"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_raises_the_version(name: str, backend: str, dynamic: bool | None) -> None:
    change = CHANGES[name]
    jitted = fusejit.jit(change, backend=backend, dynamic=dynamic)
    b = torch.rand(3)
    expected = (lambda before: (change(b), b._version > before)[1])(b._version)
    for _ in range(3):  # found the general way, bound, by its entry
        before = b._version
        jitted(b)
        assert (b._version > before) is expected


@pytest.mark.parametrize("forward", [False, True])
@pytest.mark.parametrize("bound", [False, True])
def test_a_backward_sees_that_what_it_saved_was_changed(forward: bool, bound: bool) -> None:
    w, b = torch.randn(3, requires_grad=True), torch.randn(3)
    change = fusejit.jit(lambda b: b.add_(1).sum(), backend="interpret")
    change = change.bind(b.clone()) if bound else change
    product = fusejit.jit(torch.mul, backend="interpret") if forward else torch.mul
    y = product(w, b)
    change(b)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_step_of_an_optimiser_between_forward_and_backward() -> None:
    weights = [torch.randn(3, requires_grad=True) for _ in range(3)]

    @fusejit.jit(backend="interpret")
    def step(weights: list[Tensor], gradients: list[Tensor]) -> None:
        with torch.no_grad():
            torch._foreach_add_(weights, gradients, alpha=-0.1)

    y = sum((w * w).sum() for w in weights)
    step(weights, [torch.ones(3) for _ in weights])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_statistics_of_a_batch_norm_raise_their_versions() -> None:
    norm = nn.BatchNorm1d(4)
    jitted = fusejit.jit(norm, backend="interpret")
    for _ in range(3):
        before = [b._version for b in norm.buffers()]
        first, second = jitted(torch.randn(6, 4)), jitted(torch.randn(6, 4))
        assert [b._version for b in norm.buffers()] > before
        (first + second).sum().backward()


def never(x: Tensor) -> Tensor:
    while x.sum() < -1e9:
        x = x * 2
    return x + 1


def at_times(x: Tensor) -> Tensor:
    while x.sum() < 30:
        x = x * 2 + 1
    return x


def counted(x: Tensor) -> Any:
    start = torch.zeros((), dtype=torch.int64)
    return torch.while_loop(lambda i, x: i < 0, lambda i, x: (i + 1, x * 2), (start, x))[1] * 3


def expanded(x: Tensor) -> Tensor:
    y = x[:1].expand(x.shape)
    while y.sum() < 100:
        y = y * 2 + 1
    return y


def expanded_never(x: Tensor) -> Tensor:
    y = x[:1].expand(x.shape)
    while y.sum() < -1e9:
        y = y * 2 + 1
    return y * 3


def expanded_in_an_arm(x: Tensor) -> Tensor:
    y = x[:, :1].expand(x.shape) if x.sum() > 5 else x * 2
    return y * 2


def transposed(x: Tensor) -> Tensor:
    y = x.t()
    while y.sum() < 100:
        y = y + x.t() + 1
    return y


@pytest.mark.parametrize("dynamic", [None, True, "marked"])
@pytest.mark.parametrize("fn", [never, at_times, counted, expanded, expanded_never, expanded_in_an_arm, transposed])
def test_loops_for_any_size_and_memory(fn: Callable, dynamic: Any) -> None:
    jitted = fusejit.jit(fn, backend="interpret", dynamic=None if dynamic == "marked" else dynamic)
    for rows in (4, 6, 3):
        x = torch.rand(rows, 5)
        y = x.clone()
        if dynamic == "marked":
            torch._dynamo.mark_dynamic(y, 0)
        expected, made = fn(x), jitted(y)
        torch.testing.assert_close(made, expected)
        assert made.stride() == expected.stride()


@pytest.mark.parametrize("fn", [never, at_times, expanded])
def test_gradients_of_loops_for_any_size(fn: Callable) -> None:
    jitted = fusejit.jit(fn, backend="interpret", dynamic=True)
    for rows in (4, 6):
        x = torch.rand(rows, 5, requires_grad=True)
        (expected,) = torch.autograd.grad(fn(x).sum(), x)
        (made,) = torch.autograd.grad(jitted(x).sum(), x)
        torch.testing.assert_close(made, expected)


SCALARS: dict[str, Callable[..., Tensor]] = {
    "scatter": lambda x, i, s: x.scatter(-1, i % x.shape[-1], 2.5),
    "scatter of a tensor": lambda x, i, s: x.scatter(-1, i, s),
    "scatter_add": lambda x, i, s: x.scatter_add(0, i, s),
    "scatter_reduce": lambda x, i, s: x.scatter_reduce(0, i, s, "sum"),
    "gather": lambda x, i, s: x.gather(-1, i),
    "index_select": lambda x, i, s: x.index_select(-1, i),
    "index_copy": lambda x, i, s: x.index_copy(0, i, s),
    "index_fill": lambda x, i, s: x.index_fill(0, i, 2.5),
    "index_put": lambda x, i, s: x.index_put((i,), s),
}  # fmt: skip


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", SCALARS)
def test_an_index_without_dimensions(name: str, dynamic: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEJIT_STRICT", "1")
    op = SCALARS[name]
    jitted = fusejit.jit(lambda x, i, s: op(x, i.amax(-1), s.sum()), backend="interpret", dynamic=dynamic)
    for size in (4, 7):
        given = torch.rand(size), torch.randint(0, 4, (3,)), torch.rand(2)
        torch.testing.assert_close(jitted(*given), op(given[0], given[1].amax(-1), given[2].sum()))
