"""Region sizes: the sizes of a block's tensors where sizes vary, and the same sizes asked of its own inputs.

In: symbolic sizes of a trace. Out: whether they can be told from some shapes, and nodes of a graph that compute them
from its inputs.

    >>> told(s0 * 4, [(s0, 4)])
    True
    >>> size_node(graph, s0 * 4, [placeholder])         # sym_size(placeholder, 0) * 4

A block that is captured once and called for many others must not use a size that a graph around it knows: each symbol
is asked of the tensors that it is called with.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from ...codegen.ir.size import spell
from ...errors import Unsupported

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def varies(spec: Sequence[Any]) -> bool:
    """Whether a size of a tensor with this (dtype, shape, stride, ...) is symbolic."""
    return any(isinstance(n, torch.SymInt) for n in (*spec[1], *spec[2]))


def numbers(sizes: Iterable[Any]) -> tuple[Any, ...]:
    """Return sizes with ints for the symbols that have become numbers meanwhile: those are no inputs of a graph."""
    return tuple(int(n) if isinstance(n, torch.SymInt) and n.node.expr.is_number else n for n in sizes)


def settled(spec: Sequence[Any]) -> tuple[Any, ...]:
    """Return a spec that can be hashed: equal where sizes are the same expressions."""
    text = lambda n: n.node.expr if isinstance(n, torch.SymInt) else n  # noqa: E731
    return (spec[0], tuple(map(text, spec[1])), tuple(map(text, spec[2])), *spec[3:])


def whole(shape: Sequence[Any], stride: Sequence[Any]) -> bool:
    """Whether a tensor is contiguous, or its sizes are all numbers."""
    if not any(isinstance(n, torch.SymInt) for n in (*shape, *stride)):
        return True
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    step: Any = 1
    for n, given in zip(reversed(shape), reversed(stride), strict=True):
        if not statically_known_true(n == 1):
            if not statically_known_true(given == step):
                return False
            step = step * n
    return True


def told(value: Any, shapes: Iterable[Sequence[Any]]) -> bool:
    """Whether some shapes have every symbol of a size as one of their own."""
    if not isinstance(value, torch.SymInt):
        return False
    names = {n.node.expr for shape in shapes for n in shape if isinstance(n, torch.SymInt)}
    return all(symbol in names for symbol in value.node.expr.free_symbols)


def size_node(graph: Graph, value: Any, inputs: Sequence[Node]) -> Any:
    """Write a size as nodes of a graph that ask its inputs, at the graph's insertion point; an int where it is one
    after all.

    Raises:
        Unsupported: none of the inputs has one of its symbols.
    """
    if value.node.expr.is_number:
        return int(value)
    if not told(value, [getattr(node.meta.get("val"), "shape", ()) for node in inputs]):
        raise Unsupported("dynamic sizes", f"no tensor that a block is called with tells {value.node.expr}")
    found: dict[str, Any] = {"max": torch.sym_max, "min": torch.sym_min}
    for node in inputs:
        for axis, n in enumerate(getattr(node.meta.get("val"), "shape", ())):
            if (
                isinstance(n, torch.SymInt)
                and n.node.expr in value.node.expr.free_symbols
                and str(n.node.expr) not in found
            ):
                asked = graph.call_function(torch.ops.aten.sym_size.int, (node, axis))
                asked.meta["val"] = n
                found[str(n.node.expr)] = torch.fx.Proxy(asked)
    made = eval(spell(value.node.expr, {name: name for name in found}), found).node
    made.meta["val"] = value
    return made
