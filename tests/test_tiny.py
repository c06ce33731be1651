"""Every feature once: the first file to open. Each test is a complete use of fusejit, without a GPU (in Triton's
interpreter).
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import fusejit


def gelu_bias(x, bias, scale=1.0):
    return F.gelu(x * scale + bias)


def test_a_function_becomes_one_kernel(fuse, device):
    x, bias = torch.randn(5, 40, device=device), torch.randn(40, device=device)
    fused = fuse(gelu_bias)
    assert_close(fused(x, bias), gelu_bias(x, bias))
    assert len(fused.explain(x, bias).kernels) == 1


def test_a_decorator_with_keywords_defaults_trees_and_none(fuse, device):
    @fusejit.jit
    def on_cpu_this_is_eager(x):
        return x + 1

    @fuse
    def f(tree, weight=None, *, power=2):
        out = tree["x"].sum() + tree["y"][0] ** power
        return {"out": out if weight is None else out * weight, "name": "kept"}

    x, y = torch.randn(3, 4, device=device), torch.randn(4, device=device)
    assert_close(on_cpu_this_is_eager(x), x + 1)
    assert_close(f({"x": x, "y": (y,)})["out"], x.sum() + y**2)
    assert_close(f({"x": x, "y": (y,)}, y, power=3)["out"], (x.sum() + y**3) * y)
    assert f({"x": x, "y": (y,)})["name"] == "kept"
    assert f.cache_info().specialisations == 2  # one program for each combination of Python values and shapes


def test_a_module_trains_as_eager_does(fuse, device):
    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.SiLU(), nn.Linear(16, 4)).to(device)

    eager, fused = model(), model()
    compiled = fuse(fused)
    for net, call in ((eager, eager), (fused, compiled)):
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for step in range(3):
            torch.manual_seed(step)
            loss = F.cross_entropy(call(torch.randn(6, 8, device=device)), torch.randint(4, (6,), device=device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_close(dict(fused.state_dict()), dict(eager.state_dict()), rtol=1e-4, atol=1e-5)
    fused.eval(), eager.eval()  # the mode is guarded: this is another program
    x = torch.randn(2, 8, device=device)
    assert_close(compiled(x), eager(x), rtol=1e-4, atol=1e-5)


def test_gradients_and_hooks(fuse, device):
    x = torch.randn(4, 10, device=device, requires_grad=True)
    same, seen = x.detach().clone().requires_grad_(), []
    x.register_hook(seen.append)
    fuse(lambda x: x.softmax(-1).square().sum())(x).backward()
    same.softmax(-1).square().sum().backward()
    assert_close(x.grad, same.grad)
    assert_close(seen, [same.grad])


def test_views_and_in_place_changes_stay_what_they_are(fuse, device):
    @fuse
    def f(x, y):
        x.add_(1)
        return x.t(), (x[:, 1:3] * y).flatten()

    x, y = torch.zeros(3, 4, device=device), torch.full((3, 2), 5.0, device=device)
    view, product = f(x, y)
    assert_close(x, torch.ones_like(x))
    assert view.data_ptr() == x.data_ptr() and view.shape == (4, 3)
    assert_close(product, torch.full_like(product, 5.0))


def test_what_cannot_be_fused_is_called_and_reported(fuse, device):
    f, x = fuse(lambda x: (x @ x.t()).relu().sort().values * 2), torch.randn(6, 3, device=device)
    assert_close(f(x), (x @ x.t()).relu().sort().values * 2)
    report = f.explain(x)
    assert (
        report.launches == 2
        and any("mm" in str(e) for e in report.externs)
        and any("sort" in str(e) for e in report.externs)
    )


def test_explain_counts_bytes(fuse, device):
    x, y = torch.randn(8, 16, device=device), torch.randn(8, 16, device=device)
    report = fuse(lambda x, y: (x + y).relu() * y).explain(x, y)
    assert report.bytes_fused == report.bytes_minimum == 3 * 4 * x.numel()
    assert report.bytes_eager == 8 * 4 * x.numel()  # add 3, relu 2, mul 3
    assert "relu" in str(report)


def test_dtypes_casts_and_reductions(fuse, device):
    def f(x, index, mask, half=torch.bfloat16):
        h = x.to(half) * 2
        return (
            h.float().var(-1),
            h[index].amax(0),
            x.masked_fill(mask, -1.0).argmax(-1),
            mask.any(),
            x.to(torch.int8) // 3,
        )

    args = (
        torch.randn(6, 9, device=device) * 4,
        torch.tensor([0, 5, 5], device=device),
        torch.rand(6, 9, device=device) > 0.5,
    )
    (variance, largest, *rest), (exact, exact_largest, *_) = fuse(f)(*args), f(*args, torch.float32)
    assert_close(variance, exact)  # a fused chain stays float32 where eager rounds to bfloat16 in its middle
    assert_close(largest, exact_largest.bfloat16())
    assert_close(rest, list(f(*args)[2:]))
    assert_close(fuse(f, numerics="eager")(*args), f(*args))


def test_dropout_and_autocast(fuse, device):
    assert (dropped := fuse(lambda x: F.dropout(x, 0.25))(torch.ones(64, 64, device=device))).unique().numel() == 2
    assert 0.7 < (dropped != 0).float().mean() < 0.8
    with torch.autocast(device, dtype=torch.bfloat16):
        assert (
            fuse(lambda a, b: (a @ b).relu())(torch.ones(4, 4, device=device), torch.ones(4, 4, device=device)).dtype
            == torch.bfloat16
        )


def test_errors_name_the_way_out(fuse, device):
    def f(x):
        return x * 2 if x.sum().item() > 0 else x - 1

    x = torch.ones(3, device=device)
    with pytest.raises(fusejit.CaptureError, match=r"x\.sum\(\)\.item\(\) > 0"):
        fuse(f, fullgraph=True)(x)
    assert_close(fuse(f)(x), f(x))  # runs eagerly, and explain says why
    assert fuse(f).explain(x).fallbacks
    with pytest.raises(RuntimeError, match="must match|broadcast"):
        fuse(lambda x, y: x + y)(x, torch.ones(4, device=device))


def test_a_program_is_a_python_file(fuse, device):
    x = torch.randn(4, 32, device=device)
    program = fuse(lambda x: F.layer_norm(x, (32,))).program(x)
    compile(program.source, "program.py", "exec")
    assert "@triton.jit" in program.source


def test_kernels_compile_for_a_gpu_that_is_not_there(sm_90):
    (kernel,) = sm_90(gelu_bias, (torch.randn(64, 128), torch.randn(128))).kernels
    assert kernel.n_spills == 0 and kernel.n_regs > 0 and kernel.wide_loads > 0 and ".target sm_90" in kernel.ptx


def test_switched_off(fuse, device):
    with fusejit.disable_jit():
        assert fuse(lambda x: x.tolist())(torch.ones(2, device=device)) == [1.0, 1.0]
