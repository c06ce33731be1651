"""Global names: which names outside itself a function loads: read off its bytecode, before it runs.

In: a code object. Out: the attribute chains rooted at globals and closure variables that it loads, and the globals that
it stores.

    >>> global_names(compile("y = config.model.width * k", "f", "exec"))
    ((('config',), ('config', 'model'), ('config', 'model', 'width'), ('k',)), ())
"""

from __future__ import annotations

import dis
import functools
import sys
import types
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ..source_lines import kind, shorten, stack_entry

ROOTS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF")
ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM")
IMPORT = "import "
"""What the name of a module begins with that the code itself imports."""
LOCALS = ("LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_CHECK", "LOAD_DEREF")
TABLES = ("_parameters", "_buffers", "_modules")
"""Where a module keeps what it has no attribute for."""
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
"""Functions that read a state of torch which the key of a call leaves out: asked again where the user's code loads
one.
"""


@functools.cache
def global_names(code: types.CodeType) -> tuple[tuple[tuple[str, ...], ...], tuple[tuple[str, ...], ...]]:
    """Return the attribute chains rooted at globals, closure variables or imports that a code object loads, and those
    that it stores.
    """
    loads: dict[tuple[str, ...], None] = {}
    stores: dict[tuple[str, ...], None] = {}
    imported: dict[str, str] = {}  # by local variable
    chain: tuple[str, ...] = ()
    changed: dict[tuple[str, ...], None] = {}  # what `a.b += 1` looks up once, for both
    for step in dis.get_instructions(code):
        if step.opname in LOCALS and step.argval in imported:
            chain = (IMPORT + imported[step.argval],)
        elif (
            step.opname in ROOTS and step.argval.isidentifier()
        ):  # others are names that pytest puts into a test's assert
            chain = (step.argval,)
        elif step.opname == "IMPORT_NAME":
            chain = (IMPORT + step.argval,)
        elif step.opname == "COPY" and chain:
            changed[chain] = None
        elif step.opname in ATTRIBUTES and chain:
            chain = (*chain, step.argval)
        elif step.opname in SILENT:
            continue
        else:
            if step.opname in ("STORE_FAST", "STORE_DEREF") and len(chain) == 1 and chain[0].startswith(IMPORT):
                imported[step.argval] = chain[0].removeprefix(IMPORT).split(".")[0]
            if step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                stores[step.argval,] = None
            if step.opname in ("STORE_ATTR", "DELETE_ATTR"):
                stores |= {(*holder, step.argval): None for holder in ([chain] if chain else changed)}
            chain = ()
        if chain:
            loads[chain] = None
    return tuple(chain for chain in loads if not chain[-1].startswith(IMPORT)), tuple(stores)


def item_line(codes: Iterable[types.CodeType], key: str) -> str:
    """The user's line among codes that stores or deletes an item; of several, one that names the key, else the
    first.
    """
    found: list[str] = []
    for code in codes:
        if kind(code.co_filename) != "torch":
            steps = (s for s in dis.get_instructions(code) if s.opname in ("STORE_SUBSCR", "DELETE_SUBSCR"))
            numbers = [step.positions.lineno or 0 for step in steps if step.positions]
            found += [shorten(stack_entry(code.co_filename, number, code.co_name)) for number in numbers]
    return next((line for line in found if key in line), found[0] if found else "")


def holder_of(path: Sequence[str], name: str, scope: Any, free: Mapping[str, Any]) -> Any:
    """Return what holds `name` at the end of a chain: a scope, a module, the table of a class; an empty dict for
    anything else.
    """
    first = path[0] if path else name
    table: Any = free if first in free else sys.modules if first.startswith(IMPORT) else scope
    for part in path:
        part = part.removeprefix(IMPORT)
        holder = table.get(part) if isinstance(table, Mapping) else getattr(table, part, None)
        table = (
            holder
            if isinstance(holder, types.ModuleType)
            else class_table(holder)
            if isinstance(holder, type) and followable(holder)
            else {}
        )
    return table


def followable(value: Any) -> bool:
    """Whether attributes of a global are followed by name: the user's modules and classes."""
    if isinstance(value, types.ModuleType):
        return kind(getattr(value, "__file__", None) or "<user>") != "torch"
    return users_class(value)


def users_class(value: Any) -> bool:
    """Whether a value is a class that is no part of torch or Python."""
    return (
        isinstance(value, type)
        and kind(getattr(sys.modules.get(value.__module__), "__file__", None) or "<user>") != "torch"
    )


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


def innermost(value: Any) -> types.FunctionType | None:
    """The function that a partial, a method or a chain of them calls in the end; None where it is no function of
    Python.
    """
    while (inner := getattr(value, "func", None) or getattr(value, "__func__", None)) is not None:
        value = inner
    return value if isinstance(value, types.FunctionType) else None
