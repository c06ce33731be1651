"""functorch levels: transforms of torch.func inside a capture: which of their ops the graph keeps.

In: the proxy mode of a running pre-dispatch trace. Out: the same mode, recording each op where it has passed every open
level of
`vmap`, `grad`, `jvp` and the rest, and has not met autograd yet.

    >>> captured = capture(torch.func.grad(lambda x: x.tanh().sum()), (torch.ones(3),), {})
    >>> [str(node.target) for node in captured.graph.graph.nodes if node.op == "call_function"]
    ['aten.tanh.default', 'aten.sum.default', 'aten.ones_like.default', 'aten.expand.default',
        'aten.tanh_backward.default']

torch calls a pre-dispatch mode first of all, above functorch, where a batched or gradient-tracking tensor has no
meaning to a graph. So an op that meets the mode there is sent on through its levels, and comes back once for each op
that they make of it. What is kept are the very ops that eager's autograd would see: outer gradients of any order,
`detach` and random numbers are therefore eager's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch

from .. import torch_private as private
from ..torch_private import tree_leaves

FUNCTORCH = private.functorch_c
KEYS = private.DispatchKey
VIEW = torch.ops.aten.view.default
SPARE_MEMORY = torch.ops.aten._new_zeros_with_same_feature_meta.default
"""Makes a tangent with as much memory as its primal, more than its shape takes; the cache of fake tensors forgets
that.
"""
ABOVE = private.DispatchKeySet(KEYS.PreDispatch)
MAKES_CONSTANT = (
    torch.ops.aten.lift_fresh.default,
    torch.ops.aten.lift_fresh_copy.default,
    torch.ops.aten.lift.default,
)
"""Take a real tensor made of Python numbers."""


def transforming() -> bool:
    """Whether a transform of torch.func is open in this thread."""
    return FUNCTORCH.maybe_current_level() is not None


def is_level_change(func: Any) -> bool:
    """Whether a function is a step of a transform: torch 2.11 shows these in every pre-dispatch trace, later versions
    while exporting.
    """
    return getattr(func, "__module__", "") == "torch._functorch.predispatch"


def of_transform(frame: FrameType | None) -> bool:
    """Whether torch.func's own Python made a call (through torch's front functions), rather than the user's."""
    while frame is not None and frame.f_globals.get("__name__") in ("torch.overrides", "torch.autograd"):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__", "").startswith("torch._functorch.")


def follow_levels(mode: Any, record: Callable[[Any, tuple, dict], Any]) -> None:
    """Make a pre-dispatch proxy mode record ops below all transforms.

    Args:
        mode: a `ProxyTorchDispatchMode` that is on torch's pre-dispatch stack.
        record: called for each op that the graph keeps, on tensors that no level wraps.
    """
    used = False

    def dispatch(func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        nonlocal used
        kwargs = kwargs or {}
        used = used or transforming()
        if used and (transforming() or any(map(wrapped, tree_leaves((args, kwargs))))):
            return send_on(mode, func, args, kwargs)
        return record(*(replace_view(args, kwargs) if used and func is VIEW else (func, args, kwargs)))

    mode.__torch_dispatch__ = dispatch


@contextlib.contextmanager
def outside_levels(fake_mode: Any) -> Iterator[None]:
    """Keep a fake mode's own work out of the levels: autograd detaches what it saves past the dispatcher, straight into
    the mode.
    """
    original, cached = fake_mode.dispatch, fake_mode.cache_enabled

    def dispatch(func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        fake_mode.cache_enabled = cached and func is not SPARE_MEMORY
        if not transforming():
            return original(func, types, args, kwargs)
        with private.DisableFuncTorch(), private.ExcludeDispatchKeyGuard(ABOVE):
            return original(func, types, args, kwargs)

    fake_mode.dispatch = dispatch
    try:
        yield
    finally:
        del fake_mode.dispatch
        fake_mode.cache_enabled = cached


def replace_view(args: tuple, kwargs: dict[str, Any]) -> tuple[Any, tuple, dict[str, Any]]:
    """What a level wrote as `view` for the strides of a fake tensor, which are not always those of the real one.

    A view of a zero that needs no memory (an absent tangent) is another such zero: torch's own leaks a tensor that is
    not fake.
    """
    source = args[0]
    if torch._is_zerotensor(source):
        shape = private.infer_size(args[1], source.numel())
        return (
            torch.ops.aten._efficientzerotensor.default,
            (list(shape),),
            {"dtype": source.dtype, "device": source.device},
        )
    return torch.ops.aten.reshape.default, args, kwargs


def wrapped(value: Any) -> bool:
    """Whether a tensor belongs to a level; outside all levels it is what a finished one left, such as a `vjp`
    function's residuals.
    """
    return isinstance(value, torch.Tensor) and FUNCTORCH.is_functorch_wrapped_tensor(value)


def send_on(mode: Any, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run an op at the level that it is at, with the mode back in its place for what comes out below."""
    from ..torch_private import pop_mode_from_pre_dispatch as _pop_mode_from_pre_dispatch
    from ..torch_private import set_mode_pre_dispatch as _set_mode_pre_dispatch

    _set_mode_pre_dispatch(mode)  # torch took it off while it handles this op
    try:
        if not transforming():
            return func._op_dk(KEYS.FuncTorchGradWrapper, *args, **kwargs)
        if not private.dispatch_tls_is_dispatch_key_excluded(KEYS.FuncTorchDynamicLayerFrontMode):
            func, args = without_numbers(func, args)
            return func._op_dk(KEYS.FuncTorchDynamicLayerFrontMode, *args, **kwargs)
        with private.ExcludeDispatchKeyGuard(
            ABOVE
        ):  # inside the level's own rule; on the way down torch restores the key
            return func(*args, **kwargs)
    finally:
        _pop_mode_from_pre_dispatch()


def without_numbers(func: Any, args: tuple) -> tuple[Any, tuple]:
    """Rewrite `add.Tensor(x, 1)` as `add.Scalar(x, 1)`: a level would wrap the number, and torch could not show it to
    Python again.
    """
    schema = func._schema.arguments
    places = [
        place
        for place, value in enumerate(args)
        if isinstance(value, (int, float, complex)) and str(schema[place].type) == "Tensor"
    ]
    if not places:
        return func, args
    for name in func._overloadpacket.overloads():
        other = getattr(func._overloadpacket, name)
        same = [str(argument.type) for argument in schema]
        for place in places:
            same[place] = "number"
        if [str(argument.type) for argument in other._schema.arguments] == same:
            return other, args
    tensors = [value for value in args if isinstance(value, torch.Tensor)]
    made = list(args)
    for place in places:
        dtype = torch.result_type(tensors[0], args[place]) if tensors else None
        made[place] = torch.scalar_tensor(args[place], dtype=dtype, device=tensors[0].device if tensors else None)
    return func, tuple(made)
