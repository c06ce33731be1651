"""Rowsums: whether a sum over everything is taken by rows first, because it needs something that the graph makes of each row.

In: the expression that is summed, and the buffers that the graph makes. Out: yes or no.

    -(log_softmax(x) * target).sum()   ->   row sums, in the kernel that reduced the rows for the log softmax, then their sum
"""

from __future__ import annotations

from collections.abc import Container

from .cluster import Expr, Load, postorder


def by_rows(x: Expr, made: Container[str]) -> bool:
    """Whether a value reads a buffer of `made` that has one element for each row of its last dimension."""
    return any(isinstance(n, Load) and not n.index and n.buffer in made and _repeated(n) for n in postorder([x]))


def _repeated(node: Load) -> bool:
    strides = node.layout.strides or (1,)
    return strides[-1] == 0 and any(strides)
