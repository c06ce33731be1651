"""Chunk op: the body of a chunked product as one op, whose Program is compiled once and called for each part of the
rows.

In: a graph of the body (an in-place sum of earlier parts at its end). Out: the key under which `fusejit.rows` finds it.

    %rows = call_function[target=fusejit.rows](args = ([%slice, %weight, %target_slice], '3f0c', 0))
    %rows_1 = call_function[target=fusejit.rows](args = ([%slice_1, %weight, %target_slice_1, %getitem_2], '99ab', 1))

The op is opaque to fusion: kernels of two parts never become one, so what is as wide as the product lives as long as
one call. What adds up over the parts is given from call to call and changed in place; nobody else holds it.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule

from ...codegen.ops.builder import line_of
from ...codegen.ops.decompositions import short
from ...fork_locks import renewed

Tensor = torch.Tensor
LIBRARY = torch.library.Library("fusejit", "FRAGMENT")
LIBRARY.define(
    "rows(Tensor[] inputs, str key, int call) -> Tensor[]", tags=(torch.Tag.nondeterministic_seeded,)
)  # never merged
ROWS = torch.ops.fusejit.rows.default
CALLS = itertools.count()
LOCK = renewed(threading.Lock())


@dataclass(slots=True)
class Body:
    """The graph of one part, the fake tensors of its inputs and results, and what compiles it."""

    module: GraphModule
    inputs: list[Any]
    results: list[Any]
    compiler: Callable[[GraphModule, Sequence[Any], str], Any]
    program: Any = field(default=None)


BODIES: dict[str, Body] = {}
"""By what they compute and for which tensors: as many as a process has different heads."""


def keep(module: GraphModule, inputs: list[Any], compiler: Callable, flavour: str) -> str:
    """Keep a body; returns its key, the same for equal ones."""
    results = [node.meta["val"] for node in module.graph.output_node().args[0]]  # type: ignore[union-attr]
    kinds = [(tuple(v.shape), tuple(v.stride()), v.dtype, str(v.device)) for v in inputs]
    lines = [node.meta.get("stack_trace") for node in module.graph.nodes]
    key = hashlib.sha256(repr((module.code, kinds, flavour, lines)).encode()).hexdigest()[:16]
    with LOCK:
        BODIES.setdefault(key, Body(module, inputs, results, compiler))
    return key


def fake(inputs: list[Tensor], key: str, call: int) -> list[Tensor]:
    return [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device) for v in BODIES[key].results]


def run(inputs: list[Tensor], key: str, call: int) -> list[Tensor]:
    """Compute one part op by op.

    Raises:
        IndexError: an index lies outside, as the op that was written says it; named by the user's lines.
    """
    module = BODIES[key].module
    try:
        with torch.no_grad():
            return list(type(module).forward(module, *inputs))
    except RuntimeError as error:
        if "out of bounds" not in str(error):
            raise
        found = IndexError(str(error))
        lines = [line_of(node) for node in module.graph.nodes if short(node.target).startswith(("gather", "scatter"))]
        found.add_note("\n".join(["in a part of", *(f"  {line}" for line in dict.fromkeys(lines))]))
        raise found from error


def program(args: Sequence[Any], strides: list[tuple[int, ...]]) -> tuple[str, Any]:
    """The Program of a call, and its name."""
    body = BODIES[args[1]]
    with LOCK:
        if body.program is None:
            body.program = body.compiler(body.module, body.inputs, "part")
    return "part", body.program


torch.library.register_fake("fusejit::rows", fake, lib=LIBRARY)
LIBRARY.impl("rows", run, "CompositeExplicitAutograd")
