"""Subgraph op: parts of a captured graph that run as Python decides when it runs: one side of a branch, the rounds of a
loop.

In: graphs that were cut out of the one being captured. Out: a node of it, whose target is a `Piece`. Run eagerly it is
Python's own `if` or `while` over those graphs, with torch's own gradients of any order. Where the graph is traced
again, to be compiled, it becomes one op, `fusejit::piece`, whose backward runs the piece once more with gradients on:
an extern call of the Program.

    %branch = call_function[target=branch](args = (%gt, %x, %w), kwargs = {})      captured, and run by backend "eager"
    b3, = torch.ops.fusejit.piece.default([b0, x, w], 'branch 1')                   in a Program
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .. import torch_private as private
from ..capture import tracer
from ..capture.effect_ops import OPS, repeating
from ..codegen.ir.effects import Effect, alive_before, in_turn
from ..errors import Unsupported

Tensor = torch.Tensor
TABLE: weakref.WeakValueDictionary[str, Piece] = weakref.WeakValueDictionary()
"""The pieces by key; a graph that runs one holds it."""
NUMBERS = itertools.count(1)
KEYS = private.DispatchKey


@dataclass(frozen=True, slots=True)
class Like:
    """What a result of a piece is: shape, strides, dtype, device."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def empty(self) -> Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)

    def laid(self, shape: Sequence[int]) -> Sequence[int]:
        """The strides for a shape of real sizes: its own, or where sizes vary those of memory in the same order without
        holes.
        """
        if all(type(n) is int for n in (*self.shape, *self.strides)):
            return self.strides
        known = [n if type(n) is int else n.node.hint for n in self.strides]  # type: ignore[attr-defined]
        order = sorted(range(len(shape)), key=lambda axis: (-known[axis], axis))
        return torch.empty_permuted(shape, order, device="meta").stride()

    def zeros(self) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)

    def plain(self) -> Like:
        """The same in contiguous memory."""
        return replace(self, strides=torch.empty(self.shape, device="meta").stride())

    def batch(self, size: int) -> Like:
        return replace(
            self, shape=(size, *self.shape), strides=torch.empty((size, *self.shape), device="meta").stride()
        )


def like(value: Tensor) -> Like:
    """What a tensor is in memory of its own: an expanded one, or one with holes, is laid out as torch lays out what it
    computes from it.
    """
    from ..torch_private import compute_elementwise_output_strides, is_non_overlapping_and_dense_or_false

    with private.DisableTorchFunction():
        kept = is_non_overlapping_and_dense_or_false(value)
        strides = value.stride() if kept else compute_elementwise_output_strides(value)
    return Like(tuple(value.shape), tuple(strides), value.dtype, value.device)


class Piece:
    """A function of tensors, `run`, that a graph calls; `results` say what it returns.

    `graphs`: what it runs. `effect`: what these do besides; `once`: the op in them that a gradient, which runs them
    again, must not repeat.
    """

    def __init__(
        self,
        kind: str,
        run: Callable[..., Sequence[Tensor]],
        results: tuple[Like, ...],
        line: str,
        graphs: Sequence[Any] = (),
    ) -> None:
        self.kind, self.run, self.results, self.line = kind, run, results, line
        nodes = [node for graph in graphs for node in graph.graph.nodes if in_turn(node)]
        self.effect = Effect.ORDERED if nodes else None
        self.once = next(
            (getattr(node.target, "once", str(node.target)) for node in nodes if node.target not in OPS), ""
        )
        self.key = f"{kind} {next(NUMBERS)}"
        self.__name__ = self.__qualname__ = self.key.replace(" ", "_")
        self.__module__ = "fusejit.pieces"  # what fx prints before the name; there is no such module to look it up in
        TABLE[self.key] = self

    def __call__(self, *inputs: Tensor) -> Sequence[Tensor]:
        if private.maybe_current_level() is not None:
            return Transformed.apply(self, *inputs)
        if private.len_torch_dispatch_stack():  # traced once more
            moving = any(value.requires_grad for value in inputs) and any(
                like.dtype.is_floating_point for like in self.results
            )
            if self.once and moving and torch.is_grad_enabled():
                reason = f"`{self.once}` in it would run again for the gradient; put it outside"
                raise Unsupported(f"the gradient of a {self.kind}", reason, self.line)
            return (torch.ops.fusejit.piece if self.effect is None else torch.ops.fusejit.piece_in_turn)(
                list(inputs), self.key
            )
        return self.run(*inputs)

    def __repr__(self) -> str:
        return self.__name__

    @functools.cached_property
    def batched(self) -> Callable[[int], Piece]:
        """The piece over a batch of each of its inputs, as a function of the batch's size."""
        return functools.lru_cache(maxsize=16)(lambda size: self.batch(size))

    def batch(self, size: int) -> Piece:
        raise Unsupported(
            f"a {self.kind} of a graph under torch.func", "write it inside the mapped function", self.line
        )

    @functools.cached_property
    def gradient(self) -> Callable[[tuple[Like, ...], tuple[bool, ...]], Piece]:
        """The gradient by the wanted inputs, a piece of (tangents..., inputs...)."""
        return functools.lru_cache(maxsize=16)(lambda inputs, wanted: Gradient(self, inputs, wanted))


class Rounds(Piece):
    """A `while` under torch.func: each round leaves as it is what its test does not hold for, so that a batch runs
    until no row is left.

    Args:
        test, body: graphs over (carried..., operands...), of one row; depth: how many batches they are mapped over.
    """

    def __init__(self, test: Callable, body: Callable, results: tuple[Like, ...], line: str, depth: int = 0) -> None:
        self.test, self.body, self.depth = test, body, depth
        for _ in range(depth):
            test, body = torch.vmap(test), torch.vmap(body)
        count = len(results)

        def run(*inputs: Tensor) -> Sequence[Tensor]:
            carried, operands = inputs[:count], inputs[count:]
            while test(*carried, *operands)[0].any():
                carried = tuple(body(*carried, *operands))
            return carried

        super().__init__("loop", run, results, line)

    def batch(self, size: int) -> Piece:
        return Rounds(self.test, self.body, tuple(like.batch(size) for like in self.results), self.line, self.depth + 1)


class Gradient(Piece):
    """The gradient of a piece, of any order: it is a piece itself."""

    def __init__(self, piece: Piece, inputs: tuple[Like, ...], wanted: tuple[bool, ...]) -> None:
        self.piece, self.inputs, self.wanted = piece, inputs, wanted
        count = len(piece.results)

        def run(*values: Tensor) -> Sequence[Tensor]:
            again = torch.is_grad_enabled() and any(value.requires_grad for value in values)
            return differentiated(piece, values[:count], values[count:], wanted, again)

        results = tuple(like.plain() for like, want in zip(inputs, wanted, strict=True) if want)
        super().__init__(f"gradient of {piece.kind}", run, results, piece.line)

    def batch(self, size: int) -> Piece:
        return self.piece.batched(size).gradient(tuple(like.batch(size) for like in self.inputs), self.wanted)


def branch_piece(then: Callable, other: Callable, results: tuple[Like, ...], line: str) -> Piece:
    """Of (predicate, operands...): one of two graphs over the operands."""
    return Piece(
        "branch", lambda pred, *operands: then(*operands) if pred else other(*operands), results, line, (then, other)
    )


def loop_piece(test: Callable, body: Callable, results: tuple[Like, ...], line: str) -> Piece:
    """Of (carried..., operands...): the carried tensors after the last round."""
    count = len(results)

    def run(*inputs: Tensor) -> Sequence[Tensor]:
        carried, operands = inputs[:count], inputs[count:]
        while test(*carried, *operands)[0]:
            carried = tuple(body(*carried, *operands))
        return carried

    return Piece("loop", run, results, line, (body,))


# The op.

LIBRARY = torch.library.Library("fusejit", "FRAGMENT")
LIBRARY.define("piece(Tensor[] inputs, str key) -> Tensor[]")
LIBRARY.define("piece_in_turn(Tensor[] inputs, str key) -> Tensor[]")  # has an effect
LIBRARY.define("piece_backward(Tensor[] tangents, Tensor[] inputs, bool[] wanted, str key) -> Tensor[]")


def settled(values: Sequence[Tensor], likes: Sequence[Like], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Results in memory of their own, with the strides that the graph expects."""
    taken = {value.untyped_storage()._cdata for value in inputs}
    made = []
    for value, like in zip(values, likes, strict=True):
        memory, strides = value.untyped_storage()._cdata, like.laid(value.shape)
        if memory in taken or value.stride() != strides:
            value = torch.empty_strided(value.shape, strides, dtype=like.dtype, device=like.device).copy_(value)
        taken.add(value.untyped_storage()._cdata)
        made.append(value.detach())
    return made


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Let autograd see ops although an op with a gradient of its own is running: a gradient's piece asks autograd for
    it.
    """
    with contextlib.ExitStack() as stack:
        for name in ("AutogradFunctionality", "AutogradOther"):
            stack.enter_context(excluded(getattr(KEYS, name), False))
        yield


@contextlib.contextmanager
def excluded(key: Any, on: bool) -> Iterator[None]:
    """Keep this thread's ops out of a dispatch key, or let them in."""
    before = private.dispatch_tls_is_dispatch_key_excluded(key)
    private.dispatch_tls_set_dispatch_key_excluded(key, on)
    try:
        yield
    finally:
        private.dispatch_tls_set_dispatch_key_excluded(key, before)


def run_piece(inputs: list[Tensor], key: str) -> list[Tensor]:
    piece = TABLE[key]
    with torch.no_grad(), recording():
        return settled(piece.run(*inputs), piece.results, inputs)


def run_backward(tangents: list[Tensor], inputs: list[Tensor], wanted: list[bool], key: str) -> list[Tensor]:
    return list(differentiated(TABLE[key], tangents, inputs, wanted, False))


def differentiated(
    piece: Piece, tangents: Sequence[Tensor], inputs: Sequence[Tensor], wanted: Sequence[bool], again: bool
) -> Sequence[Tensor]:
    """Gradients of the wanted inputs, zeros where the side that ran does not use one; `again`: to be differentiated
    themselves.
    """
    leaves = [
        value if again and value.requires_grad else value.detach().requires_grad_(want)
        for value, want in zip(inputs, wanted)
    ]
    with torch.enable_grad(), repeating():
        results = piece.run(*leaves)
    pairs = [(result, tangent) for result, tangent in zip(results, tangents, strict=True) if result.requires_grad]
    sources = [leaf for leaf, want in zip(leaves, wanted, strict=True) if want]
    found: Sequence[Tensor | None] = [None] * len(sources)
    if pairs:
        ends, given = zip(*pairs)
        found = torch.autograd.grad(ends, sources, given, allow_unused=True, create_graph=again)
    return own_memory(
        [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(sources, found)], tangents
    )


def own_memory(grads: Sequence[Tensor], tangents: Sequence[Tensor]) -> list[Tensor]:
    """Gradients in contiguous memory that is neither a tangent's nor another gradient's: of `a + b`, torch gives both
    the same tensor.
    """
    taken = {value.untyped_storage()._cdata for value in tangents}
    made = []
    for grad in grads:
        grad = grad.contiguous()
        if grad.untyped_storage()._cdata in taken:
            grad = grad.clone()
        taken.add(grad.untyped_storage()._cdata)
        made.append(grad)
    return made


def fake_piece(inputs: list[Tensor], key: str) -> list[Tensor]:
    return [like.empty() for like in TABLE[key].results]


def fake_backward(tangents: list[Tensor], inputs: list[Tensor], wanted: list[bool], key: str) -> list[Tensor]:
    return [
        torch.empty_like(value, memory_format=torch.contiguous_format)
        for value, want in zip(inputs, wanted, strict=True)
        if want
    ]


def keep_inputs(ctx: Any, inputs: Any, output: Any) -> None:
    tensors, key = inputs
    ctx.save_for_backward(*tensors)
    ctx.key = key


def differentiate(ctx: Any, tangents: list[Tensor | None]) -> Any:
    inputs, likes = list(ctx.saved_tensors), TABLE[ctx.key].results
    needed = ctx.needs_input_grad[0]
    wanted = list(needed) if isinstance(needed, (list, tuple)) else [bool(needed)] * len(inputs)
    wanted = [want and value.is_floating_point() for want, value in zip(wanted, inputs, strict=True)]
    pairs = zip(tangents, likes, strict=True)
    filled = [like.zeros() if tangent is None else tangent for tangent, like in pairs]
    found = iter(torch.ops.fusejit.piece_backward(filled, inputs, wanted, ctx.key))
    return [next(found) if want else None for want in wanted], None


for _name in ("piece", "piece_in_turn"):
    LIBRARY.impl(_name, run_piece, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fusejit::{_name}", fake_piece, lib=LIBRARY)
    torch.library.register_autograd(f"fusejit::{_name}", differentiate, setup_context=keep_inputs, lib=LIBRARY)
torch.fx.node.has_side_effect(torch.ops.fusejit.piece_in_turn.default)
LIBRARY.impl("piece_backward", run_backward, "CompositeExplicitAutograd")
torch.library.register_fake("fusejit::piece_backward", fake_backward, lib=LIBRARY)


# Under torch.func.


def tracing(on: bool) -> Any:
    """Let ops pass the tracer that sees them before all transforms, or not: a function of transforms is none of its
    ops.
    """
    return excluded(KEYS.PreDispatch, not on)


class Transformed(torch.autograd.Function):
    """A piece on tensors of torch.func's transforms: what each transform makes of it is a piece again; below all of
    them it is called.
    """

    @classmethod
    def apply(cls, piece: Piece, *inputs: Tensor) -> Any:
        if private.maybe_current_level() is None:
            with tracing(True):
                return tuple(WRITERS[0](piece, inputs) if tracer.active() else piece(*inputs))
        with tracing(False), private.DisableTorchFunction():
            return super().apply(piece, *inputs)

    @staticmethod
    def forward(piece: Piece, *inputs: Tensor) -> Any:
        raise AssertionError("below all transforms a piece is called")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.piece = inputs[0]
        ctx.set_materialize_grads(False)  # zeros that torch makes there are in no graph
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> Any:
        piece, inputs = ctx.piece, ctx.saved_tensors
        wanted = tuple(
            bool(need) and value.is_floating_point()
            for need, value in zip(ctx.needs_input_grad[1:], inputs, strict=True)
        )
        with tracing(True):
            filled = [
                like.zeros() if tangent is None else tangent
                for tangent, like in zip(tangents, piece.results, strict=True)
            ]
        found = iter(
            Transformed.apply(piece.gradient(tuple(map(like, inputs)), wanted), *filled, *inputs) if any(wanted) else ()
        )
        return None, *[next(found) if want else None for want in wanted]

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Any:
        """The gradient of the gradient by what goes into it, in which it is linear: all that is needed are gradients of
        pieces.
        """
        piece, inputs, given = ctx.piece, ctx.saved_tensors, tangents[1:]
        wanted = tuple(
            tangent is not None and value.is_floating_point() for tangent, value in zip(given, inputs, strict=True)
        )
        moving = tuple(like.dtype.is_floating_point for like in piece.results)
        if not any(wanted) or not any(moving):
            return tuple(None for _ in piece.results)
        with tracing(True):
            start = [like.zeros() for like in piece.results]
        backward = piece.gradient(tuple(map(like, inputs)), wanted)
        second = backward.gradient((*piece.results, *map(like, inputs)), (*moving, *[False] * len(inputs)))
        moved = [tangent for tangent, want in zip(given, wanted, strict=True) if want and tangent is not None]
        found = iter(Transformed.apply(second, *moved, *start, *inputs))
        return tuple(next(found) if moves else None for moves in moving)

    @staticmethod
    def vmap(info: Any, in_dims: Any, piece: Piece, *inputs: Tensor) -> Any:
        size = info.batch_size
        with tracing(True):
            rows = [
                value.expand(size, *value.shape) if dim is None else value.movedim(dim, 0)
                for value, dim in zip(inputs, in_dims[1:], strict=True)
            ]
        results = Transformed.apply(piece.batched(size), *rows)
        return results, (0,) * len(results)


WRITERS: list[Callable[[Piece, Sequence[Tensor]], Sequence[Tensor]]] = []
"""What writes a piece into the graph that is being captured; filled by branch_nodes.py."""


# Cutting graphs.


def nodes_after(graph: torch.fx.Graph, mark: torch.fx.Node) -> list[torch.fx.Node]:
    """The nodes that were traced after a mark, inputs aside: those that are met for the first time stay inputs of the
    whole.
    """
    found, node = [], mark.next
    while node.op != "root":
        if node.op != "placeholder":
            found.append(node)
        node = node.next
    return found


def erase(graph: torch.fx.Graph, nodes: Sequence[torch.fx.Node]) -> None:
    """Take nodes out that a branch or loop of its own repeats."""
    for node in reversed(nodes):
        graph.erase_node(node)


def outside(nodes: Sequence[torch.fx.Node], outputs: Sequence[torch.fx.Node]) -> dict[torch.fx.Node, None]:
    """The nodes that a cut part takes from outside, in order."""
    own = set(nodes)
    used = [source for node in nodes for source in node.all_input_nodes] + list(outputs)
    return dict.fromkeys(source for source in used if source not in own)


def cut(
    root: Any, nodes: Sequence[torch.fx.Node], inputs: Sequence[torch.fx.Node], outputs: Sequence[torch.fx.Node]
) -> Any:
    """Copy a part of a graph into a function of `inputs`; results are never the inputs themselves."""
    made = torch.fx.Graph()
    names = {node: made.placeholder(f"input_{number}") for number, node in enumerate(inputs)}
    given = set(names)
    constants = torch.nn.Module()
    for node in nodes:
        names[node] = made.node_copy(node, names.__getitem__)
        if node.op == "get_attr":
            setattr(constants, str(node.target), operator.attrgetter(str(node.target))(root))
    results = [
        made.call_function(torch.ops.aten.clone.default, (names[node],)) if node in given else names[node]
        for node in outputs
    ]
    made.output(tuple(results))
    made.eliminate_dead_code(alive_before)
    return torch.fx.GraphModule(constants, made)
