"""What stands around matrix products, convolutions and attention: folded into the call, or one kernel that reads and
writes once.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fusejit

ROWS, WIDTH, OUT = 12, 16, 24
ACTIVATION, ADD, PRODUCT = "aten._addmm_activation.default", "aten.addmm.default", "aten.mm.default"


def made(device, dtype=torch.float32, grad=False):
    shapes = ((ROWS, WIDTH), (WIDTH, OUT), (OUT,))
    return [torch.randn(s, device=device).to(dtype).requires_grad_(grad) for s in shapes]


def linear_relu(x, w, b):
    return F.relu(torch.addmm(b, x, w))


def product_bias(x, w, b):
    return x @ w + b


def bias_product(x, w, b):
    return b + x @ w


def product_bias_relu(x, w, b):
    return F.relu(x @ w + b)


def batched(x, w, b):
    return F.relu(F.linear(x.view(3, 4, WIDTH), w.t(), b))


def chain(x, w, b):
    y = F.relu(x @ w + b)
    return F.relu(y @ w.t() + b[:WIDTH]) @ w


FOLDED = {
    linear_relu: [ACTIVATION],
    product_bias: [ADD],
    bias_product: [ADD],
    product_bias_relu: [ACTIVATION],
    batched: [ACTIVATION],
    chain: [ACTIVATION, ACTIVATION, PRODUCT],
}


def assert_right(ours, eager, right):
    unit = torch.finfo(ours.dtype).eps * right.abs().max()
    assert ours.dtype is eager.dtype and ours.shape == eager.shape and ours.stride() == eager.stride()
    assert (ours.double() - right).abs().max() <= 2 * (eager.double() - right).abs().max() + 2 * unit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fn", FOLDED)
def test_bias_and_relu_are_part_of_the_call(fn, dtype, fuse, device):
    args, fused = made(device, dtype), fuse(fn, fullgraph=True)
    assert_right(fused(*args), fn(*args), fn(*(a.double() for a in args)))
    report = fused.explain(*args)
    assert [e.target for e in report.externs] == FOLDED[fn] and report.launches == 0
    assert len(report.rewrites) == sum(t != PRODUCT for t in FOLDED[fn])
    assert all(
        "less read and written" in line and "test_matmul_epilogue.py" in line for line in report.rewrites
    ) and "rewrites" in str(report)


@pytest.mark.parametrize("fn", [linear_relu, product_bias, product_bias_relu, batched])
def test_gradients(fn, fuse, device):
    results = []
    for f in (fuse(fn, fullgraph=True), fn):
        args = made(device, grad=True) if not results else [a.detach().clone().requires_grad_() for a in args]  # noqa: F821
        out = f(*args)
        (out * torch.linspace(-1, 1, out.numel(), device=device).view(out.shape)).sum().backward()
        results.append([out.detach(), *(a.grad for a in args)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_what_is_read_elsewhere_or_does_more_keeps_its_kernel(fuse, device):
    def residual(x, w, b):
        return F.relu(x @ w + b) + b.sum()

    def normed(x, w, b):
        return F.layer_norm(F.relu(x @ w + b), (OUT,))

    def both(x, w, b):
        y = x @ w
        return F.relu(y + b), y

    def saved(x, w, b):
        return F.silu(x @ w + b)

    def unbiased(x, w, b):  # the call takes a vector in any case
        return F.relu(x @ w)

    def rows(x, w, b):
        return x @ w + x[:, :1]

    def twice(x, w, b):
        y = x @ w
        return F.relu(y + b) * y

    for fn in (residual, normed, both, saved, unbiased, rows, twice):
        args, fused = made(device), fuse(fn, fullgraph=True)
        torch.testing.assert_close(fused(*args), fn(*args))
        report = fused.explain(*args)
        assert [e.target for e in report.externs] == [PRODUCT] and report.rewrites == (), fn
        assert sum(k.bytes_read >= ROWS * OUT * 4 for k in report.kernels) == 1, fn  # the product is read once


def test_a_bias_that_is_made_later_or_changed_is_no_epilogue(fuse, device):
    def made_later(x, w, b):
        y = x @ w
        return y + (y[0] * b).sin()

    def changed(x, w, b):
        y = F.relu(x @ w + b)
        b.add_(1)
        return y

    for fn in (made_later, changed):
        args = made(device)
        ours, theirs = [a.clone() for a in args], [a.clone() for a in args]
        fused = fuse(fn)
        torch.testing.assert_close(fused(*ours), fn(*theirs))
        torch.testing.assert_close(ours, theirs)
        assert ACTIVATION not in [e.target for e in fused.explain(*args).externs]


def test_not_where_each_op_is_rounded(fuse, device):
    report = fuse(product_bias_relu, numerics="eager").explain(*made(device))
    assert [e.target for e in report.externs] == [PRODUCT] and report.launches == 1 and report.rewrites == ()


# -- gelu: two functions of one name -----------------------------------------------------------------------------------
def gelu(x, w, b):
    return F.gelu(x @ w + b, approximate="tanh")


def exact_gelu(x, w, b):
    return F.gelu(x @ w + b)


def test_what_a_cpu_calls_gelu():
    """The fact that the fold rests on: on a CPU `use_gelu` is the exact one, whatever the libraries of a GPU
    compute.
    """
    x, w, b = made("cpu")
    found = torch.ops.aten._addmm_activation(b, x, w, use_gelu=True)
    assert (found - exact_gelu(x, w, b)).abs().max() < 1e-5 < (found - gelu(x, w, b)).abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tanh_gelu_is_folded_for_a_gpu_only(dtype, fuse, device, backend):
    args = made(device, dtype)
    for fn in (gelu, exact_gelu):
        torch.testing.assert_close(
            fuse(fn)(*args), fn(*args), rtol=3e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-2
        )
    if backend == "interpret":
        assert [e.target for e in fuse(gelu).explain(*args).externs] == [PRODUCT]
    on_gpu = [fusejit.compile_for(fn, tuple(args), target="sm_90").forward for fn in (gelu, exact_gelu)]
    assert [e.target for e in on_gpu[0].externs] == [ACTIVATION] and "use_gelu=True" in on_gpu[0].source
    assert [e.target for e in on_gpu[1].externs] == [PRODUCT] and "use_gelu" not in on_gpu[1].source


# -- neighbours that stay kernels: one read and one write --------------------------------------------------------------
class Convolution(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.norm = torch.nn.Conv2d(8, 8, 3, padding=1), torch.nn.BatchNorm2d(8)

    def forward(self, x):
        return F.relu(self.norm(self.one(x)) + x)


def attention(q, k, v, x, weight):
    out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
    stream = x + out
    return F.rms_norm(stream, x.shape[-1:], weight), stream


def projected(x, w, b, residual):
    return F.layer_norm(residual + F.dropout(torch.addmm(b, x, w), 0.0), (OUT,)), None


def large(report, size):
    """How often kernels read and write tensors of a size, in units of it."""
    return sum(k.bytes_read for k in report.forward.kernels) / size, sum(
        k.bytes_written for k in report.forward.kernels
    ) / size


def test_around_a_convolution(fuse, device):
    module = Convolution().to(device).eval()
    x = torch.randn(2, 8, 16, 16, device=device)
    fused = fuse(module)
    with torch.no_grad():
        torch.testing.assert_close(fused(x), module(x))
        report = fused.explain(x)
    assert report.forward.launches == 1 and len(report.externs) == 1
    read, written = large(report, x.numel() * 4)
    assert 2 <= read <= 2.1 and written == 1  # the convolution and the residual


def test_around_attention(fuse, device):
    q, k, v = (torch.randn(2, 4, 32, 16, device=device) for _ in range(3))
    x, weight = torch.randn(2, 32, 64, device=device), torch.rand(64, device=device)
    fused = fuse(attention)
    for ours, theirs in zip(fused(q, k, v, x, weight), attention(q, k, v, x, weight), strict=True):
        torch.testing.assert_close(ours, theirs)
    report = fused.explain(q, k, v, x, weight)
    assert report.forward.launches == 1
    read, written = large(report, x.numel() * 4)
    assert 2 <= read <= 2.1 and written == 2  # attention's result and x; the norm and the new x


def test_around_a_product(fuse, device):
    args = [*made(device), torch.randn(ROWS, OUT, device=device)]
    fused = fuse(projected)
    torch.testing.assert_close(fused(*args)[0], projected(*args)[0])
    report = fused.explain(*args)
    read, written = large(report, ROWS * OUT * 4)
    assert report.forward.launches == 1 and read == 2 and written == 1 and [e.target for e in report.externs] == [ADD]


# -- the bias of a convolution -----------------------------------------------------------------------------------------
CONVOLUTIONS = {
    "1d": (torch.nn.Conv1d(6, 8, 3, padding=1), (2, 6, 11)),
    "2d": (torch.nn.Conv2d(6, 8, 3, stride=2, groups=2), (2, 6, 9, 7)),
    "3d": (torch.nn.Conv3d(2, 4, 2), (1, 2, 4, 5, 3)),
    "transposed": (torch.nn.ConvTranspose2d(6, 4, 3, stride=2, output_padding=1), (2, 6, 5, 4)),
    "channels last": (torch.nn.Conv2d(6, 8, 3).to(memory_format=torch.channels_last), (2, 6, 9, 7)),
}


def convolved(module, x):
    return F.silu(F.relu(module(x)) * 0.5)


def lifting(monkeypatch):
    """Lift biases here as well, where no GPU is."""
    from fusejit import compile as pipeline
    from fusejit.codegen.graph.conv_bias import lift_bias

    monkeypatch.setattr(pipeline, "lift_bias", lambda graph, numerics, gpu: lift_bias(graph, numerics, True))


@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_lifted_biases_give_the_same_values_and_gradients(kind, fuse, device, monkeypatch):
    lifting(monkeypatch)
    plain, shape = CONVOLUTIONS[kind]
    module = plain.to(device)
    x = torch.randn(shape, device=device).to(
        memory_format=torch.channels_last if kind == "channels last" else torch.contiguous_format
    )
    fused, results = fuse(convolved, fullgraph=True), []
    for fn in (fused, convolved):
        given = x.detach().clone().requires_grad_()
        out = fn(module, given)
        module.zero_grad()
        (out * torch.linspace(-1, 1, out.numel(), device=device).view(out.shape)).sum().backward()
        results.append([out.detach(), given.grad, module.weight.grad.clone(), module.bias.grad.clone()])
        assert out.stride() == results[0][0].stride()
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    report = fused.explain(module, x.requires_grad_())
    assert len(report.rewrites) == 2 and all("test_matmul_epilogue.py" in line for line in report.rewrites)
    assert "read and written" in report.rewrites[0] and "bias' gradient" in report.rewrites[1]


def test_lifted_biases_where_sizes_vary(fuse, device, monkeypatch):
    lifting(monkeypatch)
    module, x = torch.nn.Conv2d(3, 4, 3).to(device), torch.randn(2, 3, 5, 6, device=device)
    varying = fuse(convolved, fullgraph=True, dynamic=True)
    for one in (x, torch.cat([x] * 2)):
        torch.testing.assert_close(varying(module, one), convolved(module, one), rtol=1e-4, atol=1e-5)
    assert varying.cache_info().specialisations == 1 and len(varying.explain(module, x).rewrites) == 2


def test_biases_are_lifted_for_a_gpu_only_and_where_a_kernel_is_there(sm_90, fuse, device):
    module = torch.nn.Conv2d(64, 64, 3, padding=1).bfloat16()
    x = torch.empty(8, 64, 56, 56, dtype=torch.bfloat16, requires_grad=True)
    found, size = sm_90(lambda m, x: F.relu(m(x)), (module, x)), 2 * x.numel()
    for half, reads in ((found.forward, 1), (found.backward, 2)):
        large = [k for k in half.kernels if k.bytes_read + k.bytes_written > size]
        assert len(large) == 1 and large[0].n_spills == 0 and len(half.rewrites) == len(half.externs) == 1
        assert (
            reads * size <= large[0].bytes_read <= 1.01 * reads * size and size <= large[0].bytes_written <= 1.02 * size
        )
    assert "[True, True, False]" in found.backward.source
    with torch.no_grad():
        assert sm_90(lambda m, x: m(x), (module, x)).forward.rewrites == ()  # nothing reads it
        assert sm_90(lambda m, x: m(m(x)), (module, x)).forward.rewrites == ()
        assert fusejit.compile_for(convolved, (module, x), numerics="eager").forward.rewrites == ()
        if device == "cpu":
            small = torch.randn(1, 64, 4, 4)
            assert fuse(convolved).explain(module.float(), small).rewrites == ()
