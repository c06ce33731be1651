"""Messages: what fusejit's source can say where it refuses something, read from its syntax trees.

In: the package's folder. Out: for each place that makes a refusal its texts, with "…" where a value is filled in.

    >>> sorted(Source(FUSEJIT).messages("CaptureError"))[0].texts
    ('… has … specialisations already (FUSEJIT_SPECIALISATIONS)',)

A text may come from a constant, an f-string, a local variable, a table, a function that returns texts, or an argument
of the function that refuses; what comes from none of these (torch's own error, a name of the user's) is "…".
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

FUSEJIT = Path(__file__).parents[1] / "fusejit"
GAP = "…"
DEPTH, MOST = 12, 200
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, order=True, slots=True)
class Message:
    """One place in the source, and each text that one of its arguments may be."""

    where: str
    texts: tuple[str, ...]


def says_something(text: str) -> bool:
    """Whether there are words of ours in a text, and not only what is filled in."""
    return re.search(r"[A-Za-z]{3}", text) is not None


def assigned(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """(name, value) of an assignment."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Name):
                yield target.id, node.value
            elif isinstance(target, ast.Tuple):
                yield from unpacked(target, node.value)
    elif isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.NamedExpr)):
        if isinstance(node.target, ast.Name) and node.value:
            yield node.target.id, node.value
    elif isinstance(node, (ast.For, ast.comprehension)) and isinstance(node.target, ast.Tuple):
        yield from unpacked(node.target, node.iter)


def unpacked(target: ast.Tuple, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """`a, b = x` as a = x[0], b = x[1]; of a table, of its rows."""
    for place, item in enumerate(target.elts):
        if isinstance(item, ast.Name):
            chosen = [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
            for one in chosen:
                whole = isinstance(one, ast.Tuple) and len(one.elts) == len(target.elts)
                yield item.id, one.elts[place] if whole else ast.Subscript(one, ast.Constant(place))  # type: ignore[attr-defined]


class Source:
    """The syntax trees of a package, and where its names are bound."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.parents: dict[ast.AST, ast.AST] = {}
        self.files: dict[ast.AST, Path] = {}
        self.constants: dict[tuple[Path, str], list[ast.expr]] = {}
        self.imported: dict[tuple[Path, str], str] = {}
        self.functions: dict[str, list[Function]] = {}
        self.calls: dict[str, list[ast.Call]] = {}
        self.bases: dict[str, list[str]] = {}
        self.bound: dict[Function, dict[str, list[ast.expr]]] = {}
        for path in sorted(root.rglob("*.py")):
            self.read(path, ast.parse(path.read_text()))

    def read(self, path: Path, tree: ast.Module) -> None:
        for node in tree.body:
            inside = ast.walk(node) if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)) else [node]
            for name, value in (pair for one in inside for pair in assigned(one)):
                self.constants.setdefault((path, name), []).append(value)
        for node in ast.walk(tree):
            self.files[node] = path
            self.parents |= dict.fromkeys(ast.iter_child_nodes(node), node)
            if isinstance(node, Function):
                self.functions.setdefault(node.name, []).append(node)
            elif isinstance(node, ast.ClassDef):
                self.bases[node.name] = [name_of(base) for base in node.bases]
            elif isinstance(node, ast.Call):
                self.calls.setdefault(name_of(node.func), []).append(node)
            elif isinstance(node, ast.ImportFrom):
                self.imported |= {
                    (path, a.asname or a.name): (node.module or "").rpartition(".")[2] for a in node.names
                }

    def messages(self, *classes: str, arguments: int = 1) -> list[Message]:
        """What the calls of these classes are given as their first arguments, in the order of the source."""
        found = []
        for call in (call for name in classes for call in self.calls.get(name, ())):
            given = [
                *call.args,
                *(keyword.value for keyword in call.keywords if keyword.arg in ("op", "reason", "text")),
            ]
            if given and isinstance(given[0], ast.Starred):
                given = [ast.Subscript(given[0].value, ast.Constant(place)) for place in range(arguments)]
                self.adopt(given, call)
            for argument in given[:arguments]:
                found.append(self.message(argument, call))
        return found

    def exceptions(self) -> set[str]:
        """The classes of errors that the package defines."""
        found: set[str] = set()
        size = -1
        while size < len(found):
            size = len(found)
            found |= {
                name
                for name, bases in self.bases.items()
                if any(b in found or b.endswith(("Error", "Exception")) for b in bases)
            }
        return found

    def returned(self, name: str) -> list[Message]:
        """What a function of this name returns."""
        return [
            self.message(node.value, node)
            for function in self.functions[name]
            for node in ast.walk(function)
            if isinstance(node, ast.Return) and node.value is not None
        ]

    def message(self, argument: ast.expr, place: ast.AST) -> Message:
        texts = {re.sub(f"{GAP}(['`.]?{GAP})+", GAP, text) for text in self.texts(argument)}
        where = f"{self.files[place].relative_to(self.root.parent)}:{getattr(place, 'lineno', 0)}"
        return Message(where, tuple(sorted(filter(says_something, texts))))

    def adopt(self, nodes: Iterable[ast.AST], parent: ast.AST) -> None:
        """Give nodes that were made here the place of another one."""
        for node in nodes:
            self.parents[node], self.files[node] = parent, self.files[parent]

    # Texts.

    def texts(self, node: ast.expr, depth: int = 0) -> set[str]:
        """What an expression may be, as text."""
        if depth > DEPTH:
            return {GAP}
        match node:
            case ast.Constant(value=value):
                return {value} if isinstance(value, str) else {GAP}
            case ast.JoinedStr(values=values):
                parts = [sorted(self.filled(value, depth + 1)) for value in values]
                return {"".join(choice) for choice in itertools.islice(itertools.product(*parts), MOST)}
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return {a + b for a in self.texts(left, depth + 1) for b in self.texts(right, depth + 1)}
            case ast.IfExp(body=body, orelse=other):
                return self.texts(body, depth + 1) | self.texts(other, depth + 1)
            case ast.BoolOp(values=values):
                return self.union(values, depth)
            case ast.NamedExpr(value=value):
                return self.texts(value, depth + 1)
            case ast.Name():
                return self.union(self.values(node), depth)
            case ast.Subscript(value=value, slice=place):
                return self.union(self.items(value, place, depth), depth)
            case ast.Call():
                return self.called(node, depth)
        return {GAP}

    def filled(self, node: ast.expr, depth: int) -> set[str]:
        """What stands in a place of an f-string: a text of ours where a name is bound to some, a gap otherwise."""
        if not isinstance(node, ast.FormattedValue):
            return self.texts(node, depth)
        plain = (
            node.conversion == -1
            and node.format_spec is None
            and isinstance(node.value, (ast.Name, ast.IfExp, ast.Subscript))
        )
        texts = self.texts(node.value, depth) if plain else {GAP}
        phrases = {text if says_something(text) and (" " in text or text == "") else GAP for text in texts}
        return phrases or {GAP}

    def union(self, nodes: Iterable[ast.expr], depth: int) -> set[str]:
        return {text for node in nodes for text in self.texts(node, depth + 1)} or {GAP}

    def called(self, node: ast.Call, depth: int) -> set[str]:
        """What a function returns; of `text.format(...)`, the text."""
        name = name_of(node.func)
        if name == "get" and isinstance(node.func, ast.Attribute) and node.args:
            return self.union(self.items(node.func.value, node.args[0], depth), depth)
        if name == "format" and isinstance(node.func, ast.Attribute):
            return {re.sub(r"\{\w*\}", GAP, text) for text in self.texts(node.func.value, depth + 1)}
        own = [
            f for f in self.functions.get(name, ()) if isinstance(node.func, ast.Name) or len(self.functions[name]) == 1
        ]
        returned = [
            r.value for f in own for r in ast.walk(f) if isinstance(r, ast.Return) and r.value and self.scope(r) is f
        ]
        return self.union(returned, depth) if len(own) == 1 else {GAP}

    # Names.

    def scope(self, node: ast.AST) -> Function | None:
        """The function around a node."""
        while node in self.parents:
            node = self.parents[node]
            if isinstance(node, Function):
                return node
        return None

    def values(self, name: ast.Name) -> list[ast.expr]:
        """The expressions that a name may be bound to: in its function and those around it, by callers, in files."""
        function = self.scope(name)
        while function is not None:
            found = self.variables(function).get(name.id, [])
            if not found and name.id in (
                parameters := [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
            ):
                found = self.passed(function, name.id, parameters)
            if found:
                return found
            function = self.scope(function)
        path = self.files[name]
        found = self.constants.get((path, name.id), [])
        if not found and (module := self.imported.get((path, name.id))):
            found = [
                v for (other, n), vs in self.constants.items() if n == name.id and other.stem == module for v in vs
            ]
        self.adopt([value for value in found if value not in self.parents], name)
        return found

    def variables(self, function: Function) -> dict[str, list[ast.expr]]:
        """What the names of a function are bound to."""
        if function not in self.bound:
            self.bound[function] = found = {}
            for name, value in (pair for node in ast.walk(function) for pair in assigned(node)):
                found.setdefault(name, []).append(value)
            self.adopt([value for values in found.values() for value in values if value not in self.parents], function)
        return self.bound[function]

    def passed(self, function: Function, name: str, parameters: list[str]) -> list[ast.expr]:
        """What the callers of a function give for a parameter."""
        place, found = parameters.index(name), []
        for call in self.calls.get(function.name, ()):
            skipped = parameters[0] in ("self", "cls") and isinstance(call.func, ast.Attribute)
            found += [keyword.value for keyword in call.keywords if keyword.arg == name]
            found += (
                []
                if any(isinstance(a, ast.Starred) for a in call.args)
                else call.args[place - skipped : place - skipped + 1]
            )
        return found

    def items(self, table: ast.expr, place: ast.expr, depth: int) -> list[ast.expr]:
        """The expressions that an item of a tuple, a list or a dict may be, looked up where a name stands for one."""
        if depth > DEPTH:
            return []
        rows: list[ast.expr] = []
        match table:
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                number = place.value if isinstance(place, ast.Constant) else None
                nested = [row.elts for row in elements if isinstance(row, ast.Tuple)]
                for row in nested or [elements]:
                    rows += row[number : number + 1] if isinstance(number, int) else row
            case ast.Dict(values=values):
                rows = list(values)
            case ast.DictComp(value=value):
                rows = [value]
            case ast.Call(func=ast.Attribute(value=inner, attr="items")):
                dicts = [
                    d for d in (self.values(inner) if isinstance(inner, ast.Name) else []) if isinstance(d, ast.Dict)
                ]
                first = isinstance(place, ast.Constant) and place.value == 0
                rows = [item for d in dicts for item in (d.keys if first else d.values) if item is not None]
            case ast.Name():
                rows = [item for value in self.values(table) for item in self.items(value, place, depth + 1)]
            case ast.Subscript(value=inner, slice=key):
                rows = [item for row in self.items(inner, key, depth + 1) for item in self.items(row, place, depth + 1)]
            case ast.Call(func=ast.Attribute(value=inner, attr="get"), args=[key, *_]):
                rows = [item for row in self.items(inner, key, depth + 1) for item in self.items(row, place, depth + 1)]
        return rows


def name_of(function: ast.expr) -> str:
    """The last part of a name."""
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
