"""Arguments that no capture can take, refused by name.

In: the leaves of a call. Out: nothing, or one error that names the argument and the way out.

    >>> check_arguments(structure, leaves)
    ArgumentError: argument mask is a numpy array: pass torch.from_numpy(mask) instead
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import CaptureError, Unsupported
from . import pytree

Tensor = torch.Tensor
PLAIN_TYPES = (Tensor, torch.nn.Parameter)


class ArgumentError(CaptureError, TypeError):
    """An argument whose type a jitted function cannot take."""


def refuse_tensor(value: Tensor, what: str) -> None:
    """Raise for a tensor that is no plain strided one."""
    if type(value) not in PLAIN_TYPES and not isinstance(value, torch.nn.Parameter):
        from ..torch_private import FakeTensor

        if not isinstance(value, FakeTensor):
            raise Unsupported(
                f"{what} of type {type(value).__name__}", "tensor subclasses run eagerly", in_python=False
            )
    if value.is_neg() or value.is_conj():
        raise Unsupported(
            f"{what} that is a conjugate or negative view", "kernels read its memory as it is", in_python=False
        )
    if value.layout is not torch.strided or value.is_nested or value.is_quantized:
        raise Unsupported(f"{what} with layout {value.layout}", "only strided tensors are captured", in_python=False)


def check_arguments(structure: Any, leaves: list[Any]) -> None:
    """Refuse arguments that no capture can take, by name."""
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            refuse_tensor(leaf, f"argument {argument_name(structure, number)}")
        elif type(leaf).__module__ == "numpy" and type(leaf).__name__ == "ndarray":
            name = argument_name(structure, number)
            raise ArgumentError(f"argument {name} is a numpy array: pass torch.from_numpy({name}) instead")
        elif hasattr(type(leaf), "__next__"):
            reason = "it can be read only once; pass a list or a tuple"
            raise ArgumentError(
                f"argument {argument_name(structure, number)} is an iterator ({type(leaf).__name__}): {reason}"
            )


def argument_name(structure: Any, number: int) -> str:
    """Name a leaf of (args, kwargs): ``args[0]`` or ``mask``."""
    path = pytree.paths(structure)[number]
    if path.startswith("[0]"):
        return "args" + path[3:]
    keyword, _, rest = path[3:].partition("]")
    return keyword.strip("['\"") + rest
