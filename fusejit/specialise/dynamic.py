"""Specialisations for many sizes: tried where sizes vary, and given up with a reason where one shape alone can be had.

In: a call that no specialisation holds for, and how to make one. Out: a `Specialisation`, with or without symbols; what
was decided is in its `dynamic`.

    >>> specialise_sizes(sizes, key, leaves, name, make).dynamic
    ['dimension 0 of x changed: 4 → 7, now dynamic']
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..capture.shapes.policy import Dynamic
from ..capture.tracer import LOCK
from ..errors import CaptureError, Unsupported
from .build import BackendError
from .specialisation import Specialisation


def specialise_sizes(
    sizes: Dynamic, key: tuple, leaves: list[Any], name: Callable[[Any, int], str], make: Callable[..., Specialisation]
) -> Specialisation:
    """Make a specialisation for many sizes where `sizes` wants that, and for this shape alone where that is not to be
    had.
    """
    with LOCK:  # torch's arithmetic on symbols sees the tracer of any thread
        return _specialise_sizes(sizes, key, leaves, name, make)


def _specialise_sizes(
    sizes: Dynamic, key: tuple, leaves: list[Any], name: Callable[[Any, int], str], make: Callable[..., Specialisation]
) -> Specialisation:
    choice, notes = sizes.choose(key, leaves, name), []
    if choice.why and choice.symbols is None:
        notes.append(f"all sizes are numbers: {choice.why}")
    while choice.symbols is not None:
        try:
            specialisation = make(symbols=choice.symbols)
            lines = sizes.settle(key, choice, name)
        except BackendError:
            raise
        except Exception as error:  # whatever it was: a capture of this one shape repeats it where it is the user's
            if choice.strict and isinstance(error, CaptureError):
                raise
            reason = (
                f"{error.op}: {error.reason}" if isinstance(error, Unsupported) else f"{type(error).__name__}: {error}"
            )
            reason = reason.partition("\n")[0]
            if not sizes.fix(key, choice, reason):
                sizes.refuse(key, reason)
                notes.append(f"all sizes are numbers: {reason}")
        else:
            if not any(item.axis.scalar for item in choice.symbols.specialised()):
                notes += [*choice.why.split("; "), *lines, *sizes.fixed(key, name)]
                return replace(
                    specialisation.noting(dynamic=notes), resized=choice.why if "changed" in choice.why else ""
                )
        choice = sizes.choose(
            key, leaves, name
        )  # once more without a number that the body needs: for one value it gains nothing
    return make().noting(dynamic=[*notes, *sizes.fixed(key, name)])
