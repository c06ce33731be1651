"""The hot path of functions whose sizes vary: what it serves, and that it never answers where the general check of
sizes would not.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_fast_path import entries, function_of, general
from torch import nn

from fusejit import jit
from fusejit.capture.guards.guards import key_for
from fusejit.runtime import torch_private
from fusejit.runtime.fast_path import MISS


@pytest.mark.parametrize("backend", ["eager", "interpret"])
@pytest.mark.parametrize("grad", [False, True])
def test_new_lengths_go_the_short_way(backend, grad, monkeypatch):
    layer = nn.Linear(3, 3)

    def target(x, y, k, flag=True):
        return torch.relu(layer(x) * y + k) * x.shape[0]

    jitted = jit(target, backend=backend)

    def check(n, m):
        x, y = torch.randn(n, m, 3, requires_grad=grad), torch.randn(m, 1)
        got, want = jitted(x, y, 2, flag=False), target(x, y, 2)
        torch.testing.assert_close(got, want)
        if grad:
            inputs = [x, layer.weight]
            ours, theirs = torch.autograd.grad(got.sum(), inputs), torch.autograd.grad(want.sum(), inputs)
            torch.testing.assert_close(ours, theirs)

    with torch.set_grad_enabled(grad):
        for n, m in ((4, 5), (6, 7), (8, 9)):
            check(n, m)
        ways = general(monkeypatch)
        for n, m in ((2, 11), (5, 5), (300, 2), (4, 4)):
            check(n, m)
        layer.weight.data.mul_(2)
        check(7, 3)
    assert not ways.calls and jitted.cache_info()[:3] == (2, 6, 2)


def test_the_text_of_an_entry():
    jitted = jit(lambda x, y: x.transpose(0, 1) * y.shape[0] if y.shape[0] > 10 else x + 1, dynamic=True)
    for n in (20, 30, 40):
        jitted(torch.ones(4, n, 8), torch.ones(n, 2).t().contiguous().t())
    (entry,) = entries(jitted)
    assert (
        "s0, s1, s2, = a0.shape" in entry.source
        and "n1_0, s3, = a1.shape" in entry.source
        and "n1_0 == s1" in entry.source
    )
    assert (
        "a0.is_contiguous() and" in entry.source
        and "a1.stride() == (1, s1, )" in entry.source
        and "(s1 > 10)" in entry.source
    )
    assert not function_of(jitted)._bound.unbound


def square(x, y):
    return x * y.sum() + x.shape[0] * x.stride(0)


def same(x):
    return x.relu() if x.shape[0] == x.shape[1] else x * 2


def cut(x, y):
    return x[: x.shape[0] - 2] + 1 if x.shape[0] % 4 == 0 else x - y[0]


def changed(x, y):
    x.add_(y[: x.shape[0]].sum())
    return x * 2


@pytest.mark.parametrize("backend", ["eager", "interpret"])
@pytest.mark.parametrize("target", [square, cut, changed], ids=lambda fn: fn.__name__)
def test_guards_on_sizes_hold_on_the_short_way(target, backend):
    jitted = jit(target, backend=backend, dynamic=True)
    shapes = [(n, m) for n in (4, 6, 1, 0, 2) for m in (3, 4)]
    for n, m in [shape for shape in shapes for _ in range(2)] + shapes[::-1]:
        for x in (torch.randn(n, m), torch.randn(m, n).t(), torch.randn(n, 2 * m)[:, ::2]):
            y = torch.randn(max(n, 1), m)
            ours, theirs = x.clone(memory_format=torch.preserve_format), x.clone(memory_format=torch.preserve_format)
            torch.testing.assert_close(jitted(ours, y), target(theirs, y))
            torch.testing.assert_close(ours, theirs)


def test_other_kinds_of_arguments_miss():
    jitted = jit(lambda x: x * 2 + x.shape[0], dynamic=True)
    for n in (4, 5, 6):
        jitted(torch.ones(n, 3))
    run = entries(jitted)[0].run
    assert run(None, (torch.ones(9, 7),), {}) is not MISS
    wrong = [
        torch.ones(9, 7).double(),
        torch.ones(9, 7).requires_grad_(),
        torch.ones(9),
        torch.ones(7, 9).t(),
        torch.ones(1, 7),
        torch.ones(0, 7),
    ]
    wrong += [
        torch.ones(9, 7, dtype=torch.complex64).conj().real,
        torch.ones(9, 14)[:, :7],
        nn.Parameter(torch.ones(9, 7)),
        3,
        None,
    ]
    wrong += [torch.ones(9, 7, device="meta"), torch.ones(7).expand(9, 7), torch.ones(9, 7, 1)]
    assert [run(None, (value,), {}) is MISS for value in wrong] == [True] * len(wrong)


@pytest.mark.parametrize("missing", ["all of it", "TensorGuards", "dict_version"])
def test_without_a_part_of_torchs_c_interface(missing, monkeypatch):
    import types

    kept = {k: getattr(torch_private._guards, k) for k in dir(torch_private._guards) if k != missing}
    monkeypatch.setattr(torch_private, "_guards", None if missing == "all of it" else types.SimpleNamespace(**kept))
    test_other_kinds_of_arguments_miss()


def test_a_replaced_parameter_and_new_lengths(monkeypatch):
    layer = nn.Linear(3, 2)
    jitted = jit(layer, dynamic=True)
    for step in range(12):
        if step % 4 == 3:
            layer.weight = nn.Parameter(torch.randn(2, 3))
        x = torch.randn(step + 300, 3)  # sizes beyond the small integers that Python keeps
        torch.testing.assert_close(jitted(x), layer(x))
    assert jitted.cache_info().specialisations == 1
    ways = general(monkeypatch)
    jitted(torch.randn(5, 3))
    assert not ways.calls


@st.composite
def tensors(draw):
    sizes = [draw(st.integers(0, 5)) for _ in range(2)]
    order = draw(st.sampled_from(["rows", "columns", "slice", "row", "padded"]))
    base = torch.arange(400.0)
    strides = {
        "rows": (sizes[1], 1),
        "columns": (1, sizes[0]),
        "slice": (2 * sizes[1], 2),
        "row": (0, 1),
        "padded": (9, 1),
    }[order]
    return base.as_strided(sizes, strides, draw(st.integers(0, 3))).clone(memory_format=torch.preserve_format)


@pytest.mark.full
@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(tensors(), tensors()), min_size=2, max_size=6), st.sampled_from([None, True]))
def test_any_sequence_of_sizes(calls, dynamic):
    """Right answers, and an entry answers only where the general check finds the same specialisation."""

    def target(a, b):
        c = a * 2 + b.sum(0).sum() if a.shape[0] > b.shape[1] else a - b.shape[0]
        return c.t(), b + a.shape[1] * 3

    jitted = jit(target, dynamic=dynamic)
    for a, b in [call for call in calls for _ in range(2)]:
        for entry in entries(jitted):
            if entry.run(None, (a, b), {}) is not MISS:
                leaves: list = []
                key_for(None, (a, b), {}, leaves)
                assert entry.specialisation.lifted(leaves) is not None, entry.source
        for got, wanted in zip(jitted(a, b), target(a, b), strict=True):
            torch.testing.assert_close(got, wanted)
            assert got.stride() == wanted.stride()
