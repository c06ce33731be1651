"""Compare traces: two captures of one function compared op by op.

In: what was recorded and what the Python does now. Out: the first thing that differs, with both of the user's lines, or
"".

    >>> divergence(recorded, now)
    'operator mismatch: recorded aten.add.Tensor (model.py:5: return a + b + c),
        now aten.sub.Tensor (model.py:6: return a + b - c)'
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from .guards.guards import equal
from .outputs import Constant
from .source_lines import user_line
from .tracer import Captured


def divergence(recorded: Captured, now: Captured) -> str:
    """Return the first difference: "operator mismatch", "tensors not equals", "too many" or "too few instructions",
    another result.
    """
    old, new = ops_of(recorded), ops_of(now)
    same: dict[Node, Node] = dict(zip(inputs_of(recorded), inputs_of(now)))
    for before, after in zip(old, new):
        if before.target is not after.target and before.op != "get_attr":
            return f"operator mismatch: {both(before, after)}"
        found = constant_tensors(recorded, now, before, after) or operands(before, after, same)
        if found:
            return found
        same[before] = after
    if len(new) > len(old):
        last = f", after {user_line(old[-1])}" if old else ""
        return f"too many instructions: {len(old)} were recorded{last}, the next now is {place(new[len(old)])}"
    if len(new) < len(old):
        last = f", after {user_line(new[-1])}" if new else ""
        return f"too few instructions: {len(new)} now{last}, the next that was recorded is {place(old[len(new)])}"
    if len(inputs_of(recorded)) != len(inputs_of(now)):
        return "tensors not equals: the function reads another number of closed-over tensors"
    return results(recorded, now, same)


def ops_of(captured: Captured) -> list[Node]:
    return [node for node in captured.graph.graph.nodes if node.op in ("call_function", "get_attr")]


def inputs_of(captured: Captured) -> list[Node]:
    return [node for node in captured.graph.graph.nodes if node.op == "placeholder"]


def place(node: Node) -> str:
    line = user_line(node)
    return f"{node.target} ({line})" if line else str(node.target)


def both(before: Node, after: Node) -> str:
    return f"recorded {place(before)}, now {place(after)}"


def constant_tensors(recorded: Captured, now: Captured, before: Node, after: Node) -> str:
    """Compare tensors that the body made of Python numbers."""
    if before.op != "get_attr" and after.op != "get_attr":
        return ""
    if before.op != after.op:
        return f"operator mismatch: {both(before, after)}"
    one, other = getattr(recorded.graph, str(before.target)), getattr(now.graph, str(after.target))
    if one.dtype is other.dtype and torch.equal(one, other):
        return ""
    reader_before, reader_after = next(iter(before.users), before), next(iter(after.users), after)
    return (
        f"tensors not equals: a constant of {both(reader_before, reader_after)} was {one.tolist()} and is "
        f"{other.tolist()}"
    )


def operands(before: Node, after: Node, same: dict[Node, Node]) -> str:
    """Compare the arguments of two calls of one op."""
    old: list[Any] = []
    new: list[Any] = []
    torch.fx.node.map_aggregate((before.args, dict(before.kwargs)), old.append)
    torch.fx.node.map_aggregate((after.args, dict(after.kwargs)), new.append)
    if len(old) != len(new):
        return f"operator mismatch: another number of operands: {both(before, after)}"
    for one, other in zip(old, new):
        if isinstance(one, Node) or isinstance(other, Node):
            if not isinstance(one, Node) or same.get(one) is not other:
                return f"operator mismatch: other operands: {both(before, after)}"
        elif not equal(one, other):
            return f"tensors not equals: a constant was {one!r} and is {other!r}: {both(before, after)}"
    return ""


def results(recorded: Captured, now: Captured, same: dict[Node, Node]) -> str:
    old, new = recorded.graph.graph.output_node(), now.graph.graph.output_node()
    if recorded.structure != now.structure or len(recorded.outputs) != len(now.outputs):
        return "another result: its containers, keys or lengths are not those that were recorded"
    for before, after in zip(old.args[0], new.args[0]):  # type: ignore[arg-type]
        if same.get(before) is not after:
            return f"another result: {both(before, after)}"
    for one, other in zip(recorded.outputs, now.outputs):
        if (
            type(one) is not type(other)
            or isinstance(one, Constant)
            and one.value is not other.value
            and not equal(one.value, other.value)
        ):
            before, after = (repr(item.value) if isinstance(item, Constant) else "a tensor" for item in (one, other))
            return f"another result: {before} was recorded, {after} is returned now"
    return ""
