"""The blocks that `fusejit bench`, perf/ and the tests measure: plain torch functions with real and with small shapes.

In: nothing but torch. Out: `BLOCKS`, a table of `Block` rows; `block.make(block.real, "cuda")` gives the arguments of
`block.fn`.

    >>> block = BLOCKS["bias_gelu"]
    >>> block.fn(*block.make(block.small)).shape
    torch.Size([6, 96])

Every differentiable argument requires grad; a forward-only measurement runs under `torch.no_grad()`. Adding a block is
one function, one function that makes its arguments, and one row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """One row of the table.

    Attributes:
        name: what the tables print.
        fn: a function of tensors and Python numbers; returns a tensor or a tuple of tensors.
        arguments: `(shape, Tensors) -> tuple of arguments of fn`.
        real: the shape measured on a GPU and used by the roofline; `small`: the one the interpreter runs.
        axes: what the numbers of `real` and `small` mean.
        dtype: of the activations in measurements.
        grad: forward and backward together are measured too.
        reference: `(outputs, *arguments) -> outputs` in the dtype of the arguments, for a block whose result depends on
            random numbers; `outputs` are followed by the gradients where there are any.
    """

    name: str
    fn: Callable[..., Any]
    arguments: Callable[[Shape, Tensors], tuple[Any, ...]]
    axes: str
    real: Shape
    small: Shape
    dtype: torch.dtype = torch.bfloat16
    grad: bool = True
    reference: Callable[..., Any] | None = None

    def make(self, shape: Shape, device: str = "cpu", dtype: torch.dtype | None = None) -> tuple[Any, ...]:
        """Arguments at `shape`, from a fixed seed, on `device` ("cpu", "cuda" or "meta") in `dtype` (the block's own if
        None).
        """
        return self.arguments(shape, Tensors(device, dtype or self.dtype))

    def make_untouched(self, shape: Shape, dtype: torch.dtype | None = None) -> tuple[Any, ...]:
        """Return the arguments at `shape` as CPU tensors whose memory is reserved and never written: for compilation,
        at any size.
        """
        return tuple(_reserve(a) if isinstance(a, Tensor) else a for a in self.make(shape, "meta", dtype))


def _reserve(like: Tensor) -> Tensor:
    empty = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
    return empty.requires_grad_(like.requires_grad)


class Tensors:
    """Makes the arguments of a block: one seeded stream, one device, one dtype."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self._generator = torch.Generator("cpu" if device == "meta" else device).manual_seed(0)

    def __call__(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None, grad: bool = True) -> Tensor:
        """A normal tensor of `shape`, times `scale`; requires grad unless told otherwise."""
        return self._draw(shape, torch.float32).mul_(scale).to(dtype or self.dtype).requires_grad_(grad)

    def near_one(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A weight of a norm: 1 plus a tenth of a normal."""
        return self._draw(shape, torch.float32).mul_(0.1).add_(1).to(dtype or self.dtype).requires_grad_()

    def positive(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A variance: positive, never near zero, without gradient."""
        return self._draw(shape, torch.float32).square_().add_(0.1).to(dtype or self.dtype)

    def integers(self, high: int, *shape: int) -> Tensor:
        """int64 in [0, high)."""
        if self.device == "meta":
            return torch.empty(shape, dtype=torch.int64, device="meta")
        return torch.randint(high, shape, generator=self._generator, device=self.device)

    def causal(self, size: int) -> Tensor:
        """A (size, size) bool mask, True where a key may not be seen."""
        return torch.ones(size, size, dtype=torch.bool, device=self.device).triu(1)

    def rotary(self, length: int, width: int) -> tuple[Tensor, Tensor]:
        """cos and sin of the rotary embedding, (length, width) each, the halves equal; constants."""
        rate = 10000.0 ** (-torch.arange(0, width, 2, device=self.device, dtype=torch.float32) / width)
        angle = torch.arange(length, device=self.device, dtype=torch.float32)[:, None] * torch.cat((rate, rate))
        return angle.cos().to(self.dtype), angle.sin().to(self.dtype)

    def _draw(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if self.device == "meta":
            return torch.empty(tuple(shape), dtype=dtype, device="meta")
        return torch.randn(tuple(shape), generator=self._generator, device=self.device, dtype=dtype)


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """x (rows, columns), bias (columns): the middle of a transformer's MLP."""
    return F.gelu(x + bias, approximate="tanh")


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """gate and up (rows, columns): the middle of a Llama MLP."""
    return F.silu(gate) * up


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """x (..., columns), weight (columns); the mean of squares is taken in float32 or better, as model code does."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def residual_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Add to the residual stream and normalise it: (normed, new residual), each (rows, columns)."""
    stream = x + residual
    return rms_norm(stream, weight), stream


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x (rows, columns)."""
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def masked_softmax(scores: Tensor, hidden: Tensor) -> Tensor:
    """scores (batch, heads, queries, keys), hidden (queries, keys) bool."""
    return scores.mul(1 / math.sqrt(128)).masked_fill(hidden, -math.inf).softmax(-1)


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """logits (rows, classes), target (rows) int64; the mean loss, computed in float32 or better."""
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), target)


def rotate_half(x: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return torch.cat((-right, left), dim=-1)


def rope(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """query and key (batch, heads, length, width), cos and sin (length, width)."""
    return query * cos + rotate_half(query) * sin, key * cos + rotate_half(key) * sin


def dropout_residual_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, p: float
) -> tuple[Tensor, Tensor]:
    """(normed, new residual) of a training step, each (rows, columns)."""
    stream = residual + F.dropout(x, p)
    return F.layer_norm(stream, stream.shape[-1:], weight, bias), stream


def _dropout_reference(
    outputs: Sequence[Tensor], x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, p: float
) -> tuple[Tensor, Tensor]:
    """The same with the mask that `outputs` shows: an element was kept if the stream moved at least half of its way, or
    better, where the stream has a gradient, if x has one too.
    """
    moved = (outputs[1].detach() - residual.detach()).to(x.dtype)
    kept = moved / x.detach() * (1 - p) > 0.5
    if len(outputs) > 2:
        kept = torch.where(outputs[3] != 0, outputs[2] != 0, kept)
    stream = residual + x * kept.to(x.dtype) / (1 - p)
    return F.layer_norm(stream, stream.shape[-1:], weight, bias), stream


def group_norm_silu(x: Tensor, weight: Tensor, bias: Tensor, groups: int) -> Tensor:
    """x (batch, channels, height, width): a diffusion model's residual block."""
    return F.silu(F.group_norm(x, groups, weight, bias))


def batch_norm_relu(x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x (batch, channels, height, width); inference, with running statistics."""
    return F.relu(F.batch_norm(x, mean, variance, weight, bias, training=False))


def adamw(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    step: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """One step of AdamW on a float32 parameter: (parameter, first moment, second moment), new tensors. `step` is a 0-d
    float tensor.
    """
    m = torch.lerp(m, g, 1 - beta1)
    v = v * beta2 + g * g * (1 - beta2)
    denominator = (v / (1 - beta2**step)).sqrt() + eps
    return p * (1 - lr * decay) - lr * (m / (1 - beta1**step)) / denominator, m, v


def llama_block(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    norm1: Tensor,
    wq: Tensor,
    wk: Tensor,
    wv: Tensor,
    wo: Tensor,
    norm2: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    heads: int,
) -> Tensor:
    """A decoder block: x (batch, length, width), cos and sin (length, width // heads), weights (out, in); causal
    attention, SwiGLU.
    """
    batch, length, width = x.shape
    normed = rms_norm(x, norm1)
    q, k, v = (F.linear(normed, w).view(batch, length, heads, width // heads).transpose(1, 2) for w in (wq, wk, wv))
    q, k = rope(q, k, cos, sin)
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + F.linear(attended.transpose(1, 2).reshape(batch, length, width), wo)
    normed = rms_norm(x, norm2)
    return x + F.linear(swiglu(F.linear(normed, gate), F.linear(normed, up)), down)


def _llama_arguments(shape: Shape, t: Tensors) -> tuple[Any, ...]:
    batch, length, width, inner, heads = shape
    scale = width**-0.5
    square = [t(width, width, scale=scale) for _ in range(4)]
    mlp = (t(inner, width, scale=scale), t(inner, width, scale=scale), t(width, inner, scale=inner**-0.5))
    rotary = t.rotary(length, width // heads)
    return (t(batch, length, width), *rotary, t.near_one(width), *square, t.near_one(width), *mlp, heads)


def _adamw_arguments(shape: Shape, t: Tensors) -> tuple[Any, ...]:
    p, g, m = (t(*shape, scale=s, grad=False) for s in (0.02, 0.001, 0.001))
    step = torch.full((), 10.0, device=t.device, dtype=t.dtype)
    return p, g, m, t.positive(*shape) * 1e-6, step, 3e-4, 0.9, 0.95, 1e-8, 0.1


def _batch_norm_arguments(shape: Shape, t: Tensors) -> tuple[Any, ...]:
    channels = shape[1]
    return (
        t(*shape, grad=False),
        t(channels, grad=False),
        t.positive(channels),
        t(channels, grad=False),
        t(channels, grad=False),
    )


BLOCKS: dict[str, Block] = {
    block.name: block
    for block in (
        Block("bias_gelu", bias_gelu, lambda s, t: (t(*s), t(s[1])), "rows, columns", (8192, 4096), (6, 96)),
        Block("swiglu", swiglu, lambda s, t: (t(*s), t(*s)), "rows, columns", (8192, 11008), (6, 96)),
        Block(
            "residual_rms_norm",
            residual_rms_norm,
            lambda s, t: (t(*s), t(*s), t.near_one(s[1])),
            "rows, columns",
            (8192, 4096),
            (6, 96),
        ),
        Block(
            "layer_norm",
            layer_norm,
            lambda s, t: (t(*s), t.near_one(s[1]), t(s[1])),
            "rows, columns",
            (8192, 4096),
            (6, 96),
        ),
        Block(
            "masked_softmax",
            masked_softmax,
            lambda s, t: (t(*s), t.causal(s[-1])),
            "batch, heads, queries, keys",
            (4, 16, 1024, 1024),
            (1, 2, 24, 24),
        ),
        Block(
            "cross_entropy",
            cross_entropy,
            lambda s, t: (t(*s, scale=2.0), t.integers(s[1], s[0])),
            "rows, classes",
            (8192, 32000),
            (6, 100),
        ),
        Block(
            "rope",
            rope,
            lambda s, t: (t(*s), t(*s), *t.rotary(s[2], s[3])),
            "batch, heads, length, width",
            (4, 32, 2048, 128),
            (1, 2, 6, 16),
        ),
        Block(
            "dropout_residual_layer_norm",
            dropout_residual_layer_norm,
            lambda s, t: (t(*s), t(*s), t.near_one(s[1]), t(s[1]), 0.1),
            "rows, columns",
            (8192, 4096),
            (6, 96),
            reference=_dropout_reference,
        ),
        Block(
            "group_norm_silu",
            group_norm_silu,
            lambda s, t: (t(*s[:4]), t.near_one(s[1]), t(s[1]), s[4]),
            "batch, channels, height, width, groups",
            (16, 320, 64, 64, 32),
            (2, 8, 4, 4, 4),
        ),
        Block(
            "batch_norm_relu",
            batch_norm_relu,
            _batch_norm_arguments,
            "batch, channels, height, width",
            (64, 256, 56, 56),
            (2, 6, 4, 4),
            grad=False,
        ),
        Block("adamw", adamw, _adamw_arguments, "rows, columns", (4096, 11008), (6, 96), torch.float32, grad=False),
        Block(
            "llama_block",
            llama_block,
            _llama_arguments,
            "batch, length, width, inner, heads",
            (2, 2048, 4096, 11008, 32),
            (1, 6, 32, 48, 2),
        ),
    )
}
