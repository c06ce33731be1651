"""More things that a capture can read, changed one by one (see test_soundness.py): what modules hold, objects of
Python's and torch's standard kind, the state of torch and of the process, and properties of arguments. Gradients are
compared as well.
"""

from __future__ import annotations

import array
import collections
import contextlib
import contextvars
import functools
import os
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from fusejit import jit

MODES = ("ast", "trace", "bytecode")
MUTATIONS: dict[str, Callable] = {}
LEFT = contextlib.ExitStack()


def mutation(make: Callable) -> Callable:
    MUTATIONS[make.__name__] = make
    return make


def ones() -> tuple:
    return (torch.linspace(-1, 2, 6).reshape(2, 3).requires_grad_(),)


def setter(holder: Any, name: str, value: Any) -> Callable:
    return lambda: setattr(holder, name, value)


def gradients(call: Callable, out: Any, given: tuple) -> list:
    """Gradients of the arguments and, of a module, the parameters."""
    leaves = [x for x in given if isinstance(x, torch.Tensor) and x.requires_grad and x.is_leaf]
    leaves += [p for p in getattr(call, "parameters", list)() if p.requires_grad]
    if not (isinstance(out, torch.Tensor) and out.requires_grad and out.is_floating_point() and leaves):
        return []
    return list(
        torch.autograd.grad((out * torch.arange(out.numel()).reshape(out.shape)).sum(), leaves, allow_unused=True)
    )


def answer(call: Callable, given: tuple) -> tuple:
    torch.manual_seed(0)
    out = call(*given)
    return out, gradients(call, out, given), [x.detach().clone() for x in given if isinstance(x, torch.Tensor)]


def check(jitted: Callable, target: Callable, arguments: Callable[[], tuple]) -> None:
    wanted, got = answer(target, arguments()), answer(jitted, arguments())
    for name, mine, its in zip(("result", "gradients", "arguments"), got, wanted):
        torch.testing.assert_close(mine, its, equal_nan=True, msg=lambda text: f"{name}: {text}")  # noqa: B023
    assert getattr(got[0], "requires_grad", None) == getattr(wanted[0], "requires_grad", None)


# What modules hold.


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.drop, self.norm, self.batch = nn.Dropout(0.5), nn.LayerNorm(3), nn.BatchNorm1d(3)
        self.named = nn.ModuleDict({"a": nn.Linear(3, 3)})
        self.scales = nn.ParameterDict({"a": nn.Parameter(torch.ones(3))})
        self.shifts = nn.ParameterList([nn.Parameter(torch.ones(3))])
        self.tail = nn.Sequential(nn.ReLU())
        self.register_buffer("mask", torch.ones(3), persistent=False)
        self.register_buffer("maybe", None)
        self.k = 2.0

    def forward(self, x):
        x = self.batch(self.norm(self.second(self.first(x))))
        for module in self.named.values():
            x = module(x)
        for name in self.scales:
            x = x * self.scales[name]
        for shift in self.shifts:
            x = x + shift
        x = x if self.maybe is None else x * self.maybe
        return self.tail(self.drop(x)) * self.mask * self.k


class Other(Net):
    def forward(self, x):
        return super().forward(x) * 3


class Double(nn.Module):
    def forward(self, weight):
        return weight * 2


def halved(module, given, result):
    return tuple(None if gradient is None else gradient * 0.5 for gradient in given)


NET: dict[str, Callable[[Net], Any]] = {
    "full_backward_hook": lambda m: m.first.register_full_backward_hook(halved),
    "full_backward_pre_hook": lambda m: m.first.register_full_backward_pre_hook(lambda m, g: (g[0] * 0.5,)),
    "backward_hook_of_the_whole": lambda m: m.register_full_backward_hook(
        lambda m, i, o: (i[0] * 0.5,) if i[0] is not None else None
    ),
    "gradient_hook_of_a_parameter": lambda m: m.first.weight.register_hook(lambda g: g * 0.5),
    "hook_with_keywords": lambda m: m.first.register_forward_hook(lambda m, a, k, o: o * 2, with_kwargs=True),
    "parametrization": lambda m: parametrize.register_parametrization(m.first, "bias", Double()),
    "weight_norm": lambda m: parametrizations.weight_norm(m.first),
    "weight_norm_by_hook": lambda m: nn.utils.weight_norm(m.named["a"]),
    "untied": lambda m: setattr(m.second, "weight", nn.Parameter(torch.full((3, 3), 0.5))),
    "probability_of_dropout": lambda m: setattr(m.drop, "p", 0.9),
    "eps": lambda m: setattr(m.norm, "eps", 0.5),
    "eval_of_a_batch_norm": lambda m: m.batch.eval(),
    "momentum": lambda m: setattr(m.batch, "momentum", 0.9),
    "statistics_off": lambda m: [setattr(m.batch, n, v) for n, v in (("running_mean", None), ("running_var", None))],
    "dictionary_of_modules": lambda m: m.named.__setitem__("a", nn.Linear(3, 3)),
    "dictionary_of_modules_grows": lambda m: m.named.update({"b": nn.Linear(3, 3)}),
    "dictionary_of_parameters": lambda m: m.scales.__setitem__("a", nn.Parameter(torch.full((3,), 4.0))),
    "dictionary_of_parameters_grows": lambda m: m.scales.__setitem__("b", nn.Parameter(torch.full((3,), 4.0))),
    "dictionary_of_parameters_shrinks": lambda m: m.scales.pop("a"),
    "list_of_parameters": lambda m: m.shifts.__setitem__(0, nn.Parameter(torch.full((3,), 4.0))),
    "list_of_parameters_grows": lambda m: m.shifts.append(nn.Parameter(torch.full((3,), 4.0))),
    "sequential_grows": lambda m: m.tail.append(nn.Tanh()),
    "sequential_insert": lambda m: m.tail.insert(0, nn.Tanh()),
    "buffer_registered": lambda m: m.register_buffer("maybe", torch.full((3,), 3.0)),
    "buffer_shape": lambda m: setattr(m, "mask", torch.full((1,), 3.0)),
    "buffer_data": lambda m: setattr(m.mask, "data", torch.full((3,), 3.0)),
    "buffer_becomes_a_parameter": lambda m: (
        m.__delattr__("mask") or setattr(m, "mask", nn.Parameter(torch.full((3,), 3.0)))
    ),
    "class_of_a_module": lambda m: setattr(m, "__class__", Other),
    "class_of_a_submodule": lambda m: setattr(m.tail[0], "__class__", nn.Sigmoid),
    "parameter_vector": lambda m: nn.utils.vector_to_parameters(torch.linspace(0, 1, 72), m.parameters()),
    "child_frozen": lambda m: m.first.requires_grad_(False),
    "child_in_double": lambda m: [
        m.named["a"].double(),
        m.named["a"].register_forward_pre_hook(lambda m, i: (i[0].double(),)),
    ],
    "bias_deleted": lambda m: m.first.register_parameter("bias", None),
    "parameter_transposed": lambda m: setattr(m.named["a"].weight, "data", torch.arange(9.0).reshape(3, 3).t()),
    "swapped_submodules": lambda m: m._modules.update(norm=nn.Identity()),
    "replaced_in___dict__": lambda m: m.__dict__.__setitem__("k", 7.0),
}


def net(change: Callable) -> Callable:
    def make():
        module = Net()
        return module, lambda: (torch.linspace(-1, 2, 12).reshape(4, 3),), lambda: change(module)

    return make


MUTATIONS |= {name: net(change) for name, change in NET.items()}


@mutation
def parametrization_removed():
    module = nn.Linear(3, 3)
    parametrize.register_parametrization(module, "weight", Double())
    return module, ones, lambda: parametrize.remove_parametrizations(module, "weight", leave_parametrized=False)


@mutation
def hook_removed():
    module = nn.Linear(3, 3)
    handle = module.register_forward_hook(lambda m, i, o: o * 2)
    return module, ones, handle.remove


@mutation
def channels_last():
    module = nn.Conv2d(2, 3, 2)
    return (
        module,
        lambda: (torch.linspace(-1, 2, 18).reshape(1, 2, 3, 3),),
        lambda: module.to(memory_format=torch.channels_last),
    )


@mutation
def inner_jitted_module():
    module = nn.Sequential(jit(nn.Linear(3, 3)), nn.ReLU())
    return module, ones, lambda: setattr(module[0], "weight", nn.Parameter(torch.full((3, 3), 0.5)))


# Python objects.


def held(value: Any, read: Callable[[torch.Tensor, Any], Any], change: Callable[[Any], Any]) -> Callable:
    """`read(x, holder.value)` of an object that `change` changes."""

    def make():
        holder = value()
        return lambda x: read(x, holder), ones, lambda: change(holder)

    return make


class Items:
    def __init__(self) -> None:
        self.k = 2.0

    def __getitem__(self, name):
        return self.k

    def __len__(self):
        return int(self.k)

    def __iter__(self):
        return iter([self.k])

    def __contains__(self, item):
        return item == self.k

    def __bool__(self):
        return self.k > 2

    def __eq__(self, other):
        return self.k == other

    __hash__ = None  # type: ignore[assignment]

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self.k

    @classmethod
    def made(cls, x):
        return x * cls.rate

    rate = 2.0


class Described:
    def __get__(self, instance, owner):
        return instance.hidden


class Owner:
    shown = Described()

    def __init__(self) -> None:
        self.hidden = 2.0


class Meta(type):
    rate = 2.0


Pair = collections.namedtuple("Pair", "a b")
VARIABLE = contextvars.ContextVar("VARIABLE", default=2.0)


def raise_k(items: Any) -> None:
    items.k = 3.0


MUTATIONS |= {
    "special_getitem": held(Items, lambda x, h: x * h["a"], raise_k),
    "special_len": held(Items, lambda x, h: x * len(h), raise_k),
    "special_iter": held(Items, lambda x, h: x * sum(h), raise_k),
    "special_contains": held(Items, lambda x, h: x * 2 if 3.0 in h else x, raise_k),
    "special_bool": held(Items, lambda x, h: x * 2 if h else x, raise_k),
    "special_eq": held(Items, lambda x, h: x * 2 if h == 3.0 else x, raise_k),
    "special_getattr": held(Items, lambda x, h: x * h.anything, raise_k),
    "class_method": held(lambda: type("Own", (Items,), {}), lambda x, h: h.made(x), lambda h: setattr(h, "rate", 3.0)),
    "descriptor": held(Owner, lambda x, h: x * h.shown, lambda h: setattr(h, "hidden", 3.0)),
    "attribute_deleted": held(
        lambda: types.SimpleNamespace(k=2.0), lambda x, h: x * getattr(h, "k", 9.0), lambda h: delattr(h, "k")
    ),
    "ordered_dict": held(
        lambda: collections.OrderedDict(a=2.0, b=3.0),
        lambda x, h: x * next(iter(h.values())),
        lambda h: h.move_to_end("a"),
    ),
    "default_dict": held(
        lambda: collections.defaultdict(float, a=2.0), lambda x, h: x * h["a"], lambda h: h.update(a=3.0)
    ),
    "counter": held(lambda: collections.Counter("aa"), lambda x, h: x * h["a"], lambda h: h.update("a")),
    "chain_map": held(lambda: collections.ChainMap({"a": 2.0}), lambda x, h: x * h["a"], lambda h: h.update(a=3.0)),
    "user_dict": held(lambda: collections.UserDict(a=2.0), lambda x, h: x * h["a"], lambda h: h.update(a=3.0)),
    "subclass_of_dict": held(
        lambda: type("Own", (dict,), {})(a=2.0), lambda x, h: x * h["a"], lambda h: h.update(a=3.0)
    ),
    "subclass_of_list": held(
        lambda: type("Own", (list,), {})([2.0]), lambda x, h: x * h[0], lambda h: h.__setitem__(0, 3.0)
    ),
    "order_of_a_dict": held(
        lambda: {"a": 2.0, "b": 3.0}, lambda x, h: x * next(iter(h.values())), lambda h: h.update(a=h.pop("a"))
    ),
    "named_tuple": held(lambda: [Pair(2.0, 3.0)], lambda x, h: x * h[0].a, lambda h: h.__setitem__(0, Pair(3.0, 3.0))),
    "slice": held(lambda: [slice(0, 1)], lambda x, h: x[h[0]], lambda h: h.__setitem__(0, slice(0, 2))),
    "dtype": held(lambda: [torch.float64], lambda x, h: x.to(h[0]), lambda h: h.__setitem__(0, torch.bfloat16)),
    "shape": held(
        lambda: [torch.Size((3, 2))], lambda x, h: x.reshape(h[0]), lambda h: h.__setitem__(0, torch.Size((6, 1)))
    ),
    "nan": held(lambda: [2.0], lambda x, h: x * h[0], lambda h: h.__setitem__(0, float("nan"))),
    "minus_zero": held(
        lambda: [0.0], lambda x, h: torch.ones(3).copysign(torch.tensor(h[0])), lambda h: h.__setitem__(0, -0.0)
    ),
    "complex_number": held(lambda: [2 + 1j], lambda x, h: x * h[0], lambda h: h.__setitem__(0, 2 - 1j)),
    "bool_or_number": held(
        lambda: [1], lambda x, h: x.int() * (2 if h[0] is True else 3), lambda h: h.__setitem__(0, True)
    ),
    "numpy_array": held(lambda: np.array([2.0]), lambda x, h: x * float(h[0]), lambda h: h.__setitem__(0, 3.0)),
    "numpy_array_replaced": held(
        lambda: [np.array([2.0])], lambda x, h: x * float(h[0][0]), lambda h: h.__setitem__(0, np.array([3.0]))
    ),
    "numpy_number": held(lambda: [np.float64(2.0)], lambda x, h: x * h[0], lambda h: h.__setitem__(0, np.float64(3.0))),
    "bytes": held(lambda: bytearray(b"\2"), lambda x, h: x * h[0], lambda h: h.__setitem__(0, 3)),
    "array": held(lambda: array.array("d", [2.0]), lambda x, h: x * h[0], lambda h: h.__setitem__(0, 3.0)),
    "partial": held(
        lambda: [functools.partial(torch.add, alpha=2)],
        lambda x, h: h[0](x, x),
        lambda h: h[0].keywords.update(alpha=3),
    ),
    "weak_reference": held(
        lambda: types.SimpleNamespace(ref=weakref.ref(Pair), two=Items),
        lambda x, h: x * (2 if h.ref() is Pair else 3),
        lambda h: setattr(h, "ref", weakref.ref(Items)),
    ),
    "deep_nesting": held(
        lambda: {"a": [{"b": [2.0]}]}, lambda x, h: x * h["a"][0]["b"][0], lambda h: h["a"][0]["b"].__setitem__(0, 3.0)
    ),
    "context_variable": held(lambda: VARIABLE, lambda x, h: x * h.get(), lambda h: LEFT.callback(h.reset, h.set(3.0))),
}


@mutation
def metaclass():
    own = Meta("Own", (), {})
    LEFT.callback(setattr, Meta, "rate", 2.0)
    return lambda x: x * own.rate, ones, setter(Meta, "rate", 3.0)


@mutation
def thread_local():
    local = threading.local()
    local.k = 2.0
    return lambda x: x * local.k, ones, setter(local, "k", 3.0)


@mutation
def environment():
    os.environ["FUSEJIT_TEST_SCALE"] = "2"
    LEFT.callback(os.environ.pop, "FUSEJIT_TEST_SCALE")
    return (
        lambda x: x * float(os.environ["FUSEJIT_TEST_SCALE"]),
        ones,
        lambda: os.environ.__setitem__("FUSEJIT_TEST_SCALE", "3"),
    )


PLACES = {"first": 0}


class First:
    def __index__(self) -> int:
        return PLACES["first"]


@mutation
def index_of_an_object():
    """Torch itself calls what reads the global."""
    LEFT.callback(PLACES.__setitem__, "first", 0)
    first = First()
    return lambda x: x[first] * 2, ones, lambda: PLACES.__setitem__("first", 1)


@mutation
def cached_function():
    k = [2.0]

    @functools.lru_cache
    def cached(name):
        return k[0]

    def change():
        k[0] = 3.0
        cached.cache_clear()

    return lambda x: x * cached("a"), ones, change


@mutation
def dispatched_function():
    @functools.singledispatch
    def scale(value, x):
        return x * 2

    return lambda x: scale(1, x), ones, lambda: scale.register(int, lambda value, x: x * 3)


@mutation
def wrapped_function():
    def inner(x):
        return x * 2

    @functools.wraps(inner)
    def outer(x):
        return inner(x) + 1

    def other(x):
        return x * 3

    return lambda x: outer(x), ones, setter(inner, "__code__", other.__code__)


@mutation
def function_of_torch():
    LEFT.callback(setattr, F, "relu", F.relu)
    return lambda x: F.relu(x), ones, setter(F, "relu", lambda x: x * 3)


@mutation
def generator_seed():
    generator = torch.Generator().manual_seed(1)
    seeds = [1]

    def given():
        generator.manual_seed(seeds[0])
        return ones()

    return lambda x: x + torch.rand(3, generator=generator), given, lambda: seeds.__setitem__(0, 2)


# The state of torch and of the process.


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    state = torch.get_default_dtype(), torch.get_num_threads(), torch.get_default_device()
    yield
    LEFT.pop_all().close()
    torch.set_default_dtype(state[0])
    torch.set_num_threads(state[1])
    torch.set_default_device(None)
    torch.autograd.set_detect_anomaly(False)


def state(target: Callable, enter: Callable[[], Any], given: Callable = ones) -> Callable:
    def make():
        def change():
            context = enter()
            if hasattr(context, "__enter__"):
                LEFT.enter_context(context)

        return target, given, change

    return make


MUTATIONS |= {
    "autocast_dtype": state(
        lambda x: x @ x.t(), lambda: (torch.set_autocast_dtype("cpu", torch.float16), torch.autocast("cpu"))[1]
    ),
    "autocast_read": state(lambda x: x * 2 if torch.is_autocast_enabled("cpu") else x, lambda: torch.autocast("cpu")),
    "default_dtype_read": state(
        lambda x: x * 2 if torch.get_default_dtype() is torch.float64 else x,
        lambda: torch.set_default_dtype(torch.float64),
    ),
    "anomaly_mode_read": state(
        lambda x: x * 2 if torch.is_anomaly_enabled() else x, lambda: torch.autograd.set_detect_anomaly(True)
    ),
    "threads_read": state(
        lambda x: x * torch.get_num_threads(), lambda: torch.set_num_threads(torch.get_num_threads() + 1)
    ),
    "inference_mode_read": state(
        lambda x: x * 2 if torch.is_inference_mode_enabled() else x, torch.inference_mode, lambda: (torch.ones(3),)
    ),
    "enable_grad": state(lambda x: x.detach() * 2 if not torch.is_grad_enabled() else x, torch.no_grad),
    "default_device_read": state(
        lambda x: x * 2 if torch.get_default_device().index == 0 else x,
        lambda: torch.set_default_device("cpu:0"),
        lambda: (torch.ones(3),),
    ),
}


# Properties of arguments.


def arguments(target: Callable, first: Callable[[], tuple], then: Callable[[], tuple]) -> Callable:
    def make():
        now = [first]
        return target, lambda: now[0](), lambda: now.__setitem__(0, then)

    return make


def number(target: Callable, first: Any, then: Any) -> Callable:
    return arguments(target, lambda: (*ones(), first), lambda: (*ones(), then))


def inference() -> tuple:
    with torch.inference_mode():
        return (torch.ones(2, 3),)


def tagged_pair(tag: float) -> tuple:
    (x,) = ones()
    x.tag = tag  # type: ignore[attr-defined]
    return (x,)


COMPLEX = torch.tensor([1 + 2j, -3 + 1j])

MUTATIONS |= {
    "argument_offset_read": arguments(
        lambda x: x * (x.storage_offset() + 1), lambda: (torch.arange(6.0)[:3],), lambda: (torch.arange(6.0)[3:],)
    ),
    "argument_leaf_read": arguments(lambda x: x * 2 if x.is_leaf else x * 3, ones, lambda: (ones()[0] * 1,)),
    "argument_view_read": arguments(
        lambda x: x * 2 if x._is_view() else x * 3, lambda: (torch.ones(3),), lambda: (torch.ones(3).view(3),)
    ),
    "argument_of_inference_mode": arguments(lambda x: x * 2, lambda: (torch.ones(2, 3),), inference),
    "argument_inference_read": arguments(
        lambda x: x * 2 if x.is_inference() else x, lambda: (torch.ones(2, 3),), inference
    ),
    "argument_attribute": arguments(lambda x: x * x.tag, lambda: tagged_pair(2.0), lambda: tagged_pair(3.0)),
    "argument_conjugate": arguments(lambda x: x * 2, lambda: (COMPLEX.clone(),), lambda: (COMPLEX.conj(),)),
    "argument_conjugate_read": arguments(
        lambda x: x * (2 if x.is_conj() else 3), lambda: (COMPLEX.clone(),), lambda: (COMPLEX.conj(),)
    ),
    "argument_negative": arguments(lambda x: x * 2, lambda: (COMPLEX.imag,), lambda: (COMPLEX.conj().imag,)),
    "argument_empty": arguments(lambda x: x.sum(0), lambda: (torch.ones(2, 3),), lambda: (torch.ones(0, 3),)),
    "argument_one": arguments(lambda x: x.squeeze(0).sum(0), lambda: (torch.ones(2, 3),), lambda: (torch.ones(1, 3),)),
    "argument_stride_of_one": arguments(
        lambda x: x * x.stride(0), lambda: (torch.ones(1, 3),), lambda: (torch.ones(1, 3).as_strided((1, 3), (7, 1)),)
    ),
    "argument_memory_format": arguments(
        lambda x: x.contiguous() * 2 if x.is_contiguous() else x.permute(0, 2, 3, 1),
        lambda: (torch.ones(1, 2, 3, 3),),
        lambda: (torch.arange(18.0).reshape(1, 2, 3, 3).to(memory_format=torch.channels_last),),
    ),
    "argument_zero_dim_or_number": arguments(
        lambda x, k: x.half() * k, lambda: (*ones(), 2.0), lambda: (*ones(), torch.tensor(2.0, dtype=torch.float64))
    ),
    "argument_int_or_float": number(lambda x, k: x.int() * k, 1, 1.0),
    "argument_bool_or_float": number(lambda x, k: x.int() * k, 1.0, True),
    "argument_int_or_bool": number(lambda x, k: x * 2 if k is True else x, 1, True),
    "argument_nan": number(lambda x, k: x * k, 1.0, float("nan")),
    "argument_slice": number(lambda x, k: x[k], slice(0, 1), slice(0, 2)),
    "argument_slice_type": number(lambda x, k: x[k] * (2 if type(k.stop) is bool else 3), slice(0, 1), slice(0, True)),
    "argument_ellipsis": number(lambda x, k: x[k], 0, ...),
    "argument_dtype_value": number(lambda x, k: x.to(k), torch.float64, torch.bfloat16),
    "argument_device_value": number(
        lambda x, k: x * (2 if torch.device(k).index is None else 3), torch.device("cpu"), torch.device("cpu:0")
    ),
    "argument_named_tuple": number(lambda x, k: x * k.a, Pair(2.0, 3.0), Pair(3.0, 3.0)),
    "argument_kind_of_named_tuple": number(
        lambda x, k: x * (2 if type(k) is Pair else 3), Pair(2.0, 3.0), collections.namedtuple("Pair", "a b")(2.0, 3.0)
    ),
    "argument_set": number(lambda x, k: x * (2 if 3 in k else 1), {1, 2}, {1, 3}),
    "argument_range": number(lambda x, k: x * sum(k), range(3), range(4)),
    "argument_numpy_number": number(lambda x, k: x * float(k), np.float64(2.0), np.float64(3.0)),
    "argument_complex": number(lambda x, k: x * k, complex(1.0, 0.0), complex(1.0, -0.0)),
    "argument_function": number(lambda x, k: k(x), torch.sin, torch.cos),
    "argument_object": number(lambda x, k: x * k.k, types.SimpleNamespace(k=2.0), types.SimpleNamespace(k=3.0)),
    "argument_bytes": number(lambda x, k: x * k[0], b"\2", b"\3"),
    "argument_nested_order": number(lambda x, k: x * next(iter(k[0])), [{2.0: 1, 3.0: 1}], [{3.0: 1, 2.0: 1}]),
}


@mutation
def argument_object_changed():
    config = types.SimpleNamespace(k=2.0)
    return lambda x, c: x * c.k, lambda: (*ones(), config), setter(config, "k", 3.0)


DYNAMO = {
    "ordered_dict": "Dynamo does not guard the order of an OrderedDict",
    "minus_zero": "Dynamo takes -0.0 for 0.0; an argument that is -0.0 runs eagerly, one in a list is not seen",
    "metaclass": "Dynamo does not guard attributes that a class has from its metaclass",
    "argument_leaf_read": "Dynamo does not guard whether a tensor is a leaf",
}
"""What mode "bytecode" would get wrong, because Dynamo reads without a guard."""
if torch.__version__ < "2.12":
    DYNAMO |= {
        "class_of_a_submodule": "Dynamo 2.11 does not guard the class of a submodule",
        "class_method": "Dynamo 2.11 does not guard what a class method reads of its class",
        "special_bool": "Dynamo 2.11 asks `__len__`, once it has traced `len` of an object of the class; torch.compile "
        "alone does so too",
    }


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MUTATIONS)
def test_nothing_is_stale(name: str, mode: str) -> None:
    if mode == "bytecode" and name in DYNAMO:
        pytest.skip(DYNAMO[name])
    target, given, change = MUTATIONS[name]()
    jitted = jit(target, capture_mode=mode, backend="eager")
    for _ in range(2):
        check(jitted, target, given)
    change()
    for _ in range(2):
        check(jitted, target, given)
