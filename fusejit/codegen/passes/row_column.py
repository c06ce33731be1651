"""Row and column: a row reduction and a column reduction over one space become one kernel that reads their common input
once.

In: a cluster (P | R) and a cluster (R | P). Out: the mixed cluster, whose programs each walk over a part of the rows
and keep their column sums in registers, and a small one that reduces the programs' partial results. Deterministic: no
atomics, a fixed order.

    parallel 8192 | reduce 1024    and   parallel 1024 | reduce 8192
      ->  parallel 8192 by 1056 programs | reduce 1024  store b3  0 | 1  float32 sum,  then  parallel 1024 | reduce 1056
"""

from __future__ import annotations

from dataclasses import replace

from ...templates.reduction_mixed import refused_walk
from ..ir.analysis import column_reduction, scans
from ..ir.cluster import Cluster, Store
from ..ir.concretize import hinted
from ..ir.expr import Expr, Reduce, load, reduction, view
from ..ir.graph import Buffer, Refused
from ..ir.layout import contiguous, permute, strided
from ..ir.reductions import splits
from ..ir.size import AnySize, atom, product
from ..schedule.device import Device
from ..schedule.registers import column_sums
from ..schedule.unaligned_rows import peel
from .align import align, join
from .rfactor import combined, cut, in_pieces
from .schedule import order, schedule, tall, taller

# microseconds more than the least: no difference that the model can tell, so the device may as well have more under way
NEAR = 0.5
MUCH = 8  # partial results, written and read again, stay below a quarter of what the rows move


def mix(
    row: Cluster, column: Cluster, column_first: bool, buffers: dict[str, Buffer], device: Device
) -> tuple[Cluster, Cluster]:
    """Return the mixed cluster and the one that finishes the column results; partial results are new `buffers`.

    Args:
        column_first: whether `row` reads what `column` makes (else the other way round, or neither).

    Raises:
        Refused: they are no such pair, or a row and its column sums do not fit in the registers of a program.
    """
    _check(row, column, column_first)
    results = {s.buffer for s in column.stores if _is_result(s, column)}
    split = len(column.parallel)
    turn = permute(column.axes, [*range(split, len(column.axes)), *range(split)])
    turned = column.map(turn, column.reduce, column.parallel)
    one, two = reversed(align(turned, row)) if column_first else align(row, turned)
    nodes = [n for n in two.order if isinstance(n, Reduce)]
    names = [f"b{len(buffers) + i}" for i in range(len(nodes))]
    place = strided(one.axes, [*(0 for _ in one.parallel), *(contiguous(one.reduce).strides or ())])
    sums = tuple(Store(name, place, n.args[0], n.dtype, n.op) for name, n in zip(names, nodes, strict=True))
    whole = tuple(s for s in two.stores if s.buffer not in results)
    first = replace(two, stores=(*whole, *sums))
    mixed = join(first, one) if column_first else join(one, first)
    programs = programs_for(mixed, device)
    mixed = replace(mixed, programs=programs)
    reason = refused_walk(hinted(mixed), device.mixed_values)
    if reason:
        raise Refused(reason)
    made = _partial(two, nodes, names, programs, buffers)
    back = permute(two.axes, [*range(len(two.parallel), len(two.axes)), *range(len(two.parallel))])
    upright = replace(two, stores=tuple(s for s in two.stores if s.buffer in results)).map(
        back, two.reduce, two.parallel
    )
    sums_of = strided(
        (*upright.parallel, programs), [*(contiguous(upright.parallel).strides or ()), product(upright.parallel)]
    )
    found = zip(view(nodes, back), nodes, made, strict=True)
    values: dict[Expr, Expr] = {
        new: reduction(n.op, load(b.name, sums_of, n.dtype), dtype=n.dtype) for new, n, b in found
    }
    return mixed, combined(upright, values, programs, column.lines)


def _check(row: Cluster, column: Cluster, column_first: bool) -> None:
    reduces = [n for n in column.order if isinstance(n, Reduce)]
    if any(not splits(n.op) for n in reduces) or max(column.levels.values(), default=0) > 1:
        raise Refused("column results of several reductions, one after the other, take several passes")
    if any(s.reduces for s in row.stores) or any(s.mode or s.index for s in column.stores):
        raise Refused("a result is scattered")
    if any(column.levels[s.value] for s in column.stores if not _is_result(s, column)):
        raise Refused("a column reduction has to end before its columns are read again")
    if column_first and row.reads.keys() & {s.buffer for s in column.stores if _is_result(s, column)}:
        raise Refused("the rows need the finished columns")


def _is_result(store: Store, cluster: Cluster) -> bool:
    """Whether a store has one value for a whole reduction."""
    return not any((store.layout.strides or ())[len(cluster.parallel) :]) and not cluster.full[store.value]


def programs_for(mixed: Cluster, device: Device) -> AnySize:
    """Return how many programs share the rows: of the device's number for such rows and its halves, the one that costs
    least.

    Each program writes, and the second kernel reads, one partial result of all columns: many programs keep the memory
    busy, few move less.
    Of a reduction of everything that is one value, and all of them are few.
    Where the number of rows varies, what is found here is the most of them; of fewer rows each has a program of its
    own.
    """
    number, columns = product(mixed.parallel), product(mixed.reduce)
    times = next(
        (k for limit, k in device.mixed_programs if columns // 16 * 16 <= limit), 1
    )  # the ends of odd rows are no part of a tile
    ordered = tall(hinted(order(mixed).coalesced), taller(number, device))
    rows = product(ordered.parallel)
    sums = [s for s in ordered.stores if s.reduces]
    results = columns if column_sums(ordered) else 1
    partial = results * sum(s.dtype.itemsize for s in sums)
    found = []
    while times:
        programs = min(rows, times * device.sms)
        choice = schedule(replace(ordered, programs=programs), device)[1].choice
        assert choice is not None
        if times == 1 or MUCH * programs * partial <= choice.bytes:
            whole = (
                peel(replace(ordered, programs=programs)) is None
            )  # rows of one program may begin at odd addresses of all kinds
            found.append(
                (whole, choice.costs[0].us + _finish(sums, results, programs, device), choice.costs[0].waits, programs)
            )
        times //= 2
    best = min(found)
    near = [(waits, programs) for odd, us, waits, programs in found if odd == best[0] and us <= best[1] + NEAR]
    return min(near)[1] if isinstance(number, int) else atom("min", number, min(near)[1])


def _finish(sums: list[Store], results: int, programs: int, device: Device) -> float:
    """Return the microseconds of the second kernel, which has few programs where rows are short: it reads every partial
    result.
    """
    axes = (results, programs)
    loads = [load(s.buffer, strided(axes, [1, results]), s.dtype) for s in sums]
    totals = [reduction(s.mode, n, dtype=s.dtype) for s, n in zip(sums, loads, strict=True)]
    stores = [
        Store(f"{s.buffer}'", strided(axes, [1, 0]), total, s.dtype) for s, total in zip(sums, totals, strict=True)
    ]
    choice = schedule(Cluster.build(axes[:1], axes[1:], stores, ()), device)[1].choice
    assert choice is not None
    return choice.costs[0].us


def _partial(
    two: Cluster, nodes: list[Reduce], names: list[str], programs: AnySize, buffers: dict[str, Buffer]
) -> list[Buffer]:
    columns = product(two.reduce)
    device = next(buffers[s.buffer].device for s in two.stores)
    made = [
        Buffer(name, (programs, columns), (columns, 1), n.dtype, device) for name, n in zip(names, nodes, strict=True)
    ]
    buffers |= {b.name: b for b in made}
    return made


# -- rows that share a reduction of everything -------------------------------------------------------------------------


def is_of_rows(whole: Cluster, rows: Cluster) -> bool:
    """Whether `whole` reduces one value of each row of `rows` to one, and neither does what no walk over rows can
    do.
    """
    one = whole.reduce != () and product(whole.parallel) == 1 and product(whole.reduce) == product(rows.parallel)
    reduces = [n for n in whole.order if isinstance(n, Reduce)]
    if not one or not reduces or any(not splits(n.op) for n in reduces) or max(whole.levels.values()) > 1:
        return False
    steps = [s for c in (whole, rows) for s in c.stores]
    plain = not any(s.index or s.mode for s in steps) and not any(
        c.programs or c.segments or scans(c) for c in (whole, rows)
    )
    results = not any(any(s.layout.strides or ()) or whole.full[s.value] for s in whole.stores)
    return (
        plain and results and isinstance(product(rows.reduce), int) and any(isinstance(n, Reduce) for n in rows.order)
    )


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
        raise Refused(
            f"programs that walk over the rows and one step take {ours:.1f} us, each row by itself and two steps "
            f"{apart:.1f} us"
        )
    buffers |= made
    return walk, tail


def _us(cluster: Cluster, device: Device) -> float:
    choice = schedule(hinted(cluster), device)[1].choice
    assert choice is not None
    return choice.costs[0].us
