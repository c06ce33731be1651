"""Cost: what a schedule of a cluster takes on a device, from figures of the two and without a measurement.

In: a cluster, its possible schedules and a device. Out: `Choice`: the quickest by the model, with what was expected of each.

    >>> print(choose(cluster, candidates, machine("sm_90")))
    268.4 MB, 89.5 us at the memory's speed, H100
    XBLOCK 1 RBLOCK 8192, 8 warps: 8192 programs, 4 a multiprocessor, 64 registers, waits 32.3 us -> 91.5 us  chosen
    XBLOCK 1 RBLOCK 8192, 16 warps: ...
    waits in us: 1.0 for memory; 0.01 a value of a thread, ...
    H100: 132 multiprocessors of 65536 registers, 3.0 TB/s, ...

The model: a launch takes the longer of two times. Its bytes over the memory's bandwidth; and its waits: each program waits for memory once
(a loop once an iteration, less with stages), for each value of a thread and for its warps at each reduction, and as many programs wait
together as fit on the device. What a row reads again comes from L2. Every constant below stands in the text of each `Choice`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files

import torch

from .cluster import Cluster, Load
from .layout import Layout
from .live import column_sums, held_values, walked
from .size import product

DEFAULT = "sm_90"
LONG_TILE = 32  # elements of a thread from which a loop over segments keeps one sum for all of them
FIXED = 32  # registers of a kernel besides its values
MEMORY_WAIT = 1.0  # microseconds until a load of a busy memory arrives
WARP_WAIT = 0.1  # microseconds that a reduction within warps takes
BARRIER_WAIT = 0.05  # more, for each doubling of the warps that have to meet
ISSUE_WAIT = 0.01  # microseconds for each value of a thread
GATHER_WAIT = 0.02  # more, for each that is loaded by itself: it stands where another value says, or is one for a row
ALONE = 1.5  # one program of 16 warps draws so many times a multiprocessor's share of the memory
CONSTANTS = (
    f"waits in us: {MEMORY_WAIT} for memory; {ISSUE_WAIT} a value of a thread, {GATHER_WAIT} more for each loaded alone; "
    f"a reduction {WARP_WAIT} and {BARRIER_WAIT} each doubling of the warps; {FIXED} registers besides values; "
    f"a program draws {ALONE} shares of the memory"
)


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
    """The candidates, best first; `memory_us` is what their bytes take at the memory's speed. As text with every constant of the model."""

    device: Device
    bytes: int
    memory_us: float
    costs: tuple[Cost, ...]

    def __str__(self) -> str:
        head = f"{self.bytes / 1e6:.1f} MB, {self.memory_us:.1f} us at the memory's speed, {self.device.name}"
        return "\n".join([head, *(f"{cost}{'  chosen' * (i == 0)}" for i, cost in enumerate(self.costs)), CONSTANTS, str(self.device)])

    @property
    def expected(self) -> str:
        """What the model expects of the schedule that it chose, in a few words."""
        best = self.costs[0]
        return f"{best.us:.1f} us by the model, {self.memory_us:.1f} at the memory's speed, {best.registers} registers"


@dataclass(frozen=True, slots=True)
class Device:
    """One row of figures an architecture, from tuned/<arch>.json.

    Attributes:
        sms: multiprocessors. bandwidth, l2_bandwidth: bytes a second that a copy reaches. l2_bytes: what stays in L2 between two passes.
        launch_us: microseconds between the ends of two small kernels. in_flight: bytes a multiprocessor has under way when memory is full.
        registers: 32-bit registers of a multiprocessor. row_values, mixed_values: values of a row that one program keeps without spills,
            alone and with its column sums. mixed_programs: (columns, programs a multiprocessor at most), rising. arch: 90 for sm_90.
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
    arch: int

    def __str__(self) -> str:
        memory = f"{self.bandwidth / 1e12:.1f} TB/s, L2 {self.l2_bandwidth / 1e12:.1f} TB/s and {self.l2_bytes / 1e6:.0f} MB"
        return f"{self.name}: {self.sms} multiprocessors of {self.registers} registers, {memory}, {self.launch_us} us a launch"


@cache
def machine(arch: str | None = None) -> Device:
    """Return the figures of `arch`; without one, of the GPU that is there, and of an H100 where there is none.

    An architecture without a table of its own is treated as an H100 with its own `arch` and number of multiprocessors.
    """
    here = torch.cuda.get_device_properties(0) if arch is None and torch.cuda.is_available() else None
    name = arch or (f"sm_{here.major}{here.minor}" if here else DEFAULT)
    table = files("fusejit.codegen") / "tuned" / f"{name}.json"
    if not table.is_file():
        table = files("fusejit.codegen") / "tuned" / f"{DEFAULT}.json"
    figures = json.loads(table.read_text())
    pairs = tuple((limit, k) for limit, k in figures.pop("mixed_programs"))
    device = Device(**figures, mixed_programs=pairs, arch=int(name.removeprefix("sm_")))
    return replace(device, name=here.name, sms=here.multi_processor_count) if here else device


def choose(cluster: Cluster, candidates: Sequence[Schedule], device: Device) -> Schedule:
    """Return the candidate with the least cost, with the `Choice` that it was; of equals the one that waits least, then the first."""
    moved, again = traffic(cluster)
    memory = moved / device.bandwidth * 1e6
    costs = [estimate(cluster, s, device, memory, again) for s in candidates]
    ranked = sorted(costs, key=lambda c: (not c.resident, round(c.us, 2), round(c.waits, 2)))
    choice = Choice(device, moved, memory, tuple(ranked))
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
    registers = FIXED + _registers(cluster, tiles, each, columns // threads, looped)
    most = min(255, device.registers // threads)
    fit = min(32, 64 // tiles.num_warps, device.registers // (registers * threads)) if registers <= most else 0
    levels = max(cluster.levels.values(), default=0)
    rounds = -(-columns // blocks["RBLOCK"]) * (levels + 1) if looped else 1
    rounds *= -(-rows // (programs * across)) if cluster.programs else 1
    ahead = max(1, min(tiles.num_stages, rounds // (levels + 1) if looped else rounds))  # a loop of one round has nothing to load early
    wait = rounds * (MEMORY_WAIT / ahead + each * _issue(cluster, tiles.template)) + levels * (
        WARP_WAIT + BARRIER_WAIT * (tiles.num_warps - 1).bit_length()
    )
    small = max(1.0, 16 / (each * _widest(cluster)))  # accesses of less than 16 bytes take more instructions
    waits = wait * small * -(-programs // max(1, device.sms * fit)) if programs > device.sms * max(1, fit) else wait * small
    second = again / device.l2_bandwidth * 1e6 if looped else 0.0
    us = device.launch_us + max((memory + second) / _share(programs, device), waits)
    return Cost(tiles, programs, fit, registers, waits, us)


def _share(programs: int, device: Device) -> float:
    """Return the part of the memory's speed that so many programs can draw."""
    return min(1.0, ALONE * programs / device.sms)


def _registers(cluster: Cluster, tiles: Schedule, each: int, row: int, looped: bool) -> int:
    """Return what a thread's values take: `each` of a tile, and `row` of a whole row, whose column sums a walk keeps beside its tiles."""
    if looped and cluster.programs:
        return row * column_sums(cluster) + each * walked(cluster)
    return each * walked(cluster) if adds_tiles_up(cluster, tiles) else int(each * held_values(cluster, looped, tiles.keep))


def adds_tiles_up(cluster: Cluster, tiles: Schedule) -> bool:
    """Whether a loop over long segments sums each tile to one value: beside so many elements a thread has no room for their sums."""
    return cluster.segments > 0 and tiles.template == "reduction_looped" and tiles["RBLOCK"] >= LONG_TILE * 32 * tiles.num_warps


def _issue(cluster: Cluster, template: str) -> float:
    """Return the microseconds that a thread takes for each of its values: one that is gathered is checked and loaded by itself."""
    single = {n for n in _loads(cluster) if n.index} | (row_operands(cluster) if template == "pointwise" else set())
    return ISSUE_WAIT + GATHER_WAIT * len(single)


def row_operands(cluster: Cluster) -> set[Load]:
    """Return the loads of a pointwise cluster that have one value for all of the innermost axis, and several for the others."""
    found = [(n, n.layout.strides or (1,)) for n in _loads(cluster) if not n.index]
    return {n for n, strides in found if not strides[-1] and any(strides)} if len(cluster.axes) > 1 and not cluster.reduce else set()


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
    share = _share(rows, device)
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
