"""The back end, pass by pass: clusters, fusion and its refusals, splitting, schedules, programs; and kernels reviewed
like source.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import subprocess
import sys

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fusejit
import fusejit.compile
from fusejit.codegen.emit.memory_plan import Alloc, Free, Launch, plan
from fusejit.codegen.emit.program import verify
from fusejit.codegen.emit.writer import render
from fusejit.codegen.graph.simplify import simplify
from fusejit.codegen.ir.cluster import Cluster, Store
from fusejit.codegen.ir.expr import Const, cast, compute, const, iota, load, postorder, view
from fusejit.codegen.ir.graph import Extern
from fusejit.codegen.ir.layout import Reshape, contiguous, permute, strided
from fusejit.codegen.ir.size import product
from fusejit.codegen.ops.decompositions import table
from fusejit.codegen.ops.rules import RULES
from fusejit.codegen.passes.fuse import fuse as fuse_pass
from fusejit.codegen.passes.lower import lower
from fusejit.codegen.passes.rfactor import split
from fusejit.codegen.passes.schedule import schedule

F32 = torch.float32
GOLDEN = pathlib.Path(__file__).parents[1] / "golden"


def lowered(f, *args):
    def flat(*inner):
        out = f(*inner)
        return out if isinstance(out, tuple) else (out,)

    with torch.no_grad():
        module = make_fx(flat, tracing_mode="fake", decomposition_table=table())(*args)
    return lower(simplify(module), args, RULES)


def fused(f, *args):
    return fuse_pass(lowered(f, *args))


# -- expressions and clusters ------------------------------------------------------------------------------------------
def test_equal_expressions_are_one_object():
    x = load("x", contiguous((4, 6)), F32)
    assert x is load("x", contiguous((4, 6)), F32)
    assert compute("add", x, x, dtype=F32) is compute("add", x, x, dtype=F32)
    assert const(1, torch.int64) is not const(True, torch.bool) and const(0.0, F32) is not const(-0.0, F32)
    assert const(300, torch.uint8).value == 44 and isinstance(cast(const(2.5, F32), torch.int32), Const)


def test_a_long_chain_is_no_recursion_and_no_exponential():
    y = load("x", contiguous((8,)), F32)
    for _ in range(5000):
        y = compute("mul", y, y, dtype=F32)
    assert len(postorder([y])) == 5001
    assert len(postorder(view([y], Reshape((2, 4))))) == 5001


def test_views_move_into_the_leaves():
    x = compute("neg", load("x", contiguous((4, 6)), F32), dtype=F32)
    (y,) = view([x], permute((4, 6), (1, 0)))
    assert y.args[0].layout.strides == (1, 6)
    (z,) = view([load("x", strided((6, 5), (10, 1)), F32)], Reshape((10, 3)))
    assert len(z.index) == 2 and z.index[0][0].op == "index_mod"


def test_build_takes_the_common_refinement_and_coalesces():
    x, w = load("x", contiguous((24,)), F32), view([load("w", strided((4, 6), (0, 1)), F32)], Reshape((24,)))[0]
    cluster = Cluster.build((24,), (), [Store("y", contiguous((24,)), compute("add", x, w, dtype=F32), F32)])
    assert cluster.parallel == (4, 6) and cluster.reads["w"][0].layout.strides == (0, 1)
    flat = Cluster.build((4, 6), (), [Store("y", contiguous((4, 6)), load("x", contiguous((4, 6)), F32), F32)])
    assert flat.coalesced.parallel == (24,)
    assert "load  x" in str(cluster) and "store y" in str(cluster)


def test_an_iota_keeps_its_values_under_views():
    (y,) = view([iota(contiguous((3, 4)))], permute((3, 4), (1, 0)))
    assert y.layout(2, 1) == 6


# -- lowering and fusion -----------------------------------------------------------------------------------------------
def test_a_norm_is_one_cluster():
    program, refused = fused(
        lambda x, w: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w, torch.randn(8, 32), torch.randn(32)
    )
    (cluster,) = program.steps
    assert (cluster.parallel, cluster.reduce) == ((8,), (32,)) and len(cluster.stores) == 1 and not refused


def test_a_column_reduction_and_its_consumer_share_axes_in_another_order():
    program, _ = fused(lambda x: x - x.mean((0, 2), keepdim=True), torch.randn(4, 6, 8))
    (cluster,) = program.steps
    assert product(cluster.parallel) == 6 and product(cluster.reduce) == 32


def test_an_extern_call_between_is_a_reason():
    program, refused = fused(lambda x, w: (x + 1) * ((x + 1) @ w), torch.randn(8, 8), torch.randn(8, 8))
    assert [type(s) for s in program.steps] == [Cluster, Extern, Cluster]
    assert not refused or all("between" in u.reason for u in refused)


def test_different_spaces_are_a_reason_with_both_lines():
    _, refused = fused(lambda x: (x.sum(0), x.sum(1)), torch.randn(40, 40))
    assert any("iteration spaces differ" in u.reason or "different orders" in u.reason for u in refused)
    assert all(len(u.pair) == 2 and all(u.pair) for u in refused)


def test_few_long_rows_are_three_steps_that_fill_the_device():
    program, _ = fused(lambda x: x / x.sum(), torch.randn(300, 100))
    assert len(program.steps) == 1
    pieces, whole, rest = split(program).steps
    assert (
        product(pieces.parallel) > 1
        and product(whole.parallel) == 1
        and not rest.reduce
        and product(rest.parallel) == 30_000
    )


def test_too_many_ops_are_several_kernels():
    def f(*xs):
        total = xs[0]
        for x in xs[1:]:
            total = total + x
        return total

    program, _ = fused(f, *(torch.randn(4) for _ in range(120)))
    assert len(program.steps) > 1


def test_o1_fuses_no_reduction():
    program, refused = fuse_pass(lowered(lambda x: (x + 1).softmax(-1), torch.randn(8, 32)), reductions=False)
    assert len(program.steps) > 1 and any("O1" in u.reason for u in refused)


def test_fusion_cost_stays_near_linear():
    def chain(n):
        def f(x):
            for _ in range(n):
                x = (x @ x + 1).relu()
            return x

        return lowered(f, torch.randn(4, 4))

    import time

    small, large = chain(50), chain(400)
    start = time.perf_counter()
    fuse_pass(small)
    middle = time.perf_counter()
    fuse_pass(large)
    assert time.perf_counter() - middle < 40 * (middle - start) + 0.5


# -- split, schedule, render -------------------------------------------------------------------------------------------
def test_split_makes_two_deterministic_steps():
    program, _ = fused(lambda x: (x * x).sum(), torch.randn(512, 512))
    one, two = split(program).steps
    assert product(one.parallel) > 1 and product(one.parallel) * product(one.reduce) == 512 * 512
    assert product(two.reduce) == product(one.parallel) and list(two.writes) == list(program.steps[0].writes)


@pytest.mark.parametrize(
    ("shape", "reduce", "template"),
    [
        ((64, 64), None, "pointwise"),
        ((64, 512), 1, "reduction_persistent"),
        ((4, 70_000), 1, "reduction_looped"),
        ((4096, 64), 0, "reduction_looped"),
    ],
)
def test_templates(shape, reduce, template):
    f = (lambda x: x + 1) if reduce is None else (lambda x: x.sum(reduce))
    (cluster,) = fused(f, torch.empty(shape))[0].steps
    assert schedule(cluster)[1].template == template


def test_a_transpose_is_a_two_dimensional_tile():
    (cluster,) = fused(lambda x, y: x.t().contiguous() + y, torch.empty(128, 256), torch.empty(256, 128))[0].steps
    ordered, tiles = schedule(cluster)
    assert tiles.template == "pointwise_2d" and tiles["XBLOCK"] >= 16 and tiles["YBLOCK"] >= 16


def test_kernel_bytes_count_each_element_once():
    program, _ = fused(lambda x, w: (x * w).softmax(-1), torch.empty(64, 512), torch.empty(512))
    kernel = render(*schedule(program.steps[0]), program.buffers)
    assert kernel.bytes_read == 4 * (64 * 512 + 512) and kernel.bytes_written == 4 * 64 * 512


# -- programs ----------------------------------------------------------------------------------------------------------
def planned(f, *args):
    program, _ = fused(f, *args)
    kernels = [None if isinstance(s, Extern) else render(*schedule(s), program.buffers) for s in program.steps]
    return plan(program, kernels), program


def test_every_buffer_is_freed_or_returned_once():
    steps, program = planned(lambda x, w: ((x + 1) @ w).relu() @ w, torch.empty(8, 8), torch.empty(8, 8))
    verify(steps, program)
    freed = [n for s in steps if isinstance(s, Free) for n in s.names]
    assert len(freed) == len(set(freed)) and any(isinstance(s, Alloc) and s.reuse for s in steps)
    with pytest.raises(AssertionError, match="freed twice"):
        verify((*steps, Free((freed[0],))), program)
    with pytest.raises(AssertionError, match="not made yet"):
        verify([s for s in steps if not isinstance(s, Alloc) or s.reuse], program)
    assert sum(isinstance(s, Launch) for s in steps) == 2


def test_program_source_runs_by_itself(tmp_path):
    f = fusejit.jit(lambda x, w: (x @ w).softmax(-1), backend="interpret")
    path = tmp_path / "program.py"
    path.write_text(f.program(torch.randn(4, 8), torch.randn(8, 6)).source)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(GOLDEN.parent.parent)}
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "tensor(" in done.stdout


def test_one_kernel_text_with_two_grids_and_two_dtypes():
    def f(x, y, z):
        return x + 1, y + 1, z + 1

    args = torch.randn(1024), torch.randn(4096), torch.randn(1024, dtype=torch.float64)
    f_fused = fusejit.jit(f, backend="interpret", jit_level="O1", fullgraph=True)  # O2 would join the first two
    torch.testing.assert_close(f_fused(*args), f(*args))
    kernels = f_fused.program(*args).kernels
    assert (
        kernels[0].params != kernels[2].params
        and kernels[0].name != kernels[2].name
        and kernels[0].grid != kernels[1].grid
    )


def test_equal_results_do_not_share_memory():
    one, two = fusejit.jit(lambda x: (x + 1, x + 1), backend="interpret", fullgraph=True)(torch.zeros(4))
    one.add_(5)
    assert two.tolist() == [1.0] * 4


def test_clusters_that_nothing_reads_are_dropped():
    """`max` under vmap also finds places, which no one asks for: two clusters of such results became a kernel without
    arguments.
    """
    f = lambda x: x.max(1).values.sum() + x.min(1).values.sin().sum()  # noqa: E731
    args = (torch.randn(4, 5),)
    assert all(step.stores and step.reads for step in fused(f, *args)[0].steps)
    jitted = fusejit.jit(f, backend="interpret", fullgraph=True)
    torch.testing.assert_close(jitted(*args), f(*args))
    assert all(kernel.arguments for kernel in jitted.program(*args).kernels)


def test_a_choice_between_a_value_and_itself_is_no_op():
    """What is left, without gradients, of the guards of an arm that may not be taken."""
    jitted = fusejit.jit(lambda x, c: torch.where(c, x, x.detach()) * 2 + x, backend="interpret", fullgraph=True)
    x, c = torch.randn(8), torch.arange(8) > 3
    torch.testing.assert_close(jitted(x, c), x * 3)
    assert "tl.where" not in jitted.program(x, c).source
    y = fusejit.jit(lambda x, c: torch.where(c, x, x.detach()), backend="interpret", fullgraph=True)(x, c)
    assert y.data_ptr() != x.data_ptr()


def test_dump_prints_and_writes_the_named_stage(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("FUSEJIT_DUMP", "fused")
    monkeypatch.setenv("FUSEJIT_DUMP_DIR", str(tmp_path))
    fusejit.jit(lambda x: x.exp() + 1, backend="interpret")(torch.randn(4))
    assert "# forward.fused" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["forward.fused.txt"]


def test_an_index_out_of_bounds_is_an_error_and_the_next_call_works():
    f = fusejit.jit(lambda x, i: x[i] * 2, backend="interpret")
    x = torch.randn(5, 3)
    with pytest.raises(IndexError):
        f(x, torch.tensor([0, 7]))
    torch.testing.assert_close(f(x, torch.tensor([0, -1])), x[[0, -1]] * 2)
    for g, y in (
        (lambda y, i: y.expand(4, 3)[i] + 1, torch.randn(1, 3)),
        (lambda y, i: torch.ones(4)[i] + y[0], torch.randn(1)),
    ):
        with pytest.raises(IndexError):  # an index along which nothing moves
            fusejit.jit(g, backend="interpret")(y, torch.tensor([0, 9]))


def test_a_kernel_that_does_not_compile_names_the_users_line(monkeypatch):
    good = fusejit.compile.render

    def broken(*args, **kwargs):
        kernel = good(*args, **kwargs)
        return dataclasses.replace(kernel, source=kernel.source.replace("tl.store", "tl.no_such_store"))

    def f(x):
        return x.exp() + 1

    monkeypatch.setattr("fusejit.compile.render", broken)
    with pytest.raises(fusejit.CompileError, match=r"(?s)does not compile.*test_codegen.py:\d+: return x.exp\(\) \+ 1"):
        fusejit.compile_for(f, (torch.randn(64),))
    monkeypatch.undo()
    assert fusejit.compile_for(f, (torch.randn(64),)).kernels[0].n_spills == 0  # nothing of the failure stays


GOLDEN_KERNELS = {
    "bias_gelu": (lambda x, b: torch.nn.functional.gelu(x + b), ((512, 1024), (1024,))),
    "layer_norm": (
        lambda x, w, b: torch.nn.functional.layer_norm(x, (x.shape[-1],), w, b),
        ((512, 1024), (1024,), (1024,)),
    ),
    "softmax_long": (lambda x: x.softmax(-1), ((512, 100_000),)),
    "softmax_few": (lambda x: x.softmax(-1), ((16, 131_072),)),
    "transpose_add": (lambda x, y: x.t() + y, ((256, 512), (512, 256))),
    "softmax_backward_bias": (
        lambda g, y: ((g - (g * y).sum(-1, keepdim=True)) * y, ((g - (g * y).sum(-1, keepdim=True)) * y).sum(0)),
        ((4096, 1024), (4096, 1024)),
    ),
    "column_sum": (lambda x: x.sum(0), ((8192, 4096),)),
}


@pytest.mark.parametrize("name", GOLDEN_KERNELS)
def test_golden_kernels(name, request):
    """A handful of rendered kernels, reviewed like source: `pytest --update-golden` rewrites them."""
    f, shapes = GOLDEN_KERNELS[name]
    program = split(fused(f, *(torch.empty(s) for s in shapes))[0])
    kernels = [render(*schedule(s), program.buffers) for s in program.steps]
    text = (
        "\n\n".join(f"# grid {k.grid}, {k.num_warps} warps, {dict(k.constants)}\n{k.source.strip()}" for k in kernels)
        + "\n"
    )
    text = re.sub(r"_[0-9a-f]{8}\(", "(", text)
    path = GOLDEN / f"{name}.py.txt"
    if request.config.getoption("--update-golden"):
        path.write_text(text)
    assert path.read_text() == text, "the kernel changed: look at the difference, then --update-golden"
