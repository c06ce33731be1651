"""Memory plan: when each buffer is made, handed on and freed.

In: fused steps. Out: a list of Alloc, Launch, Extern, Free and Return; every buffer is freed or returned exactly once.
A result takes the memory of an operand that dies with it; other freed memory goes back to torch's caching allocator.

    Alloc b0 | Launch row_softmax(arg0, b0) | Extern b1 = mm(b0, arg1) | Free b0 | Return b1
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ...templates.table import named
from ..ir.cluster import Cluster
from ..ir.expr import Expr
from ..ir.graph import Buffer, Extern, Foreach, Lowered, refs
from ..ir.size import product
from ..passes.online import in_one_pass, last_reads
from ..schedule.registers import needed_beside
from .kernel import Kernel


@dataclass(frozen=True, slots=True)
class Alloc:
    """Make a buffer; `reuse` names a dead one of the same kind whose memory it takes over."""

    buffer: Buffer
    reuse: str = ""


@dataclass(frozen=True, slots=True)
class Launch:
    kernel: Kernel
    arguments: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Free:
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Return:
    values: tuple[Any, ...]


Step: TypeAlias = Alloc | Launch | Extern | Free | Return


def plan(lowered: Lowered, kernels: Sequence[Kernel | None]) -> tuple[Step, ...]:
    """Return the program's steps; `kernels[i]` is step i's kernel, None for extern calls."""
    buffers = lowered.buffers
    returned = {ref.buffer for ref in refs(lowered.outputs)}
    given = {name for name in lowered.inputs if name}
    # what an extern call may have looked at instead of copied keeps its memory
    pinned = {
        name
        for s in lowered.steps
        if isinstance(s, Extern) and s.pins
        for name in (*s.reads, *(o for o in s.outputs if o))
    }
    last = _last_uses(lowered, kernels)
    live: set[str] = set(given)
    made = {n for s in lowered.steps if isinstance(s, Extern) for n in s.outputs} | {
        n for k in kernels if k for n in k.arguments
    }
    empty = [
        b for b in buffers.values() if 0 in b.shape and b.name not in made | given
    ]  # without elements: no kernel writes them
    steps: list[Step] = [Alloc(b) for b in empty]
    live |= {b.name for b in empty}
    for i, (step, kernel) in enumerate(zip(lowered.steps, kernels, strict=True)):
        dying = {n for n in live if last.get(n, -1) <= i and n not in returned}
        if isinstance(step, Extern):
            steps.append(step)
            live |= {n for n in step.outputs if n}
            dying |= {n for n in step.outputs if n and n not in last and n not in returned}
        else:
            assert kernel is not None
            mine = [n for n in kernel.arguments if n not in live]
            over = _in_place(step, kernel, dying - given - pinned, mine, buffers)
            for name in mine:
                steps.append(Alloc(buffers[name], over.get(name, "")))
            live |= set(mine)
            steps.append(Launch(kernel, kernel.arguments))
            dying |= {n for n in mine if n not in last and n not in returned}
        if dying:
            steps.append(Free(tuple(sorted(dying, key=list(buffers).index))))
            live -= dying
    if unread := sorted(live - returned):
        steps.append(Free(tuple(unread)))
    steps.append(Return(lowered.outputs))
    return tuple(steps)


def _last_uses(lowered: Lowered, kernels: Sequence[Kernel | None]) -> dict[str, int]:
    last: dict[str, int] = {}
    for i, (step, kernel) in enumerate(zip(lowered.steps, kernels, strict=True)):
        for name in step.reads if isinstance(step, Extern) else kernel.arguments if kernel else ():
            last[name] = i
    return last


def _in_place(
    step: Cluster | Foreach, kernel: Kernel, dying: set[str], made: list[str], buffers: dict[str, Buffer]
) -> dict[str, str]:
    """Return {result: operand whose memory it takes}: an operand that dies and is read only where, and before, the
    result is written.
    """
    found: dict[str, str] = {}
    if isinstance(step, Foreach):  # members run at once: none may write what another one reads
        readers = Counter(name for member in step.members for name in member.reads)
        own = {name for name in dying if readers[name] == 1}
        for member in step.members:
            found |= _in_place(member, kernel, own & member.reads.keys(), made, buffers)
        return found
    levels, last = _passes(step, kernel)
    for store in step.stores:
        if (
            store.buffer not in made
            or store.index
            or store.mode
            or (isinstance(step, Cluster) and step.one_a_segment(store))
        ):
            continue
        for name in sorted(dying - set(found.values())):
            loads = step.reads.get(name, ())
            same = all(n.layout == store.layout and not n.index and n.mask is None for n in loads)
            # a loop over a row must not read again, in a later pass, what it has overwritten
            again = name in last and last[name] > levels[store.value]
            beside = isinstance(step, Cluster) and needed_beside(store, name, step)
            if loads and same and not again and not beside and _alike(buffers[name], buffers[store.buffer]):
                found[store.buffer] = name
                break
    return found


def _passes(step: Cluster, kernel: Kernel) -> tuple[dict[Expr, int], dict[str, int]]:
    """Return the pass that has each value, and {operand: the last pass that loads it}; nothing of a kernel that loads a
    row once.
    """
    if named(kernel.template).in_passes(product(step.reduce), kernel.schedule):
        exact = not kernel.fp_fusion  # as it was rendered
        return in_one_pass(step, exact)[0], last_reads(step, exact=exact)
    return (step.levels, last_reads(step, one_pass=False)) if kernel.schedule.keep else ({}, {})


def _alike(one: Buffer, two: Buffer) -> bool:
    return (one.shape, one.strides, one.dtype, one.device) == (two.shape, two.strides, two.dtype, two.device)
