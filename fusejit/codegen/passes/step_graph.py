"""Step graph: the steps of a program by number while passes merge them, and which of them wait for which.

In: a program. Out: the same with steps replaced by merged ones, in an order that respects every dependency. Vertical
fusion (fuse.py) and horizontal fusion (horizontal.py) work on it; neither knows how order is kept.

    0 extern mm -> 1 cluster | 2 cluster -> 3 cluster       ancestors  {0: 0b0, 1: 0b1, 2: 0b0, 3: 0b100}
    merge((1, 3), step)                                     ancestors  {0: 0b0, 2: 0b0, 3: 0b101}

Ancestors are bit sets, so that "is there a path" is one `&`.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace

from ..ir.cluster import Cluster
from ..ir.graph import Buffer, Extern, Foreach, Lowered, Refused, refs
from ..ir.signature import Place, places
from ..ir.size import hint
from .hazards import overwrites, reads, writes

BETWEEN = "an op between them reads one and feeds the other"
BARRIER = "fusejit.order.default"

Step = Cluster | Extern | Foreach


class StepGraph:
    """Steps by number. `tails`: the second kernel of a step that is two, which runs right after it.

    `needed`: buffers that something other than a cluster reads, so that they have to be written.
    """

    def __init__(self, lowered: Lowered) -> None:
        self.lowered, self.buffers = lowered, dict(lowered.buffers)
        self.steps: dict[int, Step] = dict(enumerate(lowered.steps))
        self.tails: dict[int, Step] = {}
        externs = {i: s for i, s in self.steps.items() if isinstance(s, Extern)}
        self.needed = {ref.buffer for ref in refs(lowered.outputs)}
        self.needed |= {b.name for b in lowered.buffers.values() if b.written_to}
        self.needed |= {name for s in externs.values() for name in s.reads}
        self.barriers = [i for i, s in externs.items() if s.target == BARRIER]
        self.effects = [i for i, s in externs.items() if s.effect]  # draws take their numbers from one stream
        self.reads: dict[int, set[str]] = {}
        self.writes: dict[int, set[str]] = {}
        self.readers: dict[str, set[int]] = {}
        self.producers: dict[str, set[int]] = {}  # several, where each writes a part of the buffer
        self._places: dict[str, Place] = {}
        for i in self.steps:
            self._link(i)
        self.ancestors: dict[int, int] = {}
        for i in self.steps:
            bits = 0
            for j in self.predecessors(i):
                bits |= self.ancestors[j] | 1 << j
            self.ancestors[i] = bits

    # -- questions -----------------------------------------------------------------------------------------------------

    def predecessors(self, i: int) -> set[int]:
        """Return the steps that must run before a step: producers of what it reads, readers of what it overwrites, and
        of an extern call the last barrier, and the last effect if it has one.
        """
        step = self.steps[i]
        before = {k for name in self.reads[i] for k in self.producers.get(name, ())}
        if isinstance(step, Extern):  # its effects, if it has any, are none of ours to know
            before |= set([k for k in self.barriers if k < i][-1:])
            before |= set([k for k in self.effects if k < i][-1:]) if step.effect else set()
        for part in self.parts(i):
            for name in overwrites(part, self.buffers):
                before |= self.readers.get(name, set())
        return before - {i}

    def parts(self, i: int) -> list[Step]:
        """Return the kernels or the call of a step."""
        return [self.steps[i], *([self.tails[i]] if i in self.tails else [])]

    def cluster(self, i: int) -> Cluster | None:
        step = self.steps.get(i)
        return step if isinstance(step, Cluster) else None

    def clusters(self, members: Sequence[int]) -> tuple[Cluster, ...]:
        """Return the steps with these numbers, which are clusters."""
        return tuple(step for step in map(self.cluster, members) if step is not None)

    def runs_before(self, i: int, j: int) -> bool:
        """Whether there is a path from step `i` to step `j`."""
        return bool(self.ancestors[j] >> i & 1)

    def in_order(self, members: tuple[int, ...]) -> tuple[int, ...]:
        """Return a pair with the step first that runs first."""
        return members[::-1] if len(members) == 2 and self.runs_before(members[1], members[0]) else members

    def producers_of(self, names: set[str]) -> set[int]:
        return {k for name in names for k in self.producers.get(name, ())}

    def readers_of(self, names: set[str]) -> set[int]:
        return {k for name in names for k in self.readers.get(name, ())}

    def check_path(self, members: Sequence[int]) -> None:
        """Refuse steps, in the order that they run in, with a path through another step between them.

        Raises:
            Refused: with `BETWEEN`.
        """
        inside = sum(1 << i for i in members)
        for place, i in enumerate(members):
            if self.ancestors[i] & sum(1 << k for k in members[place + 1 :]):
                raise Refused(BETWEEN)
            between = self.ancestors[i] & ~inside if place else 0
            while between:
                k = between.bit_length() - 1
                between ^= 1 << k
                if k in self.steps and self.ancestors[k] & inside:
                    raise Refused(BETWEEN)

    def saved(self, i: int, j: int) -> int:
        """Return the bytes that merging saves: shared reads once, a value that `i` hands to `j` in registers neither
        written nor read.
        """
        total = sum(self.buffers[name].bytes for name in self.reads[i] & self.reads[j])
        for name in self.writes[i] & self.reads[j]:
            gone = name not in self.needed and self.readers[name] <= {i, j}
            total += self.buffers[name].bytes * (2 if gone else 1)
        return hint(total)

    def saved_either_way(self, i: int, j: int) -> int:
        return self.saved(i, j) + self.saved(j, i)

    def handed_on(self, i: int, j: int) -> int:
        """Return the bytes that step `i` hands to step `j`."""
        return hint(sum(self.buffers[name].bytes for name in self.writes[i] & self.reads[j]))

    @property
    def places(self) -> dict[str, Place]:
        """What `pattern` has to know of the buffers."""
        if len(self._places) != len(self.buffers):
            self._places = places(self.buffers)
        return self._places

    # -- changes -------------------------------------------------------------------------------------------------------

    def without_dead(self, merged: Cluster, members: Sequence[int]) -> Cluster:
        """Return `merged` without the stores that only these steps read: they take them from registers now."""
        dead = {
            name
            for name in merged.writes
            if name in self.producers and name not in self.needed and self.readers.get(name, set()) <= {*members}
        }
        kept = tuple(s for s in merged.stores if s.buffer not in dead or s.buffer in merged.reads)
        return replace(merged, stores=kept)

    def merge(
        self, members: tuple[int, ...], step: Step, tail: Step | None = None, buffers: dict[str, Buffer] | None = None
    ) -> int:
        """Put `step`, with `tail` behind it, in the place of the last of `members`, and forget the others."""
        assert tail is not None or not any(k in self.tails for k in members), "a second kernel would be lost"
        self.buffers.update(buffers or {})
        last = members[-1]
        for k in members:
            self._unlink(k)
            self.tails.pop(k, None)
            if k != last:
                del self.steps[k]
        self.steps[last] = step
        if tail is not None:
            self.tails[last] = tail
        self._link(last)
        gone = sum(1 << k for k in members if k != last)
        inside = gone | 1 << last
        bits = 0
        for k in members:
            bits |= self.ancestors[k] if k == last else self.ancestors.pop(k)
        bits &= ~inside
        for k, ancestors in self.ancestors.items():
            if ancestors & inside:
                self.ancestors[k] = (ancestors | bits | 1 << last) & ~gone
        self.ancestors[last] = bits
        return last

    def _link(self, i: int) -> None:
        parts = self.parts(i)
        self.reads[i] = {name for part in parts for name in reads(part)}
        self.writes[i] = {name for part in parts for name in writes(part)}
        for name in self.reads[i]:
            self.readers.setdefault(name, set()).add(i)
        for name in self.writes[i]:
            self.producers.setdefault(name, set()).add(i)

    def _unlink(self, i: int) -> None:
        for name in self.reads.pop(i):
            self.readers[name].discard(i)
        for name in self.writes.pop(i):
            self.producers[name].discard(i)
            if not self.producers[name]:
                del self.producers[name]

    def program(self) -> Lowered:
        """Return the program, its steps in an order that respects every dependency, as close to what it was as can
        be.
        """
        waiting = {i: self.predecessors(i) for i in self.steps}
        followers: dict[int, list[int]] = {}
        for i, before in waiting.items():
            for k in before:
                followers.setdefault(k, []).append(i)
        ready = sorted(i for i, before in waiting.items() if not before)
        ordered: list[Step] = []
        while ready:
            i = heapq.heappop(ready)
            ordered += self.parts(i)
            for k in followers.get(i, ()):
                waiting[k].discard(i)
                if not waiting[k]:
                    heapq.heappush(ready, k)
        assert len(ordered) == len(self.steps) + len(self.tails), "merging made a cycle"
        return replace(self.lowered, buffers=self.buffers, steps=tuple(ordered))
