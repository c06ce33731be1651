"""Cases of the kernel benchmarks whose operands run in different directions, come in pieces, or are placed by data.

In: nothing but torch and `fusejit.tools.blocks`. Out: `LAYOUTS`, the fields of a `Family` for each: cases.py makes
them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusejit.tools.blocks import Block, Shape, Tensors, rotate_half

ELEMENTS = 2**26
WINDOW = 8
OUTPUT = -1  # in `again`: the first output, or as many bytes


# -- functions ---------------------------------------------------------------------------------------------------------
def cast_transpose(x: Tensor) -> Tensor:
    """x (rows, columns), out (columns, rows) in the other of bfloat16 and float32."""
    return x.to(torch.float32 if x.dtype is torch.bfloat16 else torch.bfloat16).t().contiguous()


def transpose_both(x: Tensor) -> tuple[Tensor, Tensor]:
    """An activation (rows, columns), and its transpose for the matmul of the backward."""
    y = F.gelu(x, approximate="tanh")
    return y, y.t().contiguous()


def permute_add(x: Tensor, y: Tensor) -> Tensor:
    """x (batch, columns, rows), y (batch, rows, columns)."""
    return x.transpose(1, 2) + y


def permute_reduce(x: Tensor) -> Tensor:
    """x (batch, columns, rows): one sum for each row."""
    return x.transpose(1, 2).sum(-1)


def permute_norm(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """x (batch, columns, rows), y (batch, rows, columns), weight (columns): a feature map joins a residual stream."""
    return F.rms_norm(x.transpose(1, 2) + y, weight.shape, weight, 1e-6)


def qkv_split_rope(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """qkv (batch, length, 3 * heads * width); out (batch, heads, length, width) each: queries and keys turned, values
    laid out.
    """
    q, k, v = qkv.unflatten(-1, (3, heads, cos.shape[-1])).permute(2, 0, 3, 1, 4)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin, v.contiguous()


def window_partition(x: Tensor) -> Tensor:
    """x (batch, height, width, channels), rolled by half a window and cut into windows, as a Swin transformer does."""
    b, h, w, c = x.shape
    x = x.roll((-WINDOW // 2, -WINDOW // 2), (1, 2)).view(b, h // WINDOW, WINDOW, w // WINDOW, WINDOW, c)
    return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, WINDOW * WINDOW, c)


def embedding_norm(index: Tensor, table: Tensor, weight: Tensor) -> Tensor:
    """index (rows), table (rows / 8, columns)."""
    return F.rms_norm(F.embedding(index, table), weight.shape, weight, 1e-6)


def scatter_add(x: Tensor, index: Tensor, messages: Tensor) -> Tensor:
    """x (rows / 8, columns), index (rows), messages (rows, columns): a layer of a graph network."""
    return x.scatter_add(0, index[:, None].expand(-1, x.shape[1]), F.silu(messages))


def pad_roll(x: Tensor) -> Tensor:
    """x (batch, height, width, channels), rolled and padded."""
    return F.relu(F.pad(x.roll((3, 5), (1, 2)), (0, 0, 1, 1, 1, 1)))


# -- arguments and sizes -----------------------------------------------------------------------------------------------
def _rows(n: int) -> Shape:
    return (max(1, ELEMENTS // n), n)


def _batch(n: int) -> Shape:
    """1,024 rows of n columns, in as many batches."""
    return (max(1, ELEMENTS // (1024 * n)), 1024, n)


def _attention(width: int) -> Shape:
    return (4, ELEMENTS // (4 * 32 * 3 * width), 32, width)


def _images(channels: int) -> Shape:
    return (max(1, ELEMENTS // (64 * 64 * channels)), 64, 64, channels)


def _one(shape: Shape, t: Tensors) -> tuple[Any, ...]:
    return (t(*shape),)


def _crossed(shape: Shape, t: Tensors) -> tuple[Any, ...]:
    batch, rows, columns = shape
    return t(batch, columns, rows), t(batch, rows, columns)


def _projected(shape: Shape, t: Tensors) -> tuple[Any, ...]:
    batch, length, heads, width = shape
    return t(batch, length, 3 * heads * width), *t.rotary(length, width), heads


def _table(shape: Shape) -> Shape:
    return (max(1, shape[0] // 8), shape[1])


ROWS, ODD = (16, 96), (17, 33)
LAYOUTS: tuple[dict[str, Any], ...] = (
    {
        "block": Block("cast_transpose", cast_transpose, _one, "rows, columns", _rows(4096), ROWS),
        "sizes": _rows,
        "odd": ODD,
        "lengths": (4096, 1024, 8192, 4097),
        "passes": ("forward", "both"),
    },
    {
        "block": Block("transpose_both", transpose_both, _one, "rows, columns", _rows(4096), ROWS),
        "sizes": _rows,
        "odd": ODD,
        "again": (0,),
        "lengths": (4096, 1024, 8192, 4097),
        "passes": ("forward", "both"),
    },
    # its backward moves nothing: the gradients are views of the tangent
    {
        "block": Block("permute_add", permute_add, _crossed, "batch, rows, columns", _batch(4096), (2, 16, 24)),
        "sizes": _batch,
        "odd": (2, 17, 33),
        "lengths": (4096, 256, 1024),
        "passes": ("forward",),
    },
    {
        "block": Block(
            "permute_reduce",
            permute_reduce,
            lambda s, t: _crossed(s, t)[:1],
            "batch, rows, columns",
            _batch(4096),
            (2, 16, 24),
        ),
        "sizes": _batch,
        "odd": (2, 17, 33),
        "lengths": (4096, 256, 1024),
        "passes": ("forward",),
    },
    {
        "block": Block(
            "permute_norm",
            permute_norm,
            lambda s, t: (*_crossed(s, t), t.near_one(s[2])),
            "batch, rows, columns",
            _batch(4096),
            (2, 16, 24),
        ),
        "sizes": _batch,
        "odd": (2, 17, 33),
        "lengths": (4096, 256, 1024),
        "passes": ("forward",),
    },
    {
        "block": Block(
            "qkv_split_rope", qkv_split_rope, _projected, "batch, length, heads, width", _attention(128), (1, 3, 2, 16)
        ),
        "sizes": _attention,
        "odd": (1, 3, 2, 6),
        "again": (1, 2),
        "lengths": (128, 64),
        "passes": ("forward", "both"),
    },
    {
        "block": Block(
            "window_partition", window_partition, _one, "batch, height, width, channels", _images(128), (1, 16, 8, 16)
        ),
        "sizes": _images,
        "odd": (1, 8, 16, 5),
        "lengths": (128, 96, 192),
        "passes": ("forward", "both"),
    },
    {
        "block": Block(
            "embedding_norm",
            embedding_norm,
            lambda s, t: (t.integers(_table(s)[0], s[0]), t(*_table(s)), t.near_one(s[1])),
            "rows, columns",
            _rows(4096),
            ROWS,
        ),
        "sizes": _rows,
        "odd": ODD,
        "again": (0, OUTPUT, 2),
        "lengths": (4096, 1024),
        "passes": ("forward", "backward"),
    },
    {
        "block": Block(
            "scatter_add",
            scatter_add,
            lambda s, t: (t(*_table(s)), t.integers(_table(s)[0], s[0]), t(*s)),
            "rows, columns",
            _rows(1024),
            ROWS,
        ),
        "sizes": _rows,
        "odd": ODD,
        "again": (1, 2),
        "same": (0,),
        "lengths": (4096, 1024, 256),
        "passes": ("forward", "both"),
    },
    {
        "block": Block("pad_roll", pad_roll, _one, "batch, height, width, channels", _images(128), (1, 6, 7, 16)),
        "sizes": _images,
        "odd": (1, 6, 7, 5),
        "lengths": (128, 96),
        "passes": ("forward",),
    },
)
