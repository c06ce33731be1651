"""Seams: what ends one block and what begins the next leave both blocks, so that they become one kernel.

In: a captured graph that calls regions (capture/cut.py). Out: the same graph with smaller regions, and a line for explain().

    block(x):   n = norm(x); y = x + mlp(n)       y1 = block(x);  y2 = block(y1)
    inner(n):   mlp(n)                            y1 = x + inner(norm(x));  y2 = y1 + inner(norm(y1))

The ops behind a block's last torch op, and those before its first, move to where the block is called, if one block's result is another's
argument on both sides of the move: compose.py then makes one region of the ops between two calls, and compiles it once for all of them.
What moves reads and writes nothing that memory would not hold anyway: results of torch ops, their operands, values that stay read inside.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ..capture.cut import Region, Spec, autocast_state
from ..codegen.lower import Lowering, line_of
from ..codegen.rules import RULES

TAGS = {torch.Tag.pointwise, torch.Tag.reduction}


@dataclass(frozen=True, slots=True)
class Ends:
    """The nodes of a region's graph that leave it: `head` before its ops, `tail` behind them."""

    head: frozenset[Node]
    tail: frozenset[Node]


@dataclass(frozen=True, slots=True)
class Inner:
    """What is left of a region, and the nodes of the old graph that are its inputs and its outputs."""

    region: Region
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]


def join_seams(module: GraphModule, decompositions: dict) -> tuple[GraphModule, list[str]]:
    """Move ops between the calls of regions.

    Args:
        module: of a capture; it stays as it is. decompositions: what the tracing of a region applies.

    Returns:
        The graph, the same one where nothing moves, and what was done.
    """
    links = set(_links(module.graph))
    blocks = {region: Block(region, decompositions) for link in links for region, _ in link}
    ends: dict[Region, Ends] = {}
    for region, block in blocks.items():
        if block.can_be_opened():
            tail = block.tail({block.outputs[place] for (giver, place), _ in links if giver is region})
            head = block.head({block.inputs[place] for _, (taker, place) in links if taker is region}, tail)
            ends[region] = Ends(frozenset(head), frozenset(tail))
    met = [link for link in links if _meets(link, blocks, ends)]
    givers, takers = {giver for (giver, _), _ in met}, {taker for _, (taker, _) in met}
    opened: dict[Region, tuple[Ends, Inner]] = {}
    for region in givers | takers:
        cut = Ends(ends[region].head if region in takers else frozenset(), ends[region].tail if region in givers else frozenset())
        opened[region] = (cut, _inner(blocks[region], cut))
    if not opened:
        return module, []
    graph = Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for call in [node for node in graph.nodes if node.target in opened]:
        _open_call(graph, call, blocks[call.target], *opened[call.target])
    graph.lint()
    return GraphModule(module, graph), [_told(region, cut) for region, (cut, _) in opened.items()]


Port = tuple[Region, int]
Link = tuple[Port, Port]


def _links(graph: Graph) -> Iterable[Link]:
    """Yield (region, result), (region, argument) wherever one call's result is another call's argument."""
    for item in graph.nodes:
        if item.target is operator.getitem and isinstance(item.args[0].target, Region):
            for user in item.users:
                if isinstance(user.target, Region):
                    yield from (((item.args[0].target, item.args[1]), (user.target, i)) for i, n in enumerate(user.args) if n is item)


def _meets(link: Link, blocks: dict[Region, Block], ends: dict[Region, Ends]) -> bool:
    """Whether ops move on both sides of a link, so that the result of one is the operand of another."""
    (giver, result), (taker, argument) = link
    if giver not in ends or taker not in ends:
        return False
    return blocks[giver].outputs[result] in ends[giver].tail and any(u in ends[taker].head for u in blocks[taker].inputs[argument].users)


# -- which ops may leave ---------------------------------------------------------------------------------------------------------------
class Block:
    """A region's graph, while it is seen which of its ops may leave it."""

    def __init__(self, region: Region, decompositions: dict) -> None:
        self.region, self.decompositions = region, decompositions
        self.graph = region.graph.graph
        self.inputs = [node for node in self.graph.nodes if node.op == "placeholder"]
        self.output = self.graph.output_node()
        self.outputs: tuple[Node, ...] = tuple(self.output.args[0])  # type: ignore[arg-type]
        self.known: dict[Node, bool] = {}

    def can_be_opened(self) -> bool:
        """Whether its ops mean the same outside it: they change no memory, hold no constant and are captured in the caller's state."""
        grad = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        if self.region.grad != grad or self.region.autocast != autocast_state():
            return False
        nodes = [node for node in self.graph.nodes if node.op not in ("placeholder", "output")]
        return all(node.op == "call_function" and not _changes(node) for node in nodes) and not all(map(self.fuses, nodes))

    def fuses(self, node: Node) -> bool:
        """Whether a captured op becomes part of a kernel, and may run anywhere: no random numbers, nothing changed."""
        if node not in self.known:
            self.known[node] = self.lowers(node)
        return self.known[node]

    def lowers(self, node: Node) -> bool:
        if node.target is operator.getitem:
            return self.fuses(node.args[0])  # type: ignore[arg-type]
        op = node.target
        if not isinstance(op, torch._ops.OpOverload) or op._schema.is_mutable or torch.Tag.nondeterministic_seeded in op.tags:
            return False
        return _tagged(op) or _views(node) or self.decomposes(node)

    def decomposes(self, node: Node) -> bool:
        """Whether all that torch makes of an op can be lowered: tells `rms_norm` from `linear`."""
        from torch.fx.experimental.proxy_tensor import make_fx

        operands = node.all_input_nodes
        values = [operand.meta.get("val") for operand in operands]
        if not all(isinstance(value, torch.Tensor) for value in values):
            return False

        def call(*tensors: torch.Tensor) -> Any:
            given = dict(zip(operands, tensors, strict=True))
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), given.__getitem__)
            return node.target(*args, **kwargs)  # type: ignore[operator]

        with torch.no_grad():
            made = make_fx(call, decomposition_table=self.decompositions)(*values)
        lowering = Lowering((), RULES)
        inside = [inner for inner in made.graph.nodes if inner.op == "call_function"]
        return all(_tagged(inner.target) or lowering.fusable(inner) for inner in inside)  # changes in place are of its own memory

    def tail(self, wanted: set[Node]) -> set[Node]:
        """Return the ops behind the last torch ops that lead to the `wanted` results."""
        chosen: set[Node] = set()
        for node in reversed(self.graph.nodes):
            inside = [user for user in node.users if user is not self.output]
            if node.op == "call_function" and (inside or node in wanted) and chosen.issuperset(inside) and self.fuses(node):
                chosen.add(node)

        def crosses(value: Node) -> bool:
            """Whether memory holds a value, whoever reads it."""
            stays_read = any(user not in chosen and user is not self.output for user in value.users)
            return value.op == "placeholder" or _held(value) and (stays_read or not self.fuses(value))

        def stays(node: Node) -> bool:
            early = any(user not in chosen and user is not self.output for user in node.users)
            return early or not all(value in chosen or crosses(value) for value in node.all_input_nodes)

        _drop(chosen, stays)
        results = {*self.outputs, *_crossing(chosen)}
        return chosen if len({_root(node) for node in results}) == len(results) else set()  # else two results would share memory

    def head(self, linked: set[Node], tail: set[Node]) -> set[Node]:
        """Return the ops before the first torch ops that start from `linked` arguments."""
        chosen: set[Node] = set()
        ready = lambda value: value.op == "placeholder" or value in chosen  # noqa: E731
        for node in self.graph.nodes:
            begins = any(value in linked or value in chosen for value in node.all_input_nodes)
            if node.op == "call_function" and node not in tail and begins and all(map(ready, node.all_input_nodes)) and self.fuses(node):
                chosen.add(node)

        def left(value: Node) -> list[Node]:
            return [user for user in value.users if user not in chosen and user not in tail]

        def stored(value: Node) -> bool:
            """Whether a torch op reads the value, as it is or a view of it."""
            return any(u is not self.output and (not self.fuses(u) or _views(u) and stored(u)) for u in left(value))

        def stays(node: Node) -> bool:
            users = left(node)
            kept = bool(users) and (self.output in users or not _held(node) or not stored(node))
            return kept or not all(map(ready, node.all_input_nodes))

        return _drop(chosen, stays)


def _tagged(op: Any) -> bool:
    """Whether torch calls an op pointwise or a reduction."""
    return bool(TAGS & set(getattr(op, "tags", ())))


def _drop(chosen: set[Node], stays: Callable[[Node], bool]) -> set[Node]:
    """Take out what has to stay, until nothing else has to."""
    while out := {node for node in chosen if stays(node)}:
        chosen -= out
    return chosen


def _crossing(tail: Iterable[Node]) -> list[Node]:
    """The values of a region that its tail reads."""
    ordered = sorted(tail)
    return list(dict.fromkeys(v for node in ordered for v in node.all_input_nodes if v not in tail and v.op != "placeholder"))


def _changes(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is None:  # torch's switches of state are plain functions
        return node.target is not operator.getitem and not isinstance(node.target, Region)
    return schema.is_mutable


def _views(node: Node) -> bool:
    """Whether a node may share the memory of its first operand."""
    if node.target is operator.getitem:
        return _views(node.args[0])  # type: ignore[arg-type]
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(result.alias_info for result in schema.returns)


def _root(node: Node) -> Node:
    while node.op == "call_function" and _views(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _held(node: Node) -> bool:
    """Whether a value can be a result or an argument of a region: one tensor with memory of its own."""
    return isinstance(node.meta.get("val"), torch.Tensor) and _root(node) is node


# -- the graphs ------------------------------------------------------------------------------------------------------------------------
def _inner(block: Block, cut: Ends) -> Inner:
    """Make the region that is left without its ends."""
    region, moved = block.region, cut.head | cut.tail
    own = [node for node in block.graph.nodes if node.op == "call_function" and node not in moved]
    read = {operand for node in own for operand in node.all_input_nodes}
    inputs = [node for node in block.graph.nodes if node in read and (node.op == "placeholder" or node in cut.head)]
    outputs = list(dict.fromkeys([*(node for node in block.outputs if node not in moved), *_crossing(cut.tail)]))
    made = Region(region.name, region.marked, region.apart)
    made.grad, made.autocast, made.calls = region.grad, region.autocast, region.calls
    graph = Graph()
    names = {node: graph.placeholder(f"x{place}") for place, node in enumerate(inputs)}
    for node in inputs:
        names[node].meta.update(node.meta)
    for node in own:
        names[node] = graph.node_copy(node, names.__getitem__)
    graph.output(tuple(names[node] for node in outputs))
    made.graph = GraphModule(torch.nn.Module(), graph)
    given = dict(zip(block.inputs, region.inputs, strict=True))
    made.inputs = [given[node] if node in given else _spec(node, given, region.grad) for node in inputs]
    made.outputs = [_spec(node, given, region.grad) for node in outputs]
    made.key = made.digest()
    return Inner(made, tuple(inputs), tuple(outputs))


def _spec(node: Node, given: dict[Node, Spec], grad: bool) -> Spec:
    """What a region depends on in one of its values: it may require grad where anything that it was made from does."""
    value = node.meta["val"]
    waiting, seen, required = [node], {node}, False
    while waiting and grad and not required:
        at = waiting.pop()
        required = at in given and given[at][4]
        waiting += [n for n in at.all_input_nodes if n not in seen]
        seen.update(at.all_input_nodes)
    floats = value.dtype.is_floating_point or value.dtype.is_complex
    return (value.dtype, tuple(value.shape), tuple(value.stride()), value.device, required and floats)


def _open_call(graph: Graph, call: Node, block: Block, cut: Ends, inner: Inner) -> None:
    """Write a region's ends around the call of what is left of it."""
    names: dict[Node, Any] = dict(zip(block.inputs, call.args, strict=True))

    def write(nodes: frozenset[Node]) -> None:
        for node in sorted(nodes):
            names[node] = graph.node_copy(node, names.__getitem__)

    with graph.inserting_before(call):
        write(cut.head)
        made = graph.call_function(inner.region, tuple(names[node] for node in inner.inputs))
        made.meta = dict(call.meta) | {"val": tuple(node.meta["val"] for node in inner.outputs)}
        for place, node in enumerate(inner.outputs):
            names[node] = graph.call_function(operator.getitem, (made, place))
            names[node].meta = dict(node.meta)
        write(cut.tail)
    for user in list(call.users):
        user.replace_all_uses_with(names[block.outputs[user.args[1]]])  # type: ignore[index]
        graph.erase_node(user)
    graph.erase_node(call)


def _told(region: Region, cut: Ends) -> str:
    lines = dict.fromkeys(filter(None, map(line_of, sorted(cut.tail | cut.head))))
    return f"{region.name}: its last ops and the first of the next are fused across its boundary  {'; '.join(lines)}"


__all__ = ["join_seams"]
