"""HyperMap and MultitypeFuncGraph: nesting, dispatch, order and errors, eagerly and inside jit."""

from __future__ import annotations

import collections

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import fusejit
from fusejit import HyperMap, MultitypeFuncGraph

Pair = collections.namedtuple("Pair", "left right")


def kinds() -> MultitypeFuncGraph:
    graph = MultitypeFuncGraph("kinds")
    graph.register("Tensor", "Tuple")(lambda x, items: x * 2 + sum(items))
    graph.register("Tensor", "List")(lambda x, items: x * 3 - sum(items))
    graph.register("Tensor", "Number")(lambda x, n: x + n)
    return graph


@pytest.fixture(params=["plain", "eager", "interpret"])
def run(request, backend, device):
    """How a function is called: as it is, or jitted on a backend."""
    if request.param == "plain":
        return lambda f: f
    chosen = backend if request.param == "interpret" else "eager"
    return lambda f: fusejit.jit(f, backend=chosen, fullgraph=True)


def test_case_58(run, device):
    square = HyperMap(lambda x: x * x)
    assert square(((1, 2), (3, 4))) == ((1, 4), (9, 16))
    x, y = torch.randn(5, device=device), torch.randn(2, 3, device=device)
    assert_close(run(square)(((x, 2), (3, y))), ((x * x, 4), (9, y * y)))
    by_type = HyperMap(kinds())
    result = run(by_type)((x, y, x), ((1, 2), [3, 4], 5))
    assert_close(result, (x * 2 + 3, y * 3 - 7, x + 5))

    def add(xs, ys):
        return HyperMap(lambda a, b: a + b)(xs, ys)

    with pytest.raises(ValueError, match=r"2, 3 elements.*test_hypermap\.py:\d+: return HyperMap"):
        run(add)((x, x), (x, x, x))
    with pytest.raises(TypeError, match=r"a list meets a tuple.*test_hypermap\.py:\d+: return HyperMap"):
        run(add)((x, x), [x, x])


def test_without_ops_the_first_argument_is_the_function():
    assert HyperMap()(lambda x, y: x + y, [1, (2, 3)], [10, (20, 30)]) == (11, (22, 33))
    with pytest.raises(TypeError, match="first argument of the call"):
        HyperMap()((1, 2))
    with pytest.raises(TypeError, match="first argument of the call"):
        HyperMap()()
    with pytest.raises(TypeError, match="at least one sequence"):
        HyperMap(abs)()


@pytest.mark.parametrize(("reverse", "calls"), [(False, [1, 2, 3, 4]), (True, [4, 3, 2, 1])])
def test_reverse_turns_the_calls_and_not_the_result(reverse, calls):
    seen = []

    def note(x):
        seen.append(x)
        return -x

    assert HyperMap(note, reverse=reverse)(((1, 2), (3, 4))) == ((-1, -2), (-3, -4))
    assert seen == calls


def test_sequences_give_tuples_named_tuples_and_dicts_themselves(run, device):
    x = torch.randn(3, device=device)
    double = HyperMap(lambda v: v * 2)
    assert_close(run(double)([x, [x]]), (x * 2, (x * 2,)))
    assert HyperMap(lambda v: v)(()) == HyperMap(lambda v: v)([]) == ()
    assert type(double(Pair(1, 2))) is Pair and double(Pair(1, (2,))) == (2, (4,))
    assert_close(run(double)({"a": x, "b": (x,)}), {"a": x * 2, "b": (x * 2,)})
    with pytest.raises(ValueError, match="different keys"):
        HyperMap(lambda a, b: a)({"a": 1}, {"b": 1})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (np.ones(3), "NumPy ndarray"),
        ((1, np.float32(2)), "NumPy float32"),
        ((v for v in (1, 2)), "generator"),
        ({1, 2}, "set"),
        (torch.nn.ParameterList([torch.ones(2)]), "ParameterList"),
    ],
)
def test_what_is_no_sequence_is_a_type_error(given, message):
    with pytest.raises(TypeError, match=message):
        HyperMap(lambda x: x)(given)


@pytest.mark.parametrize("make", [lambda: HyperMap(3), lambda: HyperMap(abs, reverse=1), lambda: MultitypeFuncGraph(3)])
def test_bad_options_are_type_errors(make):
    with pytest.raises(TypeError):
        make()
    with pytest.raises(TypeError):
        MultitypeFuncGraph("f", read_value=1)


@pytest.mark.parametrize("kind", ["Tensr", 3, None, [torch.Tensor]])
def test_bad_register_types(kind):
    with pytest.raises(TypeError, match=r"'f': .*test_hypermap\.py"):
        MultitypeFuncGraph("f").register(kind)
    with pytest.raises(TypeError, match="types of the arguments"):
        MultitypeFuncGraph("f").register()
    with pytest.raises(TypeError, match="decorates a function"):
        MultitypeFuncGraph("f").register("Tensor")(3)


def test_no_overload_names_the_types_and_what_there_is():
    add = MultitypeFuncGraph("add")
    add.register("Tensor", "Number")(lambda x, y: x + y)
    add.register(str, torch.float64)(lambda x, y: y)
    with pytest.raises(
        ValueError,
        match=r"'add' has no function for \(Tensor, str\); registered: \(Tensor, Number\), \(str, torch.float64\)",
    ):
        add(torch.ones(2), "x")
    with pytest.raises(ValueError, match="registered: nothing"):
        MultitypeFuncGraph("empty")(1)
    with pytest.raises(ValueError, match=r"for \(int\)"):
        add(1)


def test_the_nearest_types_win_and_a_later_registration_replaces():
    which = MultitypeFuncGraph("which")
    for name in ("Any", "Number", "Int", "Float", "Bool", "Tensor", "Tuple", "List", "Dict", "None", "String"):
        which.register(name)(lambda x, name=name: name)
    which.register(torch.float64)(lambda x: "float64")
    which.register(Pair)(lambda x: "Pair")
    values = [object(), 1j, 1, 1.0, True, torch.ones(2), (1,), [1], {}, None, "x", torch.ones(2).double(), Pair(1, 2)]
    expected = [
        "Any",
        "Number",
        "Int",
        "Float",
        "Bool",
        "Tensor",
        "Tuple",
        "List",
        "Dict",
        "None",
        "String",
        "float64",
        "Pair",
    ]
    assert [which(v) for v in values] == expected
    assert which(torch.nn.Parameter(torch.ones(2))) == "Tensor"
    which.register("Int")(lambda x: "again")
    assert which(1) == "again"
    numbers = MultitypeFuncGraph("numbers")
    numbers.register("Number")(lambda x: "number")
    assert numbers(True) == numbers(2) == "number"


def test_read_value_is_checked():
    change = MultitypeFuncGraph("change", read_value=True)
    change.register("Tensor")(lambda x: x.add_(1))
    change.register("Number")(lambda x: x + 1)
    assert change(1) == 2
    with pytest.raises(ValueError, match="changed an argument in place"):
        change(torch.ones(2))


def test_a_new_overload_recompiles(fuse, device):
    graph = MultitypeFuncGraph("scale")
    graph.register("Tensor")(lambda x: x * 2)
    scale = HyperMap(graph)

    @fuse
    def f(xs):
        return scale(xs)

    x = torch.ones(3, device=device)
    assert_close(f((x, x)), (x * 2, x * 2))
    graph.register("Tensor")(lambda x: x * 5)
    assert_close(f((x, x)), (x * 5, x * 5))


def test_a_map_over_many_tensors_is_one_launch(fuse, device):
    update = MultitypeFuncGraph("update")

    @update.register("Tensor", "Tensor")
    def _(p, g):
        return p.sub_(0.1 * g)

    def step(params, grads):
        HyperMap(update)(params, grads)

    shapes = [(3, 5), (8,), (2, 2, 2), (40,), (1,)]
    params, grads = (tuple(torch.randn(s, device=device) for s in shapes) for _ in range(2))
    expected = [p - 0.1 * g for p, g in zip(params, grads, strict=True)]
    fused = fuse(step, fullgraph=True)
    fused(params, grads)
    assert_close(list(params), expected)
    assert fused.explain(params, grads).launches == 1
