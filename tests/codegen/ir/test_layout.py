"""Layout laws, by enumeration against NumPy: every view of every layout gives the element that NumPy gives."""

from __future__ import annotations

import random

import numpy as np
import pytest

from fusejit.codegen.ir import layout as L
from fusejit.codegen.ir.layout import Computed, Layout, Mode, Reshape, apply, contiguous, refine, regroup, strided
from fusejit.codegen.ir.size import symbol


def offset(layout: Layout, rest: tuple[Computed, ...], coordinate: tuple[int, ...]) -> int:
    total = layout(*coordinate)
    for term in rest:
        number = term.coordinate(*coordinate) // term.divisor
        total += (number if term.extent is None else number % term.extent) * term.stride
    return total


def check(layout: Layout, view: L.View, expected: np.ndarray) -> tuple[Layout, bool]:
    new, rest = apply(layout, view)
    assert new.shape == expected.shape
    for coordinate in np.ndindex(*expected.shape):
        assert offset(new, rest, coordinate) == expected[coordinate], (str(layout), view, coordinate)
    return new, bool(rest)


def factors(n: int, rng: random.Random) -> tuple[int, ...]:
    found = []
    while n > 1:
        found.append(rng.choice([d for d in range(2, n + 1) if n % d == 0]))
        n //= found[-1]
    if rng.random() < 0.3:
        found.insert(rng.randrange(len(found) + 1), 1)
    return tuple(found)


def a_view(x: np.ndarray, rng: random.Random) -> tuple[L.View, np.ndarray] | None:
    """A random view of x, as ours and as NumPy's."""
    shape, rank = x.shape, x.ndim
    d = rng.randrange(rank) if rank else 0
    match rng.choice(("reshape", "permute", "flip", "slice", "select", "expand", "diagonal", "unfold")):
        case "reshape" if x.size:
            new = factors(x.size, rng)
            return Reshape(new), x.reshape(new)
        case "permute":
            order = rng.sample(range(rank), rank)
            return L.permute(shape, order), x.transpose(order)
        case "flip" if rank:
            return L.flip(shape, [d]), np.flip(x, d)
        case "slice" if rank:
            start, step = rng.randrange(max(1, shape[d])), rng.choice((1, 1, 2, 3))
            cut = x[(slice(None),) * d + (slice(start, None, step),)]
            return L.slice_(shape, d, start, step, cut.shape[d]), cut
        case "select" if rank and 0 not in shape:
            index = rng.randrange(shape[d])
            return L.select(shape, d, index), x.take(index, d)
        case "expand" if x.size <= 200:
            new = (2, *(3 if n == 1 else n for n in shape))
            return L.expand(shape, new), np.broadcast_to(x, new)
        case "diagonal" if rank > 1:
            (a, b), k = rng.sample(range(rank), 2), rng.choice((-1, 0, 1))
            return L.diagonal(shape, k, a, b), np.diagonal(x, k, a, b)
        case "unfold" if rank and shape[-1] > 1:
            return L.unfold(shape, rank - 1, 2, 1), np.lib.stride_tricks.sliding_window_view(x, 2, axis=rank - 1)
    return None


@pytest.mark.parametrize("seed", range(8))
def test_chains_of_views(seed):
    rng = random.Random(seed)
    done = computed = 0
    for _ in range(200):
        size = rng.choice((1, 6, 12, 24, 30, 36, 48))
        shape = factors(size, rng)
        layout, x = contiguous(shape), np.arange(size).reshape(shape)
        for _ in range(4):
            made = a_view(x, rng)
            if made is None:
                continue
            new, refused = check(layout, *made)
            done, computed = done + 1, computed + refused
            if refused:
                break
            layout, x = new, made[1]
    assert done > 300 and computed > 3


def test_refused_reshape_is_a_computed_coordinate():
    new, rest = apply(strided((6, 5), (10, 1)), Reshape((10, 3)))
    assert [(t.divisor, t.extent, t.stride) for t in rest] == [(1, 5, 1), (5, None, 10)]
    assert new.strides == (0, 0)


def test_a_slice_at_multiples_of_the_inner_digits_stays_strides():
    two_digits = apply(strided((4, 6), (100, 1)), Reshape((24,)))[0]
    assert two_digits.dims == ((Mode(4, 100), Mode(6, 1)),)
    assert apply(two_digits, L.slice_((24,), 0, 6, 1, 12)) == (Layout(((Mode(2, 100), Mode(6, 1)),), 100), ())
    assert apply(two_digits, L.slice_((24,), 0, 1, 1, 12))[1]


def test_zero_and_negative_strides():
    assert contiguous((2, 1, 3)).strides == (3, 0, 1)
    assert str(apply(contiguous((4,)), L.flip((4,), [0]))[0]) == "(4):(-1)+3"
    assert apply(contiguous((3, 0)), Reshape((0, 7)))[0].shape == (0, 7)


def test_regroup_and_refine():
    assert regroup([Mode(6, 5)], (2, 3)) == [(Mode(2, 15),), (Mode(3, 5),)]
    assert regroup([Mode(6, 10), Mode(5, 1)], (10, 3)) is None
    one, two = apply(contiguous((4, 6)), Reshape((24,)))[0], apply(strided((4, 6), (100, 1)), Reshape((24,)))[0]
    assert refine([one, two], 0) == (4, 6)
    assert refine([one], 0) == (24,)


def test_symbolic_sizes_split_where_they_divide():
    s = symbol("s0")
    new, rest = apply(contiguous((s, 768)), Reshape((s, 12, 64)))
    assert not rest and new.strides == (768, 64, 1)
    assert apply(contiguous((s, 768)), Reshape((s * 12, 64)))[0].strides == (64, 1)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 3, 1), (3, 2, 1, 0)], ids=str)
def test_axes_that_count_through_several_digits_need_no_computed_coordinate(order):
    """`as_strided` of a reshaped broadcast, as torch's group norm has it: the axes take the digits, in whatever order
    they stand.
    """
    layout = Layout(((Mode(4, 3), Mode(3, 1), Mode(10, 0)),))
    x = np.broadcast_to((np.arange(4)[:, None] * 3 + np.arange(3))[:, :, None], (4, 3, 10)).reshape(-1)
    shape, steps = (4, 3, 2, 5), (30, 10, 5, 1)
    axes = tuple((place, steps[d]) for place, d in enumerate(order))
    view = L.Affine(tuple(shape[d] for d in order), ((0, axes),))
    assert not check(layout, view, x.reshape(shape).transpose(order))[1]
    part = L.Affine((3, 2, 5), ((0, ((0, 10), (1, 5), (2, 1))),))  # a part of the digits only
    assert check(layout, part, x[:30].reshape(3, 2, 5))[1]
