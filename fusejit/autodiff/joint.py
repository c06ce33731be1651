"""Joint: a captured graph becomes functional ATen graphs, forward and backward, and the function that runs them.

In: the graph of a capture, its input tensors and a compiler for functional graphs. Out: `Built`: a callable of the input
tensors that behaves as the captured graph does under torch: gradients, buffer updates, aliased results and in-place changes.

    >>> built = build(captured.graph, inputs, compiler, decompositions)
    >>> built.run([x, weight])
    [tensor([...], grad_fn=<FusedBackward>)]

Three routes, taken from AOTAutograd's metadata: nothing requires grad: the forward Program alone; gradients: one forward and one
backward Program behind one thin `autograd.Function` (bridge.py); in-place changes of inputs that autograd must see, or memory
shared among changed inputs: torch's own runtime wrappers around our Programs (40 to 100 us a call; recorded).
Results that are only views of inputs or of other results never enter the graphs: they are replayed natively.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..capture.lines import user_line
from ..capture.trace import LOCK
from ..codegen.random import share_seeds
from ..errors import Unsupported
from ..runtime.torch_c import apply_of, unread
from .bridge import Differentiable
from .partition import partition

Tensor = torch.Tensor
Compiler = Callable[[torch.fx.GraphModule, Sequence[Any], str], Any]
"""(functional graph, fake inputs, "forward" or "backward") -> Program."""


@dataclass(slots=True)
class Built:
    """What `build` returns.

    Attributes:
        run: list of input tensors (cleared) to the sequence of outputs.
        graphs: stage name to graph: joint, forward, backward.
        forward: the forward Program; differentiable: its gradients, or None.
        notes: what runs another way than compiled, and why.
        mutates: the graph changes some of its inputs.
        regions: the compiled regions that the Programs call (see region.py), kept alive.
    """

    run: Callable[[list[Any]], Sequence[Any]]
    graphs: dict[str, Any]
    forward: Any = None
    differentiable: Differentiable | None = None
    wrapped_backward: Any = None
    notes: list[tuple[str, str]] = field(default_factory=list)
    mutates: bool = False
    regions: list[Any] = field(default_factory=list)

    def backward(self) -> Any:
        """The backward Program, compiled now for tangents as traced if it was not needed yet; None without gradients."""
        return self.wrapped_backward if self.differentiable is None else self.differentiable.backward_program()

    def body(self) -> tuple[Callable[..., Any], bool]:
        """`run` for calls outside autocast and torch.func, as short as it gets; and whether it takes its inputs one by one."""
        if self.differentiable is not None and self.run == self.differentiable.apply:
            return apply_of(self.differentiable.function), True
        program = getattr(self.run, "program", None)
        return (self.run, False) if program is None else (getattr(program, "call", program), False)


# View results.


def is_view(node: Any) -> bool:
    """Whether a node only looks at its first argument's memory."""
    if not isinstance(node, torch.fx.Node) or not isinstance(node.target, torch._ops.OpOverload):
        return False
    schema = node.target._schema
    returns = schema.returns[0].alias_info if len(schema.returns) == 1 else None
    if returns is None or schema.is_mutable or "*" in returns.after_set or not isinstance(node.args[0], torch.fx.Node):
        return False
    made, source = node.meta.get("val"), node.args[0].meta.get("val")
    if not (isinstance(made, Tensor) and isinstance(source, Tensor)):
        return True
    # what may be a view is none here where it copied: a cast, a reshape or a `contiguous` that had to move something
    return made.untyped_storage()._cdata == source.untyped_storage()._cdata


def split_views(module: torch.fx.GraphModule) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule | None]:
    """Take results that are views of inputs, of each other, or the same twice, out of a graph.

    Returns the core graph and a graph (inputs..., core results...) -> all results; None when nothing had to be taken out.
    """
    graph = module.graph
    outputs = list(graph.output_node().args[0])  # type: ignore[arg-type]
    if any(node.target is torch._C._set_grad_enabled for node in graph.nodes):
        return module, None
    roots: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in graph.nodes:
        roots[node] = roots[node.args[0]] if is_view(node) else roots.get(node.args[0], node) if is_inplace(node) else node
    changed = {roots[node.args[0]] for node in graph.nodes if is_inplace(node)}
    groups: dict[torch.fx.Node, int] = {}
    for value in outputs:
        groups[roots[value]] = groups.get(roots[value], 0) + 1
    taken = {value for value in outputs if roots[value] not in changed and (roots[value].op == "placeholder" or groups[roots[value]] > 1)}
    if not taken:
        return module, None
    core_outputs = dict.fromkeys(value for value in outputs if value not in taken)
    core_outputs |= dict.fromkeys(roots[value] for value in outputs if value in taken and roots[value].op != "placeholder")
    return core_graph(module, list(core_outputs)), epilogue(module, outputs, list(core_outputs), taken)


def is_inplace(node: torch.fx.Node) -> bool:
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and node.target._schema.is_mutable
        and bool(node.args)
        and isinstance(node.args[0], torch.fx.Node)
    )


def core_graph(module: torch.fx.GraphModule, outputs: list[torch.fx.Node]) -> torch.fx.GraphModule:
    """Copy a graph with other outputs."""
    copied = torch.fx.Graph()
    names: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in module.graph.nodes:
        if node.op != "output":
            names[node] = copied.node_copy(node, names.__getitem__)
    copied.output(tuple(names[value] for value in outputs))
    copied.eliminate_dead_code()
    return torch.fx.GraphModule(module, copied)


def epilogue(module: torch.fx.GraphModule, outputs: list, core: list, taken: set) -> torch.fx.GraphModule:
    """The graph that replays views from the inputs and the core's results."""
    made = torch.fx.Graph()
    names: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in module.graph.nodes:
        if node.op == "placeholder":
            names[node] = made.placeholder(node.name)
    for number, node in enumerate(core):
        names[node] = made.placeholder(f"result_{number}")

    def copy(node: torch.fx.Node) -> torch.fx.Node:
        chain = []
        while node not in names:
            chain.append(node)
            node = node.args[0]  # type: ignore[assignment]
        for link in reversed(chain):
            names[link] = made.node_copy(link, names.__getitem__)
        return names[chain[0]] if chain else names[node]

    made.output(tuple(copy(value) for value in outputs))
    return torch.fx.GraphModule(torch.nn.Module(), made)


# Constants.


def lift_constants(module: torch.fx.GraphModule) -> tuple[torch.fx.GraphModule, list[Tensor]]:
    """Turn tensors that the body made from Python numbers into `full`, and larger ones into inputs at the end."""
    if not any(node.op == "get_attr" for node in module.graph.nodes):
        return module, []
    module = core_graph(module, list(module.graph.output_node().args[0]))  # type: ignore[arg-type]
    graph = module.graph
    constants: list[Tensor] = []
    last = [node for node in graph.nodes if node.op == "placeholder"]
    for node in [node for node in graph.nodes if node.op == "get_attr"]:
        value = getattr(module, str(node.target))
        if isinstance(value, torch.Generator):
            raise Unsupported("a random op with a generator of its own", "kernels draw from torch's default generator")
        with graph.inserting_before(node):
            if value.numel() == 1 and not value.dtype.is_complex:
                made = graph.call_function(
                    torch.ops.aten.full.default, (list(value.shape), value.item()), {"dtype": value.dtype, "device": value.device}
                )
            else:
                made = graph.placeholder(f"constant_{len(constants)}")
                made.meta["val"] = value
                constants.append(value)
                (last[-1].append if last else next(iter(graph.nodes)).prepend)(made)
                last.append(made)
        made.meta.update(node.meta)
        node.replace_all_uses_with(made)
        graph.erase_node(node)
    return torch.fx.GraphModule(torch.nn.Module(), graph), constants  # without the tensors, which AOTAutograd would take for buffers


# The trace.


def fake_inputs(inputs: Sequence[Tensor]) -> list[Tensor]:
    """Fake twins of tensors, in one mode, with what they share; fake ones and sizes are kept."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    modes = {value.fake_mode for value in inputs if isinstance(value, FakeTensor)}
    mode = modes.pop() if modes else FakeTensorMode()
    with torch.inference_mode(False):
        return [
            value if isinstance(value, (FakeTensor, torch.SymInt, torch.SymFloat, int, float)) else mode.from_tensor(value)
            for value in inputs
        ]


def build(
    graph: torch.fx.GraphModule,
    inputs: Sequence[Tensor],
    compiler: Compiler,
    decompositions: dict,
    change: Callable[[torch.fx.GraphModule], None] | None = None,
) -> Built:
    """Trace the joint graph under the present grad mode and autocast, and compile the forward.

    Args:
        graph: of a capture; inputs: its input tensors, real or fake.
        compiler: called for each functional graph; its errors come out unchanged.
        decompositions: {overload: function} applied below autograd.
        change: what is done to the joint graph before it is cut in two.
    """
    core, views = split_views(graph)
    core, constants = lift_constants(core)
    grad = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()  # before inference_mode(False), which switches gradients on
    with contextlib.ExitStack() as stack, torch.inference_mode(False), torch.set_grad_enabled(grad):
        joint, given = trace_joint(core, [*inputs, *constants], decompositions, stack, change)
        built = route(joint, given, compiler)
    if constants:
        built.run = with_constants(built.run, constants)
    if views is not None:
        built.run = with_views(built.run, type(views).forward.__get__(views))
    return built


def trace_joint(
    core: torch.fx.GraphModule,
    inputs: Sequence[Tensor],
    decompositions: dict,
    stack: contextlib.ExitStack,
    change: Callable[[torch.fx.GraphModule], None] | None = None,
) -> Any:
    """AOTAutograd's joint graph and metadata, and the fake inputs; both are good until `stack` is left."""
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors  # 2.4 s of import: only when something is compiled

    stack.enter_context(capture_quietly())
    given = fake_inputs(inputs)
    if given:
        stack.enter_context(torch._guards.tracing(torch._guards.TracingContext(given[0].fake_mode)))  # type: ignore[attr-defined]
    with LOCK:  # torch marks a running trace in a global that other threads' traces would spoil
        joint = aot_export_joint_with_descriptors(
            stack, core, tuple(given), decompositions=decompositions, keep_inference_input_mutations=True
        )
    share_seeds(joint._aot_graph_capture.graph_module.graph)
    if change is not None:
        change(joint._aot_graph_capture.graph_module)
    return joint, given


@contextlib.contextmanager
def capture_quietly() -> Any:
    """Keep torch's tracing from warning and from traces of its own."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def with_constants(run: Callable, constants: list[Tensor]) -> Callable:
    return lambda inputs: run([*inputs, *constants])


def with_views(run: Callable, replay: Callable) -> Callable:
    def run_with_views(inputs: list[Any]) -> Sequence[Any]:
        kept = tuple(inputs)
        return replay(*kept, *run(inputs))

    return run_with_views


def route(joint: Any, given: list[Tensor], compiler: Compiler) -> Built:
    """Choose how the graphs run, from AOTAutograd's metadata."""
    reason = why_wrapped(joint)
    state, captured = joint._aot_state, joint._aot_graph_capture
    graphs = {"joint": captured.graph_module}
    if any(info.mutates_data and overlaps(value) for info, value in zip(state.fw_metadata.input_info, given)):
        raise Unsupported("an input whose elements share memory is changed in place", "what that means depends on the order of the writes")
    mutates = any(info.mutates_data for info in state.fw_metadata.input_info)
    if reason:
        return wrapped(joint, compiler, graphs, reason, mutates)
    module = captured.graph_module
    if not state.needs_autograd:
        plain = flat_graph(module)
        graphs["forward"] = plain
        program = compiler(plain, placeholder_values(plain), "forward")
        return Built(outside_autocast(program), graphs, program, mutates=mutates)
    refuse_sparse(module)
    halves = partition(module, captured.updated_flat_args, state.fw_metadata.num_outputs)
    graphs |= {"forward": halves.forward, "backward": halves.backward}
    # torch 2.11 has one name where later versions tell the user's requires_grad from the backward's
    requires_grad = [getattr(info, "requires_grad_for_backward", info.requires_grad) for info in state.fw_metadata.output_info]
    program = compiler(halves.forward, placeholder_values(halves.forward), "forward")
    gradient = Differentiable(halves, program, compiler, requires_grad)
    return Built(gradient.apply, graphs, program, gradient, mutates=mutates)


def refuse_sparse(module: torch.fx.GraphModule) -> None:
    """Refuse what the backward alone would refuse, when it is too late: sparse gradients, as of `nn.Embedding(sparse=True)`."""
    for node in module.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and value.layout is not torch.strided:
            raise Unsupported(str(node.target), f"a gradient has layout {value.layout}: only strided tensors are compiled", user_line(node))


def overlaps(value: Tensor) -> bool:
    """Whether two elements of a tensor may be one piece of memory; expanded tensors, and views with strides that do not nest."""
    reach = 0
    for stride, extent in sorted((stride, n) for stride, n in zip(value.stride(), value.shape) if n != 1):
        if stride <= reach and value.numel() != 0:
            return True
        reach += stride * (extent - 1)
    return False


def why_wrapped(joint: Any) -> str:
    """Why a graph keeps torch's wrappers; "" when the thin route is right."""
    from torch._functorch._aot_autograd.schemas import MutationType, OutputType

    metadata = joint._aot_state.fw_metadata
    alone = (OutputType.non_alias, OutputType.unsafe_view_alias)
    if any(getattr(wrapper, "needs_post_compile", False) for wrapper in joint._aot_graph_capture.wrappers):
        if any(info.output_type not in alone for info in metadata.output_info):  # torch's wrappers rebuild such a result at a wrong place
            raise Unsupported("a result that is an input's memory", "other inputs share memory and are changed in place")
        return "inputs that share memory are changed in place"
    if any(info.mutation_type is MutationType.MUTATED_OUT_GRAPH for info in metadata.input_info):
        return "an input that requires grad, or its shape, is changed in place"
    if any(info.output_type not in alone for info in metadata.output_info):
        return "a result shares memory with an input or with another result"
    if metadata.num_intermediate_bases:
        return "results share memory"
    if metadata.tokens or metadata.num_backward_tokens:
        return "ops with effects keep their order"
    return "the graph switches gradients on or off for its caller" if metadata.grad_enabled_mutation is not None else ""


def wrapped(joint: Any, compiler: Compiler, graphs: dict[str, Any], reason: str, mutates: bool) -> Built:
    """Compile both halves and run them inside torch's runtime wrappers."""
    from torch._functorch._aot_autograd.graph_compile import aot_stage2_compile
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    programs: dict[str, Any] = {}

    def compile_half(stage: str) -> Callable:
        def compiled(module: torch.fx.GraphModule, _: Any) -> Boxed:
            module = flat_graph(module)
            if stage == "forward":
                keep_changed(module, joint._aot_state.fw_metadata)
            graphs[stage] = module
            half, restore = drop_none(module)
            programs[stage] = compiler(half, placeholder_values(half), stage)
            return Boxed(programs[stage], restore)

        return compiled

    function, _ = aot_stage2_compile(
        joint._aot_state, joint._aot_graph_capture, min_cut_rematerialization_partition, compile_half("forward"), compile_half("backward")
    )
    boxed = getattr(function, "_boxed_call", False)
    run = function if boxed else lambda inputs: function(*inputs)
    if not boxed:
        run = lambda inputs: function(inputs)  # noqa: E731
    return Built(run, graphs, programs["forward"], None, programs.get("backward"), [("torch's runtime wrappers", reason)], mutates)


def keep_changed(module: torch.fx.GraphModule, metadata: Any) -> None:
    """Save copies of inputs that are changed in place: the wrappers write the new values before the backward reads the old ones."""
    graph = module.graph
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    changed = {node for node, info in zip(inputs, metadata.input_info) if info.mutates_data}
    output, first = graph.output_node(), next(node for node in graph.nodes if node.op != "placeholder")
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in output.all_input_nodes:
        if node in changed:
            with graph.inserting_before(first):
                copies[node] = graph.call_function(torch.ops.aten.clone.default, (node,))
            copies[node].meta.update(node.meta)
    output.args = torch.fx.node.map_arg(output.args, lambda node: copies.get(node, node))
    module.recompile()


class Boxed:
    """A Program in the calling convention of AOTAutograd: a list that the callee owns, and None among the results."""

    _boxed_call = True

    def __init__(self, program: Any, places: list[int | None]) -> None:
        self.program, self.places = outside_autocast(program), places

    @unread
    def __call__(self, inputs: list[Any]) -> list[Any]:
        results = self.program(inputs)
        return [None if place is None else results[place] for place in self.places]


def drop_none(module: torch.fx.GraphModule) -> tuple[torch.fx.GraphModule, list[int | None]]:
    """Take what is no tensor out of a graph's output; returns each output's place in the new one."""
    output = module.graph.output_node()
    kept: list[Any] = []
    places: list[int | None] = []
    for value in output.args[0]:  # type: ignore[union-attr]
        places.append(len(kept) if isinstance(value, torch.fx.Node) else None)
        if isinstance(value, torch.fx.Node):
            kept.append(value)
    output.args = (tuple(kept),)
    module.recompile()
    return module, places


def flat_graph(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A graph with positional inputs and a flat tuple of outputs, whatever pytree calling convention it carried."""
    graph = module.graph
    graph.set_codegen(torch.fx.graph.CodeGen())
    output = graph.output_node()
    output.args = (tuple(output.args[0]),)  # type: ignore[arg-type]
    module.recompile()
    return module


def placeholder_values(module: torch.fx.GraphModule) -> list[Any]:
    """The fake tensors of a graph's inputs; None for a number."""
    return [node.meta.get("val") for node in module.graph.nodes if node.op == "placeholder"]


def outside_autocast(program: Callable[[list[Any]], Sequence[Any]]) -> Callable[[list[Any]], Sequence[Any]]:
    """Run a program without ambient autocast: the casts that it asked for are in the graph already."""

    def run(inputs: list[Any]) -> Sequence[Any]:
        if not torch._C._is_any_autocast_enabled():
            return program(inputs)
        with torch._C._DisableAutocast():
            return program(inputs)

    run.program = program  # type: ignore[attr-defined]
    return run
