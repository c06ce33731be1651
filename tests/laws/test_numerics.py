"""The two promises of `numerics`, over the op table: "eager" is what torch eager computes, bit for bit; "fast" is no
less precise.

Under the interpreter, eager is torch's CPU kernels: equal but for the last bits of the maths library. On a GPU (`pytest
-m gpu`) the same tests ask for equal bits. What they rest on, read off torch's CUDA kernels and off what nvcc 13.0
makes of their expressions:

    op  what eager's CUDA kernel computes in float32 (half types: operands widened, one rounding at the end)
    add, sub, mul, neg, ...  one rounded operation;
        nothing is contracted across ops, so the chain is compiled without fma contraction
    add, sub with alpha  fma(alpha, y, x), alpha a float32;
        a Python number beside a half tensor is a float32, never rounded to half
    addcmul, addcdiv, lerp  fma(value, a * b, x), fma(a, b, x) for value 1; fma(value, a / b, x);
        fma(weight, end - a, a)
    x / y, 1 / x, sqrt(x)     div.rn, rcp.rn, sqrt.rn; x / number: x * (1 / number)
    exp, log, tanh, sin, ...  libdevice without flush to zero (__nv_expf, ...): never ex2.approx,
        tanh.approx or sin.approx of their own
    rsqrt(x), x ** -0.5       rsqrt.approx, as libdevice's __nv_rsqrtf
    sigmoid, silu             1 / (1 + exp(-x)), x / (1 + exp(-x)), divisions rounded
    gelu  (x * 0.5) * (1 + erf(x * sqrt(1/2))); "tanh": (0.5 * x) * (1 + tanh(k * fma(0.044715, x * x * x, x)))
    gelu's gradient           g * fma(0.5, 1 + erf(...), x * pdf)
    sigmoid's, tanh's, silu's (g * (1 - y)) * y; g * fma(-y, y, 1); g * s * fma(x, 1 - s, 1)
    hardswish, hardsigmoid    * (1 / 6), as a float32
    pow  x * x; (x * x) * x, the half types rounded in between; 1 / (x * x), x * x rounded; a number as exponent is
                              of the tensor's dtype; otherwise __nv_powf
    casts                     half types to nearest even

Not promised bit for bit: libdevice of another CUDA version than torch's (LIBRARY names the ops whose last bit moved
between versions), hypot (Triton cannot ask libdevice for its rounded square root), floor and trunc division of half
types, selu, celu, Bessel functions and the like (OWN_CODE), which torch computes by code of its own.
"""

from __future__ import annotations

import itertools
import math
import random
import re
import warnings

import pytest
import test_op_table as table
import torch
import torch.nn.functional as F

import fusejit
from fusejit.codegen.ops.table import POINTWISE
from fusejit.runtime.compile_workers import KernelSpec, compile_kernels
from fusejit.tools.bench import difference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
GROUP = 12  # ops in one function: tracing it costs more than running it


def steps(a, b):
    """How many numbers of their dtype lie between the elements of two tensors; NaN equals NaN."""
    if not a.dtype.is_floating_point:
        return (a != b).long()
    bits = [t.contiguous().view(BITS[t.dtype]).long() for t in (a, b)]
    lowest = torch.iinfo(BITS[a.dtype]).min
    ordered = [torch.where(i < 0, lowest - i, i) for i in bits]  # both zeros are 0
    return torch.where(a.isnan() & b.isnan(), 0, (ordered[0] - ordered[1]).abs())


def ulps(got, exact):
    """The largest error against float64 in ulps of the exact value, where both are finite."""
    info = torch.finfo(got.dtype)
    exact = exact.double()
    both = got.isfinite() & exact.isfinite() & (exact.abs() <= info.max)
    _, exponent = torch.frexp(exact.abs().clamp(min=info.tiny))
    unit = torch.ldexp(torch.ones_like(exact), exponent - 1) * info.eps
    return float(((got.double() - exact).abs() / unit)[both].max()) if both.any() else 0.0


# -- the op table ------------------------------------------------------------------------------------------------------
# what is computed without the maths library: equal bits everywhere
ARITHMETIC = {
    "add",
    "sub",
    "mul",
    "div",
    "fma",
    "neg",
    "abs",
    "pass",
    "sign",
    "reciprocal",
    "maximum",
    "minimum",
    "fmax",
    "fmin",
    "sqrt",
    "copysign",
    "nextafter",
    "floor",
    "ceil",
    "trunc",
    "round",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "isnan",
    "isinf",
    "isfinite",
    "isposinf",
    "isneginf",
    "signbit",
    "logical_and",
    "logical_or",
    "logical_xor",
    "logical_not",
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    "bitwise_not",
    "where",
    "cast",
    "relu",
}
# torch's CPU kernels contract where they like and have a square root that is not always rounded
NOT_ON_A_CPU = {"fma", "sqrt"}
# ... divide where CUDA's multiply with a reciprocal, and round float16 between the steps of a gradient
OTHERWISE_ON_A_CPU = {
    "div.Scalar",
    "divide.Scalar",
    "true_divide.Scalar",
    "hardsigmoid.default",
    "hardswish.default",
    "sigmoid_backward.default",
}
CANCELS = table.CANCELS | {"sub.Tensor", "subtract.Tensor", "rsub.Scalar", "add.Tensor", "mish.default"}
# torch's own code, not libdevice's; half types that eager rounds inside of one op; see the end of the docstring
OWN_CODE = re.compile(
    r"digamma|polygamma|bessel|i0|i1|erfcx|ndtr|entr|xlog|hypot|selu|celu|mish_backward|logaddexp2|(div|divide)\.\w+_mode|floor_divide"
)
LIBRARY = re.compile(
    r"tanh|erf|pow|atan|asin|acos|sinh|cosh|fmod|remainder|gelu|mish|ndtr"
)  # their last bit is the toolkit's


def calls(dtype, device="cpu", most=2):
    """(overload, args, kwargs) of the table's samples whose operands have `dtype`."""
    for name in sorted(set(POINTWISE) - table.SKIP_ROWS):
        if name.startswith("prims."):
            continue  # the same rows again
        for args, kwargs in itertools.islice(table.calls(name, dtype), most):
            args = [a.to(device) if isinstance(a, torch.Tensor) else a for a in args]
            try:
                out = table.overload_of(name)(*args, **kwargs)
            except (RuntimeError, NotImplementedError, TypeError):
                continue  # eager has no such call
            if any(isinstance(a, torch.Tensor) for a in args) and out.dtype in (dtype, torch.bool):
                yield name, args, kwargs


def together(group):
    """One function of all tensors of several calls, and these tensors."""

    def function(*flat):
        rest = iter(flat)
        filled = ([next(rest) if isinstance(a, torch.Tensor) else a for a in args] for _, args, _ in group)
        return tuple(table.overload_of(name)(*args, **kwargs) for (name, _, kwargs), args in zip(group, filled))

    return function, [a for _, args, _ in group for a in args if isinstance(a, torch.Tensor)]


def results(dtype, device, fuse, numerics, most=2):
    """(call, fused result, eager result) of every call."""
    found = list(calls(dtype, device, most))
    for start in range(0, len(found), GROUP):
        group = found[start : start + GROUP]
        function, tensors = together(group)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            got = fuse(function, numerics=numerics, fullgraph=True)(*tensors)
        yield from zip(group, got, function(*tensors), strict=True)


def arithmetic(name, args, kwargs, out):
    """Whether a call is computed without the maths library."""
    exprs = [table.load(f"x{i}", None, a.dtype) if isinstance(a, torch.Tensor) else a for i, a in enumerate(args)]
    try:
        nodes = table.postorder([table.lower_pointwise(name, out.dtype, exprs, kwargs)])
    except table.Unsupported:
        return True  # a call of torch's own kernel
    return {n.op for n in nodes if isinstance(n, table.Compute)} <= ARITHMETIC - (
        NOT_ON_A_CPU if out.device.type == "cpu" else set()
    )


def toolkit():
    from fusejit.runtime.compile_workers import toolkit_libdevice

    return bool(toolkit_libdevice())


def allowed(name, args, kwargs, want):
    """The steps that a result may lie away from eager's, and an absolute difference that is no more than rounding."""
    own = OWN_CODE.search(name) is not None
    size = sum(float(a.double().abs().nan_to_num(0, 0, 0).max()) for a in args if isinstance(a, torch.Tensor)) + 1
    slack = 4 * torch.finfo(want.dtype).eps * size**2 if want.dtype.is_floating_point else 0.0
    if want.device.type != "cpu":
        return (2, slack) if own or (LIBRARY.search(name) and not toolkit()) else (0, 0.0)
    if name not in OTHERWISE_ON_A_CPU and not own and arithmetic(name, args, kwargs, want):
        return 0, 0.0
    return 2, slack if own or name in CANCELS else 0.0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_eager_is_eager(dtype, device, fuse):
    """Every pointwise row: equal bits on a GPU; under the interpreter equal without the maths library, within two steps
    with it.
    """
    wrong, seen = [], 0
    for (name, args, kwargs), got, want in results(
        dtype, device, fuse, "eager", most=2 if dtype is torch.float32 else 1
    ):
        assert got.dtype is want.dtype, name
        most, absolute = allowed(name, args, kwargs, want)
        off = steps(got, want) > most
        if absolute:
            off &= ~((got.double() - want.double()).abs() <= absolute)
        seen += 1
        if off.any():
            numbers = [a for a in args if not isinstance(a, torch.Tensor)]
            wrong.append(
                f"{name} {numbers} {kwargs}: {int(steps(got, want).max())} steps, {got[off][0].item()} against "
                f"{want[off][0].item()}"
            )
    assert not wrong, "\n".join(wrong)
    assert seen > 150


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fast_is_no_less_precise(dtype, device, fuse):
    """Every pointwise row against float64: at most twice eager's largest error, and two ulp."""
    wrong = []
    for (name, args, kwargs), got, want in results(dtype, device, fuse, "fast", most=1):
        if not want.dtype.is_floating_point:
            assert torch.equal(got, want), name
            continue
        try:
            exact = table.overload_of(name)(*(table.widen(a) for a in args), **kwargs)
        except (RuntimeError, NotImplementedError):
            continue  # eager has it for other dtypes only
        if name in CANCELS or OWN_CODE.search(name):  # beside a zero of the function an ulp is no measure
            finite = exact.isfinite() & got.isfinite() & want.isfinite()
            ours, eager = (difference(v[finite], exact[finite]) / torch.finfo(dtype).eps for v in (got, want))
        else:
            ours, eager = ulps(got, exact), ulps(want, exact)
        if not torch.equal(got.isnan(), want.isnan()) or ours > 2 * eager + 2:
            wrong.append(f"{name}: {ours:.1f} ulp, eager {eager:.1f}")
    assert not wrong, "\n".join(wrong)


# -- chains ------------------------------------------------------------------------------------------------------------
# numbers added are exact in every dtype: torch rounds them to a half type on a CPU, not on a GPU
PLAIN = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "scaled": lambda x, y: x * 0.1,
    "moved": lambda x, y: x + 0.75,
    "from": lambda x, y: 1.5 - x,
    "neg": lambda x, y: -x,
    "abs": lambda x, y: x.abs(),
    "square": lambda x, y: x.square(),
    "maximum": lambda x, y: torch.maximum(x, y),
    "clamp": lambda x, y: x.clamp(-1.5, 2.5),
    "relu": lambda x, y: F.relu(x),
    "where": lambda x, y: torch.where(x > 0.1, x, y),
    "reciprocal": lambda x, y: (x.abs() + 0.5).reciprocal(),
    "leaky": lambda x, y: F.leaky_relu(x, 0.3),
    "floor": lambda x, y: (x * 3).floor(),
}
# what torch's CPU kernels compute otherwise in the last bit
SMOOTH = {
    "exp": lambda x, y: x.clamp(-5, 5).exp(),
    "tanh": lambda x, y: x.tanh(),
    "sigmoid": lambda x, y: x.sigmoid(),
    "silu": lambda x, y: F.silu(x),
    "log": lambda x, y: (x.abs() + 0.1).log(),
    "rsqrt": lambda x, y: (x.abs() + 0.1).rsqrt(),
    "erf": lambda x, y: x.erf(),
    "sin": lambda x, y: x.clamp(-1, 1).sin(),
    "log1p": lambda x, y: x.abs().log1p(),
    "cos": lambda x, y: x.clamp(-1, 1).cos(),
    "softplus": lambda x, y: F.softplus(x),
    "sqrt": lambda x, y: x.abs().sqrt(),
    "cube": lambda x, y: x**3,
}


def chains(count):
    """Seeded chains of two to six ops; one of the maths library comes last, if at all."""
    draw = random.Random(7)
    for _ in range(count):
        names = draw.choices(list(PLAIN), k=draw.randint(2, 5))
        yield [*names, draw.choice(list(SMOOTH))] if draw.random() < 0.4 else names


def run_chain(names, x, y):
    for name in names:
        x = (PLAIN | SMOOTH)[name](x, y)
    return x


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_chains_round_as_eager_rounds(dtype, device, fuse):
    """Fused into one kernel, each op still rounds; what "fast" computes differs, so the test can tell."""
    x, y = (torch.randn(512).to(device, dtype) for _ in range(2))
    everything = list(chains(40))

    def function(x, y):
        return tuple(run_chain(names, x, y) for names in everything)

    want = function(x, y)
    for names, a, b in zip(everything, fuse(function, numerics="eager", fullgraph=True)(x, y), want, strict=True):
        on_cpu = device == "cpu" and names[-1] in SMOOTH
        most = int(steps(a, b).max())
        assert most <= (2 if on_cpu or (not toolkit() and LIBRARY.search(names[-1])) else 0), (
            f"{' '.join(names)}: {most} steps"
        )
    if dtype is not torch.float32:
        fast = fuse(function, numerics="fast", fullgraph=True)(x, y)
        assert any(int(steps(a, b).max()) for a, b in zip(fast, want, strict=True))


def test_gradients_round_as_eager_rounds(device, fuse):
    """The backward of a chain, in bfloat16."""
    x, y = (torch.randn(256).to(device, torch.bfloat16) for _ in range(2))

    def function(x, y):
        return ((x * y + x) / (y.abs() + 1.5)).relu() * 0.3

    def slopes(f):
        leaves = [t.clone().requires_grad_() for t in (x, y)]
        return torch.autograd.grad(f(*leaves), leaves, torch.linspace(-1, 1, 256, device=device).to(torch.bfloat16))

    for ours, eager in zip(slopes(fuse(function, numerics="eager", fullgraph=True)), slopes(function), strict=True):
        assert int(steps(ours, eager).max()) <= (
            1 if device == "cpu" else 0
        )  # torch's CPU kernels divide where CUDA's multiply


# -- what the compiler makes of it -------------------------------------------------------------------------------------
def ptx(fn, *args, numerics):
    return "\n".join(k.ptx for k in fusejit.compile_for(fn, args, numerics=numerics).kernels)


def found(pattern, text):
    return sorted(set(re.findall(pattern, text)))


def test_no_contraction_and_rounded_divisions():
    """a * b + c stays two roundings, / is div.rn and sqrt is sqrt.rn; "fast" may do better and worse."""
    args = [torch.empty(4096) for _ in range(3)]

    def chain(a, b, c):
        return (a * b + c) / b.sqrt()

    eager, fast = (ptx(chain, *args, numerics=n) for n in ("eager", "fast"))
    assert {"mul.rn.f32", "add.rn.f32", "div.rn.f32", "sqrt.rn.f32"} <= set(
        found(r"\b(?:mul|add|div|sqrt)\.[\w.]*f32", eager)
    )
    assert not found(r"\bfma\.|\.approx|\.full|\.ftz", eager)
    assert found(r"\bdiv\.full|\bsqrt\.approx", fast) and "sqrt.rn" not in fast


def test_one_rounding_inside_an_op():
    """What nvcc contracts inside one kernel of eager's is one fma here too."""
    x, y, z = (torch.empty(4096) for _ in range(3))
    for function in (
        lambda x, y, z: torch.add(x, y, alpha=3), lambda x, y, z: torch.sub(x, y, alpha=3),
        lambda x, y, z: torch.addcmul(x, y, z),
        lambda x, y, z: torch.addcmul(x, y, z, value=0.3), lambda x, y, z: torch.addcdiv(x, y, z, value=0.3),
    ):  # fmt: skip
        text = ptx(function, x, y, z, numerics="eager")
        assert found(r"\bfma\.[\w.]*", text) == ["fma.rn.f32"], text


def test_division_by_a_number_is_a_product():
    text = ptx(lambda x: x / 3.0, torch.empty(4096), numerics="eager")
    assert not found(r"\bdiv\.", text) and found(r"\bmul\.rn\.f32", text)


UNARY = (
    "exp",
    "exp2",
    "expm1",
    "log",
    "log2",
    "log1p",
    "sin",
    "cos",
    "tan",
    "asin",
    "atan",
    "sinh",
    "tanh",
    "erf",
    "erfc",
    "sigmoid",
    "rsqrt",
)


def test_maths_library_keeps_denormals():
    """No approximation of Triton's own (tanh.approx, sin.approx, div.full), and nothing but approximations' steps
    flushes to zero.
    """
    source = (
        "@triton.jit\ndef k(x, o, B: tl.constexpr):\n    i = tl.arange(0, B)\n    v = tl.load(x + i)\n    tl.store(o "
        "+ i, {})\n"
    )
    specs = [
        KernelSpec(
            source.format(table.OPS[name].text("v", exact=True)),
            "k",
            ("*fp32", "*fp32"),
            (("B", 128),),
            fp_fusion=False,
        )
        for name in UNARY
    ]
    for name, done in zip(UNARY, compile_kernels(specs), strict=True):
        assert not found(r"\b(?:tanh|sin|cos)\.approx|\bdiv\.full|\b(?:fma|mul|add|sub)\.\w+\.ftz", done.ptx), name
        assert ("rsqrt.approx.f32" in done.ptx) == (name == "rsqrt"), name


# -- reductions at awkward magnitudes ----------------------------------------------------------------------------------
def spread(*shape):
    """Values from -1e4 to 1e4."""
    return (torch.rand(*shape) * 2 - 1) * 1e4


# name: function, values, and how many ulp of its result one rounding of the mean costs: torch sums up in float64 on a
# CPU, not on a GPU
REDUCTIONS = {
    "softmax": (lambda x: x.softmax(-1), spread, 0),
    "log_softmax": (lambda x: x.log_softmax(-1), spread, 0),
    "logsumexp": (lambda x: x.logsumexp(-1), spread, 0),
    "logsumexp far below": (lambda x: x.logsumexp(-1), lambda *s: spread(*s) - 2e4, 0),
    "var_mean": (lambda x: torch.var_mean(x, -1), lambda *s: torch.randn(*s) + 1e4, 2),
    "layer_norm": (lambda x: F.layer_norm(x, x.shape[-1:]), lambda *s: torch.randn(*s) * 30 + 1e4, 333),
    "rms_norm": (lambda x: F.rms_norm(x, x.shape[-1:]), spread, 0),
    "l2_norm": (lambda x: F.normalize(x, dim=-1), spread, 0),
    "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), lambda *s: torch.randn(*s) * 30 + 1e4, 333),
    "mean": (lambda x: x.mean(-1), lambda *s: torch.randn(*s) + 1e4, 0),
    "column sum": (lambda x: x.sum(0), spread, 0),
    "sum of cancelling": (lambda x: torch.cat((x, -x), -1).sum(-1), spread, 0),
    "amax": (lambda x: x.amax(-1), spread, 0),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_at_awkward_magnitudes(name, dtype, device, fuse):
    """Short rows, odd rows and rows too long for one tile: at most twice eager's error against float64, and two ulp of
    the largest.
    """
    function, make, conditioned = REDUCTIONS[name]
    slack = conditioned * torch.finfo(torch.float32).eps if device == "cpu" else 0.0
    for shape, numerics in (((5, 1023), "fast"), ((6, 64), "eager"), ((2, 40000), "fast")):
        x = make(*shape).to(device, dtype)
        pairs = ((fuse(function, numerics=numerics), x), (function, x), (function, x.double()))
        for ours, eager, exact in zip(*(torch.utils._pytree.tree_leaves(f(v)) for f, v in pairs), strict=True):
            error, most = difference(ours, exact), 2 * difference(eager, exact) + 2 * torch.finfo(dtype).eps + slack
            assert math.isfinite(error) and error <= most, f"{shape}: {error:.2e}, allowed {most:.2e}"


# -- rows of every kind ------------------------------------------------------------------------------------------------
def rows_of_every_kind(columns, dtype):
    """One row of each kind that rounding, overflow and infinities treat apart: {kind: row}."""
    info, normal = torch.finfo(dtype), torch.randn(columns)
    big = min(info.max, 1e18) / 8
    middle = columns // 2
    one = lambda value: normal.index_fill(0, torch.tensor(middle), value)  # noqa: E731
    rows = {
        "normal": normal,
        "far from zero": normal + 1e4,
        "large": (torch.rand(columns) * 2 - 1) * big,
        "tiny": normal * info.tiny * 64,
        "constant": torch.full((columns,), 3.25),
        "zero": torch.zeros(columns),
        "one outlier": one(big),
        "+inf": one(math.inf),
        "-inf": one(-math.inf),
        "both": one(math.inf).index_fill(0, torch.tensor(0), -math.inf),
        "nan": one(math.nan),
        "all -inf": torch.full((columns,), -math.inf),
        "all +inf": torch.full((columns,), math.inf),
    }
    return {kind: row.to(dtype) for kind, row in rows.items()}


ROW_WISE = {
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "l2_norm": lambda x: F.normalize(x, dim=-1),
    "var_mean": lambda x: torch.var_mean(x, -1),
    "std": lambda x: x.std(-1),
    "mean": lambda x: x.mean(-1),
    "sum": lambda x: x.sum(-1),
    "amax": lambda x: x.amax(-1),
    "norm": lambda x: x.norm(dim=-1),
    "group_norm": lambda x: F.group_norm(x[:, :, None], 2) if x.shape[1] > 2 else x * 1,
    "masked softmax": lambda x: x.masked_fill(torch.arange(x.shape[1], device=x.device) % 3 == 1, -math.inf).softmax(
        -1
    ),
    "max": lambda x: x.max(-1),
    "argmin": lambda x: x.argmin(-1),
    "cross_entropy": lambda x: F.cross_entropy(
        x, torch.zeros(x.shape[0], dtype=torch.int64, device=x.device), reduction="none"
    ),
}


def with_gradients(function, x):
    """Every output of a function of rows, and the gradient of x."""
    x = x.detach().requires_grad_()
    outputs = [o for o in torch.utils._pytree.tree_leaves(function(x)) if isinstance(o, torch.Tensor)]
    smooth = [o for o in outputs if o.requires_grad]
    given = [torch.arange(o.numel(), device=o.device).mul(0.7).sin().view(o.shape).to(o.dtype) for o in smooth]
    return [o.detach() for o in outputs] + list(torch.autograd.grad(smooth, [x], given) if smooth else ())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ROW_WISE)
def test_rows_of_every_kind(name, dtype, device, fuse):
    """Forward and backward, row by row: no worse than twice eager's error and 2 ulp of the row's largest; NaN and
    infinity where eager or float64 has them (eager's eps of 1e-12 is 0 in float16, ours is not).
    """
    wrong = []
    for columns in (66, 1):
        kinds = rows_of_every_kind(columns, dtype)
        if name in (
            "norm",
            "std",
        ):  # squares of tiny numbers are 0 in float32, as in torch's CUDA kernels; its CPU kernels take them in float64
            del kinds["tiny"]
        x = torch.stack(list(kinds.values())).to(device)
        runs = (
            with_gradients(f, v)
            for f, v in ((fuse(ROW_WISE[name]), x), (ROW_WISE[name], x), (ROW_WISE[name], x.double()))
        )
        for place, (ours, eager, exact) in enumerate(zip(*runs, strict=True)):
            for row, kind in enumerate(kinds):
                got, want, true = ours[row], eager[row], exact[row]
                error, most = difference(got, true), 2 * difference(want, true) + 2 * torch.finfo(dtype).eps
                right = any(
                    torch.equal(got.isnan(), o.isnan()) and torch.equal(got.isinf(), o.isinf())
                    for o in (want, true.to(got.dtype))
                )
                cancelled = (
                    columns == 1
                    and got.is_floating_point()
                    and torch.allclose(got.double(), true, rtol=0, atol=1e-7, equal_nan=True)
                )  # a gradient of 0
                if not right or (error > most and not cancelled):
                    wrong.append(
                        f"{columns} columns, {kind}, result {place}: {error:.1e}, allowed {most:.1e}; {got} {want}"[
                            :300
                        ]
                    )
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0)], ids=str)
@pytest.mark.parametrize("name", ["softmax", "log_softmax", "sum", "layer_norm", "rms_norm", "mean", "l2_norm"])
def test_empty_rows(name, shape, fuse):
    x = torch.empty(shape)
    for ours, eager in zip(*(with_gradients(f, x) for f in (fuse(ROW_WISE[name]), ROW_WISE[name])), strict=True):
        assert ours.shape == eager.shape and torch.equal(ours.isnan(), eager.isnan())
