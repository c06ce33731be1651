"""Philox tiles: four random numbers from one Philox call, wherever a tile holds neighbours of a stream side by side.

In: a `Random` node and the index variables of its tile. Out: the statements of the tile's counters, and the call; None
where each element needs a call of its own.

    r4 = (0 + 4 * tl.arange(0, RBLOCK // 4))[None, :]
    tmp3 = fj.rand_tile(tmp2, (4096 * x + r4) >> 2, 1)

Number k of a stream is lane k % 4 at counter k // 4. A tile takes whole counters if it begins at a multiple of four
along the axis on which the numbers follow each other, and every other stride is a multiple of four: rows of an odd
length take a call for each element.
"""

from __future__ import annotations

from ...templates.base import ROW
from ..ir.expr import Expr, Iota, Load, Random, postorder
from .index import IndexSpace


def lanes(index: IndexSpace, node: Random, begins: dict[str, str]) -> tuple[list[str], str] | None:
    """Return the statements before a random tile and its call.

    Args:
        index: the tile's index variables. begins: where tiles begin here, if not where the template says.
    """
    facts = index.facts
    if facts.peel or facts.cluster.segments:  # tiles there do not begin where the template says
        return None
    variable, known = _along(index, node), index.begins()
    if variable is None or variable not in known or any(_varies(n) for n in postorder([node.seed])):
        return None
    block, side = f"{variable.upper()}BLOCK", facts.template.sides[variable]
    begin = begins.get(variable) or known[variable]
    quads = f"{variable}4"
    lines = [f"{quads} = ({begin} + 4 * tl.arange(0, {block} // 4)){side}{facts.widening}"]
    names: dict[int, str] = {}
    axes, inner = index.groups[variable], 1
    for place in reversed(range(len(axes))):
        names[axes[place]] = quads if len(axes) == 1 else f"{quads}_{place}"
        if len(axes) > 1:
            text = f"{quads} // {inner}" if inner > 1 else quads
            lines.append(
                f"{quads}_{place} = {text} % {facts.cluster.axes[axes[place]]}"
                if place
                else f"{quads}_{place} = {text}"
            )
        inner *= facts.cluster.axes[axes[place]]
    layout = node.offset.layout  # type: ignore[union-attr]
    terms = [(stride, names.get(a) or index.axis(a)) for a, stride in enumerate(layout.strides or ()) if stride]
    texts = [name if stride == 1 else f"{stride} * {name}" for stride, name in terms]
    texts += [str(layout.offset)] if layout.offset else []
    return lines, f"({' + '.join(texts)}) >> 2, {int(side == ROW)}"


def _along(index: IndexSpace, node: Random) -> str | None:
    """Return the index variable along which four neighbours of a stream stand side by side, from a multiple of four
    on.
    """
    if not isinstance(node.offset, Iota) or node.offset.layout.strides is None:
        return None
    strides, axes = node.offset.layout.strides, index.facts.cluster.axes
    for variable, group in index.groups.items():
        fast = group[-1] if group else None
        if fast is None or strides[fast] != 1 or index.facts.tiles[f"{variable.upper()}BLOCK"] < 4:
            continue
        several = any(n > 1 for a, n in enumerate(axes) if a != fast)
        even = (axes[fast] % 4 == 0 or not several) and node.offset.layout.offset % 4 == 0
        return variable if even and all(s % 4 == 0 for a, s in enumerate(strides) if a != fast) else None
    return None


def _varies(node: Expr) -> bool:
    return isinstance(node, (Load, Iota)) and any(node.layout.strides or ())
