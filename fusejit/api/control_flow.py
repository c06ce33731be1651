"""Control flow by hand: `select`, `cond` and `while_loop`, as functions that work eagerly, inside a jitted function,
and under torch.func.

>>> select(torch.tensor([True, False]), torch.tensor([2, 3]), 5)
tensor([2, 5])
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..capture import tracer
from ..capture.source_lines import shorten, user_frame
from ..frontend.convert import Site
from ..frontend.converted_call import INSTEAD, callee
from ..frontend.operators import as_predicate, choose, unknown, while_

Tensor = torch.Tensor
NUMBERS = (bool, int, float, complex)


def site(kind: str) -> Site:
    return Site(kind, shorten(tracer.entry_of(user_frame(sys._getframe(2)))))


def select(cond: Tensor, a: Any, b: Any) -> Tensor:
    """Take `a` where `cond` holds and `b` where it does not, element by element; both have been computed.

    Args:
        cond: bool tensor of any shape. a, b: tensors, or Python numbers; all three are broadcast against each other.

    Returns:
        A tensor of the broadcast shape, of the dtype that torch gives `a` and `b` together; of two numbers, too, it is
            a tensor.

    Raises:
        TypeError: `cond` is no bool tensor, or `a` or `b` is neither a tensor nor a number.
    """
    if not isinstance(cond, Tensor) or cond.dtype is not torch.bool:
        shown = f"a tensor of {cond.dtype}" if isinstance(cond, Tensor) else repr(cond)
        raise TypeError(f"select: `cond` is {shown}: pass a bool tensor, for example `x > 0`")
    for name, value in (("a", a), ("b", b)):
        if not isinstance(value, (Tensor, *NUMBERS)):
            raise TypeError(f"select: `{name}` is a {type(value).__name__}: pass a tensor or a number")
    return torch.where(cond, a, b)


def cond(pred: Any, true_fn: Callable, false_fn: Callable, operands: Sequence[Any] = ()) -> Any:
    """Call one of two functions; a branch in a captured graph, of which only the side that is taken runs (see
    torch.cond).

    Args:
        pred: a bool, or a tensor of one element. true_fn, false_fn: take the operands and return alike results.

    Returns:
        What the function of the taken side returns. Under torch.vmap both are computed and one is selected.

    Raises:
        Unsupported: while capturing: the two sides return tensors of different dtype or shape; says which.
    """
    then, other = callee(true_fn), callee(false_fn)
    if not unknown(pred):
        return then(*operands) if pred else other(*operands)
    here = site("cond")
    return choose(
        as_predicate(pred, here), lambda: then(*operands), lambda: other(*operands), here, "it is written as a branch"
    )


def while_loop(cond_fn: Callable, body_fn: Callable, carried_inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Call `body_fn(*carried)` while `cond_fn(*carried)` holds, and return the carried values (see torch.while_loop).

    Args:
        cond_fn: returns a bool or a tensor of one element. body_fn: returns as many values as it takes, of the same
            dtypes and shapes.
        carried_inputs: what goes in first.

    Raises:
        Unsupported: while capturing, or under torch.func: a carried value changes its dtype or shape.

    Under torch.vmap each row goes round until its own test fails; gradients of any order flow through the rounds that
    it took.
    """
    test_fn, step = callee(cond_fn), callee(body_fn)
    carried = tuple(carried_inputs)

    def test() -> Any:
        return test_fn(*carried)

    def body() -> None:
        nonlocal carried
        found = step(*carried)
        carried = tuple(found) if isinstance(found, (tuple, list)) else (found,)

    here = site("while_loop")
    while_(test, body, Site(here.kind, here.line, ("carried",), frozenset({"carried"})))
    return carried


def loop_of_torch(
    cond_fn: Callable, body_fn: Callable, carried_inputs: Sequence[Any], additional_inputs: Sequence[Any]
) -> Any:
    """`torch.ops.higher_order.while_loop`, as Dynamo writes it: what the functions read besides is handed to them."""
    given = tuple(additional_inputs)
    return while_loop(
        lambda *carried: cond_fn(*carried, *given), lambda *carried: body_fn(*carried, *given), carried_inputs
    )


INSTEAD |= {torch.cond: cond, torch.while_loop: while_loop}
tracer.HIGHER |= {torch.ops.higher_order.cond: cond, torch.ops.higher_order.while_loop: loop_of_torch}
