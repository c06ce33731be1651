"""Liveness: which variables still matter behind each `if` and loop of a function.

In: the tree of a function, after its jumps became flags. Out: {id of statement: names that may be read after it}.

    y = x * 2
    if y.sum() > 0:      # live behind it: {"z"}
        t = y.exp()
        z = t + 1
    else:
        z = y
    return z

A name that a nested function or class reads is live everywhere: it may be called at any time.
"""

from __future__ import annotations

import ast
from typing import Any

from .lower_jumps import SCOPES

Live = frozenset[str]
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def names_read(node: ast.AST) -> set[str]:
    """Names that are loaded anywhere inside, nested functions included."""
    return {item.id for item in ast.walk(node) if isinstance(item, ast.Name) and not isinstance(item.ctx, ast.Store)}


def names_bound(node: Any) -> set[str]:
    """Names that a statement or expression binds or deletes in the function's own scope."""
    found: set[str] = set()
    waiting = list(node) if isinstance(node, list) else [node]
    while waiting:
        item = waiting.pop()
        if isinstance(item, ast.Name) and isinstance(item.ctx, (ast.Store, ast.Del)):
            found.add(item.id)
        elif isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(item.name)
            waiting += item.decorator_list
            continue
        elif isinstance(item, ast.Lambda):
            continue
        elif isinstance(item, COMPREHENSIONS):  # its targets are its own; only a walrus leaves it
            found |= {walrus.target.id for walrus in ast.walk(item) if isinstance(walrus, ast.NamedExpr)}
            continue
        elif isinstance(item, (ast.Import, ast.ImportFrom)):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in item.names}
        elif isinstance(item, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and item.name:
            found.add(item.name)
        elif isinstance(item, ast.MatchMapping) and item.rest:
            found.add(item.rest)
        waiting += ast.iter_child_nodes(item)
    return found


class Liveness:
    """One backward walk over a function."""

    def __init__(self, function: ast.FunctionDef) -> None:
        self.after: dict[int, Live] = {}
        self.head: dict[int, Live] = {}
        self.always: Live = frozenset()
        for node in ast.walk(function):
            if isinstance(node, SCOPES) and node is not function:
                self.always |= names_read(node)
            if isinstance(node, (ast.Global, ast.Nonlocal)):
                self.always |= set(node.names)
        self.block(function.body, frozenset())

    def block(self, statements: list[ast.stmt], live: Live) -> Live:
        for statement in reversed(statements):
            live = self.statement(statement, live)
        return live

    def statement(self, node: ast.stmt, live: Live) -> Live:
        """Return what is live before a statement, from what is live after it."""
        if isinstance(node, (ast.If, ast.For, ast.While)):
            self.after[id(node)] = self.after.get(id(node), frozenset()) | live | self.always
        if isinstance(node, ast.If):
            return self.block(node.body, live) | self.block(node.orelse, live) | names_read(node.test)
        if isinstance(node, (ast.For, ast.While)):
            return self.loop(node, live)
        if isinstance(node, ast.With):
            inner = self.block(node.body, live)
            return inner | names_read(ast.Tuple([item.context_expr for item in node.items], ast.Load()))
        if isinstance(node, (ast.Try, ast.Match)) or type(node).__name__ == "TryStar":
            everything = live | names_read(
                node
            )  # an exception leaves from anywhere, so nothing is certainly overwritten
            for inside in self.parts(node):
                self.block(inside, everything)
            return everything
        if isinstance(node, (ast.Return, ast.Raise)):
            return frozenset(names_read(node))
        if isinstance(node, (ast.Break, ast.Continue)):
            return live | self.outer
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            return live | names_read(node.value) | {node.target.id}
        return (live - names_bound(node)) | names_read(node)

    outer: Live = frozenset()
    """What is live where a jump of the innermost loop may lead to."""

    def parts(self, node: Any) -> list[list[ast.stmt]]:
        found = [getattr(node, field, []) for field in ("body", "orelse", "finalbody")]
        if isinstance(node, ast.Match):
            found = []
        return found + [part.body for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ()))]

    def loop(self, node: Any, live: Live) -> Live:
        before = self.outer
        after = self.block(node.orelse, live)
        test = frozenset(names_read(node.test)) if isinstance(node, ast.While) else frozenset()
        head = live | after | test
        for _ in range(2):  # the second pass sees what the first found at the head
            self.outer = head | live
            body = self.block(node.body, head)
            if isinstance(node, ast.For):
                body = body - names_bound(node.target) | names_read(node.target)
            head = head | body
        self.outer = before
        self.head[id(node)] = head | self.always
        return head | names_read(node.iter) if isinstance(node, ast.For) else head
