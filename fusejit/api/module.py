"""`JitModule`: an `nn.Module` that runs compiled and is otherwise the original: its parameters, buffers, names,
methods.

In: a module and `Settings`. Out: a module.

    >>> fast = JitModule(model, Settings())
    >>> fast.state_dict().keys() == model.state_dict().keys()
    True
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from ..options import Settings
from ..specialise.specialisation import Specialisation
from .dynamo_function import jit_function
from .function import CacheInfo, JitFunction

FUNCTIONS: weakref.WeakKeyDictionary[torch.nn.Module, dict[Settings, weakref.ref[JitFunction]]] = (
    weakref.WeakKeyDictionary()
)
"""The jitted functions of modules, so that jitting a module twice compiles once."""


class JitModule(torch.nn.Module):
    """A jitted `nn.Module`: the same parameters, buffers, names and methods; calling it runs the compiled module.

    `state_dict`, `parameters`, `train`, `to` and the like are the original's; hooks registered on the JitModule run
    around the compiled call, and so does a `forward` that is set on it (`fast.forward = wrapper(fast.forward)`), as
    Python.
    """

    _fusejit_ready = False

    def __init__(self, module: torch.nn.Module, settings: Settings) -> None:
        super().__init__()
        own = self.__dict__
        for name in ("training", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            own.pop(name, None)
        own["__wrapped__"] = module
        settings = replace(settings, name=settings.name or type(module).__name__)
        known = FUNCTIONS.setdefault(module, {})
        function = known[settings]() if settings in known else None
        if function is None:
            function = jit_function(module, settings)
            known[settings] = weakref.ref(function)
        own["_fusejit_function"] = function
        own["_fusejit_settings"] = settings
        own["_fusejit_hooks"] = tuple(
            own[name] for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        )
        own["_fusejit_ready"] = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; hooks that were registered on the JitModule run around it (global ones belong to the module
        inside).
        """
        if any(self._fusejit_hooks) or "forward" in self.__dict__:
            return super().__call__(*args, **kwargs)
        return self._fusejit_function(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._fusejit_function.call(None, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "__wrapped__" or "__wrapped__" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["__wrapped__"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        own = not self._fusejit_ready or name in self.__dict__ or name == "forward"
        if own or name == "__class__":  # torch's fully_shard gives modules a class of their own
            object.__setattr__(self, name, value)
        else:
            setattr(self.__wrapped__, name, value)

    def __delattr__(self, name: str) -> None:
        if name == "forward" and name in self.__dict__:
            object.__delattr__(self, name)
        else:
            delattr(self.__wrapped__, name)

    def __reduce__(self) -> Any:
        """The module inside, the options, and what belongs to the JitModule alone: its hooks."""
        own = {
            name: value
            for name, value in self.__dict__.items()
            if value and name != "__wrapped__" and not name.startswith("_fusejit")
        }
        return (JitModule, (self.__wrapped__, self._fusejit_settings), own)

    def __deepcopy__(self, memo: Any) -> JitModule:
        _, parts, own = self.__reduce__()
        made = JitModule(*copy.deepcopy(parts, memo))
        made.__setstate__(copy.deepcopy(own, memo))
        return made

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():  # into the tables that are there: calls look at these
            table = self.__dict__.get(name)
            if isinstance(table, dict):
                table.update(value)
            else:
                self.__dict__[name] = value

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__reduce__()

    def __repr__(self) -> str:
        return f"JitModule({self.__wrapped__!r})"

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self.__wrapped__)})

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Module]]:
        """Those of the module inside; itself instead of the outermost one where a library (fully_shard) gave it a class
        of its own.
        """
        for name, module in self.__wrapped__.named_modules(*args, **kwargs):
            yield name, self if module is self.__wrapped__ and type(self) is not JitModule else module

    def modules(self, remove_duplicate: bool = True) -> Iterator[torch.nn.Module]:
        return (module for _, module in self.named_modules(remove_duplicate=remove_duplicate))

    def __bool__(self) -> bool:
        return bool(self.__wrapped__)

    def __len__(self) -> int:
        return len(self.__wrapped__)

    def __iter__(self) -> Any:
        return iter(self.__wrapped__)

    def __getitem__(self, index: Any) -> Any:
        return self.__wrapped__[index]

    def explain(self, *args: Any, **kwargs: Any) -> Any:
        """See `JitFunction.explain`."""
        return self._fusejit_function.explain(*args, **kwargs)

    def program(self, *args: Any, **kwargs: Any) -> Any:
        """See `JitFunction.program`."""
        return self._fusejit_function.program(*args, **kwargs)

    def bind(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """See `JitFunction.bind`; hooks of the JitModule itself do not run."""
        return self._fusejit_function.bind(*args, **kwargs)

    def specialisation(self, *args: Any, **kwargs: Any) -> Specialisation:
        return self._fusejit_function.specialisation(*args, **kwargs)

    def cache_info(self) -> CacheInfo:
        """See `JitFunction.cache_info`."""
        return self._fusejit_function.cache_info()


def forwarded(name: str) -> Callable:
    """A method that is the original module's; where that returns itself, the JitModule."""
    original = getattr(torch.nn.Module, name)

    @functools.wraps(original)
    def method(self: JitModule, *args: Any, **kwargs: Any) -> Any:
        result = getattr(self.__wrapped__, name)(*args, **kwargs)
        return self if result is self.__wrapped__ else result

    return method


# What nn.Module defines and a JitModule takes from the original: everything about its contents, nothing about calls and
# hooks.
CONTENTS = (
    "state_dict",
    "load_state_dict",
    "_load_from_state_dict",
    "_save_to_state_dict",
    "named_parameters",
    "parameters",
    "named_buffers",
    "buffers",
    "named_children",
    "children",
    "train",
    "eval",
    "requires_grad_",
    "zero_grad",
    "_apply",
    "apply",
    "cuda",
    "cpu",
    "type",
    "float",
    "double",
    "half",
    "bfloat16",
    "to",
    "to_empty",
    "share_memory",
    "register_buffer",
    "register_parameter",
    "register_module",
    "add_module",
    "get_submodule",
    "set_submodule",
    "get_parameter",
    "get_buffer",
    "get_extra_state",
    "set_extra_state",
    "extra_repr",
    "_named_members",
    "register_load_state_dict_post_hook",
    "register_state_dict_pre_hook",
    "_register_state_dict_hook",
    "register_load_state_dict_pre_hook",
)
for _name in CONTENTS:
    if hasattr(torch.nn.Module, _name):
        setattr(JitModule, _name, forwarded(_name))
