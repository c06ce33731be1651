"""Capture by bytecode: torch's Dynamo reads a function's bytecode and cuts it into graphs where it cannot go on.

In: a function and what receives each graph. Out: the function as Dynamo runs it: guards, received graphs, plain Python
between.

    >>> fast = read(fn, receive)          # receive(Found) -> what runs in the graph's place
    >>> fast(torch.ones(3))  # Found(module=..., why="first call", ending=Ending("print", "model.py:3: print(x)"))

Dynamo's graphs are of torch calls; `replay` runs one node by node, so that the trace of tracer.py makes our graphs of
it, with the user's lines. Importing Dynamo takes two seconds: it happens here, at the first call in this mode, and
nowhere else.
"""

from __future__ import annotations

import re
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import torch_private as private
from ..errors import Unsupported
from ..torch_private import symbolic_trace as _symbolic_trace
from .checkpoints import marking, policy_of
from .source_lines import ENTRY, kind, shorten, stack_entry
from .state.global_names import TABLES, class_table, users_class
from .tracer import LOCAL, LOCK

FIRST = "first call"
ENDLESS = 1_000_000
"""What Dynamo's own limit of recompilations becomes: ours counts."""

FAILURES = 3
"""How often a frame that Dynamo fails at is tried again."""
PATCHES = {
    "recompile_limit": ENDLESS,
    "accumulated_recompile_limit": ENDLESS,
    # Dynamo leaves some guards out for speed: a hook that is added later, `module.half()`, changed defaults would not
    # be seen
    "skip_nnmodule_hook_guards": False,
    "record_runtime_overhead": False,  # two calls around each graph that only a profiler reads
    "skip_tensor_guards_with_matching_dict_tags": False,
    "skip_guards_on_constant_func_defaults": False,
    "use_numpy_random_stream": True,  # numpy's random numbers stay numpy's
}
"""Dynamo's configuration while a frame is read."""
VARYING: dict[bool | None, dict[str, bool]] = {  # what `optimize(dynamic=...)` would set and unset at each call
    False: {"assume_static_by_default": True, "automatic_dynamic_shapes": False, "specialize_float": True},
    None: {"assume_static_by_default": True, "automatic_dynamic_shapes": True, "specialize_float": False},
    True: {"assume_static_by_default": False, "automatic_dynamic_shapes": False, "specialize_float": False},
}
"""More of it: which sizes and numbers vary, by the option `dynamic` of `jit`."""


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a graph ends where it does: Dynamo's words and the user's line; `broken` is False at a function's own end."""

    reason: str
    line: str
    broken: bool


@dataclass(frozen=True, slots=True)
class Found:
    """A graph that Dynamo found: its module, why it was made, and why it ends."""

    module: torch.fx.GraphModule
    why: str
    ending: Ending


# Reading a function.


class Frames:
    """Stands before Dynamo's own callback, which compiles one frame: counts what is compiled, and stops at the limit.

    Attributes:
        why: the guards that failed before the last compilation. classes: of the objects that Dynamo guards.
        skipped: Dynamo gave up a frame of the user's, for good.
        breaks: reasons of graph breaks in frames that gave no graph.
    """

    def __init__(
        self,
        inner: Callable,
        limit: Callable[[], int],
        stopped: Callable[[str, int], None],
        fullgraph: bool,
        dynamic: bool | None,
    ) -> None:
        self.patches = PATCHES | VARYING[dynamic]
        self.inner, self.limit, self.stopped, self.fullgraph = inner, limit, stopped, fullgraph
        self._torchdynamo_orig_backend = inner  # Dynamo follows this name to the backend that its caches are kept for
        self.compiled: dict[types.CodeType, int] = {}
        self.failed: dict[types.CodeType, int] = {}
        self.why: list[str] = []
        self.classes: dict[type, None] = {}
        self.modules: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self.skipped = False
        self.breaks: dict[str, None] = {}

    def __call__(self, frame: Any, *rest: Any) -> Any:
        from ..torch_private import ConvertFrameReturn, FrameAction, FrameExecStrategy, counters
        from ..torch_private import dynamo_config as config

        code, limit = frame.f_code, self.limit()
        if self.compiled.get(code, 0) >= limit:
            self.stopped(code.co_name, limit)
            return ConvertFrameReturn(frame_exec_strategy=FrameExecStrategy(FrameAction.RUN_ONLY, FrameAction.RUN_ONLY))
        self.why = []
        before = dict(counters["graph_break"])
        try:
            with (
                LOCK,
                config.patch(self.patches),
            ):  # Dynamo and a trace in another thread would spoil each other's globals
                result = self.inner(frame, *rest)
        except Exception as error:
            # whatever Dynamo fails at (assertions of its own, too) runs in Python; a wrong call gets its own error
            if self.fullgraph:
                raise
            self.breaks[str(error) or type(error).__name__] = None
            self.failed[code] = self.failed.get(code, 0) + 1
            action = FrameAction.SKIP if self.failed[code] > FAILURES else FrameAction.DEFAULT
            return ConvertFrameReturn(frame_exec_strategy=FrameExecStrategy(action, FrameAction.DEFAULT))
        for text, count in counters["graph_break"].items():
            if count > before.get(text, 0):
                self.breaks[text] = None
        if result.guarded_code is None:
            self.skipped = self.skipped or kind(code.co_filename) != "torch"
        else:
            self.compiled[code] = self.compiled.get(code, 0) + 1
        return result


def read(
    fn: Callable,
    receive: Callable[[Found], Callable],
    *,
    fullgraph: bool = False,
    limit: Callable[[], int] = lambda: ENDLESS,
    stopped: Callable[[str, int], None] = lambda name, limit: None,
    first: str = FIRST,
    dynamic: bool | None = False,
) -> tuple[Callable, Frames]:
    """Return the function as Dynamo runs it, and the record of its frames.

    Args:
        receive: called for each graph, while a call is read; returns what runs in its place (inputs to a tuple of
            results).
        fullgraph: a graph break raises torch's `Unsupported` (see `explain_break`) instead of going on in Python.
        limit: how often one frame is compiled; `stopped(name, limit)` is called at more, and the frame runs what it
            has, or in Python.
        first: why the first graph is made. dynamic: which sizes and numbers Dynamo makes symbols, as for `jit`.
    """
    from ..torch_private import eval_frame, optimize

    frames: Any = None

    def backend(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable:
        return receive(Found(module, frames.why[0] if frames.why else first, ending_of(module)))

    def failed(guard: Any) -> None:
        if frames is not None:
            frames.why.append(guard_text(guard.reason))

    def guarded(guards: Any) -> None:
        for guard in guards:
            cls = guard.guarded_class_weakref() if guard.guarded_class_weakref is not None else None
            obj = guard.obj_weakref() if guard.obj_weakref is not None else None
            if isinstance(obj, torch.nn.Module):
                frames.modules.add(obj)
            frames.classes |= dict.fromkeys(base for base in getattr(cls, "__mro__", ()) if users_class(base))

    context: Any = optimize(backend, nopython=fullgraph, guard_fail_fn=failed, guard_export_fn=guarded)
    if not isinstance(context, eval_frame._TorchDynamoContext):  # TORCHDYNAMO_DISABLE
        raise Unsupported("capture_mode='bytecode'", "Dynamo is switched off in this process (TORCHDYNAMO_DISABLE)")
    inner: Any = context.callback
    frames = Frames(inner, limit, stopped, fullgraph, dynamic)
    context.callback = frames
    return context(own_code(fn)), frames


def own_code(fn: Callable) -> Callable:
    """The function with a code object of its own: Dynamo keeps what it compiled, and its limits, by code object."""
    if isinstance(fn, types.MethodType) and isinstance(fn.__func__, types.FunctionType):
        return types.MethodType(own_code(fn.__func__), fn.__self__)
    if not isinstance(fn, types.FunctionType) or kind(fn.__code__.co_filename) == "torch":
        inner = fn

        def call(*args: Any, **kwargs: Any) -> Any:
            return inner(*args, **kwargs)

        fn = call
    made = types.FunctionType(fn.__code__.replace(), fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    made.__kwdefaults__, made.__qualname__, made.__module__ = fn.__kwdefaults__, fn.__qualname__, fn.__module__
    made.__dict__.update(fn.__dict__)
    return made


class Unguarded:
    """What Dynamo takes to stay as it is, as it was: the function's own code and defaults, classes, and hooks on every
    module.
    """

    def __init__(self, fn: Any) -> None:
        self.function = (
            getattr(fn, "__func__", fn) if isinstance(getattr(fn, "__func__", fn), types.FunctionType) else None
        )
        self.own = self.state()
        self.classes: dict[type, tuple[Any, int, list[str], list[Any]]] = {}
        self.modules: list[tuple[weakref.ref[torch.nn.Module], frozenset[str]]] = []
        self.hidden: set[tuple[int, str]] = set()

    def state(self) -> tuple:
        hooks, own = torch.nn.modules.module, self.function
        present = bool(hooks._global_forward_hooks or hooks._global_forward_pre_hooks or hooks._global_backward_hooks)
        return (
            (present, None, None, None)
            if own is None
            else (present, own.__code__, own.__defaults__, own.__kwdefaults__)
        )

    def add(self, classes: Iterable[type]) -> None:
        for cls in classes:
            if cls not in self.classes:
                table = class_table(cls)
                names = [name for name, value in table.items() if isinstance(value, METHODS)]
                self.classes[cls] = (table, len(table), names, [table[name] for name in names])

    def add_modules(self, modules: Iterable[torch.nn.Module]) -> None:
        """Modules whose parameters, buffers and submodules Dynamo takes from their tables, though Python looks at
        `__dict__` first.
        """
        self.modules = [(weakref.ref(module), frozenset(names_in_tables(module))) for module in modules]
        self.hidden = {*self.hiding()}

    def hiding(self) -> Iterator[tuple[int, str]]:
        """The names in modules' tables that an attribute of the module's own hides."""
        for reference, names in self.modules:
            if (module := reference()) is not None and not (own := module.__dict__.keys()).isdisjoint(names):
                yield from ((id(module), name) for name in names & own)

    def changed(self) -> str:
        """What changed, or ""."""
        if any(pair not in self.hidden for pair in self.hiding()):
            return "a module has an attribute of its own in the place of a parameter, a buffer or a submodule"
        hooks, code, defaults, keywords = self.state()
        was = self.own
        if hooks is not was[0] or code is not was[1] or defaults is not was[2] or keywords is not was[3]:
            return "the function's own code or defaults changed, or hooks on every module"
        for cls, (table, size, names, values) in self.classes.items():
            if len(table) != size or list(map(table.get, names)) != values:
                return f"class {cls.__name__} changed"
        return ""


def names_in_tables(module: torch.nn.Module) -> Iterable[str]:
    return (name for section in TABLES for name in module.__dict__.get(section, ()))


METHODS = (types.FunctionType, staticmethod, classmethod, property)


# Dynamo's words.


def guard_text(reason: str) -> str:
    """What a failed guard says, without Dynamo's numbers and code: ``"k == 2"``, ``"tensor 'x' size mismatch at index
    0. ..."``.
    """
    text = re.sub(r"^\d+/\d+(_\d+)?: ", "", reason.split("\n")[0]).split("  #")[0]
    return text.strip() or "a guard"


def first_words(text: str) -> tuple[str, str]:
    """Take a message of Dynamo's apart: what it is about, and its explanation."""
    lines = [line.strip() for line in text.strip().split("\n") if line.strip()] or ["a graph break"]
    explained = next(
        (line.removeprefix("Explanation:").strip() for line in lines if line.startswith("Explanation:")), ""
    )
    return lines[0], explained


def ending_of(module: torch.fx.GraphModule) -> Ending:
    reason: Any = getattr(module, "compile_subgraph_reason", None)
    if reason is None:
        return Ending("", "", False)
    what, explained = first_words(reason.reason)
    return Ending(
        f"{what}: {explained}" if explained else what, stack_lines(reason.user_stack), bool(reason.graph_break)
    )


def stack_lines(stack: Any) -> str:
    """The user's lines of a Python stack, outermost first: ``"model.py:9: y = self.inner(x) → model.py:4:
    print(x)"``.
    """
    frames = [(entry.filename, entry.lineno, entry.name) for entry in stack or ()]
    wanted = [frame for frame in frames if kind(frame[0]) == "user"] or [
        frame for frame in frames if kind(frame[0]) == "library"
    ][-1:]
    return " → ".join(shorten(stack_entry(*frame)) for frame in wanted)


NESTED = "using FX to symbolically trace"
"""What Dynamo says, before it runs anything, while some thread traces: torch keeps that in a global."""


def outside_traces(function: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call what Dynamo runs, waiting for traces in other threads to end."""
    while True:
        if not _symbolic_trace._is_fx_tracing_flag:
            try:
                return function(*args, **kwargs)
            except RuntimeError as error:
                entered = error.__traceback__ is not None and error.__traceback__.tb_next
                if (
                    NESTED not in str(error) or not entered or entered.tb_next is not None
                ):  # it came from inside the function
                    raise
        with LOCK:  # not held while the function runs: it may need a lock whose owner waits for this one
            pass


def error_types() -> tuple[type[BaseException], ...]:
    """What Dynamo raises where it cannot read on."""
    from ..torch_private import exc

    return (
        exc.Unsupported,
        exc.TorchRuntimeError,
        exc.UserError,
        exc.UncapturedHigherOrderOpError,
        exc.InternalTorchDynamoError,
    )


def explain_break(error: Any) -> Unsupported:
    """The refusal behind an error that Dynamo raised with `fullgraph`, at the user's line."""
    what, explained = first_words(str(getattr(error, "msg", "") or error))
    reason = f"breaks the graph: {explained.rstrip('.')}" if explained else "breaks the graph"
    return Unsupported(
        what, f"{reason}; move it outside, or use fullgraph=False", stack_lines(getattr(error, "real_stack", None))
    )


# Running a graph of Dynamo's under our own trace.


def wrapped_floats(module: torch.fx.GraphModule) -> tuple[int, ...]:
    """The inputs that are Python floats in the shape of tensors, read back by `.item()`: Dynamo makes them of floats
    that vary.
    """
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    return tuple(
        number
        for number, node in enumerate(inputs)
        if not getattr(node.meta.get("grapharg"), "is_tensor", True)
        and node.users
        and all(user.op == "call_method" and user.target == "item" for user in node.users)
    )


def dynamic(module: torch.fx.GraphModule) -> bool:
    """Whether inputs of the graph vary from call to call: its sizes are symbols, or some inputs are numbers."""
    for node in module.graph.nodes:
        if node.op == "placeholder":
            value = node.meta.get("example_value")
            if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                return True
            if isinstance(value, torch.Tensor) and any(
                isinstance(size, torch.SymInt) for size in (*value.shape, *strides(value))
            ):
                return True
    return bool(wrapped_floats(module))


def strides(value: torch.Tensor) -> tuple:
    return value.stride() if value.layout is torch.strided else ()


def replay(module: torch.fx.GraphModule) -> Callable:
    """Return the graph as a function that runs node by node and tells the trace each node's line of the user's code."""
    lines = {node: line_entry(node.meta.get("stack_trace") or "") for node in module.graph.nodes}
    floats = frozenset(wrapped_floats(module))

    def run(*inputs: Any) -> Any:
        values: dict[torch.fx.Node, Any] = {}
        given = iter(enumerate(inputs))
        entry = getattr(LOCAL, "entry", "")
        try:
            for node in module.graph.nodes:
                LOCAL.entry = lines[node]
                if node.op == "placeholder":
                    number, values[node] = next(given)
                    if number in floats:  # a number, whose `.item()` is itself
                        values |= dict.fromkeys(node.users, values[node])
                elif node.op == "output":
                    return torch.fx.map_arg(node.args[0], values.__getitem__)
                elif node not in values:
                    values[node] = run_node(module, node, values)
        except BaseException:
            left = {node.args[0] for node in values if node.target is EXIT_AUTOCAST}
            for node in reversed([node for node in values if node.target is ENTER_AUTOCAST and node not in left]):
                values[node].__exit__(None, None, None)
            raise
        finally:
            LOCAL.entry = entry
        raise AssertionError("a graph without output")

    return run


def run_node(module: torch.fx.GraphModule, node: torch.fx.Node, values: dict[torch.fx.Node, Any]) -> Any:
    if node.op == "get_attr":
        found: Any = module
        for part in str(node.target).split("."):
            found = getattr(found, part)
        return found
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    target: Any = module.get_submodule(str(node.target)) if node.op == "call_module" else node.target
    return INSTEAD.get(target, target)(*args, **kwargs)


def enter_autocast(*state: Any) -> Any:
    """Enter autocast for the fake tensors of the trace, too: torch's function of that name would only write the
    node.
    """
    mode = torch.amp.autocast_mode.autocast(*state)
    mode.__enter__()
    return mode


def run_checkpointed(body: Any, *inputs: Any, **options: Any) -> Any:
    """What `torch.utils.checkpoint` runs, in place, and marked with what is to be kept."""
    context_fn = body.meta.get("_checkpoint_context_fn") if isinstance(body, torch.fx.GraphModule) else None
    with marking(policy_of(context_fn)):
        return (replay(body) if isinstance(body, torch.fx.GraphModule) else body)(*inputs)


ENTER_AUTOCAST: Any = private.enter_autocast
EXIT_AUTOCAST: Any = private.exit_autocast
INSTEAD: dict[Any, Callable] = {
    ENTER_AUTOCAST: enter_autocast,
    EXIT_AUTOCAST: lambda mode: mode.__exit__(None, None, None),
    torch.ops.higher_order.tag_activation_checkpoint: run_checkpointed,
}
"""Functions in Dynamo's graphs that are traced another way than by calling them."""


def line_entry(text: str) -> str:
    """The user's innermost entry of a stack as text; a library's `forward` counts, its small functions only where
    nothing else is.
    """
    entries = list(ENTRY.finditer(text))
    for found in reversed(entries):
        where = kind(found["file"])
        if where == "user" or where == "library" and found["name"] == "forward":
            return found[0]
    return entries[-1][0] if entries else ""
