"""Environment: what a function asks of the process around it: environment variables, context variables, torch's
switches, clocks, files.

In: a call that the profile hook of a capture sees. Out: reads of the recorder, which become guards, or a refusal.

    >>> seer(os.environ.__getitem__.__code__)(recorder, frame)    # of os.environ["SCALE"]
    >>> recorder.reads
    {...: Read('item', os.environ, 'SCALE', '2')}

Such a call reads no attribute or global of the user's by name, so that the recorder's other means do not see it.
"""

from __future__ import annotations

import functools
import logging
import os
import random
import sys
import time
import types
import warnings
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from datetime import date, datetime
from typing import Any

import torch

from ... import torch_private as private
from ...errors import Unsupported
from ..source_lines import frame_line, kind, user_frame
from .global_names import users_class
from .reads import MISSING, Effect, Read

AROUND = frozenset({os.getenv.__code__, Mapping.get.__code__, Mapping.__contains__.__code__})
"""Between a user's call and the one that reads the environment."""
CLOCKS = frozenset(
    {
        time.time,
        time.time_ns,
        time.perf_counter,
        time.perf_counter_ns,
        time.monotonic,
        time.monotonic_ns,
        time.process_time,
        time.process_time_ns,
        time.localtime,
        time.gmtime,
        time.strftime,
        datetime.now,
        datetime.utcnow,
        datetime.today,
        date.today,
        open,
        os.urandom,
        os.listdir,
        os.stat,
    }
)
"""Functions whose result is another one at each call, and which a graph does not call again."""
FROZEN = (
    "it would run while capturing only, and its result be frozen into the graph; call it outside, and pass the "
    "result as an argument"
)
MARK = "what Python code keeps on a tensor is no input of the graph; pass it as an argument"
RESEEDS = frozenset({"manual_seed", "seed", "set_state", "set_offset", "graphsafe_set_state"})
SETTINGS: dict[Any, str] = {private.set_default_dtype: "torch.set_default_dtype"}
ONCE = "it would take effect at capture only; call it outside"
INFERENCE = "the capture itself runs outside inference mode, and would see that"


def seer(code: types.CodeType) -> Callable[[Any, types.FrameType], None] | None:
    """What has to see every call of a code; None: a capture looks at it once."""
    return note_birth if code.co_name == "__init__" and code.co_argcount else SEERS.get(code)


def note_environment(recorder: Any, frame: types.FrameType) -> None:
    """Record a read of an environment variable by code that is not torch's."""
    if frame.f_locals.get("self") is not os.environ:
        return
    caller = frame.f_back
    while caller is not None and caller.f_code in AROUND:
        caller = caller.f_back
    name = frame.f_locals["key"]
    if caller is None or not isinstance(name, str) or kind(caller.f_code.co_filename) == "torch":
        return
    value = os.environ._data.get(os.environ.encodekey(name), MISSING)  # type: ignore[attr-defined]  # `in` would come here again
    if value is MISSING:
        remember(recorder, Read("absent", os.environ, name, None))
    else:
        remember(recorder, Read("item", os.environ, name, os.environ.decodevalue(value)))  # type: ignore[attr-defined]


def note_birth(recorder: Any, frame: types.FrameType) -> None:
    made = frame.f_locals.get(frame.f_code.co_varnames[0])
    followed = isinstance(made, torch.nn.Module) or users_class(type(made))
    if followed and hasattr(made, "__dict__") and id(vars(made)) not in recorder.before:
        recorder.born[id(made)] = made
        recorder.newborn[id(vars(made))] = vars(made)


def on_builtin_call(recorder: Any, frame: types.FrameType, called: Any) -> None:
    """Record a read of a context variable; refuse a question to which a capture knows no answer."""
    owner = called.__self__
    if isinstance(owner, random.Random) and called.__name__ != "getstate":
        recorder.streams.refuse(owner, frame)
    if called in SETTINGS or type(owner) is torch.Generator and called.__name__ in RESEEDS:
        name = SETTINGS.get(called, f"torch.Generator.{called.__name__}")
        raise Unsupported(f"{name} inside a jitted function", ONCE, frame_line(user_frame(frame)), in_python=False)
    if kind(frame.f_code.co_filename) == "torch":
        return
    if called is warnings.warn:
        note_message(recorder, frame, "a warning", "given")
    elif type(owner) is ContextVar and called.__name__ == "get":
        value = owner.get(MISSING)
        remember(recorder, Read("call", functools.partial(owner.get, MISSING), owner.name, value))
    elif isinstance(owner, (types.ModuleType, type)) and called in CLOCKS:
        raise Unsupported(f"{owner.__name__.removeprefix('_')}.{called.__name__}", FROZEN, frame_line(frame))
    elif called is torch.is_inference_mode_enabled and recorder.inference:
        raise Unsupported("torch.is_inference_mode_enabled", INFERENCE, frame_line(frame))


def refuse_marks(recorder: Any) -> None:
    """Refuse an attribute that the user's code has put on a tensor: the trace's stand-in has none, and a default would
    be taken for it.
    """
    from ...torch_private import FakeTensor

    def missing(fake: Any, name: str) -> Any:
        if kind(sys._getframe(1).f_code.co_filename) != "torch":
            for value in recorder.marked:
                if name in vars(value) and recorder.twins.get(id(value)) is fake:
                    raise Unsupported(
                        f"the attribute {name} of a tensor",
                        MARK,
                        frame_line(user_frame(sys._getframe(1))),
                        in_python=False,
                    )
        raise AttributeError(f"'Tensor' object has no attribute '{name}'", name=name, obj=fake)

    recorder.replace(FakeTensor, "__getattr__", missing)


def note_message(recorder: Any, frame: types.FrameType, what: str, done: str) -> None:
    """Record that the user's code says something, which later calls do not."""
    found: types.FrameType | None = frame
    while found is not None and found.f_code.co_filename == logging.__file__:
        found = found.f_back
    if found is not None and kind(found.f_code.co_filename) == "user":
        line = frame_line(found)
        recorder.messages[line] = Effect(what, done, line)


def note_draw(recorder: Any, frame: types.FrameType) -> None:
    """Refuse the method of Python's generators that gives back what an earlier call has drawn."""
    recorder.streams.refuse(frame.f_locals.get("self"), frame)


def remember(recorder: Any, read: Read) -> None:
    """Keep a read whose value holds nothing to follow."""
    owner = read.table.func.__self__ if isinstance(read.table, functools.partial) else read.table  # type: ignore[attr-defined]
    recorder.reads.setdefault((id(owner), read.how, read.name), read)
    recorder.watched.setdefault(id(owner), owner)
    if owner is os.environ:
        recorder.scopes.add(id(owner))  # every block's


SEERS: dict[types.CodeType, Callable[[Any, types.FrameType], None]] = {
    type(os.environ).__getitem__.__code__: note_environment,
    random.Random.gauss.__code__: note_draw,
    logging.Logger._log.__code__: functools.partial(note_message, what="a message", done="logged"),
}
