"""Registers: how many values a thread holds at once, and which rows stay in registers as they were loaded.

In: a cluster. Out: numbers of 32-bit values; the loads to keep across the passes over a row.

    softmax across 19 tensors     at_once  20     every one is held until the last is read
    layer norm backward  walked  4  most that one pass over its row holds: dy * w, x - mean, and what they are made of

The number of values times a tile's elements is what a kernel takes of the registers. An estimate, not an allocation: it
counts from where a value is made to its last reader, in the order of the kernel's text. A reduction whose row is needed
again after it keeps the row:

    softmax backward of 32,768 bfloat16 columns: dy and y in float32 would be 65,536 values,
        as they were loaded they are 32,768

Each pass over the row then widens them again (`fj.again`), an instruction a value; the compiler would otherwise keep
what it has widened.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from ..ir.analysis import by_pass, used_again
from ..ir.cluster import Cluster, Store, analysis
from ..ir.expr import Const, Expr, Iota, Load, Random, Reduce, children, postorder

DRAWN = 4  # values that a random number takes while it is drawn: the counters and the keys of its call


@analysis
def kept(cluster: Cluster) -> tuple[Load, ...]:
    """Return the loads of each row that a pass reads and a later one reads again; what is the same for all rows is not
    kept.
    """
    again, split = used_again(cluster), len(cluster.parallel)
    loads = [n for n in cluster.order if isinstance(n, Load) and n in again and _can_be_kept(n)]
    return tuple(n for n in loads if any((n.layout.strides or ())[:split]))


def kept_values(cluster: Cluster) -> float:
    """Return how many 32-bit values a column takes while its row is kept."""
    return sum(n.dtype.itemsize for n in kept(cluster)) / 4


def _can_be_kept(node: Load) -> bool:
    return not node.index and node.mask is None and node.dtype.itemsize in (2, 4) and node.dtype is not torch.bool


def needed_beside(store: Store, name: str, cluster: Cluster) -> bool:
    """Whether one result a row takes the place of an operand that more than this result is made of.

    All warps load what there is one of for a row, and one of them stores it: the others may not have loaded it yet.
    """
    if not cluster.reduce or any((store.layout.strides or ())[len(cluster.parallel) :]):
        return False
    roots = [root for s in cluster.stores if s is not store for root in (s.value, *(e for e, _ in s.index))]
    roots += [arg for n in cluster.order if isinstance(n, Reduce) for arg in n.args]
    return any(isinstance(n, Load) and n.buffer == name for n in postorder(roots))


# -- values held at once -----------------------------------------------------------------------------------------------


@analysis
def at_once(cluster: Cluster) -> int:
    """Return the most values that a thread holds at once: from where each is made to its last reader, results to the
    end.
    """
    return _most(cluster.order, cluster.roots)


@analysis
def walked(cluster: Cluster) -> int:
    """Return the most values that a thread holds at once in one of the passes over a row, besides sums."""
    return max(
        (_most(nodes) + DRAWN * any(isinstance(n, Random) for n in nodes) for nodes in by_pass(cluster)), default=0
    )


def column_sums(cluster: Cluster) -> int:
    """Return how many reductions of columns a walk over rows keeps beside its row; one of everything takes a value a
    row.
    """
    return sum(s.reduces and any((s.layout.strides or ())[len(cluster.parallel) :]) for s in cluster.stores)


def held_values(cluster: Cluster, looped: bool, keep: bool) -> float:
    """Return how many values of its tile a thread keeps at once: those held across reductions, or accumulators, and
    column sums.
    """
    sums = column_sums(cluster)
    if keep:
        return sums + kept_values(cluster)
    reduces = sum(isinstance(n, Reduce) for n in cluster.order)
    return sums + (reduces + 1 if looped else max(1, cluster.held) if cluster.reduce else len(cluster.reads))


def _most(nodes: Sequence[Expr], results: Iterable[Expr] = ()) -> int:
    order = [n for n in nodes if not isinstance(n, (Const, Iota))]
    last: dict[Expr, int] = {}
    for place, node in enumerate(order):
        last[node] = place
        for operand in children(node):
            last[operand] = place
    last |= dict.fromkeys(results, len(order))
    ends = Counter(last[node] for node in order)
    live = most = 0
    for place in range(len(order)):
        live += 1 - ends[place]  # a result takes the register of an operand that is read here for the last time
        most = max(most, live)
    return most
