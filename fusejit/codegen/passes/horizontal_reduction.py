"""Horizontal reduction: reductions of whole tensors that do the same become two launches, whatever their number and
sizes.

In: fused clusters. Out: the same program with independent whole reductions of one pattern joined into `Foreach` steps:
one reduces pieces of all tensors to partial results, one combines each tensor's; a single one where every tensor is
short. Deterministic: no atomics.

    200 x (n = sqrt(sum(g * g)))   ->   foreach of 200 to 5,120 partial sums, foreach of 200

So a norm over all gradients costs two launches and a read, from `torch._foreach_norm`, `HyperMap` and plain loops
alike; the scaling that follows is one more (horizontal.py). It runs before rfactor.py, which cuts single long
reductions by itself.
"""

from __future__ import annotations

from dataclasses import replace

from ..ir.analysis import power_of_two
from ..ir.cluster import Cluster, Store
from ..ir.expr import Expr, Load, Reduce, load, reduction, rewrite, substitute
from ..ir.graph import Buffer, Foreach, Lowered
from ..ir.layout import strided
from ..ir.signature import Pattern, line, pattern, places
from ..ir.size import product
from ..schedule.device import Device, machine
from .horizontal import Grouping, Row
from .rfactor import padded, reductions
from .step_graph import Step, StepGraph

BLOCK = 4096  # elements of one iteration
MOST = 8  # iterations of a program
EACH = 8  # programs a multiprocessor, from which programs take more instead


def many(lowered: Lowered, device: Device | None = None) -> Lowered:
    """Return the program with its groups of whole reductions joined."""
    return _Reductions(StepGraph(lowered), device or machine()).run()


class _Reductions(Grouping):
    """As its base, for reductions; a group's partial results are new buffers."""

    def wanted(self, step: Step) -> bool:
        return isinstance(step, Cluster) and bool(step.reduce) and self.small(step)

    def launches(self, group: list[Row]) -> tuple[Step, ...]:
        rows, members = tuple(row for _, row in group), self.members(group)
        longest, total = max(row.size for row in rows), sum(row.size for row in rows)
        chunk = BLOCK * max(1, min(MOST, total // (BLOCK * EACH * self.device.sms)))
        if longest <= max(chunk, MOST // 2 * BLOCK):
            return (Foreach(members, rows, power_of_two(longest)),)
        known = places(self.buffers)
        # stores in the order that patterns have them: then the reductions of all members are in one order
        flat = [
            _straight(replace(m, stores=tuple(sorted(m.stores, key=lambda s: known[s.buffer][1])))) for m in members
        ]
        pieces = [-(-row.size // chunk) for row in rows]
        partial = [self.partial(node, sum(pieces), members[0]) for node in reductions(flat[0])]
        known |= places({b.name: b for b in partial})
        raw = [_raw(member, partial) for member in flat]
        firsts = [sum(pieces[:i]) for i in range(len(pieces))]
        cut = [_pieces(member, first, chunk) for member, first in zip(raw, firsts, strict=True)]
        ends = [
            _combined(member, partial, first, count) for member, first, count in zip(flat, firsts, pieces, strict=True)
        ]
        one = _row(pattern(ends[pieces.index(max(pieces))], known))
        last = tuple(_row(pattern(member, known, one.strides)) for member in ends)
        first = tuple(_row(pattern(member, known)) for member in raw)
        return Foreach(tuple(cut), first, chunk), Foreach(tuple(ends), last, power_of_two(max(pieces)))

    def partial(self, node: Reduce, count: int, member: Cluster) -> Buffer:
        """Make the buffer of one reduction's partial results, one for each program."""
        device = self.buffers[member.stores[0].buffer].device
        buffer = Buffer(f"b{len(self.buffers)}", (count,), (1,), node.dtype, device)
        self.buffers[buffer.name] = buffer
        return buffer


def _row(row: Pattern | None) -> Pattern:
    assert row is not None, "pieces of a line are a line"
    return row


def _straight(member: Cluster) -> Cluster:
    """Return a reduction over one axis."""
    flat = line(member)
    assert flat is not None, "members of a group are lines"
    return flat


def _raw(flat: Cluster, partial: list[Buffer]) -> Cluster:
    """Return a reduction that keeps its results as they are; a program writes them behind those of the programs before
    it.
    """
    stores = (
        Store(b.name, strided(flat.axes, (0,)), n, n.dtype) for n, b in zip(reductions(flat), partial, strict=True)
    )
    return replace(flat, stores=tuple(stores))


def _pieces(raw: Cluster, first: int, chunk: int) -> Cluster:
    """Return the reduction of a tensor's pieces: what one row of the first launch does."""
    size = product(raw.reduce)
    wide = raw.reshape((), (size // chunk, chunk)) if size % chunk == 0 else padded(raw, -(-size // chunk), chunk)
    stores = (replace(s, layout=strided(wide.axes, (1, 0), first)) for s in wide.stores)
    return Cluster(wide.reduce[:1], wide.reduce[1:], tuple(stores), raw.lines)


def _combined(flat: Cluster, partial: list[Buffer], first: int, count: int) -> Cluster:
    """Return the combination of a tensor's partial results, and what follows it."""
    values: dict[Expr, Expr] = {
        n: reduction(n.op, load(b.name, strided((count,), (1,), first), n.dtype), dtype=n.dtype)
        for n, b in zip(reductions(flat), partial, strict=True)
    }
    names = {b.name for b in partial}

    def visit(node: Expr) -> Expr:  # what else is read is one element
        if not isinstance(node, Load) or node.buffer in names:
            return node
        return load(node.buffer, strided((count,), (0,), node.layout.offset), node.dtype)

    results = rewrite(substitute([s.value for s in flat.stores], values), visit)
    stores = (
        replace(s, value=v, layout=strided((count,), (0,), s.layout.offset))
        for s, v in zip(flat.stores, results, strict=True)
    )
    return Cluster((), (count,), tuple(stores), flat.lines)
