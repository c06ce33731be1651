"""Sizes: integer polynomials over size symbols, so that `==` is provable equality.

In: integers and symbols. Out: `Size` values, or plain `int`s wherever no symbol is left.

    >>> s = symbol("s0")
    >>> str(divide((s + 1) * 768, 768)), divide(s * 6, 4)
    ('1 + s0', None)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

Monomial: TypeAlias = tuple[str, ...]
AnySize: TypeAlias = Any  # int | Size: what holds no symbol stays an int, and ints are most of it


@dataclass(frozen=True, slots=True)
class Size:
    """A polynomial: sorted (monomial, coefficient) pairs; a monomial is a sorted tuple of symbols or opaque atoms."""

    terms: tuple[tuple[Monomial, int], ...]

    def __add__(self, other: AnySize) -> AnySize:
        total = dict(self.terms)
        for monomial, coefficient in _terms(other):
            total[monomial] = total.get(monomial, 0) + coefficient
        return _make(total)

    def __mul__(self, other: AnySize) -> AnySize:
        total: dict[Monomial, int] = {}
        for left, a in self.terms:
            for right, b in _terms(other):
                monomial = tuple(sorted(left + right))
                total[monomial] = total.get(monomial, 0) + a * b
        return _make(total)

    def __neg__(self) -> AnySize:
        return self * -1

    def __sub__(self, other: AnySize) -> AnySize:
        return self + other * -1

    def __rsub__(self, other: AnySize) -> AnySize:
        return self * -1 + other

    __radd__ = __add__
    __rmul__ = __mul__

    def __str__(self) -> str:
        return " + ".join("*".join([*([str(c)] if c != 1 or not m else []), *m]) for m, c in self.terms)


def symbol(name: str) -> Size:
    """Return the size symbol `name`."""
    return Size((((name,), 1),))


def atom(function: str, *args: AnySize) -> AnySize:
    """Return `function(args)` as a size: an integer where all arguments are, an opaque atom computed on the host otherwise."""
    if all(isinstance(a, int) for a in args):
        operation: Any = {"floordiv": int.__floordiv__, "mod": int.__mod__, "max": max, "min": min}[function]
        return operation(*args)
    return symbol(f"{function}({', '.join(map(str, args))})")


def divide(a: AnySize, b: AnySize) -> AnySize | None:
    """Return a / b where it is provably a whole polynomial, else None ("cannot tell")."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    divisor = _terms(b)
    if len(divisor) != 1:
        return 1 if a == b else None
    ((monomial, coefficient),) = divisor
    total: dict[Monomial, int] = {}
    for term, c in _terms(a):
        rest = list(term)
        for name in monomial:
            if name not in rest:
                return None
            rest.remove(name)
        if not coefficient or c % coefficient:
            return None
        total[tuple(rest)] = c // coefficient
    return _make(total)


def evaluate(size: AnySize, values: dict[str, int]) -> int:
    """Return the number that `size` is when each symbol has its value."""
    total = 0
    for monomial, coefficient in _terms(size):
        for name in monomial:
            coefficient *= values[name]
        total += coefficient
    return total


def product(sizes: Iterable[AnySize]) -> AnySize:
    """Return the product of an iterable of sizes (1 when empty)."""
    result: AnySize = 1
    for size in sizes:
        result = result * size
    return result


def _terms(size: AnySize) -> tuple[tuple[Monomial, int], ...]:
    if isinstance(size, Size):
        return size.terms
    return (((), size),) if size else ()


def _make(terms: dict[Monomial, int]) -> AnySize:
    kept = tuple(sorted((m, c) for m, c in terms.items() if c))
    if not kept:
        return 0
    if len(kept) == 1 and not kept[0][0]:
        return kept[0][1]
    return Size(kept)
