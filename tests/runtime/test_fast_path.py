"""The hot path: what it serves, and that it never answers where the guards would not."""

from __future__ import annotations

import collections
import threading
import types
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_soundness import MUTATIONS, Net, globals_put_back, ones, state_put_back  # noqa: F401  the fixtures put back what mutations change
from torch import nn

import fusejit
from fusejit import jit
from fusejit.capture.guards.guards import key_for
from fusejit.errors import FusejitError
from fusejit.runtime import fast_path, torch_private
from fusejit.runtime.fast_path import MISS


def function_of(jitted):
    return getattr(jitted, "_fusejit_function", jitted)


def entries(jitted):
    return function_of(jitted)._bound.entries


def warm(jitted, *args, **kwargs):
    """Capture, then bind."""
    for _ in range(2):
        jitted(*args, **kwargs)
    return jitted


class general:
    """Counts how many calls inside went the general way."""

    def __init__(self, monkeypatch):
        self.calls = 0

        def counted(*given):
            self.calls += 1
            return key_for(*given)

        monkeypatch.setattr("fusejit.api.function.key_for", counted)


# What it serves.


@pytest.mark.parametrize("backend", ["eager", "interpret"])
@pytest.mark.parametrize("grad", [False, True])
def test_a_known_call_goes_the_short_way(backend, grad, monkeypatch):
    jitted = jit(lambda x, y, k, flag=True: (x * y + k).tanh(), backend=backend)
    x, y = torch.randn(4, 3, requires_grad=grad), torch.randn(3)
    with torch.set_grad_enabled(grad):
        warm(jitted, x, y, 2, flag=False)
        assert len(entries(jitted)) == 1
        ways = general(monkeypatch)
        for _ in range(3):
            result = jitted(x, y, 2, flag=False)
        torch.testing.assert_close(result, (x * y + 2).tanh())
        assert not ways.calls and jitted.cache_info()[:3] == (1, 4, 1)
        if grad:
            (found,) = torch.autograd.grad(result.sum(), x)
            torch.testing.assert_close(found, torch.autograd.grad((x * y + 2).tanh().sum(), x)[0])


@pytest.mark.parametrize("backend", ["eager", "interpret"])
def test_a_known_module_goes_the_short_way(backend, monkeypatch):
    module = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.ReLU(), nn.Linear(4, 2))
    jitted, x = jit(module, backend=backend), torch.randn(5, 3)
    warm(jitted, x)
    ways = general(monkeypatch)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        got = jitted(x)
        torch.testing.assert_close(got, module(x))
        got.square().sum().backward()
        optimizer.step()
    assert not ways.calls


def test_results_of_any_structure():
    jitted = jit(lambda x, y: {"a": (x + y, x), "b": [2, x * y]})
    x, y = torch.ones(2), torch.ones(2)
    warm(jitted, x, y)
    result = jitted(x, y)
    assert entries(jitted) and result["a"][1] is x and result["b"][0] == 2 and result["b"][1].tolist() == [1, 1]


def test_methods_of_two_objects(monkeypatch):
    class Scale:
        def __init__(self, k):
            self.k = k

        @jit
        def __call__(self, x):
            return x * self.k

    two, three = Scale(2), Scale(3)
    for _ in range(2):
        assert two(torch.ones(1)).item() == 2 and three(torch.ones(1)).item() == 3
    ways = general(monkeypatch)
    assert two(torch.ones(1)).item() == 2 and three(torch.ones(1)).item() == 3
    assert not ways.calls


def test_more_kinds_of_calls_than_entries():
    jitted = jit(lambda x: x + x.shape[0], dynamic=False)
    for _ in range(20):
        for size in range(1, 9):
            assert jitted(torch.zeros(size)).tolist() == [size] * size
    assert len(entries(jitted)) == fast_path.ENTRIES
    assert (
        function_of(jitted)._bound.made == 8
    )  # each is written once, and put in front again when its kind of call comes back
    assert jitted.cache_info()[:3] == (8, 152, 8)
    jitted.cache_clear()
    assert not entries(jitted)


def test_an_error_of_the_body_comes_out():
    jitted = jit(lambda x, i: x[i])
    x = torch.ones(3)
    warm(jitted, x, torch.tensor([1]))
    with pytest.raises(IndexError):
        jitted(x, torch.tensor([7]))


def test_explain_says_why_calls_stay_general():
    x = torch.ones(2)
    for jitted, args, reason in (
        (jit(lambda xs: xs[0] + xs[1]), ([x, x],), "an argument is a container, or marked as mutable"),
        (jit(lambda x, k: x * k), (x, 0.0), "an argument is 0.0"),
        (jit(lambda x, k: x * k), (x, fusejit.mutable(2.0)), "an argument is a container, or marked as mutable"),
        (jit(lambda x, k: x * k.real), (x, 1j), "an argument is of type complex"),
        (jit(lambda n: torch.ones(3) * n), (2,), "it has no tensor among its inputs"),
    ):
        assert "general way" not in str(jitted.explain(*args))
        warm(jitted, *args)
        assert not entries(jitted) and jitted.explain(*args).unbound == reason and reason in str(jitted.explain(*args))
    with torch.autocast("cpu"):
        autocast = warm(jit(lambda x: x @ x), torch.ones(2, 2))
        assert "autocast" in autocast.explain(torch.ones(2, 2)).unbound


# What it must not answer.


@pytest.mark.parametrize("name", MUTATIONS)
def test_an_entry_is_never_laxer_than_the_guards(name):
    target, arguments, change = MUTATIONS[name]()
    jitted = jit(target, backend="eager")
    warm(jitted, *arguments())
    function, before = function_of(jitted), entries(jitted)
    change()
    args = arguments()
    leaves: list = []
    held = function._table.by_key.get(key_for(None, args, {}, leaves), ())
    lifted = {id(entry.specialisation): entry.lifted(leaves) for entry in held}
    for entry in before:
        if entry.run(None, args, {}) is not MISS:
            assert lifted.get(id(entry.specialisation)) is not None


def test_most_mutations_are_bound_before_they_change():
    """The test above means something only where there is an entry."""
    unbound = []
    for name in MUTATIONS:
        target, arguments, _ = MUTATIONS[name]()
        if not entries(warm(jit(target, backend="eager"), *arguments())):
            unbound.append(name)
    # containers as arguments, and a value with two zeros, are compared by the key of the general way
    assert set(unbound) <= {"argument_list", "argument_list_or_tuple", "argument_dict_order", "argument_zero"}


def half_and_back(module):
    module.linear.half()
    module.linear.float()


MORE = {
    "data_of_another_dtype": lambda m: setattr(m.weight, "data", m.weight.data.double()),
    "data_of_other_strides": lambda m: setattr(m.linear.weight, "data", torch.randn(3, 3).t()),
    "data_of_another_shape": lambda m: setattr(m.weight, "data", torch.full((1,), 3.0)),
    "data_of_the_same_kind": lambda m: setattr(m.linear.weight, "data", torch.randn(3, 3)),
    "half_and_back": half_and_back,
    "to_another_dtype": lambda m: m.to(torch.float64),
    "frozen_and_back": lambda m: (m.weight.requires_grad_(False), m.weight.requires_grad_(True)),
    "one_frozen_deep_inside": lambda m: m.layers[0].weight.requires_grad_(False),
    "written_into_the_dict_of_parameters": lambda m: m.linear._parameters.update(weight=nn.Parameter(torch.ones(3, 3))),
    "written_into_the_dict_of_an_instance": lambda m: m.__dict__.update(scale=7.0),
    "deleted_and_set_again": lambda m: (delattr(m, "shift"), m.register_buffer("shift", torch.full((3,), 9.0))),
    "eval_and_train": lambda m: (m.eval(), m.train()),
    "submodule_of_another_class": lambda m: setattr(m, "drop", nn.Identity()),
    "module_tied_in_a_list": lambda m: m.layers.__setitem__(0, m.linear),
    "hook_on_a_layer_of_a_list": lambda m: m.layers[0].register_forward_pre_hook(lambda m, i: (i[0] * 3,)),
    "full_backward_hook": lambda m: m.linear.register_full_backward_hook(lambda m, i, o: (i[0] * 2,)),
    "keyword_hook": lambda m: m.register_forward_hook(lambda m, a, k, o: o * 4, with_kwargs=True),
    "class_of_a_module": lambda m: setattr(
        m.layers[0], "__class__", type("Own", (nn.Linear,), {"forward": lambda s, x: x * 6})
    ),
    "buffer_of_another_shape": lambda m: setattr(m, "shift", torch.ones(1)),
    "buffer_is_a_parameter_now": lambda m: (delattr(m, "shift"), setattr(m, "shift", nn.Parameter(torch.ones(3)))),
    "buffer_requires_grad": lambda m: m.shift.requires_grad_(True),
}


def module_mutations():
    return [pytest.param(change, id=name) for name, change in MORE.items()]


def first(table):
    return next(iter(table.values()))


HELD = {
    "order_of_an_ordered_dict": (
        lambda: collections.OrderedDict(a=2.0, b=3.0),
        first,
        lambda h: h.move_to_end("a"),
    ),
    "order_of_a_dict": (lambda: {"a": 2.0, "b": 3.0}, first, lambda h: h.update(a=h.pop("a"))),
    "bytes": (lambda: bytearray([2]), lambda h: h[0], lambda h: h.__setitem__(0, 5)),
    "bytes_in_a_dict": (lambda: {"k": bytearray([2])}, lambda h: h["k"][0], lambda h: h["k"].__setitem__(0, 5)),
    "list_in_a_dict": (lambda: {"k": [2]}, lambda h: h["k"][0], lambda h: h["k"].__setitem__(0, 5)),
    "list_in_a_tuple": (lambda: ([2],), lambda h: h[0][0], lambda h: h[0].__setitem__(0, 5)),
    "number_in_a_dict": (lambda: {"k": 2}, lambda h: h["k"], lambda h: h.__setitem__("k", 5)),
    "empty_list": (list, len, lambda h: h.append(1)),
    "empty_dict": (dict, len, lambda h: h.__setitem__("k", 1)),
    "set": (lambda: {1}, len, lambda h: h.add(2)),
}


@pytest.mark.parametrize("name", HELD)
def test_what_changes_inside_an_attribute(name):
    make, read, change = HELD[name]
    holder, x = types.SimpleNamespace(held=make()), torch.ones(2)
    jitted = warm(jit(lambda x: x * read(holder.held)), x)
    assert entries(jitted)
    change(holder.held)
    for _ in range(3):
        torch.testing.assert_close(jitted(x), x * read(holder.held))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("change", module_mutations())
def test_mutations_of_modules(change, grad):
    module = Net()
    jitted, x = jit(module, backend="eager"), ones()[0].requires_grad_(grad)
    module.drop.p = 0.0
    with torch.set_grad_enabled(grad):
        warm(jitted, x)
        assert entries(jitted)
        change(module)
        for _ in range(3):
            got, wanted = jitted(x), module(x)
            torch.testing.assert_close(got, wanted)
            assert got.requires_grad == wanted.requires_grad
            if grad:
                leaves = [x, *(p for p in module.parameters() if p.requires_grad)]
                ours = torch.autograd.grad(got.sum(), leaves, allow_unused=True)
                torch.testing.assert_close(ours, torch.autograd.grad(wanted.sum(), leaves, allow_unused=True))


FEW = ["data_of_other_strides", "to_another_dtype", "frozen_and_back", "hook_on_a_layer_of_a_list", "class_of_a_module"]


@pytest.mark.parametrize("missing", ["TensorGuards", "dict_version", "RootGuardManager", "everything"])
@pytest.mark.parametrize(
    "name",
    ["data_of_other_strides", "to_another_dtype", "frozen_and_back", "hook_on_a_layer_of_a_list", "class_of_a_module"],
)
def test_without_a_part_of_torchs_c_interface(missing, name, monkeypatch):
    """The second way of each thing in runtime/torch_private.py."""
    if missing == "everything":
        monkeypatch.setattr(torch_private, "_guards", None)
    else:
        kept = {k: getattr(torch_private._guards, k) for k in dir(torch_private._guards) if k != missing}
        monkeypatch.setattr(torch_private, "_guards", types.SimpleNamespace(**kept))
    module, x = Net(), ones()[0]
    jitted = warm(jit(module, backend="eager"), x)
    assert entries(jitted)
    MORE[name](module)
    torch.testing.assert_close(jitted(x), module(x))


def along_with_dicts(tensors):
    import torch._dynamo.guards

    dicts = [{"a": n} for n in range(9)]
    assert torch_private.has_tree(len(dicts) + len(tensors)) and torch._dynamo.guards
    check = torch_private.dict_check(dicts, (), tensors)
    return lambda *given: check((*dicts, *given))


@pytest.mark.parametrize(
    "make",
    [torch_private.tensor_check, torch_private.python_tensor_check, along_with_dicts],
    ids=lambda make: make.__name__,
)
def test_tensor_checks_agree(make):
    x, y = torch.randn(4, 8), nn.Parameter(torch.randn(4, 8))
    z = torch.randn(3, dtype=torch.complex64)
    check = make([x, y, z])
    assert check(x, y, z) and check(torch.randn(4, 8), y, z)
    others = [
        x.double(),
        x.half(),
        x[:2],
        x.t(),
        torch.randn(8, 8)[::2],
        torch.randn(4, 8, requires_grad=True),
        nn.Parameter(x),
        y,
        3,
        None,
    ]
    others += [x.to("meta"), x.to_sparse(), torch.ones(4, 8, dtype=torch.complex64).conj().imag]
    assert not any(check(other, y, z) for other in others)
    assert not check(x, y, z.conj())
    with torch.inference_mode():
        assert not check(x, y, z) and not check(torch.randn(4, 8), y, z)
    with torch.no_grad():
        assert check(x, y, z)
    seen = []
    torch.vmap(lambda v: seen.append(check(x, y, z)) or v)(torch.ones(2))
    assert seen == [False]


def test_python_values():
    jitted = jit(lambda x, k: x * k if k is not None else x)
    x = torch.ones(2)
    for value in (2, 2.0, True, 1, 1.0, None, 0.0, -0.0, 2):
        for _ in range(3):
            torch.testing.assert_close(jitted(x, value), x * value if value is not None else x)
            assert torch.equal(torch.signbit(jitted(x, value)), torch.signbit(x * value if value is not None else x))
    assert jitted(torch.ones(2, dtype=torch.int64), 2).dtype == torch.int64


def test_keywords_and_their_order():
    jitted = jit(lambda x, **options: x * list(options.values())[0] - options["b"])
    x = torch.ones(2)
    for _ in range(3):
        assert jitted(x, a=5, b=2).tolist() == [3, 3]
        assert jitted(x, b=2, a=5).tolist() == [0, 0]
        assert jitted(x, b=3, a=5).tolist() == [0, 0]
    assert len(entries(jitted)) == 3


def test_one_tensor_twice():
    jitted = jit(lambda a, b: a.add_(1) + b)
    for _ in range(3):
        x, y = torch.ones(2), torch.ones(2)
        assert jitted(x, x).tolist() == [4, 4]
        assert jitted(y, torch.ones(2)).tolist() == [3, 3]
    assert len(entries(jitted)) == 2


def test_a_parameter_as_the_argument():
    layer = nn.Linear(3, 3)
    jitted, x = jit(lambda x: layer(x).sum()), torch.randn(3, 3)
    warm(jitted, x)
    jitted(layer.weight).backward()
    got = layer.weight.grad.clone()
    layer.weight.grad = None
    layer(layer.weight).sum().backward()
    torch.testing.assert_close(got, layer.weight.grad)


def test_inside_transformations_and_modes():
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.overrides import TorchFunctionMode

    jitted = jit(lambda x: x * 2 + 1, backend="interpret")
    x = torch.ones(3)
    warm(jitted, x)
    assert entries(jitted)
    torch.testing.assert_close(torch.vmap(jitted)(x.expand(2, 3)), torch.full((2, 3), 3.0))
    torch.testing.assert_close(torch.func.grad(lambda v: jitted(v).sum())(x), torch.full((3,), 2.0))
    assert [node.op for node in make_fx(jitted)(x).graph.nodes].count("call_function") == 2
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(jitted(x), FakeTensor)

    class Seen(TorchFunctionMode):
        count = 0

        def __torch_function__(self, function, kinds, args=(), kwargs=None):
            Seen.count += 1
            return function(*args, **(kwargs or {}))

    with Seen():
        jitted(x)
    assert Seen.count
    with fusejit.disable_jit():
        hits = jitted.cache_info().hits
        jitted(x)
        assert jitted.cache_info().hits == hits


@pytest.mark.parametrize("backend", ["eager", "interpret"])
def test_a_closed_over_call_inside_a_capture(backend):
    inner = jit(lambda x: x * 2, backend=backend)
    x = torch.ones(3)
    warm(inner, x)
    outer = jit(lambda y: inner(x) + y, backend=backend)
    for _ in range(3):
        torch.testing.assert_close(outer(x), x * 3)
    assert not outer.specialisation(x).effects and not fast_path.beyond()


def test_an_attribute_that_always_changes():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.step, self.linear = 0, nn.Linear(3, 3)

        def forward(self, x):
            return self.linear(x)

    module, x = Counting(), torch.randn(2, 3)
    jitted = jit(module)
    for step in range(300):
        module.step = step
        assert jitted(x) is not None
    made = function_of(jitted)._bound.made
    assert made <= 8, "the dict of the instance is checked by its values from the fourth change on"
    module.linear = nn.Linear(3, 3)
    torch.testing.assert_close(jitted(x), module(x))
    module.forward = lambda x: x * 9
    torch.testing.assert_close(jitted(x), module(x))


def test_epochs_of_training_and_evaluation(monkeypatch):
    """Dicts that change now and then are versions taken anew, not conditions one by one."""
    module = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.0), nn.Linear(3, 3))
    jitted, x = jit(module), torch.randn(2, 3)
    ways = general(monkeypatch)
    for epoch in range(10):
        module.train(epoch % 2 == 0)
        for _ in range(250):
            jitted(x)
        torch.testing.assert_close(jitted(x), module(x))
    assert ways.calls == 2 + 10  # two captures, and one look a switch
    bound = function_of(jitted)._bound
    assert bound.made == 2 and bound.renewed == 8 and not bound.restless


def test_a_replaced_parameter_is_let_go():
    module, x = nn.Linear(3, 3), torch.randn(2, 3)
    jitted = jit(module)
    warm(jitted, x)
    module.weight = nn.Parameter(torch.ones(3, 3))
    warm(jitted, x)
    gone = weakref.ref(module.weight)
    module.weight = nn.Parameter(torch.zeros(3, 3))
    jitted(x)
    assert gone() is None and entries(jitted)


def test_buffers_that_a_program_updates_must_not_come_to_share_memory():
    module = nn.BatchNorm1d(3)
    jitted, x = jit(module, backend="interpret"), torch.randn(4, 3)
    warm(jitted, x)
    assert entries(jitted)
    twin = nn.BatchNorm1d(3)
    twin.load_state_dict(module.state_dict())
    for one in (module, twin):
        memory = torch.zeros(6)
        one.running_mean.data, one.running_var.data = memory[:3], memory[:3]
    torch.testing.assert_close(jitted(x), twin(x))
    torch.testing.assert_close(module.running_mean, twin.running_mean)


def test_threads():
    jitted, failures = jit(lambda x, k: x.sum() * k), []

    def work(size):
        try:
            for step in range(200):
                if jitted(torch.ones(size), step % 3).item() != size * (step % 3):
                    failures.append((size, step))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(size,)) for size in (2, 3, 4, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64]


@st.composite
def tensors(draw):
    rows, columns = draw(st.integers(0, 3)), draw(st.integers(1, 3))
    dtype = draw(st.sampled_from(DTYPES))
    base = torch.arange(64, dtype=dtype)
    offset, order = (
        draw(st.integers(0, 3)),
        draw(st.sampled_from([(columns, 1), (1, rows or 1), (0, 1), (2 * columns, 2)])),
    )
    value = base.as_strided((rows, columns), order, offset)
    return value.requires_grad_() if dtype.is_floating_point and draw(st.booleans()) else value


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(tensors(), tensors(), st.sampled_from(["two", "same", "view"])), min_size=2, max_size=6))
def test_any_sequence_of_calls(calls):
    def target(a, b):
        return a * 2 + b.sum(), b - a.shape[0]

    jitted = jit(target)
    for a, b, how in [call for call in calls for _ in range(3)]:
        b = {"two": b, "same": a, "view": a[:1].sum(0)}[how]
        for got, wanted in zip(jitted(a, b), target(a, b), strict=True):
            torch.testing.assert_close(got, wanted)
            assert got.requires_grad == wanted.requires_grad and got.stride() == wanted.stride()


# bind.


@pytest.mark.parametrize("backend", ["eager", "interpret"])
@pytest.mark.parametrize("grad", [False, True])
def test_bind(backend, grad, monkeypatch):
    layer = nn.Linear(3, 3)
    jitted = jit(lambda x, k, **more: layer(x) * k + more["y"][0], backend=backend)
    x, y = torch.randn(2, 3), torch.randn(3)
    plain = jit(layer, backend=backend)
    with torch.set_grad_enabled(grad):
        step, short = jitted.bind(x, 2, y=[y]), plain.bind(x)
        ways = general(monkeypatch)
        for _ in range(2):
            torch.testing.assert_close(step(x, 2, y=[y]), layer(x) * 2 + y)
            torch.testing.assert_close(short(x), layer(x))
            with torch.no_grad():
                layer.weight.mul_(2)
        assert step(x, 2, y=[y]).requires_grad is grad and not ways.calls


def test_bind_of_a_method_and_of_what_is_not_one_graph():
    class Scale:
        k = 2

        @jit
        def scaled(self, x):
            return x * self.k

        @jit
        def shown(self, x):
            with fusejit.exclude_from_trace():
                x = x + 1
            return x * self.k

    x = torch.ones(2)
    assert Scale().scaled.bind(x)(x).tolist() == [2, 2]
    assert Scale().shown.bind(x)(x).tolist() == [4, 4]
    assert jit(lambda x: x * 3, capture_mode="bytecode").bind(x)(x).tolist() == [3, 3]
    assert jit(lambda x: x * float(x.sum()), capture_mode="trace").bind(x)(x).tolist() == [2, 2]


def test_a_broken_promise(monkeypatch):
    layer = nn.Linear(3, 3)
    jitted, x = jit(layer), torch.randn(2, 3)
    monkeypatch.setenv("FUSEJIT_DEBUG", "1")
    step = jitted.bind(x)
    torch.testing.assert_close(step(x), layer(x))
    with pytest.raises(
        FusejitError, match=r"Linear was bound.*shape of argument input changed from \(2, 3\) to \(4, 3\)"
    ):
        step(torch.randn(4, 3))
    with pytest.raises(FusejitError, match="dtype of argument input changed"):
        step(x.double())
    with torch.no_grad(), pytest.raises(FusejitError, match="grad mode changed from True to False"):
        step(x)
    with pytest.raises(FusejitError, match="another structure"):
        step(x, x)
    layer.weight.requires_grad_(False)
    with pytest.raises(FusejitError, match=r"requires_grad of parameter .*weight changed"):
        step(x)
    layer.weight = nn.Parameter(torch.ones(3, 3))
    with pytest.raises(
        FusejitError, match="a tensor that it reads, is another now: a bound call checks nothing, so call Linear itself"
    ):
        step(x)


# Allocation and launch.


def test_allocation():
    for device in ("cpu", "meta"):
        made = torch_private.allocator(torch.device(device))((2, 3), (1, 2), torch.float16)
        assert (made.shape, made.stride(), made.dtype, made.device.type) == ((2, 3), (1, 2), torch.float16, device)


def test_a_program_knows_which_addresses_need_no_look():
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    source = jit(lambda x: x.softmax(-1), backend="interpret").program(x).source
    assert "empty_cpu = allocator(device('cpu'))" in source and "= empty_cpu((8, 8), (8, 1), torch.float32)" in source
    assert "own=(1,)" in source
    source = jit(lambda x, y: (x.softmax(-1) @ y).softmax(-1), backend="interpret").program(x, y).source
    assert "own=" not in source  # the same kernel runs in place on what the matmul returned, which may lie anywhere


def test_a_parameter_of_a_deep_module_as_its_argument():
    """Parameters are checked apart from the arguments there, and an argument may be one of them."""
    module = nn.Sequential(*[nn.Linear(3, 3, bias=False) for _ in range(6)])
    jitted = jit(module)
    x = nn.Parameter(torch.randn(3, 3))
    warm(jitted, x)
    (entry,) = entries(jitted)
    assert entry.run(None, (x,), {}) is not MISS
    for layer in module:
        assert entry.run(None, (layer.weight,), {}) is MISS
        torch.testing.assert_close(jitted(layer.weight), module(layer.weight))
        ours, theirs = (torch.autograd.grad(fn(layer.weight).sum(), [*module.parameters()]) for fn in (jitted, module))
        torch.testing.assert_close(ours, theirs)
