"""Pressure: whether two clusters are better one kernel, by the registers that it takes and by the cost model.

In: two clusters and what they would be together. Out: nothing, or `Refused` with the figures.

    24 values at once in each thread, 8 elements each, take 224 registers: the kernel would spill
    one kernel takes 210.3 us, two take 95.5 and 94.1 us
"""

from __future__ import annotations

from collections import Counter

from .align import Refused
from .cluster import Cluster, Const, Expr, Iota, Reduce, children
from .cost import FIXED, Device, full
from .schedule import MAX_ROW, column_reduction, row_tile, schedule

EACH = 8  # elements a thread of a pointwise kernel
MOST = 208  # registers by this count up to which no kernel was seen to spill, of 255: addresses and temporaries take the others


def worth_it(a: Cluster, b: Cluster, merged: Cluster, device: Device) -> None:
    """Refuse a merge that would spill registers, or whose rows, kept in registers so far, would have to be read twice at a loss.

    Raises:
        Refused: the two are better apart.
    """
    if not merged.reduce:
        live = at_once(merged)
        if FIXED + EACH * live > MOST:
            raise Refused(f"{live} values at once in each thread take {FIXED + EACH * live} registers: the kernel would spill")
    elif _leaves_registers(a, b, merged):
        costs = [_cost(c, device) for c in (merged, a, b)]
        if costs[0] > costs[1] + costs[2]:
            raise Refused(f"one kernel takes {costs[0]:.1f} us, two take {costs[1]:.1f} and {costs[2]:.1f} us")


def at_once(cluster: Cluster) -> int:
    """Return the most values that a thread holds at once: from where each is made to its last reader, results to the end."""
    order = [n for n in cluster.order if not isinstance(n, (Const, Iota))]
    last: dict[Expr, int] = {}
    for place, node in enumerate(order):
        for operand in children(node):
            last[operand] = place
    last |= dict.fromkeys(cluster.roots, len(order))
    ends = Counter(last[node] for node in order)
    live = most = 0
    for place in range(len(order)):
        live += 1 - ends[place]  # a result takes the register of an operand that is read here for the last time
        most = max(most, live)
    return most


def _leaves_registers(a: Cluster, b: Cluster, merged: Cluster) -> bool:
    """Whether a row that stayed in registers in one of the two does so no more in one kernel."""
    fits = lambda c: row_tile(c) * max(1, c.held) <= MAX_ROW  # noqa: E731
    reduces = all(any(isinstance(n, Reduce) for n in c.order) for c in (a, b))  # what only follows along the row is read once less
    return reduces and not column_reduction(merged) and not fits(merged) and any(full(c) and fits(c) for c in (a, b))


def _cost(cluster: Cluster, device: Device) -> float:
    choice = schedule(cluster, device)[1].choice
    assert choice is not None
    return choice.costs[0].us
