"""Reductions: one row each, with all that is known of it. Every pass asks the row.

In: the `op` of a `Reduce` or `Segment`, or the mode of a store that reduces. Out: its row.

    >>> row_of("amax").identity(torch.float32), row_of("amax").combined("a", "b"), row_of("amax").scan.name
    (-inf, 'fj.amax_combine(a, b)', 'cummax')

A new reduction is a row here (or `rules.register(row)`): it is lowered, fused, split into pieces, scanned and cut into
chunks of rows by what the row says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

Number = bool | int | float
Identity = Callable[[torch.dtype], Number]


@cache
def names(overloads: str) -> tuple[str, ...]:
    """Expand "add: Tensor Scalar" into overload names; a bare "exp" is "exp.default"."""
    result: list[str] = []
    for part in overloads.split(","):
        name, _, rest = part.strip().partition(":")
        result += [f"{name}.{o}" for o in (rest.split() or ["default"])] if name else []
    return tuple(result)


@dataclass(frozen=True, slots=True)
class Running:
    """The scan of a reduction: the same, up to each place of a row.

    `name`: what `Scan.op` says; `along`: its overload, where that is not of the same name.
    `places`: whether it gives the place of each value, too. `spelling`: Triton text of a scan, operands as {0}, then
    {axis} and {reverse}; `combining`: of what was carried so far {0} and the scan of a tile {1}; "" are fj's.
    """

    name: str
    dtypes: str = "number"
    places: bool = False
    along: str = ""
    spelling: str = ""
    combining: str = ""

    @property
    def aten(self) -> str:
        return names(self.along or self.name)[0]

    def text(self, operands: list[str], reverse: bool) -> str:
        if self.spelling:
            return self.spelling.format(*operands, axis=1, reverse=reverse)
        return f"fj.{self.name}({', '.join(operands)}, 1, {reverse})"

    def combined(self, *operands: str) -> str:
        return self.combining.format(*operands) if self.combining else f"fj.{self.name}_combine({', '.join(operands)})"


@dataclass(frozen=True, slots=True)
class Reduction:
    """One row of the table of reductions.

    Args:
        name: what `Reduce.op` says. identity: identity(dtype) is the number that changes nothing.
        along, whole: overloads that take dimensions, and those that reduce all. more: others with a rule of their own.
        dtypes: a key of table.DTYPES: those that it accumulates in. weight: its size in a kernel, in additions.
        truth: whether it asks of each element if it is zero. of_nothing: whether without elements it is the identity.
        splits: whether it is made of the reductions of its pieces, in any order.
        place_of: of a reduction to a place, the reduction whose place that is. both: overloads that give a value and
            its place, of a reduction that has one. scan: its scan.
        spelling: Triton text of a reduction of a tile, operands as {0}, ..., and {axis}; combining: of an accumulator
            {0} and another result or element {1}; "" are fj.<name> and fj.<name>_combine.
    """

    name: str
    identity: Identity
    along: str = ""
    whole: str = ""
    more: str = ""
    dtypes: str = "number"
    weight: int = 2
    truth: bool = False
    of_nothing: bool = False
    splits: bool = True
    place_of: str = ""
    both: str = ""
    scan: Running | None = None
    spelling: str = ""
    combining: str = ""

    @property
    def aten(self) -> tuple[str, ...]:
        """All overloads that are not to be taken apart before they are lowered."""
        return names(", ".join(part for part in (self.whole, self.along, self.more) if part))

    def reduced(self, *operands: str, axis: int) -> str:
        """Return the text that reduces one axis of a tile."""
        if self.spelling:
            return self.spelling.format(*operands, axis=axis)
        return f"fj.{self.name}({', '.join(operands)}, {axis})"

    def combined(self, *operands: str) -> str:
        """Return the text that combines two results; of a reduction to a place, (value, place) of each."""
        return self.combining.format(*operands) if self.combining else f"fj.{self.name}_combine({', '.join(operands)})"


def lowest(dtype: torch.dtype) -> Number:
    return False if dtype is torch.bool else -float("inf") if dtype.is_floating_point else torch.iinfo(dtype).min


def highest(dtype: torch.dtype) -> Number:
    return True if dtype is torch.bool else float("inf") if dtype.is_floating_point else torch.iinfo(dtype).max


INDEX_IDENTITY = 2**31 - 1  # the start of an arg-reduction's index: it loses every tie
_ROWS = [
    Reduction(
        "sum",
        lambda dtype: 0,
        along="sum: dim_IntList",
        whole="sum",
        more="prims.sum",
        of_nothing=True,
        scan=Running("cumsum"),
    ),
    Reduction(
        "prod",
        lambda dtype: 1,
        along="prod: dim_int",
        whole="prod",
        more="prims.prod",
        weight=4,
        of_nothing=True,
        scan=Running("cumprod"),
    ),
    Reduction(
        "amax",
        lowest,
        along="amax",
        more="max, prims.amax",
        dtypes="any",
        both="max: dim default",
        scan=Running("cummax", places=True),
    ),
    Reduction(
        "amin",
        highest,
        along="amin",
        more="min, prims.amin",
        dtypes="any",
        both="min: dim default",
        scan=Running("cummin", places=True),
    ),
    Reduction(
        "any", lambda dtype: False, along="any: dim dims", whole="any", dtypes="any", truth=True, of_nothing=True
    ),
    Reduction("all", lambda dtype: True, along="all: dim dims", whole="all", dtypes="any", truth=True, of_nothing=True),
    # of values and their places: fj.argmax(values, places, axis) -> place, fj.argmax_combine(a, i, b, j) -> (a, i)
    Reduction("argmax", lowest, along="argmax", weight=6, splits=False, place_of="amax"),
    Reduction("argmin", highest, along="argmin", weight=6, splits=False, place_of="amin"),
    # lowered as a maximum and a sum; its scan is one op
    Reduction("logaddexp_reduce", lowest, dtypes="float", weight=20, scan=Running("logcumsumexp", "float"),
              combining="fj.logaddexp_combine({0}, {1})"),
]  # fmt: skip
REDUCTIONS: dict[str, Reduction] = {row.name: row for row in _ROWS}


def row_of(op: str) -> Reduction:
    """Return the row of a reduction."""
    return REDUCTIONS[op]


def scanned_by(op: str) -> Reduction:
    """Return the reduction of which an op is the scan: cumsum is that of sum."""
    return next(row for row in REDUCTIONS.values() if row.scan and row.scan.name == op)


def place_of(value: str) -> Reduction:
    """Return the reduction to the place of another one's value: argmax is that of amax."""
    return next(row for row in REDUCTIONS.values() if row.place_of == value)


def splits(op: str) -> bool:
    """Whether a reduction is made of those of its pieces."""
    return op in REDUCTIONS and REDUCTIONS[op].splits
