"""Results that several elements are added to: every op and dtype against eager, their gradients, what is refused, and
the kernels.
"""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from test_reduction_templates import for_h100, meta

import fusejit
from fusejit.codegen.ir.cluster import Cluster

ROWS, COLUMNS, MANY = 6, 7, 50


def numbers(*shape, dtype=torch.float32, grad=False):
    made = torch.randn(shape) if dtype.is_floating_point else torch.randint(-50, 50, shape)
    return made.to(dtype).requires_grad_(grad)


def places(high, *shape, low=0):
    return torch.randint(low, high, shape)


def index_add(x, i, s):
    return x.index_add(0, i, F.gelu(s), alpha=2.0) * 2


def embedding_norm(i, table, weight):
    return F.rms_norm(F.embedding(i, table, padding_idx=3), table.shape[1:], weight)


def segments(i, x, out):
    """Sums of rows, scattered: what is added is a reduction itself."""
    return out.index_add(0, i, x.softmax(-1).square().sum(-1)).sqrt()


CASES = {
    "index_add": (
        index_add,
        lambda: (numbers(ROWS, COLUMNS, grad=True), places(ROWS, MANY), numbers(MANY, COLUMNS, grad=True)),
    ),
    "index_add_columns": (
        lambda x, i, s: x.index_add(-1, i, s),
        lambda: (numbers(COLUMNS, ROWS).t(), places(COLUMNS, MANY).int(), numbers(ROWS, MANY, grad=True)),
    ),
    "index_add_scalar_rows": (
        lambda x, i, s: x.index_add(0, i, s),
        lambda: (numbers(ROWS), places(ROWS, MANY), numbers(MANY, grad=True)),
    ),
    "scatter_add": (
        lambda x, i, s: x.scatter_add(0, i, s * 2).relu(),
        lambda: (numbers(ROWS, COLUMNS, grad=True), places(ROWS, MANY, COLUMNS - 2), numbers(MANY + 3, COLUMNS)),
    ),
    "scatter_add_rows": (
        lambda x, i, s: x.scatter_add(1, i, s),
        lambda: (
            numbers(4, ROWS, 5, grad=True),
            places(ROWS, 4, MANY, 5),
            numbers(4, 5, MANY).transpose(1, 2).requires_grad_(),
        ),
    ),
    "scatter_reduce": (
        lambda x, i, s: x.scatter_reduce(1, i, s, "sum"),
        lambda: (numbers(ROWS, 5), places(5, ROWS, MANY), numbers(ROWS, MANY)),
    ),
    "channels_last": (
        lambda x, i, s: x.index_add(1, i, s) + 1,
        lambda: (
            numbers(2, ROWS, 5, 3).to(memory_format=torch.channels_last).requires_grad_(),
            places(ROWS, 9),
            numbers(2, 9, 5, 3).to(memory_format=torch.channels_last).requires_grad_(),
        ),
    ),
    "negative": (
        lambda x, i, s: x.index_put((i,), s, accumulate=True),
        lambda: (numbers(ROWS, COLUMNS, grad=True), places(ROWS, MANY, low=-ROWS), numbers(MANY, COLUMNS, grad=True)),
    ),
    "two_indices": (
        lambda x, i, j, s: torch.ops.aten.index_put(x, [i, None, j], s, True),
        lambda: (numbers(ROWS, COLUMNS, 3), places(ROWS, MANY), places(3, MANY, low=-3), numbers(COLUMNS)),
    ),
    "gather_backward": (
        lambda x, i: x.gather(1, i).sin(),
        lambda: (numbers(ROWS, 5, grad=True), places(5, ROWS, MANY)),
    ),
    "index_backward": (lambda x, i: x[i].sin(), lambda: (numbers(ROWS, 5, grad=True), places(ROWS, 4, 3, low=-ROWS))),
    "index_select_backward": (
        lambda x, i: x.index_select(1, i).sin(),
        lambda: (numbers(ROWS, 5, grad=True), places(5, MANY)),
    ),
    "embedding_norm": (embedding_norm, lambda: (places(10, 4, 9), numbers(10, 33, grad=True), numbers(33, grad=True))),
    "embedding_in_pieces": (
        embedding_norm,
        lambda: (places(5, 3), numbers(5, 70000, grad=True), numbers(70000, grad=True)),
    ),
    "rows_of_sums": (
        segments,
        lambda: (places(ROWS, MANY), numbers(MANY, 33, grad=True), torch.ones(ROWS, requires_grad=True)),
    ),
    "twice": (
        lambda x, i, s: x.index_add(0, i, s).index_add(0, i, s * 2),
        lambda: (numbers(ROWS, COLUMNS), places(ROWS, MANY), numbers(MANY, COLUMNS)),
    ),
    "twice_and_between": (
        lambda x, i, s: (x.index_add(0, i, s), x.index_add(0, i, s).index_add(0, i, s * 2), x + 1),
        lambda: (numbers(ROWS, COLUMNS), places(ROWS, MANY), numbers(MANY, COLUMNS)),
    ),
    "read_by_matmul": (
        lambda x, i, s: x.index_add(0, i, s) @ s.t(),
        lambda: (numbers(ROWS, COLUMNS), places(ROWS, MANY), numbers(MANY, COLUMNS, grad=True)),
    ),
    "as_many_as_there_are": (
        lambda x, i, s: x.index_add(0, i, s).relu(),
        lambda: (numbers(ROWS, COLUMNS), places(ROWS, ROWS), numbers(ROWS, COLUMNS)),
    ),
    "index_of_an_argmax": (
        lambda x, s: x.index_add(0, s.argmax(-1), s),
        lambda: (numbers(ROWS, ROWS), numbers(MANY, ROWS, grad=True)),
    ),
    "index_put": (
        lambda x, i, s: x.index_put((i,), s * 2).relu(),
        lambda: (numbers(MANY, COLUMNS, grad=True), torch.randperm(MANY)[:9] - MANY, numbers(9, COLUMNS, grad=True)),
    ),
    "index_copy": (
        lambda x, i, s: x.index_copy(1, i, s) + x,
        lambda: (numbers(ROWS, MANY).t().t(), torch.randperm(MANY)[:9], numbers(ROWS, 9)),
    ),
    "scatter": (
        lambda x, i, s: x.scatter(1, i, s).sin(),
        lambda: (numbers(ROWS, MANY, grad=True), torch.rand(ROWS, MANY).argsort(1)[:, :4], numbers(ROWS, 5)),
    ),
    "scatter_a_number": (
        lambda x, i: x.scatter(0, i, 1.5),
        lambda: (numbers(MANY, 3).bfloat16(), torch.rand(MANY, 3).argsort(0)[:4]),
    ),
    "nothing_to_add": (
        lambda x, i, s: x.index_add(0, i, s) * 1,
        lambda: (numbers(ROWS, 3, grad=True), places(ROWS, 0), numbers(0, 3)),
    ),
}


def assert_as_eager(fn, args, backend, tolerance=1e-5, **options):
    """Results, strides, gradients and changed arguments of the fused function."""
    jitted = fusejit.jit(fn, backend=backend, fullgraph=True, **options)
    one, two = ([a.detach().clone().requires_grad_(a.requires_grad) for a in args] for _ in range(2))
    ours, eagers = (torch.utils._pytree.tree_leaves(f(*given)) for f, given in ((jitted, one), (fn, two)))
    for a, b in zip(ours, eagers, strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)
        assert a.stride() == b.stride()
    if any(o.requires_grad for o in eagers):
        tangents = [torch.randn_like(o) for o in eagers]
        torch.autograd.backward(ours, tangents)
        torch.autograd.backward(eagers, tangents)
    for a, b in zip(one, two, strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), atol=tolerance, rtol=tolerance)
        if b.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, atol=tolerance, rtol=tolerance)
    return jitted.explain(*one)


@pytest.mark.parametrize("backend", ["eager", "interpret"])
@pytest.mark.parametrize("name", CASES)
def test_as_eager(name, backend):
    fn, make = CASES[name]
    report = assert_as_eager(fn, make(), backend, 1e-4)
    if backend == "interpret":
        assert [e.target for e in report.externs if e.target != "aten.mm.default"] == [], report


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8], ids=str
)
def test_dtypes(dtype):
    args = numbers(ROWS, COLUMNS, dtype=dtype), places(ROWS, MANY), numbers(MANY, COLUMNS, dtype=dtype)
    report = assert_as_eager(lambda x, i, s: x.index_add(0, i, s), args, "interpret", 1e-12)
    assert report.launches == 2 + (dtype.itemsize < 4) and not report.externs


def one_by_one(x, i, s):
    """Each addition rounded, in the order of the elements: what atomics in the half type give in some order."""
    made = x.clone()
    for row, added in zip(i, s, strict=True):
        made[row] += added
    return made


def by_rows(x, i, s):
    return x.scatter_add(0, i[:, None].expand(-1, x.shape[1]), s)


PAYS, ALONE = "as eager does: sums in float32 would move", "added one by one here"
HALVES = {  # function, dtype, columns, additions, numerics; launches, and what explain() says
    "index_add": (lambda x, i, s: x.index_add(0, i, s), torch.bfloat16, 8, 500, "fast", 2, PAYS),
    "scatter_add": (by_rows, torch.float16, 8, 500, "fast", 2, PAYS),
    "scatter_reduce": (
        lambda x, i, s: x.scatter_reduce(0, i[:, None].expand(-1, 8), s, "sum"),
        torch.bfloat16,
        8,
        500,
        "fast",
        2,
        PAYS,
    ),
    "odd_rows": (by_rows, torch.float16, 7, 500, "fast", 3, ALONE),
    "own_places": (
        lambda x, i, s: x.scatter_add(0, i[:, None] + (s * 0).long(), s),
        torch.bfloat16,
        8,
        500,
        "fast",
        3,
        ALONE,
    ),
    "many": (by_rows, torch.bfloat16, 8, 900, "fast", 3, "adds up in float32 and rounds once: 3.9% more bytes"),
    "eager": (by_rows, torch.bfloat16, 7, 900, "eager", 2, "as numerics='eager' asks"),
    "index_put": (
        lambda x, i, s: x.index_put((i,), s, accumulate=True),
        torch.bfloat16,
        8,
        500,
        "fast",
        3,
        "",
    ),  # float32 in eager too
}


@pytest.mark.parametrize("name", HALVES)
def test_half_types_are_added_up_as_eager_does_where_it_pays(name):
    fn, dtype, columns, many, numerics, launches, said = HALVES[name]
    x, i, s = numbers(ROWS, columns, dtype=dtype), places(ROWS, many), numbers(many, columns, dtype=dtype)
    jitted = fusejit.jit(fn, backend="interpret", fullgraph=True, numerics=numerics)
    mine, rounded, exact = jitted(x, i, s), one_by_one(x, i, s), x.double().index_add(0, i, s.double())
    if launches == 2:
        assert torch.equal(mine, rounded)
    else:
        error, theirs = (((y.double() - exact).abs() / exact.abs()).max() for y in (mine, rounded))
        assert error <= torch.finfo(dtype).eps / 2 * 1.01 < theirs
    report = jitted.explain(x, i, s)
    assert report.launches == launches and said in "".join(report.rewrites) and bool(report.rewrites) == bool(said), (
        report
    )


def test_half_sums_that_follow_each_other():
    """Wide sums behind narrow ones begin a buffer of their own; a few that are added to a large table stay a
    kernel's.
    """
    x, i, s = numbers(ROWS, 8, dtype=torch.bfloat16), places(ROWS, 50), numbers(50, 8, dtype=torch.bfloat16)
    j, more = places(ROWS, 900), numbers(900, 8, dtype=torch.bfloat16)
    both = fusejit.jit(
        lambda x, i, s, j, t: x.index_add(0, i, s).index_add(0, j, t), backend="interpret", fullgraph=True
    )
    exact = one_by_one(x, i, s).double().index_add(0, j, more.double())
    torch.testing.assert_close(both(x, i, s, j, more).double(), exact, atol=0, rtol=2**-8)
    large = numbers(900, 8, dtype=torch.bfloat16)
    report = assert_as_eager(lambda x, i, s: x.index_add(0, i, s), (large, i, s), "interpret", 0.05)
    assert report.launches == 2 and not report.externs
    older = fusejit.compile_for(lambda x, i, s: x.index_add(0, i, s), (x, i, s), target="sm_80").forward
    assert "sm_80 adds no pairs of bfloat16" in older.rewrites[0] and not any(".cas." in k.ptx for k in older.kernels)


@pytest.mark.parametrize("dynamic", [True, None])
def test_sizes_that_change(dynamic):
    jitted = fusejit.jit(index_add, backend="interpret", fullgraph=True, dynamic=dynamic)
    for rows, many, columns in ((6, 50, 7), (5, 33, 7), (9, 17, 12)):
        x, i, s = numbers(rows, columns), places(rows, many), numbers(many, columns)
        torch.testing.assert_close(jitted(x, i, s), index_add(x, i, s), atol=1e-4, rtol=1e-4)


# -- inputs that change ------------------------------------------------------------------------------------------------
def remember(cache, place, new, query):
    """A cache of keys (batch, length, width) with some new ones, and what a query finds in it."""
    cache.index_copy_(1, place, new * 2)
    return (query @ cache.transpose(1, 2)).softmax(-1)


def count(counts, i):
    counts.index_add_(0, i, torch.ones_like(i, dtype=counts.dtype))


def count_rows(counts, i):
    counts.index_add_(0, i, torch.ones(len(i), counts.shape[1], dtype=counts.dtype, device=counts.device))


def moved(x, i):
    x.index_copy_(0, i, x[i].flip(0))  # reads what it overwrites
    return x + 1


def returned(x, i, s):
    y = x.index_add(0, i, s)
    x.copy_(y)
    return y


CHANGED = {
    "cache": (remember, lambda: (numbers(2, 40, 8), torch.tensor([7, 3]), numbers(2, 2, 8), numbers(2, 1, 8)), 1),
    "holes": (
        remember,
        lambda: (numbers(2, 40, 16)[:, ::2, :8], torch.tensor([7, 3]), numbers(2, 2, 8), numbers(2, 1, 8)),
        1,
    ),
    "bfloat16": (
        remember,
        lambda: (
            numbers(2, 40, 8, dtype=torch.bfloat16),
            torch.tensor([7, 3]),
            *(numbers(2, n, 8, dtype=torch.bfloat16) for n in (2, 1)),
        ),
        1,
    ),
    "counts": (count, lambda: (torch.zeros(9, dtype=torch.int64), places(9, MANY)), 1),
    "half_counts": (count, lambda: (torch.zeros(9, dtype=torch.float16), places(9, MANY)), 3),
    "half_rows": (count_rows, lambda: (torch.zeros(9, 4, dtype=torch.bfloat16), places(9, MANY)), None),
    "moved": (moved, lambda: (numbers(9, 3), torch.tensor([1, 5, 2])), None),
    "returned": (returned, lambda: (numbers(ROWS, 3), places(ROWS, MANY), numbers(MANY, 3)), None),
}


@pytest.mark.parametrize("backend", ["eager", "interpret"])
@pytest.mark.parametrize("name", CHANGED)
def test_inputs_change_as_in_eager(name, backend):
    fn, make, launches = CHANGED[name]
    args = make()
    jitted = fusejit.jit(fn, backend=backend, fullgraph=True)
    for _ in range(2):
        again = [a.clone() for a in args]
        result, wanted = jitted(*args), fn(*again)
        for a, b in zip((result, *args), (wanted, *again), strict=True):
            torch.testing.assert_close(a, b)
        if name == "returned":
            assert result.data_ptr() != args[0].data_ptr()
    if backend == "interpret" and launches:
        writes = [k for k in jitted.explain(*args).forward.kernels if args[0].dim() == 1 or "index_copy" in str(k.ops)]
        assert len(writes) == launches, jitted.explain(*args)
        assert (
            all(k.bytes_written < 2 * 2 * 2 * 8 * 4 for k in writes) or name != "cache"
        )  # the new rows, not the cache


# -- what is refused ---------------------------------------------------------------------------------------------------
OUTSIDE = {
    "index_add": lambda x, i, s: x.index_add(0, i, s),
    "index_put": lambda x, i, s: x.index_put((i,), s, accumulate=True),
    "scatter_add": lambda x, i, s: x.scatter_add(0, i[:, None].expand(-1, COLUMNS), s),
    "index_copy": lambda x, i, s: x.index_copy(0, i, s),
}


@pytest.mark.parametrize("wrong", [ROWS, -ROWS - 1, -1])
@pytest.mark.parametrize("name", OUTSIDE)
def test_an_index_out_of_bounds_names_the_line(name, wrong):
    fn = OUTSIDE[name]
    x, i, s = numbers(ROWS, COLUMNS), places(ROWS, MANY), numbers(MANY, COLUMNS)
    i[17] = wrong
    jitted = fusejit.jit(fn, backend="interpret", fullgraph=True)
    if name == "index_put" and wrong == -1:  # counts from the end
        torch.testing.assert_close(jitted(x, i, s), fn(x, i, s))
        return
    with pytest.raises((IndexError, RuntimeError)):
        fn(x, i, s)
    with pytest.raises(IndexError, match="out of bounds for dimension with size 6") as found:
        jitted(x, i, s)
    assert "test_scatter.py:" in "\n".join(found.value.__notes__)


def test_deterministic_algorithms_are_torchs():
    fn = OUTSIDE["index_add"]
    args = numbers(ROWS, COLUMNS), places(ROWS, MANY), numbers(MANY, COLUMNS)
    whole = [a.long() for a in args]
    jitted = fusejit.jit(fn, backend="interpret", fullgraph=True)
    assert not jitted.explain(*args).externs
    torch.use_deterministic_algorithms(True)
    try:
        report = assert_as_eager(fn, args, "interpret")
        torch.testing.assert_close(jitted(*args), fn(*args))  # the program of before is not taken
        (call,) = jitted.explain(*args).externs
        assert "aten.index_add" in call.target and "use_deterministic_algorithms" in str(report)
        assert not assert_as_eager(fn, whole, "interpret").externs  # integers come to the same in any order
    finally:
        torch.use_deterministic_algorithms(False)
    assert not jitted.explain(*args).externs


def test_what_torch_does_says_why():
    table, i, few = numbers(900, 8, dtype=torch.bfloat16, grad=True), places(900, 5), places(900, 5)
    report = fusejit.jit(lambda i, t: F.embedding(i, t) * 2, backend="interpret", fullgraph=True).explain(i, table)
    assert "900x8 sums in float32 move more than what is added" in str(report)
    by_mask = fusejit.jit(lambda x, m: x.index_put((m,), x[0, 0] + torch.ones(1), accumulate=True), backend="interpret")
    assert "how many elements a mask selects" in str(by_mask.explain(numbers(3, 3), torch.eye(3).bool()))
    scaled = fusejit.jit(lambda i, t: F.embedding(i, t, scale_grad_by_freq=True) * 2, backend="interpret")
    assert "how often an index occurs" in str(scaled.explain(few, numbers(9, 8, grad=True)))
    largest = fusejit.jit(lambda x, i, s: x.scatter_reduce(0, i, s, "amax"), backend="interpret")
    assert "no sum: amax" in str(largest.explain(numbers(ROWS), places(ROWS, MANY), numbers(MANY)))


# -- the kernels -------------------------------------------------------------------------------------------------------
def on_h100(fn, *args):
    begun, added, *rounded = for_h100(fn, *args)
    return begun, added, rounded


def test_atomics_are_wide_and_nothing_spills():
    for dtype, word in ((torch.float32, "v4.f32"), (torch.bfloat16, "noftz.v8.bf16"), (torch.float16, "noftz.v8.f16")):
        x, s = meta(65536, 1024, dtype=dtype), meta(65536, 1024, dtype=dtype)
        begun, added, rounded = on_h100(
            lambda x, i, s: x.index_add(0, i, F.gelu(s)), x, torch.zeros(65536, dtype=torch.int64), s
        )
        assert not rounded and not any(k.n_spills for k in (begun, added))
        assert words(added) == {word}
        assert added.bytes_written == dtype.itemsize * 65536 * 1024  # each element once
    assert isinstance(added.cluster, Cluster) and added.cluster.stores[0].mode == "atomic_add"


# whichever way their source runs, half types are added in pairs at least: one alone is a loop of compare-and-swap
FORMS = {
    "crossed": (
        lambda x, i, s: x.index_add(0, i, F.silu(s.t()).bfloat16()),
        (64, 64),
        (64, 512),
        torch.float32,
        "noftz.v8.bf16",
    ),
    "narrow": (
        lambda x, i, s: x.index_add(0, i, F.silu(s.t()).bfloat16()),
        (64, 6),
        (6, 512),
        torch.float32,
        "noftz.v2.bf16",
    ),
    "one_a_row": (
        lambda x, i, s: x.index_add(0, i, s[:, None].expand(-1, 64) * 2),
        (64, 64),
        (512,),
        torch.bfloat16,
        "noftz.v8.bf16",
    ),
}


def words(kernel):
    """The kinds of additions in memory that a kernel makes."""
    return set(re.findall(r"\b(?:atom|red)\.[\w.]*?\.(?:add\.|cas)([\w.]*)", kernel.ptx))


def test_half_types_are_added_in_pairs_whichever_way_they_come():
    for name, (fn, table, added, dtype, word) in FORMS.items():
        kernels = for_h100(fn, meta(*table), torch.zeros(512, dtype=torch.int64), meta(*added, dtype=dtype))
        assert words(kernels[-1]) == {word}, name


def test_gradient_of_an_embedding_is_added_where_it_is_made(spilled):
    """The backward of a norm, the column sums of its weight and the rows of the table come from one read."""
    table, weight = meta(32768, 1024).requires_grad_(), meta(1024).requires_grad_()
    found = fusejit.compile_for(
        embedding_norm, (torch.zeros(16, 2048, dtype=torch.int64), table, weight), target="sm_90"
    )
    assert not found.backward.externs
    both = next(k for k in found.backward.kernels if k.template == "reduction_mixed")
    assert {s.mode for s in both.cluster.stores} == {"atomic_add", "sum"} and both.n_spills <= spilled


def test_elements_of_a_row_that_are_added_to_one_place(backend):
    """One kernel sums over the first axis and scatters by places that do not depend on it; another scatters its own
    sums.
    """

    def by_position(g, i):
        return g.new_zeros(4, 5).index_put([i.expand(2, 3)], g, accumulate=True), g.sum(0)

    def sums(g, i):
        row = g[0]
        total = row.sum(0)
        return (
            g.new_zeros(3, 5).index_put([i], total, accumulate=True),
            g.new_zeros(3, 5).index_put([i[0]], row[0], accumulate=True),
        )

    g = torch.randn(2, 3, 5)
    for fn, given in ((by_position, torch.tensor([1, 3, 1])), (sums, torch.tensor([0, 2, 1]))):
        torch.testing.assert_close(fusejit.jit(fn, backend=backend, fullgraph=True)(g, given), fn(g, given))


def test_a_place_that_a_whole_row_leads_to(fuse, device):
    """The index is one value a row, and so is what stands there: the mask of the row's columns is none of theirs."""
    for fn in (lambda x: x[x.argmax()], lambda x: x[(x.sum() > 0).long()] * 2):
        jitted = fuse(fn, fullgraph=True)
        for sign in (1, -1):
            x = (torch.arange(5.0, device=device) * sign).requires_grad_()
            torch.testing.assert_close(jitted(x), fn(x))
            torch.testing.assert_close(torch.autograd.grad(jitted(x), x), torch.autograd.grad(fn(x), x))
