"""Scatter dtype: the accumulation dtype of scatters of half types, chosen before anything is lowered.

In: a functional graph, and the GPU's architecture. Out: `node.meta["sums"]` of each scatter_add, index_add and sum by
scatter_reduce that adds in the half type itself; and for each in a half type a line that says what was chosen, and why.

    >>> sums(module, "fast", 90)
    ('aten.scatter_add adds in bfloat16, as eager does: sums in float32 would move 100.7 MB more (50 %)
        net.py:7: x.scatter_add(0, i, s)',)

Eager rounds after each of these additions, and so does a kernel where that saves memory's time: sums in float32 are
begun wide, added to wide, then read once more to be rounded by a third kernel. They stay

* where many elements meet at a place. There they cost next to nothing, since the results are few against what is added,
and there they
  matter: a bfloat16 sum of positive numbers is off by 1 % after 115 additions, by 30 % after 1,000 (it hardly grows any
  more beyond some
  256 times what is added), and rounded once by 0.2 % at most;
* where a GPU cannot add pairs. It adds half types two at a time; one alone (a row of odd length, places that differ
from element to
  element) and, before sm_90, each bfloat16 is a loop of compare-and-swap, in Triton 3.6 and 3.7 alike;
* for embeddings and index_put, which eager adds up in float32 too.

With numerics="eager" these ops always round after each addition.
"""

# fx types the arguments of a node as one wide union; here an op's schema says which member each one is mypy:
# disable-error-code="union-attr,arg-type"

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from ..ir.graph import dense, row_major
from ..ir.size import AnySize, divide, hint, product
from ..ops.builder import line_of
from ..ops.decompositions import short
from ..ops.gather import arguments
from ..ops.scatter import SUMS, refused

ROUNDING = {"scatter_add.default", "scatter_reduce.two", "index_add.default"}
"""The ops that eager adds up in the half type on a GPU."""
PAIRS = {torch.float16: 75, torch.bfloat16: 90}
"""The first architecture that adds pairs of them in memory."""
SMALL = 0.05
"""Sums in float32 stay while they cost at most so much more of the bytes: from 116 additions for each result on, on
average.
"""


def sums(module: GraphModule, numerics: str, arch: int) -> tuple[str, ...]:
    """Note in a graph of ours where half types are added up as they are; return what was chosen for each."""
    found = [
        n
        for n in module.graph.nodes
        if n.op == "call_function" and short(n.target) in ROUNDING and n.meta["val"].dtype in PAIRS
    ]
    return tuple(line for line in (_chosen(node, numerics, arch) for node in found) if line)


def _chosen(node: Node, numerics: str, arch: int) -> str:
    dtype = node.meta["val"].dtype
    name = str(dtype).removeprefix("torch.")
    whole, more = _bytes(node)
    stays = "" if numerics == "eager" else _why_wide(node, arch, name, more / whole)
    if not stays:
        node.meta["sums"] = dtype
    if refused(node):
        return ""
    asked = ", as numerics='eager' asks" if numerics == "eager" else ", as eager does"
    how = f"adds up in float32 and rounds once: {stays}" if stays else f"adds up in {name}{asked}"
    spared = "" if stays else f": sums in float32 would move {more / 1e6:.1f} MB more ({more / whole:.0%})"
    return f"aten.{short(node.target).split('.')[0]} {how}{spared}  {line_of(node)}".rstrip()


def _why_wide(node: Node, arch: int, name: str, share: float) -> str:
    """Return why sums stay in float32, "" where they do not; `share`: what that costs more."""
    if share <= SMALL:
        return f"{share:.1%} more bytes, and many additions for each result"
    if arch < PAIRS[node.meta["val"].dtype]:
        return f"a GPU of sm_{arch} adds no pairs of {name}"
    return (
        ""
        if _in_pairs(node)
        else f"{name} elements are added one by one here, and a GPU adds only pairs of them at once"
    )


def _bytes(node: Node) -> tuple[int, int]:
    """Return the bytes that are moved with sums in the half type, and how many more there would be in float32."""
    out, wide = node.meta["val"], SUMS[node.meta["val"].dtype].itemsize
    size, results, many = out.dtype.itemsize, hint(product(out.shape)), hint(product(_added(node)))
    met = min(results, many)  # what is added to, read and written
    whole = 2 * size * results + size * many + 2 * size * met
    more = (wide - size) * (results + 2 * met) + (wide + size) * results
    return max(1, whole), more


def _added(node: Node) -> tuple[AnySize, ...]:
    """Return the shape of what is added; scatter_add's source may be larger than its index, and then counts as far as
    that.
    """
    index, source = (n.meta["val"] for n in arguments(node)[2:4])
    return tuple((source if short(node.target).startswith("index") else index).shape)


def _in_pairs(node: Node) -> bool:
    """Whether two elements that are added side by side stand side by side, and at an even place."""
    target, dim, index = arguments(node)[:3]
    added, out = _added(node), node.meta["val"]
    begun = out.stride() if dense(out.shape, out.stride()) else row_major(out.shape)
    fast = next((d for d, (n, s) in enumerate(zip(out.shape, begun, strict=True)) if s == 1 and n != 1), None)
    if fast is None or fast == dim % out.dim() or divide(added[fast], 2) is None:
        return False
    if not short(node.target).startswith("index") and index.meta["val"].stride()[fast] != 0:
        return False  # each element has a place of its own
    # an input that is changed at once keeps its own strides, holes and all
    changed = target.op == "placeholder" and any(short(user.target) == "copy_.default" for user in target.users)
    memory = [begun, target.meta["val"].stride()] if changed else [begun]
    others = [s for strides in memory for d, s in enumerate(strides) if d != fast and out.shape[d] != 1]
    return all(strides[fast] == 1 for strides in memory) and all(divide(s, 2) is not None for s in others)


__all__ = ["sums"]
