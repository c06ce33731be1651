"""Index space: the index variables of a tile as text, their masks, and the offsets that are made of them.

In: the facts of a kernel. Out: statements that split a tile's index into axes, and the texts of offsets and masks.

    x (8, 512) . t  of  y = 64 * ..., x = 64 * ...     offset  y + 8 * x       mask  xmask & ymask
"""

from __future__ import annotations

from collections.abc import Iterable

from ..ir.analysis import power_of_two
from ..ir.expr import Scan
from ..ir.layout import Layout
from ..ir.size import AnySize, divide, product
from ..schedule.unaligned_rows import is_flat
from .facts import Facts


class IndexSpace:
    """The index variables of a tile. `column` is the one along a row and `width` the tile's; `groups` are the axes
    behind each. Of a peeled row, `ends` is the space of what is not in whole groups; `segments` that of what is one
    value a segment.
    """

    def __init__(
        self, facts: Facts, column: str = "r", width: str = "RBLOCK", groups: dict[str, list[int]] | None = None
    ) -> None:
        self.facts, self.column, self.width = facts, column, width
        self.groups: dict[str, list[int]] = facts.template.groups(facts.cluster) if groups is None else groups
        self.ends: IndexSpace | None = None
        self.segments: IndexSpace | None = None
        if groups is None and facts.peel:
            rows, columns = self.groups["x"], self.groups["r"]
            self.ends = IndexSpace(facts, "e", str(2 * facts.peel.group), {"x": rows, "e": columns})
        if groups is None and facts.cluster.segments:
            numbers = self.groups["r"][: facts.cluster.segments]
            self.segments = IndexSpace(facts, "s", f"RBLOCK // {self.padded}", {"x": self.groups["x"], "s": numbers})

    @property
    def padded(self) -> int:
        """How many places of a tile a segment takes."""
        return power_of_two(self.facts.cluster.segment[1])

    @property
    def middle(self) -> str:
        """How many elements of a peeled row are in whole groups."""
        assert self.facts.peel is not None
        return f"({product(self.facts.cluster.reduce)} - head) // {self.facts.peel.group} * {self.facts.peel.group}"

    def begins(self) -> dict[str, str]:
        """Return where a tile begins along each index variable, as the template's row says."""
        words = {"wide": self.facts.widening, "across": f"(({self.extent('x')} + XBLOCK - 1) // XBLOCK)"}
        return {variable: begin.format(**words) for variable, begin in self.facts.template.begins.items()}

    @property
    def backwards(self) -> str:
        """Where a tile begins in a loop that takes a row from its end on, "" in all others."""
        if not self.facts.template.loops or not any(
            isinstance(n, Scan) and n.reverse for n in self.facts.cluster.order
        ):
            return ""
        last = (product(self.facts.cluster.reduce) - 1) // self.facts.tiles["RBLOCK"] * self.facts.tiles["RBLOCK"]
        return f"{last} - start"

    def coordinates(self, variable: str, begin: str = "start") -> list[str]:
        """Return the statements that split an index variable into its axes, and its mask; a loop's tile begins at
        `begin`, "" is 0.
        """
        axes = self.groups[variable]
        if variable == "r" and self.uneven:
            return self.digits(axes) + self.numbers(begin)
        lines: list[str] = self.shifted(variable)
        inner: AnySize = 1
        for place in reversed(range(len(axes))):
            n = self.facts.cluster.axes[axes[place]]
            if len(axes) > 1:
                text = f"{variable} // {inner}" if inner != 1 else variable
                lines.append(f"{variable}{place} = {text} % {n}" if place else f"{variable}{place} = {text}")
            inner *= n
        if self.facts.peel and variable != "x":
            return lines
        if self.masked(variable):
            lines.append(f"{variable}mask = {variable} < {inner}")
        if variable == "r" and self.segments:
            return lines + self.numbers(begin)
        if self.facts.peel:
            rows, group = self.offset(self.facts.peel.rows, self.groups["x"]), self.facts.peel.group
            assert self.ends is not None
            lines += [f"head = ({group} - ({rows}) % {group}) % {group}", *self.ends.coordinates("e")]
        return lines

    @property
    def uneven(self) -> bool:
        """Whether segments are padded: places of the tile are no places of the row then."""
        return self.segments is not None and self.padded != self.facts.cluster.segment[1]

    def digits(self, axes: list[int]) -> list[str]:
        """Return the statements that split `r` into segments, each padded to a power of two, and what is in them."""
        cut, (many, each) = self.facts.cluster.segments, self.facts.cluster.segment
        lines = [f"rs = r // {self.padded}", f"ri = r % {self.padded}"]
        for word, places in (("rs", range(cut)), ("ri", range(cut, len(axes)))):
            inner = 1
            for place in reversed(places):
                text = f"{word} // {inner}" if inner > 1 else word
                n = self.facts.cluster.axes[axes[place]]
                lines.append(f"r{place} = {text} % {n}" if place != places[0] else f"r{place} = {text}")
                inner *= n
        return lines + ([f"rmask = (rs < {many}) & (ri < {each})"] if self.masked("r") else [])

    def numbers(self, begin: str) -> list[str]:
        """Return the statements that number the segments of a tile."""
        assert self.segments is not None
        first = f"{begin} // {self.padded} + " if begin and self.facts.template.loops else ""
        return [f"s = ({first}tl.arange(0, {self.segments.width}))[None, :]", *self.segments.coordinates("s")]

    def shifted(self, variable: str) -> list[str]:
        """Return the statements that place the columns of a peeled row, with their masks: whole groups, or the two
        ends.
        """
        if not self.facts.peel or variable == "x":
            return []
        group, columns = self.facts.peel.group, product(self.facts.cluster.reduce)
        if variable == "r":
            return ["k = r", "r = head + k", f"rmask = k // {group} < ({columns} - head) // {group}"]
        return [
            f"e = tl.arange(0, {2 * group})[None, :]{self.facts.widening}",
            f"e = tl.where(e < {group}, e, e + {columns - 2 * group})",
            f"emask = (e < head) | (e >= {columns} - ({columns} - head) % {group})",
        ]

    def masked(self, variable: str) -> bool:
        if variable in ("r", "s") and self.facts.cluster.segments:
            many, each = self.facts.cluster.segment
            return self.uneven or many * each % self.facts.tiles["RBLOCK"] != 0
        if self.facts.peel and variable != "x":
            return True
        if variable in self.facts.template.scalars:
            return False
        return (
            bool(self.facts.tiles.buckets)
            or divide(self.extent(variable), self.facts.tiles[f"{variable.upper()}BLOCK"]) is None
        )

    def extent(self, variable: str) -> AnySize:
        """How many values an index variable has."""
        return product(self.facts.cluster.axes[a] for a in self.groups[variable])

    def extents(self) -> tuple[AnySize, ...]:
        """Return how many values x, y and r have; x has a tile for each of the programs that share the rows."""
        found = tuple(self.extent(v) if v in self.groups else 1 for v in "xyr")
        return (
            (self.facts.cluster.programs * self.facts.tiles["XBLOCK"], *found[1:])
            if self.facts.cluster.programs
            else found
        )

    def axis(self, number: int) -> str:
        for variable, axes in self.groups.items():
            if number in axes:
                return variable if len(axes) == 1 else f"{variable}{axes.index(number)}"
        raise KeyError(number)

    def some_axis(self, layouts: Iterable[Layout]) -> str:
        """Return an index variable, of those that are a tile, along which one of the layouts runs; "" if none does."""
        scalar = [a for v in self.facts.template.scalars for a in self.groups[v]]
        runs = (a for lay in layouts for a, stride in enumerate(lay.strides or ()) if stride != 0 and a not in scalar)
        return next((self.axis(a) for a in runs), "")

    def offset(self, layout: Layout, among: list[int] | None = None) -> str:
        """Return an offset as text, or the part of it along some axes (and its constant)."""
        strides, axes = layout.strides or (), self.facts.cluster.axes
        terms = []
        for variable, group in self.groups.items():
            own = [strides[a] for a in group] if strides and (among is None or group == among) else []
            padded = variable == "r" and self.uneven  # its digits are no digits of the row
            if not padded and len(own) > 1 and own[-1] and is_flat(own, [axes[a] for a in group]):
                names = [(variable, own[-1])]  # one run of memory: neighbours stay neighbours in the text
            else:
                names = [(self.axis(a), stride) for a, stride in zip(group, own, strict=False)]
            terms += [name if stride == 1 else f"{stride} * {name}" for name, stride in names if stride != 0]
        if layout.offset != 0:
            terms.append(str(layout.offset))
        return " + ".join(terms) or "0"

    def address(self, layout: Layout) -> str:
        """Return the offset of an access, of a peeled row as whole groups."""
        if self.column != "r" or not self.facts.peel or not self.facts.peel.follows(layout, self.facts.split):
            return self.offset(layout)
        group = self.facts.peel.group
        return f"({self.offset(layout, self.groups['x'])} + {group - 1}) // {group} * {group} + k"

    def mask(self, layouts: list[Layout], extra: str = "", columns: bool | None = None) -> str:
        """Return the mask of an access: the tile's borders along the variables that it uses, and its own."""
        used = {v for v, axes in self.groups.items() if any((lay.strides or ())[a] for lay in layouts for a in axes)}
        if columns is not None:
            along = {self.column} & self.groups.keys()
            used = (used | {"x"} | ({"y"} if "y" in self.groups else set())) - along | (along if columns else set())
        parts = [f"{v}mask" for v in self.groups if v in used and self.masked(v)] + ([extra] if extra else [])
        return " & ".join(parts)

    def tile(self, number: int) -> list[str]:
        """Return the statements that set the column index to one tile of the row."""
        first = f"{number} * RBLOCK + " if number else ""
        begin = f"{number} * RBLOCK" if number else ""
        return [f"r = ({first}tl.arange(0, RBLOCK))[None, :]{self.facts.widening}", *self.coordinates("r", begin)]
