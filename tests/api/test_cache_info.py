"""cache_info(): how many specialisations there are, why each was made, the limit, and what a failed capture leaves
behind.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

import fusejit
from fusejit import jit

GAIN = 2.0


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.flag, self.value, self.weight = True, 5, nn.Parameter(torch.ones(3))

    def forward(self, x, k=1):
        return x * self.value * self.weight * k * GAIN if self.flag else x


def test_reasons():
    global GAIN
    net = Net()
    jitted, x = jit(net), torch.ones(3)
    jitted(x)
    jitted(torch.ones(2, 3))
    jitted(x.double())
    net.flag = False
    jitted(x)
    net.flag = True
    jitted(x)
    GAIN = 3.0
    jitted(x)
    jitted(x, 2)
    jitted(x, k=3)
    with torch.no_grad():
        jitted(x)
    net.weight.data = torch.ones(3, dtype=torch.float64)
    jitted(x)
    net.weight.requires_grad_(False)
    jitted(x)
    GAIN = 2.0
    info = jitted.cache_info()
    assert info.reasons == (
        "first call",
        "shape of argument x changed from (3,) to (2, 3)",
        "dtype of argument x changed from torch.float32 to torch.float64",
        "attribute Net.flag changed from True to False",
        "global GAIN changed from 2.0 to 3.0",
        "the arguments have another structure: other containers, lengths or names",
        "the arguments have another structure: other containers, lengths or names",
        "grad mode changed from True to False",
        "dtype of parameter Net.weight changed from torch.float32 to torch.float64",
        "requires_grad of parameter Net.weight changed from True to False",
    )
    assert info[:4] == (10, 1, 10, 0)
    assert jitted.explain(x).why


@pytest.mark.parametrize(
    ("first", "then", "reason"),
    [
        ((1, [1]), (2, [1]), "argument k changed from 1 to 2"),
        ((1, [1]), (1.0, [1]), "type of argument k changed from int to float"),
        ((1, [1]), (1, [4]), "argument items[0] changed from 1 to 4"),
        ((1, [1]), (1, [1, 2]), "the arguments have another structure: other containers, lengths or names"),
        ((1, ["a"]), (1, ["b"]), "argument items[0] changed from a to b"),
    ],
)
def test_reasons_of_arguments(first, then, reason):
    jitted = jit(lambda x, k, items: x * k)
    jitted(torch.ones(2), *first)
    jitted(torch.ones(2), *then)
    assert jitted.cache_info().reasons == ("first call", reason)


def test_reasons_of_tensors_and_closures():
    scale = 2.0
    jitted = jit(lambda x, y: x * y * scale)
    x = torch.ones(3)
    jitted(x, torch.ones(3))
    jitted(x, x)
    jitted(x.requires_grad_(), torch.ones(3))
    scale = 3.0
    jitted(x, torch.ones(3))
    assert jitted.cache_info().reasons[1:] == (
        "other arguments are one and the same tensor",
        "requires_grad of argument x changed from False to True",
        "closure variable scale changed from 2.0 to 3.0",
    )


def test_case_51_a_changed_attribute_is_seen():
    class Add:
        def __init__(self):
            self.value = 5

        @jit
        def add(self, x):
            return x + self.value

    for mode in ("ast", "trace", "bytecode"):
        net = Net()
        net.weight.requires_grad_(False)
        jitted, x = jit(net, capture_mode=mode), torch.tensor([1.0, 2.0, 3.0])
        net.value = 5
        assert jitted(x).tolist() == [10, 20, 30]
        net.value = 1
        assert jitted(x).tolist() == [2, 4, 6]
    one = Add()
    x = torch.tensor([1, 2, 3])
    assert one.add(x).tolist() == [6, 7, 8]
    one.value = 1
    assert one.add(x).tolist() == [2, 3, 4]


@pytest.fixture
def limit(monkeypatch: Any) -> int:
    monkeypatch.setenv("FUSEJIT_SPECIALISATIONS", "4")
    return 4


def test_the_limit(limit, caplog):
    ran = threading.Semaphore(0)  # counts calls: what capture does not look into

    def f(x):
        ran.release()
        return x * 2

    jitted = jit(f, dynamic=False)
    for size in range(1, 10):
        assert jitted(torch.ones(size)).sum() == 2 * size
    assert jitted.cache_info()[:3] == (limit, 0, limit)
    said = [record.message for record in caplog.records if "more than 4 specialisations" in record.message]
    assert len(said) == 1 and "shape of argument x changed from (3,) to (4,)" in said[0]
    count = ran._value
    jitted(torch.ones(2))
    assert ran._value == count and jitted.cache_info().hits == 1  # what there is still runs
    jitted(torch.ones(20))
    assert ran._value == count + 1
    (fallback,) = jitted.explain(torch.ones(20)).fallbacks
    assert "more than 4" in fallback.op and "FUSEJIT_SPECIALISATIONS" in fallback.reason
    assert not jitted.explain(torch.ones(2)).fallbacks
    jitted.cache_clear()
    jitted(torch.ones(20))
    assert jitted.cache_info().specialisations == 1


def test_the_limit_is_sixteen(monkeypatch):
    jitted = jit(lambda x: x * 2, dynamic=False)
    for size in range(1, 20):
        jitted(torch.ones(size))
    assert jitted.cache_info().specialisations == 16
    monkeypatch.setenv("FUSEJIT_STRICT", "1")
    with pytest.raises(fusejit.CaptureError, match="16 specialisations already"):
        jitted(torch.ones(30))


def test_each_object_has_its_own_limit(limit):
    class Scale:
        def __init__(self, k):
            self.k = k

        @jit
        def apply(self, x):
            return x * self.k

    objects, x = [Scale(k) for k in range(10)], torch.ones(2)
    for _ in range(2):
        assert [item.apply(x)[0].item() for item in objects] == list(range(10))
    info = Scale.apply.cache_info()
    assert info[:3] == (10, 10, 10) and set(info.reasons) == {"first call"}
    for k in range(100):  # of many objects, only the last ones' programs are kept
        Scale(k).apply(x)
    assert Scale.apply.cache_info().specialisations == 16 * limit


def test_case_55_a_warning_names_the_argument(caplog):
    jitted, x = jit(lambda x, rate, items: x * rate, backend="eager"), torch.ones(2)
    for rate in range(8):
        jitted(x, rate, (1, 2))
    said = [record.message for record in caplog.records if "keeps changing" in record.message]
    assert len(said) == 1 and "argument rate" in said[0] and "fusejit.mutable" in said[0]
    caplog.clear()
    jitted = jit(lambda x, held: x * held[0])
    for k in range(8):  # tensors in a tuple are inputs, not constants: nothing recompiles
        assert jitted(x, (torch.full((2,), float(k)), 1))[0] == k
    assert jitted.cache_info()[:3] == (1, 7, 1) and not caplog.records


def test_a_failed_capture_leaves_nothing():
    def f(x, fail):
        if fail:
            raise ZeroDivisionError
        return x * 2

    for mode in ("ast", "trace", "bytecode"):
        jitted, x = jit(f, capture_mode=mode), torch.ones(2)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                jitted(x, True)
        assert jitted.cache_info().specialisations == 0
        assert jitted(x, False)[0] == 2 and jitted.cache_info().specialisations == 1


def test_threads_compile_once():
    traced, barrier = threading.Semaphore(0), threading.Barrier(6)

    def f(x):
        traced.release()
        return x * 2

    jitted = jit(f)

    def work():
        barrier.wait()
        assert jitted(torch.ones(3))[0] == 2

    threads = [threading.Thread(target=work) for _ in range(6)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert traced._value == 1 and jitted.cache_info().specialisations == 1
