"""vmap against a Python loop over 100 rows of hswish, as in the seed's page: 33 times there, with MindSpore on its own hardware.

`extra_info["variant"]` tells the rows of one run apart: the loop in eager, torch.vmap in eager, jit(vmap) on the device's default backend.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusejit

SPEEDUP = 33
"""Of the seed: 1.928 s for the loop, 0.0577 s for vmap."""


def loop(x: Tensor) -> Tensor:
    return torch.stack([F.hardswish(x[row]) for row in range(x.shape[0])])


VARIANTS: dict[str, Callable] = {
    "loop": loop,
    "torch.vmap": torch.vmap(F.hardswish),
    "fusejit": fusejit.jit(fusejit.vmap(F.hardswish)),
}


@pytest.fixture(scope="module")
def rows() -> Tensor:
    return torch.randn(100, 2, device="cuda" if torch.cuda.is_available() else "cpu") * 100


@pytest.mark.parametrize("variant", VARIANTS)
def test_hswish_of_100_rows(variant, rows, measure):
    with torch.no_grad():
        torch.testing.assert_close(VARIANTS[variant](rows), loop(rows))
        measure(lambda: VARIANTS[variant](rows), rounds=200, case="vmap_hswish", shape="100x2", dtype="float32", variant=variant)


def test_vmap_beats_the_seed(rows):
    """The loop and jit(vmap) in turn, so that a slow moment of the machine meets both; the ratio of the medians."""

    def seconds(call: Callable, times: int) -> float:
        start = time.perf_counter()
        for _ in range(times):
            call(rows)
        if rows.is_cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / times

    with torch.no_grad():
        VARIANTS["fusejit"](rows)
        pairs = [(seconds(loop, 3), seconds(VARIANTS["fusejit"], 100)) for _ in range(30)]
    slow, fast = (statistics.median(times) for times in zip(*pairs))
    assert slow / fast >= SPEEDUP, f"{slow * 1e6:.0f} us against {fast * 1e6:.1f} us: {slow / fast:.1f}x"
