"""Philox tiles: four random numbers from one Philox call, wherever a tile holds neighbours of a stream side by side.

In: a `Random` node and the writer of its kernel. Out: the statements of the tile's counters, and the call; None where
each element needs a call of its own.

    r4 = (0 + 4 * tl.arange(0, RBLOCK // 4))[None, :]
    tmp3 = fj.rand_tile(tmp2, (4096 * x + r4) >> 2, 1)

Number k of a stream is lane k % 4 at counter k // 4. A tile takes whole counters if it begins at a multiple of four
along the axis on which the numbers follow each other, and every other stride is a multiple of four: rows of an odd
length take a call for each element.
"""

from __future__ import annotations

from typing import Any

from ...templates.base import ROW
from ...templates.table import TEMPLATE
from ..ir.expr import Expr, Iota, Load, Random, postorder


def lanes(writer: Any, node: Random, begins: dict[str, str]) -> tuple[list[str], str] | None:
    """Return the statements before a random tile and its call.

    Args:
        writer: of the kernel (writer.py). begins: where tiles begin here, if not where the template says.
    """
    if getattr(writer, "peel", None) or getattr(
        writer.cluster, "segments", 0
    ):  # tiles there do not begin where the table says
        return None
    variable = _along(writer, node)
    known = writer.begins()
    if variable is None or variable not in known or any(_varies(n) for n in postorder([node.seed])):
        return None
    block, side = f"{variable.upper()}BLOCK", TEMPLATE[writer.tiles.template].sides[variable]
    wide = ".to(tl.int64)" if writer.wide else ""
    begin = begins.get(variable) or known[variable]
    quads = f"{variable}4"
    lines = [f"{quads} = ({begin} + 4 * tl.arange(0, {block} // 4)){side}{wide}"]
    names: dict[int, str] = {}
    axes, inner = writer.groups[variable], 1
    for place in reversed(range(len(axes))):
        names[axes[place]] = quads if len(axes) == 1 else f"{quads}_{place}"
        if len(axes) > 1:
            text = f"{quads} // {inner}" if inner > 1 else quads
            lines.append(
                f"{quads}_{place} = {text} % {writer.cluster.axes[axes[place]]}"
                if place
                else f"{quads}_{place} = {text}"
            )
        inner *= writer.cluster.axes[axes[place]]
    layout = node.offset.layout  # type: ignore[union-attr]
    terms = [(stride, names.get(a) or writer.axis(a)) for a, stride in enumerate(layout.strides or ()) if stride]
    texts = [name if stride == 1 else f"{stride} * {name}" for stride, name in terms]
    texts += [str(layout.offset)] if layout.offset else []
    return lines, f"({' + '.join(texts)}) >> 2, {int(side == ROW)}"


def _along(writer: Any, node: Random) -> str | None:
    """Return the index variable along which four neighbours of a stream stand side by side, from a multiple of four
    on.
    """
    if not isinstance(node.offset, Iota) or node.offset.layout.strides is None:
        return None
    strides, axes = node.offset.layout.strides, writer.cluster.axes
    for variable, group in writer.groups.items():
        fast = group[-1] if group else None
        if fast is None or strides[fast] != 1 or writer.tiles[f"{variable.upper()}BLOCK"] < 4:
            continue
        several = any(n > 1 for a, n in enumerate(axes) if a != fast)
        even = (axes[fast] % 4 == 0 or not several) and node.offset.layout.offset % 4 == 0
        return variable if even and all(s % 4 == 0 for a, s in enumerate(strides) if a != fast) else None
    return None


def _varies(node: Expr) -> bool:
    return isinstance(node, (Load, Iota)) and any(node.layout.strides or ())
