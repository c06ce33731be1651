"""`jit`: functions and modules that capture themselves when they are called, and run the compiled graph from then on.

In: a function, method, callable object or `nn.Module`. Out: a `JitFunction` or a `JitModule`, called like the original.

    >>> @fusejit.jit
    ... def f(x):
    ...     return torch.nn.functional.gelu(x + 1)
    >>> f(torch.ones(3)).shape
    torch.Size([3])
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from .function import JitFunction
from .module import JitModule
from .specialise import BACKENDS, LEVELS, MODES, NUMERICS, Settings


def jit(
    fn_or_module: Any = None,
    *,
    capture_mode: str = "ast",
    jit_level: str = "O2",
    fullgraph: bool = False,
    backend: str = "auto",
    dynamic: Any = None,
    numerics: str = "fast",
    name: str | None = None,
) -> Any:
    """Compile a function or a module when it is called.

    Args:
        fn_or_module: a function, method, callable object or `nn.Module`; None makes a decorator.
        capture_mode: "ast" rewrites control flow on tensors (`if`, `while`, `and`, ...) into selects, branches and loops of the graph,
            then traces; "trace" traces the Python as it is; "bytecode" is not there yet.
        jit_level: O0 runs the captured graph op by op; O1 fuses elementwise ops; O2 adds reductions; O3 autotuning.
        fullgraph: raise `CaptureError` where the function cannot be captured, instead of running it eagerly.
        backend: "auto" (triton for CUDA tensors, eager otherwise), "triton", "interpret" (the kernels on the CPU), "eager".
            FUSEJIT_BACKEND replaces "auto".
        dynamic: None or False: one specialisation a shape.
        numerics: "fast" rounds a fused chain once, "eager" after each op as torch does.
        name: how messages and kernels call the function.

    Returns:
        A `JitModule` for an `nn.Module`, a `JitFunction` for anything else.

    Raises:
        ValueError: an option is none of its choices. TypeError: the argument is not callable.
    """
    settings = Settings(capture_mode, jit_level, check_flag("fullgraph", fullgraph), backend, numerics, name or "")
    check("capture_mode", capture_mode, MODES)
    check("jit_level", jit_level, LEVELS)
    check("backend", backend, BACKENDS)
    check("numerics", numerics, NUMERICS)
    if dynamic not in (None, False):
        if dynamic is True:
            raise NotImplementedError("dynamic=True is not available yet: use None or False, which compile once per shape")
        raise ValueError(f"dynamic={dynamic!r}: choose one of None, False, True")
    if capture_mode == "bytecode":
        raise NotImplementedError("capture_mode='bytecode' is not available yet: use 'ast' or 'trace'")
    if fn_or_module is None:
        return functools.partial(make, settings=settings)
    return make(fn_or_module, settings=settings)


def check(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r}: choose one of {', '.join(map(repr, choices))}")


def check_flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: choose one of True, False")
    return value


def make(target: Any, settings: Settings) -> Any:
    """Wrap what was given to `jit`."""
    if isinstance(target, (JitFunction, JitModule)):
        target = target.__wrapped__
    if isinstance(target, torch.nn.Module):
        return JitModule(target, settings)
    if isinstance(target, (staticmethod, classmethod)):
        return type(target)(make(target.__func__, settings))
    if not callable(target) or isinstance(target, type):
        raise TypeError(f"fusejit.jit takes a function, a method, a callable object or an nn.Module, not {target!r}")
    return JitFunction(target, settings)
