"""Sizes: canonical polynomials, so that `==` proves equality; "cannot tell" is None."""

from __future__ import annotations

import pytest

from fusejit.codegen.ir.size import Size, atom, divide, evaluate, product, symbol

S, T = symbol("s"), symbol("t")


def test_equal_polynomials_are_the_same():
    assert (S + 1) * (S - 1) == S * S - 1
    assert S * T == T * S and S - S == 0 and 3 - S + S == 3
    assert isinstance(S * 0, int) and not isinstance(S, int) and isinstance(S, Size)


@pytest.mark.parametrize(
    ("a", "b", "result"),
    [
        (12, 4, 3),
        (13, 4, None),
        (S * 6, 4, None),
        (S * 768 + 768, 768, S + 1),
        (S * S * 6, S * 2, S * 3),
        (S, T, None),
        (S + 1, S + 1, 1),
        (5, 0, None),
    ],
)
def test_divide(a, b, result):
    assert divide(a, b) == result


def test_every_law_holds_for_numbers():
    for s in range(4):
        for t in range(4):
            values = {"s": s, "t": t}
            assert evaluate((S + T * 2) * (S - 3), values) == (s + t * 2) * (s - 3)
            assert evaluate(product((S, T, 5)), values) == s * t * 5


def test_what_is_no_polynomial_is_an_opaque_atom():
    assert atom("floordiv", 7, 2) == 3 and atom("max", 3, 5) == 5
    assert atom("floordiv", S, 2) == atom("floordiv", S, 2) != atom("floordiv", T, 2)
    assert str(S * 2 + 1) == "1 + 2*s"
