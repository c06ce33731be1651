"""Convolution bias: on a GPU the bias of a convolution, and its gradient, belong to the kernels beside the call.

In: a functional ATen graph. Out: the same graph with convolutions that add no bias where a kernel reads their result
anyway, and with a sum in place of a bias' gradient where a kernel makes what is summed; and a line for each, with what
it saves.

    y = convolution(x, w, b); relu(y)                 ->   y = convolution(x, w, None); relu(y + b.view(-1, 1, 1))
    _, _, db = convolution_backward(relu's gradient)  ->   db = sum of relu's gradient, by the kernel that writes it

torch adds a bias after cuDNN, in a kernel of its own that reads and writes the whole result, and sums the gradient in
another one that reads it. `aten.cudnn_convolution_relu` and `_add_relu` would take bias and relu into the call. They
are not used: they never choose a deterministic engine, whatever torch's switches say; where cuDNN has no fused engine
they raise instead of computing in two steps; without a residual they add zero times the uninitialised result, so that
the result is read too; and for some sizes their engine is many times slower (pytorch issues 62926, 68506). Not with
numerics="eager", which rounds the sum.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ..ir.size import hint, product
from ..ops.builder import line_of
from ..ops.decompositions import short
from ..ops.rules import RULES
from ..ops.table import POINTWISE
from ..ops.views import VIEWS
from .simplify import unwritten

aten = torch.ops.aten
FORWARD, BACKWARD = "convolution.default", "convolution_backward.default"
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
MASK = 10  # the argument of the backward that says which gradients are wanted


def lift_bias(module: GraphModule, numerics: str, gpu: bool) -> tuple[GraphModule, tuple[str, ...]]:
    """Return the graph with its lifted biases, and what was lifted; `gpu`: whether it runs on one."""
    wanted = [n for n in module.graph.nodes if n.op == "call_function" and (_adds(n) or _sums(n))]
    if numerics == "eager" or not gpu or not wanted:
        return module, ()
    graph = Graph()
    new: dict[Node, Node] = {}
    for node in module.graph.nodes:
        new[node] = made = graph.node_copy(node, new.__getitem__)
        made.meta = dict(node.meta)
        if node in wanted:
            new[node] = _with_add(graph, made) if _adds(node) else _without_sum(made)
        elif node.target is operator.getitem and node.args[0] in wanted and node.args[1] == 2:
            new[node] = _sum(graph, made)
    return unwritten(graph, module), tuple(_said(n) for n in wanted)


def _adds(node: Node) -> bool:
    """Whether a convolution adds a bias to what a kernel reads."""
    if short(node.target) != FORWARD or not isinstance(node.args[2], Node) or node.meta["val"].dtype not in FLOATS:
        return False
    bias = node.args[2].meta["val"]
    return _fused(node.users) and bias.dtype is node.meta["val"].dtype and isinstance(bias.shape[0], int)


def _sums(node: Node) -> bool:
    """Whether a convolution's backward sums what a kernel writes."""
    if short(node.target) != BACKWARD or not node.args[MASK][2] or node.args[0].meta["val"].dtype not in FLOATS:  # type: ignore[index,union-attr]
        return False
    return any(user.args[1] == 2 for user in node.users) and _fused([node.args[0]])  # type: ignore[list-item]


def _fused(nodes: Iterable[Node]) -> bool:
    """Whether a kernel computes any of some nodes, or what they are views of."""
    names = [(n, short(n.target)) for n in nodes if n.op == "call_function"]
    return any(name in POINTWISE or name in RULES or name in VIEWS and _fused(n.users) for n, name in names)


def _with_add(graph: Graph, call: Node) -> Node:
    bias: Any = call.args[2]
    out = call.meta["val"]
    call.args = (*call.args[:2], None, *call.args[3:])
    column = bias.meta["val"].new_empty((bias.meta["val"].shape[0], *(1 for _ in out.shape[2:])))
    view = graph.call_function(aten.view.default, (bias, [*column.shape]))
    added = graph.call_function(aten.add.Tensor, (call, view))
    for node, value in ((view, column), (added, out)):
        node.meta |= {"val": value, "stack_trace": call.meta.get("stack_trace")}
    return added


def _without_sum(call: Node) -> Node:
    mask: Any = call.args[MASK]
    call.args = (*call.args[:MASK], [*mask[:2], False])
    call.meta["val"] = (*call.meta["val"][:2], None)
    return call


def _sum(graph: Graph, taken: Node) -> Node:
    """Return the sum that stands for the third result of a backward."""
    call: Any = taken.args[0]
    gradient, value = call.args[0], taken.meta["val"]
    dims = [d for d in range(gradient.meta["val"].dim()) if d != 1]
    graph.erase_node(taken)
    node = graph.call_function(aten.sum.dim_IntList, (gradient, dims))
    node.meta |= {"val": value, "stack_trace": call.meta.get("stack_trace")}
    return node


def _said(node: Node) -> str:
    forward = _adds(node)
    of = node.meta["val"] if forward else node.args[0].meta["val"]  # type: ignore[union-attr]
    saved = (2 if forward else 1) * hint(product(of.shape)) * of.dtype.itemsize
    what = "adds no bias: the kernel after it does" if forward else "sums no bias' gradient: the kernel before it does"
    return (
        f"aten.{short(node.target)} {what}, {saved / 1e6:.1f} MB less {'read and written' if forward else 'read'}  "
        f"{line_of(node)}"
    ).rstrip()
