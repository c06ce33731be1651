"""Capture AST: the function is rewritten, then traced; what its control flow became is kept for the report.

In: a function or module and the arguments of one call. Out: the `Captured` of its rewritten twin, and a list of
`Outcome`.

    >>> captured, outcomes = capture_rewritten(f, (x,), {})
    >>> print(outcomes[0])
    model.py:3: if x.sum() > 0: -> select (both arms: 2 ops, 32 B)

Reads of the original function become guards, as in mode "trace". Modules are called as ever, hooks and all: only what
they read as their `forward` is rewritten, in the capturing thread and nowhere else.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

from ..capture.shapes.symbols import Symbols
from ..capture.tracer import Captured, capture, tracing
from ..errors import Unsupported
from .aliases import WHAT as CHANGED_IN_PLACE
from .aliases import Ties, check_aliases, check_versions
from .branch_nodes import Weaver
from .converted_call import reason_for, rewritten
from .operators import Outcome, Session, explain_unbound, recording


def checked(function: Callable, session: Session) -> Callable:
    """Run a function and look at its graph before the capture ends."""

    def run(*args: Any, **kwargs: Any) -> Any:
        ties = session.ties
        if ties is not None:
            tracing().echo = ties.follow
        result = function(*args, **kwargs)
        if session.shared:
            check_aliases(Weaver().graph, session.shared if ties is None else ties.kept(session.shared), result=result)
        return result

    run.__dict__.update(
        vars(function) if isinstance(function, types.FunctionType) else {}
    )  # a segment stays one (see exclude.py)
    return run


def call_rewritten(fn: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run the rewritten twin of a function as it is: under a transform of torch.func that is no part of a capture.

    Raises:
        Unsupported: the twin cannot do what Python would; names the user's line.
    """
    with recording() as session:
        try:
            result = rewritten(fn)(*args, **kwargs)
            check_versions(session.shared)
        except NameError as error:
            raise explain_unbound(error, session) or error from None
    return result


def capture_in(
    ties: Ties | None,
    fn: Callable,
    args: tuple,
    kwargs: dict[str, Any],
    name: str,
    watch: tuple,
    regions: Any,
    symbols: Symbols | None,
) -> tuple[Captured, Session]:
    """One capture; with `ties`, changes in place of what an `if` chose are repeated on what it was chosen from."""

    def rewrite(callable_: Any, module: Any = None) -> Any:
        made = rewritten(callable_, asked=module is None or module is fn or getattr(fn, "__self__", None) is module)
        return checked(made, session) if callable_ is fn else made

    with recording(ties) as session:
        try:
            return capture(fn, args, kwargs, name, watch, rewrite, regions, symbols), session
        except NameError as error:
            explained = explain_unbound(error, session)
            if explained is None:
                raise
            raise explained from error


def capture_rewritten(
    fn: Callable,
    args: tuple,
    kwargs: dict[str, Any],
    name: str = "",
    watch: tuple = (),
    regions: Callable | None = None,
    symbols: Symbols | None = None,
) -> tuple[Captured, list[Outcome]]:
    """See `capture`.

    Raises:
        Unsupported: it cannot be captured; names the user's line, and the variable where an `if` cannot give it one
            value.
    """
    given = (fn, args, kwargs, name, watch, regions, symbols)
    try:
        captured, session = capture_in(None, *given)
    except Unsupported as error:
        if (
            error.op != CHANGED_IN_PLACE or symbols is not None
        ):  # whose sizes belong to one capture; the next one has none
            raise
        captured, session = capture_in(Ties(), *given)  # once more, with writes to all that a variable may be
        reason = "it is changed in place behind it: the change is written to what it was chosen from, too"
        session.outcomes[error.line, CHANGED_IN_PLACE] = Outcome(error.line, "change in place", "repeated", reason)
    outcomes = list(session.outcomes.values())
    plain = reason_for(fn.forward if isinstance(fn, torch.nn.Module) else fn)
    if plain:
        outcomes.insert(0, Outcome(name or "the function", "function", "traced as it is", plain))
    return captured, outcomes
