"""Random numbers in kernels: their distribution, one seed a call, the same numbers in backward and under any tiling,
and eager's stream.
"""

from __future__ import annotations

import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import fusejit
from fusejit.tools.blocks import BLOCKS


def kolmogorov(sample: torch.Tensor, cdf) -> float:
    """The largest distance between the sample's distribution and `cdf`, times sqrt(n): above 1.95 once in a
    thousand.
    """
    ordered = sample.flatten().double().sort().values
    n = len(ordered)
    expected, steps = cdf(ordered), torch.arange(n + 1, dtype=torch.float64, device=ordered.device) / n
    return float(torch.maximum((expected - steps[:-1]).abs().max(), (steps[1:] - expected).abs().max())) * math.sqrt(n)


def normal_cdf(mean=0.0, std=1.0):
    return lambda x: 0.5 * (1 + torch.erf((x - mean) / std / math.sqrt(2)))


DRAWS = {
    "rand": (lambda x: torch.rand(x.shape, device=x.device), lambda v: v),
    "rand_like": (lambda x: torch.rand_like(x), lambda v: v),
    "randn": (lambda x: torch.randn(x.shape, device=x.device), normal_cdf()),
    "randn_like": (lambda x: torch.randn_like(x), normal_cdf()),
    "uniform_": (lambda x: torch.empty_like(x).uniform_(-1, 3), lambda v: (v + 1) / 4),
    "normal_": (lambda x: torch.empty_like(x).normal_(2, 3), normal_cdf(2, 3)),
    "exponential_": (lambda x: torch.empty_like(x).exponential_(2.0), lambda v: 1 - torch.exp(-2 * v)),
    "log_normal_": (lambda x: torch.empty_like(x).log_normal_(1, 0.5), lambda v: normal_cdf(1, 0.5)(v.log())),
    "cauchy_": (lambda x: torch.empty_like(x).cauchy_(1, 2), lambda v: 0.5 + torch.atan((v - 1) / 2) / math.pi),
}


@pytest.mark.parametrize("name", DRAWS)
def test_distributions(name, fuse, device):
    draw, cdf = DRAWS[name]
    fused = fuse(draw, fullgraph=True)
    x = torch.zeros(31, 331, device=device)
    sample = fused(x)
    assert fused.program(x).launches == 1 and len(fused.program(x).externs) == 1  # the seed
    assert sample.dtype is torch.float32 and kolmogorov(sample, cdf) < 1.95
    neighbours = torch.stack([cdf(sample.double()).flatten()[:-1], cdf(sample.double()).flatten()[1:]])
    assert abs(float(torch.corrcoef(neighbours)[0, 1])) < 4 / math.sqrt(sample.numel())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types(dtype, fuse, device):
    x = torch.zeros(32, 512, device=device, dtype=dtype)
    uniform, normal = fuse(lambda x: (torch.rand_like(x), torch.randn_like(x)))(x)
    assert uniform.dtype is normal.dtype is dtype
    assert float(uniform.min()) >= 0 and float(uniform.max()) < 1
    assert abs(float(uniform.double().mean()) - 0.5) < 0.01 and abs(float(normal.double().std()) - 1) < 0.02
    kept = fuse(lambda x: F.dropout(x, 0.1))(torch.ones_like(x)) != 0
    assert abs(float(kept.double().mean()) - 0.9) < 4 * math.sqrt(0.09 / kept.numel())


def test_integers(fuse, device):
    fused = fuse(
        lambda x: (
            torch.randint(3, 17, (40, 100), device=x.device),
            torch.randint_like(x, 5),
            torch.empty_like(x).geometric_(0.25),
        )
    )
    integers, like, tries = fused(torch.zeros(64, 64, device=device))
    counts = torch.bincount(integers.flatten() - 3, minlength=14).double()
    assert integers.dtype is torch.int64 and len(counts) == 14
    assert (
        float(((counts - 4000 / 14) ** 2 / (4000 / 14)).sum()) < 34.5
    )  # chi squared, 13 degrees of freedom, once in a thousand
    assert like.dtype is torch.float32 and like.unique().tolist() == [0, 1, 2, 3, 4]
    assert float(tries.min()) == 1 and abs(float(tries.mean()) - 4) < 0.3


@pytest.mark.parametrize(
    ("low", "high"),
    [
        (0, 3 * 2**30),
        (-(2**31), 2**31),
        (5, 2**28 + 5),
        (-3 * 2**40, 2**41),
        (0, 2**63 - 1),
        (-(2**62), 2**61),
        (-(2**63), 2**63 - 1),
    ],
)
def test_integers_of_a_wide_range(low, high, fuse, device):
    """As even as eager's, of 64 bits where 32 would draw a third of the range twice as often; remainders of 2**64 show
    in both.
    """
    fused = fuse(lambda x: torch.randint(low, high, x.shape, device=x.device), fullgraph=True)
    x = torch.zeros(100, 500, device=device)
    drawn, count = fused(x), high - low
    assert fused.program(x).launches == 1 and len(fused.program(x).externs) == 1  # the seed
    assert (
        int(drawn.min()) >= low
        and int(drawn.max()) < high
        and len(drawn.unique()) > 49000
        and len((drawn % 1024).unique()) == 1024
    )
    whole, rest = divmod(2**64, count)  # the first `rest` of them are drawn once more
    cdf = lambda k: (whole * k + min(k, rest)) / 2**64  # noqa: E731
    for part in (1 / 8, 1 / 3, 1 / 2, 3 / 4):
        bound = int(count * part)
        assert abs(float((drawn < low + bound).double().mean()) - cdf(bound)) < 4 * math.sqrt(0.25 / drawn.numel())


def test_bernoulli(fuse, device):
    p = torch.rand(30, 300, device=device)
    p[:, :3], p[:, 3:6] = 0, 1
    drawn = fuse(torch.bernoulli)(p)
    assert float(drawn[:, :3].max()) == 0 and float(drawn[:, 3:6].min()) == 1
    assert abs(float((drawn - p).mean())) < 4 * math.sqrt(1 / 6 / p.numel())
    flipped = fuse(lambda x: torch.bernoulli(x, 0.3))(p)
    assert abs(float(flipped.mean()) - 0.3) < 4 * math.sqrt(0.21 / p.numel())


@pytest.mark.parametrize("wrong", [-0.1, 1.1, math.nan])
def test_what_is_no_probability(wrong, fuse, device):
    if device == "cuda":
        pytest.skip("a failed assertion on the device ends the process's use of it")
    p = torch.full((4, 5), 0.5)
    p[2, 3] = wrong
    with pytest.raises(RuntimeError, match="0 <= p <= 1") as raised:
        fuse(lambda p: torch.bernoulli(p) + 1)(p)
    assert "test_random.py" in "\n".join(raised.value.__notes__)
    with pytest.raises(ValueError, match="between 0 and 1"):
        fuse(lambda p: F.dropout(p, 1.5))(p)


def test_seeds(fuse, device):
    fused = fuse(lambda x: (torch.rand_like(x), torch.rand_like(x)))
    x = torch.zeros(16, 128, device=device)
    torch.manual_seed(5)
    first, second = fused(x)
    later = fused(x)[0]
    assert kolmogorov(torch.cat([fused(x)[0][:1] for _ in range(12)]), lambda v: v) < 1.95  # over calls as within one
    torch.manual_seed(5)
    again = fused(x)
    assert torch.equal(first, again[0]) and torch.equal(second, again[1])
    for other in (second, later):
        assert abs(float(torch.corrcoef(torch.stack([first.flatten(), other.flatten()]))[0, 1])) < 4 / math.sqrt(
            first.numel()
        )
    state = torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()
    once = fused(x)[0]
    (torch.set_rng_state if device == "cpu" else torch.cuda.set_rng_state)(state)
    assert torch.equal(once, fused(x)[0])


# Rows of one tile, of several, odd ones, columns, a walk over rows, transposed and sliced results: one stream, whatever
# the tiling.
USES = {
    "flat": lambda x: torch.rand_like(x),
    "row": lambda x: torch.rand_like(x) - torch.rand_like(x).sum(-1, keepdim=True) * 0,
    "column": lambda x: torch.rand_like(x) + x.sum(0) * 0,
    "tile": lambda x: torch.rand_like(x) + x.t().contiguous().t() * 0,
    "halves": lambda x: torch.cat(
        [torch.rand_like(x)[:, : x.shape[1] // 2], torch.rand_like(x)[:, x.shape[1] // 2 :] * 0], 1
    ),
}


@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("shape", [(12, 96), (7, 33), (64, 4), (3, 516)], ids=str)
def test_numbers_do_not_depend_on_the_tiling(shape, level, fuse, device):
    """Element k of a stream is Philox's lane k % 4 at k // 4, in every template and at every level."""
    x = torch.randn(shape, device=device)
    torch.manual_seed(11)
    expected = fuse(USES["flat"])(x)
    for name, use in USES.items():
        torch.manual_seed(11)
        found = fuse(use, jit_level=level)(x)
        columns = shape[1] // 2 if name == "halves" else shape[1]
        assert torch.equal(found[:, :columns], expected[:, :columns]), name
    torch.manual_seed(11)
    total = fuse(lambda x: torch.rand_like(x).double().sum(0), jit_level=level)(x)
    torch.testing.assert_close(total, expected.double().sum(0))
    torch.manual_seed(11)
    turned = fuse(lambda x: torch.rand_like(x).t().contiguous(), jit_level=level)(x)
    assert torch.equal(turned, expected.t())


def test_long_rows_and_walks(fuse, device, monkeypatch):
    """Looped rows and walks in several tiles take the same numbers as rows in registers."""
    from fusejit.templates import reduction_persistent

    def normed(x):
        kept = F.dropout(x, 0.4)
        return F.layer_norm(kept, kept.shape[-1:]), kept

    x = torch.randn(9, 512, device=device, requires_grad=True)
    results = []
    for limit in (32768, 128):
        monkeypatch.setattr(reduction_persistent, "MAX_ROW", limit)
        torch.manual_seed(2)
        x.grad = None
        fused = fuse(normed)
        out, kept = fused(x)
        (out.square().sum() + kept.sum()).backward()
        templates = {k.template for k in fused.program(x).kernels}
        assert templates == ({"reduction_persistent"} if limit == 32768 else {"reduction_looped"})
        results.append((out.detach(), kept.detach(), x.grad))
    assert torch.equal(results[0][1], results[1][1])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", ["dropout", "dropout1d", "dropout2d", "alpha_dropout", "bernoulli", "noise"])
def test_backward_takes_the_same_numbers(name, fuse, device):
    functions = {
        "bernoulli": lambda x: x * torch.bernoulli(x.detach(), 0.3),
        "noise": lambda x: x * torch.randn_like(x),
        "alpha_dropout": lambda x: F.alpha_dropout(x, 0.4, training=True),
    }
    fn = functions.get(name) or (lambda x: getattr(F, name)(x, 0.4))
    x = torch.randn(6, 8, 24, device=device).add(4).requires_grad_()
    x = x if name != "dropout2d" else torch.ones(6, 8, 5, 5, device=device, requires_grad=True)
    fused = fuse(fn, fullgraph=True)
    out = fused(x)
    saved = sum(t.numel() * t.element_size() for t in out.grad_fn.saved_tensors)
    out.sum().backward()
    slope = ((out - out.min()) / (x - x.min()).clamp_min(1)) if name == "alpha_dropout" else out / x
    if name == "alpha_dropout":
        assert len(x.grad.unique()) == 2 and torch.equal(x.grad == 0, out.detach() == out.detach()[x.grad == 0][0])
    else:
        torch.testing.assert_close(x.grad, slope.detach())
    assert saved <= 8, "the mask is recomputed, not stored"


def test_dropout_residual_layer_norm(fuse, backend, device):
    """One kernel forward; backward a walk and a small sum. The mask is nowhere in memory: what is saved is what layer
    norm needs.
    """
    block = BLOCKS["dropout_residual_layer_norm"]
    shape = (64, 256)
    args = block.make(shape, device, torch.float32)
    fused = fuse(block.fn)
    normed, stream = fused(*args)
    (normed * 3 + stream).sum().backward()
    x, residual = args[:2]
    kept = (stream - residual).detach() != 0
    torch.testing.assert_close(x.grad, residual.grad * kept / 0.9)
    specialised = fused.explain(*args)
    forward, backward = fused.program(*args), specialised.backward if hasattr(specialised, "backward") else None
    assert forward.launches == 1
    size = 4 * shape[0] * shape[1]
    assert (
        sum(k.bytes_read + k.bytes_written for k in forward.kernels) <= 4 * size + 8 * shape[0] + 4 * 4 * shape[1] + 8
    )
    assert backward is None or backward.launches == 2


def test_p_of_zero_and_one(fuse, device):
    x = torch.randn(8, 40, device=device, requires_grad=True)
    assert torch.equal(fuse(lambda x: F.dropout(x, 0.0))(x), x)
    out = fuse(lambda x: F.dropout(x, 1.0))(x)
    out.sum().backward()
    assert not out.any() and not x.grad.any()


def test_train_and_eval(fuse, device):
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Dropout(0.5), torch.nn.ReLU()).to(device)
    fused, x = fuse(model), torch.randn(16, 32, device=device)
    trained = fused(x)
    assert float((trained == 0).float().mean()) > 0.6
    model.eval()
    torch.testing.assert_close(fused(x), model(x))
    model.train()
    assert not torch.equal(fused(x), trained)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_around_a_jitted_function(reentrant, fuse, device):
    fused = fuse(lambda x: F.dropout(torch.sin(x) + 2, 0.5))
    x = torch.randn(16, 64, device=device, requires_grad=True)
    for _ in range(2):  # the first call compiles, inside of the checkpoint
        x.grad = None
        out = checkpoint(fused, x, use_reentrant=reentrant)
        out.sum().backward()
        assert torch.equal(out != 0, x.grad != 0)


def test_checkpoint_inside(fuse, device):
    fused = fuse(lambda x: checkpoint(lambda y: F.dropout(torch.sin(y) + 2, 0.5), x, use_reentrant=False))
    x = torch.randn(16, 64, device=device, requires_grad=True)
    out = fused(x)
    out.sum().backward()
    assert torch.equal(out != 0, x.grad != 0)


def test_vmap_randomness(fuse, device):
    x = torch.ones(5, 64, device=device)
    different = fuse(fusejit.vmap(lambda r: F.dropout(r, 0.5), randomness="different"))(x)
    same = fuse(fusejit.vmap(lambda r: F.dropout(r, 0.5), randomness="same"))(x)
    assert torch.equal(same, same[:1].expand_as(same)) and not torch.equal(
        different, different[:1].expand_as(different)
    )


EAGER = {
    "dropout": lambda x: F.dropout(x, 0.3) + 1,
    "many": lambda x: torch.rand_like(x) + torch.randn_like(x) * F.dropout(x, 0.3) + torch.bernoulli(torch.sigmoid(x)),
    "in place": lambda x: (
        torch.empty_like(x).uniform_(1, 2) * torch.empty_like(x).normal_() + torch.empty_like(x).exponential_()
    ),
    "integers": lambda x: (
        x + torch.randint(0, 9, x.shape, device=x.device) + torch.randperm(x.shape[-1], device=x.device)
    ),
    "order": lambda x: torch.randn_like(torch.rand_like(x).sort()[0]) + torch.rand(3, device=x.device).exp()[1] + x,
}


@pytest.mark.parametrize("name", EAGER)
def test_eagers_stream(name, fuse, device):
    """numerics="eager": every random op is torch's own call, in the function's order, so numbers and generator state
    are eager's.
    """
    fused = fuse(EAGER[name], numerics="eager", fullgraph=True)
    for shape in ((9, 17), (4, 64)):
        x = torch.randn(shape, device=device, requires_grad=name == "many")
        for _ in range(2):
            torch.manual_seed(3)
            expected, after = EAGER[name](x), torch.rand(3, device=device)
            torch.manual_seed(3)
            assert torch.equal(fused(x), expected)
            assert torch.equal(torch.rand(3, device=device), after)


def test_the_eager_backend_keeps_eagers_stream(device):
    x = torch.randn(9, 17, device=device)
    torch.manual_seed(3)
    expected = F.dropout(x, 0.3)
    torch.manual_seed(3)
    assert torch.equal(fusejit.jit(lambda x: F.dropout(x, 0.3), backend="eager")(x), expected)


def test_a_generator_of_its_own_is_respected(fuse, device):
    generator = torch.Generator(device).manual_seed(7)
    fused = fuse(lambda x: x + torch.rand(x.shape, generator=generator, device=x.device))
    x = torch.zeros(4, 8, device=device)
    found = [fused(x), fused(x)]
    generator.manual_seed(7)
    assert torch.equal(found[0], torch.rand(4, 8, generator=generator, device=device))
    assert torch.equal(found[1], torch.rand(4, 8, generator=generator, device=device))
    assert any("enerator" in str(fallback) for fallback in fused.explain(x).fallbacks)


BF16 = torch.bfloat16
COMPILED = {
    "flat": (lambda x, r: F.dropout(x, 0.1) + r, ((8192, 4096), (8192, 4096))),
    "row": (lambda x: F.dropout(x.softmax(-1), 0.1), ((16384, 1024),)),
    "long row": (lambda x: F.dropout(x.softmax(-1), 0.1), ((1024, 131072),)),
    "column": (lambda x: F.dropout(x, 0.1).sum(0), ((8192, 4096),)),
    "tile": (lambda x: F.dropout(x, 0.1).t().contiguous(), ((8192, 4096),)),
}


@pytest.mark.parametrize("name", COMPILED)
def test_four_lanes_of_each_philox_call(name, sm_90):
    """A Philox call is ten rounds of two wide products (the last two rounds' are partly unused): 18 to 20 for four
    elements.
    """
    fn, shapes = COMPILED[name]
    args = [torch.empty(shape, dtype=BF16, requires_grad=name != "column") for shape in shapes]
    for kernel in sm_90(fn, args).kernels:
        if "fj.rand" not in kernel.source:
            continue
        blocks = dict(kernel.constants)
        each = math.prod(blocks.values()) // (32 * kernel.num_warps)
        products = len(re.findall(r"mul\.hi\.u32|mul\.wide\.u32", kernel.ptx))
        passes = kernel.source.count("fj.rand_tile")
        assert passes >= 1 and "fj.rand(" not in kernel.source
        assert products <= 20 * passes * max(1, each // 4), f"{products} products for {each} elements a thread"
        assert kernel.n_spills == 0 and kernel.wide_loads > 0
