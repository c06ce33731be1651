"""Explain: what one call of a jitted function runs, what it moves, and what was not fused and why.

In: a specialisation. Out: `Report`: fields for programs, `str()` for people. Nothing is executed for it.

    f: 1 kernel launch, 0 extern calls, 48 bytes moved (eager 128, minimum 48)
      forward
        flat_mul_add_relu_393a1fc2  pointwise  reads 32 writes 16
          relu.default  model.py:3: (a * b + a).relu()
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .codegen.lower import Extern
from .codegen.program import Program
from .codegen.render import Kernel
from .specialise import Fallback, Specialisation


@dataclass(frozen=True, slots=True)
class Half:
    """The forward or the backward Program: its kernels in launch order, launches of one call, extern calls, unfused pairs."""

    kernels: tuple[Kernel, ...] = ()
    launches: int = 0
    externs: tuple[Extern, ...] = ()
    unfused: tuple[Any, ...] = ()
    bytes_fused: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """What `JitFunction.explain(*args)` returns; forward and backward together unless said otherwise.

    Attributes:
        kernels: each with name, template, source, ops (with the user's lines), bytes_read, bytes_written.
        launches: kernel launches in one call; externs: calls of torch's own kernels; fallbacks: op, reason and line of what runs eagerly.
        unfused: pairs of clusters that share memory and stay apart, each with a reason.
        bytes_eager: bytes that eager's kernels move, op by op; bytes_fused: that kernels and extern calls move here;
        bytes_minimum: every input read once and every output written once.
        compile_ms: milliseconds by stage. effects: attribute writes that capture put back.
    """

    name: str
    backend: str
    forward: Half
    backward: Half
    fallbacks: tuple[Fallback, ...]
    effects: tuple[Any, ...]
    bytes_eager: int
    bytes_minimum: int
    compile_ms: dict[str, float]
    stages: dict[str, Any]

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
    def bytes_fused(self) -> int:
        return self.forward.bytes_fused + self.backward.bytes_fused

    def __str__(self) -> str:
        moved = f"{_bytes(self.bytes_fused)} moved (eager {_bytes(self.bytes_eager)}, minimum {_bytes(self.bytes_minimum)})"
        lines = [f"{self.name} on backend {self.backend}: {self.launches} kernel launches, {len(self.externs)} extern calls, {moved}"]
        for title, half in (("forward", self.forward), ("backward", self.backward)):
            if half.kernels or half.externs:
                lines += [f"  {title}", *(f"    {line}" for line in _half(half))]
        for title, rows in (("fallbacks", self.fallbacks), ("attribute writes put back after capture", self.effects)):
            if rows:
                lines += [f"  {title}", *(f"    {row}" for row in rows)]
        lines.append("  compile  " + "  ".join(f"{stage} {ms:.0f} ms" for stage, ms in self.compile_ms.items()))
        return "\n".join(lines)


def _half(half: Half) -> list[str]:
    lines = []
    for kernel in half.kernels:
        lines.append(f"{kernel.name}  {kernel.template}  reads {_bytes(kernel.bytes_read)}, writes {_bytes(kernel.bytes_written)}")
        lines += [f"    {op}" for op in kernel.ops]
    lines += [f"extern {e.target}" + (f"  {e.line}" if e.line else "") for e in half.externs]
    return lines + [f"not fused: {u}" for u in half.unfused]


def _bytes(n: int) -> str:
    for unit in ("B", "KB", "MB"):
        if n < 10_000:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n = n / 1000  # type: ignore[assignment]
    return f"{n:.1f} GB"


def report(found: Specialisation, name: str) -> Report:
    """Return the report of one specialisation; a backward is compiled for it if none has run yet."""
    backward = found.backward
    compile_ms = dict(found.compile_ms)
    for title, program in (("forward", found.forward), ("backward", backward)):
        if isinstance(program, Program):
            compile_ms |= {f"{title}.{stage}": ms for stage, ms in program.compile_ms.items()}
    graph = found.record.get("capture")
    return Report(
        name=name, backend=found.backend, forward=_program(found.forward), backward=_program(backward), fallbacks=tuple(found.fallbacks),
        effects=tuple(found.effects), bytes_eager=_bytes_eager(found), bytes_minimum=_bytes_minimum(graph, found.forward, backward),
        compile_ms=compile_ms, stages=dict(found.record),
    )  # fmt: skip


def _program(program: Program | None) -> Half:
    if program is None:
        return Half()
    moved = sum(k.bytes_read + k.bytes_written for k in program.kernels)
    for call in program.externs:
        moved += sum(program.buffers[n].bytes for n in (*call.reads, *(o for o in call.outputs if o)))
    return Half(program.kernels, program.launches, program.externs, program.unfused, moved)


def _bytes_eager(found: Specialisation) -> int:
    """Count what each of eager's kernels reads and writes: on the captured graph, or on its joint graph without decompositions."""
    graph = found.record.get("capture")
    if graph is None:
        return 0
    if found.built is not None and found.built.backward() is not None:
        from .autodiff.joint import build  # AOTAutograd: seconds of import, there already when something was compiled

        inputs = [n.meta["val"] for n in graph.graph.nodes if n.op == "placeholder"]
        with torch.enable_grad():
            graph = build(graph, inputs, lambda module, inputs, stage: None, {}).graphs["joint"]
    return sum(_node_bytes(node) for node in graph.graph.nodes if node.op == "call_function")


def _node_bytes(node: torch.fx.Node) -> int:
    """Return the bytes of a node's operands and results; results that share an operand's memory move nothing."""
    results = [v for v in _tensors(node.meta.get("val"))]
    operands = {id(n): v for n in node.all_input_nodes for v in _tensors(n.meta.get("val"))}.values()
    if not isinstance(node.target, torch._ops.OpOverload):
        return 0
    if not node.target._schema.is_mutable:
        shared = {v.untyped_storage()._cdata for v in operands}
        if node.target.is_view or all(v.untyped_storage()._cdata in shared for v in results):
            return 0
    return sum(_size(v) for v in (*operands, *results))


def _bytes_minimum(graph: torch.fx.GraphModule | None, *programs: Program | None) -> int:
    """Every input of forward and backward read once, every result written once; what is saved between the two is not counted."""
    if graph is None:
        return 0
    inputs = [v for n in graph.graph.nodes if n.op == "placeholder" and n.users for v in _tensors(n.meta.get("val"))]
    outputs = [v for n in graph.graph.output_node().all_input_nodes for v in _tensors(n.meta.get("val"))]
    changed = {n.args[0] for n in graph.graph.nodes if isinstance(n.target, torch._ops.OpOverload) and n.target._schema.is_mutable}
    written = [v for n in changed if isinstance(n, torch.fx.Node) and n.op == "placeholder" for v in _tensors(n.meta.get("val"))]
    total = sum(map(_size, (*inputs, *outputs, *written)))
    if len(programs) > 1 and programs[1] is not None:  # a tangent for each result, the inputs again, a gradient for each
        total += sum(map(_size, outputs)) + sum(_size(v) * (2 if v.requires_grad else 1) for v in inputs)
    return total


def _tensors(value: Any) -> Sequence[torch.Tensor]:
    values = value if isinstance(value, (tuple, list)) else (value,)
    return [v for v in values if isinstance(v, torch.Tensor) and v.layout is torch.strided]  # others have no strides to count by


def _size(value: torch.Tensor) -> int:
    elements = 1
    for n, stride in zip(value.shape, value.stride(), strict=True):
        elements *= n if stride != 0 or n == 0 else 1
    return elements * value.dtype.itemsize
