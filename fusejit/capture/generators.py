"""The random generators of Python and numpy, which a capture must leave as they were.

In: nothing, or a state from before. Out: that state, or the generators put back to it.

    >>> before = random.getstate(), numpy_state()
    >>> restore_generators(before)
"""

from __future__ import annotations

import random
import sys
from typing import Any


def numpy_state() -> Any:
    """numpy's global random state as something comparable; None when numpy is not imported."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    name, keys, position, *rest = numpy.random.get_state()
    return (name, keys.tobytes(), position, *rest)


def restore_generators(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    if states[1] is not None:
        numpy = sys.modules["numpy"]
        name, keys, *rest = states[1]
        numpy.random.set_state((name, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))
