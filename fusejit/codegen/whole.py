"""Whole: a reduction of all elements becomes one of each row, in the kernel that holds the rows, and a small one of what the rows give.

In: a cluster (P | R) and one (1 | P x R) that reads the same or what the first one makes. Out: the second one over (P | R), which writes a
partial result a row, and the cluster (1 | P) that combines those.

    norm, codes by a known scale    parallel 16384 | reduce 4096
    largest of all                  parallel 1 | reduce 67108864    ->   parallel 16384 | reduce 4096,  then  parallel 1 | reduce 16384

The row is read once: without this, a second kernel would make it again to reduce it.
"""

from __future__ import annotations

from .align import Refused
from .cluster import Cluster, Reduce
from .lower import Buffer
from .scans import scans
from .size import product
from .split import SPLITTABLE, in_pieces


def fits_rows(whole: Cluster, rows: Cluster) -> bool:
    """Whether `whole` reduces to one value as many elements as the rows of `rows` have together."""
    one = product(whole.parallel) == 1 and product(rows.parallel) > 1 and whole.reduce != () and rows.reduce != ()
    one = one and isinstance(product(rows.reduce), int)  # whether a program holds a row does not depend on how many there are
    return one and product(whole.reduce) == product(rows.parallel) * product(rows.reduce)


def by_rows(whole: Cluster, rows: Cluster, first: bool, buffers: dict[str, Buffer]) -> tuple[Cluster, Cluster]:
    """Return the reduction of each row and that of all rows' results; those are new `buffers`.

    Args:
        first: whether `rows` reads what `whole` makes.

    Raises:
        Refused: it reduces several times, or the rows wait for its result.
    """
    found = [n for n in whole.order if isinstance(n, Reduce)]
    along = [s for s in whole.stores if any((s.layout.strides or ())[len(whole.parallel) :]) or whole.full[s.value]]
    if any(n.op not in SPLITTABLE for n in found) or max(whole.levels.values()) > 1 or scans(whole) or whole.segments:
        raise Refused("a reduction of all rows that takes more than their partial results")
    if any(s.index or s.mode for s in (*whole.stores, *rows.stores)) or any(whole.levels[s.value] for s in along):
        raise Refused("what follows a reduction of all rows needs it finished")
    if first and any(rows.reads.keys() & {s.buffer} for s in whole.stores if s not in along):
        raise Refused("the rows need the finished reduction of all")
    pieces, *rest = in_pieces(whole, product(rows.parallel), product(rows.reduce), buffers)
    if len(rest) != 1:
        raise Refused("a reduction of all rows in several steps")
    return pieces, rest[0]
