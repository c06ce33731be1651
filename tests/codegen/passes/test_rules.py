"""Fusion rules: one row of the table adds a way to fuse, and every pair that stays apart has a reason."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch
from test_codegen import lowered

import fusejit
from fusejit.codegen.ir.analysis import column_reduction, full, scans
from fusejit.codegen.ir.cluster import analysis
from fusejit.codegen.ir.concretize import hinted
from fusejit.codegen.ir.expr import Load
from fusejit.codegen.ir.graph import Lowered, Refused
from fusejit.codegen.passes.align import align, join
from fusejit.codegen.passes.fuse import fuse
from fusejit.codegen.passes.fusion_rules import NEIGHBOURS, RULES, Fusion, Merged, Rule
from fusejit.codegen.passes.rfactor import POLICIES
from fusejit.codegen.passes.schedule import order as schedule_order
from fusejit.codegen.passes.step_graph import StepGraph
from fusejit.codegen.schedule.access import crossing
from fusejit.codegen.schedule.device import machine
from fusejit.codegen.schedule.registers import at_once, kept

SM90 = machine("sm_90")


# -- a rule in one row -------------------------------------------------------------------------------------------------
def strangers(fusion, steps):
    """Pointwise steps over one space that share nothing: a launch is saved."""
    graph = fusion.graph
    for i in steps:
        for j in graph.steps:
            if i < j and not graph.reads[i] & graph.reads[j]:
                yield (i, j), (i, j)


def merge_strangers(fusion, members):
    a, b = fusion.graph.clusters(members)
    fusion.graph.check_path(members)
    if a.axes != b.axes:
        raise Refused("strangers of two sizes")
    return Merged(join(a, b))


TOY = Rule("strangers", strangers, merge_strangers)


def two_of_each(x, y, z):
    return x.exp(), y.sin(), z.cos()


def test_a_rule_is_one_row():
    args = torch.randn(8, 16), torch.randn(8, 16), torch.randn(3, 5)
    program = lowered(two_of_each, *args)
    assert len(fuse(program, device=SM90)[0].steps) == 3
    ours, unfused = fuse(program, device=SM90, rules=(*RULES, TOY))
    assert len(ours.steps) == 2 and {u.reason for u in unfused} == {"strangers of two sizes"}


def test_a_rule_may_refuse_before_it_tries():
    args = torch.randn(8, 16), torch.randn(8, 16), torch.randn(8, 16)
    rule = Rule("strangers", strangers, merge_strangers, refuse=lambda fusion, members: "not today")
    program, unfused = fuse(lowered(two_of_each, *args), device=SM90, rules=(*RULES, rule))
    assert len(program.steps) == 3 and [u.reason for u in unfused] == ["not today"] * 3


def test_a_rule_after_another_waits_for_its_merges():
    args = torch.randn(8, 16), torch.randn(8, 16), torch.randn(8, 16)
    late = Rule("late", strangers, merge_strangers, after="shared buffers")
    assert len(fuse(lowered(two_of_each, *args), device=SM90, rules=(*RULES, late))[0].steps) == 3


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_rules_say_what_they_match_and_what_they_wait_for(rule):
    assert rule.match.__doc__, "what its pairs are"
    assert not rule.after or rule.after in [other.name for other in RULES[: RULES.index(rule)]]


# -- reasons -----------------------------------------------------------------------------------------------------------
def many_readers(x):
    return tuple(x[: n + 1].exp() for n in range(3 * NEIGHBOURS))


def optimiser(lr, *pairs):
    return tuple(p - lr * g for p, g in zip(pairs[::2], pairs[1::2], strict=True))


def beside_slices(x):
    return x[:4].sin(), x[4:].cos()


@pytest.mark.parametrize(
    "fn, args, reason",
    [
        (many_readers, (torch.randn(64, 4),), "than are tried with each other"),
        (optimiser, (torch.randn(()), *(torch.randn(n, 8) for n in (3, 3, 4, 4, 5, 5))), "share single elements only"),
        (beside_slices, (torch.randn(8, 6),), "in different orders"),
    ],
    ids=["neighbours", "foreach", "slices"],
)
def test_pairs_that_are_left_alone_have_a_reason(fn, args, reason):
    unfused = fuse(lowered(fn, *args), device=SM90)[1]
    assert any(reason in u.reason for u in unfused), [str(u) for u in unfused]
    assert any(reason in str(u) for u in fusejit.compile_for(fn, args, target="sm_90").forward.unfused)


def test_steps_of_many_tensors_have_one_reason_for_all_their_pairs():
    args = torch.randn(()), *(torch.randn(n, 8) for n in range(3, 40) for _ in "pg")
    unfused = fuse(lowered(optimiser, *args), device=SM90)[1]
    assert len(unfused) <= 3, [str(u) for u in unfused]


# -- the graph ---------------------------------------------------------------------------------------------------------
def chain(x, y):
    a = x.exp()
    b = a @ y
    return a + 1, b.sin() + a


def graph_of(fn, *args) -> StepGraph:
    return StepGraph(lowered(fn, *args))


def test_paths_and_orders_of_a_graph():
    graph = graph_of(chain, torch.randn(6, 6), torch.randn(6, 6))
    first, last = min(graph.steps), max(graph.steps)
    matmul = next(i for i in graph.steps if graph.cluster(i) is None)
    assert graph.runs_before(first, last) and graph.runs_before(first, matmul) and not graph.runs_before(last, first)
    assert graph.in_order((last, first)) == (first, last)
    with pytest.raises(Refused, match="an op between them"):
        graph.check_path((first, last))
    assert isinstance(graph.program(), Lowered) and graph.program().steps == graph.lowered.steps


def test_merged_steps_are_one_in_every_table():
    args = torch.randn(8, 16), torch.randn(8, 16)
    graph = graph_of(lambda x, y: (x.exp(), y.exp(), x + y), *args)
    before = {name for names in graph.writes.values() for name in names}
    members = tuple(graph.steps)[:2]
    a, b = graph.clusters(members)
    graph.merge(members, join(a, b))
    assert members[0] not in graph.steps and members[0] not in graph.ancestors
    assert graph.writes[members[1]] == {*a.writes, *b.writes}
    assert {name for names in graph.writes.values() for name in names} == before
    assert all(k in graph.steps for numbers in (*graph.readers.values(), *graph.producers.values()) for k in numbers)
    assert Fusion(graph, SM90).open_again(members) and align(a, a)


def only_step(fn, *args):
    (step,) = fuse(lowered(lambda *inner: (fn(*inner),), *args), device=SM90)[0].steps
    return step


# -- reductions in two stages ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_policies_refuse_with_a_reason(policy):
    """Each row of the table takes a plain sum; what pieces cannot be combined to, and what is cut already, it names."""
    plain = only_step(lambda x: x.sum(1), torch.randn(6, 8))
    assert not policy.unfit(plain) and policy.pieces and policy.why
    nested = only_step(lambda x: (x - x.sum(1, keepdim=True)).square().sum(1), torch.randn(6, 8))
    assert bool(policy.unfit(nested)) == bool(policy.passes)
    assert bool(policy.unfit(replace(plain, programs=3))) == policy.whole
    scatters = replace(plain, stores=tuple(replace(s, mode="atomic_add") for s in plain.stores))
    assert policy.unfit(scatters) == policy.scattered


# -- analyses are values -----------------------------------------------------------------------------------------------
def test_an_analysis_runs_once_for_a_cluster():
    calls = []

    @analysis
    def loads(cluster, least=0):
        calls.append(least)
        return sum(isinstance(n, Load) for n in cluster.order) > least

    cluster = only_step(lambda x, y: x + y, torch.randn(8), torch.randn(8))
    other = replace(cluster, lines=("other",))
    assert loads(cluster) and loads(cluster) and loads(cluster, 1) and not loads(cluster, 2) and loads(cluster, least=1)
    assert calls == [0, 1, 2, 1] and loads(other) and len(calls) == 5
    assert "facts" not in pickle.loads(pickle.dumps(replace(cluster, stores=()))).__dict__


@pytest.mark.parametrize("fact", [hinted, full, scans, column_reduction, schedule_order, at_once, kept, crossing])
def test_what_fusion_asks_of_a_cluster_is_found_out_once(fact):
    cluster = only_step(lambda x: x.sum(1), torch.randn(6, 8))
    assert fact(cluster) is fact(cluster) and any(fact.__name__ in str(key) for key in cluster.facts)
