"""Dataflow: which local variables a run of statements reads, surely writes and perhaps writes.

In: statements and the local names of their function. Out: `Flow`.

    y = x + 1
    if flag:
        z = y            reads x, flag; writes y; perhaps z

"Reads" means: may read a value that was there before the run. What cannot be said (a `match`, a `yield`) raises
`Unclear`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Names = frozenset[str]
NONE: Names = frozenset()
SCOPES = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
ENDS = (ast.Return, ast.Raise, ast.Break, ast.Continue)


class Unclear(Exception):
    """A statement that is left as it is; the text names what it is."""


@dataclass(frozen=True, slots=True)
class Flow:
    """Local names: `reads` from before the run, `writes` on every way through it, `perhaps` on some (those of `writes`
    among them).
    """

    reads: Names = NONE
    writes: Names = NONE
    perhaps: Names = NONE

    def then(self, other: Flow) -> Flow:
        return Flow(self.reads | (other.reads - self.writes), self.writes | other.writes, self.perhaps | other.perhaps)

    def maybe(self) -> Flow:
        """The same where it may not run at all, or stop in the middle."""
        return Flow(self.reads, NONE, self.perhaps)


def either(one: Flow, other: Flow, one_ends: bool, other_ends: bool) -> Flow:
    """What holds after one of two branches; one that leaves the run says nothing of what holds behind it."""
    writes = other.writes if one_ends else one.writes if other_ends else one.writes & other.writes
    return Flow(one.reads | other.reads, writes, one.perhaps | other.perhaps)


def flow(statements: Sequence[ast.stmt], local: Names) -> Flow:
    """Return what statements read and write.

    Raises:
        Unclear: one of them is not understood.
    """
    found = Flow()
    for statement in statements:
        found = found.then(of_statement(statement, local))
    return found


def of_statement(node: ast.stmt, local: Names) -> Flow:
    rule = STATEMENTS.get(type(node))
    if rule is None:
        raise Unclear(f"`{type(node).__name__.lower()}`")
    return rule(node, local)


# Expressions.


def value(node: ast.AST | None, local: Names) -> Flow:
    """What evaluating an expression reads, and writes by `:=`, which it may not reach."""
    if node is None:
        return Flow()
    if isinstance(node, ast.Name):
        return Flow(reads=frozenset({node.id}) & local) if isinstance(node.ctx, ast.Load) else Flow()
    if isinstance(node, (ast.Yield, ast.YieldFrom, ast.Await)):
        raise Unclear("a `yield` or `await`")
    if isinstance(node, ast.NamedExpr):
        return value(node.value, local).then(Flow(perhaps=frozenset({node.target.id}) & local))
    if isinstance(node, ast.Lambda):
        inside = local - {arg.arg for arg in every_argument(node.args)}
        outside = (*node.args.defaults, *(default for default in node.args.kw_defaults if default is not None))
        return together(outside, local).then(value(node.body, inside).maybe())
    if isinstance(node, SCOPES):
        own = frozenset(name for generator in node.generators for name in stored(generator.target))
        first = value(node.generators[0].iter, local)
        return first.then(together(ast.iter_child_nodes(node), local - own).maybe())
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("locals", "vars", "eval", "exec", "dir")
    ):
        raise Unclear(f"`{node.func.id}()`")
    return together(ast.iter_child_nodes(node), local)


def together(nodes: Iterable[ast.AST], local: Names) -> Flow:
    found = Flow()
    for node in nodes:
        found = found.then(value(node, local))
    return found


def every_argument(arguments: ast.arguments) -> list[ast.arg]:
    more = [arg for arg in (arguments.vararg, arguments.kwarg) if arg is not None]
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *more]


def stored(target: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(target) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def into(targets: Iterable[ast.AST], local: Names) -> Flow:
    """What assigning to targets reads (`a[i]`, `a.b`) and writes."""
    targets = list(targets)
    names = frozenset(name for target in targets for name in stored(target)) & local
    return together(targets, local).then(Flow(writes=names, perhaps=names))


# Statements.


def of_if(node: ast.If, local: Names) -> Flow:
    one, other = flow(node.body, local), flow(node.orelse, local)
    return value(node.test, local).then(either(one, other, ends(node.body), ends(node.orelse)))


def ends(statements: Sequence[ast.stmt]) -> bool:
    return bool(statements) and isinstance(statements[-1], ENDS)


def of_for(node: ast.For, local: Names) -> Flow:
    body = into([node.target], local).then(flow(node.body, local)).maybe()
    return value(node.iter, local).then(body).then(flow(node.orelse, local).maybe())


def of_while(node: ast.While, local: Names) -> Flow:
    return value(node.test, local).then(flow(node.body, local).maybe()).then(flow(node.orelse, local).maybe())


def of_with(node: ast.With, local: Names) -> Flow:
    found = Flow()
    for item in node.items:
        found = found.then(value(item.context_expr, local))
        if item.optional_vars is not None:
            found = found.then(into([item.optional_vars], local))
    return found.then(flow(node.body, local))


def of_try(node: ast.Try, local: Names) -> Flow:
    found = flow(node.body, local).maybe()
    for handler in node.handlers:
        own = frozenset({handler.name} if handler.name else ()) & local
        inside = value(handler.type, local).then(Flow(writes=own, perhaps=own)).then(flow(handler.body, local))
        found = found.then(inside.maybe())
    return found.then(flow(node.orelse, local).maybe()).then(flow(node.finalbody, local))


def of_augmented(node: ast.AugAssign, local: Names) -> Flow:
    read = Flow(reads=frozenset({node.target.id}) & local) if isinstance(node.target, ast.Name) else Flow()
    return read.then(value(node.value, local)).then(into([node.target], local))


STATEMENTS: dict[type[ast.stmt], Callable[[Any, Names], Flow]] = {
    ast.Expr: lambda node, local: value(node.value, local),
    ast.Return: lambda node, local: value(node.value, local),
    ast.Raise: lambda node, local: together([n for n in (node.exc, node.cause) if n is not None], local),
    ast.Assert: lambda node, local: value(node.test, local).then(value(node.msg, local).maybe()),
    ast.Assign: lambda node, local: value(node.value, local).then(into(node.targets, local)),
    ast.AnnAssign: lambda node, local: value(node.value, local).then(
        into([node.target], local) if node.value else Flow()
    ),
    ast.AugAssign: of_augmented,
    ast.If: of_if,
    ast.For: of_for,
    ast.While: of_while,
    ast.With: of_with,
    ast.Try: of_try,
    ast.Pass: lambda node, local: Flow(),
    ast.Break: lambda node, local: Flow(),
    ast.Continue: lambda node, local: Flow(),
}
"""Statement → (node, local names) to its Flow."""
