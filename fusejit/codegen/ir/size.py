"""Sizes: integer polynomials over size symbols, so that `==` is provable equality.

In: integers and symbols. Out: `Size` values, or plain `int`s wherever no symbol is left.

    >>> s = symbol("s0")
    >>> str(divide((s + 1) * 768, 768)), divide(s * 6, 4)
    ('1 + s0', None)
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from ...errors import Unsupported

Monomial: TypeAlias = tuple[str, ...]
AnySize: TypeAlias = Any  # int | Size: what holds no symbol stays an int, and ints are most of it


STATE = threading.local()
LARGEST = 1 << 40
"""No size is larger; what reads sizes from a call checks it."""
UNKNOWN = (-(LARGEST**8), LARGEST**8)
"""The bounds of what may be anything."""


class Scope:
    """What one compilation knows of its symbols, and what it assumed of them.

    Attributes:
        hints: {name: its value in the call that is compiled for}. atoms: {name: Python text of a size that is no
            polynomial}.
        guards: what was assumed, as Python text over the names; the result holds for all sizes of which these are true.
        floats: names whose values are floats, which only ever stand for numbers in expressions.
        steps: both as statements, in the order in which they were made: an assumption may be what lets an atom be
            computed.
    """

    def __init__(self, hints: Mapping[str, Any]) -> None:
        self.hints = dict(hints)
        self.atoms: dict[str, str] = {}
        self.guards: dict[str, None] = {}
        self.steps: list[str] = []
        self.programs: dict[Any, Any] = {}  # those that were compiled in this scope, for others of it to call
        self.floats = {name for name, value in hints.items() if isinstance(value, float)}
        self.bounds = {name: UNKNOWN if name in self.floats else (2, LARGEST) for name in hints}

    def __enter__(self) -> Scope:
        self.outside, STATE.scope = getattr(STATE, "scope", None), self
        return self

    def __exit__(self, *error: object) -> None:
        STATE.scope = self.outside

    def atom(self, text: str, value: int, least: int, most: int) -> Size:
        """Name a size that the host computes; it is in least..most for all sizes."""
        name = next((known for known, other in self.atoms.items() if other == text), None)
        if name is None:
            name = f"q{len(self.atoms)}"
            self.atoms[name], self.hints[name], self.bounds[name] = text, value, (least, most)
            self.steps.append(f"{name} = {text}")
        return symbol(name)

    def assume(self, text: str, value: bool) -> bool:
        guard = text if value else f"not ({text})"
        if guard not in self.guards:
            self.guards[guard] = None
            self.steps.append(f"if not ({guard}): return False")
        return value


def scope() -> Scope:
    """The scope that is open: symbols have hints only inside one."""
    found = getattr(STATE, "scope", None)
    if found is None:
        raise TypeError("the value of a size was asked for outside of a compilation")
    return found


def has_hints() -> bool:
    return getattr(STATE, "scope", None) is not None


@dataclass(frozen=True, slots=True)
class Size:
    """A polynomial: sorted (monomial, coefficient) pairs; a monomial is a sorted tuple of symbols or opaque atoms.

    `==` is equality for all values of the symbols. `<` and the like, and the truth of a size, are proved from the
    symbols' bounds where that can be done; otherwise they are what they are in the call that is compiled for, and the
    scope notes that as an assumption.
    """

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

    def __pow__(self, power: int) -> AnySize:
        return product([self] * power)

    def __floordiv__(self, other: AnySize) -> AnySize:
        return atom("floordiv", self, other)

    def __rfloordiv__(self, other: AnySize) -> AnySize:
        return atom("floordiv", other, self)

    def __mod__(self, other: AnySize) -> AnySize:
        return atom("mod", self, other)

    def __rmod__(self, other: AnySize) -> AnySize:
        return atom("mod", other, self)

    def __lt__(self, other: AnySize) -> bool:
        return _less(self, other)

    def __gt__(self, other: AnySize) -> bool:
        return _less(other, self)

    def __le__(self, other: AnySize) -> bool:
        return not _less(other, self)

    def __ge__(self, other: AnySize) -> bool:
        return not _less(self, other)

    def __abs__(self) -> AnySize:
        return -self if self < 0 else self

    def __bool__(self) -> bool:
        low, high = _bounds(self)
        return True if low > 0 or high < 0 else scope().assume(f"{self} != 0", hint(self) != 0)

    def __index__(self) -> int:
        """The number that the size is in the call that is compiled for, which is assumed from now on."""
        value = hint(self)
        scope().assume(f"{self} == {value}", True)
        return value

    __int__ = __index__

    def __str__(self) -> str:
        return " + ".join("*".join([*([str(c)] if c != 1 or not m else []), *m]) for m, c in self.terms)

    __repr__ = __str__  # as a Python expression: a tuple of sizes is one, too

    def __format__(self, spec: str) -> str:
        """In a text, as one operand."""
        text = str(self)
        return text if text.isidentifier() else f"({text})"


def symbol(name: str) -> Size:
    """Return the size symbol `name`."""
    return Size((((name,), 1),))


def scope_names() -> tuple[str, ...]:
    """The names that sizes may have in the open scope; none without one."""
    return tuple(scope().hints) if has_hints() else ()


def symbols(size: AnySize) -> set[str]:
    """Return the names in a size."""
    return {name for monomial, _ in _terms(size) for name in monomial}


def hint(size: AnySize) -> int:
    """Return the number that a size is in the call that is compiled for; a choice by it must be right for every
    other.
    """
    return evaluate(size, scope().hints) if isinstance(size, Size) else size


def most(size: AnySize) -> int:
    """Return what a size is at most, for all values of its symbols."""
    return _bounds(size)[1] if isinstance(size, Size) else size


def largest(sizes: Iterable[AnySize]) -> AnySize:
    """Return the maximum, by `hint`."""
    return max(sizes, key=hint)


def _bounds(size: AnySize) -> tuple[int, int]:
    known = scope().bounds
    low = high = 0
    for monomial, coefficient in _terms(size):
        ends = [known[name] for name in monomial]
        if any(end[0] < 0 for end in ends):
            return UNKNOWN
        least, most = product(e[0] for e in ends) * coefficient, product(e[1] for e in ends) * coefficient
        low, high = low + min(least, most), high + max(least, most)
    return low, high


def _less(a: AnySize, b: AnySize) -> bool:
    gap = b - a
    if isinstance(gap, int):
        return gap > 0
    low, high = _bounds(gap)
    if low > 0 or high <= 0:
        return low > 0
    return scope().assume(f"{a} < {b}", hint(gap) > 0)


def atom(function: str, *args: AnySize) -> AnySize:
    """Return `function(args)` as a size: a polynomial where that can be proved, an opaque atom computed on the host
    otherwise.
    """
    if all(isinstance(a, int) for a in args):
        operation: Any = {"floordiv": int.__floordiv__, "mod": int.__mod__, "max": max, "min": min}[function]
        return operation(*args)
    if function in ("max", "min"):
        for one, two in (args, args[::-1]):
            low, high = _bounds(one - two)
            if low >= 0 or high <= 0:
                return one if (low >= 0) == (function == "max") else two
        values = [hint(a) for a in args]
        ends = [_bounds(a) for a in args]
        pick = max if function == "max" else min
        least, most = (pick(end[side] for end in ends) for side in (0, 1))
        return scope().atom(f"{function}({args[0]}, {args[1]})", pick(values), least, most)
    if getattr(STATE, "scope", None) is None:
        return symbol(f"{function}({', '.join(map(str, args))})")
    return _divided(function, *args)


def number(text: str, value: float) -> Size:
    """Name a float that the host computes from sizes."""
    made = scope().atom(text, value, *UNKNOWN)  # type: ignore[arg-type]
    scope().floats |= symbols(made)
    return made


def _divided(function: str, a: AnySize, b: AnySize) -> AnySize:
    """Return a // b or a % b: what b divides for sure is taken out, the rest is an atom."""
    exact = divide(a, b)
    if exact is not None:
        return exact if function == "floordiv" else 0
    if not _bounds(b)[0] > 0:
        scope().assume(f"{b} != 0", hint(b) != 0)
    whole: AnySize = 0
    if isinstance(b, int) and b > 0:
        whole = _make({m: c // b for m, c in _terms(a) if c % b == 0})
        a = _make({m: c for m, c in _terms(a) if c % b})
        if isinstance(a, int):
            return whole + a // b if function == "floordiv" else a % b
    if function == "floordiv":
        (low, high), (least, largest) = _bounds(a), _bounds(b)
        ends = (low // largest, high // least) if low >= 0 and least > 0 else UNKNOWN
        return whole + scope().atom(f"{a:} // {b:}", hint(a) // hint(b), *ends)
    ends = (0, _bounds(b)[1] - 1) if _bounds(b)[0] > 0 else UNKNOWN
    return scope().atom(f"{a:} % {b:}", hint(a) % hint(b), *ends)


def divide(a: AnySize, b: AnySize) -> AnySize | None:
    """Return a / b where it is provably a whole polynomial, else None ("cannot tell")."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    divisor, rest, total = _terms(b), dict(_terms(a)), dict[Monomial, int]()
    if not divisor:
        return None
    monomial, coefficient = max(divisor, key=_rank)
    while rest:  # long division: the leading term of what is left goes each time
        lead, c = max(rest.items(), key=_rank)
        left = list(lead)
        for name in monomial:
            if name not in left:
                return None
            left.remove(name)
        if c % coefficient:
            return None
        step = (tuple(left), c // coefficient)
        total[step[0]] = step[1]
        for m, k in divisor:
            place = tuple(sorted((*m, *step[0])))
            rest[place] = rest.get(place, 0) - k * step[1]
            if not rest[place]:
                del rest[place]
    return _make(total)


def _rank(term: tuple[Monomial, int]) -> tuple[int, Monomial]:
    return len(term[0]), term[0]


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


INFIX = {
    "Add": "+",
    "Mul": "*",
    "Pow": "**",
    "FloorDiv": "//",
    "CleanDiv": "//",
    "Mod": "%",
    "PythonMod": "%",
    "Equality": "==",
    "Unequality": "!=",
    "StrictGreaterThan": ">",
    "GreaterThan": ">=",
    "StrictLessThan": "<",
    "LessThan": "<=",
    "And": "and",
    "Or": "or",
}
CALLED = {"Max": "max", "Min": "min"}


def spell(expression: Any, names: Mapping[str, str]) -> str:
    """Write a size or a condition of torch's tracing as Python; `names` are ours of its symbols.

    Raises:
        Unsupported: it is no expression of integers.
    """
    kind = type(expression).__name__
    if expression.is_Symbol and str(expression) in names:
        return names[str(expression)]
    if getattr(expression, "is_Integer", False):
        return str(int(expression))
    if kind == "Float":
        return repr(float(expression))
    parts = [spell(part, names) for part in expression.args]
    if kind in INFIX and (kind != "Pow" or parts[1].isdigit()):
        return "(" + f" {INFIX[kind]} ".join(parts) + ")"
    if kind in CALLED:
        while len(parts) > 1:
            parts[-2:] = [f"{CALLED[kind]}({parts[-2]}, {parts[-1]})"]
        return parts[0]
    if kind == "Not":
        return f"(not {parts[0]})"
    if kind in ("BooleanTrue", "BooleanFalse"):
        return kind.removeprefix("Boolean")
    raise Unsupported("dynamic sizes", f"a size or a condition that is no expression of integers: {expression}")


def read(text: str, names: Iterable[str]) -> AnySize:
    """Return the size that `spell` wrote."""
    known: dict[str, Any] = {name: symbol(name) for name in names}
    known |= {"max": lambda a, b: atom("max", a, b), "min": lambda a, b: atom("min", a, b), "__builtins__": {}}
    return eval(text, known)


def _make(terms: dict[Monomial, int]) -> AnySize:
    kept = tuple(sorted((m, c) for m, c in terms.items() if c))
    if not kept:
        return 0
    if len(kept) == 1 and not kept[0][0]:
        return kept[0][1]
    return Size(kept)
