"""fusejit: PyTorch functions and modules, captured as graphs, fused into Triton kernels.

In: a function or an `nn.Module`. Out: the same, compiled on its first call.

    >>> fused = fusejit.jit(lambda x: torch.nn.functional.gelu(x + 1))
    >>> fused(torch.ones(3))
    tensor([1.9545, 1.9545, 1.9545])
"""

from __future__ import annotations

from . import knobs
from . import moved as _moved
from .api.compile_for import compile_for
from .api.control_flow import cond, select, while_loop
from .api.disable import disable_jit
from .api.function import JitFunction
from .api.hypermap import HyperMap, MultitypeFuncGraph
from .api.jit import jit
from .api.jit_class import jit_class
from .api.lazy_inline import lazy_inline, no_inline
from .api.module import JitModule
from .api.trace_function import TraceFunction, partial_trace, trace
from .api.transforms import grad, value_and_grad, vmap
from .capture.effect_ops import assign, depend, print
from .capture.mutable import mutable
from .errors import CaptureError, CompileError, FusejitError, TraceError, Unsupported
from .frontend.exclude import exclude_from_trace

_moved.install()

__version__ = "0.1.0"

knobs.check_environment()

__all__ = [
    "CaptureError",
    "CompileError",
    "FusejitError",
    "HyperMap",
    "JitFunction",
    "JitModule",
    "MultitypeFuncGraph",
    "TraceError",
    "TraceFunction",
    "Unsupported",
    "assign",
    "compile_for",
    "cond",
    "depend",
    "disable_jit",
    "exclude_from_trace",
    "grad",
    "jit",
    "jit_class",
    "lazy_inline",
    "mutable",
    "no_inline",
    "partial_trace",
    "print",
    "select",
    "trace",
    "value_and_grad",
    "vmap",
    "while_loop",
]
