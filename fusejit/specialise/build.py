"""Build: a captured graph on its way to a backend.

In: the backend that the options and the tensors ask for (`resolve`), a captured graph. Out: its forward and backward,
compiled (`build_programs`, which returns autodiff's `Built`).

    >>> resolve(Settings(), [torch.ones(3)])
    'eager'
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from .. import knobs
from ..capture.regions.extract import Region
from ..capture.shapes.region_sizes import SYMBOLIC
from ..compile_log import CompileLog
from ..errors import FusejitError, Unsupported
from ..options import Settings
from ..runtime.eager import eager
from .dump import dump

if TYPE_CHECKING:
    from ..autodiff.built import Built, Compiler
    from ..autodiff.region_ops import Toolchain
    from ..compile import Options

Tensor = torch.Tensor
aten = torch.ops.aten
PRODUCTS = {aten.linear.default, aten.mm.default, aten.addmm.default, aten.matmul.default, aten.einsum.default}


class BackendError(FusejitError):
    """A backend that cannot run here at all; never a fallback."""

    final = True


def resolve(settings: Settings, tensors: Sequence[Tensor]) -> str:
    """Decide the backend of a call from the option, the environment and the tensors' devices."""
    backend = settings.backend
    if backend == "auto":
        backend = knobs.read("backend")
    if backend == "auto":
        backend = "triton" if any(tensor.is_cuda for tensor in tensors) else "eager"
    if settings.target is None and tensors and backend == "triton" and not any(tensor.is_cuda for tensor in tensors):
        raise BackendError(
            "backend='triton' needs CUDA tensors, and all of these are on the CPU: use backend='auto' (eager on the "
            "CPU), "
            "'interpret' (the same kernels, slowly, on the CPU), or fusejit.compile_for(...) to compile without a GPU"
        )
    return backend


def check_devices(backend: str, tensors: Sequence[Tensor]) -> None:
    """Refuse tensors of several devices in one graph, Python-number-like CPU tensors aside."""
    devices = {tensor.device for tensor in tensors if tensor.dim() or tensor.device.type != "cpu"}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise Unsupported("tensors on several devices", f"{names}: one graph runs on one device")
    if backend == "interpret" and any(device.type != "cpu" for device in devices):
        raise BackendError("backend='interpret' runs on CPU tensors: use backend='triton' for CUDA ones")


def prepare_interpreter(backend: str) -> None:
    """Switch Triton's interpreter on, which works only before Triton is imported."""
    if backend != "interpret" or os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        return
    if "triton" in sys.modules:
        raise BackendError(
            "backend='interpret' needs TRITON_INTERPRET=1 before triton is imported, and it is imported already: "
            "set TRITON_INTERPRET=1 in the environment of the process"
        )
    os.environ["TRITON_INTERPRET"] = "1"


def effective(backend: str, settings: Settings) -> str:
    """The backend of Programs: at O0, and on "eager", they run op by op."""
    return "eager" if settings.jit_level == "O0" else backend


@dataclass(frozen=True, slots=True, eq=False)
class HalfCompiler:
    """The compiler of a forward and of its backward, now or when that is needed.

    Attributes:
        log: of stages, milliseconds and fallbacks.
        captured: the graph that both come from, and regions: those of it. Each Program keeps them: ops of pieces and
            regions name what they call by a key, and a backward may run when its function is gone.
    """

    options: Options
    records: bool
    log: CompileLog
    captured: torch.fx.GraphModule
    regions: list[Any] = field(default_factory=list)

    def __call__(self, module: torch.fx.GraphModule, inputs: Sequence[Any], stage: str) -> Any:
        from ..compile import compile_graph
        from ..runtime import cudagraph
        from ..runtime.multiversion import Variants

        start, plain = time.perf_counter(), self.options.backend == "eager"
        note = functools.partial(self.note, stage)
        program: Any = eager_program(module) if plain else compile_graph(module, inputs, self.options, record=note)
        program.keeps = self.captured, self.regions
        if isinstance(program, Variants) and self.records:
            self.log.dynamic.append("no CUDA graph: a recording holds the sizes of one call")
        elif not plain and self.records:
            program = cudagraph.record(program)
        self.log.spend(stage, (time.perf_counter() - start) * 1e3)
        return program

    def note(self, stage: str, name: str, value: Any) -> None:
        """Keep what a pass made."""
        self.log.record[f"{stage}.{name}"] = value
        dump(f"{stage}.{name}", value)


def toolchain(
    graph: torch.fx.GraphModule, tensors: Sequence[Tensor], settings: Settings, options: Options
) -> Toolchain:
    """What compiles the regions of a graph: their decompositions, and how their captured graphs are rewritten first."""
    from ..autodiff.cumprod_backward import scan_cumprods
    from ..autodiff.region_ops import Toolchain
    from ..autodiff.sdpa_for_target import retarget_attention
    from ..codegen.ops.decompositions import table
    from ..codegen.ops.random import with_draws

    plain, limit = options.backend == "eager", settings.most_at_once
    flavour = "/".join(map(str, (options.backend, options.jit_level, options.numerics, options.target, plain, limit)))
    if plain:
        drawn = torch.Tag.nondeterministic_seeded  # op by op, random numbers stay eager's
        known = {op: rule for op, rule in table().items() if drawn not in op.tags} if larger(graph, limit) else {}
        return Toolchain(region_compiler(options), known, lambda module: module, flavour)
    elsewhere = settings.target is not None and not any(tensor.is_cuda for tensor in tensors)
    rewrite = (lambda module: scan_cumprods(retarget_attention(module))) if elsewhere else scan_cumprods
    return Toolchain(region_compiler(options), with_draws(table(), settings.numerics), rewrite, flavour)


def build_programs(
    graph: torch.fx.GraphModule, tensors: Sequence[Tensor], settings: Settings, backend: str, log: CompileLog
) -> Built:
    """Trace the joint graph and compile it with fusejit's own back end."""
    from ..autodiff.chunked.canonicalize import heads
    from ..autodiff.chunked.chunk import chunk
    from ..autodiff.compose_regions import compose
    from ..autodiff.joint import build
    from ..autodiff.move_across_regions import join_seams
    from ..autodiff.region_ops import call_regions
    from ..codegen.schedule.device import machine
    from ..compile import Options

    options = Options(backend, settings.jit_level, settings.numerics, settings.target)
    compiler = HalfCompiler(options, settings.records, log, graph)
    start, limit = time.perf_counter(), settings.most_at_once
    graph, changed = heads(graph, limit)
    log.rewrites += changed
    tools = toolchain(graph, tensors, settings, options)
    tools.change = lambda module: log.rewrites.extend(chunk(module, limit, tools.compiler, tools.flavour))
    graph = tools.rewrite(graph)
    calls = any(isinstance(node.target, Region) for node in graph.graph.nodes)
    calls = calls and not any(isinstance(tensor, SYMBOLIC) for tensor in tensors)
    if calls and backend != "eager" and settings.jit_level == "O3":
        graph, joined = join_seams(graph, tools.decompositions, machine(settings.target))
        log.rewrites += joined
    built = compose(graph, tensors, tools, compiler) if calls else None
    if built is None:
        graph, regions = call_regions(graph, tools)
        built = build(graph, tensors, compiler, tools.decompositions, tools.change)
        built.regions = regions
    compiler.regions.extend(built.regions)
    built.log = log
    log.inlined += tools.notes
    log.compile_ms["regions"] = tools.spent_ms
    spent = sum(log.compile_ms.get(stage, 0.0) for stage in ("forward", "backward", "regions"))
    log.compile_ms["joint"] = (time.perf_counter() - start) * 1e3 - spent
    return built


def larger(graph: torch.fx.GraphModule, limit: int) -> bool:
    """Whether a captured graph has a matrix product of more than `limit` bytes (0: none counts), in one of its regions
    too.
    """
    for node in graph.graph.nodes if limit else ():
        if isinstance(node.target, Region) and larger(node.target.graph, limit):
            return True
        value = node.meta.get("val")
        fixed = isinstance(value, torch.Tensor) and all(type(n) is int for n in value.shape)
        if node.target in PRODUCTS and fixed and value.numel() * value.dtype.itemsize > limit:
            return True
    return False


def eager_program(module: torch.fx.GraphModule) -> Callable[[list[Any]], Sequence[Any]]:
    """A functional graph as something that is called like a Program, and runs op by op."""
    run = eager(module)

    def program(inputs: list[Any]) -> Sequence[Any]:
        tensors = tuple(inputs)
        inputs.clear()
        return run(*tensors)

    return program


def region_compiler(options: Options) -> Compiler:
    """The compiler of regions, which outlive the specialisation that needs them first and therefore know nothing of
    it.
    """
    from ..codegen.graph.bind_sizes import bound
    from ..compile import InScope, compile_graph

    def compiler(module: torch.fx.GraphModule, inputs: Sequence[Any], stage: str) -> Any:
        record = lambda name, value: dump(f"{stage}.{name}", value)  # noqa: E731
        return (
            InScope(module, inputs, options, record)
            if bound(inputs)
            else compile_graph(module, inputs, options, record=record)
        )

    return compiler
