"""Reductions: lowering rules of sum, mean, var, max and their kin, as expressions over layouts.

In: a reduction of ATen's. Out: its value, loaded from a buffer that a cluster of its own stores.

    sum.dim_IntList(x (4,6), [1])   ->  cluster  parallel 4 | reduce 6  store b0 = sum(load x)

Two reductions are written otherwise. A one-hot row, one value at a data-dependent place and another everywhere else,
needs no loop:

    sum over c of (where(c == target, -1, 0) * g)  ->  -1 * g + (n - 1) * (0 * g)

So the backward of a cross entropy, whose gradient of the log softmax is such a row, needs no reduction. The place has
to be a checked index; the two values must not vary along the row. The zeros stay: times an infinite gradient they are
NaN, as in eager. And a sum over everything is taken by rows first where it needs something that the graph makes of each
row:

    -(log_softmax(x) * target).sum()  ->
        row sums, in the kernel that reduced the rows for the log softmax, then their sum
"""

# fx types the arguments of a node as one wide union; here an op's schema says which member each one is

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
from torch.fx import Node

from ..ir.cluster import Cluster, Store
from ..ir.expr import (
    Compute,
    Const,
    Expr,
    Iota,
    Load,
    cast,
    compute,
    const,
    iota,
    leaves,
    postorder,
    reduction,
    rewrite,
    substitute,
    view,
)
from ..ir.layout import Affine, Reshape, contiguous, permute, strided
from ..ir.reductions import place_of, row_of
from ..ir.size import product
from .builder import Lowering, Rule
from .decompositions import short
from .formulas import HALF
from .gather import INDEX
from .table import DTYPES
from .views import VIEWS


# -- reductions --------------------------------------------------------------------------------------------------------
def reduce_to_buffer(
    low: Lowering,
    node: Node,
    x: Expr,
    dims: Sequence[int],
    op: str,
    dtype: torch.dtype,
    place: bool = False,
    shape: tuple[int, ...] = (),
) -> Expr:
    """Reduce `dims` of x (shaped as the node's first operand, or `shape`) and return the result with those dims kept as
    size 1.

    `place` gives arg-reductions the row-major position within the reduced dims.
    """
    shape = shape or tuple(node.args[0].meta["val"].shape)
    if (
        op == "sum" and len(dims) == len(shape) > 1 and by_rows(x, low.reasons)
    ):  # rows first: they join the kernel that reduced them before
        x = reduce_to_buffer(low, node, x, [len(shape) - 1], op, dtype, shape=shape)
        shape = (*shape[:-1], 1)
    kept = [d for d in range(len(shape)) if d not in dims]
    after = tuple(1 if d in dims else n for d, n in enumerate(shape))
    (x,) = view([x], permute(shape, [*kept, *dims]))
    outer, inner = tuple(shape[d] for d in kept), tuple(shape[d] for d in dims)
    args = (
        (x, iota(strided((*outer, *inner), [0] * len(outer) + list(contiguous(inner).strides or ())), INDEX))
        if place
        else (x,)
    )
    device = node.args[0].meta["val"].device
    buffer = low.buffer(after, None, dtype, device)
    low.reasons[buffer.name] = "a reduction"
    rows = strided((*outer, *inner), [*(contiguous(outer).strides or ()), *([0] * len(inner))])
    if product(outer):
        if not product(inner):
            identity = row_of(op).identity
            value, inner, rows = const(identity(x.dtype), dtype), (), contiguous(outer)
        elif product(inner) == 1:  # of one element: the element itself, at place 0
            value, inner, rows = const(0, dtype) if place else view([x], Reshape(outer))[0], (), contiguous(outer)
        else:
            value = reduction(op, *args, dtype=dtype)
        low.steps.append(Cluster.build(outer, inner, [Store(buffer.name, rows, value, dtype)], low.lines(node)))
    return low.whole(buffer)


def _dims(rank: int, dims: Any) -> list[int]:
    if dims is None or (isinstance(dims, (tuple, list)) and not dims):
        return list(range(rank))
    return sorted({d % max(rank, 1) for d in ([dims] if isinstance(dims, int) else dims)} if rank else set())


def _drop(value: Expr, rank: int, dims: Sequence[int], shape: Sequence[int], keepdim: bool) -> Expr:
    if keepdim or not dims:
        return value
    after = tuple(1 if d in dims else n for d, n in enumerate(shape))
    for d in sorted(dims, reverse=True):
        (value,) = view(
            [value],
            Affine(
                (*after[:d], *after[d + 1 :]),
                tuple((0, ()) if i == d else (0, ((i - (i > d), 1),)) for i in range(len(after))),
            ),
        )
        after = (*after[:d], *after[d + 1 :])
    return value


def accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in HALF else dtype


def reduce_rule(op: str) -> Rule:
    def rule(low: Lowering, node: Node, dims: Any = None, keepdim: bool = False, **_: Any) -> Expr:
        out, source = node.meta["val"], node.args[0].meta["val"]
        chosen = _dims(source.dim(), dims)
        x = low.values[node.args[0]]
        inner = torch.bool if row_of(op).truth else accumulator(out.dtype)
        x = (
            compute("ne", x, const(0, x.dtype), dtype=torch.bool)
            if inner is torch.bool and x.dtype is not torch.bool
            else cast(x, inner)
        )
        known = one_hot_sum(x, tuple(source.shape), chosen[0]) if op == "sum" and len(chosen) == 1 else None
        if known is not None:
            x = known
        elif product(source.shape[d] for d in chosen) != 1:
            x = reduce_to_buffer(low, node, x, chosen, op, inner)
        return cast(_drop(x, source.dim(), chosen, source.shape, keepdim), out.dtype)

    return with_arguments(rule, ("dims", "keepdim"))


def with_arguments(rule: Callable[..., Any], names: tuple[str, ...]) -> Rule:
    """Let a rule take the call's arguments after the first by name."""

    def called(low: Lowering, node: Node) -> Any:
        given = dict(zip(names, node.args[1:], strict=False)) | dict(node.kwargs)
        for long, word in (("dim", "dims"),):
            if long in given and word in names:
                given[word] = given.pop(long)
        return rule(low, node, **given)

    return called


def mean(low: Lowering, node: Node, dims: Any = None, keepdim: bool = False, **_: Any) -> Expr:
    out, source = node.meta["val"], node.args[0].meta["val"]
    chosen, inner = _dims(source.dim(), dims), accumulator(out.dtype)
    total = reduce_to_buffer(low, node, cast(low.values[node.args[0]], inner), chosen, "sum", inner)
    count = product(source.shape[d] for d in chosen)
    mean = compute("div", total, const(count, inner), dtype=inner)
    return cast(_drop(mean, source.dim(), chosen, source.shape, keepdim), out.dtype)


def _var_mean(
    low: Lowering, node: Node, dims: Any, correction: Any, keepdim: bool, dtype: torch.dtype
) -> tuple[Expr, Expr]:
    """Two passes: the mean, then the mean square of what is left; exact where one pass would cancel.

    In registers a kernel corrects the squares for the rounding of the mean; in a loop it takes them about the mean of
    the first tile, and pieces of a row are combined as Chan, Golub and LeVeque do: see passes/online.py.
    """
    source = node.args[0].meta["val"]
    chosen, inner = _dims(source.dim(), dims), accumulator(dtype)
    shape = tuple(source.shape)
    x = cast(low.values[node.args[0]], inner)
    count = product(shape[d] for d in chosen)
    total = reduce_to_buffer(low, node, x, chosen, "sum", inner)
    mean = compute("div", total, const(count, inner), dtype=inner)
    kept = tuple(1 if d in chosen else n for d, n in enumerate(shape))
    (wide,) = view([mean], Affine(shape, tuple((0, ()) if kept[d] == 1 else (0, ((d, 1),)) for d in range(len(shape)))))
    rest = compute("sub", x, wide, dtype=inner)
    squares = reduce_to_buffer(low, node, compute("mul", rest, rest, dtype=inner), chosen, "sum", inner)
    freedom = count - (1 if correction is None else int(correction) if float(correction).is_integer() else correction)
    freedom = 0 if freedom <= 0 else freedom
    var = compute("div", squares, const(freedom, inner), dtype=inner)
    drop = lambda v: cast(_drop(v, source.dim(), chosen, shape, keepdim), dtype)  # noqa: E731
    if count > 1 and not _subtracted(
        node
    ):  # eager's running mean of a row with an infinity is NaN; what it is subtracted from is NaN without more
        mean = compute("where", compute("isnan", squares, dtype=torch.bool), squares, mean, dtype=inner)
    return drop(var), drop(mean)


def _subtracted(node: Node) -> bool:
    """Whether the mean of a `var_mean` is subtracted from something: a norm, which then needs one difference, not
    two.
    """
    waiting = [n for n in node.users if n.target is operator.getitem and n.args[1] == 1]
    while waiting:
        user = waiting.pop()
        if short(user.target) == "sub.Tensor":
            return True
        waiting += user.users if user.target is operator.getitem or short(user.target) in VIEWS else ()
    return False


def var(low: Lowering, node: Node, dims: Any = None, correction: Any = None, keepdim: bool = False) -> Expr:
    return _var_mean(low, node, dims, correction, keepdim, node.meta["val"].dtype)[0]


def var_and_mean(
    low: Lowering, node: Node, dims: Any = None, correction: Any = None, keepdim: bool = False
) -> tuple[Expr, Expr]:
    return _var_mean(low, node, dims, correction, keepdim, node.meta["val"][0].dtype)


def arg(op: str) -> Rule:
    def rule(low: Lowering, node: Node, dims: Any = None, keepdim: bool = False) -> Expr:
        source = node.args[0].meta["val"]
        chosen = _dims(source.dim(), dims)
        x = cast(low.values[node.args[0]], accumulator(source.dtype))
        value = reduce_to_buffer(low, node, x, chosen, op, INDEX, place=True)
        return _drop(value, source.dim(), chosen, source.shape, keepdim)

    return with_arguments(rule, ("dims", "keepdim"))


def extremum(op: str) -> Rule:
    arg = place_of(op).name

    def rule(low: Lowering, node: Node, dims: Any = None, keepdim: bool = False) -> Any:
        source = node.args[0].meta["val"]
        chosen = _dims(source.dim(), dims)
        x = cast(low.values[node.args[0]], accumulator(source.dtype))
        value = cast(reduce_to_buffer(low, node, x, chosen, op, x.dtype), source.dtype)
        if dims is None:
            return _drop(value, source.dim(), chosen, source.shape, False)
        place = reduce_to_buffer(low, node, x, chosen, arg, INDEX, place=True)
        return tuple(_drop(v, source.dim(), chosen, source.shape, keepdim) for v in (value, place))

    return with_arguments(rule, ("dims", "keepdim"))


def is_reducible(op: str) -> Callable[[Node], bool]:
    row = row_of(op)

    def check(node: Node) -> bool:
        out, source = node.meta["val"], node.args[0].meta["val"]
        out = out[0] if isinstance(out, (tuple, list)) else out
        if not source.numel():  # of nothing: torch knows which reductions are an error
            return row.of_nothing and product(out.shape) == 0
        return row.truth or accumulator(source.dtype if row.place_of else out.dtype) in DTYPES[row.dtypes]

    return check


# -- one-hot rows ------------------------------------------------------------------------------------------------------


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
            return any(
                _is_place(i, dim) and isinstance(e, Compute) and e.op == "checked_place" and not _varies(e, dim)
                for i, e in pairs
            )
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


# -- sums by rows ------------------------------------------------------------------------------------------------------


def by_rows(x: Expr, made: Container[str]) -> bool:
    """Whether a value reads a buffer of `made` that has one element for each row of its last dimension."""
    return any(isinstance(n, Load) and not n.index and n.buffer in made and _repeated(n) for n in postorder([x]))


def _repeated(node: Load) -> bool:
    strides = node.layout.strides or (1,)
    return strides[-1] == 0 and any(strides)
