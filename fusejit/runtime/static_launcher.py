"""torch's static launcher, where it is there and works: one C call a launch, without Triton's Python around it.

In: Triton's compiled kernel and its spec. Out: a function with the signature of `CompiledKernel.run`, or None where
Triton's own has to do.

    >>> run = static_run(binary, spec, works=lambda launch: True)
    >>> run(4, 1, 1, stream, binary.function, binary.packed_metadata, None, None, None, x, out, 1024)

It takes kernels of pointers and whole numbers that want no scratch memory, no clusters and no cooperative or dependent
launch. Whether it works with this driver is tried once per device, with a kernel whose result is read (see launch.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import torch_private as private
from .compile_workers import KernelSpec

TYPES = {"i32": "i", "i64": "l", "fp64": "d"}
"""Triton's types of plain parameters as the launcher spells them; a pointer is "O"."""
MOST = 48
"""Parameters, scratch included, up to which the launcher keeps its arguments on the stack in every version."""
SCRATCH = ("global_scratch_size", "profile_scratch_size")
"""What the kernel has a hidden last parameter for, when Triton's metadata has it; the size is 0 where the kernel does
not use it.
"""


def static_run(binary: Any, spec: KernelSpec, works: Callable[[Callable], bool]) -> Callable[..., None] | None:
    """Return what launches a loaded kernel through torch; `works` is asked last, with the launcher."""
    launch = getattr(getattr(private.torch_c, "_StaticCudaLauncher", None), "_launch_kernel", None)
    metadata = getattr(binary, "metadata", None)
    if launch is None or metadata is None:
        return None
    types = ["O" if param.startswith("*") else TYPES.get(param, "") for param in spec.params]
    hidden = [name for name in SCRATCH if hasattr(metadata, name)]
    wanted = [*(getattr(metadata, name) for name in hidden), getattr(metadata, "num_ctas", 1) != 1]
    wanted += [getattr(metadata, name, False) for name in ("launch_cooperative_grid", "launch_pdl")]
    if any(wanted) or not all(types) or len(types) + len(hidden) > MOST or not works(launch):
        return None
    count, warps, shared = len(types), metadata.num_warps, metadata.shared
    text, rest = "".join(types) + "O" * len(hidden), (None,) * len(hidden)

    def run(
        x: int, y: int, z: int, stream: int, function: int, packed: Any, data: Any, enter: Any, leave: Any, *args: Any
    ) -> None:
        launch(function, x, y, z, warps, shared, text, (*args[:count], *rest), stream)

    return run
