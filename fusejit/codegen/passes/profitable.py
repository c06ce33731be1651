"""Profitable: whether two clusters are better one kernel, by the registers that it takes and by the cost model.

In: two clusters and what they would be together. Out: nothing, or `Refused` with the figures.

    24 values at once in each thread, 8 elements each, take 224 registers: the kernel would spill
    one kernel takes 210.3 us, two take 95.5 and 94.1 us
"""

from __future__ import annotations

from ...templates.reduction_persistent import row_tile
from ..ir.analysis import MAX_ROW, column_reduction, full
from ..ir.cluster import Cluster
from ..ir.expr import Reduce
from ..ir.graph import Refused
from ..schedule.choice import FIXED
from ..schedule.device import Device
from ..schedule.registers import at_once
from .schedule import microseconds

EACH = 8  # elements a thread of a pointwise kernel
# registers by this count up to which no kernel was seen to spill, of 255: addresses and temporaries take the others
MOST = 208


def worth_it(a: Cluster, b: Cluster, merged: Cluster, device: Device) -> None:
    """Refuse a merge that would spill registers, or whose rows, kept in registers so far, would have to be read twice
    at a loss.

    Raises:
        Refused: the two are better apart.
    """
    if not merged.reduce:
        live = at_once(merged)
        if FIXED + EACH * live > MOST:
            raise Refused(
                f"{live} values at once in each thread take {FIXED + EACH * live} registers: the kernel would spill"
            )
    elif _leaves_registers(a, b, merged):
        one, *two = [microseconds(c, device) for c in (merged, a, b)]
        if one > sum(two):
            raise Refused(f"one kernel takes {one:.1f} us, two take {two[0]:.1f} and {two[1]:.1f} us")


def _leaves_registers(a: Cluster, b: Cluster, merged: Cluster) -> bool:
    """Whether a row that stayed in registers in one of the two does so no more in one kernel."""
    fits = lambda c: row_tile(c) * max(1, c.held) <= MAX_ROW  # noqa: E731
    reduces = all(
        any(isinstance(n, Reduce) for n in c.order) for c in (a, b)
    )  # what only follows along the row is read once less
    return reduces and not column_reduction(merged) and not fits(merged) and any(full(c) and fits(c) for c in (a, b))
