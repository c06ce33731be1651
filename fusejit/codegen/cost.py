"""Cost: what a schedule of a cluster takes on a device, from figures of the two and without a measurement.

In: a cluster, its possible schedules and a device. Out: `Choice`: the quickest by the model, with what was expected of each.

    >>> print(choose(cluster, candidates, machine("sm_90")))
    268.4 MB, 89.5 us at the memory's speed, H100
    XBLOCK 1 RBLOCK 8192, 8 warps: 8192 programs, 4 a multiprocessor, 64 registers, waits 32.3 us -> 91.5 us  chosen
    XBLOCK 1 RBLOCK 8192, 16 warps: ...

The model: a launch takes the longer of two times. Its bytes over the memory's bandwidth; and its waits: each program waits for memory once
(a loop once an iteration, less with stages), for each value of a thread and for its warps at each reduction, and as many programs wait
together as fit on the device. What a row reads again comes from L2.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files

import torch

from .cluster import Cluster, Load, Reduce
from .keep import kept_values
from .layout import Layout
from .size import product

DEFAULT = "sm_90"
FIXED = 32  # registers of a kernel besides its values
MEMORY_WAIT = 1.0  # microseconds until a load of a busy memory arrives
WARP_WAIT = 0.1  # microseconds that a reduction within warps takes
BARRIER_WAIT = 0.05  # more, for each doubling of the warps that have to meet
ISSUE_WAIT = 0.01  # microseconds for each value of a thread
ALONE = 1.5  # one program of 16 warps draws so many times a multiprocessor's share of the memory


@dataclass(frozen=True, slots=True)
class Schedule:
    """Template, tile sizes in the template's order, warps, stages of its loop. Sizes and strides are literals in the kernel.

    `choice` keeps what it was chosen from; `others` of equal standing can be measured. `buckets`: where the length of a row varies,
    (longest row, its schedule), rising: the text of the kernel is one, and a bucket is compiled when a row first falls into it. `peel`:
    elements of the groups that a row at an odd address is cut into, 0 for a row that is one tile from end to end. `keep`: whether the row
    stays in registers as it was loaded (keep.py).
    """

    template: str
    blocks: tuple[tuple[str, int], ...]
    num_warps: int
    num_stages: int = 1
    buckets: tuple[tuple[int, Schedule], ...] = ()
    peel: int = field(default=0, repr=False)
    keep: bool = field(default=False, repr=False)
    choice: Choice | None = field(default=None, repr=False, compare=False)

    def __getitem__(self, name: str) -> int:
        return dict(self.blocks)[name]

    def __str__(self) -> str:
        stages = f", {self.num_stages} stages" if self.num_stages > 1 else ""
        cut = f", rows in groups of {self.peel}" if self.peel else ", rows kept as loaded" if self.keep else ""
        return f"{' '.join(f'{n} {v}' for n, v in self.blocks)}, {self.num_warps} warp{'s' * (self.num_warps > 1)}{stages}{cut}"


@dataclass(frozen=True, slots=True)
class Cost:
    """What the model expects of one schedule: times in microseconds, `resident` programs a multiprocessor."""

    schedule: Schedule
    programs: int
    resident: int
    registers: int
    waits: float
    us: float

    def __str__(self) -> str:
        where = f"{self.resident} a multiprocessor" if self.resident else "too many registers"
        time = f"waits {self.waits:.1f} us -> {self.us:.1f} us" if self.resident else "spills"
        return f"{self.schedule}: {self.programs} programs, {where}, {self.registers} registers, {time}"


@dataclass(frozen=True, slots=True)
class Choice:
    """The candidates, best first; `memory_us` is what their bytes take at the memory's speed."""

    device: str
    bytes: int
    memory_us: float
    costs: tuple[Cost, ...]

    def __str__(self) -> str:
        head = f"{self.bytes / 1e6:.1f} MB, {self.memory_us:.1f} us at the memory's speed, {self.device}"
        return "\n".join([head, *(f"{cost}{'  chosen' * (i == 0)}" for i, cost in enumerate(self.costs))])


@dataclass(frozen=True, slots=True)
class Device:
    """One row of figures an architecture, from tuned/<arch>.json.

    Attributes:
        sms: multiprocessors. bandwidth, l2_bandwidth: bytes a second that a copy reaches. l2_bytes: what stays in L2 between two passes.
        launch_us: microseconds between the ends of two small kernels. in_flight: bytes a multiprocessor has under way when memory is full.
        registers: 32-bit registers of a multiprocessor. row_values, mixed_values: values of a row that one program keeps without spills,
            alone and with its column sums. mixed_programs: (columns, programs a multiprocessor at most), rising.
    """

    name: str
    sms: int
    bandwidth: float
    l2_bytes: float
    l2_bandwidth: float
    launch_us: float
    in_flight: int
    registers: int
    row_values: int
    mixed_values: int
    mixed_programs: tuple[tuple[int, int], ...]


@cache
def machine(arch: str | None = None) -> Device:
    """Return the figures of `arch`; without one, of the GPU that is there, and of an H100 where there is none.

    An architecture without a table of its own is treated as an H100 with its own number of multiprocessors.
    """
    here = torch.cuda.get_device_properties(0) if arch is None and torch.cuda.is_available() else None
    name = arch or (f"sm_{here.major}{here.minor}" if here else DEFAULT)
    table = files("fusejit.codegen") / "tuned" / f"{name}.json"
    if not table.is_file():
        table = files("fusejit.codegen") / "tuned" / f"{DEFAULT}.json"
    figures = json.loads(table.read_text())
    pairs = tuple((limit, k) for limit, k in figures.pop("mixed_programs"))
    device = Device(**figures, mixed_programs=pairs)
    return replace(device, name=here.name, sms=here.multi_processor_count) if here else device


def choose(cluster: Cluster, candidates: Sequence[Schedule], device: Device) -> Schedule:
    """Return the candidate with the least cost, with the `Choice` that it was; of equals the one that waits least, then the first."""
    moved, again = traffic(cluster)
    memory = moved / device.bandwidth * 1e6
    costs = [estimate(cluster, s, device, memory, again) for s in candidates]
    ranked = sorted(costs, key=lambda c: (not c.resident, round(c.us, 2), round(c.waits, 2)))
    choice = Choice(device.name, moved, memory, tuple(ranked))
    return replace(ranked[0].schedule, choice=choice)


def estimate(cluster: Cluster, tiles: Schedule, device: Device, memory: float, again: int) -> Cost:
    """Return what one schedule takes; `memory` are the microseconds of its bytes, `again` the bytes that a loop reads a second time."""
    rows, columns = product(cluster.parallel), product(cluster.reduce)
    columns -= columns % tiles.peel if tiles.peel else 0
    blocks = dict(tiles.blocks)
    tile = product(blocks.values())
    across = blocks["XBLOCK"] * blocks.get("YBLOCK", 1)
    programs = cluster.programs or -(-rows // across)
    threads = 32 * tiles.num_warps
    each = max(1, tile // threads)
    looped = "RBLOCK" in blocks and blocks["RBLOCK"] < columns
    live = live_values(cluster, looped) if not tiles.keep else kept_values(cluster) + sum(s.reduces for s in cluster.stores)
    registers = FIXED + int(each * live)
    most = min(255, device.registers // threads)
    fit = min(32, 64 // tiles.num_warps, device.registers // (registers * threads)) if registers <= most else 0
    levels = max(cluster.levels.values(), default=0)
    rounds = -(-columns // blocks["RBLOCK"]) * (levels + 1) if looped else 1
    rounds *= -(-rows // (programs * across)) if cluster.programs else 1
    ahead = max(1, min(tiles.num_stages, rounds // (levels + 1) if looped else rounds))  # a loop of one round has nothing to load early
    wait = rounds * (MEMORY_WAIT / ahead + each * ISSUE_WAIT) + levels * (WARP_WAIT + BARRIER_WAIT * (tiles.num_warps - 1).bit_length())
    small = max(1.0, 16 / (each * _widest(cluster)))  # accesses of less than 16 bytes take more instructions
    waits = wait * small * -(-programs // max(1, device.sms * fit)) if programs > device.sms * max(1, fit) else wait * small
    second = again / device.l2_bandwidth * 1e6 if looped else 0.0
    share = min(1.0, ALONE * programs / device.sms)
    return Cost(tiles, programs, fit, registers, waits, device.launch_us + max((memory + second) / share, waits))


def live_values(cluster: Cluster, looped: bool) -> int:
    """Return how many values of its tile a thread keeps at once: those held across reductions, or accumulators, and column sums."""
    sums = sum(s.reduces for s in cluster.stores)
    reduces = sum(isinstance(n, Reduce) for n in cluster.order)
    return sums + (reduces + 1 if looped else max(1, cluster.held) if cluster.reduce else len(cluster.reads))


def traffic(cluster: Cluster) -> tuple[int, int]:
    """Return the bytes of one launch, each element of each operand once, and the bytes of its rows, which a looped kernel reads again."""
    rows = sum(_spanned(n.layout, cluster) * n.dtype.itemsize for n in {(n.buffer, n.layout): n for n in _loads(cluster)}.values())
    written = sum(_spanned(s.layout, cluster) * s.dtype.itemsize * (cluster.programs or 1 if s.reduces else 1) for s in cluster.stores)
    again = sum(_spanned(n.layout, cluster) * n.dtype.itemsize for n in full(cluster)) if max(cluster.levels.values(), default=0) else 0
    return rows + written, again


def _loads(cluster: Cluster) -> list[Load]:
    return [n for n in cluster.order if isinstance(n, Load)]


def _spanned(layout: Layout, cluster: Cluster) -> int:
    return product(n for n, stride in zip(cluster.axes, layout.strides or (), strict=False) if stride != 0)


def _widest(cluster: Cluster) -> int:
    return max((n.dtype.itemsize for n in _loads(cluster)), default=4)


def pays_to_split(cluster: Cluster, passes: int, device: Device) -> bool:
    """Whether rows are better cut into pieces (one or two launches more) than left to one program each, which reads them in `passes`."""
    rows, columns = product(cluster.parallel), product(cluster.reduce)
    read = sum(n.dtype.itemsize for n in full(cluster)) * rows * columns
    written = sum(s.dtype.itemsize for s in cluster.stores if any((s.layout.strides or ())[len(cluster.parallel) :])) * rows * columns
    share = min(1.0, ALONE * rows / device.sms)  # of the memory that so many programs can keep busy
    whole = (read + written) / (device.bandwidth * share) + (passes - 1) * read / (device.l2_bandwidth * share)
    fits = read <= device.l2_bytes
    pieces = (read + written) / device.bandwidth
    if not written:  # nothing follows along the row
        return pieces + 1e-6 * device.launch_us < whole
    return pieces + read / (device.l2_bandwidth if fits else device.bandwidth) + 2e-6 * device.launch_us < whole


def full(cluster: Cluster) -> set[Load]:
    """Return the loads that run along a reduce axis, one per buffer and position."""
    split = len(cluster.parallel)
    return {n for n in cluster.order if isinstance(n, Load) and (n.index or any((n.layout.strides or ())[split:]))}
