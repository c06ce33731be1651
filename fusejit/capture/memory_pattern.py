"""Memory pattern: which tensors of a call share memory with which.

In: the tensors among a call's arguments. Out: () where none share, otherwise a hashable tuple, a part of a
specialisation's key.

    >>> x = torch.ones(4); memory_pattern([x, torch.ones(2), x[1:]])
    ((0, 0), None, (0, 1))
"""

from __future__ import annotations

from collections import Counter

import torch

Tensor = torch.Tensor


def memory_pattern(tensors: list[Tensor]) -> tuple:
    """Which tensors share memory with which: group, and first and last byte in units of the group's first tensor."""
    groups: dict[int, int] = {}
    found = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        group = groups.setdefault(storage._cdata, len(groups))
        found.append((group, tensor.storage_offset()))
    if len(groups) == len(tensors):
        return ()
    members = Counter(group for group, _ in found)
    return tuple((group, offset) if members[group] > 1 else None for group, offset in found)
