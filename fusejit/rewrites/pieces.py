"""Pieces: parts of a captured graph that run as Python decides when it runs: one side of a branch, the rounds of a loop.

In: graphs that were cut out of the one being captured. Out: a node of it, whose target is a `Piece`. Run eagerly it is Python's own
`if` or `while` over those graphs, with torch's own gradients of any order. Where the graph is traced again, to be compiled, it
becomes one op, `fusejit::piece`, whose backward runs the piece once more with gradients on: an extern call of the Program.

    %branch = call_function[target=branch](args = (%gt, %x, %w), kwargs = {})      captured, and run by backend "eager"
    b3, = torch.ops.fusejit.piece.default([b0, x, w], 'branch 1')                   in a Program
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..capture.lines import user_line
from ..capture.ordered import OPS as ORDERED
from ..errors import Unsupported

Tensor = torch.Tensor
TABLE: weakref.WeakValueDictionary[str, Piece] = weakref.WeakValueDictionary()
"""The pieces by key; a graph that runs one holds it."""
NUMBERS = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Like:
    """What a result of a piece is: shape, strides, dtype, device."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def empty(self) -> Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)


class Piece:
    """A function of tensors, `run`, that a graph calls; `results` say what it returns."""

    def __init__(self, kind: str, run: Callable[..., Sequence[Tensor]], results: tuple[Like, ...], line: str) -> None:
        self.kind, self.run, self.results, self.line = kind, run, results, line
        self.key = f"{kind} {next(NUMBERS)}"
        self.__name__ = self.__qualname__ = self.key.replace(" ", "_")
        self.__module__ = "fusejit.pieces"  # what fx prints before the name; there is no such module to look it up in
        TABLE[self.key] = self

    def __call__(self, *inputs: Tensor) -> Sequence[Tensor]:
        if torch._C._len_torch_dispatch_stack():  # traced once more
            return torch.ops.fusejit.piece(list(inputs), self.key)
        return self.run(*inputs)

    def __repr__(self) -> str:
        return self.__name__


def branch_piece(then: Callable, other: Callable, results: tuple[Like, ...], line: str) -> Piece:
    """Of (predicate, operands...): one of two graphs over the operands."""
    return Piece("branch", lambda pred, *operands: then(*operands) if pred else other(*operands), results, line)


def loop_piece(test: Callable, body: Callable, results: tuple[Like, ...], line: str) -> Piece:
    """Of (carried..., operands...): the carried tensors after the last round."""
    count = len(results)

    def run(*inputs: Tensor) -> Sequence[Tensor]:
        carried, operands = inputs[:count], inputs[count:]
        while test(*carried, *operands)[0]:
            carried = tuple(body(*carried, *operands))
        return carried

    return Piece("loop", run, results, line)


# The op.

LIBRARY = torch.library.Library("fusejit", "FRAGMENT")
LIBRARY.define("piece(Tensor[] inputs, str key) -> Tensor[]")
LIBRARY.define("piece_backward(Tensor[] tangents, Tensor[] inputs, bool[] wanted, str key) -> Tensor[]")


def settled(values: Sequence[Tensor], likes: Sequence[Like], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Results in memory of their own, with the strides that the graph expects."""
    taken = {value.untyped_storage()._cdata for value in inputs}
    made = []
    for value, like in zip(values, likes, strict=True):
        memory = value.untyped_storage()._cdata
        if memory in taken or value.stride() != like.strides:
            value = like.empty().copy_(value)
        taken.add(value.untyped_storage()._cdata)
        made.append(value.detach())
    return made


def run_piece(inputs: list[Tensor], key: str) -> list[Tensor]:
    piece = TABLE[key]
    with torch.no_grad():
        return settled(piece.run(*inputs), piece.results, inputs)


def run_backward(tangents: list[Tensor], inputs: list[Tensor], wanted: list[bool], key: str) -> list[Tensor]:
    """Gradients of the wanted inputs, zeros where the side that ran does not use one."""
    leaves = [value.detach().requires_grad_(want) for value, want in zip(inputs, wanted, strict=True)]
    with torch.enable_grad():
        results = TABLE[key].run(*leaves)
    pairs = [(result, tangent) for result, tangent in zip(results, tangents, strict=True) if result.requires_grad]
    sources = [leaf for leaf, want in zip(leaves, wanted, strict=True) if want]
    found: Sequence[Tensor | None] = [None] * len(sources)
    if pairs:
        found = torch.autograd.grad([result for result, _ in pairs], sources, [tangent for _, tangent in pairs], allow_unused=True)
    return own_memory([torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(sources, found)], tangents)


def own_memory(grads: Sequence[Tensor], tangents: Sequence[Tensor]) -> list[Tensor]:
    """Gradients in contiguous memory that is neither a tangent's nor another gradient's: of `a + b`, torch gives both the same tensor."""
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
    return [torch.empty_like(value, memory_format=torch.contiguous_format) for value, want in zip(inputs, wanted, strict=True) if want]


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
    filled = [torch.zeros(like.shape, dtype=like.dtype, device=like.device) if tangent is None else tangent for tangent, like in pairs]
    found = iter(torch.ops.fusejit.piece_backward(filled, inputs, wanted, ctx.key))
    return [next(found) if want else None for want in wanted], None


LIBRARY.impl("piece", run_piece, "CompositeExplicitAutograd")
LIBRARY.impl("piece_backward", run_backward, "CompositeExplicitAutograd")
torch.library.register_fake("fusejit::piece", fake_piece, lib=LIBRARY)
torch.library.register_fake("fusejit::piece_backward", fake_backward, lib=LIBRARY)
torch.library.register_autograd("fusejit::piece", differentiate, setup_context=keep_inputs, lib=LIBRARY)


# Cutting graphs.


def nodes_after(graph: torch.fx.Graph, mark: torch.fx.Node) -> list[torch.fx.Node]:
    """The nodes that were traced after a mark, inputs aside: those that are met for the first time stay inputs of the whole."""
    found, node = [], mark.next
    while node.op != "root":
        if node.op != "placeholder":
            found.append(node)
        node = node.next
    return found


def erase(graph: torch.fx.Graph, nodes: Sequence[torch.fx.Node]) -> None:
    """Take nodes out that a branch or loop of its own repeats; an op with an effect cannot live there."""
    for node in nodes:
        if node.target in ORDERED:
            reason = "the branch is a graph of its own, where its order would be lost; move it behind the branch"
            raise Unsupported(f"{node.target} in a branch or loop of the graph", reason, user_line(node))
    for node in reversed(nodes):
        graph.erase_node(node)


def outside(nodes: Sequence[torch.fx.Node], outputs: Sequence[torch.fx.Node]) -> dict[torch.fx.Node, None]:
    """The nodes that a cut part takes from outside, in order."""
    own = set(nodes)
    used = [source for node in nodes for source in node.all_input_nodes] + list(outputs)
    return dict.fromkeys(source for source in used if source not in own)


def cut(root: Any, nodes: Sequence[torch.fx.Node], inputs: Sequence[torch.fx.Node], outputs: Sequence[torch.fx.Node]) -> Any:
    """Copy a part of a graph into a function of `inputs`; results are never the inputs themselves."""
    made = torch.fx.Graph()
    names = {node: made.placeholder(f"input_{number}") for number, node in enumerate(inputs)}
    given = set(names)
    constants = torch.nn.Module()
    for node in nodes:
        names[node] = made.node_copy(node, names.__getitem__)
        if node.op == "get_attr":
            setattr(constants, str(node.target), operator.attrgetter(str(node.target))(root))
    results = [made.call_function(torch.ops.aten.clone.default, (names[node],)) if node in given else names[node] for node in outputs]
    made.output(tuple(results))
    made.eliminate_dead_code()
    return torch.fx.GraphModule(constants, made)
