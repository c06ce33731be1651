"""Clusters: what one kernel computes, as data.

In: ops on layouts. Out: `Cluster`, stores over parallel and reduce axes whose leaves hold one stride per axis.

    layernorm_0     parallel 512 | reduce 768
      load  x             768   |   1     float32
      load  w               0   |   1     float32
      store y             768   |   1     float32
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from .expr import Expr, Iota, Load, Reduce, Segment, children, computed, postorder, rewrite, view
from .layout import Layout, Reshape, View, apply, refine


@dataclass(frozen=True, slots=True)
class Store:
    """`value` written to `buffer` of `dtype` at `layout`; a stride of 0 along all reduce axes makes it a row result.

    `mode` is "", "atomic_add", or a reduction: each of a cluster's `programs` then writes one partial result, of all
    its rows, behind those of the programs before it. `index` adds computed coordinates (scatter): the other elements
    stay as they are in `onto`, the buffer whose memory `buffer` takes over.
    """

    buffer: str
    layout: Layout
    value: Expr
    dtype: torch.dtype
    mode: str = ""
    index: tuple[tuple[Expr, int], ...] = ()
    onto: str = ""

    @property
    def reduces(self) -> bool:
        """Whether what is written is a reduction of several values."""
        return self.mode not in ("", "atomic_add")


@dataclass(frozen=True)
class Cluster:
    """One kernel: parallel extents, reduce extents, stores. Every layout inside spans (*parallel, *reduce), one stride
    per axis.

    `programs` is 0, or the number of programs that share the rows between them (mixed reductions). `varies`: the rows
    are those of one call, and stand for others (concretize.py). `cut`: how many reduce axes number the segments of a
    row where nothing is reduced over them.
    """

    parallel: tuple[int, ...]
    reduce: tuple[int, ...]
    stores: tuple[Store, ...]
    lines: tuple[str, ...] = ()
    programs: Any = 0
    varies: bool = False
    cut: int = 0

    @staticmethod
    def build(
        parallel: Sequence[int], reduce: Sequence[int], stores: Iterable[Store], lines: tuple[str, ...] = ()
    ) -> Cluster:
        """Return the cluster with every axis split by the common refinement of all digits in it."""
        cluster = Cluster(tuple(parallel), tuple(reduce), tuple(stores), lines)
        found = [leaf.layout for leaf in cluster.leaves] + [s.layout for s in cluster.stores]
        parts = [refine(found, axis) for axis in range(len(cluster.axes))]
        split = len(cluster.parallel)
        return cluster.reshape([n for p in parts[:split] for n in p], [n for p in parts[split:] for n in p])

    @property
    def axes(self) -> tuple[int, ...]:
        return (*self.parallel, *self.reduce)

    @cached_property
    def order(self) -> tuple[Expr, ...]:
        """Every node of every store, operands first."""
        return tuple(postorder(self.roots))

    @property
    def roots(self) -> list[Expr]:
        """What the stores write, and where."""
        return [r for s in self.stores for r in (s.value, *(e for e, _ in s.index))]

    @property
    def leaves(self) -> list[Load | Iota]:
        return [n for n in self.order if isinstance(n, (Load, Iota))]

    @cached_property
    def reads(self) -> dict[str, tuple[Load, ...]]:
        found: dict[str, list[Load]] = {}
        for node in self.order:
            if isinstance(node, Load):
                found.setdefault(node.buffer, []).append(node)
        return {name: tuple(loads) for name, loads in found.items()}

    @cached_property
    def levels(self) -> dict[Expr, int]:
        """How many reductions lie below each node, one above the other: a looped kernel needs that many passes before
        it.
        """
        found: dict[Expr, int] = {}
        for node in self.order:
            found[node] = max((found[c] for c in children(node)), default=0) + isinstance(node, Reduce)
        return found

    @cached_property
    def full(self) -> dict[Expr, bool]:
        """Whether each node varies along the reduce axes; the others are one value a row."""
        split = len(self.parallel)
        found: dict[Expr, bool] = {}
        for node in self.order:
            runs = isinstance(node, (Load, Iota)) and any((node.layout.strides or ())[split:])
            found[node] = not isinstance(node, Reduce) and (runs or any(found[c] for c in children(node)))
        return found

    @cached_property
    def held(self) -> int:
        """How many whole-row values must stay in registers across a reduction, at the worst one.

        What is the same for all rows and only read above a reduction (a weight, say) is loaded after it, and counts
        nothing; nor does what has one value a segment.
        """
        split, varies = len(self.parallel), dict[Expr, bool]()
        for node in self.order:
            runs = isinstance(node, (Load, Iota)) and any((node.layout.strides or ())[:split])
            varies[node] = runs or any(varies[c] for c in children(node))
        first, last = dict(self.levels), dict.fromkeys(self.order, 0)
        made = lambda n: first[n] - isinstance(n, Reduce)  # noqa: E731 - a reduction reads its operands in the pass before
        begun: dict[Expr, int] = {}
        for node in reversed(self.order):
            if not self.levels[node] and node in begun and not varies[node]:
                first[node] = begun[node]
            for operand in children(node):
                begun[operand] = min(begun.get(operand, made(node)), made(node))
                last[operand] = max(last[operand], made(node))
        kept = [n for n in self.order if self.full[n] and n not in self.by_segment and not isinstance(n, Iota)]
        top = max(self.levels.values(), default=0)
        return max((sum(first[n] <= level < last[n] for n in kept) for level in range(top)), default=0)

    @cached_property
    def segments(self) -> int:
        """How many reduce axes, the leading ones of an ordered cluster, number the segments of a row."""
        split = len(self.parallel)
        found = [
            n.number.layout.strides or () for n in self.order if isinstance(n, Segment) and isinstance(n.number, Iota)
        ]
        return max(
            (axis - split + 1 for strides in found for axis in range(split, len(strides)) if strides[axis]),
            default=self.cut,
        )

    @cached_property
    def by_segment(self) -> frozenset[Expr]:
        """The nodes that have one value a segment: what is reduced over segments, what numbers them, and what is made
        of those alone.
        """
        cut = len(self.parallel) + self.segments
        inside: dict[Expr, bool] = {}
        for node in self.order if self.segments else ():
            runs = isinstance(node, (Load, Iota)) and any((node.layout.strides or ())[cut:])
            inside[node] = not isinstance(node, (Reduce, Segment)) and (runs or any(inside[c] for c in children(node)))
        return frozenset(n for n, varies in inside.items() if not varies and self.full[n])

    def one_a_segment(self, store: Store) -> bool:
        """Whether a store writes one value for each segment of a row."""
        split = len(self.parallel)
        cut, strides = split + self.segments, store.layout.strides or ()
        return any(strides[split:cut]) and not any(strides[cut:]) and all(e in self.by_segment for e, _ in store.index)

    @property
    def segment(self) -> tuple[int, int]:
        """The number of segments of a row, and the elements of each."""
        cut = len(self.parallel) + self.segments
        return math.prod(self.axes[len(self.parallel) : cut]), math.prod(self.axes[cut:])

    @cached_property
    def writes(self) -> dict[str, Store]:
        return {s.buffer: s for s in self.stores}

    def runs_along(self, store: Store) -> bool:
        """Whether a store has a value for each element of the row; the others have one for a whole reduction."""
        return any((store.layout.strides or ())[len(self.parallel) :]) or self.full[store.value]

    @property
    def scatters(self) -> bool:
        """Whether a result is written where data says, or added to what is there."""
        return any(s.index or s.mode for s in self.stores)

    @cached_property
    def facts(self) -> dict[Any, Any]:
        """What analyses found out about the cluster."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}  # what is known of it is found again

    def reshape(self, parallel: Sequence[int], reduce: Sequence[int]) -> Cluster:
        """Return the same cluster over other extents of the same row-major order."""
        return self.map(Reshape((*parallel, *reduce)), parallel, reduce)

    def map(self, change: View, parallel: Sequence[int], reduce: Sequence[int]) -> Cluster:
        """Return the cluster with its axes seen through `change`."""
        new = dict(zip(self.roots, view(self.roots, change), strict=True))
        stores = []
        for store in self.stores:
            layout, rest = apply(store.layout, change)
            index = (*((new[e], stride) for e, stride in store.index), *((computed(t), t.stride) for t in rest))
            stores.append(replace(store, layout=layout, value=new[store.value], index=index))
        return replace(self, parallel=tuple(parallel), reduce=tuple(reduce), stores=tuple(stores))

    def rewritten(self, visit: Callable[[Expr], Expr]) -> Cluster:
        """Return the cluster with `visit` applied to every node of its expressions, operands first."""
        new = dict(zip(self.roots, rewrite(self.roots, visit), strict=True))
        at = lambda s: tuple((new[e], stride) for e, stride in s.index)  # noqa: E731
        return replace(self, stores=tuple(replace(s, value=new[s.value], index=at(s)) for s in self.stores))

    @cached_property
    def coalesced(self) -> Cluster:
        """The cluster with neighbouring axes joined wherever they are one axis in every operand; axes of extent 1 are
        dropped.
        """
        strides = [s.layout.strides for s in self.stores] + [leaf.layout.strides for leaf in self.leaves]
        split = len(self.parallel)
        groups: list[int] = []
        ends = []
        for side in (range(split), range(split, len(self.axes))):
            previous: int | None = None
            for axis in side:
                n = self.axes[axis]
                if n == 1:
                    continue
                joined = previous is not None and all(s[previous] == s[axis] * n for s in strides if s)
                if joined:
                    groups[-1] *= n
                else:
                    groups.append(n)
                previous = axis
            ends.append(len(groups))
        return self.reshape(groups[: ends[0]], groups[ends[0] :])

    def __str__(self) -> str:
        split = len(self.parallel)

        def row(kind: str, name: str, layout: Layout, dtype: torch.dtype, note: str = "") -> str:
            strides = [str(s) for s in layout.strides or layout.dims]
            left, right = " ".join(strides[:split]), " ".join(strides[split:])
            return f"  {kind:<6}{name:<12} {left:>16} | {right:<12} {str(dtype).removeprefix('torch.')}{note}"

        by = f" by {self.programs} programs" if self.programs != 0 else ""
        lines = [
            f"parallel {' '.join(map(str, self.parallel)) or 1}{by} | reduce {' '.join(map(str, self.reduce)) or 1}"
        ]
        for node in self.order:
            if isinstance(node, Load):
                note = (" indirect" if node.index else "") + (" masked" if node.mask is not None else "")
                lines.append(row("load", node.buffer, node.layout, node.dtype, note))
        for s in self.stores:
            lines.append(
                row(
                    "store", s.buffer, s.layout, s.dtype, " indirect" * bool(s.index) + (" " + s.mode if s.mode else "")
                )
            )
        return "\n".join(lines)


Args = ParamSpec("Args")
Fact = TypeVar("Fact")


def analysis(
    function: Callable[Concatenate[Cluster, Args], Fact],
) -> Callable[Concatenate[Cluster, Args], Fact]:
    """Let a function of a cluster run once for each cluster: fusion, schedules and text ask it of the same one.

    A cluster never changes, so what was found out about it stays true; nobody changes a fact either.
    """
    name = f"{function.__module__}.{function.__qualname__}"

    @wraps(function)
    def fact(cluster: Cluster, /, *args: Args.args, **kwargs: Args.kwargs) -> Fact:
        key = (name, args, tuple(kwargs.items())) if args or kwargs else name
        facts = cluster.facts
        if key not in facts:
            facts[key] = function(cluster, *args, **kwargs)
        return facts[key]  # type: ignore[no-any-return]

    return fact
