"""Bind sizes: torch's symbolic integers leave the graph; everything below sees `Size`s.

In: a functional ATen graph whose fake tensors may have symbolic sizes. Out: the same graph with `Size`s among the
arguments, and stand-ins with `Size`s for the fake tensors in `node.meta["val"]`; and where each symbol's value is found
in a call.

    >>> bound(module)
    (('s0', 0, -1),)
    >>> sized(module, inputs)[0].graph.find_nodes(op="call_function", target=aten.expand.default)[0].args
    (sum_1, (s0, 4))

A graph without symbols passes as it is.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ... import torch_private as private
from ...errors import Unsupported
from ..ir.layout import contiguous
from ..ir.size import AnySize, Size, hint, number, product, read, scope, spell, symbols

Tensor = torch.Tensor
Bound = tuple[tuple[str, int, int], ...]
"""(name of a symbol, number of the input, axis of that tensor or -1 for the input itself)."""
LINEAR: dict[Any, Callable[..., Any]] = {
    operator.add: operator.add,
    operator.sub: operator.sub,
    operator.mul: operator.mul,
    operator.neg: operator.neg,
}
FLOATS: dict[Any, tuple[str, Callable[..., float]]] = {
    operator.truediv: ("{} / {}", operator.truediv),
    operator.pow: ("{} ** {}", operator.pow),
    torch.sym_sqrt: ("{} ** 0.5", math.sqrt),
    operator.add: ("{} + {}", operator.add),
    operator.sub: ("{} - {}", operator.sub),
    operator.mul: ("{} * {}", operator.mul),
    operator.neg: ("-{}", operator.neg),
}
"""What makes a float of numbers, by the op: Python text, and its value."""
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def bound(values: Sequence[Any]) -> Bound:
    """Return where the inputs of a graph hold the value of each of its symbols; nothing where no size is symbolic.

    Raises:
        Unsupported: a symbol occurs in products only.
    """
    found: dict[str, tuple[str, int, int]] = {}
    used: set[str] = set()
    for place, value in enumerate(values):
        parts: list = (
            [(-1, value)]
            if isinstance(value, torch.SymInt | torch.SymFloat)
            else list(enumerate(value.shape))
            if isinstance(value, Tensor)
            else []
        )
        more = (
            [*value.stride(), value.storage_offset()]
            if isinstance(value, Tensor) and value.layout is torch.strided
            else []
        )
        for axis, part in [*parts, *((-2, part) for part in more)]:
            if not isinstance(part, torch.SymInt | torch.SymFloat) or part.node.expr.is_number:
                continue
            expression = part.node.expr
            used |= {str(name) for name in expression.free_symbols}
            if expression.is_Symbol and axis > -2 and (str(expression) not in found or axis == -1):
                found[str(expression)] = (str(expression), place, axis)
    if used - found.keys():
        raise Unsupported("dynamic sizes", f"no input alone tells {', '.join(sorted(used - found.keys()))}")
    return tuple(found.values())


def hints(values: Sequence[Any], known: Bound) -> dict[str, int]:
    """Return the sizes of the call that was traced."""
    found = {}
    for name, place, axis in known:
        value = values[place] if axis < 0 else values[place].shape[axis]
        found[name] = value.node.hint
    return found


def sized(module: GraphModule, inputs: Sequence[Any]) -> tuple[GraphModule, list[Any]]:
    """Return a graph and its inputs with `Size`s in the place of symbolic integers; needs an open `Scope`.

    Raises:
        Unsupported: a number that is computed from sizes and is no integer.
    """
    graph = Graph()
    new: dict[Node, Any] = {}
    stands: dict[int, Any] = {}
    for node in module.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, SYMBOLIC) and node.op != "placeholder":
            if isinstance(value, torch.SymInt):
                new[node] = size_of(value)
            elif node.users:
                new[node] = float_of(node, new)
            continue
        made = new[node] = graph.node_copy(node, new.__getitem__)
        made.meta = dict(node.meta)
        if "val" in node.meta:
            made.meta["val"] = private.tree_map(lambda v: stand_in(v, stands), value)
        if node.op == "placeholder" and isinstance(value, torch.SymInt | torch.SymFloat):
            new[node] = size_of(value)
    return GraphModule(torch.nn.Module(), graph), [stand_in(value, stands) for value in inputs]


def float_of(node: Node, new: dict[Node, Any]) -> Any:
    """Return a float that is computed from sizes: a polynomial, or a name for what the host computes."""
    a, *rest = torch.fx.node.map_arg(node.args, new.__getitem__)
    if node.target is torch.sym_float:
        return a
    if node.target in LINEAR and not any(symbols(value) & scope().floats for value in (a, *rest)):
        return LINEAR[node.target](a, *rest)
    if node.target not in FLOATS:
        raise Unsupported("dynamic sizes", f"{node.target} makes a number of a size")
    text, made = FLOATS[node.target]
    return number(text.format(a, *rest), made(*(hint(value) for value in (a, *rest))))


def size_of(value: Any) -> AnySize:
    """Return a symbolic integer, or a float argument, as a `Size`, any other as it is."""
    if not isinstance(value, torch.SymInt | torch.SymFloat):
        return value
    expression = value.node.expr
    names = {str(name): str(name) for name in expression.free_symbols}
    return read(spell(expression, names), names)


def stand_in(value: Any, known: dict[int, Any]) -> Any:
    """Return what stands for a value of the trace: tensors without a symbolic size stay."""
    if isinstance(value, torch.SymInt | torch.SymFloat):
        return size_of(value)
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return value
    parts = [*value.shape, *value.stride(), value.storage_offset()]
    if not any(isinstance(part, torch.SymInt) for part in parts):
        return value
    if id(value) not in known:
        known[id(value)] = (Shaped.like(value), value)
    return known[id(value)][0]


class Shaped(Tensor):
    """A tensor without memory whose sizes are `Size`s: what the passes ask of `node.meta["val"]`, and nothing else."""

    _sizes: tuple[AnySize, ...]
    _strides: tuple[AnySize, ...]
    _offset: AnySize
    _place: torch.device
    __torch_function__ = private.disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise Unsupported(str(func), "a pass asked it of a tensor whose sizes vary")

    @staticmethod
    def like(value: Tensor) -> Shaped:
        return Shaped.make(
            tuple(map(size_of, value.shape)),
            tuple(map(size_of, value.stride())),
            value.dtype,
            value.device,
            size_of(value.storage_offset()),
        )

    @staticmethod
    def make(shape: tuple, strides: tuple, dtype: torch.dtype, device: torch.device, offset: AnySize = 0) -> Shaped:
        numbers = [tuple(max(0, hint(n)) for n in values) for values in (shape, strides)]
        made: Any = private.make_wrapper_subclass(
            Shaped, numbers[0], strides=numbers[1], dtype=dtype, device=torch.device("meta")
        )
        made._sizes, made._strides, made._offset, made._place = shape, strides, offset, device
        return made  # type: ignore[no-any-return]

    shape = property(lambda self: self._sizes)  # type: ignore[assignment]
    device = property(lambda self: self._place)  # type: ignore[assignment]

    def size(self, dim: int | None = None) -> Any:  # type: ignore[override]
        return self._sizes if dim is None else self._sizes[dim]

    def stride(self, dim: int | None = None) -> Any:  # type: ignore[override]
        return self._strides if dim is None else self._strides[dim]

    def storage_offset(self) -> Any:  # type: ignore[override]
        return self._offset

    def numel(self) -> Any:  # type: ignore[override]
        return product(self._sizes)

    def is_contiguous(self, *args: Any, **kwargs: Any) -> bool:
        wanted = contiguous(self._sizes).strides or ()
        return all(n == 1 or a == b for n, a, b in zip(self._sizes, self._strides, wanted, strict=True))

    def new_empty(self, size: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:  # type: ignore[override]
        strides = contiguous(tuple(size)).strides
        assert strides is not None
        return Shaped.make(tuple(size), strides, dtype or self.dtype, self._place)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Shaped({self._sizes}, {self._strides}, {self.dtype}, {self._place})"


__all__ = ["Bound", "Shaped", "Size", "bound", "hints", "sized"]
