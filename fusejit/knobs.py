"""The knobs: one table of environment variables, their defaults and their meaning.

In: the name of a knob. Out: its value now; an argument given to the API always beats the variable. A value that is none
of a knob's choices raises `ValueError` with the list of them, when fusejit is imported; a variable that no knob reads
warns then.

    >>> read("backend")
    'auto'
"""

from __future__ import annotations

import difflib
import os
import warnings
from dataclasses import dataclass
from typing import Any

PREFIX = "FUSEJIT_"
TRUE, FALSE = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")
STAGES = ("capture", "joint", "forward", "backward", "simplified", "clusters", "fused", "source")


@dataclass(frozen=True, slots=True)
class Knob:
    name: str
    variable: str
    default: Any
    meaning: str
    choices: tuple[str, ...] = ()
    several: bool = False

    def value(self, text: str) -> Any:
        """Return the value that a variable's text stands for.

        Raises:
            ValueError: it stands for none; the message lists the choices.
        """
        if isinstance(self.default, bool):
            word = text.strip().lower()
            if word not in (*TRUE, *FALSE):
                raise self.error(text, f"choose one of {', '.join((*TRUE, *FALSE[1:]))}")
            return word in TRUE
        if isinstance(self.default, int):
            if not text.strip().isdecimal():
                raise self.error(text, f"give a whole number ({self.meaning})")
            return int(text)
        words = [word.strip() for word in text.split(",") if word.strip()] if self.several else [text.strip()]
        if self.choices:
            for word in words:  # a stage of one half, or of a region's, is named with it: "backward.fused"
                if word.rsplit(".", 1)[-1] not in (*self.choices, "") or "." in word and not self.several:
                    raise self.error(text, f"choose {'of' if self.several else 'one of'} {', '.join(self.choices)}")
        return ",".join(words) if self.choices else text

    def error(self, text: str, way_out: str) -> ValueError:
        return ValueError(f"{self.variable}={text!r}: {way_out}")


KNOBS = {
    knob.name: knob
    for knob in (
        Knob(
            "backend",
            "FUSEJIT_BACKEND",
            "auto",
            "what `backend='auto'` means",
            ("auto", "triton", "interpret", "eager"),
        ),
        Knob("disable", "FUSEJIT_DISABLE", False, "1 runs every jitted function as plain eager Python"),
        Knob("strict", "FUSEJIT_STRICT", False, "1 raises where a fallback to eager would be recorded"),
        Knob("debug", "FUSEJIT_DEBUG", False, "1 verifies every pass and checks every launch"),
        Knob("dump", "FUSEJIT_DUMP", "", "comma-separated stages to print", STAGES, several=True),
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
        Knob("commit", "FUSEJIT_COMMIT", "", "the commit that results name, of a tree without git"),
        Knob("workers", "FUSEJIT_WORKERS", 0, "processes that compile kernels; 0 means one per core, at most 2"),
    )
}


def read(name: str) -> Any:
    """Return the knob's value: its variable's, converted to the type of its default, or the default."""
    knob = KNOBS[name]
    text = os.environ.get(knob.variable)
    return knob.default if text is None else knob.value(text)


def check_values() -> None:
    """Read every knob once, so that a misspelt value is an error now and not where it first matters.

    Raises:
        ValueError: a variable's value is none of its knob's choices.
    """
    for knob in KNOBS:
        read(knob)


def check_environment() -> None:
    """Read every knob once, and warn of variables that look like one and are none.

    Raises:
        ValueError: a variable's value is none of its knob's choices.
    """
    known = [knob.variable for knob in KNOBS.values()]
    check_values()
    for variable in sorted(v for v in os.environ if v.startswith(PREFIX) and v not in known):
        near = difflib.get_close_matches(variable, known, 1)
        meant = f"did you mean {near[0]}?" if near else f"the knobs are {', '.join(known)}"
        warnings.warn(f"{variable} is no knob of fusejit: {meant}", stacklevel=3)
