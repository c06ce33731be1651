"""Which line of the user's an op, an error or a graph node came from.

In: a Python frame, an exception or an fx node. Out: a short text that names the file, the line number and the code.

    >>> user_line(node)
    'model.py:12: y = f(x)'

A line is the user's when its file belongs neither to torch, nor to fusejit (its blocks aside), nor to Python itself. A
library's module (Hugging Face, timm) counts as the user's inside its `forward`; its small functions count only when no
such frame is near.
"""

from __future__ import annotations

import functools
import linecache
import os
import re
import sysconfig
from types import FrameType
from typing import Any

import torch

ROOTS = (
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
)
BLOCKS = os.path.join(ROOTS[1], "tools", "blocks.py")  # the functions that `fusejit bench` measures are a user's
STDLIB = tuple({os.path.join(sysconfig.get_paths()[key], "") for key in ("stdlib", "platstdlib")})
LIBRARIES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
ENGINES = re.compile(r"[/\\\\](numpy|sympy|mpmath|networkx|triton|functorch|torchgen|typing_extensions\.py)([/\\\\]|$)")
"""Libraries that torch's tracing itself runs."""
ENTRY = re.compile(r'File "(?P<file>[^"]*)", line (?P<line>\d+), in (?P<name>[^\n]*)\n?\s*(?P<code>[^\n]*)')


@functools.cache
def kind(filename: str) -> str:
    """Say whose a file is: ``"torch"`` (torch, fusejit, Python), ``"library"`` (anything installed) or ``"user"``."""
    if filename.startswith("<"):
        return "torch" if filename.startswith("<frozen") else "user"
    if filename.startswith(ROOTS):
        return "user" if filename == BLOCKS else "torch"
    if any(part in filename for part in LIBRARIES):
        return "torch" if ENGINES.search(filename) else "library"
    return "torch" if filename.startswith(STDLIB) else "user"


def user_frame(frame: FrameType | None, stop: Any = None) -> FrameType | None:
    """Walk outwards from `frame` to the user's innermost one; `stop` is the code object where the walk ends."""
    library = None
    while frame is not None and frame.f_code is not stop:
        where = kind(frame.f_code.co_filename)
        if where == "user" or (where == "library" and frame.f_code.co_name == "forward"):
            return frame
        if where == "library" and library is None:
            library = frame
        frame = frame.f_back
    return library


def stack_entry(filename: str, number: int, name: str) -> str:
    """Write one traceback entry, the form in which fx carries lines from graph to graph."""
    return f'File "{filename}", line {number}, in {name}\n    {linecache.getline(filename, number).strip()}'


def frame_entry(frame: FrameType | None) -> str:
    """Write the entry of a frame, or ``""``."""
    return "" if frame is None else stack_entry(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def shorten(entry: str) -> str:
    """Turn the last traceback entry of a text into ``"file.py:12: code"``; ``""`` when there is none."""
    found = next(iter([*ENTRY.finditer(entry)][-1:]), None)
    if found is None:
        return ""
    place = f"{os.path.basename(found['file'])}:{found['line']}"
    return f"{place}: {found['code']}" if found["code"] else place


def user_line(node: torch.fx.Node) -> str:
    """Return the user's line of a graph node, forward or backward, as ``"model.py:12: y = f(x)"``; ``""`` when
    unknown.
    """
    return shorten(node.meta.get("stack_trace") or "")


def frame_line(frame: FrameType | None) -> str:
    """Return the line of a frame, in the same form."""
    return shorten(frame_entry(frame))


def error_line(error: BaseException) -> str:
    """Return the user's innermost line in an exception's traceback."""
    best = library = ""
    traceback = error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        where = kind(code.co_filename)
        if where != "torch":
            entry = stack_entry(code.co_filename, traceback.tb_lineno, code.co_name)
            if where == "user" or code.co_name == "forward":
                best = entry
            library = entry
        traceback = traceback.tb_next
    return shorten(best or library)


def error_lines(error: BaseException | None) -> list[str]:
    """Return the user's lines on the way to an error, the outermost first; those of what it was made from follow its
    own.
    """
    found: list[str] = []
    met: list[BaseException] = []
    while error is not None and error not in met:  # a cause may have been raised again
        met.append(error)
        traceback = error.__traceback__
        while traceback is not None:
            code = traceback.tb_frame.f_code
            if (
                kind(code.co_filename) == "user" and code.co_filename != "<string>"
            ):  # which torch makes of its own wrappers
                line = shorten(stack_entry(code.co_filename, traceback.tb_lineno, code.co_name))
                if line not in found[-1:]:
                    found.append(line)
            traceback = traceback.tb_next
        error = error.__cause__
    return found


def refusal_lines(error: Any) -> list[str]:
    """Return the user's lines that lead to an `Unsupported`: the one that calls first, the refused one last."""
    if not error.line:
        return []
    own = error.line.split(" → ")
    return [*(line for line in error_lines(error) if line not in own), *own]


def raised_by_user(error: BaseException) -> bool:
    """Whether the exception was raised in the user's own Python, rather than by torch under it."""
    traceback = error.__traceback__
    if traceback is None:
        return False
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    return kind(traceback.tb_frame.f_code.co_filename) != "torch"
