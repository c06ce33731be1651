"""Kernels that can be called: compiled once per process, launched on the current stream of their arguments' device.

In: a kernel's text, parameter types, constants and grid. Out: a `Launcher`.

    >>> add = kernel(source, name="add_0", params=("*fp32", "*fp32"), constants={"XBLOCK": 1024}, grid=(4, 1, 1),
        num_warps=4)
    >>> add(x, out)

With TRITON_INTERPRET=1 the same text runs in Triton's interpreter on CPU tensors.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from .. import torch_private as private
from ..errors import CompileError, KernelAssertion
from ..fork_locks import renewed
from .compile_workers import KernelSpec, ast_source, compile_kernels, define_kernel, reason, target_arch
from .static_launcher import static_run

log = logging.getLogger("fusejit")
MANY = 48  # pointers beyond which one unaligned address counts for all
_lock = renewed(threading.RLock())
_static: dict[int, bool] = {}  # by device, whether torch's static launcher works there
_binaries: dict[tuple[KernelSpec, int], Any] = {}  # (kernel, device) -> Triton's compiled kernel, loaded


@cache
def interpreted() -> bool:
    """Whether this process runs kernels in Triton's interpreter."""
    import triton  # only here: `import fusejit` must not load Triton

    return bool(triton.knobs.runtime.interpret)


class Launcher:
    """A kernel with its grid. Call it with the tensors (and numbers) of its parameters, in their order.

    Launching runs on the current stream and on the tensors' device; a tensor whose address breaks an `aligned` promise
    is served by a variant of the kernel compiled without that promise.

    Raises:
        CompileError: the kernel cannot be compiled or its arguments cannot be launched; not remembered, a later call
            tries again.
        IndexError: under the interpreter, an index was out of bounds.
    """

    __slots__ = ("_checked", "_constants", "_empty", "_loaded", "grid", "spec")

    def __init__(self, spec: KernelSpec, grid: tuple[int, int, int], own: tuple[int, ...] = ()) -> None:
        self.spec, self.grid = spec, grid
        self._constants = tuple(value for _, value in spec.constants)
        aligned = [i for i, promise in enumerate(spec.aligned) if promise and spec.params[i].startswith("*")]
        self._checked = tuple(i for i in aligned if i not in own)
        self._empty = not all(grid)
        # a device, and how the kernel is run there, in one piece: threads may launch on two devices
        self._loaded: tuple[int | None, Any, Any, Any] = (None, None, None, None)

    def __repr__(self) -> str:
        return f"Launcher({self.spec.name}, grid={self.grid})"

    def __call__(self, *args: Any) -> None:
        device, run, function, metadata = self._loaded
        # of a CPU tensor -1, where nothing is ever loaded
        if not args or args[0].get_device() != device or device != private.cuda_getDevice():
            self._elsewhere(args)
            return
        for i in self._checked:
            if args[i].data_ptr() % 16:
                self._unaligned(args)
                return
        if self._empty:
            return
        x, y, z = self.grid
        run(
            x,
            y,
            z,
            private.cuda_getCurrentRawStream(device),
            function,
            metadata,
            None,
            None,
            None,
            *args,
            *self._constants,
        )

    def _elsewhere(self, args: tuple[Any, ...]) -> None:
        """Launch on a device that is not the current one, or for the first time on this one, or in the interpreter."""
        if interpreted():
            _interpret(self, args)
            return
        device = args[0].device
        if device.type != "cuda":
            hint = (
                "; set TRITON_INTERPRET=1 before importing triton to run it on the CPU" if device.type == "cpu" else ""
            )
            raise CompileError(f"kernel {self.spec.name}: cannot be launched on {device} tensors{hint}")
        with torch.cuda.device(device.index):
            binary = _binary(self.spec, device.index)
            run = static_run(binary, self.spec, functools.partial(_works, device.index)) or binary.run
            self._loaded = (device.index, run, binary.function, binary.packed_metadata)
            self(*args)

    def _unaligned(self, args: tuple[Any, ...]) -> None:
        # of a kernel of many tensors there are two variants, not one for each set of unaligned addresses
        broken = {i for i in self._checked if len(self._checked) > MANY or args[i].data_ptr() % 16}
        aligned = tuple(a and i not in broken for i, a in enumerate(self.spec.aligned))
        _launcher(replace(self.spec, aligned=aligned), self.grid)(*args)

    def compile(self) -> None:
        """Compile now for the current device, instead of at the first call. Nothing to do under the interpreter."""
        if interpreted():
            define_kernel(self.spec.source, self.spec.name)
        else:
            _binary(self.spec, torch.cuda.current_device())


def kernel(
    source: str,
    *,
    name: str,
    params: Sequence[str],
    constants: Mapping[str, int] | None = None,
    grid: tuple[int, int, int] = (1, 1, 1),
    num_warps: int = 4,
    num_stages: int = 1,
    debug: bool = False,
    aligned: Sequence[bool] = (),
    fp_fusion: bool = True,
    own: Sequence[int] = (),
) -> Launcher:
    """Return the launcher of a kernel; equal kernels give the same launcher and compile once per process.

    Args:
        source: the text of one function decorated with @triton.jit, using `triton`, `tl` and `fj`
            (fusejit.runtime.kernels.device).
        name: the function's name.
        params: Triton types of its leading parameters, in order ("*fp32", "*i1", "i64").
        constants: values of the remaining, tl.constexpr, parameters, in the function's order.
        grid: programs along each axis.
        num_warps, num_stages, debug, fp_fusion: see KernelSpec.
        aligned: for each param, whether the kernel may rely on an address that is a multiple of 16.
        own: numbers of the params that the program allocates itself, whose addresses need no look.
    """
    constant_items = tuple((constants or {}).items())
    spec = KernelSpec(
        source, name, tuple(params), constant_items, num_warps, num_stages, debug, tuple(aligned), fp_fusion
    )
    return _launcher(spec, tuple(grid), tuple(own))  # type: ignore[arg-type]


@cache
def _launcher(spec: KernelSpec, grid: tuple[int, int, int], own: tuple[int, ...] = ()) -> Launcher:
    return Launcher(spec, grid, own)


def compile_all(launchers: Iterable[Launcher]) -> None:
    """Compile many kernels for the current device, in parallel where it pays."""
    wanted = list(dict.fromkeys(launchers))
    if interpreted():
        for launcher in wanted:
            launcher.compile()
        return
    device = torch.cuda.current_device()
    missing = {launcher.spec: launcher for launcher in wanted if (launcher.spec, device) not in _binaries}
    major, minor = torch.cuda.get_device_capability(device)
    if len(missing) > 2:
        # the workers leave the binaries in Triton's cache on disk, where the loads below find them
        compile_kernels(list(missing), _known_target(f"sm_{major}{minor}"))
    for launcher in missing.values():
        launcher.compile()


def _known_target(target: str) -> str:
    try:
        target_arch(target)
    except ValueError as error:
        raise CompileError(f"this GPU is not supported: {error}") from error
    return target


def _binary(spec: KernelSpec, device: int) -> Any:
    """Return Triton's compiled kernel, loaded on `device`, which is the current one."""
    found = _binaries.get((spec, device))
    if found is not None:
        return found
    with _lock:
        if (spec, device) not in _binaries:
            import triton

            try:
                binary = triton.compile(ast_source(spec), options=spec.options())
                binary.run  # noqa: B018  reading it loads the module and makes the launcher
            except Exception as error:
                raise CompileError(f"kernel {spec.name} does not compile: {reason(error)}") from error
            _binaries[spec, device] = binary
        return _binaries[spec, device]


PROBE = """@triton.jit
def probe(out, number):
    tl.store(out, number)
"""


def _works(device: int, launch: Callable) -> bool:
    """Whether torch's static launcher runs a kernel on this device, which is the current one; tried once."""
    with _lock:
        if device not in _static:
            if torch.cuda.is_current_stream_capturing():
                return False  # the result of the probe cannot be read now
            spec = KernelSpec(PROBE, "probe", ("*i32", "i32"), ())
            out = torch.zeros(1, dtype=torch.int32, device=torch.device("cuda", device))
            binary = _binary(spec, device)
            run = static_run(binary, spec, lambda launch: True)
            try:
                if run is not None:
                    stream = private.cuda_getCurrentRawStream(device)
                    run(1, 1, 1, stream, binary.function, None, None, None, None, out, 7)
            except (RuntimeError, TypeError, ValueError) as error:  # another signature than the one known
                log.info("torch's static launcher is not used: %s", error)
            _static[device] = out.item() == 7
        return _static[device]


# -- the interpreter ---------------------------------------------------------------------------------------------------


@cache
def _comparisons_are_bool() -> None:
    """Let the interpreter's comparisons have the type int1: they keep their operands' type, which a later broadcast
    restores.
    """
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder

    original = InterpreterBuilder.binary_op

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        result = original(self, lhs, rhs, op)
        if result.data.dtype == np.bool_:
            result.dtype = tl.int1
        return result

    InterpreterBuilder.binary_op = binary_op


@cache
def _interpretable(spec: KernelSpec) -> Any:
    """Return the kernel as a Python function, and make triton.language interpret from now on.

    Triton patches its language before and after each launch and before each device function call, about 20 ms; a
    process with TRITON_INTERPRET=1 never compiles, so patching once is enough.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    _comparisons_are_bool()
    function = define_kernel(spec.source, spec.name).fn
    interpreter._patch_lang(function)
    # a loop from a program's number on: 3.6 takes int() of an array of one element, which NumPy no longer allows
    tl.tensor.__index__ = lambda self: int(self.handle.data.item())
    return function


def _argument(kind: str, value: Any) -> Any:
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle, _get_np_dtype

    dtype = tl.str_to_ty(kind, None)
    data = np.array([value.data_ptr()], np.uint64) if kind.startswith("*") else np.array([value], _get_np_dtype(dtype))
    return tl.tensor(TensorHandle(data, dtype), dtype)


def _interpret(launcher: Launcher, args: tuple[Any, ...]) -> None:
    import numpy as np
    from triton.runtime.interpreter import interpreter_builder

    spec = launcher.spec
    for i, value in enumerate(args):
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            raise CompileError(
                f"kernel {spec.name}: argument {i} is on {value.device}, but the interpreter runs on the CPU"
            )
    with _lock, np.errstate(all="ignore"):
        try:
            function = _interpretable(spec)
            values = [_argument(kind, value) for kind, value in zip(spec.params, args, strict=True)]
            constants = dict(spec.constants)
            interpreter_builder.set_grid_dim(*launcher.grid)
            for x in range(launcher.grid[0]):
                for y in range(launcher.grid[1]):
                    for z in range(launcher.grid[2]):
                        interpreter_builder.set_grid_idx(x, y, z)
                        function(*values, **constants)
        except (IndexError, KernelAssertion) as error:
            error.add_note(f"in kernel {spec.name}")
            raise
        except Exception as error:
            raise CompileError(f"kernel {spec.name} fails in the interpreter: {reason(error)}") from error
