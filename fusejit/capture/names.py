"""Which names outside itself a function loads: read off its bytecode, before it runs.

In: a code object. Out: the attribute chains rooted at globals and closure variables that it loads, and the globals that it stores.

    >>> global_names(compile("y = config.model.width * k", "f", "exec"))
    ((('config',), ('config', 'model'), ('config', 'model', 'width'), ('k',)), ())
"""

from __future__ import annotations

import dis
import functools
import sys
import types
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from .lines import kind

ROOTS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF")
ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
SILENT = ("CACHE", "PRECALL", "EXTENDED_ARG")
STATE = frozenset(
    {
        torch.get_float32_matmul_precision,
        torch.get_num_threads,
        torch.get_num_interop_threads,
        torch.is_anomaly_enabled,
        torch.is_anomaly_check_nan_enabled,
        torch.is_deterministic_algorithms_warn_only_enabled,
        torch.get_deterministic_debug_mode,
    }
)
"""Functions that read a state of torch which the key of a call leaves out: asked again where the user's code loads one."""


@functools.cache
def global_names(code: types.CodeType) -> tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]:
    """Return the attribute chains rooted at globals or closure variables that a code object loads, and the globals that it stores."""
    loads: dict[tuple[str, ...], None] = {}
    stores: dict[str, None] = {}
    chain: tuple[str, ...] = ()
    for step in dis.get_instructions(code):
        if step.opname in ROOTS and step.argval.isidentifier():  # others are names that pytest puts into a test's assert
            chain = (step.argval,)
        elif step.opname in ATTRIBUTES and chain:
            chain = (*chain, step.argval)
        elif step.opname in SILENT:
            continue
        else:
            chain = ()
            if step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                stores[step.argval] = None
        if chain:
            loads[chain] = None
    return tuple(loads), tuple(stores)


def followable(value: Any) -> bool:
    """Whether attributes of a global are followed by name: the user's modules and classes."""
    if isinstance(value, types.ModuleType):
        return kind(getattr(value, "__file__", None) or "<user>") != "torch"
    return users_class(value)


def users_class(value: Any) -> bool:
    """Whether a value is a class that is no part of torch or Python."""
    return isinstance(value, type) and kind(getattr(sys.modules.get(value.__module__), "__file__", None) or "<user>") != "torch"


def torch_state(value: Any) -> bool:
    """Whether a global is one of torch's namespaces of switches: ``torch.backends.cudnn`` and the like."""
    return isinstance(value, types.ModuleType) and value.__name__.startswith("torch.backends")


TABLES_OF_CLASSES: dict[type, Mapping[str, Any]] = weakref.WeakKeyDictionary()  # type: ignore[assignment]


def class_table(cls: type) -> Mapping[str, Any]:
    """A class's `__dict__`, the same object each time (Python makes a new proxy of it at every look)."""
    return TABLES_OF_CLASSES.setdefault(cls, cls.__dict__)


def full(cell: types.CellType) -> bool:
    """Whether a closure variable has a value yet."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
