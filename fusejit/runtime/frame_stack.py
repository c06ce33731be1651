"""Frame stack: memory for the frames of deep calls, taken once.

In: a function that calls a great deal below it. Out: the same function, whose calls find room on the interpreter's
stack.

    >>> @roomy
    ... def compile_graph(...): ...

CPython 3.11 and later keep frames in chunks of 16 KiB, and give a chunk back as soon as the call that needed it
returns. Calls in a loop at the depth where a chunk ends map and unmap memory each time, so that the same capture takes
up to twice as long, by the depth of its caller. A frame that asks for more than a chunk gets one of the next power of
two; what is left of that serves the calls below.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

SLOTS = 33_000
"""Of 8 bytes: a chunk of 512 KiB, half of which is left, for some thousand frames."""
Function = TypeVar("Function", bound=Callable[..., Any])


def roomy(fn: Function) -> Function:
    """Make a function whose every call begins a chunk of the stack that is large enough for all that it calls."""

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    wide: Any = call
    wide.__code__ = wide.__code__.replace(co_stacksize=SLOTS)
    return wide
