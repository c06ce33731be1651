"""Fuse: clusters become fewer clusters, ranked by the bytes that a merge saves.

In: the clusters and extern calls of `lower`. Out: the same program with fewer launches, and a reason for every refused
pair.

Two clusters merge when no path through a third runs between them and their axes can be made the same: equal (parallel,
reduce); a pointwise cluster over the parallel x reduce space, or the parallel space alone, of a reduction. A value that
only the merged cluster reads is never written. Ideas: Inductor's scheduler (greedy, by score), MindSpore's graph
kernels (limits).
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, replace

from ..ir.analysis import column_reduction, out_of_order, scans
from ..ir.cluster import Cluster
from ..ir.concretize import hinted, symbolic
from ..ir.expr import Reduce
from ..ir.graph import Buffer, Extern, Foreach, Lowered, Refused, refs
from ..ir.signature import pattern, places
from ..ir.size import hint, most, product
from ..schedule.device import Device, machine
from .align import ORDERS, align, join, space
from .block_reduction import check_segments, in_segments
from .hazards import order, overwrites, reads, writes
from .nested_reduction import joined, nest
from .profitable import worth_it
from .realize import MAX_WEIGHT, weight
from .rfactor import by_rows, fits_rows
from .row_column import in_shares, is_of_rows, mix
from .schedule import taller

MAX_BUFFERS = 48  # arguments of one kernel
NEIGHBOURS = 12  # how many siblings of one buffer are tried with each other
BETWEEN = "an op between them reads one and feeds the other"


@dataclass(frozen=True, slots=True)
class Unfused:
    """Two clusters that share a buffer and stay apart, and why."""

    pair: tuple[str, str]
    reason: str

    def __str__(self) -> str:
        return f"{self.pair[0]} | {self.pair[1]}: {self.reason}"


def fuse(
    lowered: Lowered, reductions: bool = True, device: Device | None = None
) -> tuple[Lowered, tuple[Unfused, ...]]:
    """Return the program with clusters merged, and the refusals. `reductions=False` fuses pointwise clusters only."""
    lowered = live(order(lowered))
    state = _Fusing(replace(lowered, buffers=dict(lowered.buffers)), reductions, device or machine())
    state.run()
    if reductions:
        if state.nest():
            state.run()
        state.whole()
        state.mix()
        state.share()
    state.beside()
    return replace(state.lowered, steps=tuple(state.ordered())), state.refusals()


def live(lowered: Lowered) -> Lowered:
    """Return the program without the results of clusters that nothing reads, and without clusters that have no
    others.
    """
    wanted = {ref.buffer for ref in refs(lowered.outputs)} | {b.name for b in lowered.buffers.values() if b.written_to}
    kept: list[Cluster | Extern] = []
    for step in reversed(lowered.steps):
        assert not isinstance(step, Foreach), "made after fusion"
        if isinstance(step, Cluster):
            stores = tuple(s for s in step.stores if s.buffer in wanted)
            if not stores:
                continue
            step = step if len(stores) == len(step.stores) else replace(step, stores=stores)
        assert not isinstance(step, Foreach)  # which are made of fused clusters
        wanted |= reads(step)
        kept.append(step)
    return replace(lowered, steps=tuple(reversed(kept)))


class _Fusing:
    """The graph of steps while it shrinks. Ancestors are bit sets, so that "is there a path" is one `&`."""

    def __init__(self, lowered: Lowered, reductions: bool, device: Device) -> None:
        self.lowered, self.reductions, self.device = lowered, reductions, device
        self.steps: dict[int, Cluster | Extern] = {
            i: s for i, s in enumerate(lowered.steps) if not isinstance(s, Foreach)
        }
        self.kept = {ref.buffer for ref in refs(lowered.outputs)} | {
            b.name for b in lowered.buffers.values() if b.written_to
        }
        self.kept |= {name for s in lowered.steps if isinstance(s, Extern) for name in s.reads}
        self.producer: dict[str, int] = {}
        self.readers: dict[str, set[int]] = {}
        self.above: dict[int, int] = {}
        self.refused: dict[tuple[int, int], str] = {}
        self.twins: set[int] | None = None
        self.tails: dict[int, Cluster] = {}  # the second kernel of a step that mix made
        self.slices = False  # whether a launch is all that is left to save
        self.barriers = [
            i for i, s in self.steps.items() if isinstance(s, Extern) and s.target == "fusejit.order.default"
        ]
        self.effects = [
            i for i, s in self.steps.items() if isinstance(s, Extern) and s.effect
        ]  # draws take their numbers from one stream
        for i, step in self.steps.items():
            for name in reads(step):
                self.readers.setdefault(name, set()).add(i)
            for name in writes(step):
                self.producer[name] = i
        for i, step in self.steps.items():
            bits = 0
            for j in self.before(i, step):
                bits |= self.above[j] | 1 << j
            self.above[i] = bits

    def before(self, i: int, step: Cluster | Extern) -> set[int]:
        """Return the steps that must run before `step`: producers of what it reads, readers of what it overwrites,
        `depend`s.
        """
        parts = [step, *([self.tails[i]] if i in self.tails else [])]
        found = {self.producer[name] for part in parts for name in reads(part) if name in self.producer}
        if isinstance(step, Extern):
            found |= set([k for k in self.barriers if k < i][-1:])
            found |= set([k for k in self.effects if k < i][-1:]) if step.effect else set()
        for name in (name for part in parts for name in overwrites(part, self.lowered.buffers)):
            found |= self.readers.get(name, set())
        return found - {i}

    def run(self) -> None:
        heap: list[tuple[int, int, int]] = []
        for i in list(self.steps):
            self.push(heap, i)
        while heap:
            score, i, j = heapq.heappop(heap)
            if i not in self.steps or j not in self.steps or self.refused.get((i, j), BETWEEN) != BETWEEN:
                continue  # what stood between two steps may have joined one of them since
            if self.reductions and self.left_to_foreach(i, j) or self.slices and not self.side_by_side(i, j):
                continue
            try:
                merged = self.merge(i, j)
            except Refused as refusal:
                self.refused[i, j] = str(refusal)
                continue
            self.refused.pop((i, j), None)
            self.replace(i, j, merged)
            self.push(heap, j)

    def push(self, heap: list[tuple[int, int, int]], i: int) -> None:
        """Queue the pairs of step `i` with the steps that share a buffer with it."""
        step = self.steps[i]
        if not isinstance(step, Cluster):
            return
        others: set[int] = set()
        for name in reads(step):
            others |= {self.producer[name]} if name in self.producer else set()
            near = sorted(self.readers[name], key=lambda k: abs(k - i))
            others |= set(near[: NEIGHBOURS + 1])
        for name in writes(step):
            others |= set(sorted(self.readers.get(name, set()))[: NEIGHBOURS * 2])
        for j in others - {i}:
            if isinstance(self.steps.get(j), Cluster):
                a, b = (i, j) if not self.above[i] >> j & 1 and i < j or self.above[j] >> i & 1 else (j, i)
                heapq.heappush(heap, (-self.saved(a, b), a, b))

    def left_to_foreach(self, i: int, j: int) -> bool:
        """Whether two steps share single elements only (a learning rate) and one has a twin: all twins will be one
        launch anyway.
        """
        a, b = self.steps[i], self.steps[j]
        shared = reads(a) & reads(b)
        if writes(a) & reads(b) or any(hint(product(self.lowered.buffers[name].shape)) > 1 for name in shared):
            return False
        if (
            self.twins is None
        ):  # the pairs with the least to save come last: by now the steps have almost taken their shape
            known = places(self.lowered.buffers)
            found = {
                k: pattern(step, known)
                for k, step in self.steps.items()
                if isinstance(step, Cluster) and not symbolic(step)
            }
            count = Counter(row.key for row in found.values() if row is not None)
            self.twins = {k for k, row in found.items() if row is not None and count[row.key] > 1}
        return i in self.twins or j in self.twins

    def saved(self, i: int, j: int) -> int:
        """Return the bytes that merging saves: shared reads once, a value handed on in registers neither written nor
        read.
        """
        a, b = self.steps[i], self.steps[j]
        total = 0
        for name in reads(a) & reads(b):
            total += self.lowered.buffers[name].bytes
        for name in writes(a) & reads(b):
            gone = name not in self.kept and self.readers[name] <= {i, j}
            total += self.lowered.buffers[name].bytes * (2 if gone else 1)
        return hint(total)

    def merge(self, i: int, j: int) -> Cluster:
        a, b = self.steps[i], self.steps[j]
        assert isinstance(a, Cluster) and isinstance(b, Cluster)
        if not self.reductions and (a.reduce or b.reduce):
            raise Refused("jit_level O1 fuses elementwise clusters only")
        self.check_between(i, j)
        blocks = in_segments(a, b)
        one, two = blocks or align(a, b, self.slices)
        merged = join(one, two)
        _check(one, two, merged, self.lowered.buffers)
        merged = self.without_dead(merged, i, j)
        if blocks:
            check_segments(a, b, merged, self.device)
        worth_it(hinted(one), hinted(two), hinted(merged), self.device)
        return merged

    def check_between(self, i: int, j: int) -> None:
        between = self.above[j] & ~(1 << i)
        while between:
            k = between.bit_length() - 1
            between ^= 1 << k
            if k in self.steps and self.above[k] >> i & 1:
                raise Refused(BETWEEN)
        if self.above[i] >> j & 1:
            raise Refused(BETWEEN)

    def without_dead(self, merged: Cluster, i: int, j: int) -> Cluster:
        """Return `merged` without the stores that only i and j read: they take them from registers now."""
        dead = {
            name
            for name in merged.writes
            if name in self.producer and name not in self.kept and self.readers.get(name, set()) <= {i, j}
        }
        return replace(
            merged, stores=tuple(s for s in merged.stores if s.buffer not in dead or s.buffer in merged.reads)
        )

    def nest(self) -> bool:
        """Join reductions of segments, of their results, and what follows along the whole space: three steps that read
        one input twice.
        """
        sums = {j for j, s in self.steps.items() if isinstance(s, Cluster) and s.reduce}
        found = False
        for j in sorted(sums):
            parts = (
                {self.producer[name] for name in reads(self.steps[j]) if name in self.producer}
                if j in self.steps
                else set()
            )
            for i in sorted(parts & sums):
                found |= self.nested(i, j)
        return found

    def nested(self, i: int, j: int) -> bool:
        """Try step `i` inside step `j`, and with it the step after them that saves most."""
        inner, outer = self.steps.get(i), self.steps.get(j)
        if not isinstance(inner, Cluster) or not isinstance(outer, Cluster) or symbolic(inner) or symbolic(outer):
            return False
        followers = {k for name in writes(outer) for k in self.readers.get(name, ())} - {i, j}
        for _, k in sorted((-self.saved(i, k), k) for k in followers if self.saved(i, k) > self.small(i, j)):
            after = self.steps[k]
            if not isinstance(after, Cluster):
                continue
            try:
                self.check_between(i, j)
                merged = joined(nest(inner, outer, self.device), after)
                _check(inner, after, merged, self.lowered.buffers)
                self.check_around(i, j, k)
            except Refused as refusal:
                self.refused[i, k] = str(refusal)
                continue
            self.replace(
                i, j, replace(inner, stores=(*inner.stores, *outer.stores))
            )  # a stand-in with the names of both
            self.replace(j, k, self.without_dead(merged, j, k))
            return True
        return False

    def small(self, i: int, j: int) -> int:
        """Return the bytes that step `i` hands to step `j`."""
        return hint(sum(self.lowered.buffers[name].bytes for name in writes(self.steps[i]) & reads(self.steps[j])))

    def check_around(self, i: int, j: int, k: int) -> None:
        inside = 1 << i | 1 << j
        for t in self.steps:
            if t not in (i, j, k) and self.above[k] >> t & 1 and self.above[t] & inside:
                raise Refused(BETWEEN)

    def beside(self) -> None:
        """Join pointwise steps over slices of one buffer, each of which reads its own: q, k and v of a projection."""
        before, self.slices = self.refused, True
        self.refused = {pair: reason for pair, reason in before.items() if reason != ORDERS}
        self.run()
        self.refused = before | self.refused

    def side_by_side(self, i: int, j: int) -> bool:
        """Whether two steps are pointwise, and no two lines of memory, of which foreach makes one launch."""
        pair = [self.steps[i], self.steps[j]]
        if any(not isinstance(s, Cluster) or s.reduce or s.programs for s in pair) or not reads(pair[0]) & reads(
            pair[1]
        ):
            return False
        known = places(self.lowered.buffers)
        return any(symbolic(s) or pattern(s, known) is None for s in pair if isinstance(s, Cluster))

    def mix(self) -> None:
        """Join what is left of row and column reductions over the same elements, the pair that saves most first."""
        rows, columns = self.by_direction()  # one row length, one number of rows
        pairs = [(i, j) for i, key in rows.items() for j in columns.get(key[::-1], ()) if i != j and self.shared(i, j)]
        for i, j in sorted(pairs, key=lambda pair: -self.shared(*pair)):
            if i not in self.steps or j not in self.steps or i in self.tails or j in self.tails:
                continue
            first, second = (j, i) if self.above[i] >> j & 1 else (i, j)
            try:
                self.mixed(i, j, first, second)
            except Refused as refusal:
                self.refused[first, second] = str(refusal)

    def by_direction(self) -> tuple[dict[int, tuple[int, int]], dict[tuple[int, int], list[int]]]:
        """Return {step: (P, R)} of the row reductions and {(P, R): steps} of the column reductions."""
        rows: dict[int, tuple[int, int]] = {}
        columns: dict[tuple[int, int], list[int]] = {}
        for i, step in self.steps.items():
            if not isinstance(step, Cluster) or scans(step):
                continue
            if any(isinstance(n, Reduce) for n in step.order):
                key = product(step.parallel), product(step.reduce)
                if column_reduction(hinted(step)):
                    columns.setdefault(key, []).append(i)
                elif isinstance(
                    key[1], int
                ):  # how many rows there are may vary, their length decides which template holds them
                    rows[i] = key
        return rows, columns

    def shared(self, i: int, j: int) -> int:
        return self.saved(i, j) + self.saved(j, i)

    def whole(self) -> None:
        """Let rows that a kernel holds give their part of a reduction of everything."""
        for j in list(self.steps):
            step = self.steps.get(j)
            if isinstance(step, Cluster) and step.reduce and product(step.parallel) == 1:
                near = {self.producer[name] for name in reads(step) if name in self.producer}
                near |= {k for name in (*reads(step), *writes(step)) for k in self.readers.get(name, ())}
                for i in sorted(near - {j}, key=lambda i: (-self.shared(i, j), i)):
                    if self.by_rows(i, j):
                        break

    def by_rows(self, i: int, j: int) -> bool:
        """Try step `j`, a reduction of everything, in the kernel of step `i`."""
        rows, step = self.steps.get(i), self.steps.get(j)
        if not isinstance(rows, Cluster) or not isinstance(step, Cluster) or not fits_rows(step, rows):
            return False
        if i in self.tails or j in self.tails:
            return False
        first, second = (j, i) if self.above[i] >> j & 1 else (i, j)
        buffers = dict(self.lowered.buffers)
        try:
            self.check_between(first, second)
            pieces, tail = by_rows(step, rows, first == j, buffers)
            one, two = align(pieces, rows) if first == j else align(rows, pieces)
            merged = join(one, two)
            _check(one, two, merged, buffers)
            worth_it(hinted(one), hinted(two), hinted(merged), self.device)
            self.check_partial(i, j, buffers)
        except Refused as refusal:
            self.refused[first, second] = str(refusal)
            return False
        self.in_two(first, second, self.without_dead(merged, i, j), tail, buffers)
        return True

    def mixed(self, i: int, j: int, first: int, second: int) -> None:
        row, column = self.steps[i], self.steps[j]
        assert isinstance(row, Cluster) and isinstance(column, Cluster)
        self.check_between(first, second)
        buffers = dict(self.lowered.buffers)
        merged, tail = mix(row, column, first == j, buffers, self.device)
        _check(row, column, merged, buffers)
        self.check_partial(i, j, buffers, taller(product(row.parallel), self.device))
        self.in_two(first, second, self.without_dead(merged, i, j), tail, buffers)

    def share(self) -> None:
        """Let the programs that make results of rows reduce those of their share, where all of them together take two
        steps.
        """
        for j in list(self.steps):
            tail = self.tails.get(j)
            if tail is not None and self.shared_out(j, j, tail):
                continue
            step = self.steps.get(j)
            if isinstance(step, Cluster) and tail is None:
                made = {self.producer[name] for name in reads(step) if name in self.producer}
                for i in sorted(made):
                    if i not in self.tails and self.shared_out(i, j, step):
                        break

    def shared_out(self, i: int, j: int, whole: Cluster) -> bool:
        """Try `whole`, which is step `j` or the tail of it, in the programs of step `i`."""
        rows = self.steps[i]
        if not isinstance(rows, Cluster) or not is_of_rows(whole, rows):
            return False
        buffers = dict(self.lowered.buffers)
        try:
            self.check_between(i, j)
            walk, tail = in_shares(whole, rows, buffers, self.device)
            _check(rows, whole, walk, buffers)
        except Refused as refusal:
            self.refused[i, j] = str(refusal)
            return False
        self.in_two(i, j, self.without_dead(walk, i, j), tail, buffers)
        return True

    def check_partial(self, i: int, j: int, buffers: dict[str, Buffer], by: int = 1) -> None:
        """Refuse partial results that cost more than they save, of `by` times as many rows as there are in this
        call.
        """
        partial = sum(b.bytes for name, b in buffers.items() if name not in self.lowered.buffers)
        made, shared = most(partial) if by > 1 else hint(partial), by * self.shared(i, j)
        if 2 * made >= shared:
            raise Refused(f"partial results of {made} bytes cost more than reading {shared} bytes again")

    def in_two(self, first: int, second: int, merged: Cluster, tail: Cluster, buffers: dict[str, Buffer]) -> None:
        """Put `merged`, with `tail` behind it, in the place of two steps."""
        self.lowered.buffers.update(buffers)
        for name in reads(self.tails[second]) if second in self.tails else ():
            self.readers[name].discard(second)
        self.tails[second] = tail
        self.replace(first, second, merged)
        for name in reads(tail):
            self.readers.setdefault(name, set()).add(second)
        for name in writes(tail):
            self.producer[name] = second

    def replace(self, i: int, j: int, merged: Cluster) -> None:
        """Put `merged` in the place of j, and forget i."""
        for k in (i, j):
            for name in reads(self.steps[k]):
                self.readers[name].discard(k)
        for name in (*writes(self.steps[i]), *writes(self.steps[j])):
            self.producer.pop(name, None)
        if i != j:
            del self.steps[i]
        self.steps[j] = merged
        for name in reads(merged):
            self.readers.setdefault(name, set()).add(j)
        for name in writes(merged):
            self.producer[name] = j
        if i == j:  # a step that took its own tail in stands where it was
            return
        bits = (self.above[i] | self.above[j]) & ~(1 << i) & ~(1 << j)
        self.above[j] = bits
        for k, above in self.above.items():
            if above >> i & 1 or above >> j & 1:
                self.above[k] = (above | bits | 1 << j) & ~(1 << i)

    def ordered(self) -> list[Cluster | Extern]:
        """Return the steps in an order that respects every dependency, as close to the program's as can be."""
        waiting = {i: self.before(i, s) for i, s in self.steps.items()}
        done: list[Cluster | Extern] = []
        ready = [i for i, above in waiting.items() if not above]
        heapq.heapify(ready)
        followers: dict[int, list[int]] = {}
        for i, above in waiting.items():
            for k in above:
                followers.setdefault(k, []).append(i)
        while ready:
            i = heapq.heappop(ready)
            done += [self.steps[i], *([self.tails[i]] if i in self.tails else [])]
            for k in followers.get(i, ()):
                waiting[k].discard(i)
                if not waiting[k]:
                    heapq.heappush(ready, k)
        assert len(done) == len(self.steps) + len(self.tails), "fusion made a cycle"
        return done

    def refusals(self) -> tuple[Unfused, ...]:
        alive = ((i, j, r) for (i, j), r in self.refused.items() if i in self.steps and j in self.steps)
        return tuple(
            Unfused((_first_line(self.steps[i]), _first_line(self.steps[j])), reason) for i, j, reason in alive
        )


def _check(a: Cluster, b: Cluster, merged: Cluster, buffers: dict[str, Buffer]) -> None:
    if reason := out_of_order(merged):
        raise Refused(reason)
    size = weight(merged.order)
    if size > MAX_WEIGHT:
        raise Refused(f"{size} ops in one kernel, {MAX_WEIGHT} at most")
    if len(merged.reads.keys() | merged.writes.keys()) > MAX_BUFFERS:
        raise Refused(f"more than {MAX_BUFFERS} buffers in one kernel")
    for store in merged.stores:
        target = buffers[store.buffer].written_to
        for node in merged.reads.get(target, ()) if target else ():
            if node.index or node.layout != store.layout or store.onto:
                raise Refused(f"it would overwrite {target} while others still read it")
        if store.onto in merged.writes:
            raise Refused(f"{store.onto} is written at places that data gives, once all of it is there")


def _first_line(step: Cluster | Extern) -> str:
    return (step.line or step.target) if isinstance(step, Extern) else step.lines[-1] if step.lines else space(step)
