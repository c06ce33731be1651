"""Profile hook: the hook of a capture, beside a profiler that the user runs; and without it where no code of the user's
runs.

In: a function that sees each call of this thread. Out: two context managers.

    >>> with Hook(see):
    ...     body()                  # see(frame, "call", None), ...
    ...     with unobserved():
    ...         torch.add(x, y)     # what torch does for an op is hundreds of calls; none is seen

Python has room for one hook a thread: a profiler sees nothing of a capture, and goes on behind it where Python can set
it again.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

LOGGER = logging.getLogger(__name__)
LOCAL = threading.local()


class Hook:
    """Calls `see` as `sys.setprofile` says, until the end; then what was there before goes on."""

    def __init__(self, see: Callable[[FrameType, str, Any], None]) -> None:
        self.see = see

    def __enter__(self) -> Hook:
        self.before, self.outer = sys.getprofile(), getattr(LOCAL, "see", None)
        LOCAL.see = self.see
        sys.setprofile(self.see)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)
        LOCAL.see = self.outer
        resume(self.before)


class unobserved:  # used like a function, as torch.no_grad is
    """Without the hook of a capture; a profiler of the user's is left alone. No code of the user's may run here."""

    def __enter__(self) -> None:
        self.see = sys.getprofile()
        if self.see is not None and self.see is getattr(LOCAL, "see", None):
            sys.setprofile(None)
        else:
            self.see = None

    def __exit__(self, *error: object) -> None:
        if self.see is not None:
            sys.setprofile(self.see)


def resume(profiler: Any) -> None:
    """Set a profiler again that `sys.getprofile` gave: a function, or the object of one that is written in C."""
    if callable(profiler):
        sys.setprofile(profiler)
    elif hasattr(profiler, "enable"):  # cProfile before Python 3.12
        profiler.enable()
    elif profiler is not None:  # torch.profiler's Python stacks: only C can set it again
        LOGGER.warning(
            "a capture ended the Python stacks of a running profiler; call the jitted function once before profiling it"
        )
