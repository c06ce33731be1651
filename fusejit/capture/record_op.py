"""Record op: write an op into the graph that is being captured, and return its result.

In: the proxy mode of a trace, and the call of an op on fake tensors. Out: what the op returns, tracked as the value of
a new node.

    %add : [num_users=1] = call_function[target=torch.ops.aten.add.Tensor](args = (%x, 1), kwargs = {})

torch asks of each op whether it decomposes, can be folded, has symbolic sizes or opaque objects among its arguments,
and flattens these several times. Nearly all ops have nothing of that: an ATen op that returns one tensor, of fake
tensors that the graph has made and of Python values. Such a call is written here, in half the time; the node is the one
that torch would make. All others torch records.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import torch_private as private
from .foreach_members import one_by_one
from .state.profile_hook import unobserved

Tensor = torch.Tensor
ATEN = torch.ops.aten
LITERALS = frozenset(
    (int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
)
SPECIAL = frozenset((ATEN.lift_fresh.default, ATEN.lift_fresh_copy.default, ATEN.lift.default, ATEN.is_nonzero.default))
"""Ops that hold or ask for the values of a constant."""
NORM = ATEN.linalg_vector_norm.default
"""Torch 2.11's fake tensors forget to drop a dim of size 1 of a norm that is counted from the end."""
PUT = ATEN.select_scatter.default
"""Torch's fake tensors promote its operands, where eager copies the one into the dtype of the other."""
SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
NAMES: dict[Any, str] = {}
"""By op: what its nodes are called, "" if the op goes torch's way."""


class NotPlain(Exception):
    """An argument that only torch's own recording knows what to do with."""


def recording(mode: Any, symbolic: bool) -> Callable[[Any, tuple, dict[str, Any]], Any]:
    """Return the function that records an op through a proxy mode.

    Args:
        mode: a `ProxyTorchDispatchMode`, while it is the mode's own turn: its `__torch_dispatch__` is taken as it is
            now.
        symbolic: sizes may be symbols, whose nodes torch makes.
    """
    import torch.fx.traceback as fx_traceback

    from ..torch_private import FakeTensor, snapshot_fake, track_tensor_tree
    from ..torch_private import ProxyTensor as _ProxyTensor

    general, tracer = mode.__torch_dispatch__, mode.tracer
    graph, tracker = tracer.graph, tracer.tensor_tracker

    def place(value: Any) -> Any:
        kind = type(value)
        if kind is FakeTensor:
            slot = tracker.get(value)
            if slot is None or slot.constant is not None:
                raise NotPlain
            return slot.proxy.node
        if kind in LITERALS:
            return value
        if kind is list or kind is tuple:
            return kind([place(item) for item in value])
        raise NotPlain

    def record(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        args = meant(func, args, general) if func in (NORM, PUT) else args
        name = NAMES.get(func)
        if name is None:
            name = NAMES[func] = name_of(func, graph)
        if not name or symbolic:
            return general(func, (), args, kwargs)
        try:
            given, named = tuple([place(value) for value in args]), {key: place(value) for key, value in kwargs.items()}
        except NotPlain:
            return general(func, (), args, kwargs)
        node = graph.create_node("call_function", func, given, named, name)
        node.meta["stack_trace"] = fx_traceback.current_meta.get("stack_trace", "")
        with unobserved():
            made = func(*args, **kwargs)
        proxy = torch.fx.Proxy(node, tracer)
        if type(made) is not FakeTensor:
            return track_tensor_tree(made, proxy, constant=None, tracer=tracer)
        tracker[made] = _ProxyTensor(proxy, None)
        node.meta["val"] = snapshot_fake(made)
        return made

    return as_eager(record)


def as_eager(write: Callable[[Any, tuple, dict[str, Any]], Any]) -> Callable[[Any, tuple, dict[str, Any]], Any]:
    """Let what writes a call write what eager does instead where the op itself does not tell that: see `WAYS` and
    members.py.
    """

    def record(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if func in WAYS and (made := WAYS[func](write, *args, **kwargs)) is not NotImplemented:
            return made
        members = one_by_one(func, args, kwargs)
        if members is None:
            return write(func, args, kwargs)
        for given, named in members:
            write(func, given, named)
        return None

    return record


def taken_apart(value: Any) -> bool:
    """Whether torch reads an argument without calling code of the user's, such as an `__index__`."""
    kind = type(value)
    if kind in LITERALS or isinstance(value, (Tensor, *SYMBOLS)) or value is ...:
        return True
    if kind is slice:
        return taken_apart((value.start, value.stop, value.step))
    return kind in (tuple, list, torch.Size) and all(map(taken_apart, value))


def meant(func: Any, args: tuple, general: Callable[..., Any]) -> tuple:
    """Return the arguments of a call with which torch's fake tensors give what eager does."""
    if func is NORM and len(args) > 2 and args[2]:
        return (*args[:2], [d % max(1, args[0].dim()) for d in args[2]], *args[3:])
    if func is PUT and args[0].dtype is not args[1].dtype:
        return (args[0], general(ATEN._to_copy.default, (), (args[1],), {"dtype": args[0].dtype}), *args[2:])
    return args


def name_of(func: Any, graph: torch.fx.Graph) -> str:
    if not isinstance(func, private.OpOverload) or func.namespace != "aten" or func in SPECIAL:
        return ""
    if torch.Tag.data_dependent_output in func.tags or [str(value.type) for value in func._schema.returns] != [
        "Tensor"
    ]:
        return ""
    return graph._target_to_str(func.overloadpacket.__name__)


# Ops whose memory torch's fake tensors mistake: each is called with what records an op, and NotImplemented leaves it as
# it is.


def dropout(record: Callable[..., Any], x: Tensor, p: float, train: bool) -> Any:
    """Return the operand itself where torch's kernel does, which neither its schema nor torch's rewrite of it in Python
    tells.
    """
    with unobserved():
        made = ATEN.dropout.default._op_dk(private.DispatchKey.CompositeImplicitAutograd, x, p, train)
    return x if made is x else NotImplemented


def native_dropout(record: Callable[..., Any], x: Tensor, p: float, train: bool | None) -> Any:
    """Return a copy where nothing is dropped: torch's rewrite returns the operand itself, and takes None for False."""
    if train is None:
        return record(ATEN.native_dropout.default, (x, p, True), {})
    if train and p:
        return NotImplemented
    return record(ATEN.clone.default, (x,), {}), record(ATEN.ones_like.default, (x,), {"dtype": torch.bool})


def told(view: Any) -> Callable[..., Any]:
    """Write down the view instead of its namesake that denies to be one: autograd alone, which lets that be changed,
    tells them apart.
    """

    def split(record: Callable[..., Any], x: Tensor, *args: Any) -> Any:
        return NotImplemented if x.requires_grad and torch.is_grad_enabled() else record(view, (x, *args), {})

    return split


WAYS: dict[Any, Callable[..., Any]] = {
    ATEN.dropout.default: dropout,
    ATEN.native_dropout.default: native_dropout,
    ATEN.unsafe_split.Tensor: told(ATEN.split.Tensor),
    ATEN.unsafe_split_with_sizes.default: told(ATEN.split_with_sizes.default),
    ATEN.unsafe_chunk.default: told(ATEN.chunk.default),
}
