"""Cost model: what a schedule of a cluster takes on a device, from figures of the two and without a measurement.

In: a cluster, its possible schedules and a device. Out: `Choice`: the quickest by the model, with what was expected of
each.

    >>> print(choose(cluster, candidates, machine("sm_90")))
    268.4 MB, 89.5 us at the memory's speed, H100
    XBLOCK 1 RBLOCK 8192, 8 warps: 8192 programs, 4 a multiprocessor, 64 registers, waits 32.3 us -> 91.5 us  chosen
    XBLOCK 1 RBLOCK 8192, 16 warps: ...
    waits in us: 1.0 for memory; 0.01 a value of a thread, ...
    H100: 132 multiprocessors of 65536 registers, 3.0 TB/s, ...

The model: a launch takes the longer of two times. Its bytes over the memory's bandwidth; and its waits: each program
waits for memory once (a loop once an iteration, less with stages), for each value of a thread and for its warps at each
reduction, and as many programs wait together as fit on the device. What a row reads again comes from L2. Every constant
below stands in the text of each `Choice`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from ..ir.analysis import full, traffic, widest
from ..ir.cluster import Cluster
from ..ir.expr import Expr
from ..ir.size import product
from .choice import ALONE, BARRIER_WAIT, FIXED, GATHER_WAIT, ISSUE_WAIT, MEMORY_WAIT, WARP_WAIT, Choice, Cost, Schedule
from .device import Device
from .registers import column_sums, held_values, walked


class Costs(Protocol):
    """What the model asks of the template that a schedule is for."""

    def single(self, cluster: Cluster) -> set[Expr]:
        """Return the loads whose elements are each checked and loaded by themselves."""

    def adds_tiles_up(self, cluster: Cluster, tiles: Schedule) -> bool:
        """Whether a loop reduces each tile to one value at once, instead of keeping a tile of partial results."""


def choose(cluster: Cluster, candidates: Sequence[Schedule], device: Device, template: Costs) -> Schedule:
    """Return the candidate with the least cost, with the `Choice` that it was; of equals the one that waits least, then
    the first.
    """
    moved, again = traffic(cluster)
    memory = moved / device.bandwidth * 1e6
    costs = [estimate(cluster, s, device, memory, again, template) for s in candidates]
    ranked = sorted(costs, key=lambda c: (not c.resident, round(c.us, 2), round(c.waits, 2)))
    choice = Choice(device, moved, memory, tuple(ranked))
    return replace(ranked[0].schedule, choice=choice)


def estimate(cluster: Cluster, tiles: Schedule, device: Device, memory: float, again: int, template: Costs) -> Cost:
    """Return what one schedule takes; `memory` are the microseconds of its bytes, `again` the bytes that a loop reads a
    second time.
    """
    rows, columns = product(cluster.parallel), product(cluster.reduce)
    columns -= columns % tiles.peel if tiles.peel else 0
    blocks = dict(tiles.blocks)
    tile = product(blocks.values())
    across = blocks["XBLOCK"] * blocks.get("YBLOCK", 1)
    programs = cluster.programs or -(-rows // across)
    threads = 32 * tiles.num_warps
    each = max(1, tile // threads)
    looped = "RBLOCK" in blocks and blocks["RBLOCK"] < columns
    registers = FIXED + _registers(cluster, tiles, each, columns // threads, looped, template)
    most = min(255, device.registers // threads)
    fit = min(32, 64 // tiles.num_warps, device.registers // (registers * threads)) if registers <= most else 0
    levels = max(cluster.levels.values(), default=0)
    rounds = -(-columns // blocks["RBLOCK"]) * (levels + 1) if looped else 1
    rounds *= -(-rows // (programs * across)) if cluster.programs else 1
    ahead = max(
        1, min(tiles.num_stages, rounds // (levels + 1) if looped else rounds)
    )  # a loop of one round has nothing to load early
    wait = rounds * (MEMORY_WAIT / ahead + each * _issue(len(template.single(cluster)))) + levels * (
        WARP_WAIT + BARRIER_WAIT * (tiles.num_warps - 1).bit_length()
    )
    small = max(1.0, 16 / (each * widest(cluster)))  # accesses of less than 16 bytes take more instructions
    waits = (
        wait * small * -(-programs // max(1, device.sms * fit)) if programs > device.sms * max(1, fit) else wait * small
    )
    second = again / device.l2_bandwidth * 1e6 if looped else 0.0
    us = device.launch_us + max((memory + second) / _share(programs, device), waits)
    return Cost(tiles, programs, fit, registers, waits, us)


def _share(programs: int, device: Device) -> float:
    """Return the part of the memory's speed that so many programs can draw."""
    return min(1.0, ALONE * programs / device.sms)


def _registers(cluster: Cluster, tiles: Schedule, each: int, row: int, looped: bool, template: Costs) -> int:
    """Return what a thread's values take: `each` of a tile, and `row` of a whole row, whose column sums a walk keeps
    beside its tiles.
    """
    if looped and cluster.programs:
        return row * column_sums(cluster) + each * walked(cluster)
    return (
        each * walked(cluster)
        if template.adds_tiles_up(cluster, tiles)
        else int(each * held_values(cluster, looped, tiles.keep))
    )


def _issue(single: int) -> float:
    """Return the microseconds that a thread takes for each of its values, of which so many are loaded by themselves."""
    return ISSUE_WAIT + GATHER_WAIT * single


def pays_to_split(cluster: Cluster, passes: int, device: Device) -> bool:
    """Whether rows are better cut into pieces (one or two launches more) than left to one program each, which reads
    them in `passes`.
    """
    rows, columns = product(cluster.parallel), product(cluster.reduce)
    read = sum(n.dtype.itemsize for n in full(cluster)) * rows * columns
    written = (
        sum(s.dtype.itemsize for s in cluster.stores if any((s.layout.strides or ())[len(cluster.parallel) :]))
        * rows
        * columns
    )
    share = _share(rows, device)
    whole = (read + written) / (device.bandwidth * share) + (passes - 1) * read / (device.l2_bandwidth * share)
    fits = read <= device.l2_bytes
    pieces = (read + written) / device.bandwidth
    if not written:  # nothing follows along the row
        return pieces + 1e-6 * device.launch_us < whole
    return pieces + read / (device.l2_bandwidth if fits else device.bandwidth) + 2e-6 * device.launch_us < whole
