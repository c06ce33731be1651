"""Fusion rules: which steps of a graph are tried together, in which order, and what one kernel of them is.

In: a graph of steps. Out: `RULES`, the table that `fuse` walks down, a rule after the other until none of its pairs is
left:

    shared buffers      two steps that read or hand on one buffer           the pair that saves most bytes first
    nested reduction    reductions of segments, of their results, and what follows
    rows of everything  a reduction of everything, by the rows that another kernel holds
    row and column      reductions of rows and of columns over one space
    shares of rows      results of rows, reduced by the programs that make them
    slices              pointwise steps over slices of one buffer

A rule says which pairs there are (`match`), which of those are left alone and why (`refuse`), and what becomes of one
(`merge`, which may still raise `Refused`). A new way to fuse is a row of the table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ..ir.analysis import column_reduction, out_of_order, scans
from ..ir.cluster import Cluster
from ..ir.concretize import hinted, symbolic
from ..ir.expr import Reduce
from ..ir.graph import Buffer, Refused
from ..ir.signature import line, pattern
from ..ir.size import hint, product
from ..schedule.device import Device
from .align import ORDERS, align, join
from .block_reduction import check_segments, in_segments
from .nested_reduction import joined, nest
from .profitable import worth_it
from .realize import MAX_WEIGHT, weight
from .rfactor import by_rows, check_partial, fits_rows
from .row_column import in_shares, is_of_rows, mix
from .schedule import taller
from .step_graph import BETWEEN, StepGraph

MAX_BUFFERS = 48  # arguments of one kernel
NEIGHBOURS = 12  # how many siblings of one buffer are tried with each other

Members = tuple[int, ...]  # the numbers of steps, in the order that they run in
Match = tuple[tuple[int, ...], Members]  # a rank, the least is tried first, and what is tried


@dataclass(frozen=True)
class Merged:
    """What becomes of some steps: a kernel, the one that runs right after it if two are needed, and all buffers with
    those of its partial results.
    """

    step: Cluster
    tail: Cluster | None = None
    buffers: dict[str, Buffer] | None = None


@dataclass
class Fusion:
    """A graph that is being fused: `refused` and `skipped` say of pairs why they stay apart, after and before a try.

    `pointwise`: jit_level O1, which leaves reductions alone and makes no horizontal launches.
    """

    graph: StepGraph
    device: Device
    pointwise: bool = False
    refused: dict[Members, str] = field(default_factory=dict)
    skipped: dict[Members, str] = field(default_factory=dict)

    @cached_property
    def twins(self) -> set[int]:
        """The steps that do what another one does; asked when the steps have almost taken their shape."""
        signatures = {}
        for i in self.graph.steps:
            step = self.graph.cluster(i)
            if step is not None and not symbolic(step):
                signatures[i] = pattern(step, self.graph.places)
        count = Counter(row.key for row in signatures.values() if row is not None)
        return {i for i, row in signatures.items() if row is not None and count[row.key] > 1}

    def open_again(self, members: Members, *reasons: str) -> bool:
        """Whether a pair was not refused yet, or for one of these reasons."""
        return members not in self.refused or self.refused[members] in reasons


@dataclass(frozen=True)
class Rule:
    """A way to fuse.

    Attributes:
        match: of some steps, the steps that each may be merged with. Called with all steps, then with each that was
            merged.
        merge: what becomes of the steps; raises `Refused`.
        refuse: why steps are left alone without a try, or "".
        after: the rule without whose merges this one has nothing to do. reductions: whether it needs any.
    """

    name: str
    match: Callable[[Fusion, Sequence[int]], Iterator[Match]]
    merge: Callable[[Fusion, Members], Merged]
    refuse: Callable[[Fusion, Members], str] = lambda fusion, members: ""
    after: str = ""
    reductions: bool = True


# -- shared buffers ----------------------------------------------------------------------------------------------------


def neighbours(fusion: Fusion, steps: Sequence[int]) -> Iterator[Match]:
    """Pairs that share a buffer; what stood between two steps may have joined one of them since."""
    graph = fusion.graph
    for i in steps:
        near = _near(fusion, i) if graph.cluster(i) else set()
        for j in near - {i}:
            if graph.cluster(j):
                pair = graph.in_order((min(i, j), max(i, j)))
                if fusion.open_again(pair, BETWEEN):
                    yield (-graph.saved(*pair), *pair), pair


def _near(fusion: Fusion, i: int) -> set[int]:
    """Return the producers of what a step reads, and the nearest of the steps that read what it reads or writes."""
    graph = fusion.graph
    near = graph.producers_of(graph.reads[i])
    for name in graph.reads[i]:
        readers = sorted(graph.readers[name], key=lambda k: abs(k - i))
        near |= set(readers[: NEIGHBOURS + 1])
        _note_limit(fusion, i, name, readers[NEIGHBOURS + 1 :], NEIGHBOURS)
    for name in graph.writes[i]:
        readers = sorted(graph.readers.get(name, ()))
        near |= set(readers[: 2 * NEIGHBOURS])
        _note_limit(fusion, i, name, readers[2 * NEIGHBOURS :], 2 * NEIGHBOURS)
    return near


def _note_limit(fusion: Fusion, i: int, name: str, left: Sequence[int], limit: int) -> None:
    """Note of the steps that are not tried with `i` the first one."""
    if left:
        pair = min(i, left[0]), max(i, left[0])
        fusion.skipped.setdefault(pair, f"more steps read {name} than are tried with each other, {limit}")


def left_to_horizontal(fusion: Fusion, members: Members) -> str:
    """Two steps that share single elements only (a learning rate), of which one has a twin: all twins will be one
    launch anyway.
    """
    graph, (i, j) = fusion.graph, members
    shared = graph.reads[i] & graph.reads[j]
    if fusion.pointwise or graph.writes[i] & graph.reads[j]:
        return ""
    if any(hint(product(graph.buffers[name].shape)) > 1 for name in shared) or not fusion.twins & {i, j}:
        return ""
    return "they share single elements only, and one is a row of a launch over many tensors"


def merge_neighbours(fusion: Fusion, members: Members, slices: bool = False) -> Merged:
    """Return both steps over the same axes as one, if that is quicker."""
    a, b = fusion.graph.clusters(members)
    if fusion.pointwise and (a.reduce or b.reduce):
        raise Refused("jit_level O1 fuses elementwise clusters only")
    fusion.graph.check_path(members)
    blocks = in_segments(a, b)
    one, two = blocks or align(a, b, slices)
    merged = join(one, two)
    check_kernel(merged, fusion.graph.buffers)
    merged = fusion.graph.without_dead(merged, members)
    if blocks:
        check_segments(a, b, merged, fusion.device)
    worth_it(hinted(one), hinted(two), hinted(merged), fusion.device)
    return Merged(merged)


def check_kernel(merged: Cluster, buffers: dict[str, Buffer]) -> None:
    """Refuse a kernel that is too large, or that would overwrite what it still reads.

    Raises:
        Refused: for one of these.
    """
    if reason := out_of_order(merged):
        raise Refused(reason)
    size = weight(merged.order)
    if size > MAX_WEIGHT:
        raise Refused(f"{size} ops in one kernel, {MAX_WEIGHT} at most")
    if len(merged.reads.keys() | merged.writes.keys()) > MAX_BUFFERS:
        raise Refused(f"more than {MAX_BUFFERS} buffers in one kernel")
    for store in merged.stores:
        target = buffers[store.buffer].written_to
        for node in merged.reads.get(target, ()) if target else ():
            if node.index or node.layout != store.layout or store.onto:
                raise Refused(f"it would overwrite {target} while others still read it")
        if store.onto in merged.writes:
            raise Refused(f"{store.onto} is written at places that data gives, once all of it is there")


# -- slices of one buffer ----------------------------------------------------------------------------------------------


def slices(fusion: Fusion, steps: Sequence[int]) -> Iterator[Match]:
    """Pairs of pointwise steps that read one buffer in different orders, each its own slice: q, k and v of a
    projection. A launch is all that is left to save.
    """
    graph = fusion.graph
    for i in steps:
        step = graph.cluster(i)
        for j in _near(fusion, i) - {i} if step and not step.reduce and not step.programs else ():
            other = graph.cluster(j)
            if other and not other.reduce and not other.programs and graph.reads[i] & graph.reads[j]:
                pair = graph.in_order((min(i, j), max(i, j)))
                if fusion.open_again(pair, BETWEEN, ORDERS):
                    yield (-graph.saved(*pair), *pair), pair


def left_as_lines(fusion: Fusion, members: Members) -> str:
    """Two lines of memory: horizontal fusion makes one launch of them."""
    if reason := left_to_horizontal(fusion, members):
        return reason
    if any(symbolic(step) or line(step) is None for step in fusion.graph.clusters(members)):
        return ""
    return "each is one line of memory: horizontal fusion makes one launch of those that do the same"


def merge_slices(fusion: Fusion, members: Members) -> Merged:
    return merge_neighbours(fusion, members, slices=True)


# -- nested reductions -------------------------------------------------------------------------------------------------


def segments_of_rows(fusion: Fusion, steps: Sequence[int]) -> Iterator[Match]:
    """A reduction of segments, one of its results, and what follows along the whole space: three steps that read one
    input twice.
    """
    graph = fusion.graph
    for j in steps:
        outer = _reduction(fusion, j)
        for i in graph.producers_of(graph.reads[j]) if outer else ():
            inner = _reduction(fusion, i)
            if not inner or symbolic(inner) or not outer or symbolic(outer):
                continue
            for k in graph.readers_of(graph.writes[j]) - {i, j}:
                if graph.cluster(k) and graph.saved(i, k) > graph.handed_on(i, j):
                    yield (j, i, -graph.saved(i, k), k), (i, j, k)


def _reduction(fusion: Fusion, i: int) -> Cluster | None:
    step = fusion.graph.cluster(i)
    return step if step and step.reduce else None


def merge_nested(fusion: Fusion, members: Members) -> Merged:
    inner, outer, after = fusion.graph.clusters(members)
    fusion.graph.check_path(members)
    merged = joined(nest(inner, outer, fusion.device), after)
    check_kernel(merged, fusion.graph.buffers)
    return Merged(fusion.graph.without_dead(merged, members))


# -- a reduction of everything, by rows --------------------------------------------------------------------------------


def everything(fusion: Fusion, steps: Sequence[int]) -> Iterator[Match]:
    """A reduction of everything and a kernel that holds rows of it, which give their part."""
    graph = fusion.graph
    for j in steps:
        whole = _reduction(fusion, j)
        if whole and product(whole.parallel) == 1:
            near = graph.producers_of(graph.reads[j]) | graph.readers_of(graph.reads[j] | graph.writes[j])
            for i in near - {j}:
                rows = graph.cluster(i)
                if rows and fits_rows(whole, rows):
                    yield (j, -graph.saved_either_way(i, j), i), (i, j)


def merge_everything(fusion: Fusion, members: Members) -> Merged:
    graph, (a, b) = fusion.graph, fusion.graph.clusters(members)
    first = fits_rows(a, b)  # whether the reduction of everything is the first of the two
    whole, rows = (a, b) if first else (b, a)
    buffers = dict(graph.buffers)
    graph.check_path(members)
    pieces, tail = by_rows(whole, rows, first, buffers)
    one, two = align(pieces, rows) if first else align(rows, pieces)
    merged = join(one, two)
    check_kernel(merged, buffers)
    worth_it(hinted(one), hinted(two), hinted(merged), fusion.device)
    check_partial(graph.buffers, buffers, graph.saved_either_way(*members))
    return Merged(graph.without_dead(merged, members), tail, buffers)


# -- rows and columns --------------------------------------------------------------------------------------------------


def rows_and_columns(fusion: Fusion, steps: Sequence[int]) -> Iterator[Match]:
    """What is left of row and column reductions over the same elements, the pair that saves most first."""
    graph = fusion.graph
    if all(i in graph.tails for i in steps):
        return
    rows: dict[int, tuple[int, int]] = {}  # one row length, one number of rows
    columns: dict[tuple[int, int], list[int]] = {}
    for i in graph.steps:
        step = graph.cluster(i)
        if step is None or scans(step) or not any(isinstance(n, Reduce) for n in step.order):
            continue
        extents = product(step.parallel), product(step.reduce)
        if column_reduction(hinted(step)):
            columns.setdefault(extents, []).append(i)
        elif isinstance(extents[1], int):
            # how many rows there are may vary, their length decides which template holds them
            rows[i] = extents
    for i, extents in rows.items():
        for j in columns.get(extents[::-1], ()):
            if i != j and graph.saved_either_way(i, j):
                yield (-graph.saved_either_way(i, j), i, j), (i, j)


def merge_row_and_column(fusion: Fusion, members: Members) -> Merged:
    graph, (a, b) = fusion.graph, fusion.graph.clusters(members)
    column_first = column_reduction(hinted(a))
    row, column = (b, a) if column_first else (a, b)
    graph.check_path(members)
    buffers = dict(graph.buffers)
    merged, tail = mix(row, column, column_first, buffers, fusion.device)
    check_kernel(merged, buffers)
    by = taller(product(row.parallel), fusion.device)
    check_partial(graph.buffers, buffers, graph.saved_either_way(*members), by)
    return Merged(graph.without_dead(merged, members), tail, buffers)


# -- results of rows, by shares ----------------------------------------------------------------------------------------


def results_of_rows(fusion: Fusion, steps: Sequence[int]) -> Iterator[Match]:
    """A reduction of what rows come to, the tail of their step or one that follows, where all of it takes two steps:
    the programs that make the results reduce those of their share.
    """
    graph = fusion.graph
    for j in steps:
        for i in [j] if j in graph.tails else sorted(graph.producers_of(graph.reads[j])):
            rows, whole = graph.cluster(i), graph.tails.get(j) or graph.cluster(j)
            if rows and isinstance(whole, Cluster) and is_of_rows(whole, rows):
                yield (j, i), (j,) if i == j else (i, j)


def merge_shares(fusion: Fusion, members: Members) -> Merged:
    graph = fusion.graph
    rows, whole = graph.cluster(members[0]), graph.tails.get(members[-1]) or graph.cluster(members[-1])
    assert rows is not None and isinstance(whole, Cluster)
    buffers = dict(graph.buffers)
    graph.check_path(members)
    walk, tail = in_shares(whole, rows, buffers, fusion.device)
    check_kernel(walk, buffers)
    return Merged(graph.without_dead(walk, members), tail, buffers)


# -- the table ---------------------------------------------------------------------------------------------------------

RULES: tuple[Rule, ...] = (
    Rule("shared buffers", neighbours, merge_neighbours, left_to_horizontal, reductions=False),
    Rule("nested reduction", segments_of_rows, merge_nested),
    Rule("what nesting left", neighbours, merge_neighbours, left_to_horizontal, after="nested reduction"),
    Rule("rows of everything", everything, merge_everything),
    Rule("row and column", rows_and_columns, merge_row_and_column),
    Rule("shares of rows", results_of_rows, merge_shares),
    Rule("slices", slices, merge_slices, left_as_lines, reductions=False),
)
