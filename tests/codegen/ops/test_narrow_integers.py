"""Integers of few bits wrap as eager's do, also where what is reduced is read on in the same kernel."""

from __future__ import annotations

import pytest
import torch

REDUCED = {
    "sum": lambda x, y: x.sum(-1, keepdim=True, dtype=x.dtype).float() + y,
    "sum compared": lambda x, y: x.sum(-1, keepdim=True, dtype=x.dtype) > y,
    "prod": lambda x, y: x.prod(-1, keepdim=True, dtype=x.dtype).float() - y,
    "of products": lambda x, y: ((x * y).sum(-1), (x + y).amax(-1), (x * 3 - y).argmin(-1)),
    "column": lambda x, y: x.sum(0, dtype=x.dtype) + y,
    "all": lambda x, y: x.sum(dtype=x.dtype) * y,
    "cumsum": lambda x, y: (x.cumsum(-1), x.cumsum(-1, dtype=x.dtype) + y),
    "cumprod": lambda x, y: (x.cumprod(-1), x.cumprod(-1, dtype=x.dtype)),
    "division": lambda x, y: (
        x // (y | 1),
        x % (y | 1),
        torch.div(x, y | 1, rounding_mode="trunc"),
        torch.fmod(x, y | 1),
    ),
    "shifts": lambda x, y: (x << 3, x >> 1, (x + y) >> 2, x << (y & 7)),
    "powers": lambda x, y: (x**3, x.square().sum(-1, dtype=x.dtype), -x, x.abs() + y, ~x),
}


@pytest.mark.parametrize("columns", [1, 40, 1100])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32], ids=str)
def test_narrow_integers_wrap(dtype, columns, fuse):
    bounds = torch.iinfo(dtype)
    x, y = (torch.randint(bounds.min, bounds.max, (3, columns), dtype=torch.int64).to(dtype) for _ in range(2))
    for name, fn in REDUCED.items():
        torch.testing.assert_close(
            fuse(fn)(x, y), fn(x, y), rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}"
        )
