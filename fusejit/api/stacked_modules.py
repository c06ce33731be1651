"""Stacked modules: modules of equal structure as one function of their stacked parameters and buffers.

In: a list of `nn.Module`s. Out: an `Ensemble`: `stack()` gives the tensors with the models in front, through which
gradients reach each model's own parameters; `call_with(...)` is the function of one model; `Stacked.write_back(...)`
brings in-place changes back.

    >>> ensemble = Ensemble([nn.Linear(2, 3), nn.Linear(2, 3)])
    >>> {name: tuple(value.shape) for name, value in ensemble.stack().state.items()}
    {'weight': (2, 3, 2), 'bias': (2, 3)}
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .. import torch_private as private

Tensor = torch.Tensor
State = dict[str, Tensor]
PLAIN = (int, float, bool, str, complex, type(None), torch.dtype)
OWN = frozenset({"_is_full_backward_hook", "_backward_pre_hooks", "_is_hf_initialized"})


class Ensemble:
    """Two or more modules of equal structure.

    Raises:
        TypeError: something in the list is no module. ValueError: fewer than two, or they differ in more than the
            values of tensors.
    """

    def __init__(self, models: list[Any]) -> None:
        for model in models:
            if not isinstance(model, torch.nn.Module):
                raise TypeError(f"fusejit.vmap takes a function, or a list of nn.Modules; the list holds {model!r}")
        if len(models) < 2:
            raise ValueError(
                f"an ensemble has at least two models, and the list holds {len(models)}: map one model as vmap(model)"
            )
        self.models = [getattr(model, "__wrapped__", model) for model in models]  # of a jitted module, the original
        self.check()

    def check(self) -> None:
        """Compare each model with the first; attributes may have changed since the last call."""
        first = self.models[0]
        for number, model in enumerate(self.models[1:], 1):
            pairs, others = dict(first.named_modules()), dict(model.named_modules())
            if pairs.keys() != others.keys():
                raise ValueError(
                    f"models[{number}] has other submodules than models[0]: {sorted(pairs.keys() ^ others.keys())}"
                )
            for name, part in pairs.items():
                difference = compare(part, others[name])
                if difference:
                    place = f".{name}" if name else ""
                    raise ValueError(f"models[{number}]{place} differs from models[0]{place}: {difference}")

    def stack(self) -> Stacked:
        """All parameters and buffers, with the models along the first axis, as they are now."""
        self.check()
        own = [tensors_of(model) for model in self.models]
        state = {name: torch.stack([one[name] for one in own]) for name in own[0]}
        return Stacked(
            state, own, {name: version_of(value) for name, value in state.items()}, statistics(self.models[0])
        )

    def call_with(self, kwargs: dict[str, Any]) -> Callable[..., tuple[Any, State]]:
        """The function (one model's state, arguments...) -> (result, tensors that the model replaced)."""

        def run(state: State, *args: Any) -> tuple[Any, State]:
            now = dict(state)
            result = torch.func.functional_call(self.models[0], now, args, kwargs)
            return result, {name: value for name, value in now.items() if value is not state[name]}

        return run


@dataclass(frozen=True, slots=True)
class Stacked:
    """The tensors of all models during one call.

    Attributes:
        state: {name: all models' tensors}; own: each model's tensors.
        versions: torch's counters of in-place changes before the call; uncounted: names that may change without being
            counted.
    """

    state: State
    own: list[State]
    versions: dict[str, int]
    uncounted: set[str]

    def write_back(self, replaced: State) -> None:
        """Copy what the models changed in place, or replaced, into their own tensors."""
        for name, value in self.state.items():
            if name not in replaced and name not in self.uncounted and version_of(value) == self.versions[name]:
                continue
            with torch.no_grad():
                for number, one in enumerate(self.own):
                    one[name].copy_(replaced.get(name, value)[number])


def statistics(model: torch.nn.Module) -> set[str]:
    """Buffers that a normalisation may update while training: under vmap, torch changes those without counting it."""
    found = set()
    for prefix, part in model.named_modules():
        if part.training:
            buffers = part.named_buffers(prefix=prefix, recurse=False)
            found |= {name for name, buffer in buffers if buffer.is_floating_point()}
    return found


def tensors_of(model: torch.nn.Module) -> State:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def compare(one: torch.nn.Module, other: torch.nn.Module) -> str:
    """How two modules differ in what an ensemble shares: class, plain attributes, shapes and dtypes of tensors; "" when
    they do not.
    """
    if type(one) is not type(other):
        return f"{type(other).__name__} instead of {type(one).__name__}"
    for name in vars(one).keys() | vars(other).keys():
        mine, its = getattr(one, name, None), getattr(other, name, None)
        if name not in OWN and (isinstance(mine, PLAIN) or isinstance(its, PLAIN)) and mine != its:
            return f"its {name} is {its!r} instead of {mine!r}"
    for section in ("_parameters", "_buffers"):
        mine, its = getattr(one, section), getattr(other, section)
        if mine.keys() != its.keys():
            return f"it has the tensors {sorted(its)} instead of {sorted(mine)}"
        for name, value in mine.items():
            if layout(value) != layout(its[name]):
                return f"its {name} is {layout(its[name])} instead of {layout(value)}"
    return ""


def layout(value: Tensor | None) -> tuple | None:
    return None if value is None else (tuple(value.shape), value.dtype, value.device)


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place; a capture refuses the question where it is the user's."""
    with private.DisableTorchFunction():
        return tensor._version
