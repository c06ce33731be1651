"""Layouts: maps from a logical coordinate to a linear offset, and the views that act on them.

In: shapes, strides and views. Out: layouts, and for what a view cannot express in strides, computed coordinates. A
dimension is a tuple of row-major digits `Mode(extent, stride)`; the algebra is CuTe's (shape, stride) algebra with two
levels only.

    >>> x = strided((6, 5), (10, 1))
    >>> str(reshape(x, (2, 3, 5))[0]), reshape(x, (10, 3))[1] != ()
    ('(2,3,5):(30,10,1)', True)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from .size import AnySize, divide, has_hints, hint, product


@dataclass(frozen=True, slots=True)
class Mode:
    """One digit of a dimension: `extent` values, `stride` elements apart."""

    extent: AnySize
    stride: AnySize


@dataclass(frozen=True)
class Layout:
    """Offset of a coordinate: `offset` plus the sum over all digits of digit value times stride. Total on its shape."""

    dims: tuple[tuple[Mode, ...], ...]
    offset: AnySize = 0

    @cached_property
    def shape(self) -> tuple[AnySize, ...]:
        return tuple(product(m.extent for m in dim) for dim in self.dims)

    @cached_property
    def strides(self) -> tuple[AnySize, ...] | None:
        """One stride per dimension, or None where a dimension has several digits."""
        return tuple(dim[0].stride for dim in self.dims) if all(len(dim) == 1 for dim in self.dims) else None

    @cached_property
    def _hash(self) -> int:
        return hash((self.dims, self.offset))

    def __hash__(self) -> int:
        return self._hash

    def __call__(self, *coordinate: int) -> AnySize:
        offset = self.offset
        for c, dim in zip(coordinate, self.dims, strict=True):
            for mode in reversed(dim):
                offset = offset + c % mode.extent * mode.stride
                c //= mode.extent
        return offset

    def __str__(self) -> str:
        def column(values: Iterable[tuple[AnySize, ...]]) -> str:
            return ",".join(str(v[0]) if len(v) == 1 else "(" + ",".join(map(str, v)) + ")" for v in values)

        extents = column(tuple(m.extent for m in d) for d in self.dims)
        strides = column(tuple(m.stride for m in d) for d in self.dims)
        return f"({extents}):({strides})" + (f"+{self.offset}" if self.offset != 0 else "")


def reach(layout: Layout) -> int:
    """Return a number beyond all offsets of a layout, counted either way, and beyond every sum of some of its terms; 0
    if sizes vary.
    """
    terms = [(n - 1) * abs(step) for n, step in zip(layout.shape, layout.strides or (), strict=False)]
    return sum(terms) + abs(layout.offset) + 1 if all(isinstance(t, int) for t in (*terms, layout.offset)) else 0


@dataclass(frozen=True, slots=True)
class Computed:
    """What a view leaves over: the term `(coordinate // divisor % extent) * stride`, `coordinate` a layout read as a
    number.

    `extent` is None for the outermost digit, which needs no remainder.
    """

    coordinate: Layout
    divisor: AnySize
    extent: AnySize | None
    stride: AnySize


@dataclass(frozen=True, slots=True)
class Affine:
    """A view whose old coordinates are affine in the new ones: `old[d] = base + sum(coefficient * new[axis])`.

    permute, expand, flip, slice, select, diagonal, unfold, unsqueeze and squeeze are all of this kind.
    """

    shape: tuple[AnySize, ...]
    old: tuple[tuple[AnySize, tuple[tuple[int, AnySize], ...]], ...]


@dataclass(frozen=True, slots=True)
class Reshape:
    """A view that regroups the row-major order of all elements into a new shape."""

    shape: tuple[AnySize, ...]


View = Affine | Reshape


def strided(shape: Sequence[AnySize], strides: Sequence[AnySize], offset: AnySize = 0) -> Layout:
    """Return the layout of a strided tensor; size-1 dimensions get stride 0."""
    return Layout(tuple((Mode(n, 0 if n == 1 else s),) for n, s in zip(shape, strides, strict=True)), offset)


def contiguous(shape: Sequence[AnySize]) -> Layout:
    """Return the row-major layout of `shape`."""
    strides: list[AnySize] = []
    step: AnySize = 1
    for n in reversed(shape):
        strides.append(step)
        step = step * n
    return strided(shape, strides[::-1])


def permute(shape: Sequence[AnySize], order: Sequence[int]) -> Affine:
    """Return the view whose axis i is the old axis order[i]."""
    place = {old: new for new, old in enumerate(order)}
    return Affine(tuple(shape[d] for d in order), tuple((0, ((place[d], 1),)) for d in range(len(shape))))


def expand(shape: Sequence[AnySize], new: Sequence[AnySize]) -> Affine:
    """Return the broadcast of `shape` to `new`, aligned at the last axis."""
    lead = len(new) - len(shape)
    return Affine(tuple(new), tuple((0, ()) if n == 1 else (0, ((lead + d, 1),)) for d, n in enumerate(shape)))


def flip(shape: Sequence[AnySize], dims: Iterable[int]) -> Affine:
    """Return the view that reverses `dims`."""
    turned = set(dims)
    return Affine(
        tuple(shape), tuple((n - 1, ((d, -1),)) if d in turned else (0, ((d, 1),)) for d, n in enumerate(shape))
    )


def slice_(shape: Sequence[AnySize], dim: int, start: AnySize, step: AnySize, length: AnySize) -> Affine:
    """Return elements start, start+step, ... (`length` of them) of `dim`."""
    new = tuple(length if d == dim else n for d, n in enumerate(shape))
    return Affine(new, tuple((start, ((d, step),)) if d == dim else (0, ((d, 1),)) for d in range(len(shape))))


def select(shape: Sequence[AnySize], dim: int, index: AnySize) -> Affine:
    """Return the view with `dim` fixed at `index` and dropped."""
    old = tuple((index, ()) if d == dim else (0, ((d - (d > dim), 1),)) for d in range(len(shape)))
    return Affine(tuple(n for d, n in enumerate(shape) if d != dim), old)


def diagonal(shape: Sequence[int], offset: int, dim1: int, dim2: int) -> Affine:
    """Return the diagonal of two dimensions, appended as the last axis."""
    length = max(0, min(shape[dim1], shape[dim2] - offset) if offset >= 0 else min(shape[dim1] + offset, shape[dim2]))
    kept = [d for d in range(len(shape)) if d not in (dim1, dim2)]
    place = {d: i for i, d in enumerate(kept)}
    base = {dim1: max(0, -offset), dim2: max(0, offset)}
    old = tuple((base[d], ((len(kept), 1),)) if d in base else (0, ((place[d], 1),)) for d in range(len(shape)))
    return Affine((*(shape[d] for d in kept), length), old)


def unfold(shape: Sequence[int], dim: int, size: int, step: int) -> Affine:
    """Return all windows of `size` along `dim`, `step` apart; the window is the last axis."""
    count = (shape[dim] - size) // step + 1
    new = (*(count if d == dim else n for d, n in enumerate(shape)), size)
    return Affine(
        new, tuple((0, ((d, step), (len(shape), 1))) if d == dim else (0, ((d, 1),)) for d in range(len(shape)))
    )


def apply(layout: Layout, view: View) -> tuple[Layout, tuple[Computed, ...]]:
    """Return the layout after `view`, plus the terms that no stride can express (empty in most cases)."""
    return reshape(layout, view.shape) if isinstance(view, Reshape) else affine(layout, view)


@lru_cache(maxsize=4096)
def affine(layout: Layout, view: Affine) -> tuple[Layout, tuple[Computed, ...]]:
    """Apply an affine view. A dimension of several digits is kept when renamed whole or cut at multiples of its inner
    digits.
    """
    strides: list[AnySize] = [0] * len(view.shape)
    whole: dict[int, tuple[Mode, ...]] = {}
    offset, rest = layout.offset, []
    for dim, (base, terms) in zip(layout.dims, view.old, strict=True):
        if len(dim) == 1:
            offset = offset + base * dim[0].stride
            for axis, coefficient in terms:
                strides[axis] = strides[axis] + coefficient * dim[0].stride
            continue
        digits = _cut(dim, base, terms, view)
        dealt = _dealt(dim, base, terms, view) if digits is None else {}
        if digits is not None and terms[0][0] not in whole and strides[terms[0][0]] == 0:
            whole[terms[0][0]], shift = digits
            offset = offset + shift
        elif dealt and not any(axis in whole or strides[axis] != 0 for axis in dealt):
            whole |= dealt
        else:
            rest += _computed(dim, _number(view.shape, base, terms))
    if any(
        strides[axis] != 0 for axis in whole
    ):  # another dimension runs along the same axis: digits cannot be added to a stride
        clash = {a: d for a, d in whole.items() if strides[a] != 0}
        for axis, clashing in clash.items():
            rest += _computed(clashing, _number(view.shape, 0, ((axis, 1),)))
            del whole[axis]
    dims = tuple(whole.get(d) or (Mode(n, 0 if n == 1 else strides[d]),) for d, n in enumerate(view.shape))
    return Layout(dims, offset), tuple(rest)


def _cut(dim: tuple[Mode, ...], base: AnySize, terms: tuple, view: Affine) -> tuple[tuple[Mode, ...], AnySize] | None:
    """Return the digits and the offset of `dim` sliced at multiples of its inner digits, or None."""
    if len(terms) != 1 or terms[0][1] != 1:
        return None
    inner = product(m.extent for m in dim[1:])
    start, length = divide(base, inner), divide(view.shape[terms[0][0]], inner)
    if start is None or length is None:
        return None
    return (Mode(length, dim[0].stride), *dim[1:]), start * dim[0].stride


def _dealt(dim: tuple[Mode, ...], base: AnySize, terms: tuple, view: Affine) -> dict[int, tuple[Mode, ...]]:
    """Return the digits of each axis where the axes together count through `dim` in some order, as in a reshape; {}
    where they do not.
    """
    if base != 0 or not all(isinstance(c, int) and c > 0 for _, c in terms):
        return {}
    axes = sorted((axis for axis, _ in terms if view.shape[axis] != 1), key=dict(terms).__getitem__, reverse=True)
    extents = [view.shape[axis] for axis in axes]
    if len(set(axes)) < len(axes) or contiguous(extents).strides != tuple(dict(terms)[axis] for axis in axes):
        return {}
    split = regroup(dim, extents) if product(extents) == product(m.extent for m in dim) else None
    return dict(zip(axes, split, strict=True)) if split else {}


def _number(shape: Sequence[AnySize], base: AnySize, terms: Iterable[tuple[int, AnySize]]) -> Layout:
    """Return the layout whose offset is the number base + sum(coefficient * axis)."""
    strides: list[AnySize] = [0] * len(shape)
    for axis, coefficient in terms:
        strides[axis] = strides[axis] + coefficient
    return strided(shape, strides, base)


def _computed(digits: Sequence[Mode], coordinate: Layout) -> list[Computed]:
    """Return each digit of the number `coordinate` as a computed term."""
    result: list[Computed] = []
    divisor: AnySize = 1
    for place in reversed(range(len(digits))):
        mode = digits[place]
        if mode.stride != 0 and mode.extent != 1:
            result.append(Computed(coordinate, divisor, mode.extent if place else None, mode.stride))
        divisor = divisor * mode.extent
    return result


@lru_cache(maxsize=16384)
def reshape(layout: Layout, shape: tuple[AnySize, ...]) -> tuple[Layout, tuple[Computed, ...]]:
    """Regroup the digits of `layout` into `shape`; a group whose factors do not nest becomes computed terms."""
    if layout.shape == shape:
        return layout, ()
    if product(shape) == 0:
        return strided(shape, [0] * len(shape), layout.offset), ()
    new: list[tuple[Mode, ...]] = []
    rest: list[Computed] = []
    for digits, axes in _groups(_merge([m for dim in layout.dims for m in dim]), shape):
        extents = [shape[a] for a in axes]
        split = regroup(digits, extents)
        if split is None:
            coordinate = contiguous(extents).strides
            assert coordinate is not None
            rest += _computed(digits, _number(shape, 0, zip(axes, coordinate, strict=True)))
            split = [(Mode(n, 0),) for n in extents]
        new += split
    return Layout(tuple(new), layout.offset), tuple(rest)


def _merge(digits: Iterable[Mode]) -> list[Mode]:
    """Drop digits of extent 1 and join neighbours that are one digit in memory."""
    result: list[Mode] = []
    for mode in digits:
        if mode.extent == 1:
            continue
        if result and result[-1].stride == mode.stride * mode.extent:
            mode = Mode(result.pop().extent * mode.extent, mode.stride)
        result.append(mode)
    return result


def _groups(digits: list[Mode], shape: Sequence[AnySize]) -> list[tuple[list[Mode], list[int]]]:
    """Cut digits and new axes into the smallest groups of equal element count, in order."""
    groups: list[tuple[list[Mode], list[int]]] = []
    d = a = 0
    while d < len(digits) or a < len(shape):
        left: list[Mode] = []
        right: list[int] = []
        count_left, count_right = 1, 1
        while not left or not right or count_left != count_right:
            grow_left = d < len(digits) and (not left or _smaller(count_left, count_right)) or a >= len(shape)
            if grow_left and d < len(digits):
                left.append(digits[d])
                count_left, d = count_left * digits[d].extent, d + 1
            elif a < len(shape):
                right.append(a)
                count_right, a = count_right * shape[a], a + 1
            else:
                break
            if count_left == count_right and d >= len(digits):
                right += range(a, len(shape))
                a = len(shape)
                break
        groups.append((left, right))
    return groups


def _smaller(a: AnySize, b: AnySize) -> bool:
    if has_hints():
        return hint(a) < hint(b)
    return a < b if isinstance(a, int) and isinstance(b, int) else divide(a, b) is None


def regroup(digits: Sequence[Mode], extents: Sequence[AnySize]) -> list[tuple[Mode, ...]] | None:
    """Deal row-major `digits` out to axes of `extents`, splitting a digit that divides exactly; None where factors do
    not nest.
    """
    stack = list(digits)
    result: list[tuple[Mode, ...]] = []
    for extent in reversed(extents):
        taken: list[Mode] = []
        while extent != 1:
            if not stack:
                return None
            mode = stack.pop()
            outer = divide(extent, mode.extent)
            inner = divide(mode.extent, extent)
            if outer is not None:
                taken.append(mode)
                extent = outer
            elif inner is not None:
                taken.append(Mode(extent, mode.stride))
                stack.append(Mode(inner, mode.stride * extent))
                extent = 1
            else:
                return None
        result.append(tuple(reversed(taken)) or (Mode(1, 0),))
    return result[::-1] if not stack else None


def _order(size: AnySize) -> int:
    """Return what sorts boundaries: the inner one is smaller in every call, since the outer one is a multiple of it."""
    return hint(size) if has_hints() else size if isinstance(size, int) else 0


def refine(layouts: Iterable[Layout], axis: int) -> tuple[AnySize, ...]:
    """Return extents that split `axis` so that as many layouts as nest have one digit per part (inner boundaries
    first).
    """
    boundaries: set[AnySize] = set()
    extent: AnySize = 1
    for layout in layouts:
        inner: AnySize = 1
        for mode in reversed(layout.dims[axis]):
            inner = inner * mode.extent
            boundaries.add(inner)
        extent = inner
    parts: list[AnySize] = []
    last: AnySize = 1
    inside = (b for b in boundaries if b not in (1, extent))
    for boundary in sorted(inside, key=lambda b: (_order(b), str(b))):
        part = divide(boundary, last)
        if part is not None and divide(extent, boundary) is not None:
            parts.append(part)
            last = boundary
    parts.append(divide(extent, last) or 1)
    return tuple(reversed(parts))
