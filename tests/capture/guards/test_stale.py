"""A law: nothing that a function reads is ever stale, in whichever way Python has changed it between two calls.

Programs are sequences of changes, each of one thing that the function reads and in one of Python's ways; after each of
them the jitted function gives what the plain one gives.
"""

from __future__ import annotations

import importlib
import itertools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from fusejit import jit

MODES = ("ast", "trace", "bytecode")
NUMBERS = itertools.count(2)
MODULE = "a_module_of_the_staleness_law"
TEXT = "SCALE = {}\n\ndef scaled(x, by={}):\n    return x * by + SCALE\n"


def number() -> float:
    return float(next(NUMBERS) % 97)


def tensor() -> torch.Tensor:
    return torch.full((3,), number())


class Plain:
    shared = 1.0

    def __init__(self) -> None:
        self.width = 2.0

    def twice(self, x):
        return x * 2


class OtherPlain(Plain):
    shared = 3.0

    def twice(self, x):
        return x * 2 + 1


class Slotted:
    __slots__ = ("level",)

    def __init__(self) -> None:
        self.level = 1.0


class Sub(nn.Module):
    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), value))

    def forward(self, x):
        return x * self.weight


class OtherSub(Sub):
    def forward(self, x):
        return x + self.weight


def world(folder: Any) -> types.SimpleNamespace:
    """A module with all that it reads, each in classes and functions of its own."""

    class Net(nn.Module):
        kind_of = 1.0

        def __init__(self) -> None:
            super().__init__()
            self.sub, self.scale = Sub(), 1.0
            self.register_buffer("shift", torch.ones(3))
            self.factor = nn.Parameter(torch.ones(3))
            self.steps, self.table = [1.0], {"a": 1.0, "b": [2.0]}

        def forward(self, x):
            x = self.sub(x) * self.factor + self.shift * self.scale + self.kind_of
            for step in self.steps:
                x = x + step
            x = x * self.table["a"] + self.table["b"][0]
            x = held.twice(x) * held.width + held.shared + slotted.level
            x = with_defaults(x)
            return outer.scaled(x) + outer.SCALE + cell

    class Held(Plain):
        pass

    def with_defaults(x, by=1.0, *, plus=0.0):
        return x * by + plus

    def set_cell(value: float) -> None:
        nonlocal cell
        cell = value

    cell = 1.0
    (folder / f"{MODULE}.py").write_text(TEXT.format(1.0, 1.0))
    importlib.invalidate_caches()
    sys.modules.pop(MODULE, None)
    outer: Any = importlib.import_module(MODULE)
    held, slotted = Held(), Slotted()
    return types.SimpleNamespace(
        net=Net(),
        held=held,
        slotted=slotted,
        function=with_defaults,
        set_cell=set_cell,
        outer=outer,
        cls=Net,
        folder=folder,
    )


def scaled(by: float, skip: int = 0) -> Callable:
    """A function of its own; `skip` arguments come before the tensor."""
    return lambda *given: given[skip] * by


def reloaded(w: Any) -> None:
    path = w.folder / f"{MODULE}.py"
    path.write_text(
        TEXT.format(number(), number()) + "#" * (next(NUMBERS) % 50)
    )  # another size: Python's cache of bytecode looks at that
    importlib.invalidate_caches()
    importlib.reload(w.outer)


def replaced(function: types.FunctionType) -> None:
    plus = number()

    def other(x, by=1.0, *, plus=plus):
        return x * by - plus

    function.__code__, function.__kwdefaults__ = other.__code__, {"plus": plus}


VALUES: dict[str, Callable[[], Any]] = {
    "sub": lambda: OtherSub(number()),
    "shift": tensor,
    "factor": lambda: nn.Parameter(tensor()),
    "scale": number,
    "kind_of": number,
    "steps": lambda: [number(), 1.0],
    "table": lambda: {"a": number(), "b": [number()]},
}
WAYS: dict[str, Callable[[Any, str, Any], Any]] = {
    "setattr": setattr,
    "object.__setattr__": object.__setattr__,
    "__dict__": lambda net, name, value: net.__dict__.__setitem__(name, value),
    "vars": lambda net, name, value: vars(net).update({name: value}),
}


def drop(net: nn.Module, name: str) -> None:
    """Delete what hides a name, where something is left behind it."""
    if name in net.__dict__ and (
        name == "kind_of" or any(name in net.__dict__[t] for t in ("_modules", "_parameters", "_buffers"))
    ):
        del net.__dict__[name]


CHANGES: dict[str, Callable[[Any], Any]] = {
    f"{way} {name}": lambda w, name=name, make=make, put=put: put(w.net, name, make())
    for name, make in VALUES.items()
    for way, put in WAYS.items()
}
CHANGES |= {f"del {name}": lambda w, name=name: drop(w.net, name) for name in VALUES}
CHANGES |= {
    "class of a module": lambda w: setattr(w.net._modules["sub"], "__class__", OtherSub),
    "class back": lambda w: setattr(w.net._modules["sub"], "__class__", Sub),
    "class of an object": lambda w: setattr(w.held, "__class__", type("Held", (OtherPlain,), {"shared": number()})),
    "class attribute": lambda w: setattr(w.cls, "kind_of", number()),
    "class attribute of a parameter's name": lambda w: setattr(w.cls, "factor", number()),
    "class attribute of an object": lambda w: setattr(type(w.held), "shared", number()),
    "attribute before a class's": lambda w: setattr(w.held, "shared", number()),
    "method of a class": lambda w: setattr(type(w.held), "twice", scaled(number(), skip=1)),
    "method of an instance": lambda w: setattr(w.held, "twice", scaled(number())),
    "slot": lambda w: setattr(w.slotted, "level", number()),
    "slot by its member": lambda w: Slotted.level.__set__(w.slotted, number()),  # type: ignore[attr-defined]
    "item of a list": lambda w: w.net.steps.append(number()),
    "slice of a list": lambda w: w.net.steps.__setitem__(slice(None), [number()]),
    "item of a dict": lambda w: w.net.table.__setitem__("a", number()),
    "item of a list in a dict": lambda w: w.net.table["b"].__setitem__(0, number()),
    "parameter in its table": lambda w: w.net._parameters.__setitem__("factor", nn.Parameter(tensor())),
    "module in its table": lambda w: w.net._modules.__setitem__("sub", OtherSub(number())),
    "data": lambda w: setattr(w.net._parameters["factor"], "data", tensor()),
    "in place": lambda w: w.net._buffers["shift"].fill_(number()),
    "cell": lambda w: w.set_cell(number()),
    "global of a module": lambda w: setattr(w.outer, "SCALE", number()),
    "global in its dict": lambda w: w.outer.__dict__.update(SCALE=number()),
    "function of a module": lambda w: setattr(w.outer, "scaled", scaled(number())),
    "reload": reloaded,
    "defaults": lambda w: setattr(w.function, "__defaults__", (number(),)),
    "keyword defaults": lambda w: setattr(w.function, "__kwdefaults__", {"plus": number()}),
    "keyword default in its dict": lambda w: w.function.__kwdefaults__.update(plus=number()),
    "code": lambda w: replaced(w.function),
    "forward of an instance": lambda w: w.net._modules["sub"].__dict__.update(forward=scaled(number())),
}


@pytest.fixture
def folder(tmp_path: Any, monkeypatch: Any) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop(MODULE, None)


def play(names: list[str], mode: str, folder: Any, backend: str = "eager") -> None:
    w, x = world(folder), torch.tensor([1.0, 2.0, 3.0])
    jitted = jit(w.net, capture_mode=mode, backend=backend)
    with torch.no_grad():
        torch.testing.assert_close(jitted(x), w.net(x))
        torch.testing.assert_close(jitted(x), w.net(x))
        for place, name in enumerate(names):
            CHANGES[name](w)
            wanted = w.net(x)
            for _ in range(2):
                torch.testing.assert_close(
                    jitted(x),
                    wanted,
                    msg=lambda text: f"stale after {names[: place + 1]}: {text}",  # noqa: B023
                )


@pytest.mark.full
@pytest.mark.parametrize("mode", MODES)
def test_each_change(mode: str, folder: Any) -> None:
    """One program for each change, and for it after a change of the same thing in another way."""
    names = sorted(CHANGES)
    for start in range(0, len(names), 6):
        play(names[start : start + 6], mode, folder)


LAW: dict[str, Any] = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
PROGRAMS = st.lists(st.sampled_from(sorted(CHANGES)), min_size=2, max_size=6)


@pytest.mark.full
@given(PROGRAMS, st.sampled_from(MODES[:2]))
@settings(max_examples=60, derandomize=True, **LAW)
def test_sequences_of_changes(folder: Any, names: list[str], mode: str) -> None:
    play(names, mode, folder)


@pytest.mark.slow
@given(PROGRAMS, st.sampled_from(MODES))
@settings(max_examples=2000, **LAW)
def test_many_sequences_of_changes(folder: Any, names: list[str], mode: str) -> None:
    play(names, mode, folder)
