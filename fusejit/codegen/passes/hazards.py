"""Hazards: the steps of a program so that nothing is overwritten before its last reader.

In: lowered steps, the in-place changes of inputs at their end in any order. Out: the same steps, each after all that it
waits for. Where changes wait for each other, one goes through a buffer of its own.

    b = 0.9 * b + p | p = p - b  each reads what the other overwrites
        ->  t = 0.9 * b + p | p = p - (0.9 * b + p) | b = t

Fusion then makes one kernel of those wherever their axes allow it, and the buffer is gone.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch.fx.node import map_aggregate

from ..ir.cluster import Cluster
from ..ir.expr import Expr, Load, load
from ..ir.graph import Buffer, Extern, Foreach, Lowered, Ref


def reads(step: Cluster | Extern | Foreach) -> set[str]:
    return {*step.reads} | ({s.onto for s in step.stores if s.onto} if isinstance(step, Cluster) else set())


def writes(step: Cluster | Extern | Foreach) -> set[str]:
    return {name for name in step.outputs if name} if isinstance(step, Extern) else set(step.writes)


def overwrites(step: Cluster | Extern | Foreach, buffers: Mapping[str, Buffer]) -> set[str]:
    """Return the buffers whose memory a step changes: whoever reads them as they were has to come before it."""
    onto = {s.onto for s in step.stores} if isinstance(step, Cluster) else set()
    return ({buffers[name].written_to for name in writes(step)} | onto) - {""}


def in_memory(lowered: Lowered) -> Lowered:
    """Return the program with every buffer that is read named after its memory; only what is written to keeps a name of
    its own.
    """
    table = {b.name: b.written_to for b in lowered.buffers.values() if b.written_to}

    def named(tree: Any) -> Any:
        return map_aggregate(
            tree, lambda ref: replace(ref, buffer=table.get(ref.buffer, ref.buffer)) if isinstance(ref, Ref) else ref
        )

    def visit(node: Expr) -> Expr:
        if not isinstance(node, Load) or node.buffer not in table:
            return node
        return load(table[node.buffer], node.layout, node.dtype, node.index, node.mask, node.fill)

    steps: list[Cluster | Extern | Foreach] = []  # the rows of a Foreach name memory as they are
    for step in lowered.steps:
        if isinstance(step, Extern):
            step = replace(step, args=named(step.args), kwargs=named(step.kwargs))
        elif isinstance(step, Cluster) and table.keys() & step.reads.keys():
            step = step.rewritten(visit)
        steps.append(step)
    return replace(lowered, steps=tuple(steps), outputs=named(lowered.outputs)) if table else lowered


def predecessors(steps: Sequence[Cluster | Extern | Foreach], buffers: dict[str, Buffer]) -> list[set[int]]:
    """Return, for each step, the steps that must run before it: producers of what it reads, readers of what it
    overwrites, calls with an effect before it."""
    producers: dict[str, set[int]] = {}  # several, where each writes a part of the buffer
    for i, step in enumerate(steps):
        for name in writes(step):
            producers.setdefault(name, set()).add(i)
    readers: dict[str, set[int]] = {}
    for i, step in enumerate(steps):
        for name in reads(step):
            readers.setdefault(name, set()).add(i)
    result = []
    last: int | None = None  # of the calls with an effect, which keep their order
    for i, step in enumerate(steps):
        found = {k for name in reads(step) for k in producers.get(name, ())}
        for name in overwrites(step, buffers):
            found |= readers.get(name, set())
        if isinstance(step, Extern) and step.effect:
            found |= set() if last is None else {last}
            last = i
        result.append(found - {i})
    return result


def order(lowered: Lowered) -> Lowered:
    """Return the program with every step after those that it waits for, otherwise in the order that it had."""
    steps = [s for s in lowered.steps if not isinstance(s, Foreach)]
    waiting = predecessors(steps, lowered.buffers)
    if all(k < i for i, found in enumerate(waiting) for k in found):
        return lowered
    buffers = dict(lowered.buffers)
    followers: dict[int, set[int]] = {i: set() for i in range(len(steps))}
    for i, found in enumerate(waiting):
        for k in found:
            followers[k].add(i)
    left = set(range(len(steps)))
    ready = [i for i, found in enumerate(waiting) if not found]
    done: list[Cluster | Extern] = []

    def release(i: int, wanted: set[int]) -> None:
        for k in wanted:
            waiting[k].discard(i)
            if not waiting[k]:
                heapq.heappush(ready, k)

    while left:
        if not ready:
            i = next(i for i in sorted(left) if _stuck(i, steps, waiting[i], buffers))
            first, steps[i] = _through_a_buffer(steps[i], buffers)
            done.append(first)
            freed = {k for k in followers[i] if not reads(steps[k]) & writes(steps[i])}
            followers[i] -= freed
            release(i, freed)
            continue
        i = heapq.heappop(ready)
        left.discard(i)
        done.append(steps[i])
        release(i, followers[i])
    return replace(lowered, buffers=buffers, steps=tuple(done))


def _stuck(i: int, steps: list[Cluster | Extern], waiting: set[int], buffers: dict[str, Buffer]) -> bool:
    """Whether a step has all that it reads and waits only for readers of what it overwrites."""
    step = steps[i]
    if not isinstance(step, Cluster) or any(s.onto for s in step.stores):
        return False
    return any(buffers[name].written_to for name in writes(step)) and not any(
        writes(steps[k]) & reads(step) for k in waiting
    )


def _through_a_buffer(step: Cluster | Extern, buffers: dict[str, Buffer]) -> tuple[Cluster, Cluster]:
    """Return the step with its results in new buffers, and the step that copies them to where they belong."""
    assert isinstance(step, Cluster)
    first, second = [], []
    for store in step.stores:
        made = replace(buffers[store.buffer], name=f"b{len(buffers)}", written_to="")
        buffers[made.name] = made
        first.append(replace(store, buffer=made.name))
        second.append(replace(store, value=load(made.name, store.layout, store.dtype)))
    return replace(step, stores=tuple(first)), replace(step, stores=tuple(second))
