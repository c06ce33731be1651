"""Threads, forks, spawned processes, ranks, copies and pickles of jitted functions and modules."""

from __future__ import annotations

import copy
import io
import itertools
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fusejit
from fusejit import jit


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    ["forks", "spawns", "fork_with_compile_workers", "ranks", pytest.param("ranks interpret", marks=pytest.mark.slow)],
)
def test_in_processes_of_its_own(name):
    if sys.platform == "win32":
        pytest.skip("no fork there")
    script = Path(__file__).parents[1] / "processes.py"
    paths = os.pathsep.join(filter(None, (str(script.parent.parent), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, str(script), *name.split()], capture_output=True, text=True, timeout=240, env=environment
    )
    assert done.returncode == 0 and done.stdout.endswith("ok\n"), done.stdout + done.stderr


def together(work, count: int = 8) -> None:
    """Call `work(number)` in threads that start at once; what one raises comes out."""
    with (
        FakeTensorMode()
    ):  # a CUDA build without a GPU replaces its device guard at the first of these, under the ops of other threads
        barrier, failures = threading.Barrier(count), []

    def run(number: int) -> None:
        barrier.wait()
        try:
            work(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    if failures:
        raise failures[0]


@pytest.mark.parametrize("mode", ["ast", "trace"])
def test_first_calls_of_threads_capture_each_kind_once(mode):
    traced = threading.Semaphore(0)

    def f(x):
        traced.release()
        return x * 2

    jitted = jit(f, capture_mode=mode, dynamic=False)

    def work(number: int) -> None:
        size = number % 3 + 1
        for k in range(5):
            assert jitted(torch.full((size,), float(k))).tolist() == [2.0 * k] * size

    together(work)
    info = jitted.cache_info()
    assert traced._value == info.specialisations == info.misses == 3


def test_first_calls_of_threads_read_the_bytecode_once():
    jitted, x = jit(lambda x: x * 2.0, capture_mode="bytecode"), torch.ones(3)

    def work(number: int) -> None:
        for _ in range(5):
            assert jitted(x).tolist() == [2.0] * 3

    together(work)
    assert jitted.cache_info().specialisations == 1


def test_first_gradients_of_threads_compile_one_backward(backend):
    jitted = jit(lambda x, w: (x * w).tanh(), backend=backend)
    x, w = torch.linspace(-1, 1, 4), torch.full((4,), 2.0)
    leaf = w.clone().requires_grad_()
    (x * leaf).tanh().backward(torch.ones(4))
    found = jitted.specialisation(x, w.clone().requires_grad_())
    compiled, compiler = itertools.count(), found.built.differentiable.compiler
    found.built.differentiable.compiler = lambda *given: (next(compiled), compiler(*given))[1]

    def work(number: int) -> None:
        own = w.clone().requires_grad_()
        jitted(x, own).backward(torch.ones(4))
        torch.testing.assert_close(own.grad, leaf.grad)

    together(work, 4)
    assert next(compiled) == 1 and jitted.cache_info().misses == 1


def test_captures_of_one_thread_do_not_disturb_calls_of_others():
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    ready, x = jit(net), torch.ones(2, 3)
    wanted = ready(x)

    def work(number: int) -> None:
        for k in range(20):
            if number % 2:
                torch.testing.assert_close(jit(nn.Linear(3, 3))(x).shape, wanted.shape)
            else:
                net.extra = k  # attribute writes of this thread are not the capture's
                assert torch.equal(ready(x), wanted)

    together(work, 4)
    assert ready.cache_info()[:3] == (1, 40, 1) and net.extra == 19


# Copies and pickles.


@jit
def named(x):
    return x + 1


class Scale:
    def __init__(self, k: float) -> None:
        self.k = k

    @jit
    def apply(self, x):
        return x * self.k

    def __call__(self, x):
        return x * self.k


class Owner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = jit(nn.Linear(2, 2))
        self.act = named
        self.scale = Scale(2.0).apply

    def forward(self, x):
        return self.scale(self.act(self.inner(x)))


def round_trip(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda v: pickle.loads(pickle.dumps(v)),
    "torch.save": round_trip,
}


@pytest.mark.parametrize("how", COPIES)
def test_copies(how):
    take, x = COPIES[how], torch.ones(2)
    assert take(named) is named and take(Scale.apply) is Scale.apply  # as functions are
    scale = Scale(3.0)
    method = take(scale.apply)
    assert method(x).tolist() == [3, 3] and (method.receiver is scale) == (how == "copy")
    assert method.function is Scale.apply
    called = take(jit(scale, backend="eager"))
    assert called(x).tolist() == [3, 3] and called.settings.backend == "eager"
    assert (called.__wrapped__ is scale) == (how == "copy")
    bound = take(jit(scale.__call__))
    assert bound(x).tolist() == [3, 3] and (bound.__wrapped__.__self__ is scale) == (how == "copy")


def test_a_function_without_a_name_is_copied_but_not_pickled():
    jitted = jit(lambda x: x + 1)
    assert copy.deepcopy(jitted) is jitted and copy.copy(jitted) is jitted
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        pickle.dumps(jitted)


def doubled(module, given, result):
    return result * 2


@pytest.mark.parametrize("how", COPIES)
def test_copies_of_modules(how):
    take, x = COPIES[how], torch.ones(1, 2)
    jitted = jit(nn.Linear(2, 2), jit_level="O1", backend="eager")
    jitted.register_forward_hook(doubled)
    made = take(jitted)
    assert type(made) is type(jitted) and made._fusejit_settings.jit_level == "O1"
    torch.testing.assert_close(made(x), jitted.__wrapped__(x) * 2)
    shared = made.weight is jitted.weight
    assert shared == (how == "copy")
    if not shared:
        with torch.no_grad():
            made.weight.zero_()
        assert jitted.weight.abs().sum() > 0
        torch.testing.assert_close(made(x), made.bias[None] * 2)
    owner = Owner()
    twin = take(owner)
    torch.testing.assert_close(twin(x), owner(x))
    assert list(twin.state_dict()) == ["inner.weight", "inner.bias"]


def test_state_dict_has_no_prefix_and_loads_both_ways():
    plain, jitted = (
        nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)),
        jit(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))),
    )
    x = torch.randn(4, 2)
    jitted(x)
    assert list(jitted.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(jitted.state_dict())
    torch.testing.assert_close(plain.eval()(x), jitted.eval()(x))
    other = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).eval()
    for assign in (False, True):
        assert str(jitted.load_state_dict(other.state_dict(), assign=assign)) == "<All keys matched successfully>"
        torch.testing.assert_close(jitted(x), other(x))
    with pytest.raises(RuntimeError, match="Missing key"):
        jitted.load_state_dict({})


def test_a_parallel_module_is_not_captured():
    class Inner(nn.Linear):
        pass

    module = nn.DataParallel(Inner(2, 2))
    x = torch.ones(1, 2)
    for mode in ("ast", "trace"):
        jitted = jit(module, capture_mode=mode)
        torch.testing.assert_close(jitted(x), module(x))
        (fallback,) = jitted.explain(x).fallbacks
        assert "DataParallel inside a jitted function" in str(fallback) and "Parallel(fusejit.jit(m))" in str(fallback)
        with pytest.raises(fusejit.CaptureError, match="DataParallel"):
            jit(module, capture_mode=mode, fullgraph=True)(x)
