"""The knobs: one table of environment variables, their defaults and their meaning.

In: the name of a knob. Out: its value now; an argument given to the API always beats the variable.

    >>> read("backend")
    'auto'
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Knob:
    name: str
    variable: str
    default: Any
    meaning: str


KNOBS = {
    knob.name: knob
    for knob in (
        Knob("backend", "FUSEJIT_BACKEND", "auto", "what `backend='auto'` means: auto, triton, interpret or eager"),
        Knob("disable", "FUSEJIT_DISABLE", False, "1 runs every jitted function as plain eager Python"),
        Knob("strict", "FUSEJIT_STRICT", False, "1 raises where a fallback to eager would be recorded"),
        Knob("debug", "FUSEJIT_DEBUG", False, "1 verifies every pass and checks every launch"),
        Knob(
            "dump",
            "FUSEJIT_DUMP",
            "",
            "comma-separated stages to print: capture, joint, forward, backward, clusters, fused, source",
        ),
        Knob(
            "dump_dir",
            "FUSEJIT_DUMP_DIR",
            "",
            "a folder that receives each dumped stage as a file (all stages when FUSEJIT_DUMP is empty)",
        ),
        Knob(
            "specialisations",
            "FUSEJIT_SPECIALISATIONS",
            16,
            "programs that a function (or a method of one object) gets; then it runs eagerly",
        ),
        Knob(
            "chunk_bytes",
            "FUSEJIT_CHUNK_BYTES",
            2**30,
            "bytes of a matrix product from which, and in which, it is computed in parts where its rows are only "
            "reduced; 0 means never",
        ),
        Knob("workers", "FUSEJIT_WORKERS", 0, "processes that compile kernels; 0 means one per core, at most 2"),
    )
}


def read(name: str) -> Any:
    """Return the knob's value: its variable's, converted to the type of its default, or the default."""
    knob = KNOBS[name]
    text = os.environ.get(knob.variable)
    if text is None:
        return knob.default
    if isinstance(knob.default, bool):
        return text.strip().lower() not in ("", "0", "false", "no", "off")
    if isinstance(knob.default, int):
        try:
            return int(text)
        except ValueError:
            raise ValueError(f"{knob.variable}={text!r} is not a whole number ({knob.meaning})") from None
    return text
