"""Function to tree and back: the same function, wherever it stood; what cannot be read says why."""

from __future__ import annotations

import ast
import functools
import importlib.util
import traceback
from typing import Any

import pytest

from fusejit.errors import Unsupported
from fusejit.frontend.source import NoSource, build, code_of, read

SCALE = 3


def rebuilt(function: Any, constants: Any = None) -> Any:
    source = read(function)
    return build(function, code_of(source, source.tree(), constants))


def count_calls(function: Any) -> Any:
    count_calls.times += 1

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


count_calls.times = 0


@count_calls
@functools.cache
def decorated(x, y=2, *rest, z: int = 4, **more) -> int:
    "With a docstring."
    return x * SCALE + y + z + sum(rest) + len(more)


class Base:
    def value(self):
        return 1


class Derived(Base):
    __hidden = 10

    def value(self, more=5):
        def inner():
            return self.__hidden

        return super().value() + more + inner() + self.__hidden


def test_defaults_decorators_and_globals():
    plain = decorated.__wrapped__.__wrapped__
    before = count_calls.times
    made = rebuilt(plain)
    assert made(1) == plain(1) == 9 and made(1, 2, 3, z=1, k=0) == plain(1, 2, 3, z=1, k=0)
    assert count_calls.times == before
    assert made.__globals__ is plain.__globals__ and made.__defaults__ is plain.__defaults__
    assert made.__kwdefaults__ is plain.__kwdefaults__
    assert (made.__name__, made.__qualname__, made.__doc__) == ("decorated", "decorated", "With a docstring.")
    assert made.__annotations__ == plain.__annotations__


def test_super_and_private_names():
    assert rebuilt(Derived.value)(Derived()) == Derived().value() == 26


def test_cells_are_shared():
    count = 0

    def step(by=1):
        nonlocal count
        count += by
        return count

    made = rebuilt(step)
    assert made() == 1 and step(2) == 3 and made(3) == 6 == count
    assert made.__closure__ == step.__closure__


def test_lambdas_are_found_by_position():
    pair = (lambda x: x + 1, lambda x: x + 1, lambda x: x * 2)
    assert [rebuilt(f)(5) for f in pair] == [6, 6, 10]
    assert read(pair[0]).node is not read(pair[1]).node


def test_tracebacks_show_the_users_line():
    def fails(x):
        y = x + 1
        return y / 0  # here

    try:
        rebuilt(fails)(1)
    except ZeroDivisionError as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
    assert last.filename == __file__ and last.line.endswith("# here") and last.name == "fails"


def test_constants_become_objects():
    def f(x):
        call = "\0marker"
        return call(x)

    seen: list[Any] = []
    assert rebuilt(f, {"\0marker": seen.append})(3) is None and seen == [3]


def test_asserts_that_pytest_rewrote():
    def f(x):
        assert x > 0, "no"
        return x

    assert rebuilt(f)(1) == 1
    with pytest.raises(AssertionError):
        rebuilt(f)(-1)


def test_no_source():
    scope: dict[str, Any] = {}
    exec("def f(x): return x", scope)
    with pytest.raises(NoSource, match="exec"):
        read(scope["f"])


def test_changed_file(tmp_path):
    path = tmp_path / "changing.py"
    path.write_text("def f(x):\n    return x + 1\n")
    spec = importlib.util.spec_from_file_location("changing", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    path.write_text("def f(x):\n    return x + y\n")
    with pytest.raises(NoSource, match="changed"):
        read(module.f)


def test_refused_kinds():
    async def waits():
        return 1

    def yields():
        yield 1

    async def both():
        yield 1

    for function, word in ((waits, "async function"), (yields, "a generator"), (both, "async generator")):
        with pytest.raises(Unsupported, match=word) as caught:
            read(function)
        assert "test_source.py" in caught.value.line and "def" in caught.value.line


def test_trees_are_fresh():
    def f(x):
        return x

    source = read(f)
    tree = source.tree()
    tree.body[0].value = ast.copy_location(ast.Constant(7), tree.body[0])
    assert build(f, code_of(source, tree))(1) == 7
    assert rebuilt(f)(1) == 1
