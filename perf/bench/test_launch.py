"""Host time of a call: functions of one kernel with 1, 4 and 16 inputs, without and with gradients; modules of 2, 12
and 50 blocks.

launches.py says what is called and how. The first variant of a case measures all of them in turns; the others replay
what was found. `extra_info["overhead_us"]` is what a call takes beyond what it runs, of medians: beyond `bare` for
fusejit, beyond `nothing` for the variants that run nothing. PERF_REHEARSE=1 takes three short turns of a clock that
counts, and the rows are marked synthetic.
"""

from __future__ import annotations

import itertools
import os
import statistics

import pytest
import torch
from launches import CALLS, ON_GPU, VARIANTS, measure

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
REHEARSED = os.environ.get("PERF_REHEARSE") == "1"
BEYOND = {"fusejit": "bare", "fusejit-noop": "nothing", "torch.compile-noop": "nothing"}
BY_ID = {call.id: call for call in CALLS}


@pytest.fixture(scope="module")
def measured():
    """`measured(call)`: what `launches.measure` finds; the last one is kept."""
    kept: dict = {}

    def found(call):
        if call not in kept:
            kept.clear()
            more = {"budget_s": 0.0, "clock": map(float, itertools.count()).__next__} if REHEARSED else {}
            kept[call] = measure(call, DEVICE, **more)
        return kept[call]

    return found


@pytest.mark.parametrize("variant", VARIANTS + (ON_GPU if DEVICE == "cuda" else ()))
@pytest.mark.parametrize("call_id", BY_ID)
def test_call(call_id, variant, measured, record, benchmark):
    call = BY_ID[call_id]
    found = measured(call)
    benchmark.group = call.id
    medians = {name: statistics.median(us) for name, us in found.items()}
    overhead = medians[variant] - medians[BEYOND[variant]] if variant in BEYOND else None
    record(
        found[variant],
        case=call.name,
        dtype="float32",
        shape=[call.inputs, call.blocks],
        variant=variant,
        overhead_us=overhead,
        launcher="driver" if DEVICE == "cuda" else "stub",
        synthetic=REHEARSED or None,
        bytes_minimum=0,
        error=None,
        **{"pass": call.pass_},
    )
