"""Prefer eager, never slower than it: of a compiled Program of one or two launches and the captured graph in eager,
what is quicker here.

In: calls of both, and the names of the kernels. Out: `Choice`, with both times and the reason in words.

    >>> choose(names, lambda: program([x, y]), lambda: eager(x, y)).why
    'eager, measured: 6.1 us, compiled 9.8 us'

A Program of many launches always saves more than its call costs. One or two small kernels may not, where eager has one
kernel of its own for the same; that depends on the machine, so it is measured, once for each Program in a process.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import torch_private

LAUNCHES = 2
"""Programs of more launches are not measured."""
MARGIN = 0.9
"""Eager has to be quicker by a tenth: less is noise."""
DEVICE = "cuda"
ROUNDS, CALLS = 7, 20
_found: dict[Any, Choice] = {}

Timer = Callable[[Callable[[], Any]], float]


@dataclass(frozen=True, slots=True)
class Choice:
    """Whether eager is kept, and why."""

    eager: bool
    why: str


def choose(key: Any, compiled: Callable[[], Any], eager: Callable[[], Any], timer: Timer | None = None) -> Choice:
    """Measure two calls that compute the same, once for each key (the names of the Program's kernels).

    Args:
        timer: microseconds of a call, host and device together.
    """
    if key not in _found and torch_private.recording():
        return Choice(False, "compiled, not measured: the call is part of a CUDA graph that its caller records")
    if key not in _found or timer is not None:
        measure = timer or elapsed_us
        ours, its = measure(compiled), measure(eager)
        keep = its < MARGIN * ours
        text = (
            f"eager, measured: {its:.1f} us, compiled {ours:.1f} us"
            if keep
            else f"compiled, measured: {ours:.1f} us, eager {its:.1f} us"
        )
        _found[key] = Choice(keep, text)
    return _found[key]


def measurable(program: Any, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the choice is open: one or two launches and nothing else, on tensors of the device, of which none
    requires grad.
    """
    small = 0 < program.launches <= LAUNCHES and not program.externs and not program.calls
    return (
        small
        and not program.changed
        and all(tensor.device.type == DEVICE and not tensor.requires_grad for tensor in tensors)
    )


def elapsed_us(call: Callable[[], Any]) -> float:
    """Median microseconds of a call in a row of calls, until the device is done."""
    found = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - start) / CALLS * 1e6)
    return statistics.median(found[1:])
