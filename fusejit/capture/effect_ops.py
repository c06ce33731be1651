"""Ops with an effect: what a graph must do at its place, on every call, although no result depends on it.

In: `print`, `depend` and `assign` called by the user's function, and its `assert`s on tensors. Out: outside a capture
the plain effect; inside one an op of the graph that takes a token from the op with an effect before it and returns one
to the next, the last of which is a hidden output:

    graph():
        %x : [num_users=2] = placeholder[target=x]
        %token : [num_users=1] = call_function[target=torch.ops.fusejit.print.default](args = (None, x = {0!s},
            [%x]), kwargs = {})
        %mul : [num_users=1] = call_function[target=torch.ops.aten.mul.Tensor](args = (%x, 2), kwargs = {})
        return (mul, token)

The chain of tokens keeps the order, the output keeps all of them alive, and nothing in a backward needs them, so
nothing there runs them again. What they read are values of the graph at that point, before or after an in-place change
as the program says.
"""

from __future__ import annotations

import builtins
import contextlib
import string
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .. import torch_private as private
from ..errors import Unsupported, forget_refusal
from .scalar_tensors import is_number

Tensor = torch.Tensor
LIBRARY = torch.library.Library("fusejit", "DEF")
LIBRARY.define("print(Tensor? token, str text, Tensor[] values, Tensor? when=None) -> Tensor")
LIBRARY.define("order(Tensor? token, Tensor[] values) -> Tensor")
LIBRARY.define(
    "check(Tensor? token, Tensor holds, str? text, Tensor[] values, Tensor? when=None, bool by_torch=False) -> Tensor"
)
LOCAL = threading.local()


class CheckFailed(AssertionError, RuntimeError):
    """What `torch._assert_async` checked did not hold: torch raises a RuntimeError, Python's `assert` an
    AssertionError.
    """


class Texts(string.Formatter):
    """`str.format` with one more conversion, "n": a tensor that stands for a number; a batch of numbers is formatted
    one by one.
    """

    def convert_field(self, value: Any, conversion: Any) -> Any:
        if conversion == "n":
            return value if value.dim() else value.item()
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> Any:
        if not isinstance(value, Tensor) or not value.dim() or not format_spec:
            return super().format_field(value, format_spec)
        return "[" + ", ".join([self.format_field(item, format_spec) for item in value]) + "]"


TEXTS = Texts()


def token(*_: Any) -> Tensor:
    """What an op with an effect returns: no elements, on the CPU whatever it looked at."""
    return torch.empty(0, dtype=torch.int8, device="cpu")


@contextlib.contextmanager
def repeating() -> Iterator[None]:
    """While this thread computes something once more: what has been printed and checked is not printed and checked
    again.
    """
    before, LOCAL.repeating = getattr(LOCAL, "repeating", False), True
    try:
        yield
    finally:
        LOCAL.repeating = before


def happens(when: Tensor | None) -> bool:
    return not getattr(LOCAL, "repeating", False) and (when is None or bool(when))


def written(text: str, values: list[Tensor]) -> str:
    return TEXTS.vformat(text, [value.detach() for value in values], {})


def show(before: Tensor | None, text: str, values: list[Tensor], when: Tensor | None = None) -> Tensor:
    if happens(when):
        builtins.print(written(text, values), end="")
    return token()


def check(
    before: Tensor | None,
    holds: Tensor,
    text: str | None,
    values: list[Tensor],
    when: Tensor | None = None,
    by_torch: bool = False,
) -> Tensor:
    if happens(when) and not bool(holds):
        raise (CheckFailed if by_torch else AssertionError)(*(() if text is None else (written(text, values),)))
    return token()


def batch_first(values: list[Tensor], dims: list[int | None]) -> list[Tensor]:
    return [value if dim is None else value.movedim(dim, 0) for value, dim in zip(values, dims)]


def show_batch(
    info: Any, in_dims: Any, before: Any, text: str, values: list[Tensor], when: Any = None
) -> tuple[Tensor, None]:
    """The rule under vmap: one print, with the batch as the first dimension."""
    if len(in_dims) > 3 and in_dims[3] is not None:
        reason = "some rows would print and some not; print behind the `if`, or outside the vmap"
        raise Unsupported("fusejit.print in an `if` on a tensor under vmap", reason)
    return torch.ops.fusejit.print(before, text, batch_first(values, in_dims[2]), when), None


def order_batch(info: Any, in_dims: Any, before: Any, values: list[Tensor]) -> tuple[Tensor, None]:
    return torch.ops.fusejit.order(before, batch_first(values, in_dims[1])), None


def check_batch(
    info: Any,
    in_dims: Any,
    before: Any,
    holds: Tensor,
    text: Any,
    values: list[Tensor],
    when: Any = None,
    by_torch: bool = False,
) -> tuple[Tensor, None]:
    """The rule under vmap: it holds for all rows, or for all that it is asked of."""
    fine = holds if when is None else holds | ~when  # a row's are without dimensions
    return torch.ops.fusejit.check(before, fine.all(), text, batch_first(values, in_dims[3]), None, by_torch), None


IMPLEMENTATIONS: dict[str, tuple[Callable, Callable]] = {
    "print": (show, show_batch), "order": (token, order_batch), "check": (check, check_batch),
}  # fmt: skip
for _name, (_run, _batch) in IMPLEMENTATIONS.items():
    LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fusejit::{_name}", token, lib=LIBRARY)
    torch.library.register_vmap(f"fusejit::{_name}", _batch, lib=LIBRARY)


PRINT: Any = torch.ops.fusejit.print.default
CHECK: Any = torch.ops.fusejit.check.default
ORDER: Any = torch.ops.fusejit.order.default
WHEN = {PRINT: 3, CHECK: 4}
"""The ops that may happen or not, and where their condition stands."""


def masked(func: Any, args: tuple, mask: Tensor) -> tuple:
    """The arguments of such an op where it happens only if a mask holds too: that of an `if` both of whose arms are
    computed.
    """
    place = WHEN[func]
    when = args[place] if len(args) > place else None
    return (*args[:place], mask if when is None else when & mask, *args[place + 1 :])


OPS: frozenset[Any] = frozenset({PRINT, CHECK, ORDER})
"""The ops whose first argument is a token; the capture threads it through them."""
for _op in OPS:
    torch.fx.node.has_side_effect(_op)


# What the user calls.


def print(*args: Any, sep: str = " ", end: str = "\n", **named: Any) -> None:
    """Print what Python's `print` would, with the values that tensors have when this line runs, on every call of a
    compiled program.

    Args:
        args: tensors of any shape, dtype and device, containers of them, and Python values (which are as they were when
            captured).
        sep, end: as for Python's `print`.
        named: values for the fields of those `args` that are strings: `fusejit.print("loss {loss:.3f}", loss=loss)`.

    Prints keep their order among each other and see in-place changes as the program has them. A backward never repeats
    one. Under `vmap` one print shows the whole batch, its dimension first; in an `if` or `while` on a tensor it prints
    when the test holds. Gradients do not flow through and are not shown.

    Raises:
        ValueError: a string has a field that is not among `named`.
    """
    values: list[Tensor] = []
    pieces = [
        formatted(arg, named, values) if named and isinstance(arg, str) else shown(arg, values, "s") for arg in args
    ]
    torch.ops.fusejit.print.default(None, literal(sep).join(pieces) + literal(end), values)


def depend(value: Any, *after: Any) -> Any:
    """Return `value`; what reads it from here on runs after `after`, and `after` is computed even where nothing reads
    it.

    In-place changes and `fusejit.print` are in order by themselves, and need this no more than in eager. It is for
    functions whose effects torch does not know: `y = fusejit.depend(y, start_timer(x))`.

    Args:
        value: anything; after: tensors of any shape and dtype (containers of them too); what is no tensor has nothing
            to wait for.
    """
    waiting = [leaf for leaf in private.tree_leaves(after) if isinstance(leaf, Tensor)]
    if waiting:
        torch.ops.fusejit.order.default(None, waiting)
    return value


def assign(target: Tensor, value: Any) -> Tensor:
    """Write `value` into a parameter or buffer, without a gradient, and return `target`.

    Args:
        target: any tensor, a leaf that requires grad too; value: a tensor or number that broadcasts to its shape; cast
            to its dtype.

    Inside a jitted function the write keeps its place among the reads. As in eager, a gradient that needs the old value
    raises at backward: read `target.clone()` where an earlier value has to survive.
    """
    with torch.no_grad():
        return target.copy_(value) if isinstance(value, Tensor) else target.fill_(value)


# Texts: everything but the tensors is written when the graph is made.


def literal(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def hole(value: Tensor, values: list[Tensor], how: str) -> str:
    values.append(value)
    if hasattr(value, "fake_mode") and value.dim() == 0 and is_number(value):
        how = "!n" + how[2:] if how.startswith("!") else "!n" + how
    return "{" + str(len(values) - 1) + how + "}"


def shown(value: Any, values: list[Tensor], conversion: str) -> str:
    """The text of one argument, with a field for each tensor; `conversion` is "s" for `str` and "r" inside containers,
    as in Python.
    """
    kind = type(value)
    if isinstance(value, Tensor):
        return hole(value, values, f"!{conversion}")
    if kind is dict:
        pairs = [f"{literal(repr(name))}: {shown(item, values, 'r')}" for name, item in value.items()]
        return "{{" + ", ".join(pairs) + "}}"
    if kind is list or kind is tuple:
        inner = ", ".join([shown(item, values, "r") for item in value])
        if kind is list:
            return f"[{inner}]"
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    return literal(repr(value) if conversion == "r" else str(value))


def formatted(text: str, named: dict[str, Any], values: list[Tensor]) -> str:
    """A format string with its fields filled in, those of tensors left open."""
    pieces = []
    for before, name, spec, conversion in string.Formatter().parse(text):
        pieces.append(literal(before))
        if name is None:
            continue
        if name not in named:
            raise ValueError(
                f"fusejit.print: {text!r} has the field {name!r}: give {name or 'name'}=... (fields are names, without "
                ". or [])"
            )
        value, how = named[name], (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
        pieces.append(
            hole(value, values, how) if isinstance(value, Tensor) else literal(("{" + how + "}").format(value))
        )
    return "".join(pieces)


# What an `assert` checks, and says.

ASSERTS: frozenset[Any] = frozenset(
    {torch._assert_async, torch.ops.aten._assert_async.default, torch.ops.aten._assert_async.msg}
)
"""Checks of torch's own, also what Dynamo makes of an `assert`; as ops without a result they would be lost."""


def as_check(holds: Tensor, text: str | None = None, assert_msg: str | None = None) -> tuple[Any, tuple]:
    """The op `check` and its arguments, for the arguments of one of these."""
    said = assert_msg if text is None else text
    return CHECK, (None, holds.reshape(()) != 0, None if said is None else literal(said), [], None, True)


class Holes(TorchFunctionMode):
    """Lets a text be written before the values of tensors in it are known: each leaves a mark."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[Tensor] = []
        self.kinds: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.__format__ and func is not Tensor.__repr__:
            return func(*args, **(kwargs or {}))
        self.kinds.append(hole(args[0], self.values, f":{args[1]}" if func is Tensor.__format__ else "!r"))
        return f"\0{len(self.kinds) - 1}\0"

    def text(self, message: str) -> str:
        pieces = message.split("\0")
        return "".join(self.kinds[int(piece)] if place % 2 else literal(piece) for place, piece in enumerate(pieces))


def message_of(message: Callable[[], Any] | None, line: str) -> tuple[str | None, list[Tensor], str]:
    """Write what an `assert` on a tensor says when it fails: a text, the tensors in it, and why it says something else
    than the user.

    Args:
        message: what stands behind the comma, None if nothing does. line: of the user's; it is said where the message
            cannot be.
    """
    if message is None:
        return None, [], ""
    holes = Holes()
    try:
        with holes:
            text = str(message())
    except (
        Exception
    ) as error:  # Python makes the message only where the check fails: what it raises is no error of the function's
        forget_refusal(error)
        return literal(line), [], f"its message cannot be made in advance ({type(error).__name__}: {error})"
    return holes.text(text), holes.values, ""
