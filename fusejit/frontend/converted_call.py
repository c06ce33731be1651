"""Converted calls: the functions that a rewritten function calls are rewritten, too.

In: whatever stands before the parentheses of a call. Out: the same, or its rewritten twin; whatever else it is (a
class, a builtin, a function of a library) stays as it is.

    callee(f)(x)      # f: function, bound method, partial, object with __call__
    rewritten(f)      # the function itself, as `jit` asks for it

Rewritten are functions of the user's files. Those of torch, of Python and of installed packages stay as they are,
except for the function or the module's `forward` that was given to `jit`. A wrapper that a decorator made is a function
like any other; one that is not the user's (`functools.lru_cache`, `torch.no_grad()`) runs as it is, with what it calls.
Each code object is rewritten once.
"""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Callable
from typing import Any

import torch

from ..capture import tracer
from ..capture.source_lines import kind
from ..errors import Unsupported, forget_refusal
from . import operators
from .convert import AND, ASSERT, CALL, COMPARE, IF, IFEXP, NOT, OR, UPDATE, WHILE, rewrite
from .lower_jumps import FREE, HALT, NotRewritten
from .source import NoSource, build, read

CODES: dict[tuple[types.CodeType, str], types.CodeType | None] = {}
"""Rewritten code by the original and its file; None where it stays as it is."""
REASONS: dict[tuple[types.CodeType, str], str] = {}
"""Why a function stays as it is, where the user may want to know."""
MADE: set[int] = set()
KEEP: list[types.CodeType] = []
LIMIT = 4096


def rewritten(function: Any, asked: bool = True) -> Any:
    """Return the rewritten twin of a callable, or the callable itself.

    Args:
        function: anything callable; asked: rewrite it although it belongs to a library.

    Raises:
        Unsupported: an async function or a generator was asked for.
    """
    if type(function) is types.FunctionType:
        if transforms(function):
            return transform(function, asked)
        if asked:
            refuse(function)
        code = code_for(function, asked)
        return function if code is None else build(function, code)
    if type(function) is types.MethodType and type(function.__func__) is types.FunctionType:
        made = rewritten(function.__func__, asked)
        return function if made is function.__func__ else types.MethodType(made, function.__self__)
    if type(function) is functools.partial:
        return functools.partial(rewritten(function.func, asked), *function.args, **function.keywords)
    if isinstance(function, (torch.nn.Module, type, types.BuiltinFunctionType)):
        return function
    call = type(function).__call__ if callable(function) else None
    if type(call) is types.FunctionType:
        made = rewritten(call, asked)
        return function if made is call else types.MethodType(made, function)
    return function


def callee(function: Any) -> Any:
    """What a call in a rewritten function calls."""
    kind_of = type(function)
    if kind_of is types.FunctionType:
        function = INSTEAD.get(function, function)
        if transforms(function):
            return transform(function, False)
        code = code_for(function, False)
        return function if code is None else build(function, code)
    if function is type:
        return type_of
    if kind_of is types.BuiltinFunctionType or kind_of is type or isinstance(function, torch.nn.Module):
        return function
    return rewritten(function, False)


def type_of(*given: Any, **options: Any) -> Any:
    """`type(...)`: of what stands for a tensor in a trace, the tensor's."""
    made = type(*given, **options)
    return (
        (torch.nn.Parameter if isinstance(given[0], torch.nn.Parameter) else torch.Tensor)
        if made.__name__ == "FakeTensor"
        else made
    )


def refuse(function: types.FunctionType) -> None:
    from .source import refuse_kind

    refuse_kind(function)


def code_for(function: types.FunctionType, asked: bool) -> types.CodeType | None:
    code = function.__code__
    key = (code, code.co_filename)
    if key in CODES:
        return CODES[key]
    where = kind(code.co_filename)
    if where != "user" and not (asked and where == "library") or id(code) in MADE:
        return None
    try:
        made: types.CodeType | None = rewrite(read(function), RUNTIME)
    except (NoSource, NotRewritten) as error:
        made, REASONS[key] = None, str(error)
    except Unsupported as error:  # a generator or an async function that is called runs as it is
        forget_refusal(error)
        made = None
    if made is not None:
        remember(made)
    if len(CODES) > LIMIT:
        CODES.clear()
    CODES[key] = made
    return made


def remember(code: types.CodeType) -> None:
    """Note that a code object, and all functions inside it, are rewritten already."""
    MADE.add(id(code))
    KEEP.append(code)  # so that its id stays its own
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            remember(constant)


def reason_for(function: Any) -> str:
    """Why a callable could not be rewritten; "" if it was, or if there was no need."""
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    return REASONS.get((code, code.co_filename), "") if code is not None else ""


def transforms(function: types.FunctionType) -> bool:
    """Whether a function is what torch.func made of another one, `func`: `torch.vmap(f)`, `torch.func.grad(f)` and the
    like.
    """
    return function.__code__.co_filename.startswith(TRANSFORMS) and "func" in function.__code__.co_freevars


def transform(function: types.FunctionType, asked: bool) -> types.FunctionType:
    """The same transform of the rewritten function."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
    inner = cells["func"].cell_contents
    made = rewritten(inner, asked)
    if tracer.active():
        tracer.recorder().watch(inner)
    return function if made is inner else build(function, function.__code__, {"func": types.CellType(made)})


def of_callee(function: Callable) -> Callable:
    """A function of torch that calls its first argument, calling the rewritten one."""

    @functools.wraps(function)
    def call(inner: Callable, *args: Any, **kwargs: Any) -> Any:
        return function(callee(inner), *args, **kwargs)

    return call


TRANSFORMS = os.path.join(os.path.dirname(torch.__file__), "_functorch", "")
INSTEAD: dict[Callable, Callable] = {f: of_callee(f) for f in (torch.func.vjp, torch.func.jvp, torch.func.linearize)}
"""Functions of torch, by what a rewritten function calls in their place; those that cannot be traced are added by
api/control_flow.py.
"""
RUNTIME: dict[str, Callable] = {
    IF: operators.if_,
    IFEXP: operators.ifexp,
    AND: operators.and_,
    OR: operators.or_,
    NOT: operators.not_,
    COMPARE: operators.compare,
    ASSERT: operators.assert_,
    WHILE: operators.while_,
    UPDATE: operators.update,
    FREE: operators.free,
    HALT: operators.halt,
    CALL: callee,
}
