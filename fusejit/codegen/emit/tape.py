"""Tape: the statements of a kernel, one for each node of its expressions.

In: nodes in an order in which operands come first. Out: lines of Triton, and the name that each node has in them.

    tmp0 = tl.load(in0 + (x), x < 1000)
    tmp1 = fj.maximum(tmp0, 0)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch

from ..ir.cluster import Store
from ..ir.expr import Compute, Const, Expr, Iota, Load, Random, Reduce, Segment, children, postorder
from ..ir.layout import Layout, strided
from ..ir.size import Size
from ..ops.table import OPS, STORAGE, cast_spelling, fill_of
from ..schedule.registers import needed_beside
from .index import IndexSpace
from .philox_tiles import lanes

INDEX_OPS = {"index_div", "index_mod"}
COMPARISONS = {"lt", "le", "gt", "ge", "eq", "ne"}


class Tape:
    """Names of the values computed so far; a tape inside a loop sees the names outside it.

    This one writes what is computed element by element: loads, computation, random numbers and stores.
    """

    def __init__(self, index: IndexSpace, outside: Tape | None = None) -> None:
        self.facts, self.index = index.facts, index
        self.names: dict[Expr, str] = dict(outside.names) if outside else {}
        self.counter: list[int] = outside.counter if outside else [0]
        self.narrow: set[Expr] = set(outside.narrow) if outside else set()
        self.policies: dict[Expr, str] = {}
        self.again = False  # whether a kept row was read by a pass before
        self.begins: dict[str, str] = {}  # where a tile begins, if not where the template says
        self.quads: set[str] = set()  # statements that every fourth index has already

    def fresh(self) -> str:
        self.counter[0] += 1
        return f"tmp{self.counter[0] - 1}"

    def text(self, node: Expr, literal: bool = False, index: bool = False) -> str:
        if isinstance(node, Const):
            return (
                literal_of(node)
                if index or (literal and not isinstance(node.value, Size))
                else f"tl.full((), {literal_of(node)}, {STORAGE[node.dtype].compute})"
            )
        name = self.names[node]
        name = f"{name}.to(tl.int64)" if node in self.narrow and not index and node.dtype is torch.int64 else name
        spread = node in self.facts.cluster.by_segment and self.index.column != "s"
        return f"fj.along({name}, {self.index.padded})" if spread else name

    def statement(self, node: Expr) -> list[str]:
        """Return the statements that compute a node, and give it a name."""
        if isinstance(node, Const) or node in self.names or node in self.facts.rounded:
            return []
        if node in self.facts.cluster.by_segment and not isinstance(node, Segment):
            return self.of_segments(lambda: self.named(node))
        return self.named(node)

    def of_segments(self, write: Callable[[], list[str]]) -> list[str]:
        """Return statements whose tiles have one value a segment."""
        row = self.index
        self.index = row.segments or row
        lines = write()
        self.index = row
        return lines

    def named(self, node: Expr) -> list[str]:
        """Return the statements that compute a node and name it."""
        if isinstance(node, Iota):
            return self._iota(node)
        lines: list[str] = []
        match node:
            case Load():
                value = self._load(node)
            case Compute():
                value = self._compute(node)
            case Random():
                lines, value = self._random(node)
            case _:
                return self.along_row(node)
        name = self.names[node] = self.fresh()
        lines.append(f"{name} = {value}")
        if isinstance(node, Compute) and node.op == "checked_probability":
            lines.append(f"fj.check_probability({name}, {self.checked_where(node) or 'None'})")
        if isinstance(node, Compute) and node.op in ("checked_index", "checked_place"):
            mask = self.checked_where(node) or "None"
            lines.append(f"fj.check_index({name}, {self.text(node.args[1])}, {mask})")
            if not self.facts.wide:  # in bounds, so 32 bits hold it: half the registers of a long row of indices
                lines.append(f"{name} = {name}.to(tl.int32)")
                self.narrow.add(node)
        return lines

    def along_row(self, node: Expr) -> list[str]:
        """Return the statements of what is made of a whole row."""
        raise TypeError(node)

    def checked_where(self, node: Expr) -> str:
        """Return where a check counts; a scalar of a row is checked once and not in each column."""
        rows = bool(self.facts.template.scalars)
        return self.index.mask(self.runs_along([node])) if rows else self.index.mask([], columns=self.facts.full[node])

    def runs_along(self, roots: Iterable[Expr]) -> list[Layout]:
        """Return layouts with the axes along which expressions run: a reduction has one value a row, whatever it was
        made of.
        """
        cluster = self.facts.cluster
        row = strided(cluster.axes, [1] * len(cluster.parallel) + [0] * len(cluster.reduce))
        found = postorder(roots, lambda n: () if isinstance(n, Reduce) else children(n))
        return [row if isinstance(n, Reduce) else n.layout for n in found if isinstance(n, (Load, Iota, Reduce))]

    def _iota(self, node: Iota) -> list[str]:
        offset = self.index.offset(node.layout)
        name = self.names[node] = self.fresh()
        if not any(node.layout.strides or ()):
            return [f"{name} = tl.full((), {offset}, {STORAGE[node.dtype].compute})"]
        self.narrow.add(node)
        return [f"{name} = {offset}"]

    def keep(self, node: Load, name: str) -> list[str]:
        """Return the statement that loads what all passes over the row share."""
        return [f"{name} = {self._access(node)}"]

    def _load(self, node: Load) -> str:
        name = self.facts.kept.get(node)
        value = self._access(node) if name is None else f"fj.again({name})" if self.again else name
        value = STORAGE[node.dtype].load.format(value)
        return f"({value} != 0)" if node.dtype is torch.bool else value

    def _access(self, node: Load) -> str:
        offset = self._place(node.layout, node.index)
        extra = self.text(node.mask) if node.mask is not None else ""
        along, tested = (
            self.runs_along(e for e, _ in node.index),
            self.runs_along([node.mask] if node.mask is not None else []),
        )
        mask = self.index.mask([node.layout, *along, *tested], extra)
        if tested and not self.index.some_axis((node.layout, *along)):
            # one element, masked by a tile: Triton wants a tile of pointers
            offset += f" + 0 * {self.index.some_axis(tested) or '0'}"
        more = (f", {mask}" if mask else "") + (
            f", other={fill_of(node.fill, node.dtype)}" if node.mask is not None else ""
        )
        more += f', eviction_policy="{self.policies[node]}"' if node in self.policies else ""
        return f"tl.load({at(self.facts.pointers[node.buffer], offset)}{more})"

    def _place(self, layout: Layout, index: tuple[tuple[Expr, int], ...]) -> str:
        offset = self.index.address(layout)
        terms = [
            f"{stride} * {self.text(e, index=True)}" if stride != 1 else self.text(e, index=True) for e, stride in index
        ]
        return " + ".join([offset, *terms])

    def _compute(self, node: Compute) -> str:
        if node.op == "cast":
            return cast_spelling(node.args[0].dtype, node.dtype, implicit=not self.facts.exact).format(
                self.text(node.args[0])
            )
        row = OPS[node.op]
        numbers = all(isinstance(a, Const) for a in node.args)  # of literals alone Python would make a Python value
        small = node.op in INDEX_OPS | COMPARISONS and all(self._is_index(a) for a in node.args) and not numbers
        if small:
            if node.op in INDEX_OPS:
                self.narrow.add(node)
            return row.text(*(self.text(a, literal=True, index=True) for a in node.args))
        plain = row.literals and not numbers
        text = row.text(
            *(self.text(a, literal=plain and a.dtype is not torch.float64) for a in node.args), exact=self.facts.exact
        )
        exact = self.facts.exact or node.op == "rounded"
        rounds = STORAGE[node.dtype].round if exact and node.dtype in STORAGE else ""
        return rounds.format(text) if rounds else text

    def _is_index(self, node: Expr) -> bool:
        if isinstance(node, Const) and isinstance(node.value, Size):
            return node.dtype is torch.int64
        return node in self.narrow or (
            isinstance(node, Const) and node.dtype is torch.int64 and abs(node.value) < 2**31
        )

    def _random(self, node: Random) -> tuple[list[str], str]:
        found = lanes(self.index, node, self.begins)
        if found is None:
            return [], f"fj.{node.kind}({self.text(node.seed)}, {self.text(node.offset)})"
        before, counters = found
        new = [line for line in before if line not in self.quads]
        self.quads |= set(new)
        return new, f"fj.{node.kind}_tile({self.text(node.seed)}, {counters})"

    def store(self, store: Store) -> list[str]:
        if self.facts.cluster.one_a_segment(store) and self.index.column != "s":
            return self.of_segments(lambda: self.store(store))
        offset = self._place(store.layout, store.index)
        strides = store.layout.strides or ()
        columns = self.facts.runs(store)
        still = "0 * " if store.index else ""
        for (
            variable,
            axes,
        ) in self.index.groups.items():  # a group of one element still gives the pointers their tile shape
            if not any(strides[a] for a in axes) and (variable != self.index.column or columns and bool(store.mode)):
                offset += f" + {still}{variable}"
        target = self.facts.buffers[store.buffer].written_to or store.buffer
        value = STORAGE[store.dtype].store.format(self.text(self.facts.rounded.get(store.value, store.value)))
        mask = self.index.mask([store.layout], columns=columns)
        word = "fj.atomic_add" if store.mode == "atomic_add" else "tl.store"
        first = ["tl.debug_barrier()"] if needed_beside(store, target, self.facts.cluster) else []
        return [
            *first,
            f"{word}({at(self.facts.pointers[target], offset)}, "
            f"{value}{', ' + mask if mask else ', None' * bool(store.mode)})",
        ]


def at(pointer: str, offset: str) -> str:
    """Return the address of an access: a sum of several terms keeps its parentheses, as the offset that it is."""
    return pointer if offset == "0" else f"{pointer} + {offset if offset.isalnum() else f'({offset})'}"


def literal_of(node: Const) -> str:
    return number(node.value)


def number(value: bool | int | float | Size) -> str:
    """Return a number as Triton's text."""
    if isinstance(value, Size):
        return f"{value}"
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, float) and not value and math.copysign(1.0, value) < 0:
        return "(tl.full((), 0.0, tl.float32) * -1.0)"  # Triton makes +0.0 of a literal -0.0
    return repr(value)
