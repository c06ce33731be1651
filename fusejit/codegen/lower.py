"""Lower: a functional ATen graph becomes clusters and extern calls.

In: an fx graph with fake tensors in `node.meta["val"]`. Out: `Lowered`: buffers, steps in order, outputs.

    buffer arg0 (4,6) float32 | step cluster store b0 = relu(load arg0) | output b0

Views never become steps: they move into the layouts of the loads. What no rule of `RULES` expresses becomes an extern call.
"""

# fx types the arguments of a node as one wide union; here an op's schema says which member each one is
# mypy: disable-error-code="union-attr,index,arg-type,operator,assignment,misc,type-var,return-value,dict-item,call-overload,attr-defined"

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.fx import Graph, GraphModule, Node

from ..errors import Unsupported
from .cluster import Cluster, Expr, Load, Store, cast, load, postorder, view
from .decompose import short
from .layout import Layout, contiguous, expand, strided
from .ops import POINTWISE, RULES, STORAGE, lower_pointwise
from .pattern import Foreach
from .realize import is_alias, realize, worth_a_buffer
from .size import AnySize, hint, product
from .views import GIVES_SHAPE, VIEWS


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory that kernels read and write. `written_to` names the buffer, an input for one, whose memory it overwrites in place."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    written_to: str = ""

    @property
    def layout(self) -> Layout:
        return strided(self.shape, self.strides)

    @property
    def bytes(self) -> int:
        return extent(self.shape, self.strides) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Ref:
    """A buffer as an operand of torch: whole, or seen with other sizes, strides and an offset."""

    buffer: str
    shape: tuple[int, ...] | None = None
    strides: tuple[int, ...] = ()
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Extern:
    """A call of a torch op, or of another Program. `outputs` are buffer names (None: unused); `several`: the op returns a sequence.

    `pins`: results may share memory with operands or each other, so that no kernel may write over either. `draws`: random numbers, in turn.
    `why`: what a kernel of this call would need, where kernels of others exist.
    """

    target: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outputs: tuple[str | None, ...]
    several: bool
    line: str
    pins: bool = False
    program: Any = field(default=None, compare=False)
    draws: bool = False
    why: str = ""

    @property
    def reads(self) -> frozenset[str]:
        return frozenset(ref.buffer for ref in refs((self.args, self.kwargs)))


@dataclass(frozen=True, slots=True)
class Lowered:
    buffers: dict[str, Buffer]
    inputs: tuple[str | None, ...]
    steps: tuple[Cluster | Extern | Foreach, ...]
    outputs: tuple[Any, ...]
    reasons: dict[str, str]

    def __str__(self) -> str:
        lines = [
            f"buffer {b.name} {b.shape} {str(b.dtype).removeprefix('torch.')} {self.reasons.get(b.name, '')}" for b in self.buffers.values()
        ]
        return "\n".join([*lines, *(str(s) for s in self.steps), f"outputs {self.outputs}"])


Value: TypeAlias = Any  # Expr | tuple[Value, ...] | None
Rule: TypeAlias = "Callable[[Lowering, Node], Value]"


class Lowering:
    """The state of one walk over a graph. Rules get it to read operands and to make buffers."""

    def __init__(self, inputs: Sequence[Any], rules: dict[str, Rule]) -> None:
        self.rules, self.given = rules, inputs
        self.values: dict[Node, Value] = {}
        self.buffers: dict[str, Buffer] = {}
        self.steps: list[Cluster | Extern] = []
        self.reasons: dict[str, str] = {}
        self.owned: set[Node] = set()
        self.seeds: str | None = None

    # -- buffers -----------------------------------------------------------------------------------------------------------------------
    def buffer(self, shape: Sequence[int], strides: Sequence[int] | None, dtype: torch.dtype, device: torch.device, **more: Any) -> Buffer:
        """Make a buffer; strides that overlap or leave holes are replaced by contiguous ones."""
        shape = tuple(shape)
        if strides is None or not dense(shape, strides):
            strides = row_major(shape)
        made = Buffer(more.pop("name", f"b{len(self.buffers)}"), shape, tuple(strides), dtype, device, **more)
        self.buffers[made.name] = made
        return made

    def whole(self, buffer: Buffer) -> Expr:
        return load(buffer.name, buffer.layout, buffer.dtype)

    def store(self, expr: Expr, like: torch.Tensor, node: Node, reason: str, written_to: str = "") -> Expr:
        """Give a value a buffer with the shape and strides of `like`."""
        buffer = self.buffer(like.shape, like.stride(), like.dtype, like.device, written_to=written_to)
        self.reasons[buffer.name] = reason
        if product(buffer.shape):
            value = Store(buffer.name, buffer.layout, cast(expr, like.dtype), like.dtype)
            self.steps.append(Cluster.build(buffer.shape, (), [value], self.lines(node)))
        return self.whole(buffer)

    def lines(self, node: Node) -> tuple[str, ...]:
        """Name the ops that a buffer's value takes, back to what is in memory already, each with the user's line; in the graph's order."""
        found, waiting = {node}, [node]
        while waiting:
            for source in waiting.pop().all_input_nodes:
                value = self.values.get(source)
                in_memory = isinstance(value, Load) and not value.index and value.mask is None
                if source not in found and source.op == "call_function" and not in_memory:
                    found.add(source)
                    waiting.append(source)
        named = [n for n in sorted(found) if n is node or not (n.target is operator.getitem or short(n.target) in VIEWS)]
        return tuple(dict.fromkeys(f"{short(n.target)}  {line_of(n)}".rstrip() for n in named))

    # -- operands ----------------------------------------------------------------------------------------------------------------------
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
        return found

    # -- the walk ----------------------------------------------------------------------------------------------------------------------
    def run(self, graph: Graph) -> Lowered:
        fused = {n for n in graph.nodes if n.op == "call_function" and self.fusable(n)}
        wanted = realize(graph, fused)
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
                self.maybe_store(node, wanted.get(node, ""))
            elif node.op == "get_attr":
                raise Unsupported(str(node.target), "a constant tensor inside the graph", line_of(node))
        return Lowered(self.buffers, tuple(names), tuple(self.steps), outputs, self.reasons)

    def write_back(self, changes: list[Node], results: list[Node]) -> None:
        """Change inputs in place, each after the last reader of its old value; what changes need of each other is stored first."""
        targets = {node.args[0].name for node in changes}
        for node in results:
            value, fake = self.values[node], node.meta.get("val")
            if isinstance(fake, torch.Tensor) and targets & self.loaded(node) and as_ref(value, self.buffers) is None:
                self.values[node] = self.store(value, fake, node, "an output that looks at a changed input")
        needs = [self.loaded(node.args[1]) & targets - {node.args[0].name} for node in changes]
        readers: dict[str, set[int]] = {name: {i for i, reads in enumerate(needs) if name in reads} for name in set().union(*needs)}
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
                self.values[source] = self.store(self.values[source], source.meta["val"], source, "an in-place change that others need")
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
        if any(v.dtype not in STORAGE or v.is_sparse or v.is_quantized for v in tensors) or len({v.device for v in tensors}) > 1:
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
            short(node.target), node.meta["val"].dtype, *torch.fx.node.map_arg((node.args, node.kwargs), stand_in), operand_dtype(node)
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
            views = VIEWS[name](tuple(source.meta["val"].shape), *given, **{k: v for k, v in node.kwargs.items() if k != "memory_format"})
            value = self.values[source]
            for change in views:
                (value,) = view([value], change)
            if views and tuple(views[-1].shape) != tuple(out.shape):
                raise Unsupported(name, f"its shape {tuple(out.shape)} is not the view's {views[-1].shape}", line_of(node))
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
        target, given, options, fake, line = node.target, tuple(node.args), dict(node.kwargs), node.meta.get("val"), line_of(node)
        token: tuple[Value, ...] = ()
        if target is torch.ops.higher_order.with_effects:  # an op with an effect, kept in its place by a token that it takes and returns
            token, target, given, fake = (self.values[given[0]],), given[1], given[2:], tuple(fake)[1 : 1 + len(given[1]._schema.returns)]
        if target in PROGRAMS:
            return self.call_program(node, PROGRAMS[target])
        if not isinstance(target, torch._ops.OpOverload):
            raise Unsupported(str(target), "no graph of ATen ops can hold it", line)
        args, kwargs = torch.fx.node.map_arg((given, options), self.ref)
        leaves = [fake] if isinstance(fake, torch.Tensor) else list(fake) if isinstance(fake, (tuple, list)) else []
        if not token and not any(isinstance(v, torch.Tensor) for v in leaves):
            raise Unsupported(str(target), f"its result ({type(fake).__name__}) is no tensor", line)
        if sparse := next((v.layout for v in leaves if isinstance(v, torch.Tensor) and v.layout is not torch.strided), None):
            raise Unsupported(str(target), f"its result has layout {sparse}: only strided tensors are compiled", line)
        if target in BY_GRAD_MODE and any(user.args[1] in BY_GRAD_MODE[target] for user in node.users):
            raise Unsupported(str(target), "what its backward needs is made only where autograd records, and programs run without", line)
        # numbers among the results were traced as constants: their readers already hold them
        made = [self.taken(v) if isinstance(v, torch.Tensor) else None for v in leaves]
        several = not isinstance(fake, torch.Tensor)
        pins = any(a.alias_info is not None for a in target._schema.arguments)
        names, draws = tuple(b and b.name for b in made), torch.Tag.nondeterministic_seeded in target.tags
        why = REFUSALS[short(target)](node) if short(target) in REFUSALS else ""
        foreign = sorted({str(v.dtype).removeprefix("torch.") for v in _tensors(node) if v.dtype not in STORAGE})
        why = f"no kernel reads or writes {', '.join(foreign)}" if foreign else why
        self.steps.append(Extern(str(target), args, tuple(kwargs.items()), names, several, line, pins, draws=draws, why=why))
        self.owned.add(node)
        values = tuple(None if b is None else self.whole(b) for b in made)
        return (*token, *values) if several else values[0]

    def call_program(self, node: Node, find: Callable[[Sequence[Any], list[tuple[int, ...]]], tuple[str, Any]]) -> Value:
        """Call another Program with the operands in the layouts that it was compiled for."""
        operands = [operand for part in node.args if isinstance(part, (tuple, list)) for operand in part]
        given = [self.ref(operand) for operand in operands]
        name, program = find(node.args, [self.buffers[r.buffer].strides if r.shape is None else r.strides for r in given])
        ready = [
            ref if wanted is None else self.in_layout(operand, ref, program.buffers[wanted])
            for operand, ref, wanted in zip(operands, given, program.inputs, strict=True)
        ]
        made = [self.taken(v) for v in node.meta["val"]]
        named = [ref.buffer for ref in refs(program.outputs)]
        pins = len({*named}) < len(named) or not {*named}.isdisjoint(program.inputs)
        draws = any(step.draws for part in (*program.called, program) for step in part.externs)
        self.steps.append(Extern(name, (tuple(ready),), (), tuple(b.name for b in made), True, line_of(node), pins, program, draws))
        self.owned.add(node)
        return tuple(self.whole(b) for b in made)

    def in_layout(self, node: Node, ref: Ref, wanted: Buffer) -> Ref:
        """Return an operand with the strides of `wanted`: itself, or a copy."""
        strides = self.buffers[ref.buffer].strides if ref.shape is None else ref.strides
        if 0 in wanted.shape or all(a == b or n == 1 for n, a, b in zip(wanted.shape, strides, wanted.strides, strict=True)):
            return ref
        made = self.buffer(wanted.shape, wanted.strides, wanted.dtype, wanted.device)
        if made.strides != wanted.strides:
            raise Unsupported(
                short(node.target), f"a region takes it with the strides {wanted.strides}, which no kernel writes", line_of(node)
            )
        self.reasons[made.name] = "the layout that a region takes"
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
    found = torch.utils._pytree.tree_leaves([node.meta.get("val"), [n.meta.get("val") for n in node.all_input_nodes]])
    return [v for v in found if isinstance(v, torch.Tensor)]


def lower(module: GraphModule, inputs: Sequence[Any], rules: dict[str, Rule]) -> Lowered:
    """Return the clusters and extern calls of a functional graph; `inputs` give the real dtypes and strides of its placeholders."""
    return Lowering(inputs, rules).run(module.graph)


BY_GRAD_MODE = {torch.ops.aten.mkldnn_rnn_layer.default: (3,)}
"""Ops that leave a result (these, by number) out where autograd does not record at that moment."""
PROGRAMS: dict[Any, Callable] = {}
"""{op: (arguments, strides of its tensors) -> (name, Program)}: ops that stand for calls of Programs; filled by autodiff/region.py."""
CHECKS: dict[str, Callable[[Node], bool]] = {}  # rule name -> whether the rule can take this call; filled by rules.py
REFUSALS: dict[str, Callable[[Node], str]] = {}  # rule name -> why it cannot, "" where it can; filled by rules.py


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


def as_ref(value: Expr, buffers: dict[str, Buffer]) -> Ref | None:
    """Return a value as a strided view of a buffer, if it is one."""
    if not isinstance(value, Load) or value.index or value.mask is not None or value.layout.strides is None:
        return None
    buffer = buffers[value.buffer]
    if value.layout == buffer.layout:
        return Ref(buffer.name)
    offset = value.layout.offset
    if any(s < 0 for s in value.layout.strides) or offset < 0:
        return None
    shape = value.layout.shape
    # size-1 dimensions have stride 0 in a layout; torch's kernels expect what a contiguous tensor would have there
    strides = list(value.layout.strides)
    for d in reversed(range(len(shape))):
        if shape[d] == 1:
            strides[d] = strides[d + 1] * shape[d + 1] if d + 1 < len(shape) else 1
    return Ref(buffer.name, shape, tuple(strides), offset)


def refs(tree: Any) -> list[Ref]:
    if isinstance(tree, Ref):
        return [tree]
    items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (tuple, list)) else ()
    return [r for item in items for r in refs(item)]


def dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether every element has its own place and none is left over."""
    step = 1
    for stride, n in sorted(((s, n) for s, n in zip(strides, shape, strict=True) if n != 1), key=lambda p: (hint(p[0]), hint(p[1]))):
        if stride != step:
            return False
        step *= n
    return 0 not in shape


def row_major(shape: Sequence[AnySize]) -> tuple[AnySize, ...]:
    """Return the strides that torch gives a contiguous tensor."""
    strides: list[AnySize] = []
    step: AnySize = 1
    for n in reversed(shape):
        strides.append(step)
        step = step * (1 if n == 0 else n)
    return tuple(reversed(strides))


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the number of different elements of a strided tensor."""
    return 0 if 0 in shape else product(n for n, s in zip(shape, strides, strict=True) if s != 0)


def line_of(node: Node) -> str:
    """Return the user's line that a node came from, as "file.py:12: code"."""
    trace = (node.meta.get("stack_trace") or "").split("Gradient addition node")[0]  # torch's own words after the line
    entries = [e for e in trace.split('File "') if e.strip()]
    if not entries:
        return ""
    head, _, code = entries[-1].partition("\n")
    name, _, rest = head.partition('", line ')
    return f"{name.rsplit('/', 1)[-1]}:{rest.split(',')[0].strip()}: {code.strip().splitlines()[0] if code.strip() else ''}"
