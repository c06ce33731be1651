"""Template: a kind of kernel, which owns all that is known of it: when it applies, its tiles, index variables and text.

In: a cluster and a device. Out: whether the template applies, the schedules that it offers, and what fills its text.

    >>> named("pointwise").tiles(cluster, machine("sm_90"))
    [Schedule(template='pointwise', blocks=(('XBLOCK', 1024),), num_warps=4)]

A new template is a module with a `TEMPLATE`, a text beside it, and a line of table.py: nothing else knows its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from ..codegen.ir.analysis import loads_of
from ..codegen.ir.cluster import Cluster
from ..codegen.ir.expr import Expr
from ..codegen.ir.graph import Foreach
from ..codegen.ir.size import AnySize, hint, product
from ..codegen.schedule.choice import Schedule
from ..codegen.schedule.cost_model import choose
from ..codegen.schedule.device import Device

COLUMN, ROW = "[:, None]", "[None, :]"
PROGRAM = "tl.program_id(0){wide} * XBLOCK"
Step = TypeVar("Step", Cluster, Foreach)


class Body(Protocol):
    """The statements of a kernel, as the writer has them for the text that asks for them."""

    @property
    def cluster(self) -> Cluster: ...
    @property
    def tiles(self) -> Schedule: ...

    def statements(self) -> list[str]:
        """All values and stores, of a tile that is read once."""

    def kept_row(self) -> list[str]:
        """A row that is loaded once and then gone over as often as there are reductions one above the other."""

    def passes(self) -> list[dict[str, list[str]]]:
        """One pass over the row for each level of reductions: its `rows`, `start`, `body` and `finish`."""

    def walk(self) -> dict[str, Any]:
        """A walk over rows that adds up columns: its `start`, `rows`, `finish` and `span`."""

    def loop(self, steps: str) -> str:
        """What a loop runs over, with the stages of the schedule."""


class Template(Generic[Step]):
    """A row of the table of templates. A subclass overrides what is its own.

    Attributes:
        name: of the file with its text, and in a `Schedule`. prefix: of the names of its kernels.
        takes: what it renders, clusters or groups of them.
        begins: {index variable: where a tile begins along it}, in the words that the text fills in too. A program
            counts from there on with `tl.arange`; `{wide}` widens a program's number, `{across}` is how many tiles lie
            side by side, "@" the number of the tile in a row that a walk takes in several.
        sides: {index variable: the side of the tile along which it runs}.
        scalars: the index variables of which a program has one value.
        loops: whether a program takes its row tile by tile, in a loop over `start`: rows of any length then.
    """

    name: ClassVar[str]
    prefix: ClassVar[str]
    takes: ClassVar[type] = Cluster
    begins: ClassVar[Mapping[str, str]] = {}
    sides: ClassVar[Mapping[str, str]] = {}
    scalars: ClassVar[frozenset[str]] = frozenset()
    loops: ClassVar[bool] = False

    # -- the choice
    def applies(self, step: Step) -> bool:
        raise NotImplementedError

    def tiles(self, step: Step, device: Device) -> list[Schedule]:
        """Return the schedules that the cost model chooses from."""
        raise NotImplementedError

    def choose(self, cluster: Cluster, device: Device) -> Schedule:
        return choose(cluster, self.tiles(cluster, device), device, self)  # type: ignore[arg-type]

    def varying(self, model: Cluster, length: AnySize, device: Device) -> Schedule:
        """Return the schedule of a cluster whose sizes vary, `model` with those of one call; `length`: of its rows."""
        return self.choose(model, device)

    # -- the cost
    def single(self, cluster: Cluster) -> set[Expr]:
        """Return the loads whose elements are each checked and loaded by themselves."""
        return {n for n in loads_of(cluster) if n.index}

    def adds_tiles_up(self, cluster: Cluster, tiles: Schedule) -> bool:
        """Whether a loop reduces each tile to one value at once, instead of keeping a tile of partial results."""
        return False

    def in_passes(self, columns: AnySize, tiles: Schedule) -> bool:
        """Whether rows of so many columns are read again by each pass over them."""
        return False

    # -- the text
    @property
    def text(self) -> str:
        """The text of the kernel, a Jinja template."""
        return text_of(self.name)

    def arranged(self, cluster: Cluster) -> Cluster:
        """Return the cluster with its axes in the order that the index variables want."""
        return cluster

    def groups(self, cluster: Cluster) -> dict[str, list[int]]:
        """Return the axes behind each index variable."""
        rank, split = len(cluster.axes), len(cluster.parallel)
        return {"x": list(range(split)), "r": list(range(split, rank))} if cluster.reduce else {"x": list(range(rank))}

    def count(self, variable: str, cluster: Cluster, tiles: Schedule) -> int:
        """Return how many tiles lie side by side along an index variable."""
        extent = hint(product(cluster.axes[a] for a in self.groups(cluster)[variable]))
        return extent if variable in self.scalars else -(-extent // tiles[f"{variable.upper()}BLOCK"])

    def grid(self, cluster: Cluster, tiles: Schedule) -> tuple[int, int, int]:
        across = [v for v in self.groups(cluster) if v != "r"]
        return (product(self.count(v, cluster, tiles) for v in across), 1, 1)

    def fields(self, body: Body) -> dict[str, Any]:
        """Return what the text takes besides its parameters, index variables and their masks."""
        return {"rows": [body.statements()]}


class Reducing(Template[Cluster]):
    """A template whose tile has rows along `x` and columns along `r`."""

    sides: ClassVar[Mapping[str, str]] = {"x": COLUMN, "r": ROW}


def text_of(name: str) -> str:
    return Path(__file__).with_name(f"{name}.py.jinja").read_text()


def lines_and_columns(cluster: Cluster) -> dict[str, list[int]]:
    """Return index variables for the innermost axis and for all others."""
    rank = len(cluster.axes)
    return {"y": list(range(rank - 1)), "x": [rank - 1]}
