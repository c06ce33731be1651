"""`vmap`, `grad` and `value_and_grad`: a function becomes another function, by torch.func's rules.

In: a function (or a list of modules) and the axes of its arguments. Out: a callable object that runs through
torch.func; under `jit` the graph that it leaves is made of batched ops, which are fused like any others, with gradients
from outside.

    >>> rows = vmap(lambda x, y: x + y, in_axes=(0, None), out_axes=1)
    >>> rows(torch.tensor([1, 2]), torch.tensor([10, 20]))
    tensor([[11, 12],
            [21, 22]])

A `Transform` calls its function in one place, `Transform.function`, where a capture may put a rewritten twin. An op
without a batching rule runs in torch's loop over the batch, and torch warns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .. import torch_private as private
from ..capture import tracer
from ..torch_private import keystr, tree_flatten, tree_flatten_with_path, tree_leaves, tree_unflatten
from .stacked_modules import Ensemble

Tensor = torch.Tensor
Axes = Any
"""An int, None, or a nesting of them that is a prefix of the arguments."""
RANDOMNESS = ("error", "different", "same")
FUNCTORCH = private.functorch_c


class Unset:
    """An option that was not given."""

    def __repr__(self) -> str:
        return "0"


UNSET = Unset()


class Transform:
    """A function made from a function; its original is `__wrapped__`."""

    kind = "transform"

    def __init__(self, fn: Any, **options: Any) -> None:
        self.__wrapped__, self.options = fn, options
        self.__name__ = self.__qualname__ = f"{self.kind}({name_of(fn)})"
        self.__doc__ = getattr(fn, "__doc__", None)

    def __repr__(self) -> str:
        return f"<fusejit.{self.kind} of {name_of(self.__wrapped__)}>"

    def function(self, *args: Any, **kwargs: Any) -> Any:
        """Call the original; while a function is captured, what the capture makes of it."""
        fn = self.__wrapped__
        if tracer.active():
            tracer.recorder().watch(fn)
            rewrite = getattr(tracer.recorder(), "rewrite", None)
            fn = fn if rewrite is None else rewrite(fn)
        return fn(*args, **kwargs)


def name_of(fn: Any) -> str:
    if isinstance(fn, (list, tuple)):
        return f"{len(fn)} x {name_of(fn[0])}" if fn else "nothing"
    return str(getattr(fn, "__name__", type(fn).__name__))


# Gradients.


class Grad(Transform):
    """See `grad`."""

    kind = "grad"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return torch.func.grad(self.function, **self.options)(*args, **kwargs)


class ValueAndGrad(Transform):
    """See `value_and_grad`."""

    kind = "value_and_grad"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        gradient, value = torch.func.grad_and_value(self.function, **self.options)(*args, **kwargs)
        return value, gradient


def grad(fn: Callable, argnums: int | tuple[int, ...] = 0, has_aux: bool = False) -> Grad:
    """The gradient of a function, as a function of the same arguments.

    Args:
        fn: returns a tensor of one element without dimensions; with `has_aux`, a pair of it and anything else.
        argnums: positions of the arguments to differentiate by (pytrees of floating-point tensors); a tuple gives a
            tuple.

    Returns:
        A callable that returns the gradient, shaped like the argument, or a pair of it and the second value.

    Raises:
        TypeError: `fn` is not callable.
    """
    return Grad(check_callable("grad", fn), argnums=argnums, has_aux=has_aux)


def value_and_grad(fn: Callable, argnums: int | tuple[int, ...] = 0, has_aux: bool = False) -> ValueAndGrad:
    """A function that returns the pair (value, gradient) of `fn`; with `has_aux`, ((value, second value), gradient).
    See `grad`.
    """
    return ValueAndGrad(check_callable("value_and_grad", fn), argnums=argnums, has_aux=has_aux)


def check_callable(what: str, fn: Any) -> Any:
    if not callable(fn) or isinstance(fn, type):
        raise TypeError(f"fusejit.{what} takes a function, a jitted function or an nn.Module, not {fn!r}")
    return fn


# Batches.


def vmap(
    fn: Any,
    in_axes: Axes = UNSET,
    out_axes: Axes = UNSET,
    *,
    in_dims: Axes = UNSET,
    out_dims: Axes = UNSET,
    randomness: str = "error",
    chunk_size: int | None = None,
) -> Vmap:
    """Map a function over an axis of its arguments, all at once.

    Args:
        fn: a function, a jitted function, an `nn.Module`, or a list of two or more modules of equal structure: an
            ensemble, whose i-th model gets the i-th slice; each model's own parameters receive its gradients and its
            in-place changes.
        in_axes: the axis of each positional argument that is mapped, from -ndim to ndim - 1, or None for one that every
            call shares: an int for all of them, or a tuple (list, dict) that follows the arguments' nesting. Keyword
            arguments are shared.
        out_axes: where the axis goes in each result. None needs a result that does not depend on mapped arguments; such
            a result is repeated along an int axis.
        in_dims, out_dims: torch's names of `in_axes` and `out_axes`.
        randomness: "error" refuses random ops, "different" draws for each slice, "same" draws once for all.
        chunk_size: the most slices that are computed at a time.

    Returns:
        A callable of the same arguments.

    Raises:
        ValueError: axes that map nothing, do not follow the arguments, lie outside a tensor's dimensions, or have
            different sizes.
        TypeError: an axis that is neither int nor None, or both spellings of an option.
    """
    models = isinstance(fn, (list, tuple, torch.nn.ModuleList))
    in_axes = choose("in_axes", in_axes, "in_dims", in_dims)
    out_axes = choose("out_axes", out_axes, "out_dims", out_dims)
    check_axes("in_axes", in_axes)
    check_axes("out_axes", out_axes)
    if not models and all(axis is None for axis in axis_leaves(in_axes)):
        raise ValueError(f"in_axes={in_axes!r}: nothing is mapped; give at least one argument an axis")
    if randomness not in RANDOMNESS:
        raise ValueError(f"randomness={randomness!r}: choose one of {', '.join(map(repr, RANDOMNESS))}")
    if chunk_size is not None and (not isinstance(chunk_size, int) or chunk_size < 1):
        raise ValueError(f"chunk_size={chunk_size!r}: give a positive int, or None for all slices at once")
    target = list(fn) if models else check_callable("vmap", fn)
    return Vmap(target, in_axes=in_axes, out_axes=out_axes, randomness=randomness, chunk_size=chunk_size)


class Vmap(Transform):
    """See `vmap`."""

    kind = "vmap"

    def __init__(self, fn: Any, **options: Any) -> None:
        super().__init__(fn, **options)
        self.ensemble = Ensemble(fn) if isinstance(fn, list) else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        axes, out_axes = self.options["in_axes"], self.options["out_axes"]
        if self.ensemble is None:
            return self.run(lambda *values: self.function(*values, **kwargs), args, axes, out_axes)
        stacked = self.ensemble.stack()
        axes = (0, *(axes if isinstance(axes, (tuple, list)) else [axes] * len(args)))
        run = self.ensemble.call_with(kwargs)
        result, replaced = self.run(run, (stacked.state, *args), axes, (out_axes, 0), skipped=1)
        stacked.write_back(replaced)
        return result

    def run(self, fn: Callable, args: tuple, axes: Axes, out_axes: Axes, skipped: int = 0) -> Any:
        """Flatten the arguments, map, and put the results' axes in place; the first `skipped` arguments are not the
        user's.
        """
        if not args:
            raise ValueError(f"{self.__name__} was called without positional arguments: there is nothing to map")
        leaves, structure = tree_flatten(args)
        where = [f"args[{number - skipped}]" if number >= skipped else "the models" for number in range(len(args))]
        flat = list(spread("in_axes", tuple(axes) if isinstance(axes, list) else axes, args, "the arguments", where))
        check_inputs([(axis, leaf, path) for (axis, path), leaf in zip(flat, leaves)])
        results: Results

        def flat_fn(*values: Any) -> tuple[Tensor, ...]:
            nonlocal results
            results = Results(fn(*tree_unflatten(values, structure)), out_axes)
            return results.mapped

        dims = tuple(axis for axis, _ in flat)
        mapped = torch.func.vmap(flat_fn, dims, 0, self.options["randomness"], chunk_size=self.options["chunk_size"])(
            *leaves
        )
        return results.assemble(mapped)


class Results:
    """What one call inside a map returned: `mapped` goes through the map, the rest is as it is."""

    def __init__(self, value: Any, axes: Axes) -> None:
        self.leaves, self.structure = tree_flatten(value)
        self.axes: list[int | None] = []
        for (axis, path), leaf in zip(spread("out_axes", axes, value, "the result"), self.leaves):
            check_output(axis, leaf, path)
            self.axes.append(axis)
        self.mapped = tuple(leaf for leaf, axis in zip(self.leaves, self.axes) if axis is not None)

    def assemble(self, mapped: Sequence[Tensor]) -> Any:
        """The result, from the mapped tensors with their axis in front."""
        rest = iter(mapped)
        leaves = [leaf if axis is None else in_place(next(rest), axis) for leaf, axis in zip(self.leaves, self.axes)]
        return tree_unflatten(leaves, self.structure)


def in_place(value: Tensor, axis: int) -> Tensor:
    """The tensor with its first axis moved to another place."""
    return value.movedim(0, axis) if axis % value.dim() else value


def choose(name: str, value: Any, other: str, alias: Any) -> Any:
    """The one of two spellings that was given; 0 when neither was."""
    if value is not UNSET and alias is not UNSET:
        raise TypeError(f"{name}={value!r} and {other}={alias!r} are the same option: give one of them")
    found = alias if value is UNSET else value
    return 0 if found is UNSET else found


def is_axis(value: Any) -> bool:
    return value is None or isinstance(value, int) and not isinstance(value, bool)


def axis_leaves(axes: Axes) -> list[Any]:
    return tree_leaves(axes)  # None is a leaf


def check_axes(name: str, axes: Axes) -> None:
    for axis in axis_leaves(axes):
        if not is_axis(axis):
            raise TypeError(f"{name}={axes!r}: an axis is an int or None, not {axis!r} ({type(axis).__name__})")


def spread(name: str, axes: Axes, value: Any, path: str, names: Sequence[str] = ()) -> Iterator[tuple[Any, str]]:
    """Give each leaf of a value its axis and its name, in the order of torch's pytrees; tuples and lists are
    interchangeable.

    Raises:
        ValueError: the axes do not follow the value's nesting.
    """
    if is_axis(axes):
        for part, label in zip(value, names) if names else [(value, path)]:
            yield from ((axes, label + keystr(keys)) for keys, _ in tree_flatten_with_path(part)[0])
    elif isinstance(axes, (tuple, list)):
        if not isinstance(value, (tuple, list)) or len(value) != len(axes):
            found = f"{len(value)} of them" if isinstance(value, (tuple, list)) else f"one {type(value).__name__}"
            raise ValueError(f"{name}={axes!r} has {len(axes)} entries for {path}, and there is {found}")
        for number, (axis, part) in enumerate(zip(axes, value)):
            yield from spread(name, axis, part, names[number] if names else f"{path}[{number}]")
    elif isinstance(axes, dict):
        if not isinstance(value, dict) or value.keys() != axes.keys():
            found = f"keys {list(value)}" if isinstance(value, dict) else f"a {type(value).__name__}"
            raise ValueError(f"{name}={axes!r} has keys {list(axes)} for {path}, which has {found}")
        for key, part in value.items():
            yield from spread(name, axes[key], part, f"{path}[{key!r}]")
    else:
        leaves, structure = tree_flatten(value)
        parts, same = tree_flatten(axes)
        if structure != same:
            raise ValueError(f"{name}={axes!r} does not follow the structure of {path}")
        yield from ((axis, path) for axis in parts)


def check_inputs(inputs: list[tuple[Any, Any, str]]) -> None:
    """Check (axis, leaf, name) of each argument tensor: kind, range, and one size for all."""
    sizes: dict[str, tuple[int, int]] = {}
    for axis, leaf, path in inputs:
        if axis is None:
            continue
        if not isinstance(leaf, Tensor):
            raise ValueError(
                f"in_axes: {path} is a {type(leaf).__name__}, which has no axis {axis}; give it the axis None"
            )
        check_range("in_axes", axis, leaf.dim(), f"{path} of shape {tuple(leaf.shape)}")
        sizes.setdefault(path, (leaf.shape[axis], axis))
    if not sizes:
        raise ValueError("in_axes maps none of the arguments: give at least one of them an axis")
    if len({size for size, _ in sizes.values()}) > 1:
        text = ", ".join(f"{path} has {size} along axis {axis}" for path, (size, axis) in sizes.items())
        raise ValueError(f"in_axes: mapped axes must have one size, and {text}")


def check_output(axis: Any, leaf: Any, path: str) -> None:
    """Check one result inside the map."""
    if axis is None:  # the levels are looked at here alone, because Dynamo cannot follow that
        if (
            isinstance(leaf, Tensor)
            and FUNCTORCH.is_batchedtensor(leaf)
            and FUNCTORCH.maybe_get_level(leaf) == FUNCTORCH.maybe_current_level()
        ):
            raise ValueError(
                f"out_axes: {path} depends on mapped arguments, so it needs an axis, and out_axes says None"
            )
    elif not isinstance(leaf, Tensor):
        raise ValueError(
            f"out_axes: {path} is a {type(leaf).__name__}, which has no axis; return a tensor, or give it the axis None"
        )
    else:
        check_range("out_axes", axis, leaf.dim() + 1, f"{path} of shape {tuple(leaf.shape)} and one axis more")


def check_range(name: str, axis: int, count: int, what: str) -> None:
    if not -count <= axis < count:
        bounds = f"from {-count} to {count - 1}" if count else "none at all"
        raise ValueError(f"{name}: axis {axis} is out of range for {what}: {bounds}")
