"""Convert: control flow that may depend on a tensor becomes calls of a small runtime (operators.py).

In: a function. Out: the code object of the same function, in which

    if x.sum() > 0:              |  def then():  nonlocal y; y = x * 2
        y = x * 2                |  def other(): nonlocal y; y = x
    else:                        |  if_(x.sum() > 0, then, other, site)
        y = x                    |

Conditional expressions, `and`, `or`, `not`, chained comparisons, `assert` and `while` go the same way; a test that
cannot be a tensor (`is None`, `isinstance`, ...) stays as it is. Each call `f(x)` becomes `callee(f)(x)`, so that the
functions which are called are rewritten when they are called (converted_call.py). Lines are kept: each new node stands
where the user's stands.
"""

from __future__ import annotations

import ast
import types
from dataclasses import dataclass, field
from typing import Any

from .liveness import Liveness, names_bound
from .lower_jumps import FREE, HALT, YIELDS, NotRewritten, lower_jumps, maybe_tensor, own_nodes, surely_python
from .source import ARM, Source, code_of

IF, IFEXP, AND, OR, NOT, COMPARE = (f"\0fusejit {name}" for name in ("if", "ifexp", "and", "or", "not", "compare"))
ASSERT, WHILE, CALL, UPDATE = (f"\0fusejit {name}" for name in ("assert", "while", "call", "update"))
MARKERS = (IF, IFEXP, AND, OR, NOT, COMPARE, ASSERT, WHILE, CALL, UPDATE, FREE, HALT)
OPERATORS = {
    ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge", ast.Eq: "eq", ast.NotEq: "ne",
    ast.Is: "is_", ast.IsNot: "is_not", ast.In: "in", ast.NotIn: "not in",
}  # fmt: skip
UPDATES = {
    ast.Add: "iadd",
    ast.Sub: "isub",
    ast.Mult: "imul",
    ast.Div: "itruediv",
    ast.FloorDiv: "ifloordiv",
    ast.Mod: "imod",
    ast.Pow: "ipow",
    ast.BitAnd: "iand",
    ast.BitOr: "ior",
    ast.BitXor: "ixor",
    ast.LShift: "ilshift",
    ast.RShift: "irshift",
    ast.MatMult: "imatmul",
}
PLAIN = frozenset(
    (
        "range",
        "len",
        "isinstance",
        "issubclass",
        "getattr",
        "setattr",
        "hasattr",
        "int",
        "float",
        "bool",
        "str",
        "tuple",
        "list",
        "dict",
        "set",
        "zip",
        "enumerate",
        "print",
        "id",
        "min",
        "max",
        "sum",
        "abs",
        "repr",
        "reversed",
        "sorted",
        "slice",
        "iter",
        "next",
        "super",
        "callable",
    )
)
"""Python's own functions, which nothing has to be done for; a variable of that name is called as it is, too."""
TESTED_AND, TESTED_OR = "and (in a test)", "or (in a test)"
"""Kinds of `and` and `or` whose value only says yes or no; elsewhere it is one of the operands."""
FRAMES = {"locals": 0, "eval": 1, "exec": 1, "vars": 0, "dir": 0}
"""Functions that see the variables of their caller, and the most arguments with which they do."""


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """One `if`, loop or expression of the user's.

    Attributes:
        kind: "if", "while", "conditional expression", ...; line: "model.py:12: if loss > 0:".
        written: variables that its arms bind; live: those of them that may be read afterwards (at the head too, for a
            loop).
    """

    kind: str
    line: str
    written: tuple[str, ...] = ()
    live: frozenset[str] = frozenset()


def rewrite(source: Source, runtime: dict[str, Any]) -> types.CodeType:
    """Return the rewritten code of a function.

    Args:
        runtime: {marker: function}: what the calls become, see MARKERS.

    Raises:
        NotRewritten: it has a construct that only works as it stands; it is traced as it is.
    """
    tree = source.tree()
    constants: dict[str, Any] = dict(runtime)
    convert_function(tree, source, constants)
    return code_of(source, tree, constants)


def convert_function(tree: ast.FunctionDef, source: Source, constants: dict[str, Any]) -> None:
    """Rewrite one function in place: jumps, then control flow and calls."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and len(node.args) <= FRAMES.get(node.func.id, -1)
        ):
            raise NotRewritten(f"it looks at its own variables by name ({node.func.id})")
    arguments = [arg.arg for arg in arguments_of(tree)]
    bound = names_bound(tree.body)
    declared: dict[str, str] = {}
    for node in own_nodes(tree.body, (ast.Global, ast.Nonlocal)):
        declared |= dict.fromkeys(node.names, "global" if isinstance(node, ast.Global) else "nonlocal")
    lower_jumps(tree)
    bound |= names_bound(tree.body)
    converter = Converter(source, constants, Liveness(tree), declared, arguments[0] if arguments else "")
    body = converter.block(tree.body)
    own = sorted(bound - set(arguments) - declared.keys())
    head: list[ast.stmt] = [
        kind([name for name, how in declared.items() if how == word])  # type: ignore[list-item]
        for word, kind in (("global", ast.Global), ("nonlocal", ast.Nonlocal))
        if word in declared.values()
    ]
    if (
        own and converter.arms
    ):  # never runs: it says that these are variables of this function, wherever they are assigned now
        targets: list[ast.expr] = [ast.Name(name, ast.Store()) for name in own]
        head.append(ast.If(ast.Constant(False), [ast.Assign(targets, ast.Constant(None))], []))
    tree.body = [*(ast.fix_missing_locations(ast.copy_location(node, tree.body[0])) for node in head), *body]


def arguments_of(node: Any) -> list[ast.arg]:
    args = node.args
    return [
        arg for arg in (*args.posonlyargs, *args.args, args.vararg, *args.kwonlyargs, args.kwarg) if arg is not None
    ]


@dataclass
class Converter(ast.NodeTransformer):
    """Rewrites the statements and expressions of one function."""

    source: Source
    constants: dict[str, Any]
    liveness: Liveness
    declared: dict[str, str]
    first: str
    arms: int = field(default=0)

    # What the new nodes are made of.

    def site(
        self, kind: str, node: ast.AST, written: tuple[str, ...] = (), live: frozenset[str] = frozenset()
    ) -> ast.Constant:
        marker = f"\0fusejit site {len(self.constants)}"
        self.constants[marker] = Site(kind, self.source.line(node), written, live)
        return ast.Constant(marker)

    def call(self, marker: str, node: ast.AST, *args: ast.expr) -> ast.Call:
        return placed(ast.Call(ast.Constant(marker), list(args), []), node)

    def later(self, value: ast.expr) -> ast.Lambda:
        """`lambda: value`."""
        empty = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
        return placed(ast.Lambda(empty, value), value)

    def arm(self, name: str, body: list[ast.stmt], written: set[str], node: ast.AST) -> ast.FunctionDef:
        """A function of no arguments that runs a block of this function on this function's own variables."""
        self.arms += 1
        empty = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
        head: list[ast.stmt] = []
        for word, kind in (("global", ast.Global), ("nonlocal", ast.Nonlocal)):
            names = sorted(item for item in written if self.declared.get(item, "nonlocal") == word)
            if names:
                head.append(kind(names))
        made = ast.FunctionDef(name=name, args=empty, body=[*head, *(body or [ast.Pass()])], decorator_list=[])
        if "type_params" in ast.FunctionDef._fields:
            made.type_params = []  # type: ignore[attr-defined]
        return placed(made, node)

    # Statements.

    def block(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        found: list[ast.stmt] = []
        for statement in statements:
            made = self.visit(statement)
            found += made if isinstance(made, list) else [made] if made is not None else []
        return found or [placed(ast.Pass(), statements[0])] if statements else []

    def visit_If(self, node: ast.If) -> Any:
        if surely_python(node.test) or is_halt(node.test):
            return self.generic_visit(node)
        yes, no = names_bound(node.body), names_bound(node.orelse)
        number = len(self.constants)
        mark_tests(node.test)
        site = self.site("if", node, tuple(sorted(yes | no)), self.liveness.after.get(id(node), frozenset()))
        test = self.visit(node.test)
        arms = [
            self.arm(f"{ARM}{number} {which}", self.block(block), written, node)
            for which, block, written in (("then", node.body, yes), ("else", node.orelse, no))
        ]
        names = [ast.Name(arm.name, ast.Load()) for arm in arms]
        return [*arms, placed(ast.Expr(self.call(IF, node, test, *names, site)), node)]

    def visit_While(self, node: ast.While) -> Any:
        if not maybe_tensor(node):
            return self.generic_visit(node)
        mark_tests(node.test)
        tested, written = names_bound(node.test), names_bound(node.body)
        live = self.liveness.head.get(id(node), frozenset()) | self.liveness.after.get(id(node), frozenset())
        number = len(self.constants)
        site = self.site("while", node, tuple(sorted(tested | written)), live)
        test = placed(ast.Return(self.visit(node.test)), node.test)
        arms = [
            self.arm(f"{ARM}{number} test", [test], tested, node),
            self.arm(f"{ARM}{number} body", self.block(node.body), written, node),
        ]
        names = [ast.Name(arm.name, ast.Load()) for arm in arms]
        made = [*arms, placed(ast.Expr(self.call(WHILE, node, *names, site)), node)]
        return made + self.block(node.orelse)

    def visit_Assert(self, node: ast.Assert) -> Any:
        self.generic_visit(node)
        if not surely_python(node.test):
            said = ast.Constant(None) if node.msg is None else self.later(node.msg)
            node.test = self.call(ASSERT, node.test, node.test, said, self.site("assert", node))
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        self.generic_visit(node)
        if not isinstance(node.target, ast.Name):
            return node
        return None if node.value is None else placed(ast.Assign([node.target], node.value), node)

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        self.generic_visit(node)
        if not isinstance(node.target, ast.Name):
            return node
        old = placed(ast.Name(node.target.id, ast.Load()), node.target)
        return placed(
            ast.Assign([node.target], self.call(UPDATE, node, ast.Constant(UPDATES[type(node.op)]), old, node.value)),
            node,
        )

    def visit_Global(self, node: ast.Global) -> Any:
        return None  # said at the top of the function

    def visit_Nonlocal(self, node: ast.Nonlocal) -> Any:
        return None

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        node.decorator_list = [self.visit(item) for item in node.decorator_list]
        node.args.defaults = [self.visit(item) for item in node.args.defaults]
        node.args.kw_defaults = [item and self.visit(item) for item in node.args.kw_defaults]
        if not own_nodes(node.body, YIELDS):  # a generator stays one
            convert_function(node, self.source, self.constants)
        return node

    def visit_Lambda(self, node: ast.Lambda) -> Any:
        first, self.first = self.first, ""
        self.generic_visit(node)
        self.first = first
        return node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> Any:
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        return node

    # Expressions.

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        mark_tests(node.test)
        keep = surely_python(node.test) or binds(node.body, node.orelse)
        self.generic_visit(node)
        if keep:
            return node
        site = self.site("conditional expression", node)
        return self.call(IFEXP, node, node.test, self.later(node.body), self.later(node.orelse), site)

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        keep = surely_python(node) or binds(*node.values[1:])
        both = isinstance(node.op, ast.And)
        word = (TESTED_AND if both else TESTED_OR) if getattr(node, "tested", False) else "and" if both else "or"
        self.generic_visit(node)
        if keep:
            return node
        return self.call(
            AND if both else OR, node, self.site(word, node), node.values[0], *map(self.later, node.values[1:])
        )

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        keep = not isinstance(node.op, ast.Not) or surely_python(node)
        if isinstance(node.op, ast.Not):
            mark_tests(node.operand)
        self.generic_visit(node)
        return node if keep else self.call(NOT, node, node.operand, self.site("not", node))

    def visit_Compare(self, node: ast.Compare) -> Any:
        keep = len(node.ops) == 1 or surely_python(node) or binds(*node.comparators)
        self.generic_visit(node)
        if keep:
            return node
        words = ast.Constant(",".join(OPERATORS[type(op)] for op in node.ops))
        return self.call(
            COMPARE, node, self.site("comparison", node), words, node.left, *map(self.later, node.comparators)
        )

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        function = node.func
        if isinstance(function, ast.Name) and function.id == "super" and not node.args and self.first:
            node.args = [
                placed(ast.Name(name, ast.Load()), node) for name in ("__class__", self.first)
            ]  # an arm has no first argument
        if not (isinstance(function, ast.Constant) or isinstance(function, ast.Name) and function.id in PLAIN):
            node.func = self.call(CALL, function, function)
        return node


def mark_tests(node: ast.expr) -> None:
    """Note the `and`s and `or`s of which a test only wants to know whether they hold."""
    if isinstance(node, ast.BoolOp):
        node.tested = True  # type: ignore[attr-defined]
        for value in node.values:
            mark_tests(value)


def placed(node: Any, like: ast.AST) -> Any:
    return ast.fix_missing_locations(ast.copy_location(node, like))


def is_halt(test: ast.expr) -> bool:
    return isinstance(test, ast.Call) and isinstance(test.func, ast.Constant) and test.func.value == HALT


def binds(*nodes: ast.AST) -> bool:
    """Whether an expression assigns (`:=`), which a lambda would keep to itself."""
    return any(isinstance(item, ast.NamedExpr) for node in nodes for item in ast.walk(node))
