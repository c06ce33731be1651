"""`jit_class`: a plain class whose methods are jitted.

In: a class. Out: the same class, its public methods and `__call__` as `JitFunction`s.

    >>> @fusejit.jit_class
    ... class Scale:
    ...     def __init__(self, by):
    ...         self.by = by
    ...     def __call__(self, x, y):
    ...         return self.by * (x + y)
    >>> Scale(2)(torch.tensor(2), torch.tensor(3))
    tensor(10)

Inside another jitted function (or module) its instances are made, called and read as in Python, and become part of that
graph; what `__init__` keeps are constants or tensors of that graph. Attributes that a method reads are guarded, so
changing one recompiles.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch

from ..capture import tracer
from ..errors import CaptureError
from .jit import jit

MARK = "__fusejit_class__"


class NoCallError(CaptureError, ValueError):
    """An instance of a `jit_class` was called inside a jitted function, and its class has no `__call__`."""


def jit_class(cls: Any = None, **options: Any) -> Any:
    """Compile a plain class's methods; also a decorator with options.

    Args:
        cls: a class that is no `nn.Module`: changed in place and returned. Static and class methods are jitted too;
            properties, names with a leading underscore and `__init__` stay as they are. Subclasses get the same for the
            methods that they define.
        options: of `fusejit.jit`, for each method.

    With jit switched off the methods are plain Python.

    Raises:
        TypeError: `cls` is an `nn.Module`, which `fusejit.jit` takes, or no class. ValueError (from a jitted function
            that calls an instance whose class has no `__call__`).
    """
    if cls is None:
        return functools.partial(jit_class, **options)
    jit(**options)  # refuses wrong options even where there is no method
    if not isinstance(cls, type):
        raise TypeError(f"Decorator jit_class can only be used for class type, but got {cls!r}")
    if issubclass(cls, torch.nn.Module):
        reason = "use fusejit.jit(module) instead"
        raise TypeError(
            f"Decorator jit_class is used for user-defined classes and cannot be used for nn.Module: {cls.__name__}; "
            f"{reason}"
        )
    jit_methods(cls, options)
    if MARK not in cls.__dict__:
        setattr(cls, MARK, True)
        inherit(cls, options)
    if not any("__call__" in base.__dict__ for base in cls.__mro__):
        setattr(cls, "__call__", no_call)  # noqa: B010  # found on the class, as Python looks it up
    return cls


def jit_methods(cls: type, options: dict[str, Any]) -> None:
    for name, value in list(cls.__dict__.items()):
        method = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
        if isinstance(method, types.FunctionType) and (name == "__call__" or not name.startswith("_")):
            setattr(cls, name, jit(value, **options))


def inherit(cls: Any, options: dict[str, Any]) -> None:
    """Make subclasses jit their own methods, after whatever the class did with subclasses already."""
    before = cls.__dict__.get("__init_subclass__")

    def __init_subclass__(sub: type, **given: Any) -> None:
        if before is not None:
            before.__get__(None, sub)(**given)
        else:
            super(cls, sub).__init_subclass__(**given)
        jit_methods(sub, options)

    cls.__init_subclass__ = classmethod(__init_subclass__)


def no_call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """What calling an instance does whose class has no `__call__`."""
    name = type(self).__name__
    if tracer.active():
        raise NoCallError(f"jit_class: '{name}' has no __call__ function, please check the code.")
    raise TypeError(f"'{name}' object is not callable")
