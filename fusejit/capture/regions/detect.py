"""Detect: blocks that are built many times become one graph that is called, with the weights of each as arguments.

In: the calls of blocks during a capture. Out: `Region`s, and a captured graph in which each later call of an equal
block is one node; the Python of the later blocks does not run.

    %block_0 : [num_users=1] = call_function[target=fusejit.region.Block_0](args = (%x, %lifted_0, %lifted_1))
    %item : [num_users=1] = call_function[target=operator.getitem](args = (%block_0, 0))

The first call of a block runs as any other code, between two marks in the graph. A later call is equal when its
arguments have the same key, torch is in the same state, and every value that the first call read is found again on the
new block (match.py). After the trace `cut` takes what stands between the marks out of the graph. Graphs that come out
equal share one region whatever Python made them; regions hold regions; what is called too seldom to be worth a boundary
is put back where it was.
"""

from __future__ import annotations

import operator
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from ... import torch_private as private
from ...codegen.ir.effects import effect_of, in_turn
from ...torch_private import get_current_function_mode as _get_current_function_mode
from .. import pytree
from ..arguments import PLAIN_TYPES
from ..checkpoints import marking_now
from ..guards.guards import state_key, value_key
from ..outputs import OUTPUT_VALUES
from ..shapes.region_sizes import SYMBOLIC, settled, told, varies, whole
from ..source_lines import frame_entry, user_frame
from ..state.profile_hook import unobserved
from ..state.reads import CONTAINERS, DEPTH
from ..state.recorder import HOOKS, Recorder
from ..tracer import LOCAL, Tracing
from .extract import Region, Spec, cut, spec_of
from .match import Window, relocate

Tensor = torch.Tensor
MARK = "_fusejit_lazy_inline"
"""The attribute of a class, an `__init__` or a function that says how its calls are captured."""
AUTOMATIC = 3
"""Equal blocks in one container from which on they become a region without being marked."""
VARIANTS = 8
"""The most different captures of one kind of call that later calls are compared with."""


@dataclass(frozen=True, slots=True)
class Mark:
    """How a block is captured: `policy` None: apart, "front": in place; `attrs` tell blocks apart besides what they
    read.
    """

    policy: str | None = None
    attrs: tuple[str, ...] = ()


AUTO = Mark()


@dataclass(slots=True, eq=False)
class Record:
    """The first call of a kind of block, and the calls found equal to it.

    Attributes:
        roots: its objects: the block, and modules among the arguments. number: of its marks.
        reads: what it read. sources: for each input of the region where a call finds it.
        results: for each leaf of the result: ("made", place), ("leaf", argument) or ("value", constant).
        outputs: of the region: (dtype, shape, stride, device, requires_grad) of each.
        reason: why it cannot be a region, or "".
    """

    name: str
    number: int
    roots: list[Any]
    leaves: list[Any]
    window: Window
    region: Region
    structure: Any = None
    sources: list[tuple[str, Any]] = field(default_factory=list)
    results: list[tuple[str, Any]] = field(default_factory=list)
    reason: str = ""

    def inputs(self) -> list[Tensor]:
        """The tensors of the region's inputs, constants aside."""
        return [self.leaves[what] if how == "leaf" else what for how, what in self.sources if how != "node"]


def begin(number: int) -> None:
    """Mark in a graph where the first call of a block starts; never run."""


def end(number: int, results: Any) -> None:
    """Mark in a graph where the first call of a block ends; never run."""


class Refused(Exception):
    """A call that cannot be a region; the argument says why."""


class Blocks:
    """Which modules are blocks: marked, or repeated in one container.

    Attributes:
        repeated: by id; scanned: the modules that were looked at, by id.
    """

    def __init__(self) -> None:
        self.repeated: set[int] = set()
        self.scanned: dict[int, torch.nn.Module] = {}

    def mark_of(self, module: torch.nn.Module) -> Mark | None:
        """How the module is captured; None: in place, without a word."""
        if id(module) not in self.scanned:
            self.scan(module)
        cls = type(module)
        if cls.__module__.startswith("torch."):
            return None
        mark = mark_of_class(cls)
        if mark is None:
            return AUTO if id(module) in self.repeated else None
        return mark if mark.policy is None else None

    def scan(self, root: torch.nn.Module) -> None:
        """Find the blocks below a module that stand three or more of a class in one container."""
        waiting: list[torch.nn.Module] = [root]
        while waiting:
            module = waiting.pop()
            if id(module) in self.scanned:
                continue
            self.scanned[id(module)] = module
            children = [child for child in module.__dict__.get("_modules", {}).values() if child is not None]
            waiting += children
            kinds: dict[type, list[Any]] = {}
            for child in children:
                kinds.setdefault(type(child), []).append(child)
            for group in kinds.values():
                if len(group) >= AUTOMATIC:
                    self.repeated.update(map(id, group))


class Nodes:
    """The graph's nodes of the values of a capture."""

    def __init__(self, tracing: Tracing) -> None:
        self.tracing = tracing

    def tracer(self) -> Any:
        """The tracer of the open trace."""
        from torch.fx.experimental.proxy_tensor import get_proxy_mode

        mode: Any = get_proxy_mode()
        return mode.tracer

    def twin(self, value: Any) -> Any:
        """What the trace has for a value, outside the trace's own function mode: looking at a tensor there would make
        it an input twice.
        """
        with private.DisableTorchFunction():
            return self.tracing.replace(value)

    def of(self, value: Tensor, like: Tensor | None = None) -> torch.fx.Node:
        """The graph's node of a tensor; a real one met for the first time becomes an input.

        Where it only takes the place of an equal tensor (`like`), it needs no fake twin, which costs more than all the
        rest of a call.
        """
        from torch.fx.experimental.proxy_tensor import get_proxy_slot

        tracing, tracer = self.tracing, self.tracer()
        if id(value) in tracing.placed:
            return tracing.placed[id(value)]
        if like is not None and id(value) not in tracing.twins and type(value) in PLAIN_TYPES:
            node = tracing.placed[id(value)] = tracing.place(value, tracer)
            node.meta.update(self.of(like).meta)
            return node
        slot: Any = get_proxy_slot(self.twin(value), tracer, None)
        if slot is None:
            raise Refused("it uses a tensor that torch's tracing did not see made")
        return slot.proxy.node

    def constant(self, node: torch.fx.Node) -> Any:
        return getattr(self.tracer().root, str(node.target), None)

    def write_call(self, record: Record, pairs: Any, leaves: list[Any]) -> Any:
        """Write a call of a region with another block's tensors; returns its result."""
        import torch.fx.traceback as fx_traceback
        from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, track_tensor_tree

        self.tracing.note_grad()
        fx_traceback.current_meta["stack_trace"] = frame_entry(user_frame(sys._getframe(2), self.tracing.stop))
        tracer = self.tracer()
        wrap = lambda node: torch.fx.Proxy(node, tracer)  # noqa: E731
        find = {
            "leaf": lambda place: self.of(leaves[place]),
            "tensor": lambda old: self.of(pairs.of(old), old),
            "node": keep,
        }
        inputs = tuple(wrap(find[how](what)) for how, what in record.sources)
        called = tracer.create_proxy("call_function", record.region, inputs, {}, name=record.name.lower())
        with private.DisableTorchFunction(), disable_proxy_modes_tracing():
            fakes = [stand_in(spec) for spec in record.region.outputs]
        for place, fake in enumerate(fakes):
            item = tracer.create_proxy("call_function", operator.getitem, (called, place), {})
            with private.DisableTorchFunction():
                track_tensor_tree(fake, item, constant=None, tracer=tracer)
        called.node.meta["val"] = tuple(fakes)
        value = {"made": fakes.__getitem__, "leaf": leaves.__getitem__, "value": lambda constant: constant}
        return pytree.unflatten(record.structure, iter([value[how](what) for how, what in record.results]))


class Regions:
    """Sees the calls of blocks during one capture; made by `capture` inside its trace.

    Attributes:
        found: the regions, after `cut`. inlined: (block, reason) of what was captured in place though marked or
            repeated.
    """

    def __init__(self, tracing: Tracing, recorder: Recorder) -> None:
        self.tracing, self.recorder = tracing, recorder
        self.nodes, self.blocks = Nodes(tracing), Blocks()
        self.records: list[Record] = []
        self.kinds: dict[Any, list[Record]] = {}
        self.inlined: dict[tuple[str, str], None] = {}
        self.found: tuple[Region, ...] = ()

    # Seeing calls.

    def __enter__(self) -> Regions:
        LOCAL.regions = self
        called: Any = torch.nn.Module.__dict__["__call__"]

        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            mark = self.blocks.mark_of(module) if self.sees() else None
            if mark is None or hooked(module):
                return called(module, *args, **kwargs)
            return self.call(type(module).__name__, mark, module, lambda: called(module, *args, **kwargs), args, kwargs)

        self.recorder.replace(torch.nn.Module, "__call__", call)  # the recorder puts it back
        return self

    def __exit__(self, *error: object) -> None:
        LOCAL.regions = None

    def sees(self) -> bool:
        """Whether a call now goes into this trace as it stands: not inside a torch.func transform, nor in a branch on a
        tensor.
        """
        if threading.get_ident() != self.recorder.owner or self.recorder.silent or marking_now():
            return False  # what a checkpoint computes again is no call of its own
        return private.maybe_current_level() is None and _get_current_function_mode() is self.tracing

    # One call.

    def call(
        self, name: str, mark: Mark, target: Any, run: Callable[[], Any], args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        """Capture a call, or, where an equal one was captured before, write a call of its region.

        Args:
            target: the module, or the function. run: the call itself.
        """
        leaves: list[Any] = []
        structure = pytree.flatten((args, kwargs), leaves)
        roots = [target, *(leaf for leaf in leaves if isinstance(leaf, torch.nn.Module))]
        apart = [(attribute, value_key(getattr(target, attribute))) for attribute in mark.attrs]
        try:
            kind = (name, mark.policy, repr(apart), self.kind_of(roots, structure, leaves))
        except Refused as refused:
            self.inlined[name, str(refused)] = None
            return run()
        known = self.kinds.setdefault(kind, [])
        with unobserved():
            for record in known:
                if record.reason:
                    break
                pairs = relocate(record.window.reads.values(), self.recorder, zip(record.roots, roots))
                if pairs is not None:
                    return self.nodes.write_call(record, pairs, leaves)
            else:
                record = None
        if record is not None:
            return run()
        if len(known) >= VARIANTS:
            return run()
        record = Record(
            name, len(self.records), roots, leaves, Window(self.recorder), Region(name, mark is not AUTO, repr(apart))
        )
        self.records.append(record)
        return self.first(record, run, known)

    def kind_of(self, roots: list[Any], structure: Any, leaves: list[Any]) -> Any:
        """What two calls must have in common before their reads are compared."""
        tensors: dict[int, int] = {}
        keys: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                keys.append((settled(self.spec(leaf)), tensors.setdefault(id(leaf), len(tensors))))
            elif isinstance(leaf, SYMBOLIC):
                raise Refused("an argument is a number that varies")
            else:
                keys.append(type(leaf) if isinstance(leaf, torch.nn.Module) else value_key(leaf))
        what = type(roots[0]) if isinstance(roots[0], torch.nn.Module) else function_key(roots[0])
        kind = (what, tuple(map(type, roots)), structure, tuple(keys), state_key())
        try:
            hash(kind)
        except TypeError:
            raise Refused("an argument's structure cannot be compared") from None
        return kind

    def spec(self, value: Tensor) -> Spec:
        with private.DisableTorchFunction():
            if value.layout is not torch.strided or not whole(value.shape, value.stride()):
                raise Refused("an argument's layout is not strided, or has holes where its shape varies")
            return spec_of(value)

    def first(self, record: Record, run: Callable[[], Any], known: list[Record]) -> Any:
        """Run a call between two marks and see whether its graph can stand alone."""
        tracer, number = self.nodes.tracer(), record.number
        arguments = {
            self.nodes.of(leaf): place
            for place, leaf in reversed([*enumerate(record.leaves)])
            if isinstance(leaf, Tensor)
        }
        self.tracing.note_grad()  # a switch of gradients stands on the side of the mark where it was made
        start = tracer.create_node("call_function", begin, (number,), {})
        with record.window:
            self.recorder.watch(record.roots[0])
            out = run()
        self.tracing.note_grad()
        flat: list[Any] = []
        record.structure = pytree.flatten(out, flat)
        flat = [self.nodes.twin(item) for item in flat]
        results: tuple[torch.fx.Node, ...] = ()
        inputs: tuple[torch.fx.Node, ...] = ()
        try:
            if record.window.change:
                raise Refused(f"it changes what is outside it: {record.window.change}")
            inputs = self.inputs(record, start, arguments)
            results = self.results(record, flat)
        except Refused as refused:
            record.reason = str(refused)
            self.inlined[record.name, record.reason] = None
        tracer.create_node("call_function", end, (number, results, inputs), {})
        known.append(record)
        return out

    def results(self, record: Record, flat: list[Any]) -> tuple[torch.fx.Node, ...]:
        """Sort the leaves of the result; returns the graph's nodes of those that the region makes."""
        arguments = {
            id(self.nodes.twin(leaf)): place for place, leaf in enumerate(record.leaves) if isinstance(leaf, Tensor)
        }
        numbers: dict[int, int] = {}
        outputs: list[torch.fx.Node] = []
        memory = {memory_of(self.nodes.twin(tensor)) for tensor in record.inputs()}
        for item in flat:
            if not isinstance(item, Tensor):
                if not isinstance(item, OUTPUT_VALUES):
                    raise Refused(f"it returns a {type(item).__name__}")
                record.results.append(("value", item))
            elif id(item) in arguments:
                record.results.append(("leaf", arguments[id(item)]))
            else:
                if id(item) not in numbers:
                    if memory_of(item) in memory:
                        raise Refused("a result shares memory with what it was given or with another result")
                    memory.add(memory_of(item))
                    numbers[id(item)] = len(outputs)
                    outputs.append(self.nodes.of(item))
                    record.region.outputs.append(self.spec(item))
                record.results.append(("made", numbers[id(item)]))
        if not outputs:
            raise Refused("it makes no tensor")
        return tuple(outputs)

    def inputs(
        self, record: Record, start: torch.fx.Node, arguments: dict[torch.fx.Node, int]
    ) -> tuple[torch.fx.Node, ...]:
        """Find the region's inputs and where each comes from; refuse what a graph apart cannot do."""
        own: dict[torch.fx.Node, None] = {}
        node = start.next
        while node.op != "root":
            if node.op == "call_function":
                own[node] = None
            node = node.next
        refuse_changes(own)
        read = self.tensors_read(record)
        needed = dict.fromkeys(source for node in own for source in node.all_input_nodes if source not in own)
        needed = {
            node: None for node in needed if node.op != "get_attr" or isinstance(self.nodes.constant(node), Tensor)
        }
        sizes = [node for node in needed if isinstance(node.meta.get("val"), SYMBOLIC)]
        needed = {node: None for node in needed if node not in sizes}
        for node in needed:
            how, what = source = self.source(node, arguments, read)
            record.sources.append(source)
            find: dict[str, Callable[[Any], Tensor]] = {
                "leaf": record.leaves.__getitem__,
                "tensor": keep,
                "node": self.nodes.constant,
            }
            dtype, shape, stride, device, grad = self.spec(find[how](what))
            grad = grad and record.region.grad  # without gradients it does not matter who requires them
            record.region.inputs.append((dtype, shape, stride, device, grad))
        if not needed:
            raise Refused("it takes no tensor")
        read_sizes = any(symbolic_in(item.value, DEPTH) for item in record.window.reads.values())
        if read_sizes or not all(told(node.meta["val"], [spec[1] for spec in record.region.inputs]) for node in sizes):
            raise Refused("it uses a size that none of its tensors has")
        return tuple(needed)

    def source(
        self, node: torch.fx.Node, arguments: dict[torch.fx.Node, int], read: dict[torch.fx.Node, Tensor]
    ) -> tuple[str, Any]:
        if node in arguments:
            return ("leaf", arguments[node])
        if node in read:
            return ("tensor", read[node])
        if node.op == "get_attr" and isinstance(self.nodes.constant(node), Tensor):
            return ("node", node)
        raise Refused("it uses a tensor that is neither an argument nor an attribute, global or closure variable")

    def tensors_read(self, record: Record) -> dict[torch.fx.Node, Tensor]:
        """The tensors that a block read, by the graph's nodes of them."""
        found: dict[torch.fx.Node, Tensor] = {}
        for read in record.window.reads.values():
            for tensor in tensors_in(read.value, DEPTH):
                if (
                    id(tensor) in self.tracing.twins
                    or id(tensor) in self.tracing.placed
                    or type(tensor) not in PLAIN_TYPES
                ):
                    found.setdefault(self.nodes.of(tensor), tensor)
        return found

    # The end.

    def finish(self, module: torch.fx.GraphModule) -> None:
        """Cut the regions out of the traced graph, in place."""
        self.found, back = cut(module, self.records, begin, end)
        self.inlined |= dict.fromkeys(back)
        self.records, self.kinds, self.blocks = [], {}, Blocks()  # they hold the trace


def function_key(function: Any) -> tuple:
    """What two functions have in common that differ in what they close over only."""
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return (function.__code__, id(function.__globals__), tuple(map(value_key, defaults)))


def keep(value: Any) -> Any:
    return value


def memory_of(value: Tensor) -> int:
    with private.DisableTorchFunction():
        return value.untyped_storage()._cdata


def refuse_changes(own: Iterable[torch.fx.Node]) -> None:
    """Refuse a block that changes in place what it did not make itself, or has effects that others come before and
    after.
    """
    roots: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in own:
        if in_turn(node):
            raise Refused(f"{node.target} in it {effect_of(node).value}, and keeps its place among others")  # type: ignore[union-attr]
        schema = getattr(node.target, "_schema", None)
        first = node.args[0] if node.args and isinstance(node.args[0], torch.fx.Node) else None
        if schema is None or not any(argument.alias_info for argument in schema.arguments):
            roots[node] = node
            continue
        roots[node] = node if first is None else roots.get(first, first)
        if schema.is_mutable and (first is None or roots[node] not in roots):
            raise Refused("it changes a parameter, a buffer or an argument in place")


def stand_in(spec: Spec) -> Tensor:
    """A fake result of a call: no leaf, so that it may be changed in place where it requires grad."""
    dtype, shape, stride, device, grad = spec
    if varies(spec):
        return torch.empty(shape, dtype=dtype, device=device, requires_grad=grad).clone()
    size = 1 + sum((n - 1) * step for n, step in zip(shape, stride)) if 0 not in shape else 0
    return torch.empty(size, dtype=dtype, device=device, requires_grad=grad).clone().as_strided(shape, stride)


def tensors_in(value: Any, depth: int) -> Iterable[Tensor]:
    """The tensors in a value that was read, those in containers included."""
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, CONTAINERS):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item, depth - 1)


def symbolic_in(value: Any, depth: int) -> bool:
    """Whether a number that varies is among the values that were read."""
    if not depth or not isinstance(value, CONTAINERS):
        return isinstance(value, SYMBOLIC)
    return any(symbolic_in(item, depth - 1) for item in (value.values() if isinstance(value, dict) else value))


def mark_of_class(cls: type) -> Mark | None:
    """The mark of a class, of its nearest base that has one, or of their `__init__`s."""
    for base in cls.__mro__:
        mark = base.__dict__.get(MARK) or getattr(base.__dict__.get("__init__"), MARK, None)
        if mark is not None:
            return mark
    return None


def hooked(module: Any) -> bool:
    """Whether a module has hooks, which the capture refuses by name when it calls it."""
    return any(module.__dict__.get(name) for name in HOOKS)
