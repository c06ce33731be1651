"""What gives another result at each call: iterators, random generators, clocks and files from outside are never frozen
into a graph.
"""

from __future__ import annotations

import datetime
import itertools
import random
import time

import numpy as np
import pytest
import torch

import fusejit

COUNT = itertools.count()
NUMBERS = iter(range(100))
LATER = (n for n in range(100))
PYTHON = random.Random(0)
NUMPY = np.random.default_rng(0)
LEGACY = np.random.RandomState(0)


class Holder:
    def __init__(self):
        self.numbers = iter(range(100))
        self.generator = random.Random(1)

    def item(self, x):
        return x + next(self.numbers)

    def draw(self, x):
        return x + self.generator.random()


HOLDER = Holder()
STREAMS = {
    "count": lambda x: x + next(COUNT),
    "iterator": lambda x: x + next(NUMBERS),
    "generator function": lambda x: x + next(LATER),
    "attribute": HOLDER.item,
    "random": lambda x: x + random.random(),
    "random.Random": lambda x: x + PYTHON.random(),
    "attribute that draws": HOLDER.draw,
    "numpy": lambda x: x + np.random.rand(),
    "numpy Generator": lambda x: x + NUMPY.random(),
    "numpy RandomState": lambda x: x + LEGACY.rand(),
    "clock": lambda x: x + time.perf_counter(),
    "date": lambda x: x + datetime.datetime.now().microsecond,
}


@pytest.mark.parametrize("name", STREAMS)
def test_each_call_gets_the_next(name):
    jitted, x = fusejit.jit(STREAMS[name], backend="eager"), torch.zeros((), dtype=torch.float64)
    found = []
    for _ in range(3):
        found.append(jitted(x).item())
        time.sleep(1e-5)
    assert len(set(found)) == 3
    assert jitted.cache_info().fallbacks == 1


def test_a_refused_capture_draws_and_takes_nothing():
    numbers, generator, numpys = iter(range(9)), random.Random(3), np.random.default_rng(3)

    def taken(x):
        return x + next(numbers)

    def drawn(x):
        return x + generator.gauss(0, 1)

    def drawn_by_numpy(x):
        return x + numpys.random()

    for fn, line in (
        (taken, r"test_streams\.py:\d+"),
        (drawn, r"test_streams\.py:\d+"),
        (drawn_by_numpy, "numpy's random numbers"),
    ):
        with pytest.raises(fusejit.CaptureError, match=line):
            fusejit.jit(fn, backend="eager", fullgraph=True)(torch.zeros(()))
    assert next(numbers) == 0
    assert generator.random() == random.Random(3).random()
    assert numpys.random() == np.random.default_rng(3).random()


def test_a_file_is_read_at_each_call(tmp_path):
    path = tmp_path / "scale.txt"

    def f(x):
        with open(path) as file:
            return x * float(file.read())

    jitted = fusejit.jit(f, backend="eager")
    for text in ("2.0", "3.0"):
        path.write_text(text)
        assert jitted(torch.ones(())).item() == float(text)


def test_iterators_of_the_function_itself_are_captured():
    def f(x, parts):
        numbers = itertools.count(1)
        return sum(part * next(numbers) for part in parts) + next(iter([x]))

    x = torch.ones(3)
    torch.testing.assert_close(fusejit.jit(f, backend="eager", fullgraph=True)(x, [x, x]), f(x, [x, x]))
