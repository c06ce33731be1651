"""The law of memory: a chain of views, of ops that may return their operand, and of changes in place does what eager
does.

Each program reads and writes one pool of tensors: two inputs, which may be parts of one memory, and what it has made of
them. Compared with eager on a copy: results, inputs afterwards, which results share which memory and where, and whether
each input's version was raised.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from test_aliasing import storages
from torch import nn

import fusejit

Tensor = torch.Tensor

LOOKS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.5, training=False),
    "dropout 0": nn.Dropout(0.0),
    "identity": nn.Identity(),
    "contiguous": lambda x: x.contiguous(),
    "to": lambda x: x.to(torch.float32),
    "reshape": lambda x: x.reshape(-1),
    "flatten": lambda x: x.flatten(),
    "ravel": lambda x: x.ravel(),
    "t": lambda x: x.transpose(0, -1),
    "first half": lambda x: x[: (x.shape[0] + 1) // 2],
    "every other": lambda x: x[::2],
    "unsqueeze": lambda x: x.unsqueeze(0),
    "squeeze": lambda x: x.squeeze(),
    "atleast_2d": torch.atleast_2d,
    "expand_as": lambda x: x.expand_as(x),
    "view_as": lambda x: x.view_as(x),
    "type_as": lambda x: x.type_as(x),
    "positive": torch.positive,
    "detach": lambda x: x.detach(),
    "chunk": lambda x: x.chunk(2)[0],
    "bits": lambda x: x.view(torch.int32).view(torch.float32),
    "alias": lambda x: x[...],
}
MAKES: dict[str, Callable[[Tensor], Tensor]] = {
    "times 2": lambda x: x * 2,
    "plus 0": lambda x: x + 0,
    "clone": torch.clone,
    "relu": torch.relu,
    "where": lambda x: torch.where(x > x, x, x),
    "cat": lambda x: torch.cat([x]),
    "repeat": lambda x: x.repeat(*[1] * x.dim()),
    "copy": lambda x: x.to(torch.float32, copy=True),
}
WRITES: dict[str, Callable[[Tensor], Any]] = {
    "add_": lambda x: x.add_(1),
    "mul_": lambda x: x.mul_(2),
    "zero_": lambda x: x.zero_(),
    "clamp_": lambda x: x.clamp_(-0.5, 0.5),
    "neg_": lambda x: x.neg_(),
    "copy_": lambda x: x.copy_(x * 3),
    "set 0": lambda x: x[0].fill_(7.0) if x.dim() else x.fill_(7.0),
    "foreach": lambda x: torch._foreach_add_([x], 1.0),
    "foreach twice": lambda x: torch._foreach_add_([x, x], 1.0),
    "foreach of parts": lambda x: (
        torch._foreach_mul_([x[: len(x) // 2 + 1], x[len(x) // 3 :]], 2.0) if x.dim() else x.mul_(2)
    ),
}
OPS = LOOKS | MAKES | WRITES
PARTS = [
    ((4, 6), (6, 1), 0),
    ((4, 6), (1, 4), 0),
    ((12,), (1,), 6),
    ((2, 6), (6, 1), 12),
    ((4, 1), (6, 1), 2),
    ((3, 4), (8, 1), 0),
]
"""(shape, strides, offset) of an input in a memory of 24 numbers."""


@st.composite
def programs(draw: st.DrawFn) -> tuple:
    """(layouts of the inputs, whether they share memory, steps (op, operand), results)."""
    layouts = draw(st.tuples(st.sampled_from(PARTS), st.sampled_from(PARTS)))
    kinds = st.one_of(st.sampled_from([*LOOKS]), st.sampled_from([*WRITES]), st.sampled_from([*MAKES]))
    steps = draw(st.lists(st.tuples(kinds, st.integers(0, 5)), min_size=1, max_size=6))
    return layouts, draw(st.booleans()), tuple(steps), draw(st.lists(st.integers(0, 7), min_size=1, max_size=3))


def program_of(steps: tuple, results: list[int]) -> Callable:
    def program(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        pool = [a, b]
        for op, operand in steps:
            made = OPS[op](pool[-1 - operand % len(pool)])
            if op not in WRITES:
                pool.append(made)
        return tuple(pool[-1 - number % len(pool)] for number in results)

    return program


def inputs_of(layouts: tuple, shared: bool) -> tuple[tuple[Tensor, Tensor], list[Tensor]]:
    """The inputs, and the memory that they lie in."""
    memories = [torch.linspace(-1, 1, 24), torch.linspace(2, -2, 24)]
    memories = memories[:1] * 2 if shared else memories
    one, other = (memory.as_strided(*layout) for memory, layout in zip(memories, layouts))
    return (one, other), memories


def outcome(call: Callable, layouts: tuple, shared: bool) -> tuple:
    given, memories = inputs_of(layouts, shared)
    versions = [x._version for x in given]
    made = call(*given)
    every = [*given, *made]
    same = [[x is t for x in given] for t in made]
    steps = [
        [stride for n, stride in zip(t.shape, t.stride()) if n != 1] for t in made
    ]  # what a dim of size 1 has reaches nothing
    facts = (
        storages(every),
        same,
        [(tuple(t.shape), strides, t.storage_offset(), t.dtype) for t, strides in zip(made, steps)],
    )
    return [*made, *memories], facts, [x._version > before for x, before in zip(given, versions)]


def check(program: tuple, backend: str) -> None:
    layouts, shared, steps, results = program
    function = program_of(steps, results)
    try:
        values, facts, raised = outcome(function, layouts, shared)
    except (RuntimeError, IndexError):  # no program in eager either
        hypothesis.reject()
    jitted = fusejit.jit(function, backend=backend)
    for _ in range(2):
        made, jitted_facts, jitted_raised = outcome(jitted, layouts, shared)
        for value, other in zip(values, made, strict=True):
            torch.testing.assert_close(other, value, equal_nan=True)
        assert jitted_facts == facts
        assert jitted_raised == raised


COMMON = {"deadline": None, "suppress_health_check": [*hypothesis.HealthCheck], "derandomize": True, "database": None}


@pytest.mark.parametrize("backend", ["eager", "interpret"])
@hypothesis.settings(max_examples=100, **COMMON)
@hypothesis.given(program=programs())
def test_any_chain_of_views_and_changes(program: tuple, backend: str) -> None:
    check(program, backend)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "interpret"])
@hypothesis.settings(max_examples=2500, **COMMON)
@hypothesis.given(program=programs())
def test_many_chains_of_views_and_changes(program: tuple, backend: str) -> None:
    check(program, backend)
