"""Never slower than eager: the choice between a tiny Program and the captured graph, with a timer that says what the
test wants; and calls that a program cannot take: the right answer by a slower path, or one clear error.
"""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

import fusejit
from fusejit import jit
from fusejit.runtime import prefer_eager


@pytest.fixture
def timer(monkeypatch):
    """Microseconds of the calls to come: compiled, eager, compiled, ..."""
    times: list[float] = []
    monkeypatch.setattr(prefer_eager, "DEVICE", "cpu")
    monkeypatch.setattr(prefer_eager, "_found", {})
    monkeypatch.setattr(prefer_eager, "elapsed_us", lambda call: (call(), times.pop(0))[1])
    return times


def test_eager_is_kept_where_it_is_quicker(timer):
    timer += [9.0, 5.0]
    jitted, x = jit(lambda x: x * 2 + 1, jit_level="O3", backend="interpret"), torch.ones(8)
    for _ in range(3):
        assert jitted(x).tolist() == [3] * 8
    report = jitted.explain(x)
    assert report.backend == "eager" and not report.kernels
    assert [str(row) for row in report.fallbacks] == [
        "a program of one or two launches: eager, measured: 5.0 us, compiled 9.0 us"
    ]
    again = jit(lambda x: x * 2 + 1, jit_level="O3", backend="interpret")
    again(x)  # the same Program: measured once, no times are left
    assert again.explain(x).backend == "eager" and not timer


@pytest.mark.parametrize("eager", [9.0, 4.8])
def test_compiled_is_kept_where_eager_is_slower_or_about_the_same(timer, eager):
    timer += [5.0, eager]
    jitted, x = jit(lambda x: x * 2 - 1, jit_level="O3", backend="interpret"), torch.ones(8)
    assert jitted(x).tolist() == [1] * 8
    report = jitted.explain(x)
    assert len(report.kernels) == 1 and not report.fallbacks
    assert f"the whole: compiled, measured: 5.0 us, eager {eager} us" in str(report)


def test_nothing_is_measured_while_the_caller_records(timer, monkeypatch):
    monkeypatch.setattr("fusejit.runtime.torch_private.recording", lambda: True)
    jitted, x = jit(lambda x: x * 2 - 7, jit_level="O3", backend="interpret"), torch.ones(8)
    assert jitted(x).tolist() == [-5] * 8
    assert "compiled, not measured: the call is part of a CUDA graph" in str(jitted.explain(x))
    monkeypatch.undo()  # a later function with the same Program measures
    monkeypatch.setattr(prefer_eager, "DEVICE", "cpu")
    asked = []
    monkeypatch.setattr(prefer_eager, "elapsed_us", lambda call: asked.append(call) or 9.0)
    jit(lambda x: x * 2 - 7, jit_level="O3", backend="interpret")(x)
    assert len(asked) == 2


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_nothing_is_measured_below_o3(timer, level):
    jit(lambda x: x * 2 + 3, jit_level=level, backend="interpret")(torch.ones(8))


def test_what_is_never_measured(timer):
    level = {"jit_level": "O3", "backend": "interpret"}
    jit(lambda x: x * 2 + 4, **level)(torch.ones(8, requires_grad=True))  # with gradients
    jit(lambda x, w: (x @ w).relu(), **level)(torch.ones(4, 4), torch.ones(4, 4))  # calls of torch
    jit(lambda x: x.add_(1) * 2, **level)(torch.ones(4))  # changes its input: a measurement would change it again
    jit(lambda x: torch.rand_like(x) * 2, **level)(torch.ones(4))  # draws random numbers
    x = torch.zeros(4)
    changed = jit(lambda x: x.add_(1), **level)
    changed(x)
    assert x.tolist() == [1] * 4


def test_strict_mode_keeps_what_is_compiled(timer, monkeypatch):
    monkeypatch.setenv("FUSEJIT_STRICT", "1")
    jitted, x = jit(lambda x: x * 2 + 5, jit_level="O3", backend="interpret"), torch.ones(8)
    assert jitted(x).tolist() == [7] * 8 and jitted.explain(x).kernels


# Bad input.


@pytest.mark.parametrize("backend", ["eager", "interpret"])
def test_unaligned_overlapping_and_reversed_memory(backend):
    jitted = jit(lambda x, y: (x * 2 + y).relu(), backend=backend)
    base = torch.randn(70)
    views = [base[k : k + 16] for k in (0, 1, 3, 4)] + [
        base[::4][:16],
        base[:1].expand(16),
        base[:16].flip(0),
        base.unfold(0, 16, 1)[2],
    ]
    for x in views:
        for y in views:
            torch.testing.assert_close(jitted(x, y), (x * 2 + y).relu())


@pytest.mark.parametrize("mode", ["ast", "trace"])
def test_another_device(mode):
    """The tensors' device is part of a specialisation; two devices in one call are torch's error or torch's answer."""
    jitted, x = jit(lambda x, y: x * 2 + y, capture_mode=mode), torch.ones(3)
    assert jitted(x, x + 0).tolist() == [3] * 3
    meta = x.to("meta")
    assert jitted(meta, meta).device.type == "meta" and jitted(x, x + 0).tolist() == [3] * 3
    with pytest.raises(RuntimeError, match="device"):
        jitted(x, meta)
    assert jitted(x, torch.tensor(1.0)).tolist() == [3] * 3
    with pytest.raises(fusejit.FusejitError, match="CUDA"):
        jit(lambda x: x + 1, backend="triton")(x)


def test_a_module_that_moved_to_another_device():
    module = nn.Linear(3, 3)
    jitted = jit(module)
    jitted(torch.ones(2, 3))
    module.to("meta")
    assert jitted(torch.ones(2, 3, device="meta")).device.type == "meta"
    with pytest.raises(RuntimeError, match="device|meta"):
        jitted(torch.ones(2, 3))


def test_what_a_jitted_method_was_bound_to_lives_as_long_as_the_method():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(2))

        def forward(self, x):
            return x * self.w

    net = Net()
    forward, kept = jit(net.forward), weakref.ref(net)
    del net
    assert kept() is not None and forward(torch.ones(2)).tolist() == [1, 1]


def test_a_conjugate_or_negative_view_is_read_as_what_it_shows():
    value = torch.tensor([1 + 2j, -3 + 1j])
    for backend in ("eager", "interpret"):
        jitted = jit(lambda x: x * 2 + 1, backend=backend)
        for x in (value.imag, value.conj().imag, value.real, value.conj().real):
            torch.testing.assert_close(jitted(x), x * 2 + 1)
