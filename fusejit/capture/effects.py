"""What a function reads and writes outside itself while it is captured.

In: a running capture. Out: every attribute, global and closure cell it read (`reads`, which become guards), and every
attribute, container or global it changed, put back and reported (`Recorder.restore() -> list[Effect]`).

    >>> with Recorder() as recorder:
    ...     recorder.watch(module); module(fake)
    >>> [str(effect) for effect in recorder.restore()]
    ['Net.last was set at model.py:9: self.last = y']

Reads are seen by replacing `__getattribute__` of `nn.Module`, and of the class of every plain object that is reached, while
the capture lasts; globals by looking at the code of each user function that runs. Other threads see the originals' behaviour.
Not seen: class attributes that are written, `obj.__dict__[...]` of a module, containers nested deeper than `DEPTH`.
"""

from __future__ import annotations

import argparse
import dis
import functools
import sys
import threading
import types
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from ..errors import Unsupported
from .lines import frame_line, kind, user_frame

DEPTH = 4
"""How deep lists, tuples, dicts and sets are followed and compared."""
WIDTH = 1000
"""The most elements of one container that are followed."""
CONTAINERS = (list, tuple, dict, set, frozenset, deque)
TABLES = ("_parameters", "_buffers", "_modules")
HOOKS = {
    "_forward_hooks": "a forward hook",
    "_forward_pre_hooks": "a forward pre-hook",
    "_backward_hooks": "a backward hook",
    "_backward_pre_hooks": "a backward pre-hook",
}
NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
REFUSED_CALLS: dict[Any, str] = {print: "print", input: "input"}


@dataclass(slots=True)
class Read:
    """One value that the capture read.

    `how`: item (`table[name]`), absent (`name not in table`), entry (`table[section][name]`), attribute, cell. `written`: the capture
    itself had put the value there, which only the calls of one capture can tell apart (see regions.py).
    """

    how: str
    table: Any
    name: str
    value: Any
    section: str = ""
    snapshot: Any = None
    written: bool = False


@dataclass(frozen=True, slots=True)
class Effect:
    """A write that the captured function makes each time in eager and that the captured graph does not make."""

    target: str
    action: str
    line: str = ""

    def __str__(self) -> str:
        return f"{self.target} was {self.action}" + (f" at {self.line}" if self.line else "")


def freeze(value: Any, depth: int = DEPTH, before: Mapping[int, Any] = MappingProxyType({})) -> Any:
    """Copy containers to the stated depth, so that a later change shows; everything else is kept as it is.

    `before` gives, by id, the old contents of containers that have been changed since.
    """
    if not depth or not isinstance(value, CONTAINERS):
        return value
    value = before.get(id(value), value)
    if isinstance(value, dict):
        return {key: freeze(item, depth - 1, before) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return frozenset(value)
    return [freeze(item, depth - 1, before) for item in value]


@functools.cache
def global_names(code: types.CodeType) -> tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]:
    """Return the attribute chains rooted at globals that a code object loads, and the globals that it stores."""
    loads: dict[tuple[str, ...], None] = {}
    stores: dict[str, None] = {}
    chain: tuple[str, ...] = ()
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            chain = (step.argval,)
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD") and chain:
            chain = (*chain, step.argval)
        elif step.opname in ("CACHE", "PRECALL", "EXTENDED_ARG"):
            continue
        else:
            chain = ()
            if step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                stores[step.argval] = None
        if chain:
            loads[chain] = None
    return tuple(loads), tuple(stores)


class Recorder:
    """Records reads and writes of one thread between `__enter__` and `__exit__`; one at a time in a process."""

    def __init__(self) -> None:
        self.reads: dict[tuple[int, str, str], Read] = {}
        self.sources: dict[int, Read] = {}
        self.writes: dict[tuple[int, str], str] = {}
        self.owner = threading.get_ident()
        self.codes: set[types.CodeType] = set()
        self.watched: dict[int, Any] = {}
        self.snapshots: list[tuple[Any, Any, str]] = []
        self.before: dict[int, Any] = {}
        self.cells: list[tuple[types.CellType, Any]] = []
        self.scopes: set[int] = set()
        self.window = False
        self.stores: dict[tuple[int, str], tuple[dict[str, Any], str, Any]] = {}
        self.patched: list[tuple[type, str, Any]] = []
        self.profiling = False
        self.silent = 0
        self.ignored: set[int] = set()

    # Installing and removing the replaced methods.

    def __enter__(self) -> Recorder:
        self.patch(torch.nn.Module)
        self.patch_apply()
        self.profiling = sys.getprofile() is None
        if self.profiling:
            sys.setprofile(self.on_call)
        return self

    def __exit__(self, *error: object) -> None:
        if self.profiling:
            sys.setprofile(None)
        for cls, name, original in reversed(self.patched):
            if original is MISSING:
                type.__delattr__(cls, name)
            else:
                type.__setattr__(cls, name, original)
        self.patched.clear()

    def replace(self, cls: type, name: str, method: Any) -> None:
        original = cls.__dict__.get(name, MISSING)
        type.__setattr__(cls, name, method)
        self.patched.append((cls, name, original))

    def patch(self, cls: type) -> bool:
        """Replace the attribute methods of a class; False where Python does not allow it."""
        recorder, ident = self, threading.get_ident
        get: Any = cls.__getattribute__
        put: Any = cls.__setattr__
        missing: Any = getattr(cls, "__getattr__", None)

        def getattribute(obj: Any, name: str) -> Any:
            value = get(obj, name)
            if ident() == recorder.owner and not recorder.silent and not name.startswith("__"):
                recorder.note(obj, name, value)
            return value

        def getattr_missing(obj: Any, name: str) -> Any:
            value = missing(obj, name)
            if ident() == recorder.owner and not recorder.silent:
                recorder.note_missing(obj, name, value)
            return value

        def setattribute(obj: Any, name: str, value: Any) -> None:
            if ident() == recorder.owner:
                recorder.writes[id(obj), name] = frame_line(user_frame(sys._getframe(1)))
            put(obj, name, value)

        try:
            self.replace(cls, "__getattribute__", getattribute)
        except TypeError:
            return False
        if missing is not None:
            self.replace(cls, "__getattr__", getattr_missing)
        self.replace(cls, "__setattr__", setattribute)
        return True

    def patch_apply(self) -> None:
        """Refuse `autograd.Function`s whose own backward the graph would lose."""
        original: Any = torch.autograd.Function.__dict__["apply"].__func__
        recorder = self

        def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == recorder.owner and torch.is_grad_enabled():
                differentiable = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in (*args, *kwargs.values()))
                if differentiable:
                    name = f"{cls.__name__} (a torch.autograd.Function)"
                    raise Unsupported(name, "its own backward cannot be captured; keep it outside the jitted function", here())
            return original(cls, *args, **kwargs)

        self.replace(torch.autograd.Function, "apply", classmethod(apply))

    def on_call(self, frame: types.FrameType, event: str, arg: Any) -> None:
        """Profile hook: look at the globals of each user function as it starts; refuse calls that a graph cannot repeat."""
        if event == "call":
            code = frame.f_code
            if code in self.codes:
                return
            self.codes.add(code)
            if kind(code.co_filename) != "torch":
                self.scan(code, frame.f_globals)
        elif event == "c_call" and type(arg) is types.BuiltinFunctionType and arg in REFUSED_CALLS and not self.silent:
            if kind(frame.f_code.co_filename) == "torch":
                return
            reason = "it would run once, while capturing, and not again; move it outside the jitted function"
            raise Unsupported(REFUSED_CALLS[arg], reason, frame_line(frame))

    # Recording reads.

    def add(self, how: str, table: Any, name: str, value: Any, section: str = "") -> None:
        key = (id(table), section or how, name)
        if key in self.reads:
            return
        written = self.written(how, table, name, value, section)
        if written and not self.window:
            return
        before = MappingProxyType({}) if self.window else self.before
        read = self.reads[key] = Read(how, table, name, value, section, freeze(value, before=before), written)
        self.watched.setdefault(id(table), table)
        if isinstance(value, torch.Tensor):
            self.sources.setdefault(id(value), read)
        else:
            self.watch(value)

    def written(self, how: str, table: Any, name: str, value: Any, section: str) -> bool:
        """Whether the capture itself put this value there: it then follows from other reads, and says nothing of the next call."""
        if how not in ("item", "absent", "entry"):
            return False
        holder = table[section] if section else table
        now = MISSING if how == "absent" else value
        _, _, stored = self.stores.get((id(holder), name), (None, "", now))
        before = self.before.get(id(holder))
        return stored is not now or isinstance(before, dict) and before.get(name, MISSING) is not now

    def note(self, obj: Any, name: str, value: Any) -> None:
        """Record that attribute `name` of `obj` was read."""
        if id(obj) in self.ignored:
            return
        self.silent += 1
        try:
            table = getattr(obj, "__dict__", None)
            if type(table) is not dict:
                self.add("attribute", obj, name, value)
            elif name in table:
                if name in HOOKS and value:
                    raise Unsupported(
                        f"{HOOKS[name]} on {type(obj).__name__}", "hooks inside a jitted function run eagerly, with all of it"
                    )
                self.add("item", table, name, table[name])
            else:
                self.note_class(obj, table, name)
        finally:
            self.silent -= 1

    def note_class(self, obj: Any, table: dict[str, Any], name: str) -> None:
        """Record that `name` came from the object's class, and that the object has none of its own."""
        for cls in type(obj).__mro__:
            if name in cls.__dict__:
                users = not cls.__module__.startswith("torch.") and cls is not object
                if users or name == "forward":
                    self.add("absent", table, name, None)
                if users:
                    self.add("item", cls.__dict__, name, cls.__dict__[name])
                return

    def note_missing(self, obj: Any, name: str, value: Any) -> None:
        """Record a read that went through `__getattr__`: a module's parameter, buffer or submodule, or a class's own rule."""
        if id(obj) in self.ignored:
            return None
        self.silent += 1
        try:
            if isinstance(obj, torch.nn.Module):
                for section in TABLES:
                    if name in obj.__dict__.get(section, ()):
                        return self.add("entry", obj.__dict__, name, obj.__dict__[section][name], section)
            self.add("attribute", obj, name, value)
        finally:
            self.silent -= 1

    def scan(self, code: types.CodeType, scope: dict[str, Any]) -> None:
        """Record the globals that a code object loads, and what they hold now for those that it stores."""
        self.silent += 1
        try:
            loads, stores = global_names(code)
            for name in stores:
                self.stores.setdefault((id(scope), name), (scope, name, scope.get(name, MISSING)))
            for *path, name in loads:
                table: Any = scope
                for part in path:
                    holder = table.get(part, MISSING)
                    table = holder.__dict__ if followable(holder) else {}
                self.scopes.add(id(table))
                if name in table:
                    value = table[name]
                    if not (isinstance(value, types.ModuleType) and kind(getattr(value, "__file__", None) or "<user>") == "torch"):
                        self.add("item", table, name, value)
        finally:
            self.silent -= 1

    # Following values.

    def watch(self, value: Any, depth: int = DEPTH) -> None:
        """Follow a value that the function can reach: its reads become guards, its changes are put back."""
        kind_of = type(value)
        if kind_of in LEAVES or id(value) in self.watched and not isinstance(value, dict):
            return
        self.watched[id(value)] = value
        if isinstance(value, torch.nn.Module):
            self.snapshot_object(value)
        elif kind_of is types.FunctionType:
            self.watch_function(value)
        elif kind_of is types.MethodType:
            self.watch(value.__self__)
            self.watch(value.__func__)
        elif kind_of is functools.partial:
            self.watch(value.func)
            self.watch(value.args)
            self.watch(value.keywords)
        elif isinstance(value, CONTAINERS):
            self.watch_container(value, depth)
        elif not isinstance(value, (type, torch.Tensor, types.ModuleType, types.BuiltinFunctionType)):
            self.watch_object(value)

    def watch_function(self, function: types.FunctionType) -> None:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            try:
                value = cell.cell_contents
            except ValueError:
                continue
            self.cells.append((cell, value))
            self.add("cell", cell, name, value)
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.watch(default)
        if hasattr(function, "__wrapped__"):
            self.watch(function.__wrapped__)
        if not self.profiling and kind(function.__code__.co_filename) != "torch" and function.__code__ not in self.codes:
            self.codes.add(function.__code__)
            self.scan(function.__code__, function.__globals__)

    def watch_container(self, value: Any, depth: int) -> None:
        if isinstance(value, (list, dict, set, deque)):
            self.keep(value, type(value).__name__)
        if depth and len(value) <= WIDTH:
            for item in value.values() if isinstance(value, dict) else value:
                self.watch(item, depth - 1)

    def watch_object(self, value: Any) -> None:
        """Follow a plain object: replace its class's methods, or, where Python does not allow that, compare all it holds."""
        cls = type(value)
        inner = getattr(cls, "__module__", "").split(".")[0]
        if inner == "fusejit":
            self.watch(getattr(value, "__wrapped__", None))
        elif inner == "torch" or not hasattr(value, "__dict__") and not hasattr(cls, "__slots__"):
            return
        else:
            module = sys.modules.get(cls.__module__)
            if kind(getattr(module, "__file__", None) or "<user>") == "torch" and cls not in NAMESPACES:
                return  # Python's own objects (loggers, locks): not state of a model
            if hasattr(value, "__dict__"):
                self.snapshot_object(value)
            known = any(base is other for other, name, _ in self.patched for base in cls.__mro__ if name == "__getattribute__")
            if not known and not self.patch(cls) and type(getattr(value, "__dict__", None)) is dict:
                for name, item in list(vars(value).items()):
                    self.add("item", vars(value), name, item)

    def keep(self, holder: Any, owner: str) -> None:
        """Copy a container the first time that it is met; a later copy would hold what the capture wrote."""
        if id(holder) not in self.before:
            self.before[id(holder)] = holder.copy()
            self.snapshots.append((holder, self.before[id(holder)], owner))

    def snapshot_object(self, obj: Any) -> None:
        table = obj.__dict__
        if type(table) is not dict:
            return
        self.keep(table, type(obj).__name__)
        self.watched[id(table)] = table
        for name, value in table.items():
            if isinstance(value, (list, dict, set, deque)) and id(value) not in self.watched:
                self.watched[id(value)] = value
                self.keep(value, f"{type(obj).__name__}.{name}")
        if isinstance(obj, torch.nn.Module):
            for section in TABLES[:2]:
                for name, tensor in table.get(section, {}).items():
                    if tensor is not None:
                        self.sources.setdefault(id(tensor), Read("entry", table, name, tensor, section))

    # Putting back.

    def restore(self) -> list[Effect]:
        """Undo every write that was seen and return them, in the order in which their objects were met."""
        found: list[Effect] = []
        for holder, before, owner in self.snapshots:
            if not same_items(holder, before):
                found.extend(self.describe(holder, before, owner))
                refill(holder, before)
        for cell, value in {id(cell): (cell, value) for cell, value in reversed(self.cells)}.values():  # as each was met first
            if cell.cell_contents is not value:
                found.append(Effect("a closure variable", "set"))
                cell.cell_contents = value
        for scope, name, value in self.stores.values():
            if scope.get(name, MISSING) is not value:
                found.append(Effect(f"the global {name}", "set"))
                if value is MISSING:
                    scope.pop(name, None)
                else:
                    scope[name] = value
        return found

    def describe(self, holder: Any, before: Any, owner: str) -> list[Effect]:
        if not isinstance(holder, dict):
            return [Effect(f"a {owner}" if owner == type(holder).__name__ else owner, "changed")]
        names = [name for name in {**before, **holder} if holder.get(name, MISSING) is not before.get(name, MISSING)]
        lines = {name: line for (_, name), line in self.writes.items()}
        return [Effect(f"{owner}.{name}", "set" if name in holder else "deleted", lines.get(name, "")) for name in names]


class _Missing:
    def __repr__(self) -> str:
        return "<missing>"


MISSING = _Missing()
LEAVES = frozenset(
    {
        int,
        float,
        bool,
        str,
        bytes,
        complex,
        type(None),
        torch.Tensor,
        torch.nn.Parameter,
        torch.dtype,
        torch.device,
        torch.Size,
        range,
        slice,
    }
)


def followable(value: Any) -> bool:
    """Whether attributes of a global are followed by name: the user's modules and classes."""
    if isinstance(value, types.ModuleType):
        return kind(getattr(value, "__file__", None) or "<user>") != "torch"
    return isinstance(value, type) and kind(getattr(sys.modules.get(value.__module__), "__file__", None) or "<user>") != "torch"


def same_items(holder: Any, before: Any) -> bool:
    """Whether a container holds the very same objects as before."""
    if len(holder) != len(before):
        return False
    if isinstance(holder, dict):
        return all(dict.get(holder, name, MISSING) is value for name, value in before.items())
    if isinstance(holder, set):
        return bool(holder == before)
    return all(one is other for one, other in zip(holder, before))


def refill(holder: Any, before: Any) -> None:
    """Give a container its old contents back, in place."""
    holder.clear()
    (holder.extend if isinstance(holder, (list, deque)) else holder.update)(before)


def here() -> str:
    """The user's line that is running now."""
    return frame_line(user_frame(sys._getframe(1)))
