"""Specialisations are frozen: made by constructors, never changed; what changes lives with its owner."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import pytest
import torch

import fusejit
from fusejit import jit
from fusejit.api.specialisation_table import Entry
from fusejit.compile_log import CompileLog, Fallback, Notes
from fusejit.specialise.specialisation import Executable, Specialisation

ROOT = Path(fusejit.__file__).parent
FROZEN = (Executable, Specialisation, Entry, Notes)


@pytest.mark.parametrize("kind", FROZEN, ids=lambda kind: kind.__name__)
def test_what_a_call_finds_is_frozen(kind):
    assert kind.__dataclass_params__.frozen
    jitted = jit(lambda x: x + 1, backend="interpret")
    jitted(torch.ones(3))
    (entry,) = jitted._table.entries
    values = {type(value): value for value in (entry, entry.specialisation, entry.specialisation.executable)}
    value = values.get(kind, entry.specialisation.notes)
    for field in dataclasses.fields(kind):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, field.name, None)


def test_nothing_writes_around_the_freeze():
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "object.__setattr__":
                assert not any(name in ast.unparse(node.args[0]) for name in ("specialisation", "executable", "entry"))


def test_a_log_goes_on_empty_when_it_is_closed():
    log = CompileLog()
    log.record["forward.fused"], log.compile_ms["forward"] = "text", 2.0
    log.fallbacks.append(Fallback("op", "reason"))
    notes = log.close()
    assert log.notes() == Notes() and notes.fallbacks == (Fallback("op", "reason"),)
    log.spend("forward", 1.0)
    log.spend("backward", 4.0)
    later = notes + log.notes()
    assert later.compile_ms == {"forward": 3.0, "backward": 4.0} and notes.compile_ms == {"forward": 2.0}


def test_a_backward_that_is_compiled_later_is_in_the_report():
    jitted = jit(lambda x: (x * 2).tanh(), backend="interpret")
    x = torch.ones(3, requires_grad=True)
    result = jitted(x)
    specialisation = jitted.specialisation(x)
    assert "backward" not in specialisation.compile_ms and "backward.fused" not in specialisation.record
    result.sum().backward()
    assert jitted.specialisation(x) is specialisation and "backward" in specialisation.compile_ms
    assert "backward.fused" in specialisation.record and "backward.fused" in jitted.explain(x).stages


def test_a_backward_outlives_the_function_that_it_is_of():
    """Its compiler holds the regions that it calls, which no one else does."""

    @fusejit.lazy_inline
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x).relu() + x.sigmoid()

    model = torch.nn.Sequential(*(Block() for _ in range(4)))
    x = torch.randn(2, 4, requires_grad=True)
    jitted = jit(lambda x: model(x) * 2, backend="interpret")
    result = jitted(x)
    assert jitted.explain(x).regions
    jitted = jit(lambda x: model(x) * 2, backend="interpret")
    result = jitted(x)
    del jitted
    (gradient,) = torch.autograd.grad(result.sum(), x)
    (wanted,) = torch.autograd.grad((model(x) * 2).sum(), x)
    torch.testing.assert_close(gradient, wanted)


def test_why_calls_go_the_general_way_is_known_to_the_bindings():
    jitted = jit(lambda items: items[0] + 1, backend="eager")
    for _ in range(3):
        jitted([torch.ones(2)])
    ((specialisation, reason),) = jitted._bound.unbound.items()
    assert specialisation is jitted._table.entries[0].specialisation and "container" in reason
    assert jitted.explain([torch.ones(2)]).unbound == reason
    assert not jitted._bound.written
