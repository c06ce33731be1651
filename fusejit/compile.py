"""The pipeline, on one screen: a functional ATen graph becomes a Program.

In: an fx graph and the real layouts of its inputs. Out: `Program`. Each pass is a function of its own name; `record`
keeps every stage's text, and `explain()` and FUSEJIT_DUMP are nothing more than that record.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule

from . import knobs
from .autodiff.program_calls import PROGRAMS
from .codegen.emit.foreach import render_foreach
from .codegen.emit.kernel import Kernel
from .codegen.emit.memory_plan import plan
from .codegen.emit.program import Program, verify
from .codegen.emit.writer import render
from .codegen.graph.bind_sizes import Bound, bound, hints, sized
from .codegen.graph.conv_bias import lift_bias
from .codegen.graph.scatter_dtype import sums
from .codegen.graph.simplify import simplify
from .codegen.ir.cluster import Cluster
from .codegen.ir.graph import Extern, Foreach, Lowered
from .codegen.ir.size import Scope
from .codegen.ir.size import scope as size_scope
from .codegen.ops.rules import RULES
from .codegen.passes.concat_in_place import cats
from .codegen.passes.fuse import fuse
from .codegen.passes.hazards import in_memory
from .codegen.passes.horizontal import foreach
from .codegen.passes.horizontal_reduction import many
from .codegen.passes.lower import lower
from .codegen.passes.matmul_epilogue import epilogue
from .codegen.passes.rfactor import split
from .codegen.passes.schedule import schedule
from .codegen.schedule.device import Device, machine
from .errors import CompileError
from .runtime.autotune import MOST, Tuned, tune
from .runtime.compile_workers import KernelSpec, compile_kernels
from .runtime.eager import eager
from .runtime.frame_stack import roomy
from .runtime.launch import compile_all
from .runtime.launch import kernel as launcher
from .runtime.multiversion import Variants


@dataclass(frozen=True, slots=True)
class Options:
    """What a compilation needs to know besides the graph; `target` compiles for a GPU that need not be here."""

    backend: str = "triton"
    jit_level: str = "O2"
    numerics: str = "fast"
    target: str | None = None


@roomy
def compile_graph(
    module: GraphModule, inputs: Sequence[Any], options: Options, *, record: Callable[[str, Any], None] | None = None
) -> Program | Variants:
    """Compile a functional graph.

    Args:
        module: functional ATen ops with fake tensors in `node.meta["val"]`; `copy_` into inputs only at the end.
        inputs: one per placeholder: a (fake) tensor with the real dtype, shape, strides and device, or a Python value.
        record: called with (stage, value) after each pass.

    Raises:
        Unsupported: the graph holds something that neither a kernel nor an extern call can do.
        CompileError: a kernel does not compile.
    """
    note = record or (lambda stage, value: None)
    known = bound(inputs)
    if not known:
        return one_program(module, inputs, options, note, ())

    def for_sizes(values: dict[str, int]) -> tuple[Program, Scope]:
        with Scope(values) as scope:
            return one_program(*sized(module, inputs), options, note, known), scope

    return Variants(known, for_sizes, hints(inputs, known), op_by_op(module))


class InScope:
    """A graph for many sizes that other graphs call: it is compiled with each of those, in its scope, and once for all
    calls there.

    Its symbols are theirs, and so are its assumptions: it has no variants of its own.
    """

    def __init__(
        self, module: GraphModule, inputs: Sequence[Any], options: Options, note: Callable[[str, Any], None]
    ) -> None:
        self.module, self.inputs, self.options, self.note = module, inputs, options, note

    def in_scope(self) -> Program:
        """Return the Program for the scope that is open."""
        known = size_scope().programs
        if self not in known:
            known[self] = one_program(*sized(self.module, self.inputs), self.options, self.note, bound(self.inputs))
        return known[self]  # type: ignore[no-any-return]


def one_program(
    module: GraphModule, inputs: Sequence[Any], options: Options, note: Callable[[str, Any], None], known: Bound
) -> Program:
    """Compile a graph for one shape, or in an open `Scope` for all sizes that its assumptions allow."""
    clock = _Clock()
    device = machine(options.target)
    gpu = options.target is not None or any(isinstance(v, torch.Tensor) and v.is_cuda for v in inputs)
    module, lifted = clock("bias", lift_bias(module, options.numerics, gpu and options.jit_level != "O1"))
    graph = clock("simplify", simplify(module))
    summed = clock("sums", sums(graph, options.numerics, device.arch))
    note("simplified", graph)
    lowered = clock("lower", lower(graph, inputs, RULES, PROGRAMS, options.numerics))
    note("clusters", lowered)
    fused, unfused = clock("fuse", fuse(lowered, options.jit_level != "O1", device))
    rewritten: tuple[str, ...] = ()
    if options.jit_level != "O1":
        fused, rewritten = clock("epilogue", epilogue(fused, options.numerics, gpu))
        fused = clock("many", many(cats(fused), device))
    fused = clock("split", split(fused, device, options.numerics))
    if options.jit_level != "O1":
        fused = clock("horizontal", foreach(fused, device))
    fused = in_memory(fused)
    note("fused", fused)
    kernels, tuned = clock("render", _kernels(fused, options, device))
    steps = clock("plan", plan(fused, kernels))
    if knobs.read("debug"):
        verify(steps, fused)
    retargeted = torch.device("cuda") if options.target else None
    rendered = tuple(k for k in kernels if k is not None)
    program = Program(
        steps,
        fused.buffers,
        fused.inputs,
        fused.outputs,
        unfused,
        fused.reasons,
        retargeted,
        rendered,
        clock.spent,
        tuned,
    )
    program.rewrites = lifted + summed + rewritten
    if known:
        program.sizes, program.atoms, program.hints = known, size_scope().atoms, size_scope().hints
    note("source", program.source)
    _compile_kernels(program, options)
    clock("kernels", None)
    return program


def op_by_op(module: GraphModule) -> Callable[[list[Any]], Sequence[Any]]:
    """A functional graph as something that is called like a Program, and runs op by op."""
    run = eager(module)

    def program(inputs: list[Any]) -> Sequence[Any]:
        tensors = tuple(inputs)
        inputs.clear()
        return run(*tensors)  # type: ignore[no-any-return]

    return program


def _kernels(fused: Lowered, options: Options, device: Device) -> tuple[list[Kernel | None], tuple[str, ...]]:
    """Schedule and render every cluster; None stands for an extern call. At O3 also say how each schedule was
    chosen.
    """
    result: list[Kernel | None] = []
    notes = []
    for step in fused.steps:
        if isinstance(step, Extern | Foreach):
            result.append(
                render_foreach(step, fused.buffers, options.numerics, device) if isinstance(step, Foreach) else None
            )
            continue
        assert isinstance(step, Cluster)
        ready, tiles = schedule(step, device)
        kernel = render(ready, tiles, fused.buffers, options.numerics)
        if options.jit_level == "O3" and tiles.choice is not None and not kernel.extents:
            listed = [replace(c.schedule, choice=tiles.choice) for c in tiles.choice.costs if c.resident][1:MOST]
            others = [render(ready, other, fused.buffers, options.numerics) for other in listed]
            here = options.backend == "triton" and not options.target
            unmeasured = Tuned(kernel, (), "not measured: the model's choice")
            tuned = tune([kernel, *others], fused.buffers) if here else unmeasured
            kernel = tuned.kernel
            notes.append(f"{kernel.name}: {tuned.why}")
        result.append(kernel)
    return result, tuple(notes)


def _compile_kernels(program: Program, options: Options) -> None:
    """Compile the program's kernels, and say of one that does not compile which ops it was made of."""
    try:
        _compile_unique(program, options)
    except CompileError as error:
        lines = next((k.ops for k in program.kernels if k.name in str(error)), ())
        raise CompileError(f"{error}\nthe kernel was made of:\n" + "\n".join(f"  {line}" for line in lines)) from error


def _compile_unique(program: Program, options: Options) -> None:
    """Compile each kernel of a program once: for a named target without launching, or for this process's device."""
    unique = list(
        {k.name: k for k in program.kernels if not k.extents}.values()
    )  # where sizes vary, at the first launch
    if options.target:
        specs = [
            KernelSpec(
                k.source,
                k.name,
                k.params,
                k.constants,
                k.num_warps,
                k.num_stages,
                k.debug,
                (True,) * len(k.params),
                k.fp_fusion,
            )
            for k in unique
        ]
        done = dict(zip((k.name for k in unique), compile_kernels(specs, options.target), strict=True))
        program.kernels = tuple(replace(k, compiled=done[k.name]) for k in program.kernels)
    elif options.backend == "triton":
        compile_all(
            launcher(
                k.source,
                name=k.name,
                params=k.params,
                constants=dict(k.constants),
                grid=k.grid,
                num_warps=k.num_warps,
                num_stages=k.num_stages,
                debug=k.debug,
                fp_fusion=k.fp_fusion,
                aligned=(True,) * len(k.params),
            )
            for k in unique
        )


class _Clock:
    """Milliseconds by stage: each call notes the time since the one before."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self.last = time.perf_counter()

    def __call__(self, stage: str, value: Any) -> Any:
        now = time.perf_counter()
        self.spent[stage] = (now - self.last) * 1e3
        self.last = now
        return value
