"""Soak: many calls over many shapes in several threads, without a wrong answer and without a leak; and what goes away
with its owner.

The full run is 200,000 calls (`--slow`); CI makes 5,000. The figures are printed (`-s`).
"""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fusejit import jit

THREADS = 4
SHAPES = [(rows, columns) for rows in (1, 2, 3, 5, 8) for columns in (1, 2, 3, 4, 6, 7, 9, 12, 16, 33)]


@pytest.fixture(autouse=True)
def _only_what_the_test_makes():
    """Collections look at the test's own objects, and not at what a thousand tests before it have left."""
    gc.freeze()
    yield
    gc.unfreeze()


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def gained(x, scale, k):
    return ((x + 1) * scale).relu() + k, x.sum()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(2.0))
        self.shift = 1.0

    def forward(self, x):
        return (x * self.gain + self.shift).tanh()


def soak(calls: int) -> tuple[float, int, int, tuple]:
    """Returns seconds, resident bytes before and after the measured part, and the cache's sizes before and after."""
    with (
        FakeTensorMode()
    ):  # a CUDA build without a GPU replaces its device guard at the first of these, under the ops of other threads
        failures: list[BaseException] = []
    function, block = jit(gained), jit(Block())
    plain = block.__wrapped__
    data = {shape: torch.linspace(-2, 2, shape[0] * shape[1]).reshape(shape) for shape in SHAPES}
    scales = {shape: torch.linspace(0, 1, shape[1]) for shape in SHAPES}
    wanted = {(shape, k): gained(data[shape], scales[shape], k) for shape in SHAPES for k in (1, 2)}

    def one(rng: random.Random) -> None:
        shape, kind = rng.choice(SHAPES), rng.randrange(8)
        x = data[shape]
        if kind < 5:
            k = rng.choice((1, 2)) if shape[0] == 1 else 1
            got, total = function(x, scales[shape], k)
            assert torch.equal(got, wanted[shape, k][0]) and torch.equal(total, wanted[shape, k][1])
        elif kind < 7:
            with torch.no_grad():
                assert torch.allclose(block(x), (x * plain.gain + 1.0).tanh())
        else:
            leaf = x.clone().requires_grad_()
            result = block(leaf)
            (gradient,) = torch.autograd.grad(result.sum(), leaf)
            assert torch.allclose(gradient, plain.gain.detach() * (1 - result.detach() ** 2), atol=1e-6)

    def work(seed: int, count: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(count):
                one(rng)
        except BaseException as error:
            failures.append(error)

    def together(count: int, seed: int) -> None:
        threads = [threading.Thread(target=work, args=(seed + n, count)) for n in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    together(1_000, 100)  # every kind of call has been captured, or has run into the limit
    sizes = (function.cache_info().specialisations, block.cache_info().specialisations)
    gc.collect()
    before, start = resident(), time.perf_counter()
    together(calls // THREADS, 0)
    seconds = time.perf_counter() - start
    gc.collect()
    after = (function.cache_info().specialisations, block.cache_info().specialisations)
    return seconds, before, resident(), (sizes, after)


@pytest.mark.parametrize("calls", [5_000, pytest.param(200_000, marks=pytest.mark.slow)])
def test_soak(calls, monkeypatch):
    monkeypatch.setenv("FUSEJIT_SPECIALISATIONS", "200")
    seconds, before, after, (sizes, later) = soak(calls)
    print(
        f"{calls} calls, {seconds:.1f} s, {seconds / calls * 1e6:.1f} us a call; {before / 1e6:.1f} to "
        f"{after / 1e6:.1f} MB; cache {sizes}"
    )
    assert later == sizes and sizes[0] <= 60 and sizes[1] <= 100, (sizes, later)
    assert after - before < 8e6, f"{(after - before) / calls:.0f} bytes a call"


def test_soak_at_the_limit(monkeypatch):
    """Kinds of calls beyond the limit run eagerly, and leave nothing."""
    monkeypatch.setenv("FUSEJIT_SPECIALISATIONS", "8")
    _, before, after, (sizes, later) = soak(2_000)
    assert sizes == later and all(
        8 <= size < 8 + THREADS for size in sizes
    )  # threads may pass the limit together, once
    assert after - before < 8e6


# What goes away.


def dead(*references: weakref.ref) -> None:
    for _ in range(3):  # what the end of an object sets free goes at the next collection
        gc.collect()
    assert [reference() for reference in references] == [None] * len(references)


@pytest.mark.parametrize("mode", ["ast", "trace"])
@pytest.mark.parametrize("how", ["unsupported", "error"])
def test_a_failed_capture_holds_nothing(mode, how):
    def f(x, module):
        y = module(x)
        if how == "error":
            raise ZeroDivisionError
        return y if y.sum().item() > 0 else -y

    jitted = jit(f, capture_mode=mode, fullgraph=how == "unsupported")

    def once() -> list:
        x, module = torch.ones(2, 3), nn.Linear(3, 3)
        references = [weakref.ref(x), weakref.ref(module), weakref.ref(module.weight)]
        try:
            jitted(x, module)
        except Exception as error:
            error.__traceback__ = None
            assert type(error).__name__ in ("ZeroDivisionError", "CaptureError")
        else:
            raise AssertionError("it should have failed")
        return references

    dead(*once())
    assert jitted.cache_info().specialisations == 0


@pytest.mark.parametrize("compiled", ["eager", "interpret"])
def test_a_freed_module_takes_its_specialisations_along(compiled):
    def once() -> list:
        module = jit(nn.Sequential(nn.Linear(64, 64), nn.Tanh()), backend=compiled)
        x = torch.ones(2, 64, requires_grad=True)
        module(x).sum().backward()
        found = module.specialisation(x)
        graph = found.captured.graph
        return [weakref.ref(item) for item in (module, module.__wrapped__, module[0].weight, graph, x)]

    dead(*once())


def test_a_freed_function_and_its_closure():
    def once() -> list:
        held = torch.ones(1000)
        jitted = jit(lambda x: x + held)
        jitted(torch.ones(1000))
        return [weakref.ref(held), weakref.ref(jitted)]

    dead(*once())


def test_inputs_and_results_are_not_kept():
    jitted = jit(lambda x, y: (x * y).relu(), backend="interpret")
    x, y = torch.ones(4, requires_grad=True), torch.ones(4)
    result = jitted(x, y)
    references = [weakref.ref(item) for item in (x, y, result)]
    result.sum().backward()
    del x, y, result
    dead(*references)
    assert jitted.cache_info().specialisations == 1


def test_memory_comes_back():
    """Modules that come and go: each is captured, and nothing of it stays."""

    def once() -> None:
        module = jit(nn.Linear(512, 512))  # a megabyte
        module(torch.ones(1, 512))

    for _ in range(5):
        once()
    gc.collect()
    before = resident()
    for _ in range(20):
        once()
    gc.collect()
    assert resident() - before < 10e6
