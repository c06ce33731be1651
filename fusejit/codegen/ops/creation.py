"""Creation: lowering rules of ops that make tensors from numbers: fills, ranges, random draws.

In: a node like full, arange or fusejit.random. Out: its value, an expression of coordinates; no buffer.

    arange(2, 10, 2)   ->  add(mul(iota, 2), 2)
"""

# fx types the arguments of a node as one wide union; here an op's schema says which member each one is

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from ..ir.expr import Expr, cast, compute, const, iota, random, view
from ..ir.layout import Affine, contiguous
from .builder import Lowering, Rule
from .gather import INDEX


def full(value: Callable[[Node], Any]) -> Rule:
    return lambda low, node: const(value(node), node.meta["val"].dtype)


def arange(low: Lowering, node: Node) -> Expr:
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


def prims_iota(low: Lowering, node: Node) -> Expr:
    start, step, out = node.kwargs["start"], node.kwargs["step"], node.meta["val"]
    place = compute("mul", iota(contiguous(tuple(out.shape)), INDEX), const(step, INDEX), dtype=INDEX)
    return cast(compute("add", place, const(start, INDEX), dtype=INDEX), out.dtype)


def random_rule(low: Lowering, node: Node) -> Expr:
    """Element k of a random tensor is number k of the stream that its own seed names: the row-major place is the
    counter.
    """
    seeds, number, kind, size = node.args
    (seed,) = view([low.values[seeds]], Affine(tuple(size), ((0, ()),)))
    seed = compute("add", seed, const(number, INDEX), dtype=INDEX) if number else seed
    return random(kind, seed, iota(contiguous(tuple(size)), INDEX), node.meta["val"].dtype)
