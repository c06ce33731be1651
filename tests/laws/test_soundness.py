"""Nothing is stale: for every kind of thing that a capture can read, change it and see the right new answer, in each
capture mode.

One mutation is a function that returns `(target, arguments, change)`: `target(*arguments())` is compared with the
jitted target before and after `change()`.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from fusejit import jit

MUTATIONS: dict[str, Callable] = {}
MODES = ("ast", "trace", "bytecode")


def mutation(make: Callable) -> Callable:
    MUTATIONS[make.__name__] = make
    return make


def ones() -> tuple:
    return (torch.linspace(-1, 2, 6).reshape(2, 3),)


def setter(holder: Any, name: str, value: Any) -> Callable:
    return lambda: setattr(holder, name, value)


class Net(nn.Module):
    kind = 3

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.flag, self.scale, self.steps = True, 2.0, [1.0, 2.0]
        self.table = {"a": {"b": [3.0]}}
        self.options = types.SimpleNamespace(deep=types.SimpleNamespace(k=4.0))
        self.linear = nn.Linear(3, 3)
        self.drop = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(3)
        self.layers = nn.ModuleList([nn.Linear(3, 3)])
        self.register_buffer("shift", torch.ones(3))
        self.weight = nn.Parameter(torch.full((3,), 2.0))
        self.extra: Any = None

    def helper(self, x):
        return x * 3

    def forward(self, x):
        x = x * self.scale if self.flag else x - 1
        for step in self.steps:
            x = x + step
        x = self.helper(x) * self.kind + self.table["a"]["b"][0] * self.options.deep.k
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype))
        if self.extra is not None:
            x = self.extra(x)
        if self.training:
            x = x * 5
        if self.drop.training:
            x = x + 0.5
        return self.linear(x.to(self.linear.weight.dtype)) * self.weight + self.shift


def net(change: Callable[[Net], Any]) -> Callable:
    def make():
        module = Net()
        return module, ones, lambda: change(module)

    return make


def replace_forward(module):
    module.forward = lambda x: x * 7


def to_half(module):
    module.linear.half()


NET = {
    "module_flag": lambda m: setattr(m, "flag", False),
    "module_number": lambda m: setattr(m, "scale", 3.0),
    "module_number_type": lambda m: setattr(m, "scale", 2),
    "list_element": lambda m: m.steps.__setitem__(0, 5.0),
    "list_grows": lambda m: m.steps.append(7.0),
    "list_replaced": lambda m: setattr(m, "steps", [1.0]),
    "nested_dict_value": lambda m: m.table["a"]["b"].__setitem__(0, 9.0),
    "dict_replaced": lambda m: m.table.__setitem__("a", {"b": [8.0]}),
    "nested_config_object": lambda m: setattr(m.options.deep, "k", 5.0),
    "config_object_replaced": lambda m: setattr(m.options, "deep", types.SimpleNamespace(k=6.0)),
    "parameter_replaced": lambda m: setattr(m, "weight", nn.Parameter(torch.full((3,), 4.0))),
    "parameter_data": lambda m: setattr(m.weight, "data", torch.full((3,), 5.0)),
    "parameter_in_place": lambda m: m.weight.data.mul_(3),
    "parameter_shape": lambda m: setattr(m, "weight", nn.Parameter(torch.full((1,), 4.0))),
    "parameter_frozen": lambda m: m.weight.requires_grad_(False),
    "all_frozen": lambda m: m.requires_grad_(False),
    "parameter_tied": lambda m: setattr(m.linear, "weight", m.layers[0].weight),
    "parameter_removed": lambda m: setattr(m.linear, "bias", None),
    "half": to_half,
    "double": lambda m: m.double(),
    "train_eval": lambda m: m.eval(),
    "training_of_a_submodule": lambda m: m.drop.eval(),
    "submodule_replaced": lambda m: (
        setattr(m, "linear", nn.Linear(3, 2, bias=False))
        or setattr(m, "weight", nn.Parameter(torch.ones(2)))
        or setattr(m, "shift", torch.zeros(2))
    ),
    "submodule_added": lambda m: setattr(m, "extra", nn.ReLU()),
    "submodule_added_to_a_list": lambda m: m.layers.append(nn.Linear(3, 3)),
    "submodule_in_a_list_replaced": lambda m: m.layers.__setitem__(0, nn.Linear(3, 3)),
    "submodule_removed": lambda m: m.layers.__delitem__(0),
    "buffer_replaced": lambda m: setattr(m, "shift", torch.full((3,), 6.0)),
    "buffer_in_place": lambda m: m.shift.mul_(4),
    "buffer_dtype": lambda m: setattr(m, "shift", torch.full((3,), 6.0, dtype=torch.float64)),
    "forward_hook": lambda m: m.register_forward_hook(lambda m, i, o: o * 2),
    "forward_pre_hook": lambda m: m.register_forward_pre_hook(lambda m, i: (i[0] * 2,)),
    "hook_on_a_submodule": lambda m: m.linear.register_forward_hook(lambda m, i, o: o * 2),
    "method_patched": lambda m: setattr(m, "helper", lambda x: x * 11),
    "forward_replaced": replace_forward,
    "class_attribute_shadowed": lambda m: setattr(m, "kind", 8),
    "attribute_of_a_layer": lambda m: setattr(m.layers[0], "forward", lambda x: x * 2),
    "load_state_dict": lambda m: m.load_state_dict({name: value * 2 for name, value in m.state_dict().items()}),
    "load_state_dict_assign": lambda m: m.load_state_dict(
        {name: value * 2 for name, value in m.state_dict().items()}, assign=True
    ),
}
MUTATIONS |= {name: net(change) for name, change in NET.items()}


# Functions: globals, closures, defaults, classes, modules.

SCALE = 2.0
TABLE = {"k": [1.0]}
WEIGHT = torch.ones(3)


def helper(x):
    return x * 2


def reads_globals(x):
    return helper(x) * SCALE + TABLE["k"][0] + WEIGHT


def global_change(name: str, value: Any) -> Callable:
    def make():
        return reads_globals, ones, setter(sys.modules[__name__], name, value)

    return make


MUTATIONS |= {
    "global_number": global_change("SCALE", 5.0),
    "global_function": global_change("helper", lambda x: x - 3),
    "global_tensor": global_change("WEIGHT", torch.full((3,), 4.0)),
    "global_dict": global_change("TABLE", {"k": [7.0]}),
}


@pytest.fixture(autouse=True)
def globals_put_back() -> Iterator[None]:
    before = {name: globals()[name] for name in ("SCALE", "TABLE", "WEIGHT", "helper", "Colour")}
    kept, values = (Net.kind, Net.helper, Net.forward), (WEIGHT.clone(), [*TABLE["k"]])
    yield
    globals().update(before)
    Net.kind, Net.helper, Net.forward = kept
    WEIGHT.copy_(values[0])
    TABLE["k"][:] = values[1]
    helper.__defaults__ = None


@mutation
def value_in_a_global_dict():
    return reads_globals, ones, lambda: TABLE["k"].__setitem__(0, 12.0)


@mutation
def global_tensor_in_place():
    return reads_globals, ones, lambda: WEIGHT.mul_(9)


@mutation
def code_of_a_global_function():
    def fresh(x):
        return x * 2

    def other(x):
        return x * 40

    def target(x):
        return fresh(x) + 1

    return target, ones, setter(fresh, "__code__", other.__code__)


@mutation
def attribute_of_a_python_module():
    module = types.ModuleType("settings_of_a_test")
    module.k = 2.0
    globals()["settings_module"] = module

    def target(x):
        return x * settings_module.k  # noqa: F821

    return target, ones, setter(module, "k", 3.0)


@mutation
def closure_number():
    scale = 2.0

    def target(x):
        return x * scale

    def change():
        nonlocal scale
        scale = 3.0

    return target, ones, change


@mutation
def closure_tensor():
    scale = torch.ones(3)

    def target(x):
        return x * scale

    def change():
        nonlocal scale
        scale = torch.ones(3, requires_grad=True) * 4

    return target, ones, change


@mutation
def closure_of_an_inner_function():
    scale = 2.0

    def inner(x):
        return x * scale

    def target(x):
        return inner(x) + 1

    def change():
        nonlocal scale
        scale = 3.0

    return target, ones, change


@mutation
def default_argument():
    def target(x, k=2.0):
        return x * k

    return target, ones, setter(target, "__defaults__", (6.0,))


@mutation
def keyword_default():
    def target(x, *, k=2.0):
        return x * k

    return target, ones, setter(target, "__kwdefaults__", {"k": 6.0})


@mutation
def default_of_a_called_function():
    def inner(x, k=2.0):
        return x * k

    def target(x):
        return inner(x) + 1

    return target, ones, setter(inner, "__defaults__", (6.0,))


@mutation
def mutable_default():
    held = [2.0]

    def target(x, k=held):
        return x * k[0]

    return target, ones, lambda: held.__setitem__(0, 5.0)


@mutation
def function_attribute():
    def target(x):
        return x * target.scale

    target.scale = 2.0
    return target, ones, setter(target, "scale", 3.0)


class Config:
    rate = 2.0

    def __init__(self) -> None:
        self.k = 1.0

    def twice(self, x):
        return x * 2

    @property
    def both(self):
        return self.k * self.rate


@mutation
def class_attribute():
    class Own(Config):
        rate = 2.0

    config = Own()
    return lambda x: x * config.rate, ones, setter(Own, "rate", 5.0)


@mutation
def class_attribute_of_a_base():
    class Base:
        rate = 2.0

    class Own(Base):
        pass

    config = Own()
    return lambda x: x * config.rate, ones, setter(Base, "rate", 5.0)


@mutation
def class_attribute_shadowed_by_a_class():
    class Base:
        rate = 2.0

    class Own(Base):
        pass

    config = Own()
    return lambda x: x * config.rate, ones, setter(Own, "rate", 5.0)


@mutation
def class_attribute_read_through_the_class():
    class Own:
        rate = 2.0

    return lambda x: x * Own.rate, ones, setter(Own, "rate", 5.0)


@mutation
def class_attribute_of_a_module():
    return Net(), ones, setter(Net, "kind", 9)


@mutation
def method_of_a_class():
    return Net(), ones, setter(Net, "helper", lambda self, x: x - 4)


@mutation
def forward_of_a_class():
    return Net(), ones, setter(Net, "forward", lambda self, x: x * 77)


@mutation
def property_of_an_object():
    config = Config()
    return lambda x: x * config.both, ones, setter(config, "k", 4.0)


@mutation
def method_of_an_object():
    config = Config()
    return lambda x: config.twice(x), ones, setter(config, "twice", lambda x: x * 9)


@mutation
def object_in_a_list():
    configs = [Config(), Config()]
    return lambda x: x * configs[1].k, ones, setter(configs[1], "k", 9.0)


@mutation
def object_replaced_in_a_list():
    configs = [Config(), Config()]

    def change():
        configs[1] = Config()
        configs[1].k = 5.0

    return lambda x: x * configs[1].k, ones, change


@dataclasses.dataclass
class Point:
    a: float
    b: list


@mutation
def dataclass_field():
    point = Point(2.0, [1.0])
    return lambda x: x * point.a, ones, setter(point, "a", 3.0)


@mutation
def list_in_a_dataclass():
    point = Point(2.0, [1.0])
    return lambda x: x * point.b[0], ones, lambda: point.b.__setitem__(0, 5.0)


@dataclasses.dataclass(slots=True)
class Slotted:
    a: float


@mutation
def slotted_field():
    point = Slotted(2.0)
    return lambda x: x * point.a, ones, setter(point, "a", 3.0)


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@mutation
def enum_attribute():
    config = Config()
    config.k = Colour.RED
    return lambda x: x * 2 if config.k is Colour.RED else x * 3, ones, setter(config, "k", Colour.BLUE)


@mutation
def set_membership():
    names = {"a"}
    return lambda x: x * 2 if "b" in names else x * 3, ones, lambda: names.add("b")


@mutation
def key_of_a_dict():
    names = {"a": 1}
    return lambda x: x * 2 if "b" in names else x * 3, ones, lambda: names.__setitem__("b", 1)


@mutation
def length_of_a_list():
    items = [1]
    return lambda x: x * len(items), ones, lambda: items.append(1)


@mutation
def absent_attribute():
    config = Config()
    return lambda x: x * getattr(config, "more", 2.0), ones, setter(config, "more", 5.0)


@mutation
def absent_attribute_of_a_module():
    module = Net()
    return lambda x: module(x) * getattr(module, "more", 2.0), ones, setter(module, "more", 5.0)


@mutation
def tensor_in_a_list():
    held = [torch.ones(3), torch.ones(3)]
    return lambda x: x * held[1], ones, lambda: held.__setitem__(1, torch.full((3,), 6.0))


@mutation
def tensor_on_an_object():
    config = Config()
    config.t = torch.ones(3)
    return lambda x: x * config.t, ones, setter(config, "t", torch.full((3,), 6.0))


@mutation
def type_of_an_attribute():
    config = Config()
    config.k = torch.ones(3)
    return lambda x: x * config.k, ones, setter(config, "k", 7.0)


@mutation
def partial_arguments():
    held = {"k": 2.0}

    def target(x):
        return x * held.get("k", 1.0)

    return target, ones, lambda: held.pop("k")


@mutation
def keyword_of_a_partial():
    scale = functools.partial(torch.mul, other=2.0)
    return lambda x: scale(x), ones, lambda: scale.keywords.__setitem__("other", 5.0)


@mutation
def object_of_a_bound_method():
    config = Config()
    config.scaled = types.MethodType(lambda self, x: x * self.k, config)
    method = config.scaled
    return lambda x: method(x), ones, setter(config, "k", 6.0)


@mutation
def call_of_a_class():
    class Scale:
        def __call__(self, x):
            return x * 2

    scale = Scale()
    return lambda x: scale(x), ones, setter(Scale, "__call__", lambda self, x: x * 3)


@mutation
def property_of_a_class():
    class Own(Config):
        @property
        def gain(self):
            return 2.0

    config = Own()
    return lambda x: x * config.gain, ones, setter(Own, "gain", property(lambda self: 4.0))


@mutation
def static_method_of_a_class():
    class Own:
        @staticmethod
        def scale(x):
            return x * 2

    return lambda x: Own.scale(x), ones, setter(Own, "scale", staticmethod(lambda x: x * 5))


@mutation
def list_of_a_class():
    class Own:
        rates = [2.0]

    own = Own()
    return lambda x: x * own.rates[0], ones, lambda: Own.rates.__setitem__(0, 3.0)


@mutation
def queue():
    held = collections.deque([2.0])
    return lambda x: x * held[0], ones, lambda: held.appendleft(3.0)


@mutation
def object_two_deep():
    config = Config()
    config.inner = Config()
    config.inner.inner = Config()
    return lambda x: x * config.inner.inner.k, ones, setter(config.inner.inner, "k", 3.0)


@mutation
def function_in_a_dict():
    table = {"f": lambda x: x * 2}
    return lambda x: table["f"](x), ones, lambda: table.__setitem__("f", lambda x: x * 3)


@mutation
def closure_of_a_function_in_a_list():
    k = 2.0

    def scaled(x):
        return x * k

    held = [scaled]

    def change():
        nonlocal k
        k = 3.0

    return lambda x: held[0](x), ones, change


@mutation
def module_in_a_plain_object():
    config = Config()
    config.net = nn.Linear(3, 3)
    return lambda x: config.net(x), ones, setter(config, "net", nn.Linear(3, 3))


@mutation
def module_in_a_dict():
    held = {"net": nn.Linear(3, 3)}
    return lambda x: held["net"](x), ones, lambda: held.__setitem__("net", nn.Linear(3, 3))


@mutation
def attribute_of_a_module_in_a_list():
    held = [Net()]
    return lambda x: held[0](x), ones, setter(held[0], "scale", 9.0)


# Arguments.


def arguments(target: Callable, first: Callable[[], tuple], then: Callable[[], tuple]) -> Callable:
    def make():
        state = [first]
        return target, lambda: state[0](), lambda: state.__setitem__(0, then)

    return make


def base(offset: int = 0) -> tuple:
    held = torch.arange(12.0)
    return held[:6], held[offset : offset + 6]


def add_twice(a, b):
    a.add_(1)
    return a + b


def one_object() -> tuple:
    held = torch.ones(6)
    return held, held


MUTATIONS |= {
    "argument_dtype": arguments(lambda x: x * 2, ones, lambda: (ones()[0].double(),)),
    "argument_shape": arguments(lambda x: x.sum() * x.shape[0], ones, lambda: (torch.ones(5, 3),)),
    "argument_rank": arguments(lambda x: x.sum(0), ones, lambda: (torch.ones(5, 3, 2),)),
    "argument_stride": arguments(lambda x: x.reshape(-1) + x.stride(0), ones, lambda: (torch.randn(3, 2).t(),)),
    "argument_requires_grad": arguments(lambda x: x * 2, ones, lambda: (ones()[0].requires_grad_(),)),
    "argument_parameter": arguments(lambda x: x * 2, ones, lambda: (nn.Parameter(ones()[0]),)),
    "argument_number": arguments(lambda x, k: x * k, lambda: (*ones(), 2), lambda: (*ones(), 3)),
    "argument_number_type": arguments(lambda x, k: x.int() * k, lambda: (*ones(), 2), lambda: (*ones(), 2.0)),
    "argument_bool": arguments(lambda x, k: x.int() * k, lambda: (*ones(), 1), lambda: (*ones(), True)),
    "argument_zero": arguments(lambda x, k: x / k, lambda: (*ones(), 0.0), lambda: (*ones(), -0.0)),
    "argument_string": arguments(lambda x, k: x if k == "a" else x * 2, lambda: (*ones(), "a"), lambda: (*ones(), "b")),
    "argument_none": arguments(lambda x, k: x if k is None else x * k, lambda: (*ones(), None), lambda: (*ones(), 3)),
    "argument_list": arguments(lambda x, k: x * sum(k), lambda: (*ones(), [1, 2]), lambda: (*ones(), [1, 5])),
    "argument_list_or_tuple": arguments(
        lambda x, k: x * (2 if isinstance(k, list) else 3), lambda: (*ones(), [1]), lambda: (*ones(), (1,))
    ),
    "argument_dict_order": arguments(
        lambda x, k: x * list(k.values())[0], lambda: (*ones(), {"a": 1, "b": 2}), lambda: (*ones(), {"b": 2, "a": 1})
    ),
    "arguments_share_memory": arguments(add_twice, lambda: base(6), lambda: base(3)),
    "arguments_are_one_object": arguments(add_twice, lambda: (torch.ones(6), torch.ones(6)), one_object),
    "arguments_expand": arguments(lambda x: x * 2, ones, lambda: (torch.ones(2, 1).expand(2, 3),)),
    "arguments_structure": arguments(lambda *xs: sum(xs), ones, lambda: (torch.ones(2, 3), torch.ones(2, 3))),
}


# The state of torch. These change what holds until the end of the test.

LEFT = contextlib.ExitStack()


@pytest.fixture(autouse=True)
def state_put_back() -> Iterator[None]:
    dtype, deterministic = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
    precision = torch.get_float32_matmul_precision()
    yield
    LEFT.pop_all().close()
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(deterministic)
    torch.set_float32_matmul_precision(precision)


def state(target: Callable, enter: Callable[[], Any]) -> Callable:
    def make():
        def change():
            context = enter()
            if context is not None:
                LEFT.enter_context(context)

        return target, lambda: (torch.ones(3, 3, requires_grad=True),), change

    return make


def matmul(x):
    return x @ x + torch.ones(3)


MUTATIONS |= {
    "no_grad": state(lambda x: x * 2, torch.no_grad),
    "grad_mode_read": state(lambda x: x * 2 if torch.is_grad_enabled() else x * 3, torch.no_grad),
    "inference_mode": state(lambda x: x * 2, torch.inference_mode),
    "autocast": state(matmul, lambda: torch.autocast("cpu", torch.bfloat16)),
    "default_dtype": state(lambda x: x + torch.ones(3), lambda: torch.set_default_dtype(torch.float64)),
    "deterministic": state(
        lambda x: x * 2 if torch.are_deterministic_algorithms_enabled() else x * 3,
        lambda: torch.use_deterministic_algorithms(True),
    ),
    "default_device": state(lambda x: x.sum() + torch.ones(3).sum(), lambda: torch.device("cpu")),
    "matmul_precision": state(matmul, lambda: torch.set_float32_matmul_precision("high")),
    "cudnn_flag": state(
        lambda x: x * 2 if torch.backends.cudnn.benchmark else x * 3, lambda: torch.backends.cudnn.flags(benchmark=True)
    ),
    "precision_read": state(
        lambda x: x * 2 if torch.get_float32_matmul_precision() == "high" else x * 3,
        lambda: torch.set_float32_matmul_precision("high"),
    ),
    "global_hook": state(
        nn.Linear(3, 3), lambda: nn.modules.module.register_module_forward_hook(lambda m, i, o: o * 2)
    ),
}


def answer(call: Callable, given: tuple) -> tuple[Any, list]:
    """The result, whether it has a gradient, and the arguments afterwards."""
    torch.manual_seed(0)
    out = call(*given)
    return out, [x.detach().clone() for x in given if isinstance(x, torch.Tensor)]


def check(jitted: Callable, target: Callable, arguments: Callable[[], tuple]) -> None:
    (wanted, wanted_after), (got, got_after) = answer(target, arguments()), answer(jitted, arguments())
    torch.testing.assert_close(got, wanted)
    assert got.requires_grad == wanted.requires_grad
    torch.testing.assert_close(got_after, wanted_after, equal_nan=True)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MUTATIONS)
def test_nothing_is_stale(name: str, mode: str) -> None:
    if mode == "bytecode" and name == "class_attribute_read_through_the_class" and torch.__version__ < "2.13":
        pytest.skip("the Dynamo of torch 2.11 puts no guard on what is read through a class by name")
    target, given, change = MUTATIONS[name]()
    jitted = jit(target, capture_mode=mode, backend="eager")
    check(jitted, target, given)
    check(jitted, target, given)
    change()
    check(jitted, target, given)
    check(jitted, target, given)


KINDS = (
    "module_number",
    "parameter_data",
    "parameter_frozen",
    "half",
    "global_function",
    "closure_tensor",
    "argument_stride",
    "autocast",
)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", KINDS)
def test_nothing_is_stale_in_kernels(name: str, mode: str) -> None:
    target, given, change = MUTATIONS[name]()
    jitted = jit(target, capture_mode=mode, backend="interpret", fullgraph=True)
    check(jitted, target, given)
    change()
    check(jitted, target, given)
