"""The op table, row by row: every overload over its dtypes and awkward values against eager, and every row compiled for
sm_90.
"""

from __future__ import annotations

import itertools
import math
import warnings

import pytest
import torch

from fusejit.codegen.ir.expr import Compute, Const, Load, compute, const, load, postorder
from fusejit.codegen.ir.layout import Layout
from fusejit.codegen.ir.reductions import REDUCTIONS
from fusejit.codegen.ops.table import OPS, POINTWISE, STORAGE, cast_spelling, lower_pointwise
from fusejit.errors import Unsupported
from fusejit.runtime.compile_workers import KernelSpec, compile_kernels
from fusejit.runtime.launch import kernel

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
ALL = (*FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
N = 256


# -- a renderer of one expression, one element a lane ------------------------------------------------------------------
def text_of(root, exact=False):
    """Return the lines of a kernel body that computes `root`, and the name of its value."""
    names, lines = {}, []
    for node in postorder([root]):
        name = names[node] = f"t{len(names)}"
        if isinstance(node, Load):
            line = STORAGE[node.dtype].load.format(f"tl.load({node.buffer} + i, mask=m)")
        elif isinstance(node, Const):
            value = (
                f"float('{node.value}')"
                if isinstance(node.value, float) and not math.isfinite(node.value)
                else repr(node.value)
            )
            line = f"tl.full((), {value}, {STORAGE[node.dtype].compute})"
        elif node.op == "cast":
            line = cast_spelling(node.args[0].dtype, node.dtype).format(names[node.args[0]])
        else:
            line = OPS[node.op].text(*(names[a] for a in node.args), exact=exact)
        lines.append(f"{name} = {line}")
    return lines, names[root]


def source_of(roots, buffers, exact=False):
    """Return the source of a kernel that stores every root to its own output."""
    params = ", ".join([*buffers, *(f"o{k}" for k in range(len(roots)))])
    lines = [
        f"def k({params}, N: tl.constexpr, B: tl.constexpr):",
        "i = tl.program_id(0) * B + tl.arange(0, B)",
        "m = i < N",
    ]
    for k, root in enumerate(roots):
        body, name = text_of(root, exact)
        lines += [*body, f"tl.store(o{k} + i, {STORAGE[root.dtype].store.format(name)}, mask=m)"]
    return "@triton.jit\n" + "\n    ".join(lines) + "\n"


def evaluate(root, tensors, exact=False):
    """Run the expression on equally long 1-D tensors through the interpreter."""
    n = len(next(iter(tensors.values())))
    out = torch.empty(n, dtype=root.dtype)
    run = kernel(
        source_of([root], list(tensors), exact),
        name="k",
        params=[*(STORAGE[t.dtype].pointer for t in tensors.values()), STORAGE[root.dtype].pointer],
        constants={"N": n, "B": 1 << (n - 1).bit_length()},
    )
    run(*tensors.values(), out)
    return out


# -- sample values -----------------------------------------------------------------------------------------------------
def values(dtype):
    """Awkward numbers of a dtype."""
    if dtype is torch.bool:
        return torch.tensor([True, False])
    if dtype.is_floating_point:
        special = [
            math.nan,
            math.inf,
            -math.inf,
            0.0,
            -0.0,
            1.0,
            -1.0,
            0.5,
            -0.5,
            2.5,
            -2.5,
            3.0,
            7.0,
            -7.5,
            1e-3,
            0.25,
            20.5,
            -90.0,
            600.0,
            -3.0,
        ]
        return torch.tensor(special, dtype=torch.float64).to(dtype)
    info = torch.iinfo(dtype)
    numbers = [0, 1, 2, 3, 5, 7, 63, 100, info.max, info.max - 1] + (
        [-1, -2, -3, -8, -100, info.min + 1] if info.min else [200, 255]
    )
    return torch.tensor(numbers).to(dtype)


def operands(dtypes, seed=0):
    """Equally long 1-D tensors: all pairs of awkward values of the first two, random ones of any further."""
    generator = torch.Generator().manual_seed(seed)
    first = [values(d) for d in dtypes[:2]]
    columns = (
        [first[0]] if len(first) == 1 else [first[0].repeat_interleave(len(first[1])), first[1].repeat(len(first[0]))]
    )
    for dtype in dtypes[2:]:
        pool = values(dtype)
        columns.append(pool[torch.randint(len(pool), (len(columns[0]),), generator=generator)])
    extra = [torch.randn(40, generator=generator, dtype=torch.float64).mul(3).to(d) for d in dtypes]
    return [torch.cat([c, e]) for c, e in zip(columns, extra, strict=True)]


SCALARS = {
    "pow.Tensor_Scalar": (0.5, 1, 2, 3, -1, -0.5, 2.5, 0, -2, 7),
    "pow.Scalar": (2, 0.5, 1),
    "remainder.Scalar": (3, -3, 2.5),
    "fmod.Scalar": (3, -3, 2.5),
    "floor_divide.Scalar": (3, -3, 2.5),
    "polygamma.default": (0, 1),
    "round.decimals": (2, -1, 0),
    "hardtanh_backward.default": (-1, 1),
    "clamp.default": (-1, 2),
    "threshold_backward.default": (0.5,),
    "elu_backward.default": (1.0,),
    "softplus_backward.default": (1.0, 20.0),
    "leaky_relu_backward.default": (0.01,),
}
KWARGS = {
    "div.Tensor_mode": [{"rounding_mode": m} for m in ("floor", "trunc", None)],
    "div.Scalar_mode": [{"rounding_mode": m} for m in ("floor", "trunc")],
    "gelu.default": [{}, {"approximate": "tanh"}],
    "gelu_backward.default": [{}, {"approximate": "tanh"}],
    "add.Tensor": [{}, {"alpha": 2}],
    "sub.Tensor": [{}, {"alpha": 3}],
    "rsub.Scalar": [{}, {"alpha": 2}],
    "addcmul.default": [{}, {"value": 2}],
    "addcdiv.default": [{}, {"value": 2}],
    "nan_to_num.default": [{}, {"nan": 1.0, "posinf": 2.0}],
    "logit.default": [{}, {"eps": 0.1}],
    "round.decimals": [{"decimals": 2}, {"decimals": -1}, {"decimals": 0}],
    "clamp.default": [{}, {"min": -1}, {"max": 2}, {"min": -1, "max": 2}],
    "elu.default": [{}, {"alpha": 0.5, "scale": 1.5}],
    "leaky_relu.default": [{}, {"negative_slope": 0.3}],
    "softplus.default": [{}, {"beta": 2.0, "threshold": 3.0}],
    "hardshrink.default": [{}, {"lambd": 1.0}],
    "softshrink.default": [{}, {"lambd": 1.0}],
    "celu.default": [{}, {"alpha": 2.0}],
}
for _alias, _name in (("divide", "div"), ("subtract", "sub"), ("clip", "clamp")):
    KWARGS |= {k.replace(_name, _alias): v for k, v in KWARGS.items() if k.startswith(_name + ".")}
# eager's vectorised CPU kernels disagree with its own scalar and CUDA kernels about these: NaN in the deciding operand,
# infinities
NANLESS = {"hardtanh_backward.default", "elu_backward.default"}
FINITE = {"gelu.default", "gelu_backward.default", "pow.Tensor_Scalar"}
# formulas that cancel: their error is measured in ulps of their inputs
CANCELS = {
    "gelu.default",
    "addcmul.default",
    "addcdiv.default",
    "digamma.default",
    "polygamma.default",
    "prims.digamma.default",
    "hardsigmoid_backward.default",
    "lerp.Scalar",
    "lerp.Tensor",
    "logaddexp2.default",
    "logaddexp.default",
    "silu_backward.default",
    "special_ndtr.default",
    "tanh_backward.default",
    "sigmoid_backward.default",
    "mish_backward.default",
    "gelu_backward.default",
    "elu_backward.default",
    "softplus_backward.default",
}
# integers only: what eager refuses or leaves undefined on a CPU
NONZERO = {"floor_divide", "remainder", "fmod", "div"}
SKIP_ROWS = {
    "_to_copy.default",
    "prims.convert_element_type.default",
    "prims.device_put.default",
    "clone.default",
    "alias.default",
}
# eager rounds 1/6 to float32 here, whatever the dtype
FLOAT32_CONSTANT = {"hardsigmoid_backward.default"}
SKIP_ROWS |= {"lift_fresh_copy.default", "log_sigmoid.default"}
SKIP_ROWS |= {
    "fusejit.probability.default"
}  # stands in graphs only, eager has no kernel for it: tests/codegen/ops/test_random.py


def overload_of(name):
    space, packet, overload = name.split(".") if name.count(".") > 1 else ("aten", *name.split("."))
    space = getattr(torch.ops, space)
    return getattr(getattr(space, packet), overload)


def calls(name, dtype):
    """Yield (args, kwargs) of eager calls of an overload, tensors of `dtype`."""
    schema = overload_of(name)._schema
    tensor_like = [
        a for a in schema.arguments if "Tensor" in str(a.type) and not (a.has_default_value() and a.kwarg_only)
    ]
    kinds = [torch.bool if a.name in ("condition", "mask", "pred") else dtype for a in tensor_like]
    if name == "where.ScalarSelf":
        kinds = [torch.bool, dtype]
    tensors = operands(kinds) if kinds else []
    base = name.split(".")[-2]
    if not dtype.is_floating_point and base in NONZERO and len(tensors) > 1 and dtype is not torch.bool:
        tensors[1] = torch.where(tensors[1] == 0, 1, tensors[1])
    if name in NANLESS | FINITE:
        tensors = [
            t.nan_to_num(0.3, *((0.7, 0.9) if name in FINITE else (None, None))) if t.dtype.is_floating_point else t
            for t in tensors
        ]
    if name == "pow.Tensor_Scalar" and dtype in (torch.float16, torch.bfloat16):
        tensors = [
            t.abs().clamp(min=1e-3) for t in tensors
        ]  # its scalar kernel knows no special cases for exponents of 0.5 and -0.5
    if "shift" in base and len(tensors) > 1:
        tensors[1] = (
            tensors[1].clamp(0, torch.iinfo(dtype).bits - 1)
            if not dtype.is_floating_point and dtype is not torch.bool
            else tensors[1]
        )
    if base == "where" and name == "where.Scalar":
        tensors = [values(torch.bool)]
    scalars = SCALARS.get(name, (2, -3, 0.7) if dtype.is_floating_point else (2, 3))
    positional = [
        a for a in schema.arguments if not a.kwarg_only and not (a.has_default_value() and "Tensor" not in str(a.type))
    ]
    holes = [a for a in positional if "Tensor" not in str(a.type)]
    choices = [[False, True] if a.name == "is_result" or "bool" in str(a.type) else list(scalars) for a in holes]
    if name in ("hardtanh_backward.default", "softplus_backward.default"):
        choices = [[s] for s in scalars]
    for numbers, kwargs in itertools.product(itertools.product(*choices), KWARGS.get(name, [{}])):
        if base == "round" and holes:
            numbers = ()
        if name == "masked_fill.Tensor":
            tensors[2] = tensors[2][5]
        source, given = iter(tensors), iter(numbers)
        yield [next(source) if "Tensor" in str(a.type) else next(given) for a in positional], kwargs


def close(ours, eager, exact, scale):
    """Assert ours == eager for integers, and for floats an error at most twice eager's plus a few ulp."""
    if not ours.dtype.is_floating_point:
        assert torch.equal(ours, eager)
        return
    info = torch.finfo(ours.dtype)
    a, b, e = ours.double(), eager.double(), exact.double()
    assert torch.equal(a.isnan(), b.isnan()), "NaN in other places"
    both = a.isfinite() & b.isfinite()
    assert torch.equal(a[~both & ~a.isnan()], b[~both & ~b.isnan()]), "infinities differ"
    allowed = 2 * (b - e).abs() + 4 * info.eps * (e.abs() + scale) + 4 * info.tiny
    allowed = torch.where(e.isfinite(), allowed, math.inf)
    worst = ((a - b).abs() - allowed)[both]
    assert worst.numel() == 0 or float(worst.max()) <= 0, f"off by {float((a - b).abs()[both].max())}"


def widen(value):
    return value.double() if isinstance(value, torch.Tensor) and value.dtype.is_floating_point else value


def check(name, dtype):
    op, ran = overload_of(name), 0
    if name in FLOAT32_CONSTANT and dtype is torch.float64:
        return 0
    for args, kwargs in calls(name, dtype):
        try:
            eager = op(*args, **kwargs)
        except (RuntimeError, NotImplementedError, TypeError):
            continue
        if eager.dtype not in ALL:
            continue
        args = [a.expand(len(eager)).contiguous() if isinstance(a, torch.Tensor) and not a.dim() else a for a in args]
        tensors = {f"x{i}": a for i, a in enumerate(args) if isinstance(a, torch.Tensor)}
        layout = Layout.contiguous((len(eager),)) if hasattr(Layout, "contiguous") else None
        exprs = [load(f"x{i}", layout, a.dtype) if isinstance(a, torch.Tensor) else a for i, a in enumerate(args)]
        try:
            root = lower_pointwise(name, eager.dtype, exprs, kwargs)
        except Unsupported:
            continue
        assert root.dtype is eager.dtype
        if not tensors:
            continue
        try:
            exact = op(*(widen(a) for a in args), **kwargs)
        except (RuntimeError, NotImplementedError):
            exact = eager
        scale = sum(t.double().abs().nan_to_num(0, 0, 0) for t in tensors.values()) ** 2 * 4 if name in CANCELS else 0.0
        try:
            for numerics in (False, True):
                close(evaluate(root, tensors, numerics), eager, exact, scale)
        except AssertionError as error:
            numbers = [a for a in args if not isinstance(a, torch.Tensor)]
            raise AssertionError(f"{name} {dtype} {numbers} {kwargs}: {error}") from None
        ran += 1
    return ran


ROWS = sorted(set(POINTWISE) - SKIP_ROWS)


@pytest.mark.parametrize("name", ROWS)
def test_row_equals_eager(name):
    """Every overload, in every dtype that eager has for it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert sum(check(name, dtype) for dtype in ALL) > 0, "eager accepted no sample of this row"


# -- the table itself --------------------------------------------------------------------------------------------------
def test_rounds_scalars_as_eager_does():
    x = load("x", None, torch.bfloat16)
    (scalar,) = [a for a in lower_pointwise("gt.Scalar", torch.bool, (x, 0.1)).args if isinstance(a, Const)]
    assert scalar.value == 0.10009765625  # a comparison in bfloat16 compares with the rounded number
    (scalar,) = [a for a in lower_pointwise("mul.Tensor", torch.bfloat16, (x, 0.1)).args if isinstance(a, Const)]
    assert scalar.value == 0.1 and scalar.dtype is torch.float32  # a product is computed in float32 with the exact one


def test_unsupported_is_said():
    x = load("x", None, torch.float32)
    with pytest.raises(Unsupported, match="not in the op table"):
        lower_pointwise("nope.default", torch.float32, (x,))
    with pytest.raises(Unsupported, match="order 3"):
        lower_pointwise("polygamma.default", torch.float32, (3, x))
    with pytest.raises(Unsupported, match=r"float16"):
        lower_pointwise(
            "nextafter.default", torch.float16, (load("x", None, torch.float16), load("y", None, torch.float16))
        )


def test_table_is_big_enough():
    assert sum(not op.reduces for op in OPS.values()) >= 100
    assert sum(bool(row.along) for row in REDUCTIONS.values()) == 8
    assert compute("add", const(1, torch.int32), const(2, torch.int32), dtype=torch.int32) is not None
    assert isinstance(lower_pointwise("add.Tensor", torch.float32, (load("x", None, torch.float32), 1)), Compute)


# -- every row compiled for a GPU that need not be there ---------------------------------------------------------------
def roots_of(dtype):
    """One expression of every row that takes `dtype`, over loads x0, x1, ... of that dtype (or bool, for
    conditions).
    """
    roots = {}
    for name in ROWS:
        for args, kwargs in calls(name, dtype):
            types = [a.dtype if isinstance(a, torch.Tensor) else None for a in args]
            exprs = [
                load(f"{'c' if t is torch.bool and dtype is not t else 'x'}{i}", None, t) if t else a
                for i, (a, t) in enumerate(zip(args, types, strict=True))
            ]
            try:
                out = overload_of(name)(
                    *(a[:1].clone() if isinstance(a, torch.Tensor) and a.dim() else a for a in args), **kwargs
                ).dtype
                roots.setdefault(lower_pointwise(name, out, exprs, kwargs), name)
            except (Unsupported, RuntimeError, NotImplementedError, TypeError, KeyError):
                continue
            break
    return [r for r in roots if isinstance(r, Compute)]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.int64, torch.uint8, torch.bool], ids=str
)
def test_rows_compile_for_sm_90(dtype):
    """Every row compiles and spills nothing, a few dozen to a kernel."""
    specs, roots = [], roots_of(dtype)
    heavy = 6 if dtype is torch.float64 else 16
    for start in range(0, len(roots), heavy):
        batch = roots[start : start + heavy]
        buffers = sorted({(n.buffer, n.dtype) for n in postorder(batch) if isinstance(n, Load)}, key=lambda b: b[0])
        source = source_of(batch, [name for name, _ in buffers])
        params = (*(STORAGE[d].pointer for _, d in buffers), *(STORAGE[r.dtype].pointer for r in batch))
        specs.append(KernelSpec(source, "k", params, (("N", 4096), ("B", 128))))
    for spec, done in zip(specs, compile_kernels(specs), strict=True):
        assert done.n_spills == 0, spec.source


# -- every row through fusejit.jit: broadcasts and gradients -----------------------------------------------------------
SHAPES = [(2, 3, 4), (3, 1), (4,), (2, 1, 1)]
JIT_ROWS = [n for n in ROWS if not n.startswith("prims.")]
# operands of these have one shape, or their gradient belongs to another op
SAME_SHAPE = {"_prelu_kernel.default"}


def jit_call(name):
    """A function of tensors that makes one eager call of the overload, and tensors of shapes that broadcast."""
    op = overload_of(name)
    integral = "bitwise" in name or "shift" in name or name.startswith("__")
    args, kwargs = list(calls(name, torch.int32 if integral else torch.float32))[-1]
    generator = torch.Generator().manual_seed(len(name))
    tensors, holes = [], []
    for i, value in enumerate(args):
        if isinstance(value, torch.Tensor) and value.dim():
            shape = SHAPES[0] if "backward" in name or name in SAME_SHAPE else SHAPES[len(tensors) % 4]
            drawn = torch.rand(shape, generator=generator) * 0.8 + 0.1
            tensors.append(
                (drawn * 6).to(value.dtype) if integral else drawn > 0.5 if value.dtype is torch.bool else drawn
            )
            holes.append(i)

    def function(*given):
        filled = list(args)
        for hole, tensor in zip(holes, given, strict=True):
            filled[hole] = tensor
        return op(*filled, **kwargs)

    return function, tensors


def gradients(function, tensors):
    """The result, and the gradients of its sum, weighted so that no two elements count the same; None where eager has
    none.
    """
    leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in tensors]
    out = function(*leaves)
    if not out.requires_grad:
        return out, None
    (out * torch.linspace(0.5, 1.5, out.numel()).reshape(out.shape)).sum().backward()
    return out.detach(), [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("name", JIT_ROWS)
def test_row_through_jit(name):
    """Broadcast operands and their gradients, compiled from one traced call to its kernels."""
    fusejit = pytest.importorskip("fusejit")
    pytest.importorskip("fusejit.compile")
    function, tensors = jit_call(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            wanted, slopes = gradients(function, tensors)
        except (RuntimeError, NotImplementedError):  # eager knows no derivative of this op
            tensors = [t.detach() for t in tensors]
            wanted, slopes = function(*tensors), None
        jitted = fusejit.jit(function, backend="interpret")
        if slopes is None:
            torch.testing.assert_close(jitted(*tensors), wanted, equal_nan=True, rtol=2e-5, atol=1e-6)
            return
        ours, found = gradients(jitted, tensors)
    torch.testing.assert_close(ours, wanted, equal_nan=True, rtol=2e-5, atol=1e-6)
    for a, b in zip(found, slopes, strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            torch.testing.assert_close(a, b, equal_nan=True, rtol=5e-5, atol=5e-6)
