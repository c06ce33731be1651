"""Report: what one call of a jitted function runs, what it moves, and what was not fused and why.

In: a specialisation. Out: `Report`: fields for programs, `str()` for people. Nothing is executed for it.

    f on backend interpret: 1 kernel launches, 0 extern calls, 48 B moved (eager 128 B, minimum 48 B)
      forward
        flat_mul_add_relu_393a1fc2  pointwise  reads 32 B, writes 16 B
            mul.Tensor, add.Tensor, relu.default  model.py:3: (a * b + a).relu()
      compile  capture 20 ms  forward 3 ms  joint 60 ms  backward 0 ms
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import torch_private as private
from ..capture.regions.extract import Region
from ..codegen.emit.kernel import Kernel, reads_of
from ..codegen.emit.program import Program
from ..codegen.ir.cluster import Cluster
from ..codegen.ir.concretize import hinted, hinted_buffers
from ..codegen.ir.graph import Buffer, Extern, refs
from ..codegen.ir.size import Scope
from ..compile_log import Fallback
from ..runtime.cudagraph import Recorded
from ..runtime.multiversion import Variants
from ..specialise.specialisation import Specialisation

aten = torch.ops.aten
ON_THE_CPU = (
    "Kernels are compiled for CUDA tensors only: to see them, use backend='interpret' (they run, slowly, on the "
    "CPU) or "
    "fusejit.compile_for(fn, args, target='sm_90')"
)
NO_KERNEL = {
    aten.detach.default,
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
}


@dataclass(frozen=True, slots=True)
class Half:
    """The forward or the backward Program: its kernels in launch order, launches of one call, extern calls, unfused
    pairs.

    `own` are the kernels and `called` the torch ops of the Program itself; `regions` are the Programs that it calls:
    name, number of calls, and what one call runs; `recorded`: what a CUDA graph does for it, or why there is none. All
    other fields are totals: a region's kernels are listed once, its launches as often as it runs.
    """

    kernels: tuple[Kernel, ...] = ()
    launches: int = 0
    externs: tuple[Extern, ...] = ()
    unfused: tuple[Any, ...] = ()
    bytes_fused: int = 0
    tuned: tuple[str, ...] = ()
    own: tuple[Kernel, ...] = ()
    called: tuple[Extern, ...] = ()
    regions: tuple[tuple[str, int, Half], ...] = ()
    recorded: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """What `JitFunction.explain(*args)` returns; forward and backward together unless said otherwise.

    Attributes:
        kernels: each with name, template, source, ops (with the user's lines), bytes_read, bytes_written.
        launches: kernel launches in one call; externs: calls of torch's own kernels.
        fallbacks: op, reason and line of what runs eagerly.
        unfused: pairs of clusters that share memory and stay apart, each with a reason.
        eager: what eager launches: (op, bytes it moves) of each, calls of torch's own kernels included.
        bytes_eager: their sum; bytes_fused: that kernels and extern calls move here;
        bytes_minimum: every input of the forward and of the backward read once and every result written once.
        compile_ms: milliseconds by stage; "forward.render" and the like are parts of "forward".
        effects: attribute writes that capture put back. why: what made this specialisation necessary.
        control: what each `if`, loop and condition on a tensor became, and why.
        regions: blocks that were captured and compiled once, each with its number of calls (see `fusejit.lazy_inline`).
        inlined: blocks that were captured in place though marked or repeated: (class, reason).
        rewrites: what is computed another way than written (products in parts of their rows), or would be and cannot,
            and why; and in which
            dtype half types are added up where data gives the place.
        dynamic: which sizes of the arguments may vary and why, and which may not.
        unbound: why calls, from the third on, are still checked by the general key and guards (see
        runtime/fast_path.py). uncompiled: why a captured graph has no kernels where nothing was refused, "" otherwise.
        graphs: where a call is cut into several graphs, the report of each, in the order in which they run; empty
            otherwise.
    """

    name: str
    backend: str
    forward: Half
    backward: Half
    fallbacks: tuple[Fallback, ...]
    effects: tuple[Any, ...]
    control: tuple[Any, ...]
    eager: tuple[tuple[str, int], ...]
    bytes_minimum: int
    compile_ms: dict[str, float]
    stages: dict[str, Any]
    why: str = ""
    graphs: tuple[Report, ...] = ()
    regions: tuple[Any, ...] = ()
    inlined: tuple[tuple[str, str], ...] = ()
    dynamic: tuple[str, ...] = ()
    unbound: str = ""
    rewrites: tuple[str, ...] = ()
    uncompiled: str = ""

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        return (*self.forward.kernels, *self.backward.kernels)

    @property
    def launches(self) -> int:
        return self.forward.launches + self.backward.launches

    @property
    def externs(self) -> tuple[Extern, ...]:
        return (*self.forward.externs, *self.backward.externs)

    @property
    def unfused(self) -> tuple[Any, ...]:
        return (*self.forward.unfused, *self.backward.unfused)

    @property
    def bytes_eager(self) -> int:
        return sum(moved for _, moved in self.eager)

    @property
    def bytes_fused(self) -> int:
        return self.forward.bytes_fused + self.backward.bytes_fused

    def __str__(self) -> str:
        moved = (
            f"{_bytes(self.bytes_fused)} moved (eager {_bytes(self.bytes_eager)}, minimum {_bytes(self.bytes_minimum)})"
        )
        lines = [
            f"{self.name} on backend {self.backend}: {self.launches} kernel launches, {len(self.externs)} extern "
            f"calls, {moved}"
        ]
        if self.uncompiled:
            lines = [
                f"{self.name} on backend {self.backend}: {len(self.eager)} ops of torch, {_bytes(self.bytes_eager)} "
                f"moved. {self.uncompiled}"
            ]
        if self.graphs:
            lines[0] += f", in {len(self.graphs)} graphs"
        for title, half in (("forward", self.forward), ("backward", self.backward)):
            if half.kernels or half.externs or half.regions:
                lines += [f"  {title}", *(f"    {line}" for line in _half(half))]
        regions = [f"{r.name}: {r.calls} calls, {r.ops} ops captured once" for r in self.regions]
        inlined = [f"{name}: {reason}" for name, reason in self.inlined]
        for title, rows in (
            ("control flow", self.control),
            ("rewrites", self.rewrites),
            ("sizes", self.dynamic),
            ("regions", regions),
            ("captured in place", inlined),
            ("fallbacks", self.fallbacks),
            ("calls go the general way, some 10 us longer", [self.unbound] if self.unbound else []),
            ("attribute writes put back after capture", self.effects),
        ):
            if rows:
                lines += [f"  {title}", *(f"    {row}" for row in rows)]
        lines.append(
            "  compile  "
            + "  ".join(f"{stage} {ms:.0f} ms" for stage, ms in self.compile_ms.items() if "." not in stage)
        )
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """The same for notebooks: the first line, and the rest in a fixed-width block under it."""
        first, _, rest = str(self).partition("\n")
        return f"<details open><summary><b>{html.escape(first)}</b></summary><pre>{html.escape(rest)}</pre></details>"


def _half(half: Half) -> list[str]:
    lines = []
    for kernel in half.own:
        template = kernel.template if kernel.tensors == 1 else f"{kernel.template} of {kernel.tensors}"
        lines.append(
            f"{kernel.name}  {template}  reads {_bytes(kernel.bytes_read)}, writes {_bytes(kernel.bytes_written)}"
        )
        expected = f"; {kernel.schedule.choice.expected}" if kernel.schedule.choice else ""
        lines.append(f"    {kernel.schedule}; grid {' x '.join(map(str, kernel.grid))}{expected}")
        lines += [f"    {', '.join(ops)}{'  ' if line else ''}{line}" for line, ops in _by_line(kernel.ops)]
    lines += [
        f"extern {e.target}" + (f"  {e.line}" if e.line else "") + (f": {e.why}" if e.why else "") for e in half.called
    ]
    lines += [f"schedule of {line}" for line in half.tuned]
    lines += [f"CUDA graph: {half.recorded}"] if half.recorded else []
    lines += [f"not fused: {u}" for u in half.unfused]
    for name, calls, inner in half.regions:
        lines += [
            f"{calls} calls of {name}: {inner.launches} kernel launches each",
            *(f"  {line}" for line in _half(inner)),
        ]
    return lines


def _by_line(ops: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Group ops ("name  line") by their line, neighbours only."""
    found: list[tuple[str, list[str]]] = []
    for op in ops:
        name, _, line = op.partition("  ")
        if not found or found[-1][0] != line:
            found.append((line, []))
        found[-1][1].append(name)
    return found


def _bytes(n: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if n >= size:
            return f"{n / size:.1f} {unit}"
    return f"{n} B"


def report(specialisation: Specialisation, name: str, why: str = "", unbound: str = "") -> Report:
    """Return the report of one specialisation; a backward is compiled for it if none has run yet."""
    backward = specialisation.backward
    eager, variants = _eager(specialisation), _variants(specialisation)
    notes = specialisation.explained
    return Report(
        name=name,
        backend=specialisation.backend,
        forward=_program(specialisation.forward),
        backward=_program(backward),
        fallbacks=notes.fallbacks,
        effects=notes.effects,
        control=notes.control,
        eager=eager,
        bytes_minimum=_bytes_minimum(specialisation, backward),
        compile_ms=specialisation.stages_ms,
        stages=dict(notes.record),
        why=why,
        inlined=tuple(dict.fromkeys(notes.inlined)),
        dynamic=(*notes.dynamic, *variants),
        regions=_regions(specialisation),
        unbound=unbound,
        rewrites=_rewrites(notes.rewrites, specialisation.forward, backward),
        uncompiled=_uncompiled(specialisation),
    )


def _uncompiled(specialisation: Specialisation) -> str:
    """Say why a captured graph has no kernels where nothing went wrong: its tensors are on the CPU. "" otherwise."""
    graph = specialisation.record.get("capture")
    if specialisation.backend != "eager" or graph is None or specialisation.fallbacks:
        return ""
    values = [n.meta.get("val") for n in graph.graph.nodes if n.op == "placeholder"]
    return "" if any(isinstance(v, torch.Tensor) and v.is_cuda for v in values) else ON_THE_CPU


def _variants(specialisation: Specialisation) -> list[str]:
    """What the Programs of a graph whose sizes vary assume of them, and how long rows share a kernel."""
    halves = (
        ()
        if specialisation.built is None
        else (("forward", specialisation.built.forward), ("backward", specialisation.built.backward()))
    )
    lines = []
    for half, variants in halves:
        if not isinstance(variants, Variants):
            continue
        if len(variants.programs) > 1:
            lines += [f"{half}: a variant for {assumed}" for assumed, _ in variants.programs]
        lines += [f"{half}: {op}: {reason}" for op, reason in variants.notes]
        parts = {id(part): part for _, program in variants.programs for part in (program, *program.called)}
        for kernel in (kernel for part in parts.values() for kernel in part.kernels):
            if kernel.schedule.buckets:
                longest = kernel.schedule.buckets[-1][0]
                lines.append(
                    f"{kernel.name}: rows of any length up to {longest}, in buckets by power of two, each compiled "
                    "when it is met"
                )
    return lines


def joined(parts: Sequence[Report], name: str) -> Report:
    """Return the report of a call that is cut into several graphs: sums, and each graph's own report."""
    if len(parts) == 1:
        return parts[0]
    compile_ms: dict[str, float] = {}
    for part in parts:
        for stage, spent in part.compile_ms.items():
            compile_ms[stage] = compile_ms.get(stage, 0.0) + spent
    graphs = tuple(part for part in parts if part.stages.get("capture") is not None)
    backends = dict.fromkeys(part.backend for part in graphs)
    return Report(
        name=name,
        backend=", ".join(backends) or "eager",
        forward=_together([part.forward for part in parts]),
        backward=_together([part.backward for part in parts]),
        fallbacks=tuple(row for part in parts for row in part.fallbacks),
        effects=tuple(row for part in parts for row in part.effects),
        control=tuple(row for part in parts for row in part.control),
        eager=tuple(row for part in parts for row in part.eager),
        bytes_minimum=sum(part.bytes_minimum for part in parts),
        compile_ms=compile_ms,
        graphs=graphs,
        why=parts[0].why if parts else "",
        rewrites=tuple(row for part in parts for row in part.rewrites),
        regions=tuple(row for part in parts for row in part.regions),
        inlined=tuple(row for part in parts for row in part.inlined),
        stages={
            f"graph {number}.{stage}": value
            for number, part in enumerate(graphs)
            for stage, value in part.stages.items()
        },
    )


def _together(halves: Sequence[Half]) -> Half:
    return Half(
        tuple(kernel for half in halves for kernel in half.kernels),
        sum(half.launches for half in halves),
        tuple(call for half in halves for call in half.externs),
        tuple(pair for half in halves for pair in half.unfused),
        sum(half.bytes_fused for half in halves),
    )


def _program(program: Program | None) -> Half:
    if program is None:
        return Half()
    moved, (buffers, _) = sum(k.bytes_read + k.bytes_written for k in program.kernels), _in_numbers(program)
    for call in program.externs:
        moved += sum(buffers[n].bytes for n in (*call.reads, *(o for o in call.outputs if o)))
    calls: dict[str, list[Extern]] = {}
    for call in program.calls:
        calls.setdefault(f"{call.target} {id(call.program)}", []).append(call)
    inner = [(group[0].target, len(group), _program(group[0].program)) for group in calls.values()]
    return Half(
        kernels=tuple({k.name: k for part in (program, *program.called) for k in part.kernels}.values())
        if inner
        else program.kernels,
        launches=program.launches + sum(count * half.launches for _, count, half in inner),
        externs=program.externs + tuple(call for _, count, half in inner for call in half.externs * count),
        unfused=program.unfused,
        bytes_fused=moved + sum(count * half.bytes_fused for _, count, half in inner),
        tuned=program.tuned,
        own=program.kernels,
        called=program.externs,
        regions=tuple(inner),
        recorded=program.state if isinstance(program, Recorded) else "",
    )


def _rewrites(graph: Sequence[str], *programs: Program | None) -> tuple[str, ...]:
    """What was rewritten in the graph, and in the Programs made of it, those that they call included."""
    parts = [part for program in programs if program is not None for part in (program, *program.called)]
    return tuple(dict.fromkeys([*graph, *(line for part in parts for line in part.rewrites)]))


def _regions(specialisation: Specialisation) -> tuple[Any, ...]:
    """The regions that were compiled as such; all that were captured where the graph runs eagerly."""
    if specialisation.captured is None or specialisation.captured.regions is None:
        return ()
    back = {name for name, _ in specialisation.notes.inlined}
    return tuple(region for region in specialisation.captured.regions.found if region.name not in back)


def _eager(specialisation: Specialisation) -> tuple[tuple[str, int], ...]:
    """Name each of eager's kernels with the bytes that it reads and writes: the ops of the joint graph without
    decompositions.
    """
    graph = specialisation.record.get("capture")
    if graph is None:
        return ()
    if specialisation.built is None:
        return _counted(graph)
    from ..autodiff.joint import build  # AOTAutograd: seconds of import, there already when something was compiled
    from ..autodiff.region_ops import in_state, stand_ins

    joint = lambda graph, inputs: build(graph, inputs, lambda module, inputs, stage: None, {}).graphs["joint"]  # noqa: E731
    if (
        specialisation.built.regions and "joint" not in specialisation.built.graphs
    ):  # all of the graph is calls of regions: each is counted once
        rows: dict[int, tuple[tuple[str, int], ...]] = {}
        for known in specialisation.built.regions:
            if id(known) not in rows:
                with in_state(known.region):
                    rows[id(known)] = _counted(joint(known.region.graph, stand_ins(known.region.inputs)))
        return tuple(row for known in specialisation.built.regions for row in rows[id(known)])
    values = [n.meta["val"] for n in graph.graph.nodes if n.op == "placeholder"]
    grad = specialisation.built.backward() is not None
    inputs = [
        v.requires_grad_(grad and own) if own else v
        for v, own in zip(_copies(values), specialisation.differentiable, strict=True)
    ]
    with torch.set_grad_enabled(grad):
        return _counted(joint(graph, inputs))


def _copies(values: list[Any]) -> list[Any]:
    """Fake tensors like those of a capture, of their own memory (equal blocks share their fake weights), all sizes
    numbers.
    """
    from ..torch_private import FakeTensorMode

    if not values:
        return []
    symbolic = any(isinstance(value, torch.SymInt | torch.SymFloat) for value in values)
    with FakeTensorMode() if symbolic else values[0].fake_mode:
        return [
            torch.empty_strided(_numbers(v.shape), _numbers(v.stride()), dtype=v.dtype, device=v.device)
            if isinstance(v, torch.Tensor)
            else _numbers([v])[0]
            for v in values
        ]


def _numbers(sizes: Sequence[Any]) -> tuple[Any, ...]:
    """Sizes as they were in the call that was traced; asking torch for their values would fix them."""
    return tuple(n.node.hint if isinstance(n, torch.SymInt | torch.SymFloat) else n for n in sizes)


def _in_numbers(program: Program) -> tuple[dict[str, Buffer], list[Any]]:
    """A Program's buffers and its kernels' clusters as they are in the call that was compiled for."""
    with Scope(program.hints):
        clusters = [hinted(k.cluster) if isinstance(k.cluster, Cluster) else k.cluster for k in program.kernels]
        return hinted_buffers(program.buffers, program.buffers), clusters


def _counted(graph: torch.fx.GraphModule) -> tuple[tuple[str, int], ...]:
    """Name each op of a graph with its bytes, the ops of a region as often as it is called."""
    rows: list[tuple[str, int]] = []
    for node in graph.graph.nodes:
        if isinstance(node.target, Region):
            rows += _counted(node.target.graph)
        elif node.op == "call_function" and (moved := _node_bytes(node)) is not None:
            rows.append((str(node.target), moved))
    return tuple(rows)


def _node_bytes(node: torch.fx.Node) -> int | None:
    """Return the bytes of a node's operands and results; None where no kernel runs: views, empty memory, what tracing
    writes back.
    """
    results = _tensors(node.meta.get("val"))
    operands = [v for n in node.all_input_nodes for v in _tensors(n.meta.get("val"))]
    if not isinstance(node.target, private.OpOverload) or node.target in NO_KERNEL:
        return None
    if node.target is torch.ops.aten.copy_.default and node.args[1].op == "call_function":  # type: ignore[union-attr]
        return None  # eager's own op changed the input in place
    if not node.target._schema.is_mutable:
        shared = {v.untyped_storage()._cdata for v in operands}
        if node.target.is_view or all(v.untyped_storage()._cdata in shared for v in results):
            return None
    return sum(_size(v) for v in (*operands, *results))


def _bytes_minimum(specialisation: Specialisation, backward: Program | None) -> int:
    """Every input of each Program read once and every result written once, what is saved between the two included."""
    if specialisation.forward is not None:
        return sum(_boundary(program) for program in (specialisation.forward, backward) if program is not None)
    graph = specialisation.record.get("capture")
    if graph is None:
        return 0
    nodes = [
        n for n in graph.graph.nodes if n.op == "placeholder" and n.users
    ] + graph.graph.output_node().all_input_nodes
    return sum(_size(v) for n in nodes for v in _tensors(n.meta.get("val")))


def _boundary(program: Program) -> int:
    """The bytes of what comes into a Program and is read, and of what it makes or changes and keeps."""
    read: dict[str, int] = {}
    (buffers, clusters), inputs = _in_numbers(program), set(program.inputs)
    for found in (
        *(reads_of(cluster, buffers) for cluster in clusters),
        *({n: buffers[n].bytes for n in e.reads} for e in (*program.externs, *program.calls)),
    ):
        for name in found.keys() & inputs:
            read[name] = max(read.get(name, 0), found[name])
    changed = {b.written_to for b in buffers.values() if b.written_to}
    written = {ref.buffer for ref in refs(program.outputs)} - inputs | changed & inputs
    return sum(read.values()) + sum(buffers[name].bytes for name in written)


def _tensors(value: Any) -> Sequence[torch.Tensor]:
    values = value if isinstance(value, (tuple, list)) else (value,)
    return [
        v for v in values if isinstance(v, torch.Tensor) and v.layout is torch.strided
    ]  # others have no strides to count by


def _size(value: torch.Tensor) -> int:
    elements = 1
    for n, stride in zip(_numbers(value.shape), _numbers(value.stride()), strict=True):
        elements *= n if stride != 0 or n == 0 else 1
    return elements * value.dtype.itemsize
