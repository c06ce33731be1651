"""The benchmarks of perf/ on a machine without a GPU: every case at a small size, every variant's path, and the reports."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PERF = Path(__file__).parent.parent / "perf"
sys.path.insert(0, str(PERF))

from cases import CASES, FAMILIES, smallest  # noqa: E402
from turns import VARIANTS, Counter, measure, rehearsal  # noqa: E402

from fusejit.bench import errors, in_turns  # noqa: E402

SMALL = smallest()


@pytest.mark.parametrize("case", SMALL, ids=[case.id for case in SMALL])
def test_case_is_right(case):
    """Through the interpreter at most twice eager's error, and two ulp."""
    ours, eager, right = errors(
        case.family.block, case.pass_, backend="interpret", device="cpu", dtype=case.dtype, shape=case.small, fullgraph=True
    )
    assert right, f"{ours} against {eager}"


ONE_A_PASS = [next(c for c in CASES if c.pass_ == pass_) for pass_ in ("forward", "both", "backward")]


@pytest.mark.parametrize("case", [*ONE_A_PASS, next(c for c in CASES if c.name == "argmax")], ids=lambda case: case.id)
def test_every_variant_rehearsed(case):
    """Building, checking and timing in turns, with a clock that counts: only the figures are not real."""
    machine = rehearsal()
    found = measure(case, machine)
    assert not found.failed and not found.wrong
    assert list(found.us) == list(VARIANTS)
    assert machine.timer.calls == sum(map(len, found.us.values()))
    assert set(found.errors) == set(VARIANTS) - {"copy"}
    assert all(math.isfinite(e) for e in found.errors.values())


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory):
    """What `perf/gpu.sh kernels` leaves, rehearsed: a folder with its JSON, every number in it synthetic."""
    out = tmp_path_factory.mktemp("synthetic")
    environment = os.environ | {"OUT": str(out), "PYTHON": sys.executable, "PERF_REHEARSE": "1", "TRITON_INTERPRET": "1", "BUDGET": "100"}
    done = subprocess.run(
        ["bash", str(PERF / "gpu.sh"), "kernels", "(softmax or column_sum) and 16384x4096 or 16x131072"],
        capture_output=True, text=True, env=environment, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_gpu_script_rehearsed(rehearsed):
    """The script, pytest-benchmark's JSON and the journal: every row of every variant, with all that design asks for."""
    rows = json.loads((rehearsed / "cpu-kernels.json").read_text())["benchmarks"]
    journal = [json.loads(line) for line in (rehearsed / "cpu-kernels.jsonl").read_text().splitlines()]
    wanted = [c for c in CASES if c.id.endswith("16x131072") or ("softmax" in c.name or c.name == "column_sum") and "16384x4096" in c.id]
    assert len(rows) == len(journal) == len(wanted) * len(VARIANTS)
    assert [(r["name"], r["stats"]["median"], r["extra_info"]) for r in rows] == [
        (r["name"], r["stats"]["median"], r["extra_info"]) for r in journal
    ]
    for row in rows:
        info = row["extra_info"]
        keys = {"device", "case", "dtype", "shape", "pass", "variant", "bytes_minimum", "torch_version", "triton_version", "commit"}
        assert keys <= set(info) and info["synthetic"]
        assert ("error" in info) == (info["variant"] != "copy")


def test_budget_and_start(tmp_path):
    """Without time no case starts, and the number to go on with is said."""
    environment = os.environ | {"OUT": str(tmp_path), "PYTHON": sys.executable, "PERF_REHEARSE": "1", "TRITON_INTERPRET": "1"}
    command = ["bash", str(PERF / "gpu.sh"), "kernels", "softmax-forward-bfloat16-16x131072"]
    done = subprocess.run([*command], capture_output=True, text=True, env=environment | {"BUDGET": "0"}, timeout=100)
    number = next(i for i, case in enumerate(CASES) if case.id == "softmax-forward-bfloat16-16x131072")
    assert f"go on with PERF_FROM={number}" in done.stdout, done.stdout + done.stderr


def test_one_failing_variant_hides_no_other(monkeypatch):
    def broken(fn, machine):
        raise RuntimeError("no such compiler\nat all")

    monkeypatch.setitem(VARIANTS, "torch.compile", broken)
    found = measure(ONE_A_PASS[0], rehearsal(), ("eager", "torch.compile", "copy"))
    assert found.failed == {"torch.compile": "RuntimeError: no such compiler"}
    assert list(found.us) == ["eager", "copy"]


def test_a_wrong_result_is_told(monkeypatch):
    monkeypatch.setitem(VARIANTS, "fusejit-O2", lambda fn, machine: lambda *args: fn(*args) * 1.5)
    assert measure(ONE_A_PASS[0], rehearsal(), ("eager", "fusejit-O2")).wrong == ["fusejit-O2"]


def test_turns_interleave():
    """The calls alternate, so that a change of clocks hits all of them."""
    timer = Counter()
    first, second = in_turns([lambda: None, lambda: None], 1e-4, timer)
    assert first[:3] == [1.0, 3.0, 5.0] and second[:3] == [2.0, 4.0, 6.0]


def test_cases_cover_the_issue():
    """Every family at every length, in both dtypes; the named shapes first; no case twice."""
    assert len({case.id for case in CASES}) == len(CASES)
    tiers = [case.tier for case in CASES]
    assert tiers == sorted(tiers) and tiers[0] == 0
    for family in FAMILIES:
        found = {(c.length, c.dtype, c.pass_) for c in CASES if c.family is family}
        assert {(n, d, p) for n in family.lengths for d in (torch.bfloat16, torch.float32) for p in family.passes} <= found
    named = {(c.name, c.shape) for c in CASES if c.tier == 0}
    assert {("rms_norm", (16384, 16384)), ("layer_norm", (2048, 8192)), ("softmax", (16, 131072)), ("softmax", (64, 131072))} <= named


def test_bytes_minimum_counts_what_has_to_move():
    by_id = {case.id: case for case in CASES}
    case = by_id["rms_norm-both-float32-65536x1024"]
    args = case.make("cpu", small=True)  # (5, 33) float32
    row, weight = 5 * 33 * 4, 33 * 4
    outputs = [args[0].detach()]
    assert case.bytes_minimum(args, outputs) == (2 * row + weight) + (row + row + weight + row + weight)
    column = next(c for c in CASES if c.name == "column_sum" and c.pass_ == "both" and c.dtype is torch.float32)
    (x,) = column.make("cpu", small=True)
    assert column.bytes_minimum((x,), [x.detach().sum(0)]) == row + weight + weight + row  # its backward reads the tangent alone


def test_peers_modes_exist():
    """The names under which torch.compile is measured; a typing error would only show on a GPU."""
    from torch._inductor import list_mode_options

    assert "max-autotune-no-cudagraphs" in list_mode_options()
