"""perf/bench/test_launch.py on a machine without a GPU: every variant's path, the stub of the driver, the rows."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.full  # whole scripts of perf/, in processes of their own

PERF = Path(__file__).parents[2] / "perf"
from launches import CALLS, VARIANTS, launching_nothing, measure, prepare, twin, variants  # noqa: E402

import fusejit  # noqa: E402
from fusejit.runtime.launch import Launcher  # noqa: E402

FEW = [call for call in CALLS if call.inputs == 4 or call.blocks == 2]


@pytest.mark.parametrize("call", FEW, ids=lambda call: call.id)
def test_every_variant_runs(call):
    found = measure(call, budget_s=0.0, clock=map(float, itertools.count()).__next__)
    assert list(found) == list(VARIANTS)
    assert all(len(times) == 3 and min(times) > 0 for times in found.values())


@pytest.mark.parametrize("call", FEW, ids=lambda call: call.id)
def test_only_the_last_step_is_a_stub(call, monkeypatch):
    """The measured call goes the short way, and each launch of the generated program reaches what stands for the
    driver.
    """
    launches, general = [], []
    original = Launcher.__call__
    monkeypatch.setattr(
        Launcher, "__call__", lambda self, *args: launches.append(self.spec.name) or original(self, *args)
    )
    fn, args = prepare(call, "cpu")
    with torch.set_grad_enabled(call.grad):
        program = fusejit.jit(twin(fn), backend="interpret").program(*args)
    with torch.set_grad_enabled(call.grad), launching_nothing():
        runs = variants(call, "cpu")
        monkeypatch.setattr("fusejit.api.function.key_for", lambda *args: general.append(args))
        launches.clear()
        result = runs["fusejit"]()
        expected = runs["eager"]()
    assert (result.shape, result.requires_grad) == (expected.shape, call.grad)
    assert len(launches) == program.launches + sum(part.program.launches for part in program.calls)
    assert not general


def test_the_stub_leaves_nothing_behind():
    x = torch.randn(8, 8)
    double = fusejit.jit(lambda x: x * 2 + x, backend="interpret")
    with launching_nothing():
        double(x)
    torch.testing.assert_close(double(x), x * 3)


def test_gpu_script_rehearsed(tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"OUT": str(tmp_path), "PYTHON": sys.executable, "PERF_REHEARSE": "1", "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        ["bash", str(PERF / "gpu.sh"), "launch", "4 and inference and not any"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "cpu-launch.json").read_text())["benchmarks"]
    assert [row["extra_info"]["variant"] for row in rows] == list(VARIANTS)
    wanted = {
        "device",
        "case",
        "dtype",
        "shape",
        "pass",
        "variant",
        "bytes_minimum",
        "torch_version",
        "triton_version",
        "commit",
        "launcher",
    }
    assert all(wanted <= row["extra_info"].keys() and row["extra_info"]["synthetic"] for row in rows)
    assert ["overhead_us" in row["extra_info"] for row in rows] == [False, False, False, True, True, True]
