"""One-hot rows: a sum along a row that is one value at a data-dependent place and another everywhere else needs no loop.

In: an expression and the dimension to sum along. Out: its sum as an expression of the row, or None.

    sum over c of (where(c == target, -1, 0) * g)  ->  -1 * g + (n - 1) * (0 * g)

So the backward of a cross entropy, whose gradient of the log softmax is such a row, needs no reduction. The place has to be a checked
index; the two values must not vary along the row. The zeros stay: times an infinite gradient they are NaN, as in eager.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .cluster import Compute, Const, Expr, Iota, Load, cast, compute, const, leaves, postorder, rewrite, substitute, view
from .layout import Affine


def one_hot_sum(x: Expr, shape: Sequence[int], dim: int) -> Expr | None:
    """Return the sum of `x` over `dim`, kept as size 1; None if `x` is no one-hot row along it."""
    if not x.dtype.is_floating_point:
        return None
    tests = [n for n in postorder([x]) if _is_test(n, dim)]
    if len(tests) != 1:
        return None
    hot, cold = (_folded(substitute([x], {tests[0]: const(value, torch.bool)})[0]) for value in (True, False))
    if _varies(hot, dim) or _varies(cold, dim):
        return None
    rest = compute("mul", cold, const(float(shape[dim] - 1), x.dtype), dtype=x.dtype)
    total = hot if isinstance(cold, Const) and cold.value == 0 else compute("add", hot, rest, dtype=x.dtype)
    row = tuple(1 if d == dim else n for d, n in enumerate(shape))
    return view([total], Affine(row, tuple((0, ()) if d == dim else (0, ((d, 1),)) for d in range(len(row)))))[0]


def _is_test(node: Expr, dim: int) -> bool:
    """Whether a node compares the coordinate along `dim` with a checked index that is one for the row."""
    match node:
        case Compute(op="eq", args=(a, b)):
            pairs = ((a, b), (b, a))
            return any(_is_place(i, dim) and isinstance(e, Compute) and e.op == "checked_place" and not _varies(e, dim) for i, e in pairs)
    return False


def _is_place(node: Expr, dim: int) -> bool:
    if not isinstance(node, Iota) or node.layout.offset != 0:
        return False
    return all([m.stride for m in modes if m.extent != 1] == [1] * (d == dim) for d, modes in enumerate(_strided(node)))


def _strided(node: Iota | Load) -> list[list]:
    return [[m for m in modes if m.stride != 0] for modes in node.layout.dims]


def _varies(node: Expr, dim: int) -> bool:
    return any(_strided(leaf)[dim] for leaf in leaves([node]))


def _folded(x: Expr) -> Expr:
    """Return `x` with selects of a known condition, and casts of constants, decided."""

    def visit(node: Expr) -> Expr:
        match node:
            case Compute(op="where", args=(Const(value=known), yes, no)):
                return yes if known else no
            case Compute(op="cast", args=(Const() as inner,)):
                return cast(inner, node.dtype)
        return node

    return rewrite([x], visit)[0]
