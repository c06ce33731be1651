"""Capture by tracing: run a Python function once on fake tensors and keep its ops as a graph.

In: a function and the arguments of one call. Out: a `Captured`: a `torch.fx` graph of ATen ops before autograd and
autocast (linear, layer_norm, dropout and scaled_dot_product_attention stay whole), whose inputs are the tensors among
the arguments and then every other tensor that the body touched (parameters, buffers, closed-over tensors).

    >>> captured = capture(lambda x: (x + 1).relu(), (torch.ones(2),), {})
    >>> print(captured.graph.graph)
    graph():
        %arg0_1 : [num_users=1] = placeholder[target=arg0_1]
        %add : [num_users=1] = call_function[target=torch.ops.aten.add.Tensor](args = (%arg0_1, 1), kwargs = {})
        %relu : [num_users=1] = call_function[target=torch.ops.aten.relu.default](args = (%add,), kwargs = {})
        return (relu,)

Nothing of the capture stays behind: attributes, containers and globals that the body wrote are put back (see
capture/state/recorder.py).
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .. import torch_private as private
from ..codegen.ir.effects import has_formula
from ..errors import CaptureError, Unsupported, note_refusal, refusals
from ..fork_locks import awaited
from . import pytree
from .arguments import check_arguments, refuse_tensor
from .effect_ops import ASSERTS, as_check
from .effect_ops import OPS as ORDERED
from .fake_mode import new_fake_mode
from .functorch import MAKES_CONSTANT, follow_levels, is_level_change, of_transform, outside_levels, transforming
from .outputs import Constant, check_unchanged, sort_outputs
from .record_op import recording, taken_apart
from .refused import DATA, DATA_DEPENDENT, REFUSED, WAY_OUT, T, explain_error
from .scalar_index import GET, SET, Picked
from .shapes.symbols import Symbols
from .shapes.symint_as_int import lookalike, refuse_type
from .sort_graph import order_graph
from .source_lines import frame_entry, frame_line, shorten, user_frame
from .state.iterators import DRAWN
from .state.profile_hook import unobserved
from .state.reads import Effect
from .state.recipes import RECIPES, Call, Recipes, Shared, Unrepeatable, marked, plain_object
from .state.recorder import Recorder
from .state.shared_containers import check_identities
from .state.writes import Change, Store, moving, repeat, restore, shared, stores

Tensor = torch.Tensor
LOCK = awaited(threading.RLock())
"""One capture at a time: it replaces attribute methods of classes that all threads share."""
LOCAL = threading.local()
QUERIES = frozenset(
    (
        T.shape.__get__,
        T.dtype.__get__,
        T.device.__get__,
        T.layout.__get__,
        T.ndim.__get__,
        T.requires_grad.__get__,
        T.dim,
        T.size,
        T.numel,
        T.stride,
        T.element_size,
        T.is_floating_point,
        T.is_complex,
        T.is_contiguous,
    )
)
"""What a tensor answers without an op, and without being asked for its values."""
NO_FORMULA = "fusejit_no_formula"
"""Marks a node through which eager differentiates what its kernel calls."""
HIGHER: dict[Any, Callable] = {}
"""Functions of functions that are traced in place instead; filled by api/control_flow.py."""
BINDINGS = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
"""Functions of torch written in C, which call no other."""
GETTERS = (*BINDINGS, types.MethodWrapperType)
"""The same, and what reads an attribute of a tensor: below them runs no code of the user's, arguments' own aside."""


@dataclass(slots=True)
class Captured:
    """A captured function.

    Attributes:
        graph: module of the graph; inputs: argument tensors, then lifted tensors; output: a flat tuple of tensors, the
            last perhaps
            a token that no one reads (see effect_ops.py).
        positions: for each argument tensor of the graph, its index among the flattened arguments' leaves.
        lifted: the other tensors, in the order of their placeholders.
        outputs: for each leaf of the result, its index in the graph's output, or `Constant(value)`.
        structure: of the result (see pytree.py).
        same: (tensor, i): closed-over tensors that were the same object as argument tensor i.
        effects, recorder: see capture/state/recorder.py. met: what `lifted` was before its tensors became constants.
        inference: entered `torch.inference_mode` somewhere; its ops run under no_grad.
        regions: the `Regions` of the capture, or None.
        stores: what each call writes; moving: of that, what the guards compare (see capture/state/writes.py).
    """

    graph: torch.fx.GraphModule
    positions: tuple[int, ...]
    lifted: tuple[Tensor, ...]
    outputs: tuple[Any, ...]
    structure: Any
    same: list[tuple[Tensor, int]]
    effects: list[Effect]
    recorder: Recorder
    name: str
    met: tuple[Tensor, ...] = ()
    regions: Any = None
    stores: tuple[Store, ...] = ()
    moving: list[Change] = field(default_factory=list)

    @property
    def bare(self) -> bool:
        """Whether the result is the graph's first one, and that is all."""
        return self.structure is None and self.outputs == (0,) and not self.stores

    def unflatten(self, results: Any) -> Any:
        """Build the function's result from the tensors that the graph returned, and store what the call leaves
        behind.
        """
        call = Call(results)
        leaves = [results[item] if type(item) is int else call.make(item) for item in self.outputs]
        repeat(self.stores, call)
        return pytree.unflatten(self.structure, iter(leaves))

    @property
    def plain(self) -> bool:
        """Whether a call leaves nothing behind, and returns nothing that the user holds elsewhere."""
        return not self.stores and all(type(item) in (int, Constant) for item in self.outputs)


def active() -> bool:
    """Whether this thread is inside a capture."""
    return getattr(LOCAL, "recorder", None) is not None


def recorder() -> Recorder:
    """The recorder of the capture that this thread is in."""
    return LOCAL.recorder


def tracing() -> Tracing:
    """The trace of the capture that this thread is in."""
    return LOCAL.tracing


def entry_of(frame: Any) -> str:
    """The traceback entry of an op: of the user's frame, or the one that a graph which is traced again knows (see
    dynamo.py).
    """
    return getattr(LOCAL, "entry", "") or frame_entry(frame)


def unrecord(last: torch.fx.Node) -> None:
    """Remove what a call that failed has left behind the last node that was there before."""
    node = last.graph._root.prev
    while node is not last:
        node, failed = node.prev, node
        if failed.op != "placeholder" and not failed.users:
            failed.graph.erase_node(failed)


class Tracing(TorchFunctionMode):
    """Sees each torch call of the body first: replaces real tensors by inputs of the graph, notes the user's line,
    refuses what is lost.
    """

    def __init__(self, fake_mode: Any, symbols: Symbols | None = None) -> None:
        super().__init__()
        self.fake_mode, self.symbols = fake_mode, symbols
        self.stop: Any = None
        self.twins: dict[int, Any] = {}
        self.arguments: dict[int, int] = {}
        self.lifted: list[tuple[Tensor, torch.fx.Node]] = []
        self.placed: dict[int, torch.fx.Node] = {}  # inputs that only regions have read: without a twin
        self.same: list[tuple[Tensor, int]] = []
        self.mode: Any = None
        self.grad = False
        self.token: Tensor | None = None
        self.picked = Picked()
        self.entries: dict[tuple[Any, int], str] = {}
        self.echo: Callable[[list[Tensor]], None] | None = None  # told of the tensors that a call has changed in place
        self.changed: list[Tensor] = []

    def follow(self, mode: Any) -> None:
        """Record through a proxy mode, from the present grad mode on."""
        keep = recording(mode, self.symbols is not None)

        def record(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
            self.note_grad()
            if func not in MAKES_CONSTANT:  # a tensor that only a transform's own code has touched
                args, kwargs = self.replace(args), self.replace(kwargs)
            if self.echo is not None and getattr(getattr(func, "_schema", None), "is_mutable", False):
                self.changed.append(args[0])
            last = mode.tracer.graph._root.prev
            try:
                made = keep(func, args, kwargs)
                if (
                    torch.is_grad_enabled()
                    and not has_formula(func)
                    and any(value.requires_grad for value in pytree.tensors((args, kwargs)))
                ):
                    next(node for node in reversed(mode.tracer.graph.nodes) if node.target is func).meta[NO_FORMULA] = (
                        True
                    )
                return made
            except Exception as error:  # the user may catch it, and go on
                unrecord(last)
                if type(error).__name__ in DATA_DEPENDENT:
                    note_refusal(error)
                raise

        self.mode, self.grad = mode, torch.is_grad_enabled()
        follow_levels(mode, record)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if type(func) in GETTERS and taken_apart(args) and (not kwargs or taken_apart([*kwargs.values()])):
            with unobserved():
                made = self.call(func, args, kwargs, sys._getframe(1))
        else:
            made = self.call(func, args, kwargs, sys._getframe(1))
        if self.changed and self.echo is not None:
            self.echo(self.changed)
            self.changed.clear()
        return made

    def call(self, func: Any, args: Any, kwargs: Any, caller: Any) -> Any:
        import torch.fx.traceback as fx_traceback  # the module's attribute `current_meta` is replaced now and then

        if self.symbols is not None:
            self.symbols.bear()
        if func in QUERIES:
            args = self.replace(args)
            with private.DisableTorchFunction():
                return func(*args, **(kwargs or {}))
        frame = user_frame(caller, self.stop)
        if (
            func in REFUSED
            and not (func is T.item and getattr(args[0], "constant", None) is not None)
            and not of_transform(caller)
        ):
            op, reason = REFUSED[func]
            twice = bool((kwargs or {}).get("create_graph"))  # which between graphs of Dynamo's would be refused, too
            raise Unsupported(op, f"{reason}; {WAY_OUT}", shorten(entry_of(frame)), in_python=not twice)
        fx_traceback.current_meta["stack_trace"] = self.entry(frame)
        if func is private.set_grad_enabled and self.traces_here() or is_level_change(func):
            with private.DisableTorchFunction():  # the graph keeps what became of it: see note_grad, and functorch.py
                return func(*self.replace(args), **(kwargs or {}))
        if isinstance(func, private.HigherOrderOperator):
            if transforming():
                raise Unsupported(
                    f"{func._name} under torch.func",
                    "a function of functions cannot be followed there",
                    frame_line(frame),
                )
            if func in HIGHER and self.traces_here():
                with self:
                    return HIGHER[func](*args, **(kwargs or {}))
            if self.traces_here():
                self.note_grad()
        if func == DATA:
            func = T.detach
        if func in ASSERTS:
            func, args = as_check(*self.replace(args), **self.replace(kwargs or {}))
        if func in ORDERED:
            return self.thread(func, self.replace(args), frame_line(frame))
        if self.picked.kept:
            self.picked.refuse_change(func, args, frame_line(frame))
        if func is GET or func is SET:
            args = self.replace(args)
            found, done = self.picked.index(func, args)
            return found if done else func(*args)
        args, named = self.replace(args), self.replace(kwargs or {})
        if type(func) in BINDINGS and func is not private.set_grad_enabled:
            with (
                private.DisableTorchFunction()
            ):  # straight to the dispatcher: torch's own modes have nothing to see in it
                return func(*args, **named)
        return func(*args, **named)

    def entry(self, frame: Any) -> str:
        """The traceback entry of a frame, which an op after the other asks for."""
        if frame is None or getattr(LOCAL, "entry", "") != "":
            return entry_of(frame)
        key = frame.f_code, frame.f_lineno
        found = self.entries.get(key)
        if found is None:
            found = self.entries[key] = entry_of(frame)
        return found

    def thread(self, func: Any, args: tuple, line: str) -> Tensor:
        """Call an op with an effect after the one before it; the last token becomes an output of the graph."""
        from torch.fx.experimental.proxy_tensor import get_proxy_mode

        if getattr(get_proxy_mode(), "tracer", None) is not self.mode.tracer:
            raise Unsupported(
                f"{func} inside a branch that is a graph of its own",
                "it would be lost; move it behind the branch",
                line,
            )
        made: Tensor = func(self.token, *args[1:])
        while private.is_functorch_wrapped_tensor(made):  # a token is older than every transform
            made = private.get_unwrapped(made)
        self.token = made
        return made

    def traces_here(self) -> bool:
        """Whether ops go into this trace now, and not into the trace of a branch or a loop body."""
        from torch.fx.experimental.proxy_tensor import get_proxy_mode

        return get_proxy_mode() is self.mode

    def take(self, leaves: list[Any]) -> list[int]:
        """Give each argument tensor a fake twin; returns where among the leaves they are."""
        from ..torch_private import FakeTensor

        positions: list[int] = []
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and id(leaf) not in self.twins:
                with torch.inference_mode(False):
                    fake = self.fake_mode.from_tensor if self.symbols is None else self.symbols.fake
                    self.twins[id(leaf)] = leaf if isinstance(leaf, FakeTensor) else fake(leaf)
                self.arguments[id(leaf)] = len(positions)
                positions.append(number)
        return positions

    def replace(self, value: Any) -> Any:
        """Replace real tensors in (nested lists of) arguments by their fake twins."""
        return pytree.map_tensors(self.twin, value)

    def twin(self, value: Tensor) -> Tensor:
        """Return the fake twin of a tensor; a real one met for the first time becomes an input of the graph."""
        from ..torch_private import FakeTensor

        if isinstance(value, FakeTensor) or private.is_functorch_wrapped_tensor(value):
            return value
        found = self.twins.get(id(value))
        if found is None:
            found = self.twins[id(value)] = self.lift(value)
        elif id(value) in self.arguments:
            self.same.append((value, self.arguments[id(value)]))
        return found

    def lift(self, value: Tensor) -> Tensor:
        from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, track_tensor_tree

        from ..torch_private import FakeTensor, unset_fake_temporarily

        with private.DisableTorchFunction():  # or looking at it would make an input of it before it is one
            refuse_tensor(value, "a closed-over tensor")
        bare = contextlib.ExitStack()
        for state in (private.DisableTorchFunction(), private.DisableFuncTorch(), disable_proxy_modes_tracing()):
            bare.enter_context(state)
        with bare, unset_fake_temporarily(), torch.inference_mode(False):
            fake = self.fake_mode.from_tensor(value)
        assert isinstance(fake, FakeTensor)
        tracer = self.mode.tracer
        node = self.placed.pop(id(value), None) or self.place(value, tracer)
        with private.DisableTorchFunction(), private.DisableFuncTorch():
            track_tensor_tree(fake, torch.fx.Proxy(node, tracer), constant=None, tracer=tracer)
        return fake

    def place(self, value: Tensor, tracer: Any) -> torch.fx.Node:
        """Give a real tensor an input of the graph."""
        node = tracer.create_node("placeholder", f"lifted_{len(self.lifted)}", (), {})
        self.lifted.append((value, node))
        return node

    def note_grad(self) -> None:
        """Write a change of grad mode before the op that it matters to: of autograd outside all transforms, inference
        mode included.
        """
        now = torch.is_grad_enabled()
        if now is not self.grad:
            self.grad = now
            self.mode.tracer.create_node("call_function", private.set_grad_enabled, (now,), {})


def capture(
    fn: Callable,
    args: tuple,
    kwargs: dict[str, Any],
    name: str = "",
    watch: tuple = (),
    rewrite: Callable | None = None,
    regions: Callable | None = None,
    symbols: Symbols | None = None,
) -> Captured:
    """Trace `fn(*args, **kwargs)` without computing anything.

    Args:
        fn: any callable; the body runs once, on fake tensors of the arguments' dtype, shape, strides and device.
        args, kwargs: real tensors (or fake ones) and Python values, nested in any pytree.
        name: how messages call the function.
        watch: objects whose attribute reads matter besides `fn` (a method's `self`).
        rewrite: makes of `fn`, and of (the `forward` that a module reads, the module), what is run instead; `fn` itself
            is watched.
        regions: makes what sees the calls of repeated blocks (see capture/regions/detect.py); None captures every call
            in place.
        symbols: the sizes that may vary (see capture/shapes/symbols.py); they become the graph's last inputs.

    Raises:
        Unsupported: something in the body cannot be captured; names the user's line.
        ArgumentError: an argument has a type that cannot be captured.
        Exception: whatever the body itself raised, the same object.
    """
    leaves: list[Any] = []
    structure = pytree.flatten((args, kwargs), leaves)
    check_arguments(structure, leaves)
    with LOCK:
        return trace_once(fn, structure, leaves, name, watch, rewrite, regions, symbols)


def trace_once(
    fn: Callable,
    structure: Any,
    leaves: list[Any],
    name: str,
    watch: tuple,
    rewrite: Callable | None,
    regions: Callable | None,
    symbols: Symbols | None,
) -> Captured:
    """Run the body once; whatever happens, put the user's objects back."""
    watcher = LOCAL.recorder = Recorder(rewrite)
    error: BaseException | None = None
    with refusals() as seen:
        try:
            for item in (fn, *watch, *leaves):
                watcher.reach(item)
                watcher.watch(item)
            captured = run_body(
                fn if rewrite is None else rewrite(fn), structure, leaves, name, watcher, regions, symbols
            )
        except BaseException as raised:  # put back in order below, whatever it was
            error = raised
        finally:
            LOCAL.recorder = LOCAL.tracing = None
    if seen and (
        error is None
        or isinstance(error, Exception)
        and not isinstance(error, (Unsupported, CaptureError))
        and error not in seen
    ):
        error = seen[0]  # which the function itself caught: what it did then is not what it does in eager
    moved = moving(watcher, captured.stores) if error is None else []
    restore(watcher)
    drawn = watcher.streams.settle()
    if error is not None:
        made = explain_error(error)
        if made is not error:
            made.__cause__ = error
        if isinstance(made, Unsupported):
            made.recorder = watcher  # type: ignore[attr-defined]  # what the failed capture read guards the fallback
        raise made
    if drawn:
        raise Unsupported(*DRAWN, in_python=False)
    captured.effects, captured.moving = [*watcher.messages.values()], moved
    return captured


def run_body(
    fn: Callable,
    structure: Any,
    leaves: list[Any],
    name: str,
    watcher: Recorder,
    regions: Callable | None,
    symbols: Symbols | None,
) -> Captured:
    """The trace itself: fake inputs, make_fx, and the graph put in order."""
    import torch.fx.traceback as fx_traceback
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

    from ..torch_private import FakeTensor
    from ..torch_private import use_lazy_graph_module as _use_lazy_graph_module

    modes = [leaf.fake_mode for leaf in leaves if isinstance(leaf, FakeTensor)]
    fake_mode = modes[0] if modes else symbols.mode if symbols is not None else new_fake_mode()
    tracing = LOCAL.tracing = Tracing(fake_mode, symbols)
    watcher.twins, watcher.marked = tracing.twins, [leaf for leaf in leaves if isinstance(leaf, Tensor) and vars(leaf)]
    blocks, positions = regions and regions(tracing, watcher), tracing.take(leaves)
    fakes = [tracing.twins[id(leaves[position])] for position in positions]
    numbers = symbols.given() if symbols is not None else {}
    result: list[Any] = []

    def body(*inputs: Tensor) -> tuple[Tensor, ...]:
        stand_in = dict(zip(tracing.arguments, inputs))
        mode: Any = get_proxy_mode()
        watcher.ignored.add(id(mode.tracer.root))
        tracing.follow(mode)
        values = [
            stand_in[id(leaf)] if isinstance(leaf, Tensor) else numbers.get(n, leaf) for n, leaf in enumerate(leaves)
        ]
        args, kwargs = pytree.unflatten(structure, iter(values))
        as_ints = lookalike() if symbols is not None else contextlib.nullcontext()
        with (
            tracing,
            watcher,
            blocks or contextlib.nullcontext(),
            as_ints,
        ):  # inside the trace: fx replaces nn.Module.__getattr__ too
            out = fn(*args, **kwargs)
            tracing.note_grad()
            check_unchanged((args, kwargs), structure, values)
            check_identities(fn, out, (args, kwargs))
        structure_of, flat, tensors, kept = take_results(out, watcher, tracing)
        result.extend((structure_of, flat, kept))
        return tuple(tensors if tracing.token is None else [*tensors, tracing.token])

    tracing.stop = body.__code__
    with (
        capture_state(),
        fake_mode,
        outside_levels(fake_mode),
        fx_traceback.preserve_node_meta(),
        _use_lazy_graph_module(True),
    ):
        fx_traceback.current_meta.pop("stack_trace", None)
        module = make_fx(body, tracing_mode="real", pre_dispatch=True)(*fakes, *numbers.values())
    if blocks:
        blocks.finish(module)
    order_graph(module, [node for _, node in tracing.lifted])
    if symbols is not None:
        refuse_type(symbols.scalars, watcher.codes)
        module = symbols.bind(module)
    lifted, outputs = tuple(value for value, _ in tracing.lifted), sort_outputs(result[1], RECIPES)
    return Captured(
        module, tuple(positions), lifted, outputs, result[0], tracing.same, [], watcher, name, (), blocks, result[2]
    )


def take_results(
    out: Any, watcher: Recorder, tracing: Tracing
) -> tuple[Any, list[Any], list[Tensor], tuple[Store, ...]]:
    """The structure and the leaves of what the body returned, the graph's results for them, and what each call
    writes.
    """
    leaves: list[Any] = []
    structure = pytree.flatten(marked(out, shared(watcher)), leaves)
    leaves = [tracing.replace(item) for item in leaves]
    tensors = [item for item in leaves if isinstance(item, Tensor)]
    recipes = Recipes(watcher, tracing.twin, tracing.mode.tracer.tensor_tracker, tensors)
    kept = stores(watcher, recipes)
    return structure, [recipe_of(recipes, item) for item in leaves], tensors, kept


def recipe_of(recipes: Recipes, result: Any) -> Any:
    """The recipe of a container that the body returns and that is held elsewhere, too, or of an object that it makes;
    what is neither as it is.
    """
    if not isinstance(result, Shared):
        try:
            return recipes.of(result) if plain_object(result) else result
        except Unrepeatable:  # refused as a result of its type
            return result
    try:
        return recipes.of(result.value)
    except Unrepeatable as error:
        raise Unsupported(f"returning a {type(result.value).__name__}", f"{error}; return a copy of it") from None


@contextlib.contextmanager
def capture_state() -> Iterator[None]:
    """Trace outside inference mode (its tensors cannot be traced), keeping its absence of gradients; put functorch
    back.

    The garbage collector waits: a generator under `no_grad` that it closes would switch gradients in the middle of the
    graph.
    """
    inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    depth, collecting = private.get_dynamic_layer_stack_depth(), gc.isenabled()
    gc.disable()
    try:
        with torch.inference_mode(False), torch.set_grad_enabled(grad and not inference):
            yield
    finally:
        if collecting:
            gc.enable()
        private.set_grad_enabled(grad)
        if private.get_dynamic_layer_stack_depth() > depth:
            private.pop_dynamic_layer_stack_and_undo_to_depth(depth)
