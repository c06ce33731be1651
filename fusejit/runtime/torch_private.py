"""What the hot path takes from torch's private C interface, each looked for once, here, with another way where it is
missing.

In: tensors and dicts as they are now. Out: functions that say whether they still are like that, and allocation without
Python's parser.

    >>> check = tensor_check([x, weight])
    >>> check(x, weight), check(x.double(), weight)
    (True, False)

Measured, in microseconds: `TensorGuards` 0.2 for one tensor and 0.1 for each more, against 0.5 for each in Python; the
versions of 750 dicts 7 through torch's guard tree and 40 one by one; `_empty_strided_cpu` 0.9, `torch.empty_strided`
3.2.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

try:
    from torch._C._dynamo import guards as _guards
except ImportError:  # a build without Dynamo's C part: everything below has a second way
    _guards = None  # type: ignore[assignment]

Tensor = torch.Tensor


# The device.


def recording() -> bool:
    """Whether the caller records a CUDA graph on this stream: nothing may wait for the device then."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


# Dynamo.


def unread(function: Any) -> Any:
    """Keep Dynamo from reading a function of ours, and all that it calls, where autograd calls it amid a function that
    is read.
    """
    frames: Any = getattr(torch._C._dynamo, "eval_frame", None)
    if hasattr(frames, "set_code_exec_strategy"):
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function


# Tensors.


Free = Sequence[tuple[Sequence[bool], Sequence[bool]]]
"""For each tensor which of its sizes, and which of its strides, may be any; nothing where none may."""


def tensor_check(tensors: Sequence[Tensor], free: Free = ()) -> Callable[..., bool]:
    """Return `check(*tensors) -> bool`: as many tensors, all different objects, each with the type, dtype, device,
    sizes, strides (but for those that are free), requires_grad and dispatch keys (conjugation, negation, inference,
    functorch) of its example.
    """
    if hasattr(_guards, "TensorGuards"):
        # both keywords have to be there, or it crashes; None asks for equal sizes and strides, a list for each that is
        # not None
        sizes: Any = None
        strides: Any = None
        if free:
            shown = [described(tensor, *parts) for tensor, parts in zip(tensors, free, strict=True)]
            sizes, strides = [list(one) for one, _ in shown], [list(other) for _, other in shown]
        return _guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return python_tensor_check(tensors, free)


def python_tensor_check(tensors: Sequence[Tensor], free: Free = ()) -> Callable[..., bool]:
    """The same in Python, where torch has no `TensorGuards`."""
    free = free or [((), ())] * len(tensors)
    wanted = [tensor_facts(*parts) for parts in zip(tensors, free, strict=True)]
    state = surroundings()

    def check(*given: Any) -> bool:
        if len({id(tensor) for tensor in given}) != len(wanted) or surroundings() != state:
            return False
        return all(
            isinstance(t, Tensor) and tensor_facts(t, parts) == facts
            for t, parts, facts in zip(given, free, wanted, strict=True)
        )

    return check


def described(tensor: Tensor, sizes: Sequence[bool], strides: Sequence[bool]) -> tuple[tuple, tuple]:
    """The sizes and strides of a tensor, None where they may be any."""
    found = []
    for values, any_value in ((tensor.shape, sizes), (tensor.stride(), strides)):
        found.append(
            tuple([None if may else n for n, may in zip(values, any_value or (False,) * len(values), strict=False)])
        )
    return found[0], found[1]


def tensor_facts(tensor: Tensor, free: tuple[Sequence[bool], Sequence[bool]] = ((), ())) -> tuple:
    places = described(tensor, *free) if tensor.layout is torch.strided else (tensor.shape, None)
    keys = torch._C._dispatch_keys(tensor)
    return (type(tensor), tensor.dtype, tensor.device, tensor.dim(), places, tensor.requires_grad, keys)


def surroundings() -> tuple:
    """What `TensorGuards` sees of this thread through the dispatch keys that are switched on and off."""
    return (
        torch.is_inference_mode_enabled(),
        torch._C._functorch.maybe_current_level(),
        torch._C._is_any_autocast_enabled(),
    )


# Dicts.


def counts_changes() -> bool:
    """Whether torch can tell that a dict was changed (Python's dict versions, or a watcher)."""
    return hasattr(_guards, "dict_version")


def version_of(table: dict) -> int:
    """A number that no two states of any two dicts share."""
    return int(_guards.dict_version(table))


def has_tree(count: int) -> bool:
    """Whether so many things are checked by torch's guard tree, which needs Dynamo: 2 s of import, loaded already where
    anything was compiled.
    """
    return count > 8 and "torch._dynamo.guards" in sys.modules and hasattr(_guards, "RootGuardManager")


def dict_check(
    tables: Sequence[dict], objects: Sequence[Any] = (), tensors: Sequence[Tensor] = ()
) -> Callable[[tuple], bool]:
    """Return `check((*tables, *objects, *tensors)) -> bool`, for these very dicts and objects: no dict has been changed
    since now, each object is still of the class that it is of now, and each tensor has the metadata that it has now (as
    of `tensor_check`).
    """
    count, kinds = len(tables), [*map(type, objects)]
    if has_tree(count + len(kinds) + len(tensors)):
        guard = sys.modules["torch._dynamo.guards"].GuardManagerType.GUARD_MANAGER
        tree = _guards.RootGuardManager()
        for number, item in enumerate((*tables, *objects, *tensors)):
            child = tree.tuple_getitem_manager(number, f"watched[{number}]", item, guard)
            if number < count:
                child.add_dict_version_guard(item, ["unchanged"], None)
            elif number < count + len(kinds):
                child.add_type_match_guard(id(type(item)), ["same class"], None)
            else:
                keys = torch._C._dispatch_keys(item)
                child.add_tensor_match_guard(
                    item, [*item.shape], [*item.stride()], f"watched[{number}]", [""], None, type(item), keys
                )
        return tree.check  # type: ignore[no-any-return]
    version, end = _guards.dict_version, count + len(kinds)
    versions, same = [version(table) for table in tables], tensor_check(tensors) if tensors else None

    def check(given: tuple) -> bool:
        if [*map(version, given[:count])] != versions or [*map(type, given[count:end])] != kinds:
            return False
        return same is None or same(*given[end:])

    return check


# Allocation.


def allocator(device: torch.device) -> Callable[[Sequence[int], Sequence[int], torch.dtype], Tensor]:
    """Return `empty(sizes, strides, dtype)` for one device."""
    direct = getattr(_guards, f"_empty_strided_{device.type}", None)
    if direct is None or device.type not in ("cpu", "cuda"):
        return lambda sizes, strides, dtype: torch.empty_strided(sizes, strides, dtype=dtype, device=device)
    if device.type == "cpu" or device.index is None:
        return direct  # type: ignore[no-any-return]
    index = device.index

    def empty(sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
        if torch._C._cuda_getDevice() == index:  # the direct call takes the current device
            return direct(sizes, strides, dtype)  # type: ignore[no-any-return]
        return torch.empty_strided(sizes, strides, dtype=dtype, device=device)

    return empty


# Autograd.


raise_versions: Callable[[Sequence[Tensor]], None] = torch._C._increment_version
"""Tell autograd that tensors were changed in place by what it did not see, so that a backward that saved them raises as
in eager.
"""


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` without its Python part, which serves functorch and `setup_context` and takes 5 us; not inside
    torch.func.
    """
    direct = getattr(super(torch.autograd.Function, function), "apply", None)
    return function.apply if direct is None else direct  # type: ignore[no-any-return]
