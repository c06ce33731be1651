"""Regions in a joint graph: a block's graph is differentiated and compiled once, and called as one op wherever the
block stood.

In: a captured graph with calls of `Region`s (capture/regions/extract.py). Out: the same graph with calls that trace to
two ops, one forward and one backward, whose Programs the lowering finds by their keys; a region that cannot be compiled
apart is put back in place.

    %region = call_function[target=fusejit.region](args = ([%x, %weight], 'c04f/interpret/O2/fast', 3))
    %region_backward = call_function[target=fusejit.region_backward](args = ([%weight, %saved], [%tangent],
        'c04f/interpret/O2/fast|1', 3))

A Program of a region is kept as long as a specialisation holds it, and serves every model whose blocks have the same
graph.
The two ops are opaque to partitioning: what the region saves goes from its forward to its backward, and nothing is
computed twice across its boundary. Inputs that the region saves as they are stay the caller's.
"""

from __future__ import annotations

import contextlib
import itertools
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ..capture.fake_mode import new_fake_mode
from ..capture.regions.extract import Region, Spec, autocast_state, put_back
from ..capture.shapes.region_sizes import numbers, size_node, told
from ..codegen.ir.graph import dense
from ..codegen.ops.views import base
from ..errors import FusejitError, Unsupported
from .autograd_function import LEADS, Differentiable
from .built import Compiler, flat_graph, placeholder_values
from .joint import lift_constants, trace_joint
from .partition import Halves, partition
from .torch_wrappers import why_wrapped

Tensor = torch.Tensor
LIBRARY = torch.library.Library("fusejit", "FRAGMENT")
RANDOM = (torch.Tag.nondeterministic_seeded,)
"""Equal calls are never merged: the block may draw random numbers."""
LIBRARY.define("region(Tensor[] inputs, str key, int call) -> Tensor[]", tags=RANDOM)
LIBRARY.define("region_backward(Tensor[] saved, Tensor[] tangents, str key, int call) -> Tensor[]", tags=RANDOM)
FORWARD, BACKWARD = torch.ops.fusejit.region.default, torch.ops.fusejit.region_backward.default
CALLS = itertools.count()


@dataclass(slots=True, eq=False, weakref_slot=True)
class Compiled:
    """A region's Programs.

    Attributes:
        forward: inputs to results and saved tensors, from `graph`. gradient: the backward, or None where nothing
            requires grad.
        outputs: fake results and saved tensors of the forward; results: how many of them are results.
        saved: for each tensor the backward reads: ("input", i), ("result", i) or ("made", i), the place among what the
            forward returns.
        inner: regions that this one calls.
    """

    key: str
    region: Region
    forward: Any
    gradient: Differentiable | None
    outputs: tuple[Tensor, ...]
    results: int
    graph: GraphModule
    saved: tuple[tuple[str, int], ...] = ()
    inner: list[Compiled] = field(default_factory=list)


COMPILED: weakref.WeakValueDictionary[str, Compiled] = weakref.WeakValueDictionary()


@dataclass(slots=True)
class Toolchain:
    """What compiles a region: `compiler` for functional graphs, decompositions, a rewrite of captured graphs; `flavour`
    names all three.

    notes: (region, why) of what stays in place. spent_ms: milliseconds that compiling regions took; backwards, compiled
    when needed, not. change: what is done to each joint graph.
    """

    compiler: Compiler
    decompositions: dict
    rewrite: Callable[[GraphModule], GraphModule]
    flavour: str
    notes: list[tuple[str, str]] = field(default_factory=list)
    spent_ms: float = 0.0
    change: Callable[[GraphModule], None] | None = None


def call_regions(module: GraphModule, tools: Toolchain) -> tuple[GraphModule, list[Compiled]]:
    """Compile the regions that a captured graph calls; returns the graph with opaque calls of them, and the regions."""
    graph = Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    made = GraphModule(module, graph)
    found: dict[Region, Compiled | None] = {}
    waiting = [node for node in graph.nodes if isinstance(node.target, Region)]
    while waiting:
        node = waiting.pop(0)
        region = node.target
        if region not in found:
            found[region] = compiled(region, tools)
        known = found[region]
        if known is None:
            before = set(graph.nodes)
            put_back(made, node)
            waiting += [inner for inner in graph.nodes if inner not in before and isinstance(inner.target, Region)]
        else:
            node.target = Opaque(known)
    made.recompile()
    return made, [known for known in found.values() if known is not None]


def compiled(region: Region, tools: Toolchain) -> Compiled | None:
    """The compiled region, from an earlier compilation of an equal one if there is one; None, noted, where it has to
    stay in place.
    """
    sizes = mode_of(region)  # symbols mean something in their own capture only
    key = f"{region.key}/{tools.flavour}" + (f"/sizes {id(sizes)}" if sizes is not None else "")
    known = COMPILED.get(key)
    if known is None:
        start, before = time.perf_counter(), tools.spent_ms
        try:
            known = COMPILED[key] = compile_region(region, key, tools)
        except (FusejitError, RuntimeError, ValueError, TypeError) as error:
            reason = error.reason if isinstance(error, Unsupported) else f"{type(error).__name__}: {error}"
            tools.notes.append((region.name, reason))
        tools.spent_ms = before + (time.perf_counter() - start) * 1e3  # inner regions included
    return known


# One region.


def compile_region(region: Region, key: str, tools: Toolchain) -> Compiled:
    """Trace a region's joint graph in the state in which it was captured, cut it in two and compile the forward.

    Raises:
        Unsupported: it changes an input, or its results share memory with one.
    """
    core, inner = call_regions(tools.rewrite(region.graph), tools)
    core, constants = lift_constants(core)
    if constants:
        raise Unsupported(region.name, "it holds a constant tensor")
    with contextlib.ExitStack() as stack, in_state(region):
        joint, given = trace_joint(
            core, stand_ins(region.inputs, mode_of(region)), tools.decompositions, stack, tools.change
        )
        state = joint._aot_state
        reason = why_wrapped(joint) or (
            any(info.mutates_data for info in state.fw_metadata.input_info) and "it changes an input in place"
        )
        if reason:
            raise Unsupported(region.name, str(reason))
        compiler = lambda module, inputs, stage: tools.compiler(module, inputs, f"{region.name}.{stage}")  # noqa: E731
        made = finish(region, key, joint, compiler)
    made.inner = inner
    return made


def finish(region: Region, key: str, joint: Any, compiler: Compiler) -> Compiled:
    state, module = joint._aot_state, joint._aot_graph_capture.graph_module
    count = len(region.outputs)
    if not state.needs_autograd:
        plain = flat_graph(module)
        return Compiled(
            key, region, compiler(plain, placeholder_values(plain), "forward"), None, output_values(plain), count, plain
        )
    halves = partition(module, joint._aot_graph_capture.updated_flat_args, state.fw_metadata.num_outputs)
    requires_grad = [
        getattr(info, "requires_grad_for_backward", info.requires_grad) for info in state.fw_metadata.output_info
    ]
    if mode_of(region) is not None and sum(requires_grad) > 1:
        raise Unsupported(region.name, "its sizes vary, and some of its results may have no gradient")
    halves, saved = keep_inputs(without_sizes(halves, region.name))
    program = compiler(halves.forward, placeholder_values(halves.forward), "forward")
    gradient = Differentiable(halves, program, compiler, requires_grad)
    return Compiled(key, region, program, gradient, output_values(halves.forward), count, halves.forward, saved)


def output_values(module: GraphModule) -> tuple[Tensor, ...]:
    return tuple(node.meta["val"] for node in module.graph.output_node().args[0])  # type: ignore[union-attr,misc]


def keep_inputs(halves: Halves) -> tuple[Halves, tuple[tuple[str, int], ...]]:
    """Take out of a forward's saved tensors what its caller has already: inputs, views of them (made again in the
    backward), results.
    """
    output = halves.forward.graph.output_node()
    values: list[Node] = list(output.args[0])  # type: ignore[arg-type]
    inputs = [node for node in halves.forward.graph.nodes if node.op == "placeholder"]
    targets = [node for node in halves.backward.graph.nodes if node.op == "placeholder"]
    results, kept = values[: halves.results], values[: halves.results]
    saved: list[tuple[str, int]] = []
    for node, target in zip(values[halves.results :], targets):
        root = base(node)
        if root in inputs:
            saved.append(("input", inputs.index(root)))
            view_again(halves.backward.graph, node, root, target, targets[-1])
        elif node in results:
            saved.append(("result", results.index(node)))
        else:
            saved.append(("made", len(kept)))
            kept.append(node)
    output.args = (tuple(kept),)
    halves.forward.recompile()
    halves.backward.recompile()
    return replace(halves, saved=len(saved)), tuple(saved)


def without_sizes(halves: Halves, name: str) -> Halves:
    """Let the backward ask its own tensors for the sizes that the forward would save for it: an op that stands for it
    returns tensors.
    """
    if not halves.sizes:
        return halves
    output, places = halves.forward.graph.output_node(), slice(halves.results, halves.results + halves.sizes)
    values, given = list(output.args[0]), [node for node in halves.backward.graph.nodes if node.op == "placeholder"]  # type: ignore[arg-type]
    tensors = given[halves.sizes :]
    for target in given[: halves.sizes]:
        if not told(target.meta["val"], [node.meta["val"].shape for node in tensors]):
            raise Unsupported(name, "its gradient needs a size that none of the saved tensors has")
        with halves.backward.graph.inserting_before(tensors[-1].next):
            target.replace_all_uses_with(size_node(halves.backward.graph, target.meta["val"], tensors))
        halves.backward.graph.erase_node(target)
    del values[places]
    output.args = (tuple(values),)
    halves.forward.recompile()
    halves.backward.recompile()
    return replace(halves, saved=halves.saved - halves.sizes, sizes=0)


def view_again(graph: Graph, node: Node, root: Node, target: Node, last: Node) -> None:
    """Let a backward start from an input where it read a view of it."""
    if node is root:
        return
    chain = []
    while node is not root:
        chain.append(node)
        node = node.args[0]  # type: ignore[assignment]
    users = list(target.users)
    names = {root: target}
    with graph.inserting_before(last.next):
        for size in dict.fromkeys(
            n for link in chain for n in link.all_input_nodes if isinstance(n.meta.get("val"), torch.SymInt)
        ):
            names[size] = size_node(graph, size.meta["val"], [n for n in graph.nodes if n.op == "placeholder"])
        for link in reversed(chain):
            names[link] = graph.node_copy(link, names.__getitem__)
    for user in users:
        user.replace_input_with(target, names[chain[0]])
    target.meta["val"] = root.meta["val"]


def mode_of(region: Region) -> Any:
    """The fake mode whose symbols a region's sizes are; None where those are numbers."""
    given = [node.meta.get("val") for node in region.graph.graph.nodes if node.op == "placeholder"]
    return next(
        (v.fake_mode for v in given for n in numbers(getattr(v, "shape", ())) if isinstance(n, torch.SymInt)), None
    )


def stand_ins(specs: Sequence[Spec], mode: Any = None) -> list[Tensor]:
    """Fake inputs of a region: its own layouts, made dense where they overlap or leave holes."""
    with mode or new_fake_mode():
        return [
            torch.empty_strided(shape, laid(shape, stride), dtype=dtype, device=device).requires_grad_(grad)
            for dtype, shape, stride, device, grad in specs
        ]


def laid(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    known = any(isinstance(n, torch.SymInt) for n in (*shape, *stride)) or dense(
        shape, stride
    )  # what varies is contiguous: see capture/regions/detect.py
    return tuple(stride) if known else tuple(torch.empty(shape, device="meta").stride())


@contextlib.contextmanager
def in_state(region: Region) -> Iterator[None]:
    """The grad mode and autocast in which a region was captured."""
    before = autocast_state()
    try:
        set_autocast(region.autocast)
        with torch.inference_mode(False), torch.set_grad_enabled(region.grad):
            yield
    finally:
        set_autocast(before)


def set_autocast(state: tuple[tuple[str, bool, torch.dtype], ...]) -> None:
    for kind, enabled, dtype in state:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)


# The call.


class Opaque:
    """What stands for a region while a joint graph is traced: calls that become one op forward and one backward."""

    def __init__(self, known: Compiled) -> None:
        self.known = known
        self.__name__ = self.__qualname__ = known.region.name
        self.__module__ = "fusejit.region"

    def __call__(self, *inputs: Tensor) -> Any:
        known, number = self.known, next(CALLS)
        given = [
            restride(value, laid(spec[1], spec[2])) for value, spec in zip(inputs, known.region.inputs, strict=True)
        ]
        if known.gradient is not None and torch.is_grad_enabled():
            return Crossing.apply(known, number, *given)
        return tuple(FORWARD(given, known.key, number)[: known.results])


def restride(value: Tensor, stride: tuple[int, ...]) -> Tensor:
    """The same tensor with the strides that a region was compiled for: itself in almost every case."""
    if all(a == b or n == 1 for n, a, b in zip(value.shape, value.stride(), stride)) or 0 in value.shape:
        return value
    order = sorted(range(value.dim()), key=lambda d: (-stride[d], value.shape[d] == 1, d))
    back = [order.index(d) for d in range(value.dim())]
    return value.permute(order).clone(memory_format=torch.contiguous_format).permute(back)


class Crossing(torch.autograd.Function):
    """A region's two ops as one differentiable call, seen only while tracing."""

    @staticmethod
    def forward(ctx: Any, known: Compiled, number: int, *inputs: Tensor) -> tuple[Tensor, ...]:
        assert known.gradient is not None
        made = FORWARD(list(inputs), known.key, number)
        places = {"input": inputs, "result": made, "made": made}
        ctx.save_for_backward(*[places[how][place] for how, place in known.saved])
        ctx.mark_non_differentiable(*[made[place] for place in known.gradient.fixed])
        ctx.set_materialize_grads(False)
        ctx.known, ctx.number = known, number
        return tuple(made[: known.results])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        known: Compiled = ctx.known
        assert known.gradient is not None
        tangents = [gradient for gradient, grad in zip(gradients, known.gradient.requires_grad) if grad]
        pattern = "".join("0" if tangent is None else "1" for tangent in tangents)
        given = [tangent for tangent in tangents if tangent is not None]
        found = BACKWARD(list(ctx.saved_tensors), given, f"{known.key}|{pattern}", ctx.number)
        there = [number for number, mark in enumerate(pattern) if mark == "1"]
        reached = [
            None if place is None or not known.gradient.reached(place, there) else place
            for place in known.gradient.halves.gradients
        ]
        return (None, None, *[None if place is None else found[place] for place in reached])


def fake_forward(inputs: list[Tensor], key: str, call: int) -> list[Tensor]:
    return [like(value) for value in COMPILED[key].outputs]


def fake_backward(saved: list[Tensor], tangents: list[Tensor], key: str, call: int) -> list[Tensor]:
    gradient = COMPILED[key.partition("|")[0]].gradient
    assert gradient is not None
    values = output_values(gradient.halves.backward)
    return [like(value) for value in values]


def like(value: Tensor) -> Tensor:
    return torch.empty_strided(numbers(value.shape), numbers(value.stride()), dtype=value.dtype, device=value.device)


def run_forward(inputs: list[Tensor], key: str, call: int) -> list[Tensor]:
    """Op by op: where sizes have no Program."""
    return list(COMPILED[key].graph(*inputs))


def run_backward(saved: list[Tensor], tangents: list[Tensor], key: str, call: int) -> list[Tensor]:
    gradient = COMPILED[key.partition("|")[0]].gradient
    assert gradient is not None
    return list(gradient.halves.backward(*saved, *tangents))


LIBRARY.impl("region", run_forward, "CompositeExplicitAutograd")
LIBRARY.impl("region_backward", run_backward, "CompositeExplicitAutograd")
torch.library.register_fake("fusejit::region", fake_forward, lib=LIBRARY)
torch.library.register_fake("fusejit::region_backward", fake_backward, lib=LIBRARY)


# What the lowering asks for.


def forward_program(args: Sequence[Any], strides: list[tuple[int, ...]]) -> tuple[str, Any]:
    """The Program of a forward call, and its name."""
    known = COMPILED[args[1]]
    return f"{known.region.name}_forward", in_scope(known.forward)


def in_scope(program: Any) -> Any:
    """A Program; of one for many sizes that of the scope that is open."""
    return program.in_scope() if hasattr(program, "in_scope") else program


def backward_program(args: Sequence[Any], strides: list[tuple[int, ...]]) -> tuple[str, Any]:
    """The Program of a backward call for tangents of these strides, and its name."""
    key, _, pattern = args[2].partition("|")
    known = COMPILED[key]
    gradient = known.gradient
    assert gradient is not None
    if gradient.sized:
        return f"{known.region.name}_backward", in_scope(
            gradient.backward_program()
        )  # tangents are laid out as it was traced
    given = iter(strides[len(known.saved) :])
    wanted: list[tuple[int, ...] | None] = []
    for mark, traced, value in zip(pattern, gradient.traced, gradient.values[len(known.saved) :]):
        stride = next(given) if mark == "1" else None
        wanted.append(stride and tuple(t if n == 1 else s for n, s, t in zip(value.shape, stride, traced)))
    program = gradient.program(tuple(wanted))
    if program is None and None not in wanted:
        program = gradient.backward_program()
    if program is None:
        raise Unsupported(known.region.name, "its gradients arrive in too many layouts")
    return f"{known.region.name}_backward", program


def leads(node: Node) -> list[set[Node]]:
    """For each result of a backward call, the tangents that lead to it."""
    key, _, pattern = str(node.args[2]).partition("|")
    gradient = COMPILED[key].gradient
    assert gradient is not None
    given: Any = node.args[1]
    there = dict(zip([number for number, mark in enumerate(pattern) if mark == "1"], given, strict=True))
    return [{there[number] for number in numbers if number in there} for numbers in gradient.leads]


LEADS[BACKWARD] = leads
