"""Concat in place: the operands of a concatenation are written where they belong, so that nothing is copied.

In: fused clusters and extern calls. Out: the same program in which a `cat` along the first dimension of more pieces
than one kernel takes is no call: each piece is a part of the result's memory, which its own kernel writes; what no
kernel makes, or others keep, is copied there.

    norms = stack([n0, n1, ..., n199])      200 results of one launch, side by side

It runs after fusion, when every buffer has its one producer; the copies become one launch too (horizontal.py).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from ..ir.cluster import Cluster, Store
from ..ir.expr import Expr, Load, load, rewrite
from ..ir.graph import Extern, Foreach, Lowered, Ref, refs, row_major
from ..ir.layout import Layout, contiguous, strided
from ..ir.size import Size, product

TARGET = "aten.cat.default"


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a result: what is put there, its shape and strides, and where it begins."""

    ref: Ref
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int

    @property
    def straight(self) -> bool:
        """Whether its elements lie in memory as in the result."""
        steps = zip(self.shape, self.strides, row_major(self.shape), strict=True)
        return self.ref.offset == 0 and all(a == b or n == 1 for n, a, b in steps)


def cats(lowered: Lowered) -> Lowered:
    """Return the program without the concatenations that need no call."""
    for step in lowered.steps:
        if isinstance(step, Extern) and step.target == TARGET:
            pieces = _pieces(step, lowered)
            direct = {p.ref.buffer: p for p in pieces if p.straight and _own(p, step, lowered)}
            if pieces and 2 * len(direct) >= len(pieces):
                lowered = _in_place(lowered, step, pieces, direct)
    return lowered


def _pieces(step: Extern, lowered: Lowered) -> list[Piece]:
    """Return the pieces of a call, none where they do not lie one after the other in its result, or where sizes
    vary.
    """
    out = lowered.buffers[str(step.outputs[0])]
    axis = (*step.args, 0)[1] if len(step.args) > 1 else dict(step.kwargs).get("dim", 0)
    found, start = [], 0
    for ref in step.args[0]:
        buffer = lowered.buffers[ref.buffer]
        shape, strides = (buffer.shape, buffer.strides) if ref.shape is None else (ref.shape, ref.strides)
        if (
            len(shape) != len(out.shape)
            or buffer.dtype is not out.dtype
            or any(isinstance(n, Size) for n in (*shape, *strides))
        ):
            return []
        found.append(Piece(ref, shape, strides, start))
        start += product(shape)
    fits = axis % len(out.shape) == 0 and out.strides == row_major(out.shape) and start == product(out.shape) > 0
    return found if fits else []


def _own(piece: Piece, call: Extern, lowered: Lowered) -> bool:
    """Whether a piece is all of a buffer that a kernel makes, for nobody else than this call and kernels."""
    name = piece.ref.buffer
    buffer = lowered.buffers[name]
    makers = [s for s in lowered.steps if isinstance(s, Cluster) and name in s.writes]
    taken = [ref.buffer for s in lowered.steps if isinstance(s, Extern) for ref in refs((s.args, s.kwargs))]
    taken += [ref.buffer for ref in refs(lowered.outputs)]
    whole = product(buffer.shape) == product(piece.shape) and buffer.strides == row_major(buffer.shape)
    return whole and len(makers) == 1 and not buffer.written_to and Counter(taken)[name] == 1


def _in_place(lowered: Lowered, call: Extern, pieces: list[Piece], direct: dict[str, Piece]) -> Lowered:
    """Return the program with the call's pieces as parts of its result."""
    name = str(call.outputs[0])
    dtype = lowered.buffers[name].dtype

    def moved(layout: Layout, buffer: str) -> Layout:
        return replace(layout, offset=layout.offset + direct[buffer].start)

    def visit(node: Expr) -> Expr:
        if not isinstance(node, Load) or node.buffer not in direct:
            return node
        return load(name, moved(node.layout, node.buffer), node.dtype, node.index, node.mask, node.fill)

    def renamed(step: Cluster) -> Cluster:
        if not direct.keys() & (step.reads.keys() | step.writes.keys()):
            return step
        roots = [root for s in step.stores for root in (s.value, *(e for e, _ in s.index))]
        new = dict(zip(roots, rewrite(roots, visit), strict=True))
        stores = [
            replace(s, value=new[s.value], index=tuple((new[e], stride) for e, stride in s.index)) for s in step.stores
        ]
        stores = [
            replace(s, buffer=name, layout=moved(s.layout, s.buffer)) if s.buffer in direct else s for s in stores
        ]
        return replace(step, stores=tuple(stores))

    steps: list[Cluster | Extern | Foreach] = []
    for step in lowered.steps:
        if step is not call:
            steps.append(renamed(step) if isinstance(step, Cluster) else step)
            continue
        for piece in (p for p in pieces if p.ref.buffer not in direct):
            value = load(piece.ref.buffer, strided(piece.shape, piece.strides, piece.ref.offset), dtype)
            at = replace(contiguous(piece.shape), offset=piece.start)
            steps.append(
                Cluster.build(
                    piece.shape, (), [Store(name, at, value, dtype)], (f"{TARGET.removeprefix('aten.')}  {call.line}",)
                )
            )
    return replace(lowered, steps=tuple(steps))
