"""THE op table: one row an op, with its Triton spelling, dtype rule, ATen names and weight.

In: an ATen overload, its operands (expressions or Python numbers) and the dtype of its result. Out: an expression whose
ops are rows of this table; for the renderer, each row's Triton text.

    >>> lower_pointwise("mul.Tensor", torch.float32, (x, 2.0))
    Compute(float32, 'mul', (x, Const(float32, 2.0)))
    >>> OPS["mul"].spelling
    '{0} * {1}'

In a kernel a value is held in its compute type (see `STORAGE`): the half and fp8 types in float32, everything else in
itself. Spellings take operands that are Triton values of these types, constants included (`tl.full((), 2.0,
tl.float32)` or a name bound to one), and write each operand exactly once unless they are comparisons of an operand with
itself. `fj` is fusejit.runtime.kernels.device. An overload that is not here, or not for a dtype, becomes an extern
call.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import Unsupported
from ..ir.expr import Expr, cast, compute, const
from ..ir.reductions import REDUCTIONS, Reduction, names
from ..ir.size import Size, hint
from . import formulas as f
from .formulas import formula, working

FLOAT = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
INT = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
BOOL = frozenset({torch.bool})
FP8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
DTYPES: dict[str, frozenset[torch.dtype]] = {
    "float": FLOAT,
    "wide": FLOAT - frozenset(f.HALF),
    "int": INT,
    "integral": INT | BOOL,
    "number": FLOAT | INT,
    "any": FLOAT | INT | BOOL,
    "storable": FLOAT | INT | BOOL | FP8,
}

# How operands become the dtypes that an op wants: given the dtype of the result, the dtype in which operands meet
# (torch.result_type of them) and an operand's position, the dtype that operand is cast to; None leaves it alone.
RULES: dict[str, Callable[[torch.dtype, torch.dtype, int], torch.dtype | None]] = {
    "promote": lambda out, operands, i: out,
    "float": lambda out, operands, i: out,
    "compare": lambda out, operands, i: operands,
    "bool": lambda out, operands, i: torch.bool,
    "test": lambda out, operands, i: None,
    "where": lambda out, operands, i: torch.bool if i == 0 else out,
    "fill": lambda out, operands, i: torch.bool if i == 1 else out,
    "cast": lambda out, operands, i: None,
}


@dataclass(frozen=True, slots=True)
class Op:
    """One row of the op table.

    Args:
        name: what `Compute.op` or `Reduce.op` says.
        spelling: Triton text of one call, operands as {0}, {1}, ...; "" where `build` always expands to other rows.
        aten: the overloads that this row implements, as "add.Tensor" (torch.ops.aten) or "prims.add.default".
        rule: a key of RULES.
        dtypes: a key of DTYPES: the dtypes that the op is computed in (of the operands, for compare and test rules).
        build: build(dtype, *args, **kwargs) -> Expr for calls that are not just operands; operands are cast already.
        weight: its size in a kernel, in additions.
        expensive: worth a buffer rather than being computed again by each reader.
        exact: the spelling with `numerics="eager"`, where it differs.
        reduces: whether it is a reduction: all else of that is in its row of ir/reductions.py.
    """

    name: str
    spelling: str
    aten: tuple[str, ...] = ()
    rule: str = "promote"
    dtypes: str = "number"
    build: Callable[..., Expr] | None = None
    weight: int = 1
    exact: str = ""
    reduces: bool = False

    @property
    def expensive(self) -> bool:
        return self.weight >= 10

    @property
    def literals(self) -> bool:
        """Whether a Python number may stand for an operand: operators take one, device functions need a typed value."""
        return self.spelling != "" and not re.search(r"\w\(", self.spelling + self.exact)

    def takes(self, dtype: torch.dtype) -> bool:
        """Whether the op is right in `dtype`."""
        return dtype in DTYPES[self.dtypes]

    def text(self, *operands: str, exact: bool = False) -> str:
        """The Triton text of a call with these operands."""
        return (self.exact if exact and self.exact else self.spelling).format(*operands)


@dataclass(frozen=True, slots=True)
class Storage:
    """How a dtype lives in memory and in a kernel: pointer type, compute type, and the texts that load and store it."""

    pointer: str
    compute: str
    load: str = "{0}"
    store: str = "{0}"
    round: str = ""  # a value of the compute type rounded to this dtype and back

    @property
    def bytes(self) -> int:
        return _BYTES[self.pointer]


# torch's conversion to e4m3 gives NaN beyond 448 in some versions and saturates in others
_E4M3 = "fj.to_e4m3_nan({0})" if torch.tensor(1e6).to(torch.float8_e4m3fn).isnan() else "fj.to_e4m3({0})"
_BYTES = {"*fp64": 8, "*i64": 8, "*fp32": 4, "*i32": 4, "*fp16": 2, "*bf16": 2, "*i16": 2}
_BYTES |= dict.fromkeys(("*i8", "*u8", "*i1"), 1)
STORAGE: dict[torch.dtype, Storage] = {
    torch.float64: Storage("*fp64", "tl.float64"),
    torch.float32: Storage("*fp32", "tl.float32"),
    torch.float16: Storage(
        "*fp16", "tl.float32", "{0}.to(tl.float32)", "{0}.to(tl.float16)", "{0}.to(tl.float16).to(tl.float32)"
    ),
    torch.bfloat16: Storage(
        "*bf16", "tl.float32", "fj.from_bf16({0})", "fj.to_bf16({0})", "fj.from_bf16(fj.to_bf16({0}))"
    ),
    # as bytes: Triton has no pointers to fp8 for a GPU that does not convert them itself
    torch.float8_e4m3fn: Storage("*u8", "tl.float32", "fj.from_e4m3({0})", _E4M3, f"fj.from_e4m3({_E4M3})"),
    torch.float8_e5m2: Storage(
        "*u8", "tl.float32", "fj.from_e5m2({0})", "fj.to_e5m2({0})", "fj.from_e5m2(fj.to_e5m2({0}))"
    ),
    torch.int64: Storage("*i64", "tl.int64"),
    torch.int32: Storage("*i32", "tl.int32"),
    torch.int16: Storage("*i16", "tl.int16"),
    torch.int8: Storage("*i8", "tl.int8"),
    torch.uint8: Storage("*u8", "tl.uint8"),
    torch.bool: Storage("*i1", "tl.int1"),
}


def fill_of(value: bool | int | float, dtype: torch.dtype) -> bool | int | float:
    """Return a number as what is loaded in its place where `dtype` lives in memory: the byte of an fp8 number."""
    return int(torch.tensor(value, dtype=torch.float32).to(dtype).view(torch.uint8)) if dtype in FP8 else value


def cast_spelling(source: torch.dtype, target: torch.dtype, implicit: bool = False) -> str:
    """Return the Triton text that converts {0}, a value of `source`'s compute type, to `target`'s.

    With `implicit` a cast to a half type does not round (numerics "fast" keeps a chain in float32). Float to integer
    truncates and wraps as torch does on a CPU, to bool tests against zero.
    """
    if target is torch.bool:
        return "{0}" if source is torch.bool else "({0} != 0)"
    before, after = STORAGE[source].compute, STORAGE[target].compute
    if target in INT:
        if source in INT or source is torch.bool:
            return "{0}" if before == after else f"{{0}}.to({after})"
        return f"fj.to_int({{0}}, {after})"
    text = "{0}" if before == after else f"{{0}}.to({after})"
    rounds = STORAGE[target].round
    if not rounds or source is target or (implicit and target in f.HALF):
        return text
    return rounds.format(text)


def _row(name: str, spelling: str, overloads: str = "", dtypes: str = "number", weight: int = 1, **more: Any) -> Op:
    return Op(name, spelling, names(overloads), dtypes=dtypes, weight=weight, **more)


def _unary(name: str, spelling: str = "", overloads: str = "", weight: int = 2) -> Op:
    return _row(name, spelling or f"fj.{name}({{0}})", overloads or name, "float", weight, rule="float")


def _formula(overloads: str, text: str, dtypes: str = "float", weight: int = 4, rule: str = "float") -> Op:
    name = names(overloads)[0].partition(".")[0]
    return _row(name, "", overloads, dtypes, weight, rule=rule, build=formula(text))


def _compare(name: str, sign: str) -> Op:
    return _row(
        name, f"({{0}} {sign} {{1}})", f"{name}: Tensor Scalar", "any", rule="compare", build=f.comparison(name)
    )


_ROWS: list[Op] = [
    # arithmetic
    _row("add", "({0} + {1})", "add: Tensor Scalar", "any", build=f.add),
    _row("sub", "({0} - {1})", "sub: Tensor Scalar, subtract: Tensor Scalar", build=f.sub),
    _row("rsub", "", "rsub: Tensor Scalar", build=f.rsub),
    _row("mul", "({0} * {1})", "mul: Tensor Scalar, multiply: Tensor Scalar", "any", build=f.mul),
    _row(
        "div",
        "({0} / {1})",
        "div: Tensor Scalar, true_divide: Tensor Scalar, divide: Tensor Scalar",
        "float",
        2,
        rule="float",
        build=f.div,
        exact="fj.div_rn({0}, {1})",
    ),
    # a * b + c with one rounding: what nvcc makes of it inside one op of eager's (between ops it cannot)
    _row("fma", "fj.fma({0}, {1}, {2})", "", "float"),
    _row("div_mode", "", "div: Tensor_mode Scalar_mode, divide: Tensor_mode Scalar_mode", build=f.div),
    _row("div_rn", "fj.div_rn({0}, {1})", "", "float", 3),
    _row("floor_div", "fj.floor_div({0}, {1})", "floor_divide: default Scalar", weight=8),
    _row("trunc_div", "fj.trunc_div({0}, {1})", weight=4),
    _row("remainder", "fj.remainder({0}, {1})", "remainder: Tensor Scalar Scalar_Tensor", weight=8),
    _row("fmod", "fj.fmod({0}, {1})", "fmod: Tensor Scalar", weight=8),
    # coordinates that no stride expresses: never negative, so Triton's own division rounds as they need
    _row("index_div", "({0} // {1})", dtypes="int"),
    _row("index_mod", "({0} % {1})", dtypes="int"),
    _row("checked_index", "fj.wrap({0}, {1})", dtypes="int"),  # the renderer adds the assertion that it is in bounds
    _row("checked_place", "{0}", dtypes="int"),  # the same, of what must not be negative
    _row("checked_probability", "{0}", "fusejit.probability", "float"),  # and that it is in [0, 1]
    _row("neg", "fj.neg({0})", "neg, negative"),
    _row("abs", "tl.abs({0})", "abs, absolute", "any", build=f.by_kind("abs", "pass")),
    _row("pass", "{0}", "positive, conj_physical, real", "any", build=lambda dtype, x: cast(x, dtype)),
    _row("sign", "fj.sign({0})", "sign, sgn", "any", build=f.sign),
    _row("square", "", "square", "number", build=formula("x: x * x")),
    _row("reciprocal", "(1.0 / {0})", "reciprocal", "float", 2, rule="float", exact="fj.reciprocal_rn({0})"),
    _row("maximum", "fj.maximum({0}, {1})", "maximum, max: other", "any", build=f.by_kind("maximum", "logical_or")),
    _row("minimum", "fj.minimum({0}, {1})", "minimum, min: other", "any", build=f.by_kind("minimum", "logical_and")),
    _row("fmax", "fj.fmax({0}, {1})", "fmax", "any", build=f.by_kind("fmax", "logical_or")),
    _row("fmin", "fj.fmin({0}, {1})", "fmin", "any", build=f.by_kind("fmin", "logical_and")),
    _row("clamp", "", "clamp: default Tensor, clip: default Tensor", build=f.clamp),
    _row("clamp_min", "", "clamp_min: default Tensor", build=f.clamp),
    _row("clamp_max", "", "clamp_max: default Tensor", build=f.clamp_max),
    _row("pow", "fj.pow({0}, {1})", "pow: Tensor_Tensor Tensor_Scalar Scalar", "number", 12, build=f.power),
    _row("int_pow", "fj.int_pow({0}, {1})", "", "int", 24),
    _row("sqrt", "tl.sqrt({0})", "sqrt", "float", 2, rule="float", exact="fj.sqrt_rn({0})"),
    _unary("rsqrt"),
    _row("hypot", "fj.hypot({0}, {1})", "hypot", "float", 8),
    _row("copysign", "fj.copysign({0}, {1})", "copysign: Tensor Scalar", "float", 2, rule="float"),
    _row("nextafter", "fj.nextafter({0}, {1})", "nextafter", "wide", 4),
    _row("addcmul", "", "addcmul", "number", 3, build=f.addcmul),
    _formula("addcdiv", "x, a, b, value=1.0: fma(value, a / b, x)"),
    _formula(
        "lerp: Scalar Tensor",
        "a, end, weight: fma(weight, end - a, a) if abs(weight) < 0.5 else fma(a - end, 1 - weight, end)",
    ),
    _formula("heaviside", "x, v: v if x == 0 else (1 if x > 0 else 0)", "number", rule="promote"),
    _formula("angle", "x: x if isnan(x) else (pi if x < 0 else 0)"),
    _formula("deg2rad", "x: x * (pi / 180)"),
    _formula("rad2deg", "x: x * (180 / pi)"),
    # rounding
    _row("floor", "tl.floor({0})", "floor", "any", build=f.integers_unchanged("floor")),
    _row("ceil", "tl.ceil({0})", "ceil", "any", build=f.integers_unchanged("ceil")),
    _row("trunc", "fj.trunc({0})", "trunc, fix", "any", build=f.integers_unchanged("trunc")),
    _row("round", "fj.round({0})", "round", "any", build=f.integers_unchanged("round")),
    _row("round_decimals", "", "round: decimals", "float", build=f.round_decimals),
    _formula("frac", "x: x - trunc(x)"),
    # exponentials and logarithms
    _unary("exp", weight=4),
    _unary("exp2", weight=3),
    _unary("expm1", weight=6),
    _unary("log", weight=6),
    _unary("log2", weight=6),
    _unary("log10", weight=6),
    _unary("log1p", weight=8),
    _row("logaddexp", "fj.logaddexp({0}, {1})", "logaddexp", "float", 12),
    _row("logaddexp2", "fj.logaddexp2({0}, {1})", "logaddexp2", "float", 12),
    _row("xlogy", "fj.xlogy({0}, {1})", "xlogy: Tensor Scalar_Self Scalar_Other", "float", 8, rule="float"),
    _row(
        "xlog1py",
        "fj.xlog1py({0}, {1})",
        "special_xlog1py: default self_scalar other_scalar",
        "float",
        10,
        rule="float",
    ),
    # trigonometric and hyperbolic
    *(_unary(n, weight=10) for n in ("sin", "cos", "tan")),
    *(_unary(n, weight=6) for n in ("asin", "acos", "atan", "sinh", "cosh", "tanh")),
    *(_unary(n, weight=10) for n in ("asinh", "acosh", "atanh")),
    _row("atan2", "fj.atan2({0}, {1})", "atan2", "float", 10, rule="float"),
    _unary("sinc", overloads="sinc", weight=12),
    # special functions
    _unary("erf", weight=5),
    _unary("erfc", weight=8),
    _unary("erfcx", overloads="special_erfcx", weight=10),
    _unary("erfinv", weight=10),
    _unary("lgamma", weight=20),
    _unary("digamma", weight=24),
    _unary("trigamma", overloads=" ", weight=20),
    _row("polygamma", "", "polygamma", "float", 24, rule="test", build=f.polygamma),
    _unary("i0", overloads="i0, special_modified_bessel_i0", weight=20),
    _unary("i0e", overloads="special_i0e", weight=20),
    _unary("i1", overloads="special_i1, special_modified_bessel_i1", weight=20),
    _unary("i1e", overloads="special_i1e", weight=20),
    *(_unary(f"bessel_{n}", overloads=f"special_bessel_{n}", weight=24) for n in ("j0", "j1", "y0", "y1")),
    _unary("spherical_bessel_j0", overloads="special_spherical_bessel_j0", weight=16),
    _unary("ndtr", overloads="special_ndtr", weight=8),
    _row("normcdf", "(0.5 * (1.0 + fj.erf({0} * 0.7071067811865476)))", "", "float", 6),
    _unary("ndtri", overloads="special_ndtri", weight=16),
    _unary("log_ndtr", overloads="special_log_ndtr", weight=20),
    _unary("entr", overloads="special_entr", weight=8),
    # comparisons and tests
    *(_compare(n, s) for n, s in (("eq", "=="), ("ne", "!="), ("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">="))),
    _row("isnan", "({0} != {0})", "isnan", "any", rule="test", build=f.float_test("isnan", False)),
    _row("isinf", "(tl.abs({0}) == float('inf'))", "isinf", "any", rule="test", build=f.float_test("isinf", False)),
    _row(
        "isfinite", "(tl.abs({0}) < float('inf'))", "isfinite", "any", rule="test", build=f.float_test("isfinite", True)
    ),
    _row("isposinf", "({0} == float('inf'))", "isposinf", "any", rule="test", build=f.float_test("isposinf", False)),
    _row("isneginf", "({0} == -float('inf'))", "isneginf", "any", rule="test", build=f.float_test("isneginf", False)),
    _row("signbit", "fj.signbit({0})", "signbit", "any", rule="test", build=f.signbit),
    # logic and bits
    _row("logical_and", "({0} & {1})", "logical_and", "any", rule="bool"),
    _row("logical_or", "({0} | {1})", "logical_or", "any", rule="bool"),
    _row("logical_xor", "({0} ^ {1})", "logical_xor", "any", rule="bool"),
    _row("logical_not", "({0} == 0)", "logical_not", "any", rule="bool"),
    *(
        _row(
            f"bitwise_{n}",
            f"({{0}} {s} {{1}})",
            f"bitwise_{n}: Tensor Scalar Scalar_Tensor, __{n}__: Tensor Scalar",
            "integral",
        )
        for n, s in (("and", "&"), ("or", "|"), ("xor", "^"))
    ),
    _row(
        "bitwise_not", "fj.bitwise_not({0})", "bitwise_not", "integral", build=f.by_kind("bitwise_not", "logical_not")
    ),
    *(
        _row(
            f"{n[0]}shift",
            f"fj.{n[0]}shift({{0}}, {{1}})",
            f"bitwise_{n}_shift: Tensor Tensor_Scalar Scalar_Tensor, __{n[0]}shift__: Tensor Scalar",
            "int",
            3,
        )
        for n in ("left", "right")
    ),
    # selection and casts
    _row(
        "where",
        "tl.where({0}, {1}, {2})",
        "where: self ScalarSelf ScalarOther Scalar",
        "any",
        rule="where",
        build=f.where,
    ),
    _row("masked_fill", "", "masked_fill: Scalar Tensor", "any", rule="fill", build=f.masked_fill),
    _row(
        "cast",
        "",
        "_to_copy, prims.convert_element_type, prims.device_put, clone, lift_fresh_copy, alias",
        "storable",
        rule="cast",
        build=lambda dtype, x, *_, **__: cast(x, dtype),
    ),
    _row("rounded", "{0}", "", "float"),  # to the dtype of the result, under every numerics: the renderer adds how
    _row("nan_to_num", "", "nan_to_num", "any", build=f.nan_to_num),
    # activations and their gradients
    _row("relu", "fj.relu({0})", "relu", "number"),
    _row("relu6", "", "relu6", "number", build=lambda dtype, x: f.clamp(dtype, x, 0, 6)),
    _row(
        "hardtanh",
        "",
        "hardtanh",
        "number",
        build=lambda dtype, x, min_val=-1, max_val=1: f.clamp(dtype, x, min_val, max_val),
    ),
    _row("sigmoid", "fj.sigmoid({0})", "sigmoid, special_expit", "float", 6, rule="float", exact="fj.sigmoid_rn({0})"),
    _formula("silu", "x: x / (1 + exp(-x))"),
    _row("gelu", "", "gelu", "float", 8, build=f.gelu),
    _formula(
        "elu",
        "x, alpha=1.0, scale=1.0, input_scale=1.0: expm1(x * input_scale) * (alpha * scale) if x <= 0 else x * scale",
    ),
    _formula("celu", "x, alpha=1.0: x if x > 0 else alpha * expm1(x / alpha)"),
    _formula("selu", "x: 1.0507009873554805 * x if x > 0 else expm1(x) * 1.7580993408473766"),
    _formula("leaky_relu", "x, negative_slope=0.01: x if x > 0 else x * negative_slope"),
    _formula("_prelu_kernel", "x, w: x if x > 0 else w * x"),
    _formula("softplus", "x, beta=1.0, threshold=20.0: x if x * beta > threshold else log1p(exp(x * beta)) / beta"),
    _formula("mish", "x: x * tanh(log1p(exp(x)))"),
    _formula("hardsigmoid", "x: minimum(maximum(x + 3, 0), 6) * (1 / 6)"),
    _formula("hardswish", "x: x * minimum(maximum(x + 3, 0), 6) * (1 / 6)"),
    _formula("hardshrink", "x, lambd=0.5: 0 if (x >= -lambd) & (x <= lambd) else x"),
    _formula("softshrink", "x, lambd=0.5: x - lambd if x > lambd else (x + lambd if x < -lambd else x * 0)"),
    _formula("threshold", "x, threshold, value: value if x <= threshold else x", "number", rule="promote"),
    _formula("log_sigmoid", "x: minimum(x, 0) - log1p(exp(-abs(x)))"),
    _row("logit", "", "logit, special_logit", "float", 8, build=f.logit),
    _formula("sigmoid_backward", "g, y: g * (1 - y) * y"),
    _formula("tanh_backward", "g, y: g * fma(-y, y, 1)"),
    _formula("silu_backward", "g, x: g * sigmoid(x) * fma(x, 1 - sigmoid(x), 1)"),
    _row("gelu_backward", "", "gelu_backward", "float", 12, build=f.gelu_backward),
    _formula("threshold_backward", "g, x, threshold: 0 if x <= threshold else g", "number", rule="promote"),
    _formula("leaky_relu_backward", "g, x, negative_slope, self_is_result: g if x > 0 else g * negative_slope"),
    _row("elu_backward", "", "elu_backward", "float", 8, build=f.elu_backward),
    _formula("hardtanh_backward", "g, x, min_val, max_val: 0 if (x <= min_val) | (x >= max_val) else g"),
    # eager multiplies by float32's 1 / 6 in every dtype
    _formula("hardsigmoid_backward", "g, x: g * 0.1666666716337204 if (x > -3) & (x < 3) else 0"),
    _formula(
        "softplus_backward",
        "g, x, beta, threshold: g if x * beta > threshold else g * exp(x * beta) / (exp(x * beta) + 1)",
    ),
    _formula(
        "mish_backward",
        "g, x: g * (tanh(softplus_(x)) + x * sigmoid(x) * (1 - tanh(softplus_(x)) * tanh(softplus_(x))))",
    ),
    _row("softplus_", "fj.softplus({0})", "", "float", 10),
]


def _prims(row: Op) -> tuple[str, ...]:
    # torch.prims has the same pointwise ops under the same names; only those whose arguments are operands alone are
    # taken
    plain = row.spelling and row.name in _PRIMS
    return (f"prims.{row.name}.default",) if plain else ()


_PRIMS = {
    "abs",
    "acos",
    "acosh",
    "add",
    "asin",
    "asinh",
    "atan",
    "atan2",
    "atanh",
    "bitwise_and",
    "bitwise_not",
    "bitwise_or",
    "bitwise_xor",
    "ceil",
    "cos",
    "cosh",
    "digamma",
    "div",
    "eq",
    "erf",
    "erfc",
    "erfcx",
    "exp",
    "exp2",
    "expm1",
    "floor",
    "fmax",
    "fmin",
    "fmod",
    "ge",
    "gt",
    "hypot",
    "isfinite",
    "le",
    "lgamma",
    "log",
    "log10",
    "log1p",
    "log2",
    "lt",
    "maximum",
    "minimum",
    "mul",
    "ne",
    "neg",
    "nextafter",
    "pow",
    "reciprocal",
    "remainder",
    "round",
    "rsqrt",
    "sign",
    "signbit",
    "sin",
    "sinh",
    "sqrt",
    "sub",
    "tan",
    "tanh",
    "trunc",
    "where",
    "ndtri",
}


_PLACEMENT = {
    "dtype",
    "layout",
    "device",
    "pin_memory",
    "non_blocking",
    "memory_format",
}  # the caller's business, not the value's


def reducing(row: Reduction) -> Op:
    """Return a reduction as an op of this table."""
    return Op(row.name, row.reduced("{0}", axis=1), row.aten, dtypes=row.dtypes, weight=row.weight, reduces=True)


OPS: dict[str, Op] = {row.name: row for row in (*_ROWS, *map(reducing, REDUCTIONS.values()))}
POINTWISE: dict[str, Op] = {n: row for row in _ROWS for n in (*row.aten, *_prims(row))}


def result_type(args: Sequence[Any]) -> torch.dtype:
    """Return the dtype in which operands meet: expressions count as tensors with dimensions, Python numbers by
    category.
    """
    tensors = [a.dtype for a in args if hasattr(a, "dtype")]
    result = tensors[0]
    for dtype in tensors[1:]:
        result = torch.promote_types(result, dtype)
    for number in (hint(a) for a in args if isinstance(a, (bool, int, float, Size))):
        if isinstance(number, float) and not result.is_floating_point:
            result = torch.get_default_dtype()
        elif result is torch.bool and not isinstance(number, bool):
            result = torch.int64
    return result


def lower_pointwise(
    overload: str,
    out_dtype: torch.dtype,
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    operand_dtype: torch.dtype | None = None,
) -> Expr:
    """Return the expression of one pointwise ATen call.

    Args:
        overload: a key of POINTWISE.
        out_dtype: dtype of the call's result, as its fake tensor says.
        args, kwargs: the call's arguments: expressions for tensors (already broadcast), Python numbers, None, strings.
        operand_dtype: the dtype in which a comparison's operands meet (torch.result_type of the real operands); None
            takes every expression for a tensor with dimensions.

    Raises:
        Unsupported: the table has no row for the overload, or not in this dtype or with these arguments.
    """
    row = POINTWISE.get(overload)
    if row is None:
        raise Unsupported(overload, "not in the op table")
    tensors = [a for a in args if hasattr(a, "dtype") and not isinstance(a, torch.dtype)]
    if operand_dtype is None:
        operand_dtype = result_type(args) if tensors else out_dtype
    computed_in = {"compare": operand_dtype, "test": operand_dtype, "bool": operand_dtype}.get(row.rule, out_dtype)
    for dtype in (computed_in, *(t.dtype for t in tensors)):
        if not (row.takes(dtype) or (dtype is not computed_in and dtype in DTYPES["any"])):
            raise Unsupported(overload, f"the op table does not have it for {dtype}")
    rule = RULES[row.rule]
    operands: list[Any] = []
    for i, value in enumerate(args):
        dtype = rule(out_dtype, operand_dtype, i)
        is_expr = hasattr(value, "dtype") and not isinstance(value, torch.dtype)
        operands.append(cast(value, dtype) if is_expr and dtype is not None else value)
    if row.build is not None:
        meaning = {k: v for k, v in (kwargs or {}).items() if k not in _PLACEMENT}
        result = row.build(operand_dtype if row.rule == "compare" else out_dtype, *operands, **meaning)
    else:
        wanted = [rule(out_dtype, operand_dtype, i) or out_dtype for i in range(len(operands))]
        result = compute(row.name, *(_number(v, d) for v, d in zip(operands, wanted, strict=True)), dtype=out_dtype)
    return result if result.dtype is out_dtype else cast(result, out_dtype)


def _number(value: Any, dtype: torch.dtype) -> Expr:
    # a Python number next to a half tensor stays in the working dtype: eager computes with it unrounded
    return const(value, working(dtype)) if isinstance(value, (bool, int, float, Size)) else value


__all__ = [
    "OPS",
    "POINTWISE",
    "RULES",
    "STORAGE",
    "Op",
    "Storage",
    "cast_spelling",
    "lower_pointwise",
    "reducing",
    "result_type",
]
