"""Disable: whether jitted functions run compiled or as plain Python, and how those nest that are captured inside each
other.

In: `disable_jit()`, FUSEJIT_DISABLE=1, a jitted function about to run its Python. Out: `Switch.off`, which every call
reads.

    >>> with disable_jit():
    ...     f(x)          # plain eager Python: breakpoints and prints work
"""

from __future__ import annotations

import threading

from .. import knobs
from ..errors import CaptureError
from ..options import Settings


class Switch:
    """Whether jitted functions run as plain Python."""

    off: bool = bool(knobs.read("disable"))


class disable_jit:
    """Run every jitted function as plain eager Python: `disable_jit()` from now on, `with disable_jit():` for a while.

    `disable_jit(False)` switches compilation on again.
    """

    def __init__(self, disable: bool = True) -> None:
        self.before, Switch.off = Switch.off, disable

    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        Switch.off = self.before


class nesting:
    """While a jitted function is captured, or runs inside another's capture: the modes of those around it, outermost
    first.
    """

    stacks = threading.local()

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def __enter__(self) -> None:
        modes: list[str] = nesting.stacks.__dict__.setdefault("modes", [])
        around = [mode for number, mode in enumerate(modes) if not number or modes[number - 1] != mode]
        if (
            self.settings.capture_mode == "trace"
            and "ast" in around[1:]
            and "trace" in around[: around.index("ast", 1)]
        ):
            raise CaptureError(
                f"{self.settings.name} has capture mode 'trace' and is called by a function of mode 'ast' inside a "
                "trace: "
                "the one wants its Python as it is, the other rewrites what it calls; give all of them one mode"
            )
        modes.append(self.settings.capture_mode)

    def __exit__(self, *error: object) -> None:
        nesting.stacks.modes.pop()
