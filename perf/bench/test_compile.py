"""What compiling costs: a Llama block, forward and backward, from Python to cubins, stage by stage.

Imports and the first start of the compiler process are done before; Triton's cache is empty in every round.
`extra_info["stages_ms"]` holds fusejit's stages of the last round (capture, joint, partition, codegen passes, kernels).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models import REAL, make
from test_peer import lifted

import fusejit
from fusejit.runtime.compile_workers import close_workers
from fusejit.tools.blocks import BLOCKS

ROUNDS = 3


def empty(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Give what comes next an empty kernel cache and compiler processes that have done their imports."""
    small = BLOCKS["masked_softmax"]
    patch.setenv("TRITON_CACHE_DIR", str(folder))
    close_workers()
    for dtype in (torch.float32, torch.float64):  # several kernels, so that every process has compiled one
        fusejit.compile_for(small.fn, small.make(small.small, dtype=dtype), target="sm_90")


@pytest.fixture
def cold(tmp_path_factory, monkeypatch):
    """A function that does so for the next round."""
    return lambda: empty(monkeypatch, tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize("name", REAL)
def test_capture_to_cubin(name, benchmark, origin, cold):
    call, args = lifted(name)
    program = benchmark.pedantic(
        lambda: fusejit.compile_for(call, tuple(args), target="sm_90"), setup=cold, rounds=ROUNDS
    )
    stages = {stage: round(ms, 1) for stage, ms in program.compile_ms.items()} if program is not None else {}
    benchmark.extra_info.update(
        origin | {"case": name, "dtype": "float32", "variant": "fusejit-O2", "pass": "both", "stages_ms": stages}
    )


@pytest.mark.parametrize("name", REAL)
def test_capture_and_codegen(name, benchmark, origin):
    """Without compiling a kernel: what a program whose kernels are cached costs."""
    call, args = lifted(name)
    fusejit.jit(call, backend="interpret").explain(*args)
    report = benchmark.pedantic(
        lambda: fusejit.jit(lambda *a: call(*a), backend="interpret").explain(*args), rounds=ROUNDS
    )
    stages = {stage: round(ms, 1) for stage, ms in report.compile_ms.items()} if report is not None else {}
    benchmark.extra_info.update(
        origin | {"case": name, "dtype": "float32", "variant": "fusejit-O2", "pass": "both", "stages_ms": stages}
    )


@pytest.mark.parametrize("name", ("llama", "vit"))
def test_capture_for_eager(name, benchmark, origin):
    """The first call of the default backend on a CPU."""
    module, inputs = make(name)
    fusejit.jit(module)(*inputs)
    with torch.no_grad():
        benchmark.pedantic(lambda: fusejit.jit(module)(*inputs), rounds=ROUNDS)
    benchmark.extra_info.update(
        origin | {"case": name, "dtype": "float32", "variant": "fusejit-eager", "pass": "forward"}
    )
