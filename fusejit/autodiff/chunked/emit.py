"""Emit: a region of row-local ops written as calls of one body, one for each part of the rows.

In: the nodes of a region (chunk.py), its sums over rows and what others read of it. Out: calls of `fusejit.rows` in the
same graph, and what stands for each result: the rows of all parts one after the other, or a sum that goes from call to
call.

    %rows = fusejit.rows([h[0:2048], w, target[0:2048]], ..)                 -> loss of each row, dh, dw
    %rows_1 = fusejit.rows([h[2048:4096], w, target[2048:4096], dw], ..)
        -> loss of each row, dh, the same dw with more in it
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ...codegen.ops.decompositions import short
from .chunk_op import CALLS, ROWS, keep
from .row_local import Rows, arguments, columns_of, share

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Given:
    """An operand from outside: a node, whether each part takes its own "rows" of it or "all", and the shape of a row,
    or of the whole.
    """

    node: Node
    kind: str
    shape: tuple[int, ...]


class Parts:
    """Writes bodies and their calls for `each` rows at a time."""

    def __init__(
        self, graph: Graph, rows: Rows, each: int, place: dict[Node, int], compiler: Callable, flavour: str
    ) -> None:  # fmt: skip
        self.graph, self.rows, self.each, self.place = graph, rows, each, place
        self.compiler, self.flavour = compiler, flavour

    def write(
        self,
        region: set[Node],
        sums: set[Node],
        exits: list[Node],
        tangent: Node | None = None,
        late: AbstractSet[Node] = frozenset(),
    ) -> None:
        """Write a region, and let others read the calls' results.

        Args:
            tangent: the gradient of the one result, taken for one here; `late` results are multiplied by it.
        """
        order = sorted(region, key=lambda n: self.place.get(n, 0))
        ends = sorted(sums, key=self.place.__getitem__)
        given = self.operands(order, ends)
        with self.graph.inserting_before(self.graph.output_node()):
            copies: dict[Node, Node] = {}
            for_one = {g.node: self.for_one(g.node, tangent, late, copies) for g in given}
            found = self.calls(order, ends, exits, given, for_one)
            made = {}
            for node, value in found.items():
                value = self.shaped(value, node)  # first: what waits for the backward is as small as can be
                made[node] = value if tangent is None or node not in late else self.scaled(value, tangent)
        for node, value in made.items():
            node.replace_all_uses_with(value)

    # -- operands
    def operands(self, order: list[Node], sums: list[Node]) -> list[Given]:
        """Return what comes from outside, each once."""
        inside = set(order)
        found: dict[Given, None] = {}
        for node in order:
            for operand in node.all_input_nodes:
                if operand not in inside and isinstance(operand.meta.get("val"), torch.Tensor):
                    found[self.given(operand, node)] = None
        for node in sums:
            other = {"left": 1, "right": 0}.get(columns_of(node, self.rows, inside))
            if other is not None:
                found[self.beside(node, other)] = None
        return list(found)

    def given(self, operand: Node, node: Node) -> Given:
        return Given(operand, *share(operand, node, self.rows))

    def beside(self, node: Node, place: int) -> Given:
        """The other matrix of a product that adds up rows."""
        other: Any = node.args[place]
        other = other if place else other.args[0]
        return Given(other, "rows", tuple(other.meta["val"].shape[1:]))

    def for_one(self, node: Node, tangent: Node | None, late: AbstractSet[Node], copies: dict[Node, Node]) -> Node:
        """Return a node as it is for a gradient of one."""
        if tangent is None or node not in late:
            return node
        waiting = [node]
        while waiting:
            last = waiting[-1]
            needed = [n for n in last.all_input_nodes if n in late and n not in copies]
            if needed and last is not tangent:
                waiting += needed
                continue
            waiting.pop()
            if last in copies:
                continue
            value = last.meta["val"]
            if last is tangent:
                options = {"dtype": value.dtype, "device": value.device}
                copies[last] = self.call(aten.full.default, (list(value.shape), 1), options, value)
            else:
                copies[last] = self.graph.node_copy(last, lambda n: copies.get(n, n))
        return copies[node]

    # -- calls
    def calls(
        self, order: list[Node], sums: list[Node], exits: list[Node], given: list[Given], early: dict[Node, Node]
    ) -> dict[Node, Node]:  # fmt: skip
        """Write the calls; returns what stands for each exit, whole, and for each sum."""
        flat = {g: self.flat(early[g.node], g.shape) for g in given if g.kind == "rows"}
        shared = {g: self.viewed(early[g.node], g.shape) for g in given if g.kind == "all"}
        pieces: dict[Node, list[Node]] = {n: [] for n in exits}
        totals: list[Node] = []
        for start in range(0, self.rows.count, self.each):
            end = min(start + self.each, self.rows.count)
            inputs = [self.slice(flat[g], start, end) if g.kind == "rows" else shared[g] for g in given] + totals
            values = [node.meta["val"] for node in inputs]
            body = self.body(order, sums, exits, given, end - start, values, bool(start))
            key = keep(body, values, self.compiler, self.flavour)
            fakes = [n.meta["val"] for n in body.graph.output_node().args[0]]  # type: ignore[union-attr]
            call = self.call(ROWS, (inputs, key, next(CALLS)), {}, fakes)
            made = [self.call(operator.getitem, (call, place), {}, value) for place, value in enumerate(fakes)]
            for node, piece in zip(exits, made, strict=False):
                pieces[node].append(piece)
            totals = made[len(exits) :]
        whole = {
            n: self.call(aten.cat.default, (found, 0), {}) if len(found) > 1 else found[0]
            for n, found in pieces.items()
        }
        return whole | dict(zip(sums, totals, strict=True))

    def body(
        self,
        order: list[Node],
        sums: list[Node],
        exits: list[Node],
        given: list[Given],
        rows: int,
        values: list[Any],
        more: bool,
    ) -> GraphModule:
        """Return the graph of one part; with `more`, sums of the parts before are its last inputs."""
        graph = Graph()
        inputs = [graph.placeholder(f"input_{place}") for place in range(len(values))]
        for node, value in zip(inputs, values, strict=True):
            node.meta["val"] = value
        outside, before = dict(zip(given, inputs, strict=False)), inputs[len(given) :]
        made: dict[Node, Node] = {}
        inside = set(order)

        def add(like: Node, target: Any, args: tuple, kwargs: dict | None = None) -> Node:
            node = graph.call_function(target, args, kwargs or {})
            node.meta["val"] = self.value(target, args, kwargs or {})
            node.meta["stack_trace"] = like.meta.get("stack_trace")
            return node

        for node in order:
            lead = self.rows.lead(node)
            assert lead is not None
            part = lambda n, node=node: made[n] if n in inside else outside[self.given(n, node)]  # noqa: E731
            made[node] = add(node, *arguments(node, lead, rows, part))
        totals = []
        for number, node in enumerate(sums):
            total = self.total(
                node,
                made,
                outside,
                inside,
                lambda target, args, kwargs=None, node=node: add(node, target, args, kwargs),
            )
            if total.meta["val"].dtype in HALF:  # many parts would add up their rounding
                total = add(node, aten._to_copy.default, (total,), {"dtype": torch.float32})
            if more:
                total = add(node, aten.add.Tensor, (before[number], total))
                total = add(node, aten.copy_.default, (before[number], total))
            totals.append(total)
        graph.output((*(made[n] for n in exits), *totals))
        return GraphModule(torch.nn.Module(), graph)

    def total(
        self, node: Node, made: dict[Node, Node], outside: dict[Given, Node], inside: set[Node], add: Callable
    ) -> Node:
        """Write the sum of one part's rows."""
        how = columns_of(node, self.rows, inside)
        one, two = (*node.args, None)[:2]
        turn = lambda x: add(aten.permute.default, (x, [1, 0]))  # noqa: E731
        if how == "left":
            found = add(aten.mm.default, (turn(made[one.args[0]]), outside[self.beside(node, 1)]))  # type: ignore[index,union-attr]
        elif how == "right":
            found = add(aten.mm.default, (turn(outside[self.beside(node, 0)]), made[two]))  # type: ignore[index]
        else:
            kwargs = {"dtype": torch.float32} if made[one].meta["val"].dtype in HALF else {}  # type: ignore[index]
            whole = short(node.target) != "sum.dim_IntList"
            total = aten.sum.default if whole else aten.sum.dim_IntList
            found = add(total, (made[one], *([] if whole else [[0]])), kwargs)  # type: ignore[index]
            if how == "mean":
                found = add(aten.div.Tensor, (found, one.meta["val"].numel()))  # type: ignore[union-attr]
        return found  # type: ignore[no-any-return]

    # -- nodes of the graph
    def call(self, target: Any, args: tuple, kwargs: dict | None = None, value: Any = None) -> Node:
        node = self.graph.call_function(target, args, kwargs or {})
        node.meta["val"] = self.value(target, args, kwargs or {}) if value is None else value
        return node

    def value(self, target: Any, args: tuple, kwargs: dict) -> Any:
        given, named = torch.fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        mode = next(n.meta["val"].fake_mode for n in self.place if isinstance(n.meta.get("val"), torch.Tensor))
        with mode, torch.no_grad():
            return target(*given, **named)

    def viewed(self, node: Node, shape: tuple[int, ...]) -> Node:
        """See a node's value in another shape; a copy where its memory does not allow it."""
        if tuple(node.meta["val"].shape) == tuple(shape):
            return node
        try:
            return self.call(aten.view.default, (node, list(shape)))
        except (RuntimeError, ValueError):
            node = self.call(aten.clone.default, (node,), {"memory_format": torch.contiguous_format})
            return self.call(aten.view.default, (node, list(shape)))

    def flat(self, node: Node, row: tuple[int, ...]) -> Node:
        return self.viewed(node, (self.rows.count, *row))

    def slice(self, node: Node, start: int, end: int) -> Node:
        return node if end - start == self.rows.count else self.call(aten.slice.Tensor, (node, 0, start, end))

    def scaled(self, value: Node, tangent: Node) -> Node:
        number = self.viewed(tangent, ())
        return self.call(aten.mul.Tensor, (value, number))

    def shaped(self, value: Node, node: Node) -> Node:
        """Give a result the shape and dtype of what it stands for."""
        wanted = node.meta["val"]
        if value.meta["val"].dtype is not wanted.dtype:
            value = self.call(aten._to_copy.default, (value,), {"dtype": wanted.dtype})
        value = self.viewed(value, tuple(wanted.shape))
        value.meta["stack_trace"] = node.meta.get("stack_trace")
        return value
