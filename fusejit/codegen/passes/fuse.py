"""Fuse: clusters become fewer clusters, ranked by the bytes that a merge saves.

In: the clusters and extern calls of `lower`. Out: the same program with fewer launches, and a reason for every pair
that stays apart.

Two clusters merge when no path through a third runs between them and their axes can be made the same: equal (parallel,
reduce); a pointwise cluster over the parallel x reduce space, or the parallel space alone, of a reduction. A value that
only the merged cluster reads is never written. What is tried is a table, fusion_rules.py. Ideas: Inductor's scheduler
(greedy, by score), MindSpore's graph kernels (limits).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..ir.cluster import Cluster
from ..ir.graph import Extern, Foreach, Lowered, Refused, refs
from ..schedule.device import Device, machine
from .align import space
from .fusion_rules import RULES, Fusion, Members, Rule
from .hazards import order, reads
from .step_graph import BETWEEN, Step, StepGraph

TWO_KERNELS = "one of them is two kernels already"


@dataclass(frozen=True, slots=True)
class Unfused:
    """Two clusters that share a buffer and stay apart, and why."""

    pair: tuple[str, str]
    reason: str

    def __str__(self) -> str:
        return f"{self.pair[0]} | {self.pair[1]}: {self.reason}"


def fuse(
    lowered: Lowered, reductions: bool = True, device: Device | None = None, rules: Sequence[Rule] = RULES
) -> tuple[Lowered, tuple[Unfused, ...]]:
    """Return the program with clusters merged, and what stays apart. `reductions=False` fuses pointwise clusters
    only.
    """
    fusion = Fusion(StepGraph(live(order(lowered))), device or machine(), pointwise=not reductions)
    merges: dict[str, int] = {}
    for rule in rules:
        if (reductions or not rule.reductions) and (not rule.after or merges.get(rule.after)):
            merges[rule.name] = apply(rule, fusion)
    return fusion.graph.program(), unfused(fusion)


def live(lowered: Lowered) -> Lowered:
    """Return the program without the results of clusters that nothing reads, and without clusters that have no
    others.
    """
    wanted = {ref.buffer for ref in refs(lowered.outputs)} | {b.name for b in lowered.buffers.values() if b.written_to}
    kept: list[Cluster | Extern] = []
    for step in reversed(lowered.steps):
        assert not isinstance(step, Foreach), "horizontal fusion comes after fusion"
        if isinstance(step, Cluster):
            stores = tuple(s for s in step.stores if s.buffer in wanted)
            if not stores:
                continue
            step = step if len(stores) == len(step.stores) else replace(step, stores=stores)
        wanted |= reads(step)
        kept.append(step)
    return replace(lowered, steps=tuple(reversed(kept)))


def apply(rule: Rule, fusion: Fusion) -> int:
    """Merge what a rule matches, best first, until nothing is left, and return how many merges there were."""
    graph = fusion.graph
    queue = list(rule.match(fusion, list(graph.steps)))
    heapq.heapify(queue)
    refused: dict[Members, str] = {}
    merges = 0
    while queue:
        _, members = heapq.heappop(queue)
        members = graph.in_order(members) if all(k in graph.steps for k in members) else ()
        if not members or refused.get(members, BETWEEN) != BETWEEN:
            continue  # what stood between two steps may have joined one of them since
        ends = (members[0], members[-1])
        two = len(members) > 1 and any(k in graph.tails for k in members)
        if reason := TWO_KERNELS if two else rule.refuse(fusion, members):
            fusion.skipped.setdefault(ends, reason)
            continue
        try:
            merged = rule.merge(fusion, members)
        except Refused as refusal:
            refused[members] = fusion.refused[ends] = str(refusal)
            continue
        fusion.refused.pop(ends, None)
        last = graph.merge(members, merged.step, merged.tail, merged.buffers)
        for match in rule.match(fusion, [last]):
            heapq.heappush(queue, match)
        merges += 1
    return merges


def unfused(fusion: Fusion) -> tuple[Unfused, ...]:
    """Return the pairs that stay apart: each that was tried, and of those left alone one of the same lines."""
    name = {i: _last_line(step) for i, step in fusion.graph.steps.items()}
    rows = lambda table: [  # noqa: E731
        Unfused((name[i], name[j]), reason) for (i, j), reason in table.items() if i in name and j in name
    ]
    left_alone = {pair: reason for pair, reason in fusion.skipped.items() if pair not in fusion.refused}
    return (*rows(fusion.refused), *dict.fromkeys(rows(left_alone)))


def _last_line(step: Step) -> str:
    if isinstance(step, Extern):
        return step.line or step.target
    return step.lines[-1] if step.lines else space(step) if isinstance(step, Cluster) else ""
