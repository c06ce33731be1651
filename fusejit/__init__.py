"""fusejit: PyTorch functions and modules, captured as graphs, fused into Triton kernels.

In: a function or an `nn.Module`. Out: the same, compiled on its first call.

    >>> fused = fusejit.jit(lambda x: torch.nn.functional.gelu(x + 1))
    >>> fused(torch.ones(3))
    tensor([1.9545, 1.9545, 1.9545])
"""

from __future__ import annotations

from .ahead import compile_for
from .capture.mutable import mutable
from .capture.ordered import assign, depend, print
from .errors import CaptureError, CompileError, FusejitError, TraceError, Unsupported
from .function import JitFunction
from .jit import jit
from .module import JitModule
from .rewrites.batch import grad, value_and_grad, vmap
from .rewrites.by_hand import cond, select, while_loop
from .rewrites.exclude import exclude_from_trace
from .rewrites.hypermap import HyperMap, MultitypeFuncGraph
from .rewrites.jit_class import jit_class
from .rewrites.lazy_inline import lazy_inline, no_inline
from .switch import disable_jit
from .tracing import TraceFunction, partial_trace, trace

__version__ = "0.1.0"

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
