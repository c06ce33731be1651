"""Device: the figures of a GPU that schedules are chosen by, one row an architecture.

In: tuned/<arch>.json, and the GPU that is there. Out: `Device`.

    >>> print(machine("sm_90"))
    H100: 132 multiprocessors of 65536 registers, 3.0 TB/s, ...
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files

import torch

DEFAULT = "sm_90"


@dataclass(frozen=True, slots=True)
class Device:
    """One row of figures an architecture, from tuned/<arch>.json.

    Attributes:
        sms: multiprocessors. bandwidth, l2_bandwidth: bytes a second that a copy reaches. l2_bytes: what stays in L2
            between two passes.
        launch_us: microseconds between the ends of two small kernels. in_flight: bytes a multiprocessor has under way
            when memory is full.
        registers: 32-bit registers of a multiprocessor. row_values, mixed_values: values of a row that one program
            keeps without spills, alone and with its column sums. mixed_programs: (columns, programs a multiprocessor at
            most), rising. arch: 90 for sm_90.
    """

    name: str
    sms: int
    bandwidth: float
    l2_bytes: float
    l2_bandwidth: float
    launch_us: float
    in_flight: int
    registers: int
    row_values: int
    mixed_values: int
    mixed_programs: tuple[tuple[int, int], ...]
    arch: int

    def __str__(self) -> str:
        memory = (
            f"{self.bandwidth / 1e12:.1f} TB/s, L2 {self.l2_bandwidth / 1e12:.1f} TB/s and {self.l2_bytes / 1e6:.0f} MB"
        )
        return (
            f"{self.name}: {self.sms} multiprocessors of {self.registers} registers, {memory}, {self.launch_us} us a "
            "launch"
        )


@cache
def machine(arch: str | None = None) -> Device:
    """Return the figures of `arch`; without one, of the GPU that is there, and of an H100 where there is none.

    An architecture without a table of its own is treated as an H100 with its own `arch` and number of multiprocessors.
    """
    here = torch.cuda.get_device_properties(0) if arch is None and torch.cuda.is_available() else None
    name = arch or (f"sm_{here.major}{here.minor}" if here else DEFAULT)
    table = files("fusejit.codegen.schedule") / "tuned" / f"{name}.json"
    if not table.is_file():
        table = files("fusejit.codegen.schedule") / "tuned" / f"{DEFAULT}.json"
    figures = json.loads(table.read_text())
    pairs = tuple((limit, k) for limit, k in figures.pop("mixed_programs"))
    device = Device(**figures, mixed_programs=pairs, arch=int(name.removeprefix("sm_")))
    return replace(device, name=here.name, sms=here.multi_processor_count) if here else device
