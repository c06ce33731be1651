"""Autotune: of a few schedules of one cluster, the one that is quickest on the device at hand.

In: the kernels of a short list, and the buffers that they work on. Out: `Tuned`, the winner with every time.

    >>> tune(kernels, buffers).why
    'measured 8 schedules: XBLOCK 1 RBLOCK 8192, 8 warps 91.2 us;
        the model chose XBLOCK 1 RBLOCK 8192, 4 warps, 94.0 us'

Without a GPU nothing is measured: the first of the list, which the model put there, wins, and `why` says so.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from . import torch_private
from .launch import Launcher, compile_all, kernel

if TYPE_CHECKING:
    from ..codegen.emit.kernel import Kernel
    from ..codegen.ir.graph import Buffer

MOST = 8  # schedules on a short list
FLUSH_BYTES = 256 << 20  # more than any L2
_found: dict[tuple[str, ...], Tuned] = {}

Timer = Callable[[Callable[[], Any]], float]


@dataclass(frozen=True, slots=True)
class Tuned:
    """The winner of a short list, the microseconds of each (none where nothing was measured), and the reason in
    words.
    """

    kernel: Kernel
    microseconds: tuple[float, ...]
    why: str


def tune(kernels: Sequence[Kernel], buffers: dict[str, Buffer], timer: Timer | None = None) -> Tuned:
    """Measure kernels that compute the same and return the quickest; equal lists are measured once in a process.

    Args:
        kernels: the model's choice first. timer: microseconds of a call; by default CUDA events, with a cold L2.
    """
    kernels = kernels[:MOST]
    if len(kernels) < 2:
        return Tuned(kernels[0], (), "one schedule only")
    if timer is None and not torch.cuda.is_available():
        return Tuned(kernels[0], (), f"not measured, no GPU: the model's choice of {len(kernels)}")
    key = tuple(k.name for k in kernels)
    if key not in _found and torch_private.recording():
        return Tuned(kernels[0], (), "not measured, the caller records a CUDA graph: the model's choice")
    if key not in _found or timer is not None:
        _found[key] = _measured(kernels, buffers, timer or device_us)
    return _found[key]


def _measured(kernels: Sequence[Kernel], buffers: dict[str, Buffer], timer: Timer) -> Tuned:
    launchers = [_launcher(k) for k in kernels]
    try:
        memory = {name: _filled(buffers[name]) for k in kernels for name in k.arguments}
    except torch.OutOfMemoryError:
        return Tuned(kernels[0], (), "not measured, its buffers do not fit in memory twice: the model's choice")
    compile_all(launchers)
    times = []
    for one, launcher in zip(kernels, launchers, strict=True):
        arguments = [memory[name] for name in one.arguments]
        times.append(timer(lambda launcher=launcher, arguments=arguments: launcher(*arguments)))  # type: ignore[misc]
    best = min(range(len(times)), key=times.__getitem__)
    model = "the model's choice" if best == 0 else f"the model chose {kernels[0].schedule}, {times[0]:.1f} us"
    return Tuned(
        kernels[best],
        tuple(times),
        f"measured {len(times)} schedules: {kernels[best].schedule} {times[best]:.1f} us; {model}",
    )


def _launcher(k: Kernel) -> Launcher:
    return kernel(
        k.source, name=k.name, params=k.params, constants=dict(k.constants), grid=k.grid, num_warps=k.num_warps,
        num_stages=k.num_stages, debug=k.debug, fp_fusion=k.fp_fusion, aligned=(True,) * len(k.params),
    )  # fmt: skip


def _filled(buffer: Buffer) -> torch.Tensor:
    """Return memory like a buffer's: normal numbers, or zeros, which are an index in every bound."""
    made = torch.empty_strided(buffer.shape, buffer.strides, dtype=buffer.dtype, device=buffer.device)
    return made.normal_() if buffer.dtype.is_floating_point and buffer.dtype.itemsize > 1 else made.zero_()


def device_us(call: Callable[[], Any], repetitions: int = 20) -> float:
    """Return the median device time of a call in microseconds, its inputs out of the L2 cache."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    call()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repetitions)]
    for before, after in events:
        flush.zero_()
        before.record()
        call()
        after.record()
    torch.cuda.synchronize()
    return statistics.median(before.elapsed_time(after) * 1e3 for before, after in events)
