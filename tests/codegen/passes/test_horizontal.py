"""Foreach: loops over tensors become few launches, and compute what eager does."""

from __future__ import annotations

import random
import re

import pytest
import torch
from test_codegen import lowered
from torch.testing import assert_close

import fusejit
from fusejit.codegen.emit.foreach import render_foreach
from fusejit.codegen.emit.memory_plan import Alloc, plan
from fusejit.codegen.emit.program import verify
from fusejit.codegen.emit.writer import render
from fusejit.codegen.ir.cluster import Cluster
from fusejit.codegen.ir.graph import Extern, Foreach
from fusejit.codegen.ir.signature import pattern, places
from fusejit.codegen.ops.decompositions import _each, _foreach_ops
from fusejit.codegen.passes import horizontal as grouping
from fusejit.codegen.passes.fuse import fuse as fuse_pass
from fusejit.codegen.passes.hazards import predecessors, reads, writes
from fusejit.codegen.passes.horizontal import foreach
from fusejit.codegen.passes.horizontal_reduction import many
from fusejit.codegen.passes.schedule import schedule
from fusejit.runtime import launch

SHAPES = [(33, 7), (16,), (8, 16), (), (12, 3, 5), (1,), (0, 4), (129,), (2, 64)]


# -- optimisers, as people write them ----------------------------------------------------------------------------------
def sgd(params, grads, lr):
    for p, g in zip(params, grads, strict=True):
        p.sub_(lr * g)


def momentum(params, grads, buffers, lr):
    for p, g, b in zip(params, grads, buffers, strict=True):
        b.mul_(0.9).add_(g + 0.01 * p)
        p.sub_(lr * b)


def adam(params, grads, moments, squares, lr, step):
    for p, g, m, v in zip(params, grads, moments, squares, strict=True):
        m.lerp_(g, 0.1)
        v.mul_(0.999).addcmul_(g, g, value=0.001)
        p.sub_(lr * (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8))


def adamw(params, grads, moments, squares, lr, step):
    for p in params:
        p.mul_(1 - lr * 0.01)
    adam(params, grads, moments, squares, lr, step)


def lion(params, grads, moments, lr):
    for p, g, m in zip(params, grads, moments, strict=True):
        p.mul_(1 - lr * 0.1).sub_(lr * (m * 0.9 + g * 0.1).sign())
        m.lerp_(g, 0.01)


def ema(averages, params, decay):
    for a, p in zip(averages, params, strict=True):
        a.mul_(decay).add_(p * (1 - decay))


def foreach_adamw(params, grads, moments, squares, lr, step):
    torch._foreach_mul_(params, 1 - lr * 0.01)
    torch._foreach_lerp_(moments, grads, 0.1)
    torch._foreach_mul_(squares, 0.999)
    torch._foreach_addcmul_(squares, grads, grads, 0.001)
    below = torch._foreach_sqrt(torch._foreach_div(squares, 1 - 0.999**step))
    torch._foreach_add_(below, 1e-8)
    torch._foreach_sub_(
        params, torch._foreach_mul(torch._foreach_div(torch._foreach_div(moments, 1 - 0.9**step), below), lr)
    )


# name: (function, lists of tensors, scalars)
STEPS = {
    "sgd": (sgd, 2, (0.1,)),
    "momentum": (momentum, 3, (0.1,)),
    "adam": (adam, 4, (0.01, 3.0)),
    "adamw": (adamw, 4, (0.01, 3.0)),
    "lion": (lion, 3, (0.01,)),
    "ema": (ema, 2, (0.99,)),
    "foreach_adamw": (foreach_adamw, 4, (0.01, 3.0)),
}


def arguments(count, lists, scalars, device, dtype=torch.float32, shapes=SHAPES):
    made = [[torch.rand(shapes[i % len(shapes)], device=device).to(dtype) for i in range(count)] for _ in range(lists)]
    return (*made, *(torch.tensor(s, device=device) for s in scalars))


def copied(args):
    return tuple([t.clone() for t in a] if isinstance(a, list) else a.clone() for a in args)


def same_as_eager(step, args, fused, calls=2):
    expected, given = copied(args), copied(args)
    for _ in range(calls):
        step(*expected)
        fused(*given)
    assert_close(given, expected)
    return fused.explain(*given)


@pytest.mark.parametrize("count", [3, 20])
@pytest.mark.parametrize("name", STEPS)
def test_an_optimiser_is_eager_in_few_launches(name, count, fuse, device):
    step, lists, scalars = STEPS[name]
    report = same_as_eager(step, arguments(count, lists, scalars, device), fuse(step, fullgraph=True))
    assert report.launches <= 4 and not report.externs
    assert re.search(r"each_\S+  foreach of \d+  reads", str(report))


def adamw_together(params, grads, moments, squares, lr, step):
    decay, first, second = 1 - lr * 0.01, lr / (1 - 0.9**step), 1 - 0.999**step
    for p, g, m, v in zip(params, grads, moments, squares, strict=True):
        m.lerp_(g, 0.1)
        v.mul_(0.999).addcmul_(g, g, value=0.001)
        p.mul_(decay).sub_(first * m / ((v / second).sqrt() + 1e-8))


@pytest.mark.full
def test_adamw_over_200_parameters(fuse, device):
    args = arguments(200, 4, (0.01, 3.0), device, shapes=[s for s in SHAPES if s not in ((), (1,), (0, 4))])
    fused, expected, given = fuse(adamw_together, fullgraph=True), copied(args), copied(args)
    adamw_together(*expected)
    fused(*given)
    assert_close(given, expected)
    found = fused.specialisation(*given)
    kernels = found.forward.kernels
    assert found.forward.launches <= 4 and sum(k.tensors for k in kernels if k.template == "foreach") == 200
    least = 7 * 4 * sum(p.numel() for p in args[0])  # four tensors read, three written
    assert (
        least <= sum(k.bytes_read + k.bytes_written for k in kernels) <= least + 100
    )  # and the scalars between the launches
    assert (
        found.compile_ms["forward"] < found.compile_ms["capture"] + found.compile_ms["joint"]
    )  # torch's tracing is the larger part


def test_a_learning_rate_and_a_step_change_without_compiling_again(fuse, device):
    args = arguments(5, 4, (), device)
    fused, expected, given = fuse(adamw, fullgraph=True), copied(args), copied(args)
    for step, lr in enumerate((0.1, 0.01, 0.5), 1):
        values = torch.tensor(lr, device=device), torch.tensor(float(step), device=device)
        adamw(*expected, *values)
        fused(*given, *values)
        assert_close(given, expected)
    assert fused.cache_info().specialisations == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes(dtype, fuse, device):
    args = arguments(6, 4, (0.01, 3.0), device, dtype)
    exact = tuple([t.double() for t in a] if isinstance(a, list) else a.double() for a in copied(args))
    eager, given = copied(args), copied(args)
    fused = fuse(adamw, fullgraph=True)
    for call, values in ((adamw, exact), (adamw, eager), (fused, given)):
        call(*values)
    for mine, theirs, right in zip(sum(given[:4], []), sum(eager[:4], []), sum(exact[:4], []), strict=True):
        if right.numel():
            errors = [(t.double() - right).abs().max() for t in (mine, theirs)]
            assert errors[0] <= 2 * errors[1] + 2 * torch.finfo(dtype).eps * right.abs().max()
    assert fused.explain(*given).launches <= 4


def test_different_dtypes_are_different_groups(fuse, device):
    def step(params, grads):
        for p, g in zip(params, grads, strict=True):
            p.sub_(g)

    dtypes = [torch.float32, torch.bfloat16]
    args = tuple([torch.rand(8, device=device).to(dtypes[i % 2]) for i in range(6)] for _ in range(2))
    report = same_as_eager(step, args, fuse(step, fullgraph=True))
    assert sorted((k.tensors, *set(k.params)) for k in report.kernels) == [(3, "*bf16"), (3, "*fp32")]


def test_parameters_that_are_views_of_one_buffer(fuse, device):
    def step(params, grads):
        for p, g in zip(params, grads, strict=True):
            p.sub_(0.1 * g)

    def make():
        flat, grads = torch.arange(60.0, device=device), torch.ones(60, device=device) * 2
        return flat, [flat[:20], flat[20:24].view(2, 2), flat[30:]], [grads[:20], grads[20:24].view(2, 2), grads[30:]]

    (flat, params, grads), (expected, theirs, _) = make(), make()
    fuse(step)(params, grads)
    step(theirs, grads)
    assert_close(flat, expected)


def test_slices_inside_the_function_are_rows_with_offsets(fuse, device):
    def step(flat, grads):
        return [flat[64 * i : 64 * i + 64] - 0.1 * g for i, g in enumerate(grads)]

    flat, grads = torch.randn(256, device=device), [torch.randn(64, device=device) for _ in range(4)]
    fused = fuse(step, fullgraph=True)
    assert_close(fused(flat, grads), step(flat, grads))
    (kernel,) = fused.explain(flat, grads).kernels
    assert kernel.tensors == 4 and "+ 192" in kernel.source


def test_strides(fuse, device):
    def step(params, grads):
        for p, g in zip(params, grads, strict=True):
            p.sub_(0.1 * g)

    def make(turn_grads):
        turned = lambda: torch.rand(6, 4, device=device).t()  # noqa: E731
        plain = lambda: torch.rand(4, 6, device=device)  # noqa: E731
        return [turned() for _ in range(4)], [(turned if turn_grads else plain)() for _ in range(4)]

    for turn_grads, launches in ((True, 1), (False, 4)):  # one line of memory; two axes: left alone
        fused, params = fuse(step, fullgraph=True), make(turn_grads)
        expected = [[t.clone(memory_format=torch.preserve_format) for t in ts] for ts in params]
        step(*expected)
        fused(*params)
        assert_close(params, tuple(expected))
        assert fused.explain(*params).launches == launches


def test_in_place_changes_of_tensors_with_holes(fuse, device):
    def step(params):
        for p in params:
            p.mul_(2).add_(1)

    def make():
        whole = [
            torch.arange(24.0, device=device),
            torch.arange(30.0, device=device).view(3, 10),
            torch.arange(12.0, device=device),
        ]
        return whole, [whole[0][::2], whole[1][:, 2:6], whole[2][3:9]]

    (whole, params), (expected, theirs) = make(), make()
    fuse(step, fullgraph=True)(params)
    step(theirs)
    assert_close(whole, expected)


def test_strided_loads_keep_their_stride(fuse, device):
    def step(*xs):
        return [x[::2] * 3 for x in xs]

    xs = [torch.randn(n, device=device) for n in (10, 64, 31)]
    fused = fuse(step, fullgraph=True)
    assert_close(fused(*xs), step(*xs))
    assert fused.explain(*xs).launches == 1


# -- order -------------------------------------------------------------------------------------------------------------
def test_reading_what_another_one_overwrites(fuse, device):
    def shift(xs):
        for x, y in zip(xs, xs[1:], strict=False):
            x.add_(2 * y)

    def ring(xs):
        for i in range(len(xs)):
            xs[i].add_(2 * xs[i - 1])

    for step in (shift, ring):
        same_as_eager(step, ([torch.randn(n, device=device) for n in (8, 8, 8, 8)],), fuse(step, fullgraph=True))


def test_two_changes_that_read_each_other(fuse, device):
    def coupled(p, g, b):
        b.mul_(0.9).add_(g + 0.01 * p)
        p.sub_(0.1 * b)

    def crossed(x, y):  # no kernel can do both: one change goes through a buffer
        total = y.sum()
        y.mul_(x.sum())
        x.add_(total)

    for step, shapes, launches in ((coupled, [(5, 3)] * 3, 1), (crossed, [(40,), (8, 9)], None)):
        report = same_as_eager(step, [torch.rand(s, device=device) for s in shapes], fuse(step, fullgraph=True))
        assert launches is None or report.launches == launches and report.bytes_fused == report.bytes_minimum


def test_chains_of_equal_steps_are_grouped_level_by_level(fuse, device):
    def f(xs, w):
        for _ in range(3):
            xs = [torch.relu(x @ w) + 1 for x in xs]
        return xs

    xs, w = [torch.randn(n, 8, device=device) for n in (3, 4, 5)], torch.randn(8, 8, device=device)
    fused = fuse(f, fullgraph=True)
    assert_close(fused(xs, w), f(xs, w))
    assert [k.tensors for k in fused.explain(xs, w).kernels] == [3, 3, 3]


def random_program(seed):
    choose = random.Random(seed)

    def f(w, *xs):
        values = list(xs)
        for _ in range(14):
            x, y = choose.choice(values), choose.choice(values)
            made = choose.choice(
                [lambda x=x: x.sin() + 1, lambda x=x: x @ w, lambda x=x, y=y: (x * y).relu(), lambda x=x: x.sum(0) + x]
            )
            values.append(made())
        return tuple(values[-4:])

    return f


@pytest.mark.parametrize("seed", range(12))
def test_grouping_keeps_every_dependency(seed, fuse, device):
    args = tuple(torch.randn(4, 4) for _ in range(4))
    program = lowered(random_program(seed), *args)
    joined = foreach(program)  # not fused before: many more clusters are alike
    order = {}
    for place, step in enumerate(joined.steps):
        for member in step.members if isinstance(step, Foreach) else (step,):
            order[id(member)] = place
    steps = list(program.steps)
    assert sorted(order) == sorted(map(id, steps))
    for step, above in zip(steps, predecessors(steps, program.buffers), strict=True):
        assert all(order[id(steps[k])] < order[id(step)] for k in above)
    if seed < 4:
        f = random_program(seed)
        given = tuple(a.to(device) for a in args)
        assert_close(
            fuse(lambda *a, seed=seed: random_program(seed)(*a), fullgraph=True)(*given),
            f(*given),
            rtol=1e-4,
            atol=1e-4,
        )


# -- what limits a group -----------------------------------------------------------------------------------------------
def groups(f, *args):
    return [len(s.members) for s in foreach(fuse_pass(lowered(f, *args))[0]).steps if isinstance(s, Foreach)]


def test_pointers_tensors_and_memory_are_limited(monkeypatch):
    def f(*xs):
        return tuple(x + 1 for x in xs)

    xs = [torch.randn(n) for n in range(10, 20)]
    assert groups(f, *xs) == [10]
    monkeypatch.setattr(grouping, "MAX_TENSORS", 4)
    assert groups(f, *xs) == [4, 4, 2]
    monkeypatch.setattr(grouping, "MAX_TENSORS", 240)
    monkeypatch.setattr(grouping, "MAX_POINTERS", 6)
    assert groups(f, *xs) == [3, 3, 3]  # and one alone
    monkeypatch.setattr(grouping, "MAX_POINTERS", 480)

    def held(w, *xs):
        return tuple((x @ w + 1) @ w for x in xs)

    xs = [torch.randn(n, 16) for n in (8, 8, 8, 8)]
    assert groups(held, torch.randn(16, 16), *xs) == [4]
    monkeypatch.setattr(grouping, "MAX_HELD", 2 * 2 * 8 * 16 * 4)  # two results and two operands
    assert groups(held, torch.randn(16, 16), *xs) == [2, 2]


def test_constants_reductions_and_transposes_stay_apart():
    xs = [torch.randn(8, 8) for _ in range(3)]
    assert groups(lambda *xs: tuple(x * i for i, x in enumerate(xs, 2)), *xs) == []  # the factor is part of the text
    assert groups(lambda *xs: tuple(x.sum(1) for x in xs), *xs) == []
    assert groups(lambda *xs: tuple(x.t() + y for x, y in zip(xs, xs[1:], strict=False)), *xs) == []


def test_o1_does_not_group(fuse, device):
    xs = [torch.randn(n, device=device) for n in (3, 4)]
    assert fuse(lambda xs: [x + 1 for x in xs], jit_level="O1").explain(xs).launches == 2


def test_a_member_takes_the_memory_of_its_own_operands_only():
    def own(w, *xs):
        return tuple((x @ w).relu() * 2 @ w for x in xs)

    def shared(w, x, *ys):
        t = x @ w
        return tuple(t * y @ w for y in ys)

    for f, reused in ((own, 2), (shared, 0)):
        xs = [torch.randn(8, 8) for _ in range(3 if f is own else 4)]
        program = foreach(lowered(f, *xs))
        assert [len(s.members) for s in program.steps if isinstance(s, Foreach)] == [2]
        kernels = [
            None
            if isinstance(s, Extern)
            else render_foreach(s, program.buffers)
            if isinstance(s, Foreach)
            else render(*schedule(s), program.buffers)
            for s in program.steps
        ]
        steps = plan(program, kernels)
        verify(steps, program)
        assert sum(isinstance(s, Alloc) and bool(s.reuse) for s in steps) == reused


def test_patterns_are_equal_up_to_names_sizes_and_offsets():
    program = lowered(
        lambda x, y, z: (x * 2 + y, z[4:] * 2 + z[:12]), torch.randn(3, 5), torch.randn(3, 5), torch.randn(16)
    )
    known = places(program.buffers)
    one, two = (pattern(s, known) for s in program.steps if isinstance(s, Cluster))
    assert one.key == two.key and (one.size, two.size) == (15, 12)
    assert two.operands[:2] == ((two.operands[1][0], 4), (two.operands[1][0], 0))
    assert {name for s in program.steps for name in (*reads(s), *writes(s))} >= {
        name for name, _ in (*one.operands, *two.operands)
    }


def test_many_pointers_have_two_variants(monkeypatch):
    made = []
    monkeypatch.setattr(launch, "_launcher", lambda spec, grid: made.append(spec.aligned) or (lambda *args: None))
    for count in (4, 60):
        spec = launch.KernelSpec("", "k", ("*fp32",) * count, aligned=(True,) * count)
        args = [torch.empty(8)[i == 2 :] for i in range(count)]
        launch.Launcher(spec, (1, 1, 1))._unaligned(args)
    assert made == [(True, True, False, True), (False,) * 60]


# -- torch._foreach_* --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("op", _foreach_ops(), ids=lambda op: str(op).removeprefix("aten._foreach_"))
def test_each_foreach_op_is_its_namesake(op):
    def value(argument, given):
        kind = str(argument.type)
        if kind == "List[Tensor]":
            return [torch.rand(n) * 0.8 + 0.1 for n in (3, 5)]
        if argument.has_default_value() and argument.name != "ord":
            return argument.default_value
        return {"Tensor": torch.tensor(1.5), "number": 2.0, "List[number]": [2.0, 0.5], "Scalar": 2.0}.get(kind, 2.0)

    torch.manual_seed(0)
    args = [value(a, op) for a in op._schema.arguments if not a.kwarg_only]
    assert_close(list(_each(op)(*args)), list(op(*args)))


# -- reductions --------------------------------------------------------------------------------------------------------
def clip_foreach(grads, most):
    total = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
    torch._foreach_mul_(grads, (most / (total + 1e-6)).clamp(max=1.0))
    return total


def clip_loop(grads, most):
    total = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads]))
    scale = (most / (total + 1e-6)).clamp(max=1.0)
    for g in grads:
        g.mul_(scale)
    return total


def clip_sum(grads, most):
    total = sum(g.float().square().sum() for g in grads).sqrt()
    scale = (most / (total + 1e-6)).clamp(max=1.0)
    for g in grads:
        g.mul_(scale.to(g.dtype))
    return total


def clip_hypermap(grads, most):
    norms = fusejit.HyperMap()(lambda g: torch.linalg.vector_norm(g), tuple(grads))
    total = torch.linalg.vector_norm(torch.stack(norms))
    scaled = fusejit.HyperMap()(lambda g: g * (most / (total + 1e-6)).clamp(max=1.0), tuple(grads))
    for g, made in zip(grads, scaled, strict=True):
        g.copy_(made)
    return total


CLIPS = [clip_foreach, clip_loop, clip_sum, clip_hypermap]
LONG = [(33, 7), (16,), (8, 16), (130, 130), (17001,), (2, 64), (1,), ()]


@pytest.mark.parametrize(
    ("clip", "dtype"),
    [*((clip, torch.float32) for clip in CLIPS), (clip_foreach, torch.bfloat16), (clip_sum, torch.bfloat16)],
)
def test_gradients_are_clipped_in_few_launches(clip, dtype, fuse, device):
    torch.manual_seed(0)
    grads = [torch.randn(LONG[i % len(LONG)], device=device).to(dtype) for i in range(24)]
    expected, given = copied([grads])[0], copied([grads])[0]
    exact = torch.linalg.vector_norm(torch.cat([g.double().flatten() for g in grads]))
    fused, theirs = fuse(clip, fullgraph=True), clip(expected, 1.0)
    ours = fused(given, 1.0)
    assert abs(ours.double() - exact) <= 2 * abs(theirs.double() - exact) + 2 * torch.finfo(dtype).eps * exact
    assert_close(given, expected, rtol=2 * torch.finfo(dtype).eps + 1e-6, atol=1e-7)
    report = fused.explain(given, 1.0)
    assert (
        report.launches <= 9 and not report.externs
    )  # at worst: pieces, rows and scaling for aligned and odd sizes, single elements, the total
    parts = [k for k in report.kernels if k.template == "foreach_reduction"]
    size = sum(g.numel() * g.element_size() for g in grads)
    assert (
        sum(k.bytes_read for k in parts) <= 1.01 * size and sum(k.bytes_written for k in report.kernels) <= 1.01 * size
    )
    assert re.search(r"each_\S+  foreach_reduction of \d+  reads", str(report))


@pytest.mark.parametrize("name", ["sum", "prod", "amax", "amin", "any", "all"])
def test_reductions_of_many_tensors(name, fuse, device):
    sizes = [3, 7, 12288, 20000, 64, 5]
    xs = [(torch.rand(n, device=device) - 0.5) * (2 if name != "prod" else 1e-3) + (name == "prod") for n in sizes]
    if name in ("any", "all"):
        xs = [x > (0.999 if i % 2 else 2) if name == "any" else x > -2 + 1.002 * (i % 2) for i, x in enumerate(xs)]
    f = lambda *xs: [getattr(x, name)() for x in xs]  # noqa: E731
    fused = fuse(f, fullgraph=True)
    for ours, theirs in zip(fused(*xs), f(*xs), strict=True):
        assert_close(ours, theirs)
    assert [k.template for k in fused.explain(*xs).kernels].count("foreach_reduction") in (1, 2)


def test_several_results_of_each_tensor_and_nan(fuse, device):
    def f(*xs):
        return [(x.square().sum() * 2 + x.amax(), x.amax()) for x in xs]

    xs = [torch.randn(n, device=device) for n in (20000, 33, 17000)]
    xs[1][4] = float("nan")
    fused = fuse(f, fullgraph=True)
    for ours, theirs in zip(fused(*xs), f(*xs), strict=True):
        assert_close(ours, theirs, equal_nan=True)
    assert [k.tensors for k in fused.explain(*xs).kernels] == [3, 3]


def test_reductions_that_need_each_other_are_apart(fuse, device):
    def f(x, y):
        return (y * x.sum()).sum()

    x, y = torch.randn(30, device=device), torch.randn(40, device=device)
    assert_close(fuse(f)(x, y), f(x, y), rtol=1e-4, atol=1e-5)
    assert groups_of_many(f, x, y) == []
    assert groups_of_many(lambda x, y: (x.sum(), y.sum()), x, y) == [2]
    assert (
        groups_of_many(lambda x, y: (x.sum(), (x - x.mean()).square().sum()), x, y) == []
    )  # two passes, one after the other


def groups_of_many(f, *args):
    return [len(s.members) for s in many(fuse_pass(lowered(f, *args))[0]).steps if isinstance(s, Foreach)]


def test_many_pieces_are_written_where_a_cat_wants_them(fuse, device):
    xs = [torch.randn(n, 3, device=device) for n in range(1, 21)]
    f = lambda *xs: torch.cat([x * 2 if n % 4 else x for n, x in enumerate(xs)])  # noqa: E731
    fused = fuse(f, fullgraph=True)
    assert torch.equal(fused(*xs), f(*xs))
    report = fused.explain(*xs)
    assert not report.externs and report.launches == 2  # what is computed, and what is copied
    kept = lambda *xs: (torch.cat(made := [x * 2 for x in xs]), *made)  # noqa: E731
    fused = fuse(kept, fullgraph=True)
    for ours, theirs in zip(fused(*xs), kept(*xs), strict=True):
        assert torch.equal(ours, theirs)
    assert [e.target for e in fused.explain(*xs).externs] == ["aten.cat.default"]
    columns = lambda *xs: torch.cat([x.t() * 2 for x in xs], 1)  # noqa: E731
    assert torch.equal(fuse(columns)(*xs), columns(*xs))


# -- compiled for a GPU ------------------------------------------------------------------------------------------------
def test_compiled_for_a_gpu_accesses_stay_wide(sm_90):
    shapes = [(256, 256), (256,), (512, 260), (1000, 40)] * 6
    args = arguments(len(shapes), 4, (0.01, 3.0), "cpu", shapes=shapes)
    kernels = sm_90(adamw, args).kernels
    (kernel,) = [k for k in kernels if k.template == "foreach"]
    assert len(kernels) == 2 and kernel.tensors == 24 and kernel.n_spills == 0
    each = kernel.schedule["XBLOCK"] // (32 * kernel.num_warps) // 4  # 16-byte accesses a thread and tensor
    assert each >= 1 and kernel.wide_loads >= 4 * each and kernel.wide_stores >= 3 * each
    assert kernel.compiled.seconds < 60


def test_reductions_compiled_for_a_gpu_read_wide(sm_90):
    shapes = [(256, 256), (256,), (512, 512), (1000, 40)] * 6
    grads = [torch.empty(s) for s in shapes]
    kernels = sm_90(clip_loop, (grads, torch.tensor(1.0))).kernels
    parts = [k for k in kernels if k.template == "foreach_reduction"]
    assert len(kernels) == 4 and len(parts) == 2 and all(k.n_spills == 0 for k in kernels)
    assert parts[0].wide_loads >= parts[0].schedule["RBLOCK"] // (32 * parts[0].num_warps) // 4
