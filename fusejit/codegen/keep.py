"""Keep: a row of several operands stays in registers as it was loaded, so that it is read once.

In: a reduction whose row is needed again after it. Out: the loads to keep, and how many 32-bit values of a program's registers they take.

    softmax backward of 32,768 bfloat16 columns: dy and y in float32 would be 65,536 values, as they were loaded they are 32,768

Each pass over the row then widens them again (`fj.again`), an instruction a value; the compiler would otherwise keep what it has widened.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .cluster import Cluster, Expr, Load, Reduce, children, postorder


def along_row(roots: Iterable[Expr], cluster: Cluster) -> list[Expr]:
    """Return the nodes that vary along the row, down to the reductions that they need."""
    return [n for n in postorder(roots, lambda n: () if isinstance(n, Reduce) else children(n)) if cluster.full[n]]


def kept(cluster: Cluster) -> tuple[Load, ...]:
    """Return the loads of each row that a pass reads and a later one reads again; what is the same for all rows is not kept."""
    roots: dict[int, list[Expr]] = {}
    for node in cluster.order:
        if isinstance(node, Reduce):
            roots.setdefault(cluster.levels[node] - 1, []).extend(node.args)
    for store in cluster.stores:
        roots.setdefault(cluster.levels[store.value], []).append(store.value)
    used: dict[Load, set[int]] = {}
    for level, values in roots.items():
        for node in along_row(values, cluster):
            if isinstance(node, Load) and _can_be_kept(node) and any((node.layout.strides or ())[: len(cluster.parallel)]):
                used.setdefault(node, set()).add(level)
    return tuple(n for n in cluster.order if isinstance(n, Load) and len(used.get(n, ())) > 1)


def kept_values(cluster: Cluster) -> float:
    """Return how many 32-bit values a column takes while its row is kept."""
    return sum(n.dtype.itemsize for n in kept(cluster)) / 4


def _can_be_kept(node: Load) -> bool:
    return not node.index and node.mask is None and node.dtype.itemsize in (2, 4) and node.dtype is not torch.bool
