"""Concretize: a cluster as it is in the call that is compiled for, all sizes numbers.

In: a cluster or a buffer with symbolic sizes. Out: the same with each size's hint in its place: what every choice of
tiles, orders and merges is made by. Such a choice may be bad for other sizes, and must be right for them. Without
symbols the input is the output.

    >>> print(hinted(cluster))          # s0 = 512
    parallel 512 | reduce 768
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from .cluster import Cluster, Store, analysis
from .expr import Const, Expr, Iota, Load, const, iota, load, rewrite
from .layout import Layout, Mode
from .size import Size, hint, most, scope, symbols


@analysis
def symbolic(cluster: Cluster) -> bool:
    """Whether a size occurs in a cluster."""
    if any(isinstance(n, Size) for n in cluster.axes):
        return True
    layouts = [leaf.layout for leaf in cluster.leaves] + [store.layout for store in cluster.stores]
    numbers = [isinstance(node.value, Size) for node in cluster.order if isinstance(node, Const)]
    terms = [isinstance(s, Size) for node in cluster.order if isinstance(node, Load) for _, s in node.index]
    return any(numbers) or any(terms) or any(_has_size(layout) for layout in layouts)


@analysis
def hinted(cluster: Cluster) -> Cluster:
    """Return the cluster with numbers for sizes.

    `varies` then says that a row may have another length or stand elsewhere in memory; how many rows there are may vary
    without it.
    """
    if not symbolic(cluster):
        return cluster
    roots = [root for store in cluster.stores for root in (store.value, *(e for e, _ in store.index))]
    new = dict(zip(roots, rewrite(roots, _numbers), strict=True))
    stores = [
        replace(
            s, layout=at(s.layout), value=new[s.value], index=tuple((new[e], hint(stride)) for e, stride in s.index)
        )
        for s in cluster.stores
    ]
    axes = [tuple(map(hint, side)) for side in (cluster.parallel, cluster.reduce)]
    layouts = [leaf.layout for leaf in cluster.leaves] + [store.layout for store in cluster.stores]
    terms = [s for node in cluster.order if isinstance(node, Load) for _, s in node.index] + [
        s for x in cluster.stores for _, s in x.index
    ]
    steps = [n for lay in layouts for n in (lay.offset, *(m.stride for dim in lay.dims for m in dim))]
    varies = any(isinstance(n, Size) for n in (*cluster.reduce, *steps, *terms))
    programs = hint(cluster.programs)
    return replace(cluster, parallel=axes[0], reduce=axes[1], stores=tuple(stores), varies=varies, programs=programs)


def hinted_most(cluster: Cluster) -> Cluster:
    """As `hinted`, with the most programs that share the rows: every choice of how a row is cut has to hold for
    them.
    """
    return replace(hinted(cluster), programs=most(cluster.programs)) if symbolic(cluster) else cluster


def hinted_buffers(buffers: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return the named buffers with numbers for sizes."""
    found = {name: buffers[name] for name in names}
    return {
        n: replace(b, shape=tuple(map(hint, b.shape)), strides=tuple(map(hint, b.strides))) for n, b in found.items()
    }


def at(layout: Layout) -> Layout:
    """Return a layout with numbers for sizes."""
    dims = tuple(tuple(Mode(hint(mode.extent), hint(mode.stride)) for mode in dim) for dim in layout.dims)
    return Layout(dims, hint(layout.offset))


def narrow(node: Expr) -> bool:
    """Whether 32 bits hold the number that an expression of sizes stands for, and each part of it; assumed of other
    sizes.
    """
    if not isinstance(node, Const) or not isinstance(node.value, Size) or symbols(node.value) & scope().floats:
        return True
    return bool(Size(tuple((monomial, abs(factor)) for monomial, factor in node.value.terms)) < 2**31)


def _numbers(node: Expr) -> Expr:
    match node:
        case Const() if isinstance(node.value, Size):
            return const(hint(node.value), node.dtype)
        case Iota():
            return iota(at(node.layout), node.dtype)
        case Load():
            index = tuple((e, hint(stride)) for e, stride in node.index)
            return load(node.buffer, at(node.layout), node.dtype, index, node.mask, node.fill)
    return node


def _has_size(layout: Layout) -> bool:
    return isinstance(layout.offset, Size) or any(
        isinstance(n, Size) for dim in layout.dims for m in dim for n in (m.extent, m.stride)
    )


__all__ = ["Store", "at", "hinted", "hinted_buffers", "narrow", "symbolic"]
