"""Motion across regions: what ends one block and what begins the next leave both blocks, so that they become one
kernel.

In: a captured graph that calls regions (capture/regions/extract.py). Out: the same graph with smaller regions, and a
line for explain().

    block(x):   n = norm(x); y = x + mlp(n)       y1 = block(x);  y2 = block(y1)
    inner(n):   mlp(n)                            y1 = x + inner(norm(x));  y2 = y1 + inner(norm(y1))

The ops behind a block's last torch op, and those before its first, move to where the block is called, if one block's
result is another's argument on both sides of the move: compose_regions.py then makes one region of the ops between two
calls, and compiles it once for all of them. What moves reads and writes nothing that memory would not hold anyway:
results of torch ops, their operands, values that stay read inside. Done at O3: a model's first and last block get
kernels of their own, about a fifth more of compile time at 48 blocks.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from .. import torch_private as private
from ..capture.regions.extract import Region, Spec, autocast_state
from ..codegen.ops.builder import line_of
from ..codegen.ops.rules import RULES
from ..codegen.passes.lower import GraphLowering
from ..codegen.schedule.device import Device

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


def join_seams(module: GraphModule, decompositions: dict, device: Device) -> tuple[GraphModule, list[str]]:
    """Move ops between the calls of regions, where that pays.

    Args:
        module: of a capture; it stays as it is. decompositions: what the tracing of a region applies. device: that the
            kernels are for.

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
    met = [link for link in links if _meets(link, blocks, ends) and _pays(link, device)]
    givers, takers = {giver for (giver, _), _ in met}, {taker for _, (taker, _) in met}
    opened: dict[Region, tuple[Ends, Inner]] = {}
    for region in givers | takers:
        cut = Ends(
            ends[region].head if region in takers else frozenset(),
            ends[region].tail if region in givers else frozenset(),
        )
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
                    yield from (
                        ((item.args[0].target, item.args[1]), (user.target, i))
                        for i, n in enumerate(user.args)
                        if n is item
                    )


def _meets(link: Link, blocks: dict[Region, Block], ends: dict[Region, Ends]) -> bool:
    """Whether ops move on both sides of a link, so that the result of one is the operand of another."""
    (giver, result), (taker, argument) = link
    if giver not in ends or taker not in ends:
        return False
    given, taken = blocks[giver], blocks[taker]
    return _root(given.outputs[result]) in ends[giver].tail and bool(
        taken.readers[taken.inputs[argument]] & ends[taker].head
    )


def _pays(link: Link, device: Device) -> bool:
    """Whether a link's value is worth a seam: one read less each way, but a launch more where a backward sums
    columns.
    """
    (giver, result), (taker, _) = link
    dtype, shape, *_ = giver.outputs[result]
    trained = taker.grad and any(spec[4] for spec in taker.inputs)
    return not trained or 2 * dtype.itemsize * math.prod(shape) > device.bandwidth * device.launch_us * 1e-6


# -- which ops may leave -----------------------------------------------------------------------------------------------
class Block:
    """A region's graph, while it is seen which of its ops may leave it. Views belong to no side: each reads its own.

    Attributes:
        ops: nodes in the graph's order, views aside. operands: the values that each reads, views of them included.
            readers: the other way.
    """

    def __init__(self, region: Region, decompositions: dict) -> None:
        self.region, self.decompositions = region, decompositions
        self.graph = region.graph.graph
        self.inputs = [node for node in self.graph.nodes if node.op == "placeholder"]
        self.output = self.graph.output_node()
        self.outputs: tuple[Node, ...] = tuple(self.output.args[0])  # type: ignore[arg-type]
        self.ops = [node for node in self.graph.nodes if node.op == "call_function" and not _views(node)]
        self.operands = {node: {_root(value) for value in node.all_input_nodes} for node in (*self.ops, self.output)}
        self.readers: dict[Node, set[Node]] = {node: set() for node in (*self.inputs, *self.ops)}
        for node, values in self.operands.items():
            for value in values:
                self.readers[value].add(node)
        self.known: dict[Node, bool] = {}

    def can_be_opened(self) -> bool:
        """Whether its ops mean the same outside it: they change no memory, hold no constant and are captured in the
        caller's state.
        """
        grad = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        if self.region.grad != grad or self.region.autocast != autocast_state():
            return False
        nodes = [node for node in self.graph.nodes if node.op not in ("placeholder", "output")]
        return all(node.op == "call_function" and not _changes(node) for node in nodes) and not all(
            map(self.fuses, nodes)
        )

    def fuses(self, node: Node) -> bool:
        """Whether a captured op becomes part of a kernel, and may run anywhere: no random numbers, nothing changed."""
        if node not in self.known:
            self.known[node] = self.lowers(node)
        return self.known[node]

    def external(self, node: Node) -> bool:
        """Whether torch runs an op, so that its operands and results are in memory; kernels draw random numbers, but
        may not move.
        """
        return not self.fuses(node) and not _draws(node)

    def lowers(self, node: Node) -> bool:
        if node.target is operator.getitem:
            return self.fuses(node.args[0])  # type: ignore[arg-type]
        op = node.target
        return isinstance(op, private.OpOverload) and (_tagged(op) or _views(node) or self.decomposes(node))

    def decomposes(self, node: Node) -> bool:
        """Whether all that torch makes of an op can be lowered: tells `rms_norm` from `linear`."""
        from torch.fx.experimental.proxy_tensor import make_fx

        from ..torch_private import FakeTensor

        operands = node.all_input_nodes
        values = [operand.meta.get("val") for operand in operands]
        if not values or not all(isinstance(value, FakeTensor) for value in values):
            return False

        def call(*tensors: torch.Tensor) -> Any:
            given = dict(zip(operands, tensors, strict=True))
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), given.__getitem__)
            return node.target(*args, **kwargs)  # type: ignore[operator]

        with torch.no_grad(), values[0].fake_mode:  # type: ignore[union-attr]
            made = make_fx(call, decomposition_table=self.decompositions)(*values)
        lowering = GraphLowering((), RULES)
        inside = [inner for inner in made.graph.nodes if inner.op == "call_function"]
        drawn = any(_draws(inner) for inner in inside)
        return not drawn and all(
            _tagged(inner.target) or lowering.fusable(inner) for inner in inside
        )  # changes are of its own memory

    def tail(self, wanted: set[Node]) -> set[Node]:
        """Return the ops behind the last torch ops that lead to the `wanted` results."""
        chosen: set[Node] = set()
        roots = {_root(node) for node in wanted}
        for node in reversed(self.ops):
            inside = self.readers[node] - {self.output}
            if (inside or node in roots) and inside <= chosen and self.fuses(node):
                chosen.add(node)

        def crosses(value: Node) -> bool:
            """Whether memory holds a value, whoever reads it."""
            stays_read = bool(self.readers[value] - chosen - {self.output})
            return value.op == "placeholder" or _tensor(value) and (stays_read or self.external(value))

        def stays(node: Node) -> bool:
            early = bool(self.readers[node] - chosen - {self.output})
            return early or not all(value in chosen or crosses(value) for value in self.operands[node])

        _drop(chosen, stays)
        results = {*self.left_outputs(chosen), *self.crossing(chosen)}
        return (
            chosen if len({_root(node) for node in results}) == len(results) else set()
        )  # else two results would share memory

    def head(self, linked: set[Node], tail: set[Node]) -> set[Node]:
        """Return the ops before the first torch ops that start from `linked` arguments."""
        chosen: set[Node] = set()
        ready = lambda value: value.op == "placeholder" or value in chosen  # noqa: E731
        for node in self.ops:
            values = self.operands[node]
            if node not in tail and values & (linked | chosen) and all(map(ready, values)) and self.fuses(node):
                chosen.add(node)

        def stays(node: Node) -> bool:
            inside = self.readers[node] - chosen - tail
            kept = bool(inside) and (self.output in inside or not _tensor(node) or not any(map(self.external, inside)))
            return kept or not all(map(ready, self.operands[node]))

        return _drop(chosen, stays)

    def left_outputs(self, moved: Collection[Node]) -> list[Node]:
        return [node for node in self.outputs if _root(node) not in moved]

    def crossing(self, tail: Collection[Node]) -> list[Node]:
        """The values, no arguments, that a tail reads."""
        values = dict.fromkeys(value for node in self.ops if node in tail for value in self.ordered(node))
        return [value for value in values if value not in tail and value.op != "placeholder"]

    def ordered(self, node: Node) -> list[Node]:
        return list(dict.fromkeys(map(_root, node.all_input_nodes)))


def _drop(chosen: set[Node], stays: Callable[[Node], bool]) -> set[Node]:
    """Take out what has to stay, until nothing else has to."""
    while out := {node for node in chosen if stays(node)}:
        chosen -= out
    return chosen


def _draws(node: Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _tagged(op: Any) -> bool:
    """Whether torch calls an op pointwise or a reduction."""
    tags = getattr(op, "tags", ())
    return bool(TAGS & set(tags)) and torch.Tag.nondeterministic_seeded not in tags


def _changes(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    if schema is None:  # torch's switches of state are plain functions
        return node.target is not operator.getitem and not isinstance(node.target, Region)
    return schema.is_mutable


def _views(node: Node) -> bool:
    """Whether a node looks at the memory of its first operand: views do, casts to the dtype that is there, dropout of
    nothing.
    """
    return node.op == "call_function" and any(_memory(node) & _memory(value) for value in node.all_input_nodes[:1])


def _memory(node: Node) -> set[int]:
    leaves = private.tree_leaves(node.meta.get("val"))
    return {leaf.untyped_storage()._cdata for leaf in leaves if isinstance(leaf, torch.Tensor)}


def _root(node: Node) -> Node:
    while node.op == "call_function" and _views(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


# -- the graphs --------------------------------------------------------------------------------------------------------
def _inner(block: Block, cut: Ends) -> Inner:
    """Make the region that is left without its ends."""
    region, moved = block.region, cut.head | cut.tail
    own = [node for node in block.ops if node not in moved]
    outputs = list(dict.fromkeys([*block.left_outputs(moved), *block.crossing(cut.tail)]))
    read = {value for node in own for value in block.operands[node]}
    inputs = [
        node for node in (*block.inputs, *block.ops) if node in read and (node.op == "placeholder" or node in cut.head)
    ]
    made = Region(region.name, region.marked, region.apart)
    made.grad, made.autocast, made.calls = region.grad, region.autocast, region.calls
    graph = Graph()
    names = {node: graph.placeholder(f"x{place}") for place, node in enumerate(inputs)}
    for node in inputs:
        names[node].meta.update(node.meta)
    for node in (*own, *outputs):
        _write(graph, node, names)
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
    with graph.inserting_before(call):
        for node in (*sorted(cut.head), *inner.inputs):
            _write(graph, node, names)
        made = graph.call_function(inner.region, tuple(names[node] for node in inner.inputs))
        made.meta = dict(call.meta) | {"val": tuple(node.meta["val"] for node in inner.outputs)}
        for place, node in enumerate(inner.outputs):
            names[node] = graph.call_function(operator.getitem, (made, place))
            names[node].meta = dict(node.meta)
        for node in (*sorted(cut.tail), *block.outputs):
            _write(graph, node, names)
    for user in list(call.users):
        user.replace_all_uses_with(names[block.outputs[user.args[1]]])  # type: ignore[index]
        graph.erase_node(user)
    graph.erase_node(call)


def _write(graph: Graph, node: Node, names: dict[Node, Any]) -> None:
    """Copy a node, and the views through which it reads values that are there."""
    if node not in names:
        for value in node.all_input_nodes:
            _write(graph, value, names)
        names[node] = graph.node_copy(node, names.__getitem__)


def _told(region: Region, cut: Ends) -> str:
    lines = dict.fromkeys(filter(None, map(line_of, sorted(cut.tail | cut.head))))
    return f"{region.name}: its last ops and the first of the next are fused across its boundary  {'; '.join(lines)}"


__all__ = ["join_seams"]
