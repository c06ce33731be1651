"""Backwards of the user's own, `autograd.Function`s: refused where the graph, which has only torch's, would lose them.

In: a running capture. Out: each call of `apply` in its thread that needs a gradient raises `Unsupported`.
"""

from __future__ import annotations

import sys
import threading
import types
from typing import Any

import torch

from ...errors import Unsupported
from ..checkpoints import REENTRANT, in_place
from ..source_lines import frame_line, user_frame

APPLY: Any = torch.autograd.Function.__dict__["apply"].__func__


def refuse_applies(recorder: Any) -> None:
    """Look at each call of `apply` while the capture lasts."""

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls is REENTRANT and threading.get_ident() == recorder.owner:
            return in_place(*args, **kwargs)
        refuse_backward(cls, (*args, *kwargs.values()) if threading.get_ident() == recorder.owner else ())
        return APPLY(cls, *args, **kwargs)

    recorder.replace(torch.autograd.Function, "apply", classmethod(apply))


def refuse_backward(cls: type, given: tuple) -> None:
    """Refuse an `autograd.Function` where its own backward would matter: the graph has only torch's.

    One that torch.library made (`register_autograd`) belongs to an op, which brings its backward into every graph that
    calls it; that of a piece under torch.func (frontend/subgraph_op.py) goes into the graph.
    """
    if cls.__module__ == "torch._library.autograd" or cls.__module__.startswith("fusejit."):
        return
    if torch.is_grad_enabled() and any(isinstance(value, torch.Tensor) and value.requires_grad for value in given):
        name = f"{cls.__name__} (a torch.autograd.Function)"
        raise Unsupported(
            name, "its own backward cannot be captured; keep it outside the jitted function", here(), False
        )


def see_apply(recorder: Any, frame: types.FrameType) -> None:
    """A call of `apply` through a name that was bound to it before the capture."""
    refuse_backward(frame.f_locals["cls"], (*frame.f_locals["args"], *frame.f_locals["kwargs"].values()))


def here() -> str:
    """The user's line that is running now."""
    return frame_line(user_frame(sys._getframe(1)))
