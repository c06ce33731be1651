"""Arguments of any layout and aliasing: what a jitted function returns, changes and gives gradients for is what eager
does.

Hypothesis draws shapes, strides, offsets, dtypes, overlapping views, the same tensor twice, expanded tensors,
requires_grad and programs that change their arguments. Each program is one jitted function for all examples, so that a
specialisation made for one aliasing meets all others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fusejit import jit

LENGTH = 40
DTYPES = (torch.float32, torch.float64, torch.int64, torch.float16)


def pure(a, b, c):
    return a * b + c, (a - b).sum()


def changes_first(a, b, c):
    a.add_(b)
    return a * c


def changes_two(a, b, c):
    b.mul_(2)
    a.copy_(b)
    return a + b + c


def changes_a_part(a, b, c):
    a[..., :1] = 3
    b[..., -1:].add_(a[..., :1])
    return a + c


def returns_views(a, b, c):
    return a.transpose(0, 1), b[1:], c


def changes_then_reads_views(a, b, c):
    view = a[..., 1:]
    b.sub_(1)
    view.mul_(3)
    return view + c[..., 1:], a


PROGRAMS = (pure, changes_first, changes_two, changes_a_part, returns_views, changes_then_reads_views)


@dataclass(frozen=True)
class Argument:
    """A view of one of two pieces of memory, or, with `same` not None, the argument of that number again."""

    base: int
    shape: tuple[int, int]
    strides: tuple[int, int]
    offset: int
    same: int | None = None


@st.composite
def calls(draw: Any) -> tuple:
    """(arguments, dtype, whether memory requires grad)"""
    rows, columns = draw(st.sampled_from([(2, 3), (3, 2), (1, 4), (2, 1), (4, 4), (0, 2)]))
    found: list[Argument] = []
    for number in range(3):
        if number and draw(st.integers(0, 4)) == 0:
            found.append(Argument(0, (0, 0), (0, 0), 0, draw(st.integers(0, number - 1))))
            continue
        strides = draw(
            st.sampled_from([(columns, 1), (1, rows), (2 * columns, 2), (columns + 1, 1), (0, 1), (1, 0), (1, 1)])
        )
        reach = (rows - 1) * strides[0] + (columns - 1) * strides[1]
        offset = draw(st.integers(0, LENGTH - 1 - max(reach, 0)) | st.sampled_from([0, 1, 4]))
        if offset + reach >= LENGTH:
            offset = 0
        found.append(Argument(draw(st.integers(0, 1)), (rows, columns), strides, offset))
    return (
        tuple(found),
        draw(st.sampled_from(DTYPES)),
        draw(st.sampled_from([(False, False), (True, False), (True, True)])),
    )


def build(arguments: tuple[Argument, ...], dtype: torch.dtype, grads: tuple[bool, bool]) -> tuple[list, list]:
    """The leaves, which hold the memory, and the arguments, fresh for each run."""
    leaves = [(torch.arange(LENGTH, dtype=torch.float64) % 7 - 2 + k).to(dtype) for k in range(2)]
    leaves = [leaf.requires_grad_(grad and dtype.is_floating_point) for leaf, grad in zip(leaves, grads)]
    memory = [leaf * 1 if leaf.requires_grad else leaf for leaf in leaves]  # a leaf must not change in place
    made: list[Any] = []
    for each in arguments:
        view = (
            made[each.same]
            if each.same is not None
            else memory[each.base].as_strided(each.shape, each.strides, each.offset)
        )
        made.append(view)
    return [leaves, memory], made


def outcome(call: Callable, given_call: tuple) -> tuple:
    """Everything that a caller can see."""
    (leaves, memory), made = build(*given_call)
    try:
        result = call(*made)
    except RuntimeError as error:
        return ("raises", type(error))
    results = result if isinstance(result, tuple) else (result,)
    names = {piece.untyped_storage().data_ptr(): number for number, piece in enumerate(memory)}
    aliases = [names.get(value.untyped_storage().data_ptr()) for value in results] if made[0].numel() else []
    objects = [next((n for n, x in enumerate(made) if x is value), None) for value in results]
    after = [piece.detach().clone() for piece in memory]
    wanted = [value for value in results if value.requires_grad]
    gradients: Any = ()
    if wanted:
        sources = [leaf for leaf in leaves if leaf.requires_grad]
        total = sum(
            (value.double() * (torch.arange(value.numel(), dtype=torch.float64) + 1).reshape(value.shape)).sum()
            for value in wanted
        )
        try:
            gradients = torch.autograd.grad(total, sources, allow_unused=True)
        except RuntimeError as error:
            gradients = ("raises", type(error))
    flat = [(value.detach().clone(), value.requires_grad, tuple(value.shape), value.dtype) for value in results]
    return ("returns", flat, aliases, objects, after, gradients)


def same(call: Callable, program: Callable, given_call: tuple, backend: str) -> None:
    wanted, got = outcome(program, given_call), outcome(call, given_call)
    assert got[0] == wanted[0], (got, wanted)
    if wanted[0] == "raises":
        return
    for mine, its in zip(got[1], wanted[1], strict=True):
        torch.testing.assert_close(mine[0], its[0], equal_nan=True)
        assert mine[1:] == its[1:]
    assert got[2] == wanted[2], "memory of the results"
    if backend == "eager":  # torch's wrappers return another tensor of the same memory
        assert got[3] == wanted[3], "results that are arguments"
    torch.testing.assert_close(got[4], wanted[4], equal_nan=True)
    assert len(got[5]) == len(wanted[5])
    for mine, its in zip(got[5], wanted[5]):
        if isinstance(mine, torch.Tensor) and isinstance(its, torch.Tensor):
            torch.testing.assert_close(mine, its, equal_nan=True)
        else:  # no gradient is a gradient of zeros
            assert mine == its or all(not isinstance(x, torch.Tensor) or not x.any() for x in (mine, its))


LIGHT = {
    "deadline": None,
    "phases": (Phase.explicit, Phase.generate),
    "derandomize": True,
    "suppress_health_check": list(HealthCheck),
}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
@pytest.mark.parametrize(("backend", "examples"), [("eager", 40), ("interpret", 12)])
def test_any_memory(program, backend, examples, monkeypatch):
    monkeypatch.setenv("FUSEJIT_SPECIALISATIONS", "64")
    jitted = jit(program, backend=backend)

    @settings(max_examples=examples, **LIGHT)
    @given(calls())
    def run(call):
        same(jitted, program, call, backend)
        same(jitted, program, call, backend)

    run()
    assert jitted.cache_info().hits > 0
