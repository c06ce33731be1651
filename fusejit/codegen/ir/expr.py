"""Expressions: what a kernel computes of one element, as an interned DAG.

In: ops on layouts. Out: `Load`, `Compute`, `Reduce` and their kin, whose leaves hold one layout each.

    >>> print(compute("add", load("x", row, torch.float32), const(1, torch.float32), dtype=torch.float32).op)
    add

Nodes are interned: structural equality is identity, and a rewrite walks a DAG once.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from .layout import Computed, Layout, View, apply
from .size import Size

_INTERNED: weakref.WeakValueDictionary[tuple, Node] = weakref.WeakValueDictionary()


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Node:
    """Base of all expressions. Nodes are interned: structural equality is identity, so a DAG is never walked twice."""

    dtype: torch.dtype


@dataclass(frozen=True, slots=True, eq=False)
class Const(Node):
    """A Python number, or a size."""

    value: Any


@dataclass(frozen=True, slots=True, eq=False)
class Iota(Node):
    """The natural numbers seen through a layout: its value at a coordinate is the layout's offset there."""

    layout: Layout


@dataclass(frozen=True, slots=True, eq=False)
class Load(Node):
    """An element of `buffer` at `layout`'s offset plus the sum of `index` (expression, stride) terms.

    Where `mask` (a bool expression) is false nothing is read and the value is `fill`.
    """

    buffer: str
    layout: Layout
    index: tuple[tuple[Expr, int], ...] = ()
    mask: Expr | None = None
    fill: bool | int | float = 0


@dataclass(frozen=True, slots=True, eq=False)
class Compute(Node):
    """A pointwise op of the op table; `args` already have the dtypes that the op wants."""

    op: str
    args: tuple[Expr, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Reduce(Node):
    """A reduction of the op table over all reduce axes of the cluster; arg-reductions have args (value, index)."""

    op: str
    args: tuple[Expr, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Scan(Node):
    """A running reduction of the op table along the whole row: up to each place, or with `reverse` from each place on.

    `place` counts along the row. Ops that end in "_at" give the place of a running maximum or minimum.
    """

    op: str
    source: Expr
    place: Expr
    reverse: bool


@dataclass(frozen=True, slots=True, eq=False)
class Segment(Node):
    """A reduction of the op table over each segment of the row: over the reduce axes along which `number`, an Iota,
    stands still.
    """

    op: str
    source: Expr
    number: Expr


@dataclass(frozen=True, slots=True, eq=False)
class Random(Node):
    """A number of a counter-based generator: `kind` (rand, randn), `seed` an int64 expression, `offset` the counter."""

    kind: str
    seed: Expr
    offset: Expr


Expr: TypeAlias = "Const | Iota | Load | Compute | Reduce | Scan | Segment | Random"
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2)


def _intern(cls: type, dtype: torch.dtype, *fields: object) -> Expr:
    key = (cls, dtype, *(f if not isinstance(f, (bool, int, float)) else (type(f), repr(f)) for f in fields))
    node: Any = _INTERNED.get(key)
    if node is None:
        node = _INTERNED[key] = cls(dtype, *fields)
    return node


def const(value: bool | int | float | Size, dtype: torch.dtype) -> Expr:
    """Return `value` as a constant of `dtype`, wrapped or rounded as a cast in torch would."""
    if isinstance(value, Size):
        return _intern(Const, dtype, value)
    if dtype is torch.bool:
        return _intern(Const, dtype, bool(value))
    if dtype in FLOATS:
        value = float(value)
        if dtype is not torch.float64 and math.isfinite(value) and value:
            value = float(torch.tensor(value, dtype=dtype)) if dtype is not torch.float32 else _float32(value)
        return _intern(Const, dtype, value)
    number = int(value)
    bits = torch.iinfo(dtype).bits
    number &= (1 << bits) - 1
    return _intern(Const, dtype, number if number <= torch.iinfo(dtype).max else number - (1 << bits))


def _float32(value: float) -> float:
    # float() of the nearest float32, without a tensor: the renderer prints it with enough digits to round back
    return float(torch.tensor(value, dtype=torch.float32)) if abs(value) > 1e38 else value


def iota(layout: Layout, dtype: torch.dtype = torch.int64) -> Expr:
    return _intern(Iota, dtype, layout)


def load(
    buffer: str,
    layout: Layout,
    dtype: torch.dtype,
    index: tuple[tuple[Expr, int], ...] = (),
    mask: Expr | None = None,
    fill: float = 0,
) -> Expr:
    return _intern(Load, dtype, buffer, layout, index, mask, fill)


def compute(op: str, *args: Expr, dtype: torch.dtype) -> Expr:
    """Return op(args) of `dtype`; the args must already have the dtypes that the op wants."""
    return _intern(Compute, dtype, op, args)


def reduction(op: str, *args: Expr, dtype: torch.dtype) -> Expr:
    return _intern(Reduce, dtype, op, args)


def scan(op: str, source: Expr, place: Expr, reverse: bool, dtype: torch.dtype) -> Expr:
    return _intern(Scan, dtype, op, source, place, reverse)


def segment(op: str, source: Expr, number: Expr, dtype: torch.dtype) -> Expr:
    return _intern(Segment, dtype, op, source, number)


def random(kind: str, seed: Expr, offset: Expr, dtype: torch.dtype) -> Expr:
    return _intern(Random, dtype, kind, seed, offset)


def cast(x: Expr, dtype: torch.dtype) -> Expr:
    """Return `x` converted to `dtype`; constants are converted at once."""
    if x.dtype is dtype:
        return x
    if isinstance(x, Const) and (
        isinstance(x.value, Size) or dtype in FLOATS or dtype is torch.bool or math.isfinite(x.value)
    ):
        return const(x.value, dtype)
    return compute("cast", x, dtype=dtype)


def children(node: Expr) -> tuple[Expr, ...]:
    match node:
        case Compute() | Reduce():
            return node.args
        case Load():
            return (*(e for e, _ in node.index), *((node.mask,) if node.mask is not None else ()))
        case Random():
            return (node.seed, node.offset)
        case Scan():
            return (node.source, node.place)
        case Segment():
            return (node.source, node.number)
    return ()


def postorder(roots: Iterable[Expr], below: Callable[[Expr], tuple[Expr, ...]] = children) -> list[Expr]:
    """Return every node under `roots` once, operands first; iterative, since chains of thousands of ops are common."""
    seen: set[Expr] = set()
    order: list[Expr] = []
    stack: list[tuple[Expr, bool]] = [(r, False) for r in reversed(list(roots))]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(c, False) for c in reversed(below(node)) if c not in seen]
    return order


def rewrite(roots: Sequence[Expr], visit: Callable[[Expr], Expr]) -> list[Expr]:
    """Return `roots` with `visit` applied to every node after its operands were rewritten."""
    new: dict[Expr, Expr] = {}
    for node in postorder(roots):
        new[node] = visit(_rebuild(node, new))
    return [new[r] for r in roots]


def substitute(roots: Sequence[Expr], table: dict[Expr, Expr]) -> list[Expr]:
    """Return `roots` with the nodes of `table` replaced, whatever lies below them."""
    new = dict(table)
    for node in postorder(roots, lambda n: () if n in table else children(n)):
        if node not in new:
            new[node] = _rebuild(node, new)
    return [new[r] for r in roots]


def _rebuild(node: Expr, new: dict[Expr, Expr]) -> Expr:
    match node:
        case Compute() | Reduce():
            args = tuple(new[a] for a in node.args)
            return node if args == node.args else _intern(type(node), node.dtype, node.op, args)
        case Load() if node.index or node.mask is not None:
            index = tuple((new[e], s) for e, s in node.index)
            mask = new[node.mask] if node.mask is not None else None
            return load(node.buffer, node.layout, node.dtype, index, mask, node.fill)
        case Random():
            return random(node.kind, new[node.seed], new[node.offset], node.dtype)
        case Scan():
            return scan(node.op, new[node.source], new[node.place], node.reverse, node.dtype)
        case Segment():
            return segment(node.op, new[node.source], new[node.number], node.dtype)
    return node


def view(roots: Sequence[Expr], change: View) -> list[Expr]:
    """Return `roots` seen through a view: it moves into the layouts of the leaves, and what refuses becomes a computed
    coordinate.
    """
    return rewrite(roots, lambda node: _view_leaf(node, change))


def _view_leaf(node: Expr, change: View) -> Expr:
    if isinstance(node, Iota):
        layout, rest = apply(node.layout, change)
        value = iota(layout, node.dtype)
        for term in rest:
            digit = cast(computed(term), node.dtype)
            value = compute(
                "add", value, compute("mul", digit, const(term.stride, node.dtype), dtype=node.dtype), dtype=node.dtype
            )
        return value
    if isinstance(node, Load):
        layout, rest = apply(node.layout, change)
        index = (*node.index, *((computed(term), term.stride) for term in rest))
        return load(node.buffer, layout, node.dtype, index, node.mask, node.fill)
    return node


def computed(term: Computed) -> Expr:
    """Return a view's computed coordinate as an expression over an Iota (never negative, so `//` and `%` need no
    floor).
    """
    value = iota(term.coordinate)
    if term.divisor != 1:
        value = compute("index_div", value, const(term.divisor, torch.int64), dtype=torch.int64)
    if term.extent is not None:
        value = compute("index_mod", value, const(term.extent, torch.int64), dtype=torch.int64)
    return value


def leaves(roots: Iterable[Expr]) -> list[Load | Iota]:
    return [n for n in postorder(roots) if isinstance(n, (Load, Iota))]
