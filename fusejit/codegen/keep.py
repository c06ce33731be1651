"""Keep: a row of several operands stays in registers as it was loaded, so that it is read once.

In: a reduction whose row is needed again after it. Out: the loads to keep, and how many 32-bit values of a program's registers they take.

    softmax backward of 32,768 bfloat16 columns: dy and y in float32 would be 65,536 values, as they were loaded they are 32,768

Each pass over the row then widens them again (`fj.again`), an instruction a value; the compiler would otherwise keep what it has widened.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch

from .cluster import Cluster, Expr, Load, Reduce, Store, children, postorder


def along_row(roots: Iterable[Expr], cluster: Cluster) -> list[Expr]:
    """Return the nodes that vary along the row, down to the reductions that they need."""
    return [n for n in postorder(roots, lambda n: () if isinstance(n, Reduce) else children(n)) if cluster.full[n]]


def by_pass(cluster: Cluster) -> list[list[Expr]]:
    """Return what varies along the row and is needed in each pass over it: of its reductions and of its stores."""
    roots: dict[int, list[Expr]] = {}
    for node in cluster.order:
        if isinstance(node, Reduce):
            roots.setdefault(cluster.levels[node] - 1, []).extend(node.args)
    for store in cluster.stores:
        roots.setdefault(cluster.levels[store.value], []).extend([store.value, *(e for e, _ in store.index)])
    return [along_row(roots.get(level, ()), cluster) for level in range(max(roots, default=-1) + 1)]


def used_again(cluster: Cluster) -> set[Expr]:
    """Return what several passes over the row need."""
    seen = Counter(node for nodes in by_pass(cluster) for node in nodes)
    return {node for node, count in seen.items() if count > 1}


def kept(cluster: Cluster) -> tuple[Load, ...]:
    """Return the loads of each row that a pass reads and a later one reads again; what is the same for all rows is not kept."""
    again, split = used_again(cluster), len(cluster.parallel)
    loads = [n for n in cluster.order if isinstance(n, Load) and n in again and _can_be_kept(n)]
    return tuple(n for n in loads if any((n.layout.strides or ())[:split]))


def kept_values(cluster: Cluster) -> float:
    """Return how many 32-bit values a column takes while its row is kept."""
    return sum(n.dtype.itemsize for n in kept(cluster)) / 4


def _can_be_kept(node: Load) -> bool:
    return not node.index and node.mask is None and node.dtype.itemsize in (2, 4) and node.dtype is not torch.bool


def needed_beside(store: Store, name: str, cluster: Cluster) -> bool:
    """Whether one result a row takes the place of an operand that more than this result is made of.

    All warps load what there is one of for a row, and one of them stores it: the others may not have loaded it yet.
    """
    if not cluster.reduce or any((store.layout.strides or ())[len(cluster.parallel) :]):
        return False
    roots = [root for s in cluster.stores if s is not store for root in (s.value, *(e for e, _ in s.index))]
    roots += [arg for n in cluster.order if isinstance(n, Reduce) for arg in n.args]
    return any(isinstance(n, Load) and n.buffer == name for n in postorder(roots))
