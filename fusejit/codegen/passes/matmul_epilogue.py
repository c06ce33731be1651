"""Matmul epilogue: a bias and an activation that a matrix product is called with cost no kernel.

In: fused clusters and extern calls. Out: the same program, in which a product whose only reader is a kernel of nothing
but a bias, a relu or a tanh gelu is a call that does both; and a line for each, with what it saves.

    b0 = mm(x, w) | b1 = relu(b0 + bias)     ->     b1 = _addmm_activation(bias, x, w)

A kernel that does more (a residual, a norm, a second result) stays: it reads the product once whatever else it does. So
does a product that a backward reads. `_addmm_activation(use_gelu=True)` is the tanh gelu in CUDA's libraries, and the
exact one on a CPU: only there, and only where the program runs on a GPU, it stands for what was written. Not with
numerics="eager", which rounds after each op.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..ir.cluster import Cluster, Store
from ..ir.expr import Expr, Load, cast, compute, const, load, rewrite
from ..ir.graph import Buffer, Extern, Foreach, Lowered, Ref, refs
from ..ir.size import Size

PRODUCTS = {"aten.mm.default": False, "aten.addmm.default": True}
"""Matrix products, and whether they have a bias already."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
ADD, ACTIVATION = "aten.addmm.default", "aten._addmm_activation.default"


@dataclass(frozen=True, slots=True)
class Found:
    """What a kernel does to a product: adds `bias`, if any, and applies "", "relu" or "gelu"."""

    bias: Ref | None
    activation: str

    def __str__(self) -> str:
        return " and ".join(
            [*(["the bias"] if self.bias is not None else []), *([self.activation] if self.activation else [])]
        )


def epilogue(lowered: Lowered, numerics: str, gpu: bool) -> tuple[Lowered, tuple[str, ...]]:
    """Return the program with its folded products, and what was folded; `gpu`: whether it runs on one."""
    notes: list[str] = []
    if numerics == "eager":
        return lowered, ()
    for name in [s.outputs[0] for s in lowered.steps if isinstance(s, Extern) and s.target in PRODUCTS]:
        step = next(
            s for s in lowered.steps if isinstance(s, Extern) and name in s.outputs
        )  # an earlier fold may have renamed its operands
        if (reader := _only_reader(step, lowered)) is not None:
            found = _match(step, reader, lowered, gpu)
            if found is not None:
                saved = 2 * lowered.buffers[str(step.outputs[0])].bytes
                lowered, made = _folded(lowered, step, reader, found)
                notes.append(
                    f"{step.target} with {found}: {made.target}, {saved / 1e6:.1f} MB less read and written  "
                    f"{step.line}".rstrip()
                )
    return lowered, tuple(notes)


def _only_reader(call: Extern, lowered: Lowered) -> Cluster | None:
    """Return the one step that reads a product, if it is a kernel with one result."""
    name = str(call.outputs[0])
    readers = [s for s in lowered.steps if name in s.reads]
    reader = readers[0] if len(readers) == 1 else None
    if not isinstance(reader, Cluster) or any(ref.buffer == name for ref in refs(lowered.outputs)):
        return None
    plain = not reader.reduce and not reader.programs and len(reader.stores) == 1
    store = reader.stores[0]
    return (
        reader
        if plain and not store.mode and not store.index and not lowered.buffers[store.buffer].written_to
        else None
    )


def _match(call: Extern, reader: Cluster, lowered: Lowered, gpu: bool) -> Found | None:
    """Return what a kernel does to a product, None where that is no epilogue."""
    (store,) = reader.stores
    product = lowered.buffers[str(call.outputs[0])]
    value, *again = reader.reads[product.name]
    fixed = not any(isinstance(n, Size) for n in (*product.shape, *reader.axes))
    in_place = not again and value.layout == store.layout and not value.index and value.mask is None
    if not in_place or not fixed or product.dtype not in FLOATS or store.dtype is not product.dtype:
        return None
    given: list[tuple[Ref | None, Expr]] = [(None, value)]
    others = [n for name, found in reader.reads.items() if name != product.name for n in found]
    if others:
        if (
            PRODUCTS[call.target]
            or len(others) != 1
            or (bias := _bias(others[0], reader, call, product, lowered)) is None
        ):
            return None
        given = [(bias, added) for added in _sums(value, others[0])]
    if not PRODUCTS[call.target] and not others:
        return None  # the call wants a bias
    for ref, inner in given:
        results = {"": [inner] if ref is not None else [], "relu": [compute("relu", inner, dtype=store.dtype)]}
        results["gelu"] = [_gelu(inner, store.dtype)] if gpu else []
        for activation, texts in results.items():
            if any(store.value == text for text in texts):
                return Found(ref, activation)
    return None


def _bias(node: Load, reader: Cluster, call: Extern, product: Buffer, lowered: Lowered) -> Ref | None:
    """Return an operand as a vector with one element for each column of the product, if it is one and there before the
    product.
    """
    strides, last = node.layout.strides or (), reader.axes[-1] if reader.axes else 0
    vector = strides and strides[-1] == 1 and not any(strides[:-1]) and last == product.shape[-1]
    if not vector or node.index or node.mask is not None or node.dtype is not product.dtype:
        return None
    before = lowered.steps[: lowered.steps.index(call)]
    ready = node.buffer in lowered.inputs or any(node.buffer in _written(s) for s in before)
    changed = any(b.written_to == node.buffer for b in lowered.buffers.values())
    whole = lowered.buffers[node.buffer].shape == (last,) and node.layout.offset == 0
    ref = Ref(node.buffer) if whole else Ref(node.buffer, (last,), (1,), node.layout.offset)
    return ref if ready and not changed else None


def _written(step: Cluster | Extern | Foreach) -> set[str]:
    return {o for o in step.outputs if o} if isinstance(step, Extern) else set(step.writes)


def _sums(value: Load, bias: Load) -> list[Expr]:
    """Return the ways in which a kernel adds a bias: either order, in float32 or rounded."""
    wide = [cast(n, torch.float32) for n in (value, bias)]
    return [
        compute("add", a, b, dtype=t)
        for a, b in (wide, wide[::-1])
        for t in dict.fromkeys((value.dtype, torch.float32))
    ]


def _gelu(x: Expr, dtype: torch.dtype) -> Expr:
    """The tanh gelu as torch's decomposition and the lowering write it."""
    f32 = torch.float32
    x, number = cast(x, f32), lambda value: const(value, f32)
    cube = compute("mul", compute("mul", x, x, dtype=f32), x, dtype=f32)
    inner = compute("mul", number(0.7978845608028654), compute("fma", number(0.044715), cube, x, dtype=f32), dtype=f32)
    half = compute("mul", number(0.5), x, dtype=f32)
    return compute("mul", half, compute("add", number(1.0), compute("tanh", inner, dtype=f32), dtype=f32), dtype=dtype)


def _folded(lowered: Lowered, call: Extern, reader: Cluster, found: Found) -> tuple[Lowered, Extern]:
    """Return the program in which the call does what its reader did, under the name of the product."""
    name, gone = str(call.outputs[0]), reader.stores[0].buffer
    args = call.args if found.bias is None else (found.bias, *call.args)
    kwargs = (*call.kwargs, *([("use_gelu", True)] if found.activation == "gelu" else []))
    made = replace(call, target=ACTIVATION if found.activation else ADD, args=args, kwargs=kwargs)
    old, new = lowered.buffers[gone], lowered.buffers[name]

    def visit(node: Expr) -> Expr:
        same = isinstance(node, Load) and node.buffer == gone
        return load(name, node.layout, node.dtype, node.index, node.mask, node.fill) if same else node  # type: ignore[union-attr]

    def renamed(tree: object) -> object:
        if isinstance(tree, Ref) and tree.buffer == gone:
            shape, strides = (old.shape, old.strides) if tree.shape is None else (tree.shape, tree.strides)
            return (
                Ref(name) if tree.shape is None and old.shape == new.shape else Ref(name, shape, strides, tree.offset)
            )
        return type(tree)(renamed(item) for item in tree) if isinstance(tree, (tuple, list)) else tree  # type: ignore[call-arg]

    def step(s: Cluster | Extern | Foreach) -> Cluster | Extern | Foreach:
        if isinstance(s, Extern):
            return replace(s, args=renamed(s.args), kwargs=renamed(s.kwargs)) if gone in s.reads else s  # type: ignore[arg-type]
        if isinstance(s, Foreach) or gone not in s.reads:
            return s
        roots = [root for st in s.stores for root in (st.value, *(e for e, _ in st.index))]
        now = dict(zip(roots, rewrite(roots, visit), strict=True))
        stores: list[Store] = [
            replace(st, value=now[st.value], index=tuple((now[e], n) for e, n in st.index)) for st in s.stores
        ]
        return replace(s, stores=tuple(stores))

    steps = tuple(made if s is call else step(s) for s in lowered.steps if s is not reader)
    return replace(lowered, steps=steps, outputs=renamed(lowered.outputs)), made  # type: ignore[arg-type]
