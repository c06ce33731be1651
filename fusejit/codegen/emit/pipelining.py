"""Pipelining: the loads of a loop over a row, which are under way for later iterations while one is computed, and what
L2 does with them.

In: the tape of a kernel's loop. Out: the statements of the loads, those that begin the rest of the iteration, and a
policy for each load.

    for start in tl.range(0, 50257, RBLOCK, num_stages=3):
        r = (start + tl.arange(0, RBLOCK))[None, :]
        tmp0 = tl.load(in0 + (50257 * x + r))           two iterations ahead
        here = start // RBLOCK * RBLOCK                 the same number, which Triton does not know to be the same
        r = (here + tl.arange(0, RBLOCK))[None, :]
        tl.store(out0 + (50257 * x + r), tl.where(r == tmp2, tmp1, 0.0) - tmp0)

What loads and values both compute with, Triton computes once and hands on from one iteration to the next: with three
stages two tiles of indices would wait in registers for the values that they belong to.
"""

from __future__ import annotations

import torch

from ..ir.expr import Compute, Const, Expr, Iota, Load, Reduce, Scan, children, postorder
from .facts import Facts
from .index import IndexSpace
from .tape import Tape


def ahead(tape: Tape, nodes: list[Expr], roots: list[Expr]) -> tuple[list[str], list[Expr]]:
    """Return the statements of what an iteration loads at places that no data gives, and the nodes that are left.

    What computes their places is written again where the iteration needs it; their masks are handed on. None are apart
    where no load is ahead, or no value is made of an index: places to store to are one for 16 bytes.
    """
    facts, before = tape.facts, set(tape.names)
    loads = [n for n in nodes if isinstance(n, Load) and n not in before and _placed(n, before)]
    places = postorder(loads, lambda n: () if n in before else children(n))
    done = before | set(loads) | {n for n in places if n.dtype is torch.bool}
    needed = set(postorder(roots, lambda n: () if n in done else children(n)))
    rest = [n for n in nodes if n in needed and n not in done]
    scanned = any(
        isinstance(n, Scan) for n in rest
    )  # its index is that of the place that it was given, which most scans leave out
    if facts.tiles.num_stages == 1 or facts.kept or scanned or not any(isinstance(n, Iota) for n in rest):
        return [], nodes
    lines = [line for n in places for line in tape.statement(n)]
    for node in set(tape.names) - done:
        del tape.names[node]
    return lines, rest


def _placed(node: Load, known: set[Expr]) -> bool:
    """Whether the place and the mask of a load are made of the loop's index and of what was known before it."""
    below = postorder(children(node), lambda n: () if n in known else children(n))
    return all(n in known or isinstance(n, (Compute, Const, Iota)) for n in below)


def again(index: IndexSpace) -> list[str]:
    """Return the statements that give the index variables of a loop's tile to what is computed after its loads."""
    begin = index.backwards.replace("start", "here") or "here"
    lines = [f"r = ({begin} + tl.arange(0, RBLOCK))[None, :]{index.facts.widening}", *index.coordinates("r", "here")]
    return ["here = start // RBLOCK * RBLOCK", *lines]


def policies(facts: Facts, top: int) -> list[dict[Expr, str]]:
    """Return, for each pass, how L2 should treat what it loads: kept for the next pass, or let go of after the last
    one.
    """
    used: list[set[Load]] = []
    cluster = facts.cluster
    for level in range(top + 1):
        made = [
            a for n in cluster.order if isinstance(n, Reduce) and facts.levels[n] == level + 1 for a in facts.inputs(n)
        ]
        stored = [s.value for s in cluster.stores if facts.stored_at(s, top) == level]
        used.append({n for n in facts.inside([*made, *stored]) if isinstance(n, Load) and not n.index})
    result: list[dict[Expr, str]] = []
    for level, loads in enumerate(used):
        later = set().union(*used[level + 1 :])
        before = set().union(*used[:level])
        shared = {n for n in loads if cluster.parallel and not any((n.layout.strides or ())[: facts.split])}
        result.append(
            {n: "evict_last" if n in later | shared else "evict_first" for n in loads & (later | shared | before)}
        )
    return result
