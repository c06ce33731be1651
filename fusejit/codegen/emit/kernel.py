"""Kernel: one Triton kernel as data, and the bytes that a launch of it moves.

In: a cluster and its buffers. Out: bytes by buffer; `Kernel`, which render fills.

    >>> reads_of(cluster, buffers)
    {'arg0_1': 134217728, 'arg1_1': 16384}
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..ir.cluster import Cluster, Store
from ..ir.expr import Iota, Load, postorder
from ..ir.graph import Buffer, Foreach
from ..ir.size import product
from ..schedule.choice import Schedule


@dataclass(frozen=True, slots=True)
class Kernel:
    """One Triton kernel, its launch, and what it costs.

    Attributes:
        source: text of the function; params: Triton types of its pointers; constants: its tile sizes; grid, num_warps,
            debug: the launch.
        arguments: buffer names in the order of `params`; ops: the ATen ops inside with the user's lines.
        bytes_read, bytes_written: what one launch moves, each element of each operand once.
        cluster: what it computes, a Cluster or a Foreach; tensors: how many clusters that are (1, or the rows of a
            Foreach).
        sizes: symbols that the kernel takes as numbers, behind its pointers. extents: where there are symbols, how many
            values its index variables x, y and r have; the grid follows from them at each launch, and `grid` is that of
            the call that was compiled for.
        compiled: machine code and its costs, where the kernel was compiled for a target.
    """

    name: str
    template: str
    source: str
    params: tuple[str, ...]
    constants: tuple[tuple[str, int], ...]
    grid: tuple[int, int, int]
    num_warps: int
    num_stages: int
    debug: bool
    fp_fusion: bool
    arguments: tuple[str, ...]
    ops: tuple[str, ...]
    bytes_read: int
    bytes_written: int
    cluster: Cluster | Foreach
    schedule: Schedule
    compiled: Any = None
    sizes: tuple[str, ...] = ()
    extents: tuple[Any, ...] = ()

    table = property(lambda self: str(self.cluster))
    tensors = property(lambda self: len(self.cluster.members) if isinstance(self.cluster, Foreach) else 1)
    ptx = property(lambda self: self.compiled.ptx)
    cubin = property(lambda self: self.compiled.cubin)
    n_regs = property(lambda self: self.compiled.n_regs)
    n_spills = property(lambda self: self.compiled.n_spills)
    shared = property(lambda self: self.compiled.shared)
    wide_loads = property(lambda self: self.compiled.wide_loads)
    wide_stores = property(lambda self: self.compiled.wide_stores)


def reads_of(step: Cluster | Foreach, buffers: dict[str, Buffer]) -> dict[str, int]:
    """Return the bytes that a launch has to read of each buffer: every element that some load reaches, once."""
    found: dict[str, int] = {}
    for cluster in _clusters(step):
        for name, loads in cluster.reads.items():
            reach = sum(_reach(node, cluster.axes) for node in {(n.layout, n.index): n for n in loads}.values())
            found[name] = min(buffers[name].bytes, found.get(name, 0) + reach * buffers[name].dtype.itemsize)
        for store in (s for s in cluster.stores if s.mode == "atomic_add"):  # what is added to is read as well
            found[store.onto] = _written(store, cluster, buffers)
    return found


def bytes_written(step: Cluster | Foreach, buffers: dict[str, Buffer]) -> int:
    total = 0
    for cluster in _clusters(step):
        total += sum(_written(s, cluster, buffers) for s in cluster.stores)
    return total


def _written(store: Store, cluster: Cluster, buffers: dict[str, Buffer]) -> int:
    reach = _reach(store, cluster.axes) * store.dtype.itemsize * (cluster.programs or 1 if store.reduces else 1)
    return reach if not store.onto else min(reach, buffers[store.onto].bytes)


def _clusters(step: Cluster | Foreach) -> tuple[Cluster, ...]:
    return step.members if isinstance(step, Foreach) else (step,)


def _reach(access: Load | Store, axes: tuple[int, ...]) -> int:
    """Return how many elements an access touches: one for each coordinate of the axes that it, or its computed index,
    runs along.
    """
    found = [n.layout for e, _ in access.index for n in postorder([e]) if isinstance(n, (Load, Iota))]
    runs = [any((lay.strides or ())[a] for lay in (access.layout, *found)) for a in range(len(axes))]
    return product(n for n, used in zip(axes, runs, strict=True) if used)
