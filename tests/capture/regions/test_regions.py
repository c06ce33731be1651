"""Regions: equal blocks are captured, differentiated and compiled once; what differs is told apart; what cannot be
stays in place.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from front import leaf
from torch import nn

import fusejit
from fusejit.autodiff import region_ops as regions


@pytest.fixture(params=["eager", "interpret"])
def backend(request: Any) -> str:
    return request.param


@fusejit.lazy_inline
class Block(nn.Module):
    def __init__(self, width: int = 6, scale: float = 1.0) -> None:
        super().__init__()
        self.norm, self.linear, self.scale = nn.LayerNorm(width), nn.Linear(width, width), scale

    def forward(self, x):
        return x + self.linear(self.norm(x)).tanh() * self.scale


class Chain(nn.Module):
    def __init__(self, blocks) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def results(call, module, *inputs, seed=0):
    """Results, and gradients of the inputs and of every parameter that requires them."""
    inputs = [value.detach().clone().requires_grad_(value.requires_grad) for value in inputs]
    torch.manual_seed(seed)
    out = call(*inputs)
    tensors = [
        value
        for value in torch.utils._pytree.tree_leaves(out)
        if isinstance(value, torch.Tensor) and value.requires_grad
    ]
    wanted = [value for value in (*inputs, *module.parameters()) if value.requires_grad]
    loss = sum((value.float() ** 2).sum() for value in tensors)
    grads = torch.autograd.grad(loss, wanted, allow_unused=True) if tensors and wanted else ()
    return out, grads


def agree(module, *inputs, backend, fn=None, tolerance=1e-4):
    """jit(fn) against fn, twice; returns the report. Nothing may fall back."""
    fn = fn or module
    jitted = fusejit.jit(fn, backend=backend)
    wanted = results(fn, module, *inputs)
    for _ in range(2):
        torch.testing.assert_close(results(jitted, module, *inputs), wanted, rtol=tolerance, atol=tolerance)
    report = jitted.explain(*inputs)
    assert not report.fallbacks, report.fallbacks
    return report


def named(report) -> list[tuple[str, int]]:
    return [(region.name, region.calls) for region in report.regions]


# What a region is.


def test_case_56(backend):
    """Ten equal blocks are one graph, other arguments make two; an attribute edited after __init__ is a region of its
    own, and right.
    """
    assert named(agree(Chain([Block() for _ in range(10)]), leaf(3, 6), backend=backend)) == [("Block_0", 10)]
    both = Chain([Block(6, 1.0 if number % 2 else 2.0) for number in range(10)])
    assert named(agree(both, leaf(3, 6), backend=backend)) == [("Block_0", 5), ("Block_1", 5)]
    edited = Chain([Block() for _ in range(6)])
    edited.blocks[2].scale = edited.blocks[4].scale = 3.0
    assert named(agree(edited, leaf(3, 6), backend=backend)) == [("Block_0", 4), ("Block_1", 2)]
    edited.blocks[4].scale = 5.0  # now one of its kind: no region, and right
    assert named(agree(edited, leaf(3, 6), backend=backend)) == [("Block_0", 4)]


def test_case_56_nested_at_any_depth(backend):
    """Case 56, nested: regions inside regions, to any depth (upstream reuses the outermost only): each graph is
    captured once.
    """

    @fusejit.lazy_inline
    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block() for _ in range(3)])

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x.sin()

    @fusejit.lazy_inline
    class Tower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.last = Stage(), Stage(), Block()

        def forward(self, x):
            return self.last(self.second(self.first(x)))

    report = agree(Chain([Tower(), Tower(), Tower()]), leaf(3, 6), backend=backend)
    assert named(report) == [("Block_0", 4), ("Stage_0", 2), ("Tower_0", 3)]
    if backend != "eager":
        assert (
            report.forward.launches == 21 * report.forward.regions[0][2].regions[0][2].regions[0][2].launches + 6
        )  # and one sin a stage


def test_compiled_once(monkeypatch):
    """One joint trace and one pair of Programs for all the blocks, and none for a second model of the same blocks."""
    made = []
    monkeypatch.setattr(
        regions,
        "compile_region",
        lambda region, *more, was=regions.compile_region: (made.append(region.name), was(region, *more))[1],
    )
    x = leaf(3, 6)
    first = fusejit.jit(Chain([Block(6, 1.25) for _ in range(12)]), backend="interpret")
    one, nodes = first.specialisation(x), []
    assert made == ["Block_0"]
    for count in (3, 12):
        found = fusejit.jit(Chain([Block(6, 1.25) for _ in range(count)]), backend="interpret").specialisation(x)
        nodes.append(len(found.record["capture"].graph.nodes))
    assert made == ["Block_0"] and nodes == [
        2 + 3 * 6,
        2 + 12 * 6,
    ]  # four weights, a call and its result for each block
    assert one.built.regions[0] is found.built.regions[0]
    assert len(set(map(id, found.forward.called))) == 1 and len(found.forward.calls) == 12


def test_automatic(backend):
    """Three equal blocks in a container are found; two, tiny ones, torch's own classes and policy="front" are not."""

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)

        def forward(self, x):
            h = self.linear(self.norm(x)).tanh()
            return x + h.sin() * 2 - h.cos() / 3 + h.exp().log1p() * x.sigmoid()

    class Tiny(nn.Module):
        def forward(self, x):
            return x.sin() + 1

    class Front(Plain):
        pass

    fusejit.lazy_inline(policy="front")(Front)
    assert named(agree(Chain([Plain() for _ in range(3)]), leaf(3, 6), backend=backend)) == [("Plain_0", 3)]
    assert named(agree(nn.Sequential(*[Plain() for _ in range(4)]), leaf(3, 6), backend=backend)) == [("Plain_0", 4)]
    assert not agree(Chain([Plain() for _ in range(2)]), leaf(3, 6), backend=backend).regions
    tiny = agree(Chain([Tiny() for _ in range(4)]), leaf(3, 6), backend=backend)
    assert not tiny.regions and "fewer than" in str(tiny.inlined) and "captured in place" in str(tiny)
    assert not agree(Chain([Front() for _ in range(4)]), leaf(3, 6), backend=backend).regions
    assert not agree(Chain([nn.Linear(6, 6) for _ in range(4)]), leaf(3, 6), backend=backend).regions


def test_marks():
    class Marked(nn.Module):
        @fusejit.lazy_inline
        def __init__(self) -> None:
            super().__init__()

        def forward(self, x):
            return x.sin()

    class Below(Marked):
        def __init__(self) -> None:
            super().__init__()

    for cls in (Marked, Below):
        assert named(agree(Chain([cls(), cls()]), leaf(3), backend="eager")) == [(f"{cls.__name__}_0", 2)]
    for arguments in ({"policy": "back"}, {"attrs": 3}, {"attrs": ("a",)}, {"attrs": ["a", 3]}):
        with pytest.raises(ValueError, match="choose one of None, 'front'|attribute"):
            fusejit.lazy_inline(**arguments)
    for target in (3, int):
        with pytest.raises(TypeError, match="lazy_inline takes"):
            fusejit.lazy_inline(target)
    with pytest.raises(TypeError, match="no_inline takes a function"):
        fusejit.no_inline(Marked)

    @fusejit.lazy_inline(attrs=["group"])
    class Grouped(Block):
        def __init__(self, group) -> None:
            super().__init__()
            self.group = group

    assert named(agree(Chain([Grouped(g) for g in "aabb"]), leaf(3, 6), backend="eager")) == [
        ("Grouped_0", 2),
        ("Grouped_1", 2),
    ]


def test_functions(backend):
    """no_inline: modules among the arguments, keywords, pytrees out, arguments handed through, closures that change."""

    @fusejit.no_inline
    def gate(linear, x, *, factor):
        h = linear(x) * factor
        return {"h": h.sigmoid() * x, "same": x, "list": [h.sum(), 3, None]}

    layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])

    def f(x):
        total = []
        for number, layer in enumerate(layers):
            out = gate(layer, x, factor=2.0 if number < 2 else 3.0)
            assert out["same"] is x and out["list"][1:] == [3, None]
            x = out["h"]
            total.append(out["list"][0])
        return x, total

    assert named(agree(layers, leaf(3, 6), backend=backend, fn=f)) == [("gate_0", 2), ("gate_1", 2)]

    def g(x):
        step = 0.0

        @fusejit.no_inline
        def shift(x):
            return (x + step).sin()

        for _ in range(3):
            x, step = shift(shift(x)), step + 1
        return x

    assert named(agree(nn.Module(), leaf(3), backend=backend, fn=g)) == [("shift_0", 2), ("shift_1", 2), ("shift_2", 2)]


# What tells blocks apart.


DEPTH = 1.0


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.config, self.factor = nn.Parameter(torch.randn(6)), {"a": [1.0, 2.0]}, 1.0
        self.drop, self.other = nn.Dropout(0.0), None

    def forward(self, x):
        x = self.drop(x * self.weight * self.factor + self.config["a"][1] * DEPTH)
        return x if self.other is None else x + self.other


EDITS = {
    "attribute": lambda b: setattr(b, "factor", 2.0),
    "int for float": lambda b: setattr(b, "factor", 1),
    "container": lambda b: b.config["a"].__setitem__(1, 7.0),
    "mode": lambda b: (setattr(b.drop, "p", 0.25), b.eval()),
    "frozen": lambda b: b.weight.requires_grad_(False),
    "dtype": lambda b: b.double(),
    "strides": lambda b: setattr(b.weight, "data", torch.randn(12)[::2]),
    "tensor for None": lambda b: setattr(b, "other", torch.ones(6)),
    "forward": lambda b: setattr(b, "forward", lambda x: x * 3),
    "shape": lambda b: setattr(b, "weight", nn.Parameter(torch.randn(1))),
    "buffer for parameter": lambda b: (delattr(b, "weight"), b.register_buffer("weight", torch.randn(6))),
}


@pytest.mark.parametrize("name", EDITS)
def test_edited(name):
    """Whatever a block reads makes it a region of its own once it differs, before the first call or after."""
    backend = "interpret" if name in ("attribute", "frozen", "strides") else "eager"
    fusejit.lazy_inline(Reads)
    chain = Chain([Reads() for _ in range(5)])
    jitted, x = fusejit.jit(chain, backend=backend), leaf(3, 6)
    assert named(jitted.explain(x)) == [("Reads_0", 5)]
    EDITS[name](chain.blocks[3])
    torch.testing.assert_close(results(jitted, chain, x), results(chain, chain, x))
    report = agree(chain, x, backend=backend)
    # dropout in eval and dropout by 0 are the same: their operand itself
    assert report.regions[0].calls < 5 or name in ("int for float", "mode")


def test_written_by_the_caller(backend):
    """A value that the caller sets between two calls is part of what they are compared by, though it guards nothing."""
    global DEPTH

    @fusejit.no_inline
    def shift(box, x):
        return (x * box.factor + DEPTH).sin()

    block = Reads()

    def f(x):
        global DEPTH
        for number in (1.0, 1.0, 2.0):
            block.factor = number
            DEPTH = number + 1
            x = shift(block, x)
        block.factor = 1.0
        DEPTH = 1.0
        return x

    assert [calls for _, calls in named(agree(nn.Module(), leaf(3), backend=backend, fn=f))] == [2]


def test_guards_after_compiling(backend):
    """An edit of one block of many recompiles; the rest stays a region."""
    chain, x = Chain([Block() for _ in range(8)]), leaf(3, 6)
    jitted = fusejit.jit(chain, backend=backend)
    for step in range(5):
        if step == 1:
            chain.blocks[7].scale = 4.0
        if step == 2:
            chain.blocks[6].linear.weight = nn.Parameter(
                torch.randn(6, 6)
            )  # another tensor of the same kind: nothing to compile
        if step == 3:
            chain.blocks[5].norm.eps = 1.0
        if step == 4:
            chain.blocks[4].linear.bias = None
        torch.testing.assert_close(results(jitted, chain, x), results(chain, chain, x), rtol=1e-4, atol=1e-4)
    assert jitted.cache_info().misses == 4 and not jitted.cache_info().fallbacks


def test_shared_and_frozen_weights(backend):
    """Blocks that share a weight, blocks called twice, frozen blocks: gradients as in eager."""
    blocks = [Block() for _ in range(6)]
    blocks[3].linear.weight = blocks[1].linear.weight
    for parameter in blocks[4].parameters():
        parameter.requires_grad_(False)
    report = agree(Chain([*blocks, blocks[0], blocks[4]]), leaf(3, 6), backend=backend)
    assert named(report) == [("Block_0", 6), ("Block_1", 2)]
    tied = [Block() for _ in range(3)]
    tied[1].linear.bias = tied[1].norm.bias
    assert named(agree(Chain(tied), leaf(3, 6), backend=backend))[0][1] >= 2


# What cannot be a region.


@pytest.mark.full
def test_in_place_with_a_reason(backend):
    """Side effects, changed buffers, views of arguments: captured in place, right, and explained."""

    class Counts(Block):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x)

    class Changes(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(6))

        def forward(self, x):
            self.mean.add_(x.detach().mean(0))
            return super().forward(x) + self.mean

    class Views(Block):
        def forward(self, x):
            return super().forward(x.t().t().flip(0)), x[0]

    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(6)

        def forward(self, x):
            return F.batch_norm(x, self.norm.running_mean, self.norm.running_var, training=True).sin()

    fusejit.lazy_inline(Norm)
    reasons = {Counts: "calls was set", Changes: "in place", Views: "shares memory", Norm: "in place"}
    for cls, reason in reasons.items():
        blocks = [cls() for _ in range(3)]

        class Run(nn.Module):
            def __init__(self, blocks) -> None:
                super().__init__()
                self.blocks = nn.ModuleList(blocks)

            def forward(self, x):
                rows = []
                for block in self.blocks:
                    x = block(x)
                    x, row = x if isinstance(x, tuple) else (x, x.sum())
                    rows.append(row * 2)
                return x, rows

        module = Run(blocks)
        twin, x = copy.deepcopy(module), leaf(3, 6)
        jitted = fusejit.jit(module, backend=backend)
        for _ in range(2):
            torch.testing.assert_close(results(jitted, module, x), results(twin, twin, x), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(list(module.buffers()), list(twin.buffers()), rtol=1e-4, atol=1e-4)
        report = jitted.explain(x)
        if backend == "interpret" or cls is not Norm:  # torch's eager kernel updates them natively, in a region too
            assert not report.regions and any(reason in why for _, why in report.inlined), (cls, report.inlined)


def test_leaks():
    """A tensor that a block puts where its caller finds it keeps the block in place."""
    found = []

    @fusejit.no_inline
    def stores(x):
        found.append(x.sin())
        return x.cos()

    def f(x):
        found.clear()
        y = stores(stores(x))
        return y + found[0] * found[1]

    report = agree(nn.Module(), leaf(3), backend="eager", fn=f)
    assert not report.regions and "found was changed" in str(report.inlined)


# States, random numbers, results.


def test_random_numbers(backend):
    """Each call draws its own numbers; gradients use the very mask of the forward."""

    @fusejit.lazy_inline
    class Drop(nn.Module):
        def forward(self, x):
            return F.dropout(x, 0.5)

    drops = nn.ModuleList([Drop() for _ in range(3)])
    jitted = fusejit.jit(lambda x: tuple(drop(x) for drop in drops), backend=backend)
    x = torch.ones(400, requires_grad=True)
    masks = jitted(x)
    assert named(jitted.explain(x)) == [("Drop_0", 3)]
    for number, mask in enumerate(masks):
        assert 100 < int((mask == 0).sum()) < 300 and torch.equal(
            torch.autograd.grad(mask.sum(), x, retain_graph=True)[0], mask
        )
        assert not any(torch.equal(mask, other) for other in masks[:number])
    again = jitted(x)
    assert not torch.equal(again[0], masks[0])


def test_states(backend):
    """Grad modes and autocast, around the call and between calls."""
    chain, x = Chain([Block() for _ in range(4)]), leaf(3, 6)
    jitted = fusejit.jit(chain, backend=backend)
    with torch.no_grad():
        torch.testing.assert_close(jitted(x), chain(x), rtol=1e-4, atol=1e-4)
        assert not jitted(x).requires_grad and named(jitted.explain(x)) == [("Block_0", 4)]
    with torch.inference_mode():
        assert jitted(x).is_inference()
    torch.testing.assert_close(results(jitted, chain, x), results(chain, chain, x), rtol=1e-4, atol=1e-4)

    def f(x):
        with torch.no_grad():
            y = chain(x)
        with torch.autocast("cpu", torch.bfloat16):
            z = chain(x)
        return y.exp() + chain(x), z.float()

    report = agree(chain, x, backend=backend, fn=f, tolerance=3e-2)
    assert sorted(calls for _, calls in named(report)) == [4, 4, 4]
    with torch.autocast("cpu", torch.bfloat16):
        assert named(agree(chain, x, backend=backend, tolerance=3e-2)) == [("Block_0", 4)]


@fusejit.lazy_inline
class Many(nn.Module):
    """Several results: some unused, one an integer, one made without gradients, one transposed, one that holes are cut
    into.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, mask):
        h = self.linear(x).masked_fill(mask, 0.5)
        with torch.no_grad():
            size = h.exp()
        return {
            "h": h,
            "unused": h.cos() * size,
            "top": h.argmax(-1),
            "size": size,
            "flip": (h * 3).t(),
            "part": (h * 5)[:, 1:3],
        }


@fusejit.lazy_inline
class Headed(nn.Module):
    """Two results, with a weight of its own each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.first(x).tanh(), self.second(x).sigmoid()


@pytest.mark.parametrize("used", [0, 1])
def test_results_that_nobody_uses_give_no_gradient(backend, used):
    """None, as in eager: an optimiser would decay a weight that has a gradient of zeros."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.end = nn.ModuleList([Headed() for _ in range(3)]), nn.Linear(6, 6)

        def forward(self, x):
            for block in self.blocks:
                x, aside = block(x)
            return x, self.end(aside)

    model, x = Model(), leaf(2, 6)
    fusejit.jit(model, backend=backend, fullgraph=True)(x)[used].sum().backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    model(x)[used].sum().backward()
    assert {n for n, g in found.items() if g is None} == {n for n, p in model.named_parameters() if p.grad is None}
    for name, p in model.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(found[name], p.grad)


@pytest.mark.parametrize("mode", ("composed", "traced"))
def test_many_results(backend, mode):
    """Absent gradients, results without gradients, strides: with the outer graph written down and, where it changes an
    input, traced.
    """
    blocks = nn.ModuleList([Many() for _ in range(4)])

    def f(x, mask, seen):
        parts = []
        for number, block in enumerate(blocks):
            out = block(x, mask.expand(4, 4))
            parts.append(out["part"].sum() if number else out["flip"].sum())
            x = out["h"] + out["flip"] if number == 1 else out["h"].t() * out["size"]
            x = x + out["top"] * 0.1
        if mode == "traced":
            seen.add_(1)
        return x, parts, seen * 2

    report = agree(blocks, leaf(4, 4), torch.tensor([True, False, False, False]), torch.zeros(3), backend=backend, fn=f)
    assert sum(calls for _, calls in named(report)) >= 2  # two have inputs in another layout


def test_changed_in_place_by_the_caller(backend):
    """What a region returns is the caller's to change."""
    chain = Chain([Block() for _ in range(3)])

    def f(x):
        y = chain.blocks[0](x)
        z = chain.blocks[1](y * 2)
        z.mul_(3).add_(1)
        return chain.blocks[2](z), z

    assert named(agree(chain, leaf(3, 6), backend=backend, fn=f)) == [("Block_0", 3)]


def test_constants_and_conversions(backend):
    """Tensors made of Python numbers inside a block, and a weight that is seen transposed."""

    @fusejit.lazy_inline
    class Made(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 6))

        def forward(self, x):
            return (x @ self.weight.t()) @ self.weight * torch.tensor(2.0) + torch.tensor(
                [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
            )

    assert named(agree(Chain([Made() for _ in range(3)]), leaf(3, 6), backend=backend)) == [("Made_0", 3)]


def test_transforms(backend):
    """Inside a torch.func transform every block is captured in place; second-order gradients stay refused, or right."""
    chain, x = Chain([Block() for _ in range(3)]), torch.randn(3, 6)
    jitted = fusejit.jit(lambda x: torch.vmap(chain)(x), backend=backend)
    with torch.no_grad():
        torch.testing.assert_close(jitted(x), chain(x), rtol=1e-4, atol=1e-4)
    x.requires_grad_()
    (first,) = torch.autograd.grad(fusejit.jit(chain, backend=backend)(x).sin().sum(), x, create_graph=True)
    if backend == "eager":
        (wanted,) = torch.autograd.grad(torch.autograd.grad(chain(x).sin().sum(), x, create_graph=True)[0].sum(), x)
        torch.testing.assert_close(torch.autograd.grad(first.sum(), x)[0], wanted)
    else:
        with pytest.raises(fusejit.FusejitError, match="differentiated again"):
            first.sum().backward()


# What comes out.


def test_report_and_source(tmp_path):
    """Launches and bytes count a region as often as it runs; the source runs by itself."""
    x, blocks = leaf(3, 6), [Block() for _ in range(4)]
    with torch.no_grad():
        jitted = fusejit.jit(Chain(blocks), backend="interpret")
        many, one = jitted.explain(x), fusejit.jit(blocks[0], backend="interpret").explain(x)
        assert (many.launches, len(many.externs), len(many.kernels)) == (
            4 * one.launches,
            4 * len(one.externs),
            len(one.kernels),
        )
        assert many.bytes_fused == 4 * one.bytes_fused and many.bytes_eager == 4 * one.bytes_eager
        source = jitted.program(x).source
        assert source.count("Block_0_forward([") == 4 and source.count("def Block_0_forward(args)") == 1
        scope: dict[str, Any] = {"__name__": "alone"}
        exec(compile(source, "alone.py", "exec"), scope)
        inputs = [
            x,
            *(
                p
                for block in blocks
                for p in (block.norm.weight, block.norm.bias, block.linear.weight, block.linear.bias)
            ),
        ]
        torch.testing.assert_close(scope["call"](inputs)[0], Chain(blocks)(x))
    text = str(many)
    assert "4 calls of Block_0_forward" in text and "Block_0: 4 calls" in text


def test_compile_for(sm_90):
    """Without a GPU: the kernels of a region are compiled once and counted among the program's."""
    fused = sm_90(Chain([Block() for _ in range(3)]), (leaf(4, 6),))
    assert len(fused.kernels) == len({kernel.name for kernel in fused.kernels}) > 0
    assert all(kernel.ptx and kernel.n_spills == 0 for kernel in fused.kernels)


@pytest.mark.full
def test_hugging_face(backend):
    """Four layers of Llama, nothing marked: one region, no fallback, gradients as in eager."""
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 40,
    }
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=4, use_cache=False, **sizes))
    tokens = torch.randint(0, 40, (2, 7))
    report = agree(model, tokens, backend=backend, fn=lambda tokens: model(tokens).logits)
    assert named(report) == [("LlamaDecoderLayer_0", 4)]


@pytest.mark.parametrize("seed", range(4))
def test_random_models(seed):
    """Blocks with random structure, edits, sharing and order of calls: always eager's results."""
    draw = random.Random(seed)

    @fusejit.lazy_inline
    class Random(nn.Module):
        def __init__(self, depth: int) -> None:
            super().__init__()
            self.kind, self.factor, self.weight = (
                draw.choice("ab"),
                draw.choice((1.0, 2.0)),
                nn.Parameter(torch.randn(4, 4)),
            )
            self.inner = nn.ModuleList([Random(depth - 1) for _ in range(draw.choice((0, 2)) if depth else 0)])

        def forward(self, x, y):
            x = (x @ self.weight).tanh() * self.factor + y
            for block in self.inner:
                x = block(x, y * 2 if self.kind == "a" else y)
            return x.sin() if self.kind == "a" else x

    blocks = nn.ModuleList([Random(2) for _ in range(4)])
    for _ in range(3):
        one, two = draw.sample(list(blocks.modules())[1:], 2)
        if isinstance(one, Random) and isinstance(two, Random):
            one.weight = two.weight
    order = [draw.randrange(4) for _ in range(5)]

    def f(x, y):
        for number in order:
            x = blocks[number](x, y) + (x if number == 2 else 0)
        return x

    agree(blocks, leaf(3, 4), leaf(3, 4), backend="interpret", fn=f, tolerance=1e-3)
