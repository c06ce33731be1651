"""The options of one jitted function, and their choices.

In: what a user gave to `fusejit.jit`. Out: `Settings`, or one error that lists the choices.

    >>> check("jit_level", "O9", LEVELS)
    ValueError: jit_level='O9': choose one of 'O0', 'O1', 'O2', 'O3'
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from . import knobs

BACKENDS = ("auto", "triton", "interpret", "eager")
LEVELS = ("O0", "O1", "O2", "O3")
MODES = ("ast", "trace", "bytecode")
NUMERICS = ("fast", "eager")


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of one jitted function (see `fusejit.jit` and `fusejit.trace`).

    `target`: a GPU architecture to compile for without one. `constants`: closed-over tensors keep the values that they
    have at capture. `apart`: forward and backward are two programs on every backend, also on "eager". `regions`: equal
    blocks are captured once. `dynamic`: see `fusejit.jit`. `chunk_bytes`: see `fusejit.jit`. `cuda_graph`: Programs are
    recorded and replayed (see runtime/cudagraph.py); None: at O3.
    """

    capture_mode: str = "ast"
    jit_level: str = "O2"
    fullgraph: bool = False
    backend: str = "auto"
    numerics: str = "fast"
    name: str = ""
    target: str | None = None
    fast_math: bool = False
    constants: bool = False
    apart: bool = False
    regions: bool = True
    dynamic: bool | None = False
    cuda_graph: bool | None = None
    chunk_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.chunk_bytes is not None and (type(self.chunk_bytes) is not int or self.chunk_bytes < 0):
            raise ValueError(f"chunk_bytes={self.chunk_bytes!r}: give a number of bytes, 0 for never, or None")

    @property
    def most_at_once(self) -> int:
        """The bytes from which a product is computed in parts, and that a part has at most; 0: never."""
        return int(knobs.read("chunk_bytes")) if self.chunk_bytes is None else self.chunk_bytes

    @property
    def records(self) -> bool:
        """Whether Programs are recorded as CUDA graphs: asked for, or by default at O3; never for a GPU that is not
        here.
        """
        return self.target is None and (self.jit_level == "O3" if self.cuda_graph is None else self.cuda_graph)


def check(name: str, value: Any, choices: tuple) -> None:
    """Refuse an option that is none of its choices, by listing them; True is not 1 here."""
    if not any(value is choice or type(value) is type(choice) and value == choice for choice in choices):
        raise ValueError(f"{name}={value!r}: choose one of {', '.join(map(repr, choices))}")
