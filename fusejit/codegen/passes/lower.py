"""Lower: a functional ATen graph becomes clusters and extern calls.

In: an fx graph with fake tensors in `node.meta["val"]`. Out: `Lowered`: buffers, steps in order, outputs.

    buffer arg0 (4,6) float32 | step cluster store b0 = relu(load arg0) | output b0

Views never become steps: they move into the layouts of the loads. What no rule of `RULES` expresses becomes an extern
call.
"""

# fx types the arguments of a node as one wide union; here an op's schema says which member each one is

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ...errors import Unsupported
from ..graph.decisions import compared, dtypes, exact
from ..ir.expr import Const, Load, compute, load, postorder, view
from ..ir.graph import Buffer, Lowered, as_ref
from ..ir.layout import contiguous
from ..ir.size import hint
from ..ops.builder import Rule, Value, line_of
from ..ops.decompositions import short
from ..ops.formulas import HALF
from ..ops.rules import CHECKS
from ..ops.table import POINTWISE, RULES, STORAGE, lower_pointwise
from ..ops.views import GIVES_SHAPE, VIEWS, is_alias
from .lower_externs import ExternLowering, ProgramOf, tensors_of
from .realize import realize, worth_a_buffer


class GraphLowering(ExternLowering):
    """The walk: each node of a graph gets a value, in the graph's order."""

    def run(self, graph: Graph) -> Lowered:
        fused = {n for n in graph.nodes if n.op == "call_function" and self.fusable(n)}
        wanted = realize(graph, fused)
        self.results = frozenset(graph.output_node().all_input_nodes)
        rounded = compared(graph, fused.__contains__) if self.numerics == "fast" else set()
        placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        names = [self.placeholder(n, given) for n, given in zip(placeholders, self.given, strict=True)]
        outputs: tuple[Any, ...] = ()
        changes: list[Node] = []
        for node in graph.nodes:
            if node.op == "output":
                self.write_back(changes, [n for n in node.all_input_nodes if n not in changes])
                outputs = torch.fx.node.map_arg(tuple(node.args[0]), self.ref)
            elif node in fused and short(node.target) == "copy_.default":
                changes.append(node)
            elif node.op == "call_function":
                self.values[node] = self.lowered(node) if node in fused else self.extern(node)
                if node in rounded:
                    self.values[node] = self.rounded(node, rounded)
                self.maybe_store(node, wanted.get(node, ""))
            elif node.op == "get_attr":
                raise Unsupported(str(node.target), "a constant tensor inside the graph", line_of(node))
        return Lowered(self.buffers, tuple(names), tuple(self.steps), outputs, self.reasons)

    def rounded(self, node: Node, others: set[Node]) -> Value:
        """Return a value that is compared as its dtype holds it: rounded, unless it is one of what is rounded
        already.
        """
        value = self.values[node]
        if isinstance(value, (tuple, Load, Const)) or value is None or value.dtype not in HALF:
            return value
        operands = [n for n in node.all_input_nodes if not set(HALF).isdisjoint(dtypes(n))]
        settled = all(n in others or isinstance(self.values[n], (Load, Const)) for n in operands)
        return value if settled and exact(node) else compute("rounded", value, dtype=value.dtype)

    def write_back(self, changes: list[Node], results: list[Node]) -> None:
        """Change inputs in place, each after the last reader of its old value; what changes need of each other is
        stored first.
        """
        targets = {node.args[0].name for node in changes}
        for node in results:
            value, fake = self.values[node], node.meta.get("val")
            if isinstance(fake, torch.Tensor) and targets & self.loaded(node) and as_ref(value, self.buffers) is None:
                self.values[node] = self.store(value, fake, node, "an output that looks at a changed input")
        needs = [self.loaded(node.args[1]) & targets - {node.args[0].name} for node in changes]
        readers: dict[str, set[int]] = {
            name: {i for i, reads in enumerate(needs) if name in reads} for name in set().union(*needs)
        }
        waiting = dict(enumerate(changes))
        while waiting:
            free = [i for i, node in waiting.items() if not readers.get(node.args[0].name)]
            for i in free:
                self.values[waiting[i]] = self.lowered(waiting[i])
                del waiting[i]
            done = free
            if not free:  # they need each other, as in a swap
                done = [next(i for i in waiting if needs[i])]
                source = changes[done[0]].args[1]
                self.values[source] = self.store(
                    self.values[source], source.meta["val"], source, "an in-place change that others need"
                )
            for i in done:
                for name in needs[i]:
                    readers[name].discard(i)
                needs[i] = set()

    def loaded(self, node: Node) -> set[str]:
        """The buffers that a value is still to be computed from."""
        return {n.buffer for n in postorder([self.values[node]]) if isinstance(n, Load)}

    def placeholder(self, node: Node, given: Any) -> str | None:
        if not isinstance(given, torch.Tensor):
            self.values[node] = given
            return None
        buffer = Buffer(node.name, tuple(given.shape), tuple(given.stride()), given.dtype, given.device)
        self.buffers[node.name] = buffer
        self.values[node] = self.whole(buffer)
        self.owned.add(node)
        return node.name

    def fusable(self, node: Node) -> bool:
        """Whether an op table row or a rule expresses the node, in these dtypes and on one device."""
        name, out = short(node.target), node.meta.get("val")
        if node.target is operator.getitem:
            return True
        tensors = tensors_of(node)
        if (
            any(v.dtype not in STORAGE or v.is_sparse or v.is_quantized for v in tensors)
            or len({v.device for v in tensors}) > 1
        ):
            return False
        if name in VIEWS or name in self.rules:
            check = CHECKS.get(name)
            return check is None or check(node)
        if name not in POINTWISE or not isinstance(out, torch.Tensor):
            return False
        try:
            self.trial(node)
        except Unsupported:
            return False
        return True

    def trial(self, node: Node) -> None:
        """Try an op table row on stand-ins for its operands."""
        stand_in = lambda n: load("?", contiguous(()), n.meta["val"].dtype)  # noqa: E731
        lower_pointwise(
            short(node.target),
            node.meta["val"].dtype,
            *torch.fx.node.map_arg((node.args, node.kwargs), stand_in),
            operand_dtype(node),
        )

    def lowered(self, node: Node) -> Value:
        name = short(node.target)
        if node.target is operator.getitem:
            source, place = node.args
            if source in self.owned:
                self.owned.add(node)
            return self.values[source][place]
        if name in VIEWS:
            source, out = node.args[0], node.meta["val"]
            given = (tuple(out.shape),) if name in GIVES_SHAPE else node.args[1:]
            views = VIEWS[name](
                tuple(source.meta["val"].shape),
                *given,
                **{k: v for k, v in node.kwargs.items() if k != "memory_format"},
            )
            value = self.values[source]
            for change in views:
                (value,) = view([value], change)
            if views and tuple(views[-1].shape) != tuple(out.shape):
                raise Unsupported(
                    name, f"its shape {tuple(out.shape)} is not the view's {views[-1].shape}", line_of(node)
                )
            return value
        if name in self.rules:
            return self.rules[name](self, node)
        shape = node.meta["val"].shape
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: self.expr(n, shape))
        return lower_pointwise(name, node.meta["val"].dtype, args, kwargs, operand_dtype(node))

    def maybe_store(self, node: Node, reason: str) -> None:
        value, fake = self.values[node], node.meta.get("val")
        if not isinstance(fake, torch.Tensor) or node in self.owned or is_alias(node):
            return
        reason = reason or worth_a_buffer(value, tuple(fake.shape), readers(node))
        if reason:
            self.values[node] = self.store(value, fake, node, reason)
            self.owned.add(node)


def lower(
    module: GraphModule,
    inputs: Sequence[Any],
    rules: dict[str, Rule],
    programs: Mapping[Any, ProgramOf] = MappingProxyType({}),
    numerics: str = "fast",
) -> Lowered:
    """Return the clusters and extern calls of a functional graph.

    Args:
        inputs: the real dtypes and strides of its placeholders. programs: ops that stand for calls of Programs.
    """
    return GraphLowering(inputs, rules, programs, numerics).run(module.graph)


def operand_dtype(node: Node) -> torch.dtype | None:
    """Return torch.result_type of a comparison's operands, None for other ops."""
    row = POINTWISE.get(short(node.target))
    if row is None or RULES[row.rule] is not RULES["compare"]:
        return None
    operands = [a.meta["val"] if isinstance(a, Node) else hint(a) for a in node.args[:2]]
    return torch.result_type(*operands)


def readers(node: Node) -> int:
    """Return how many nodes compute with a value, looking through views."""
    return sum(readers(u) if short(u.target) in VIEWS else 1 for u in node.users)
