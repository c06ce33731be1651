"""Builder: what lowering rules read operands with and make buffers, stores and clusters by.

In: nodes of a functional ATen graph and their values so far. Out: expressions, buffers, references to buffers.

    low.store(low.expr(node), node.meta["val"], node, "an output")  ->  load b0;  step cluster store b0 = ...
"""

# fx types the arguments of a node as one wide union; here an op's schema says which member each one is

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch.fx import Node

from ..ir.cluster import Cluster, Store
from ..ir.expr import Expr, Load, cast, load, view
from ..ir.graph import Buffer, Extern, Ref, apart, as_ref, dense, row_major
from ..ir.layout import expand
from ..ir.size import product
from .decompositions import short
from .views import VIEWS, is_alias

Value: TypeAlias = Any  # Expr | tuple[Value, ...] | None
Rule: TypeAlias = "Callable[[Lowering, Node], Value]"


class Lowering:
    """The state of one walk over a graph: rules read operands and make buffers by it."""

    def __init__(self, inputs: Sequence[Any], rules: dict[str, Rule], numerics: str = "fast") -> None:
        self.rules, self.given, self.numerics = rules, inputs, numerics
        self.values: dict[Node, Value] = {}
        self.buffers: dict[str, Buffer] = {}
        self.steps: list[Cluster | Extern] = []
        self.reasons: dict[str, str] = {}
        self.owned: set[Node] = set()
        self.results: frozenset[Node] = frozenset()
        self.seeds: str | None = None

    # -- buffers -------------------------------------------------------------------------------------------------------
    def buffer(
        self, shape: Sequence[int], strides: Sequence[int] | None, dtype: torch.dtype, device: torch.device, **more: Any
    ) -> Buffer:
        """Make a buffer; strides that overlap or leave holes are replaced by contiguous ones, but for a result, which
        has eager's.
        """
        shape = tuple(shape)
        keeps = apart if more.pop("result", False) else dense
        if strides is None or not keeps(shape, strides):
            strides = row_major(shape)
        made = Buffer(more.pop("name", f"b{len(self.buffers)}"), shape, tuple(strides), dtype, device, **more)
        self.buffers[made.name] = made
        return made

    def whole(self, buffer: Buffer) -> Expr:
        return load(buffer.name, buffer.layout, buffer.dtype)

    def store(self, expr: Expr, like: torch.Tensor, node: Node, reason: str, written_to: str = "") -> Expr:
        """Give a value a buffer with the shape and strides of `like`."""
        result = node in self.results and not is_alias(node)
        buffer = self.buffer(like.shape, like.stride(), like.dtype, like.device, written_to=written_to, result=result)
        self.reasons[buffer.name] = reason
        if product(buffer.shape):
            value = Store(buffer.name, buffer.layout, cast(expr, like.dtype), like.dtype)
            self.steps.append(Cluster.build(buffer.shape, (), [value], self.lines(node)))
        return self.whole(buffer)

    def lines(self, node: Node) -> tuple[str, ...]:
        """Name the ops that a buffer's value takes, back to what is in memory already, each with the user's line; in
        the graph's order.
        """
        found, waiting = {node}, [node]
        while waiting:
            for source in waiting.pop().all_input_nodes:
                value = self.values.get(source)
                in_memory = isinstance(value, Load) and not value.index and value.mask is None
                if source not in found and source.op == "call_function" and not in_memory:
                    found.add(source)
                    waiting.append(source)
        named = [
            n for n in sorted(found) if n is node or not (n.target is operator.getitem or short(n.target) in VIEWS)
        ]
        return tuple(dict.fromkeys(f"{short(n.target)}  {line_of(n)}".rstrip() for n in named))

    # -- operands ------------------------------------------------------------------------------------------------------
    def expr(self, node: Node, shape: Sequence[int] | None = None) -> Expr:
        """Return a node's value, broadcast to `shape`."""
        value, own = self.values[node], tuple(node.meta["val"].shape)
        if shape is not None and tuple(shape) != own:
            (value,) = view([value], expand(own, tuple(shape)))
        return value

    def ref(self, node: Node) -> Ref:
        """Return a node's value as an operand of torch, stored first if it lives in registers only."""
        value, fake = self.values[node], node.meta["val"]
        found = as_ref(value, self.buffers)
        if found is None:
            value = self.values[node] = self.store(value, fake, node, "an operand that no view of a buffer gives")
            found = as_ref(value, self.buffers)
            assert found is not None
        if node in self.results and found.shape is not None and tuple(fake.shape) == found.shape:
            strides = tuple(
                s if n == 1 else own for n, own, s in zip(found.shape, found.strides, fake.stride(), strict=True)
            )
            found = replace(found, strides=strides)
        return found


def line_of(node: Node) -> str:
    """Return the user's line that a node came from, as "file.py:12: code"."""
    trace = (node.meta.get("stack_trace") or "").split("Gradient addition node")[0]  # torch's own words after the line
    entries = [e for e in trace.split('File "') if e.strip()]
    if not entries:
        return ""
    head, _, code = entries[-1].partition("\n")
    name, _, rest = head.partition('", line ')
    return (
        f"{name.rsplit('/', 1)[-1]}:{rest.split(',')[0].strip()}: "
        f"{code.strip().splitlines()[0] if code.strip() else ''}"
    )
