"""Matrix products in parts of their rows: what eager and float64 give, how much memory is held at once, and where it is
refused and why.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fusejit
from fusejit.codegen.emit.memory_plan import Alloc, Free
from fusejit.codegen.ir.graph import Extern

ROWS, WIDTH, CLASSES = 14, 8, 37
LIMIT = 5 * CLASSES * 4  # five rows of float32: three parts, the last one shorter
BACKENDS = ["kernels", "eager"]


def plain(h, w, b, t):
    return F.cross_entropy(F.linear(h, w), t)


def bias(h, w, b, t):
    return F.cross_entropy(F.linear(h, w, b), t)


def total(h, w, b, t):
    return F.cross_entropy(F.linear(h, w, b), t, reduction="sum")


def each(h, w, b, t):
    return F.cross_entropy(F.linear(h, w, b), t, reduction="none")


def smoothing(h, w, b, t):
    return F.cross_entropy(F.linear(h, w, b), t, label_smoothing=0.1)


def weights(h, w, b, t):
    return F.cross_entropy(F.linear(h, w, b), t, weight=b.detach().abs() + 0.5, label_smoothing=0.1)


def ignored(h, w, b, t):
    return F.cross_entropy(F.linear(h, w, b), t, ignore_index=3)


def capped(h, w, b, t):
    x = F.linear(h.view(2, -1, WIDTH), w, b)
    x = 30 * torch.tanh(x / 30)
    return F.cross_entropy(x.view(-1, CLASSES), t, label_smoothing=0.1) + 1e-2 * torch.logsumexp(x, -1).square().mean()


def probabilities(h, w, b, t):
    return F.cross_entropy(F.linear(h, w), F.linear(h.detach() * 0.5, w.detach()).softmax(-1))


def distilled(h, w, b, t):
    return F.kl_div(
        F.log_softmax(h @ w.t(), -1), F.log_softmax((h * 0.5) @ w.t() + b, -1), log_target=True, reduction="batchmean"
    )


def hinge(h, w, b, t):
    x = h @ w.t()
    return (x - x.gather(1, t[:, None]) + 1).clamp(min=0).square().mean()


def nonlinear(h, w, b, t):
    return F.cross_entropy(F.linear(h, w, b), t).square()


def used_twice(h, w, b, t):
    return 3 * F.cross_entropy(F.linear(h, w, b) * b.sum(), t) + h.square().sum() + w.sum()


LOSSES = [
    plain,
    bias,
    total,
    each,
    smoothing,
    weights,
    ignored,
    capped,
    probabilities,
    distilled,
    hinge,
    nonlinear,
    used_twice,
]


def arguments(device, dtype=torch.float32, rows=ROWS):
    made = [torch.randn(s, device=device).to(dtype) for s in ((rows, WIDTH), (CLASSES, WIDTH), (CLASSES,))]
    return [*made, torch.randint(CLASSES, (rows,), device=device)]


def run(fn, args, scale=1.0):
    given = [a.detach().clone().requires_grad_(a.is_floating_point()) for a in args]
    loss = fn(*given)
    (
        loss * scale * torch.arange(1, loss.numel() + 1, device=loss.device, dtype=loss.dtype).view(loss.shape)
    ).sum().backward()
    return [loss.detach(), *(g.grad for g in given[:3])]


def exact(args):
    return [a.double() if a.is_floating_point() else a for a in args]


def assert_right(ours, eager, right):
    """At most twice eager's error, and some units of the dtype: sums over parts are rounded once a part."""
    for one, two, three in zip(ours, eager, right, strict=True):
        assert (one is None) == (two is None)
        if one is not None:
            assert one.dtype is two.dtype and one.shape == two.shape
            unit = torch.finfo(one.dtype).eps * three.abs().max()
            assert (one.double() - three).abs().max() <= 2 * (two.double() - three).abs().max() + 8 * unit


@pytest.fixture(params=BACKENDS)
def chunked(request, backend):
    """`fusejit.jit` in parts of five rows, with kernels and op by op."""

    def made(fn, **options):
        return fusejit.jit(
            fn,
            backend=backend if request.param == "kernels" else "eager",
            fullgraph=True,
            **{"chunk_bytes": LIMIT} | options,
        )

    return made


@pytest.mark.parametrize("fn", LOSSES)
def test_values_and_gradients(fn, chunked, device):
    args = arguments(device)
    if fn not in (hinge, ignored):
        args[3][2] = -100
    fused = chunked(fn)
    assert_right(run(fused, args, 0.7), run(fn, args, 0.7), run(fn, exact(args), 0.7))
    rewrites = fused.explain(*[a.requires_grad_(a.is_floating_point()) for a in args]).rewrites
    again = fn in (each, nonlinear)
    assert len(rewrites) == 1 and "in 3 parts of 5 rows" in rewrites[0] and "test_chunked.py" in rewrites[0]
    assert ("computed again for the gradients, since" in rewrites[0]) == again and (
        "scaled in the backward" in rewrites[0]
    ) != again


@pytest.mark.parametrize(("dtype", "later"), [(torch.bfloat16, False), (torch.float16, True)])
def test_half_types(dtype, later, chunked, device):
    args = arguments(device, dtype, 40)
    loss = lambda h, w, b, t: F.cross_entropy(F.linear(h, w, b).float(), t)  # noqa: E731
    fused = chunked(loss)
    assert_right(run(fused, args), run(loss, args), run(loss, exact(args)))
    (line,) = fused.explain(*[a.requires_grad_(a.is_floating_point()) for a in args]).rewrites
    assert ("float16 may underflow" in line) == later


def test_without_gradients(chunked, device):
    args, fused = arguments(device), chunked(capped)
    with torch.no_grad():
        torch.testing.assert_close(fused(*args), capped(*args))
        report = fused.explain(*args)
    assert report.rewrites[0].count("gradients") == 0 and "3 parts" in str(report)


@pytest.mark.parametrize("wanted", [(0,), (1,), (0, 1)])
def test_gradients_of_some(wanted, chunked, device):
    args, fused = arguments(device), chunked(bias)
    results = []
    for fn in (fused, bias):
        given = [a.detach().clone().requires_grad_(i in wanted) for i, a in enumerate(args[:3])]
        fn(*given, args[3]).backward()
        results.append([g.grad for g in given])
    for ours, theirs in zip(*results, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs)


def test_a_model_of_blocks_and_a_head(chunked, device):
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.norm = torch.nn.Linear(WIDTH, WIDTH), torch.nn.LayerNorm(WIDTH)

        def forward(self, x):
            return x + self.up(self.norm(x))

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList(Block() for _ in range(3))
            self.head = torch.nn.Linear(WIDTH, CLASSES, bias=False)

        def forward(self, x, target):
            for block in self.blocks:
                x = block(x)
            return F.cross_entropy(self.head(x), target)

    torch.manual_seed(0)
    model = Model().to(device)
    x, target = torch.randn(ROWS, WIDTH, device=device), torch.randint(CLASSES, (ROWS,), device=device)
    loss = model(x, target)
    loss.backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    fused = chunked(model)
    ours = fused(x, target)
    ours.backward()
    torch.testing.assert_close(ours, loss)
    for p, right in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, right)
    assert any("in 3 parts" in line for line in fused.explain(x, target).rewrites)


# -- heads as models write them ----------------------------------------------------------------------------------------
def shifted(h, w, b, t):
    x = F.linear(h.view(2, -1, WIDTH), w, b).float()
    return F.cross_entropy(x[..., :-1, :].contiguous().view(-1, CLASSES), t.view(2, -1)[..., 1:].reshape(-1))


def padded(h, w, b, t):
    x = F.linear(h.view(2, -1, WIDTH), w, b).float()
    t = F.pad(t.view(2, -1), (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(x.view(-1, CLASSES), t.view(-1), ignore_index=-100)


def capped_then_cut(h, w, b, t):
    x = 5 * torch.tanh((h.view(2, -1, WIDTH) @ w.t()) / 5)
    return F.cross_entropy(x[:, 1:].reshape(-1, CLASSES), t.view(2, -1)[:, 1:].reshape(-1)) + 0 * b.sum()


def contraction(h, w, b, t):
    return F.cross_entropy(torch.einsum("bsd, vd -> bsv", h.view(2, -1, WIDTH), w).flatten(0, 1), t) + 0 * b.sum()


def contraction_of_columns(h, w, b, t):
    return F.cross_entropy(torch.einsum("nd,dv->nv", h, w.t()), t) + 0 * b.sum()


def accuracy(h, w, b, t):
    x = F.linear(h, w, b)
    best, place = x.max(-1)
    right = ((place == t) & (t != -100)).float().mean().detach()
    return F.cross_entropy(x, t) + right + 1e-2 * best.mean() + 1e-2 * x.min(-1, keepdim=True).values.square().mean()


HEADS = {
    shifted: "linear.default of 2 x 7 x 37 is computed for the 2 x 6 x 37 that are read",
    padded: "",
    capped_then_cut: "matmul.default of 2 x 7 x 37 is computed for the 2 x 6 x 37 that are read",
    contraction: "einsum of 2 x 7 x 37 is computed as linear.default",
    contraction_of_columns: "einsum of 14 x 37 is computed as matmul.default",
    accuracy: "",
}


@pytest.mark.parametrize("fn", HEADS)
def test_heads(fn, chunked, device):
    args = arguments(device)
    args[3][4] = -100
    fused = chunked(fn)
    assert_right(run(fused, args, 0.7), run(fn, args, 0.7), run(fn, exact(args), 0.7))
    *before, last = fused.explain(*[a.requires_grad_(a.is_floating_point()) for a in args]).rewrites
    assert "in 3 parts of" in last and "scaled in the backward" in last
    assert len(before) == bool(HEADS[fn]) and all(HEADS[fn] in line and "test_chunked.py" in line for line in before)


def test_rows_that_something_else_reads_are_computed(chunked, device):
    def both(h, w, b, t):
        x = F.linear(h.view(2, -1, WIDTH), w, b)
        return F.cross_entropy(x[:, :-1].reshape(-1, CLASSES), t.view(2, -1)[:, 1:].reshape(-1)) + x.square().mean()

    def columns(h, w, b, t):
        return F.cross_entropy(F.linear(h, w, b)[:, :20], t % 20)

    for fn in (both, columns):
        args, fused = arguments(device), chunked(fn)
        for ours, eager in zip(run(fused, args), run(fn, args), strict=True):
            torch.testing.assert_close(ours, eager)
        (line,) = fused.explain(*[a.requires_grad_(a.is_floating_point()) for a in args]).rewrites
        assert "is held whole: slice.Tensor" in line

    def last(h, w, b, t):  # the next token's logits
        return F.linear(h.view(2, -1, WIDTH), w, b)[:, -1]

    args, fused = arguments(device), chunked(last)
    torch.testing.assert_close(fused(*args), last(*args))
    assert "computed for the 2 x 37 that are read" in fused.explain(*args).rewrites[0]


# -- memory ------------------------------------------------------------------------------------------------------------
def peak(program):
    """The most bytes that a call of a Program holds at once besides its inputs, those of the Programs that it calls
    included.
    """
    alive, most = {}, 0
    for step in program.steps:
        inside = 0
        if isinstance(step, Alloc):
            alive[step.buffer.name] = alive.pop(step.reuse, step.buffer.bytes)
        elif isinstance(step, Extern):
            inside = 0 if step.program is None else peak(step.program)
            taken = (
                {}
                if step.program is None
                else {
                    o
                    for o, ref in zip(step.outputs, step.program.outputs, strict=True)
                    if ref.buffer in step.program.inputs
                }
            )
            alive |= {o: program.buffers[o].bytes for o in step.outputs if o and o not in taken}
        elif isinstance(step, Free):
            alive = {name: n for name, n in alive.items() if name not in step.names}
        most = max(most, sum(alive.values()) + inside)
    return most


def programs(found):
    return [p for whole in (found.forward, found.backward) if whole is not None for p in (*whole.called, whole)]


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("classes", [32768, 50257])
def test_no_part_is_larger_than_said(classes, reduction):
    rows, width = 4096, 64
    loss = lambda h, w, t: F.cross_entropy(F.linear(h, w).float(), t, reduction=reduction)  # noqa: E731
    made = lambda *s: torch.empty(s, dtype=torch.bfloat16, requires_grad=True)  # noqa: E731
    args = made(rows, width), made(classes, width), torch.empty(rows, dtype=torch.int64)
    sizes = {}
    for limit in (0, 512 * classes * 2):
        fused = fusejit.jit(loss, backend="interpret", chunk_bytes=limit)
        found = fused.specialisation(*args)
        sizes[limit] = (
            max(b.bytes for p in programs(found) for b in p.buffers.values()),
            max(map(peak, programs(found))),
        )
        if limit:
            part = 512 * classes * 2
            assert sizes[limit][0] == part and sizes[0][0] == 8 * part
            assert (
                sizes[limit][1] <= 2 * part + 4 * classes * width * 4
            )  # logits, their gradient, and what of the weight adds up
            assert sizes[0][1] > 8 * part
            logits = [k for p in found.forward.called for k in p.kernels if k.bytes_read >= part]
            assert all(
                k.bytes_read + k.bytes_written <= 2.01 * part for k in logits
            )  # loss and gradient: one read (a row is in L2), one write
            assert len({id(p) for p in found.forward.called}) <= 2  # the first part, and all others


def test_more_than_a_gigabyte_is_never_held_by_default(monkeypatch):
    rows, classes = 16384, 128256
    made = lambda *s: torch.empty(s, dtype=torch.bfloat16, requires_grad=True)  # noqa: E731
    args = made(rows, 16), made(classes, 16), made(classes), torch.empty(rows, dtype=torch.int64)
    report = fusejit.jit(plain, backend="interpret").explain(*args)
    assert "in 4 parts of 4096 rows: 1050.7 MB at once, 3152.0 MB less" in str(report)
    monkeypatch.setenv("FUSEJIT_CHUNK_BYTES", "0")
    assert fusejit.jit(plain, backend="interpret").explain(*args).rewrites == ()
    monkeypatch.setenv("FUSEJIT_CHUNK_BYTES", str(2**29))
    assert "in 8 parts" in fusejit.jit(plain, backend="interpret").explain(*args).rewrites[0]


def test_random_numbers_are_eagers_op_by_op(device):
    def loss(h, w, b, t):
        return F.cross_entropy(F.linear(F.dropout(h, 0.5), w), t)

    args, fused = arguments(device), fusejit.jit(loss, backend="eager", chunk_bytes=LIMIT)
    results = []
    for fn in (fused, loss):
        torch.manual_seed(3)
        results.append(run(fn, args))
    for ours, theirs in zip(*results, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs)


def test_sizes_that_vary_are_held_whole(chunked, device):
    args, fused = arguments(device), chunked(bias, dynamic=True)
    for rows in (ROWS, ROWS + 3):
        h, t = torch.randn(rows, WIDTH, device=device), torch.randint(CLASSES, (rows,), device=device)
        torch.testing.assert_close(fused(h, args[1], args[2], t), bias(h, args[1], args[2], t))
    assert fused.cache_info().specialisations == 1


# -- where not ---------------------------------------------------------------------------------------------------------
def test_what_is_not_local_to_rows_is_held_whole(chunked, device):
    def returned(h, w, b, t):
        x = F.linear(h, w, b)
        return F.cross_entropy(x, t), x

    def columns(h, w, b, t):
        return F.linear(h, w, b).softmax(0).square().sum()

    def long(h, w, b, t):
        return F.gelu(F.linear(h, w, b)) @ torch.cat([w, w, w], 1)

    def turned(h, w, b, t):
        return F.linear(h, w, b).t().softmax(-1).sum()

    reasons = {
        returned: "is a result",
        columns: "amax.default needs all rows at once",
        long: "its rows end in 24 values each (mm.default), not in a reduction",
        turned: "needs it turned",
    }
    for fn, reason in reasons.items():
        args, fused = arguments(device), chunked(fn)
        given = [a.requires_grad_(a.is_floating_point()) for a in args]
        ours, theirs = fused(*given), fn(*given)
        torch.testing.assert_close(ours, theirs)
        lines = fused.explain(*given).rewrites
        assert any("is held whole: " in line and reason in line and "test_chunked.py" in line for line in lines), lines
        assert not any("parts" in line for line in lines)


def test_small_products_and_zero_are_left_alone(chunked, device):
    args = arguments(device)
    assert chunked(bias, chunk_bytes=0).explain(*args).rewrites == ()
    assert chunked(bias, chunk_bytes=ROWS * CLASSES * 4).explain(*args).rewrites == ()
    for wrong in (-1, 1.5, "1G", True):
        with pytest.raises(ValueError, match="chunk_bytes"):
            fusejit.jit(bias, chunk_bytes=wrong)


@pytest.mark.parametrize("wrong", [CLASSES, -1])
def test_targets_out_of_range(wrong, chunked, device):
    if device == "cuda":
        pytest.skip("a failed assertion on the device ends the process's use of it")
    args = arguments(device)
    args[3][7] = wrong
    with pytest.raises(IndexError):
        bias(*args)
    with pytest.raises(IndexError, match="out of bounds") as raised:
        chunked(bias)(*args)
    assert "test_chunked.py" in "\n".join(raised.value.__notes__)
