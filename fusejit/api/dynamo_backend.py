"""Functions read by their bytecode, and `torch.compile(model, backend="fusejit")`: each graph of Dynamo's becomes our
Programs.

In: a graph of torch calls from Dynamo (see capture/dynamo.py) and `Settings`. Out: what runs it, specialised by our own
trace.

    >>> fast = torch.compile(model, backend="fusejit", options={"jit_level": "O1"})
    >>> reader = Reader(fn, Settings(capture_mode="bytecode")); reader.call((torch.ones(3),), {});
        len(reader.entries)
    1

Dynamo's guards say whether a graph holds. A graph with symbolic sizes or numbers among its inputs, which Dynamo makes
from the second shape on, has Programs whose sizes vary, where our own trace can have that (see specialise/dynamic.py),
and a table from values to Programs otherwise.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from .. import knobs
from ..capture import dynamo, pytree
from ..capture.dynamo import Found
from ..capture.guards.guards import key_of, state_key
from ..capture.guards.recompile_reasons import differences
from ..capture.shapes.policy import Dynamic
from ..compile_log import Fallback
from ..errors import FusejitError, Unsupported
from ..fork_locks import renewed
from ..options import BACKENDS, LEVELS, NUMERICS, Settings, check
from ..specialise.dynamic import specialise_sizes
from ..specialise.specialisation import Specialisation, eager_specialisation, refusal
from ..specialise.specialise import specialise
from .specialisation_table import Entry

Tensor = torch.Tensor
log = logging.getLogger("fusejit")


class Graph:
    """One graph that Dynamo found, with its specialisations: one where all sizes are fixed, one for each kind of input
    otherwise.

    Attributes:
        traced: the graph, and why Dynamo made it; entries: its specialisations, in the order of their making.
    """

    def __init__(
        self, traced: Found, settings: Settings, tell: Callable[[Specialisation], None], owner: Reader | None = None
    ) -> None:
        self.traced, self.settings, self.tell, self.owner = traced, settings, tell, owner
        self.plain = traced.module.forward
        self.floats = frozenset(dynamo.wrapped_floats(traced.module))
        self.varies = dynamo.dynamic(traced.module)
        self.sizes: Dynamic[Entry] = Dynamic(self.varies)
        self.body = dynamo.replay(traced.module)
        self.table: dict[tuple, tuple[Entry, ...]] = {}
        self.entries: list[Entry] = []
        self.only: tuple[Entry, list[Tensor]] | None = None
        self.lock = renewed(threading.Lock())

    def run(self, *inputs: Any) -> Any:
        """Run the graph on the inputs that Dynamo passes: tensors, and numbers where sizes are symbols."""
        leaves = (
            [float(value) if number in self.floats else value for number, value in enumerate(inputs)]
            if self.floats
            else list(inputs)
        )
        entry, lifted = self.only or self.choose(leaves)
        if self.owner is not None and self.owner.watching is not None:
            self.owner.watching.see(entry, inputs)
        run = entry.specialisation.executable.run
        return self.plain(*inputs) if run is None else run(leaves, lifted)

    def choose(self, leaves: list[Any]) -> tuple[Entry, list[Tensor]]:
        """Look up the specialisation of these inputs, or make it. A fixed graph that changes no input needs no look
        again.
        """
        key = (pytree.LEAF, state_key(), key_of(leaves) if self.varies else (None,), None)
        with self.lock:
            for entry in self.table.get(key, ()):
                lifted = entry.lifted(leaves)
                if lifted is not None:
                    return entry, lifted
            if (known := self.sizes.find(key, leaves)) is not None:
                return known
            entry = self.make(key, leaves)
            lifted = entry.lifted(leaves) or []
            self.table[key] = (entry, *self.table.get(key, ()))
            self.entries.append(entry)
            if entry.specialisation.symbols is not None:
                self.sizes.add(key, entry)
            if self.owner is not None:
                self.owner.count += 1
            built = entry.specialisation.built
            if not self.varies and not (built is not None and built.mutates):
                self.only = entry, lifted
        self.tell(entry.specialisation)
        return entry, lifted

    def make(self, key: tuple, leaves: list[Any]) -> Entry:
        """Specialise the graph for inputs of a new kind."""
        why = self.traced.why
        if self.entries:
            known = [(entry.key, entry.specialisation.guards) for entry in self.entries]
            why = str(differences(key, leaves, known, input_name)[0])
        ending = self.traced.ending
        breaks = [Fallback("graph break", ending.reason, ending.line)] if ending.broken else []
        return Entry(key, self.specialised(key, leaves).noting(*breaks), why)

    def specialised(self, key: tuple, leaves: list[Any]) -> Specialisation:
        limit, name = knobs.read("specialisations"), self.settings.name
        if len(self.entries) >= limit:
            many = f"more than {limit} specialisations"
            error = Unsupported(many, "this kind of call runs eagerly (FUSEJIT_SPECIALISATIONS)")
            return eager_specialisation(error, name, None, leaves)
        try:
            make = functools.partial(specialise, self.body, tuple(leaves), {}, leaves, self.settings)
            return specialise_sizes(self.sizes, key, leaves, input_name, make)
        except Unsupported as error:
            if self.settings.fullgraph or knobs.read("strict"):
                raise refusal(error, name) from error
            return eager_specialisation(Unsupported(error.op, error.reason, error.line), name, None, leaves)


def input_name(structure: Any, number: int) -> str:
    return f"input {number} of the graph"


class Watch:
    """What one watched call ran, and the inputs as they were before graphs changed them."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.entries: list[Entry] = []
        self.before: dict[int, tuple[Tensor, Tensor]] = {}

    def see(self, entry: Entry, inputs: Sequence[Any]) -> None:
        if threading.get_ident() != self.thread:
            return
        if not any(entry is other for other in self.entries):
            self.entries.append(entry)
        captured = entry.specialisation.captured
        graph = captured.graph if captured is not None else None
        if graph is not None and not any(
            getattr(getattr(n.target, "_schema", None), "is_mutable", False) for n in graph.graph.nodes
        ):
            return
        for value in inputs:
            if isinstance(value, Tensor):
                self.before.setdefault(id(value), (value, value.detach().clone()))

    def put_back(self) -> None:
        with torch.no_grad():
            for value, before in self.before.values():
                if not torch.equal(value, before):
                    value.copy_(before)


class Reader:
    """A function as Dynamo reads it: calls, and the graphs that they were cut into.

    Attributes:
        graphs: in the order of their making; count: of their specialisations;
        stopped: what runs eagerly without a graph, each with its reason.
    """

    def __init__(
        self, fn: Callable, settings: Settings, tell: Callable[[Specialisation], None] = lambda specialisation: None
    ) -> None:
        self.fn, self.settings, self.tell = fn, replace(settings, capture_mode="bytecode"), tell
        self.graphs: list[Graph] = []
        self.stopped: list[Fallback] = []
        self.watching: Watch | None = None
        self.lock = renewed(threading.RLock())
        self.function: Callable | None = None
        self.frames: Any = None
        self.unguarded: Any = None
        self.called = False
        self.count = 0

    @property
    def entries(self) -> list[Entry]:
        """The specialisations of all graphs."""
        return [entry for graph in self.graphs for entry in graph.entries]

    @property
    def compiles(self) -> bool:
        """Whether some graph became more than Python."""
        return any(entry.specialisation.run is not None for entry in self.entries)

    @property
    def reasons(self) -> list[str]:
        """Why the function is cut, or not compiled at all, as Dynamo says."""
        return [": ".join(filter(None, dynamo.first_words(text))) for text in self.frames.breaks] if self.frames else []

    def prepare(self, first: str = dynamo.FIRST) -> Callable:
        """Return the function as Dynamo runs it, made anew when what Dynamo does not guard has changed."""
        with self.lock:
            if self.function is None:
                self.unguarded = dynamo.Unguarded(self.fn)
                self.function, self.frames = dynamo.read(
                    self.fn,
                    self.receive,
                    fullgraph=self.settings.fullgraph,
                    limit=lambda: knobs.read("specialisations"),
                    stopped=self.stop,
                    first=first,
                    dynamic=self.settings.dynamic,
                )
            return self.function

    def receive(self, traced: Found) -> Callable:
        graph = Graph(traced, self.settings, self.tell, self)
        self.graphs.append(graph)
        return lambda *inputs: graph.run(*inputs)

    def stop(self, name: str, limit: int) -> None:
        fallback = Fallback(
            f"more than {limit} specialisations of {name}", "new kinds of calls run eagerly (FUSEJIT_SPECIALISATIONS)"
        )
        self.note(fallback)

    def note(self, fallback: Fallback) -> None:
        if fallback not in self.stopped:
            self.stopped.append(fallback)
            log.warning("%s: %s", self.settings.name, fallback)

    def call(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call the function; raises `CaptureError` at a graph break where `fullgraph` is set."""
        for value in (*args, *kwargs.values()) if kwargs else args:
            if value.__class__ is float and not value and math.copysign(1.0, value) < 0:
                self.note(Fallback("an argument that is -0.0", "Dynamo takes it for 0.0; the call runs eagerly"))
                return self.fn(*args, **kwargs)
        function = self.function or self.prepare()
        if change := self.unguarded.changed():
            self.function = None
            function = self.prepare(change)
        if self.called:
            return self.run(function, args, kwargs)
        # first calls compile once. Later ones may compile twice: Dynamo looks nothing up again after waiting for its
        # lock
        with self.lock:
            return self.run(function, args, kwargs)

    def run(self, function: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        before, count = (len(self.frames.classes), len(self.frames.modules)), self.count
        self.frames.skipped = False
        try:
            result = dynamo.outside_traces(function, args, kwargs)
            self.called = self.called or self.count == count
            return result
        except Exception as error:
            if (
                self.frames.skipped
            ):  # the user's exception made Dynamo give the function up; the next call may be a good one
                self.function = None
            if isinstance(error, FusejitError) or not isinstance(error, dynamo.error_types()):
                raise
            raise refusal(dynamo.explain_break(error), self.settings.name) from error
        finally:
            if (len(self.frames.classes), len(self.frames.modules)) != before:
                self.unguarded.add(self.frames.classes)
                self.unguarded.add_modules(self.frames.modules)

    def observe(self, args: tuple, kwargs: dict[str, Any]) -> list[Entry]:
        """Run a call once to see which graphs it is cut into; random numbers and changed inputs of graphs are put
        back.
        """
        tensors: list[Any] = []
        pytree.flatten((args, kwargs), tensors)
        devices = {value.device for value in tensors if isinstance(value, Tensor) and value.is_cuda}
        with self.lock:
            watch = self.watching = Watch()
            try:
                with torch.random.fork_rng(list(devices)):
                    self.call(args, kwargs)
            finally:
                self.watching = None
                watch.put_back()
        return watch.entries


# torch.compile(model, backend="fusejit")

OPTIONS = {"jit_level": LEVELS, "backend": BACKENDS, "numerics": NUMERICS}
"""What `torch.compile(..., backend="fusejit", options={...})` takes."""
COMPILE_MODES = {
    "default": "O2",
    "reduce-overhead": "O3",
    "max-autotune": "O3",
    "max-autotune-no-cudagraphs": "O3",
}
"""torch.compile's modes as levels of ours."""


def torch_backend(
    module: torch.fx.GraphModule, inputs: Sequence[Any], *, options: dict[str, Any] | None = None, mode: str = ""
) -> Callable:
    """The backend behind `torch.compile(model, backend="fusejit")`.

    Args:
        module, inputs: a graph of torch calls and its example inputs, from Dynamo.
        options: jit_level, backend and numerics, as in `fusejit.jit`; mode: one of torch.compile's: a level.

    Raises:
        ValueError: an unknown option, value or mode; lists the choices.
    """
    chosen = dict(options or {})
    unknown = [name for name in chosen if name not in OPTIONS]
    if unknown:
        raise ValueError(
            f"torch.compile(backend='fusejit') has no option {unknown[0]!r}: choose one of "
            f"{', '.join(map(repr, OPTIONS))}"
        )
    if mode:
        check("mode", mode, tuple(COMPILE_MODES))
        chosen.setdefault("jit_level", COMPILE_MODES[mode])
    for name, value in chosen.items():
        check(name, value, OPTIONS[name])
    settings = Settings(capture_mode="bytecode", name="graph", **chosen)
    ending = dynamo.ending_of(module)
    graph = Graph(Found(module, dynamo.FIRST, ending), settings, log_fallbacks)
    return lambda *values: graph.run(*values)


def log_fallbacks(specialisation: Specialisation) -> None:
    for fallback in specialisation.fallbacks:
        if fallback.op not in ("graph break", "torch's runtime wrappers"):
            log.warning("torch.compile graph: eager fallback: %s", fallback)
