"""Block reduction: a reduction of a row's blocks joins the kernel that holds the whole row.

In: a cluster (P | R) and one (P x S | E) with S * E = R that share reads, or of which one reads what the other makes.
Out: both over
(P | S x E), the reductions of the second one over each segment of E elements; `join` makes one kernel of them.

    norm     parallel 4096 | reduce 4096            mean of squares of a row
    amax     parallel 4096 32 | reduce 128          largest value of each block of 128
    both  parallel 4096 | reduce 32 128  the row is read once; store scales  32 | 1 0,  quantised  4096 | 128 1

What follows the blocks alone, over (P x S), joins a kernel that has segments already.
"""

from __future__ import annotations

from dataclasses import replace

from ...templates.reduction_persistent import in_registers
from ..ir.analysis import fast_axis, full, power_of_two, scans
from ..ir.cluster import Cluster
from ..ir.concretize import hinted
from ..ir.expr import Expr, Iota, Random, Reduce, Segment, iota, rewrite, segment
from ..ir.graph import Refused
from ..ir.layout import Affine, strided
from ..ir.size import divide, product
from ..schedule.choice import Schedule
from ..schedule.device import Device
from .align import above, align, by_rank
from .schedule import microseconds, order


def in_segments(a: Cluster, b: Cluster) -> tuple[Cluster, Cluster] | None:
    """Return both clusters over the rows of the one with the longer rows; None where neither is about segments of the
    other's rows.

    Raises:
        Refused: they are, but cannot be one kernel.
    """
    for wide, short, swap in ((a, b, False), (b, a, True)):
        many = _segments(wide, short)
        if many:
            return _placed(wide, short, many, swap)
    return None


def _placed(wide: Cluster, short: Cluster, many: int, swap: bool) -> tuple[Cluster, Cluster]:
    """Return both over the rows of `wide`: the blocks of `short` in the order that they have, or by their strides in
    what both share.
    """
    shared = sorted({*wide.reads, *wide.writes} & {*short.reads, *short.writes})
    last: Refused | None = None
    for blocks in (short, by_rank(short, shared, None)):
        try:
            one, two = (wide, _turned(blocks, many)) if short.reduce else (_cut(wide), _widened(blocks, _cut(wide)))
            return align(two, one) if swap else align(one, two)
        except Refused as refusal:
            last = last or refusal
    assert last is not None
    raise last


def check_segments(a: Cluster, b: Cluster, merged: Cluster, device: Device) -> None:
    """Refuse rows that one program does not hold, segments that do not lie together in memory, and what is quicker
    apart.

    Raises:
        Refused: for one of these.
    """
    ordered = order(hinted(merged)).coalesced
    numbers = [n.number for n in ordered.order if isinstance(n, Segment)]
    split, cut = len(ordered.parallel), len(ordered.parallel) + ordered.segments
    if not all(isinstance(n, Iota) and all((n.layout.strides or ())[split:cut]) for n in numbers):
        raise Refused("blocks of several lengths in one row")
    along = [n.layout.strides or () for n in full(ordered) if not n.index]
    if any(
        fast_axis(strides, ordered.axes) not in (None, len(ordered.axes) - 1) for strides in along if any(strides[cut:])
    ):
        raise Refused("the elements of a block do not lie together in memory")
    if not in_registers(ordered):
        raise Refused(f"rows of {product(ordered.reduce)} do not stay in registers while their blocks are reduced")
    together, apart = microseconds(merged, device), [microseconds(c, device) for c in (a, b)]
    if together > sum(apart):
        raise Refused(f"one kernel takes {together:.1f} us, two take {apart[0]:.1f} and {apart[1]:.1f} us")


def numbered(cluster: Cluster, tiles: Schedule) -> Cluster:
    """Return the cluster with segments, if what it loads is the same all along pieces of a row: scales of blocks,
    weights of channels.

    Those are then loaded once a piece, not once an element. Pieces are powers of two: a padded tile would cost more
    than such loads.
    """
    whole = not (cluster.programs or tiles.keep or tiles.peel or tiles.buckets or scans(cluster))
    if (
        cluster.segments
        or not whole
        or not all(isinstance(n, int) for n in cluster.reduce)
        or not tiles.template.startswith("reduction")
    ):
        return cluster
    if any(isinstance(n, Random) for n in cluster.order):  # drawn four at a time along a row
        return cluster
    split, axes = len(cluster.parallel), cluster.axes
    loads = [n.layout.strides or () for n in full(cluster) if not n.index]
    if any(fast_axis(strides, axes) not in (None, len(axes) - 1) for strides in loads if strides[-1:] != (0,)):
        return cluster
    for cut in range(len(axes) - 1, split, -1):
        each = product(axes[cut:])
        stands = [any(strides[split:cut]) and not any(strides[cut:]) for strides in loads]
        if any(stands) and not all(stands) and power_of_two(each) == each and tiles["RBLOCK"] % each == 0:
            return replace(cluster, cut=cut - split)
    return cluster


def _segments(wide: Cluster, short: Cluster) -> int:
    """Return into how many segments `short` cuts the rows of `wide`, 0 if it does not."""
    rows, columns, each = product(wide.parallel), product(wide.reduce), product(short.reduce)
    many = divide(product(short.parallel), rows)
    if not wide.reduce or not isinstance(many, int) or many == 1 or not isinstance(columns, int):
        return 0
    if not short.reduce:
        return many if wide.segments and many == order(hinted(wide)).segment[0] else 0
    return many if many * each == columns else 0


def _turned(short: Cluster, many: int) -> Cluster:
    """Return a cluster (P x S | E) as (P | S x E), its reductions over segments."""
    if scans(short) or short.programs or short.segments:
        raise Refused("blocks of what is itself cut into parts")
    if short.scatters:
        raise Refused("a result is scattered")
    if any(isinstance(n, Reduce) and len(n.args) > 1 for n in short.order):
        raise Refused("the place of a block's largest element")
    rows = above(short.parallel, many)
    cut = short.reshape((*rows, many), short.reduce)
    number = iota(strided(cut.axes, [*(0 for _ in rows), 1, *(0 for _ in cut.reduce)]))

    def visit(node: Expr) -> Expr:
        return segment(node.op, node.args[0], number, node.dtype) if isinstance(node, Reduce) else node

    values = rewrite([s.value for s in cut.stores], visit)
    stores = tuple(replace(s, value=v) for s, v in zip(cut.stores, values, strict=True))
    return replace(cut, parallel=rows, reduce=(many, *cut.reduce), stores=stores)


def _cut(wide: Cluster) -> Cluster:
    """Return a cluster with segments, its reduce axes two: their number and their length."""
    ordered = order(wide)
    return ordered.reshape(ordered.parallel, ordered.segment)


def _widened(short: Cluster, wide: Cluster) -> Cluster:
    """Return a cluster (P x S) as (P | S x E), the same for all elements of a segment."""
    many, each = wide.reduce
    rows = above(short.parallel, many)
    cut = short.reshape((*rows, many), ())
    return cut.map(Affine((*rows, many, each), tuple((0, ((d, 1),)) for d in range(len(rows) + 1))), rows, (many, each))
