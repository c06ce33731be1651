"""Decompositions: which ATen ops torch rewrites for us into the ops of the op table, and which stay whole.

In: nothing. Out: the table that AOTAutograd's tracing applies below autograd.

    >>> torch.ops.aten.native_layer_norm.default in table()
    True
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from ... import torch_private as private
from ..ir.reductions import REDUCTIONS
from .table import POINTWISE

# Core ATen keeps these whole because they are one kernel in eager; as clusters they are only reductions and pointwise
# ops.
BROKEN_UP = (
    "native_layer_norm",
    "native_group_norm",
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_functional",
    "_native_batch_norm_legit_no_training",
    "batch_norm_backward",
    "_softmax",
    "_log_softmax",
    "gelu",
    "elu",
    "leaky_relu",
    "hardtanh",
    "linalg_vector_norm",
    "rrelu_with_noise_backward",
    "bucketize",
    "tril_indices",
    "triu_indices",
    "special_erfcx",
    "upsample_bilinear2d",
    "upsample_nearest2d",
    "dist",
    "frexp",
    "normal",
    "round",
    "ldexp",
    "gcd",
    "lcm",
)
# Torch can rewrite these, but the rewrite is slower than its kernel or loses precision, so they are called as they are.
WHOLE = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "embedding_dense_backward",
    "col2im",
    "im2col",
    "max_pool2d_with_indices_backward",
    "max_pool3d_with_indices",
    "max_pool2d_with_indices",
    "grid_sampler_2d",
    "upsample_bicubic2d",
    "index_add",
    "index_copy",
    "cdist",
    "_euclidean_dist",
    "matrix_exp",
    "take",
    "renorm",
    "bernoulli",
    "pdist",
    "linalg_cross",
    "nonzero_numpy",
    "_unsafe_index_put",
    "_unsafe_masked_index_put_accumulate",
    "unfold_backward",
    "rnn_relu_cell",
    "multilabel_margin_loss_forward",
    "addr",
    "mv",
    "split",
    "split_with_sizes",
    "unbind",
    "unfold_copy",
    "roll",
    "index_fill",
    "quantile",
    "nanquantile",
)


@cache
def table() -> dict[private.OpOverload, Callable]:
    """Return {overload: decomposition}; an op with a row of its own in the op table is never decomposed."""
    from ...torch_private import core_aten_decompositions, get_decompositions  # 0.1 s, only when something is compiled

    packets = [getattr(torch.ops.aten, name) for name in BROKEN_UP if hasattr(torch.ops.aten, name)]
    found = {**core_aten_decompositions(), **get_decompositions(packets)}
    for op in (torch.ops.aten.bucketize.Tensor, torch.ops.aten.bucketize.Scalar):
        if op in found:
            found[op] = _unless_a_number(found[op])
    for op in (torch.ops.aten.nll_loss_backward.default, torch.ops.aten.nll_loss2d_backward.default):
        found[op] = _weighted_by_row(found[op])
    for name in ("mse_loss_backward", "smooth_l1_loss_backward", "huber_loss_backward"):
        op = getattr(torch.ops.aten, name).default
        found[op] = _of_a_difference(found[op], signs=name.startswith("smooth"))
    found |= {op: _each(op) for op in _foreach_ops()}
    own = POINTWISE.keys() | {name for row in REDUCTIONS.values() for name in row.aten}
    return {op: rule for op, rule in found.items() if short(op) not in own and short(op).split(".")[0] not in WHOLE}


# torch._foreach_* ops whose namesake in torch has another name or other arguments
APART: dict[str, Callable] = {
    "copy": lambda x, source, non_blocking=False: torch.ops.aten.copy(x, source, non_blocking),
    "zero": torch.zeros_like,
    "norm": lambda x, order=2, dtype=None: torch.linalg.vector_norm(x, order, dtype=dtype),
    "addcmul": lambda x, one, two, value=1: torch.addcmul(x, one, two, value=value),
    "addcdiv": lambda x, one, two, value=1: torch.addcdiv(x, one, two, value=value),
    "maximum": lambda x, y: torch.maximum(x, y) if isinstance(y, torch.Tensor) else torch.clamp_min(x, y),
    "minimum": lambda x, y: torch.minimum(x, y) if isinstance(y, torch.Tensor) else torch.clamp_max(x, y),
}
NOT_EACH = ("mm", "powsum")
MEAN = 1  # of torch's numbers for reductions


def _foreach_ops() -> list[private.OpOverload]:
    """Return the functional torch._foreach_* ops that are one op on each tensor."""
    names = {
        s.name.removeprefix("aten::") for s in private.jit_get_all_schemas() if s.name.startswith("aten::_foreach_")
    }
    found = []
    for name in sorted(n for n in names if not n.endswith("_") and n.removeprefix("_foreach_") not in NOT_EACH):
        packet = getattr(torch.ops.aten, name)
        found += [getattr(packet, overload) for overload in packet.overloads() if not overload.endswith("out")]
    one_tensor_of_scalars = ("addcmul.Tensor", "addcdiv.Tensor")  # they read its values
    return [op for op in found if not short(op).endswith(one_tensor_of_scalars)]


def _each(op: private.OpOverload) -> Callable:
    """Return a foreach op as its namesake on every tensor: lists go to it element by element, everything else as it
    is.
    """
    name = op._schema.name.removeprefix("aten::_foreach_")
    one = APART.get(name) or getattr(torch, name)
    lists = {a.name for a in op._schema.arguments if isinstance(a.type, torch.ListType)}

    def decomposition(*args: Any, **kwargs: Any) -> list[Any]:
        named = [*zip((a.name for a in op._schema.arguments), args, strict=False)]
        count = len(next(value for name, value in named if name in lists))
        return [
            one(
                *(value[i] if name in lists else value for name, value in named),
                **{k: v for k, v in kwargs.items() if v is not None},
            )
            for i in range(count)
        ]

    return decomposition


def _weighted_by_row(rule: Callable) -> Callable:
    """Let the gradient of an nll_loss look up the one weight of each row, as torch's kernel does, instead of
    multiplying rows by all.
    """

    def decomposition(
        grad: torch.Tensor,
        x: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | None,
        reduction: int,
        ignored: int,
        total: torch.Tensor,
    ) -> object:
        if weight is None or x.dim() < 2:
            return rule(grad, x, target, weight, reduction, ignored, total)
        given = torch.where(target != ignored, target, 0)
        own = weight.gather(0, given.reshape(-1)).reshape(given.shape)
        return rule(
            (grad / total if reduction == MEAN else grad) * own, x, target, None, 0, ignored, total
        )  # 0: a gradient for each row

    return decomposition


def _of_a_difference(rule: Callable, signs: bool) -> Callable:
    """Let the gradient of a loss of x - y be NaN where that is, also where torch's rewrite takes its sign; of nothing
    there is none.
    """

    def decomposition(grad: torch.Tensor, x: torch.Tensor, y: torch.Tensor, *args: object) -> torch.Tensor:
        rest = x - y
        if not x.numel():
            return rest
        return torch.where(rest != rest, rest, rule(grad, x, y, *args)) if signs else rule(grad, x, y, *args)

    return decomposition


def _unless_a_number(rule: Callable) -> Callable:
    """Keep an op whole where its operand is a scalar: torch's search through the boundaries then reads values while
    tracing.
    """

    def decomposition(x: torch.Tensor, *args: object, **kwargs: object) -> object:
        return rule(x, *args, **kwargs) if isinstance(x, torch.Tensor) and x.dim() else NotImplemented

    return decomposition


def short(op: object) -> str:
    """Return an overload's name without the `aten.` namespace: "add.Tensor"."""
    return str(op).removeprefix("aten.")
