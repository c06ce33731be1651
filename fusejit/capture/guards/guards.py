"""Guards: what a specialisation is keyed by, and the check that says whether it still holds.

In: the flattened arguments of a call (`key_of`), and the reads and lifted tensors of a capture (`Guards`). Out: a
hashable key, and on each call either the lifted tensors as they are now, or None when something that the capture read
has changed.

    >>> guards = Guards(captured)
    >>> guards.lifted()            # re-reads parameters and buffers by path
    [Parameter containing: ...]
    >>> module.eval(); guards.lifted() is None
    True

The check is one generated Python function: a chain of comparisons on pinned dictionaries, about 60 ns a read. Compared
by value: numbers, strings, dtypes and the like, and containers of them to `effects.DEPTH`; by identity: everything
else. Tensors are inputs: only their dtype, device, shape, strides, requires_grad and type are compared.
"""

from __future__ import annotations

import enum
import types
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ... import torch_private as private
from .. import pytree as tree
from ..state.reads import CONTAINERS, DEPTH, Contents, Read, contents
from ..state.recipes import Place
from ..tracer import Captured

Tensor = torch.Tensor
VALUES = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size, range)
"""Types compared by value."""


# The key: arguments and the state of torch.


def tensor_key(value: Tensor) -> tuple:
    """What a program depends on in a tensor."""
    return (type(value), value.dtype, value.shape, value.stride(), value.device, value.requires_grad)


def value_key(value: Any) -> Any:
    """Type and value of a Python argument; objects without a value are told apart by identity."""
    kind = type(value)
    if kind is float or kind is complex:
        return (kind, repr(value))  # tells 0.0 from -0.0, and finds nan
    if kind in VALUES or isinstance(value, enum.Enum):
        return (kind, value)
    if kind is slice:
        return (kind, value_key(value.start), value_key(value.stop), value_key(value.step))
    if kind is frozenset or kind is set:
        return (kind, frozenset(map(value_key, value)))
    if kind.__module__ == "numpy" and hasattr(value, "dtype"):
        return (kind, repr(value))
    if kind is bytearray or kind is array:
        return (kind, contents(value))
    return (kind, id(value))


def key_of(leaves: list[Any]) -> tuple:
    """Return the part of the key that the arguments make: one entry a leaf, and which tensors are one object."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    pattern: tuple[int, ...] | None = None
    if len(tensors) > 1 and len({id(tensor) for tensor in tensors}) != len(tensors):
        first: dict[int, int] = {}
        pattern = tuple([first.setdefault(id(tensor), number) for number, tensor in enumerate(tensors)])
    for number, tensor in enumerate(tensors):
        if tensor.is_neg() or tensor.is_conj():  # a lazy view: its memory holds something else
            pattern = (*(pattern or ()), ~number)
    try:
        entries = [
            (type(leaf), leaf.dtype, leaf.shape, leaf.stride(), leaf.device, leaf.requires_grad)
            if isinstance(leaf, Tensor)
            else value_key(leaf)
            for leaf in leaves
        ]
    except RuntimeError:  # a sparse tensor has no strides
        entries = [sparse_key(leaf) if isinstance(leaf, Tensor) else value_key(leaf) for leaf in leaves]
    return (pattern, *entries)


def sparse_key(leaf: Tensor) -> tuple:
    """One entry of the key for a tensor that may have no strides."""
    strides = leaf.stride() if leaf.layout is torch.strided else leaf.layout
    return (type(leaf), leaf.dtype, leaf.shape, strides, leaf.device, leaf.requires_grad)


def state_key() -> tuple:
    """The state of torch outside the arguments that changes what a function computes."""
    hooks = torch.nn.modules.module
    state = (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        bool(
            hooks._global_forward_hooks
            or hooks._global_forward_pre_hooks
            or hooks._global_backward_hooks
            or hooks._global_backward_pre_hooks
        ),
        private.len_torch_function_stack() and str(torch.get_default_device()),
    )
    if private.is_any_autocast_enabled():
        kinds = ("cpu", "cuda")
        return (*state, *[(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds])
    return state


def key_for(receiver: Any, args: tuple, kwargs: dict[str, Any], leaves: list[Any]) -> tuple:
    """What the specialisations of a function are looked up by; fills `leaves` with the flattened arguments."""
    structure = (tree.KEYED, tree.flatten((args, kwargs), leaves)) if kwargs else tree.flatten(args, leaves)
    return (structure, state_key(), key_of(leaves), id(receiver))


# The check.


class Guards:
    """The conditions under which a captured graph holds, as one function.

    Attributes:
        lifted: `lifted(leaves) -> list of tensors | None`.
        source: its Python text, for explain().
        count: number of conditions. writer: what wrote them, to say later which one failed (see recompile_reasons.py).
    """

    def __init__(self, captured: Captured) -> None:
        self.writer = writer = Writer(captured)
        self.source, scope = writer.write()
        self.count = writer.count
        exec(compile(self.source, f"<guards of {captured.name or 'function'}>", "exec"), scope)
        self.lifted: Callable[[list[Any]], list[Tensor] | None] = scope["check"]
        self.pins = list(scope.values())


class Writer:
    """Writes the check function: names each pinned object once, then one condition a read."""

    def __init__(self, captured: Captured) -> None:
        self.captured = captured
        self.scope: dict[str, Any] = {}
        self.names: dict[int, str] = {}
        self.constants: dict[tuple[type, Any], str] = {}
        self.count = 0
        self.conditions: list[str] = []
        self.guarded: list[tuple[str, Read]] = []
        self.keys = [tensor_key(value) for value in captured.lifted]

    def pin(self, value: Any) -> str:
        """Return the name under which the function knows an object."""
        name = self.names.get(id(value))
        if name is None:
            name = self.names[id(value)] = f"p{len(self.scope)}"
            self.scope[name] = value
        return name

    def place(self, place: Place) -> str:
        """The text that finds what stands at a place."""
        keys = [repr(key) if type(key) in (str, int) else self.pin(key) for key in place.keys]
        return self.expression(place.read) + "".join(f"[{key}]" for key in keys)

    def expression(self, read: Read) -> str:
        """The text that reads the value again."""
        if read.how == "holder":
            return self.place(read.table)
        if read.how == "entry":
            return f"{self.pin(read.table)}[{read.section!r}][{read.name!r}]"
        if read.how == "cell":
            return f"{self.pin(read.table)}.cell_contents"
        if read.how == "element":
            return self.expression(read.table) + "".join(f"[{key!r}]" for key in read.name)
        if read.how == "call":
            return f"{self.pin(read.table)}()"
        if read.how == "attribute":
            return (
                f"{self.pin(read.table)}.{read.name}"
                if read.name.isidentifier()
                else f"getattr({self.pin(read.table)}, {read.name!r})"
            )
        return f"{self.pin(read.table)}[{read.name!r}]"

    def condition(self, read: Read) -> str | None:
        """The text that is true while the value is as it was; None where the tensor check does it."""
        if read.how == "absent":
            return f"{read.name!r} not in {self.pin(read.table)}"
        value, text = read.value, self.expression(read)
        if read.how == "holder":
            others = [f"{text} {'is' if same else 'is not'} {self.place(other)}" for other, same in read.snapshot]
            return " and ".join([f"nature({text}) == {self.pin(nature(value))}", *others])
        if isinstance(value, Tensor):
            return (
                self.tied(value, text) if id(value) in self.lifted_ids else f"type({text}) is {self.pin(type(value))}"
            )
        if isinstance(read.snapshot, Contents):
            return f"frozen_same({text}, {self.pin(read.snapshot)})"
        if value is None or value is True or value is False:
            return f"{text} is {value}"
        if isinstance(value, CONTAINERS):
            if not value:
                return f"not {text}"
            frozen = self.loosened(read.snapshot, read)
            return f"same({text}, {self.pin(frozen)}, {self.pin(type(value))})"
        if isinstance(value, (*VALUES, enum.Enum)):
            return f"({text} is {self.pin(value)} or equal({text}, {self.pin(value)}))"
        if type(value) is types.MethodType:
            return f"{text} == {self.pin(value)}"
        return f"{text} is {self.pin(value)}"

    def loosened(self, frozen: Any, read: Read, keys: tuple = ()) -> Any:
        """A frozen container, any tensor in the place of one that the graph does not use, or that the tensor check
        looks for there.
        """
        if isinstance(frozen, Tensor):
            source = self.captured.recorder.sources.get(id(frozen))
            place = None if source is None else (id(source.table), source.section, source.name)
            found = place in (
                (id(read), "", keys),
                (id(read.table), read.name, *keys),
            )  # the latter: an entry of `self._buffers`
            used = id(frozen) in self.lifted_ids or id(frozen) in self.arguments
            return AnyTensor(type(frozen)) if not used or found and id(frozen) not in self.arguments else frozen
        if len(keys) >= DEPTH:  # compared by identity, and perhaps around a circle
            return frozen
        if isinstance(frozen, dict):
            return {key: self.loosened(item, read, (*keys, key)) for key, item in frozen.items()}
        return (
            [self.loosened(item, read, (*keys, n)) for n, item in enumerate(frozen)]
            if isinstance(frozen, list)
            else frozen
        )

    def tied(self, value: Tensor, text: str) -> str | None:
        """The text that is true while two places hold one tensor; None for the place where the tensor check finds
        it.
        """
        source = self.captured.recorder.sources.get(id(value))
        found = self.pin(value) if source is None else self.expression(source)
        return None if found == text else f"{text} is {found}"

    def write(self) -> tuple[str, dict[str, Any]]:
        captured, recorder = self.captured, self.captured.recorder
        self.lifted_ids = {id(value): number for number, value in enumerate(captured.lifted)}
        arguments = self.arguments = {id(value): index for value, index in captured.same}
        for read in recorder.reads.values():
            if id(read.value) in arguments and isinstance(read.value, Tensor):
                text: str | None = f"{self.expression(read)} is leaves[{captured.positions[arguments[id(read.value)]]}]"
            else:
                text = self.condition(read)
            if text is not None:
                self.conditions.append(text)
                self.guarded.append((text, read))
        lines = ["def check(leaves):", "    try:"]
        for start in range(0, len(self.conditions), 16):
            lines.append(f"        if not ({' and '.join(self.conditions[start : start + 16])}): return None")
        results = []
        for number, value in enumerate(captured.lifted):
            lines += self.tensor_lines(number, value, recorder.sources.get(id(value)))
            results.append(f"t{number}")
        if len(results) > 1:
            lines.append(
                f"        if len({{{', '.join(f'id({name})' for name in results)}}}) != {len(results)}: return None"
            )
        lines += [
            f"        return [{', '.join(results)}]",
            "    except (LookupError, AttributeError, ValueError, TypeError):",
            "        return None",
        ]
        self.count = len(self.conditions) + len(results)
        self.scope |= {"same": same, "equal": equal, "frozen_same": frozen_same, "nature": nature}
        return "\n".join(lines) + "\n", self.scope

    def tensor_lines(self, number: int, value: Tensor, read: Read | None) -> list[str]:
        """Read a lifted tensor again (or take the pinned one) and compare what a program depends on."""
        text = self.pin(value) if read is None else self.expression(read)
        kind, dtype, shape, stride, device, grad = tensor_key(value)
        test = (
            f"type(t{number}) is {self.pin(kind)} and t{number}.dtype is {self.pin(dtype)} and t{number}.shape == "
            f"{self.constant(shape)} "
            f"and t{number}.requires_grad is {grad} and t{number}.stride() == {self.constant(stride)} "
            f"and t{number}.device == {self.constant(device)}"
        )
        return [f"        t{number} = {text}", f"        if not ({test}): return None"]

    def constant(self, value: Any) -> str:
        """Pin a value once for all equal ones."""
        name = self.constants.get((type(value), value))
        if name is None:
            name = self.constants[type(value), value] = self.pin(value)
        return name


@dataclass(frozen=True, slots=True)
class AnyTensor:
    """In a frozen container: any tensor of a type."""

    kind: type


def nature(container: Any) -> tuple:
    """What kind of container one is, besides what it holds."""
    return (type(container), getattr(container, "maxlen", None), getattr(container, "default_factory", None))


def equal(now: Any, then: Any) -> bool:
    """Whether two values are the same to a program: type and value, and the sign of zero."""
    if type(now) is not type(then):
        return False
    return repr(now) == repr(then) if isinstance(now, (float, complex)) else bool(now == then)


def same(now: Any, frozen: Any, kind: type) -> bool:
    """Whether a container still holds what it held when it was frozen."""
    return type(now) is kind and frozen_same(now, frozen)


def frozen_same(now: Any, then: Any) -> bool:
    """Compare a container with its frozen copy (see `freeze`), element by element."""
    if now is then:
        return True
    if isinstance(then, dict):
        return (
            isinstance(now, dict)
            and list(now) == list(then)
            and all(frozen_same(dict.__getitem__(now, key), then[key]) for key in then)
        )
    if isinstance(then, list):
        return isinstance(now, (list, tuple, deque)) and len(now) == len(then) and all(map(frozen_same, now, then))
    if isinstance(then, frozenset):
        return bool(now == then)
    if isinstance(then, Contents):
        return contents(now) == then
    if isinstance(then, AnyTensor):
        return type(now) is then.kind
    return isinstance(then, (*VALUES, enum.Enum)) and equal(now, then)
