"""vmap, grad and their like: under jit, with gradients from outside, against torch.func in eager and float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, hessian, jacfwd, jacrev, jvp, stack_module_state, vjp
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves

import fusejit
from fusejit import grad, jit, value_and_grad, vmap

D = torch.float64
pytestmark = pytest.mark.filterwarnings(
    "ignore:There is a performance drop"
)  # clamp_ has no batching rule: torch loops


@pytest.fixture(params=["eager", "interpret"])
def backend(request: Any) -> str:
    return request.param


def compiled(fn: Callable, backend: str, *args: Any) -> Any:
    """jit(fn), which must have captured the call."""
    jitted = jit(fn, backend=backend)
    assert not jitted.specialisation(*args).fallbacks
    return jitted


# Gradients from outside, first and second order.


def without_grad_inside(r):
    y = r * 2
    with torch.no_grad():
        c = r**2
        y.clamp_(max=0.5)
    return y * c - c.sin()


def in_place(r):
    y = r.clone()
    y[1:3].mul_(r[:2])
    y.add_(1)
    return y.exp()


def in_bfloat16(r):
    with torch.autocast("cpu", torch.bfloat16):
        return (r.float() @ W.float()).to(D).tanh()


W = torch.randn(4, 4, dtype=D, generator=torch.Generator().manual_seed(7)).requires_grad_()
G = torch.randn(4, dtype=D, generator=torch.Generator().manual_seed(8)).requires_grad_()
FUNCTIONS = {
    "tanh": torch.tanh,
    "exp": torch.exp,
    "softmax": lambda r: F.softmax(r, 0),
    "layer_norm": lambda r: F.layer_norm(r, (4,), G, G),
    "norm": lambda r: (r * r + 1).sqrt() * r.norm(),
    "linear": lambda r: F.linear(r, W, G).sigmoid(),
    "cumsum": lambda r: torch.where(r > 0, r**3, r.cumsum(0).sin()),
    "amax": lambda r: r.amax(0) * F.gelu(r),
    "cosine": lambda r: F.cosine_similarity(r.view(1, 4), W).sin(),  # switches gradients off in C++
    "detach": lambda r: r.tanh().detach() * r.sin() + r.detach() * r,
    "no_grad": without_grad_inside,
    "in_place": in_place,
    "autocast": in_bfloat16,
    "constant": lambda r: r * torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=D) + 2,
}


def scalar(f):
    return lambda r: f(r).sin().sum()


def outside_no_grad(f):
    def run(x):
        with torch.no_grad():
            inner = torch.func.grad(scalar(f))(x[0])
        return inner * x.sum()

    return run


def residuals(f):
    def run(x):
        out, pull = vjp(f, x[0])
        return out, pull(out.detach() * 2)[0], pull(out.cos())[0]  # each runs after the transform has ended

    return run


TRANSFORMS = {
    "vmap": lambda f: torch.vmap(f, 1, -1),
    "grad": lambda f: lambda x: torch.func.grad(scalar(f))(x[0]),
    "vmap_grad": lambda f: torch.vmap(torch.func.grad(scalar(f))),
    "grad_vmap": lambda f: torch.func.grad(lambda x: torch.vmap(f)(x).sin().sum()),
    "grad_grad": lambda f: lambda x: torch.func.grad(lambda r: torch.func.grad(scalar(f))(r).sin().sum())(x[0]),
    "jvp": lambda f: lambda x: jvp(f, (x[0],), (x[1],)),
    "vjp": residuals,
    "jacrev": lambda f: lambda x: jacrev(f)(x[0]),
    "jacfwd": lambda f: lambda x: jacfwd(f)(x[0]),
    "hessian": lambda f: lambda x: hessian(scalar(f))(x[0]),
    "vmap_vmap": lambda f: lambda x: torch.vmap(torch.vmap(f), 1)(torch.stack([x, x * 2], 1)),
    "vmap_hessian": lambda f: torch.vmap(hessian(scalar(f))),
    "no_grad_grad": outside_no_grad,
}
NOT_IN_TORCH = {(transform, name) for transform in ("hessian", "vmap_hessian") for name in ("norm", "cosine")}
"""Torch's own second gradients raise there: a tangent is changed in place."""
SLOW = ("grad_grad", "jvp", "jacfwd", "hessian", "vmap_hessian")
SOME = ("softmax", "linear", "cosine", "detach", "no_grad", "in_place")


def derivatives(fn: Callable, order: int) -> list[Any]:
    """Results of a function of x, whether they require grad, and their gradients by all that it reads, up to an
    order.
    """
    x = torch.randn(4, 4, dtype=D, generator=torch.Generator().manual_seed(1)).requires_grad_()
    inputs = (x, W, G)
    found: list[Any] = [leaf for leaf in tree_leaves(fn(x)) if isinstance(leaf, torch.Tensor)]
    flags = [leaf.requires_grad for leaf in found]
    wave = found
    for level in range(order):
        wave = [leaf for leaf in wave if leaf is not None and leaf.requires_grad]
        if not wave:
            break
        loss = sum(((leaf.to(D) + 0.3) ** 2).sum() for leaf in wave)
        wave = list(torch.autograd.grad(loss, inputs, allow_unused=True, create_graph=level + 1 < order))
        found += wave
    return [*flags, *(None if leaf is None or not leaf.any() else leaf.detach() for leaf in found)]


def agree(fn: Callable, backend: str, order: int, loose: bool = False) -> None:
    jitted = jit(fn, backend=backend)
    want = derivatives(fn, order)
    for _ in range(2):
        for mine, its in zip(derivatives(jitted, order), want, strict=True):
            if isinstance(its, torch.Tensor):
                assert_close(mine, its, rtol=1e-2 if loose else 1e-8, atol=1e-2 if loose else 1e-9)
            else:
                assert mine is its
    assert jitted.cache_info().fallbacks == 0
    assert torch._C._functorch.get_dynamic_layer_stack_depth() == 0 and torch.is_grad_enabled()


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_gradients_from_outside(transform):
    for name in SOME if transform in SLOW else FUNCTIONS:
        if (transform, name) not in NOT_IN_TORCH:
            agree(TRANSFORMS[transform](FUNCTIONS[name]), "eager", 2, name == "autocast")


@pytest.mark.parametrize("name", ["softmax", "linear", "detach", "no_grad", "in_place"])
@pytest.mark.parametrize("transform", ["vmap", "grad", "vmap_grad", "jvp", "hessian"])
def test_gradients_from_outside_compiled(transform, name):
    agree(TRANSFORMS[transform](FUNCTIONS[name]), "interpret", 1)


def test_convolution_and_embedding(backend):
    kernel, table = torch.randn(2, 1, 3, dtype=D, requires_grad=True), torch.randn(5, 4, dtype=D, requires_grad=True)

    def f(x, rows):
        embedded = torch.vmap(lambda r: F.embedding(r, table))(rows)
        return torch.vmap(
            torch.func.grad(lambda r, e: (F.conv1d((r * e).view(1, 1, 4), kernel, padding=1) ** 2).sum())
        )(x, embedded)

    x, rows = torch.randn(3, 4, dtype=D, requires_grad=True), torch.tensor([1, 4, 4])
    jitted = compiled(f, backend, x, rows)
    found = [torch.autograd.grad(call(x, rows).square().sum(), (x, kernel, table)) for call in (f, jitted)]
    assert_close(found[1], found[0])


LINEAR = nn.Linear(4, 4)


def rows_through(x):
    return torch.vmap(lambda r: LINEAR(LINEAR(r).tanh()))(x)


def partly_without_autocast(x):
    def f(r):
        with torch.autocast("cpu", enabled=False):
            exact = LINEAR(r.float())
        return exact + LINEAR(exact)

    return torch.vmap(f)(x)


@pytest.mark.parametrize(
    "inside", [rows_through, partly_without_autocast, lambda x: grad(lambda r: LINEAR(r).float().cos().sum())(x)]
)
def test_autocast_around(backend, inside):
    x = torch.randn(3, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        want, found = inside(x), compiled(inside, backend, x)(x)
    assert found.dtype == want.dtype
    assert_close(found, want, rtol=2e-2, atol=2e-2)
    gradients = [torch.autograd.grad(out.float().square().sum(), (x, LINEAR.weight)) for out in (want, found)]
    assert_close(gradients[1], gradients[0], rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize(
    "inside",
    [
        lambda x: torch.vmap(torch.func.functionalize(lambda r: r.clone().add_(1).sin()))(x),
        lambda x: torch.func.grad(lambda y: (y * x).sum())(x.detach()) * x + torch.no_grad()(torch.vmap(torch.sin))(x),
        lambda x: torch.vmap(lambda r: r.view(2, 2).t(), out_dims=1)(x),
        lambda x: (
            torch.func.grad(lambda r: (torch.where(r.half() > 0, r.half(), 0.1) * 0.3 + 0.7).float().sum())(x) * x
        ),
    ],
)
def test_among_other_things(backend, inside):
    x = torch.randn(3, 4, requires_grad=True)
    want, found = inside(x), compiled(inside, backend, x)(x)
    assert_close(found, want, rtol=1e-3, atol=2e-4)  # the backend rounds a chain of halves once
    assert_close(*(torch.autograd.grad(out.square().sum(), x) for out in (found, want)), rtol=1e-3, atol=1e-3)
    with torch.inference_mode():
        assert_close(compiled(inside, backend, x)(x), want.detach(), rtol=1e-3, atol=2e-4)


def test_a_graph_holds_batched_ops_and_nothing_of_the_transform():
    x = torch.randn(3, 4, requires_grad=True)
    graph = jit(torch.vmap(torch.func.grad(lambda r: r.tanh().sum()))).specialisation(x).record["capture"]
    names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert names[:2] == ["aten.tanh.default", "aten.sum.dim_IntList"] and names[-1] == "aten.tanh_backward.default"
    assert not any("detach" in name or "grad_enabled" in name for name in names)


def test_refused_inside_a_transform(backend):
    class Double(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x):
            return x * 2

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, g):
            return g * 7

    x = torch.randn(3, 4, requires_grad=True)
    for fn, reason in (
        (lambda x: torch.vmap(torch.func.grad(lambda r: Double.apply(r).sum()))(x), "Double|custom_function_call"),
        (lambda x: torch.vmap(lambda r: torch.autograd.grad((r * x[0]).sum(), x)[0])(x), "torch.autograd.grad"),
    ):
        with pytest.raises(fusejit.CaptureError, match=rf"(?s)({reason}).*|test_transforms\.py"):
            jit(fn, backend=backend, fullgraph=True)(x)
    jitted = jit(lambda x: torch.vmap(torch.func.grad(lambda r: Double.apply(r).sum()))(x), backend=backend)
    assert_close(jitted(x), torch.full((3, 4), 7.0))  # eagerly


# Fusion.


def test_batched_functions_are_one_kernel():
    x = torch.randn(100, 2)
    for f in (F.hardswish, lambda r: r.softmax(0), lambda r: (r - r.mean()) / (r.var() + 1e-5).sqrt()):
        report = jit(vmap(f), backend="interpret").explain(x)
        assert report.forward.launches == 1 and not report.forward.externs, report
    x = torch.randn(4, 8, 16)
    report = jit(vmap(vmap(grad(lambda r: r.softmax(0).square().sum()))), backend="interpret").explain(x)
    assert report.forward.launches == 1, report


# The seed's cases.


def test_case_44(backend):
    condition, x, y = torch.tensor([[True, False], [False, True]]), torch.tensor([[2, 3], [4, 1]]), torch.tensor([3, 5])
    mapped = vmap(torch.where, in_axes=(0, 0, None))
    assert compiled(mapped, backend, condition, x, y)(condition, x, y).tolist() == [[2, 5], [3, 1]]
    assert mapped(condition, x, y).tolist() == [[2, 5], [3, 1]]


def test_case_45(backend):
    x = torch.randn(100, 2) * 100
    loop = torch.stack([F.hardswish(row) for row in x])
    assert_close(compiled(vmap(F.hardswish), backend, x)(x), loop)
    assert_close(vmap(jit(F.hardswish, backend=backend))(x), loop)


def test_case_46(backend):
    x, y, z = torch.tensor([[2], [4], [6]]), torch.tensor([[-3, -2, -1], [3, 2, 1]]), torch.tensor([-1, 3])
    for mapped in (
        vmap(lambda x, y, z: x + y + z, in_axes=(0, 1, None), out_axes=1),
        vmap(lambda x, y, z: x + y + z, in_dims=[-2, -1, None], out_dims=-1),
    ):
        assert compiled(mapped, backend, x, y, z)(x, y, z).tolist() == [[-2, 1, 4], [8, 9, 10]]


def plus(x, y=0):
    return x + y


ERRORS = {
    "in_axes=None": (lambda: vmap(plus, in_axes=None), ValueError, "in_axes=None: nothing is mapped"),
    "all None": (lambda: vmap(plus, (None, None)), ValueError, "nothing is mapped"),
    "all None where mapped": (lambda: vmap(plus, in_axes=({"a": None}, None)), ValueError, "nothing is mapped"),
    "float": (lambda: vmap(plus, in_axes=(0, 1.5)), TypeError, r"in_axes.*1\.5 \(float\)"),
    "bool": (lambda: vmap(plus, True), TypeError, r"in_axes.*True \(bool\)"),
    "float out": (lambda: vmap(plus, out_axes=1.0), TypeError, r"out_axes.*1\.0 \(float\)"),
    "both": (lambda: vmap(plus, in_axes=0, in_dims=0), TypeError, "in_axes.*in_dims"),
    "both out": (lambda: vmap(plus, out_axes=0, out_dims=1), TypeError, "out_axes.*out_dims"),
    "randomness": (lambda: vmap(plus, randomness="some"), ValueError, "'error', 'different', 'same'"),
    "chunk": (lambda: vmap(plus, chunk_size=0), ValueError, "chunk_size=0"),
    "no function": (lambda: vmap(3), TypeError, "function"),
    "range": (
        lambda: vmap(plus, in_axes=-3)(torch.ones(2, 3)),
        ValueError,
        r"axis -3 is out of range for args\[0\].*from -2 to 1",
    ),
    "scalar": (lambda: vmap(plus)(torch.ones(())), ValueError, r"args\[0\] of shape \(\)"),
    "sizes": (lambda: vmap(plus)(torch.ones(3), torch.ones(2)), ValueError, r"args\[0\] has 3.*args\[1\] has 2"),
    "no inputs": (lambda: vmap(plus)(), ValueError, "without positional arguments"),
    "in length": (
        lambda: vmap(plus, in_axes=(0, 0, 0))(torch.ones(3), torch.ones(3)),
        ValueError,
        "in_axes.*3 entries.*2 of them",
    ),
    "in keys": (
        lambda: vmap(plus, in_axes=({"a": 0},))({"b": torch.ones(3)}),
        ValueError,
        r"in_axes.*'a'.*args\[0\].*'b'",
    ),
    "number": (lambda: vmap(plus)(torch.ones(3), 2), ValueError, r"args\[1\] is a int.*axis None"),
    "out length": (
        lambda: vmap(lambda x: (x, x), out_axes=(0, 0, 0))(torch.ones(3)),
        ValueError,
        "out_axes.*3 entries for the result.*2 of",
    ),
    "out None": (
        lambda: vmap(plus, out_axes=None)(torch.ones(3)),
        ValueError,
        "out_axes: the result depends on mapped",
    ),
    "out range": (
        lambda: vmap(plus, out_axes=2)(torch.ones(3, 4)),
        ValueError,
        "out_axes: axis 2 is out of range for the result",
    ),
    "out number": (lambda: vmap(lambda x: (x, 3))(torch.ones(3)), ValueError, r"out_axes: the result\[1\] is a int"),
    "grad": (lambda: grad(3), TypeError, "fusejit.grad takes a function"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_case_47(name):
    call, kind, text = ERRORS[name]
    with pytest.raises(kind, match=text):
        call()


def test_errors_under_jit_are_the_same(backend):
    with pytest.raises(ValueError, match=r"args\[0\] has 3.*args\[1\] has 2"):
        jit(vmap(plus), backend=backend)(torch.ones(3), torch.ones(2))


def test_case_48(backend):
    x, y, z = torch.randn(3, 5, dtype=D), torch.randn(3, 5, dtype=D), torch.randn(3, dtype=D)

    def f(a, rest):
        return (a.sin() * rest[0] + rest[1]).square().sum()

    mapped = vmap(grad(f), in_axes=(1, [-1, None]), out_axes=1)
    total = torch.func.grad(lambda a: torch.vmap(f, (1, (-1, None)))(a, (y, z)).sum())
    assert_close(compiled(mapped, backend, x, (y, z))(x, (y, z)), total(x))
    assert_close(mapped(x, [y, z]), total(x))
    both = vmap(value_and_grad(f, argnums=(0, 1)), in_axes=(1, (-1, None)))
    value, (by_a, (by_y, by_z)) = compiled(both, backend, x, (y, z))(x, (y, z))
    assert value.shape == (5,) and by_a.shape == by_y.shape == (5, 3) and by_z.shape == (5, 3)
    assert_close(by_a.t(), total(x))


class Assign(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), value))
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, new):
        with torch.no_grad():
            self.weight.copy_(new)
            self.seen.scatter_add_(0, torch.tensor([2, 0]), new[:2])
        return self.weight + new


def test_case_49(backend):
    models, new = [Assign(value) for value in (1.0, 2.0, 3.0)], torch.arange(9.0).view(3, 3)
    jitted = compiled(vmap(models), backend, new)
    assert_close(jitted(new), 2 * new)
    for number, model in enumerate(models):
        assert_close(model.weight.data, new[number])
        assert_close(model.seen, torch.tensor([new[number, 1], 0.0, new[number, 0]]))

    def update(parameter, row):
        parameter.index_add_(0, torch.tensor([0, 0]), row[:2])
        return parameter * 2

    given, expected = torch.zeros(3, 4), new[:, 0] + new[:, 1]
    result = compiled(vmap(update), backend, given.clone(), new)(given, new)
    assert_close(given[:, 0], expected)
    assert_close(result, given * 2)
    for wrong, text in (
        ([Assign(1.0)], "at least two"),
        ([Assign(1.0), nn.Linear(3, 3)], r"models\[1\].*Linear instead of Assign"),
        ([nn.Linear(3, 3), nn.Linear(3, 4)], r"models\[1\].*out_features is 4 instead of 3"),
        ([nn.Sequential(nn.Dropout(0.1)), nn.Sequential(nn.Dropout(0.2))], r"models\[1\]\.0.*p is 0.2 instead of 0.1"),
        ([Assign(1.0), Assign(1.0).double()], r"weight is .*float64.* instead of .*float32"),
        ([nn.Sequential(), nn.Sequential(nn.Tanh())], "other submodules"),
    ):
        with pytest.raises(ValueError, match=text):
            vmap(wrong)
    with pytest.raises(ValueError, match=r"the models has|the models have|args\[0\] has 4"):
        vmap(models)(torch.ones(4, 3))
    with pytest.raises(TypeError, match="list of nn.Modules"):
        vmap([nn.Tanh(), torch.tanh])


# Ensembles.


def networks(count: int = 3) -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)) for _ in range(count)]


def train(call: Callable, models: list[nn.Module], x: torch.Tensor, y: torch.Tensor) -> list[float]:
    optimiser = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1, momentum=0.9)
    losses = []
    for _ in range(3):
        optimiser.zero_grad()
        loss = (call(x) - y).square().mean(dim=(1, 2)).sum()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


def test_an_ensemble_trains_as_its_models_would(backend):
    models = networks()
    alone = copy.deepcopy(models)
    x, y = torch.randn(6, 4), torch.randn(6, 1)
    jitted = compiled(vmap(models, in_axes=None), backend, x)
    losses = train(jitted, models, x, y)
    assert losses[2] < losses[0]
    assert losses == pytest.approx(train(lambda x: torch.stack([model(x) for model in alone]), alone, x, y), rel=1e-4)
    for model, other in zip(models, alone):
        assert_close(dict(model.state_dict()), dict(other.state_dict()), rtol=1e-4, atol=1e-5)
    assert jitted.cache_info().misses == 1
    models[1].eval()
    with pytest.raises(ValueError, match="training is False"):
        jitted(x)
    for model in (*models, *alone):
        model.eval()
    assert_close(jitted(x), torch.stack([model(x) for model in alone]), rtol=1e-4, atol=1e-5)


def test_an_ensemble_by_hand(backend):
    """torch's recipe: stacked parameters that are leaves themselves, functional_call inside vmap."""
    models = [nn.Linear(4, 2).double() for _ in range(3)]
    base = copy.deepcopy(models[0]).to("meta")
    x = torch.randn(3, 5, 4, dtype=D)
    found = []
    for wrap in (lambda f: f, lambda f: jit(f, backend=backend, fullgraph=True)):
        parameters, buffers = stack_module_state(models)
        call = wrap(lambda p, b, x: torch.vmap(lambda p, b, x: functional_call(base, (p, b), (x,)).tanh())(p, b, x))
        call(parameters, buffers, x).square().sum().backward()
        found.append({name: value.grad for name, value in parameters.items()})
    assert_close(found[1], found[0])


def test_each_model_has_its_own_input_and_gradient(backend):
    models = [nn.Linear(4, 2) for _ in range(3)]
    x = torch.randn(5, 3, 4)
    out = compiled(vmap(models, in_axes=1, out_axes=1), backend, x)(x)
    out[:, 1].sum().backward()
    assert_close(out, torch.stack([model(x[:, i]) for i, model in enumerate(models)], 1))
    assert_close(models[1].weight.grad, x[:, 1].sum(0).expand(2, 4))
    assert not models[0].weight.grad.any() and not models[2].bias.grad.any()


# Per-sample gradients, hessians, closures.


def test_gradients_per_sample(backend):
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x, y = torch.randn(5, 4, dtype=D), torch.tensor([0, 2, 1, 1, 0])

    def loss(parameters, x, y):
        return F.cross_entropy(functional_call(model, parameters, (x[None],)), y[None])

    parameters = dict(model.named_parameters())
    per_sample = compiled(vmap(grad(loss), in_axes=(None, 0, 0)), backend, parameters, x, y)(parameters, x, y)
    for row in range(5):
        want = torch.autograd.grad(F.cross_entropy(model(x[row : row + 1]), y[row : row + 1]), list(model.parameters()))
        assert_close([value[row] for value in per_sample.values()], list(want))


def test_a_hessian_and_a_newton_step(backend):
    weight = torch.randn(3, 3, dtype=D, requires_grad=True)

    def energy(x):
        return (x @ weight).cosh().sum()

    def step(x):
        return x - torch.func.grad(energy)(x) / torch.func.hessian(energy)(x).diagonal()

    x = torch.randn(3, dtype=D, requires_grad=True)
    found = [torch.autograd.grad(call(x).square().sum(), (x, weight)) for call in (step, compiled(step, backend, x))]
    assert_close(found[1], found[0])


def test_transforms_of_jitted_functions(backend):
    x = torch.randn(3, 4, dtype=D, requires_grad=True)
    inner = jit(lambda r: r.tanh().sum(), backend=backend)
    for composed in (
        grad(inner),
        jit(grad(inner), backend=backend),
        grad(lambda r: jit(vmap(inner), backend=backend)(r).sum()),
    ):
        assert_close(composed(x), 1 - x.tanh() ** 2)
    jitted = jit(vmap(grad(inner)), backend=backend)
    jitted(x).sum().backward()
    assert_close(x.grad, -2 * x.tanh() * (1 - x.tanh() ** 2))
    assert jitted.cache_info().fallbacks == 0
    value, gradient = jit(value_and_grad(lambda r: (inner(r), r * 2), has_aux=True), backend=backend)(x)
    assert_close(value, (x.tanh().sum(), x * 2))
    assert_close(gradient, 1 - x.tanh() ** 2)


def test_a_captured_closure_is_an_input(backend):
    scale = torch.tensor([2.0, 3.0])

    def f(x):
        return torch.vmap(lambda r, s: r * s, (0, None))(x, scale) + torch.vmap(torch.neg)(scale)

    x = torch.ones(4, 2)
    jitted = compiled(f, backend, x)
    assert_close(jitted(x), f(x))
    scale.mul_(5)  # read at each call, not frozen
    assert_close(jitted(x), f(x))
    nothing = compiled(lambda: torch.vmap(lambda s: s * 2)(scale), backend)
    assert_close(nothing(), scale * 2)


# Axes and results.


def test_axes(backend):
    x, y = torch.randn(2, 3, 4), torch.randn(4, 2)

    def f(tree, factor):
        return {"sum": tree["x"] @ tree["y"] * factor, "same": torch.ones(2), "number": 7}

    axes = {"sum": -1, "same": None, "number": None}
    mapped = vmap(f, in_axes=({"x": 1, "y": None}, None), out_axes=axes)
    tree = {"y": y, "x": x}
    want = torch.stack([x[:, i] @ y * 0.5 for i in range(3)], -1)
    for call in (mapped, compiled(mapped, backend, tree, 0.5)):
        found = call(tree, 0.5)
        assert_close(found["sum"], want)
        assert found["same"].shape == (2,) and found["number"] == 7
    assert vmap(lambda x: torch.ones(2), out_axes=1)(x).shape == (2, 2)  # repeated
    assert_close(vmap(lambda x, *, by: x * by)(x, by=2.0), x * 2)


def test_chunks_and_nesting(backend):
    x = torch.randn(7, 5, dtype=D, requires_grad=True)
    mapped = vmap(vmap(lambda r, s: (r * s).sin(), (0, None)), (0, 0), 1, chunk_size=3)
    found = compiled(mapped, backend, x, x[:, 0].detach())(x, x[:, 0].detach())
    assert_close(found, (x * x[:, :1].detach()).sin().t())
    found.sum().backward()
    assert_close(x.grad, (x * x[:, :1]).cos() * x[:, :1])


def test_randomness():
    x = torch.ones(4, 256)
    for mode in ("different", "same"):
        mapped = vmap(lambda r: F.dropout(r, 0.5), randomness=mode)
        jitted = compiled(mapped, "eager", x)
        torch.manual_seed(3)
        want = mapped(x)
        torch.manual_seed(3)
        assert torch.equal(jitted(x), want) and not torch.equal(jitted(x), want)
        assert torch.equal(want[0], want[1]) is (mode == "same")
        drawn = compiled(mapped, "interpret", x)(x)
        assert torch.equal(drawn[0], drawn[1]) is (mode == "same") and 0.4 < (drawn != 0).float().mean() < 0.6
    for call in (vmap(lambda r: F.dropout(r, 0.5)), jit(vmap(lambda r: F.dropout(r, 0.5)))):
        with pytest.raises(RuntimeError, match="randomness"):
            call(x)


def test_a_transform_keeps_its_function():
    mapped = vmap(plus, in_axes=(0, None), out_axes=1)
    assert mapped.__wrapped__ is plus and mapped.__name__ == "vmap(plus)" and repr(mapped) == "<fusejit.vmap of plus>"
    assert_close(mapped(torch.eye(2), torch.ones(2)), torch.eye(2) + 1)
    assert fusejit.compile_for(vmap(lambda r: r.sum()), (torch.ones(4, 8),)).kernels  # and not of the row alone
    compiled_for = fusejit.compile_for(vmap(lambda r: r.sum()), (torch.ones(4, 8),))
    assert compiled_for.specialisation.record["capture"].graph.output_node().args[0][0].meta["val"].shape == (4,)


# What the captures above found in the back end.


def test_inputs_changed_with_each_others_old_values():
    def swap(a, b):
        first, second = a * 2, b * 3
        a.copy_(second)
        b.copy_(first)
        return first + second

    def turn(a, b):
        old = a.clone()
        a.copy_(b.t())
        b.copy_(old.flip(0))
        return a.sum()

    for f in (swap, turn):
        given = [torch.randn(40, 40), torch.randn(40, 40)]
        kept = [value.clone() for value in given]
        jitted = jit(f, backend="interpret", fullgraph=True)
        assert_close([jitted(*given), *given], [f(*kept), *kept])


def test_a_saved_piece_with_holes():
    """A strided piece of a value that only the backward reads keeps the strides that the backward was compiled for."""

    def f(x):
        return (x.exp().as_strided((3, 2), (4, 1), 1) ** 3).sin()

    x = torch.randn(3, 4, dtype=D, requires_grad=True)
    found = [torch.autograd.grad(call(x).sum(), x) for call in (f, jit(f, backend="interpret"))]
    assert_close(found[1], found[0])
