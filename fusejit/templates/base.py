"""Template: a row of the table of templates.

In: a cluster and a device. Out: whether the template applies, and the schedules that it offers.

    >>> TEMPLATE["pointwise"].tiles(cluster, machine("sm_90"))
    [Schedule(template='pointwise', blocks=(('XBLOCK', 1024),), num_warps=4)]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..codegen.ir.cluster import Cluster
from ..codegen.schedule.choice import Schedule
from ..codegen.schedule.device import Device


@dataclass(frozen=True, slots=True)
class Template:
    """A row of TEMPLATES: the file that owns the control flow, when it applies, its tiles and where each of them
    begins.

    `begins`: {index variable: where a tile begins along it}, in the words that the file fills in too. A program counts
    from there on with
    `tl.arange`; `{wide}` widens a program's number, `{across}` is how many tiles lie side by side, "@" the number of
    the tile in a row that a walk takes in several. `sides`: {index variable: the side of the tile along which it runs}.
    """

    name: str
    applies: Callable[[Cluster], bool]
    tiles: Callable[[Cluster, Device], list[Schedule]]
    begins: dict[str, str]
    sides: dict[str, str]


COLUMN, ROW = "[:, None]", "[None, :]"
PROGRAM = "tl.program_id(0){wide} * XBLOCK"
REDUCTION = {"x": COLUMN, "r": ROW}
