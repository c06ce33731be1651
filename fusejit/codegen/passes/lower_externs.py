"""Lower externs: a node that no kernel computes becomes a call, of torch or of another Program.

In: a node whose operands are lowered. Out: an `Extern` step, and the buffers that it makes.

    %mm = aten.mm(%x, %w)   ->   step extern aten.mm.default(b0, b1) -> b2
"""

# fx types the arguments of a node as one wide union; here an op's schema says which member each one is

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import Node

from ... import torch_private as private
from ...errors import Unsupported
from ..ir.cluster import Cluster, Store
from ..ir.effects import effect, effect_of, in_turn
from ..ir.expr import cast
from ..ir.graph import Buffer, Extern, Ref, refs
from ..ops.builder import Lowering, Rule, Value, line_of
from ..ops.decompositions import short
from ..ops.rules import REFUSALS
from ..ops.table import STORAGE

ProgramOf = Callable[[Sequence[Any], list[tuple[int, ...]]], tuple[str, Any]]
"""From the arguments of an op, and the strides of its tensors, to the name of a Program and the Program."""
BY_GRAD_MODE = {torch.ops.aten.mkldnn_rnn_layer.default: (3,)}
"""Ops that leave a result (these, by number) out where autograd does not record at that moment."""
FUNCTIONAL = frozenset({torch.ops.higher_order.auto_functionalized, torch.ops.higher_order.auto_functionalized_v2})
"""What torch makes of calls of ops that change operands in place, where it knows nothing of them but their schema."""


class ExternLowering(Lowering):
    """Lowering of what stands between kernels: operands in memory, in the layout that a call takes."""

    def __init__(
        self,
        inputs: Sequence[Any],
        rules: dict[str, Rule],
        programs: Mapping[Any, ProgramOf] = MappingProxyType({}),
        numerics: str = "fast",
    ) -> None:
        super().__init__(inputs, rules, numerics)
        self.programs = programs

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
        foreign = sorted({str(v.dtype).removeprefix("torch.") for v in tensors_of(node) if v.dtype not in STORAGE})
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


def tensors_of(node: Node) -> list[torch.Tensor]:
    """Return the fake tensors that a node reads and makes."""
    found = private.tree_leaves([node.meta.get("val"), [n.meta.get("val") for n in node.all_input_nodes]])
    return [v for v in found if isinstance(v, torch.Tensor)]
