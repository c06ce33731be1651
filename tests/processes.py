"""What tests/api/test_processes.py runs in processes of its own: `python processes.py NAME`; exit status 0 says that
all of it held.

$ python tests/processes.py forks forks: ok
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time

import torch
from torch import nn

import fusejit

BACKEND = "eager"


@fusejit.jit
def scaled(x):
    return x * 3 + 1


class Rows(torch.utils.data.Dataset):
    """Rows through a jitted function and a jitted module, where a DataLoader's workers run them."""

    def __init__(self) -> None:
        self.net = fusejit.jit(nn.Linear(3, 3).requires_grad_(False))
        self.closed = scaled

    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int):
        x = torch.full((3,), float(number))
        return scaled(x), self.net(x), self.closed(x[:2])


def loaders(method: str) -> None:
    rows = Rows()
    wanted = [rows[number] for number in range(8)]
    assert scaled.cache_info().misses == 2
    loader = torch.utils.data.DataLoader(
        rows, batch_size=None, num_workers=2, multiprocessing_context=method, timeout=60
    )
    for got, want in zip(loader, wanted, strict=True):
        torch.testing.assert_close(got, list(want))


def child(work) -> None:
    """Run `work` in a forked child, which has 30 seconds; what it raises fails this process."""
    pid = os.fork()
    if not pid:
        signal.alarm(30)
        try:
            work()
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0, work


def check_jit(f) -> None:
    """Known and new kinds of calls, gradients, and new functions."""
    for size in (2, 3, 4):
        assert f(torch.ones(size)).tolist() == [2.0] * size
    x = torch.ones(5, requires_grad=True)
    fresh = fusejit.jit(lambda x: (x * x).sum(), backend=BACKEND)
    try:
        (x * x).sum().backward()
    except RuntimeError as error:  # a CUDA build of torch refuses all gradients in the child of a process that had some
        assert "fork" in str(error)
    else:
        fresh(x).backward()
        assert x.grad.tolist() == [4.0] * 5
    get = nn.Module.__dict__.get("__getattribute__")
    assert get is None or get.__module__ == "builtins", "a capture of the parent's is still installed"


def fork_during_capture() -> None:
    """A capture in another thread: the fork waits for it, and the child finds classes and locks in order."""
    inside = threading.Event()

    def slow(x):
        inside.set()
        time.sleep(0.5)
        return x * 2

    f = fusejit.jit(slow, backend=BACKEND, capture_mode="trace")
    thread = threading.Thread(target=f, args=(torch.ones(2),))
    thread.start()
    inside.wait()

    assert nn.Module.__dict__["__getattribute__"].__module__.startswith("fusejit"), "the capture is not under way"
    child(lambda: check_jit(f))
    thread.join()
    check_jit(f)


def fork_while_locked() -> None:
    """Another thread holds every lock but the one that forks wait for."""
    from fusejit import fork_locks

    f = fusejit.jit(lambda x: x * 2, backend=BACKEND)
    f(torch.ones(2))
    assert any(lock is f._lock for lock in fork_locks._renewed)
    held, leave = threading.Event(), threading.Event()

    def hold() -> None:
        for lock in list(fork_locks._renewed):
            lock.acquire()
        held.set()
        leave.wait()

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    held.wait()
    child(lambda: check_jit(f))
    leave.set()


def fork_inside_capture() -> None:
    """The capture itself forks: the child goes on with it."""

    def forks(x):
        child(lambda: None)
        return x * 2

    f = fusejit.jit(forks, backend=BACKEND, capture_mode="trace")
    assert f(torch.ones(2)).tolist() == [2, 2]
    check_jit(fusejit.jit(lambda x: x * 2))


def fork_with_compile_workers() -> None:
    """A child starts compile workers of its own, and its end leaves the parent's alone."""
    from fusejit.runtime import compile_workers

    def compiled(block: int) -> None:
        source = (
            "@triton.jit\ndef k(x, B: tl.constexpr):\n    i = tl.arange(0, B)\n    tl.store(x + i, tl.load(x + i) + "
            "1)\n"
        )
        spec = compile_workers.KernelSpec(source, "k", ("*fp32",), (("B", block),))
        assert compile_workers.compile_kernels([spec])[0].cubin

    compiled(32)
    before = list(compile_workers._idle)
    assert before and all(worker.alive for worker in before)

    def work() -> None:
        assert not compile_workers._idle
        compiled(64)
        compile_workers.close_workers()

    child(work)
    assert compile_workers._idle == before and all(worker.alive for worker in before)
    compiled(128)
    assert compile_workers._idle == before


def forks() -> None:
    loaders("fork")
    fork_during_capture()
    fork_while_locked()
    fork_inside_capture()


def spawns() -> None:
    loaders("spawn")


# Two ranks.


class Counted(torch.autograd.Function):
    """The identity; counts its backward calls."""

    calls = 0

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        Counted.calls += 1
        return gradient


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 4)
    )


def wrapped(kind: str, backend: str):
    """The parallel module, and the jitted one in or around it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    mesh = init_device_mesh("cpu", (2,))
    plain = net()
    if kind.endswith("inside"):
        plain[3] = jitted = fusejit.jit(plain[3], backend=backend)
    elif kind.endswith("inside_sharded"):
        plain[3] = jitted = fusejit.jit(plain[3], backend=backend)
        fully_shard(jitted, mesh=mesh)
    elif kind == "jit_of_ddp":
        jitted = fusejit.jit(DistributedDataParallel(plain), backend=backend)
        return jitted, jitted
    else:
        plain = jitted = fusejit.jit(plain, backend=backend)
    return (DistributedDataParallel(plain) if kind.startswith("ddp") else fully_shard(plain, mesh=mesh)), jitted


KINDS = ("ddp_around", "ddp_inside", "jit_of_ddp", "fsdp_around", "fsdp_inside", "fsdp_inside_sharded")


def rank(number: int, file: str, backend: str) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{file}", rank=number, world_size=2)
    for kind in KINDS:
        module, jitted = wrapped(kind, backend)
        single, xs = net(), torch.randn(2, 4, generator=torch.Generator().manual_seed(3))
        hooked = []
        jitted.register_forward_hook(lambda module, given, result: hooked.append("forward"))  # noqa: B023
        for parameter in jitted.parameters():
            parameter.register_post_accumulate_grad_hook(lambda parameter: hooked.append("grad"))  # noqa: B023
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (module, single)]
        for step in range(3):
            hooked.clear()
            module(xs[number : number + 1]).pow(2).sum().backward()
            (single(xs).pow(2).sum() / 2).backward()
            for got, want in zip(module.parameters(), single.parameters(), strict=True):
                gradient = got.grad.full_tensor() if hasattr(got.grad, "full_tensor") else got.grad
                torch.testing.assert_close(gradient, want.grad, msg=lambda text: f"{kind}, step {step}: {text}")  # noqa: B023
            wanted = len(list(jitted.parameters()))
            assert hooked.count("forward") == 1 and hooked.count("grad") == wanted, (kind, hooked)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        names = [name.removeprefix("module.") for name in module.state_dict()]
        assert names == list(single.state_dict()), names
        info = jitted.cache_info()
        assert info.misses == 1 and info.hits >= 1, (kind, info)
        assert info.fallbacks == (kind == "jit_of_ddp"), (kind, info)
    dist.barrier()
    dist.destroy_process_group()


def ranks(backend: str = "eager") -> None:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank, (f"{folder}/store", backend), nprocs=2)


if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    globals()[name](*arguments)
    print(f"{name}: ok")
