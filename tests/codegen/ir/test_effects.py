"""One notion of effect (codegen/ir/effects.py), obeyed by every pass: what runs, how often and in which order is as in
eager.
"""

from __future__ import annotations

import itertools
import linecache
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor
from torch.fx import Graph, GraphModule

import fusejit
from fusejit.autodiff import region_ops  # noqa: F401  (its ops)
from fusejit.autodiff.chunked.chunk import in_order
from fusejit.capture.regions.detect import Refused, refuse_changes
from fusejit.codegen.graph.simplify import simplify
from fusejit.codegen.ir.effects import Effect, effect, effect_of, in_turn
from fusejit.codegen.ir.graph import Extern
from fusejit.frontend.subgraph_op import cut
from fusejit.runtime.cudagraph import waits

LOG: list[str] = []
LIBRARY = torch.library.Library("effects_test", "DEF")


def noted(name: str, run: Callable) -> Callable:
    def body(x: Tensor) -> Any:
        LOG.append(f"{name} {x.numel()}")
        return run(x)

    return body


def define(name: str, run: Callable, schema: str = "(Tensor x) -> Tensor", **more: Any) -> Any:
    LIBRARY.define(f"{name}{schema}", **more)
    LIBRARY.impl(name, noted(name, run), "CompositeExplicitAutograd")
    if "-> ()" not in schema:
        torch.library.register_fake(f"effects_test::{name}", lambda x: torch.empty_like(x), lib=LIBRARY)
    else:
        torch.library.register_fake(f"effects_test::{name}", lambda x: None, lib=LIBRARY)
    return getattr(torch.ops.effects_test, name).default


def doubled(x: Tensor) -> None:
    x.mul_(2)


PLAIN = define("plain", lambda x: x * 2)
FORMLESS = define("formless", lambda x: x * 2)
TAGGED = define("tagged", lambda x: x * 3, tags=torch.Tag.pointwise)
SAID = define("said", lambda x: None, "(Tensor x) -> ()")
CHANGED = define("changed", doubled, "(Tensor(a!) x) -> ()")
ORDERED = define("ordered", lambda x: x + 1)
for _op in (PLAIN, TAGGED, ORDERED):
    torch.library.register_autograd(_op._name, lambda ctx, grad: grad * 2, lib=LIBRARY)
torch.library._register_effectful_op("effects_test::ordered", torch._library.effects.EffectType.ORDERED)
SUMMED: Any = torch.ops._c10d_functional.all_reduce.default


@torch.library.custom_op("effects_test::trained", mutates_args=())
def trained(x: Tensor) -> Tensor:
    LOG.append(f"trained {x.numel()}")
    return x * 2


trained.register_fake(lambda x: torch.empty_like(x))
trained.register_autograd(lambda ctx, grad: PLAIN(grad))
TRAINED: Any = torch.ops.effects_test.trained.default

KINDS = {
    PLAIN: Effect.UNKNOWN,
    SAID: Effect.UNKNOWN,
    CHANGED: Effect.UNKNOWN,
    TRAINED: Effect.UNKNOWN,
    ORDERED: Effect.ORDERED,
    SUMMED: Effect.COMMUNICATES,
    torch.ops._c10d_functional.broadcast.default: Effect.COMMUNICATES,
    torch.ops.fusejit.print.default: Effect.ORDERED,
    torch.ops.fusejit.piece_in_turn.default: Effect.ORDERED,
    torch.ops.aten._linalg_check_errors.default: Effect.ORDERED,
    torch.ops.aten.add_.Tensor: Effect.WRITES,
    torch.ops.aten.bernoulli.default: Effect.DRAWS,
    torch.ops.fusejit.region.default: Effect.DRAWS,
    TAGGED: None,
    torch.ops.aten.mm.default: None,
    torch.ops.fusejit.piece.default: None,
    torch.ops.prims.sin.default: None,
}
"""What the op itself says."""
CALLS = {PLAIN: (), ORDERED: (), TRAINED: (), SUMMED: ("sum", "0"), TAGGED: (), torch.ops.aten.sin.default: ()}
"""Ops of one tensor to one, and what else they take."""


@pytest.mark.parametrize("op", KINDS, ids=str)
def test_an_op_says_its_effect(op: Any) -> None:
    assert effect(op) is KINDS[op]
    assert effect(op._overloadpacket) in set(KINDS.values())


def graph_of(op: Any) -> GraphModule:
    """Two equal calls, one of which nothing reads, and a third one that reads what comes late."""
    graph = Graph()
    x = graph.placeholder("x")
    one, two = [graph.call_function(op, (x, *CALLS[op])) for _ in range(2)]
    late = graph.call_function(torch.ops.aten.cos.default, (two,))
    third = graph.call_function(op, (late, *CALLS[op]))
    graph.output((late,))
    for node in (x, one, two, late, third):
        node.meta["val"] = torch.empty(4, device="meta")
    return GraphModule(torch.nn.Module(), graph)


def count(module: GraphModule, op: Any) -> int:
    return sum(node.target is op for node in module.graph.nodes)


@pytest.mark.parametrize("op", CALLS, ids=str)
def test_passes_over_graphs(op: Any) -> None:
    turn = effect(op) is not None
    assert count(simplify(graph_of(op)), op) == (3 if turn else 1)
    module = graph_of(op)
    nodes = [node for node in module.graph.nodes if node.op == "call_function"]
    assert count(cut(module, nodes, [nodes[0].args[0]], [nodes[2]]), op) == (3 if turn else 1)
    assert [in_turn(node) for node in module.graph.nodes if node.target is op] == [turn] * 3
    try:
        refuse_changes(nodes)
        assert not turn
    except Refused as refused:
        assert turn and effect(op).value in str(refused)
    assert bool(waits(Extern(str(op), (), (), (), False, "", effect=effect(op)))) is turn


@pytest.mark.parametrize("op", [PLAIN, SUMMED, ORDERED], ids=str)
def test_the_order_of_nodes_keeps_turns(op: Any) -> None:
    graph = Graph()
    x = graph.placeholder("x")
    first = graph.call_function(op, (x, *CALLS[op]))
    second = graph.call_function(op, (x, *CALLS[op]))
    late = graph.call_function(torch.ops.aten.sin.default, (x,))  # written behind what reads it, as chunks are
    graph.output((first, second))
    first.args = (late, *first.args[1:])
    in_order(graph)
    nodes = list(graph.nodes)
    assert nodes.index(late) < nodes.index(first) < nodes.index(second)


def test_functions_of_functions_have_the_effect_of_what_they_call() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    changed = graph.call_function(torch.ops.higher_order.auto_functionalized_v2, (CHANGED,), {"_all_bases": [x]})
    token = graph.call_function(torch.ops.higher_order.with_effects, (x, ORDERED, x))
    assert effect_of(changed) is Effect.UNKNOWN and effect_of(token) is Effect.ORDERED


# Whole programs: what they call, in which order, is what eager calls.

STATEMENTS = (
    "v{n} = torch.sin({a})",
    "v{n} = {a} * 2 + {b}",
    "v{n} = P.plain({a})",
    "v{n} = P.plain(x)",
    "v{n} = P.ordered({a})",
    "v{n} = P.trained({a})",
    "P.said({a}); v{n} = {a}",
    "v{n} = {a} * 1.5; P.changed(v{n})",
    "P.plain({a}); v{n} = {b} + 1",
    "v{n} = P.trained(x); P.trained({a})",
    "v{n} = P.tagged({a})",
    "v{n} = (P.plain({a}) + P.plain({a})).cos()",
    "v{n} = {a}.sum(0, keepdim=True) + {b}",
    "v{n} = P.formless({a})",
    "if {a}.sum() > 0:\n        v{n} = P.plain({a})\n    else:\n        v{n} = P.plain({b}) * P.ordered({b})",
    "v{n} = {a} - 1\n    if {b}.mean() < 0.5:\n        P.said(v{n})",
    "v{n} = {a} + 1\n    if {b}.mean() < 0.5:\n        P.changed(v{n})",
    "v{n} = {a} * 1\n    while v{n}.abs().sum() < 40:\n        v{n} = P.plain(v{n})  + 1",
    "v{n} = P.plain({a}) if {b}.sum() > 0 else P.plain({b})",
)
NUMBERS = itertools.count()


def program(seed: int) -> Callable:
    chosen = random.Random(seed)
    names, lines = ["x"], []
    for n in range(chosen.randint(2, 5)):
        a, b = chosen.choice(names), chosen.choice(names)
        lines.append("    " + chosen.choice(STATEMENTS).format(n=n, a=a, b=b))
        names.append(f"v{n}")
    source = "def f(x):\n" + "\n".join(lines) + f"\n    return {names[-1]}, {chosen.choice(names)} * 1\n"
    filename = f"<effects {seed} {next(NUMBERS)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    space: dict[str, Any] = {"torch": torch, "P": torch.ops.effects_test, "__name__": "effects_program"}
    exec(compile(source, filename, "exec"), space)
    space["f"].source = source
    return space["f"]


def told(fn: Callable, value: Tensor, grad: bool) -> SimpleNamespace:
    LOG.clear()
    x = value.clone().requires_grad_(grad)
    results = fn(x)
    forward = list(LOG)
    if grad and any(result.requires_grad for result in results):
        sum(result.sum() for result in results if result.requires_grad).backward()
    return SimpleNamespace(
        results=[r.detach() for r in results], calls=forward, backward=LOG[len(forward) :], grad=x.grad
    )


def effects(calls: list[str]) -> list[str]:
    """Calls of what is not known to be pure; the others may be merged, dropped and repeated."""
    return [call for call in calls if not call.startswith("tagged")]


def compare(seed: int, backend: str, grad: bool) -> None:
    fn = program(seed)
    jitted = fusejit.jit(fn, backend=backend)
    for sign in (1, -1, 1):
        value = torch.linspace(-0.5, 1.0, 4) * sign
        try:
            wanted = told(fn, value, grad)
        except RuntimeError:  # eager has no gradient of it
            return
        made = told(jitted, value, grad)
        text = f"seed {seed} sign {sign}\n{fn.source}"
        assert effects(made.calls) == effects(wanted.calls), text
        for one, other in zip(made.results, wanted.results, strict=True):
            torch.testing.assert_close(one, other, msg=lambda said, text=text: f"{said}\n{text}")
        assert effects(made.backward) == effects(wanted.backward), text
        if wanted.grad is not None:
            torch.testing.assert_close(made.grad, wanted.grad, msg=lambda said, text=text: f"{said}\n{text}")


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("seed", range(12))
def test_programs_call_what_eager_calls(seed: int, grad: bool) -> None:
    compare(seed, "interpret", grad)
    compare(seed, "auto", grad)


def branched(x: Tensor) -> Tensor:
    if x.sum() > 0:
        y = collectives.all_reduce(x, "sum", torch.distributed.group.WORLD)
    else:
        y = collectives.all_reduce(x * 2, "sum", torch.distributed.group.WORLD)
    return y


def repeated(x: Tensor) -> Tensor:
    collectives.all_reduce(x + 1, "sum", torch.distributed.group.WORLD)
    one = collectives.all_reduce(x, "sum", torch.distributed.group.WORLD)
    return one * collectives.all_reduce(x, "sum", torch.distributed.group.WORLD)


def in_one_rank(rank: int, store: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    x = torch.tensor([1.0 if rank == 0 else -1.0])
    for fn in (branched, repeated):
        wanted = fn(x)
        for backend in ("auto", "interpret"):
            jitted = fusejit.jit(fn, backend=backend)
            for _ in range(2):
                assert torch.equal(jitted(x), wanted), (fn.__name__, backend, rank)
    torch.distributed.destroy_process_group()


@pytest.mark.full
def test_collectives_of_ranks_that_differ(tmp_path: Any) -> None:
    torch.multiprocessing.spawn(in_one_rank, args=(str(tmp_path / "store"),), nprocs=2)


def under_vmap(x: Tensor) -> Tensor:
    y = x * 2
    if x.sum() > 0:
        y = torch.ops.effects_test.plain(y)
    return y


def test_an_arm_with_an_effect_is_refused_where_both_would_run() -> None:
    with pytest.raises(fusejit.errors.CaptureError, match="under_vmap|both arms would run"):
        fusejit.jit(lambda x: fusejit.vmap(under_vmap)(x), fullgraph=True)(torch.ones(2, 3))


def without_formula(x: Tensor) -> Tensor:
    return torch.ops.effects_test.formless(x.sin()).cos()


def test_an_op_without_a_formula_keeps_eager_s_gradient() -> None:
    x, y = [torch.linspace(0, 1, 5).requires_grad_() for _ in range(2)]
    jitted = fusejit.jit(without_formula, backend="interpret")
    jitted(x).sum().backward()
    without_formula(y).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    assert "no formula" in str(jitted.explain(x).fallbacks[0]) and "test_effects.py" in str(
        jitted.explain(x).fallbacks[0]
    )
    assert not jitted.explain(x.detach()).fallbacks


@pytest.mark.slow
def test_many_programs_call_what_eager_calls() -> None:
    for seed in range(100, 1100):
        compare(seed, "interpret", bool(seed % 2))
