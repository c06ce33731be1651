"""The table of lowering rules: every op that is no plain pointwise row and no view.

In: reductions, creation, concat, gather, scatter and scan, each a table of its own. Out: `RULES`, and the checks of
what a rule can take.

    >>> RULES["sum.dim_IntList"], CHECKS["sum.dim_IntList"](node)
    (<function _reduce.<locals>.rule>, True)
"""

# fx types the arguments of a node as one wide union; here an op's schema says which member each one is

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch.fx import Node

from ..ir.cluster import Cluster, Store
from ..ir.expr import Expr, Load, cast, postorder
from ..ir.graph import Buffer
from ..ir.reductions import REDUCTIONS, Reduction, names
from ..ir.size import Size, product
from .builder import Lowering, Rule
from .concat import PIECE_CHECKS, PIECES
from .creation import arange, full, prims_iota, random_rule
from .gather import INDEXING, INDEXING_CHECKS
from .reductions import arg, extremum, is_reducible, mean, reduce_rule, var, var_and_mean, with_arguments
from .scan import scan_check, scan_rule
from .scatter import SCATTER_CHECKS, SCATTERS, refused
from .table import OPS, reducing


def _copy_(low: Lowering, node: Node) -> Expr:
    """Write back what the graph changed: a store into the input's own memory, after its last reader."""
    target, source = node.args[:2]
    buffer = low.buffers[target.name]
    low.owned.add(node)
    written = low.values[source]
    if (
        isinstance(written, Load)
        and low.buffers[written.buffer].written_to == buffer.name
        and written is low.whole(low.buffers[written.buffer])
    ):
        return written  # scatter.py has written it already
    value = cast(low.expr(source, target.meta["val"].shape), buffer.dtype)
    if product(buffer.shape) and _reads_elsewhere(value, buffer):
        value = low.store(value, target.meta["val"], node, "read elsewhere in an input that the graph changes")
    made = replace(
        buffer, name=f"b{len(low.buffers)}", written_to=buffer.name
    )  # with the input's very strides, holes and all
    low.buffers[made.name] = made
    low.reasons[made.name] = "an in-place change of an input"
    if product(buffer.shape):
        low.steps.append(
            Cluster.build(buffer.shape, (), [Store(made.name, made.layout, value, buffer.dtype)], low.lines(node))
        )
    return low.whole(made)


def _reads_elsewhere(value: Expr, own: Buffer) -> bool:
    """Whether a new value of an input needs old ones other than the very element that it replaces; `write_back` orders
    other inputs.
    """
    old = [n for n in postorder([value]) if isinstance(n, Load) and n.buffer == own.name]
    return any(n.index or n.layout != own.layout for n in old)


RULES: dict[str, Rule] = {
    "mean.default": with_arguments(mean, ("dims", "keepdim")),
    "mean.dim": with_arguments(mean, ("dims", "keepdim")),
    "var.correction": with_arguments(var, ("dims",)),
    "var_mean.correction": with_arguments(var_and_mean, ("dims",)),
    "full.default": full(lambda n: n.args[1]),
    "full_like.default": full(lambda n: n.args[1]),
    "scalar_tensor.default": full(lambda n: n.args[0]),
    "zeros.default": full(lambda n: 0),
    "ones.default": full(lambda n: 1),
    "zeros_like.default": full(lambda n: 0),
    "ones_like.default": full(lambda n: 1),
    "empty.memory_format": full(lambda n: 0),
    "empty_strided.default": full(lambda n: 0),
    "empty_permuted.default": full(lambda n: 0),
    "empty_like.default": full(lambda n: 0),
    "new_empty.default": full(lambda n: 0),
    "new_empty_strided.default": full(lambda n: 0),
    "new_zeros.default": full(lambda n: 0),
    "new_ones.default": full(lambda n: 1),
    "new_full.default": full(lambda n: n.args[2]),
    "arange.start_step": arange,
    "arange.start": arange,
    "arange.default": arange,
    "prims.iota.default": prims_iota,
    "fusejit.random.default": random_rule,
    "copy_.default": _copy_,
    "copy.default": lambda low, n: cast(low.expr(n.args[1], n.meta["val"].shape), n.meta["val"].dtype),
    **PIECES,
    **INDEXING,
    **SCATTERS,
}
CHECKS: dict[str, Callable[[Node], bool]] = dict.fromkeys(
    ("mean.default", "mean.dim", "var.correction", "var_mean.correction"), is_reducible("sum")
)  # formulas of sums
"""Rule name: whether the rule can take this call."""


def register(row: Reduction) -> None:
    """Let the overloads of a reduction, and of its scan, be lowered as its row says."""
    REDUCTIONS[row.name], OPS[row.name] = row, reducing(row)
    rule, check = (arg if row.place_of else reduce_rule)(row.name), is_reducible(row.name)
    for name in names(", ".join(part for part in (row.along, row.whole) if part)):
        RULES[name], CHECKS[name] = rule, check
    for name in names(row.both):
        RULES[name], CHECKS[name] = extremum(row.name), check
    if row.scan:
        RULES[row.scan.aten], CHECKS[row.scan.aten] = scan_rule(row.scan), scan_check(row.scan)


for _row in list(REDUCTIONS.values()):
    register(_row)
CHECKS |= {
    **PIECE_CHECKS,
    **INDEXING_CHECKS,
    **SCATTER_CHECKS,
    "copy_.default": lambda n: n.args[0].op == "placeholder",
    "arange.start_step": lambda n: all(
        isinstance(a, (int, Size)) or n.meta["val"].dtype.is_floating_point for a in n.args
    ),
}
REFUSALS: dict[str, Callable[[Node], str]] = dict.fromkeys(SCATTERS, refused)
"""Rule name: why it cannot, "" where it can."""
