"""Live: how many values a thread holds at once for each of its elements; that times the elements is what a kernel takes of the registers.

In: a cluster. Out: numbers of 32-bit values.

    softmax across 19 tensors     at_once  20     every one is held until the last is read
    layer norm backward           walked    4     most that one pass over its row holds: dy * w, x - mean, and what they are made of

An estimate, not an allocation: it counts from where a value is made to its last reader, in the order of the kernel's text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from .cluster import Cluster, Const, Expr, Iota, Random, Reduce, children
from .keep import by_pass, kept_values

DRAWN = 4  # values that a random number takes while it is drawn: the counters and the keys of its call


def at_once(cluster: Cluster) -> int:
    """Return the most values that a thread holds at once: from where each is made to its last reader, results to the end."""
    return _most(cluster.order, cluster.roots)


def walked(cluster: Cluster) -> int:
    """Return the most values that a thread holds at once in one of the passes over a row, besides sums."""
    return max((_most(nodes) + DRAWN * any(isinstance(n, Random) for n in nodes) for nodes in by_pass(cluster)), default=0)


def column_sums(cluster: Cluster) -> int:
    """Return how many reductions of columns a walk over rows keeps beside its row; one of everything takes a value a row."""
    return sum(s.reduces and any((s.layout.strides or ())[len(cluster.parallel) :]) for s in cluster.stores)


def held_values(cluster: Cluster, looped: bool, keep: bool) -> float:
    """Return how many values of its tile a thread keeps at once: those held across reductions, or accumulators, and column sums."""
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
