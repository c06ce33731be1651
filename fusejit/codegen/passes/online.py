"""Online: sums whose terms are shifted by another reduction of the same row, taken piece by piece and corrected
afterwards.

In: a Reduce. Out: `Shifted` for the kinds that can be had in one pass, None for all others; and the term that corrects
a piece.

    sum(exp(x - max(x)))  a piece's sum, shifted by its own maximum, counts exp(max of the piece - max of the row) times
    sum((x - sum(x) / n) ** 2)  a piece's squares about its own mean, plus what moving them to the row's mean adds
    sum(w * (x - max(x) - l))  a piece's sum about its own maximum,
        plus (that maximum - max(x) - l) times the piece's sum of w

The first is the online softmax of Milakov and Gimelshein, the second the parallel variance of Chan, Golub and LeVeque;
both are exact. The third is what a log softmax is multiplied with and summed: l is the logarithm of the first. Its two
terms have the sign of w: none cancel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..ir.cluster import Cluster
from ..ir.expr import (
    Compute,
    Const,
    Expr,
    Load,
    Reduce,
    Scan,
    cast,
    children,
    compute,
    const,
    postorder,
    reduction,
    substitute,
)


@dataclass(frozen=True, slots=True)
class Shifted:
    """sum(exp(value - shift)), sum((value - shift) ** 2) or sum(weights * (value - shift - ..)), by `kind`: "exp",
    "square" or "linear".

    `shifts`: what is subtracted from the value, in turn, is made of reductions of the row and of constants. A linear
    sum has any number of them, one of which is `about`, the maximum of the values; it counts elements where `mask`
    holds.
    """

    kind: str
    node: Reduce
    value: Expr
    shifts: tuple[Expr, ...]
    weights: tuple[Expr, ...] = ()
    mask: Expr | None = None
    about: Reduce | None = None

    @property
    def deviation(self) -> Expr:
        """value - shift, of squares."""
        (term,) = self.node.args
        assert isinstance(term, Compute)
        return term.args[0]

    @property
    def shift(self) -> Expr:
        (shift,) = self.shifts
        return shift

    @property
    def bases(self) -> list[Reduce]:
        return [n for n in _above(*self.shifts) if isinstance(n, Reduce)]

    @property
    def reads(self) -> tuple[Expr, ...]:
        """What of the row a piece needs."""
        return tuple(e for e in (self.value, *self.weights, self.mask) if e is not None and not isinstance(e, Const))


def shifted(node: Expr) -> Shifted | None:
    """Return what `node` is shifted by, if it is a sum of one of the two kinds."""
    if not isinstance(node, Reduce) or node.op != "sum" or node.dtype is not torch.float32:
        return None
    term: Expr = node.args[0]
    masked = False
    match term:
        case Compute(op="where", args=(_, inner, Const(value=0))):  # fewer terms, the same shift
            term, masked = inner, True
    if not isinstance(term, Compute):
        return None
    kind = "exp" if term.op == "exp" else "square" if term.op == "mul" and term.args[0] is term.args[1] else ""
    rest = term.args[0] if kind else None
    if (
        not isinstance(rest, Compute)
        or rest.op != "sub"
        or any(isinstance(n, Reduce) for n in postorder([rest.args[0]]))
    ):
        return None
    value, shift = rest.args
    if not _of_row(shift) or any(
        isinstance(n, Reduce) for base in _leaves(shift) for a in children(base) for n in postorder([a])
    ):
        return None
    scanned = any(
        isinstance(n, Scan) for n in postorder([value])
    )  # what the first tile is near, nobody knows before the loop scans it
    if kind == "square" and (masked or scanned or not _is_mean(shift, value)):
        return None
    return Shifted(kind, node, value, (shift,))


def linear(node: Expr, exact: bool = False) -> Shifted | None:
    """Return the weights and the shift of `node`, if it is a sum of weighted distances to a maximum and more.

    Args:
        exact: whether casts to half types round inside a kernel; elsewhere they are looked through.

    >>> linear(sum(where(inside, t * ((x - max(x)) - log(sum(exp(x - max(x))))), 0)))
    Shifted("linear", .., x, (max(x), log(..)), weights=(t,), mask=inside, about=max(x))
    """
    if not isinstance(node, Reduce) or node.op != "sum" or node.dtype is not torch.float32:
        return None
    term, mask = node.args[0], None
    weights: list[Expr] = []
    match term:
        case Compute(op="where", args=(condition, inner, Const(value=0))):
            term, mask = inner, condition
    term = term if exact else _unrounded(term)
    while isinstance(term, Compute) and term.op in ("mul", "neg"):
        factor, rest = (const(-1.0, torch.float32), term.args[0]) if term.op == "neg" else term.args
        factor, rest = (rest, factor) if _has_reduce(factor) else (factor, rest)
        weights.append(factor)
        term = rest if exact else _unrounded(rest)
    parts: list[Expr] = []
    while isinstance(term, Compute) and term.op == "sub" and _of_row(term.args[1]) and term.dtype is torch.float32:
        parts.append(term.args[1])
        term = term.args[0]
    about = next(
        (p for p in parts if isinstance(p, Reduce) and p.op == "amax" and _same_or_masked(p.args[0], term)), None
    )
    if (
        about is None
        or any(_has_reduce(e) for e in (term, *weights, mask) if e is not None)
        or term.dtype is not torch.float32
    ):
        return None
    return Shifted("linear", node, term, tuple(reversed(parts)), tuple(weights), mask, about)


def _unrounded(x: Expr) -> Expr:
    """Return what casts from float32 to half types, and back, are made of."""
    while (
        isinstance(x, Compute)
        and x.op == "cast"
        and {x.dtype, x.args[0].dtype} <= {torch.float32, torch.bfloat16, torch.float16}
    ):
        if not _has_reduce(x):
            break
        x = x.args[0]
    return x


def _same_or_masked(x: Expr, value: Expr) -> bool:
    return x is value or isinstance(x, Compute) and x.op == "where" and x.args[1] is value


def _has_reduce(x: Expr) -> bool:
    return any(isinstance(n, Reduce) for n in postorder([x]))


def _leaves(shift: Expr) -> list[Expr]:
    return [n for n in _above(shift) if isinstance(n, Reduce) or not children(n)]


def _of_row(shift: Expr) -> bool:
    """Whether a value is made of reductions of the row, and of constants."""
    leaves = _leaves(shift)
    return any(isinstance(n, Reduce) for n in leaves) and all(isinstance(n, (Reduce, Const)) for n in leaves)


def _above(*shifts: Expr) -> list[Expr]:
    return postorder(list(shifts), lambda n: () if isinstance(n, Reduce) else children(n))


def _is_mean(shift: Expr, value: Expr) -> bool:
    match shift:
        case Compute(op="div", args=(Reduce(op="sum", args=(summed,)), Const())):
            return summed is value
    return False


def with_count(shift: Expr, count: Expr) -> Expr:
    """Return a mean with another count."""
    assert isinstance(shift, Compute)
    return compute("div", shift.args[0], count, dtype=shift.dtype)


def of_piece(found: Shifted, count: int) -> Reduce:
    """Return the sum as a piece of `count` elements takes it, about its own shift."""
    if found.kind == "exp":
        return found.node
    if found.kind == "linear":
        return _weighted(found, compute("sub", found.value, own_shift(found, count), dtype=found.node.dtype))
    (node,) = substitute([found.node], {found.shift: own_shift(found, count)})
    assert isinstance(node, Reduce)
    return node


def own_shift(found: Shifted, count: int) -> Expr:
    """Return what a piece of `count` elements has in the place of the row's shift."""
    if found.kind == "square":
        return with_count(found.shift, const(float(count), found.shift.dtype))
    if found.about is None:
        return found.shift
    low, dtype = (
        const(-math.inf, found.about.dtype),
        found.about.dtype,
    )  # of -inf only: those are -inf about anything else
    return compute(
        "where", compute("eq", found.about, low, dtype=torch.bool), const(0.0, dtype), found.about, dtype=dtype
    )


def weighted_count(found: Shifted) -> Reduce:
    """Return the sum of a piece's weights."""
    return _weighted(found, const(1.0, found.node.dtype))


def _weighted(found: Shifted, value: Expr) -> Reduce:
    dtype = found.node.dtype
    for weight in found.weights:
        value = compute("mul", value, cast(weight, dtype), dtype=dtype)
    value = value if found.mask is None else compute("where", found.mask, value, const(0.0, dtype), dtype=dtype)
    node = reduction("sum", value, dtype=dtype)
    assert isinstance(node, Reduce)
    return node


def residual(found: Shifted, count: int) -> Reduce:
    """Return what a piece's deviations from its own rounded mean add up to: nothing, but for that rounding."""
    node = reduction(
        "sum", compute("sub", found.value, own_shift(found, count), dtype=found.node.dtype), dtype=found.node.dtype
    )
    assert isinstance(node, Reduce)
    return node


def corrected(
    kind: str, partial: Expr, own: Expr, shifts: tuple[Expr, ...], more: tuple[Expr, Expr] | None = None
) -> Expr:
    """Return what a piece adds to the whole row: `partial` about its `own` shift, moved to the row's `shifts`.

    Args:
        more: for squares, the count of a piece and its residual; for linear sums, the count and the sum of the weights.
    """
    dtype = partial.dtype
    away = own
    for shift in shifts:  # one after the other, as the row does: their sum would round what is small beside a maximum
        away = compute("sub", away, shift, dtype=dtype)
    if more is not None:
        count, left = more
        if kind == "linear":
            return compute("add", partial, compute("mul", away, left, dtype=dtype), dtype=dtype)
        twice = compute("mul", const(2.0, dtype), left, dtype=dtype)
        moved = compute("add", compute("mul", count, away, dtype=dtype), twice, dtype=dtype)
        return compute("add", partial, compute("mul", away, moved, dtype=dtype), dtype=dtype)
    low = const(-math.inf, dtype)
    # a piece of -inf only has a sum of exp(-inf + inf); it counts as nothing unless the whole row is like that
    empty = compute(
        "where", compute("eq", shifts[0], low, dtype=torch.bool), const(math.nan, dtype), const(0.0, dtype), dtype=dtype
    )
    scale = compute("exp", away, dtype=dtype)
    return compute(
        "where",
        compute("eq", own, low, dtype=torch.bool),
        empty,
        compute("mul", partial, scale, dtype=dtype),
        dtype=dtype,
    )


def in_one_pass(cluster: Cluster, exact: bool = True) -> tuple[dict[Expr, int], dict[Expr, Shifted]]:
    """Return `Cluster.levels` where a loop takes shifted sums together with what they are shifted by, and those sums.

    Args:
        exact: as `linear`.
    """
    levels: dict[Expr, int] = {}
    found: dict[Expr, Shifted] = {}
    for node in cluster.order:
        below = max((levels[c] for c in children(node)), default=0)
        one = (shifted(node) or linear(node, exact)) if below == 1 else None
        if one is not None and (one.kind == "square" or _is_maximum(one) or _about_maximum(one, levels)):
            found[node] = one
            levels[node] = 1
        else:
            levels[node] = below + isinstance(node, Reduce)
    return levels, found


def last_reads(cluster: Cluster, one_pass: bool = True, exact: bool = True) -> dict[str, int]:
    """Return {buffer: the last pass over a row that loads it}; a store's pass is its value's level.

    Args:
        one_pass: whether shifted sums are taken together with what they are shifted by, as a loop does; exact: as
            `linear`.
    """
    levels, found = in_one_pass(cluster, exact) if one_pass else (cluster.levels, {})
    taken = [
        (levels[n] - 1, a)
        for n in cluster.order
        if isinstance(n, Reduce)
        for a in (found[n].reads if n in found else n.args)
    ]
    result: dict[str, int] = {}
    for level, root in (
        *taken,
        *((levels[s.value], r) for s in cluster.stores for r in (s.value, *(e for e, _ in s.index))),
    ):
        for node in postorder([root], lambda n: () if isinstance(n, Reduce) else children(n)):
            if isinstance(node, Load):
                result[node.buffer] = max(result.get(node.buffer, 0), level)
    return result


def _is_maximum(found: Shifted) -> bool:
    bases = found.bases
    return (
        found.kind == "exp"
        and len(bases) == 1
        and bases[0].op == "amax"
        and bases[0].args[0] is found.value
        and not _masked(found.node)
    )


def _about_maximum(found: Shifted, levels: dict[Expr, int]) -> bool:
    """Whether a linear sum is about a maximum that the same loop takes, and moved by what it takes besides."""
    plain = found.about is not None and found.about.args[0] is found.value and found.mask is None
    plain = plain and all(read in levels for read in found.reads)
    return plain and all(levels[base] == 1 for base in found.bases)


def _masked(node: Reduce) -> bool:
    term = node.args[0]
    return isinstance(term, Compute) and term.op == "where"
