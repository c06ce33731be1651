"""Symbols: sizes and Python numbers that may vary, for one capture: the fake tensors that have them, the graph's inputs
for them, and their check.

In: the leaves of a call, the axes of them that may vary and the numbers among them that may. Out: `Symbols`: a fake
twin of each tensor, and afterwards the graph with the sizes as inputs, and the text of a function that reads them from
a call, or says that the graph does not hold for it.

    >>> symbols = Symbols([torch.ones(5, 64)], {0: frozenset({0})}); ...; print(symbols.source())
    def sizes(leaves):
        s0, n = leaves[0].shape
        if not (n == 64 and leaves[0].stride() == (64, 1) and 2 <= s0 <= 1099511627776 and s0 > 4): return None
        return [s0]

torch's ShapeEnv does the algebra and collects the guards; equal sizes share a symbol (duck shaping) and are then
checked to be equal. 0 and 1 are never symbols: torch specialises on them, and so do we; nor is a float that is 0.0,
infinite or nan.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from ...codegen.ir.size import LARGEST, spell
from ...errors import Unsupported
from ..fake_mode import new_fake_mode
from ..source_lines import frame_entry, shorten, user_frame

Tensor = torch.Tensor
MOST_GUARDS = 128
MOST_SECONDS = 30.0
"""Beyond these a capture with symbols costs more than programs for single shapes."""
SIZE_OPS = {torch.ops.aten.sym_size.int, torch.ops.aten.sym_stride.int, torch.ops.aten.sym_numel.default,
            torch.ops.aten.sym_storage_offset.default}  # fmt: skip


VALUE = -1
"""In the place of an axis: a Python number among the arguments."""


@dataclass(frozen=True, slots=True)
class Axis:
    """A size, or a stride, of a leaf, or the leaf itself where that is a Python number: what a symbol stands for."""

    leaf: int
    number: int
    stride: bool = False

    @property
    def scalar(self) -> bool:
        return self.number == VALUE


@dataclass(frozen=True, slots=True)
class Specialised:
    """A symbol that the body needed the value of; `line` is the user's where that is known; `shared`: others had it."""

    axis: Axis
    value: float
    line: str = ""
    shared: bool = False

    def __str__(self) -> str:
        return f"its value {self.value} is needed" + (f" at {self.line}" if self.line else " by the function")


class Symbols:
    """The symbols of one capture.

    Attributes:
        mode: the fake mode whose ShapeEnv holds them. names: s0, s1, ..., in the order of the graph's inputs.
        ints: {name: torch's symbolic integer, or float}; axes: {name: every axis that has it}.
        scalars: {number of a leaf that is a Python number: its name}; fixed: the other Python numbers, of which the
            check looks at each.
    """

    def __init__(
        self,
        leaves: Sequence[Any],
        varying: dict[int, frozenset[int]],
        strides: frozenset[tuple[int, int]] = frozenset(),
        apart: frozenset[Axis] = frozenset(),
        scalars: Mapping[int, bool] = MappingProxyType({}),
    ) -> None:
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        self.env = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
        self.env.guards = self.guarded = Noting()
        self.env._generate_unique_id = lambda name: int(name.lstrip("szf"))  # type: ignore[method-assign,assignment]  # torch's s0 is ours, where it is asked
        self.mode = new_fake_mode(shape_env=self.env, static_shapes=True)
        self.ints: dict[str, Any] = {}
        self.axes: dict[str, list[Axis]] = {}
        self.known: dict[str, str] = {}  # torch's name of a symbol to ours
        self.described: dict[int, tuple[tuple, tuple, tuple[str, ...], tuple[str, ...]]] = {}
        self.numbers: dict[int, int] = {}
        self.started = time.perf_counter()
        duck: dict[int, str] = {}
        for number, leaf in enumerate(leaves):
            if number in varying and id(leaf) not in self.numbers:
                self.numbers[id(leaf)] = number
                self.described[number] = self.describe(leaf, number, varying[number], (strides, apart), duck)
        self.scalars = {number: self.make(leaves[number]) for number, varies in scalars.items() if varies}
        self.fixed = {number: leaves[number] for number in scalars if number not in self.scalars}
        for number, name in self.scalars.items():
            self.axes[name].append(Axis(number, VALUE))

    def describe(self, leaf: Tensor, number: int, axes: frozenset[int], known: tuple, duck: dict[int, str]) -> tuple:
        """Return the symbolic sizes and strides of a tensor, and their texts. A dense stride is a product of sizes,
        others are numbers.
        """
        free, apart = known
        sizes: list[Any] = list(leaf.shape)
        texts = [str(n) for n in sizes]
        for axis in sorted(axes):
            if sizes[axis] > 1:
                alone = Axis(number, axis) in apart
                name = None if alone else duck.get(sizes[axis])
                name = name or self.make(sizes[axis])
                if not alone:
                    duck[sizes[axis]] = name
                self.axes[name].append(Axis(number, axis))
                sizes[axis], texts[axis] = self.ints[name], name
        strides: list[Any] = list(leaf.stride())
        stride_texts = [str(n) for n in strides]
        step, dense, inner = 1, 1, ["1"]
        for axis in sorted(range(leaf.dim()), key=lambda a: (leaf.stride(a), leaf.shape[a])):
            if not leaf.stride(axis):
                continue
            strides[axis], parts = dense, inner
            if leaf.stride(axis) != step:
                strides[axis], parts = leaf.stride(axis), [str(leaf.stride(axis))]
                if (number, axis) in free and leaf.stride(axis) > 1:
                    name = self.make(leaf.stride(axis))
                    self.axes[name].append(Axis(number, axis, True))
                    strides[axis], parts = self.ints[name], [name]
            stride_texts[axis] = "*".join(part for part in parts if part != "1") or "1"
            if leaf.shape[axis] != 1:
                step, dense, inner = (
                    leaf.stride(axis) * leaf.shape[axis],
                    strides[axis] * sizes[axis],
                    [*parts, texts[axis]],
                )
        return tuple(sizes), tuple(strides), tuple(texts), tuple(stride_texts)

    def make(self, value: float) -> str:
        """Make a symbol whose value is `value` in this call, under the name that torch will give it."""
        from torch.fx.experimental.symbolic_shapes import DimDynamic

        if type(value) is float:
            origin = source(name := f"zf{len(self.ints)}")
            symbol = self.env.create_unspecified_symbol(value, origin, DimDynamic.DYNAMIC)
            self.ints[name] = self.env.create_symfloatnode(symbol, hint=value, source=origin)
        else:
            origin = source(name := f"s{len(self.ints)}")
            symbol = self.env.create_symbol(value, origin, DimDynamic.DYNAMIC)  # type: ignore[arg-type]
            self.ints[name] = self.env.create_symintnode(symbol, hint=value, source=origin)  # type: ignore[arg-type]
        self.axes[name], self.known[str(symbol)] = [], name
        return name

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.ints)

    def given(self) -> dict[int, Any]:
        """What the body gets for Python numbers that vary, by the number of the leaf."""
        return {number: self.ints[name] for number, name in self.scalars.items()}

    def fake(self, leaf: Tensor) -> Tensor:
        """Make a fake twin of an argument: with symbolic sizes where they vary."""
        number = self.numbers.get(id(leaf))
        if number is None:
            return self.mode.from_tensor(leaf)
        sizes, strides, _, _ = self.described[number]
        with torch.inference_mode(False), torch.enable_grad(), self.mode:
            made = torch.empty_strided(sizes, strides, dtype=leaf.dtype, device=leaf.device)
            if leaf.requires_grad:
                made.requires_grad_()
                if not leaf.is_leaf:  # a change in place is an error of a leaf, and none of this one
                    made = Grown.apply(made)
        return made

    def inputs(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Return the inputs of the graph: fake twins of its tensors (closed-over ones included), and the symbols."""
        return [*map(self.fake, tensors), *self.ints.values()]

    def bear(self) -> None:
        """Give up where symbols cost too much.

        Raises:
            Unsupported: too many guards, or too many seconds.
        """
        spent = time.perf_counter() - self.started
        if len(self.env.guards) > MOST_GUARDS or spent > MOST_SECONDS:
            raise Unsupported("dynamic sizes", f"{len(self.env.guards)} guards on sizes after {spent:.0f} s")

    # -- the check
    def size(self, value: Any) -> str:
        """Write a (symbolic) integer as Python over our names."""
        return spell(value.node.expr, self.known) if isinstance(value, torch.SymInt) else str(int(value))

    def guards(self) -> list[str]:
        """The conditions that the body asked for.

        Raises:
            Unsupported: one computes with a float argument, which torch's algebra does in another order than Python.
        """
        for guard in self.env.guards:
            floats = {symbol for symbol in guard.expr.free_symbols if str(symbol).startswith("zf")}
            if floats - {*guard.expr.args}:
                raise Unsupported(
                    "dynamic numbers", f"the function decides by what it computes from a float argument: {guard.expr}"
                )
        return list(dict.fromkeys(spell(guard.expr, self.known) for guard in self.env.guards))

    def reads(self, leaf: str, checked: bool = False) -> tuple[list[str], list[str]]:
        """The statements that read the symbols from tensors that are called `leaf.format(number)`, and the tests of a
        call.

        Args:
            checked: sizes and strides that are numbers have been compared already.
        """
        lines: list[str] = []
        tests: list[str] = []
        seen: set[str] = set()
        for number, (_, _, sizes, strides) in self.described.items():
            tensor, targets = leaf.format(number), []
            for axis, text in enumerate(sizes):
                fresh, known = text in self.ints and text not in seen, checked and text.isdigit()
                targets.append(text if fresh else "_" if known else f"n{number}_{axis}")
                seen.add(text)
                if not (fresh or known):
                    tests.append(f"n{number}_{axis} == {text}")
            if {*targets} - {"_"}:
                lines.append(f"{', '.join(targets)}, = {tensor}.shape")
            for axis in (a for a, text in enumerate(strides) if text in self.ints and text not in seen):
                lines.append(f"{strides[axis]} = {tensor}.stride({axis})")
                seen.add(strides[axis])
            if not (checked and all(map(str.isdigit, strides))):
                dense = checked and strides == rows(sizes)
                tests.append(
                    f"{tensor}.is_contiguous()"
                    if dense
                    else f"{tensor}.stride() == ({''.join(text + ', ' for text in strides)})"
                )
        for number, name in self.scalars.items():
            lines.append(f"{name} = {leaf.format(number)}")
            tests.append(f"type({name}) is {'int' if name[0] == 's' else 'float'}")
        for number, value in self.fixed.items() if not checked else ():
            tests.append(
                f"type({leaf.format(number)}) is {type(value).__name__} and {leaf.format(number)} == {value!r}"
            )
        ranges = [
            f"2 <= {name} <= {LARGEST}" if name[0] == "s" else f"{name} - {name} == 0 != {name}" for name in self.ints
        ]
        return lines, [*tests, *ranges, *self.guards()]

    def source(self) -> str:
        """The text of `sizes(leaves)`: the values of the symbols, or None where the graph does not hold."""
        lines, tests = self.reads("leaves[{}]")
        return "\n".join(
            ["def sizes(leaves):", *(f"    {line}" for line in lines)]
            + [f"    if not ({' and '.join(tests)}): return None", f"    return [{', '.join(self.ints)}]", ""]
        )

    def free(self, number: int) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
        """Which sizes and which strides of a leaf are no numbers."""
        _, _, sizes, strides = self.described.get(number, ((), (), (), ()))
        return tuple([not text.isdigit() for text in sizes]), tuple([not text.isdigit() for text in strides])

    def check(self) -> Callable[[list[Any]], list[int] | None]:
        scope: dict[str, Any] = {}
        exec(compile(self.source(), "<sizes>", "exec"), scope)
        return scope["sizes"]  # type: ignore[no-any-return]

    def specialised(self) -> list[Specialised]:
        """The axes whose symbol became a number."""
        found = []
        for name, value in self.ints.items():
            if isinstance(value, torch.SymInt | torch.SymFloat) and value.node.expr.is_number:
                number = value.node.hint
                found += [
                    Specialised(axis, number, self.line(name), len(self.axes[name]) > 1) for axis in self.axes[name]
                ]
        return found

    def line(self, name: str) -> str:
        """The user's line of the guard that fixed a symbol."""
        for guard in self.env.guards:
            if type(guard.expr).__name__ == "Equality" and name in map(
                self.known.get, map(str, guard.expr.free_symbols)
            ):
                return self.guarded.lines.get(id(guard), "")
        return ""

    # -- the graph
    def bind(self, module: torch.fx.GraphModule) -> torch.fx.GraphModule:
        """Return the graph with the symbols as its last inputs; what asked a tensor for a size computes it from
        them.
        """
        graph = torch.fx.Graph()
        new: dict[torch.fx.Node, torch.fx.Node] = {}
        scope: dict[str, Any] = {"max": torch.sym_max, "min": torch.sym_min}
        made: dict[str, Any] = {}
        taken: dict[torch.fx.Node, str] = {}
        names = [*self.scalars.values()]
        for node in module.graph.nodes:
            if node.op != "placeholder" and not (scope.keys() & self.ints.keys()):
                for name, value in self.ints.items():
                    place = graph.placeholder(name)
                    place.meta["val"] = value
                    scope[name] = torch.fx.Proxy(place)
                new |= {old: scope[name].node for old, name in taken.items()}
            if node.op == "placeholder" and isinstance(node.meta.get("val"), torch.SymInt | torch.SymFloat):
                taken[node] = names[len(taken)]
            elif node.target in SIZE_OPS:
                text = self.size(node.meta["val"])
                if text not in made:
                    value = eval(text, scope)
                    made[text] = value.node if isinstance(value, torch.fx.Proxy) else value
                new[node] = made[text]
            else:
                new[node] = graph.node_copy(node, new.__getitem__)
        graph.lint()
        return torch.fx.GraphModule(module, graph)


def rows(sizes: tuple[str, ...]) -> tuple[str, ...] | None:
    """The texts of the strides of a contiguous tensor; None where `is_contiguous` would not look at every stride."""
    if {"0", "1"} & {*sizes}:
        return None
    return tuple(["*".join(reversed(sizes[axis + 1 :])) or "1" for axis in range(len(sizes))])


class Noting(list):
    """A list of guards that notes the user's line of each: torch knows it only inside Dynamo."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[int, str] = {}

    def append(self, guard: Any) -> None:
        self.lines[id(guard)] = shorten(frame_entry(user_frame(sys._getframe(1))))
        super().append(guard)


class Grown(torch.autograd.Function):
    """Makes a tensor that is no leaf of autograd's graph, and no view."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


def source(text: str) -> Any:
    """What torch wants to know of where a symbol comes from: a name."""
    from ...torch_private import GuardSource, Source

    class Size(Source):
        name = text  # type: ignore[assignment]
        guard_source = GuardSource.CONSTANT  # type: ignore[assignment]

    return Size()
