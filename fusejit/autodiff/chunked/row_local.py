"""Row-local: which ops of a graph treat each row of a matrix product by itself, and how such an op is written for fewer
rows.

In: a node of a functional ATen graph and the leading dimensions that number its rows. Out: the same op on a part of the
rows.

    logits (3,4,20), rows (3,4)     sum.dim_IntList(logits, [-1])   ->   on 5 rows: sum.dim_IntList(part (5,20), [1])
    logits (12,20), rows (12,)      gather(logits, 1, index)        ->   gather(part (5,20), 1, part of index (5,1))

A value of shape (*lead, *tail) has prod(lead) rows; in a part of them it has shape (rows, *tail).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.fx import Node

from ...codegen.ir.reductions import REDUCTIONS, names
from ...codegen.ops.decompositions import short
from ...codegen.ops.table import POINTWISE

aten = torch.ops.aten
Lead: TypeAlias = tuple[int, ...]
Write: TypeAlias = "Callable[[Node, Lead, int, Callable[[Node], Any]], tuple[tuple, dict]]"
"""(node, lead of its result, rows of the part, {operand: its part}) -> arguments for the part."""
RESHAPES = {
    "view.default",
    "_unsafe_view.default",
    "reshape.default",
    "unsqueeze.default",
    "squeeze.dims",
    "squeeze.dim",
}
FILLS = {"full_like.default", "zeros_like.default", "ones_like.default"}
MADE = {"full.default", "expand.default"}
SUMS = {"mean.dim", "var.correction"}  # formulas of a sum along dimensions
INDEXED = {"gather.default", "scatter.value", "scatter.src", "scatter_add.default"}
PRODUCTS = {"mm.default": 0, "addmm.default": 1}
"""Matrix products, and the operand whose rows are those of the result."""


def reduces(name: str) -> bool:
    """Whether an op reduces along dimensions that it is given, to one value."""
    return name in SUMS or any(name in names(row.along) for row in REDUCTIONS.values())


def runs(name: str) -> bool:
    """Whether an op takes one dimension, along which each row is scanned or indexed by itself."""
    scans = (row.scan for row in REDUCTIONS.values())
    return name in INDEXED or any(scan and not scan.places and name == scan.aten for scan in scans)


class NotLocal(Exception):
    """An op that needs all rows, and why."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a matrix product: their number, and the columns of each."""

    count: int
    columns: int

    def lead(self, node: Node) -> Lead | None:
        """Return the leading dimensions of a value that number its rows; None where none do."""
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return None
        total = 1
        for place, n in enumerate(value.shape):
            total *= n
            if total == self.count:
                return tuple(value.shape[: place + 1])
            if total > self.count:
                return None
        return None

    def wide(self, node: Node) -> bool:
        """Whether a value has as many elements a row as the product."""
        value = node.meta.get("val")
        return (
            isinstance(value, torch.Tensor)
            and value.numel() >= self.count * self.columns
            and self.lead(node) is not None
        )


def tail(node: Node, lead: Lead) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape[len(lead) :])


def operands(node: Node) -> list[Node]:
    """The tensors that a node computes with."""
    return [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]


def local(node: Node, rows: Rows, region: set[Node]) -> Lead:
    """Return the lead of a node that treats rows by themselves.

    Args:
        region: nodes whose values have their rows as `rows.lead` says; all others come from outside.

    Raises:
        NotLocal: it does not.
    """
    name, lead = short(node.target), rows.lead(node)
    if lead is None or node.op != "call_function":
        raise NotLocal(f"{name} needs all rows at once")
    inside = [n for n in operands(node) if n in region]
    if name in PRODUCTS:
        place = PRODUCTS[name]
        others = [n for i, n in enumerate(node.args) if i != place]
        if len(lead) != 1 or any(n in region for n in others):
            raise NotLocal(f"{name} of two values of the rows")
        return lead
    if name in RESHAPES:
        return lead
    if reduces(name):
        own = rows.lead(inside[0]) if inside else None
        if own is None or own != lead or any(d < len(own) for d in _dims(node)):
            raise NotLocal(f"{name} reduces along the rows")
        return lead
    if runs(name) and _dim(node) >= len(lead) or name in POINTWISE or name in FILLS or name in MADE:
        for operand in operands(node):
            numbered(operand, lead, node)
        if any(rows.lead(n) != lead or n.meta["val"].dim() != node.meta["val"].dim() for n in inside):
            raise NotLocal(f"{name} lines up rows with something else")
        return lead
    raise NotLocal(f"{name} needs more than one row at a time")


def numbered(operand: Node, lead: Lead, node: Node) -> bool:
    """Whether an operand from outside has a value for each row of a node (else one for all of them); neither is an
    error.
    """
    shape = (1,) * (node.meta["val"].dim() - operand.meta["val"].dim()) + tuple(operand.meta["val"].shape)
    own = shape[: len(lead)]
    if own == lead and math.prod(lead) > 1:
        return True
    if all(n == 1 for n in own):
        return False
    raise NotLocal(f"{short(node.target)} repeats an operand along a part of the rows")


def _dims(node: Node) -> list[int]:
    given: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    rank = node.args[0].meta["val"].dim()  # type: ignore[union-attr]
    found = [given] if isinstance(given, int) else list(given or range(rank))
    return [d % rank for d in found]


def _dim(node: Node) -> int:
    return int(node.args[1]) % node.args[0].meta["val"].dim()  # type: ignore[arg-type,union-attr]


def share(operand: Node, node: Node, rows: Rows) -> tuple[str, tuple[int, ...]]:
    """Return how an operand from outside is given to a part: "rows" or "all", and the shape of one row of it or of the
    whole.
    """
    name, value, lead = short(node.target), operand.meta["val"], rows.lead(node)
    assert lead is not None, "row-local"
    if name in PRODUCTS:
        return ("rows", tuple(value.shape[1:])) if node.args[PRODUCTS[name]] is operand else ("all", tuple(value.shape))
    if name in RESHAPES:
        own = rows.lead(operand)
        assert own is not None, "row-local"
        return "rows", tail(operand, own)
    shape = (1,) * (node.meta["val"].dim() - value.dim()) + tuple(value.shape)
    if numbered(operand, lead, node):
        return "rows", shape[len(lead) :]
    return "all", tuple(value.shape) if value.dim() <= len(shape) - len(lead) else shape[len(lead) :]


def arguments(node: Node, lead: Lead, rows: int, part: Callable[[Node], Any]) -> tuple[Any, tuple, dict]:
    """Return an op and its arguments that do for a part of the rows what a row-local node does for all."""
    name, target = short(node.target), node.target
    own = [rows, *tail(node, lead)]
    if name in RESHAPES:
        return aten.view.default, (part(node.args[0]), own), {}  # type: ignore[arg-type]
    if name == "expand.default":
        return target, (part(node.args[0]), own), {}  # type: ignore[arg-type]
    if name == "full.default":
        return target, (own, *node.args[1:]), dict(node.kwargs)
    args, named = torch.fx.node.map_arg((node.args, dict(node.kwargs)), part)
    kwargs = {k: v for k, v in named.items() if k != "memory_format"}
    if reduces(name):
        moved: Any = [d - len(lead) + 1 for d in _dims(node)]
        given = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
        args = (args[0], moved[0] if isinstance(given, int) else moved, *args[2:])
        kwargs.pop("dim", None)
    if runs(name):
        args = (args[0], _dim(node) - len(lead) + 1, *args[2:])
    return target, args, kwargs


def columns_of(node: Node, rows: Rows, region: set[Node]) -> str:
    """Return how a node adds up what rows have in each column, or all of it: "left" or "right" of a product, "sum",
    "mean", or "".
    """
    name, args = short(node.target), _list(node.args)
    if name == "mm.default":
        one, two = args
        if turned(one) and one.args[0] in region and two not in region and first_size(two) == rows.count:
            return "left"
        if two in region and turned(one) and one.args[0] not in region and first_size(two) == rows.count:
            return "right"
    if not args or args[0] not in region:
        return ""
    if name in ("sum.default", "mean.default"):
        return name.removesuffix(".default")
    lead = rows.lead(args[0])
    return (
        "sum"
        if name == "sum.dim_IntList" and lead is not None and sorted(_dims(node)) == list(range(len(lead)))
        else ""
    )


def turned(node: Any) -> bool:
    """Whether a node is a matrix with rows and columns exchanged."""
    if not isinstance(node, Node) or node.op != "call_function":
        return False
    return (
        short(node.target) == "t.default" or short(node.target) == "permute.default" and _list(node.args[1]) == [1, 0]
    )


def _list(values: Any) -> list[Any]:
    """A node's arguments, each of which its op's schema says what it is."""
    return list(values)


def first_size(node: Any) -> int:
    return int(node.meta["val"].shape[0])
