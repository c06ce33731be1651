"""Recorder: what a function reads and writes outside itself while it is captured.

In: a running capture. Out: every attribute, global and closure cell it read (`reads`, which become guards), and every
attribute, container or global it can change, as it was before (`snapshots`, `cells`, `stores`: see writes.py).

    >>> with Recorder() as recorder:
    ...     recorder.watch(module); module(fake)
    >>> [str(change.effect) for change in restore(recorder, ())]
    ['Net.last was set at model.py:9: self.last = y']

Reads are seen by replacing `__getattribute__` of `nn.Module`, and of the class of every plain object that is reached,
while the capture lasts; globals by looking at the code of each user function that runs. Other threads see the
originals' behaviour. Also read, in the functions and classes that are reached: code, defaults, attributes and special
methods. Not seen: class attributes that are reached through `type(obj)`, `obj.__dict__[...]` of a module, containers
nested deeper than `DEPTH`, `os.environ`.
"""

from __future__ import annotations

import argparse
import functools
import sys
import threading
import types
from collections import ChainMap, UserDict, UserList
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from ...errors import Unsupported
from ..checkpoints import Checkpoints
from ..source_lines import frame_line, kind, user_frame
from .backwards import APPLY, refuse_applies, see_apply
from .before import Before
from .blind import attribute_use, is_addition, variable_uses
from .environment import on_builtin_call, refuse_marks, seer
from .global_names import (
    STATE,
    TABLES,
    class_table,
    followable,
    full,
    global_names,
    holder_of,
    innermost,
    torch_state,
    users_class,
)
from .iterators import Streams, is_stand_in
from .profile_hook import Hook
from .reach import CHANGING
from .reads import CONTAINERS, DEPTH, MISSING, WIDTH, Effect, Read, freeze, tensors_within

HOOKS = {
    "_forward_hooks": "a forward hook",
    "_forward_pre_hooks": "a forward pre-hook",
    "_backward_hooks": "a backward hook",
    "_backward_pre_hooks": "a backward pre-hook",
}
PARALLEL = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel")
PARALLEL_WAY_OUT = (
    "each of its calls prepares the exchange of gradients, which a graph does not repeat; "
    "jit the module inside it: Parallel(fusejit.jit(m))"
)
NAMESPACES = (types.SimpleNamespace, argparse.Namespace, ChainMap, UserDict, UserList)
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
ONCE = "it would run once, while capturing, and not again; move it outside the jitted function"
REFUSED_CALLS: dict[Any, Any] = {
    print: ("print", ONCE + ", or use fusejit.print, which prints on every call"),
    input: ("input", ONCE),
}


class Recorder(Before):
    """Records reads and writes of one thread between `__enter__` and `__exit__`; one at a time in a process."""

    def __init__(self, rewrite: Callable | None = None) -> None:
        super().__init__()
        self.rewrite = rewrite
        self.reads: dict[tuple[int, str, str], Read] = {}
        self.sources: dict[int, Read] = {}
        self.writes: dict[tuple[int, str], str] = {}
        self.owner = threading.get_ident()
        self.codes: dict[types.CodeType, Callable | None] = {}  # that have run, each with what sees every call of it
        self.watched: dict[int, Any] = {}
        self.streams = Streams()
        self.around: tuple[Any, ...] = (self.streams, Checkpoints())
        # by key of `reads`: values that are only added to, and how
        self.blind: dict[tuple[int, str, str], tuple[Read, set[str]]] = {}
        self.functions: set[int] = set()  # tables of their attributes
        self.marked: list[torch.Tensor] = []  # arguments on which the user's code keeps something
        self.lines: dict[int, str] = {}  # by id of a container: where the body changed it
        self.messages: dict[str, Effect] = {}  # by line: what only the capture logs or warns
        self.tables: set[int] = set()  # of the objects whose attributes are read by name
        self.scopes: set[int] = set()
        self.window = False
        self.stores: dict[tuple[int, str], tuple[dict[str, Any], str, Any]] = {}
        self.patched: list[tuple[type, str, Any]] = []
        self.hook = Hook(self.on_call)
        self.ignored: set[int] = set()
        self.classed: set[tuple[type, str]] = set()
        self.born: dict[int, Any] = {}  # objects that the body makes: what they hold is nothing that was there before
        self.newborn: dict[int, Any] = {}  # and their attributes, by id
        self.twins: Mapping[int, Any] = {}  # real tensors' stand-ins in the trace, by id
        self.inference = torch.is_inference_mode_enabled()

    # Installing and removing the replaced methods.

    def __enter__(self) -> Recorder:
        self.patch(torch.nn.Module)
        refuse_applies(self)
        refuse_marks(self)
        for state in self.around:
            state.__enter__()
        self.hook.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.hook.__exit__()
        for state in self.around:
            state.__exit__()
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
            try:
                value = get(obj, name)
            except AttributeError:
                if missing is None and ident() == recorder.owner:
                    recorder.note_absent(obj, name)
                raise
            if ident() == recorder.owner and not recorder.silent and not name.startswith("__"):
                recorder.note(obj, name, value)
                if name == "forward" and recorder.rewrite is not None and isinstance(obj, torch.nn.Module):
                    return recorder.rewrite(value, obj)
            return value

        def getattr_missing(obj: Any, name: str) -> Any:
            try:
                value = missing(obj, name)
            except AttributeError:
                if ident() == recorder.owner:
                    recorder.note_absent(obj, name)
                raise
            if ident() == recorder.owner and not recorder.silent:
                recorder.note_missing(obj, name, value)
            return value

        def setattribute(obj: Any, name: str, value: Any) -> None:
            if ident() == recorder.owner:
                recorder.note_write(obj, name, sys._getframe(1))
            put(obj, name, value)

        try:
            self.replace(cls, "__getattribute__", getattribute)
        except TypeError:
            return False
        if missing is not None:
            self.replace(cls, "__getattr__", getattr_missing)
        self.replace(cls, "__setattr__", setattribute)
        return True

    def on_call(self, frame: types.FrameType, event: str, arg: Any) -> None:
        """Profile hook: look at the globals of each user function as it starts; refuse calls that a graph cannot
        repeat.
        """
        if event == "call":
            code = frame.f_code
            if code not in self.codes:
                self.codes[code] = see_apply if code is APPLY.__code__ else seer(code)
                if kind(code.co_filename) != "torch":
                    names = frame.f_locals if code.co_freevars else {}
                    self.scan(code, frame.f_globals, {name: names[name] for name in code.co_freevars if name in names})
            see = self.codes[code]
            if see is not None:
                see(self, frame)
        elif event == "c_call" and type(arg) is types.BuiltinFunctionType and not self.silent:
            if id(arg.__self__) in self.before and kind(frame.f_code.co_filename) != "torch":
                self.lines[id(arg.__self__)] = frame_line(user_frame(frame))
            on_builtin_call(self, frame, arg)
            if type(arg.__self__) is not types.ModuleType or arg not in REFUSED_CALLS:
                return
            if kind(frame.f_code.co_filename) == "torch":
                return
            op, reason = REFUSED_CALLS[arg]
            raise Unsupported(op, reason, frame_line(frame))

    # Recording reads.

    def add(self, how: str, table: Any, name: str, value: Any, section: str = "") -> None:
        key = (id(table), section or how, name)
        if key in self.reads:
            return
        written = self.written(how, table, name, value, section)
        if written and key in self.blind:
            self.expose(key)
        if written and not self.window:
            return
        if not written and id(table) not in self.newborn:
            self.reach(value)
        before = MappingProxyType({}) if self.window else self.before
        read = self.reads[key] = Read(how, table, name, value, section, freeze(value, before=before), written)
        self.watched.setdefault(id(table), table)
        if isinstance(value, torch.Tensor):
            self.sources.setdefault(id(value), read)
            for mark, item in vars(value).items():  # what the user's code keeps on it
                if type(item) in LEAVES and not mark.startswith("_"):
                    self.add("item", vars(value), mark, item)
            return
        for keys, tensor in tensors_within(read.snapshot) if isinstance(value, CONTAINERS) else ():
            self.sources.setdefault(id(tensor), Read("element", read, keys, tensor))  # type: ignore[arg-type]
        self.watch(value)

    def note_blind(self, how: str, table: Any, name: str, value: Any, uses: Iterable[str], owner: str = "") -> bool:
        """Record a value that is only added to (see blind.py): no guard compares what it holds; False where one does
        already.
        """
        key = (id(table), how, name)
        if key in self.reads:
            return False
        before = self.before.get(id(table))
        if key not in self.blind and isinstance(before, dict) and before.get(name, MISSING) is not value:
            return False  # the body has put it there
        if isinstance(value, CHANGING):
            self.keep(value, owner or type(value).__name__)
            self.reach(value)
        self.blind.setdefault(key, (Read(how, table, name, value), set()))[1].update(uses)
        return True

    def expose(self, key: tuple[int, str, str]) -> None:
        """Compare what a value held that was taken for one that is only added to."""
        read, _ = self.blind.pop(key)
        self.compare(read.how, read.table, read.name, read.value)

    def compare(self, how: str, table: Any, name: str, value: Any) -> Read:
        """Compare what a place held before the body ran."""
        key = (id(table), how, name)
        self.blind.pop(key, None)
        if key not in self.reads:
            read = self.reads[key] = Read(how, table, name, value, snapshot=freeze(value, before=self.before))
            self.watched.setdefault(id(table), table)
            if isinstance(value, torch.Tensor):
                self.sources.setdefault(id(value), read)
            for keys, tensor in tensors_within(read.snapshot) if isinstance(value, CONTAINERS) else ():
                self.sources.setdefault(id(tensor), Read("element", read, keys, tensor))  # type: ignore[arg-type]
        return self.reads[key]

    def written(self, how: str, table: Any, name: str, value: Any, section: str) -> bool:
        """Whether the capture itself put this value there: it then follows from other reads, and says nothing of the
        next call.
        """
        if how == "attribute":
            return (id(table), name) in self.writes
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
        if name == "forward" and type(obj).__name__ in PARALLEL and type(obj).__module__.startswith("torch."):
            raise Unsupported(f"{type(obj).__name__} inside a jitted function", PARALLEL_WAY_OUT, in_python=False)
        self.silent += 1
        try:
            table = getattr(obj, "__dict__", None)
            self.note_type(obj)
            if type(table) is not dict:
                self.add("attribute", obj, name, value)
            elif name in table:
                if name in HOOKS and value:
                    raise Unsupported(
                        f"{HOOKS[name]} on {type(obj).__name__}",
                        "hooks inside a jitted function run eagerly, with all of it",
                    )
                self.note_classes(obj, name)
                use = attribute_use(sys._getframe(2), name, table[name])
                if not (
                    use and self.note_blind("item", table, name, table[name], {use}, f"{type(obj).__name__}.{name}")
                ):
                    self.add("item", table, name, table[name])
            else:
                self.note_class(obj, table, name)
        finally:
            self.silent -= 1

    def note_write(self, obj: Any, name: str, frame: types.FrameType) -> None:
        """Record that an attribute is set, and where."""
        self.writes[id(obj), name] = frame_line(user_frame(frame))
        key = (id(getattr(obj, "__dict__", None)), "item", name) if self.blind else None
        if key in self.blind and not is_addition(frame):
            self.expose(key)  # type: ignore[arg-type]

    def note_class(self, obj: Any, table: dict[str, Any], name: str) -> None:
        """Record that `name` came from the object's class, and that the object has none of its own."""
        order = type(obj).__mro__
        for place, cls in enumerate(order):
            if name in cls.__dict__:
                users = not cls.__module__.startswith("torch.") and cls is not object
                if users or name == "forward":
                    self.add("absent", table, name, None)
                if users:
                    self.add("item", class_table(cls), name, cls.__dict__[name])
                for nearer in order[:place]:
                    if users_class(nearer):
                        self.add("absent", class_table(nearer), name, None)
                return

    def note_classes(self, obj: Any, name: str) -> None:
        """Record what the user's classes of an object hold under a name that was found elsewhere: a property there
        would come first.
        """
        if (type(obj), name) not in self.classed:
            self.classed.add((type(obj), name))
            for table in [class_table(cls) for cls in type(obj).__mro__ if users_class(cls)]:
                self.add("item" if name in table else "absent", table, name, table.get(name))

    def note_type(self, obj: Any) -> None:
        """Record the class of an object, which may be given another: torch's parametrizations and `fully_shard` do
        that.
        """
        self.reads.setdefault((id(obj), "attribute", "__class__"), Read("attribute", obj, "__class__", type(obj)))
        self.watched.setdefault(id(obj), obj)

    def note_special(self, cls: type) -> None:
        """Record the special methods of a user's class (`__call__`, `__getitem__`, ...), which Python looks up past
        `__getattribute__`.
        """
        own = {(owner, name) for owner, name, _ in self.patched}
        self.keep_class(cls)
        for owner in filter(users_class, cls.__mro__):
            for name, value in list(owner.__dict__.items()):
                special = (
                    name.startswith("__") and type(value) is types.FunctionType and name not in ("__init__", "__new__")
                )
                if special and (owner, name) not in own:
                    self.add("item", class_table(owner), name, value)

    def note_absent(self, obj: Any, name: str) -> None:
        """Record that an object has no attribute `name`, which the function asked for (`hasattr`, `getattr` with a
        default).
        """
        if self.silent or name.startswith("__") or id(obj) in self.ignored:
            return
        self.silent += 1
        try:
            table = getattr(obj, "__dict__", None)
            if type(table) is dict:
                sections = (
                    [table[section] for section in TABLES if section in table]
                    if isinstance(obj, torch.nn.Module)
                    else []
                )
                for holder in (table, *sections, *[class_table(cls) for cls in type(obj).__mro__ if users_class(cls)]):
                    self.add("absent", holder, name, None)
        finally:
            self.silent -= 1

    def note_missing(self, obj: Any, name: str, value: Any) -> None:
        """Record a read that went through `__getattr__`: a module's parameter, buffer or submodule, or a class's own
        rule.
        """
        if id(obj) in self.ignored:
            return None
        self.silent += 1
        try:
            if isinstance(obj, torch.nn.Module):
                for section in TABLES:
                    if name in obj.__dict__.get(section, ()):
                        self.note_type(obj)
                        self.note_classes(obj, name)
                        self.add("absent", obj.__dict__, name, None)  # Python looks there first
                        return self.add("entry", obj.__dict__, name, obj.__dict__[section][name], section)
            self.add("attribute", obj, name, value)
        finally:
            self.silent -= 1

    def scan(self, code: types.CodeType, scope: dict[str, Any], free: Mapping[str, Any] = MappingProxyType({})) -> None:
        """Record the globals that a code object loads (`free`: its closure variables), and what those hold now that it
        stores.
        """
        self.silent += 1
        try:
            loads, stores = global_names(code)
            for *path, name in stores:
                table = holder_of(path, name, scope, free)
                table = vars(table) if isinstance(table, types.ModuleType) and followable(table) else table
                if not path or isinstance(table, dict) and "__name__" in table:
                    self.stores.setdefault((id(table), name), (table, name, table.get(name, MISSING)))
            for *path, name in loads:
                table = holder_of(path, name, scope, free)
                value = table.get(name) if not path and table is scope else None
                uses = variable_uses(code, name, value)
                if table is not free and not (uses and self.note_blind("item", scope, name, value, uses)):
                    self.scan_name(table, name)
        finally:
            self.silent -= 1

    def scan_name(self, table: Any, name: str) -> None:
        """Record one name: of a scope, a class or a module."""
        if isinstance(table, types.ModuleType):
            if torch_state(table) and hasattr(table, name) and type(getattr(table, name)) in LEAVES:
                self.add("attribute", table, name, getattr(table, name))
            value = vars(table).get(name)
            if type(value) in FUNCTIONS and value in STATE:
                self.add("call", value, name, value())
            elif (
                type(value) in FUNCTIONS and not followable(table) and not is_stand_in(value)
            ):  # of torch: some programs put functions of their own in their place
                self.scopes.add(id(vars(table)))
                self.reads.setdefault((id(vars(table)), "item", name), Read("item", vars(table), name, value))
            table = vars(table) if followable(table) else {}
        self.scopes.add(id(table))
        if name in table:
            value = table[name]
            if not (
                isinstance(value, types.ModuleType) and kind(getattr(value, "__file__", None) or "<user>") == "torch"
            ):
                self.add("item", table, name, value)

    # Following values.

    def watch(self, value: Any, depth: int = DEPTH) -> None:
        """Follow a value that the function can reach: its reads become guards, its changes are put back."""
        kind_of = type(value)
        if kind_of in LEAVES or id(value) in self.watched and not isinstance(value, dict):
            return
        self.watched[id(value)] = value
        self.streams.note(value)
        if isinstance(value, torch.nn.Module):
            self.snapshot_object(value)
            self.note_special(kind_of)
        elif kind_of is types.FunctionType:
            self.watch_function(value)
        elif kind_of is types.MethodType:
            self.watch(value.__self__)
            self.watch(value.__func__)
        elif kind_of is functools.partial:
            for name in ("func", "args", "keywords"):
                self.add("attribute", value, name, getattr(value, name))
        elif kind_of is functools._lru_cache_wrapper:  # a call may find its result there, and read nothing
            self.watch(value.__wrapped__)
            if (inner := innermost(value.__wrapped__)) is not None:
                self.scan(inner.__code__, inner.__globals__)
        elif isinstance(value, CONTAINERS):
            self.watch_container(value, depth)
        elif isinstance(value, type):
            self.watch_class(value)
        elif not isinstance(value, (torch.Tensor, types.ModuleType, types.BuiltinFunctionType)):
            self.watch_object(value)

    def watch_function(self, function: types.FunctionType) -> None:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            if full(cell):
                self.cells.append((cell, cell.cell_contents))
                uses = variable_uses(function.__code__, name, cell.cell_contents)
                if not (uses and self.note_blind("cell", cell, name, cell.cell_contents, uses)):
                    self.add("cell", cell, name, cell.cell_contents)
        if kind(function.__code__.co_filename) == "user":
            self.keep(vars(function), function.__name__)
            self.functions.add(id(vars(function)))
            self.add("attribute", function, "__code__", function.__code__)
        for name in ("__defaults__", "__kwdefaults__"):
            if getattr(function, name):
                self.add("attribute", function, name, getattr(function, name))
        for name, value in list(vars(function).items()):
            self.add("item", vars(function), name, value)

    def watch_class(self, cls: type) -> None:
        """Compare all that a class of the user's holds: Python lets no one see which of it is read."""
        self.keep_class(cls)
        nearer: list[Any] = []
        classes: list[type] = [*cls.__mro__, *type.mro(type(cls))]
        for table in [class_table(each) for each in classes if users_class(each)]:
            for name in [name for name in table if not name.startswith("__")]:
                self.add("item", table, name, table[name])
                for other in nearer:
                    if name not in other:
                        self.add("absent", other, name, None)
            nearer.append(table)

    def watch_container(self, value: Any, depth: int) -> None:
        if isinstance(value, CHANGING):
            self.keep(value, type(value).__name__)
        if depth and len(value) <= WIDTH:
            for item in value.values() if isinstance(value, dict) else value:
                self.watch(item, depth - 1)

    def watch_object(self, value: Any) -> None:
        """Follow a plain object: replace its class's methods, or, where Python does not allow that, compare all it
        holds.
        """
        cls = type(value)
        inner = getattr(cls, "__module__", "").split(".")[0]
        ours = getattr(cls, "_holds_user_state", False)  # HyperMap and the like: fusejit's class, the user's functions
        if inner == "fusejit" and not ours:
            self.watch(getattr(value, "__wrapped__", None))
        elif inner == "torch" or not hasattr(value, "__dict__") and not hasattr(cls, "__slots__"):
            return
        else:
            module = sys.modules.get(cls.__module__)
            if not ours and kind(getattr(module, "__file__", None) or "<user>") == "torch" and cls not in NAMESPACES:
                return  # Python's own objects (loggers, locks): not state of a model
            if hasattr(value, "__dict__"):
                self.snapshot_object(value)
            self.keep_slots(value)
            self.note_special(cls)
            known = any(
                base is other for other, name, _ in self.patched for base in cls.__mro__ if name == "__getattribute__"
            )
            if not known and not self.patch(cls) and type(getattr(value, "__dict__", None)) is dict:
                for name, item in list(vars(value).items()):
                    self.add("item", vars(value), name, item)

    def snapshot_object(self, obj: Any) -> None:
        table = obj.__dict__
        if type(table) is not dict:
            return
        self.keep(table, type(obj).__name__)
        self.tables.add(id(table))
        self.attributes[id(table)] = obj
        self.watched[id(table)] = table
        for name, value in table.items():
            if isinstance(value, CHANGING):
                self.keep(value, f"{type(obj).__name__}.{name}")
        if isinstance(obj, torch.nn.Module):
            for section in TABLES[:2]:
                for name, tensor in table.get(section, {}).items():
                    if tensor is not None:
                        self.sources.setdefault(id(tensor), Read("entry", table, name, tensor, section))


LEAVES = frozenset({int, float, bool, str, bytes, complex, type(None), torch.Tensor, torch.nn.Parameter,
                    torch.dtype, torch.device, torch.Size, range, slice})  # fmt: skip
