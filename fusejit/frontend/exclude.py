"""`exclude_from_trace`: blocks of a captured function that run in Python on every call.

In: a function with such blocks. Out: `Split`: the function in Python, in which everything between the blocks is a
jitted segment.

    >>> @fusejit.jit
    ... def f(x):
    ...     x += 1
    ...     with fusejit.exclude_from_trace():
    ...         if i % 2 == 0:
    ...             x += 1
    ...     return x
    >>> print(f.explain(torch.ones(1)))
    f in 1 segments around what stays Python
      model.py:4: with fusejit.exclude_from_trace():  runs in Python
    f[3-3] on backend ...

Values flow in and out as the local variables that they are, gradients through the segments as through any jitted
function. It works on the source (see outline.py), so in every capture mode. A block inside a function that the captured
one calls, or without source text, is refused while capturing: all of that function then runs eagerly, with the reason.
"""

from __future__ import annotations

import ast
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..capture import tracer
from ..capture.source_lines import frame_line, user_frame
from ..capture.state.shared_containers import SEGMENT
from ..errors import Unsupported
from .outline import Segment, function_of, name, outline
from .source import NoSource, code_of, read
from .source import build as rebuild


class exclude_from_trace:
    """Run a block of a captured function in Python, on every call: `with fusejit.exclude_from_trace(): ...`.

    It may read and set local variables of the function, read the values of tensors, print, and have any effect. Outside
    a captured function, inside another such block and with jit switched off it does nothing. Its line must name it (no
    variable holding an instance), and the function must be the jitted one itself: elsewhere the jitted function runs
    eagerly, with the reason.
    """

    def __enter__(self) -> None:
        if tracer.active():
            reason = (
                "it has to stand in the jitted function itself, whose source must be there: move it up, or jit the "
                "called function alone"
            )
            raise Unsupported(
                "exclude_from_trace() in a function that a captured one calls",
                reason,
                frame_line(user_frame(sys._getframe(1))),
            )

    def __exit__(self, *error: object) -> None:
        return None


@dataclass(frozen=True, slots=True)
class Split:
    """A function in segments.

    Attributes:
        run: the function; segments: what `make` gave for each, in the order of their lines.
        excluded: the lines of the blocks; kept: (line, reason) of other statements that stay Python.
    """

    run: Callable
    segments: tuple[Any, ...]
    excluded: tuple[str, ...]
    kept: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class SplitReport:
    """What `explain` returns for a function in segments: each segment's reports, one for each specialisation that calls
    have made.
    """

    name: str
    split: Split
    parts: tuple[Any, ...]

    @property
    def kernels(self) -> tuple[Any, ...]:
        return tuple(kernel for part in self.parts for kernel in part.kernels)

    @property
    def externs(self) -> tuple[Any, ...]:
        return tuple(call for part in self.parts for call in part.externs)

    @property
    def launches(self) -> int:
        return sum(part.launches for part in self.parts)

    @property
    def fallbacks(self) -> tuple[Any, ...]:
        return tuple(fallback for part in self.parts for fallback in part.fallbacks)

    @property
    def effects(self) -> tuple[Any, ...]:
        return tuple(effect for part in self.parts for effect in part.effects)

    def __str__(self) -> str:
        lines = [f"{self.name} in {len(self.split.segments)} segments around what stays Python"]
        lines += [f"  {line}  runs in Python" for line in self.split.excluded]
        lines += [f"  {line}  runs in Python: {why}" for line, why in self.split.kept]
        if not self.parts:
            lines.append("  no segment has been called yet: what they are given is known only then")
        return "\n".join([*lines, *map(str, self.parts)])


def function_in(target: Any) -> tuple[types.FunctionType | None, tuple]:
    """The Python function that a call of `target` runs, and the arguments that go before the call's own."""
    if isinstance(target, types.FunctionType):
        return target, ()
    if isinstance(target, types.MethodType) and isinstance(target.__func__, types.FunctionType):
        return target.__func__, (target.__self__,)
    method = getattr(type(target), "forward" if isinstance(target, torch.nn.Module) else "__call__", None)
    own = isinstance(method, types.FunctionType) and "forward" not in getattr(target, "__dict__", ())
    return (method, (target,)) if own else (None, ())


def mentions(target: Any) -> bool:
    """Whether a function may contain an excluded block: cheap, and wrong only by saying yes."""
    function, _ = function_in(target)
    if function is None:
        return False
    scope = function.__globals__
    names = (*function.__code__.co_names, *function.__code__.co_freevars)
    return "exclude_from_trace" in names or any(scope.get(text) is exclude_from_trace for text in names)


def hooked(target: Any) -> bool:
    """Whether calling a module does more than its `forward`."""
    if not isinstance(target, torch.nn.Module):
        return False
    everywhere = torch.nn.modules.module
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(target, table) or getattr(everywhere, f"_global{table}") for table in tables)


def split(target: Any, make: Callable[[types.FunctionType, Segment], Any]) -> Split | None:
    """Cut what stands around excluded blocks into segments; None where there is no such block, or no source to cut.

    Args:
        make: (function of a segment, the segment) to what is called in its place.
    """
    function, before = function_in(target)
    if function is None:
        return None
    try:
        source = read(function)
    except (NoSource, Unsupported):  # the block itself then refuses the capture, and says so
        return None
    excluded: dict[str, None] = {}

    def stays(node: ast.stmt) -> str:
        found = isinstance(node, ast.With) and any(is_block(item.context_expr, function) for item in node.items)
        if found:
            excluded[source.line(node)] = None
        return "excluded" if found else ""

    found = outline(source, stays)
    if not excluded:
        return None
    functions = [function_of(source, segment, function) for segment in found.segments]
    for made in functions:
        setattr(made, SEGMENT, True)
    segments = tuple(make(made, segment) for made, segment in zip(functions, found.segments))
    code = code_of(source, found.tree, {name(number): segment for number, segment in enumerate(segments)})
    host = rebuild(function, code)
    run = types.MethodType(host, before[0]) if before else host
    return Split(run, segments, tuple(excluded), tuple((line, why) for line, why in found.kept if why != "excluded"))


def is_block(node: ast.expr, function: types.FunctionType) -> bool:
    """Whether an expression makes an `exclude_from_trace`: called by its name or through a module's, an alias or
    not.
    """
    if not isinstance(node, ast.Call):
        return False
    path: list[str] = []
    target: ast.expr = node.func
    while isinstance(target, ast.Attribute):
        path.append(target.attr)
        target = target.value
    if not isinstance(target, ast.Name):
        return False
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
    if target.id in cells:
        value = cells[target.id].cell_contents
    elif target.id in function.__globals__:
        value = function.__globals__[target.id]
    else:  # imported in the function: known by its name
        return [target.id, *reversed(path)][-1] == "exclude_from_trace"
    for part in reversed(path):
        value = getattr(value, part, None) if isinstance(value, (types.ModuleType, type)) else None
    return value is exclude_from_trace
