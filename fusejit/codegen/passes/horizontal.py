"""Horizontal fusion: pointwise clusters that do the same to different tensors become one launch.

In: fused clusters. Out: the same program with independent clusters of one pattern joined into `Foreach` steps.

    200 x (p, m, v = adamw(p, g, m, v, lr, step))   ->   foreach of 119, foreach of 81

Which clusters: one line of memory (contiguous operands of any rank, uniform strides, single elements such as a learning
rate), the same expression in the same dtypes and with the same constants, no path between them. What needs two axes,
and reductions of rows, stay as they are; reductions of whole tensors are grouped by horizontal_reduction.py.

How a program of the kernel finds its tensor was decided by compiling the alternatives for sm_90 (119 tensors, AdamW,
Triton 3.7):

    a row an `if`, in blocks of 8  1.6 s  64 registers, no spills, all accesses 16 bytes wide;
        a program runs 15 tests and one block
    a row an `if`, one after another  1.3 s    the same, but every program runs all of 708 selects
    a tree of `tl.where`              1.7 s    as many selects, and unreadable
    a tree of `if`  1.9 s  255 registers, 120 bytes spilled: every pointer is loaded before the first branch
    a table of addresses in memory  0.9 s  40 registers, no selects; but host time in every call to see
        whether an address moved, an upload when one did, and a CUDA graph that holds the table instead of the tensors

So pointers are plain kernel arguments, and the rows are blocks of `if`s. A driver before CUDA 12.1 takes 4,096 bytes of
arguments, ptxas
32,764: 480 pointers and Triton's own two fit the former. Triton 3.6 runs a C compiler for each new signature (4 s for
480 pointers, cached on disk), 3.7 does not.
"""

from __future__ import annotations

import heapq
from dataclasses import replace

from ..ir.cluster import Cluster
from ..ir.concretize import symbolic
from ..ir.graph import Extern, Foreach, Lowered, refs
from ..ir.signature import Pattern, pattern, places
from ..schedule.device import Device, machine
from .hazards import predecessors

MAX_POINTERS = 480
MAX_TENSORS = 240  # rows; every program tests one in eight before it starts
MAX_HELD = (
    64 << 20
)  # bytes of temporaries that a group may keep alive at once: its members no longer run one after the other
WIDE = 16  # bytes of the widest access
FEW = 512  # elements a multiprocessor, of which a launch costs more than narrow accesses do

Step = Cluster | Extern | Foreach
Row = tuple[int, Pattern]  # the number of a step, and its pattern


def foreach(lowered: Lowered, device: Device | None = None) -> Lowered:
    """Return the program with its groups joined. No order between steps is lost, and none becomes circular."""
    return Grouping(lowered, device or machine()).run()


class Grouping:
    """Steps by number; `above` holds what must run before each one as a bit set, kept true while groups form."""

    def __init__(self, lowered: Lowered, device: Device) -> None:
        self.lowered, self.buffers, self.device = lowered, lowered.buffers, device
        self.steps: list[Step] = list(lowered.steps)
        self.before = predecessors(self.steps, self.buffers)
        self.above: list[int] = []
        for found in self.before:
            bits = 0
            for k in found:
                bits |= self.above[k] | 1 << k
            self.above.append(bits)
        self.kept = {ref.buffer for ref in refs(lowered.outputs)} | {name for name in lowered.inputs if name}

    def run(self) -> Lowered:
        groups = []
        for found in self.patterns().values():
            while len(found) > 1:
                group, found = self.gather(found)
                if len(group) > 1:
                    self.join(group)
                    groups.append(group)
        return replace(self.lowered, steps=tuple(self.ordered(groups)))

    def wanted(self, step: Step) -> bool:
        """Whether a step may join a group here."""
        return isinstance(step, Cluster) and not step.reduce and self.small(step)

    def patterns(self) -> dict[tuple[object, bool], list[Row]]:
        """Return the steps of each pattern, in order; those whose every element lies in a 16-byte access apart from the
        others.
        """
        known = places(self.buffers)
        found: dict[tuple[object, bool], list[Row]] = {}
        single: list[int] = []
        for i, step in enumerate(self.steps):
            row = pattern(step, known) if isinstance(step, Cluster) and self.wanted(step) else None
            if row is not None and row.size > 1:
                found.setdefault((self.key(row), self.aligned(row)), []).append((i, row))
            elif row is not None:
                single.append(i)
        shapes = dict.fromkeys(rows[0][1].strides for rows in found.values())
        for i in single:  # a single element fits the strides of any pattern
            step = self.steps[i]
            assert isinstance(step, Cluster)
            rows = [row for strides in (*shapes, None) if (row := pattern(step, known, strides)) is not None]
            fit = next((row for row in rows if (self.key(row), False) in found), rows[-1])
            found.setdefault((self.key(fit), False), []).append((i, fit))
        for key in [key for key, whole in found if whole and (key, False) in found]:
            if sum(row.size for _, row in found[key, True]) < FEW * self.device.sms:
                found[key, False] += found.pop((key, True))
        return {key: sorted(rows, key=lambda row: row[0]) for key, rows in found.items()}

    def key(self, row: Pattern) -> object:
        """Return what members of a group have in common: the pattern and the types of its pointers."""
        return (row.key, tuple(self.buffers[name].dtype for name, _ in row.operands))

    def small(self, step: Cluster) -> bool:
        """Whether 32 bits hold every offset."""
        return not symbolic(step) and all(self.buffers[name].bytes < 2**31 for name in (*step.reads, *step.writes))

    def aligned(self, row: Pattern) -> bool:
        """Whether 16-byte accesses cover a row without a rest."""
        sizes = [
            (self.buffers[b].dtype.itemsize, at) for (b, at), s in zip(row.operands, row.strides, strict=True) if s != 0
        ]
        return all(row.size * size % WIDE == 0 and at * size % WIDE == 0 for size, at in sizes)

    def gather(self, found: list[Row]) -> tuple[list[Row], list[Row]]:
        """Return the first steps that can be one launch, and the others."""
        group: list[Row] = []
        rest: list[Row] = []
        members = union = held = 0
        pointers: set[str] = set()
        for i, row in found:
            more = {name for name, _ in row.operands}
            temporary = sum(self.buffers[name].bytes for name in more - self.kept)
            full = len(pointers | more) > MAX_POINTERS or len(group) >= MAX_TENSORS or held + temporary > MAX_HELD
            if group and (full or self.above[i] & members or union >> i & 1):
                rest.append((i, row))
                continue
            group.append((i, row))
            members |= 1 << i
            union |= self.above[i]
            held += temporary
            pointers |= more
        return group, rest

    def join(self, group: list[Row]) -> None:
        """Let everything above or below one member be above or below all of them."""
        members = sum(1 << i for i, _ in group)
        union = 0
        for i, _ in group:
            union |= self.above[i]
        for k, bits in enumerate(self.above):
            if bits & members:
                self.above[k] = bits | union | members
        for i, _ in group:
            self.above[i] = union

    def ordered(self, groups: list[list[Row]]) -> list[Step]:
        """Return the steps in an order that respects every dependency, a group in the place of its first member if it
        can be.
        """
        place = {i: group[0][0] for group in groups for i, _ in group}
        made: dict[int, tuple[Step, ...]] = {i: (step,) for i, step in enumerate(self.steps) if place.get(i, i) == i}
        for group in groups:
            made[group[0][0]] = self.launches(group)
        waiting: dict[int, set[int]] = {i: set() for i in made}
        followers: dict[int, set[int]] = {i: set() for i in made}
        for i, found in enumerate(self.before):
            for k in found:
                one, other = place.get(k, k), place.get(i, i)
                waiting[other].add(one)
                followers[one].add(other)
        ready = [i for i, found in waiting.items() if not found]
        done: list[Step] = []
        while ready:
            i = heapq.heappop(ready)
            done += made[i]
            for k in followers[i]:
                waiting[k].discard(i)
                if not waiting[k]:
                    heapq.heappush(ready, k)
        assert len(done) == sum(map(len, made.values())), "grouping made a cycle"
        return done

    def launches(self, group: list[Row]) -> tuple[Step, ...]:
        """Return the steps that do what the members of a group do."""
        return (Foreach(self.members(group), tuple(row for _, row in group)),)

    def members(self, group: list[Row]) -> tuple[Cluster, ...]:
        return tuple(s for s in (self.steps[i] for i, _ in group) if isinstance(s, Cluster))
