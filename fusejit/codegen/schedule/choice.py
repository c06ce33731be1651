"""Choice: a schedule of a cluster, and the candidates that it was chosen from.

In: tiles by a template, times by the cost model. Out: `Schedule`, which the writer reads, and `Choice`, which
`explain()` prints.

    Schedule(template='reduction_persistent', blocks=(('XBLOCK', 1), ('RBLOCK', 1024)), num_warps=4)
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .device import Device

FIXED = 32  # registers of a kernel besides its values
MEMORY_WAIT = 1.0  # microseconds until a load of a busy memory arrives
WARP_WAIT = 0.1  # microseconds that a reduction within warps takes
BARRIER_WAIT = 0.05  # more, for each doubling of the warps that have to meet
ISSUE_WAIT = 0.01  # microseconds for each value of a thread
GATHER_WAIT = 0.02  # more, for each that is loaded by itself: it stands where another value says, or is one for a row
ALONE = 1.5  # one program of 16 warps draws so many times a multiprocessor's share of the memory
CONSTANTS = (
    f"waits in us: {MEMORY_WAIT} for memory; {ISSUE_WAIT} a value of a thread, {GATHER_WAIT} more for each loaded "
    "alone; "
    f"a reduction {WARP_WAIT} and {BARRIER_WAIT} each doubling of the warps; {FIXED} registers besides values; "
    f"a program draws {ALONE} shares of the memory"
)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Template, tile sizes in the template's order, warps, stages of its loop. Sizes and strides are literals in the
    kernel.

    `choice` keeps what it was chosen from; `others` of equal standing can be measured. `buckets`: where the length of a
    row varies, (longest row, its schedule), rising: the text of the kernel is one, and a bucket is compiled when a row
    first falls into it. `peel`: elements of the groups that a row at an odd address is cut into, 0 for a row that is
    one tile from end to end. `keep`: whether the row stays in registers as it was loaded (registers.py).
    """

    template: str
    blocks: tuple[tuple[str, int], ...]
    num_warps: int
    num_stages: int = 1
    buckets: tuple[tuple[int, Schedule], ...] = ()
    peel: int = field(default=0, repr=False)
    keep: bool = field(default=False, repr=False)
    choice: Choice | None = field(default=None, repr=False, compare=False)

    def __getitem__(self, name: str) -> int:
        return dict(self.blocks)[name]

    def __str__(self) -> str:
        stages = f", {self.num_stages} stages" if self.num_stages > 1 else ""
        cut = f", rows in groups of {self.peel}" if self.peel else ", rows kept as loaded" if self.keep else ""
        return (
            f"{' '.join(f'{n} {v}' for n, v in self.blocks)}, {self.num_warps} "
            f"warp{'s' * (self.num_warps > 1)}{stages}{cut}"
        )


@dataclass(frozen=True, slots=True)
class Cost:
    """What the model expects of one schedule: times in microseconds, `resident` programs a multiprocessor."""

    schedule: Schedule
    programs: int
    resident: int
    registers: int
    waits: float
    us: float

    def __str__(self) -> str:
        where = f"{self.resident} a multiprocessor" if self.resident else "too many registers"
        time = f"waits {self.waits:.1f} us -> {self.us:.1f} us" if self.resident else "spills"
        return f"{self.schedule}: {self.programs} programs, {where}, {self.registers} registers, {time}"


@dataclass(frozen=True, slots=True)
class Choice:
    """The candidates, best first; `memory_us` is what their bytes take at the memory's speed. As text with every
    constant of the model.
    """

    device: Device
    bytes: int
    memory_us: float
    costs: tuple[Cost, ...]

    def __str__(self) -> str:
        head = f"{self.bytes / 1e6:.1f} MB, {self.memory_us:.1f} us at the memory's speed, {self.device.name}"
        return "\n".join(
            [
                head,
                *(f"{cost}{'  chosen' * (i == 0)}" for i, cost in enumerate(self.costs)),
                CONSTANTS,
                str(self.device),
            ]
        )

    @property
    def expected(self) -> str:
        """What the model expects of the schedule that it chose, in a few words."""
        best = self.costs[0]
        return f"{best.us:.1f} us by the model, {self.memory_us:.1f} at the memory's speed, {best.registers} registers"
