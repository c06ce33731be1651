"""Joint: a captured graph becomes functional ATen graphs, forward and backward, and the function that runs them.

In: the graph of a capture, its input tensors and a compiler for functional graphs. Out: `Built`: a callable of the
input tensors that behaves as the captured graph does under torch: gradients, buffer updates, aliased results and
in-place changes.

    >>> built = build(captured.graph, inputs, compiler, decompositions)
    >>> built.run([x, weight])
    [tensor([...], grad_fn=<FusedBackward>)]

Three routes, taken from AOTAutograd's metadata: nothing requires grad: the forward Program alone; gradients: one
forward and one backward Program behind one thin `autograd.Function` (autograd_function.py); in-place changes of inputs
that autograd must see, or memory shared among changed inputs: torch's own runtime wrappers around our Programs (40 to
100 us a call; recorded). Results that are only views of inputs or of other results never enter the graphs: they are
replayed natively.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from .. import torch_private as private
from ..capture.fake_mode import new_fake_mode
from ..capture.source_lines import user_line
from ..capture.tracer import LOCK, NO_FORMULA
from ..codegen.graph.decisions import mark_compared
from ..codegen.ir.effects import kept
from ..codegen.ops.random import share_seeds
from ..codegen.ops.rules import RULES
from ..errors import Unsupported
from .autograd_function import Differentiable
from .built import Built, Compiler, flat_graph, outside_autocast, placeholder_values
from .output_views import core_graph, is_inplace, split_views, with_views
from .partition import partition
from .torch_wrappers import why_wrapped, wrapped

Tensor = torch.Tensor
aten = torch.ops.aten


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
                    torch.ops.aten.full.default,
                    (list(value.shape), value.item()),
                    {"dtype": value.dtype, "device": value.device},
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
    return torch.fx.GraphModule(
        torch.nn.Module(), graph
    ), constants  # without the tensors, which AOTAutograd would take for buffers


# The trace.


def fake_inputs(inputs: Sequence[Tensor]) -> list[Tensor]:
    """Fake twins of tensors, in one mode, with what they share; fake ones and sizes are kept."""
    from ..torch_private import FakeTensor

    modes = {value.fake_mode for value in inputs if isinstance(value, FakeTensor)}
    mode = modes.pop() if modes else new_fake_mode()
    with torch.inference_mode(False):
        return [
            value
            if isinstance(value, (FakeTensor, torch.SymInt, torch.SymFloat, int, float))
            else mode.from_tensor(value)
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
    grad = (
        torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    )  # before inference_mode(False), which switches gradients on
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
    from ..torch_private import aot_export_joint_with_descriptors  # 2.4 s of import: only when something is compiled

    refuse_formless(core.graph)
    stack.enter_context(capture_quietly())
    given = fake_inputs(inputs)
    if given:
        stack.enter_context(private.tracing(private.TracingContext(given[0].fake_mode)))  # type: ignore[attr-defined]
    with LOCK, kept():  # torch marks a running trace in a global that other threads' traces would spoil
        joint = aot_export_joint_with_descriptors(
            stack, core, tuple(given), decompositions=decompositions, keep_inference_input_mutations=True
        )
    lay_out_results(joint, core)
    share_seeds(joint._aot_graph_capture.graph_module.graph)
    mark_compared(joint._aot_graph_capture.graph_module.graph, RULES)
    if change is not None:
        change(joint._aot_graph_capture.graph_module)
    return joint, given


def refuse_formless(graph: torch.fx.Graph) -> None:
    """Refuse an op whose gradient is that of the ops that its kernel calls, where a gradient can come to it."""
    wanted: set[torch.fx.Node] = set()
    for node in reversed(graph.nodes):
        floats = [
            leaf for leaf in private.tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor) and floating(leaf)
        ]
        if node.op == "output" or is_inplace(node) or floats and not wanted.isdisjoint(node.users):
            wanted.add(node)
            if NO_FORMULA in node.meta:
                reason = "it has no formula for its gradient; eager's is that of the ops that its kernel calls"
                raise Unsupported(str(node.target), reason, user_line(node))


def floating(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def lay_out_results(joint: Any, core: torch.fx.GraphModule) -> None:
    """Give results the strides that they have in the captured graph, which are eager's, whatever decompositions made of
    them.
    """
    metadata, graph = joint._aot_state.fw_metadata, joint._aot_graph_capture.graph_module.graph
    output, results = graph.output_node(), cast(Sequence[Any], core.graph.output_node().args[0])
    values, first = list(output.args[0]), metadata.num_mutated_inp_runtime_indices + len(metadata.tokens)
    for number, (node, info) in enumerate(zip(results, metadata.output_info), first):
        wanted = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
        value = values[number].meta.get("val") if isinstance(values[number], torch.fx.Node) else None
        if not (isinstance(wanted, Tensor) and isinstance(value, Tensor)) or info.output_type.name not in (
            "non_alias",
            "unsafe_view_alias",
        ):
            continue
        if (
            wanted.layout is not torch.strided
            or wanted.shape != value.shape
            or same_sizes(wanted.stride(), value.stride())
        ):
            continue
        with graph.inserting_before(output):
            laid = graph.call_function(aten.clone.default, (values[number],))
        with cast(Any, value).fake_mode:
            fake = torch.empty_strided(value.shape, wanted.stride(), dtype=value.dtype, device=value.device)
        laid.meta = values[number].meta | {"val": fake}
        values[number] = laid
    output.args = (type(output.args[0])(values),)


def same_sizes(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether sizes or strides are the same for all values of their symbols; asks no guard."""
    expression = lambda n: n.node.expr if isinstance(n, torch.SymInt) else n  # noqa: E731
    return [expression(n) for n in one] == [expression(n) for n in other]


@contextlib.contextmanager
def capture_quietly() -> Any:
    """Keep torch's tracing from warning and from traces of its own."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def with_constants(run: Callable, constants: list[Tensor]) -> Callable:
    return lambda inputs: run([*inputs, *constants])


def route(joint: Any, given: list[Tensor], compiler: Compiler) -> Built:
    """Choose how the graphs run, from AOTAutograd's metadata."""
    reason = why_wrapped(joint)
    state, captured = joint._aot_state, joint._aot_graph_capture
    graphs = {"joint": captured.graph_module}
    if any(info.mutates_data and overlaps(value) for info, value in zip(state.fw_metadata.input_info, given)):
        raise Unsupported(
            "an input whose elements share memory is changed in place",
            "what that means depends on the order of the writes",
        )
    mutates = any(info.mutates_data for info in state.fw_metadata.input_info)
    if reason:
        return wrapped(joint, compiler, graphs, reason, mutates)
    module = captured.graph_module
    if not state.needs_autograd:
        plain = flat_graph(module)
        graphs["forward"] = plain
        program = compiler(plain, placeholder_values(plain), "forward")
        moving = torch.is_grad_enabled() and any(isinstance(value, Tensor) and value.requires_grad for value in given)
        return Built((without_grad if moving else outside_autocast)(program), graphs, program, mutates=mutates)
    refuse_sparse(module)
    halves = partition(module, captured.updated_flat_args, state.fw_metadata.num_outputs)
    graphs |= {"forward": halves.forward, "backward": halves.backward}
    # torch 2.11 has one name where later versions tell the user's requires_grad from the backward's
    requires_grad = [
        getattr(info, "requires_grad_for_backward", info.requires_grad) for info in state.fw_metadata.output_info
    ]
    program = compiler(halves.forward, placeholder_values(halves.forward), "forward")
    gradient = Differentiable(halves, program, compiler, requires_grad)
    return Built(gradient.apply, graphs, program, gradient, mutates=mutates)


def refuse_sparse(module: torch.fx.GraphModule) -> None:
    """Refuse what the backward alone would refuse, when it is too late: sparse gradients, as of
    `nn.Embedding(sparse=True)`.
    """
    for node in module.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and value.layout is not torch.strided:
            raise Unsupported(
                str(node.target),
                f"a gradient has layout {value.layout}: only strided tensors are compiled",
                user_line(node),
            )


def overlaps(value: Tensor) -> bool:
    """Whether two elements of a tensor may be one piece of memory; expanded tensors, and views with strides that do not
    nest.
    """
    reach = 0
    for stride, extent in sorted((stride, n) for stride, n in zip(value.stride(), value.shape) if n != 1):
        if stride <= reach and value.numel() != 0:
            return True
        reach += stride * (extent - 1)
    return False


def without_grad(program: Callable[[list[Any]], Sequence[Any]]) -> Callable[[list[Any]], Sequence[Any]]:
    """Run a program whose results have no gradient although its inputs require one: what it calls of torch would
    record.
    """
    inside = outside_autocast(program)

    def run(inputs: list[Any]) -> Sequence[Any]:
        with torch.no_grad():
            return inside(inputs)

    return run
