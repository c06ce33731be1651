"""Lower: a functional ATen graph becomes clusters and extern calls.

In: an fx graph with fake tensors in `node.meta["val"]`. Out: `Lowered`: buffers, steps in order, outputs.

    buffer arg0 (4,6) float32 | step cluster store b0 = relu(load arg0) | output b0

Views never become steps: they move into the layouts of the loads. What no rule of `RULES` expresses becomes an extern
call.
"""

# fx types the arguments of a node as one wide union; here an op's schema says which member each one is

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ... import torch_private as private
from ...errors import Unsupported
from ..graph.decisions import compared, dtypes, exact
from ..ir.cluster import Cluster, Store
from ..ir.effects import effect, effect_of, in_turn
from ..ir.expr import Const, Load, cast, compute, load, postorder, view
from ..ir.graph import Buffer, Extern, Lowered, Ref, as_ref, refs
from ..ir.layout import contiguous
from ..ir.size import hint
from ..ops.builder import Lowering, Rule, Value, line_of
from ..ops.decompositions import short
from ..ops.formulas import HALF
from ..ops.rules import CHECKS, REFUSALS
from ..ops.table import POINTWISE, RULES, STORAGE, lower_pointwise
from ..ops.views import GIVES_SHAPE, VIEWS, is_alias
from .realize import realize, worth_a_buffer

ProgramOf = Callable[[Sequence[Any], list[tuple[int, ...]]], tuple[str, Any]]
"""From the arguments of an op, and the strides of its tensors, to the name of a Program and the Program."""


class GraphLowering(Lowering):
    """The walk: each node of a graph gets a value, in the graph's order."""

    def __init__(
        self,
        inputs: Sequence[Any],
        rules: dict[str, Rule],
        programs: Mapping[Any, ProgramOf] = MappingProxyType({}),
        numerics: str = "fast",
    ) -> None:
        super().__init__(inputs, rules, numerics)
        self.programs = programs

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
        tensors = _tensors(node)
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

    def extern(self, node: Node) -> Value:
        """Call the op through torch."""
        target, given, options, fake, line = (
            node.target,
            tuple(node.args),
            dict(node.kwargs),
            node.meta.get("val"),
            line_of(node),
        )
        token: tuple[Value, ...] = ()
        if (
            target is torch.ops.higher_order.with_effects
        ):  # an op with an effect, kept in its place by a token that it takes and returns
            token, target, given, fake = (self.values[given[0]],), given[1], given[2:], tuple(fake)[1:]
            fake = fake[0] if len(fake) == 1 else fake
        if target in self.programs:
            return self.call_program(node, self.programs[target])
        if target in FUNCTIONAL:
            return self.changing(node)
        if not isinstance(target, private.OpOverload):
            raise Unsupported(str(target), "no graph of ATen ops can hold it", line)
        args, kwargs = torch.fx.node.map_arg((given, options), self.ref)
        leaves = [fake] if isinstance(fake, torch.Tensor) else list(fake) if isinstance(fake, (tuple, list)) else []
        if not token and not in_turn(node) and not any(isinstance(v, torch.Tensor) for v in leaves):
            raise Unsupported(str(target), f"its result ({type(fake).__name__}) is no tensor", line)
        if sparse := next(
            (v.layout for v in leaves if isinstance(v, torch.Tensor) and v.layout is not torch.strided), None
        ):
            raise Unsupported(str(target), f"its result has layout {sparse}: only strided tensors are compiled", line)
        if target in BY_GRAD_MODE and any(user.args[1] in BY_GRAD_MODE[target] for user in node.users):
            raise Unsupported(
                str(target),
                "what its backward needs is made only where autograd records, and programs run without",
                line,
            )
        # numbers among the results were traced as constants: their readers already hold them
        made = [self.taken(v) if isinstance(v, torch.Tensor) else None for v in leaves]
        several = not isinstance(fake, torch.Tensor)
        pins = any(a.alias_info is not None for a in target._schema.arguments)
        names = tuple(b and b.name for b in made)
        why = REFUSALS[short(target)](node) if short(target) in REFUSALS else ""
        foreign = sorted({str(v.dtype).removeprefix("torch.") for v in _tensors(node) if v.dtype not in STORAGE})
        why = f"no kernel reads or writes {', '.join(foreign)}" if foreign else why
        self.steps.append(
            Extern(str(target), args, tuple(kwargs.items()), names, several, line, pins, effect=effect(target), why=why)
        )
        self.owned.add(node)
        values = tuple(None if b is None else self.whole(b) for b in made)
        if token and len(target._schema.returns) <= 1:
            return (*token, values if several else values[0] if values else None)
        return (*token, *values) if several else values[0]

    def changing(self, node: Node) -> Value:
        """Call an op that changes operands in place, on copies that torch makes of them; its results, then the
        copies.
        """
        op, options, fakes = node.args[0], node.kwargs, node.meta["val"]
        if not isinstance(op, private.OpOverload) or any(isinstance(fake, (tuple, list)) for fake in fakes):
            raise Unsupported(
                str(op),
                "it changes operands in place and returns a list, which no step of a program holds",
                line_of(node),
            )
        kwargs = torch.fx.node.map_arg(options, self.as_traced)
        made = [self.taken(fake) if isinstance(fake, torch.Tensor) else None for fake in fakes]
        names, name = tuple(b and b.name for b in made), f"higher_order.{node.target}"
        self.steps.append(
            Extern(name, (op,), tuple(kwargs.items()), names, True, line_of(node), effect=effect_of(node))
        )
        self.owned.add(node)
        return tuple(None if b is None else self.whole(b) for b in made)

    def as_traced(self, node: Node) -> Ref | Any:
        """Return an operand with the strides that it was traced with: views of it are told by offsets into its
        memory.
        """
        fake = node.meta.get("val")
        if not isinstance(fake, torch.Tensor):
            return self.values[node]
        return self.in_layout(
            node, self.ref(node), Buffer("", tuple(fake.shape), tuple(fake.stride()), fake.dtype, fake.device)
        )

    def call_program(
        self, node: Node, find: Callable[[Sequence[Any], list[tuple[int, ...]]], tuple[str, Any]]
    ) -> Value:
        """Call another Program with the operands in the layouts that it was compiled for."""
        operands = [operand for part in node.args if isinstance(part, (tuple, list)) for operand in part]
        given = [self.ref(operand) for operand in operands]
        name, program = find(
            node.args, [self.buffers[r.buffer].strides if r.shape is None else r.strides for r in given]
        )
        ready = [
            ref if wanted is None else self.in_layout(operand, ref, program.buffers[wanted])
            for operand, ref, wanted in zip(operands, given, program.inputs, strict=True)
        ]
        made = [self.taken(v) for v in node.meta["val"]]
        named = [ref.buffer for ref in refs(program.outputs)]
        pins = len({*named}) < len(named) or not {*named}.isdisjoint(program.inputs)
        met = [step.effect for part in (*program.called, program) for step in part.externs if step.effect is not None]
        most = max(met, key=lambda one: one.in_turn, default=None)
        self.steps.append(
            Extern(name, (tuple(ready),), (), tuple(b.name for b in made), True, line_of(node), pins, program, most)
        )
        self.owned.add(node)
        return tuple(self.whole(b) for b in made)

    def in_layout(self, node: Node, ref: Ref, wanted: Buffer) -> Ref:
        """Return an operand with the strides of `wanted`: itself, or a copy."""
        strides = self.buffers[ref.buffer].strides if ref.shape is None else ref.strides
        if 0 in wanted.shape or all(
            a == b or n == 1 for n, a, b in zip(wanted.shape, strides, wanted.strides, strict=True)
        ):
            return ref
        made = self.buffer(wanted.shape, wanted.strides, wanted.dtype, wanted.device)
        if made.strides != wanted.strides:
            raise Unsupported(
                short(node.target),
                f"a call takes it with the strides {wanted.strides}, which no kernel writes",
                line_of(node),
            )
        self.reasons[made.name] = "the layout that a call takes"
        value = Store(made.name, made.layout, cast(self.expr(node), wanted.dtype), wanted.dtype)
        self.steps.append(Cluster.build(made.shape, (), [value], self.lines(node)))
        return Ref(made.name)

    def taken(self, fake: torch.Tensor) -> Buffer:
        """Make the buffer that an extern call returns, with whatever strides torch gives it."""
        made = Buffer(f"b{len(self.buffers)}", tuple(fake.shape), fake.stride(), fake.dtype, fake.device)
        self.buffers[made.name] = made
        return made


def _tensors(node: Node) -> list[torch.Tensor]:
    """Return the fake tensors that a node reads and makes."""
    found = private.tree_leaves([node.meta.get("val"), [n.meta.get("val") for n in node.all_input_nodes]])
    return [v for v in found if isinstance(v, torch.Tensor)]


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


BY_GRAD_MODE = {torch.ops.aten.mkldnn_rnn_layer.default: (3,)}
"""Ops that leave a result (these, by number) out where autograd does not record at that moment."""
FUNCTIONAL = frozenset({torch.ops.higher_order.auto_functionalized, torch.ops.higher_order.auto_functionalized_v2})
"""What torch makes of calls of ops that change operands in place, where it knows nothing of them but their schema."""


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
