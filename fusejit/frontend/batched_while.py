"""Batched while: a `while` on a tensor under torch.func: each row goes round until its own test fails, and all go on
until no row is left.

In: the test and the body of a loop while transforms are open. Out: the variables behind it. In a captured graph it is
one `Rounds` (subgraph_op.py), which each transform turns into another piece; outside of a capture Python loops.

    torch.vmap(f)(rows)        f: `while x.sum() < 9: x = x * 2`
    # round: x = where(x.sum() < 9, x * 2, x), while the test holds for any row

Test and body are traced for one row, with all transforms put aside: tensors of a transform that enter are stood for by
plain ones of their shape. A row whose test does not hold is computed too, as an arm of an `if` that is not taken is:
gradients do not leak out of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .. import torch_private as private
from ..capture import pytree
from ..capture.scalar_tensors import mark_number, node_of
from ..errors import Unsupported
from .branch_nodes import Loop, Weaver, is_scalar, untracked
from .phi import Where, merge
from .predicate import aside, running
from .subgraph_op import Like, Rounds, Transformed

Tensor = torch.Tensor
FUNCTORCH = private.functorch_c


def masks() -> list[Tensor]:
    """The conditions of the arms that this thread is in: a loop in an arm goes round only where the arm is taken."""
    return [arm.holds() for arm in running() if arm.mask is not None]


def any_row(value: Tensor) -> bool:
    """Whether a condition holds for any row of any open transform."""
    while FUNCTORCH.is_functorch_wrapped_tensor(value):
        value = FUNCTORCH.get_unwrapped(value)
    return bool(value.any())


@contextlib.contextmanager
def one_row() -> Iterator[None]:
    """Trace what one row does: outside all transforms, and outside the arms that were entered under them."""
    from ..torch_private import temporarily_clear_interpreter_stack

    with aside(), temporarily_clear_interpreter_stack():
        yield


class Standing(TorchFunctionMode):
    """Lets plain tensors stand for those of transforms, and for those that the graph has not met yet.

    Attributes:
        actual: the tensor outside that a node of the graph is, or stands for.
    """

    def __init__(self, weaver: Weaver) -> None:
        super().__init__()
        self.weaver = weaver
        self.twins: dict[int, Tensor] = {}
        self.actual: dict[torch.fx.Node, Tensor] = {}
        self.made: list[torch.fx.Node] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*pytree.map_tensors(self.twin, args), **pytree.map_tensors(self.twin, kwargs or {}))

    def twin(self, value: Tensor) -> Tensor:
        if hasattr(value, "fake_mode") and not FUNCTORCH.is_functorch_wrapped_tensor(value):
            node = node_of(value)
            if node is not None:
                self.actual.setdefault(node, value)
            return value
        found = self.twins.get(id(value))
        if found is None:
            found = self.twins[id(value)] = self.stand_in(value)
        return found

    def stand_in(self, value: Tensor) -> Tensor:
        from torch.fx.experimental.proxy_tensor import track_tensor_tree

        with private.DisableTorchFunction():
            made = untracked(Like(tuple(value.shape), value.stride(), value.dtype, value.device), True)
            tracer = self.weaver.tracer
            node = tracer.create_node("placeholder", f"stand_in_{len(self.made)}", (), {})
            track_tensor_tree(made, torch.fx.Proxy(node, tracer), constant=None, tracer=tracer)
        self.made.append(node)
        self.actual[node] = value
        if is_scalar(value):
            mark_number(made)
        return made


class RowLoop(Loop):
    """A loop whose rounds change nothing where its test does not hold."""

    def __init__(self, *given: Any, around: Sequence[Tensor], standing: Standing) -> None:
        super().__init__(*given)
        self.around, self.standing = around, standing
        self.mask: Any = None

    def tested(self) -> Tensor:
        found = super().tested()
        found = found if found.dtype is torch.bool else found != 0
        for mask in self.around:
            found = torch.logical_and(found, mask)
        return found

    def masked(self, tested: Tensor) -> Tensor:
        self.mask = tested
        return tested

    def end(self, after: Tensor, before: Tensor) -> Tensor:
        return merge(after, before, Where(self.mask))

    def outer(self, value: Tensor) -> Tensor:
        node = (
            None if FUNCTORCH.is_functorch_wrapped_tensor(value) or not hasattr(value, "fake_mode") else node_of(value)
        )
        return self.standing.actual.get(node, value)  # type: ignore[arg-type]

    def run(self) -> list[tuple[Tensor, Any]]:
        """Trace the loop for one row, call it, and set the variables; return as `Loop.run` does."""
        outside = self.values()
        with one_row(), self.standing:
            self.set([self.stood(value) for value in outside])
            structures, leaves = self.settle()
            if self.effects:
                reason = "the rows of a batch leave the loop one by one, so there is no order; do it behind the loop"
                raise Unsupported(
                    "a print, a check or `depend` in a `while` on a tensor under torch.func", reason, self.site.line
                )
            found = self.trace(structures, leaves)
            starts = [self.weaver.node(leaves[number]) for number in found.places]
            shared = self.stand_ins(
                found.arm, {id(found.inside[n]): leaves[n] for n in found.places}, leaves, found.inside, found.last
            )
            self.weaver.erase(self.weaver.since(found.mark))
        actual = self.standing.actual
        inputs = [entering(actual.get(node, leaves[number])) for node, number in zip(starts, found.places)]
        inputs += [entering(actual[node]) for node in found.operands]
        given = dict(zip(found.places, inputs))
        piece = Rounds(found.test, found.body, found.results, self.site.line)
        taken = [given[n].clone() if n in found.changed else given[n] for n in found.places]
        results = Transformed.apply(piece, *taken, *inputs[len(taken) :])
        for node in self.standing.made:
            self.weaver.graph.erase_node(node)
        started = list(leaves)
        for number, result in zip(found.places, results):
            for arm in running():
                arm.keep(result, counted=True)
            leaves[number] = given[number].copy_(result) if number in found.changed else result
        self.finish(structures, leaves, started)
        made = dict(zip(map(id, found.inside), leaves))
        return [(made[id(head)], others) for head, others in shared if made[id(head)] is not others[0]]

    def stood(self, value: Any) -> Any:
        """A variable with plain tensors in the places of those of transforms."""
        leaves: list[Any] = []
        structure = pytree.flatten(value, leaves)
        return pytree.unflatten(
            structure, iter([self.standing.twin(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves])
        )


def entering(value: Tensor) -> Tensor:
    """A tensor as the arms around see it: guarded, and changed where they changed it."""
    return value.view_as(value) if running() else value
