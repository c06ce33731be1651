"""Schedules: what the model expects, what it chooses, and what measuring at O3 changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_codegen import fused

import fusejit
from fusejit.codegen.emit.writer import render
from fusejit.codegen.passes.schedule import schedule
from fusejit.codegen.schedule import choice
from fusejit.codegen.schedule import cost_model as cost
from fusejit.codegen.schedule.cost_model import pays_to_split
from fusejit.codegen.schedule.device import machine
from fusejit.runtime.autotune import MOST, tune


def only(f, *args):
    (cluster,) = fused(f, *args)[0].steps
    return cluster


def softmax(x):
    return x.softmax(-1)


def test_a_device_is_a_table_of_data():
    h100 = machine("sm_90")
    assert h100.sms == 132 and h100.mixed_programs[0] == (256, 16)
    assert machine("sm_120").sms == h100.sms  # no table of its own


def test_the_choice_is_printed_with_its_reasons():
    _, tiles = schedule(only(softmax, torch.empty(8192, 8192)), machine("sm_90"))
    lines = str(tiles.choice).splitlines()
    assert lines[0].startswith("536.9 MB, 179.0 us at the memory's speed")
    assert str(tiles) in lines[1] and lines[1].endswith("chosen") and "registers" in lines[1] and "waits" in lines[1]
    assert len(lines) > 2 and not any(line.endswith("chosen") for line in lines[2:])


def test_every_constant_of_the_model_is_printed():
    """Nothing that a schedule was chosen by has to be looked up."""
    _, tiles = schedule(only(softmax, torch.empty(8192, 8192)), machine("sm_90"))
    text = str(tiles.choice)
    names = ("MEMORY_WAIT", "ISSUE_WAIT", "GATHER_WAIT", "WARP_WAIT", "BARRIER_WAIT", "FIXED", "ALONE")
    assert all(str(getattr(cost, name)) in choice.CONSTANTS for name in names) and choice.CONSTANTS in text
    assert "132 multiprocessors of 65536 registers, 3.0 TB/s, L2 5.5 TB/s and 40 MB, 2.0 us a launch" in text


def test_short_rows_are_walked_several_at_a_time():
    """So that a few programs keep the memory busy, whose partial sums are few."""
    cluster = only(lambda x: x.softmax(-1), torch.empty(65536, 256))
    tiles = schedule(replace(cluster, programs=264), machine("sm_90"))[1]
    assert tiles.template == "reduction_mixed" and tiles["XBLOCK"] * tiles["RBLOCK"] >= 2048


def test_values_that_are_loaded_alone_want_more_threads():
    """Each of them takes a check and a load of its own."""
    table, rows, scores = torch.empty(512, 64), torch.zeros(1024, dtype=torch.long), torch.empty(1024)

    def gathered(table, rows, scores):
        return (table[rows, 3] * scores).sum()

    warps = [
        schedule(only(f, *args), machine("sm_90"))[1].num_warps
        for f, args in ((gathered, (table, rows, scores)), (lambda x: (x * 2).sum(), (scores,)))
    ]
    assert warps[0] > warps[1]


@pytest.mark.parametrize("columns", [64, 1000, 4096, 16384, 32768])
def test_the_least_cost_wins_and_spills_never(columns):
    _, tiles = schedule(only(softmax, torch.empty(4096, columns)), machine("sm_90"))
    costs = tiles.choice.costs
    assert costs[0].schedule == tiles and costs[0].resident > 0
    assert all(costs[0].us <= c.us + 0.01 for c in costs if c.resident)


def test_small_rows_share_a_program_and_few_rows_do_not():
    def across(rows, columns):
        return schedule(only(softmax, torch.empty(rows, columns)), machine("sm_90"))[1]["XBLOCK"]

    assert across(65536, 64) > 1 and across(200, 256) == 1
    assert across(200, 8) == 16  # one row would leave most lanes of the only warp without a value


def test_a_column_reduction_of_few_columns_fills_the_device():
    tiles = schedule(only(lambda x: x.sum(0), torch.empty(64, 256)), machine("sm_90"))[1]
    assert tiles.template == "reduction_persistent" and tiles["XBLOCK"] == 8


def test_more_multiprocessors_want_more_programs():
    import dataclasses

    cluster = only(softmax, torch.empty(2048, 64))
    small = dataclasses.replace(machine("sm_90"), sms=8)
    assert schedule(cluster, small)[1]["XBLOCK"] > schedule(cluster, machine("sm_90"))[1]["XBLOCK"]


def test_splitting_is_judged_by_time():
    assert pays_to_split(only(softmax, torch.empty(16, 131072)), 2, machine("sm_90"))
    assert not pays_to_split(only(softmax, torch.empty(1024, 131072)), 2, machine("sm_90"))


# -- O3 ----------------------------------------------------------------------------------------------------------------
def candidates():
    program, _ = fused(softmax, torch.empty(8, 2048))
    ready, tiles = schedule(program.steps[0])
    return [
        render(ready, cost.schedule, program.buffers) for cost in tiles.choice.costs if cost.resident
    ], program.buffers


def test_the_quickest_of_the_short_list_is_kept(backend):
    """A clock that is handed in: the third is the quickest."""
    kernels, buffers = candidates()
    assert len(kernels) > 3
    asked = []

    def timer(call):
        call()
        asked.append(call)
        return 5.0 if len(asked) == 3 else 9.0

    found = tune(kernels[:4], buffers, timer)
    assert found.kernel is kernels[2] and found.microseconds == (9.0, 9.0, 5.0, 9.0)
    assert "measured 4" in found.why and str(kernels[0].schedule) in found.why


def test_the_list_is_short(monkeypatch):
    kernels, buffers = candidates()
    monkeypatch.setattr("fusejit.runtime.autotune._launcher", lambda k: lambda *args: None)
    monkeypatch.setattr("fusejit.runtime.autotune.compile_all", lambda launchers: None)
    found = tune(kernels * 3, buffers, lambda call: 1.0)
    assert len(found.microseconds) == MOST and found.kernel is kernels[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, so O3 measures")
def test_without_a_gpu_the_models_choice_is_said_to_be_one():
    kernels, buffers = candidates()
    found = tune(kernels, buffers)
    assert found.kernel is kernels[0] and "no GPU" in found.why


def test_explain_says_how_a_schedule_was_chosen(backend):
    x = torch.randn(64, 512)
    levels = {level: str(fusejit.jit(softmax, backend=backend, jit_level=level).explain(x)) for level in ("O2", "O3")}
    assert "warp" in levels["O2"] and "schedule of" not in levels["O2"]
    assert "schedule of" in levels["O3"] and "model's choice" in levels["O3"]
    assert all("us by the model" in text and "at the memory's speed" in text for text in levels.values())


def test_nothing_is_measured_while_the_caller_records(monkeypatch):
    """A measurement waits for the device, which would break the recording; a later call measures."""
    kernels, buffers = candidates()
    monkeypatch.setattr("fusejit.runtime.torch_private.recording", lambda: True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("fusejit.runtime.autotune._measured", lambda *given: pytest.fail("it was measured"))
    monkeypatch.setattr("fusejit.runtime.autotune._found", found := {})
    assert "the caller records a CUDA graph" in tune(kernels, buffers).why and not found
