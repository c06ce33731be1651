"""Lookalike: while a body is captured with symbolic sizes, its Python sees them as the ints that they are in eager.

In: nothing. Out: a context in which `isinstance(x.shape[0], int)` holds in the user's code, and a size that is printed or looked up in a
dict is its value, which fixes it.

    >>> with lookalike():
    ...     f(x)          # whose `if isinstance(n, int)` takes the branch that it takes in eager

torch's own code tells symbolic integers from ints, so it sees them as ever.
"""

from __future__ import annotations

import builtins
import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

from .lines import kind

PRINTED = ("__str__", "__repr__", "__format__", "__hash__")


def asked_by_user(depth: int) -> bool:
    """Whether the frame that many calls up is the user's code, or a library's."""
    return kind(sys._getframe(depth + 1).f_code.co_filename) != "torch"


@contextlib.contextmanager
def lookalike() -> Iterator[None]:
    """See the module. Whatever else runs meanwhile sees no difference, but for the time that a Python function takes."""
    plain = builtins.isinstance
    kept = {name: torch.SymInt.__dict__.get(name) for name in PRINTED}

    def isinstance_of_sizes(value: Any, kinds: Any) -> bool:
        if plain(value, kinds):
            return True
        return type(value) is torch.SymInt and asked_by_user(1) and issubclass(int, kinds)

    def answer(name: str) -> Any:
        own, number = getattr(torch.SymInt, name), getattr(int, name)

        def method(self: Any, *args: Any) -> Any:
            return number(int(self), *args) if asked_by_user(1) else own(self, *args)

        return method

    made = {name: answer(name) for name in PRINTED}
    builtins.isinstance = isinstance_of_sizes
    for name, method in made.items():
        setattr(torch.SymInt, name, method)
    try:
        yield
    finally:
        builtins.isinstance = plain
        for name, before in kept.items():
            if before is None:
                delattr(torch.SymInt, name)
            else:
                setattr(torch.SymInt, name, before)
