"""Shared containers: containers that are one object to the user, and would be two behind a graph.

In: what a part of a function returns and what it was given. Out: nothing, or `Unsupported`.

    >>> check_identities(segment, (items, total), (items,))
    Unsupported: a list that is handed on beside an excluded block: a graph would return a copy of it
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...errors import Unsupported

SEGMENT = "__fusejit_segment__"
"""The attribute of functions that were cut out of a user's function (see frontend/exclude.py)."""


def containers(value: Any) -> Iterator[Any]:
    """The lists, dicts and sets inside a value, itself included; the same one as often as it occurs."""
    if isinstance(value, (list, dict, set)):
        yield value
    if isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from containers(item)


def check_identities(fn: Any, out: Any, given: Any) -> None:
    """Refuse a segment of a function that hands on a container it was given, or one twice: the rest of the function may
    change it.
    """
    if not getattr(fn, SEGMENT, False):
        return
    seen = {id(item) for item in containers(given)}
    for item in containers(out):
        if id(item) in seen:
            raise Unsupported(
                f"a {type(item).__name__} that is handed on beside an excluded block",
                "a graph would return a copy of it",
                in_python=False,
            )
        seen.add(id(item))
