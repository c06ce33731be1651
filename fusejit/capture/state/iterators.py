"""Iterators: iterators and random generators from outside a function, which give something else at each call.

In: a value that the function can reach. Out: a refusal of an iterator; of Python's and numpy's generators, whether a
capture drew.

    >>> with Streams(): np.random.rand()
    Unsupported: Python's or numpy's random numbers: would be frozen into the graph
"""

from __future__ import annotations

import functools
import pickle
import random
import sys
import threading
import types
from typing import Any

from ...errors import Unsupported
from ..source_lines import frame_line, user_frame

NAMED = frozenset({"seed", "ranf", "sample", "set_bit_generator"})
"""Functions of `numpy.random` that are no methods of its generator."""
DRAWN = ("Python's or numpy's random numbers", "would be frozen into the graph; use torch's, or pass them as arguments")


def is_iterator(value: Any) -> bool:
    """Whether a value is an iterator of Python's own: of a container or generator function, or from itertools."""
    return type(value).__module__ in ("builtins", "itertools") and hasattr(type(value), "__next__")


class Streams:
    """The random generators that a capture meets, the global ones at once; none that others may draw from is ever set
    back.

    What this thread draws is refused where it draws: the profile hook sees the methods of Python's generators, and
    stand-ins those of numpy's global one. Of other generators of numpy's only the state tells; it is put back where no
    other thread can have drawn.
    """

    def __init__(self) -> None:
        self.met: dict[int, Any] = {}
        self.states: list[tuple[Any, Any, bytes]] = []
        self.replaced: list[tuple[str, Any]] = []
        self.note(random._inst)  # type: ignore[attr-defined]  # what random.random() and its kin are methods of

    def note(self, value: Any) -> None:
        """Keep a generator, with its state where nothing else tells a draw.

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
        if any(value is other for other, *_ in self.states) or not is_generator(value):
            return
        self.met[id(value)] = value
        if (found := state(value)) is not None:
            self.states.append((value, found, pickle.dumps(found)))

    def refuse(self, value: Any, frame: Any) -> None:
        """Refuse a draw from a generator that was there before the capture; here, and not by numpy, which would draw
        first.
        """
        if id(value) in self.met:
            raise Unsupported(*DRAWN, frame_line(user_frame(frame)), in_python=False)  # Dynamo has streams of its own

    def __enter__(self) -> None:
        """Put stand-ins in the places of the functions that draw from numpy's global generator: this thread's calls are
        refused.
        """
        shared, owner = numpys(), threading.get_ident()
        if shared is None:
            return
        self.met[id(shared)] = shared
        module = sys.modules["numpy"].random
        for name, function in list(vars(module).items()):
            if name in NAMED or getattr(function, "__self__", None) is shared and not name.startswith("get_"):
                self.replaced.append((name, function))
                setattr(module, name, self.stand_in(function, shared, owner))

    def stand_in(self, function: Any, shared: Any, owner: int) -> Any:
        @functools.wraps(function)
        def drawn(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == owner:
                self.refuse(shared, sys._getframe(1))
            return function(*args, **kwargs)

        return drawn

    def __exit__(self, *error: object) -> None:
        for name, function in self.replaced:
            setattr(sys.modules["numpy"].random, name, function)
        self.replaced.clear()

    def settle(self) -> bool:
        """Return whether a generator has drawn meanwhile that nothing saw draw; put it back where no other thread has
        it at hand.
        """
        drawn = [(value, before) for value, before, text in self.states if pickle.dumps(state(value)) != text]
        for value, before in drawn:
            if used_elsewhere(value):
                continue
            if hasattr(value, "set_state"):
                value.set_state(before)
            else:
                getattr(value, "bit_generator", value).state = before
        return bool(drawn)


def used_elsewhere(value: Any) -> bool:
    """Whether a frame of another thread has a value: in a variable, a global that its code names, or an attribute."""
    own = threading.get_ident()
    for thread, innermost in sys._current_frames().items():
        frame: types.FrameType | None = innermost if thread != own else None
        while frame is not None:
            scope = frame.f_globals
            at_hand = (*frame.f_locals.values(), *(scope[name] for name in frame.f_code.co_names if name in scope))
            if any(thing is value or holds(thing, value) for thing in at_hand):
                return True
            frame = frame.f_back
    return False


def holds(thing: Any, value: Any) -> bool:
    """Whether a value is an attribute of a plain object."""
    table = getattr(thing, "__dict__", None)
    return isinstance(table, dict) and any(one is value for one in list(table.values()))


def is_stand_in(value: Any) -> bool:
    """Whether a value is a stand-in of this capture's, which no later call will find."""
    return isinstance(value, types.FunctionType) and value.__code__ in STANDS_IN


STANDS_IN = frozenset(code for code in Streams.stand_in.__code__.co_consts if isinstance(code, types.CodeType))


def numpys() -> Any:
    """The generator that the functions of `numpy.random` are methods of; None where nobody has imported it."""
    module = sys.modules.get("numpy.random.mtrand")
    return None if module is None else module._rand


def is_generator(value: Any) -> bool:
    """Whether each call of a method of a value draws, or would change what is drawn."""
    return isinstance(value, random.Random) or type(value).__module__.startswith("numpy.random")


def state(value: Any) -> Any:
    """The state of a random generator of numpy's; None for anything else."""
    if not type(value).__module__.startswith("numpy.random"):
        return None
    return (
        value.get_state(legacy=False) if hasattr(value, "get_state") else getattr(value, "bit_generator", value).state
    )
