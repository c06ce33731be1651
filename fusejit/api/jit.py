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

from .. import knobs
from ..options import BACKENDS, LEVELS, MODES, NUMERICS, Settings, check
from .dynamo_function import jit_function
from .function import JitFunction
from .module import JitModule

CHOICES = {
    "fullgraph": (False, True),
    "fast_math": (False, True),
    "capture_mode": MODES,
    "jit_level": LEVELS,
    "backend": BACKENDS,
    "numerics": NUMERICS,
    "dynamic": (None, False, True),
    "cuda_graph": (None, False, True),
}


def jit(
    fn_or_module: Any = None,
    *,
    capture_mode: str = "ast",
    jit_level: str = "O2",
    fullgraph: bool = False,
    backend: str = "auto",
    dynamic: Any = None,
    numerics: str = "fast",
    fast_math: bool = False,
    cuda_graph: bool | None = None,
    chunk_bytes: int | None = None,
    name: str | None = None,
) -> Any:
    """Compile a function or a module when it is called.

    Args:
        fn_or_module: a function, method, callable object or `nn.Module`; None makes a decorator. A class is changed:
            calls of its instances (`forward` of an `nn.Module`, `__call__` of others) run compiled from then on.
        capture_mode: "ast" rewrites control flow on tensors (`if`, `while`, `and`, ...) into selects, branches and
            loops of the graph, then traces; "trace" traces the Python as it is; "bytecode" lets torch's Dynamo read the
            bytecode, and where that cannot go on (a graph break) runs the Python between two graphs. What "ast" cannot
            capture falls to "bytecode" where kernels are compiled and the Python, not its tensors, is the reason; what
            "trace" or "bytecode" cannot, runs eagerly.
        jit_level: O0 runs the captured graph op by op; O1 fuses elementwise ops; O2 adds reductions; O3 measures, and
            fuses across blocks.
        fullgraph: raise `CaptureError` where the function cannot be captured, instead of running it eagerly.
        backend: "auto" (triton for CUDA tensors, eager otherwise), "triton", "interpret" (the kernels on the CPU),
            "eager". FUSEJIT_BACKEND replaces "auto".
        dynamic: None specialises on the first sizes and makes a dimension that changes a symbol at the second, True all
            of them at once; False compiles each shape. Sizes 0 and 1 are always specialised. What torch's
            `mark_dynamic`, `maybe_mark_dynamic` and `mark_static` noted on a tensor is honoured (not with False).
            Python numbers likewise: an int from 2 on and a finite float other than 0.0 are inputs from their second
            value on; where the body needs the value (`range(n)`), each has a program.
        numerics: "fast" rounds a fused chain once, "eager" after each op as torch does. Random numbers: "fast" makes
            them inside the kernels, all from one seed of torch's default generator; "eager" calls torch's random ops in
            order, and has their numbers.
        fast_math: also rewrite `y / y` to 1, `log(exp(a) + exp(b))` to logaddexp and the like, which differs from eager
            where that overflows or is nan (codegen/graph/fast_math.py has the table).
        cuda_graph: replay the launches of a call at once (runtime/cudagraph.py); None: at O3. Where not, `explain()`
            has the reason.
        chunk_bytes: larger products whose rows are only reduced (logits) are computed in parts of so many; 0: never;
            None: knobs.py, 1 GiB
        name: how messages and kernels call the function.

    Returns:
        A `JitModule` for an `nn.Module`, a `JitFunction` for anything else.

    Raises:
        ValueError: an option is none of its choices. TypeError: the argument is not callable.
    """
    more = {"fast_math": fast_math, "dynamic": dynamic, "cuda_graph": cuda_graph, "chunk_bytes": chunk_bytes}
    settings = Settings(capture_mode, jit_level, fullgraph, backend, numerics, name or "", **more)
    check_options(settings)
    return functools.partial(make, settings=settings) if fn_or_module is None else make(fn_or_module, settings=settings)


def check_options(settings: Settings) -> None:
    """Refuse options and environment variables that are none of their choices."""
    knobs.check_values()
    for option, choices in CHOICES.items():
        check(option, getattr(settings, option), choices)


def make(target: Any, settings: Settings) -> Any:
    """Wrap what was given to `jit`."""
    if isinstance(target, (JitFunction, JitModule)):
        target = target.__wrapped__
    if isinstance(target, torch.nn.Module):
        return JitModule(target, settings)
    if isinstance(target, (staticmethod, classmethod)):
        return type(target)(make(target.__func__, settings))
    if isinstance(target, type):
        return jit_methods(target, settings)
    if not callable(target):
        raise TypeError(
            f"fusejit.jit takes a function, a method, a callable object, a class or an nn.Module, not {target!r}"
        )
    return jit_function(target, settings)


def jit_methods(cls: type, settings: Settings) -> type:
    """Jit what calling an instance of a class runs: `forward` of an `nn.Module`, `__call__` of any other; changes the
    class.
    """
    name = "forward" if issubclass(cls, torch.nn.Module) else "__call__"
    method = getattr(cls, name, None)
    if method is None or name == "__call__" and not any(name in base.__dict__ for base in cls.__mro__):
        raise TypeError(
            f"fusejit.jit of class {cls.__name__}: its instances cannot be called; give it a __call__, or jit its "
            "methods"
        )
    setattr(cls, name, make(method, settings))
    return cls
