"""Freeze: the closed-over tensors of a capture as copies that keep their values.

In: a capture. Out: a detached copy of each lifted tensor; the graph then reads the copies, whatever becomes of the
originals.

    >>> captured.met, captured.lifted = captured.lifted, constants(captured)
"""

from __future__ import annotations

import torch

from .. import torch_private as private
from ..errors import Unsupported
from .source_lines import user_line
from .tracer import Captured


def constants(captured: Captured) -> tuple[torch.Tensor, ...]:
    """Copy the closed-over tensors.

    Raises:
        Unsupported: the graph changes one of them, which would change the copy and not the original.
    """
    inputs = [node for node in captured.graph.graph.nodes if node.op == "placeholder"]
    lifted = set(inputs[len(captured.positions) :])
    for node in captured.graph.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            written = [
                value
                for value, argument in zip(node.args, schema.arguments)
                if argument.alias_info and argument.alias_info.is_write
            ]
            if any(root(value) in lifted for value in written):
                reason = "the change would be made to the constant and lost; pass the tensor as an argument"
                raise Unsupported(
                    "changing a tensor that capture_as_const has made a constant", reason, user_line(node)
                )
    return tuple([value.detach().clone() for value in captured.lifted])


def root(value: object) -> object:
    """The node whose memory a node's value may share, through the views between them."""
    while (
        isinstance(value, torch.fx.Node)
        and value.op == "call_function"
        and isinstance(value.target, private.OpOverload)
    ):
        returns = value.target._schema.returns
        if not (returns and returns[0].alias_info and value.args):
            break
        value = value.args[0]
    return value
