"""SymInt as int: while a body is captured with symbols, its Python sees them as the ints and floats that they are in
eager.

In: nothing. Out: a context in which `isinstance(x.shape[0], int)` holds in the user's code, and a symbol that is
printed or looked up in a dict is its value, which fixes it.

    >>> with lookalike():
    ...     f(x)          # whose `if isinstance(n, int)` takes the branch that it takes in eager

`isinstance` asks an object for its `__class__` where its type alone does not answer; `match` does, too. Only torch's
two classes of symbols answer otherwise for that time, and only the user's code: torch tells symbols from numbers, so it
sees them as ever. `type(n)` cannot be answered that way: see `refuse_type`.
"""

from __future__ import annotations

import contextlib
import dis
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ...errors import Unsupported
from ..source_lines import kind

PRINTED = ("__str__", "__repr__", "__format__", "__hash__")
NUMBERS: dict[type, type] = {torch.SymInt: int, torch.SymFloat: float}


def asked_by_user(depth: int) -> bool:
    """Whether the frame that many calls up is the user's code, or a library's."""
    return kind(sys._getframe(depth + 1).f_code.co_filename) != "torch"


def answers(symbol: type, number: type) -> dict[str, Any]:
    """The attributes of a class of symbols that answer as the numbers do, where it is not torch that asks."""

    def answer(name: str) -> Any:
        own, plain = getattr(symbol, name), getattr(number, name)

        def method(self: Any, *args: Any) -> Any:
            return plain(number(self), *args) if asked_by_user(1) else own(self, *args)

        return method

    def attribute(self: Any, name: str) -> Any:
        return number if name == "__class__" and asked_by_user(1) else object.__getattribute__(self, name)

    return {name: answer(name) for name in PRINTED} | {"__getattribute__": attribute}


@contextlib.contextmanager
def lookalike() -> Iterator[None]:
    """See the module."""
    kept = [(symbol, name, symbol.__dict__.get(name)) for symbol in NUMBERS for name in (*PRINTED, "__getattribute__")]
    made = {symbol: answers(symbol, number) for symbol, number in NUMBERS.items()}
    for symbol, attributes in made.items():
        for name, value in attributes.items():
            setattr(symbol, name, value)
    try:
        yield
    finally:
        for symbol, name, before in kept:
            if before is None:
                delattr(symbol, name)
            else:
                setattr(symbol, name, before)


def refuse_type(scalars: Any, codes: Iterable[types.CodeType]) -> None:
    """Refuse arguments that are symbols where one of the functions that ran calls Python's `type`, to which a symbol is
    no number.

    Raises:
        Unsupported: the function has to be compiled for the numbers themselves.
    """
    if not scalars:
        return
    named = [code for code in codes if "type" in code.co_names and kind(code.co_filename) != "torch"]
    for each in (each for code in named for each in dis.get_instructions(code)):
        if each.opname in ("LOAD_GLOBAL", "LOAD_NAME") and each.argval == "type":
            raise Unsupported(
                "dynamic numbers", "the function calls type(...), to which a number that varies is no int and no float"
            )
