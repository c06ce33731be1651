"""Fast path: a call of a known kind, checked and run by one generated function.

In: a specialisation that has just been found the general way, and the call that found it. Out: an entry:
`entry(receiver, args, kwargs)` is the result, or `MISS` where anything that the specialisation depends on may differ;
the general way (api/function.py) then decides.

    def entry(receiver, args, kwargs):
        if receiver is not owner or kwargs or len(args) != 2: return MISS
        a0, a1, = args
        try:
            if not (same_tensors(a0, a1, *lifted) and grad() is True and not autocast() and ... and
                unchanged(watched) and not any(empty)):
                return MISS
        except ERRORS:
            return MISS
        return body([a0, a1, *lifted])[0]

Where sizes vary, torch's guards leave them out, and the entry reads and tests them itself, as the general way does:

            _, s0, = a0.shape
            if not (2 <= s0 <= 1099511627776 and s0 > 4): return MISS
        ...
        return body([a0, a1, *lifted, s0])[0]

An entry may only be stricter than the guards. What it checks: every tensor by torch's C guards; the other arguments by
type and value; the state of torch; of what the capture read, the dicts by their version (a changed dict is a miss, even
if it was changed back) and the rest by the guards' own conditions. Since no dict has changed, parameters and buffers
are the very objects of the last time: they are not read again, only their metadata is checked, which `.data = `,
`half()` and `requires_grad_()` change without a trace.
"""

from __future__ import annotations

import gc
import math
import operator
import re
import types
from collections import OrderedDict
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from .. import torch_private as private
from ..capture.guards.guards import VALUES, Guards, Writer
from ..capture.memory_pattern import memory_pattern
from ..capture.shapes.symbols import Symbols
from ..capture.state.reads import CONTAINERS, Contents, Read, contents
from ..capture.tracer import LOCAL, Captured, active
from .torch_private import counts_changes, dict_check, has_tree, tensor_check, version_of

Tensor = torch.Tensor
MISS: Any = object()
"""What an entry returns for a call that is not surely its own."""
ENTRIES = 4
"""How many entries of one function are tried; a call of another kind costs a look-up."""
RESTLESS = 3
"""How often a dict may soon have changed again before its conditions are checked one by one instead of by its
version.
"""
OFTEN = 200
"""How many calls an entry has to serve to be worth the 0.5 ms of its making."""
ERRORS = (KeyError, AttributeError, ValueError, TypeError)
PLAIN = (Tensor, torch.nn.Parameter)
hooks = torch.nn.modules.module


class Body(Protocol):
    """What runs a graph (see specialise/specialisation.py, Executable)."""

    @property
    def run(self) -> Callable[[list[Any], list[Any]], Any] | None: ...
    @property
    def body(self) -> Callable[..., Any] | None: ...
    @property
    def spread(self) -> bool: ...
    @property
    def result(self) -> Callable[[Sequence[Any]], Any] | None: ...
    @property
    def pattern(self) -> tuple | None: ...


class Bindable(Protocol):
    """What an entry is written for: a specialisation (see specialise/specialisation.py)."""

    @property
    def executable(self) -> Body: ...
    @property
    def lifted(self) -> Callable[[list[Any]], list[Any] | None]: ...
    @property
    def captured(self) -> Captured | None: ...
    @property
    def guards(self) -> Guards | None: ...
    @property
    def symbols(self) -> Symbols | None: ...


@dataclass(slots=True, eq=False)
class Entry:
    """A bound specialisation: its function with the names that it sees, its text, and what it takes to be as it was.

    `tables` are dicts with their versions; `born` is how many calls had found something when it was made or renewed.
    """

    specialisation: Bindable
    run: Callable[[Any, tuple, dict], Any]
    source: str
    scope: dict[str, Any]
    tables: tuple[tuple[dict, int], ...]
    born: int = 0


@dataclass(slots=True)
class Bindings:
    """The entries of one jitted function, the newest first.

    Attributes:
        runs: their functions, which is all that a call looks at.
        written: the entry of each specialisation that has one, whether it is among the newest or not;
        unbound: why a specialisation has none, and never will.
        made, renewed: how often one was written, and was given new versions; restless: dicts that keep changing, by id,
            and how often.
    """

    runs: tuple[Callable[[Any, tuple, dict], Any], ...] = ()
    entries: tuple[Entry, ...] = ()
    written: dict[Bindable, Entry] = field(default_factory=dict)
    unbound: dict[Bindable, str] = field(default_factory=dict)
    made: int = 0
    renewed: int = 0
    restless: dict[int, tuple[dict, int]] = field(default_factory=dict)

    def add(self, specialisation: Bindable, call: Call, hits: int) -> None:
        """Put in front the entry of a specialisation that a call has just found the general way, written or renewed
        where that pays.
        """
        if specialisation in self.unbound:
            return
        entry = self.written.get(specialisation)
        if entry is None or any(entry is other for other in self.entries):  # there, and yet it did not answer
            entry = self.fresh(entry, specialisation, call, hits)
        others = [other for other in self.entries if other.specialisation is not specialisation]
        if entry is None:
            self.written.pop(specialisation, None)
            self.put(others)
        else:
            self.written[specialisation] = entry
            self.put([entry, *others[: ENTRIES - 1]])

    def fresh(self, entry: Entry | None, specialisation: Bindable, call: Call, hits: int) -> Entry | None:
        """Renew or write an entry; None where entries have not paid so far, or cannot be."""
        if entry is not None:
            if hits - entry.born < OFTEN:
                self.learn(entry)
            if self.renewed * 8 <= hits and renew(entry, call, self.restless):
                self.renewed, entry.born = self.renewed + 1, hits
                return entry
        if self.made > 16 and self.made * OFTEN > hits:
            return None
        self.made += 1
        bound = bind(specialisation, call, self.restless)
        if isinstance(bound, str):
            self.unbound[specialisation] = bound
            return None
        bound.born = hits
        return bound

    def learn(self, entry: Entry) -> None:
        """Count the dicts on whose account an entry soon stopped to hold though the guards still do."""
        if len(self.restless) > 1000:
            self.restless.clear()
        for table, version in entry.tables:
            if version_of(table) != version:
                self.restless[id(table)] = (table, self.restless.get(id(table), (table, 0))[1] + 1)

    def forget(self, specialisation: Bindable) -> None:
        """Drop a specialisation that is kept no longer."""
        self.written.pop(specialisation, None)
        self.unbound.pop(specialisation, None)
        self.put([entry for entry in self.entries if entry.specialisation is not specialisation])

    def put(self, entries: list[Entry]) -> None:
        self.entries = tuple(entries)
        self.runs = tuple(entry.run for entry in entries)


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A call, its flattened arguments, and what the guards found for it: parameters and other closed-over tensors, then
    the sizes that vary.
    """

    receiver: Any
    args: tuple
    kwargs: dict[str, Any]
    leaves: list[Any]
    lifted: list[Any]

    @property
    def tensors(self) -> list[Tensor]:
        """Of what the guards found, the tensors."""
        return [value for value in self.lifted if isinstance(value, Tensor)]

    @property
    def flat(self) -> bool:
        """Whether each argument is one leaf: no containers, nothing that flattening changes."""
        arguments = (*self.args, *self.kwargs.values())
        return len(arguments) == len(self.leaves) and all(map(operator.is_, arguments, self.leaves))


def bind(specialisation: Bindable, call: Call, restless: dict) -> Entry | str:
    """Write the entry of a call, or say why the general way has to check it each time."""
    captured, guards, executable = specialisation.captured, specialisation.guards, specialisation.executable
    if captured is None or guards is None:
        return "it was not captured"
    if reason := why_not(guards, call):
        return reason
    leaves, lifted, symbols = call.leaves, call.tensors, specialisation.symbols
    arguments = Arguments(call, symbols.scalars if symbols is not None else ())
    watched = watch(guards.writer, lifted, restless)
    beside = [] if watched.tensors else lifted  # of the arguments' check
    scope = torch_state() | watched.scope | {f"v{number}": leaves[number] for number in arguments.values}
    scope |= {
        "owner": call.receiver,
        "names": [*call.kwargs],
        "lifted": tuple(lifted),
        "local": LOCAL,
        "MISS": MISS,
        "ERRORS": ERRORS,
        "body": executable.body,
        "result": executable.result,
        "memory_pattern": memory_pattern,
        "pattern": executable.pattern,
    }
    free = [symbols.free(n) for n in arguments.distinct] + [((), ())] * len(beside) if symbols is not None else ()
    scope["same_tensors"] = tensor_check([*(leaves[number] for number in arguments.distinct), *beside], free)
    scope["elsewhere"] = frozenset(map(id, lifted)).isdisjoint
    tensors, inputs = arguments.names(arguments.distinct, beside), arguments.names(captured.positions, lifted)
    conditions = [f"same_tensors({tensors})"] if arguments.distinct or beside else []
    conditions += [f"elsewhere(map(id, ({tensors},)))"] if watched.tensors and arguments.distinct else []
    conditions += [*arguments.conditions, *STATE, *watched.conditions]
    reads, tests = symbols.reads("a{}", checked=True) if symbols is not None else ([], [])
    tests += [f"memory_pattern([{inputs}]) == pattern"] if executable.pattern is not None else []
    inputs = ", ".join([inputs, *symbols.names]) if symbols is not None else inputs
    result = returned(captured, executable, inputs)
    source = text(arguments, [*checks(conditions), *reads, *checks(tests)], result)
    # under the name of this file, so that a capture that meets an entry takes it for ours and does not look into it
    exec(compile(source, f"{__file__}, entry of {captured.name or 'function'}", "exec"), scope)
    if not still(specialisation, call):
        return "what it reads changed while it was bound"
    run = scope.pop("entry")  # no circle, so that old parameters go at once
    return Entry(specialisation, run, source, scope, watched.tables)


def still(specialisation: Bindable, call: Call) -> bool:
    """Whether the guards hold and find the same tensors; asked after versions were taken, or a change in between would
    go unseen.
    """
    again = specialisation.lifted(call.leaves)
    return again is not None and len(again) == len(call.lifted) and all(map(operator.is_, again, call.tensors))


def renew(entry: Entry, call: Call, restless: dict) -> bool:
    """Take the dicts of an entry as they are now; False where it has to be written anew: other tensors, or dicts that
    keep changing.
    """
    tables = [table for table, _ in entry.tables]
    same = all(map(operator.is_, entry.scope["lifted"], call.tensors)) and all(
        versioned(table, restless) for table in tables
    )
    if not (tables and same):
        return False
    versions = tuple((table, version_of(table)) for table in tables)
    objects, tensors = entry.scope["others"]
    unchanged = dict_check(tables, objects, tensors)
    if not still(entry.specialisation, call):
        return False
    entry.tables, entry.scope["unchanged"] = versions, unchanged
    return True


def why_not(guards: Guards, call: Call) -> str:
    """Why a call cannot be bound; "" where it can."""
    tensors = [leaf for leaf in call.leaves if type(leaf) in PLAIN]
    if not call.flat:
        return "an argument is a container, or marked as mutable"
    if not (tensors or call.lifted):
        return "it has no tensor among its inputs"
    if any(type(value) not in PLAIN for value in call.tensors):
        return "a tensor that it reads is of a class of its own"
    for number, leaf in enumerate(call.leaves):
        if type(leaf) not in PLAIN and literal(number, leaf) is None:
            return (
                f"an argument is {leaf!r}" if type(leaf) is float else f"an argument is of type {type(leaf).__name__}"
            )
    if any("leaves[" in condition for condition, _ in guards.writer.guarded):
        return "a tensor that it reads has to be one of its arguments"
    return (
        "the state of torch is compared by the key: autocast, a mode, a default device, or hooks on every module"
        if beyond()
        else ""
    )


class Arguments:
    """The arguments of a call as an entry names them.

    Attributes:
        values: numbers of those that are no tensors and do not vary; distinct: of the tensors, one of each.
        conditions: that the values are what they were, and the same arguments one and the same tensor.
        whole: `args` holds just the distinct tensors, so none needs a name.
    """

    def __init__(self, call: Call, varying: Container[int]) -> None:
        self.call, leaves = call, call.leaves
        self.values = [
            number for number, leaf in enumerate(leaves) if type(leaf) not in PLAIN and number not in varying
        ]
        first: dict[int, int] = {}
        twins = [
            (n, first[id(v)]) for n, v in enumerate(leaves) if type(v) in PLAIN and first.setdefault(id(v), n) != n
        ]
        self.distinct = [*first.values()]
        self.conditions = [str(literal(number, leaves[number])) for number in self.values] + [
            f"a{n} is a{other}" for n, other in twins
        ]
        self.whole = not (self.conditions or varying or call.kwargs)

    def names(self, numbers: Sequence[int], lifted: Sequence[Tensor]) -> str:
        """The text of some of the arguments, and the lifted tensors behind them."""
        own = (
            ["*args"]
            if self.whole and [*numbers] == [*range(len(self.call.args))]
            else [f"a{number}" for number in numbers]
        )
        return ", ".join([*own, "*lifted"] if lifted else own)


def checks(conditions: list[str]) -> list[str]:
    """Statements that leave an entry where a condition does not hold."""
    return [
        f"if not ({' and '.join(conditions[start : start + 16])}): return MISS"
        for start in range(0, len(conditions), 16)
    ]


def text(arguments: Arguments, statements: list[str], result: str) -> str:
    """The source of an entry. Names of keywords are compared in order, which a function can see."""
    call = arguments.call
    keyed = "[*kwargs] != names" if call.kwargs else "kwargs"
    lines = ["def entry(receiver, args, kwargs):"]
    lines.append(f"    if receiver is not owner or {keyed} or len(args) != {len(call.args)}: return MISS")
    lines += unpacked(call) if re.search(r"\ba\d+\b", " ".join([*statements, result])) else []
    lines += ["    try:", *(f"        {statement}" for statement in statements)]
    return "\n".join([*lines, "    except ERRORS: return MISS", f"    return {result}", ""])


def unpacked(call: Call) -> list[str]:
    """The lines that name each argument."""
    names = [f"a{number}, " for number in range(len(call.leaves))]
    positional, keyed = "".join(names[: len(call.args)]), "".join(names[len(call.args) :])
    return [f"    {named}= {what}" for named, what in ((positional, "args"), (keyed, "kwargs.values()")) if named]


def returned(captured: Captured, executable: Body, inputs: str) -> str:
    """The expression that runs the graph and builds the user's result."""
    call = f"body({inputs})" if executable.spread else f"body([{inputs}])"
    return f"{call}[0]" if captured.bare else f"result({call})"


def literal(number: int, value: Any) -> str | None:
    """The condition under which a Python argument is what it was; None for one that only the general key can
    compare.
    """
    name, then, kind = f"a{number}", f"v{number}", type(value)
    if value is None or kind is bool:
        return f"{name} is {value}"
    if (
        kind is int or kind is str or kind is float and value and not math.isnan(value)
    ):  # 0.0 == -0.0, and nan is never equal
        return f"type({name}) is {kind.__name__} and {name} == {then}"
    return f"{name} is {then}" if kind in (torch.dtype, torch.memory_format, torch.layout) else None


# The state of torch: as `guards.state_key` and `elsewhere` see it; what those tell apart beyond this is not bound.

STATE = (
    "grad() is grad_now",
    "not autocast()",
    "not modes()",
    "not functions()",
    "dtype() is dtype_now",
    "deterministic() is deterministic_now",
    "not (hooks_0 or hooks_1 or hooks_2 or hooks_3)",
    "getattr(local, 'recorder', None) is None",
)


def torch_state() -> dict[str, Any]:
    """What the conditions of `STATE` mean."""
    tables = (
        hooks._global_forward_hooks,
        hooks._global_forward_pre_hooks,
        hooks._global_backward_hooks,
        hooks._global_backward_pre_hooks,
    )
    scope: dict[str, Any] = {f"hooks_{number}": table for number, table in enumerate(tables)}
    scope |= {"autocast": private.is_any_autocast_enabled, "modes": private.len_torch_dispatch_stack}
    scope |= {
        "functions": private.len_torch_function_stack,
        "grad": private.is_grad_enabled,
        "dtype": torch.get_default_dtype,
    }
    scope["deterministic"] = private.get_deterministic_algorithms
    return scope | {f"{name}_now": scope[name]() for name in ("grad", "dtype", "deterministic")}


def elsewhere() -> bool:
    """Whether this call happens inside another transformation (a capture, torch.func, a dispatch mode), which sees
    plain Python.
    """
    if active() or private.maybe_current_level() is not None or private.len_torch_dispatch_stack():
        return True
    depth = private.len_torch_function_stack()
    if depth:
        from ..torch_private import DeviceContext

        return any(not isinstance(private.get_function_stack_at(level), DeviceContext) for level in range(depth))
    return False


def beyond() -> bool:
    """Whether the state now is one that entries leave to the general way: autocast, modes, hooks of every module, a
    capture.
    """
    scope = torch_state() | {"local": LOCAL}
    return not all(eval(condition, scope) for condition in STATE)


# What the capture read.


@dataclass(slots=True)
class Watched:
    """The reads of a capture as conditions on versions of dicts, on empty containers, and as they are; `tensors`: the
    lifted ones are checked along with the dicts.
    """

    scope: dict[str, Any]
    conditions: list[str]
    tables: tuple[tuple[dict, int], ...] = ()
    tensors: bool = False


def watch(writer: Writer, lifted: list[Tensor], restless: dict) -> Watched:
    """Sort the guards' conditions."""
    tables: dict[int, dict] = {}
    objects: dict[int, Any] = {}
    empty: list[Any] = []
    conditions: list[str] = []
    for condition, read in writer.guarded:
        if read.how == "attribute" and read.name == "__class__" and type(read.table) is read.value:
            objects[id(read.table)] = read.table
            continue
        holders, contents = covered(read, writer, restless)
        if holders is None:
            conditions.append(condition)
            continue
        tables |= {id(table): table for table in holders}
        if contents is not None:
            empty.append(contents)
    scope = dict(writer.scope)
    for number in range(len(lifted)):
        source = writer.captured.recorder.sources.get(id(writer.captured.lifted[number]))
        if source is None:
            continue
        holders = holders_of(source, restless)
        if holders is None:
            conditions.append(f"{writer.expression(source)} is lifted[{number}]")
        else:
            tables |= {id(table): table for table in holders}
    scope |= {
        name: value for name, value in writer.scope.items() if name not in scope
    }  # an expression may have pinned more
    if empty:
        scope["empty"] = tuple(empty)
        conditions.insert(0, "not any(empty)")
    versions = tuple((table, version_of(table)) for table in tables.values())
    along = lifted if has_tree(len(tables) + len(objects) + len(lifted)) else []
    if tables:
        others = ([*objects.values()], along)
        scope |= {
            "watched": (*tables.values(), *others[0], *along),
            "others": others,
            "unchanged": dict_check([*tables.values()], *others),
        }
        conditions.insert(0, "unchanged(watched)")
    else:
        conditions += [f"type({pinned(scope, value)}) is {pinned(scope, type(value))}" for value in objects.values()]
    return Watched(scope, conditions, versions, bool(tables and along))


def pinned(scope: dict[str, Any], value: Any) -> str:
    """Give a value a name in a scope."""
    name = f"w{len(scope)}"
    scope[name] = value
    return name


def covered(read: Read, writer: Writer, restless: dict) -> tuple[tuple[dict, ...] | None, Any]:
    """The dicts whose versions stand for a condition, None where none do; and the container that in addition has to
    stay empty.
    """
    holders = holders_of(read, restless)
    value = read.value
    if holders is None or isinstance(read.snapshot, Contents):  # bytes that change in place
        return None, None
    if read.how == "absent" or not isinstance(value, CONTAINERS) or fixed(value):
        return holders, None
    now = eval(writer.expression(read), writer.scope)
    if not value:
        return holders, now
    if type(now) is not dict or not versioned(
        now, restless
    ):  # an OrderedDict may be put in another order without a new version
        return None, None
    if not any(map(changeable, now.values())):
        return (*holders, now), None
    return None, None


def holders_of(read: Read, restless: dict) -> tuple[dict, ...] | None:
    """The dicts that have to stay as they are for a read to give the same object."""
    table = dict_of(read.table)
    if read.how not in ("item", "absent", "entry") or not versioned(table, restless):
        return None
    if read.how != "entry":
        return (table,)
    section = read.table.get(read.section)
    return (read.table, section) if versioned(section, restless) else None


def dict_of(table: Any) -> Any:
    """The dict behind the read-only view of a class's attributes, whose version says whether these have changed."""
    return gc.get_referents(table)[0] if type(table) is types.MappingProxyType else table


def versioned(table: Any, restless: dict) -> bool:
    """Whether the version of a dict stands for what it holds; not so for globals, which any function may write at any
    time.
    """
    if type(table) not in (dict, OrderedDict) or not counts_changes() or "__builtins__" in table:
        return False
    return restless.get(id(table), (None, 0))[1] < RESTLESS


def changeable(value: Any) -> bool:
    """Whether a value may become another without its holder's notice."""
    return isinstance(value, CONTAINERS) and not fixed(value) or contents(value) is not None


def fixed(value: Any) -> bool:
    """Whether a container can never change: a tuple or frozenset of plain values."""
    plain = isinstance(value, (tuple, frozenset))
    return plain and all(fixed(item) if isinstance(item, CONTAINERS) else type(item) in VALUES for item in value)
