"""Online: sums whose terms are shifted by another reduction of the same row, taken piece by piece and corrected afterwards.

In: a Reduce. Out: `Shifted` for the two kinds that can be had in one pass, None for all others; and the term that corrects a piece.

    sum(exp(x - max(x)))        a piece's sum, shifted by its own maximum, counts exp(max of the piece - max of the row) times
    sum((x - sum(x) / n) ** 2)  a piece's squares about its own mean, plus what moving them to the row's mean adds

The first is the online softmax of Milakov and Gimelshein, the second the parallel variance of Chan, Golub and LeVeque; both are exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .cluster import Cluster, Compute, Const, Expr, Load, Reduce, Scan, children, compute, const, postorder, reduction, substitute


@dataclass(frozen=True, slots=True)
class Shifted:
    """sum(exp(value - shift)) or sum((value - shift) ** 2); `shift` is made of reductions of the row and of constants."""

    kind: str
    node: Reduce
    value: Expr
    shift: Expr

    @property
    def deviation(self) -> Expr:
        """value - shift, of squares."""
        (term,) = self.node.args
        assert isinstance(term, Compute)
        return term.args[0]

    @property
    def bases(self) -> list[Reduce]:
        return [n for n in _above(self.shift) if isinstance(n, Reduce)]


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
    if not isinstance(rest, Compute) or rest.op != "sub" or any(isinstance(n, Reduce) for n in postorder([rest.args[0]])):
        return None
    value, shift = rest.args
    leaves = [n for n in _above(shift) if isinstance(n, Reduce) or not children(n)]
    if not any(isinstance(n, Reduce) for n in leaves) or not all(isinstance(n, (Reduce, Const)) for n in leaves):
        return None
    if any(isinstance(n, Reduce) for leaf in leaves for a in children(leaf) for n in postorder([a])):
        return None
    scanned = any(isinstance(n, Scan) for n in postorder([value]))  # what the first tile is near, nobody knows before the loop scans it
    if kind == "square" and (masked or scanned or not _is_mean(shift, value)):
        return None
    return Shifted(kind, node, value, shift)


def _above(shift: Expr) -> list[Expr]:
    return postorder([shift], lambda n: () if isinstance(n, Reduce) else children(n))


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
    local = with_count(found.shift, const(float(count), found.shift.dtype))
    (node,) = substitute([found.node], {found.shift: local})
    assert isinstance(node, Reduce)
    return node


def residual(found: Shifted, count: int) -> Reduce:
    """Return what a piece's deviations from its own rounded mean add up to: nothing, but for that rounding."""
    local = with_count(found.shift, const(float(count), found.shift.dtype))
    node = reduction("sum", compute("sub", found.value, local, dtype=found.node.dtype), dtype=found.node.dtype)
    assert isinstance(node, Reduce)
    return node


def corrected(kind: str, partial: Expr, own: Expr, shift: Expr, more: tuple[Expr, Expr] | None = None) -> Expr:
    """Return what a piece adds to the whole row: `partial` about its `own` shift, moved to the row's `shift`.

    Args:
        more: for squares, the count of a piece and its residual.
    """
    dtype = partial.dtype
    if more is not None:
        count, left = more
        away = compute("sub", own, shift, dtype=dtype)
        twice = compute("mul", const(2.0, dtype), left, dtype=dtype)
        moved = compute("add", compute("mul", count, away, dtype=dtype), twice, dtype=dtype)
        return compute("add", partial, compute("mul", away, moved, dtype=dtype), dtype=dtype)
    low = const(-math.inf, dtype)
    # a piece of -inf only has a sum of exp(-inf + inf); it counts as nothing unless the whole row is like that
    empty = compute("where", compute("eq", shift, low, dtype=torch.bool), const(math.nan, dtype), const(0.0, dtype), dtype=dtype)
    scale = compute("exp", compute("sub", own, shift, dtype=dtype), dtype=dtype)
    return compute("where", compute("eq", own, low, dtype=torch.bool), empty, compute("mul", partial, scale, dtype=dtype), dtype=dtype)


def in_one_pass(cluster: Cluster) -> tuple[dict[Expr, int], dict[Expr, Shifted]]:
    """Return `Cluster.levels` where a loop takes shifted sums together with what they are shifted by, and those sums."""
    levels: dict[Expr, int] = {}
    found: dict[Expr, Shifted] = {}
    for node in cluster.order:
        below = max((levels[c] for c in children(node)), default=0)
        one = shifted(node) if below == 1 else None
        if one is not None and (one.kind == "square" or _is_maximum(one)):
            found[node] = one
            levels[node] = 1
        else:
            levels[node] = below + isinstance(node, Reduce)
    return levels, found


def last_reads(cluster: Cluster, one_pass: bool = True) -> dict[str, int]:
    """Return {buffer: the last pass over a row that loads it}; a store's pass is its value's level.

    Args:
        one_pass: whether shifted sums are taken together with what they are shifted by, as a loop does.
    """
    levels, found = in_one_pass(cluster) if one_pass else (cluster.levels, {})
    taken = [(levels[n] - 1, a) for n in cluster.order if isinstance(n, Reduce) for a in ((found[n].value,) if n in found else n.args)]
    result: dict[str, int] = {}
    for level, root in (*taken, *((levels[s.value], r) for s in cluster.stores for r in (s.value, *(e for e, _ in s.index)))):
        for node in postorder([root], lambda n: () if isinstance(n, Reduce) else children(n)):
            if isinstance(node, Load):
                result[node.buffer] = max(result.get(node.buffer, 0), level)
    return result


def _is_maximum(found: Shifted) -> bool:
    bases = found.bases
    return len(bases) == 1 and bases[0].op == "amax" and bases[0].args[0] is found.value and not _masked(found.node)


def _masked(node: Reduce) -> bool:
    term = node.args[0]
    return isinstance(term, Compute) and term.op == "where"
