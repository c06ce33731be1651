"""Effect: what an op does besides its results, and so what no pass may merge, drop, repeat, move past its kind or run
for nothing.

In: an op, or a node of a graph. Out: an `Effect`, read from the op itself: its schema, its tags, torch's registry of
effects, its library.

    >>> effect(torch.ops.aten.add.Tensor), effect(torch.ops._c10d_functional.all_reduce.default)
    (None, <Effect.COMMUNICATES: 'talks to other processes'>)

Every pass asks here: arms of an `if`, common subexpressions, dead code, chunks, partition and recomputation, regions,
the order of steps,
CUDA graphs. An op of a library that is not known to be pure is taken to have an effect; its author can say otherwise
with a tag:
`torch.library.define(..., tags=torch.Tag.pointwise)`.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.fx import Node

from ... import torch_private as private
from ...torch_private import side_effectful_functions as MARKED  # what torch's own passes keep alive


class Effect(enum.Enum):
    """What an op does; the text completes "it ..."."""

    WRITES = "changes an operand in place"
    DRAWS = "draws random numbers"
    ORDERED = "has its place among other effects"
    COMMUNICATES = "talks to other processes"
    UNKNOWN = "is an op of a library that is not known to be pure"

    @property
    def in_turn(self) -> bool:
        """Whether it happens exactly once a call, at its place among its kind; writes are data of graphs, draws may be
        unread.
        """
        return self in IN_TURN


IN_TURN = frozenset({Effect.ORDERED, Effect.COMMUNICATES, Effect.UNKNOWN})
PURE = frozenset(
    {
        "aten",
        "prims",
        "prim",
        "fusejit",
        "quantized",
        "quantized_decomposed",
        "mkldnn",
        "mkldnn_prepacked",
        "onednn",
        "torchvision",
        "torchao",
    }
)
"""Libraries whose ops do what their schemas and tags say, and no more."""
COLLECTIVES = ("c10d", "_c10d_functional", "_dtensor", "symm_mem")
"""How the names of libraries begin whose ops wait for other processes."""
FORMULAS = ("Autograd", "AutogradCPU", "AutogradCUDA", "CompositeImplicitAutograd")
COMPUTES = frozenset({torch.Tag.pointwise, torch.Tag.reduction})
"""Tags by which the author of an op says that its results are all that it makes."""


def effect(op: Any) -> Effect | None:
    """The effect of an op; None if its results are all that there is to it.

    Args:
        op: an overload, or a packet of them; anything else has the effect that its attribute `effect` names, functions
            of Python none.
    """
    if isinstance(op, private.OpOverloadPacket):
        return next((met for name in op.overloads() if (met := effect(getattr(op, name))) is not None), None)
    if not isinstance(op, private.OpOverload):
        if isinstance(op, private.HigherOrderOperator) and (op in MARKED or registered(op)):
            return Effect.ORDERED
        return getattr(op, "effect", None)
    if op in MARKED or registered(op):
        return Effect.ORDERED
    tags = set(op.tags)
    if op.namespace not in PURE and not COMPUTES & tags:
        return Effect.COMMUNICATES if op.namespace.startswith(COLLECTIVES) else Effect.UNKNOWN
    if op._schema.is_mutable:
        return Effect.WRITES
    return Effect.DRAWS if torch.Tag.nondeterministic_seeded in tags else None


@functools.cache
def has_formula(op: Any) -> bool:
    """Whether a gradient through an op is the op's own; torch differentiates what the kernel of another one happens to
    call.
    """
    if not isinstance(op, private.OpOverload) or op.namespace in PURE:
        return True
    if not op._schema.returns and not op._schema.is_mutable:
        return True
    return any(private.dispatch_has_kernel_for_dispatch_key(op.name(), key) for key in FORMULAS)


def registered(op: Any) -> bool:
    """Whether torch's registry knows an effect of an op."""
    return private.singleton.find(qualified(op)).effect.effect is not None


def qualified(op: Any) -> str:
    return op._name if isinstance(op, private.OpOverload) else f"{op.namespace}::{op.name()}"


def effect_of(node: Node) -> Effect | None:
    """The effect of a node: of the op that it calls, or of the one that torch's functions of functions call for it."""
    if node.op != "call_function":
        return None
    if isinstance(node.target, private.HigherOrderOperator):
        met = [effect(arg) for arg in (node.target, *node.args[:2]) if not isinstance(arg, Node) and callable(arg)]
        return next((one for one in met if one is not None), None)
    return effect(node.target)


def in_turn(node: Node) -> bool:
    """Whether a node must run exactly once a call, at its place among its kind."""
    met = effect_of(node)
    return met is not None and met.in_turn


def first_in_turn(nodes: Iterable[Node]) -> Node | None:
    return next((node for node in nodes if in_turn(node)), None)


def alive(node: Node) -> bool:
    """Whether a node of a functional graph stays although nothing reads it: what changes inputs at the end, what
    happens in turn.
    """
    return node.op in ("placeholder", "output") or node.target is torch.ops.aten.copy_.default or in_turn(node)


def alive_before(node: Node) -> bool:
    """Whether a node of a captured graph, whose changes in place are not data yet, stays although nothing reads it."""
    return node.is_impure() or in_turn(node)


class Watch:
    """While any thread is inside, torch's own removals of dead code keep what is in turn."""

    def __init__(self) -> None:
        self.lock, self.inside = threading.Lock(), 0
        self.before: Any = None

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with self.lock:
            if not self.inside:
                before = self.before = Node.is_impure
                Node.is_impure = lambda node, *args, **named: before(node, *args, **named) or in_turn(node)  # type: ignore[method-assign]
            self.inside += 1
        try:
            yield
        finally:
            with self.lock:
                self.inside -= 1
                if not self.inside:
                    Node.is_impure = self.before  # type: ignore[method-assign]


kept = Watch()
TURN = "fusejit_turn"
"""The argument that tells two equal nodes in turn apart while torch merges equal nodes."""


@contextlib.contextmanager
def in_their_half(joint: torch.fx.GraphModule) -> Iterator[None]:
    """While torch cuts a joint graph in two: each node in turn stays where it is, is not merged, not dropped, not
    computed again.
    """
    for node in joint.graph.nodes:
        if "recompute" in node.meta and effect_of(node) is not None:  # other numbers, or a second effect
            node.meta["recompute"] = torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE
    nodes = [node for node in joint.graph.nodes if in_turn(node)]
    for number, node in enumerate(nodes):
        half = "backward" if node.meta.get("partitioner_tag") == "is_backward" else "forward"
        node.meta = {**node.meta, "partitioner_tag": f"must_be_in_{half}"}
        node.kwargs = {**node.kwargs, TURN: number}
    with kept():
        yield


def told_apart(*graphs: torch.fx.GraphModule) -> None:
    """Take the argument out again."""
    for module in graphs:
        for node in module.graph.nodes:
            if TURN in node.kwargs:
                node.kwargs = {name: value for name, value in node.kwargs.items() if name != TURN}


def sequence(nodes: Iterable[Node]) -> dict[Node, Node]:
    """{node in turn: the one before it}, for what orders nodes anew."""
    row = [node for node in nodes if in_turn(node)]
    return dict(zip(row[1:], row))
