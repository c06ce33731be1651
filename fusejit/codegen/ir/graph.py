"""The kernel graph: buffers, clusters and extern calls in order.

In: what lowering makes of a functional ATen graph. Out: `Lowered`: buffers, steps, outputs; passes turn one into the
next.

    buffer arg0 (4,6) float32 | step cluster store b0 = relu(load arg0) | output b0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from .cluster import Cluster, Store
from .effects import Effect
from .expr import Expr, Load
from .layout import Layout, strided
from .signature import Pattern
from .size import AnySize, hint, product


class Refused(Exception):
    """Why two clusters cannot be one."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory that kernels read and write. `written_to` names the buffer, an input for one, whose memory it overwrites
    in place.
    """

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    written_to: str = ""

    @property
    def layout(self) -> Layout:
        return strided(self.shape, self.strides)

    @property
    def bytes(self) -> int:
        return extent(self.shape, self.strides) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Ref:
    """A buffer as an operand of torch: whole, or seen with other sizes, strides and an offset."""

    buffer: str
    shape: tuple[int, ...] | None = None
    strides: tuple[int, ...] = ()
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Extern:
    """A call of a torch op, or of another Program. `outputs` are buffer names (None: unused); `several`: the op returns
    a sequence.

    `pins`: results may share memory with operands or each other, so that no kernel may write over either. `effect`:
    what else it does; calls with one keep their order.
    `why`: what a kernel of this call would need, where kernels of others exist.
    """

    target: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outputs: tuple[str | None, ...]
    several: bool
    line: str
    pins: bool = False
    program: Any = field(default=None, compare=False)
    effect: Effect | None = None
    why: str = ""

    @property
    def reads(self) -> frozenset[str]:
        return frozenset(ref.buffer for ref in refs((self.args, self.kwargs)))


@dataclass(frozen=True, slots=True)
class Lowered:
    buffers: dict[str, Buffer]
    inputs: tuple[str | None, ...]
    steps: tuple[Cluster | Extern | Foreach, ...]
    outputs: tuple[Any, ...]
    reasons: dict[str, str]

    def __str__(self) -> str:
        lines = [
            f"buffer {b.name} {b.shape} {str(b.dtype).removeprefix('torch.')} {self.reasons.get(b.name, '')}"
            for b in self.buffers.values()
        ]
        return "\n".join([*lines, *(str(s) for s in self.steps), f"outputs {self.outputs}"])


def as_ref(value: Expr, buffers: dict[str, Buffer]) -> Ref | None:
    """Return a value as a strided view of a buffer, if it is one."""
    if not isinstance(value, Load) or value.index or value.mask is not None or value.layout.strides is None:
        return None
    buffer = buffers[value.buffer]
    if value.layout == buffer.layout:
        return Ref(buffer.name)
    offset = value.layout.offset
    if any(s < 0 for s in value.layout.strides) or offset < 0:
        return None
    shape = value.layout.shape
    # size-1 dimensions have stride 0 in a layout; torch's kernels expect what a contiguous tensor would have there
    strides = list(value.layout.strides)
    for d in reversed(range(len(shape))):
        if shape[d] == 1:
            strides[d] = strides[d + 1] * shape[d + 1] if d + 1 < len(shape) else 1
    return Ref(buffer.name, shape, tuple(strides), offset)


def refs(tree: Any) -> list[Ref]:
    if isinstance(tree, Ref):
        return [tree]
    items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (tuple, list)) else ()
    return [r for item in items for r in refs(item)]


def dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether every element has its own place and none is left over."""
    step = 1
    for stride, n in sorted(
        ((s, n) for s, n in zip(strides, shape, strict=True) if n != 1), key=lambda p: (hint(p[0]), hint(p[1]))
    ):
        if stride != step:
            return False
        step *= n
    return 0 not in shape


def row_major(shape: Sequence[AnySize]) -> tuple[AnySize, ...]:
    """Return the strides that torch gives a contiguous tensor."""
    strides: list[AnySize] = []
    step: AnySize = 1
    for n in reversed(shape):
        strides.append(step)
        step = step * (1 if n == 0 else n)
    return tuple(reversed(strides))


def extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the number of different elements of a strided tensor."""
    return 0 if 0 in shape else product(n for n, s in zip(shape, strides, strict=True) if s != 0)


@dataclass(frozen=True)
class Foreach:
    """Clusters of one pattern, independent of each other, that run as one launch. Their patterns are `rows`.

    `chunk`: of reductions, how many elements a program takes; where that is not a whole row it writes a partial result.
    """

    members: tuple[Cluster, ...]
    rows: tuple[Pattern, ...]
    chunk: int = 0

    @cached_property
    def lines(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(line for member in self.members for line in member.lines))

    @cached_property
    def stores(self) -> tuple[Store, ...]:
        return tuple(store for member in self.members for store in member.stores)

    @cached_property
    def writes(self) -> dict[str, Store]:
        return {store.buffer: store for store in self.stores}

    @cached_property
    def reads(self) -> dict[str, tuple[Load, ...]]:
        found: dict[str, tuple[Load, ...]] = {}
        for member in self.members:
            for name, loads in member.reads.items():
                found[name] = (*found.get(name, ()), *loads)
        return found

    def __str__(self) -> str:
        rows = (
            f"  {row.size:>10} elements  {' '.join(name + (f'+{at}' if at else '') for name, at in row.operands)}"
            for row in self.rows
        )
        head = f"foreach of {len(self.members)}\n{self.rows[0].body(max(r.size for r in self.rows))}"
        return "\n".join([head, *rows])


def apart(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether every element of what torch laid out has its own place, even if some are left over; of symbols, for the
    sizes at hand.
    """
    reach = 1
    for stride, n in sorted((hint(s), hint(n)) for s, n in zip(strides, shape, strict=True) if n != 1):
        if stride < reach:
            return False
        reach = stride * n
    return 0 not in shape
