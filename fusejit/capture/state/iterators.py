"""Iterators: iterators and random generators from outside a function, which give something else at each call.

In: a value that the function can reach. Out: a refusal of an iterator; of Python's and numpy's generators, whether a
capture drew.

    >>> streams = Streams()
    >>> random.random(); streams.restore()
    True
"""

from __future__ import annotations

import pickle
import random
import sys
from typing import Any

from ...errors import Unsupported
from ..source_lines import frame_line, user_frame

DRAWN = ("Python's or numpy's random numbers", "would be frozen into the graph; use torch's, or pass them as arguments")


def is_iterator(value: Any) -> bool:
    """Whether a value is an iterator of Python's own: of a container or generator function, or from itertools."""
    return type(value).__module__ in ("builtins", "itertools") and hasattr(type(value), "__next__")


class Streams:
    """The random generators that a capture meets, the global ones at once, each with its state from before."""

    def __init__(self) -> None:
        self.met: dict[int, tuple[Any, Any, bytes]] = {}
        self.note(random._inst)  # type: ignore[attr-defined]  # what random.random() and its kin are methods of
        if (numpy := sys.modules.get("numpy")) is not None:
            self.note(numpy.random.mtrand._rand)

    def note(self, value: Any) -> None:
        """Keep a generator's state.

        Raises:
            Unsupported: it is an iterator: what is taken from it while capturing could not be given back.
        """
        if is_iterator(value):
            reason = (
                "each call would take further items of it, a graph the same ones; take them outside, and pass them "
                "as arguments"
            )
            raise Unsupported(
                f"a {type(value).__name__} from outside the function", reason, frame_line(user_frame(sys._getframe(1)))
            )
        if id(value) not in self.met and (found := state(value)) is not None:
            self.met[id(value)] = value, found, pickle.dumps(found)

    def restore(self) -> bool:
        """Put the generators back, and return whether one had drawn."""
        drawn = [(value, before) for value, before, text in self.met.values() if pickle.dumps(state(value)) != text]
        for value, before in drawn:
            if isinstance(value, random.Random):
                value.setstate(before)
            elif hasattr(value, "set_state"):
                value.set_state(before)
            else:
                getattr(value, "bit_generator", value).state = before
        return bool(drawn)


def is_generator(value: Any) -> bool:
    """Whether each call of a method of a value draws, or would change what is drawn."""
    return isinstance(value, random.Random) or type(value).__module__.startswith("numpy.random")


def state(value: Any) -> Any:
    """The state of a random generator of Python's or numpy's; None for anything else, and where the system draws."""
    if isinstance(value, random.Random):
        return None if isinstance(value, random.SystemRandom) else value.getstate()
    if not type(value).__module__.startswith("numpy.random"):
        return None
    return (
        value.get_state(legacy=False) if hasattr(value, "get_state") else getattr(value, "bit_generator", value).state
    )
