"""Lower jumps: `return`, `break` and `continue` inside an `if` become flags, so that every arm runs to its end.

In: the tree of a function. Out: the same function without jumps out of the arms that may become functions: what came
after such an `if` goes into the arm that does not jump, or is guarded by the flags that the arm may have set.

    for row in rows:            |  `break 1` = False
        if row.sum() > 3:       |  for `item 1` in rows:
            break               |      if free(`break 1`):
        total = total + row     |          row = `item 1`
    return total                |          if row.sum() > 3: `break 1` = True
                                |          else: total = total + row
                                |      if halt(`break 1`): break
                                |  return total

Flags have names with a space, which no variable of a user can have. Functions without such jumps are left alone.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

RETURNED, VALUE = "return flag", "return value"
FREE, HALT = "\0fusejit free", "\0fusejit halt"
JUMPS = (ast.Return, ast.Break, ast.Continue)
YIELDS = (ast.Yield, ast.YieldFrom, ast.Await)
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
PYTHON_CALLS = frozenset({"isinstance", "issubclass", "hasattr", "callable", "len"})
IDENTITY = (ast.Is, ast.IsNot, ast.In, ast.NotIn)


class NotRewritten(Exception):
    """A function that is traced as it is; the text says why."""


def is_flag(name: str) -> bool:
    """Whether a variable is a flag of this module."""
    return name == RETURNED or name.startswith(("break ", "continue "))


def surely_python(test: ast.expr) -> bool:
    """Whether a test cannot be a tensor, whatever its operands are."""
    if isinstance(test, ast.Constant):
        return True
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return surely_python(test.operand)
    if isinstance(test, ast.BoolOp):
        return all(map(surely_python, test.values))
    if isinstance(test, ast.Compare):
        if all(isinstance(op, IDENTITY) for op in test.ops):
            return True
        return any(
            isinstance(side, ast.Constant) and isinstance(side.value, (str, type(None)))
            for side in (test.left, *test.comparators)
        )
    return isinstance(test, ast.Call) and isinstance(test.func, ast.Name) and test.func.id in PYTHON_CALLS


def own_nodes(node: ast.AST | Sequence[ast.stmt], kinds: Any, loops: bool = True) -> list[Any]:
    """Find nodes of some kinds, not in nested functions and classes, and not in nested loops if `loops` is False."""
    waiting: list[Any] = list(node) if isinstance(node, Sequence) else [node]
    found = []
    while waiting:
        item = waiting.pop()
        if isinstance(item, kinds):
            found.append(item)
        if isinstance(item, SCOPES):
            continue
        if not loops and isinstance(item, (ast.For, ast.While)):
            waiting += item.orelse  # a break there belongs to the loop around
            continue
        waiting += ast.iter_child_nodes(item)
    return found


def blocks(node: ast.AST) -> list[list[ast.stmt]]:
    """The lists of statements directly inside a statement."""
    if isinstance(node, SCOPES):
        return []
    found = [
        getattr(node, field)
        for field in ("body", "orelse", "finalbody")
        if isinstance(getattr(node, field, None), list)
    ]
    found += [part.body for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ()))]
    return [block for block in found if block]


def terminates(block: Sequence[ast.stmt]) -> bool:
    """Whether the end of a block is never reached."""
    if not block:
        return False
    last = block[-1]
    if isinstance(last, ast.If):
        return terminates(last.body) and terminates(last.orelse)
    if isinstance(last, ast.With):
        return isinstance(last.body[-1], ast.Return)
    return isinstance(last, (*JUMPS, ast.Raise))


def has_jump(block: Sequence[ast.stmt]) -> bool:
    """Whether a block may jump out of itself."""
    return bool(own_nodes(block, ast.Return) or own_nodes(block, (ast.Break, ast.Continue), loops=False))


def absorb(block: list[ast.stmt]) -> None:
    """Move what follows an `if` of which one arm always jumps into its other arm."""
    for place, statement in enumerate(block):
        rest = block[place + 1 :]
        if isinstance(statement, ast.If) and rest and not surely_python(statement.test):
            if terminates(statement.body) and has_jump(statement.body):
                statement.orelse.extend(rest)
            elif terminates(statement.orelse) and has_jump(statement.orelse):
                statement.body.extend(rest)
            else:
                rest = []
            if rest:
                del block[place + 1 :]
        for inside in blocks(statement):
            absorb(inside)
        if place + 1 >= len(block):
            return


def unreachable(block: list[ast.stmt]) -> None:
    """Drop what stands behind a jump."""
    for place, statement in enumerate(block):
        for inside in blocks(statement):
            unreachable(inside)
        if terminates([statement]):
            del block[place + 1 :]
            return


def maybe_tensor(node: ast.AST) -> bool:
    """Whether a statement's test may be a tensor."""
    return isinstance(node, (ast.If, ast.While)) and not surely_python(node.test)


def assign(name: str, value: ast.expr, like: ast.AST) -> ast.stmt:
    return ast.fix_missing_locations(ast.copy_location(ast.Assign([ast.Name(name, ast.Store())], value), like))


def call(marker: str, names: Sequence[str], like: ast.AST) -> ast.Call:
    made = ast.Call(ast.Constant(marker), [ast.Name(name, ast.Load()) for name in names], [])
    return ast.fix_missing_locations(ast.copy_location(made, like))


class Lowering:
    """Turns the jumps of one function into flags."""

    def __init__(self, function: ast.FunctionDef) -> None:
        self.function = function
        self.returns = any(
            own_nodes(node, ast.Return) for node in own_nodes(function.body, (ast.If, ast.While)) if maybe_tensor(node)
        )
        self.loops: list[
            tuple[str, str]
        ] = []  # (break flag, continue flag) of the loops around, "" where it stays a real one
        self.count = 0

    def run(self) -> None:
        body = self.function.body
        falls = not terminates(body)
        if self.returns:
            for block in own_nodes(body, (ast.Try, *([ast.TryStar] if hasattr(ast, "TryStar") else []))):
                if own_nodes(block, ast.Return):
                    raise NotRewritten(
                        "it returns from inside `try` and from inside an `if` that may depend on a tensor"
                    )
        made = self.block(body)
        if self.returns:
            end = ast.copy_location(ast.Return(ast.Name(VALUE, ast.Load())), body[-1])
            if falls:
                made.append(self.guarded([RETURNED], [assign(VALUE, ast.Constant(None), body[-1])], body[-1]))
            made = [assign(RETURNED, ast.Constant(False), body[0]), *made, ast.fix_missing_locations(end)]
        self.function.body = made

    def block(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        made: list[ast.stmt] = []
        for place, statement in enumerate(statements):
            flags = self.flags_of(statement)
            made += self.statement(statement)
            rest = statements[place + 1 :]
            if flags and rest:
                made.append(self.guarded(flags, self.block(rest), rest[0]))
                break
        return made

    def flags_of(self, statement: ast.stmt) -> list[str]:
        """The flags that a statement may set for what follows it in its block."""
        found = [RETURNED] if self.returns and own_nodes(statement, ast.Return) else []
        if self.loops:
            broken, continued = self.loops[-1]
            if broken and own_nodes(statement, ast.Break, loops=False):
                found.append(broken)
            if continued and own_nodes(statement, ast.Continue, loops=False):
                found.append(continued)
        return found

    def guarded(self, flags: list[str], body: list[ast.stmt], like: ast.AST) -> ast.stmt:
        """`if` none of the flags is set: body, in which none of them is set."""
        reset = [assign(flag, ast.Constant(False), like) for flag in flags]
        return ast.copy_location(ast.If(call(FREE, flags, like), [*reset, *body], []), like)

    def statement(self, statement: ast.stmt) -> list[ast.stmt]:
        if isinstance(statement, ast.Return) and self.returns:
            value = statement.value if statement.value is not None else ast.Constant(None)
            return [assign(VALUE, value, statement), assign(RETURNED, ast.Constant(True), statement)]
        if isinstance(statement, (ast.Break, ast.Continue)):
            flag = self.loops[-1][isinstance(statement, ast.Continue)] if self.loops else ""
            return [assign(flag, ast.Constant(True), statement)] if flag else [statement]
        if isinstance(statement, (ast.For, ast.While)):
            return self.loop(statement)
        for inside in blocks(statement):
            inside[:] = self.block(list(inside))
        return [statement]

    def loop(self, loop: ast.For | ast.While) -> list[ast.stmt]:
        """A loop whose jumps are flags where one of them stands in an `if` on a tensor, or where its own test may be
        one.
        """
        whole = isinstance(loop, ast.While) and maybe_tensor(loop)
        inside = (
            loop.body
            if whole
            else [node for node in own_nodes(loop.body, (ast.If, ast.While), loops=False) if maybe_tensor(node)]
        )
        jumps = {kind: bool(own_nodes(inside, kind, loops=False)) for kind in (ast.Break, ast.Continue)}
        returns = self.returns and bool(own_nodes(loop.body, ast.Return))
        either = any(jumps.values()) or returns
        self.count += 1
        broken = f"break {self.count}" if either and own_nodes(loop.body, ast.Break, loops=False) else ""
        continued = f"continue {self.count}" if either and own_nodes(loop.body, ast.Continue, loops=False) else ""
        number = self.count
        self.loops.append((broken, continued))
        body = self.block(loop.body)
        self.loops.pop()
        orelse = self.block(loop.orelse)
        if not either:
            loop.body, loop.orelse = body, orelse
            return [loop]
        return self.flagged_loop(loop, body, orelse, broken, continued, [RETURNED] if returns else [], number)

    def flagged_loop(
        self, loop: Any, body: list, orelse: list, broken: str, continued: str, returned: list[str], number: int
    ) -> list:
        stops = [*([broken] if broken else []), *returned]
        start = [assign(continued, ast.Constant(False), loop)] if continued else []
        made: list[ast.stmt] = [assign(broken, ast.Constant(False), loop)] if broken else []
        if continued:
            made.append(assign(continued, ast.Constant(False), loop))
        if isinstance(loop, ast.While):
            if stops:
                test = ast.BoolOp(ast.And(), [call(FREE, stops, loop), loop.test])
                loop.test = ast.fix_missing_locations(ast.copy_location(test, loop.test))
            loop.body = [*start, *body]
        elif stops:
            item = f"item {number}"
            first = ast.copy_location(ast.Assign([loop.target], ast.Name(item, ast.Load())), loop.target)
            loop.target = ast.copy_location(ast.Name(item, ast.Store()), loop.target)
            halt = ast.copy_location(ast.If(call(HALT, stops, loop), [ast.copy_location(ast.Break(), loop)], []), loop)
            loop.body = [self.guarded(stops, [ast.fix_missing_locations(first), *start, *body], loop), halt]
        else:
            loop.body = [*start, *body]
        loop.orelse = []
        made.append(loop)
        if orelse:
            made += [self.guarded(stops, orelse, orelse[0])] if stops else orelse
        return made


def lower_jumps(function: ast.FunctionDef) -> None:
    """Rewrite the jumps of one function (not of those nested in it), in place.

    Raises:
        NotRewritten: a `return` inside `try`, whose `else` and `finally` a flag would not respect.
    """
    absorb(function.body)
    unreachable(function.body)
    Lowering(function).run()
