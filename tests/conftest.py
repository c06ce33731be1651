"""What every test shares: the interpreter, the markers, the flags.

Without a GPU the kernels run in Triton's interpreter, which has to be switched on before triton is imported, hence here
and first. With `-m gpu` it stays off, and the tests marked `gpu` and all that take the fixture `device` run on the
device.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

# a test file takes helpers from others, in whatever folder they are
sys.path += [str(folder) for folder in sorted(Path(__file__).parent.rglob("*")) if any(folder.glob("test_*.py"))]


CASES = 2
"""How many cases of a test function are in the quick tier."""
ALL_IF = ("--all", "--slow", "-m", "--update-golden")
"""Options with which every case is wanted."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="every case of every test; without it two of each")
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")
    parser.addoption(
        "--opinfo", choices=("ci", "all"), default="ci", help="torch's op database: the subset of CI, or all"
    )
    parser.addoption("--opinfo-dtype", default="float32", help="the dtype of its samples")
    parser.addoption("--update-golden", action="store_true", help="rewrite the committed kernels under tests/golden")


def _wants_gpu(config: pytest.Config) -> bool:
    words = (config.getoption("-m") or "").split()
    return "gpu" in words and "not" not in words


def pytest_configure(config: pytest.Config) -> None:
    if not _wants_gpu(config) and "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"
    # One user's settings must not decide whether the tests pass.
    for name in [name for name in os.environ if name.startswith("FUSEJIT_")]:
        del os.environ[name]


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what `-m` does not want
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch

    if _wants_gpu(config):
        for item in items:
            if "device" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.gpu)
    if not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
        _skip(items, "gpu", "needs an NVIDIA GPU and `-m gpu`")
    if not config.getoption("--slow"):
        _skip(items, "slow", "slow: give --slow")
    named = bool(config.getoption("-k")) or any("::" in argument for argument in config.args)
    if not named and not any(config.getoption(option) for option in ALL_IF):
        _quick(config, items)


def _quick(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the quick tier: of each test function its first and its last case, all of those marked `cheap`,
    and none of those marked `full`.

    A test that the command line names (`file.py::test`) runs with all its cases.
    """
    groups: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        groups.setdefault((item.nodeid.partition("::")[0], getattr(item, "originalname", item.name)), []).append(item)
    kept: set[pytest.Item] = set()
    for cases in groups.values():
        if cases[0].get_closest_marker("cheap"):
            kept |= set(cases)
            continue
        cases = [item for item in cases if not item.get_closest_marker("full")]
        step = (len(cases) - 1) / (CASES - 1)
        kept |= set(cases if len(cases) <= CASES else (cases[round(step * n)] for n in range(CASES)))
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def _skip(items: list[pytest.Item], marker: str, reason: str) -> None:
    for item in items:
        if item.get_closest_marker(marker):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _one_seed() -> None:
    import torch

    torch.manual_seed(0)


@pytest.fixture(scope="session")
def backend() -> str:
    """The backend that runs kernels here: on the device with `-m gpu`, in the interpreter otherwise."""
    return "interpret" if os.environ.get("TRITON_INTERPRET") == "1" else "triton"


@pytest.fixture(scope="session")
def spilled() -> int:
    """Bytes that a kernel at the edge of a thread's registers may spill: Triton 3.6 makes up to 64 of the text of which
    3.7 makes none.
    """
    import triton

    return 64 if triton.__version__.startswith("3.6.") else 0


@pytest.fixture(scope="session")
def device(backend: str) -> str:
    return "cpu" if backend == "interpret" else "cuda"


@pytest.fixture(scope="session")
def fuse(backend: str):
    """`fusejit.jit` with the backend that runs kernels here."""
    import functools

    import fusejit

    return functools.partial(fusejit.jit, backend=backend)


@pytest.fixture(scope="session")
def sm_90():
    """`compile_for(fn, args)` for an H100; the compiler processes are shared by the whole session."""
    import functools

    import fusejit

    return functools.partial(fusejit.compile_for, target="sm_90")
