"""Ops of ATen that are several ops of the table: formulas, and the calls whose meaning depends on Python arguments.

In: the dtype of the result, operands (expressions or Python numbers), keyword arguments. Out: one expression.

    >>> formula("x: x / (1 + exp(-x))")(torch.float32, x)        # silu
    Compute(float32, 'div', (x, Compute(float32, 'add', ...)))

A formula is computed in the working dtype, float32 for the half types, and only its last step has the dtype of the
result: so it is rounded once, as one eager kernel would.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from typing import Any

import torch

from ...errors import Unsupported
from ..ir.expr import Compute, Const, Expr, cast, compute, const
from ..ir.size import Size

Number = bool | int | float
HALF = (torch.float16, torch.bfloat16)
TESTS = {
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "isnan",
    "isinf",
    "isfinite",
    "signbit",
    "logical_and",
    "logical_or",
    "logical_not",
}
_BINARY = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "div",
    ast.BitAnd: "logical_and",
    ast.BitOr: "logical_or",
}
_COMPARE = {ast.Eq: "eq", ast.NotEq: "ne", ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge"}
_MATH = {"pi": math.pi, "inf": math.inf, "nan": math.nan, "sqrt2": math.sqrt(2), "ln2": math.log(2), "euler": math.e}


def working(dtype: torch.dtype) -> torch.dtype:
    """The dtype that an op on `dtype` is computed in: float32 for the half types, else the dtype itself."""
    return torch.float32 if dtype in HALF else dtype


def operand(x: Expr | Number, dtype: torch.dtype) -> Expr:
    """Return an operand of `dtype`: expressions are cast, Python numbers become constants."""
    return const(x, dtype) if isinstance(x, (bool, int, float, Size)) else cast(x, dtype)


def retype(x: Expr, dtype: torch.dtype) -> Expr:
    """Return `x`, whose last step now has the half type `dtype` (its operands stay in the working dtype)."""
    if x.dtype is dtype:
        return x
    if isinstance(x, Compute) and dtype in HALF and x.dtype is torch.float32 and x.op != "cast":
        return compute(x.op, *x.args, dtype=dtype)
    return cast(x, dtype)


class _Evaluate:
    """Turns one parsed formula into an expression of `dtype`."""

    def __init__(self, dtype: torch.dtype, names: dict[str, Expr]) -> None:
        self.dtype, self.names = dtype, names

    def __call__(self, node: ast.expr) -> Expr:
        match node:
            case ast.Constant(value=value):
                return const(value, self.dtype)  # type: ignore[arg-type]
            case ast.Name(id=name):
                return self.names[name] if name in self.names else const(_MATH[name], self.dtype)
            case ast.UnaryOp(op=ast.USub(), operand=inner):
                x = self(inner)
                return const(-x.value, x.dtype) if isinstance(x, Const) else compute("neg", x, dtype=self.dtype)
            case ast.BinOp(left=left, op=op, right=right):
                return self.apply(_BINARY[type(op)], self(left), self(right))
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return self.apply(_COMPARE[type(op)], self(left), self(right))
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return self.apply("where", self(test), self(body), self(orelse))
            case ast.Call(func=ast.Name(id=name), args=args):
                return self.apply(name, *(self(a) for a in args))
        raise ValueError(f"a formula cannot contain {ast.unparse(node)!r}")

    def apply(self, op: str, *args: Expr) -> Expr:
        if op == "mul" and isinstance(args[0], Const) and args[0].value == 1:
            return args[1]  # the default value=1 of addcmul and its like
        folded = _fold(op, args)
        if folded is not None:
            return const(folded, args[0].dtype)
        return compute(op, *args, dtype=torch.bool if op in TESTS else self.dtype)


def _fold(op: str, args: tuple[Expr, ...]) -> float | None:
    # formulas may spell constants as 2 / pi; only what Python computes as torch would is folded
    if len(args) != 2 or not all(isinstance(a, Const) for a in args) or not args[0].dtype.is_floating_point:
        return None
    a, b = (a.value for a in args)  # type: ignore[union-attr]
    if isinstance(a, Size) or isinstance(b, Size):
        return None
    if op == "div" and b:
        return a / b
    return {"add": a + b, "sub": a - b, "mul": a * b}.get(op)


def formula(text: str) -> Callable[..., Expr]:
    """Return the build function of a formula ``"x, slope=0.01: where(x > 0, x, x * slope)"``.

    Names before the colon are operands, with defaults as in a lambda; `a if c else b` is `where`, `&` and `|` join
    conditions, and any op of the table can be called by its name.
    """
    parsed = ast.parse(f"lambda {text}", mode="eval").body
    assert isinstance(parsed, ast.Lambda)
    names = [a.arg for a in parsed.args.args]
    defaults = dict(zip(reversed(names), (ast.literal_eval(d) for d in reversed(parsed.args.defaults)), strict=False))

    def build(dtype: torch.dtype, *args: Any, **kwargs: Any) -> Expr:
        work = working(dtype)
        given = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        operands = {n: operand(given[n], work) if n in given else None for n in names}
        missing = [n for n, v in operands.items() if v is None]
        if missing or set(given) - set(names):
            raise TypeError(
                f"formula {text!r} was called without {missing} or with unknown {sorted(set(given) - set(names))}"
            )
        return retype(_Evaluate(work, operands)(parsed.body), dtype)  # type: ignore[arg-type]

    return build


def call(op: str, dtype: torch.dtype, *args: Expr | Number) -> Expr:
    """Return op(args) of `dtype` with all operands in the dtype's working dtype."""
    work = working(dtype)
    return compute(op, *(operand(a, work) for a in args), dtype=dtype)


# -- calls whose meaning depends on Python arguments -------------------------------------------------------------------


def add(dtype: torch.dtype, x: Expr | Number, y: Expr | Number, alpha: Number = 1) -> Expr:
    """x + alpha * y; `or` of bools."""
    if dtype is torch.bool:
        return compute("logical_or", operand(x, dtype), operand(y if alpha else False, dtype), dtype=dtype)
    if alpha == 1:
        return call("add", dtype, x, y)
    return (
        call("fma", dtype, y, alpha, x)
        if dtype.is_floating_point
        else call("add", dtype, x, call("mul", dtype, y, alpha))
    )


def sub(dtype: torch.dtype, x: Expr | Number, y: Expr | Number, alpha: Number = 1) -> Expr:
    """x - alpha * y."""
    if alpha == 1:
        return call("sub", dtype, x, y)
    return (
        call("fma", dtype, y, -alpha, x)
        if dtype.is_floating_point
        else call("sub", dtype, x, call("mul", dtype, y, alpha))
    )


def rsub(dtype: torch.dtype, x: Expr, y: Expr | Number, alpha: Number = 1) -> Expr:
    """y - alpha * x."""
    return sub(dtype, y, x, alpha)


def mul(dtype: torch.dtype, x: Expr | Number, y: Expr | Number) -> Expr:
    """x * y; `and` of bools."""
    if dtype is torch.bool:
        return compute("logical_and", operand(x, dtype), operand(y, dtype), dtype=dtype)
    return call("mul", dtype, x, y)


def div(dtype: torch.dtype, x: Expr | Number, y: Expr | Number, rounding_mode: str | None = None) -> Expr:
    """x / y, true, floored or truncated. By a Python number eager's CUDA kernel multiplies with the number's
    reciprocal.
    """
    if rounding_mode is None and dtype.is_floating_point and isinstance(y, (bool, int, float)):
        return call("mul", dtype, x, inverse(y, dtype))
    return call({None: "div", "floor": "floor_div", "trunc": "trunc_div"}[rounding_mode], dtype, x, y)


def inverse(x: Number, dtype: torch.dtype) -> float:
    """Return 1 / x, both as the working dtype of `dtype` holds them."""
    return float(1.0 / torch.tensor(float(x), dtype=working(dtype)))


def addcmul(dtype: torch.dtype, x: Expr | Number, a: Expr | Number, b: Expr | Number, value: Number = 1) -> Expr:
    """x + value * (a * b)."""
    if not dtype.is_floating_point:
        return _ADDCMUL_INT(dtype, x, a, b, value)
    return call("fma", dtype, a, b, x) if value == 1 else _ADDCMUL(dtype, x, a, b, value)


def logical_in_bool(op: str) -> Callable[..., Expr]:
    """Return the build of a pointwise op that is the logical op `op` on bools."""

    def build(dtype: torch.dtype, *args: Expr | Number) -> Expr:
        return compute(op, *(operand(a, dtype) for a in args), dtype=dtype)

    return build


def by_kind(name: str, for_bool: str) -> Callable[..., Expr]:
    """Return a build: op `name` for numbers, op `for_bool` for bools."""

    def build(dtype: torch.dtype, *args: Expr | Number) -> Expr:
        return logical_in_bool(for_bool)(dtype, *args) if dtype is torch.bool else call(name, dtype, *args)

    return build


def integers_unchanged(name: str) -> Callable[..., Expr]:
    """Return a build: op `name` for floats; integers and bools pass through (floor, round, ...)."""

    def build(dtype: torch.dtype, x: Expr | Number) -> Expr:
        return call(name, dtype, x) if dtype.is_floating_point else operand(x, dtype)

    return build


def comparison(name: str) -> Callable[..., Expr]:
    """Return the build of a comparison; `dtype` is the dtype in which the operands are compared."""

    def build(dtype: torch.dtype, x: Expr | Number, y: Expr | Number) -> Expr:
        a, b = (operand(v, dtype) for v in (x, y))
        if dtype is torch.bool and name not in ("eq", "ne"):
            a, b = cast(a, torch.int32), cast(b, torch.int32)
        return compute(name, a, b, dtype=torch.bool)

    return build


def float_test(name: str, for_integers: bool) -> Callable[..., Expr]:
    """Return the build of a test of floats that has the same answer for every integer."""

    def build(dtype: torch.dtype, x: Expr) -> Expr:
        return compute(name, x, dtype=torch.bool) if x.dtype.is_floating_point else const(for_integers, torch.bool)

    return build


def signbit(dtype: torch.dtype, x: Expr) -> Expr:
    """The sign bit of a float, x < 0 of an integer."""
    if x.dtype.is_floating_point:
        return compute("signbit", x, dtype=torch.bool)
    return (
        const(False, torch.bool)
        if x.dtype in (torch.bool, torch.uint8)
        else compute("lt", x, const(0, x.dtype), dtype=torch.bool)
    )


def sign(dtype: torch.dtype, x: Expr) -> Expr:
    """-1, 0, 1 or NaN... of which torch's sign of NaN is 0."""
    return cast(x, dtype) if dtype is torch.bool else call("sign", dtype, x)


def clamp(dtype: torch.dtype, x: Expr, min: Expr | Number | None = None, max: Expr | Number | None = None) -> Expr:
    """x limited to [min, max]; NaN in any operand propagates, and max wins where min > max."""
    work = working(dtype)
    result = operand(x, work)
    if min is not None:
        result = compute("maximum", result, operand(min, work), dtype=work)
    if max is not None:
        result = compute("minimum", result, operand(max, work), dtype=work)
    return retype(result, dtype)


def clamp_max(dtype: torch.dtype, x: Expr, max: Expr | Number) -> Expr:
    """x limited to at most `max`."""
    return clamp(dtype, x, None, max)


def where(dtype: torch.dtype, condition: Expr, x: Expr | Number, y: Expr | Number) -> Expr:
    """x where the condition holds, else y."""
    if dtype in HALF and any(isinstance(v, (bool, int, float)) for v in (x, y)):
        x, y = (
            const(v, dtype) if isinstance(v, (bool, int, float)) else v for v in (x, y)
        )  # rounded as eager's scalar is
    return compute("where", operand(condition, torch.bool), operand(x, dtype), operand(y, dtype), dtype=dtype)


def masked_fill(dtype: torch.dtype, x: Expr, mask: Expr, value: Expr | Number) -> Expr:
    """`value` where the mask holds, else x."""
    return where(dtype, mask, value, x)


def power(dtype: torch.dtype, x: Expr | Number, y: Expr | Number) -> Expr:
    """x ** y: the constant exponents that eager multiplies out, floats by `pow`, integers by squaring."""
    if not dtype.is_floating_point:
        if isinstance(y, (bool, int)) and 0 <= y <= 3:
            base = operand(x, dtype)
            steps = [const(1, dtype), base, compute("mul", base, base, dtype=dtype)]
            return steps[y] if y < 3 else compute("mul", steps[2], base, dtype=dtype)
        return call("int_pow", dtype, x, y)
    if isinstance(y, (bool, int, float)) and not isinstance(x, (bool, int, float)) and float(y) in _POWERS:
        return _POWERS[float(y)](dtype, x)
    # a number is an operand of the tensor's own dtype: bfloat16 raises to 2.703125 where 2.7 was asked for
    return call("pow", dtype, *(rounded(v, dtype) if isinstance(v, (bool, int, float)) else v for v in (x, y)))


def round_decimals(dtype: torch.dtype, x: Expr, decimals: int = 0) -> Expr:
    """Round half to even at `decimals` places, scaled in the dtype itself as eager does."""
    if not dtype.is_floating_point:
        raise Unsupported("round", "integers are not rounded to decimals")
    if decimals == 0:
        return call("round", dtype, x)
    scale = const(10.0 ** abs(decimals), working(dtype))
    first, last = ("mul", "div_rn") if decimals > 0 else ("div_rn", "mul")
    work = working(dtype)
    return compute(last, call("round", work, compute(first, operand(x, work), scale, dtype=work)), scale, dtype=dtype)


def polygamma(dtype: torch.dtype, n: int, x: Expr) -> Expr:
    """The n-th derivative of digamma, for n = 0 and 1."""
    if n not in (0, 1):
        raise Unsupported("polygamma", f"order {n} is not in the op table (0 and 1 are)")
    return call(("digamma", "trigamma")[n], dtype, x)


def gelu(dtype: torch.dtype, x: Expr, approximate: str = "none") -> Expr:
    """GELU, exact or by tanh."""
    return _GELU[approximate](dtype, x)


def gelu_backward(dtype: torch.dtype, grad: Expr, x: Expr, approximate: str = "none") -> Expr:
    """Gradient of GELU."""
    return _GELU_BACKWARD[approximate](dtype, grad, x)


def nan_to_num(
    dtype: torch.dtype, x: Expr, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Expr:
    """Replace NaN and the infinities; the defaults are 0 and the dtype's largest numbers."""
    if not dtype.is_floating_point:
        return operand(x, dtype)
    info = torch.finfo(dtype)
    high, low = (posinf if posinf is not None else info.max), (neginf if neginf is not None else info.min)
    return _NAN_TO_NUM(dtype, x, nan or 0.0, high, low)


def elu_backward(
    dtype: torch.dtype, grad: Expr, alpha: Number, scale: Number, input_scale: Number, is_result: bool, x: Expr
) -> Expr:
    """Gradient of ELU from its input or its result."""
    return _ELU_BACKWARD[bool(is_result)](dtype, grad, x, float(alpha) * float(scale), float(scale), float(input_scale))


def logit(dtype: torch.dtype, x: Expr, eps: float | None = None) -> Expr:
    """log(x / (1 - x)), with x limited to [eps, 1 - eps] where eps is given."""
    work = working(dtype)
    z = operand(x, work) if eps is None or eps < 0 else clamp(work, x, eps, 1.0 - eps)
    return _LOGIT(dtype, z)


def rounded(x: Number, dtype: torch.dtype) -> Number:
    """Return a Python number as the dtype holds it (a comparison with 0.1 in bfloat16 compares with 0.10009765625)."""
    value = const(x, dtype)
    assert isinstance(value, Const)
    return value.value


_POWERS = {
    0.0: lambda dtype, x: const(1.0, dtype),
    0.5: formula("x: sqrt(x)"),
    1.0: lambda dtype, x: cast(x, dtype),
    2.0: formula("x: x * x"),
    3.0: lambda dtype, x: call("mul", dtype, call("mul", dtype, x, x), x),  # the half types round in between
    -0.5: formula("x: rsqrt(x)"),
    -1.0: formula("x: reciprocal(x)"),
    -2.0: lambda dtype, x: call("reciprocal", dtype, call("mul", dtype, x, x)),
}
_ADDCMUL = formula("x, a, b, value: fma(value, a * b, x)")
_ADDCMUL_INT = formula("x, a, b, value: x + value * (a * b)")
_GELU = {
    "none": formula("x: x * normcdf(x)"),
    "tanh": formula("x: 0.5 * x * (1 + tanh(0.7978845608028654 * fma(0.044715, x * x * x, x)))"),
}
_GELU_BACKWARD = {
    "none": formula(
        "g, x: g * fma(0.5, 1 + erf(x * 0.7071067811865476), x * (exp(-0.5 * x * x) * 0.3989422804014327))"
    ),
    "tanh": lambda dtype, g, x: _gelu_tanh_backward(dtype, g, x),
}
_NAN_TO_NUM = formula("x, n, hi, lo: n if isnan(x) else (hi if x == inf else (lo if x == -inf else x))")
_ELU_BACKWARD = {
    True: formula("g, y, a, s, i: g * i * (y + a) if y <= 0 else g * s"),
    False: formula("g, x, a, s, i: g * i * a * exp(x * i) if x <= 0 else g * s"),
}
_LOGIT = formula("z: log(z / (1 - z))")
_TANH_INNER = formula("x: tanh(0.7978845608028654 * fma(0.044715, x * x * x, x))")
_TANH_OUTER = formula(
    "g, x, t: g * fma(0.5, 1 + t, 0.5 * x * fma(-t, t, 1) * (0.7978845608028654 * fma(0.134145, x * x, 1)))"
)


def _gelu_tanh_backward(dtype: torch.dtype, g: Expr, x: Expr) -> Expr:
    return _TANH_OUTER(dtype, g, x, _TANH_INNER(working(dtype), x))
