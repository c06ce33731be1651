"""Functions with an `assert` on a tensor: in the files of tests, pytest replaces the statement by its own."""

from __future__ import annotations

import fusejit


def positive(x):
    fusejit.print("before", x.sum())
    assert (x > 0).all(), f"min {x.min():.2f} of {list(x.shape)}, {x.detach().sum()!r} {{}}"
    fusejit.print("behind")
    return (x * 2).exp()


def in_arms(x):
    if x.sum() > 0:
        assert x.max() < 5, "too large"
        y = x * 2
    else:
        assert (x.min() > -5) and x.dim() == 2
        y = x.exp()
    return y


def in_parts(x):
    if x.sum() > 0:
        y = x @ x
        assert y.max() < 50, ("too large", 50)
    else:
        y = x - 1
    while y.sum() < 100:
        y = y.abs() * 3 + 1
        assert (y < 1000).all(), "diverges"
    return y


def read(x):
    assert (x > 0).all(), "{:d} is not positive".format(int(x[0]))  # noqa: UP032
    return x * 2


def asserted(x):
    assert (x > 0).all(), "not positive"
    return x * 2
