"""Shares: row results that a reduction of all of them reads are reduced by the programs that make them, each of its share of the rows.

In: a cluster (P | R) and one (1 | P) of its results, so many that it takes two steps. Out: the first one by programs that each walk over
a part of the rows and keep one value of each reduction, and a small one of the programs' values. Deterministic: no atomics, a fixed order.

    parallel 65536 | reduce 1024   store b7  1 | 0              then  parallel 32 | reduce 2048  and  parallel 1 | reduce 32
      ->  parallel 65536 by 1056 programs | reduce 1024   store b9  0 | 0  amax,  then  parallel 1 | reduce 1056
"""

from __future__ import annotations

from dataclasses import replace

from .align import Refused, align, join
from .cluster import Cluster, Expr, Reduce, Store, load, reduction
from .cost import Device
from .hinted import hinted
from .layout import strided
from .lower import Buffer
from .mix import programs_for
from .pattern import SPLITTABLE
from .scans import scans
from .schedule import column_reduction, refused_walk, schedule
from .size import product
from .split import combined, cut, in_pieces


def is_of_rows(whole: Cluster, rows: Cluster) -> bool:
    """Whether `whole` reduces one value of each row of `rows` to one, and neither does what no walk over rows can do."""
    one = whole.reduce != () and product(whole.parallel) == 1 and product(whole.reduce) == product(rows.parallel)
    reduces = [n for n in whole.order if isinstance(n, Reduce)]
    if not one or not reduces or any(n.op not in SPLITTABLE for n in reduces) or max(whole.levels.values()) > 1:
        return False
    steps = [s for c in (whole, rows) for s in c.stores]
    plain = not any(s.index or s.mode for s in steps) and not any(c.programs or c.segments or scans(c) for c in (whole, rows))
    results = not any(any(s.layout.strides or ()) or whole.full[s.value] for s in whole.stores)
    return plain and results and isinstance(product(rows.reduce), int) and any(isinstance(n, Reduce) for n in rows.order)


def in_shares(whole: Cluster, rows: Cluster, buffers: dict[str, Buffer], device: Device) -> tuple[Cluster, Cluster]:
    """Return the rows by programs, and the reduction of what the programs come to; that is in new `buffers`.

    Raises:
        Refused: one step is enough for so many results, no program can walk over the rows, or it would take longer.
    """
    whole = whole.coalesced
    if column_reduction(hinted(rows)):
        raise Refused("results of columns are few, and read along the rows")
    found = cut(whole, device)
    if found is None:
        raise Refused("one step is enough for the results of the rows")
    reduces = [n for n in whole.order if isinstance(n, Reduce)]
    names = [f"b{len(buffers) + i}" for i in range(len(reduces))]
    place = strided(whole.reduce, [0] * len(whole.reduce))
    stores = tuple(Store(name, place, n.args[0], n.dtype, n.op) for name, n in zip(names, reduces, strict=True))
    merged = join(*align(rows, Cluster(whole.reduce, (), stores, whole.lines)))
    programs = programs_for(merged, device)
    walk = replace(merged, programs=programs)
    if reason := refused_walk(hinted(walk), device.mixed_values):
        raise Refused(reason)
    at = next(buffers[s.buffer].device for s in whole.stores)
    made = {name: Buffer(name, (programs,), (1,), n.dtype, at) for name, n in zip(names, reduces, strict=True)}
    parts = {n: load(name, strided((programs,), [1]), n.dtype) for name, n in zip(names, reduces, strict=True)}
    values: dict[Expr, Expr] = {n: reduction(n.op, part, dtype=n.dtype) for n, part in parts.items()}
    tail = combined(whole, values, programs, whole.lines)
    ours = _us(walk, device) + _us(tail, device)
    apart = _us(rows, device) + sum(_us(step, device) for step in in_pieces(*found, dict(buffers)))
    if ours > apart:
        raise Refused(f"programs that walk over the rows and one step take {ours:.1f} us, each row by itself and two steps {apart:.1f} us")
    buffers |= made
    return walk, tail


def _us(cluster: Cluster, device: Device) -> float:
    choice = schedule(hinted(cluster), device)[1].choice
    assert choice is not None
    return choice.costs[0].us
