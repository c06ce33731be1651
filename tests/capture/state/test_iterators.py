"""What gives another result at each call: iterators, random generators, clocks and files from outside are never frozen
into a graph.
"""

from __future__ import annotations

import datetime
import itertools
import random
import threading
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
        (taken, r"test_iterators\.py:\d+"),
        (drawn, r"test_iterators\.py:\d+"),
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


def others_draw(draw, fn, *, times):
    """What another thread draws while `fn` is captured by many jitted functions; and the captures."""
    drawn, stop = [], threading.Event()

    def work():
        while not stop.is_set():
            drawn.append(draw())
            time.sleep(0)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        jits = [fusejit.jit(lambda x, k=k: fn(x) + k, backend="eager") for k in range(times)]
        results = [jitted(torch.ones(3)) for jitted in jits]
    finally:
        stop.set()
        thread.join()
    return drawn, jits, results


DRAWS = {
    "random": random.random,
    "gauss": lambda: random.gauss(0, 1),
    "numpy": np.random.rand,
    "torch": lambda: torch.rand(()).item(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_capture_leaves_what_others_draw(name):
    drawn, jits, _ = others_draw(DRAWS[name], lambda x: (x * 2).sin().sum(), times=12)
    if name == "torch":  # of which float32 has 2**24
        assert len(set(drawn)) > 0.9 * len(drawn)
    else:
        assert len(set(drawn)) == len(drawn)
    assert not any(jitted.cache_info().fallbacks for jitted in jits)


def test_a_thread_goes_on_in_its_sequence():
    drawn, _, _ = others_draw(random.Random(7).random, lambda x: x * 2, times=6)
    expected = random.Random(7)
    assert drawn == [expected.random() for _ in drawn]


def read_numbers(x):
    return x + PYTHON.gauss(0, 1)


def saved(x):
    return x + random.gauss(0, 1)


def directly(x):
    return x + RAND()


RAND = np.random.rand
SEEDED = {
    "gauss": (random.seed, saved), "randint": (random.seed, lambda x: x + random.randint(0, 1 << 40)),
    "choice": (random.seed, lambda x: x * random.choice(range(1 << 40))),
    "sample": (random.seed, lambda x: x + random.sample(range(99), 3)[0]),
    "numpy": (np.random.seed, lambda x: x + np.random.normal()),
    "numpy choice": (np.random.seed, lambda x: x + int(np.random.choice(1 << 30))),
    "numpy by its name": (np.random.seed, directly),
}  # fmt: skip


@pytest.mark.parametrize("name", SEEDED)
def test_the_sequence_is_eager_s(name):
    seed, fn = SEEDED[name]
    x = torch.zeros((), dtype=torch.float64)
    seed(5)
    wanted = [fn(x).item() for _ in range(4)]
    seed(5)
    jitted = fusejit.jit(fn, backend="eager")
    assert [jitted(x).item() for _ in range(4)] == wanted
    assert "test_iterators.py" in str(jitted.explain(x).fallbacks[0]) or name == "numpy by its name"


def test_a_draw_that_python_leaves_out_is_no_reason():
    def f(x, noise=False):
        return x * 2 + (np.random.rand() + random.random() if noise else 0)

    jitted = fusejit.jit(f, backend="eager", fullgraph=True)
    torch.testing.assert_close(jitted(torch.ones(3)), torch.full((3,), 2.0))
    jitted(torch.ones(3))
    assert jitted.cache_info().specialisations == 1
