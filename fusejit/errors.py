"""The errors a user of fusejit can see.

In: what went wrong and where in the user's code. Out: one exception whose text says the line and the way out.

    CaptureError: cannot capture `step` (model.py:12: `if loss > 0:`): the test depends on the values of a tensor
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence


class FusejitError(RuntimeError):
    """Base of every error that fusejit raises on purpose."""


class CaptureError(FusejitError):
    """The Python function cannot become a graph; raised with `fullgraph=True`, recorded as a fallback otherwise.

    Attributes:
        lines: the user's lines that lead to what was refused, that of the jitted function first, that of the callee
            last.
    """

    def __init__(self, text: str = "", lines: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.lines = tuple(lines)


class TraceError(FusejitError):
    """A replayed trace no longer matches the Python function it came from."""


class CompileError(FusejitError):
    """A kernel could not be compiled or launched; names the user's lines that the kernel was made of."""


class KernelAssertion(FusejitError):
    """A kernel met data that its op refuses, such as a probability of 2; an index out of bounds is an IndexError, as in
    eager.
    """


class Unsupported(FusejitError):
    """An op or a construct that fusejit refuses.

    Args:
        op: the op or construct, as the user knows it (``"torch.autograd.Function"``).
        reason: why it is refused, and what to do instead.
        line: ``"file.py:12: y = f(x)"``, or ``""`` when no line of the user's is known.
        in_python: the refusal is of the Python around the tensors, which another capture mode may get around; False
            where the tensors, their devices or their gradients are refused, which no way of reading the Python changes.
    """

    def __init__(self, op: str, reason: str, line: str = "", in_python: bool = True) -> None:
        super().__init__(f"{op}: {reason}" + (f" (at {line})" if line else ""))
        self.op, self.reason, self.line, self.in_python = op, reason, line, in_python
        note_refusal(self)


class _Raised(threading.local):
    seen: list[Exception] | None = None


_RAISED = _Raised()


@contextlib.contextmanager
def refusals() -> Iterator[list[Exception]]:
    """Collect the refusals that this thread makes inside the block, those that the user's own `except` catches
    included.
    """
    before, _RAISED.seen = _RAISED.seen, []
    try:
        yield _RAISED.seen
    finally:
        _RAISED.seen = before


def note_refusal(error: Exception) -> None:
    """Add to the refusals that are collected, if any are."""
    if _RAISED.seen is not None:
        _RAISED.seen.append(error)


def forget_refusal(error: Exception) -> None:
    """Take back a refusal that fusejit itself has caught, and found another way."""
    if _RAISED.seen is not None:
        _RAISED.seen[:] = [other for other in _RAISED.seen if other is not error]
