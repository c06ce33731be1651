"""Canonicalize: large matrix products as their loss needs them, before anything is differentiated.

In: the graph of a capture. Out: the same graph with products that leave out the rows that a slice drops, and a
contraction that is a linear layer written as one; and a line for each. chunk.py then has whole rows to compute a part
of at a time.

    slice(to(linear(h, w), float32), 1, 0, -1)
        ->  to(linear(slice(h, 1, 0, -1), w), float32)  a loss of shifted logits and labels
    einsum("bsd,vd->bsv", h, w)                  ->   linear(h, w)

Rows are dropped through ops on one tensor that treat each element by itself, and only where nothing else reads them. A
product that is also a result stays as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ...codegen.ops.builder import line_of
from ...codegen.ops.decompositions import short
from ...codegen.ops.table import POINTWISE

aten = torch.ops.aten
PRODUCTS = {"linear.default", "matmul.default", "mm.default"}
"""Products whose rows are those of their first operand; the second has to be a matrix."""
DROPS = {"slice.Tensor", "select.int", "narrow.default"}
SAME = {"to.dtype", "_to_copy.default", "contiguous.default", "clone.default", "alias.default"}


def heads(module: GraphModule, limit: int) -> tuple[GraphModule, list[str]]:
    """Return the graph with its products of more than `limit` bytes (0: none) as their readers need them, and what was
    changed.
    """
    if not limit or not any(_large(n, limit) and (_contraction(n) or _drops(n)) for n in module.graph.nodes):
        return module, []
    graph = Graph()
    made = graph.graph_copy(module.graph, copied := dict[Node, Node]())
    graph.output(made)
    for old, new in copied.items():
        new.meta = dict(old.meta)
    notes: list[str] = []
    for node in list(graph.nodes):
        if _large(node, limit) and (found := _contraction(node)):
            notes.append(f"einsum of {_sizes(node)} is computed as {short(found)}  {line_of(node)}".rstrip())
            node = _replaced(node, found, tuple(_list(node.args[1])))
        while _large(node, limit) and (chain := _drops(node)):
            before = _sizes(node)
            node = _dropped(node, chain)
            notes.append(
                f"{short(node.target)} of {before} is computed for the {_sizes(node)} that are read  "
                f"{line_of(node)}".rstrip()
            )
    graph.lint()
    return GraphModule(module, graph), notes


def _large(node: Node, limit: int) -> bool:
    value = node.meta.get("val")
    if (
        node.op != "call_function"
        or not isinstance(value, torch.Tensor)
        or any(type(n) is not int for n in value.shape)
    ):
        return False
    return value.numel() * value.dtype.itemsize > limit


def _sizes(node: Node) -> str:
    return " x ".join(map(str, node.meta["val"].shape))


def _contraction(node: Node) -> Any:
    """Return the op that an einsum of two operands is, if it is a linear layer or a product with a matrix; None
    otherwise.
    """
    if node.target is not aten.einsum.default or len(node.args) != 2 or len(_list(node.args[1])) != 2:
        return None
    inputs, arrow, output = str(node.args[0]).replace(" ", "").partition("->")
    one, comma, two = inputs.partition(",")
    plain = (
        arrow
        and comma
        and (one + two + output).isalpha()
        and all(len(set(word)) == len(word) for word in (one, two, output))
    )
    if not plain or len(one) < 2 or len(two) != 2 or one[-1] not in two or one[-1] in output:
        return None
    a, b = (operand.meta["val"] for operand in _list(node.args[1]))
    if a.shape[-1] != b.shape[two.index(one[-1])]:  # one of the two is repeated
        return None
    for op, (inner, outer) in ((aten.linear.default, (two[1], two[0])), (aten.matmul.default, (two[0], two[1]))):
        if inner == one[-1] and outer not in one and output == one[:-1] + outer:
            return op
    return None


def _drops(product: Node) -> list[Node]:
    """Return the ops from a product to what drops some of its rows, that one last; nothing where all rows are read."""
    other: Any = product.args[1] if short(product.target) in PRODUCTS else None
    if other is None or other.meta["val"].dim() != 2:
        return []
    chain: list[Node] = []
    node = product
    while len(node.users) == 1:
        (node,) = node.users
        chain.append(node)
        if node.op == "call_function" and short(node.target) in DROPS:
            return chain if len(node.all_input_nodes) == 1 and _of_rows(node) else []
        alone = len(node.all_input_nodes) == 1 and node.op == "call_function"
        if not alone or not (short(node.target) in SAME or short(node.target) in POINTWISE):
            return []
    return []


def _of_rows(drop: Node) -> bool:
    """Whether an op drops rows, and not columns."""
    value, dim = _list(drop.args)[0].meta["val"], _dim(drop)
    return dim != value.dim() - 1 and drop.meta["val"].numel() < value.numel() and not drop.kwargs


def _dim(drop: Node) -> int:
    x, *rest = _list(drop.args)
    return int(rest[0] if rest else 0) % x.meta["val"].dim()  # type: ignore[no-any-return]


def _list(values: Any) -> list[Any]:
    """A node's arguments, each of which its op's schema says what it is."""
    return list(values)


def _dropped(product: Node, chain: list[Node]) -> Node:
    """Move an op that drops rows in front of a product, and return the product of the others."""
    *between, drop = chain
    with product.graph.inserting_before(product):
        rows = _call(product, drop.target, (product.args[0], _dim(drop), *drop.args[2:]))
        last = fewer = _call(product, product.target, (rows, *product.args[1:]), dict(product.kwargs))
    for node in between:
        with node.graph.inserting_before(node):
            args, kwargs = torch.fx.node.map_arg((node.args, dict(node.kwargs)), lambda _, before=last: before)  # type: ignore[misc]
            last = _call(node, node.target, args, kwargs)
    drop.replace_all_uses_with(last)
    for node in (*reversed(chain), product):
        node.graph.erase_node(node)
    return fewer


def _replaced(node: Node, target: Any, args: tuple) -> Node:
    with node.graph.inserting_before(node):
        made = _call(node, target, args)
    node.replace_all_uses_with(made)
    node.graph.erase_node(node)
    return made


def _call(like: Node, target: Any, args: tuple, kwargs: dict | None = None) -> Node:
    """Write a call at the place of another one, with what its result is like."""
    node = like.graph.call_function(target, args, kwargs or {})
    node.meta = {k: v for k, v in like.meta.items() if k == "stack_trace"}
    given, named = torch.fx.node.map_arg((args, kwargs or {}), lambda n: n.meta["val"])
    with like.meta["val"].fake_mode, torch.no_grad():
        node.meta["val"] = target(*given, **named)
    return node


__all__ = ["heads"]
