"""The table of lowering rules: reductions and generators (pieces, indexing, scatters and scans are next door), as expressions over layouts.

In: a node whose op is no plain pointwise row and no view. Out: its value; a reduction makes a buffer, everything else none.

    sum.dim_IntList(x (4,6), [1])   ->  cluster  parallel 4 | reduce 6  store b0 = sum(load x)
"""

# fx types the arguments of a node as one wide union; here an op's schema says which member each one is
# mypy: disable-error-code="union-attr,index,arg-type,operator,assignment,misc,type-var,return-value,dict-item,call-overload,attr-defined"

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from .cluster import Cluster, Expr, Load, Store, cast, compute, const, iota, postorder, random, reduction, view
from .decompose import short
from .formulas import HALF
from .indexing import INDEX, INDEXING, INDEXING_CHECKS
from .layout import Affine, Reshape, contiguous, permute, strided
from .lower import CHECKS, REFUSALS, Buffer, Lowering, Rule
from .onehot import one_hot_sum
from .ops import DTYPES, OPS
from .pieces import PIECE_CHECKS, PIECES
from .rowsums import by_rows
from .scans import SCAN_CHECKS, SCANS
from .scatter import SCATTER_CHECKS, SCATTERS, refused
from .size import Size, product
from .views import VIEWS


# -- reductions ------------------------------------------------------------------------------------------------------------------------
def reduce_to_buffer(
    low: Lowering, node: Node, x: Expr, dims: Sequence[int], op: str, dtype: torch.dtype, place: bool = False, shape: tuple[int, ...] = ()
) -> Expr:
    """Reduce `dims` of x (shaped as the node's first operand, or `shape`) and return the result with those dims kept as size 1.

    `place` gives arg-reductions the row-major position within the reduced dims.
    """
    shape = shape or tuple(node.args[0].meta["val"].shape)
    if op == "sum" and len(dims) == len(shape) > 1 and by_rows(x, low.reasons):  # rows first: they join the kernel that reduced them before
        x = reduce_to_buffer(low, node, x, [len(shape) - 1], op, dtype, shape=shape)
        shape = (*shape[:-1], 1)
    kept = [d for d in range(len(shape)) if d not in dims]
    after = tuple(1 if d in dims else n for d, n in enumerate(shape))
    (x,) = view([x], permute(shape, [*kept, *dims]))
    outer, inner = tuple(shape[d] for d in kept), tuple(shape[d] for d in dims)
    args = (x, iota(strided((*outer, *inner), [0] * len(outer) + list(contiguous(inner).strides or ())), INDEX)) if place else (x,)
    device = node.args[0].meta["val"].device
    buffer = low.buffer(after, None, dtype, device)
    low.reasons[buffer.name] = "a reduction"
    rows = strided((*outer, *inner), [*(contiguous(outer).strides or ()), *([0] * len(inner))])
    if product(outer):
        if not product(inner):
            row = OPS[op].identity
            assert row is not None
            value, inner, rows = const(row(x.dtype), dtype), (), contiguous(outer)
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
            Affine((*after[:d], *after[d + 1 :]), tuple((0, ()) if i == d else (0, ((i - (i > d), 1),)) for i in range(len(after)))),
        )
        after = (*after[:d], *after[d + 1 :])
    return value


def accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in HALF else dtype


def _reduce(op: str) -> Rule:
    def rule(low: Lowering, node: Node, dims: Any = None, keepdim: bool = False, **_: Any) -> Expr:
        out, source = node.meta["val"], node.args[0].meta["val"]
        chosen = _dims(source.dim(), dims)
        x = low.values[node.args[0]]
        inner = torch.bool if op in ("any", "all") else accumulator(out.dtype)
        x = compute("ne", x, const(0, x.dtype), dtype=torch.bool) if inner is torch.bool and x.dtype is not torch.bool else cast(x, inner)
        known = one_hot_sum(x, tuple(source.shape), chosen[0]) if op == "sum" and len(chosen) == 1 else None
        if known is not None:
            x = known
        elif product(source.shape[d] for d in chosen) != 1:
            x = reduce_to_buffer(low, node, x, chosen, op, inner)
        return cast(_drop(x, source.dim(), chosen, source.shape, keepdim), out.dtype)

    return _with_arguments(rule, ("dims", "keepdim"))


def _with_arguments(rule: Callable[..., Any], names: tuple[str, ...]) -> Rule:
    """Let a rule take the call's arguments after the first by name."""

    def called(low: Lowering, node: Node) -> Any:
        given = dict(zip(names, node.args[1:], strict=False)) | dict(node.kwargs)
        for long, word in (("dim", "dims"),):
            if long in given and word in names:
                given[word] = given.pop(long)
        return rule(low, node, **given)

    return called


def _mean(low: Lowering, node: Node, dims: Any = None, keepdim: bool = False, **_: Any) -> Expr:
    out, source = node.meta["val"], node.args[0].meta["val"]
    chosen, inner = _dims(source.dim(), dims), accumulator(out.dtype)
    total = reduce_to_buffer(low, node, cast(low.values[node.args[0]], inner), chosen, "sum", inner)
    count = product(source.shape[d] for d in chosen)
    mean = compute("div", total, const(count, inner), dtype=inner)
    return cast(_drop(mean, source.dim(), chosen, source.shape, keepdim), out.dtype)


def _var_mean(low: Lowering, node: Node, dims: Any, correction: Any, keepdim: bool, dtype: torch.dtype) -> tuple[Expr, Expr]:
    """Two passes: the mean, then the mean square of what is left; exact where one pass would cancel.

    In registers a kernel corrects the squares for the rounding of the mean; in a loop it takes them about the mean of the first tile, and
    pieces of a row are combined as Chan, Golub and LeVeque do: see online.py.
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
    """Whether the mean of a `var_mean` is subtracted from something: a norm, which then needs one difference, not two."""
    waiting = [n for n in node.users if n.target is operator.getitem and n.args[1] == 1]
    while waiting:
        user = waiting.pop()
        if short(user.target) == "sub.Tensor":
            return True
        waiting += user.users if user.target is operator.getitem or short(user.target) in VIEWS else ()
    return False


def _var(low: Lowering, node: Node, dims: Any = None, correction: Any = None, keepdim: bool = False) -> Expr:
    return _var_mean(low, node, dims, correction, keepdim, node.meta["val"].dtype)[0]


def _var_and_mean(low: Lowering, node: Node, dims: Any = None, correction: Any = None, keepdim: bool = False) -> tuple[Expr, Expr]:
    return _var_mean(low, node, dims, correction, keepdim, node.meta["val"][0].dtype)


def _arg(op: str) -> Rule:
    def rule(low: Lowering, node: Node, dims: Any = None, keepdim: bool = False) -> Expr:
        source = node.args[0].meta["val"]
        chosen = _dims(source.dim(), dims)
        x = cast(low.values[node.args[0]], accumulator(source.dtype))
        value = reduce_to_buffer(low, node, x, chosen, op, INDEX, place=True)
        return _drop(value, source.dim(), chosen, source.shape, keepdim)

    return _with_arguments(rule, ("dims", "keepdim"))


def _extremum(op: str, arg: str) -> Rule:
    def rule(low: Lowering, node: Node, dims: Any = None, keepdim: bool = False) -> Any:
        source = node.args[0].meta["val"]
        chosen = _dims(source.dim(), dims)
        x = cast(low.values[node.args[0]], accumulator(source.dtype))
        value = cast(reduce_to_buffer(low, node, x, chosen, op, x.dtype), source.dtype)
        if dims is None:
            return _drop(value, source.dim(), chosen, source.shape, False)
        place = reduce_to_buffer(low, node, x, chosen, arg, INDEX, place=True)
        return tuple(_drop(v, source.dim(), chosen, source.shape, keepdim) for v in (value, place))

    return _with_arguments(rule, ("dims", "keepdim"))


# -- generators ------------------------------------------------------------------------------------------------------------------------
def _full(value: Callable[[Node], Any]) -> Rule:
    return lambda low, node: const(value(node), node.meta["val"].dtype)


def _arange(low: Lowering, node: Node) -> Expr:
    start, end, *step = node.args if len(node.args) > 1 else (0, node.args[0])
    scale, out = step[0] if step else 1, node.meta["val"]
    inner = (
        out.dtype
        if out.dtype.is_floating_point and out.dtype is not torch.float16 and out.dtype is not torch.bfloat16
        else (torch.float64 if out.dtype.is_floating_point else INDEX)
    )
    place = cast(iota(contiguous(tuple(out.shape)), INDEX), inner)
    scaled = compute("mul", place, const(scale, inner), dtype=inner) if scale != 1 else place
    return cast(compute("add", scaled, const(start, inner), dtype=inner) if start != 0 else scaled, out.dtype)


def _prims_iota(low: Lowering, node: Node) -> Expr:
    start, step, out = node.kwargs["start"], node.kwargs["step"], node.meta["val"]
    place = compute("mul", iota(contiguous(tuple(out.shape)), INDEX), const(step, INDEX), dtype=INDEX)
    return cast(compute("add", place, const(start, INDEX), dtype=INDEX), out.dtype)


def _random(low: Lowering, node: Node) -> Expr:
    """Element k of a random tensor is number k of the stream that its own seed names: the row-major place is the counter."""
    seeds, number, kind, size = node.args
    (seed,) = view([low.values[seeds]], Affine(tuple(size), ((0, ()),)))
    seed = compute("add", seed, const(number, INDEX), dtype=INDEX) if number else seed
    return random(kind, seed, iota(contiguous(tuple(size)), INDEX), node.meta["val"].dtype)


# -- in-place results ------------------------------------------------------------------------------------------------------------------
def _copy_(low: Lowering, node: Node) -> Expr:
    """Write back what the graph changed: a store into the input's own memory, after its last reader."""
    target, source = node.args[:2]
    buffer = low.buffers[target.name]
    low.owned.add(node)
    written = low.values[source]
    if (
        isinstance(written, Load)
        and low.buffers[written.buffer].written_to == buffer.name
        and written is low.whole(low.buffers[written.buffer])
    ):
        return written  # scatter.py has written it already
    value = cast(low.expr(source, target.meta["val"].shape), buffer.dtype)
    if product(buffer.shape) and _reads_elsewhere(value, buffer):
        value = low.store(value, target.meta["val"], node, "read elsewhere in an input that the graph changes")
    made = replace(buffer, name=f"b{len(low.buffers)}", written_to=buffer.name)  # with the input's very strides, holes and all
    low.buffers[made.name] = made
    low.reasons[made.name] = "an in-place change of an input"
    if product(buffer.shape):
        low.steps.append(Cluster.build(buffer.shape, (), [Store(made.name, made.layout, value, buffer.dtype)], low.lines(node)))
    return low.whole(made)


def _reads_elsewhere(value: Expr, own: Buffer) -> bool:
    """Whether a new value of an input needs old ones other than the very element that it replaces; `write_back` orders other inputs."""
    old = [n for n in postorder([value]) if isinstance(n, Load) and n.buffer == own.name]
    return any(n.index or n.layout != own.layout for n in old)


def _is_reducible(op: str) -> Callable[[Node], bool]:
    def check(node: Node) -> bool:
        out, source = node.meta["val"], node.args[0].meta["val"]
        out = out[0] if isinstance(out, (tuple, list)) else out
        if not source.numel():  # of nothing: torch knows which reductions are an error
            return op in ("sum", "prod", "any", "all") and product(out.shape) == 0
        return (
            op in ("any", "all")
            or (accumulator(out.dtype) if op not in ("argmax", "argmin") else accumulator(source.dtype)) in DTYPES[OPS[op].dtypes]
        )

    return check


RULES: dict[str, Rule] = {
    "mean.default": _with_arguments(_mean, ("dims", "keepdim")), "mean.dim": _with_arguments(_mean, ("dims", "keepdim")),
    "var.correction": _with_arguments(_var, ("dims",)), "var_mean.correction": _with_arguments(_var_and_mean, ("dims",)),
    "argmax.default": _arg("argmax"), "argmin.default": _arg("argmin"),
    "max.dim": _extremum("amax", "argmax"), "min.dim": _extremum("amin", "argmin"),
    "max.default": _extremum("amax", "argmax"), "min.default": _extremum("amin", "argmin"),
    "full.default": _full(lambda n: n.args[1]), "full_like.default": _full(lambda n: n.args[1]),
    "scalar_tensor.default": _full(lambda n: n.args[0]),
    "zeros.default": _full(lambda n: 0), "ones.default": _full(lambda n: 1), "zeros_like.default": _full(lambda n: 0),
    "ones_like.default": _full(lambda n: 1), "empty.memory_format": _full(lambda n: 0), "empty_strided.default": _full(lambda n: 0),
    "empty_permuted.default": _full(lambda n: 0), "empty_like.default": _full(lambda n: 0), "new_empty.default": _full(lambda n: 0),
    "new_empty_strided.default": _full(lambda n: 0),
    "new_zeros.default": _full(lambda n: 0), "new_ones.default": _full(lambda n: 1), "new_full.default": _full(lambda n: n.args[2]),
    "arange.start_step": _arange, "arange.start": _arange, "arange.default": _arange, "prims.iota.default": _prims_iota,
    "fusejit.random.default": _random,
    "copy_.default": _copy_,
    "copy.default": lambda low, n: cast(low.expr(n.args[1], n.meta["val"].shape), n.meta["val"].dtype),
    **PIECES, **INDEXING, **SCATTERS, **SCANS,
}  # fmt: skip
for _op, _overloads in {
    "sum": "default dim_IntList",
    "prod": "default dim_int",
    "any": "default dim dims",
    "all": "default dim dims",
}.items():
    for _name in _overloads.split():
        RULES[f"{_op}.{_name}"] = _reduce(_op)
for _op in ("amax", "amin"):
    RULES[f"{_op}.default"] = _reduce(_op)
CHECKS |= {
    name: _is_reducible(
        {"mean": "sum", "var": "sum", "var_mean": "sum", "max": "amax", "min": "amin"}.get(name.split(".")[0], name.split(".")[0])
    )
    for name in RULES
    if name.split(".")[0] in ("mean", "var", "var_mean", "max", "min", "sum", "prod", "any", "all", "amax", "amin", "argmax", "argmin")
}
CHECKS |= {
    **PIECE_CHECKS, **INDEXING_CHECKS, **SCATTER_CHECKS, **SCAN_CHECKS,
    "copy_.default": lambda n: n.args[0].op == "placeholder",
    "arange.start_step": lambda n: all(isinstance(a, (int, Size)) or n.meta["val"].dtype.is_floating_point for a in n.args),
}  # fmt: skip
REFUSALS |= dict.fromkeys(SCATTERS, refused)
