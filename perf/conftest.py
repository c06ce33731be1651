"""What every benchmark records: the device, the versions and the commit, next to its times."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available() and "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"

ROOT = Path(__file__).parent.parent
sys.path[:0] = [
    str(ROOT),
    str(ROOT / "tests"),
    str(ROOT / "perf"),
    str(ROOT / "perf" / "lib"),
    str(ROOT / "tests" / "laws"),
]


@pytest.fixture(scope="session")
def gpu() -> bool:
    return torch.cuda.is_available()


@pytest.fixture(scope="session")
def origin() -> dict[str, str]:
    """The part of `extra_info` that every benchmark of a run shares."""
    from fusejit.tools.bench import commit, versions

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {"device": device, "commit": commit()} | {f"{name}_version": text for name, text in versions().items()}


@pytest.fixture
def record(benchmark, origin):
    """`record(microseconds, **extra_info)` makes times that were measured elsewhere this benchmark's, and appends it to
    PERF_JOURNAL.
    """

    def run(times: list[float], **info):
        benchmark.extra_info.update(origin | {key: value for key, value in info.items() if value is not None})
        benchmark._timer = Replay(times)
        benchmark.pedantic(lambda: None, rounds=len(times))
        journal = os.environ.get("PERF_JOURNAL")
        if journal and benchmark.stats is not None:
            with open(journal, "a") as file:
                file.write(json.dumps(benchmark.stats.as_dict(include_data=False)) + "\n")

    return run


@pytest.fixture
def measure(benchmark, origin, gpu, record):
    """`measure(call, **extra_info)` times a call: device time with a cold L2 cache on a GPU, host time elsewhere."""

    def run(call, *, rounds: int = 30, **info):
        if gpu:
            from fusejit.tools.bench import device_us

            return record(device_us(call), **info)
        benchmark.extra_info.update(origin | {key: value for key, value in info.items() if value is not None})
        return benchmark.pedantic(call, rounds=rounds, warmup_rounds=3)

    return run


class Replay:
    """A clock that pytest-benchmark reads before and after each round and that shows what CUDA events measured in
    it.
    """

    def __init__(self, microseconds: list[float]) -> None:
        self._readings = iter([reading for time in microseconds for reading in (0.0, time * 1e-6)])

    def __call__(self) -> float:
        return next(self._readings)


def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict) -> None:
    """Keep of the host what its figures depend on."""
    kept = {key: machine_info[key] for key in ("machine", "system", "python_version")}
    cpu = {key: machine_info["cpu"].get(key) for key in ("arch", "bits", "count", "brand_raw")}
    machine_info.clear()
    machine_info.update(kept | {"cpu": cpu})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the figures of the seeds that this run measured."""
    from figures import table

    session = getattr(config, "_benchmarksession", None)
    text = table(row.extra_info for row in session.benchmarks) if session is not None else ""
    if text:
        terminalreporter.section("figures of the seeds")
        terminalreporter.write_line(text)
