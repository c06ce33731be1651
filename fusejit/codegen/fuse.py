"""Fuse: clusters become fewer clusters, ranked by the bytes that a merge saves.

In: the clusters and extern calls of `lower`. Out: the same program with fewer launches, and a reason for every refused pair.

Two clusters merge when no path through a third runs between them and their axes can be made the same: equal (parallel, reduce);
a pointwise cluster over the parallel x reduce space, or the parallel space alone, of a reduction. A value that only the merged
cluster reads is never written. Ideas: Inductor's scheduler (greedy, by score), MindSpore's graph kernels (limits).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, replace

from .cluster import Cluster, Expr, Load, Reduce, Store, cast, compute, const, rewrite
from .layout import Affine, permute
from .lower import Buffer, Extern, Lowered, refs
from .realize import MAX_WEIGHT, weight
from .size import product

MAX_BUFFERS = 48  # arguments of one kernel
FEW_ROWS = 32  # below this many programs a long row must not drag its pointwise neighbours into its few programs
LONG_ROW = 8192
NEIGHBOURS = 12  # how many siblings of one buffer are tried with each other


@dataclass(frozen=True, slots=True)
class Unfused:
    """Two clusters that share a buffer and stay apart, and why."""

    pair: tuple[str, str]
    reason: str

    def __str__(self) -> str:
        return f"{self.pair[0]} | {self.pair[1]}: {self.reason}"


class Refused(Exception):
    """Why two clusters cannot be one."""


def fuse(lowered: Lowered, reductions: bool = True) -> tuple[Lowered, tuple[Unfused, ...]]:
    """Return the program with clusters merged, and the refusals. `reductions=False` fuses pointwise clusters only."""
    state = _Fusing(lowered, reductions)
    state.run()
    return replace(lowered, steps=tuple(state.ordered())), state.refusals()


class _Fusing:
    """The graph of steps while it shrinks. Ancestors are bit sets, so that "is there a path" is one `&`."""

    def __init__(self, lowered: Lowered, reductions: bool) -> None:
        self.lowered, self.reductions = lowered, reductions
        self.steps: dict[int, Cluster | Extern] = dict(enumerate(lowered.steps))
        self.kept = {ref.buffer for ref in refs(lowered.outputs)} | {b.name for b in lowered.buffers.values() if b.written_to}
        self.kept |= {name for s in lowered.steps if isinstance(s, Extern) for name in s.reads}
        self.producer: dict[str, int] = {}
        self.readers: dict[str, set[int]] = {}
        self.above: dict[int, int] = {}
        self.refused: dict[tuple[int, int], str] = {}
        self.barriers = [i for i, s in self.steps.items() if isinstance(s, Extern) and s.target == "fusejit.order.default"]
        for i, step in self.steps.items():
            for name in reads(step):
                self.readers.setdefault(name, set()).add(i)
            for name in writes(step):
                self.producer[name] = i
        for i, step in self.steps.items():
            bits = 0
            for j in self.before(i, step):
                bits |= self.above[j] | 1 << j
            self.above[i] = bits

    def before(self, i: int, step: Cluster | Extern) -> set[int]:
        """Return the steps that must run before `step`: producers of what it reads, readers of what it overwrites, `depend`s."""
        found = {self.producer[name] for name in reads(step) if name in self.producer}
        if isinstance(step, Extern):  # its effects, if it has any, are none of ours to know
            found |= set([k for k in self.barriers if k < i][-1:])
        for name in writes(step):
            target = self.lowered.buffers[name].written_to
            found |= self.readers.get(target, set()) if target else set()
        return found - {i}

    def run(self) -> None:
        heap: list[tuple[int, int, int]] = []
        for i in list(self.steps):
            self.push(heap, i)
        while heap:
            score, i, j = heapq.heappop(heap)
            if i not in self.steps or j not in self.steps or (i, j) in self.refused:
                continue
            try:
                merged = self.merge(i, j)
            except Refused as refusal:
                self.refused[i, j] = str(refusal)
                continue
            self.replace(i, j, merged)
            self.push(heap, j)

    def push(self, heap: list[tuple[int, int, int]], i: int) -> None:
        """Queue the pairs of step `i` with the steps that share a buffer with it."""
        step = self.steps[i]
        if not isinstance(step, Cluster):
            return
        others: set[int] = set()
        for name in reads(step):
            others |= {self.producer[name]} if name in self.producer else set()
            near = sorted(self.readers[name], key=lambda k: abs(k - i))
            others |= set(near[: NEIGHBOURS + 1])
        for name in writes(step):
            others |= set(sorted(self.readers.get(name, set()))[: NEIGHBOURS * 2])
        for j in others - {i}:
            if isinstance(self.steps.get(j), Cluster):
                a, b = (i, j) if not self.above[i] >> j & 1 and i < j or self.above[j] >> i & 1 else (j, i)
                heapq.heappush(heap, (-self.saved(a, b), a, b))

    def saved(self, i: int, j: int) -> int:
        """Return the bytes that merging saves: shared reads once, a value handed on in registers neither written nor read."""
        a, b = self.steps[i], self.steps[j]
        total = 0
        for name in reads(a) & reads(b):
            total += self.lowered.buffers[name].bytes
        for name in writes(a) & reads(b):
            gone = name not in self.kept and self.readers[name] <= {i, j}
            total += self.lowered.buffers[name].bytes * (2 if gone else 1)
        return total

    def merge(self, i: int, j: int) -> Cluster:
        a, b = self.steps[i], self.steps[j]
        assert isinstance(a, Cluster) and isinstance(b, Cluster)
        if not self.reductions and (a.reduce or b.reduce):
            raise Refused("jit_level O1 fuses elementwise clusters only")
        between = self.above[j] & ~(1 << i)
        while between:
            k = between.bit_length() - 1
            between ^= 1 << k
            if k in self.steps and self.above[k] >> i & 1:
                raise Refused("an op between them reads one and feeds the other")
        if self.above[i] >> j & 1:
            raise Refused("an op between them reads one and feeds the other")
        a, b = align(a, b)
        merged = join(a, b)
        _check(a, b, merged, self.lowered.buffers)
        dead = {name for name in merged.writes if name not in self.kept and self.readers.get(name, set()) <= {i, j}}
        stores = tuple(s for s in merged.stores if s.buffer not in dead or s.buffer in merged.reads)
        return replace(merged, stores=stores)

    def replace(self, i: int, j: int, merged: Cluster) -> None:
        """Put `merged` in the place of j, and forget i."""
        for k in (i, j):
            for name in reads(self.steps[k]):
                self.readers[name].discard(k)
        for name in (*writes(self.steps[i]), *writes(self.steps[j])):
            self.producer.pop(name, None)
        del self.steps[i]
        self.steps[j] = merged
        for name in reads(merged):
            self.readers.setdefault(name, set()).add(j)
        for name in writes(merged):
            self.producer[name] = j
        bits = (self.above[i] | self.above[j]) & ~(1 << i) & ~(1 << j)
        self.above[j] = bits
        for k, above in self.above.items():
            if above >> i & 1 or above >> j & 1:
                self.above[k] = (above | bits | 1 << j) & ~(1 << i)

    def ordered(self) -> list[Cluster | Extern]:
        """Return the steps in an order that respects every dependency, as close to the program's as can be."""
        waiting = {i: self.before(i, s) for i, s in self.steps.items()}
        done: list[Cluster | Extern] = []
        ready = [i for i, above in waiting.items() if not above]
        heapq.heapify(ready)
        followers: dict[int, list[int]] = {}
        for i, above in waiting.items():
            for k in above:
                followers.setdefault(k, []).append(i)
        while ready:
            i = heapq.heappop(ready)
            done.append(self.steps[i])
            for k in followers.get(i, ()):
                waiting[k].discard(i)
                if not waiting[k]:
                    heapq.heappush(ready, k)
        assert len(done) == len(self.steps), "fusion made a cycle"
        return done

    def refusals(self) -> tuple[Unfused, ...]:
        alive = ((i, j, r) for (i, j), r in self.refused.items() if i in self.steps and j in self.steps)
        return tuple(Unfused((_first_line(self.steps[i]), _first_line(self.steps[j])), reason) for i, j, reason in alive)


def reads(step: Cluster | Extern) -> frozenset[str] | set[str]:
    return step.reads if isinstance(step, Extern) else set(step.reads)


def writes(step: Cluster | Extern) -> set[str]:
    return {name for name in step.outputs if name} if isinstance(step, Extern) else set(step.writes)


# -- making the axes of two clusters the same ------------------------------------------------------------------------------------------
def align(a: Cluster, b: Cluster) -> tuple[Cluster, Cluster]:
    """Return both clusters over the same parallel and reduce axes, in the same order.

    Raises:
        Refused: their iteration spaces differ, or no order makes a value that one writes stand where the other reads it.
    """
    swap = bool(b.reduce) and not a.reduce
    wide, other = (b, a) if swap else (a, b)
    last: Refused | None = None
    for arrange in (_as_they_are, _by_strides):
        try:
            one, two = _common(*arrange(*_spaces(wide, other), a, b))
            pair = (two, one) if swap else (one, two)
            _same_places(*pair)
            return pair
        except Refused as refusal:
            last = last or refusal
    assert last is not None
    raise last


def _spaces(wide: Cluster, other: Cluster) -> tuple[Cluster, Cluster]:
    """Give `other` the same number of parallel and reduce elements as `wide`."""
    rows, columns = product(wide.parallel), product(wide.reduce)
    if bool(other.reduce) == bool(wide.reduce):
        if (product(other.parallel), product(other.reduce)) != (rows, columns):
            raise Refused(f"iteration spaces differ: {_space(wide)} and {_space(other)}")
        return wide, other
    size = product(other.parallel)
    if size == rows * columns:
        return wide, other  # its parallel axes are cut into rows and columns by _common
    if size == rows:
        return wide, other.map(_widen(other.parallel, wide.reduce), other.parallel, wide.reduce)
    raise Refused(f"iteration spaces differ: {_space(wide)} and {_space(other)}")


def _widen(parallel: tuple[int, ...], reduce: tuple[int, ...]) -> Affine:
    return Affine((*parallel, *reduce), tuple((0, ((d, 1),)) for d in range(len(parallel))))


def _space(cluster: Cluster) -> str:
    rows = "x".join(map(str, cluster.parallel)) or "1"
    return rows + (" | " + "x".join(map(str, cluster.reduce)) if cluster.reduce else "")


def _as_they_are(wide: Cluster, other: Cluster, a: Cluster, b: Cluster) -> tuple[Cluster, Cluster]:
    return wide, other


def _by_strides(wide: Cluster, other: Cluster, a: Cluster, b: Cluster) -> tuple[Cluster, Cluster]:
    """Sort the axes of both by their strides in the buffers that they share, rows before columns."""
    shared = sorted({*a.reads, *a.writes} & {*b.reads, *b.writes})
    wide, other = _sorted(wide, shared, None), other
    if wide.reduce and not other.reduce:
        # an axis of the pointwise cluster is a column where everything that the reduction makes is constant along it
        results = [name for name in shared if name in wide.writes] or shared
        keys = _keys(other, results)
        columns = [axis for axis in range(len(other.parallel)) if all(k == 0 for k in keys[axis])] if results else []
        if product(other.parallel[axis] for axis in columns) != product(wide.reduce):
            columns = _columns_by_reads(wide, other, shared)
        return wide, _sorted(other, shared, columns)
    return wide, _sorted(other, shared, None)


def _columns_by_reads(wide: Cluster, other: Cluster, shared: list[str]) -> list[int]:
    """Return the axes of `other` whose strides in shared buffers are those of the reduction's columns."""
    theirs = set(_keys(wide, shared)[len(wide.parallel) :])
    keys = _keys(other, shared)
    return [axis for axis in range(len(other.parallel)) if keys[axis] in theirs]


def _keys(cluster: Cluster, shared: Iterable[str]) -> list[tuple[int, ...]]:
    """Return, for each axis, its strides in the shared buffers."""
    layouts = []
    for name in shared:
        found = cluster.writes[name].layout if name in cluster.writes else cluster.reads[name][0].layout if name in cluster.reads else None
        layouts.append(found)
    return [tuple(0 if lay is None or lay.strides is None else lay.strides[axis] for lay in layouts) for axis in range(len(cluster.axes))]


def _sorted(cluster: Cluster, shared: list[str], columns: list[int] | None) -> Cluster:
    """Return the cluster with parallel axes sorted by falling strides in `shared`, and `columns` of them (if given) at the end."""
    keys = _keys(cluster, shared)
    split = len(cluster.parallel)
    rank = lambda axis: tuple(-abs(k) for k in keys[axis])  # noqa: E731
    chosen = set(columns or ())
    parallel = sorted((x for x in range(split) if x not in chosen), key=rank) + sorted(chosen, key=rank)
    order = parallel + sorted(range(split, len(cluster.axes)), key=rank)
    axes = cluster.axes
    return cluster.map(permute(axes, order), [axes[x] for x in parallel], [axes[x] for x in order[split:]])


def _common(wide: Cluster, other: Cluster) -> tuple[Cluster, Cluster]:
    """Split the axes of both at each other's boundaries; the columns of `wide` divide the parallel axes of a pointwise `other`."""
    columns = product(wide.reduce)
    if wide.reduce and not other.reduce:
        inner = _nest(wide.reduce, other.parallel, columns)
        outer = _nest(wide.parallel, _outer(other.parallel, columns), product(wide.parallel))
        return wide.reshape(outer, inner), _recut(other, outer, inner)
    parallel = _nest(wide.parallel, other.parallel, product(wide.parallel))
    reduce = _nest(wide.reduce, other.reduce, columns)
    return wide.reshape(parallel, reduce), other.reshape(parallel, reduce)


def _recut(cluster: Cluster, parallel: tuple[int, ...], reduce: tuple[int, ...]) -> Cluster:
    return Cluster(parallel, reduce, cluster.reshape((*parallel, *reduce), ()).stores, cluster.lines)


def _outer(extents: tuple[int, ...], columns: int) -> tuple[int, ...]:
    """Return the extents above the innermost `columns` elements."""
    rest, count = list(extents), columns
    while rest and count > 1:
        n = rest.pop()
        if count % n and n % count:
            raise Refused("their axes do not nest")
        if n > count:
            rest.append(n // count)
            count = 1
        else:
            count //= n
    return tuple(rest)


def _nest(one: tuple[int, ...], two: tuple[int, ...], total: int) -> tuple[int, ...]:
    """Return extents whose boundaries are those of both, up to `total` elements from the inside."""
    boundaries = {1, total}
    for extents in (one, two):
        size = 1
        for n in reversed(extents):
            size *= n
            if size < total:
                boundaries.add(size)
    chain = sorted(boundaries)
    if any(b % a for a, b in zip(chain, chain[1:], strict=False)):
        raise Refused("their axes do not nest")
    return tuple(b // a for a, b in reversed(list(zip(chain, chain[1:], strict=False))))


def _same_places(a: Cluster, b: Cluster) -> None:
    """Refuse unless every value that a hands to b is read where it was written, and a shared read is one read."""
    gain = False
    for name, store in a.writes.items():
        for node in b.reads.get(name, ()):
            if node.index or node.layout != store.layout or store.index or store.mode:
                raise Refused(f"{name} is read at other positions than it is written")
            gain = True
    if not gain:
        same = (set(map(_access, a.reads[n])) & set(map(_access, b.reads[n])) for n in a.reads.keys() & b.reads.keys())
        if not any(same):
            raise Refused("they read what they share in different orders")


def _access(node: Load) -> tuple:
    return node.layout, node.index


def _check(a: Cluster, b: Cluster, merged: Cluster, buffers: dict[str, Buffer]) -> None:
    size = weight(merged.order)
    if size > MAX_WEIGHT:
        raise Refused(f"{size} ops in one kernel, {MAX_WEIGHT} at most")
    if len(merged.reads.keys() | merged.writes.keys()) > MAX_BUFFERS:
        raise Refused(f"more than {MAX_BUFFERS} buffers in one kernel")
    rows, columns = product(merged.parallel), product(merged.reduce)
    flat = [c for c in (a, b) if not any(isinstance(n, Reduce) for n in c.order)]
    if len(flat) == 1 and rows < FEW_ROWS and columns >= LONG_ROW and any(_spans(s, len(merged.parallel)) for s in flat[0].stores):
        raise Refused(f"only {rows} rows of {columns}: one program a row would leave the device idle")
    for store in merged.stores:
        target = buffers[store.buffer].written_to
        for node in merged.reads.get(target, ()) if target else ():
            if node.index or node.layout != store.layout:
                raise Refused(f"it would overwrite {target} while others still read it")


def _spans(store: Store, split: int) -> bool:
    return any(s != 0 for s in (store.layout.strides or ())[split:])


def join(a: Cluster, b: Cluster) -> Cluster:
    """Return one cluster with the stores of both; b takes a's values from registers."""
    made: dict[str, Expr] = {s.buffer: s.value for s in a.stores}

    def visit(node: Expr) -> Expr:
        if not isinstance(node, Load) or node.buffer not in made:
            return node
        value = cast(made[node.buffer], node.dtype)
        return value if node.mask is None else compute("where", node.mask, value, const(node.fill, node.dtype), dtype=node.dtype)

    values = rewrite([s.value for s in b.stores], visit)
    stores = (*a.stores, *(replace(s, value=v) for s, v in zip(b.stores, values, strict=True)))
    return Cluster(a.parallel, a.reduce, stores, tuple(dict.fromkeys((*a.lines, *b.lines))))


def _first_line(step: Cluster | Extern) -> str:
    return (step.line or step.target) if isinstance(step, Extern) else step.lines[-1] if step.lines else _space(step)
