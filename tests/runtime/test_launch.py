"""Launching and compiling kernels: memoised, in Triton's interpreter, on a GPU, and for a GPU that is not there."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import types

import pytest
import torch

from fusejit import torch_private as private
from fusejit.errors import CompileError
from fusejit.runtime import compile_workers, launch
from fusejit.runtime.compile_workers import KernelSpec, compile_kernels
from fusejit.runtime.launch import compile_all, interpreted, kernel

ADD = """@triton.jit
def add(x, y, o, N: tl.constexpr, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    m = i < N
    tl.store(o + i, tl.load(x + i, mask=m) + tl.load(y + i, mask=m), mask=m)
"""
F32 = ("*fp32",) * 3


def adder(n=3000, block=1024, source=ADD, params=F32, **more):
    return kernel(
        source, name="add", params=params, constants={"N": n, "B": block}, grid=(-(-n // block), 1, 1), **more
    )


def spec(source=ADD, **more):
    return KernelSpec(source, "add", F32, (("N", 1 << 20), ("B", 1024)), aligned=(True,) * 3, **more)


def test_adds(device="cpu"):
    x, y = torch.randn(3000, device=device), torch.randn(3000, device=device)
    out = torch.empty_like(x)
    adder()(x, y, out)
    assert torch.equal(out, x + y)


def test_equal_kernels_are_one():
    assert adder() is adder()
    assert adder() is not adder(n=3001)
    assert adder() is not adder(num_warps=8)
    assert "add" in repr(adder())


def test_an_empty_grid_launches_nothing():
    out = torch.full((3,), 7.0)
    kernel(ADD, name="add", params=F32, constants={"N": 0, "B": 16}, grid=(0, 1, 1))(out, out, out)
    assert out.tolist() == [7, 7, 7]


@pytest.mark.parametrize(
    "dtype,kind",
    [
        (torch.float64, "*fp64"), (torch.float16, "*fp16"), (torch.int64, "*i64"), (torch.int32, "*i32"),
        (torch.int16, "*i16"),
        (torch.int8, "*i8"), (torch.uint8, "*u8"),
    ],
)  # fmt: skip
def test_pointer_types(dtype, kind):
    x = torch.arange(300).to(dtype)
    out = torch.empty_like(x)
    adder(300, 256, params=(kind,) * 3)(x, x, out)
    assert torch.equal(out, x + x)


def test_bool_pointers_and_numbers():
    source = """@triton.jit
def pick(c, x, o, f, n, B: tl.constexpr):
    i = tl.arange(0, B)
    m = i < n
    v = tl.where(tl.load(c + i, mask=m, other=0), tl.load(x + i, mask=m), f.to(tl.float32))
    tl.store(o + i, v, mask=m)
    tl.store(c + i, v > 0, mask=m)
"""
    c, x, out = torch.tensor([True, False, True]), torch.tensor([1.0, 2.0, -3.0]), torch.zeros(4)
    kernel(source, name="pick", params=("*i1", "*fp32", "*fp32", "fp64", "i64"), constants={"B": 4})(c, x, out, 0.5, 3)
    assert out.tolist() == [1, 0.5, -3, 0] and c.tolist() == [True, True, False]


def test_scalar_conditions_broadcast():
    source = """@triton.jit
def both(x, y, o, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(o + i, (tl.load(x + i) != 0) & (tl.load(y) != 0))
"""
    x, y, out = torch.tensor([1.5, 0, -2, 0]), torch.tensor([2.5]), torch.zeros(4, dtype=torch.bool)
    kernel(source, name="both", params=("*fp32", "*fp32", "*i1"), constants={"B": 4})(x, y, out)
    assert out.tolist() == [True, False, True, False]


def test_strided_views_are_addresses():
    base = torch.arange(12.0)
    out = torch.zeros(4)
    adder(4, 4)(base[5:], base[2:], out)  # neither address is a multiple of 16
    assert out.tolist() == [7, 9, 11, 13]


def test_a_broken_kernel_says_so_and_is_not_remembered():
    broken = ADD.replace("tl.load(y + i, mask=m)", "tl.nonsense(y)")
    x = torch.ones(8)
    for _ in range(2):
        with pytest.raises(CompileError, match=r"kernel add.*nonsense"):
            adder(8, 8, source=broken)(x, x, x)
    with pytest.raises(CompileError, match="kernel add"):
        adder(8, 8)(x, x)  # an argument too few
    out = torch.empty(8)
    adder(8, 8)(x, x, out)
    assert out.tolist() == [2] * 8


def test_threads_share_kernels():
    failures = []

    def work(seed):
        try:
            generator = torch.Generator().manual_seed(seed)
            for n in (100, 2000):
                x, y = torch.randn(n, generator=generator), torch.randn(n, generator=generator)
                out = torch.empty(n)
                adder(n)(x, y, out)
                assert torch.equal(out, x + y)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_compile_all_ahead():
    compile_all([adder(), adder(n=10)])
    assert interpreted() or adder().spec in {spec for spec, _ in launch._binaries}


def test_cpu_tensors_without_the_interpreter_are_refused():
    code = (
        "import torch\nfrom fusejit.runtime.launch import kernel\n"
        f"k = kernel({ADD!r}, name='add', params={F32!r}, constants={{'N': 8, 'B': 8}})\n"
        "try:\n    k(*[torch.ones(8)] * 3)\nexcept Exception as error:\n    print(type(error).__name__, error)\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert "CompileError kernel add" in done.stdout and "TRITON_INTERPRET=1" in done.stdout


# -- compiled without a GPU --------------------------------------------------------------------------------------------
def test_compiles_for_sm_90():
    (done,) = compile_kernels([spec()], "sm_90")
    assert ".target sm_90" in done.ptx and done.cubin[:4] == b"\x7fELF"
    assert 8 <= done.n_regs <= 64 and done.n_spills == 0 and done.shared == 0
    assert (
        done.wide_loads == 4 and done.wide_stores == 2
    )  # 1,024 elements on 128 threads: two accesses of four for each operand
    (narrow,) = compile_kernels(
        [KernelSpec(ADD, "add", F32, (("N", 1 << 20), ("B", 1024)), aligned=(True, False, True))]
    )
    assert narrow.wide_loads == 2


def test_counts_spills():
    source = ADD.replace("tl.load(y + i, mask=m)", "fj.sum(tl.load(x + i, mask=m), 0)")  # the row must wait for its sum
    (done,) = compile_kernels([KernelSpec(source, "add", F32, (("N", 1 << 20), ("B", 8192)), num_warps=1)])
    assert done.n_spills > 0


def test_targets():
    (done,) = compile_kernels([spec()], "sm_80")
    assert ".target sm_80" in done.ptx
    with pytest.raises(ValueError, match="sm_90, sm_100"):
        compile_kernels([spec()], "sm_33")


def test_a_failure_names_the_kernel_and_the_others_go_on():
    with pytest.raises(CompileError, match=r"kernel add does not compile for sm_90: .*nonsense"):
        compile_kernels([spec(), spec(ADD.replace("tl.load(y + i, mask=m)", "tl.nonsense(y)"))])
    assert compile_kernels([spec()])[0].n_regs > 0


def test_a_dead_worker_is_replaced():
    compile_kernels([spec()])
    assert compile_workers._idle
    for worker in list(compile_workers._idle):
        worker.process.kill()
        worker.process.wait()
    assert compile_kernels([spec()])[0].n_regs > 0

    class Dying(compile_workers._Worker):
        def ask(self, *args):
            self.process.kill()
            return super().ask(*args)

    compile_workers.close_workers()
    compile_workers._idle.append(Dying())
    with pytest.raises(CompileError, match="kernel add: the compile worker died"):
        compile_kernels([spec()])
    assert compile_kernels([spec()])[0].n_regs > 0


def test_equal_specs_compile_once_and_debug_keeps_assertions():
    source = ADD.replace("    m = i < N\n", "    m = i < N\n    fj.check_index(i, N, m)\n")
    plain, again, checked = compile_kernels([spec(source), spec(source), spec(source, debug=True)])
    assert plain is again
    assert "assertfail" in checked.ptx and "assertfail" not in plain.ptx


def test_a_worker_imports_neither_torch_nor_the_package():
    code = (
        "import runpy, sys, io\n"
        f"sys.stdin = type('S', (), {{'buffer': io.BytesIO()}})()\nrunpy.run_path({compile_workers.__file__!r}, "
        "run_name='__main__')\n"
        "import fusejit.runtime.compile_workers as w\nw.define_kernel('@triton.jit\\ndef k(x):\\n    pass\\n', 'k')\n"
        "import os; os.write(2, str(sorted(m for m in ('torch', 'numpy', 'triton') if m in sys.modules)).encode())\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stderr.endswith("['triton']")


def test_fifteen_kernels_in_seconds():
    """Cold, with the workers' start: at most 2.5 s on two free cores; the bound here allows for a busy machine."""
    body = ["fj.tanh({})", "fj.exp({})", "fj.sigmoid({})", "tl.sqrt({})", "{} * 2.0"]
    sources = [
        ADD.replace("tl.load(x + i, mask=m)", body[k % 5].format(f"(tl.load(x + i, mask=m) + {k}.0)"))
        for k in range(15)
    ]
    compile_workers.close_workers()
    start = time.perf_counter()
    done = compile_kernels([spec(s) for s in sources], fresh=True)
    assert len(done) == 15 and time.perf_counter() - start < 25
    assert sum(d.seconds for d in done) < 50


class _Address:
    """As much of a CUDA tensor as a launch looks at."""

    def __init__(self, address, device=0):
        self.address, self.device = address, torch.device("cuda", device)

    def data_ptr(self):
        return self.address

    def get_device(self):
        return self.device.index


def test_alignment_variants_and_devices(monkeypatch):
    """The path of a GPU launch, with a recording in the place of the driver."""
    current, loaded, runs = [0], [], []

    class Device:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            self.before, current[0] = current[0], self.index

        def __exit__(self, *error):
            current[0] = self.before

    def binary(spec, device):
        loaded.append((spec.aligned, device))
        fake = type("Binary", (), {"function": 1, "packed_metadata": 2})()
        fake.run = lambda *args: runs.append((current[0], spec.aligned, args[:3], args[-2:]))
        return fake

    monkeypatch.setattr(launch, "interpreted", lambda: False)
    monkeypatch.setattr(launch, "_binary", binary)
    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setitem(vars(private), "cuda_getDevice", lambda: current[0])
    monkeypatch.setitem(vars(private), "cuda_getCurrentRawStream", lambda device: 70 + device)
    run = adder(n=2999, aligned=(True, False, True))
    good, odd, far = _Address(1 << 20), _Address((1 << 20) + 4), _Address(1 << 20, device=1)
    run(good, odd, good)
    run(good, odd, good)
    assert loaded == [((True, False, True), 0)]
    assert runs == [(0, (True, False, True), (3, 1, 1), (2999, 1024))] * 2
    run(odd, good, good)
    assert loaded[1:] == [((False, False, True), 0)] and runs[-1][1] == (False, False, True)
    run(far, far, far)
    assert runs[-1][0] == 1 and current == [0]
    with pytest.raises(CompileError, match=r"cannot be launched on cpu tensors; set TRITON_INTERPRET=1"):
        run(torch.ones(1), torch.ones(1), torch.ones(1))


@pytest.mark.parametrize("answer", [7, 0, TypeError("function takes 8 arguments")])
def test_the_static_launcher_is_tried_once(answer, monkeypatch):
    """The path of a GPU with torch's static launcher, which here writes down what it is given."""
    launches, probes, sizes = [], [], {"global_scratch_size": 0, "profile_scratch_size": 0}

    def launch_kernel(function, x, y, z, warps, shared, types, args, stream):
        if args[1:2] == (7,):
            probes.append(types)
            if isinstance(answer, Exception):
                raise answer
            args[0].fill_(answer)
        launches.append((function, (x, y, z), warps, shared, types, args, stream))

    def binary(spec, device):
        fake = types.SimpleNamespace(function=1, packed_metadata=2, run=lambda *args: launches.append("Triton's"))
        fake.metadata = types.SimpleNamespace(num_warps=4, shared=96, num_ctas=1, launch_pdl=False, **sizes)
        return fake

    class Device:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            return None

        def __exit__(self, *error):
            return None

    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device, **more: zeros(*size, **more))
    monkeypatch.setattr(launch, "interpreted", lambda: False)
    monkeypatch.setattr(launch, "_binary", binary)
    monkeypatch.setattr(launch, "_static", {})
    monkeypatch.setattr(launch, "_launcher", launch.Launcher)  # without the memory of other tests
    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setitem(vars(private), "cuda_getDevice", lambda: 0)
    monkeypatch.setitem(vars(private), "cuda_getCurrentRawStream", lambda device: 70)
    monkeypatch.setattr(
        torch._C, "_StaticCudaLauncher", types.SimpleNamespace(_launch_kernel=launch_kernel), raising=False
    )
    x = _Address(1 << 20)
    for n in (2997, 2996):
        adder(n)(x, x, x)
    assert probes == ["OiOO"]
    own = (1, (3, 1, 1), 4, 96, "OOOOO", (x, x, x, None, None), 70)
    assert launches[-2:] == ([own] * 2 if answer == 7 else ["Triton's"] * 2)
    sizes["global_scratch_size"] = 64  # what the static launcher cannot give
    adder(2995)(x, x, x)
    assert launches[-1] == "Triton's"


# -- on a GPU ----------------------------------------------------------------------------------------------------------
@pytest.mark.gpu
def test_on_a_gpu():
    test_adds("cuda")
    x = torch.randn(3001, device="cuda")
    out = torch.empty(3000, device="cuda")
    aligned = adder(aligned=(True, True, True))
    aligned(x[1:], x[:-1], out)  # the first address breaks the promise
    assert torch.equal(out, x[1:] + x[:-1])
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        aligned(x[:-1], x[:-1], out)
    stream.synchronize()
    assert torch.equal(out, x[:-1] * 2)
    compile_all([adder(n=k) for k in (5, 6, 7, 8)])
