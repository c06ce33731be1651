"""`BoundJitFunction`: a decorated method, looked up on an object.

In: a `JitFunction` in a class, and an instance of that class. Out: what is called, explained, bound like the function,
for this object.

    >>> scale = Scale(2)       # a class with `@fusejit.jit def by(self, x): return x * self.k`
    >>> scale.by(torch.ones(1))
    tensor([2.])
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

from ..specialise.specialisation import Specialisation


class BoundJitFunction:
    """A jitted method together with its object."""

    __slots__ = ("function", "receiver", "__weakref__")

    def __init__(self, function: Any, receiver: Any) -> None:
        self.function, self.receiver = function, receiver

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function.call(self.receiver, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in self.__slots__:  # not made yet: Dynamo looks at objects before their __init__
            raise AttributeError(name)
        return getattr(self.function, name)

    @property
    def __wrapped__(self) -> Any:
        return types.MethodType(self.function.__wrapped__, self.receiver)

    @property
    def __self__(self) -> Any:
        return self.receiver

    def __reduce__(self) -> Any:
        return (BoundJitFunction, (self.function, self.receiver))

    def __deepcopy__(self, memo: Any) -> BoundJitFunction:
        return BoundJitFunction(self.function, copy.deepcopy(self.receiver, memo))

    def explain(self, *args: Any, **kwargs: Any) -> Any:
        return self.function.explain_for(self.receiver, args, kwargs)

    def bind(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        return self.function.bind_for(self.receiver, args, kwargs)

    def program(self, *args: Any, **kwargs: Any) -> Any:
        return self.function.program_for(self.receiver, args, kwargs)

    def specialisation(self, *args: Any, **kwargs: Any) -> Specialisation:
        return self.function.entry_for(self.receiver, args, kwargs).specialisation
