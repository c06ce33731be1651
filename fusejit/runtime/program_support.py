"""What a Program's own source calls: allocation and views of buffers, and the check of what torch returned.

In: tensors. Out: tensors with exactly the sizes and strides that the Program was compiled for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def view_of(buffer: torch.Tensor, shape: Sequence[int], strides: Sequence[int], offset: int) -> torch.Tensor:
    """Return a buffer with other sizes and strides, `offset` elements from its start."""
    return buffer.as_strided(shape, strides, buffer.storage_offset() + offset)


def laid_out(result: torch.Tensor, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """Return torch's result with the strides that were traced: itself in almost every case, a copy where a kernel chose
    others.
    """
    if tuple(result.stride()) == tuple(strides) or result.numel() <= 1:
        return result
    made = torch.empty_strided(shape, strides, dtype=result.dtype, device=result.device)
    return made.copy_(result)
