"""fusejit: PyTorch functions and modules, captured as graphs, fused into Triton kernels.

In: a function or an `nn.Module`. Out: the same, compiled on its first call.

    >>> fused = fusejit.jit(lambda x: torch.nn.functional.gelu(x + 1))
    >>> fused(torch.ones(3))
    tensor([1.9545, 1.9545, 1.9545])
"""

from __future__ import annotations

from .errors import CaptureError, CompileError, FusejitError, TraceError, Unsupported
from .function import JitFunction, disable_jit
from .jit import jit
from .module import JitModule
from .rewrites.lazy_inline import lazy_inline, no_inline
from .specialise import compile_for

__version__ = "0.1.0"

__all__ = [
    "CaptureError",
    "CompileError",
    "FusejitError",
    "JitFunction",
    "JitModule",
    "TraceError",
    "Unsupported",
    "compile_for",
    "disable_jit",
    "jit",
    "lazy_inline",
    "no_inline",
]
