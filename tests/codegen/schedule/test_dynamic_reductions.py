"""Reductions whose number of rows or whose length varies: the launches and bytes of one size alone, and right for every
other.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fusejit.compile
from fusejit import jit
from fusejit.codegen.schedule.device import machine
from fusejit.runtime.compile_workers import KernelSpec, compile_kernels


def layer_norm(columns):
    return lambda x, w, b: torch.nn.functional.layer_norm(x, (columns,), w, b)


def rms_norm(columns):
    return lambda x, w, b: (
        x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w.reshape(columns) + b.reshape(columns)
    )


def call(fn, x, w, b, grad):
    """Return a result and the gradients of all three."""
    given = [v.detach().clone().requires_grad_() for v in (x, w, b)]
    y = fn(*given)
    return [y, *torch.autograd.grad(y, given, grad)]


def bytes_moved(programs):
    return sum(k.bytes_read + k.bytes_written for program in programs for k in program.kernels)


def halves(jitted, *args):
    found = jitted.specialisation(*[a.detach().requires_grad_() for a in args])
    return [found.forward, found.backward]


def spilled(kernels, even):
    """Compile kernels for sm_90, each bucket of theirs, with sizes that are multiples of 16 or not; the names of those
    that spill.
    """
    specs = []
    for k in kernels:
        pointers = sum(kind.startswith("*") for kind in k.params)
        sizes = (even,) * (len(k.params) - pointers)
        for _, tiles in k.schedule.buckets or ((None, k.schedule),):
            specs.append(
                KernelSpec(
                    k.source,
                    k.name,
                    k.params,
                    tiles.blocks,
                    tiles.num_warps,
                    tiles.num_stages,
                    k.debug,
                    (True,) * pointers + sizes,
                    k.fp_fusion,
                )
            )
    return [spec.name for spec, done in zip(specs, compile_kernels(specs), strict=True) if done.n_spills]


@pytest.fixture
def small_device(monkeypatch, request):
    """A GPU of few multiprocessors: what takes thousands of rows on a large one is seen with a few."""
    monkeypatch.setattr(
        fusejit.compile, "machine", lambda target=None: replace(machine("sm_90"), sms=getattr(request, "param", 8))
    )


@pytest.mark.parametrize(
    ("make", "columns", "shapes"),
    [
        (layer_norm, 256, [(20,), (2,), (7,), (1,), (0,), (8,), (50,)]),
        (layer_norm, 257, [(11,), (3,), (40,)]),
        (layer_norm, 5000, [(12,), (3,)]),
        (rms_norm, 96, [(3, 5), (2, 2), (2, 1), (7, 5), (0, 4)]),
        (rms_norm, 64, [(3,), (60,)]),
    ],
)
def test_row_and_column_sums_of_any_number_of_rows(make, columns, shapes, small_device):
    """The backward of a norm reads its input once for all sizes, as it does for one."""
    plain, w, b = make(columns), torch.randn(columns), torch.randn(columns)
    jitted = jit(plain, backend="interpret", dynamic=True)
    for shape in shapes:
        x, grad = torch.randn(*shape, columns), torch.randn(*shape, columns)
        want = call(plain, x.double(), w.double(), b.double(), grad.double())
        for mine, theirs in zip(call(jitted, x, w, b, grad), want, strict=True):
            torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-5 * max(1, len(x)) ** 0.5)
    x = torch.randn(*shapes[0], columns)
    varying = halves(jitted, x, w, b)
    assert [k.template for p in varying for k in p.kernels] == [
        "reduction_persistent",
        "reduction_mixed",
        "reduction_looped",
    ]
    if x[..., 0].numel() > 8:  # for fewer rows a program each was chosen: where they vary, they may be many
        fixed = halves(jit(plain, backend="interpret", dynamic=False), x, w, b)
        assert [p.launches for p in varying] == [p.launches for p in fixed] == [1, 2]
        assert bytes_moved(varying) == bytes_moved(fixed)
        cuts = [[k.schedule.peel for half in found for k in half.kernels] for found in (varying, fixed)]
        assert cuts[0] == cuts[1] == ([4, 4, 0] if columns == 257 else [0, 0, 0])
    assert jitted.cache_info().fallbacks == 0


def test_partial_sums_have_the_size_of_the_call():
    kernels = []
    for columns in (257, 8192):
        x, w, b = (torch.randn(*shape, dtype=torch.bfloat16) for shape in ((4, columns), (columns,), (columns,)))
        jitted = jit(layer_norm(columns), backend="interpret", dynamic=True)
        call(jitted, x, w, b, x)
        backward = halves(jitted, x, w, b)[1]
        assert "= min(s0, " in backward.source and "by q0 programs" in backward.kernels[0].table
        kernels += backward.kernels
    assert not spilled(kernels, True) and not spilled(kernels[:2], False)


class Scaled(torch.nn.Module):
    """A function of an argument whose sizes vary and of a weight whose sizes do not."""

    def __init__(self, fn, *shape):
        super().__init__()
        self.fn, self.weight = fn, torch.nn.Parameter(torch.rand(*shape) + 0.5, requires_grad=False)

    def forward(self, x):
        return self.fn(x, self.weight)


def normed(x, w):
    y = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w
    return y, y.abs().amax()


SPLIT = {
    "columns": (
        lambda x, w: (x * w).sum(0),
        (24,),
        [(2100, 24), (2, 24), (17, 24), (1, 24), (0, 24), (5000, 24)],
        ["looped", "persistent"],
    ),
    "several": (
        lambda x, w: ((x + w).amax(0), x.mean(0)),
        (9,),
        [(2051, 9), (3, 9), (2500, 9)],
        ["looped", "persistent"],
    ),
    "around": (
        lambda x, w: (x * w).sum((0, 2)),
        (8, 1),
        [(3000, 8, 10), (2, 8, 10), (41, 8, 10)],
        ["looped", "persistent"],
    ),
    "all": (lambda x, w: (x * w).sum(), (1,), [(500_000,), (2,), (5,), (700_001,)], ["looped", "persistent"]),
    "mean": (lambda x, w: (x * w).mean(), (64,), [(8000, 64), (2, 64), (1, 64), (1237, 64)], ["looped", "persistent"]),
    "place": (lambda x, w: (x * w).argmax(), (1,), [(400_000,), (2,), (100,), (500_001,)], ["looped", "persistent"]),
    "long rows": (lambda x, w: (x + w).softmax(-1), (120_000,), [(2, 120_000), (3, 120_000)], None),
    "rows, all": (normed, (512,), [(90, 512), (2, 512), (301, 512)], ["persistent", "looped"]),
}


@pytest.mark.parametrize("small_device", [32], indirect=True)
@pytest.mark.parametrize("case", SPLIT)
def test_few_results_of_a_length_that_varies(case, small_device):
    """The whole device works on a long reduction: as many launches and bytes as for one length, and right for
    others.
    """
    fn, weights, shapes, templates = SPLIT[case]
    model = Scaled(fn, *weights)
    jitted = jit(model, backend="interpret", dynamic=True)
    first, fixed = (jit(model, backend="interpret", dynamic=d).program(torch.randn(shapes[0])) for d in (True, False))
    assert first.launches == fixed.launches
    assert first.kernels[0].bytes_read == fixed.kernels[0].bytes_read  # once; there may be more partial results
    assert templates is None or [k.template for k in first.kernels] == [f"reduction_{name}" for name in templates]
    for shape in shapes:
        x = torch.randn(shape)
        got, want = jitted(x), fn(x.double(), model.weight.double())
        for mine, theirs in zip(*((y,) if isinstance(y, torch.Tensor) else y for y in (got, want)), strict=True):
            torch.testing.assert_close(mine.to(theirs.dtype), theirs, rtol=1e-5, atol=1e-3)
    assert jitted.cache_info().fallbacks == 0


@pytest.mark.parametrize("small_device", [32], indirect=True)
def test_what_is_short_at_first_has_a_variant_that_is_split(small_device):
    jitted = jit(lambda x: (x * 2).sum(), backend="interpret", dynamic=True)
    for n in (20, 3, 100_000, 400_000, 7, 300_001):
        x = torch.randint(-3, 4, (n,)).float()
        assert jitted(x) == 2 * x.sum()
    variants = jitted.specialisation(x).built.forward
    assert [(len(program.kernels), "s0 < 131072" in assumed) for assumed, program in variants.programs] == [
        (2, False),
        (1, True),
    ]
    assert "forward: a variant for s0 < 131072" in str(jitted.explain(x))
    assert not spilled([k for _, program in variants.programs for k in program.kernels if k.extents], True)


def test_offsets_of_64_bits(small_device):
    """The variant for tensors beyond 32-bit offsets, compiled as for such a call, computes the same for small ones."""
    plain, w, b = layer_norm(64), torch.randn(64), torch.randn(64)
    jitted = jit(plain, backend="interpret", dynamic=True)
    call(jitted, torch.randn(20, 64), w, b, torch.randn(20, 64))
    norm = jitted.specialisation(*(v.requires_grad_() for v in (torch.randn(20, 64), w, b))).built.backward()
    total = jit(lambda x: (x * 2).sum(0), backend="interpret", dynamic=True)
    total(torch.randn(2100, 24))
    for variants, far in (
        (norm, {"s0": 50_000_000}),
        (total.specialisation(torch.randn(5, 24)).built.forward, {"s0": 90_000_000, "s1": 24}),
    ):
        wide, narrow = variants.compiler(far)[0], variants.first
        assert (
            all("i64" in k.params and "tl.int64" in k.source for k in wide.kernels[:1])
            and wide.launches == narrow.launches == 2
        )
        for rows in (3, 30):
            given = []
            for number, name in enumerate(wide.inputs):
                known = next((n for n, place, axis in wide.sizes if place == number and axis < 0), None)
                shape = wide.buffers[name].shape if name else ()
                sizes = {"s0": rows, "s1": 24}
                given.append(
                    sizes.get(known) if name is None else torch.randn(*(eval(str(n), dict(sizes)) for n in shape))
                )
            for mine, theirs in zip(wide(list(given)), narrow(list(given)), strict=True):
                torch.testing.assert_close(mine, theirs)
        assert not spilled([k for k in wide.kernels if k.extents], True)
