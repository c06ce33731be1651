"""Branch nodes: an `if` or `while` on a tensor becomes one node of the graph that is being captured.

In: a `Choice` whose arms are too much for a select, or a loop. Out: the variables after it; in the graph, one `Piece`
(subgraph_op.py) over graphs that were traced in place and then cut out.

    branch(choice, "`matmul` is no cheap op")
    # graph: %branch_1 = call_function[target=branch_1](args = (%gt, %x, %w), kwargs = {})
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import torch_private as private
from ..capture import pytree, tracer
from ..capture.effect_ops import OPS as ORDERED
from ..capture.effect_ops import ORDER
from ..capture.scalar_tensors import is_number, mark_number
from ..capture.source_lines import frame_entry, user_frame
from ..codegen.ir.effects import effect_of, first_in_turn
from ..errors import Unsupported
from .aliases import Shared, check_aliases, leaves_of, origins_in, relatives
from .lower_jumps import VALUE, is_flag
from .phi import MISSING, NUMBERS, Mismatch, merge, shown
from .predicate import Arm, memory_of, quietly, run_arm, write_back
from .subgraph_op import WRITERS, Like, Piece, branch_piece, cut, erase, like, loop_piece, nodes_after, outside

Tensor = torch.Tensor
ROUNDS = 8
LOOP_WAY_OUT = (
    "keep each variable's type, dtype and shape the same in every round, or loop over a `range` with a test inside"
)


class Weaver:
    """Writes into the graph that this thread captures."""

    def __init__(self, shared: Sequence[Shared] = ()) -> None:
        from torch.fx.experimental.proxy_tensor import get_proxy_mode  # torch.fx: there when something is captured

        self.shared = shared
        mode: Any = get_proxy_mode()
        self.tracer: Any = None if mode is None else mode.tracer

    @property
    def graph(self) -> torch.fx.Graph:
        return self.tracer.graph

    def mark(self) -> torch.fx.Node:
        return next(iter(reversed(self.graph.nodes)))

    def node(self, value: Tensor) -> torch.fx.Node:
        from torch.fx.experimental.proxy_tensor import get_proxy_slot

        if not hasattr(value, "fake_mode"):
            value = value.clone()  # a tensor that was not met before becomes an input first
        slot = get_proxy_slot(value, self.tracer, None)
        if slot is None:
            value = value.clone()
            slot = get_proxy_slot(value, self.tracer)
        return slot.proxy.node

    def since(self, mark: torch.fx.Node) -> list[torch.fx.Node]:
        return nodes_after(self.graph, mark)

    def erase(self, nodes: Sequence[torch.fx.Node]) -> None:
        erase(self.graph, nodes)

    def preserve(self, value: Tensor, mark: torch.fx.Node) -> None:
        """Let what reads a tensor since `mark` read a copy: it is about to change in place, and gradients may need what
        was read.
        """
        node, later = self.node(tracer.tracing().twin(value)), self.since(mark)
        readers = [user for user in later if node in user.all_input_nodes]
        if not readers:
            return
        with self.graph.inserting_after(
            max(node, mark)
        ):  # an input that was met first since then stands behind the mark
            copy = self.graph.call_function(torch.ops.aten.clone.default, (node,))
        copy.meta = dict(node.meta)
        for reader in readers:
            reader.replace_input_with(node, copy)

    def cut(
        self, nodes: Sequence[torch.fx.Node], inputs: Sequence[torch.fx.Node], outputs: Sequence[torch.fx.Node]
    ) -> Any:
        check_aliases(self.graph, self.shared, set(nodes))
        recorder = tracer.recorder()
        recorder.silent += 1  # the modules that are made here are no modules of the user's
        try:
            return cut(self.tracer.root, nodes, inputs, outputs)
        finally:
            recorder.silent -= 1

    def emit(self, piece: Piece, inputs: Sequence[torch.fx.Node], outs: Sequence[Tensor]) -> None:
        """Add the node of a piece; `outs` become its results."""
        import torch.fx.traceback as fx_traceback
        from torch.fx.experimental.proxy_tensor import track_tensor_tree

        fx_traceback.current_meta["stack_trace"] = frame_entry(user_frame(sys._getframe(1)))
        node = self.graph.create_node("call_function", piece, tuple(inputs), {}, name=piece.__name__)
        node.meta.update(fx_traceback.get_current_meta())
        node.meta["val"] = tuple(outs)
        proxy: Any = torch.fx.Proxy(node, self.tracer)
        with private.DisableTorchFunction():
            for number, out in enumerate(outs):
                track_tensor_tree(out, proxy[number], constant=None, tracer=self.tracer)
                if hasattr(out, "fusejit_number"):
                    mark_number(out)


def zeros(value: Tensor) -> Tensor:
    """Zeros that are like a tensor, without a node that takes it."""
    return torch.zeros(value.shape, dtype=value.dtype, device=value.device)


def tensors_of(values: Any) -> list[Tensor]:
    return [leaf for leaf in leaves_of(values) if isinstance(leaf, Tensor)]


def is_scalar(value: Tensor) -> bool:
    """Whether a tensor stands for a Python number."""
    return value.dim() == 0 and is_number(value)


def untracked(kind: Like, requires_grad: bool) -> Tensor:
    """A new fake tensor of a kind, that no node of the graph makes."""
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

    with private.DisableTorchFunction(), disable_proxy_modes_tracing(), torch.no_grad():
        made = kind.empty()
    wanted = requires_grad and torch.is_grad_enabled() and made.is_floating_point()
    if wanted:
        with private.DisableTorchFunction(), disable_proxy_modes_tracing():
            made = made.requires_grad_().clone()  # no leaf, so that it may be changed in place
    return made


def write(piece: Piece, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Write the call of a piece into the graph and return its results."""
    weaver = Weaver()
    grad = any(value.requires_grad for value in inputs)
    outs = [untracked(kind, grad) for kind in piece.results]
    weaver.emit(piece, [weaver.node(value) for value in inputs], outs)
    return outs


WRITERS.append(write)


# Effects.


class Chain:
    """The chain of ops with an effect (see capture/effect_ops.py) at a place of the graph, from which several parts go
    on.
    """

    def __init__(self) -> None:
        self.trace = tracer.tracing() if tracer.active() else None
        self.start = self.end

    @property
    def end(self) -> Tensor | None:
        """The last token so far."""
        return None if self.trace is None else self.trace.token

    @end.setter
    def end(self, token: Tensor | None) -> None:
        if self.trace is not None:
            self.trace.token = token

    def back(self) -> bool:
        """Go back to the start of what was traced since; returns whether there were effects."""
        grown = self.end is not self.start
        self.end = self.start
        return grown

    def begin(self) -> None:
        """Make sure that there is a token to go on from."""
        if self.start is None:
            ORDER(None, [])
            self.start = self.end


# Branches.


class Pairs:
    """Chooses between the tensors of two arms by making them results of the branch."""

    def __init__(self) -> None:
        self.pairs: list[tuple[Tensor, Tensor, Tensor]] = []

    def __call__(self, one: Tensor, other: Tensor) -> Tensor:
        made = untracked(like(one), one.requires_grad or other.requires_grad)
        self.pairs.append((one, other, made))
        return made

    def alone(self, value: Any, place: int) -> Any:
        """A value of one arm that the other one does not have; zeros stand for it there."""
        leaves: list[Any] = []
        structure = pytree.flatten(value, leaves)
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                leaves[number] = self(leaf, zeros(leaf)) if place == 0 else self(zeros(leaf), leaf)
        return pytree.unflatten(structure, iter(leaves))


def branch(choice: Any, mark: torch.fx.Node, weaver: Weaver, chain: Chain) -> dict[str, Any]:
    """Trace both arms as they are, cut them out, and return the variables' values behind the branch.

    Args:
        choice: see operators.py; mark: the last node before the arms were tried; chain: the effects up to there.
    """
    weaver.erase(weaver.since(mark))
    effects = chain.back()
    if effects:
        chain.begin()
    traced, values, arms = [], [], []
    ends: list[Any] = []
    for place in (0, 1):
        start = weaver.mark()
        chain.end = chain.start
        found, arm = choice.trial(place, guard=False)
        traced.append(weaver.since(start))
        values.append(found)
        arms.append(arm)
        ends.append(chain.end)
    pick = Pairs()
    merged, changed, pairs = choice.merged(values, arms, pick), choice.changed(arms, pick), pick.pairs
    if effects:
        chain.end = pick(*ends)
    sides = [[weaver.node(pair[number]) for pair in pairs] for number in (0, 1)]
    operands = list(outside(traced[0], sides[0]) | outside(traced[1], sides[1]))
    inner = set(traced[0]) | set(traced[1])
    operands = [node for node in operands if node not in inner]
    graphs = [weaver.cut(nodes, operands, outputs) for nodes, outputs in zip(traced, sides)]
    predicate = weaver.node(choice.pred)
    weaver.erase(traced[1])
    weaver.erase(traced[0])
    if pairs or any(first_in_turn(graph.graph.nodes) is not None for graph in graphs):
        piece = branch_piece(graphs[0], graphs[1], tuple(like(made) for _, _, made in pairs), choice.site.line)
        weaver.emit(piece, [predicate, *operands], [made for _, _, made in pairs])
    for original, new in changed:
        weaver.preserve(original, mark)
        write_back(original, new, quietly(original, *arms))
    return merged


# Loops.


@dataclass(frozen=True, slots=True)
class Traced:
    """A traced loop: its graphs, where the carried tensors stand among the leaves, the nodes that it takes besides,
    what it carries.

    Attributes:
        changed: places of the tensors that a round changes in place; inside, last, after: leaves at the head, at the
            end of a round, and at the end with what was changed in place as its copy; mark: the last node before the
            traced ones.
    """

    test: Any
    body: Any
    places: list[int]
    operands: list[torch.fx.Node]
    results: tuple[Like, ...]
    changed: set[int]
    arm: Arm
    inside: list[Any]
    last: list[Any]
    after: list[Any]
    mark: torch.fx.Node


class Loop:
    """A `while` on a tensor: what goes round in it, found by tracing its body until the carried tensors no longer
    change their kind.
    """

    def __init__(
        self,
        test: Callable,
        body: Callable,
        site: Any,
        cells: dict[str, Any],
        content: Callable,
        put: Callable,
        weaver: Weaver,
    ) -> None:
        self.test, self.body, self.site, self.cells = test, body, site, cells
        self.content, self.put = content, put
        self.weaver = weaver
        kept = [name for name in cells if name in site.live or name == VALUE or is_flag(name)]
        self.names = [name for name in kept if content(cells[name]) is not MISSING or name == VALUE]
        self.local = [name for name in cells if name not in self.names]
        self.chain = Chain()
        self.effects = False

    def values(self) -> list[Any]:
        return [self.content(self.cells[name]) for name in self.names]

    def set(self, values: Sequence[Any]) -> None:
        for name in self.local:  # what one round leaves behind the next one does not see
            self.put(self.cells[name], MISSING)
        for name, value in zip(self.names, values):
            self.put(self.cells[name], value)

    def round(self, heads: Any) -> Arm:
        """Trace one round; a carried tensor that it changes in place is copied first."""
        mask = self.masked(self.tested())
        _, arm = run_arm(self.body, mask, taken=True, guard=mask is not None)
        carried = {id(value) for value in tensors_of(heads)}
        if mask is not None and arm.effect:
            reason = (
                f"{arm.effect}, and it would run for the rows of a batch that have left the loop; do it behind the loop"
            )
            raise Unsupported("`while` on a tensor under torch.func", reason, self.site.line)
        if any(id(original) not in carried for original, _ in arm.changed):
            reason = f"its body changes a tensor in place that is no variable of the loop; {LOOP_WAY_OUT}"
            raise Unsupported("`while` on a tensor", reason, self.site.line)
        return arm

    def masked(self, tested: Tensor) -> Tensor | None:
        """What a round must hold for to count, where it is computed although its test may not hold."""
        return None

    def tested(self) -> Tensor:
        """The test of a round, which only looks."""
        before = self.values()
        found = self.test().reshape(())
        for name, one, other in zip(self.names, before, self.values()):
            if one is not other:
                raise self.refuse(
                    name, "is assigned in its test (`:=`), which runs once more than the body; assign it in the body"
                )
        return found

    def refuse(self, name: str, reason: str) -> Unsupported:
        return Unsupported("`while` on a tensor", f"`{name}` {reason}; {LOOP_WAY_OUT}", self.site.line)

    def settle(self) -> tuple[list[Any], list[Any]]:
        """Return (structures, leaves) of the carried variables, with numbers that change in the loop made tensors."""
        for _ in range(ROUNDS):
            mark, before = self.weaver.mark(), self.values()
            self.round(before)
            self.effects |= self.chain.back()
            after = self.values()
            self.numbers = {id(value) for value in tensors_of(after) if is_scalar(value)}
            self.weaver.erase(self.weaver.since(mark))
            settled = [self.promote(name, one, other) for name, one, other in zip(self.names, before, after)]
            self.set(settled)
            if all(one is other for one, other in zip(settled, before)):
                break
        else:
            raise self.refuse(self.names[0], "changes its kind from round to round")
        structures: list[Any] = []
        leaves: list[Any] = []
        for value in settled:
            structures.append(pytree.flatten(value, leaves))
        if self.effects:
            self.chain.begin()
            leaves.append(self.chain.start)
        return structures, leaves

    def promote(self, name: str, before: Any, after: Any) -> Any:
        """The value to start with, so that a round leaves its kind as it is."""
        ones: list[Any] = []
        others: list[Any] = []
        if (
            before is MISSING and name == VALUE and after is not MISSING
        ):  # the result of a `return`, which counts when its flag is set
            structure = pytree.flatten(after, others)
            return pytree.unflatten(structure, iter([zeros(x) if isinstance(x, Tensor) else x for x in others]))
        if before is MISSING and after is MISSING:
            return MISSING
        if after is MISSING or pytree.flatten(before, ones) != (structure := pytree.flatten(after, others)):
            raise self.refuse(name, f"is {shown(before)} before and {shown(after)} after a round")
        made = [self.promote_leaf(name, one, other) for one, other in zip(ones, others)]
        same = all(one is other for one, other in zip(made, ones))
        return before if same else pytree.unflatten(structure, iter(made))

    def promote_leaf(self, name: str, before: Any, after: Any) -> Any:
        if isinstance(before, Tensor) and isinstance(after, Tensor):
            if (before.dtype, before.shape) != (after.dtype, after.shape):
                raise self.refuse(name, f"is {shown(before)} before and {shown(after)} after a round")
            return before
        if type(before) in NUMBERS and isinstance(after, Tensor):
            made = torch.full(after.shape, before, dtype=after.dtype, device=after.device)
            return mark_number(made) if id(after) in self.numbers else made
        if type(before) in NUMBERS and type(after) in NUMBERS:
            if type(before) is type(after) and before == after:
                return before
            dtype = {bool: torch.bool, int: torch.int64, float: torch.get_default_dtype()}[type(after)]
            return mark_number(torch.full((), before, dtype=dtype))
        if isinstance(before, Tensor) and type(after) in NUMBERS and before.dim() == 0:
            return before
        try:
            return merge(before, after, lambda one, other: one)
        except Mismatch as error:
            raise self.refuse(name, str(error)) from None

    def run(self) -> list[tuple[Tensor, Any]]:
        """Emit the loop and set the variables; return the tensors behind it that stand for others, each with those."""
        structures, leaves = self.settle()
        weaver, started = self.weaver, list(leaves)
        found = self.trace(structures, leaves)
        grad = any(leaves[n].requires_grad or getattr(found.after[n], "requires_grad", False) for n in found.places)
        outs = [untracked(kind, grad) for kind in found.results]
        starts = [weaver.node(leaves[number]) for number in found.places]
        weaver.erase(weaver.since(found.mark))
        weaver.emit(loop_piece(found.test, found.body, found.results, self.site.line), [*starts, *found.operands], outs)
        for number, out in zip(found.places, outs):
            if number in found.changed:
                weaver.preserve(started[number], found.mark)
                out = write_back(started[number], out, quietly(found.inside[number], found.arm))
            leaves[number] = out
        self.finish(structures, leaves, started)
        return self.stand_ins(
            found.arm, {id(found.inside[n]): started[n] for n in found.places}, started, leaves, found.last
        )

    def finish(self, structures: list[Any], leaves: list[Any], started: Sequence[Any]) -> None:
        """Set the variables to what they are behind the loop."""
        for one, other in zip(leaves, started):
            if isinstance(one, Tensor) and is_scalar(other):
                mark_number(one)
        rest = iter(leaves)
        self.set([pytree.unflatten(structure, rest) for structure in structures])
        self.chain.end = leaves[-1] if self.effects else self.chain.start

    def trace(self, structures: list[Any], leaves: list[Any]) -> Traced:
        """Trace the test and one round, as graphs over (carried..., operands...); their nodes are left behind
        `mark`.
        """
        weaver = self.weaver
        places = [number for number, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        for number in places:
            weaver.node(leaves[number])
        mark = weaver.mark()
        inside, started = list(leaves), list(leaves)
        for number in places:
            inside[number] = leaves[number].clone()
            if is_scalar(leaves[number]):
                mark_number(inside[number])
        heads = [weaver.node(inside[number]) for number in places]
        rest = iter(inside)
        self.set([pytree.unflatten(structure, rest) for structure in structures])
        first = weaver.mark()
        self.chain.end = inside[-1] if self.effects else self.chain.start
        tested = weaver.node(self.tested())
        tests = weaver.since(first)
        if any(getattr(getattr(node.target, "_schema", None), "is_mutable", False) for node in tests):
            raise Unsupported(
                "`while` on a tensor", f"its test changes a tensor in place; {LOOP_WAY_OUT}", self.site.line
            )
        if any(node.target in ORDERED for node in tests):
            raise Unsupported(
                "`while` on a tensor", "its test prints, checks or waits; do that in the body", self.site.line
            )
        if (node := first_in_turn(tests)) is not None:  # a graph computes it twice for the first round
            reason = f"`{node.target}` in its test {effect_of(node).value}; do that in the body"  # type: ignore[union-attr]
            raise Unsupported("`while` on a tensor", reason, self.site.line)
        second = weaver.mark()
        arm = self.round(inside)
        last = [leaf for value in self.values() for leaf in leaves_of(value)] + (
            [self.chain.end] if self.effects else []
        )
        copies = arm.copies()
        after = [copies.get(id(leaf), leaf) for leaf in last]
        self.refuse_aliases(arm, {id(inside[number]): number for number in places}, started, after)
        ends = [
            weaver.node(self.end(self.as_tensor(after[number], leaves[number]), inside[number])) for number in places
        ]
        bodies = weaver.since(second)
        own = {*heads, *tests}
        operands = [node for node in outside(tests, [tested]) | outside(bodies, ends) if node not in own]
        test = weaver.cut(tests, [*heads, *operands], [tested])
        body = weaver.cut([*tests, *bodies], [*heads, *operands], ends)
        changed = {number for number in places if id(inside[number]) in copies}
        return Traced(
            test,
            body,
            places,
            operands,
            tuple(like(leaves[n]) for n in places),
            changed,
            arm,
            inside,
            last,
            after,
            mark,
        )

    def end(self, after: Tensor, before: Tensor) -> Tensor:
        """What a round leaves of a carried tensor."""
        return after

    def stand_ins(
        self, arm: Arm, heads: dict[int, Tensor], started: list[Any], leaves: list[Any], last: list[Any]
    ) -> list:
        """What is behind the loop stands for what was before it (no round may run) and for what the last round left."""
        origins = origins_in(arm, self.weaver.shared)
        found = []
        count = len(leaves) - self.effects
        for start, leaf, value in zip(started[:count], leaves, last):
            if isinstance(leaf, Tensor) and leaf is not start:
                others = [heads.get(id(other), other) for one in tensors_of(value) for other in origins(one)]
                found.append((leaf, tuple(map(self.outer, (start, *others)))))
        return found

    def outer(self, value: Tensor) -> Tensor:
        """The tensor outside of the loop that one in it is."""
        return value

    def refuse_aliases(self, arm: Arm, places: dict[int, int], started: list[Any], after: list[Any]) -> None:
        """Raise where a carried tensor that a round changes in place is also met under another name."""
        for original, copy in arm.changed:
            number = places[id(original)]
            others = [*arm.entered, *(value for place, value in enumerate(started) if place != number)]
            known = relatives(self.outer(started[number]), self.weaver.shared)
            before = [value for value in others if isinstance(value, Tensor) and memory_of(self.outer(value)) in known]
            later = [value for value in after if isinstance(value, Tensor) and memory_of(value) == memory_of(copy)]
            if before or len(later) != 1 or after[number] is not copy:
                reason = f"its body changes a tensor in place that has several names; {LOOP_WAY_OUT}"
                raise Unsupported("`while` on a tensor", reason, self.site.line)

    def as_tensor(self, value: Any, start: Tensor) -> Tensor:
        return (
            value
            if isinstance(value, Tensor)
            else torch.full(start.shape, value, dtype=start.dtype, device=start.device)
        )
