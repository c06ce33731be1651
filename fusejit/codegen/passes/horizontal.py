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

from ..ir.cluster import Cluster
from ..ir.concretize import symbolic
from ..ir.graph import Foreach, Lowered, refs
from ..ir.signature import Pattern, pattern
from ..schedule.device import Device, machine
from .step_graph import Step, StepGraph

MAX_POINTERS = 480
MAX_TENSORS = 240  # rows; every program tests one in eight before it starts
MAX_HELD = (
    64 << 20
)  # bytes of temporaries that a group may keep alive at once: its members no longer run one after the other
WIDE = 16  # bytes of the widest access
FEW = 512  # elements a multiprocessor, of which a launch costs more than narrow accesses do

Row = tuple[int, Pattern]  # the number of a step, and its pattern


def foreach(lowered: Lowered, device: Device | None = None) -> Lowered:
    """Return the program with its groups joined. No order between steps is lost, and none becomes circular."""
    return Grouping(StepGraph(lowered), device or machine()).run()


class Grouping:
    """The steps of a program by number, while those of one pattern become launches."""

    def __init__(self, graph: StepGraph, device: Device) -> None:
        self.graph, self.buffers, self.device = graph, graph.buffers, device
        lowered = graph.lowered
        self.lasting = {ref.buffer for ref in refs(lowered.outputs)} | {name for name in lowered.inputs if name}

    def run(self) -> Lowered:
        for rows in self.patterns().values():
            while len(rows) > 1:
                group, rows = self.gather(rows)
                if len(group) > 1:
                    members = tuple(i for i, _ in group)
                    launch, *tail = self.launches(group)
                    self.graph.merge((*members[1:], members[0]), launch, tail[0] if tail else None)
        return self.graph.program()

    def wanted(self, step: Step) -> bool:
        """Whether a step may join a group here."""
        return isinstance(step, Cluster) and not step.reduce and self.small(step)

    def patterns(self) -> dict[tuple[object, bool], list[Row]]:
        """Return the steps of each pattern, in order; those whose every element lies in a 16-byte access apart from the
        others.
        """
        places = self.graph.places
        rows_of: dict[tuple[object, bool], list[Row]] = {}
        single: list[int] = []
        for i, step in self.graph.steps.items():
            row = pattern(step, places) if isinstance(step, Cluster) and self.wanted(step) else None
            if row is not None and row.size > 1:
                rows_of.setdefault((self.key(row), self.aligned(row)), []).append((i, row))
            elif row is not None:
                single.append(i)
        shapes = dict.fromkeys(rows[0][1].strides for rows in rows_of.values())
        for i in single:  # a single element fits the strides of any pattern
            step = self.graph.steps[i]
            assert isinstance(step, Cluster)
            rows = [row for strides in (*shapes, None) if (row := pattern(step, places, strides)) is not None]
            fit = next((row for row in rows if (self.key(row), False) in rows_of), rows[-1])
            rows_of.setdefault((self.key(fit), False), []).append((i, fit))
        for key in [key for key, whole in rows_of if whole and (key, False) in rows_of]:
            if sum(row.size for _, row in rows_of[key, True]) < FEW * self.device.sms:
                rows_of[key, False] += rows_of.pop((key, True))
        return {key: sorted(rows, key=lambda row: row[0]) for key, rows in rows_of.items()}

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

    def gather(self, rows: list[Row]) -> tuple[list[Row], list[Row]]:
        """Return the first steps that can be one launch, and the others."""
        group: list[Row] = []
        rest: list[Row] = []
        members = ancestors = held = 0
        pointers: set[str] = set()
        for i, row in rows:
            operands = {name for name, _ in row.operands}
            temporary = sum(self.buffers[name].bytes for name in operands - self.lasting)
            full = len(pointers | operands) > MAX_POINTERS or len(group) >= MAX_TENSORS or held + temporary > MAX_HELD
            if group and (full or self.graph.ancestors[i] & members or ancestors >> i & 1):
                rest.append((i, row))
                continue
            group.append((i, row))
            members |= 1 << i
            ancestors |= self.graph.ancestors[i]
            held += temporary
            pointers |= operands
        return group, rest

    def launches(self, group: list[Row]) -> tuple[Step, ...]:
        """Return the one or two steps that do what the members of a group do."""
        return (Foreach(self.members(group), tuple(row for _, row in group)),)

    def members(self, group: list[Row]) -> tuple[Cluster, ...]:
        return self.graph.clusters([i for i, _ in group])
