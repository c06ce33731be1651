"""What Python does around the ops of a function: exceptions, random state, what calls leave behind. Each call does what
eager does.

Every program is made twice, run three times eagerly and three times jitted; results, arguments and what it changed are
compared.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fusejit import jit

PROGRAMS: dict[str, Callable[[], tuple]] = {}
CALLS = 3


def program(make: Callable[[], tuple]) -> Callable[[], tuple]:
    """Register what makes (a function, what it leaves behind, what makes its arguments)."""
    PROGRAMS[make.__name__] = make
    return make


def none() -> None:
    return None


def row() -> tuple:
    return (torch.randn(3),)


# Exceptions: an op that fails leaves nothing in the graph; a refusal that the function itself catches is a refusal all
# the same.


@program
def an_op_that_fails():
    def run(x):
        try:
            y = x @ x
        except RuntimeError:
            y = x.sum()
        return y, x * 3

    return run, none, lambda: (torch.randn(3, 4),)


@program
def a_value_in_a_try():
    def run(x):
        try:
            scale = x.sum().item()
        except Exception:
            scale = 0.0
        return x * scale

    return run, none, row


@program
def a_float_in_a_suppress():
    def run(x):
        scale = 0.0
        with contextlib.suppress(RuntimeError):
            scale = float(x.sum())
        return x * scale

    return run, none, row


@program
def a_refusal_turned_into_another_error():
    def run(x):
        try:
            return x * len(x.tolist())
        except Exception as error:
            raise ValueError("no list") from error

    return run, none, row


@program
def a_change_before_an_error():
    def run(x):
        x.add_(1)
        if x.shape[0] == 3:
            raise KeyError(f"{x.shape}")
        return x

    return run, none, row


@program
def an_error_that_names_a_type():
    return (lambda x: x @ None), none, row


# What calls leave behind, and the next one finds.


class Moving(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("total", torch.zeros(3))
        self.last: Any = None
        self.seen: dict[str, Any] = {}
        self.calls = 0

    def forward(self, x):
        self.mean = self.mean * 0.9 + x.detach() * 0.1
        self.total += x.detach()
        self.last = (x * 2, x.shape)
        self.seen["x"] = self.last[0]
        self.calls += 1  # nothing computes with it
        return x * self.mean + self.total, self.last[0]


@program
def buffers_and_attributes():
    net = Moving()
    return (
        net,
        lambda: (net.mean, net.total, net.last, net.seen, net.last[0] is net.seen["x"]),
        lambda: (torch.randn(3, requires_grad=True),),
    )


@program
def a_hidden_state():
    state = types.SimpleNamespace(hidden=None)

    def run(x):
        state.hidden = x if state.hidden is None else state.hidden.tanh() + x
        return state.hidden * 2

    return run, lambda: state.hidden, row


@program
def a_state_of_two():
    cell = nn.LSTMCell(3, 3)
    net = types.SimpleNamespace(state=(torch.zeros(1, 3), torch.zeros(1, 3)))

    def run(x):
        net.state = tuple(value.detach() for value in cell(x, net.state))
        return net.state[0]

    return run, lambda: net.state, lambda: (torch.randn(1, 3),)


@program
def a_closure_tensor():
    total = torch.zeros(3)

    def run(x):
        nonlocal total
        total = total + x
        return total * 2

    return run, lambda: total, row


@program
def a_counter_that_counts():
    class Count:
        def __init__(self) -> None:
            self.calls = 0

    count = Count()

    def run(x):
        count.calls += 1
        return x * count.calls

    return run, lambda: count.calls, row


@program
def slots_and_class_attributes():
    class Slotted:
        __slots__ = ("total",)
        latest: Any = None

    held = Slotted()
    held.total = torch.zeros(3)

    def run(x):
        held.total = held.total + x
        Slotted.latest = x * 2
        return held.total * 2

    return run, lambda: (held.total, Slotted.latest), row


@program
def a_dict_of_attributes():
    held = types.SimpleNamespace(calls=1)

    def run(x):
        vars(held)["calls"] += 1
        vars(held)["last"] = x * 2
        return x * held.calls

    return run, lambda: vars(held), row


@program
def attributes_of_a_module():
    settings = sys.modules["settings_of_a_user"] = types.ModuleType("settings_of_a_user")
    settings.total, settings.scale = torch.zeros(3), 1  # type: ignore[attr-defined]

    def run(x):
        import settings_of_a_user  # type: ignore[import-not-found]
        from settings_of_a_user import scale

        settings_of_a_user.total = settings_of_a_user.total + x
        settings_of_a_user.scale += 1
        return settings_of_a_user.total * scale * settings_of_a_user.scale

    def arguments():
        settings.scale += 1
        return row()

    return run, lambda: (settings.total, settings.scale), arguments


@program
def a_queue():
    latest: Any = deque(maxlen=2)

    def run(x):
        latest.append(x * 1)
        return torch.stack(list(latest)).mean(0)

    return run, lambda: list(latest), row


@program
def a_list_that_grows():
    seen: list[Any] = []

    def run(x):
        seen.append(x * 2)
        return sum(seen)

    return run, lambda: seen, row


@program
def a_flag_that_turns():
    state = {"even": True}

    def run(x):
        state["even"] = not state["even"]
        return x * 2 if state["even"] else -x

    return run, lambda: state["even"], row


@program
def spectral_norm():
    net = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4))
    return net, lambda: dict(net.state_dict()), row


# What Python asks of a tensor besides its values.


@program
def a_mark_on_an_argument():
    def marked():
        x = torch.randn(3)
        x.scale = int(10 * torch.rand(()))  # type: ignore[attr-defined]
        return (x,)

    return (lambda x: x * getattr(x, "scale", 1)), none, marked


@program
def a_mark_on_a_parameter():
    net = nn.Linear(3, 3)
    net.weight.scale = 1  # type: ignore[attr-defined]

    def arguments():
        net.weight.scale += 1
        return row()

    return (lambda x: net(x) * net.weight.scale), none, arguments


# Random numbers and the state of torch.


@program
def random_state_taken_back():
    def run(x):
        state = torch.get_rng_state()
        y = x + torch.rand(3)
        torch.set_rng_state(state)
        return y, x + torch.rand(3)

    return run, torch.get_rng_state, row


@program
def a_forked_stream():
    def run(x):
        with torch.random.fork_rng(devices=[]):
            y = x + torch.rand(3)
        return y, x + torch.rand(3)

    return run, torch.get_rng_state, row


@program
def a_generator_seeded_inside():
    generator = torch.Generator()
    return (lambda x: x + torch.rand(3, generator=generator.manual_seed(3))), generator.get_state, row


@program
def numpy_generator():
    generator = np.random.default_rng(0)
    return (lambda x: x * generator.random()), none, row


@program
def checkpointed():
    net = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.ReLU())

    def run(x):
        return checkpoint(net, x, use_reentrant=False) + checkpoint(
            lambda y: y.sin() * torch.rand(3), x, use_reentrant=False
        )

    return run, lambda: [weight.grad for weight in net.parameters()], lambda: (torch.randn(4, 3, requires_grad=True),)


@program
def autocast_inside():
    net = nn.Linear(3, 3)

    def run(x):
        with torch.autocast("cpu", torch.bfloat16):
            y = net(x)
            z = y.float() @ x
        return y.detach(), z, net(x)

    return run, none, lambda: (torch.randn(3, 3),)


@program
def a_step_of_an_optimizer():
    net = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def run(x):
        optimizer.zero_grad()
        loss = net(x).pow(2).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return run, lambda: [(weight, weight.grad) for weight in net.parameters()], lambda: (torch.randn(2, 3),)


# Sizes.


@program
def sizes_among_results():
    sizes = iter((3, 5, 7))

    def run(x):
        return x.shape, x.t().shape, slice(0, x.shape[0]), x.shape[0], x * x.shape[0]

    return run, none, lambda: (torch.randn(next(sizes), 4),)


def plain(value: Any) -> Any:
    """A value without gradients, its tensors copied."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone(), value.requires_grad, value.dtype
    if isinstance(value, dict):
        return [(key, plain(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)) and type(value) is not torch.Size:
        return [plain(item) for item in value]
    return type(value).__name__, value


def played(make: Callable[[], tuple], options: dict[str, Any] | None) -> list[Any]:
    """What each call returns or raises, does to its arguments, and leaves behind."""
    torch.manual_seed(0)
    fn, left, arguments = make()
    call = fn if options is None else jit(fn, **options)
    found = []
    for number in range(CALLS):
        torch.manual_seed(number)
        given = arguments()
        try:
            out = call(*given)
        except (RuntimeError, LookupError, ValueError, TypeError) as error:
            out = (type(error).__name__, str(error))
        results = [
            value
            for value in (out if isinstance(out, tuple) else (out,))
            if isinstance(value, torch.Tensor) and value.requires_grad
        ]
        if results and options is None or results and given[0].requires_grad:
            sum((value.float() ** 2).sum() for value in results).backward()
        found.append(plain([out, given, [value.grad for value in given], left(), torch.get_rng_state()]))
    return found


def same(one: Any, other: Any) -> None:
    if isinstance(one, (list, tuple)) and not isinstance(one, torch.Size):
        assert type(one) is type(other) and len(one) == len(other), (one, other)
        for a, b in zip(one, other):
            same(a, b)
    elif isinstance(one, torch.Tensor):
        torch.testing.assert_close(one, other)
    else:
        assert one == other and type(one) is type(other)


OPTIONS: dict[str, dict[str, Any]] = {
    "ast": {},
    "trace": {"capture_mode": "trace"},
    "bytecode": {"capture_mode": "bytecode"},
    "dynamic": {"dynamic": True},
    "interpret": {"backend": "interpret", "numerics": "eager"},
}
COMPILED = {
    "an_op_that_fails",
    "buffers_and_attributes",
    "a_hidden_state",
    "a_list_that_grows",
    "a_queue",
    "checkpointed",
    "a_step_of_an_optimizer",
}
DYNAMO = {"a_queue"}  # which it takes for one without an end
CASES = [
    (name, mode)
    for name in PROGRAMS
    for mode in OPTIONS
    if (mode != "interpret" or name in COMPILED) and (mode != "bytecode" or name not in DYNAMO)
]


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_as_eager(name: str, mode: str) -> None:
    same(played(PROGRAMS[name], None), played(PROGRAMS[name], {"backend": "eager"} | OPTIONS[mode]))


def test_the_type_of_a_tensor():
    def run(x):
        return x * 2 if type(x) is torch.Tensor else x * 3 if type(x) is nn.Parameter else x * 4

    jitted = jit(run, fullgraph=True)
    assert jitted(torch.ones(1)).item() == 2 and jitted(nn.Parameter(torch.ones(1))).item() == 3


def test_what_is_said_of_it(caplog):
    """What calls write again is not spoken of; what nothing can be made of is said with the line."""
    net = Moving()
    jitted = jit(net)
    for _ in range(3):
        jitted(torch.randn(3))
    assert jitted.cache_info()[:4] == (2, 1, 2, 0)  # `seen` was empty at first
    assert not caplog.text and net.calls == 3
    recurrent = jit(a_state_of_two()[0])
    for _ in range(5):
        recurrent(torch.randn(1, 3))
    assert recurrent.cache_info()[:4] == (1, 4, 1, 0)
    caplog.clear()
    jit(a_counter_that_counts()[0])(torch.randn(3))
    assert "eager fallback" in caplog.text and "count.calls += 1" in caplog.text


def test_objects_that_the_body_makes(caplog):
    """A slice of a ModuleList, a box of one call: nothing was there before that later calls would have to repeat, or
    find as it was.
    """

    class Box:
        def __init__(self, value):
            self.value, self.seen = value, []

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.depth = nn.ModuleList([nn.Linear(3, 3) for _ in range(4)]), 2

        def forward(self, x):
            box = Box(x)
            for layer in self.layers[: self.depth]:
                box.value = layer(box.value).relu()
                box.seen.append(box.value.shape)
            return box.value, len(box.seen)

    net, x = Net(), torch.randn(2, 3)
    jitted = jit(net, fullgraph=True, backend="eager")
    with caplog.at_level("WARNING"):
        for depth in (2, 3, 2):
            net.depth = depth
            found, wanted = jitted(x), net(x)
            torch.testing.assert_close(found[0], wanted[0])
            assert found[1] == wanted[1]
    assert not caplog.records and not jitted.explain(x).effects
