"""Calls of ATen overloads as calls of torch's own bindings, which cost about half as much on the host.

In: a captured graph. Out: a copy that calls `torch.add` where the graph calls `torch.ops.aten.add.Tensor`, and so on,
wherever the binding is shown to dispatch the very same ops with the very same arguments; everything else stays as it
is.

    >>> print(direct(graph).code)
    add = torch.add(x, y);  x = y = None
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from .. import torch_private as private
from ..torch_private import TorchDispatchMode

Tensor = torch.Tensor
Binding = tuple[str, Any]
"""What a node becomes: its op ("call_function" or "call_method") and its target."""

FACTORY = frozenset({"device", "layout", "pin_memory"})
"""Arguments of ops that make tensors: their bindings obey `torch.device(...)` as a context, overloads do not."""
NUMBERS = (bool, int, float, complex)
LITERALS = (*NUMBERS, type(None), str, torch.dtype, torch.memory_format)
KNOWN: dict[Any, Binding | None] = {}
"""By overload and kinds of arguments: a binding chooses its overload by nothing else. One process meets some dozens."""


def direct(module: GraphModule) -> GraphModule:
    """Return a copy of a graph whose ops are called through torch's bindings; the graph itself where none can be."""
    graph = torch.fx.Graph()
    copies: dict[Node, Node] = {}
    changed = False
    for node in module.graph.nodes:
        copies[node] = copy = graph.node_copy(node, copies.__getitem__)
        if (found := binding_of(node)) is not None:
            copy.op, copy.target = found
            changed = True
    return GraphModule(module, graph) if changed else module


def binding_of(node: Node) -> Binding | None:
    """The binding that does what the node's overload does; None where there is none, or where that cannot be shown."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, private.OpOverload) or target.namespace != "aten":
        return None
    if not node.args or not isinstance(node.args[0], Node):
        return None
    kinds = kind(node.args), tuple((name, kind(value)) for name, value in node.kwargs.items())
    if None in (kinds[0], *(k for _, k in kinds[1])):
        return None
    key = target, kinds
    if key not in KNOWN:
        schema = target._schema
        plain = [str(value.type) for value in schema.returns] == ["Tensor"] and not FACTORY & {
            a.name for a in schema.arguments
        }
        KNOWN[key] = next((c for c in candidates(target) if same(target, c, node)), None) if plain else None
    return KNOWN[key]


def kind(value: Any) -> Any:
    """What the parser of a binding sees in an argument; None: something of which we cannot tell."""
    if isinstance(value, Node):
        fake = value.meta.get("val")
        # a tensor without dims can stand for a number where it asks for no gradient
        return (Tensor, fake.dim() == 0, fake.dtype, fake.requires_grad) if isinstance(fake, Tensor) else None
    if isinstance(value, (list, tuple)):
        inside = [kind(item) for item in value]
        return (
            None
            if None in inside
            else (type(value), len(inside) if isinstance(value, tuple) else 0, tuple(dict.fromkeys(inside)))
        )
    return type(value) if isinstance(value, LITERALS) else None


def candidates(target: Any) -> list[Binding]:
    """Functions of torch, of its neural network bindings, and methods of tensors that have the name of an op."""
    name = target._schema.name.removeprefix("aten::")
    functions = [getattr(home, name, None) for home in (torch, private.nn)]
    found: list[Binding] = [("call_function", f) for f in functions if isinstance(f, types.BuiltinFunctionType)]
    method = getattr(private.TensorBase, name, None)
    return [*found, ("call_method", name)] if isinstance(method, types.MethodDescriptorType) else found


class Heard(TorchDispatchMode):
    """Writes down what is dispatched: ops, numbers, and tensors by the order in which they first appear."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.seen: dict[int, tuple[str, Tensor]] = {}  # keeps them alive, so that no other tensor gets an id

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.lines.append(f"{func} {private.tree_map_only(Tensor, self.place, (args, kwargs or {}))}")
        return func(*args, **(kwargs or {}))

    def place(self, value: Tensor) -> str:
        return self.seen.setdefault(id(value), (f"%{len(self.seen)}", value))[0]


def same(target: Any, binding: Binding, node: Node) -> bool:
    """Whether a binding dispatches what the overload dispatches, on the fake values of a node's arguments."""
    op, called = binding
    function = called if op == "call_function" else lambda first, *rest, **named: getattr(first, called)(*rest, **named)
    one, other = (heard(f, node) for f in (target, function))
    return bool(one) and one == other


def heard(function: Callable[..., Any], node: Node) -> list[str]:
    """What a function dispatches for the arguments of a node; [] where it refuses them."""
    with (
        private.DisableTorchFunction(),
        private.DisableFuncTorch(),
        private.DisableAutocast(),
        torch.no_grad(),
        Heard() as mode,
    ):
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"].detach())
        mode.lines.clear()  # of the detaches
        mode.seen.clear()
        try:
            function(*args, **kwargs)
        except (TypeError, ValueError, RuntimeError, IndexError, AssertionError):
            # the parser refuses, a fake tensor has no values, or it meets a real one that the parser made of a number
            return []
    return mode.lines
