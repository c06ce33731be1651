"""Dynamic sizes: one specialisation for many sizes; every size gives what eager gives, and nothing compiles more often
than it has to.
"""

from __future__ import annotations

import random

import pytest
import torch

from fusejit import CaptureError, jit

BACKENDS = ("eager", "interpret")
SIZES = (4, 7, 1, 16, 0, 2, 13, 48, 3)


def check(jitted, plain, *args, **options):
    """Compare results and gradients with eager."""
    ours = [a.detach().clone().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a for a in args]
    theirs = [a.detach().clone().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a for a in args]
    got, want = jitted(*ours), plain(*theirs)
    torch.testing.assert_close(got, want, **options)
    if isinstance(want, torch.Tensor) and want.requires_grad:
        weight = torch.randn_like(want)
        got.backward(weight)
        want.backward(weight)
        for a, b in zip(ours, theirs, strict=True):
            if isinstance(a, torch.Tensor) and a.requires_grad:
                torch.testing.assert_close(a.grad, b.grad, **options)


# -- when a dimension becomes dynamic


def test_the_second_size_makes_the_dimension_dynamic():
    jitted = jit(lambda x, y: x * 2 + y, backend="eager")
    for n in (4, 7, 9, 100, 2):
        assert jitted(torch.ones(n, 3), torch.ones(n, 3)).shape == (n, 3)
    info = jitted.cache_info()
    assert info[:3] == (2, 3, 2)
    assert "dimension 0 of x changed: 4 → 7, now dynamic" in info.reasons[1]
    assert "dimension 0 of x changed: 4 → 7, now dynamic" in str(jitted.explain(torch.ones(9, 3), torch.ones(9, 3)))
    jitted(torch.ones(4, 5), torch.ones(4, 5))  # another dimension: one more, and it holds for both
    for n, m in ((8, 8), (3, 9), (20, 6)):
        jitted(torch.ones(n, m), torch.ones(n, m))
    assert jitted.cache_info().specialisations <= 4


def test_false_compiles_each_shape():
    jitted = jit(lambda x: x * 2, backend="eager", dynamic=False)
    for n in range(2, 8):
        jitted(torch.ones(n))
    assert jitted.cache_info().specialisations == 6


@pytest.mark.parametrize("backend", BACKENDS)
def test_case_25_dynamic_true(backend):
    jitted = jit(lambda x: torch.relu(x) * 3 - 1, backend=backend, dynamic=True)
    plain = jitted.__wrapped__
    for shape, count in (((3, 3), 1), ((5, 5), 1), ((3, 3, 3), 2), ((4, 4, 4), 2), ((3, 3), 2), ((6, 6), 2)):
        x = torch.randn(shape)
        torch.testing.assert_close(jitted(x), plain(x))
        assert jitted.cache_info().specialisations == count, shape
    assert jitted.cache_info().fallbacks == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dynamic", [None, True])
def test_case_8_reshape_by_a_size(backend, dynamic):
    jitted = jit(lambda x: x.reshape(x.shape[0], 100) * 2, backend=backend, dynamic=dynamic)
    for batch in (2, 4, 8):
        check(jitted, jitted.__wrapped__, torch.randn(batch, 10, 10, requires_grad=True))


def test_a_thousand_lengths_compile_twice():
    def attention(q, k, v):
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        return torch.softmax(scores, -1) @ v

    jitted = jit(attention, backend="eager")
    for length in range(2, 1002):
        q = torch.randn(1, 2, length % 97 + 2, 4) if length % 100 else torch.randn(1, 2, length, 4)
        torch.testing.assert_close(jitted(q, q + 1, q - 1), attention(q, q + 1, q - 1))
    info = jitted.cache_info()
    assert info.specialisations == info.misses == 2 and info.hits == 998


def test_marks_of_torch_are_honoured():
    marked, static = torch.ones(4, 3), torch.ones(4, 3)
    marked._dynamo_dynamic_indices = {0}  # what torch._dynamo.mark_dynamic writes
    static._dynamo_static_indices = {0, 1}
    jitted = jit(lambda x: x + 1, backend="eager")
    jitted(marked)
    jitted(torch.ones(9, 3))
    assert jitted.cache_info()[:3] == (1, 1, 1)
    fixed = jit(lambda x: x + 1, backend="eager", dynamic=True)
    fixed(static)
    other = torch.ones(5, 3)
    other._dynamo_static_indices = {0, 1}
    fixed(other)
    assert fixed.cache_info().specialisations == 2
    weak = torch.ones(6)
    weak._dynamo_weak_dynamic_indices = {0}
    read = jit(lambda x: [x + i for i in range(x.shape[0])], backend="eager")
    assert len(read(weak)) == 6


def test_a_marked_size_that_the_body_needs_is_an_error_that_names_the_line():
    x = torch.ones(4)
    x._dynamo_dynamic_indices = {0}

    def f(x):
        return sum(x[i] for i in range(x.shape[0]))

    with pytest.raises(
        CaptureError, match=r"dimension 0 of x is marked dynamic, but its value 4 is needed at test_dynamic.py"
    ):
        jit(f, backend="eager")(x)


# -- what the body does with sizes


def test_a_condition_on_a_size_is_a_guard():
    def f(x):
        return x + 1 if x.shape[0] > 10 else x * 5

    jitted = jit(f, backend="eager", dynamic=True)
    for n in (4, 5, 20, 30, 3, 11, 10):
        x = torch.randn(n)
        torch.testing.assert_close(jitted(x), f(x))
    assert jitted.cache_info().specialisations == 2


def test_a_size_that_the_body_needs_stays_a_number_and_the_report_says_why():
    def f(x):
        for i in range(x.shape[0]):
            x = x + i
        return x

    jitted = jit(f, backend="eager", dynamic=True)
    for n in (3, 5, 4, 3):
        check(jitted, f, torch.randn(n, 8))
    assert jitted.cache_info().specialisations == 3
    assert "dimension 0 of x is not dynamic: its value 3 is needed at test_dynamic.py" in str(
        jitted.explain(torch.ones(3, 8))
    )
    jitted(torch.ones(3, 20))
    assert jitted.cache_info().specialisations == 3  # the other dimension is still dynamic


def test_equal_sizes_that_later_differ():
    def f(x, y):
        return x.sum(0) * y.shape[0] + y.sum()

    jitted = jit(f, backend="eager", dynamic=True)
    for n, m in ((4, 4), (6, 6), (4, 7), (8, 3), (5, 5)):
        check(jitted, f, torch.randn(n), torch.randn(m))
    assert jitted.cache_info().specialisations == 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_broadcasts_between_dynamic_dimensions(backend):
    def f(x, y):
        return (x[:, None] + y[None]) * x.shape[0] + y.sum()

    jitted = jit(f, backend=backend, dynamic=True)
    for n, m in ((4, 4), (6, 5), (1, 3), (3, 1), (2, 17), (16, 32)):
        check(jitted, f, torch.randn(n, requires_grad=True), torch.randn(m, requires_grad=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_strides(backend):
    def f(x):
        return torch.relu(x.transpose(0, 1)) + 1

    jitted, rng = jit(f, backend=backend), random.Random(0)
    for _ in range(8):
        n, m = rng.randrange(2, 9), rng.randrange(2, 9)
        for x in (
            torch.randn(n, m),
            torch.randn(m, n).t(),
            torch.randn(n, 2 * m)[:, ::2],
            torch.randn(n, 40)[:, :m],
            torch.randn(n, 1).expand(n, m),
        ):
            torch.testing.assert_close(jitted(x), f(x))


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_size(backend):
    def f(x, w):
        y = torch.softmax(x * 2, -1)
        return (y - y.mean(0)) * w

    jitted = jit(f, backend=backend)
    for n in SIZES:
        check(
            jitted, f, torch.randn(n, 6, requires_grad=True), torch.randn(6, requires_grad=True), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("backend", BACKENDS)
def test_changes_in_place(backend):
    def f(x, y):
        x.add_(y)
        return x * 2

    jitted = jit(f, backend=backend, dynamic=True)
    for n in (4, 6, 9):
        x, y = torch.randn(n, 3), torch.randn(n, 3)
        ours = x.clone()
        torch.testing.assert_close(jitted(ours, y), (x + y) * 2)
        torch.testing.assert_close(ours, x + y)
        ours = x.clone()
        torch.testing.assert_close(jitted(ours, ours), x * 4)  # one and the same
        base = torch.randn(n + 1, 3)
        want = base[:n] + base[1:]
        if backend == "eager":
            got = jitted(base[:n].clone(), base[1:])
            torch.testing.assert_close(got, want * 2)


def test_a_module_keeps_its_parameters_static():
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    jitted = jit(model, backend="eager")
    for n in (3, 5, 8, 13):
        x = torch.randn(n, 8)
        torch.testing.assert_close(jitted(x), model(x))
    assert jitted.cache_info().specialisations == 2


# -- kernels


class Attention(torch.nn.Module):
    """A block in the style of Hugging Face's: norms, rotary embedding, a causal mask, a gated MLP."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.norm = heads, torch.nn.RMSNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width, bias=False), torch.nn.Linear(width, width, bias=False)
        self.gate, self.up = torch.nn.Linear(width, 2 * width), torch.nn.Linear(width, 2 * width)
        self.down = torch.nn.Linear(2 * width, width)

    def rotate(self, x):
        half = x.shape[-1] // 2
        places = torch.arange(x.shape[-2], device=x.device)[:, None] / 10 ** torch.linspace(0, 1, half)
        angle = torch.cat([places, places], -1)
        return x * angle.cos() + torch.cat([-x[..., half:], x[..., :half]], -1) * angle.sin()

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        scores = self.rotate(q) @ self.rotate(k).transpose(-1, -2) * q.shape[-1] ** -0.5
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = torch.softmax(scores.masked_fill(mask, float("-inf")).float(), -1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))
        return x + self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


@pytest.mark.full
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_transformer_block_of_any_length(backend):
    model = Attention()
    jitted = jit(model, backend=backend)
    for length in (5, 9, 33):
        ours = torch.randn(2, length, 16, requires_grad=True)
        theirs = ours.detach().clone().requires_grad_()
        got, want = jitted(ours), model(theirs)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        grads = [
            torch.autograd.grad(y.square().sum(), [x, *model.parameters()]) for y, x in ((got, ours), (want, theirs))
        ]
        torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-4)
    info = jitted.cache_info()
    assert info[:4] == (2, 1, 2, 0) and "dimension 1 of x changed: 5 → 9, now dynamic" in info.reasons[1]


def test_rows_of_many_lengths_share_a_kernel():
    jitted = jit(lambda x: torch.softmax(x * 2, -1), backend="interpret", dynamic=True)
    for n in range(2, 40):
        x = torch.randn(3, n)
        torch.testing.assert_close(jitted(x), jitted.__wrapped__(x))
    assert jitted.cache_info()[:3] == (1, 37, 1)
    (kernel,) = jitted.program(x).kernels
    launcher = jitted.program(x).call.__globals__[kernel.name]
    assert sorted({launcher.tiles[bucket][0] for bucket, _ in launcher.compiled}) == [2, 4, 8, 16, 32, 64]
    assert "in buckets by power of two" in str(jitted.explain(x))


def test_a_row_too_long_for_registers_has_a_variant():
    jitted = jit(lambda x: torch.softmax(x, -1), backend="interpret", dynamic=True)
    for n in (40, 40000, 33, 50000):
        x = torch.randn(2, n)
        torch.testing.assert_close(jitted(x), torch.softmax(x, -1))
    assert jitted.cache_info()[:3] == (1, 3, 1)
    variants = jitted.specialisation(x).built.forward
    assert [program.kernels[0].template for _, program in variants.programs] == [
        "reduction_looped",
        "reduction_persistent",
    ]
    assert "forward: a variant for not (32768 < s1)" in str(jitted.explain(x))


def test_what_the_kernels_cannot_do_is_compiled_for_one_shape_and_said():
    jitted = jit(lambda x: torch.log(torch.exp(x)) + 1, backend="interpret", dynamic=True, fast_math=True)
    for n in (3, 4):
        x = torch.randn(n)
        torch.testing.assert_close(jitted(x), x + 1)
    assert jitted.cache_info()[:4] == (2, 0, 2, 0)
    assert "all sizes are numbers: dynamic sizes: fast_math" in str(jitted.explain(torch.randn(3)))


def test_torch_s_own_functions_mark():
    x = torch.randn(4, 3)
    torch._dynamo.mark_dynamic(x, 0)
    jitted = jit(lambda x: x * 2, backend="eager")
    jitted(x)
    jitted(torch.randn(9, 3))
    assert jitted.cache_info()[:3] == (1, 1, 1)
    assert jitted.specialisation(x).dynamic == ("dimension 0 of x is marked dynamic",)


def test_sizes_are_ints_to_the_user_s_python():
    def f(x, table={4: 1.5}):  # noqa: B006
        n = x.shape[0]
        y = x * 2 if isinstance(n, int) else x * 1000
        return y + table.get(n, 0.25) + len(f"{n}") + (10 if isinstance(n, (float, str)) else 0)

    jitted = jit(f, backend="eager", dynamic=True)
    for n in (4, 5, 12):
        x = torch.randn(n, 3)
        torch.testing.assert_close(jitted(x), f(x))
    plain = isinstance
    assert isinstance is plain and torch.SymInt.__hash__ is not int.__hash__


def test_gradients_through_changes_in_place_and_views():
    def f(x, y):
        z = x * 1
        z.add_(y)
        return z.t(), z[1:] * 2

    jitted = jit(f, backend="interpret", dynamic=True)
    for n, m in ((3, 5), (4, 6), (7, 2)):
        x = torch.randn(n, m, requires_grad=True)
        y = torch.randn(n, m)
        got, want = jitted(x, y), f(x, y)
        torch.testing.assert_close(got, want)
        a, b = (torch.autograd.grad(one.sum() + (two * two).sum(), x) for one, two in (got, want))
        torch.testing.assert_close(a, b)
    assert jitted.cache_info().specialisations == 1


def test_results_that_no_one_needs():
    jitted = jit(lambda x: (x * 2, torch.softmax(x, 0)), backend="interpret", dynamic=True)
    for n in (3, 5, 9):
        x = torch.randn(n, 4, requires_grad=True)
        (ours,) = torch.autograd.grad(jitted(x)[1].square().sum(), x)
        (theirs,) = torch.autograd.grad(torch.softmax(x, 0).square().sum(), x)
        torch.testing.assert_close(ours, theirs)
    assert jitted.cache_info().specialisations == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_sizes_that_come_again_and_bound_calls(backend, monkeypatch):
    weight = torch.randn(3, requires_grad=True)
    jitted = jit(lambda x: torch.relu(x) * weight + x.shape[0], backend=backend, dynamic=True)
    for n in (300, 300, 300, 300, 7, 300, 7, 7, 7):
        x = torch.randn(n, 3)
        torch.testing.assert_close(jitted(x), jitted.__wrapped__(x))
    assert jitted.cache_info()[:3] == (1, 8, 1)
    monkeypatch.setenv("FUSEJIT_DEBUG", "1")
    x = torch.randn(300, 3)
    bound = jitted.bind(x)
    for _ in range(3):
        torch.testing.assert_close(bound(x), jitted.__wrapped__(x))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_the_length_of_a_normalised_row_is_no_assumption(dtype):
    """One Program serves every length that stays in registers: the count by which variances are divided is an argument
    too.
    """
    jitted = jit(lambda x: torch.nn.functional.layer_norm(x, (x.shape[-1],)), backend="interpret", dynamic=True)
    for n in (64, 100, 300, 7):
        check(jitted, jitted.__wrapped__, torch.randn(4, n, dtype=dtype) + 3)
    assert not [line for line in jitted.explain(torch.randn(4, 300, dtype=dtype)).dynamic if "variant" in line]


def test_variances_of_rows_of_any_length():
    """Rows that stay in registers and rows that are read in pieces: the shift of the squares has the row's own count in
    each.
    """

    def f(x):
        return torch.nn.functional.layer_norm(x, (x.shape[-1],)), x.var(-1), torch.softmax(x, -1)

    jitted = jit(f, backend="interpret", dynamic=True)
    for n in (40, 33001, 33):
        x = torch.randn(2, n) + 100
        for got, want in zip(jitted(x), f(x.double()), strict=True):
            torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-4)
    assert jitted.cache_info()[:3] == (1, 2, 1)
