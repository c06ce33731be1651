"""Compiling ahead of time: the kernels of a call, for a GPU that need not be there.

In: a function, example arguments and an architecture. Out: `Programs`, with the machine code and its figures.

    >>> compile_for(lambda x: x.softmax(-1), (torch.randn(64, 1024),), target="sm_90").kernels[0].n_spills
    0
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..capture import pytree
from ..errors import CaptureError, Unsupported
from ..options import Settings
from ..specialise.specialisation import Specialisation
from ..specialise.specialise import specialise


@dataclass(frozen=True, slots=True)
class Programs:
    """What `compile_for` returns: the forward Program and, where something requires grad, the backward one.

    Attributes:
        kernels: those of both; `.ptx`, `.cubin`, `.n_regs`, `.n_spills`, `.shared` and `.wide_loads` of each are there.
        source: of both, as one Python text. compile_ms: milliseconds by stage. specialisation: the graphs of each
            stage.
    """

    forward: Any
    backward: Any
    specialisation: Specialisation

    @property
    def compile_ms(self) -> dict[str, float]:
        return self.specialisation.stages_ms

    @property
    def kernels(self) -> list[Any]:
        halves = [program for program in (self.forward, self.backward) if program is not None]
        return [kernel for half in halves for program in (half, *half.called) for kernel in program.kernels]

    @property
    def source(self) -> str:
        return "\n\n".join(program.source for program in (self.forward, self.backward) if program is not None)


def compile_for(
    fn: Callable,
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    *,
    target: str = "sm_90",
    jit_level: str = "O2",
    numerics: str = "fast",
    name: str | None = None,
) -> Programs:
    """Compile a function for a GPU without running it, and without the GPU.

    Args:
        fn: function or `nn.Module`; args, kwargs: of one call. Tensors may be on the CPU, or fake; their values do not
            matter.
        target: the GPU's architecture: "sm_80", "sm_90", ...

    Raises:
        CaptureError: the function cannot be captured. CompileError: a kernel cannot be compiled.
    """
    fn = getattr(fn, "__wrapped__", fn) if hasattr(type(fn), "explain") else fn  # of a jitted function, the original
    name = name or str(getattr(fn, "__qualname__", type(fn).__name__))
    settings = Settings(
        jit_level=jit_level, fullgraph=True, backend="triton", numerics=numerics, name=name, target=target
    )
    leaves: list[Any] = []
    pytree.flatten((tuple(args), kwargs or {}), leaves)
    try:
        specialisation = specialise(fn, tuple(args), kwargs or {}, leaves, settings)
    except Unsupported as error:
        raise CaptureError(f"cannot capture {name!r}: {error}") from error
    return Programs(specialisation.forward, specialisation.backward, specialisation)
