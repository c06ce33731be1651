"""CUDA graphs: a whole Program, its calls of torch included, recorded once and replayed with one launch.

In: a Program. Out: `Recorded`, called like the Program; `state` says in words what it does and why.

    >>> program = record(program)            # at jit_level="O3", or jit(cuda_graph=True)
    >>> for _ in range(4): program([x, weight])
    >>> program.state
    'replayed: 1 recording, 2 of 2 inputs read in place'

A recording holds addresses. An input whose address repeats (a parameter, what the forward saved) is read where it is,
and the addresses are part of the key of a small table; one that keeps moving is copied into memory of the recording.
Results live in the recording's memory and are handed out as they are; while callers still hold those of a call before,
a second recording serves, which hands out copies. All recordings of a device share one pool, and run on the stream on
which they were made; a call on another stream runs without them. Random numbers: torch gives a recording the
generator's offset at each replay. Gradients need nothing of their own: the forward and the backward are two Programs.

What stands between these decisions and the device is `Driver`; tests put another in its place, which records and
replays on the CPU. This file has not run on a GPU yet: what has been tested is everything but `CudaDriver`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from .. import torch_private as private
from ..fork_locks import renewed
from .torch_private import raise_versions

Tensor = torch.Tensor
WARM = 2
"""Calls that run as they are before a recording: they load kernels and libraries, and show which addresses repeat."""
MOST = 4
"""Recordings of one Program by the addresses of its inputs; more, and the inputs that moved are copied from then on."""


class Driver(Protocol):
    """What a recording needs of a device, whose type is `device`."""

    device: str

    def busy(self) -> bool:
        """Whether someone else is recording on this stream."""

    def stream(self) -> int:
        """The current stream."""

    def record(self, program: Any, inputs: list[Any]) -> tuple[Any, list[Any]]:
        """Record what a Program launches, without running it; returns the recording and the results' memory."""

    def replay(self, recording: Any) -> None:
        """Launch a recording."""


class CudaDriver:
    """torch's CUDA graphs on the current device."""

    device = "cuda"
    pools: dict[int, Any] = {}

    def busy(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def stream(self) -> int:
        return torch.cuda.current_stream().cuda_stream

    def record(self, program: Any, inputs: list[Any]) -> tuple[Any, list[Any]]:
        pool = self.pools.setdefault(torch.cuda.current_device(), None) or torch.cuda.graph_pool_handle()
        self.pools[torch.cuda.current_device()] = pool
        recording = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recording, pool=pool, capture_error_mode="thread_local"):
            results = list(program(inputs))
        return recording, results

    def replay(self, recording: Any) -> None:
        recording.replay()


@dataclass(slots=True)
class Recording:
    """One recording: its inputs that are copied (`None` where the caller's memory is read), its results' memory.

    `given`: for each result the input that it is, or None. `shared`: callers get copies of the results. `idle`:
    references to each result's memory when no caller holds it.
    """

    handle: Any
    copies: list[Tensor | None]
    results: list[Tensor]
    given: list[int | None]
    shared: bool
    idle: list[int] = field(default_factory=list)

    def free(self) -> bool:
        """Whether no caller holds a result of an earlier replay, which the next one would overwrite."""
        return self.shared or self.idle == [references(result) for result in self.results]


def references(value: Tensor) -> int:
    """How many tensors, and parts of autograd, hold a tensor's memory."""
    return private.storage_Use_Count(value.untyped_storage()._cdata)  # type: ignore[attr-defined]


class Recorded:
    """A Program that replays recordings of itself; every attribute that is not named here is the Program's.

    Attributes:
        program: what runs where nothing is replayed.
        reason: why nothing ever is, "" otherwise. moving: inputs that are copied. recordings: by the addresses of the
            others.
    """

    def __init__(self, program: Any, driver: Driver) -> None:
        self.program, self.driver = program, driver
        self.reason = refusal(program, driver.device)
        self.changed = {
            program.inputs.index(b.written_to) for b in program.buffers.values() if b.written_to in program.inputs
        }
        self.moving: set[int] = set()
        self.unread = {number for number, name in enumerate(program.inputs) if name is None}
        self.recordings: dict[tuple[int, ...], list[Recording]] = {}
        self.before: list[int] = []
        self.ran = 0
        self.home: int | None = None
        self.lock = renewed(threading.Lock())

    def __getattr__(self, name: str) -> Any:
        if name == "program":  # not made yet: copies and pickles ask first
            raise AttributeError(name)
        return getattr(self.program, name)

    @property
    def state(self) -> str:
        """What a call does, in words."""
        if self.reason:
            return f"not recorded: {self.reason}"
        if not self.recordings:
            return f"not recorded yet: {self.ran} of {WARM} calls before"
        count, inputs = sum(map(len, self.recordings.values())), len(self.program.inputs)
        return (
            f"replayed: {count} recording{'s' * (count != 1)}, {inputs - len(self.moving)} of {inputs} inputs read in "
            "place"
        )

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        if self.reason or not self.lock.acquire(blocking=False):  # two threads would write into one memory
            return self.program(args)
        try:
            if self.driver.busy() or self.home not in (None, self.driver.stream()):
                return self.program(args)
            addresses = [value.data_ptr() if isinstance(value, Tensor) else 0 for value in args]
            if self.ran < WARM:
                return self.warm(args, addresses)
            known = self.recordings.get(self.key(addresses), [])
            found = next((each for each in known if each.free()), None) or self.make(
                args, addresses, shared=bool(known)
            )
            return self.program(args) if found is None else self.replay(found, args)
        finally:
            self.lock.release()

    def call(self, args: list[Any]) -> Sequence[Any]:
        """What the hot path calls in place of a Program's own function."""
        return self(args)

    def key(self, addresses: list[int]) -> tuple[int, ...]:
        return tuple(
            [
                0 if number in self.moving or number in self.unread else address
                for number, address in enumerate(addresses)
            ]
        )

    def warm(self, args: list[Any], addresses: list[int]) -> Sequence[Any]:
        """A call before the recording: what moves between two such calls is taken to move always."""
        self.ran += 1
        if self.before:
            self.moving |= {
                number for number, (one, other) in enumerate(zip(self.before, addresses)) if one != other
            } - self.unread
        self.before = addresses
        return self.program(args)

    def make(self, args: list[Any], addresses: list[int], shared: bool) -> Recording | None:
        """Record this call; None where the device refuses, which is remembered with its reason.

        `shared`: callers keep results of the recording with these addresses, so the one that is made now gives copies.
        """
        if not shared and len(self.recordings) >= MOST:
            keys = [*self.recordings, self.key(addresses)]
            self.moving |= {number for number, column in enumerate(zip(*keys, strict=True)) if len(set(column)) > 1}
            self.recordings.clear()
        copies = [like(value) if number in self.moving else None for number, value in enumerate(args)]
        inputs = [value if copy is None else copy for value, copy in zip(args, copies)]
        try:
            handle, results = self.driver.record(self.program, list(inputs))
        except RuntimeError as error:
            self.reason = f"the device refuses: {str(error).splitlines()[0]}"
            return None
        places = {id(value): number for number, value in enumerate(inputs)}
        given = [places.get(id(result)) for result in results]
        memory = {value.untyped_storage().data_ptr() for value in inputs if isinstance(value, Tensor)}
        if any(
            place is None and result.untyped_storage().data_ptr() in memory for place, result in zip(given, results)
        ):
            self.reason = "a result is a view of an input"
            return None
        del inputs
        made = Recording(handle, copies, [r for r, place in zip(results, given) if place is None], given, shared)
        del results
        made.idle = [references(result) for result in made.results]
        self.recordings.setdefault(self.key(addresses), []).append(made)
        self.home = self.driver.stream()
        return made

    def replay(self, found: Recording, args: list[Any]) -> Sequence[Any]:
        """Copy what moves, launch, write back what the Program changes, and hand the results out."""
        for value, copy in zip(args, found.copies):
            if copy is not None:
                copy.copy_(value)
        self.driver.replay(found.handle)
        for number in self.changed:
            copy = found.copies[number]
            if copy is not None:
                args[number].copy_(copy)
            else:
                raise_versions((args[number],))
        fresh = iter([result.clone() if found.shared else result.detach() for result in found.results])
        handed = tuple([next(fresh) if place is None else args[place] for place in found.given])
        args.clear()
        return handed


def like(value: Tensor) -> Tensor:
    """Memory laid out as a tensor is, its gaps included."""
    reach = sum((n - 1) * stride for n, stride in zip(value.shape, value.stride())) + 1 if value.numel() else 0
    return torch.empty(reach, dtype=value.dtype, device=value.device).as_strided(value.shape, value.stride())


def refusal(program: Any, device: str) -> str:
    """Why a Program cannot be recorded; "" where it can."""
    for buffer in program.buffers.values():
        if buffer.device.type != device:
            return f"{buffer.name} is on the {buffer.device.type.upper()}"
        if any(type(n) is not int for n in (*buffer.shape, *buffer.strides)):
            return "its sizes vary from call to call"
    for part in (program, *program.called):
        for call in part.externs:
            if reason := waits(call):
                return f"{call.target} {reason}" + (f" ({call.line})" if call.line else "")
    return ""


def waits(call: Any) -> str:
    """Why a call of torch cannot be recorded; "" where it can."""
    if call.effect is not None and call.effect.in_turn:
        return f"{call.effect.value}, and a replay runs nothing on the host"
    namespace, name, overload = (*call.target.split("."), "default")[:3]
    if namespace == "fusejit":
        return "runs Python on the host"
    op = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(op.tags):
        return "waits for values on the host"
    return ""


def record(program: Any, driver: Driver | None = None) -> Recorded:
    """Return the Program as one that is recorded after a few calls."""
    return Recorded(program, driver or CudaDriver())
