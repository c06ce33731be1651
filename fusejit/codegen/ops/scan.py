"""Scan: cumsum, cumprod, logcumsumexp, cummax and cummin, as nodes of a kernel that keeps its row in order.

In: a node of one of these ops. Out: its value; and, for the passes after, whether a cluster's scans still run along its
rows.

    cumsum(x (4,6), 1)        ->  cluster  parallel 4 | reduce 6  store b0 = cumsum(load x, place)
    cumsum(flip(x, [1]), 1)  ->  the same from the end on,
        seen flipped: the gradient of a cumsum reads and writes forwards

Each scan carries its `place`, an Iota that counts along the row: however axes were split, joined or exchanged, they are
in order as long as it counts row-major. A tile is scanned at once; a longer row tile by tile, with a carry.
"""

# fx types the arguments of a node as one wide union; here an op's schema says which member each one is mypy:
# disable-error-code="union-attr,index,arg-type,operator,assignment,misc"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from ..ir.cluster import Cluster, Store
from ..ir.expr import cast, iota, scan, view
from ..ir.layout import flip, permute, strided
from ..ir.reductions import Running
from ..ir.size import product
from .builder import Lowering, Rule
from .decompositions import short
from .formulas import HALF
from .table import DTYPES

INDEX = torch.int64


def scan_rule(running: Running) -> Rule:
    op, results = running.name, 2 if running.places else 1

    def rule(low: Lowering, node: Node, *_: Any, **__: Any) -> Any:
        source, dim = node.args[0], _dim(node)
        outs = node.meta["val"] if results == 2 else (node.meta["val"],)
        shape, dtype = tuple(outs[0].shape), outs[0].dtype
        reverse = (
            results == 1
            and short(source.target) == "flip.default"
            and [d % max(1, len(shape)) for d in source.args[1]] == [dim]
        )
        inner = torch.float32 if dtype in HALF else dtype
        x = cast(low.values[source.args[0] if reverse else source], inner)
        kept = [d for d in range(len(shape)) if d != dim]
        (row,) = view([x], permute(shape, [*kept, dim]))
        axes = tuple(shape[d] for d in (*kept, dim))
        place = iota(strided(axes, [0] * len(kept) + [1]), INDEX)
        values = [
            scan(op if k == 0 else f"{op}_at", row, place, reverse, inner if k == 0 else INDEX) for k in range(results)
        ]
        made = [low.buffer(shape, out.stride(), out.dtype, out.device) for out in outs]
        back = permute(shape, [*kept, dim])
        stores = []
        for buffer, value, out in zip(made, values, outs, strict=True):
            low.reasons[buffer.name] = "a scan"
            layout = view([low.whole(buffer)], back)[0].layout
            stores.append(Store(buffer.name, layout, cast(value, out.dtype), out.dtype))
        low.steps.append(Cluster.build(axes[:-1], axes[-1:], stores, low.lines(node)))
        found = tuple(low.whole(b) for b in made)
        if reverse:
            return view([found[0]], flip(shape, [dim]))[0]
        return found if results == 2 else found[0]

    return rule


def _dim(node: Node) -> int:
    dim = node.args[1] if len(node.args) > 1 else node.kwargs["dim"]
    return dim % max(1, node.args[0].meta["val"].dim())


def _is_scannable(node: Node, dtypes: str) -> bool:
    out, source = node.meta["val"], node.args[0].meta["val"]
    out = out[0] if isinstance(out, (tuple, list)) else out
    return (
        source.dim() > 0
        and source.shape[_dim(node)] > 1
        and product(source.shape) > 0
        and out.dtype in DTYPES["number"] & DTYPES[dtypes]
    )


def scan_check(running: Running) -> Callable[[Node], bool]:
    return lambda node: _is_scannable(node, running.dtypes)
