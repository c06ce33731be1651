"""Cost: what a device can do, read from its table of data.

In: an architecture. Out: `Device`.

    >>> machine("sm_90").programs(4096, 32768)
    264
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files

import torch

from .cluster import Cluster, Load
from .size import product

DEFAULT = "sm_90"
ALONE = 1.5  # one program of 16 warps draws so many times a multiprocessor's share of the memory


@dataclass(frozen=True, slots=True)
class Device:
    """One row of figures an architecture, from tuned/<arch>.json.

    Attributes:
        sms: multiprocessors. bandwidth, l2_bandwidth: bytes a second that a copy reaches. l2_bytes: what stays in L2 between two passes.
        launch_us: microseconds between the ends of two small kernels. in_flight: bytes a multiprocessor has under way when memory is full.
        registers: 32-bit registers of a multiprocessor. row_values, mixed_values: values of a row that one program keeps without spills,
            alone and with its column sums. mixed_programs: (columns, programs a multiprocessor), rising.
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

    def programs(self, columns: int, rows: int) -> int:
        """Return how many programs walk over the rows of a mixed reduction: the table's number, but 16 rows each.

        With fewer rows a program the partial results would be a good part of all bytes; fewer programs would leave the device idle.
        """
        most = self.sms * next((k for limit, k in self.mixed_programs if columns <= limit), 1)
        return min(rows, most, max(self.sms, rows // 16 // self.sms * self.sms))


@cache
def machine(arch: str | None = None) -> Device:
    """Return the figures of `arch`; without one, of the GPU that is there, and of an H100 where there is none.

    An architecture without a table of its own is treated as an H100 with its own number of multiprocessors.
    """
    here = torch.cuda.get_device_properties(0) if arch is None and torch.cuda.is_available() else None
    name = arch or (f"sm_{here.major}{here.minor}" if here else DEFAULT)
    table = files("fusejit.codegen") / "tuned" / f"{name}.json"
    if not table.is_file():
        table = files("fusejit.codegen") / "tuned" / f"{DEFAULT}.json"
    figures = json.loads(table.read_text())
    pairs = tuple((limit, k) for limit, k in figures.pop("mixed_programs"))
    device = Device(**figures, mixed_programs=pairs)
    return replace(device, name=here.name, sms=here.multi_processor_count) if here else device


def pays_to_split(cluster: Cluster, device: Device) -> bool:
    """Whether a row that is read again is better cut into pieces, two launches more, than left to one program a row."""
    rows, columns = product(cluster.parallel), product(cluster.reduce)
    read = sum(n.dtype.itemsize for n in full(cluster)) * rows * columns
    written = sum(s.dtype.itemsize for s in cluster.stores if any((s.layout.strides or ())[len(cluster.parallel) :])) * rows * columns
    passes = max(cluster.levels.values()) + 1
    share = min(1.0, ALONE * rows / device.sms)  # of the memory that so many programs can keep busy
    whole = (read + written) / (device.bandwidth * share) + (passes - 1) * read / (device.l2_bandwidth * share)
    fits = read <= device.l2_bytes
    pieces = (read + written) / device.bandwidth + read / (device.l2_bandwidth if fits else device.bandwidth)
    return pieces + 2e-6 * device.launch_us < whole


def full(cluster: Cluster) -> set[Load]:
    """Return the loads that run along a reduce axis, one per buffer and position."""
    split = len(cluster.parallel)
    return {n for n in cluster.order if isinstance(n, Load) and (n.index or any((n.layout.strides or ())[split:]))}
