"""Random numbers in a graph: torch's random ops as draws, and draws as functions of one seed a call.

In: the decompositions of a trace, and then the traced graph. Out: the table with random ops in it, and the graph with
one seed on each device, drawn from torch's generator, of which every random tensor is a function.

    %rand_like = aten.rand_like(%x)  ->  %draw = fusejit.draw('rand', [8, 64], cpu)
        ->  %seed = aten.randint.low(-2**63, 2**63 - 1, [1]) | %draw = fusejit.random(%seed, 0, 'rand', [8, 64])

Element k, counted in row-major order, of the n-th random tensor is lane k % 4 of Philox at counter k // 4 with the key
seed + n: the same number however a kernel is tiled, and the same in a backward that computes it again. What is a
function of draws alone (a dropout's mask) is therefore never saved for the backward; its seed is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from .decompositions import short
from .table import POINTWISE
from .views import VIEWS

Tensor = torch.Tensor
KINDS = {"rand": torch.float32, "randn": torch.float32, "random_bits": torch.int64}
"""What a draw is: uniform in [0, 1), normal, or 32 random bits; and its dtype."""
DIGITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24}
"""Random bits of a uniform number in each dtype, as in eager: rounding 24 of them to a half type could give 1."""
FEW = (
    2**28
)  # of more integers than that, 32 bits would draw some markedly more often than others: eager takes 64 then, too
LEAST = 2.0**-25  # an exponential number is never 0

LIBRARY = torch.library.Library("fusejit", "FRAGMENT")
LIBRARY.define("draw(str kind, SymInt[] size, Device device) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
LIBRARY.define("random(Tensor seed, int number, str kind, SymInt[] size) -> Tensor")
LIBRARY.define("probability(Tensor p) -> Tensor")  # p itself; a kernel stops where it is none
DRAW, RANDOM, PROBABILITY = (getattr(torch.ops.fusejit, name).default for name in ("draw", "random", "probability"))
torch.library.register_fake(
    "fusejit::draw", lambda kind, size, device: torch.empty(size, dtype=KINDS[kind], device=device), lib=LIBRARY
)
torch.library.register_fake(
    "fusejit::random",
    lambda seed, number, kind, size: torch.empty(size, dtype=KINDS[kind], device=seed.device),
    lib=LIBRARY,
)
torch.library.register_fake("fusejit::probability", torch.empty_like, lib=LIBRARY)


# -- torch's random ops, of draws --------------------------------------------------------------------------------------
def _as(like: Tensor, value: Tensor, memory_format: Any = None) -> Tensor:
    """Return `value` with the strides that eager gives a result like `like`."""
    wanted = torch.empty_like(like, dtype=value.dtype, memory_format=memory_format or torch.preserve_format)
    return value if wanted.is_contiguous() else torch.ops.aten.copy.default(wanted, value)


def _uniform(size: Sequence[int], device: torch.device, dtype: torch.dtype) -> Tensor:
    value = DRAW("rand", size, device)
    if dtype is torch.float32:
        return value
    steps = float(2 ** DIGITS[dtype])
    return torch.floor(value * steps).mul(1 / steps).to(dtype)


def _fresh(kind: str) -> Callable:
    """rand and randn of a size."""

    def rule(
        size: Sequence[int], *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
    ) -> Tensor:
        dtype, device = dtype or torch.get_default_dtype(), torch.device(device or "cpu")
        if dtype not in DIGITS or layout not in (None, torch.strided) or pin_memory:
            return NotImplemented
        return _uniform(size, device, dtype) if kind == "rand" else DRAW(kind, size, device).to(dtype)

    return rule


def _like(kind: str) -> Callable:
    def rule(x: Tensor, *, memory_format: Any = None, **options: Any) -> Tensor:
        given = {"dtype": options.get("dtype") or x.dtype, "device": options.get("device") or x.device}
        value = _fresh(kind)(x.shape, **(options | given))
        return value if value is NotImplemented else _as(x, value, memory_format)

    return rule


def _without_generator(rule: Callable, dtypes: Sequence[torch.dtype] = tuple(DIGITS)) -> Callable:
    """A rule for the default generator and some dtypes; everything else stays what it is."""

    def checked(x: Tensor, *args: Any, generator: Any = None, **kwargs: Any) -> Any:
        if generator is not None or (dtypes and x.dtype not in dtypes):
            return NotImplemented
        return _as(x, rule(x, *args, **kwargs))

    return checked


def _bernoulli(x: Tensor, p: Any = None) -> Tensor:
    """0 or 1; P(1) is p to 24 bits in every dtype, and exactly 0 and 1 where p is."""
    chance = PROBABILITY(x) if p is None else float(p)
    return (DRAW("rand", x.shape, x.device) < chance).to(x.dtype)


def _dropout(x: Tensor, p: float, train: bool | None) -> Any:
    if train is False:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    kept = _as(x, DRAW("rand", x.shape, x.device) >= p)
    return (torch.zeros_like(x) if p == 1 else x * kept * (1.0 / (1.0 - p))), kept


def _log_of_uniform(x: Tensor) -> Tensor:
    """log of a number in (0, 1]."""
    return torch.log(1.0 - DRAW("rand", x.shape, x.device))


def _normal(x: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    return DRAW("randn", x.shape, x.device) * std + mean


def _integers(low: int, high: int, size: Sequence[int], options: dict[str, Any], device: Any) -> Any:
    if not 0 < high - low < 2**64 or options.get("layout") not in (None, torch.strided) or options.get("pin_memory"):
        return NotImplemented
    device = torch.device(device or "cpu")
    if high - low < FEW:
        value = torch.remainder(DRAW("random_bits", size, device), high - low)
    else:
        value = _remainder(DRAW("random_bits", size, device), DRAW("random_bits", size, device), high - low)
    return (value + low).to(options.get("dtype") or torch.int64)


def _remainder(upper: Tensor, lower: Tensor, count: int) -> Tensor:
    """(upper * 2**32 + lower) % count of two draws of 32 bits: an int64 that wraps where it is 2**63 or more."""
    if count >= 2**63:
        value = upper * 2**32 + lower
        beyond = value + -(2**63) >= count - 2**63  # value >= count, if both are taken for unsigned
        return torch.where(beyond, value + (2**64 - count), value)
    half = torch.remainder(upper * 2**31 + torch.bitwise_right_shift(lower, 1), count)
    twice = torch.where(half >= count - half, half - (count - half), half + half) + torch.bitwise_and(lower, 1)
    return torch.where(twice >= count, twice - count, twice)


def _randint_like(x: Tensor, low: int, high: int, *, memory_format: Any = None, **options: Any) -> Any:
    value = _integers(
        low, high, x.shape, options | {"dtype": options.get("dtype") or x.dtype}, options.get("device") or x.device
    )
    return value if value is NotImplemented else _as(x, value, memory_format)


def _dropout_rule(x: Tensor, p: float, train: bool | None = None) -> Any:
    return _dropout(x, p, train) if x.is_floating_point() else NotImplemented


aten = torch.ops.aten
DRAWN: dict[Any, Callable] = {
    aten.rand.default: _fresh("rand"),
    aten.randn.default: _fresh("randn"),
    aten.rand_like.default: _like("rand"),
    aten.randn_like.default: _like("randn"),
    aten.bernoulli.p: _without_generator(_bernoulli, ()),
    aten.bernoulli.default: _without_generator(_bernoulli, (*DIGITS, torch.float64)),
    aten.native_dropout.default: _dropout_rule,
    aten.uniform.default: _without_generator(
        lambda x, low=0.0, high=1.0: (_uniform(x.shape, x.device, x.dtype).float() * (high - low) + low).to(x.dtype)
    ),
    aten.normal_functional.default: _without_generator(lambda x, *parameters: _normal(x, *parameters).to(x.dtype)),
    aten.log_normal.default: _without_generator(
        lambda x, mean=1.0, std=2.0: torch.exp(_normal(x, mean, std)).to(x.dtype)
    ),
    aten.exponential.default: _without_generator(
        lambda x, rate=1.0: (-_log_of_uniform(x)).clamp_min(LEAST).div(rate).to(x.dtype)
    ),
    aten.geometric.default: _without_generator(
        lambda x, p: torch.ceil(_log_of_uniform(x) / math.log1p(-p)).clamp_min(1).to(x.dtype)
    ),
    aten.cauchy.default: _without_generator(
        lambda x, median=0.0, sigma=1.0: (
            torch.tan(math.pi * (DRAW("rand", x.shape, x.device) - 0.5)).mul(sigma).add(median).to(x.dtype)
        )
    ),
    aten.randint.default: lambda high, size, *, device=None, **options: _integers(0, high, size, options, device),
    aten.randint.low: lambda low, high, size, *, device=None, **options: _integers(low, high, size, options, device),
    aten.randint_like.default: lambda x, high, **options: _randint_like(x, 0, high, **options),
    aten.randint_like.low_dtype: lambda x, low, high, **options: _randint_like(x, low, high, **options),
}


def with_draws(table: dict[Any, Callable], numerics: str) -> dict[Any, Callable]:
    """Return decompositions with the random ops among them; under numerics "eager" those stay calls of torch, with
    eager's stream.
    """
    return {op: rule for op, rule in table.items() if op not in DRAWN} | (DRAWN if numerics == "fast" else {})


# -- one seed a graph --------------------------------------------------------------------------------------------------
def share_seeds(graph: Graph) -> None:
    """Make the draws of a traced graph functions of one seed for each device, and mark what they alone decide as never
    saved.
    """
    draws = [node for node in graph.nodes if node.target is DRAW]
    seeds: dict[torch.device, Node] = {}
    drawn: set[Node] = set()
    for number, node in enumerate(draws):
        kind, size, device = node.args
        if device not in seeds:
            seeds[device] = _seed(graph, node, device)  # type: ignore[index,arg-type]
        node.target, node.args = RANDOM, (seeds[device], number, kind, size)  # type: ignore[index]
        drawn.add(node)
    constants: set[Node] = set()
    for node in graph.nodes if draws else ():
        if node in drawn or (_repeatable(node) and drawn | constants >= {*node.all_input_nodes}):
            if node in drawn or drawn & {*node.all_input_nodes}:
                drawn.add(node)
                node.meta["recompute"] = torch.utils.checkpoint.CheckpointPolicy.MUST_RECOMPUTE
            else:
                constants.add(node)


def _repeatable(node: Node) -> bool:
    return node.op == "call_function" and (
        short(node.target) in POINTWISE or short(node.target) in VIEWS or node.target is aten.full.default
    )


def _seed(graph: Graph, draw: Node, device: torch.device) -> Node:
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        seed = graph.call_function(
            aten.randint.low, (-(2**63), 2**63 - 1, [1]), {"dtype": torch.int64, "device": device}
        )
    with draw.meta["val"].fake_mode:
        value = torch.empty((1,), dtype=torch.int64, device=device)
    seed.meta = {**draw.meta, "val": value}
    return seed
