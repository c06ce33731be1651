"""Reductions over rows, columns and both: every case of cases.py, every variant of turns.py, in one process and one
run; needs a GPU.

The first variant of a case measures all of them in turns; the others replay what was found, one row of the JSON each.
The cases that come first tell most. With PERF_BUDGET (seconds) the cases that would start later are skipped, with
PERF_FROM the first ones are, and with PERF_JOURNAL every finished row is appended to a file at once, so that a run that
is cut short loses nothing (see gpu.sh). PERF_REHEARSE=1 runs all of it without a GPU, at small shapes and with a clock
that counts: its rows are marked synthetic and mean nothing.
"""

from __future__ import annotations

import os
import statistics
import time

import pytest
from cases import CASES
from turns import VARIANTS, gpu, measure, rehearsal

BY_ID = {case.id: case for case in CASES}
REHEARSED = os.environ.get("PERF_REHEARSE") == "1"


class Run:
    """The case measured last, and the time that is left."""

    def __init__(self, config: pytest.Config) -> None:
        self.end = time.monotonic() + float(os.environ.get("PERF_BUDGET", "inf"))
        self.first = int(os.environ.get("PERF_FROM", "0"))
        self.aside = config.pluginmanager.get_plugin("capturemanager").global_and_fixture_disabled
        self.case = self.found = None

    def measured(self, case):
        if case is self.case:
            return self.found
        number = CASES.index(case)
        if number < self.first:
            pytest.skip(f"PERF_FROM={self.first}")
        if time.monotonic() > self.end:
            pytest.skip(f"the time is up: go on with PERF_FROM={number}")
        self.case, self.found, start = case, None, time.monotonic()
        self.found = found = measure(case, rehearsal() if REHEARSED else gpu())
        times = ", ".join(f"{name} {statistics.median(us):.1f}" for name, us in found.us.items())
        with self.aside():
            print(f"\n{number} {case.id}: {times} us; {time.monotonic() - start:.0f} s", flush=True)
        return found


@pytest.fixture(scope="module")
def measured(request, gpu):
    """`measured(case)`: what `turns.measure` finds on the device."""
    if not (gpu or REHEARSED):
        pytest.skip("needs a GPU, or PERF_REHEARSE=1 for a rehearsal without one")
    return Run(request.config).measured


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("case_id", BY_ID)
def test_kernel(case_id, variant, measured, record, benchmark):
    case = BY_ID[case_id]
    found = measured(case)
    assert found is not None, "the case failed"
    assert variant not in found.failed, found.failed[variant]
    benchmark.group = f"{case.name} {case.pass_} {case.dtype_name} N={case.length}"
    record(
        found.us[variant],
        case=case.name,
        dtype=case.dtype_name,
        shape=list(found.shape),
        variant=variant,
        length=case.length,
        bytes_minimum=found.bytes_minimum,
        error=found.errors.get(variant),
        synthetic=REHEARSED or None,
        **{"pass": case.pass_},
    )
    assert variant not in found.wrong, f"error {found.errors[variant]:.1e}, eager's {found.errors.get('eager')}"
