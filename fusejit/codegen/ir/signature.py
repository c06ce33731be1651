"""Signatures: what a cluster computes along one line of memory, whatever its buffers and sizes.

In: a pointwise cluster, or one that reduces all that it reads. Out: its `Pattern`, or None where its memory is not one
line. Expressions are interned, so equal patterns have equal keys.

    p (33,7) -= 0.1 * g (33,7)      key  in0 = sub(load in0, mul(load in1, 0.1))      operands p+0 g+0      size 231
    q (8,16) -= 0.1 * h (8,16)      the same key                                      operands q+0 h+0      size 128
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .cluster import Cluster, Store, analysis
from .expr import Expr, Iota, Load, Random, Reduce, load, postorder, rewrite
from .layout import Layout, permute, strided
from .reductions import splits
from .size import product

LINE = (2,)  # the extent that stands for every size
Place = tuple[str, int]  # a buffer and an offset in it


@dataclass(frozen=True, slots=True)
class Pattern:
    """A cluster along one line of memory.

    Attributes:
        key: equal for clusters that differ in names, sizes and offsets only; it holds `body`'s stores.
        operands: buffer and offset of each role; roles are numbered in the order of the body. strides: of each role.
        size: elements.
    """

    key: tuple[Any, ...]
    operands: tuple[Place, ...]
    strides: tuple[int, ...]
    size: int

    def body(self, block: int) -> Cluster:
        """Return the cluster over roles instead of buffers, `block` elements long."""
        wide = lambda layout: strided((block,), layout.strides)  # noqa: E731

        def visit(node: Expr) -> Expr:
            return load(node.buffer, wide(node.layout), node.dtype) if isinstance(node, Load) else node

        values = rewrite([value for _, value, _, _ in self.key], visit)
        stores = (
            Store(name, wide(at), value, dtype) for (name, _, dtype, at), value in zip(self.key, values, strict=True)
        )
        return Cluster(() if self.reduces else (block,), (block,) if self.reduces else (), tuple(stores))

    @property
    def reduces(self) -> bool:
        """Whether the line is reduced."""
        return any(isinstance(node, Reduce) for node in postorder([value for _, value, _, _ in self.key]))


def places(buffers: Mapping[str, Any]) -> dict[str, Place]:
    """Return {buffer: (the buffer that its stores write, its number)}: what `pattern` has to know of buffers."""
    return {name: (buffer.written_to or name, number) for number, (name, buffer) in enumerate(buffers.items())}


def pattern(cluster: Cluster, known: Mapping[str, Place], strides: tuple[int, ...] | None = None) -> Pattern | None:
    """Return a cluster's pattern; None for rows, numbered or indexed elements, and memory that needs two axes.

    A single element has every stride: `strides` names those of the pattern that it is compared with, otherwise they are
    1.
    """
    flat = line(cluster)
    if flat is None:
        return None
    size = product(flat.axes)
    # buffers are numbered as the graph makes them, which is the same order in every repetition of a loop's body
    stores = sorted(flat.stores, key=lambda s: known[s.buffer][1])
    roles = _Roles(size, strides)
    values = rewrite(
        [s.value for s in stores], lambda node: roles.read(node, known) if isinstance(node, Load) else node
    )
    made = [(*roles.of(known[s.buffer][0], s.layout, "out"), v, s.dtype) for s, v in zip(stores, values, strict=True)]
    if roles.refused:
        return None
    key = tuple((name, value, dtype, layout) for name, layout, value, dtype in made)
    return Pattern(key, tuple((buffer, offset) for buffer, offset, _ in roles.names), tuple(roles.strides), size)


class _Roles:
    """Names for what a cluster touches: one for each buffer, offset and stride."""

    def __init__(self, size: int, given: tuple[int, ...] | None) -> None:
        self.size, self.given = size, given
        self.names: dict[tuple[str, int, int], tuple[str, int]] = {}
        self.strides: list[int] = []
        self.refused = False

    def of(self, buffer: str, layout: Layout, word: str) -> tuple[str, Layout]:
        own = (layout.strides or (0,))[0] if self.size > 1 else 0
        found = self.names.get((buffer, layout.offset, own))
        if found is None:
            number = len(self.names)
            stride = (
                own
                if self.size > 1
                else 1
                if self.given is None
                else self.given[number]
                if number < len(self.given)
                else 0
            )
            self.refused |= self.size == 1 and self.given is not None and number >= len(self.given)
            found = self.names[buffer, layout.offset, own] = (f"{word}{number}", stride)
            self.strides.append(stride)
        return found[0], strided(LINE, (found[1],))

    def read(self, node: Load, known: Mapping[str, Place]) -> Expr:
        name, layout = self.of(known[node.buffer][0], node.layout, "in")
        return load(name, layout, node.dtype)


@analysis
def line(cluster: Cluster) -> Cluster | None:
    """Return a cluster over one axis or none, if every operand runs through memory in the same order."""
    if cluster.programs or any(s.mode or s.index for s in cluster.stores) or cluster.reduce and not _whole(cluster):
        return None
    for node in cluster.order:
        if isinstance(node, (Iota, Random)) or isinstance(node, Load) and (node.index or node.mask is not None):
            return None
    leaf = next((n.layout for n in cluster.order if isinstance(n, Load) and cluster.full[n]), None)
    strides = (cluster.stores[0].layout if leaf is None or not cluster.reduce else leaf).strides
    if strides is None:
        return None
    axes = cluster.axes
    order = sorted(range(len(axes)), key=lambda axis: -abs(strides[axis]))
    turned = [axes[a] for a in order]
    flat = cluster.map(permute(axes, order), *(([], turned) if cluster.reduce else (turned, []))).coalesced
    return flat if len(flat.axes) <= 1 else None


def _whole(cluster: Cluster) -> bool:
    """Whether a cluster reduces all that it reads at once, to results that pieces of it can be combined to."""
    ops = {node.op for node in cluster.order if isinstance(node, Reduce)}
    along = any(cluster.full[s.value] or any(s.layout.strides or ()) for s in cluster.stores)
    one = product(cluster.parallel) == 1 and max(cluster.levels.values(), default=0) == 1
    return one and all(map(splits, ops)) and not along
