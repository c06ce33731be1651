"""Messages: what the log "fusejit" hears of one jitted function, each thing once.

In: a new specialisation, or a text. Out: log records.

    >>> Messages("f").say(logging.WARNING, "argument k keeps changing, and each value recompiles")
    WARNING:fusejit:f: argument k keeps changing, and each value recompiles
"""

from __future__ import annotations

import logging

from ..specialise.executable import TINY
from ..specialise.specialisation import Specialisation

log = logging.getLogger("fusejit")
EXPECTED = ("torch's runtime wrappers", "graph break", TINY)
"""Fallbacks that are no news to a user who does not ask."""


class Messages:
    """What was said of one jitted function."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.said: set[str] = set()

    def tell(self, specialisation: Specialisation, bytecode: bool = False) -> None:
        """Log what a new specialisation does not do as compiled code; `bytecode`: that mode runs it instead."""
        instead = "read by its bytecode instead" if bytecode else "eager fallback"
        for fallback in specialisation.fallbacks:
            level = logging.INFO if fallback.op in EXPECTED else logging.WARNING
            self.say(level, f"{instead}: {fallback}")
        for effect in specialisation.effects:
            self.say(logging.WARNING, f"{effect}; compiled calls will not repeat that")

    def say(self, level: int, text: str) -> None:
        if text not in self.said:
            self.said.add(text)
            log.log(level, f"{self.name}: {text}")
