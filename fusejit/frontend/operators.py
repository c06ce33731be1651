"""Operators: what an `if`, a loop or a condition does when the program runs, now that it is a call.

In: a test and arms that are functions of no arguments. Out: the very effect of Python's own statement while the test is
a Python value or a tensor with a value; a `select` of both arms, or a branch of the graph, where the test is a tensor
whose value is not known: while capturing, and under `torch.vmap`.

    if_(test, then, other, site)
    # session().outcomes: model.py:12: if x.sum() > 0: -> select (both arms: 2 ops, 32 B)

The rule: an `if` becomes a select when both arms together make at most OPS tensors of at most BYTES, none of them by a
matmul, a convolution, a sort, linear algebra or random numbers; otherwise it becomes a branch, of which only the side
that is taken runs. Under `vmap` and `torch.func.grad` it is always a select: there is no one side to take.
"""

from __future__ import annotations

import contextlib
import operator
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import torch_private as private
from ..capture import tracer
from ..capture.effect_ops import CHECK, message_of
from ..capture.scalar_tensors import is_number
from ..capture.source_lines import raised_by_user
from ..errors import Unsupported
from .aliases import Shared, Ties, origins_in, refuse_other_names, stand_ins
from .arm_effects import Surroundings
from .batched_while import RowLoop, Standing, any_row, masks
from .branch_nodes import Chain, Loop, Weaver, branch
from .convert import TESTED_AND, TESTED_OR, Site
from .lower_jumps import RETURNED, VALUE, is_flag
from .phi import MISSING, Mismatch, Where, merge
from .predicate import (
    Arm,
    NoSelect,
    bottom,
    depth,
    guarded,
    note_effects,
    quietly,
    refuse_effects,
    run_arm,
    running,
    write_back,
)

Tensor = torch.Tensor
OPS, BYTES = 128, 1 << 26
"""The most tensors that both arms of a select may make, and the most bytes in them."""
LOCAL = threading.local()
SELECT_WAY_OUT = "give it the same kind of value in both, or compute it with torch.where or fusejit.select"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a control flow statement became, and why."""

    line: str
    kind: str
    became: str
    reason: str

    def __str__(self) -> str:
        return f"{self.line} -> {self.became} ({self.reason})"


@dataclass(slots=True)
class Session:
    """What one capture finds out: outcomes in order, and the variables that an `if` had to give up, with the reason."""

    outcomes: dict[tuple[str, str], Outcome] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    shared: list[Shared] = field(default_factory=list)
    ties: Ties | None = None

    def share(self, made: Any, site: Site, values: tuple[Tensor, ...], weaver: Weaver | None) -> None:
        """Note a tensor that from here on stands for one of others: changing one of them in place would have to change
        the other.
        """
        tensors = tuple(map(bottom, (made, *values)))
        since = [tensor._version for tensor in tensors] if weaver is None else weaver.mark()
        if weaver is None or hasattr(tensors[0], "fake_mode"):
            self.shared.append(Shared(tensors[0], tensors[1:], site.line, since))

    def note(self, site: Site, became: str, reason: str) -> None:
        self.outcomes[site.line, site.kind] = Outcome(
            site.line, site.kind, became, reason
        )  # the last word: arms may be tried twice

    def drop(self, name: str, site: Site, reason: str) -> None:
        self.dropped[name] = f"`{name}` {reason} of the arms of {site.line}"


def session() -> Session:
    """The session of the capture that this thread is in; one that no one reads outside of a capture."""
    return getattr(LOCAL, "session", None) or Session()


@contextlib.contextmanager
def recording(ties: Ties | None = None) -> Iterator[Session]:
    """Collect what the control flow of one capture becomes."""
    before, LOCAL.session = getattr(LOCAL, "session", None), Session(ties=ties)
    try:
        yield LOCAL.session
    finally:
        LOCAL.session = before


# Tests.


def unknown(value: Any) -> bool:
    """Whether a value is a tensor whose elements cannot be looked at: a fake one, or a batch of torch.vmap."""
    if not isinstance(value, Tensor):
        return False
    while private.is_functorch_wrapped_tensor(value):
        if private.is_batchedtensor(value):
            return True
        value = private.get_unwrapped(value)
    return hasattr(value, "fake_mode") and getattr(value, "constant", None) is None


def as_predicate(test: Tensor, site: Site) -> Tensor:
    """A test as a bool tensor without dimensions.

    Raises:
        Unsupported: it has several elements, as `bool(test)` would say.
    """
    if test.numel() != 1:
        reason = (
            f"its test has {test.numel()} elements (shape {tuple(test.shape)}); say which are meant: `.any()` or "
            "`.all()`"
        )
        raise Unsupported(f"`{site.kind}` on a tensor", reason, site.line)
    test = test.reshape(()) if test.dim() else test
    return test if test.dtype is torch.bool else test != 0


def transformed() -> bool:
    """Whether a torch.func transform is running, or what one row does under it is traced."""
    return private.maybe_current_level() is not None or depth() > 0


# `if`.


def if_(test: Any, then: Callable[[], None], other: Callable[[], None], site: Site) -> None:
    """`if test: then` `else: other`."""
    if not unknown(test):
        (then if test else other)()
        return
    Choice(as_predicate(test, site), then, other, site).run()


def cells_of(*arms: Any) -> dict[str, types.CellType]:
    """The variables of the user's function that arms see."""
    return {name: cell for arm in arms for name, cell in zip(arm.__code__.co_freevars, arm.__closure__ or ())}


def content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def put(cell: types.CellType, value: Any) -> None:
    if value is not MISSING:
        cell.cell_contents = value
    elif content(cell) is not MISSING:
        del cell.cell_contents


@dataclass(frozen=True, slots=True)
class Side:
    """What a variable holds at the end of an arm: a tensor that the arm changed in place is, there, the changed
    copy.
    """

    pick: Any
    copies: list[dict[int, Tensor]]
    entering: list[Tensor]

    def held(self, value: Any, place: int) -> Any:
        return self.copies[place].get(id(value), value)

    def alone(self, value: Any, place: int) -> Any:
        """A value that only one arm has; a tensor from outside stays itself, and is written back to like any other."""
        outer = id(value) in self.copies[place] or any(value is tensor for tensor in self.entering)
        return value if outer else self.pick.alone(value, place)


class Choice:
    """One `if` on a tensor: both arms run, then one value a variable."""

    def __init__(self, pred: Tensor, then: Any, other: Any, site: Site, forced: str = "") -> None:
        self.pred, self.arms, self.site, self.forced = pred, (then, other), site, forced
        seen = cells_of(then, other)
        self.cells = {name: seen[name] for name in site.written if name in seen}
        self.before = {name: content(cell) for name, cell in self.cells.items()}
        self.around = Surroundings(seen, self.cells)
        self.shared: list[tuple[Tensor, Any]] = []
        self.entering = [value for value in map(content, seen.values()) if isinstance(value, Tensor)]

    def run(self) -> dict[str, Any]:
        """Return the variables behind the `if`, which they are set to."""
        weaver = Weaver(session().shared) if tracer.active() or not transformed() else None
        mark: Any = None if weaver is None else weaver.mark()
        chain = Chain()
        found: list[Any] = []
        try:
            found = [self.trial(place, guard=True) for place in (0, 1)]
            note_effects([arm for _, arm in found], [] if weaver is None else weaver.since(mark))
            reason = why_not_select([arm for _, arm in found])
        except NoSelect as error:
            reason = str(error)
        reason = self.forced or reason
        if reason and weaver is not None and not transformed():
            if guarded():
                raise NoSelect(reason)
            session().note(self.site, "a branch", reason)
            merged = branch(self, mark, weaver, chain)
        else:
            arms = [arm for _, arm in found]
            refuse_effects(arms, self.site)
            ops, moved = sum(arm.ops for arm in arms), sum(arm.bytes for arm in arms)
            because = f"both arms: {ops} ops, {moved} B" + ("; under torch.func always" if transformed() else "")
            session().note(self.site, "select", because)
            pick = Where(self.pred)
            merged, changed = self.merged([values for values, _ in found], arms, pick), self.changed(arms, pick)
            for original, new in changed:
                if weaver is not None:
                    weaver.preserve(bottom(original), mark)
                write_back(original, new, quietly(original, *arms))
        for name, value in merged.items():
            put(self.cells[name], value)
        for made, others in self.shared:
            session().share(made, self.site, others, weaver)
        return merged

    def trial(self, place: int, guard: bool) -> tuple[dict[str, Any], Arm]:
        """Run one arm and take its values; the variables are then as before."""
        try:
            _, arm = run_arm(self.arms[place], self.pred, taken=place == 0, guard=guard)
            self.around.check(self.site)
        except Unsupported as error:
            raise error if error.line else Unsupported(error.op, error.reason, self.site.line) from error
        except (NameError, NoSelect):
            raise
        except Exception as error:
            if not raised_by_user(error):  # torch's own, which the capture explains
                raise
            way_out = (
                "only values chosen by a tensor can be in a graph; check outside the jitted function, or use "
                "torch.where"
            )
            reason = (
                f"an arm raises {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}; {way_out}"
            )
            raise Unsupported(
                "an `if` that depends on a tensor", reason, self.site.line
            ) from None  # not the user's own error
        finally:
            values = {name: content(cell) for name, cell in self.cells.items()}
            for name, cell in self.cells.items():
                put(cell, self.before[name])
        originals = {id(copy): original for original, copy in arm.changed}
        return {name: originals.get(id(value), value) for name, value in values.items()}, arm

    def changed(self, arms: list[Arm], pick: Any) -> list[tuple[Tensor, Tensor]]:
        """Tensors that an arm changed in place, each with what it holds behind the `if`."""
        for arm in arms:
            refuse_other_names(arm, session().shared, self.site.line)
        copies = [arm.copies() for arm in arms]
        originals = {id(original): original for arm in arms for original, _ in arm.changed}
        return [
            (value, pick(copies[0].get(place, value), copies[1].get(place, value)))
            for place, value in originals.items()
        ]

    def merged(self, values: list[dict[str, Any]], arms: list[Arm], pick: Any) -> dict[str, Any]:
        """One value for each variable; what cannot be one value becomes unbound, and reading it says why."""
        jumped = [any(is_flag(name) and value is True for name, value in found.items()) for found in values]
        copies = [arm.copies() for arm in arms]
        found = {}
        for name in self.cells:
            one, other = values[0][name], values[1][name]
            if not (is_flag(name) or name == VALUE or name in self.site.live) and one is not other:
                found[name] = MISSING  # not read again; if it were, Python would say so rather than take a wrong value
                continue
            made = found[name] = self.merge_variable(
                name, one, other, jumped, values, Side(pick, copies, self.entering)
            )
            if name != VALUE:  # behind a `return` nothing is changed any more
                self.shared += stand_ins(made, (one, other), [origins_in(arm, session().shared) for arm in arms])
                if (ties := session().ties) is not None and not running() and not transformed():
                    ties.tie(made, (one, other), arms, self.pred, self.site.line)
        return found

    def merge_variable(
        self, name: str, one: Any, other: Any, jumped: list[bool], values: list[dict[str, Any]], side: Side
    ) -> Any:
        returned = [found.get(RETURNED) is True for found in values]
        if name != VALUE and not is_flag(name) and any(returned) and not all(returned):
            kept = other if returned[0] else one  # after `return` no variable matters
            return MISSING if kept is MISSING else side.alone(kept, int(returned[0]))
        if (one is MISSING) != (other is MISSING):
            if any(jumped) and not all(jumped) or name == VALUE:
                return side.alone(other, 1) if one is MISSING else side.alone(one, 0)  # the flag hides the missing one
            session().drop(name, self.site, "is bound in only one")
            return MISSING
        try:
            return one if one is other else merge(side.held(one, 0), side.held(other, 1), side.pick)
        except Mismatch as error:
            if name == VALUE:
                raise Unsupported(
                    "a result that depends on a tensor", f"it {error}; {SELECT_WAY_OUT}", self.site.line
                ) from None
            session().drop(name, self.site, str(error))
            return MISSING


def why_not_select(arms: list[Arm]) -> str:
    """The rule; "" says select."""
    refused = next((arm.refused for arm in arms if arm.refused), "")
    if refused:
        return refused
    ops, moved = sum(arm.ops for arm in arms), sum(arm.bytes for arm in arms)
    if ops > OPS:
        return f"its arms have {ops} ops, more than {OPS}"
    return f"its arms make {moved} B, more than {BYTES}" if moved > BYTES else ""


# Expressions.


def ifexp(test: Any, then: Callable[[], Any], other: Callable[[], Any], site: Site) -> Any:
    """`then if test else other`."""
    if not unknown(test):
        return then() if test else other()
    return choose(as_predicate(test, site), then, other, site)


def choose(pred: Tensor, then: Callable[[], Any], other: Callable[[], Any], site: Site, forced: str = "") -> Any:
    """The value of one of two expressions."""
    found: Any = MISSING

    def set_then() -> None:
        nonlocal found
        found = then()

    def set_other() -> None:
        nonlocal found
        found = other()

    own = Site(site.kind, site.line, ("found",), frozenset({"found"}))
    choice = Choice(pred, set_then, set_other, own, forced)
    choice.around = Surroundings(cells_of(then, other))
    here = session()
    merged = choice.run()["found"]
    if merged is MISSING:
        reason = here.dropped.pop("found", "`found` is not the same kind of value in both").partition("`found` ")[2]
        raise Unsupported(f"`{site.kind}` on a tensor", f"its value {reason}; {SELECT_WAY_OUT}", site.line)
    return merged


def and_(site: Site, value: Any, *rest: Callable[[], Any]) -> Any:
    """`value and ...`: the first operand that does not hold, or the last."""
    for number, later in enumerate(rest):
        if unknown(value):
            last = value
            if site.kind == TESTED_AND:
                return choose(
                    as_predicate(last, site),
                    lambda: truth(and_(site, later(), *rest[number + 1 :]), site),  # noqa: B023
                    lambda: False,
                    site,
                )
            return choose(
                as_predicate(last, site),
                lambda: alike(and_(site, later(), *rest[number + 1 :]), last),  # noqa: B023
                lambda: last,  # noqa: B023
                site,
            )
        if not value:
            return value
        value = later()
    return value


def or_(site: Site, value: Any, *rest: Callable[[], Any]) -> Any:
    """`value or ...`: the first operand that holds, or the last."""
    for number, later in enumerate(rest):
        if unknown(value):
            last = value
            if site.kind == TESTED_OR:
                return choose(
                    as_predicate(last, site),
                    lambda: True,
                    lambda: truth(or_(site, later(), *rest[number + 1 :]), site),  # noqa: B023
                    site,
                )
            return choose(
                as_predicate(last, site),
                lambda: last,  # noqa: B023
                lambda: alike(or_(site, later(), *rest[number + 1 :]), last),  # noqa: B023
                site,
            )
        if value:
            return value
        value = later()
    return value


def truth(value: Any, site: Site) -> Any:
    """Whether a value holds, where nothing else is asked of it."""
    return as_predicate(value, site) if unknown(value) else bool(value)


def alike(value: Any, first: Tensor) -> Any:
    """A condition of one element in the shape of the first operand; as conditions all such shapes say the same."""
    fits = isinstance(value, Tensor) and value.numel() == 1 and value.dtype is torch.bool
    return value.reshape(first.shape) if fits and value.shape != first.shape else value


def not_(value: Any, site: Site) -> Any:
    """`not value`."""
    return torch.logical_not(as_predicate(value, site)) if unknown(value) else not value


COMPARED = {"in": lambda a, b: a in b, "not in": lambda a, b: a not in b}


def compare(site: Site, words: str, left: Any, *operands: Callable[[], Any]) -> Any:
    """`a < b < c`: each operand once, and no further than needed."""

    def step(left: Any, names: list[str], rest: tuple[Callable[[], Any], ...]) -> Any:
        right = rest[0]()
        name = names[0]
        found = COMPARED[name](left, right) if name in COMPARED else getattr(operator, name)(left, right)
        return found if len(rest) == 1 else and_(site, found, lambda: step(right, names[1:], rest[1:]))

    return step(left, words.split(","), operands)


def assert_(test: Any, message: Callable[[], Any] | None, site: Site) -> Any:
    """The test of an `assert`; one on a tensor without a value is checked when the program runs."""
    if not unknown(test):
        return test
    weaver = Weaver() if tracer.active() else None
    mark: Any = None if weaver is None else weaver.mark()
    text, values, lost = message_of(message, site.line)
    if lost and weaver is not None:
        weaver.erase(weaver.since(mark))
    CHECK(None, as_predicate(test, site), text, values)
    session().note(site, "a check of the graph", lost or "it raises AssertionError where the program runs")
    return True


def update(name: str, value: Any, other: Any) -> Any:
    """`value += other`: a number that became a tensor is still a number, which no other variable sees change."""
    if isinstance(value, Tensor) and value.dim() == 0 and unknown(value) and is_number(value):
        name = name[1:]
    return getattr(operator, name)(value, other)


def free(*flags: Any) -> Any:
    """Whether no flag is set."""
    if any(flag is True for flag in flags):
        return False
    tensors = [flag for flag in flags if isinstance(flag, Tensor)]
    if not tensors:
        return not any(flags)
    found = tensors[0]
    for flag in tensors[1:]:
        found = torch.logical_or(found, flag)
    return torch.logical_not(found)


def halt(*flags: Any) -> bool:
    """Whether a flag is surely set: a loop over Python values then ends."""
    return any(flag is True or isinstance(flag, Tensor) and not unknown(flag) and bool(flag) for flag in flags)


def while_(test: Callable[[], Any], body: Callable[[], None], site: Site) -> None:
    """`while test: body`."""
    while True:
        value = test()
        if unknown(value):
            run_loop(test, body, site)
            return
        if not value:
            return
        body()


def run_loop(test: Any, body: Any, site: Site) -> None:
    """A `while` whose test is a tensor without a value."""
    if transformed():
        each_row(test, body, site)
        return
    if guarded():
        raise NoSelect("it holds a `while` on a tensor")
    session().note(site, "a loop of the graph", "its test is a tensor; each variable keeps its dtype and shape")
    weaver = Weaver(session().shared)
    cells, test, body = variables(test, body, site)
    for made, others in Loop(test, body, site, cells, content, put, weaver).run():
        session().share(made, site, others, weaver)


def variables(test: Any, body: Any, site: Site) -> tuple[dict[str, types.CellType], Any, Any]:
    """The variables that a loop carries, its test and its body; what these change besides is refused."""
    seen = cells_of(test, body)
    cells = {name: seen[name] for name in site.written if name in seen}
    around = Surroundings(seen, cells)
    return cells, around.checked(test, site), around.checked(body, site)


def each_row(test: Any, body: Any, site: Site) -> None:
    """A `while` whose test is a tensor of a transform: each row goes round until its own test fails."""
    cells, watched_test, watched_body = variables(test, body, site)
    if not tracer.active():
        while any_row(holds := row_test(watched_test, site, cells)):
            Choice(holds, body, lambda: None, site).run()
        return
    session().note(
        site,
        "a loop of the graph",
        "its test is a tensor; under torch.func each row goes round until its own test fails",
    )
    weaver = Weaver(session().shared)
    loop = RowLoop(
        watched_test, watched_body, site, cells, content, put, weaver, around=masks(), standing=Standing(weaver)
    )
    for made, others in loop.run():
        session().share(made, site, others, weaver)


def row_test(test: Any, site: Site, cells: dict[str, types.CellType]) -> Tensor:
    """Which rows go round once more, outside of a capture."""
    before = {name: content(cell) for name, cell in cells.items()}
    found = as_predicate(torch.as_tensor(test()), site)
    for name, cell in cells.items():
        if content(cell) is not before[name]:
            raise Unsupported(
                "`while` on a tensor", f"`{name}` is assigned in its test (`:=`); assign it in the body", site.line
            )
    for mask in masks():
        found = torch.logical_and(found, mask)
    return found


def explain_unbound(error: NameError, here: Session) -> Unsupported | None:
    """Say why a variable has no value that an `if` on a tensor had to give up."""
    words = str(error).split("'")
    name = words[1] if len(words) > 1 else ""
    return (
        Unsupported(f"the variable `{name}`", f"{here.dropped[name]}; {SELECT_WAY_OUT}")
        if name in here.dropped
        else None
    )
