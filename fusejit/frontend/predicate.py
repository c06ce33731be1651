"""Predication: run one side of an `if` although its test may not hold, without harm to values, gradients or memory.

In: a mask and a function without arguments. Out: what the function made, what it cost, what it would have changed.

Each tensor that enters the arm is `where(mask, x, x.detach())`, so an infinite gradient stops there; index operands are
`where(mask, i, 0)` and integer divisors `where(mask, d, 1)`, so an arm that is not taken cannot raise. A tensor that
the arm changes in place is copied first; the copy is written back under the mask.

    with Arm(mask, taken=True) as arm: y = (x / 0)[index]
    arm.ops, arm.bytes, arm.refused
    (2, 24, '')
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .. import torch_private as private
from ..capture import pytree
from ..capture.effect_ops import ASSERTS, OPS, WHEN, as_check, masked
from ..codegen.ir.effects import Effect, effect, effect_of, first_in_turn
from ..errors import Unsupported

Tensor = torch.Tensor
LOCAL = threading.local()
CALLED = (private.OpOverload, private.OpOverloadPacket, private.HigherOrderOperator)
"""What a user calls by its name in a library."""

QUERIES = frozenset(
    (
        "size",
        "dim",
        "ndimension",
        "numel",
        "nelement",
        "stride",
        "storage_offset",
        "is_contiguous",
        "is_floating_point",
        "is_complex",
        "element_size",
        "type",
        "__len__",
        "is_signed",
        "get_device",
        "data_ptr",
        "untyped_storage",
        "storage",
        "result_type",
        "is_same_size",
        "is_tensor",
        "__hash__",
    )
)
"""Methods that ask for no value; the tensor itself answers."""
CHANGES = frozenset(
    (
        "__iadd__",
        "__isub__",
        "__imul__",
        "__itruediv__",
        "__ifloordiv__",
        "__imod__",
        "__ipow__",
        "__iand__",
        "__ior__",
        "__ixor__",
        "__ilshift__",
        "__irshift__",
        "__setitem__",
    )
)
HEAVY = frozenset(
    (
        "matmul",
        "__matmul__",
        "__rmatmul__",
        "mm",
        "bmm",
        "addmm",
        "addbmm",
        "baddbmm",
        "mv",
        "einsum",
        "tensordot",
        "linear",
        "bilinear",
        "scaled_dot_product_attention",
        "multi_head_attention_forward",
        "sort",
        "argsort",
        "topk",
        "kthvalue",
        "msort",
        "unique",
        "conv1d",
        "conv2d",
        "conv3d",
        "conv_transpose1d",
        "conv_transpose2d",
        "conv_transpose3d",
        "lstm",
        "gru",
        "cdist",
        "pinverse",
        "inverse",
        "cholesky",
        "qr",
        "svd",
        "det",
        "logdet",
        "slogdet",
        "matrix_exp",
        "cholesky_solve",
        "lu_solve",
        "triangular_solve",
        "ctc_loss",
        "grid_sample",
        "interpolate",
        "unfold",
        "fold",
    )
)
"""Ops that are no cheap loop over elements, or that raise for some values."""
RANDOM = frozenset(
    (
        "rand",
        "randn",
        "randint",
        "rand_like",
        "randn_like",
        "randint_like",
        "randperm",
        "normal",
        "normal_",
        "uniform_",
        "bernoulli",
        "bernoulli_",
        "random_",
        "exponential_",
        "multinomial",
        "poisson",
        "dropout",
        "dropout1d",
        "dropout2d",
        "dropout3d",
        "alpha_dropout",
        "feature_dropout",
        "feature_alpha_dropout",
        "rrelu",
        "gumbel_softmax",
        "log_normal_",
        "geometric_",
        "cauchy_",
        "fractional_max_pool2d",
        "fractional_max_pool3d",
    )
)
INDEXED = {
    "__getitem__": (1,),
    "__setitem__": (1,),
    "gather": (2,),
    "take": (1,),
    "index_select": (2,),
    "take_along_dim": (1,),
    "embedding": (0,),
    "scatter": (2,),
    "scatter_add": (2,),
    "scatter_reduce": (2,),
    "index_add": (2,),
    "index_copy": (2,),
    "index_fill": (2,),
    "one_hot": (0,),
    "scatter_": (2,),
    "scatter_add_": (2,),
    "index_add_": (2,),
    "index_copy_": (2,),
    "index_fill_": (2,),
    "index_put": (1,),
    "index_put_": (1,),
    "cross_entropy": (1,),
    "nll_loss": (1,),
}
"""Ops with operands that must lie within bounds, and where those stand."""
NAMED_INDEX = ("index", "indices", "input", "target")
DIVIDED = dict.fromkeys(
    (
        "floor_divide",
        "remainder",
        "fmod",
        "div",
        "divide",
        "__floordiv__",
        "__mod__",
        "floor_divide_",
        "remainder_",
        "fmod_",
        "__ifloordiv__",
        "__imod__",
        "div_",
    ),
    1,
) | {"__rfloordiv__": 0, "__rmod__": 0}


class Arm(TorchFunctionMode):
    """One arm while it runs.

    Attributes:
        ops, bytes: calls of torch that made tensors, and the bytes of these.
        refused: why the arm must not run unless its test holds, "" if it may. effect: the same, where no mask makes it
        harmless. changed: (entering tensor, its changed copy). quiet: those that autograd does not see change, by
            identity.
    """

    def __init__(self, mask: Tensor | None, taken: bool, guard: bool = True) -> None:
        super().__init__()
        self.mask, self.taken, self.guard = mask, taken, guard
        self.depth = depth()
        self.ops = self.bytes = 0
        self.refused = self.effect = ""
        self.known: dict[int, Tensor] = {}
        self.twins: dict[int, Tensor] = {}
        self.changed: list[tuple[Tensor, Tensor]] = []
        self.quiet: set[int] = set()
        self.entered: list[Tensor] = []
        self.scratch: set[int] = set()  # made by the guards of arms inside; no one will look at them

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in QUERIES or self.depth != depth():
            return func(*args, **kwargs)
        if name == "__get__":
            found = func(*args, **kwargs)
            if not isinstance(found, Tensor):
                return found
        if func in WHEN or func in ASSERTS:
            held = self.copies()
            args = pytree.map_tensors(lambda value: held.get(id(value), value), args)
            if func in ASSERTS:
                func, args = as_check(*args, **kwargs)
            return func(*(args if self.mask is None else masked(func, args, self.holds())))
        self.judge(func, name)
        for target in written(func, name, args, kwargs):
            self.prepare_change(target)
        if kwargs.get("out") is not None:
            self.refuse_change(kwargs["out"])
        args, kwargs = pytree.map_tensors(self.enter, args), pytree.map_tensors(self.enter, kwargs)
        if self.guard:
            args, kwargs = self.within_bounds(name, list(args), kwargs)
        result = func(*args, **kwargs)
        self.keep(result, counted=True)
        return result

    def judge(self, func: Any, name: str) -> None:
        met = effect(func) if isinstance(func, CALLED) else None
        if met is not None and met.in_turn:
            self.effect = self.refused = self.effect or f"`{func}` {met.value}"
        elif met is Effect.DRAWS:
            self.refused = self.refused or f"`{func}` {met.value}"
        if name in RANDOM:
            self.refused = self.refused or f"`{name}` draws random numbers"
        elif name in HEAVY or name.startswith(("linalg_", "fft_")):
            self.refused = self.refused or f"`{name.strip('_')}` is no cheap op"

    def holds(self) -> Tensor:
        """The condition under which this arm is taken."""
        assert self.mask is not None
        return self.mask if self.taken else self.mask.logical_not()

    # Tensors that enter.

    def enter(self, value: Tensor) -> Tensor:
        return self.twin(value) if id(value) in self.twins or id(value) not in self.known else value

    def twin(self, value: Tensor) -> Tensor:
        found = self.twins.get(id(value))
        if found is None:
            if any(memory_of(value) == memory_of(original) for original, _ in self.changed):
                self.refuse_change(value)
            self.entered.append(value)  # keeps its id its own
            found = value
            if self.guard and differentiable(value):
                with guarding():
                    found = self.between(value, value.detach())
            self.twins[id(value)] = found
            self.known[id(found)] = found
        return found

    def between(self, value: Tensor, other: Any) -> Tensor:
        """The value where this arm is taken, the other one where not."""
        assert self.mask is not None
        return torch.where(self.mask, value, other) if self.taken else torch.where(self.mask, other, value)

    def keep(self, value: Any, counted: bool = False) -> None:
        if isinstance(value, Tensor):
            if counted and id(value) not in self.known:
                self.ops += 1
                self.bytes += value.numel() * value.element_size()
            if getattr(LOCAL, "guarding", False):
                self.scratch.add(id(value))
            self.known[id(value)] = value
        elif isinstance(value, (tuple, list)):
            for item in value:
                self.keep(item, counted)

    # Values that would raise.

    def within_bounds(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        for place in INDEXED.get(name, ()):
            if place < len(args):
                args[place] = self.masked(args[place], 0)
        if name in INDEXED:
            kwargs = {key: self.masked(value, 0) if key in NAMED_INDEX else value for key, value in kwargs.items()}
        place = DIVIDED.get(name, -1)
        if 0 <= place < len(args):
            args[place] = self.masked(args[place], 1)
        return args, kwargs

    def masked(self, value: Any, other: int) -> Any:
        """Whole numbers become `other` where the arm is not taken."""
        if isinstance(value, (tuple, list)):
            return type(value)([self.masked(item, other) for item in value])
        whole = (
            isinstance(value, Tensor)
            and not value.is_floating_point()
            and not value.is_complex()
            and value.dtype is not torch.bool
        )
        return self.between(value, torch.full((), other, dtype=value.dtype, device=value.device)) if whole else value

    # Changes in place.

    def copies(self) -> dict[int, Tensor]:
        """What each tensor that the arm changed in place holds behind it, by the identity of that tensor."""
        return {id(original): copy for original, copy in self.changed}

    def origins(self, value: Tensor) -> tuple[Tensor, ...]:
        """The tensors from outside whose memory a tensor has that the arm holds at its end; none if the arm made it."""
        if id(value) in self.twins or id(value) not in self.known:
            return (value,)
        memory = memory_of(value)
        return tuple(other for other in self.entered if memory_of(self.twins[id(other)]) == memory)

    def prepare_change(self, target: Any) -> None:
        """Before an in-place op: a tensor from outside is copied, memory that only seems to be the arm's own is
        refused.
        """
        if not isinstance(target, Tensor) or any(
            target is copy or target is original for original, copy in self.changed
        ):
            return
        memory = memory_of(target)
        if id(target) in self.known and id(target) not in self.twins:
            if any(memory_of(other) == memory for other in (*self.entered, *self.twins.values())):
                self.refuse_change(target)
            return
        if id(target) in self.twins and any(
            memory_of(other) == memory_of(self.twins[id(target)]) for other in self.made_of_twins(target)
        ):
            self.refuse_change(target)
        if any(other is not target and memory_of(other) == memory for other in self.entered):
            self.refuse_change(target)
        with contextlib.ExitStack() as stack:
            if not torch.is_grad_enabled():
                self.quiet.add(id(target))
                if (
                    target.requires_grad
                ):  # what reads it later in the arm has its gradient: it is only the change that has none
                    stack.enter_context(torch.enable_grad())
            copy = self.twin(target).clone()
        self.twins[id(target)] = self.known[id(copy)] = copy
        self.changed.append((target, copy))

    def made_of_twins(self, target: Tensor) -> list[Tensor]:
        skipped = {id(value) for value in (target, *self.twins.values())}
        return [value for place, value in self.known.items() if place not in skipped and place not in self.scratch]

    def refuse_change(self, target: Any) -> None:
        raise Unsupported(
            "an in-place change of a view inside an `if` that depends on a tensor",
            "it cannot be taken back where the test does not hold; write `x = torch.where(test, new, x)`, or change "
            "the whole tensor",
        )


def written(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """The operands that a call changes in place: by its schema where an op is called by its name in a library, by its
    name otherwise.
    """
    if not isinstance(func, CALLED) or isinstance(func, private.HigherOrderOperator):
        changes = name in CHANGES or name.endswith("_") and not name.endswith("__")
        return [args[0]] if changes and args else []
    overloads = [func] if isinstance(func, private.OpOverload) else [getattr(func, each) for each in func.overloads()]
    found: dict[int, Any] = {}
    for overload in overloads:
        for place, argument in enumerate(overload._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[place] if place < len(args) and not argument.kwarg_only else kwargs.get(argument.name)
                found |= {
                    id(each): each
                    for each in (value if isinstance(value, (list, tuple)) else [value])
                    if isinstance(each, Tensor)
                }
    return list(found.values())


def note_effects(arms: list[Arm], nodes: list[torch.fx.Node]) -> None:
    """Note what the arms have traced and must not run unless taken; prints and checks are told when they happen."""
    node = first_in_turn(node for node in nodes if node.target not in OPS)
    if node is not None and not any(arm.effect for arm in arms):
        arms[0].effect = arms[0].refused = f"`{node.target}` {effect_of(node).value}"  # type: ignore[union-attr]


def refuse_effects(arms: list[Arm], site: Any) -> None:
    """Refuse to run both arms of an `if` whose test differs from row to row.

    Raises:
        Unsupported: names the op that would run although its arm is not taken.
    """
    if reason := next((arm.effect for arm in arms if arm.effect), ""):
        raise Unsupported(
            f"`{site.kind}` on a tensor under torch.func", f"{reason}, and both arms would run", site.line
        )


def quietly(original: Tensor, *arms: Arm) -> bool:
    """Whether autograd saw none of the changes of a tensor."""
    return all(id(original) in arm.quiet for arm in arms if id(original) in arm.copies())


def write_back(original: Tensor, new: Tensor, quiet: bool) -> Tensor:
    """Give a tensor that arms changed in place what it holds behind them, unseen by autograd if the changes were."""
    with torch.set_grad_enabled(torch.is_grad_enabled() and not quiet):
        return original.copy_(new)


def differentiable(value: Tensor) -> bool:
    """Whether a gradient can flow into a tensor, of this or of an outer torch.func transform."""
    if not (value.is_floating_point() or value.is_complex()):
        return False
    return torch.is_grad_enabled() and (value.requires_grad or private.is_functorch_wrapped_tensor(value))


def bottom(value: Tensor) -> Tensor:
    """A tensor without the wrappers of torch.func."""
    while private.is_functorch_wrapped_tensor(value):
        value = private.get_unwrapped(value)
    return value


def memory_of(value: Tensor) -> Any:
    """The identity of a tensor's storage, under all wrappers of torch.func."""
    value = bottom(value)
    return value.untyped_storage()._cdata if value.layout is torch.strided else id(value)


@contextlib.contextmanager
def guarding() -> Iterator[None]:
    """While an arm makes the twins of what enters it."""
    before, LOCAL.guarding = getattr(LOCAL, "guarding", False), True
    try:
        yield
    finally:
        LOCAL.guarding = before


def depth() -> int:
    """How many loops this thread traces for one row, one in the other, with the arms around them put aside."""
    return getattr(LOCAL, "depth", 0)


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """Put the arms around aside: what is traced here is no part of theirs."""
    LOCAL.depth = depth() + 1
    try:
        yield
    finally:
        LOCAL.depth -= 1


def running() -> list[Arm]:
    """The arms that this thread runs, the outermost first, those that were put aside left out."""
    return [arm for arm in getattr(LOCAL, "arms", ()) if arm.depth == depth()]


class NoSelect(Exception):
    """An arm holds what only a branch of the graph can; the text says what."""


def guarded() -> bool:
    """Whether this thread runs an arm to see whether it can be a select."""
    return any(arm.guard for arm in getattr(LOCAL, "arms", ()))


def run_arm(body: Callable[[], Any], mask: Tensor | None, taken: bool, guard: bool = True) -> tuple[Any, Arm]:
    """Run one arm and return its result and its record."""
    arm = Arm(mask, taken, guard)
    running = LOCAL.__dict__.setdefault("arms", [])
    running.append(arm)
    try:
        with arm:
            return body(), arm
    finally:
        running.pop()
