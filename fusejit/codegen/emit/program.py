"""Program: the compiled artefact, as data and as a Python file that a person can read and run.

In: planned steps. Out: `Program`: call it with a list of tensors (it takes the list over); `.source` is its Python
text.

    def call(args):
        arg0, arg1, = args
        b0 = empty_cpu((4, 6), (6, 1), torch.float32)
        flat_add_1f0c9a2b(arg0, arg1, b0)
        return (b0,)
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from ... import torch_private as private
from ...errors import KernelAssertion
from ...templates.base import text_of
from ..ir.graph import Buffer, Extern, Lowered, Ref
from ..ir.size import Scope, hint
from ..passes.fuse import Unfused
from .kernel import Kernel
from .memory_plan import Alloc, Free, Launch, Return, Step
from .writer import jinja_template


@dataclass
class Program:
    """Kernels, steps and what they cost. `call` exists once the source was loaded.

    Attributes:
        steps: Alloc, Launch, Extern, Free, Return, in order. buffers: by name. inputs: names of the arguments, None
            where unused.
        unfused: pairs of clusters that share a buffer and stay apart, with reasons. compile_ms: milliseconds by stage.
        tuned: at O3, how each kernel's schedule was chosen.
        sizes: where the inputs hold the value of each symbol (see graph/bind_sizes.py). atoms: {name: text} of what is
            computed from them.
        hints: their values in the call that was compiled for. rewrites: calls that do what kernels did before
            (passes/matmul_epilogue.py).
    """

    steps: tuple[Step, ...]
    buffers: dict[str, Buffer]
    inputs: tuple[str | None, ...]
    outputs: tuple[Any, ...]
    unfused: tuple[Unfused, ...]
    reasons: dict[str, str]
    device: torch.device | None = None
    kernels: tuple[Kernel, ...] = ()
    compile_ms: dict[str, float] = field(default_factory=dict)
    tuned: tuple[str, ...] = ()
    sizes: tuple[tuple[str, int, int], ...] = ()
    atoms: dict[str, str] = field(default_factory=dict)
    hints: dict[str, int] = field(default_factory=dict)
    rewrites: tuple[str, ...] = ()

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        try:
            return self.call(args)
        except (IndexError, KernelAssertion) as error:
            self.name_lines(error)
            raise

    def name_lines(self, error: Exception) -> None:
        """Add the user's lines of the kernel that refused its data."""
        notes = "\n".join(getattr(error, "__notes__", ()))
        lines = [
            line
            for part in (*self.called, self)
            for k in part.kernels
            if f"in kernel {k.name}" in notes
            for line in k.ops
        ]
        if lines and "made of" not in notes:
            error.add_note("\n".join(["which was made of:", *(f"  {line}" for line in dict.fromkeys(lines))]))

    @property
    def launches(self) -> int:
        """Kernel launches of one call; extern calls not counted."""
        return sum(isinstance(s, Launch) for s in self.steps)

    @property
    def externs(self) -> tuple[Extern, ...]:
        """Calls of torch's ops."""
        return tuple(s for s in self.steps if isinstance(s, Extern) and s.program is None)

    @property
    def calls(self) -> tuple[Extern, ...]:
        """Calls of other Programs."""
        return tuple(s for s in self.steps if isinstance(s, Extern) and s.program is not None)

    @property
    def called(self) -> list[Program]:
        """Every Program that a call of this one runs, itself left out, the innermost first."""
        return [program for program, _ in self.runs[:-1]]

    @property
    def runs(self) -> list[tuple[Program, int]]:
        """Every Program that a call of this one runs, and how often: the innermost first, itself last and once."""
        found: dict[int, tuple[Program, int]] = {}
        for step in self.calls:
            for program, count in step.program.runs:
                found[id(program)] = program, count + found.get(id(program), (program, 0))[1]
        return [*found.values(), (self, 1)]

    @property
    def changed(self) -> list[str]:
        """Names of the inputs that kernels write to, in their order; a call of torch tells autograd of its changes
        itself.
        """
        written = {b.written_to for b in self.buffers.values() if b.written_to}
        return [name for name in self.inputs if name in written]

    @cached_property
    def call(self) -> Callable[[list[Any]], Sequence[Any]]:
        filename = f"<fusejit program {id(self):x}>"
        linecache.cache[filename] = (len(self.source), None, self.source.splitlines(keepends=True), filename)
        namespace: dict[str, Any] = {"__name__": "fusejit.program"}
        exec(compile(self.source, filename, "exec"), namespace)
        return namespace["call"]

    @cached_property
    def source(self) -> str:
        """The whole program as Python text."""
        parts, names = [*self.called, self], self._names
        launchers = _launchers([k for part in parts for k in part.kernels])
        own = _own_arguments(parts)
        shown = [
            {
                **{
                    f: getattr(k, f)
                    for f in ("name", "source", "grid", "num_warps", "num_stages", "debug", "fp_fusion")
                },
                "variable": variable,
                "ops": k.ops,
                "constants": dict(k.constants),
                "params": _repeated(k.params),
                "aligned": _repeated((True,) * len(k.params)),
                "own": own[k.name, k.grid],
                "tiles": _tiles(k),
            }
            for k, variable in launchers.values()
        ]
        doc = f"{self.launches} launches, {len(self.externs)} extern calls. Written by fusejit; runs by itself."
        functions = [
            {"name": names[id(part)], "lines": part._body(launchers, names), "inputs": part._inputs()}
            for part in parts
        ]  # fmt: skip
        with Scope(self.hints):
            examples = [self._example(name, i) for i, name in enumerate(self.inputs)]
        allocators = sorted(
            {part._allocator(step.buffer.device) for part in parts for step in part.steps if isinstance(step, Alloc)}
        )
        fields = {"examples": examples, "allocators": allocators, "sized": any(k["tiles"] for k in shown)}
        fields["changes"] = any(part.changed for part in parts)
        return jinja_template(text_of("program")).render(doc=doc, kernels=shown, functions=functions, **fields)

    @cached_property
    def _names(self) -> dict[int, str]:
        """The function of each Program in the source, by id: `call` is this one."""
        found: dict[int, str] = {}
        for owner in [*self.called, self]:
            for step in owner.calls:
                if id(step.program) not in found:
                    again = sum(
                        name.rpartition("__")[0] == step.target or name == step.target for name in found.values()
                    )
                    found[id(step.program)] = f"{step.target}__{again + 1}" if again else step.target
        return found | {id(self): "call"}

    def _inputs(self) -> list[str]:
        given = {number: name for name, number, axis in self.sizes if axis < 0}
        return [name or given.get(i) or f"unused{i}" for i, name in enumerate(self.inputs)]

    def _body(self, launchers: dict[Any, tuple[Kernel, str]], names: dict[int, str]) -> list[str]:
        """The lines of the function; before them, the sizes that they name."""
        lines = [line for step in self.steps for line in self._lines(step, launchers, names)]
        if changed := self.changed:
            lines.insert(0, f"raise_versions(({', '.join(changed)},))")
        wanted: list[str] = []
        for name in reversed(self.atoms):  # each is made of symbols and of those before it
            if any(re.search(rf"\b{name}\b", line) for line in (*lines, *wanted)):
                wanted.insert(0, f"{name} = {self.atoms[name]}")
        return [
            *(f"{name} = {self.inputs[i]}.shape[{axis}]" for name, i, axis in self.sizes if axis >= 0),
            *wanted,
            *lines,
        ]

    def _lines(self, step: Step, launchers: dict[Any, tuple[Kernel, str]], names: dict[int, str]) -> list[str]:
        match step:
            case Alloc(buffer, ""):
                return [
                    f"{buffer.name} = {self._allocator(buffer.device)[0]}({buffer.shape}, {buffer.strides}, "
                    f"{buffer.dtype})"
                ]
            case Alloc(buffer, reuse):
                return [f"{buffer.name} = {reuse}  # in place"]
            case Launch(kernel, arguments):
                extents = [f"({', '.join(map(str, kernel.extents))})"] if kernel.extents else []
                return [f"{launchers[kernel.name, kernel.grid][1]}({', '.join((*extents, *arguments, *kernel.sizes))})"]
            case Free(dead):
                return [f"del {', '.join(dead)}"]
            case Return(values):
                return [f"return ({', '.join(map(self._text, values))}{',' if values else ''})"]
        assert isinstance(step, Extern)
        return self._extern(step) if step.program is None else self._called(step, names[id(step.program)])

    def _called(self, step: Extern, name: str) -> list[str]:
        """A call of another Program; its results are laid out anew only where they are known to differ from what was
        traced.
        """
        lines = [
            f"{', '.join(map(str, step.outputs))}, = {name}({self._text(step.args[0])})"
            + (f"  # {step.line}" if step.line else "")
        ]
        for output, ref in zip(step.outputs, step.program.outputs, strict=True):
            if ref is None:  # the gradient of what only results without gradients read
                continue
            buffer = self.buffers[str(output)]
            given = step.program.buffers[ref.buffer].strides if ref.shape is None else ref.strides
            if 0 not in buffer.shape and any(
                a != b and n != 1 for n, a, b in zip(buffer.shape, given, buffer.strides, strict=True)
            ):
                lines.append(f"{output} = laid_out({output}, {buffer.shape}, {buffer.strides})")
        return lines

    def _extern(self, step: Extern) -> list[str]:
        arguments = [self._text(a) for a in step.args] + [f"{k}={self._text(v)}" for k, v in step.kwargs]
        outputs = [o or "_" for o in step.outputs]
        left = "" if not outputs else f"{', '.join(outputs)}, = " if step.several else f"{outputs[0]} = "
        lines = [f"{left}torch.ops.{step.target}({', '.join(arguments)})" + (f"  # {step.line}" if step.line else "")]
        for name in (o for o in step.outputs if o):
            buffer = self.buffers[name]
            if buffer.strides and 0 not in buffer.shape:
                lines.append(f"{name} = laid_out({name}, {buffer.shape}, {buffer.strides})")
        return lines

    def _allocator(self, device: torch.device) -> tuple[str, str]:
        """The name of what allocates on a device, and the device's text."""
        place = self._device(device)
        return "_".join(["empty", *re.findall(r"\w+", place)[1:]]), place

    def _device(self, device: torch.device) -> str:
        shown = self.device if self.device is not None and device.type == "cpu" else device
        return f"device({shown.type!r}{'' if shown.index is None else f', {shown.index}'})"

    def _text(self, value: Any) -> str:
        match value:
            case Ref(buffer, None):
                return buffer
            case Ref():
                return f"view_of({value.buffer}, {value.shape}, {value.strides}, {value.offset})"
            case tuple() | list():
                return "[" + ", ".join(map(self._text, value)) + "]"
            case torch.device():
                return self._device(value)
            case private.OpOverload():
                return f"torch.ops.{value}"
            case float() if value != value or value in (float("inf"), -float("inf")):
                return f'float("{value}")'
        return str(value) if isinstance(value, (torch.dtype, torch.memory_format, torch.layout)) else repr(value)

    def _example(self, name: str | None, number: int) -> str:
        if name is None:
            return str(next((self.hints[symbol] for symbol, i, axis in self.sizes if i == number and axis < 0), None))
        b = self.buffers[name]
        base = (
            f"empty_strided({tuple(map(hint, b.shape))}, {tuple(map(hint, b.strides))}, dtype={b.dtype}, "
            f"device={self._device(b.device)})"
        )
        return f"{base}.normal_()" if b.dtype.is_floating_point and b.dtype.itemsize > 1 else f"{base}.fill_(1)"


def _tiles(kernel: Kernel) -> Any:
    """The schedules of a kernel whose sizes vary: (longest row, constants, warps, stages), the last for all others."""
    if not kernel.extents:
        return None
    found = kernel.schedule.buckets or ((None, kernel.schedule),)
    return [(limit, dict(s.blocks), s.num_warps, s.num_stages) for limit, s in found]


def _repeated(values: tuple[Any, ...]) -> str:
    """Spell a tuple; a long one of equal values as a product."""
    return f"({values[0]!r},) * {len(values)}" if len(values) > 12 and len(set(values)) == 1 else repr(values)


def _launchers(kernels: Sequence[Kernel]) -> dict[tuple[str, tuple[int, int, int]], tuple[Kernel, str]]:
    """{(kernel, grid): (kernel, variable)}: one kernel may be launched with several grids."""
    found: dict[tuple[str, tuple[int, int, int]], tuple[Kernel, str]] = {}
    for k in kernels:
        if (k.name, k.grid) not in found:
            again = sum(name == k.name for name, _ in found)
            found[k.name, k.grid] = k, f"{k.name}_{again + 1}" if again else k.name
    return found


def _own_arguments(parts: Sequence[Program]) -> dict[tuple[str, tuple[int, int, int]], tuple[int, ...]]:
    """By kernel and grid, the arguments that are allocated right here in every launch: their addresses are aligned."""
    found: dict[tuple[str, tuple[int, int, int]], tuple[int, ...]] = {}
    for part in parts:
        made: set[str] = set()
        for step in part.steps:
            match step:
                case Alloc(buffer, reuse) if not reuse or reuse in made:
                    made.add(buffer.name)
                case Launch(kernel, arguments):
                    before = found.get((kernel.name, kernel.grid), tuple(range(len(arguments))))
                    found[kernel.name, kernel.grid] = tuple(n for n in before if arguments[n] in made)
    return found


def verify(steps: Sequence[Step], lowered: Lowered) -> None:
    """Check that every buffer is made before it is used, and freed or returned exactly once.

    Raises:
        AssertionError: names the buffer and the step.
    """
    alive = {n for n in lowered.inputs if n}
    for step in steps:
        match step:
            case Alloc(buffer, reuse):
                assert not reuse or reuse in alive, f"{buffer.name} reuses {reuse}, which is gone"
                alive.add(buffer.name)
            case Launch(kernel, arguments):
                assert set(arguments) <= alive, f"{kernel.name} uses {set(arguments) - alive}, not made yet or gone"
            case Extern():
                assert step.reads <= alive, f"{step.target} uses {step.reads - alive}, not made yet or gone"
                alive |= {o for o in step.outputs if o}
            case Free(names):
                assert set(names) <= alive, f"{set(names) - alive} freed twice"
                alive -= set(names)
