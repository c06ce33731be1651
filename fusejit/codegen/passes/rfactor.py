"""rfactor: a reduction with few results and many elements becomes several steps, so that the whole device works on
each.

In: fused clusters. Out: the same program; a split cluster reduces pieces into a small buffer of partial results, then
those; what it writes along the whole row follows as a pointwise cluster. Deterministic: no atomics, the pieces are
combined in a fixed order.

    parallel 1 | reduce 1048576   ->   parallel 256 | reduce 4096,  then  parallel 1 | reduce 256
    softmax of 16 x 131072  ->  maximum and sum of 32 pieces a row,  those combined,  then  16 x 131072 values written
    the loss of soft targets      ->   maximum, sum and weighted sum of a piece,  those combined:  logits are read once
    parallel 256 | reduce s0  ->  parallel 256 33 | reduce q0,  then  parallel 256 | reduce 33  q0 = s0 / 33, rounded up

Where a length varies the number of pieces is one for all sizes, and what lies behind the end of the row is masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..ir.analysis import column_reduction, columns_at_once, full, scans
from ..ir.cluster import Cluster, Store
from ..ir.concretize import hinted
from ..ir.expr import (
    Expr,
    Load,
    Reduce,
    cast,
    compute,
    const,
    iota,
    load,
    postorder,
    reduction,
    rewrite,
    substitute,
    view,
)
from ..ir.graph import Buffer, Extern, Foreach, Lowered, Refused
from ..ir.layout import Affine, contiguous, strided
from ..ir.reductions import INDEX_IDENTITY, row_of, splits
from ..ir.size import AnySize, Size, atom, hint, most, product
from ..schedule.cost_model import pays_to_split
from ..schedule.device import Device, machine
from .online import Shifted, corrected, in_one_pass, linear, of_piece, own_shift, residual, shifted, weighted_count

LONG = {
    True: 2048,
    False: 16384,
}  # elements a result, from which it pays: {column reduction: rows, row reduction: columns}
FAR = 8  # so much longer rows than those from which it pays have a variant that is split, where this call's are shorter
EVEN = 256  # pieces of a row that it is no multiple of begin at multiples of so many elements: wide loads


# -- policies ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Policy:
    """Why a reduction is made of those of its pieces, and what it has to be for that.

    Attributes:
        pieces: what the pieces are. places: whether reductions to a place are combined too. beneath: whether only those
            that wait for no other have to be.
        passes: how many reductions may stand one above the other, 0 for any number.
        whole: whether a cluster that is cut already (programs, segments, scans) is no such reduction.
        why, scattered: the reasons that a refused one has.
    """

    name: str
    pieces: str
    places: bool = False
    beneath: bool = False
    passes: int = 1
    whole: bool = True
    why: str = "a reduction that is not made of those of its pieces"
    scattered: str = "a result is scattered"

    def combines(self, op: str) -> bool:
        """Whether results of pieces give the result of the whole."""
        return splits(op) or self.places and bool(row_of(op).place_of)

    def unfit(self, cluster: Cluster) -> str:
        """Return why a cluster is no reduction that this policy cuts, or ""."""
        ops = {n.op for n in reductions(cluster) if not self.beneath or cluster.levels[n] == 1}
        levels = max(cluster.levels.values(), default=0)
        if not all(map(self.combines, ops)) or self.passes and levels > self.passes or self.whole and is_cut(cluster):
            return self.why
        return self.scattered if cluster.scatters else ""


FEW_PROGRAMS = Policy(
    "few programs",
    "as many as keep the device busy",
    places=True,
    beneath=True,
    passes=0,
)
ROWS_OF_EVERYTHING = Policy(
    "rows of everything",
    "the rows that another kernel holds",
    why="a reduction of all rows that takes more than their partial results",
    scattered="what follows a reduction of all rows needs it finished",
)
COLUMNS_BY_PROGRAMS = Policy(
    "row and column",
    "the columns of the rows that a program walks over",
    whole=False,
    why="column results of several reductions, one after the other, take several passes",
)
SHARES_OF_ROWS = Policy("shares of rows", "the results of the rows that a program walks over")
POLICIES = (FEW_PROGRAMS, ROWS_OF_EVERYTHING, COLUMNS_BY_PROGRAMS, SHARES_OF_ROWS)


def reductions(cluster: Cluster) -> list[Reduce]:
    return [n for n in cluster.order if isinstance(n, Reduce)]


def is_cut(cluster: Cluster) -> bool:
    """Whether the rows of a cluster are shared by programs, cut into segments, or have to be walked in order."""
    return bool(cluster.programs or cluster.segments or scans(cluster))


def partial_names(buffers: dict[str, Buffer], count: int) -> list[str]:
    """Return names for new buffers of partial results."""
    return [f"b{len(buffers) + i}" for i in range(count)]


def check_partial(before: dict[str, Buffer], after: dict[str, Buffer], saved: int, by: int = 1) -> None:
    """Refuse new buffers of partial results that cost more than the bytes which a merge saves, of `by` times as many
    rows as there are in this call.

    Raises:
        Refused: with the bytes of both.
    """
    size = sum(b.bytes for name, b in after.items() if name not in before)
    partial, shared = most(size) if by > 1 else hint(size), by * saved
    if 2 * partial >= shared:
        raise Refused(f"partial results of {partial} bytes cost more than reading {shared} bytes again")


# -- few programs for a long reduction ---------------------------------------------------------------------------------


def split(lowered: Lowered, device: Device | None = None, numerics: str = "fast") -> Lowered:
    """Return the program with every reduction split that has too few programs for its length."""
    buffers = dict(lowered.buffers)
    steps: list[Cluster | Extern | Foreach] = []
    waiting = list(reversed(lowered.steps))
    while waiting:
        step = waiting.pop()
        pieces = cut(step, device or machine()) if isinstance(step, Cluster) else None
        if pieces:
            *first, last = in_pieces(*pieces, buffers, numerics == "eager")
            steps += first
            waiting.append(last)  # a reduction of the corrected row is split again
        else:
            steps.append(step)
    return replace(lowered, buffers=buffers, steps=tuple(steps))


def cut(cluster: Cluster, device: Device) -> tuple[Cluster, int, AnySize] | None:
    """Return a cluster as it is split, into how many pieces, and their length; None where it stays whole."""
    if any(isinstance(n, Size) for n in cluster.reduce):
        return _varying(cluster, device)
    columns, wanted = product(cluster.reduce), _pieces(hinted(cluster), device)
    length = _even(cluster.reduce, columns, wanted) if wanted else 0
    return (cluster, -(-columns // length), length) if length else None


def _varying(cluster: Cluster, device: Device) -> tuple[Cluster, int, AnySize] | None:
    """As `_cut`, of a row whose length varies: as many pieces for all sizes, or an assumption that none is much
    longer.
    """
    joined = cluster.coalesced
    model, first = hinted(joined), joined.reduce[0]
    if isinstance(first, int) or max(cluster.levels.values()) > 1 or any(cluster.runs_along(s) for s in cluster.stores):
        return None
    far = FAR * LONG[column_reduction(model)]
    if not _pieces(replace(model, reduce=(max(far, product(model.reduce)), *(1 for _ in model.reduce[1:]))), device):
        return None
    if (
        not _pieces(model, device) and product(joined.reduce) < far
    ):  # true in this call, and of every size that the Program is for
        return None
    pieces = max(2, 2 * device.sms // max(1, _programs(model)))
    even = 1 if column_reduction(model) or len(joined.reduce) > 1 else EVEN
    return joined, pieces, even * atom("floordiv", first + even * pieces - 1, even * pieces)


def _programs(cluster: Cluster) -> int:
    """Return how many programs work on the rows of a cluster that stays whole."""
    rows = product(cluster.parallel)
    return -(-rows // columns_at_once(cluster)) if column_reduction(cluster) else rows


def _pieces(cluster: Cluster, device: Device) -> int:
    """Return into how many pieces a row is best cut, 0 where it stays whole."""
    rows, columns = product(cluster.parallel), product(cluster.reduce)
    if not reductions(cluster) or FEW_PROGRAMS.unfit(cluster):
        return 0
    upright, programs = column_reduction(cluster), _programs(cluster)
    again = max(cluster.levels.values()) > 1 or any(
        cluster.runs_along(s) and cluster.levels[s.value] for s in cluster.stores
    )
    enough = device.sms if upright else device.sms // 2
    unsure = again or (
        rows == 1 and not upright
    )  # what is left of partial results may be less than a launch more is worth
    if (
        columns < LONG[upright]
        or programs >= enough
        or (unsure and not pays_to_split(cluster, _passes(cluster, device), device))
    ):
        return 0
    wanted = min(2 * device.sms // max(1, programs), columns // (LONG[upright] // 8))
    operands = len(full(cluster))
    room = device.row_values // (
        2 * operands if operands > 1 else 1
    )  # several are kept as loaded beside what is made of them
    return wanted if upright else max(wanted, -(-columns // room))  # a piece stays in registers


def _passes(cluster: Cluster, device: Device) -> int:
    return 1 if product(cluster.reduce) <= device.row_values else max(in_one_pass(cluster)[0].values()) + 1


def _even(reduce: Sequence[int], columns: int, wanted: int) -> int:
    """Return the length of `wanted` pieces: a divisor of the row where a near one is, first one that cuts no axis."""
    steps = [product(reduce[i:]) for i in range(len(reduce) + 1)]
    divisors = [d for d in range(max(2, wanted // 4), 2 * wanted + 1) if columns % d == 0]
    nesting = [d for d in divisors if all(columns // d % n == 0 or n % (columns // d) == 0 for n in steps)]
    if nesting or divisors:
        return columns // min(nesting or divisors, key=lambda d: (d > wanted, abs(d - wanted)))
    if len(reduce) > 1 or wanted < 2:
        return 0
    return -(-columns // wanted // EVEN) * EVEN  # the last piece is shorter: masked


def in_pieces(
    cluster: Cluster, pieces: AnySize, length: AnySize, buffers: dict[str, Buffer], exact: bool = False
) -> list[Cluster]:
    """Return the reduction of the pieces, that of the partial results, and what is left to do along the row."""
    even = pieces * length == product(cluster.reduce)
    wide = cluster.reshape(cluster.parallel, (pieces, length)) if even else padded(cluster, pieces, length)
    level = {n: wide.levels[n] for n in reductions(wide)}
    about_shifts: dict[Expr, Shifted] = {}
    for n, at in level.items():
        kind = shifted(n) if at == 2 else None
        kind = linear(n, exact) if kind is None and at > 1 else kind
        if kind is not None and all(level[base] == 1 or base in about_shifts for base in kind.bases):
            about_shifts[n] = kind
    taken = [n for n, at in level.items() if at == 1 or n in about_shifts]
    partial = _Partial(wide, pieces, buffers)
    values: dict[Expr, Expr] = {n: partial.whole(n) for n, at in level.items() if at == 1}
    for node, kind in about_shifts.items():
        values[node] = partial.shifted(kind, values, length)  # the shift of a linear sum holds sums of exponentials
    # whether a store runs along the row is asked of the cluster: a piece of several axes has no one stride there
    along = [cluster.runs_along(s) for s in cluster.stores]
    # what needs no reduction is written where it is read, unless a shorter last piece would write behind its end
    passed = [s for s, runs in zip(wide.stores, along, strict=True) if even and runs and not wide.levels[s.value]]
    first = Cluster.build((*wide.parallel, pieces), wide.reduce[1:], (*partial.stores, *passed), cluster.lines)
    results = [s for s, runs in zip(wide.stores, along, strict=True) if not runs]
    done = [s for s in results if all(n in taken for n in postorder([s.value]) if isinstance(n, Reduce))]
    left = tuple(s for s in wide.stores if s not in done and s not in passed)
    if not left:
        return [first, combined(replace(wide, stores=tuple(done)), values, pieces, cluster.lines)]
    rows = {n: _row(wide, n, buffers) for n in taken}
    second = combined(replace(wide, stores=(*done, *(s for s, _ in rows.values()))), values, pieces, cluster.lines)
    names = [s.buffer for s in left]
    original: dict[Expr, str] = {
        n: rows[m][0].buffer for n, m in zip(reductions(cluster), reductions(wide), strict=True) if m in rows
    }
    return [first, second, _rest(cluster, names, original)]


def padded(cluster: Cluster, pieces: int, length: AnySize) -> Cluster:
    """Return the cluster over pieces that do not divide the row: what lies behind its end is neither read nor counted.

    Of several reduce axes the first is cut, and the pieces have the others whole.
    """
    columns, *others = cluster.reduce
    rank = len(cluster.parallel)
    axes = (*cluster.parallel, pieces, length, *others)
    rest = ((0, ((rank + 2 + d, 1),)) for d in range(len(others)))
    change = Affine(axes, (*((0, ((d, 1),)) for d in range(rank)), (0, ((rank, length), (rank + 1, 1))), *rest))
    wide = cluster.map(change, cluster.parallel, (pieces, length, *others))
    place = iota(strided(axes, [*(0 for _ in range(rank)), length, 1, *(0 for _ in others)]))
    inside = compute("lt", place, const(columns, torch.int64), dtype=torch.bool)

    def visit(node: Expr) -> Expr:
        if isinstance(node, Load) and any((node.layout.strides or ())[rank:]):
            mask = inside if node.mask is None else compute("logical_and", inside, node.mask, dtype=torch.bool)
            return load(node.buffer, node.layout, node.dtype, node.index, mask, node.fill)
        if isinstance(node, Reduce):
            first = row_of(node.op).identity
            neutral = [first(node.args[0].dtype), INDEX_IDENTITY]
            args = [
                compute("where", inside, a, const(n, a.dtype), dtype=a.dtype)
                for a, n in zip(node.args, neutral, strict=False)
            ]
            return reduction(node.op, *args, dtype=node.dtype)
        return node

    values = rewrite([s.value for s in wide.stores], visit)
    return replace(wide, stores=tuple(replace(s, value=v) for s, v in zip(wide.stores, values, strict=True)))


class _Partial:
    """The partial results of one split: what the pieces store, and what their readers make of it, over (*parallel,
    pieces).
    """

    def __init__(self, wide: Cluster, pieces: AnySize, buffers: dict[str, Buffer]) -> None:
        self.wide, self.pieces, self.buffers = wide, pieces, buffers
        self.rows = product(wide.parallel)
        self.device = next(buffers[s.buffer].device for s in wide.stores)
        self.stores: list[Store] = []
        self.loads: dict[Expr, Expr] = {}

    def stored(self, node: Expr) -> Expr:
        """Let the pieces store `node`, and return it as its readers load it."""
        if node not in self.loads:
            buffer = Buffer(f"b{len(self.buffers)}", (self.pieces, self.rows), (self.rows, 1), node.dtype, self.device)
            self.buffers[buffer.name] = buffer
            along = contiguous(self.wide.parallel).strides or ()
            at = strided(self.wide.axes, [*along, self.rows, *(0 for _ in self.wide.reduce[1:])])
            self.stores.append(Store(buffer.name, at, node, node.dtype))
            self.loads[node] = load(
                buffer.name, strided((*self.wide.parallel, self.pieces), [*along, self.rows]), node.dtype
            )
        return self.loads[node]

    def whole(self, node: Expr) -> Expr:
        """Return a reduction of the row as one of its pieces' results."""
        assert isinstance(node, Reduce)
        if not (best := row_of(node.op).place_of):
            return reduction(node.op, self.stored(node), dtype=node.dtype)
        value = reduction(best, node.args[0], dtype=node.args[0].dtype)
        place = cast(self.stored(node), node.args[1].dtype)
        return reduction(node.op, self.stored(value), place, dtype=node.dtype)

    def shifted(self, sum_about: Shifted, values: dict[Expr, Expr], length: int) -> Expr:
        """Return a sum about a shift as its pieces' sums about their own."""
        dtype = sum_about.node.dtype
        shifts = tuple(substitute(list(sum_about.shifts), values))
        (own,) = substitute([own_shift(sum_about, length)], self.loads)
        piece = self.stored(of_piece(sum_about, length))
        count = const(float(length), dtype)
        more = None
        if sum_about.kind == "square":
            more = count, self.stored(residual(sum_about, length))
        elif sum_about.kind == "linear":
            more = (
                count,
                count if not sum_about.weights and sum_about.mask is None else self.stored(weighted_count(sum_about)),
            )
        return reduction("sum", corrected(sum_about.kind, piece, own, shifts, more), dtype=dtype)


def combined(wide: Cluster, values: dict[Expr, Expr], pieces: AnySize, lines: tuple[str, ...]) -> Cluster:
    """Return the cluster that reduces partial results and computes what followed the reduction.

    Args:
        wide: the cluster as it was, its results along the parallel axes. values: for each Reduce in it, the same over
            (*parallel, pieces).
    """
    rank = len(wide.parallel)
    names = {f"?{i}": node for i, node in enumerate(values)}
    places = {node: load(name, strided(wide.axes, [0] * len(wide.axes)), node.dtype) for name, node in names.items()}
    roots = substitute([s.value for s in wide.stores], places)
    drop = Affine(
        (*wide.parallel, pieces), tuple((0, ((d, 1),)) if d < rank else (0, ()) for d in range(len(wide.axes)))
    )
    finish = lambda n: values[names[n.buffer]] if isinstance(n, Load) and n.buffer in names else n  # noqa: E731
    roots = rewrite(view(roots, drop), finish)
    stores = [
        replace(
            s, value=v, layout=strided((*wide.parallel, pieces), [*(s.layout.strides or ())[:rank], 0], s.layout.offset)
        )
        for s, v in zip(wide.stores, roots, strict=True)
    ]
    return Cluster.build(wide.parallel, (pieces,), stores, lines)


def _row(wide: Cluster, node: Expr, buffers: dict[str, Buffer]) -> tuple[Store, Buffer]:
    """Make a buffer for a reduction of each row, which the rest of the cluster reads."""
    shape = (product(wide.parallel),)
    buffer = Buffer(f"b{len(buffers)}", shape, (1,), node.dtype, next(buffers[s.buffer].device for s in wide.stores))
    buffers[buffer.name] = buffer
    at = strided(wide.axes, [*(contiguous(wide.parallel).strides or ()), *(0 for _ in wide.reduce)])
    return Store(buffer.name, at, node, node.dtype), buffer


def _rest(cluster: Cluster, names: Sequence[str], rows: dict[Expr, str]) -> Cluster:
    """Return what a cluster still has to do once some of its reductions are in buffers: pointwise if those were all."""
    at = strided(cluster.axes, [*(contiguous(cluster.parallel).strides or ()), *(0 for _ in cluster.reduce)])
    stores = [s for s in cluster.stores if s.buffer in names]
    values = substitute([s.value for s in stores], {n: load(name, at, n.dtype) for n, name in rows.items()})
    stores = [replace(s, value=v) for s, v in zip(stores, values, strict=True)]
    left = any(isinstance(n, Reduce) for v in values for n in postorder([v]))
    parallel, reduce = (cluster.parallel, cluster.reduce) if left else (cluster.axes, ())
    return Cluster.build(parallel, reduce, stores, cluster.lines)


# -- everything, by rows -----------------------------------------------------------------------------------------------


def fits_rows(whole: Cluster, rows: Cluster) -> bool:
    """Whether `whole` reduces to one value as many elements as the rows of `rows` have together."""
    one = product(whole.parallel) == 1 and product(rows.parallel) > 1 and whole.reduce != () and rows.reduce != ()
    one = one and isinstance(
        product(rows.reduce), int
    )  # whether a program holds a row does not depend on how many there are
    return one and product(whole.reduce) == product(rows.parallel) * product(rows.reduce)


def by_rows(whole: Cluster, rows: Cluster, first: bool, buffers: dict[str, Buffer]) -> tuple[Cluster, Cluster]:
    """Return the reduction of each row and that of all rows' results; those are new `buffers`.

    Args:
        first: whether `rows` reads what `whole` makes.

    Raises:
        Refused: it reduces several times, or the rows wait for its result.
    """
    along = [s for s in whole.stores if whole.runs_along(s)]
    if reason := ROWS_OF_EVERYTHING.unfit(whole):
        raise Refused(reason)
    if rows.scatters or any(whole.levels[s.value] for s in along):
        raise Refused(ROWS_OF_EVERYTHING.scattered)
    if first and any(rows.reads.keys() & {s.buffer} for s in whole.stores if s not in along):
        raise Refused("the rows need the finished reduction of all")
    pieces, *rest = in_pieces(whole, product(rows.parallel), product(rows.reduce), buffers)
    if len(rest) != 1:
        raise Refused("a reduction of all rows in several steps")
    return pieces, rest[0]
