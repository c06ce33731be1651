"""Cross entropy in all its forms: values and gradients against eager and float64, bytes at real vocabularies, targets
out of range.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fusejit

ROWS, CLASSES = 6, 37


def logits_of(shape, dtype, device):
    return (torch.randn(shape, device=device) * 3).to(dtype).requires_grad_()


def targets_of(rows, classes, device, ignore=None):
    target = torch.randint(classes, (rows,), device=device)
    if ignore is not None:
        target[::3] = ignore
    return target


FORMS = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "weights": {"weight": True},
    "weights and smoothing": {"weight": True, "label_smoothing": 0.2},
    "an ignored class": {"ignore_index": 5},
    "all of it": {"weight": True, "label_smoothing": 0.1, "ignore_index": -1},
}


def options_of(form, dtype, device):
    options = dict(FORMS[form])
    if "weight" in options:
        options["weight"] = (torch.rand(CLASSES, device=device) + 0.5).to(dtype)
    return options


def run(fn, x, *args, **options):
    x = x.detach().clone().requires_grad_()
    loss = fn(x, *args, **options)
    (
        loss * torch.arange(1, loss.numel() + 1, device=x.device, dtype=loss.dtype).reshape(loss.shape) / 3
    ).sum().backward()
    return loss.detach(), x.grad


def assert_as_right(fused, fn, x, *args, **options):
    """At most twice eager's error, and two units of the dtype."""
    wide = {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in options.items()}
    exact = run(fn, x.double(), *(a.double() if a.is_floating_point() else a for a in args), **wide)
    for ours, eager, right in zip(run(fused, x, *args, **options), run(fn, x, *args, **options), exact, strict=True):
        assert ours.dtype is eager.dtype and ours.shape == eager.shape
        unit = torch.finfo(ours.dtype).eps * right.abs().max()
        assert (ours.double() - right).abs().max() <= 2 * (eager.double() - right).abs().max() + 2 * unit


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("form", FORMS)
def test_cross_entropy(form, reduction, fuse, device):
    fused = fuse(F.cross_entropy, fullgraph=True)
    options = options_of(form, torch.float32, device) | {"reduction": reduction}
    target = targets_of(ROWS, CLASSES, device, options.get("ignore_index"))
    assert_as_right(fused, F.cross_entropy, logits_of((ROWS, CLASSES), torch.float32, device), target, **options)


@pytest.mark.parametrize("form", ["plain", "smoothing"])
def test_half_logits(form, fuse, device):
    options = options_of(form, torch.float32, device)
    fn = lambda x, t: F.cross_entropy(x.float(), t, **options)  # noqa: E731
    x, target = logits_of((ROWS, 40), torch.bfloat16, device), targets_of(ROWS, 40, device)
    for ours, eager in zip(run(fuse(fn), x, target), run(fn, x, target), strict=True):
        torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("form", ["plain", "weights", "smoothing"])
def test_probabilities(form, reduction, fuse, device):
    options = options_of(form, torch.float32, device) | {"reduction": reduction}
    target = torch.randn(ROWS, CLASSES, device=device).softmax(-1)
    assert_as_right(
        fuse(F.cross_entropy), F.cross_entropy, logits_of((ROWS, CLASSES), torch.float32, device), target, **options
    )


def test_images(fuse, device):
    """Classes in the second dimension, as segmentation has them."""
    x = logits_of((2, 5, 3, 4), torch.float32, device)
    target = torch.randint(5, (2, 3, 4), device=device)
    assert_as_right(fuse(F.cross_entropy), F.cross_entropy, x, target, label_smoothing=0.1)
    log_p = lambda x, t: F.nll_loss(F.log_softmax(x, 1), t)  # noqa: E731
    assert_as_right(fuse(log_p), log_p, x, target)


def capped_with_z(x, target, cap=20.0, z=1e-2):
    """Logits capped at `cap`, and the square of their logsumexp added `z` times."""
    x = cap * torch.tanh(x / cap)
    return F.cross_entropy(x, target, ignore_index=-100) + z * torch.logsumexp(x, -1).square().mean()


def test_capped_logits_and_z_loss(fuse, device):
    x, target = logits_of((ROWS, CLASSES), torch.float32, device), targets_of(ROWS, CLASSES, device, -100)
    assert_as_right(fuse(capped_with_z), capped_with_z, x, target)


def test_rows_that_are_ignored_all(fuse, device):
    x, target = logits_of((4, 9), torch.float32, device), torch.full((4,), -100, device=device)
    loss, gradient = run(fuse(F.cross_entropy), x, target)
    assert loss.isnan() and gradient.isnan().all() == run(F.cross_entropy, x, target)[1].isnan().all()
    loss, gradient = run(fuse(F.cross_entropy), x, target, reduction="sum")
    assert loss == 0 and not gradient.any()


def test_infinite_gradients_and_logits(fuse, device):
    """What overflowed stays visible: a scaled loss of infinity gives no finite gradient where eager's has none."""
    x, target = logits_of((4, 9), torch.float32, device), targets_of(4, 9, device)
    fn = lambda x, t: F.cross_entropy(x, t, reduction="sum") * float("inf")  # noqa: E731
    ours, eager = run(fuse(fn), x, target)[1], run(fn, x, target)[1]
    assert torch.equal(ours.isfinite(), eager.isfinite()) and not ours.isfinite().any()
    masked = x.detach().masked_fill(torch.rand_like(x) < 0.3, -float("inf"))
    masked[torch.arange(4), target] = 1.0
    torch.testing.assert_close(run(fuse(F.cross_entropy), masked, target), run(F.cross_entropy, masked, target))


@pytest.mark.parametrize("wrong", [CLASSES, -1, 10**6])
def test_targets_out_of_range(wrong, fuse, device):
    if device == "cuda":
        pytest.skip("a failed assertion on the device ends the process's use of it")
    x, target = logits_of((ROWS, CLASSES), torch.float32, device), targets_of(ROWS, CLASSES, device)
    target[2] = wrong
    with pytest.raises(IndexError):
        F.cross_entropy(x, target)

    def loss(x, target):
        return F.cross_entropy(x, target)

    with pytest.raises(IndexError, match="out of bounds") as raised:
        fuse(loss)(x, target)
    assert "test_losses.py" in "\n".join(raised.value.__notes__)


def test_one_hot_sums(fuse, device):
    """A sum along a row that differs at one checked place only is no reduction; what varies along the row is one."""
    x, i = torch.randn(5, 7, device=device), torch.randint(7, (5, 1), device=device)
    g = torch.randn(5, 1, device=device)

    def rows(g, i):
        return (torch.full((5, 7), 0.25, device=g.device).scatter(1, i, -2.0) * g).sum(1)

    fused = fuse(rows)
    torch.testing.assert_close(fused(g, i), rows(g, i))
    assert [k.template for k in fused.program(g, i).kernels] == ["pointwise"]
    g[2] = float("inf")
    assert fuse(lambda g, i: (torch.zeros(5, 7, device=g.device).scatter(1, i, 1.0) * g).sum(1))(g, i)[2].isnan()
    varying = lambda x, i: (torch.zeros(5, 7, device=x.device).scatter(1, i, 1.0) * x).sum(1)  # noqa: E731
    torch.testing.assert_close(fuse(varying)(x, i), varying(x, i))
    column = lambda x, i: torch.zeros(5, 7, device=x.device).scatter(1, i, 1.0).sum(0) + x[0]  # noqa: E731
    torch.testing.assert_close(fuse(column)(x, i), column(x, i))


SIZES = [(16, 128256), (16384, 32768), (4096, 50257), (2048, 128256), (1024, 262144)]
BIG = {
    "plain": lambda x, t: F.cross_entropy(x.float(), t),
    "smoothing": lambda x, t: F.cross_entropy(x.float(), t, label_smoothing=0.1),
    "capped": capped_with_z,
}


@pytest.mark.parametrize("shape", SIZES, ids=str)
@pytest.mark.parametrize("form", BIG)
def test_bytes(form, shape):
    """Forward: one read of the logits. Backward: one more, and one write."""
    x = torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)
    report = fusejit.jit(BIG[form], backend="interpret").explain(x, torch.empty(shape[0], dtype=torch.int64))
    size, rows = 2 * shape[0] * shape[1], 8 * 40 * shape[0]
    moved = [sum(k.bytes_read + k.bytes_written for k in half.kernels) for half in (report.forward, report.backward)]
    assert moved[0] <= size * (1.02 if shape[0] > 16 else 1.05) + rows
    assert size * 2 <= moved[1] <= 2.02 * size + rows
    assert not report.forward.externs and not report.backward.externs and report.forward.launches <= 4


LARGE = {
    "weights": lambda x, t, w: F.cross_entropy(x.float(), t, weight=w),
    "weights and smoothing": lambda x, t, w: F.cross_entropy(x.float(), t, weight=w, label_smoothing=0.1),
    "probabilities": lambda x, t, w: F.cross_entropy(x.float(), t.float()),
    "half probabilities": lambda x, t, w: F.cross_entropy(x, t),
    "probabilities, weights and smoothing": lambda x, t, w: F.cross_entropy(
        x.float(), t.float(), weight=w, label_smoothing=0.1
    ),
}


@pytest.mark.parametrize("shape", SIZES, ids=str)
@pytest.mark.parametrize("form", LARGE)
def test_bytes_of_weights_and_probabilities(form, shape):
    """Forward and backward: two reads and one write of the logits; probabilities are read twice besides, of few rows
    three times.
    """
    x = torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)
    soft, few = "probabilities" in form, shape[0] == 16
    target = torch.empty(shape, dtype=torch.bfloat16) if soft else torch.empty(shape[0], dtype=torch.int64)
    report = fusejit.jit(LARGE[form], backend="interpret", chunk_bytes=0).explain(x, target, torch.empty(shape[1]))
    size, rest = 2 * shape[0] * shape[1], 8 * 60 * shape[0] * (5 if few else 1) + 8 * 4 * shape[1]
    for half, least in ((report.forward, 1 + soft), (report.backward, 2 + soft + (soft and few))):
        assert least * size <= sum(k.bytes_read + k.bytes_written for k in half.kernels) <= 1.01 * least * size + rest
        assert not half.externs
    assert all(
        k.source.count("for start in") <= 1 for k in report.forward.kernels
    )  # a second pass would read the row out of L2
    large = [k for k in report.backward.kernels if k.bytes_written >= size]
    assert len(large) == 1 and large[0].template.startswith("reduction") == (form != "weights" and not few)


PIECES, LOOP = "reduction_persistent", "reduction_looped"


@pytest.mark.parametrize(
    ("form", "classes", "template"),
    [("weights and smoothing", 50257, PIECES), ("probabilities", 65536, PIECES), ("weights and smoothing", 65536, LOOP),
     ("probabilities", 50257, LOOP)],
)  # fmt: skip
def test_long_rows(form, classes, template, fuse, device, monkeypatch):
    """In pieces or a loop, whose sums are about maxima of their own: a loss of nearly nothing beside large logits,
    pieces of -inf only.
    """
    if template == LOOP:
        monkeypatch.setattr("fusejit.codegen.passes.rfactor._pieces", lambda cluster, device: 0)  # as with many rows
    x = torch.randn(4, classes, device=device)  # the second's loss is nearly nothing
    x[1] *= 40
    x[2, : classes // 3] = -float("inf")
    x[3] = -float("inf")
    target, w = x[:].argmax(-1), torch.rand(classes, device=device) + 0.5
    soft = F.one_hot(target, classes).float() if form == "probabilities" else target
    fn = lambda x, t, w: F.cross_entropy(  # noqa: E731
        x, t, weight=w if t.dim() == 1 else None, label_smoothing=0.1 * (t.dim() == 1), reduction="none"
    )
    fused = fuse(fn)
    first = fused.explain(x, soft, w).forward.kernels[0]
    assert first.template == template and first.source.count("for start in") == (template == LOOP)
    right = fn(x.double(), soft.double() if soft.is_floating_point() else soft, w.double())[:2]
    ours, eager = fused(x, soft, w), fn(x, soft, w)
    assert (
        (ours[:2] - right).abs() <= 2 * (eager[:2] - right).abs() + 2 * torch.finfo(torch.float32).eps * right.abs()
    ).all()
    torch.testing.assert_close(ours, eager, equal_nan=True)


def test_weights_of_images_and_of_one_row(fuse, device):
    x, w = logits_of((2, 5, 3, 4), torch.float32, device), torch.rand(5, device=device) + 0.5
    target = torch.randint(5, (2, 3, 4), device=device)
    target[0, 1] = -100
    for reduction in ("mean", "sum", "none"):
        assert_as_right(fuse(F.cross_entropy), F.cross_entropy, x, target, weight=w, reduction=reduction)
        assert_as_right(
            fuse(F.cross_entropy), F.cross_entropy, x[0, :, 0, 0], target[1, 0, 0], weight=w, reduction=reduction
        )


def test_negative_probabilities_are_numbers_as_any(fuse, device):
    """Eager's cross entropy takes any target of the logits' shape."""
    target = torch.randn(ROWS, CLASSES, device=device)
    assert_as_right(fuse(F.cross_entropy), F.cross_entropy, logits_of((ROWS, CLASSES), torch.float32, device), target)


@pytest.mark.parametrize("shape", [(2048, 128256), (8192, 32768)], ids=str)
def test_kernels_for_sm_90(shape, sm_90):
    x = torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)
    programs = sm_90(BIG["plain"], (x, torch.empty(shape[0], dtype=torch.int64)))
    large = [k for k in programs.kernels if k.bytes_read >= 2 * shape[0] * shape[1]]
    assert len(large) == 2
    for kernel in programs.kernels:
        assert kernel.n_spills == 0
    assert all(kernel.wide_loads for kernel in large) and large[1].template == "pointwise_row" and large[1].wide_stores
