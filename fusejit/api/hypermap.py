"""HyperMap and MultitypeFuncGraph: one function over nested sequences, chosen at each element by the types it finds
there.

In: a function of n elements and n nested sequences. Out: a tuple of the same nesting. Plain Python: eager as it stands;
inside `jit` it is unrolled by the capture, and what it does to many tensors becomes few kernels
(codegen/passes/horizontal.py).

    >>> HyperMap(lambda x: x * x)(((1, 2), (3, 4)))
    ((1, 4), (9, 16))

The idea and the names are MindSpore's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..capture.source_lines import frame_line, user_frame

# Names that `register` takes besides Python types, and what they stand for; a bool is a Number but no Int, as in
# MindSpore.
NAMES: dict[str, tuple[type, ...]] = {
    "Tensor": (torch.Tensor,),
    "Number": (int, float, complex),
    "Int": (int,),
    "Float": (float,),
    "Complex": (complex,),
    "Bool": (bool,),
    "String": (str,),
    "Tuple": (tuple,),
    "List": (list,),
    "Dictionary": (dict,),
    "Dict": (dict,),
    "None": (type(None),),
    "Dtype": (torch.dtype,),
    "Any": (object,),
}
NO_BOOL = ("Int",)


def _complain(kind: type[Exception], what: str) -> Exception:
    line = frame_line(user_frame(sys._getframe(1)))
    return kind(what + (f" (at {line})" if line else ""))


@dataclass(frozen=True, slots=True)
class Overload:
    """A registered function: the names or types it was registered with, and the function."""

    types: tuple[Any, ...]
    fn: Callable

    __wrapped__ = property(lambda self: self.fn)  # what a capture follows

    def distance(self, args: tuple[Any, ...]) -> int | None:
        """Return how far the arguments' types are from the registered ones, None if they do not match."""
        if len(args) != len(self.types):
            return None
        steps = [_steps(wanted, value) for wanted, value in zip(self.types, args, strict=True)]
        return None if None in steps else sum(s for s in steps if s is not None)

    def __str__(self) -> str:
        return f"({', '.join(map(_spelled, self.types))})"


def _steps(wanted: Any, value: Any) -> int | None:
    """Return how many base classes lie between a value's type and a registered one, doubled: 0 if it is that very
    type.
    """
    if isinstance(wanted, torch.dtype):
        return -1 if isinstance(value, torch.Tensor) and value.dtype is wanted else None  # nearer than any Tensor
    classes = NAMES[wanted] if isinstance(wanted, str) else (wanted,)
    if isinstance(value, bool) and wanted in NO_BOOL:
        return None
    if not isinstance(value, classes):
        return None
    if torch.Tensor in classes:
        return 0 if type(value) is torch.Tensor else 1  # a parameter, or what a capture puts in a tensor's place
    bases = type(value).__mro__
    near = min((bases.index(c) for c in classes if c in bases), default=len(bases))
    return 2 * near + (wanted == "Number")  # Int, Float and bool are nearer than Number


def _spelled(wanted: Any) -> str:
    return wanted if isinstance(wanted, str) else getattr(wanted, "__name__", str(wanted))


class MultitypeFuncGraph:
    """A function with one implementation for each combination of argument types.

    Args:
        name: for messages.
        read_value: the implementations only read their arguments; one that changes a tensor in place then raises.

    Raises:
        TypeError: the name is no string.

    >>> add = MultitypeFuncGraph("add")
    >>> @add.register("Tensor", "Number")
    ... def add_number(x, y):
    ...     return x + y
    >>> add(torch.ones(2), 1)
    tensor([2., 2.])
    """

    _holds_user_state = True

    def __init__(self, name: str, read_value: bool = False) -> None:
        if not isinstance(name, str):
            raise _complain(TypeError, f"MultitypeFuncGraph takes a name, not {name!r}")
        if not isinstance(read_value, bool):
            raise _complain(TypeError, f"MultitypeFuncGraph {name!r}: read_value is True or False, not {read_value!r}")
        self.name, self.read_value = name, read_value
        self.overloads: tuple[Overload, ...] = ()

    def register(self, *types: Any) -> Callable[[Callable], Callable]:
        """Decorate the implementation for arguments of these types.

        Args:
            types: one for each argument: a name ("Tensor", "Tuple", "List", "Number", "Int", "Float", "Bool", "String",
                "None", ...), a Python type, or a torch.dtype (a tensor of that dtype). The nearest registered types
                win; the same ones again replace.

        Raises:
            TypeError: something else.
        """
        for kind in types:
            if isinstance(kind, str) and kind not in NAMES:
                raise _complain(
                    TypeError,
                    f"MultitypeFuncGraph {self.name!r}: no type is called {kind!r}; choose one of {', '.join(NAMES)}",
                )
            if not isinstance(kind, (str, type, torch.dtype)):
                raise _complain(
                    TypeError,
                    f"MultitypeFuncGraph {self.name!r}: {kind!r} is no type, no torch.dtype and no type's name",
                )
        if not types:
            raise _complain(
                TypeError,
                f"MultitypeFuncGraph {self.name!r}: register takes the types of the arguments: register('Tensor')",
            )

        def decorate(fn: Callable) -> Callable:
            if not callable(fn):
                raise _complain(
                    TypeError, f"MultitypeFuncGraph {self.name!r}: register decorates a function, not {fn!r}"
                )
            self.overloads = (*(o for o in self.overloads if o.types != types), Overload(types, fn))
            return fn

        return decorate

    def __call__(self, *args: Any) -> Any:
        """Call the implementation whose types are nearest to the arguments'.

        Raises:
            ValueError: none matches.
        """
        found = [
            (distance, overload) for overload in self.overloads if (distance := overload.distance(args)) is not None
        ]
        if not found:
            given = ", ".join(type(a).__name__ for a in args)
            have = ", ".join(map(str, self.overloads)) or "nothing"
            raise _complain(
                ValueError, f"MultitypeFuncGraph {self.name!r} has no function for ({given}); registered: {have}"
            )
        fn = min(found, key=lambda pair: pair[0])[1].fn
        return self._reading(fn, args) if self.read_value else fn(*args)

    def _reading(self, fn: Callable, args: tuple[Any, ...]) -> Any:
        tensors = [a for a in args if isinstance(a, torch.Tensor) and not a.is_inference()]
        before = [a._version for a in tensors]
        result = fn(*args)
        if before != [a._version for a in tensors]:
            raise _complain(
                ValueError,
                f"MultitypeFuncGraph {self.name!r} has read_value=True, but {fn.__name__} changed an argument in place",
            )
        return result

    def __repr__(self) -> str:
        return f"MultitypeFuncGraph({self.name!r}, {', '.join(map(str, self.overloads))})"


class HyperMap:
    """Apply a function to the elements of nested sequences.

    Args:
        ops: the function, or a MultitypeFuncGraph; None: the first argument of each call is the function.
        reverse: call it on the last elements first; the result's order stays.

    A call takes one or more sequences of the same nesting. As soon as one of them is at an element (whatever is no
    tuple, list or dict: a tensor, a number, a dataclass), the function gets what all of them hold there, so a tensor
    may meet a whole tuple. Sequences give a tuple (a named tuple its own type), dicts with the same keys a dict.

    Raises:
        TypeError: a tuple meets a list, or a NumPy array, a generator or a set is given. ValueError: lengths or keys
            differ.

    >>> HyperMap()(lambda x, y: x + y, [1, (2, 3)], [10, (20, 30)])
    (11, (22, 33))
    """

    _holds_user_state = True

    def __init__(self, ops: Callable | None = None, reverse: bool = False) -> None:
        if ops is not None and not callable(ops):
            raise _complain(TypeError, f"HyperMap takes a function or None, not {ops!r}")
        if not isinstance(reverse, bool):
            raise _complain(TypeError, f"HyperMap: reverse is True or False, not {reverse!r}")
        self.ops, self.reverse = ops, reverse

    def __call__(self, *args: Any) -> Any:
        ops, rest = (self.ops, args) if self.ops is not None else (args[0] if args else None, args[1:])
        if not callable(ops):
            raise _complain(
                TypeError, f"HyperMap() without a function takes it as the first argument of the call, not {ops!r}"
            )
        if not rest:
            raise _complain(TypeError, "HyperMap is called with at least one sequence: HyperMap(f)(xs)")
        return self._map(ops, rest)

    def _map(self, ops: Callable, args: tuple[Any, ...]) -> Any:
        for arg in args:
            _check(arg)
        if all(isinstance(arg, Mapping) for arg in args):
            return self._dicts(ops, args)
        if not all(isinstance(arg, (tuple, list)) for arg in args):
            return ops(*args)
        if len({isinstance(arg, list) for arg in args}) > 1:
            kinds = ", ".join(type(arg).__name__ for arg in args)
            raise _complain(TypeError, f"HyperMap: a list meets a tuple ({kinds}); convert one of them")
        if len({len(arg) for arg in args}) > 1:
            raise _complain(
                ValueError, f"HyperMap: the sequences have {', '.join(str(len(arg)) for arg in args)} elements"
            )
        results = self._each(ops, list(zip(*args, strict=True)))
        return type(args[0])(*results) if hasattr(args[0], "_fields") else tuple(results)

    def _dicts(self, ops: Callable, args: tuple[Any, ...]) -> dict[Any, Any]:
        keys = list(args[0])
        for arg in args[1:]:
            if arg.keys() != args[0].keys():
                raise _complain(ValueError, f"HyperMap: dicts with different keys: {keys} and {list(arg)}")
        return dict(zip(keys, self._each(ops, [tuple(arg[key] for arg in args) for key in keys]), strict=True))

    def _each(self, ops: Callable, rows: list[tuple[Any, ...]]) -> list[Any]:
        results = [self._map(ops, row) for row in (reversed(rows) if self.reverse else rows)]
        return results[::-1] if self.reverse else results

    def __repr__(self) -> str:
        return f"HyperMap({self.ops!r}{', reverse=True' if self.reverse else ''})"


def _check(arg: Any) -> None:
    """Refuse what looks like a sequence or a tensor and is neither.

    Raises:
        TypeError: see there.
    """
    if type(arg).__module__ == "numpy":
        raise _complain(
            TypeError,
            f"HyperMap: a NumPy {type(arg).__name__} is no tensor; convert it with torch.from_numpy or float()",
        )
    if isinstance(arg, (Iterator, set, frozenset)):
        raise _complain(
            TypeError, f"HyperMap: a {type(arg).__name__} has no order or only one pass; make it a tuple: tuple(...)"
        )
    if isinstance(arg, (torch.nn.ParameterList, torch.nn.ModuleList)):
        raise _complain(TypeError, f"HyperMap: a {type(arg).__name__} is a module; make it a tuple: tuple(...)")
