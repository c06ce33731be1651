"""Extract: blocks that a trace marked become graphs of their own, called where they stood.

In: a traced graph with marks around the first call of each block, and calls of those blocks. Out: `Region`s, and the
graph in which equal blocks are calls of one region. What is called too seldom, or is too small, to be worth a boundary
is put back in place.

    >>> cut(module, records, begin, end)
    (Region(Block_0: 12 inputs, 1 outputs, 31 ops, 48 calls),)
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ... import torch_private as private
from ..shapes.region_sizes import SYMBOLIC, numbers, size_node
from ..sort_graph import drop_switches

Tensor = torch.Tensor
Spec = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], torch.device, bool]
SMALL = 10
"""Blocks that nobody marked and that have fewer ops than this stay in place: kernels at their ends fuse with their
neighbours'.
"""
ONCE = "called once: captured in place"
TOO_SMALL = (
    f"fewer than {SMALL} ops: a boundary would cost more than it saves; mark the class with fusejit.lazy_inline to "
    "keep it apart"
)
SELDOM = "fewer than three equal calls; mark the class with fusejit.lazy_inline to keep it apart"


def spec_of(value: Tensor) -> Spec:
    """What a graph depends on in a tensor."""
    return (value.dtype, tuple(value.shape), tuple(value.stride()), value.device, value.requires_grad)


class Region:
    """A block's graph, called with the tensors of each block; the target of a node, and a function of tensors to a
    tuple of tensors.

    Attributes:
        graph: its module: inputs to a flat tuple of outputs. inputs, outputs: dtype, shape, stride, device,
            requires_grad of each.
        grad, autocast: the state in which it was captured and runs. marked: by the user, not found by itself.
        key: equal for equal graphs in equal states. calls: nodes that call it, in the graph that holds it.
    """

    def __init__(self, name: str, marked: bool, apart: str = "") -> None:
        self.rename(name)
        self.__module__ = "fusejit.region"
        self.marked, self.apart = marked, apart
        self.grad = torch.is_grad_enabled()
        self.autocast = autocast_state()
        self.inputs: list[Spec] = []
        self.outputs: list[Spec] = []
        self.graph: GraphModule = GraphModule(torch.nn.Module(), Graph())
        self.key = ""
        self.calls = 0

    def rename(self, name: str) -> None:
        self.name = self.__name__ = self.__qualname__ = name

    def __repr__(self) -> str:
        return (
            f"Region({self.name}: {len(self.inputs)} inputs, {len(self.outputs)} outputs, {self.ops} ops, "
            f"{self.calls} calls)"
        )

    def __call__(self, *inputs: Tensor) -> Any:
        return self.graph.forward(*inputs)

    @property
    def ops(self) -> int:
        calls = [
            node
            for node in self.graph.graph.nodes
            if node.op == "call_function" and node.target is not operator.getitem
        ]
        return sum(not isinstance(node.meta.get("val"), SYMBOLIC) for node in calls)

    def digest(self) -> str:
        """A text that two regions share exactly when their graphs, inputs and states are equal."""
        places: dict[Node, int] = {}
        lines = [repr((self.inputs, self.outputs, self.grad, self.autocast, self.apart))]
        for place, node in enumerate(self.graph.graph.nodes):
            places[node] = place
            arguments = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: Place(places[n]))
            target = "" if node.op in ("placeholder", "output") else target_text(node.target)
            if node.op == "get_attr":
                target = str(id(getattr(self.graph, target)))
            part = node.meta.get("ac_graph_id")  # a policy is known by its identity
            kept = "" if part is None else f" {int(part)} {id(part.policy)}"
            lines.append(f"{node.op} {target} {arguments}{kept}")
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:24]


class Place(str):
    """The number of a node, in a text of a graph."""

    __slots__ = ()

    def __new__(cls, number: int) -> Place:
        return super().__new__(cls, f"%{number}")


def target_text(target: Any) -> str:
    if isinstance(target, Region):
        return f"region {target.key}"
    if isinstance(target, (str, private.OpOverload, private.HigherOrderOperator)):
        return str(target)
    return f"{target.__module__}.{target.__qualname__} {id(target)}"


def autocast_state() -> tuple[tuple[str, bool, torch.dtype], ...]:
    return tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))


def cut(
    module: GraphModule, records: list[Any], begin: Callable, end: Callable
) -> tuple[tuple[Region, ...], list[tuple[str, str]]]:
    """Cut the marked blocks out of a graph, in place.

    Args:
        module: of the trace. records: by the number in their marks, with `region` and `reason`. begin, end: the marks'
            targets.

    Returns:
        The regions that are left, in the order of their first calls, and (block, why) of those put back.
    """
    graph = module.graph
    starts = {node.args[0]: node for node in graph.nodes if node.target is begin}
    calls: dict[Region, list[Node]] = {}
    for node in graph.nodes:
        if isinstance(node.target, Region):
            calls.setdefault(node.target, []).append(node)
    shared: dict[str, Region] = {}
    for stop in [node for node in graph.nodes if node.target is end]:  # inner blocks end first
        start, record = starts.pop(stop.args[0]), records[stop.args[0]]
        if not record.reason:
            hoist_sizes(start, stop)
            region = record.region
            region.graph = extract(module, start, stop, region.grad)
            region.inputs, region.outputs = (
                [(s[0], numbers(s[1]), numbers(s[2]), *s[3:]) for s in side] for side in (region.inputs, region.outputs)
            )
            region.key = region.digest()
            same = shared.setdefault(region.key, region)
            same.marked |= region.marked
            for node in calls.get(region, ()):
                node.target = same
            replace_range(graph, start, stop, same)
        graph.erase_node(stop)
        graph.erase_node(start)
    for start in starts.values():
        graph.erase_node(start)
    kept, back = settle(module, list(shared.values()))
    return kept, back


def between(start: Node, stop: Node) -> Iterable[Node]:
    node = start.next
    while node is not stop:
        yield node
        node = node.next


def hoist_sizes(start: Node, stop: Node) -> None:
    """Compute the sizes that need nothing of a block before it: torch makes each once, where it is first needed, for
    all that follow.
    """
    inside = {*between(start, stop)}
    for node in [*between(start, stop)]:
        if (
            node.op == "call_function"
            and isinstance(node.meta.get("val"), torch.SymInt)
            and inside.isdisjoint(node.all_input_nodes)
        ):
            inside.discard(node)
            start.prepend(node)


def extract(module: GraphModule, start: Node, stop: Node, grad: bool) -> GraphModule:
    """Copy what stands between two marks; the end mark names results and inputs."""
    _, results, inputs = stop.args
    made, root = Graph(), torch.nn.Module()
    names: dict[Node, Node] = {}
    for place, node in enumerate(inputs):  # type: ignore[arg-type,union-attr]
        names[node] = made.placeholder(f"x{place}")  # type: ignore[index]
        names[node].meta.update(node.meta)  # type: ignore[index,union-attr]
    given, inside = list(names.values()), {*between(start, stop)}
    for source in dict.fromkeys(source for node in between(start, stop) for source in node.all_input_nodes):
        if source not in inside and source not in names and isinstance(source.meta.get("val"), torch.SymInt):
            names[source] = size_node(made, source.meta["val"], given)
    for node in between(start, stop):
        if node in names or node.op == "placeholder":
            continue
        if node.op == "get_attr":
            setattr(root, str(node.target), getattr(module, str(node.target)))
        names[node] = made.node_copy(node, names.__getitem__)
    made.output(tuple(names[node] for node in results))  # type: ignore[union-attr,index]
    drop_switches(made, grad)
    made.lint()
    return GraphModule(root, made)


def replace_range(graph: Graph, start: Node, stop: Node, region: Region) -> None:
    """Put a call of a region where a block stood."""
    _, results, inputs = stop.args
    inside = [node for node in between(start, stop) if node.op == "call_function"]
    own = {*inside, stop}
    if any(user not in own for node in inside if node not in results for user in node.users):  # type: ignore[operator]
        return  # something outside looks into the block: the first call stays as it is
    with graph.inserting_before(stop):
        called = graph.call_function(region, tuple(inputs))  # type: ignore[arg-type]
        called.meta = {"stack_trace": entered(inside), "val": tuple(node.meta.get("val") for node in results)}  # type: ignore[union-attr]
        for place, node in enumerate(list(results)):  # type: ignore[arg-type]
            item = graph.call_function(operator.getitem, (called, place))
            item.meta = dict(node.meta)  # type: ignore[union-attr]
            node.replace_all_uses_with(item)  # type: ignore[union-attr]
    stop.args = (stop.args[0], (), ())
    for node in reversed(inside):
        graph.erase_node(node)


def entered(inside: list[Node]) -> str:
    """The user's line that a block's last op came from."""
    return next((node.meta["stack_trace"] for node in reversed(inside) if node.meta.get("stack_trace")), "")


def settle(module: GraphModule, regions: list[Region]) -> tuple[tuple[Region, ...], list[tuple[str, str]]]:
    """Put regions back that are not worth a boundary, the outermost first; name and count those that stay."""
    back: list[tuple[str, str]] = []
    for region in reversed(regions):
        holders = [module, *(other.graph for other in regions)]
        sites = [(holder, node) for holder in holders for node in holder.graph.nodes if node.target is region]
        reason = why_back(region, len(sites))
        if reason:
            regions = [other for other in regions if other is not region]
            for holder, node in sites:
                put_back(holder, node)
            if region.marked or reason is not ONCE:
                back.append((region.name, reason))
    names: dict[str, int] = {}
    for region in regions:
        number = names[region.name] = names.get(region.name, -1) + 1
        region.rename(f"{region.name}_{number}")
        for holder in (module, *(other.graph for other in regions)):
            region.calls += sum(node.target is region for node in holder.graph.nodes)
    for other in regions:
        other.graph.recompile()
    return tuple(regions), back


def why_back(region: Region, sites: int) -> str:
    if sites <= 1:
        return ONCE
    if region.marked:
        return ""
    return SELDOM if sites < 3 else TOO_SMALL if region.ops < SMALL else ""


def put_back(holder: GraphModule, node: Node) -> None:
    """Write a region's ops where it is called, in place."""
    graph, source = holder.graph, node.target.graph  # type: ignore[union-attr]
    names: dict[Node, Any] = dict(zip([n for n in source.graph.nodes if n.op == "placeholder"], node.args))
    results: tuple[Any, ...] = ()
    with graph.inserting_before(node):
        for inner in source.graph.nodes:
            if inner.op == "output":
                results = tuple(names[value] for value in inner.args[0])
            elif inner.op == "get_attr":
                setattr(holder, str(inner.target), getattr(source, str(inner.target)))
                names[inner] = graph.node_copy(inner, names.__getitem__)
            elif inner.op != "placeholder":
                names[inner] = graph.node_copy(inner, names.__getitem__)
    for user in list(node.users):
        user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index]
        graph.erase_node(user)
    graph.erase_node(node)
