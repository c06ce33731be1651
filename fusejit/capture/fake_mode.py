"""Fake tensors with eager's strides: torch's own, but for ops whose Python reference lays its result out in another way
than the kernel.

In: what `FakeTensorMode` takes. Out: a mode that gives tensors without data, as a trace runs on them.

    torch.copysign(x.t(), row)      # torch's fake: (4, 1), as after row was expanded; eager and this one: (1, 6)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from .. import torch_private as private

aten = torch.ops.aten
Tensor = torch.Tensor
Strides = Sequence[int] | None


def elementwise(operands: Sequence[Tensor]) -> Strides:
    """The strides that torch's TensorIterator gives a result: it sorts dimensions by the strides of the operands, the
    first one first.
    """
    shape = torch.broadcast_shapes(*(v.shape for v in operands))
    rank = len(shape)
    if all(v.shape == shape for v in operands):
        if all(v.is_contiguous() for v in operands):
            return packed(shape, range(rank)[::-1])
        if rank == 4 and all(v.is_contiguous(memory_format=torch.channels_last) for v in operands):
            return packed(shape, (1, 3, 2, 0))
        if len({v.stride() for v in operands}) == 1 and dense(operands[0]):
            return operands[0].stride()
    steps = [
        [0] * (rank - v.dim())
        + [0 if n == 1 != m else s for n, s, m in zip(v.shape, v.stride(), shape[rank - v.dim() :])]
        for v in operands
    ]
    order = list(range(rank))[::-1]
    for last in range(1, rank):
        here = last
        for before in range(last)[::-1]:
            sign = _compare(shape, steps, order[before], order[here])
            if sign < 0:
                break
            if sign > 0:
                order[before], order[here] = order[here], order[before]
                here = before
    return packed(shape, order)


def _compare(shape: Sequence[int], steps: list[list[int]], one: int, other: int) -> int:
    """Whether dimension `one` runs slower than `other` (1), faster (-1), or no operand tells (0)."""
    for strides in steps:
        a, b = strides[one], strides[other]
        if a and b and a != b:
            return 1 if a > b else -1
        if a and b and shape[one] > shape[other]:
            return 1
    return 0


def packed(shape: Sequence[int], order: Sequence[int]) -> Strides:
    """The strides of a dense tensor whose dimensions run in this order, the fastest first."""
    strides, step = [0] * len(shape), 1
    for dim in order:
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def dense(x: Tensor) -> bool:
    return bool(torch.ops.aten.is_non_overlapping_and_dense.default(x))


# -- by op -------------------------------------------------------------------------------------------------------------
def _pointwise(func: Any, result: Any, x: Any, *args: Any, **kwargs: Any) -> Strides:
    """A number where a tensor is meant is an operand without dimensions."""
    operands = []
    for argument, value in zip(func._schema.arguments, (x, *args), strict=False):
        if isinstance(value, Tensor):
            operands.append(value)
        elif str(argument.type) == "Tensor" or (
            func._overloadname.startswith("Scalar") and argument.name in ("self", "other")
        ):
            operands.append(torch.empty((), device="meta"))
    return elementwise(operands)


def _like(func: Any, result: Any, x: Any, *args: Any, memory_format: Any = None, **kwargs: Any) -> Strides:
    return x.stride() if memory_format in (None, torch.preserve_format) and dense(x) else None


def _suggested(func: Any, result: Any, x: Any, *args: Any, **kwargs: Any) -> Strides:
    """Dense, in the operand's memory format."""
    channels_last = x.dim() == 4 and private.suggest_memory_format(x) is torch.channels_last
    return packed(result.shape, (1, 3, 2, 0) if channels_last else range(x.dim())[::-1])


def _of_memory_format(func: Any, result: Any, x: Any, *args: Any, **kwargs: Any) -> Strides:
    """The same where a kernel of a CPU does so, and no other."""
    return _suggested(func, result, x) if x.device.type == "cpu" and x.dim() < 5 else None


def _contiguous(func: Any, result: Any, x: Any, *args: Any, **kwargs: Any) -> Strides:
    return packed(x.shape, range(x.dim())[::-1])


def _roll(func: Any, result: Any, x: Any, shifts: Any, dims: Sequence[int] = ()) -> Strides:
    return _of_memory_format(func, result, x) if len(dims) == 1 else None


def _loss(func: Any, result: Any, x: Any, y: Any, reduction: int = 1, *_: Any, **kwargs: Any) -> Strides:
    return elementwise((x, y)) if reduction == 0 and x.dim() and y.dim() else None


STRIDES: dict[Any, Callable[..., Strides]] = {
    **dict.fromkeys((aten.floor_divide.default, aten.floor_divide.Scalar), _pointwise),
    **dict.fromkeys(
        (aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default), _like
    ),
    **dict.fromkeys(
        (aten.rand_like.default, aten.randn_like.default, aten.flip.default, aten.clone.default, aten._to_copy.default),
        _like,
    ),
    **dict.fromkeys((aten.sort.default, aten.sort.stable), _like),
    **dict.fromkeys((aten.channel_shuffle.default, aten.native_channel_shuffle.default), _of_memory_format),
    **dict.fromkeys((aten.native_group_norm.default, aten.native_batch_norm.default), _of_memory_format),
    **dict.fromkeys((aten._native_batch_norm_legit.default, aten._native_batch_norm_legit.no_stats), _of_memory_format),
    **dict.fromkeys((aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default), _loss),
    aten.roll.default: _roll,
    **dict.fromkeys(
        (aten.upsample_nearest2d.vec, aten.upsample_nearest2d.default, aten.upsample_bilinear2d.vec), _suggested
    ),
    **dict.fromkeys((aten.tril.default, aten.triu.default), _contiguous),
}
"""{op: (the op, its operands) -> eager's strides, None for torch's fake ones}; beside pointwise ops, which have one
rule.
"""
COPIES = {aten.masked_fill.Scalar, aten.masked_fill.Tensor}


def _rule(func: Any, args: Sequence[Any], shape: Sequence[Any]) -> Callable[..., Strides] | None:
    """What gives the strides of a call whose sizes are all known, where torch's fake may be wrong about them."""
    rule, tensors = STRIDES.get(func), [v for v in args if isinstance(v, Tensor)]
    if rule is None and torch.Tag.pointwise in func.tags and func not in COPIES and not func._schema.is_mutable:
        rule = _pointwise if 1 in shape or len(tensors) > 1 else None
    known = rule is not None and tensors and all(type(n) is int for v in tensors for n in (*v.shape, *v.stride()))
    return rule if known and isinstance(args[0], Tensor) and 0 not in shape else None


@cache
def _mode() -> type:
    from ..torch_private import FakeTensor, FakeTensorMode

    class EagerStrides(FakeTensorMode):
        supports_higher_order_operators = True

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            own = isinstance(func, private.HigherOrderOperator) and func not in private.registered_hop_fake_fns
            if own:  # torch finds the rule that such an op has for fake tensors by the very class of a mode
                rule: Any = func.python_key_table[FakeTensorMode]
                return rule(self, *args, **(kwargs or {}))
            return super().__torch_dispatch__(func, types, args, kwargs)

        def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result: Any = super().dispatch(func, types, args, kwargs)
            several = isinstance(result, (tuple, list)) and func in STRIDES
            first = result[0] if several else result
            if not isinstance(first, FakeTensor) or first.layout is not torch.strided:
                return result
            if isinstance(func, private.HigherOrderOperator):
                return result
            rule = _rule(func, args, first.shape)
            strides = rule(func, first, *args, **(kwargs or {})) if rule is not None else None
            if strides is None:
                return result
            again = lambda v: self.relaid(v, strides) if isinstance(v, FakeTensor) and v.shape == first.shape else v  # noqa: E731
            if not several:
                return again(result)
            values = [again(value) for value in result]
            return type(result)(*values) if hasattr(result, "_fields") else type(result)(values)

        def relaid(self, value: Any, strides: Sequence[int]) -> Any:
            if tuple(value.stride()) == tuple(strides):
                return value
            with self:
                return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)

    return EagerStrides


def new_fake_mode(**options: Any) -> Any:
    """A `FakeTensorMode` in which results have eager's strides."""
    return _mode()(**options)
