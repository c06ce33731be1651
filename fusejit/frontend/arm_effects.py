"""Effects of an arm: what an arm of an `if` could change besides its variables, although its test may not hold.

In: the variables that the arms see. Out: `check(site)`, which puts changes back and refuses them by name.

    >>> around = Surroundings({"outs": cell}); outs.append(y); around.check(site)
    Unsupported: changing a list (`outs`) in an `if` that depends on a tensor: ...

Everything that the arms can reach from their variables is followed, however deep: what containers and objects hold,
closures, bound methods, iterators. What the capture has met of arguments, modules and globals its recorder knows.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from ..capture import tracer
from ..capture.state.reach import ATOMS, CHANGING, attributes, cells_of, flat, parts, put_back, same, state
from ..errors import Unsupported
from .convert import Site

WAY_OUT = "both arms run while capturing; assign a variable in the arms, and change what is shared behind the `if`"
NAMES: dict[type, str] = {types.CellType: "variable", type: "class"}


class Kept(NamedTuple):
    """A thing that may change, what it held, the variable through which it was found, and what it is to the user."""

    holder: Any
    before: Sequence[Any]
    name: str
    what: str = ""


class Surroundings:
    """What is reachable before an arm runs.

    Args:
        cells: the variables by name; own: names of those that are assigned by the arms, which whoever runs them puts
            back.
    """

    def __init__(self, cells: dict[str, types.CellType], own: Iterable[str] = ()) -> None:
        self.kept: list[Kept] = []
        self.met: dict[int, Any] = {}
        self.recorder = tracer.recorder() if tracer.active() else None
        self.known = len(self.recorded())
        with self.unseen():
            self.follow(
                [*self.written(), *((cell, name) for name, cell in cells.items())], {name: cells[name] for name in own}
            )

    def recorded(self) -> list[tuple[Any, Any, str]]:
        """What the capture has met: (holder, what it held then, whose it is)."""
        return [] if self.recorder is None else self.recorder.snapshots

    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        """Look at things without a record that they were read."""
        if self.recorder is None:
            yield
            return
        self.recorder.silent += 1
        try:
            yield
        finally:
            self.recorder.silent -= 1

    def written(self) -> list[tuple[Any, str]]:
        """Keep what the capture has met, and return what it put there itself, of which it has no record."""
        found = []
        for holder, before, owner in self.recorded():
            self.keep(holder, owner)
            if isinstance(holder, dict):
                found += [(value, owner) for name, value in holder.items() if before.get(name) is not value]
        return found

    def follow(self, rest: list[tuple[Any, str]], own: dict[str, types.CellType]) -> None:
        """Keep all that can be reached; of `own` variables what they hold, but not that they hold it."""
        for name, cell in own.items():
            self.met[id(cell)] = cell
            rest += [(value, name) for value in state(cell)]
        while rest:
            value, name = rest.pop()
            if type(value) in ATOMS or id(value) in self.met:
                continue
            self.keep(value, name)
            if isinstance(value, types.FunctionType):
                rest += cells_of(value)
            if (table := attributes(value)) is not None and id(table) not in self.met:
                self.keep(table, name, type(value).__name__)
                rest += [(part, name) for part in table.values()]
            rest += [(part, name) for part in parts(value) if type(part) not in ATOMS]

    def keep(self, holder: Any, name: str, what: str = "") -> None:
        self.met[id(holder)] = holder
        before = state(holder)
        if before or isinstance(holder, CHANGING):
            self.kept.append(Kept(holder, before, name, what or NAMES.get(type(holder), type(holder).__name__)))

    def check(self, site: Site) -> None:
        """Put changes back and raise for the first."""
        with self.unseen():
            late = [
                Kept(holder, flat(before), owner, type(holder).__name__)
                for holder, before, owner in self.recorded()[self.known :]
            ]  # first met in an arm
            changed = [kept for kept in (*self.kept, *late) if not same(state(kept.holder), kept.before)]
            for kept in changed:
                put_back(kept.holder, kept.before)
        if changed:
            article = "an" if site.kind[0] in "aeiou" else "a"
            what = (
                f"changing a {changed[0].what} (`{changed[0].name}`) in {article} `{site.kind}` that depends on a "
                "tensor"
            )
            raise Unsupported(what, WAY_OUT, site.line)

    def checked(self, run: Callable[[], Any], site: Site) -> Callable[[], Any]:
        """A function that is checked after each call."""

        def checked() -> Any:
            found = run()
            self.check(site)
            return found

        return checked
