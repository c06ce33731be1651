"""The cases of the kernel benchmarks: which reductions, at which shapes, in which dtypes, in which passes, the most
telling ones first.

In: nothing but torch and `fusejit.tools.blocks`. Out: `CASES`, `Case` rows that `test_kernels.py` measures and
`static.py` counts.

    >>> case = CASES[0]
    >>> case.id
    'rms_norm-backward-bfloat16-8192x8192'
    >>> case.make("cpu", small=True)[0].shape
    torch.Size([6, 96])

`sizes` maps a row length N to a shape of about 2**26 elements, 128 MB in bfloat16: more than any L2 cache holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from layouts import LAYOUTS
from torch import Tensor

from fusejit.tools.blocks import BLOCKS, Block, Shape, Tensors, layer_norm, masked_softmax, rotate_half

ELEMENTS = 2**26
LENGTHS = (256, 1024, 4096, 8192, 16384, 32768, 131072)
ODD = (1023, 4097, 50257)
OUTPUT = -1  # in `again`: the first output


@dataclass(frozen=True, slots=True)
class Family:
    """One kernel at many sizes.

    Attributes:
        block: the function, its arguments, its small shape; `sizes`: row length to shape.
        odd: the small shape whose rows divide by nothing.
        again: which arguments (by position) and outputs (OUTPUT) any backward has to read besides the tangents.
        same: the arguments whose gradient is that of another one, and no tensor of its own.
        lengths: the row lengths that it is measured at.
        passes: "forward", "both" (forward and backward), "backward" (after a forward that is not timed).
    """

    block: Block
    sizes: Callable[[int], Shape]
    odd: Shape
    again: tuple[int, ...] = ()
    same: tuple[int, ...] = ()
    lengths: tuple[int, ...] = LENGTHS + ODD
    passes: tuple[str, ...] = ("forward", "both")


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement: a family at one shape, in one dtype and pass. `tier`: 0 is measured first."""

    family: Family
    length: int
    shape: Shape
    dtype: torch.dtype
    pass_: str
    tier: int

    @property
    def name(self) -> str:
        return self.family.block.name

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def id(self) -> str:
        return f"{self.name}-{self.pass_}-{self.dtype_name}-{'x'.join(map(str, self.shape))}"

    @property
    def small(self) -> Shape:
        """A shape for the interpreter, its rows odd in float32."""
        return self.family.odd if self.dtype is torch.float32 else self.family.block.small

    def make(self, device: str, *, small: bool = False) -> tuple[Any, ...]:
        return self.family.block.make(self.small if small else self.shape, device, self.dtype)

    def bytes_minimum(self, args: Sequence[Any], outputs: Sequence[Tensor]) -> int:
        """What any implementation moves: each input read once and each output written once; for a backward the tangents
        and what it needs `again` read, the gradients written. What an implementation chooses to save in between does
        not count.
        """
        return sum(self.bytes_least(args, outputs))

    def bytes_least(self, args: Sequence[Any], outputs: Sequence[Tensor]) -> tuple[int, int]:
        """The same as (read, written)."""
        inputs = [a for a in args if isinstance(a, Tensor)]
        tangents = sum(_bytes(o) for o in outputs if o.is_floating_point())
        again = sum(_bytes(outputs[0] if i == OUTPUT else args[i]) for i in self.family.again)
        gradients = sum(_bytes(a) for i, a in enumerate(inputs) if a.requires_grad and i not in self.family.same)
        forward, backward = self.pass_ != "backward", self.pass_ != "forward"
        read = forward * sum(map(_bytes, inputs)) + backward * (tangents + again)
        return read, forward * sum(map(_bytes, outputs)) + backward * gradients


def _bytes(t: Tensor) -> int:
    """The bytes of a tensor's different elements."""
    elements = 1
    for n, stride in zip(t.shape, t.stride(), strict=True):
        elements *= n if stride else 1
    return elements * t.dtype.itemsize


# -- functions ---------------------------------------------------------------------------------------------------------
def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """x (rows, columns), weight (columns); eager has one kernel for it."""
    return F.rms_norm(x, x.shape[-1:], weight, 1e-6)


def residual_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(normed, new residual), each (rows, columns)."""
    stream = x + residual
    return rms_norm(stream, weight), stream


def softmax(x: Tensor) -> Tensor:
    return x.softmax(-1)


def log_softmax(x: Tensor) -> Tensor:
    return x.log_softmax(-1)


def logsumexp(x: Tensor) -> Tensor:
    return x.logsumexp(-1)


def l2_norm(x: Tensor) -> Tensor:
    """Rows of length 1."""
    return F.normalize(x, dim=-1)


def group_norm(x: Tensor, weight: Tensor, bias: Tensor, groups: int) -> Tensor:
    """x (batch, channels, length); a row is a group: channels // groups * length elements."""
    return F.group_norm(x, groups, weight, bias)


def batch_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x (batch, channels, length), statistics of the batch."""
    return F.batch_norm(x, None, None, weight, bias, training=True)


def qk_norm_rope(
    query: Tensor, key: Tensor, query_weight: Tensor, key_weight: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """query and key (batch, length, heads, width) as the projections give them; out (batch, heads, length, width)."""
    q, k = (rms_norm(x, w).transpose(1, 2) for x, w in ((query, query_weight), (key, key_weight)))
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def cumsum(x: Tensor) -> Tensor:
    return x.cumsum(-1)


def argmax(x: Tensor) -> Tensor:
    return x.argmax(-1)


def var_mean(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.var_mean(x, -1)


def column_sum(x: Tensor) -> Tensor:
    return x.sum(0)


BLOCK, LARGEST = 128, 448.0  # columns of a block, and the largest number of float8_e4m3fn


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.float64 if x.dtype is torch.float64 else torch.float32)


def rms_norm_quant(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(codes, scales): x (rows, columns) normalised, each 1 x 128 block as float8_e4m3fn by its own scale."""
    parts = _wide(rms_norm(x, weight)).reshape(x.shape[0], -1, BLOCK)
    scale = parts.abs().amax(-1, keepdim=True).clamp(min=1e-12) / LARGEST
    return (parts / scale).to(torch.float8_e4m3fn).reshape(x.shape), scale.squeeze(-1)


def silu_mul_quant(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """(codes, scales): silu(gate) * up, each row (rows, columns) as int8 by its own scale."""
    made = F.silu(_wide(gate)) * _wide(up)
    scale = made.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
    return torch.round(made / scale).to(torch.int8), scale


def _nearest(outputs: Sequence[Tensor], gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The same; of two codes equally near, give or take float32's error in a value of 127, the one that `outputs`
    chose.
    """
    made = F.silu(gate) * up
    scale = made.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
    near = (outputs[0] - made / scale).abs() < 0.5 + 1e-4
    return torch.where(near, outputs[0], torch.round(made / scale).to(torch.int8)), scale


def quant_squares(x: Tensor) -> tuple[Tensor, Tensor]:
    """(codes, scales): each 128 x 128 block of x (rows, columns) as float8_e4m3fn by its own scale."""
    parts = _wide(x).reshape(x.shape[0] // BLOCK, BLOCK, -1, BLOCK)
    scale = parts.abs().amax((1, 3), keepdim=True).clamp(min=1e-12) / LARGEST
    return (parts / scale).to(torch.float8_e4m3fn).reshape(x.shape), scale[:, 0, :, 0]


def quant_tensor(x: Tensor) -> tuple[Tensor, Tensor]:
    """(codes, scale): x (rows, columns) as float8_e4m3fn by one scale."""
    scale = _wide(x.abs().amax()).clamp(min=1e-12) / LARGEST
    return (_wide(x) / scale).to(torch.float8_e4m3fn), scale


def rms_norm_quant_known(x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """(codes, largest): x (rows, columns) normalised, float8_e4m3fn by a scale of before (0-d), and the largest value
    for the next one.
    """
    normed = _wide(rms_norm(x, weight))
    return (normed / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), normed.abs().amax()


def dequant_rms_norm(codes: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
    """codes (rows, columns) float8_e4m3fn and scale (rows, columns // 128) as what they stand for, normalised; in
    weight's dtype.
    """
    parts = _wide(codes).reshape(codes.shape[0], -1, BLOCK) * scale[..., None]
    return rms_norm(parts.reshape(codes.shape).to(weight.dtype), weight)


def weighted_cross_entropy(logits: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """logits (rows, classes), target (rows), weight (classes)."""
    return F.cross_entropy(logits, target, weight=weight)


def soft_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Targets are probabilities: both (rows, classes)."""
    return F.cross_entropy(logits, target)


def linear_cross_entropy(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """hidden (rows, width), weight (classes, width), target (rows): at the measured sizes the logits are never held
    whole.
    """
    return F.cross_entropy(F.linear(hidden, weight), target)


def clip_grad_norm(*grads: Tensor) -> tuple[Tensor, ...]:
    """What torch.nn.utils.clip_grad_norm_ does to gradients, as new tensors; last, their norm."""
    total = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
    return *torch._foreach_mul(grads, (1.0 / (total + 1e-6)).clamp(max=1.0)), total


# -- arguments and sizes -----------------------------------------------------------------------------------------------
def _one(shape: Shape, t: Tensors) -> tuple[Any, ...]:
    return (t(*shape),)


def _weighted(shape: Shape, t: Tensors) -> tuple[Any, ...]:
    """x, and a weight of its second dimension."""
    return t(*shape), t.near_one(shape[1])


def _scaled(shape: Shape, t: Tensors) -> tuple[Any, ...]:
    """x, and a weight and a bias of its second dimension."""
    return t(*shape), t.near_one(shape[1]), t(shape[1])


def _causal_rows(shape: Shape, t: Tensors) -> tuple[Any, ...]:
    """scores (heads, queries, keys), hidden (queries, keys): the upper triangle of a wide matrix, no row whole."""
    _, queries, keys = shape
    return t(*shape), torch.ones(queries, keys, dtype=torch.bool, device=t.device).triu(max(1, keys // 2))


def _rotated(shape: Shape, t: Tensors) -> tuple[Any, ...]:
    batch, length, heads, width = shape
    return t(*shape), t(*shape), t.near_one(width), t.near_one(width), *t.rotary(length, width)


def _constants(arguments: Callable[[Shape, Tensors], tuple[Any, ...]]) -> Callable[[Shape, Tensors], tuple[Any, ...]]:
    """The same arguments, none of which wants a gradient."""
    return lambda shape, t: tuple(a.detach() for a in arguments(shape, t))


def _known(shape: Shape, t: Tensors) -> tuple[Any, ...]:
    """x, a weight of its columns, a scale."""
    return t(*shape, grad=False), t.near_one(shape[1]).detach(), torch.full((), 0.01, device=t.device)


def _quantised(shape: Shape, t: Tensors) -> tuple[Any, ...]:
    """codes, scales of their 1 x 128 blocks, a weight of the columns."""
    scales = t.positive(shape[0], shape[1] // BLOCK, dtype=torch.float32)
    return t(*shape, grad=False).to(torch.float8_e4m3fn), scales, t.near_one(shape[1]).detach()


def _rows(n: int) -> Shape:
    return (max(1, ELEMENTS // n), n)


def _columns(n: int) -> Shape:
    """n rows to add up, each column apart."""
    return (n, max(1, ELEMENTS // n))


def _heads(n: int) -> Shape:
    return (16, max(1, ELEMENTS // (16 * n)), n)


def _grouped(n: int) -> Shape:
    """32 groups of n elements, in as many channels as divide them."""
    channels = next(c for c in (8, 3, 17, 29, 1) if n % c == 0)
    return (max(1, ELEMENTS // (32 * n)), 32 * channels, n // channels, 32)


def _images(n: int) -> Shape:
    channels = max(64, min(512, ELEMENTS // (8 * n)))
    return (max(1, ELEMENTS // (channels * n)), channels, n)


def _attention(width: int) -> Shape:
    return (4, ELEMENTS // (4 * 32 * width), 32, width)


def _labelled(shape: Shape, t: Tensors) -> tuple[Any, ...]:
    """logits (rows, classes), target (rows)."""
    return t(*shape), t.integers(shape[1], shape[0])


def _gradients(shape: Shape, t: Tensors) -> tuple[Any, ...]:
    """Matrices and vectors in turn, as a model has them; (pairs, size of the matrices)."""
    pairs, n = shape
    return tuple(t(*one, grad=False) for _ in range(pairs) for one in ((n, n), (n,)))


def _model(n: int) -> Shape:
    return (100, n)


def _head(classes: int) -> Shape:
    return (16384, 1024, classes)


ROWS, ODD_ROWS = (6, 96), (5, 33)
VOCABULARIES = (128256, 32768, 50257, 262144)
FAMILIES: tuple[Family, ...] = (
    Family(Block("rms_norm", rms_norm, _weighted, "rows, columns", _rows(4096), ROWS), _rows, ODD_ROWS, (0, 1)),
    Family(Block("layer_norm", layer_norm, _scaled, "rows, columns", _rows(4096), ROWS), _rows, ODD_ROWS, (0, 1)),
    Family(Block("softmax", softmax, _one, "rows, columns", _rows(4096), ROWS), _rows, ODD_ROWS, (OUTPUT,)),
    Family(
        Block("qk_norm_rope", qk_norm_rope, _rotated, "batch, length, heads, width", _attention(128), (1, 3, 2, 16)),
        _attention,
        (1, 3, 2, 6),
        (0, 1, 2, 3, 4, 5),
        lengths=(128, 64, 256),
    ),
    Family(
        Block(
            "residual_rms_norm",
            residual_rms_norm,
            lambda s, t: (t(*s), t(*s), t.near_one(s[1])),
            "rows, columns",
            _rows(4096),
            ROWS,
        ),
        _rows,
        ODD_ROWS,
        (0, 2),
        (1,),
    ),
    Family(
        Block("bias_gelu", BLOCKS["bias_gelu"].fn, BLOCKS["bias_gelu"].arguments, "rows, columns", _rows(4096), ROWS),
        _rows,
        ODD_ROWS,
        (0, 1),
        lengths=(4096, 1024, 8192, 16384, 4097),
        passes=("backward", "both"),
    ),
    # its backward moves nothing: it is a view of the tangent
    Family(
        Block("column_sum", column_sum, _one, "rows, columns", _columns(4096), ROWS),
        _columns,
        ODD_ROWS,
        passes=("forward",),
    ),
    Family(Block("logsumexp", logsumexp, _one, "rows, columns", _rows(4096), ROWS), _rows, ODD_ROWS, (0, OUTPUT)),
    Family(
        Block("masked_softmax", masked_softmax, _causal_rows, "heads, queries, keys", _heads(4096), (2, 6, 24)),
        _heads,
        (2, 5, 33),
        (OUTPUT,),
    ),
    Family(
        Block(
            "group_norm",
            group_norm,
            lambda s, t: (t(*s[:3]), t.near_one(s[1]), t(s[1]), s[3]),
            "batch, channels, length, groups",
            _grouped(4096),
            (2, 8, 16, 4),
        ),
        _grouped,
        (2, 6, 11, 2),
        (0, 1),
    ),
    Family(
        Block("batch_norm", batch_norm, _scaled, "batch, channels, length", _images(4096), (4, 6, 16)),
        _images,
        (3, 5, 11),
        (0, 1),
    ),
    Family(Block("log_softmax", log_softmax, _one, "rows, columns", _rows(4096), ROWS), _rows, ODD_ROWS, (OUTPUT,)),
    Family(Block("l2_norm", l2_norm, _one, "rows, columns", _rows(4096), ROWS), _rows, ODD_ROWS, (0,)),
    Family(Block("var_mean", var_mean, _one, "rows, columns", _rows(4096), ROWS), _rows, ODD_ROWS, (0,)),
    Family(
        Block("argmax", argmax, lambda s, t: (t(*s, grad=False),), "rows, columns", _rows(4096), ROWS, grad=False),
        _rows,
        ODD_ROWS,
        passes=("forward",),
    ),
)
DROPOUT, ENTROPY = BLOCKS["dropout_residual_layer_norm"], BLOCKS["cross_entropy"]
FAMILIES += (
    Family(
        Block(
            "dropout_add_layer_norm",
            DROPOUT.fn,
            DROPOUT.arguments,
            "rows, columns",
            _rows(4096),
            ROWS,
            reference=DROPOUT.reference,
        ),
        _rows,
        ODD_ROWS,
        (2, OUTPUT),
        lengths=(4096, 1024, 8192, 16384),
        passes=("forward", "both"),
    ),
    Family(
        Block("cross_entropy", ENTROPY.fn, _labelled, "rows, classes", _rows(32768), ROWS),
        _rows,
        ODD_ROWS,
        (0, 1),
        lengths=VOCABULARIES,
        passes=("forward", "both"),
    ),
    Family(
        Block("cumsum", cumsum, _one, "rows, columns", _rows(4096), ROWS),
        _rows,
        ODD_ROWS,
        lengths=(4096, 8192, 16384, 32768, 131072),
    ),
)
QUANTISED = (4096, 1024, 8192, 16384)
FAMILIES += tuple(
    Family(
        Block(name, fn, arguments, "rows, columns", _rows(4096), small, grad=False, reference=reference),
        _rows, odd, lengths=QUANTISED, passes=("forward",),
    )
    for name, fn, arguments, small, odd, reference in (
        ("rms_norm_quant_1x128", rms_norm_quant, _constants(_weighted), (6, 384), (5, 640), None),
        ("silu_mul_quant_row", silu_mul_quant, _constants(lambda s, t: (t(*s), t(*s))), ROWS, ODD_ROWS, _nearest),
        ("quant_128x128", quant_squares, _constants(_one), (256, 384), (128, 256), None),
        ("quant_per_tensor", quant_tensor, _constants(_one), ROWS, ODD_ROWS, None),
        ("rms_norm_quant_known", rms_norm_quant_known, _known, ROWS, ODD_ROWS, None),
        ("dequant_rms_norm", dequant_rms_norm, _quantised, (6, 384), (5, 640), None),
    )
)  # fmt: skip
FAMILIES += (
    Family(
        Block(
            "weighted_cross_entropy",
            weighted_cross_entropy,
            lambda s, t: (*_labelled(s, t), t.positive(s[1])),
            "rows, classes",
            _rows(32768),
            ROWS,
        ),
        _rows,
        ODD_ROWS,
        (0, 1),
        lengths=VOCABULARIES,
        passes=("forward", "both"),
    ),
    Family(
        Block(
            "soft_cross_entropy",
            soft_cross_entropy,
            lambda s, t: (t(*s), t(*s, grad=False).softmax(-1)),
            "rows, classes",
            _rows(32768),
            ROWS,
        ),
        _rows,
        ODD_ROWS,
        (0, 1),
        lengths=VOCABULARIES,
        passes=("forward", "both"),
    ),
    Family(
        Block(
            "linear_cross_entropy",
            linear_cross_entropy,
            lambda s, t: (t(*s[:2]), t(s[2], s[1], scale=0.02), t.integers(s[2], s[0])),
            "rows, width, classes",
            _head(128256),
            (6, 16, 96),
        ),
        _head,
        (5, 8, 33),
        (0, 1, 2),
        lengths=(128256, 50257),
        passes=("forward", "both"),
    ),
    Family(
        Block(
            "clip_grad_norm",
            clip_grad_norm,
            _gradients,
            "pairs of a matrix and a vector, size",
            _model(1024),
            (3, 16),
            grad=False,
        ),
        _model,
        (3, 13),
        lengths=(1024, 256),
        passes=("forward",),
    ),
)
FAMILIES += tuple(Family(**row) for row in LAYOUTS)
BY_NAME = {family.block.name: family for family in FAMILIES}
BF16, F32 = torch.bfloat16, torch.float32

# The shapes that the targets name: (rows, columns) of the norms' backward, and the few long rows of a vocabulary.
BACKWARDS = ((8192, 8192), (2048, 8192), (32768, 4096), (16384, 16384))
VOCABULARY = ((16, 131072), (64, 131072))
ENTROPIES, FEW = ("cross_entropy", "weighted_cross_entropy", "soft_cross_entropy"), (16, 128256)
CENTRAL, WIDE = 4096, 32768


def _named() -> list[Case]:
    """What the targets name."""
    norms = [Case(BY_NAME[n], s[1], s, BF16, "backward", 0) for s in BACKWARDS for n in ("rms_norm", "layer_norm")]
    few = [Case(BY_NAME["softmax"], s[1], s, BF16, "forward", 0) for s in VOCABULARY]
    losses = [Case(BY_NAME[n], FEW[1], FEW, BF16, "both", 2) for n in ENTROPIES]
    return [*norms, *few, *losses]


def _tier(family: Family, length: int, dtype: torch.dtype, pass_: str) -> int:
    """1: the middle of every family; 2: bfloat16 over N; 3: its backwards over N; 4: float32."""
    central = (CENTRAL, WIDE) if CENTRAL in family.lengths else family.lengths[:1]
    if length in central and dtype is BF16:
        return 1
    return 4 if dtype is F32 else 2 if pass_ == "forward" else 3


def _all() -> list[Case]:
    swept = [
        Case(family, n, family.sizes(n), dtype, pass_, _tier(family, n, dtype, pass_))
        for dtype in (BF16, F32) for family in FAMILIES for n in family.lengths for pass_ in family.passes
    ]  # fmt: skip
    return sorted([*_named(), *swept], key=lambda case: case.tier)  # stable: a family's sizes stay together


CASES: list[Case] = _all()


def smallest() -> list[Case]:
    """One case of each family, pass and dtype: what the interpreter runs, at the small shapes."""
    first: dict[tuple[str, str, torch.dtype], Case] = {}
    for case in CASES:
        first.setdefault((case.name, case.pass_, case.dtype), case)
    return list(first.values())
