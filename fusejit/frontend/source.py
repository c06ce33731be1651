"""Source: a function object becomes its syntax tree, and a changed tree becomes a function object again.

In: a Python function. Out: `Source`, whose tree may be copied and changed, and `build(function, code_of(source,
tree))`: the same function (globals, closure cells, defaults, name, attributes) with other code, whose lines are still
the user's.

    >>> source = read(f)
    >>> tree = source.tree(); tree.body.insert(0, ast.parse("print('in')").body[0])
    >>> build(f, code_of(source, tree))(3)
    in
    4

The tree is cut out of the whole parsed file, so lines and columns need no correction and lambdas are found by their
position. It is believed only if it compiles to the very bytecode of the function: a file that was edited after its
import is refused. Neither the decorators nor the default values are executed again: only code is made, and code has
neither.
"""

from __future__ import annotations
import __future__

import ast
import copy
import functools
import inspect
import linecache
import types
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..capture.source_lines import shorten, stack_entry
from ..errors import Unsupported

FACTORY = "<fusejit factory>"
ARM = "arm "
"""How the names of functions start that stand for a block of the user's function; tracebacks show that function's
name.
"""
FUTURES = functools.reduce(
    int.__or__, (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
)
REFUSED = (
    (
        inspect.CO_COROUTINE,
        "an async function",
        "a graph has nothing to wait for; make it a plain `def`, and await outside of it",
    ),
    (
        inspect.CO_ASYNC_GENERATOR,
        "an async generator",
        "a graph has nothing to wait for; return a list of tensors from a plain `def`",
    ),
    (
        inspect.CO_GENERATOR,
        "a generator",
        "a graph returns all its results at once; build a list and return it instead of `yield`",
    ),
)
PYTEST = "@py_"
"""How pytest starts the names of the variables that it adds where it rewrites an `assert`."""


KNOWN: dict[tuple[types.CodeType, str], Source] = {}
"""Trees of code that other rewrites made out of a user's function, by code object and file name; no file has their
text.
"""


class NoSource(Exception):
    """A function whose syntax tree cannot be had; the text says why. It can still be traced as it is."""


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """Where a function's code stands.

    Attributes:
        node: its `def` or `lambda` in the parsed file; never changed, see `tree`.
        code: the code object that it was found for.
        owner: name of the class whose body it stands in, which private names (`self.__x`) take; "" outside of one.
        imports: names that the file imports; Python compiles calls of their attributes in a way of its own.
    """

    node: ast.FunctionDef | ast.Lambda
    code: types.CodeType
    owner: str
    imports: tuple[str, ...] = ()

    @property
    def filename(self) -> str:
        return self.code.co_filename

    def line(self, node: ast.AST | None = None) -> str:
        """Return the user's line of a node of the tree, as ``"model.py:12: y = f(x)"``."""
        number = getattr(node, "lineno", None) or self.code.co_firstlineno
        return shorten(stack_entry(self.filename, number, self.code.co_name))

    def tree(self) -> ast.FunctionDef:
        """Return a fresh `def` that may be changed: without decorators, defaults and annotations; a lambda's body is
        its `return`.
        """
        node = copy.deepcopy(self.node)
        if isinstance(node, ast.Lambda):
            returned = ast.copy_location(ast.Return(node.body), node.body)
            made = ast.FunctionDef(name=self.code.co_name, args=node.args, body=[returned], decorator_list=[])
            node = ast.copy_location(made, node)
        return bare(node)


def bare(node: Any) -> Any:
    """Take from a `def` or `lambda` what is evaluated where it stands rather than when it is called."""
    args = node.args
    args.defaults, args.kw_defaults = [], [None] * len(args.kwonlyargs)
    for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg):
        if arg is not None:
            arg.annotation = None
    if isinstance(node, ast.FunctionDef):
        node.decorator_list, node.returns = [], None
        if hasattr(node, "type_params"):  # Python 3.12 on
            node.type_params = []
    return node


# Function to tree.


def read(function: types.FunctionType) -> Source:
    """Find the syntax tree of a function.

    Raises:
        NoSource: there is no source text (REPL, exec), or it is not that of this function any more.
        Unsupported: an async function or a generator; names its line.
    """
    refuse_kind(function)
    key = (function.__code__, function.__code__.co_filename)
    return KNOWN[key] if key in KNOWN else read_code(*key)


def refuse_kind(function: types.FunctionType) -> None:
    """Raise for a function that does not run from its first line to a `return`."""
    code = function.__code__
    for flag, what, way_out in REFUSED:
        if code.co_flags & flag:
            line = shorten(stack_entry(code.co_filename, code.co_firstlineno, code.co_name))
            raise Unsupported(f"{what} (`{function.__qualname__}`)", way_out, line)


@functools.lru_cache(maxsize=4096)
def read_code(code: types.CodeType, filename: str) -> Source:  # equal code objects may come from different files
    """Find the tree of a code object; a failure is not cached, since an editor may register the text later."""
    found, imports = index(filename, tuple(linecache.getlines(filename)))
    owner = class_around(code.co_qualname)
    for node in found.get((code.co_firstlineno, code.co_name), ()):
        source = Source(node, code, owner, imports)
        if same_code(compile_node(source, bare(copy.deepcopy(node))), code):
            return source
    if not linecache.getlines(filename):
        raise NoSource(f"there is no source text of {code.co_qualname} ({filename}): it was typed in or made by exec")
    raise NoSource(
        f"the text of {filename} is not that of {code.co_qualname} any more: the file was changed after it was imported"
    )


@functools.lru_cache(maxsize=64)
def index(filename: str, lines: tuple[str, ...]) -> tuple[dict[tuple[int, str], list[Any]], tuple[str, ...]]:
    """Find every `def` and `lambda` of a file by its first line (its first decorator's) and name; and the names that it
    imports.
    """
    found: dict[tuple[int, str], list[Any]] = {}
    imports: dict[str, None] = {}
    try:
        parsed = ast.parse("".join(lines), filename)
    except (SyntaxError, ValueError):  # another language, or text that is not what was compiled
        return found, ()
    waiting: list[ast.AST] = [parsed]
    while waiting:  # not into functions and classes, whose imports are their own
        node = waiting.pop()
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            imports |= dict.fromkeys(
                (alias.asname or alias.name).split(".")[0] for alias in node.names if alias.name != "*"
            )
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.expr)):
            waiting += ast.iter_child_nodes(node)
    for node in ast.walk(parsed):
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found.setdefault((first, node.name), []).append(node)
        elif isinstance(node, ast.Lambda):
            found.setdefault((node.lineno, "<lambda>"), []).append(node)
    return found, tuple(imports)


def class_around(qualname: str) -> str:
    """Return the innermost class around a function: ``"K"`` of ``"K.method.<locals>.inner"``, or ``""``."""
    parts = qualname.split(".")
    place = len(parts) - 1
    while place > 0:
        if parts[place - 1] != "<locals>":
            return parts[place - 1]
        place -= 2
    return ""


def same_code(made: types.CodeType, code: types.CodeType) -> bool:
    """Whether the tree that was found is the one that `code` was compiled from; positions tell two lambdas of one line
    apart.
    """
    if made.co_freevars != code.co_freevars or arguments_of(made) != arguments_of(code):
        return False
    if any(name.startswith(PYTEST) for name in code.co_varnames):
        return True  # pytest compiled another tree, in which each `assert` says more
    first = {made.co_firstlineno, code.co_firstlineno}
    return (
        made.co_code == code.co_code
        and made.co_names == code.co_names
        and made.co_varnames == code.co_varnames
        and positions(made, first) == positions(code, first)
    )


def positions(code: types.CodeType, first: set[int]) -> list[Any]:
    """Where each instruction stands; those of the first lines aside: the decorator's in the original, and the `def` in
    its tree.
    """
    return [place for place in code.co_positions() if place[0] not in first or code.co_name == "<lambda>"]


def arguments_of(code: types.CodeType) -> tuple[str, ...]:
    flags = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + flags]


# Tree to function.


def compile_node(source: Source, node: ast.FunctionDef | ast.Lambda) -> types.CodeType:
    """Compile one function as if it stood where it stood: the same free variables, the same class for private names."""
    parameters = [ast.arg(name) for name in source.code.co_freevars]
    arguments = ast.arguments(posonlyargs=[], args=parameters, kwonlyargs=[], kw_defaults=[], defaults=[])
    inside = ast.Return(node) if isinstance(node, ast.Lambda) else node
    outer: ast.stmt = ast.FunctionDef(name=FACTORY, args=arguments, body=[inside], decorator_list=[])
    if source.owner:
        outer = ast.ClassDef(name=source.owner, bases=[], keywords=[], body=[outer], decorator_list=[])
    for made in ast.walk(outer):
        if isinstance(made, (ast.FunctionDef, ast.ClassDef)) and not hasattr(made, "type_params"):
            setattr(made, "type_params", [])  # noqa: B010  # Python 3.12 on has the field and wants it set
    imported: list[ast.stmt] = (
        [ast.Import([ast.alias(name) for name in source.imports])] if source.imports else []
    )  # never runs
    module = ast.fix_missing_locations(ast.copy_location(ast.Module(body=[*imported, outer], type_ignores=[]), node))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what Python has to say of the user's syntax it said at import
        code = compile(module, source.filename, "exec", source.code.co_flags & FUTURES, dont_inherit=True)
    while code.co_name != FACTORY:
        code = inner(code)
    return inner(code)


def inner(code: types.CodeType) -> types.CodeType:
    return next(constant for constant in code.co_consts if isinstance(constant, types.CodeType))


def code_of(source: Source, tree: ast.FunctionDef, constants: Mapping[str, Any] | None = None) -> types.CodeType:
    """Compile a changed tree.

    Args:
        tree: from `source.tree()`; new nodes without a position take their parent's.
        constants: {string: object}: wherever the tree has that string as a constant, the code has the object. So a
            rewrite can call functions that are neither globals nor closure variables of the user's, and nothing reads
            or guards them.
    """
    code = compile_node(source, tree)
    return with_constants(code, constants or {}).replace(co_qualname=source.code.co_qualname)


def with_constants(code: types.CodeType, constants: Mapping[str, Any], name: str = "") -> types.CodeType:
    """Put objects in the place of string constants, in nested functions too; give arms the name of the function that
    they are of.
    """
    name = name if code.co_name.startswith(ARM) else code.co_name

    def exchanged(value: Any) -> Any:
        if isinstance(value, types.CodeType):
            return with_constants(value, constants, name)
        return constants.get(value, value) if isinstance(value, str) else value

    made = code.replace(co_consts=tuple(map(exchanged, code.co_consts)))
    if made.co_name.startswith(ARM):
        made = made.replace(co_name=name, co_qualname=name)
    return made


def build(
    function: types.FunctionType, code: types.CodeType, changed: Mapping[str, types.CellType] | None = None
) -> types.FunctionType:
    """Make the function that is `function` with other code: the very same globals dict, cells, default objects,
    `__dict__` entries.

    Args:
        changed: closure variables that are others.
    """
    cells = {**dict(zip(function.__code__.co_freevars, function.__closure__ or ())), **(changed or {})}
    made = types.FunctionType(
        code,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        tuple(cells[name] for name in code.co_freevars),
    )
    made.__kwdefaults__ = function.__kwdefaults__
    made.__qualname__, made.__module__, made.__doc__ = function.__qualname__, function.__module__, function.__doc__
    made.__annotations__ = function.__annotations__
    made.__dict__.update(function.__dict__)
    return made
