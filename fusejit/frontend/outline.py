"""Outline: what stands between the blocks of a function that stay Python becomes functions of its own.

In: the source of a function and a test for the blocks. Out: `Outlined`: the function with each run of statements
between such blocks replaced by a call of a segment, and the segments.

    def f(x):                         def f(x):
        x += 1                            x = <segment 0>(x)
        with exclude_from_trace():        with exclude_from_trace():
            if i % 2 == 0:       →            if i % 2 == 0:
                x += 1                            x += 1
        y = x * 2                         return <segment 1>(x)
        return y

A compound statement that contains a block stays Python and its parts are outlined. A segment takes what it reads and
returns what is read after it; one that may return from the middle says so by a flag. What is not understood stays
Python, with its reason.
"""

from __future__ import annotations

import ast
import copy
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from . import source as sources
from .dataflow import Names, Unclear, flow, of_statement, stored
from .source import Source, code_of

RESULT = "<result of a segment>"
NESTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
WORK = (ast.Call, ast.BinOp, ast.UnaryOp, ast.Compare, ast.AugAssign, ast.Subscript)


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of statements as a function of what it reads; `first` and `last` are its lines."""

    tree: ast.FunctionDef
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Outlined:
    """A function whose segments are called as the constants `name(0)`, `name(1)`, ...; `kept`: (line, why it stays
    Python).
    """

    tree: ast.FunctionDef
    segments: tuple[Segment, ...]
    kept: tuple[tuple[str, str], ...]


def name(number: int) -> str:
    return f"<segment {number}>"


def outline(source: Source, stays: Callable[[ast.stmt], str]) -> Outlined:
    """Cut a function into segments.

    Args:
        stays: a statement to why it stays Python as it is, with all inside it; "" for all others.
    """
    tree = source.tree()
    work = Outliner(source, stays, tree)
    tree.body = work.block(tree.body, frozenset(argument_names(tree)), in_loop=False)
    return Outlined(tree, tuple(work.segments), tuple(work.kept))


def argument_names(tree: ast.FunctionDef) -> list[str]:
    args = tree.args
    more = [arg.arg for arg in (args.vararg, args.kwarg) if arg is not None]
    return [arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs)] + more


def function_of(source: Source, segment: Segment, function: types.FunctionType) -> types.FunctionType:
    """The segment as a function beside the one that it was cut from: its globals, its cells, and a source of its
    own.
    """
    code = code_of(source, segment.tree)
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
    made = types.FunctionType(
        code, function.__globals__, function.__name__, None, tuple(cells[free] for free in code.co_freevars)
    )
    made.__qualname__, made.__module__ = function.__qualname__, function.__module__
    sources.KNOWN[code, code.co_filename] = Source(segment.tree, code, source.owner)
    return made


class Outliner:
    """The state of one walk over a function's statements."""

    def __init__(self, source: Source, stays: Callable[[ast.stmt], str], tree: ast.FunctionDef) -> None:
        self.source, self.stays = source, stays
        code = source.code
        self.local: Names = frozenset(code.co_varnames) | frozenset(code.co_cellvars)
        declared = (n for n in ast.walk(tree) if isinstance(n, (ast.Global, ast.Nonlocal)))
        self.elsewhere: Names = frozenset(text for node in declared for text in node.names)
        self.loads: dict[str, list[ast.AST]] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store):
                self.loads.setdefault(node.id, []).append(node)
            elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
                self.loads.setdefault(node.target.id, []).append(node)
        self.segments: list[Segment] = []
        self.kept: list[tuple[str, str]] = []

    # Statements, one block after the other.

    def block(self, statements: Sequence[ast.stmt], bound: Names, in_loop: bool) -> list[ast.stmt]:
        """Outline a list of statements; `bound` are the names that surely have a value before it."""
        made: list[ast.stmt] = []
        run: list[ast.stmt] = []
        for statement in statements:
            why = self.refusal(statement, bound)
            if why is None:
                run.append(statement)
            else:
                made += self.segment(run, in_loop)
                run = []
                made.append(self.opened(statement, bound, in_loop) if why == "" else self.keep(statement, why))
            bound = self.after(statement, bound)
        return made + self.segment(run, in_loop)

    def keep(self, statement: ast.stmt, why: str) -> ast.stmt:
        if not is_text(statement):
            self.kept.append((self.source.line(statement), why))
        return statement

    def opened(self, node: ast.stmt, bound: Names, in_loop: bool) -> ast.stmt:
        """A compound statement that stays Python around parts that are outlined."""
        if isinstance(node, (ast.For, ast.While)):
            inside = bound | (stored(node.target) if isinstance(node, ast.For) else set())
            node.body, node.orelse = self.block(node.body, inside, True), self.block(node.orelse, bound, in_loop)
        elif isinstance(node, ast.If):
            node.body, node.orelse = self.block(node.body, bound, in_loop), self.block(node.orelse, bound, in_loop)
        elif isinstance(node, ast.With):
            targets = {
                text for item in node.items if item.optional_vars is not None for text in stored(item.optional_vars)
            }
            node.body = self.block(node.body, bound | targets, in_loop)
        elif isinstance(node, ast.Try):
            node.body = self.block(node.body, bound, in_loop)
            for handler in node.handlers:
                handler.body = self.block(handler.body, bound | ({handler.name} if handler.name else set()), in_loop)
            node.orelse, node.finalbody = (
                self.block(node.orelse, bound, in_loop),
                self.block(node.finalbody, bound, in_loop),
            )
        return node

    def after(self, statement: ast.stmt, bound: Names) -> Names:
        """The names that surely have a value after a statement."""
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            return bound | {statement.name}
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            return bound | {(alias.asname or alias.name).split(".")[0] for alias in statement.names}
        if isinstance(statement, ast.Delete):
            return bound - {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
        try:
            return bound | of_statement(statement, self.local).writes
        except Unclear:
            return bound

    def refusal(self, statement: ast.stmt, bound: Names) -> str | None:
        """Why a statement is no part of a segment: "" for one that is opened instead, None for one that is."""
        if why := self.stays(statement):
            return why
        if any(self.stays(node) for node in ast.walk(statement) if isinstance(node, ast.stmt)):
            return (
                ""
                if isinstance(statement, (ast.For, ast.While, ast.If, ast.With, ast.Try))
                else "it contains such a block"
            )
        if is_text(statement):
            return "text"
        if isinstance(getattr(statement, "value", None), (ast.Lambda, ast.GeneratorExp)):
            return "it makes a function or generator that lives on"
        if loose_jump(statement):
            return "it leaves a loop that stays Python"
        try:
            found = of_statement(statement, self.local)
        except Unclear as error:
            return f"{error} is not outlined"
        if found.perhaps & self.elsewhere or any(
            isinstance(node, (ast.Global, ast.Nonlocal)) for node in ast.walk(statement)
        ):
            return "it writes a global or nonlocal variable"
        handed_on = {text for text in found.perhaps - found.writes if self.read_outside(text, [statement])}
        unsure = (found.reads | handed_on) - bound
        if unsure:
            return f"{', '.join(sorted(unsure))} may have no value yet"
        return None

    # Segments.

    def segment(self, run: list[ast.stmt], in_loop: bool) -> list[ast.stmt]:
        """A run of statements as a call of a segment; as it is where there is nothing to compute."""
        if not any(isinstance(node, WORK) for statement in run for node in ast.walk(statement)):
            return run
        body = [explicit_super(copy.deepcopy(statement), self.source) for statement in run]
        found = flow(body, self.local)
        writes = sorted(
            text for text in found.perhaps if self.read_outside(text, run) or in_loop and text in found.reads
        )
        reads = sorted(found.reads | (frozenset(writes) - found.writes))
        returns = [node for statement in run for node in own_returns(statement)]
        tail = len(returns) == 1 and returns[0] is run[-1]
        if returns and not tail:
            body = [Flagged().visit(statement) for statement in body]
        if not tail and (returns or writes):
            given = pack(writes)
            body.append(ast.Return(ast.Tuple([ast.Constant(False), given], ast.Load()) if returns else given))
        arguments = ast.arguments(
            posonlyargs=[], args=[ast.arg(text) for text in reads], kwonlyargs=[], kw_defaults=[], defaults=[]
        )
        tree = ast.FunctionDef(name=self.source.code.co_name, args=arguments, body=body, decorator_list=[])
        for statement in body:
            located(statement, run[-1])
        self.segments.append(Segment(located(tree, run[0]), run[0].lineno, run[-1].end_lineno or run[-1].lineno))
        call = ast.Call(ast.Constant(name(len(self.segments) - 1)), [ast.Name(text, ast.Load()) for text in reads], [])
        return [located(statement, run[0]) for statement in call_of(call, writes, bool(returns), tail)]

    def read_outside(self, text: str, run: list[ast.stmt]) -> bool:
        inside = {id(node) for statement in run for node in ast.walk(statement)}
        return any(id(node) not in inside for node in self.loads.get(text, ()))


def call_of(call: ast.Call, writes: list[str], returns: bool, tail: bool) -> list[ast.stmt]:
    """The statements that take a segment's place."""
    if tail:
        return [ast.Return(call)]
    targets: ast.expr = ast.Tuple([ast.Name(text, ast.Store()) for text in writes], ast.Store())
    if not returns:
        if not writes:
            return [ast.Expr(call)]
        return [ast.Assign([ast.Name(writes[0], ast.Store()) if len(writes) == 1 else targets], call)]

    def item(number: int) -> ast.expr:
        return ast.Subscript(ast.Name(RESULT, ast.Load()), ast.Constant(number), ast.Load())

    made: list[ast.stmt] = [
        ast.Assign([ast.Name(RESULT, ast.Store())], call),
        ast.If(item(0), [ast.Return(item(1))], []),
    ]
    if writes:
        made.append(ast.Assign([ast.Name(writes[0], ast.Store()) if len(writes) == 1 else targets], item(1)))
    return made


def pack(names: list[str]) -> ast.expr:
    if len(names) == 1:
        return ast.Name(names[0], ast.Load())
    return ast.Tuple([ast.Name(text, ast.Load()) for text in names], ast.Load())


def located(node: Any, where: ast.stmt) -> Any:
    """Give new nodes the place of a statement of the user's."""
    for child in ast.walk(node):
        if "lineno" in child._attributes and not hasattr(child, "lineno"):
            ast.copy_location(child, where)
    return node


class Flagged(ast.NodeTransformer):
    """`return value` becomes `return (True, value)`."""

    def visit_Return(self, node: ast.Return) -> ast.Return:
        given = node.value or ast.Constant(None)
        return ast.copy_location(ast.Return(ast.Tuple([ast.Constant(True), given], ast.Load())), node)

    def visit_Lambda(self, node: ast.Lambda) -> ast.Lambda:
        return node


def explicit_super(statement: ast.stmt, source: Source) -> ast.stmt:
    """Write `super()` as `super(__class__, self)`: a segment's first argument need not be the method's."""
    arguments = source.code.co_varnames
    for node in ast.walk(statement):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "super"
            and not node.args
            and arguments
        ):
            node.args = [ast.copy_location(ast.Name(text, ast.Load()), node) for text in ("__class__", arguments[0])]
    return statement


def own_returns(statement: ast.stmt) -> list[ast.Return]:
    return [node for node in ast.walk(statement) if isinstance(node, ast.Return)]


def loose_jump(statement: ast.AST) -> bool:
    """Whether a `break` or `continue` inside belongs to a loop around the statement."""
    if isinstance(statement, (ast.Break, ast.Continue)):
        return True
    if isinstance(statement, (ast.For, ast.While)):
        return any(map(loose_jump, statement.orelse))
    return any(
        loose_jump(child)
        for child in ast.iter_child_nodes(statement)
        if isinstance(child, (ast.stmt, ast.excepthandler))
    )


def is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
