"""Unguarded calls: a specialisation without its guards, and the check of what the caller promised.

In: a specialisation and the call that it was made or found for. Out: a callable of the arguments of calls like that
one.

    >>> step = unguarded(specialisation, call)
    >>> step(x, weight)
    tensor([...])

With FUSEJIT_DEBUG=1 `promised` compares each call with the bound one and raises an error that names what differs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..capture import pytree
from ..capture.guards.guards import key_for
from ..capture.guards.recompile_reasons import differences
from ..errors import FusejitError
from .fast_path import Bindable, Call, beyond, elsewhere, returned, unpacked


def unguarded(specialisation: Bindable, call: Call) -> Callable[..., Any]:
    """Return what runs a specialisation on the arguments of calls that promise to be like this one."""
    executable, captured, lifted = specialisation.executable, specialisation.captured, call.lifted
    run = executable.run
    assert run is not None
    if captured is None or not call.flat or executable.body is None or beyond():

        def general(*args: Any, **kwargs: Any) -> Any:
            leaves: list[Any] = []
            pytree.flatten((args, kwargs) if call.kwargs else args, leaves)
            return run(leaves, lifted)

        return general
    inputs = ", ".join([f"a{position}" for position in captured.positions] + (["*lifted"] if lifted else []))
    result = returned(captured, executable, inputs)
    source = "\n".join(["def bound(*args, **kwargs):", *unpacked(call), f"    return {result}", ""])
    scope: dict[str, Any] = {"lifted": tuple(lifted), "body": executable.body, "result": executable.result}
    exec(compile(source, f"{__file__}, {captured.name or 'function'} without guards", "exec"), scope)
    return scope.pop("bound")  # type: ignore[no-any-return]


def promised(
    run: Callable, specialisation: Bindable, bound: Call, key: tuple, name: Callable[[Any, int], str]
) -> Callable[..., Any]:
    """A bound callable that checks what its caller promised (FUSEJIT_DEBUG=1)."""
    fn = specialisation.captured.name if specialisation.captured is not None else "function"
    way_out = f"a bound call checks nothing, so call {fn} itself, or bind it again"

    def checked(*args: Any, **kwargs: Any) -> Any:
        leaves: list[Any] = []
        now = key_for(bound.receiver, args, kwargs, leaves)
        lifted = specialisation.lifted(leaves) if now == key else None
        if lifted is None or elsewhere():
            reason = "; ".join(map(str, differences(now, leaves, [(key, specialisation.guards)], name)[:3]))
            raise FusejitError(f"{fn} was bound, and the call breaks the promise: {reason}: {way_out}")
        if any(
            one is not other and not (type(one) is int and one == other)
            for one, other in zip(lifted, bound.lifted, strict=True)
        ):
            what = "a size, or a tensor that it reads, is another now"
            raise FusejitError(f"{fn} was bound, and {what}: {way_out}")
        return run(*args, **kwargs)

    return checked
