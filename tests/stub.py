"""A stand-in for the back end: runs each functional graph through torch, so that the front can be tested by itself.

>>> with installed(monkeypatch): jit(f, backend="interpret")(x)
"""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Options:
    backend: str = "triton"
    jit_level: str = "O2"
    numerics: str = "fast"
    target: str | None = None


class Program:
    def __init__(self, graph: torch.fx.GraphModule, inputs: Any) -> None:
        self.graph, self.inputs = graph, list(inputs)
        self.runs = 0

    def __call__(self, args: list) -> tuple:
        assert isinstance(args, list)
        for value, fake in zip(args, self.inputs, strict=True):
            assert value.shape == fake.shape and value.dtype == fake.dtype and value.stride() == fake.stride(), (
                value.stride(),
                fake.stride(),
            )
        self.runs += 1
        inputs = tuple(args)
        args.clear()
        with torch.no_grad():
            return tuple(self.graph.forward(*inputs))


def install(monkeypatch: Any) -> list[Program]:
    """Replace fusejit's compile and decompose modules; returns the list of programs made from now on."""
    from torch._decomp import core_aten_decompositions

    import fusejit
    import fusejit.codegen.decompose as decompose

    made: list[Program] = []

    def compile_graph(graph: Any, inputs: Any, options: Any, *, record: Any = None) -> Program:
        made.append(Program(graph, inputs))
        return made[-1]

    module = types.ModuleType("fusejit.compile")
    module.Options, module.compile_graph, module.dump = Options, compile_graph, lambda stage, value: None
    monkeypatch.setitem(sys.modules, "fusejit.compile", module)
    monkeypatch.setattr(fusejit, "compile", module, raising=False)
    monkeypatch.setattr(decompose, "table", core_aten_decompositions)
    monkeypatch.setattr("fusejit.specialise.prepare_interpreter", lambda backend: None)
    return made
