"""Surroundings: lists, dicts and attributes that an arm of an `if` could change although its test may not hold.

In: the variables that the arms see. Out: `check(site)`, which puts changes back and refuses them by name.

    >>> around = Surroundings({"outs": cell}); outs.append(y); around.check(site)
    Unsupported: changing a list (`outs`) in an `if` that depends on a tensor: ...
"""

from __future__ import annotations

import types
from typing import Any

from ..capture import trace
from ..capture.reads import CONTAINERS, DEPTH, WIDTH, refill, same_items
from ..errors import Unsupported
from .select import Site

WAY_OUT = "both arms run while capturing; assign a variable in the arms, and change the container behind the `if`"


class Surroundings:
    """Shallow copies of what is reachable before an arm runs."""

    def __init__(self, cells: dict[str, types.CellType]) -> None:
        self.kept: list[tuple[Any, Any, str]] = []
        self.met: set[int] = set()
        for name, cell in cells.items():
            try:
                self.follow(cell.cell_contents, name, DEPTH)
            except ValueError:
                continue
        if trace.active():
            for holder, _, owner in trace.recorder().snapshots:
                self.keep(holder, owner)

    def follow(self, value: Any, name: str, depth: int) -> None:
        if not depth or not isinstance(value, CONTAINERS) or id(value) in self.met or len(value) > WIDTH:
            return
        self.keep(value, name)
        for item in value.values() if isinstance(value, dict) else value:
            self.follow(item, name, depth - 1)

    def keep(self, holder: Any, name: str) -> None:
        if id(holder) not in self.met:
            self.met.add(id(holder))
            if not isinstance(holder, (tuple, frozenset)):
                self.kept.append((holder, holder.copy(), name))

    def check(self, site: Site) -> None:
        """Put changes back and raise for the first."""
        changed = [(holder, before, name) for holder, before, name in self.kept if not same_items(holder, before)]
        for holder, before, _ in changed:
            refill(holder, before)
        if changed:
            kind, name = type(changed[0][0]).__name__, changed[0][2]
            raise Unsupported(f"changing a {kind} (`{name}`) in an `{site.kind}` that depends on a tensor", WAY_OUT, site.line)
