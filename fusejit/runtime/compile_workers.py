"""Processes that compile kernels for a named GPU, present or not.

In: `KernelSpec`s, the whole truth about a kernel, and a target. Out: `Compiled`, with PTX, cubin and what they cost.

    >>> compile_kernels([KernelSpec("def k(x, N: tl.constexpr): ...", "k", ("*fp32",), (("N", 1024),))],
        "sm_90")[0].n_regs
    18

Compiling is impossible in a process that runs Triton's interpreter, and slow in one process; so this file is also a
program: a worker that has neither TRITON_INTERPRET nor torch, reads pickled requests on stdin and answers on stdout.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import linecache
import os
import pickle
import re
import struct
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120")


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One kernel, as text.

    Args:
        source: the text of one function decorated with @triton.jit, without imports; it may use `triton`, `tl` and
            `fj`.
        name: the function's name.
        params: Triton types of its leading parameters, "*fp32", "*bf16", "*i1", "i64", ...
        constants: (name, value) of its other parameters, all tl.constexpr.
        num_warps, num_stages: as in Triton.
        debug: whether tl.device_assert is compiled in.
        aligned: for each of `params`, whether its address (or value) is a multiple of 16.
        fp_fusion: whether a multiplication and an addition may become one fma. Without it (numerics "eager") the maths
            library keeps denormal numbers too, and is the CUDA toolkit's where there is one: torch's kernels are built
            with it.
    """

    source: str
    name: str
    params: tuple[str, ...]
    constants: tuple[tuple[str, int], ...] = ()
    num_warps: int = 4
    num_stages: int = 1
    debug: bool = False
    aligned: tuple[bool, ...] = ()
    fp_fusion: bool = True

    def options(self) -> dict[str, Any]:
        """The compile options, each one explicit: Triton's defaults move between versions."""
        library = (
            {} if self.fp_fusion or not toolkit_libdevice() else {"extern_libs": {"libdevice": toolkit_libdevice()}}
        )
        return library | {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "debug": self.debug,
            "enable_fp_fusion": self.fp_fusion,
            "enable_reflect_ftz": self.fp_fusion,
            "sanitize_overflow": False,  # with debug it would turn every wrapping addition into an assertion
        }


@cache
def toolkit_libdevice() -> str:
    """Return the path of the CUDA toolkit's libdevice, "" where there is none.

    Triton bundles a version of its own, whose tanh, erf, pow, atan, asin, acos, sinh, cosh and fmod differ in the last
    bit from those of toolkits from 13.0 on. TRITON_LIBDEVICE_PATH, which Triton reads itself, wins.
    """
    if os.environ.get("TRITON_LIBDEVICE_PATH"):
        return ""
    homes = [
        os.environ.get("CUDA_HOME", ""),
        os.environ.get("CUDA_PATH", ""),
        "/usr/local/cuda",
        *sorted(_toolkits(), reverse=True),
    ]
    found = (Path(home, "nvvm", "libdevice", "libdevice.10.bc") for home in homes if home)
    return next((str(path) for path in found if path.is_file()), "")


def _toolkits() -> list[str]:
    """The CUDA toolkits beside Triton (the nvidia-cuda-nvcc packages) and in the usual place."""
    beside = Path(_tool("ptxas")).parents[4] / "nvidia"
    return [str(path) for path in (*Path("/usr/local").glob("cuda-*"), *beside.glob("cu*"))]


@dataclass(frozen=True, slots=True)
class Compiled:
    """A kernel in machine code: registers a thread, bytes spilled a thread, bytes of shared memory, 16-byte accesses in
    the PTX.
    """

    ptx: str
    cubin: bytes
    n_regs: int
    n_spills: int
    shared: int
    wide_loads: int
    wide_stores: int
    seconds: float


def target_arch(target: str) -> int:
    """Return 90 for "sm_90".

    Raises:
        ValueError: not one of TARGETS.
    """
    if target not in TARGETS:
        raise ValueError(f"target {target!r} is not known; choose one of {', '.join(TARGETS)}")
    return int(target.removeprefix("sm_"))


@cache
def define_kernel(source: str, name: str) -> Any:
    """Execute a kernel's text and return its Triton function; equal texts give the same function."""
    import triton  # only here: `import fusejit` must not load Triton
    import triton.language as tl

    from fusejit.runtime.kernels import device

    filename = f"<kernel {name} {hashlib.sha256(source.encode()).hexdigest()[:12]}>"
    # Triton reads a function's text through inspect, which asks linecache
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = {
        "triton": triton,
        "tl": tl,
        "core": tl.core,
        "fj": device,
        "__name__": "fusejit.kernels",
    }
    exec(compile(source, filename, "exec"), namespace)
    return namespace[name]


def ast_source(spec: KernelSpec) -> Any:
    """Return the spec as what triton.compile takes: types, constants and which arguments are multiples of 16."""
    from triton.compiler import ASTSource

    function = define_kernel(spec.source, spec.name)
    names = function.arg_names
    signature = dict.fromkeys(names, "constexpr") | dict(zip(names, spec.params, strict=False))
    attrs = {(i,): [["tt.divisibility", 16]] for i, aligned in enumerate(spec.aligned) if aligned}
    return ASTSource(fn=function, signature=signature, constexprs=dict(spec.constants), attrs=attrs)


def reason(error: BaseException) -> str:
    """Return the first telling line of a compile failure, with the innermost cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "error" in line.lower()] or lines[-1:] or [""]
    return f"{type(error).__name__}: {telling[0]}"


# -- the worker's side -------------------------------------------------------------------------------------------------


def _tool(name: str) -> str:
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def _memory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _resources(cubin: bytes, ptx: str, arch: int, name: str) -> tuple[int, int]:
    """Return registers and spilled bytes a thread; the stack may also hold local arrays (sin has 32 bytes), so only
    ptxas can tell.
    """
    with tempfile.TemporaryDirectory(dir=_memory()) as folder:
        binary = Path(folder, "kernel.cubin")
        binary.write_bytes(cubin)
        usage = subprocess.run(
            [_tool("cuobjdump"), "-res-usage", str(binary)], capture_output=True, text=True, check=True
        ).stdout
        found = re.search(rf"Function {re.escape(name)}:\s*REG:(\d+) STACK:(\d+)", usage)
        if found is None:
            raise ValueError(f"cuobjdump names no function {name}: {usage[:200]!r}")
        registers, stack = int(found[1]), int(found[2])
        if not stack:
            return registers, 0
        text = Path(folder, "kernel.ptx")
        text.write_text(ptx)
        ptxas = _tool("ptxas-blackwell" if arch >= 100 else "ptxas")
        version = re.search(r"^\.target\s+(\w+)", ptx, re.MULTILINE)
        command = [
            ptxas,
            "-v",
            f"--gpu-name={version[1] if version else f'sm_{arch}'}",
            str(text),
            "-o",
            f"{folder}/again.cubin",
        ]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        return registers, sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", said))


def _wide(ptx: str, access: str) -> int:
    """Count 16-byte accesses, "ld" or "st", of global memory, whatever their cache hints; loads that go to shared
    memory count.
    """
    pipelined = len(re.findall(r"\bcp\.async\.c[ag]\.shared\.global[^;]*\], 0x10,", ptx)) if access == "ld" else 0
    return pipelined + len(
        re.findall(rf"\b{access}\.global[.\w:]*\.(?:v4\.[bfu]32|v2\.[bfu]64|v8\.[bfu]16|b128)\b", ptx)
    )


def compile_spec(spec: KernelSpec, target: str, fresh: bool = False) -> Compiled:
    """Compile one kernel in this process, which must not run Triton's interpreter."""
    import triton
    from triton.backends.compiler import GPUTarget

    start = time.perf_counter()
    arch = target_arch(target)
    with contextlib.ExitStack() as stack:
        if fresh:  # an empty cache of its own, in memory where there is such a file system
            stack.enter_context(triton.knobs.cache.scope())
            triton.knobs.cache.dir = stack.enter_context(tempfile.TemporaryDirectory(dir=_memory()))
        binary = triton.compile(ast_source(spec), target=GPUTarget("cuda", arch, 32), options=spec.options())
        ptx, cubin = binary.asm["ptx"], binary.asm["cubin"]
    seconds = time.perf_counter() - start
    registers, spills = _resources(cubin, ptx, arch, binary.metadata.name)
    return Compiled(ptx, cubin, registers, spills, binary.metadata.shared, _wide(ptx, "ld"), _wide(ptx, "st"), seconds)


def _write(stream: IO[bytes], value: Any) -> None:
    data = pickle.dumps(value)
    stream.write(struct.pack("<Q", len(data)) + data)
    stream.flush()


def _read(stream: IO[bytes]) -> Any:
    header = stream.read(8)
    if len(header) < 8:
        raise EOFError("the compile worker ended")
    (length,) = struct.unpack("<Q", header)
    data = stream.read(length)
    if len(data) < length:
        raise EOFError("the compile worker ended in the middle of an answer")
    return pickle.loads(data)


def _serve() -> None:
    """Answer (spec fields, target, fresh) with ("ok", fields of Compiled) or ("error", reason) until stdin closes."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a compiler prints must not mix with the answers
    while True:
        try:
            fields, target, fresh = _read(sys.stdin.buffer)
        except EOFError:
            return
        try:
            done = compile_spec(KernelSpec(*fields), target, fresh)
            _write(answers, ("ok", tuple(getattr(done, name) for name in Compiled.__slots__)))
        except Exception as error:  # any failure of a compiler is an answer, and the worker lives on
            _write(answers, ("error", reason(error)))


# -- the side that asks ------------------------------------------------------------------------------------------------


class _Worker:
    """One worker process."""

    def __init__(self) -> None:
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment,
        )  # fmt: skip

    def ask(self, spec: KernelSpec, target: str, fresh: bool) -> Compiled:
        from ..errors import CompileError  # not at the top: the worker runs this file as a program

        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            _write(self.process.stdin, (tuple(getattr(spec, name) for name in KernelSpec.__slots__), target, fresh))
            kind, answer = _read(self.process.stdout)
        except (OSError, EOFError) as error:
            raise CompileError(
                f"kernel {spec.name}: the compile worker died (exit status {self.process.wait()}): {error}"
            ) from error
        if kind == "error":
            raise CompileError(f"kernel {spec.name} does not compile for {target}: {answer}")
        return Compiled(*answer)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.process.stdin.close()  # type: ignore[union-attr]
        try:
            self.process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


_idle: list[_Worker] = []
_lock = threading.Lock()


@contextlib.contextmanager
def _borrow() -> Iterator[_Worker]:
    with _lock:
        while _idle and not _idle[-1].alive:
            _idle.pop().close()
        worker = _idle.pop() if _idle else None
    worker = worker or _Worker()
    try:
        yield worker
    finally:
        if worker.alive:
            with _lock:
                _idle.append(worker)
        else:
            worker.close()


@atexit.register
def close_workers() -> None:
    """End all idle workers; the next compilation starts new ones."""
    with _lock:
        workers = _idle[:]
        _idle.clear()
    for worker in workers:
        worker.close()


def _forked() -> None:
    """A forked child shares neither its parent's pipes nor a lock that another of the parent's threads may hold."""
    _idle.clear()
    _lock._at_fork_reinit()  # type: ignore[attr-defined]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def worker_count(n: int) -> int:
    """Return how many workers compile `n` kernels: the knob's number, or one per core and at most two."""
    from ..knobs import read

    return max(
        1, min(n, read("workers") or min(2, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2))
    )


def compile_kernels(specs: Sequence[KernelSpec], target: str = "sm_90", fresh: bool = False) -> list[Compiled]:
    """Compile kernels for `target`, each one once, on up to two processes; `fresh` ignores Triton's cache on disk.

    Raises:
        ValueError: the target is not known.
        CompileError: a kernel does not compile, or a worker died; the others still finish.
    """
    target_arch(target)
    pending = iter(dict.fromkeys(specs))
    results: dict[KernelSpec, Compiled] = {}
    failures: list[Exception] = []
    take = threading.Lock()

    def work() -> None:
        with _borrow() as worker:
            while True:
                with take:
                    spec = next(pending, None)
                if spec is None:
                    return
                results[spec] = worker.ask(spec, target, fresh)

    def guarded() -> None:
        while True:
            try:
                return work()
            except Exception as error:  # carried to the caller's thread below
                failures.append(error)

    threads = (
        [threading.Thread(target=guarded, daemon=True) for _ in range(worker_count(len(set(specs))))] if specs else []
    )
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return [results[spec] for spec in specs]


if __name__ == "__main__":
    # the package without its __init__, which would import torch
    package = types.ModuleType("fusejit")
    package.__path__ = [str(Path(__file__).resolve().parent.parent)]
    sys.modules["fusejit"] = package
    sys.path = [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]
    _serve()
