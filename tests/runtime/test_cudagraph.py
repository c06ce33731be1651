"""CUDA graphs: which addresses, copies and results a replay may use, with a driver that records and replays on the CPU;
the real thing with `-m gpu`.
"""

from __future__ import annotations

import gc
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fusejit import jit
from fusejit.codegen.ir.effects import effect
from fusejit.codegen.ir.graph import Extern
from fusejit.runtime import cudagraph
from fusejit.runtime.cudagraph import MOST, WARM, Recorded, waits


class Fake:
    """Records a Program with the memory that it was given, and replays it there, on the CPU.

    As on a device, recording computes nothing: the results hold garbage, and inputs keep their values, until the first
    replay.
    """

    device = "cpu"

    def __init__(self) -> None:
        self.recorded = self.replayed = 0
        self.occupied, self.current, self.broken = False, 1, ""

    def busy(self) -> bool:
        return self.occupied

    def stream(self) -> int:
        return self.current

    def record(self, program: Any, inputs: list[Any]) -> tuple[Any, list[Any]]:
        if self.broken:
            raise RuntimeError(self.broken)
        self.recorded += 1
        before = [value.clone() for value in inputs]
        results = list(program(list(inputs)))
        for value, old in zip(inputs, before):
            value.data.copy_(old)
        for result in results:
            if not any(result is value for value in inputs) and result.is_floating_point():
                result.fill_(float("nan"))
        return (program, inputs, results), results

    def replay(self, recording: Any) -> None:
        self.replayed += 1
        program, inputs, results = recording
        for kept, value in zip(results, program(list(inputs))):
            if kept is not value:
                kept.data.copy_(value)  # as a device does: without a trace in the version


class Doubled:
    """A Program by hand: (x * 2 + w, x), and, where asked, `counter += 1`."""

    called: tuple = ()
    externs: tuple = ()

    def __init__(self, changes: bool = False, names: tuple = ("x", "w", "n")) -> None:
        self.inputs, self.changes, self.runs = names, changes, 0
        row = SimpleNamespace(name="x", device=torch.device("cpu"), shape=(4,), strides=(1,), written_to="")
        self.buffers = {"x": row}
        if changes:
            self.buffers["c"] = SimpleNamespace(**{**vars(row), "name": "c", "written_to": "n"})

    def __call__(self, args: list) -> tuple:
        x, w, n = args
        args.clear()
        self.runs += 1
        if self.changes:
            n.add_(1)
        return x * 2 + w, n


def ready(**more: Any) -> tuple[Recorded, Fake]:
    driver = Fake()
    return Recorded(Doubled(**more), driver), driver


def call(recorded: Recorded, k: float, w: torch.Tensor, n: torch.Tensor, x: torch.Tensor | None = None) -> torch.Tensor:
    x = torch.full((4,), k) if x is None else x.fill_(k)
    result, same = recorded([x, w, n])
    assert same is n, "a result that is an input is the caller's tensor"
    assert torch.equal(result, torch.full((4,), k * 2) + w)
    return result


def test_addresses_that_repeat_are_read_in_place():
    recorded, driver = ready()
    x, w, n = torch.ones(4), torch.ones(4), torch.zeros(4)
    assert "0 of 2 calls before" in recorded.state
    for k in range(WARM + 5):
        call(recorded, float(k), w, n, x)
    assert (driver.recorded, driver.replayed) == (1, 5) and not recorded.moving
    assert recorded.state == "replayed: 1 recording, 3 of 3 inputs read in place"
    w.mul_(5)  # as an optimizer does
    call(recorded, 3.0, w, n, x)


def test_what_moves_is_copied():
    recorded, driver = ready()
    w, n, kept = torch.ones(4), torch.zeros(4), []
    for k in range(WARM + 5):
        kept.append(torch.full((4,), float(k)))  # alive, so that the next one is elsewhere
        call(recorded, float(k), w, n, kept[-1])
    assert recorded.moving == {0} and driver.recorded == 1
    assert recorded.state.endswith("2 of 3 inputs read in place")


def test_another_address_is_another_recording_until_there_are_too_many():
    recorded, driver = ready()
    x, n = torch.ones(4), torch.zeros(4)
    weights = [torch.full((4,), float(k)) for k in range(MOST + 3)]
    for _ in range(WARM + 1):
        call(recorded, 1.0, weights[0], n, x)
    for w in weights[:MOST]:
        for k in range(3):
            call(recorded, float(k), w, n, x)
    assert driver.recorded == MOST and not recorded.moving
    for w in weights:
        call(recorded, 2.0, w, n, x)
    assert recorded.moving == {1} and len(recorded.recordings) == 1
    count = driver.recorded
    for w in weights:
        call(recorded, 2.0, w, n, x)
    assert driver.recorded == count


def test_results_survive_the_next_call():
    recorded, driver = ready()
    x, w, n = torch.ones(4), torch.ones(4), torch.zeros(4)
    for _ in range(WARM):
        call(recorded, 1.0, w, n, x)
    kept = [call(recorded, float(k), w, n, x) for k in range(6)]
    assert [value.tolist() for value in kept] == [[2.0 * k + 1] * 4 for k in range(6)]
    assert driver.recorded == 2 and len({value.data_ptr() for value in kept}) == 6
    view = kept[0][1:]
    del kept
    assert call(recorded, 9.0, w, n, x) is not None and view.tolist() == [1] * 3, "a view holds the memory too"
    del view
    first = call(recorded, 1.0, w, n, x).data_ptr()
    assert call(recorded, 2.0, w, n, x).data_ptr() == first, "dead results cost no copy"
    assert driver.recorded == 2


@pytest.mark.parametrize("moves", [False, True])
def test_changes_in_place_reach_the_callers_tensor(moves):
    recorded, driver = ready(changes=True)
    x, w, kept = torch.ones(4), torch.ones(4), []
    n = torch.zeros(4)
    for k in range(WARM + 4):
        if moves:
            n = n.clone()
            kept.append(n)
        call(recorded, float(k), w, n, x)
        assert n.tolist() == [k + 1.0] * 4
    assert driver.replayed == 4 and (2 in recorded.moving) == moves


def test_an_input_that_is_not_read_may_move():
    class Unread(Doubled):
        def __call__(self, args: list) -> tuple:
            return (args[0] * 2 + args[1],)

    recorded = Recorded(Unread(names=("x", "w", None)), driver := Fake())
    x, w, kept = torch.ones(4), torch.ones(4), []
    for k in range(WARM + 3):
        kept.append(torch.zeros(4))
        (result,) = recorded([x.fill_(k), w, kept[-1]])
        assert result.tolist() == [2.0 * k + 1] * 4
        del result
    assert driver.recorded == 1 and driver.replayed == 3 and not recorded.moving


def test_calls_that_run_without_a_recording():
    recorded, driver = ready()
    x, w, n = torch.ones(4), torch.ones(4), torch.zeros(4)
    for _ in range(WARM + 1):
        call(recorded, 1.0, w, n, x)
    driver.occupied = True  # during someone else's recording
    call(recorded, 2.0, w, n, x)
    driver.occupied, driver.current = False, 2  # on another stream
    call(recorded, 3.0, w, n, x)
    assert driver.replayed == 1
    driver.current = 1
    with recorded.lock:  # in another thread
        done = []
        thread = threading.Thread(target=lambda: done.append(call(recorded, 4.0, w, n)))
        thread.start()
        thread.join(10)
        assert done
    call(recorded, 5.0, w, n, x)
    assert driver.replayed == 2


def test_a_refusal_of_the_device_is_remembered():
    recorded, driver = ready()
    driver.broken = "operation not permitted when stream is capturing\nmore"
    x, w, n = torch.ones(4), torch.ones(4), torch.zeros(4)
    for k in range(WARM + 3):
        call(recorded, float(k), w, n, x)
    assert recorded.state == "not recorded: the device refuses: operation not permitted when stream is capturing"
    assert recorded.program.runs == WARM + 3


def test_reasons():
    assert Recorded(Doubled(), cudagraph.CudaDriver()).state == "not recorded: x is on the CPU"
    program = Doubled()
    program.buffers["x"].shape = (torch.empty(0),)
    assert Recorded(program, Fake()).reason == "its sizes vary from call to call"
    program = Doubled()
    program.externs = (Extern("aten.nonzero.default", (), (), (), False, "model.py:3"),)
    assert Recorded(program, Fake()).reason == "aten.nonzero.default waits for values on the host (model.py:3)"
    aten, call = torch.ops.aten, lambda op: Extern(str(op), (), (), (), False, "", effect=effect(op))
    assert waits(call(aten._local_scalar_dense.default)) and waits(call(torch.ops.fusejit.print.default))
    assert waits(call(torch.ops.fusejit.piece.default)) and waits(call(torch.ops._c10d_functional.all_reduce.default))
    assert not any(waits(call(op)) for op in (aten.mm.default, aten.randint.default, aten.convolution.default))


# In jitted functions, with the interpreter's kernels.


@pytest.fixture
def drivers(monkeypatch):
    made: list[Fake] = []
    monkeypatch.setattr(cudagraph, "CudaDriver", lambda: made.append(Fake()) or made[-1])
    return made


def test_inference_and_explain(drivers):
    net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2)).requires_grad_(False)
    jitted = jit(net, backend="interpret", cuda_graph=True)
    kept = []
    for _ in range(7):
        x = torch.randn(3, 4)
        kept.append((jitted(x), net(x)))
    for got, wanted in kept:
        torch.testing.assert_close(got, wanted)
    (driver,) = drivers
    assert driver.replayed == 5
    assert "CUDA graph: replayed: " in str(jitted.explain(x))
    assert jitted.program(x).launches and "def call" in jitted.program(x).source


@pytest.mark.parametrize("keep", [False, True])
def test_training(drivers, keep):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 2))
    torch.manual_seed(0)
    other = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 2))
    jitted = jit(other, backend="interpret", cuda_graph=True)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in (plain, other)]
    kept = []
    for step in range(6):
        batches = [torch.randn(5, 4) for _ in range(2)]
        for net in (plain, jitted):
            losses = [net(batch).pow(2).mean() for batch in batches]  # two forwards before the backwards
            for loss in losses:
                loss.backward()
            if keep:
                kept.append(losses)
        for mine, its in zip(other.parameters(), plain.parameters()):
            torch.testing.assert_close(mine.grad, its.grad, msg=lambda text: f"step {step}: {text}")  # noqa: B023
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for mine, its in zip(other.state_dict().values(), plain.state_dict().values()):
        torch.testing.assert_close(mine, its)
    for its, mine in zip(kept[::2], kept[1::2]):
        torch.testing.assert_close(torch.stack(mine), torch.stack(its))
    assert len(drivers) == 2 and all(driver.replayed for driver in drivers)
    x = torch.randn(5, 4)
    assert str(jitted.explain(x)).count("CUDA graph: replayed") == 2


def test_random_numbers_differ_from_call_to_call(drivers):
    jitted = jit(lambda x: torch.nn.functional.dropout(x + 0, 0.5, True), backend="interpret", cuda_graph=True)
    x = torch.ones(64)
    masks = {tuple(jitted(x).tolist()) for _ in range(6)}
    assert len(masks) == 6 and drivers[0].replayed == 4


def test_levels(drivers):
    x = torch.ones(4)
    for options, count in (
        ({"jit_level": "O2"}, 0),
        ({"jit_level": "O3"}, 1),
        ({"jit_level": "O3", "cuda_graph": False}, 1),
    ):
        jit(lambda x: x * 2 + 1, backend="interpret", **options)(x)
        assert len(drivers) == count, options
    with pytest.raises(ValueError, match="cuda_graph"):
        jit(lambda x: x, cuda_graph="yes")


def test_on_the_cpu_the_reason_is_said():
    jitted = jit(lambda x: x * 2 + 1, backend="interpret", cuda_graph=True)
    x = torch.ones(4)
    for _ in range(4):
        assert jitted(x).tolist() == [3] * 4
    assert "CUDA graph: not recorded: " in str(jitted.explain(x)) and "on the CPU" in str(jitted.explain(x))


def test_memory_of_a_freed_recording():
    recorded, driver = ready()
    x, w, n = torch.ones(4), torch.ones(4), torch.zeros(4)
    for _ in range(WARM):
        call(recorded, 1.0, w, n, x)
    kept = call(recorded, 2.0, w, n, x)
    recorded.recordings.clear()
    gc.collect()
    assert kept.tolist() == [5.0] * 4


# On a GPU.


@pytest.mark.gpu
def test_replays_on_a_gpu():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 8)).cuda()
    jitted = jit(net, cuda_graph=True, backend="triton")
    kept = []
    for _ in range(8):
        x = torch.randn(16, 64, device="cuda")
        with torch.no_grad():
            kept.append((jitted(x), net(x)))
        for module in (jitted, net):
            module.zero_grad()
            module(x).pow(2).sum().backward()
            kept.append((module[0].weight.grad.clone(), module[0].weight.grad.clone()))
        torch.testing.assert_close(kept[-2][0], kept[-1][0], atol=1e-4, rtol=1e-4)
    for got, wanted in kept:
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
    assert "CUDA graph: replayed" in str(jitted.explain(x))


@pytest.mark.gpu
def test_random_numbers_and_streams_on_a_gpu():
    jitted = jit(lambda x: torch.nn.functional.dropout(x + 0, 0.5, True), cuda_graph=True, backend="triton")
    x = torch.ones(4096, device="cuda")
    masks = {tuple(jitted(x).tolist()) for _ in range(6)}
    assert len(masks) == 6
    with torch.cuda.stream(torch.cuda.Stream()):
        assert jitted(x).shape == x.shape
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    fused = jit(lambda x: (x * 2 + 1).relu(), cuda_graph=True, backend="triton")
    for _ in range(4):
        fused(x)
    with torch.cuda.graph(graph):  # a call during someone else's recording
        y = fused(x)
    x.fill_(3.0)
    graph.replay()
    torch.cuda.synchronize()
    assert y[0].item() == 7
