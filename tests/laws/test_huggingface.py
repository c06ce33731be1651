"""Blocks of real models, forward and backward: kernels within 1e-4 of eager in float32, and the default backend equal
to eager on a CPU.
"""

from __future__ import annotations

import pytest
import torch
from models import MODELS, make
from torch.testing import assert_close

import fusejit

pytestmark = pytest.mark.filterwarnings("ignore")


def results(call, module, inputs):
    """The output, the gradient of the first input and of every parameter, for one seeded gradient of the output."""
    out = call(*inputs)
    tangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    wanted = [inputs[0], *module.parameters()]
    return {
        "out": out.detach(),
        **dict(zip(["x", *dict(module.named_parameters())], torch.autograd.grad(out, wanted, tangent))),
    }


@pytest.mark.parametrize("name", MODELS)
def test_kernels_match_eager(name, fuse, device):
    module, inputs = make(name)
    module, inputs = module.to(device), tuple(t.detach().to(device).requires_grad_(t.requires_grad) for t in inputs)
    fused = fuse(module)
    got, wanted = results(fused, module, inputs), results(module, module, inputs)
    for key, value in wanted.items():
        assert_close(got[key], value, rtol=1e-4, atol=1e-4, msg=lambda text, key=key: f"{key}: {text}")
    report = fused.explain(*inputs)
    assert report.kernels and not report.fallbacks


@pytest.mark.parametrize("name", MODELS)
def test_default_backend_is_eager_on_a_cpu(name):
    module, inputs = make(name)
    got, wanted = results(fusejit.jit(module), module, inputs), results(module, module, inputs)
    assert_close(got, wanted, rtol=0, atol=0)


TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 99}
T5 = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2, "vocab_size": 99}
WHOLE = {
    "llama": ("LlamaConfig", TINY | {"max_position_embeddings": 64}),
    "bert": ("BertConfig", TINY | {"max_position_embeddings": 64}),
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 99, "n_positions": 64}),
    "t5": ("T5Config", T5),  # an encoder and a decoder, relative positions
    "mamba": (
        "MambaConfig",
        {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 99, "state_size": 4},
    ),  # a scan, and no attention
}


def tiny(name):
    """A whole model of Hugging Face with two layers and random weights, and its token ids."""
    import transformers

    kind, sizes = WHOLE[name]
    config = getattr(transformers, kind)(**sizes)
    if name != "mamba":
        config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    return transformers.AutoModel.from_config(config).eval(), torch.arange(16).reshape(2, 8)


def outcome(call, model, ids, **options):
    """The last hidden state, and the gradient of every parameter that has one."""
    out = call(ids, **options)
    out = out if isinstance(out, torch.Tensor) else out.last_hidden_state
    tangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    named = dict(model.named_parameters())
    return {
        "out": out.detach(),
        **dict(zip(named, torch.autograd.grad(out, list(named.values()), tangent, allow_unused=True))),
    }


def same(got, wanted, **tolerance):
    assert got.keys() == wanted.keys()
    for key, value in wanted.items():
        assert (got[key] is None) == (value is None), key
        if value is not None:
            assert_close(got[key], value, msg=lambda text, key=key: f"{key}: {text}", **tolerance)


@pytest.mark.parametrize(
    ("name", "mode"), [*((name, "ast") for name in WHOLE), ("t5", "bytecode")]
)  # more of it in test_dynamo_backend.py
def test_whole_models(name, mode):
    """In one graph, without a fallback: the output and every gradient are eager's."""
    torch._dynamo.reset()
    model, ids = tiny(name)
    options = {} if name == "bert" else {"use_cache": False}
    options |= {"decoder_input_ids": ids} if name == "t5" else {}
    jitted = fusejit.jit(model, backend="eager", fullgraph=True, capture_mode=mode)
    wanted = outcome(model, model, ids, **options)
    for _ in range(2):
        same(outcome(jitted, model, ids, **options), wanted)
    info = jitted.cache_info()
    assert not info.fallbacks and info.specialisations == 1
    assert not jitted.explain(ids, **options).fallbacks


@pytest.mark.parametrize("name", ("llama", "bert", "gpt2"))
def test_whole_models_on_kernels(name, fuse, device):
    model, ids = tiny(name)
    model, ids = model.to(device), ids.to(device)
    options = {} if name == "bert" else {"use_cache": False}
    jitted = fuse(model, fullgraph=True)
    with torch.no_grad():
        got, wanted = jitted(ids, **options).last_hidden_state, model(ids, **options).last_hidden_state
    assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("gradients", (False, True))
@pytest.mark.parametrize("name", ("llama", "gpt2"))
def test_a_cache_that_is_a_pytree(name, gradients):
    """Keys and values of each layer are results of the graph like any other, gradients through them included."""
    import transformers
    from torch.utils import _pytree

    cache = transformers.DynamicCache
    if cache not in _pytree.SUPPORTED_NODES:
        _pytree.register_pytree_node(
            cache,
            lambda value: ([(layer.keys, layer.values) for layer in value.layers], None),
            lambda pairs, _: cache(list(pairs)),
        )
    model, ids = tiny(name)
    jitted = fusejit.jit(model, backend="eager", fullgraph=True)
    parameters, found = dict(model.named_parameters()), []
    for call in (jitted, model, jitted):
        with torch.set_grad_enabled(gradients):
            out = call(ids, use_cache=True)
        kept = [tensor for layer in out.past_key_values.layers for tensor in (layer.keys, layer.values)]
        assert len(kept) == 4 and type(out.past_key_values) is cache
        results = [out.last_hidden_state, *kept]
        assert all(result.requires_grad is gradients for result in results)
        loss = sum((result * result.detach().cos()).sum() for result in results)
        grads = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True) if gradients else ()
        found.append({str(n): value.detach() for n, value in enumerate(results)} | dict(zip(parameters, grads)))
    same(found[0], found[1])
    same(found[2], found[1])
    assert not jitted.explain(ids, use_cache=True).fallbacks


def test_a_subclass_with_tensor_ifs():
    import transformers

    class Gate(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            if x.abs().mean() > 0.8:
                x = x * 0.5
            elif x.max() < 0:
                return x
            return self.inner(x)

    class Model(transformers.LlamaModel):
        def __init__(self, config):
            super().__init__(config)
            for layer in self.layers:
                layer.mlp = Gate(layer.mlp)

        def forward(self, ids, **kwargs):
            hidden = super().forward(ids, **kwargs).last_hidden_state
            return hidden if hidden.mean() > 0 else -hidden

    plain, ids = tiny("llama")
    model = Model(plain.config).eval()
    whole = fusejit.jit(model, backend="eager", fullgraph=True)
    parts = fusejit.jit(model, backend="eager", capture_mode="bytecode")  # Dynamo cuts the model at the tests
    for seed in range(3):
        torch.manual_seed(seed)
        for parameter in model.parameters():
            parameter.data.normal_(std=0.2 * (seed + 1))
        wanted = outcome(model, model, ids, use_cache=False)
        same(outcome(whole, model, ids, use_cache=False), wanted, rtol=1e-4, atol=1e-5)
        same(outcome(parts, model, ids, use_cache=False), wanted, rtol=1e-4, atol=1e-5)
    found = whole.specialisation(ids, use_cache=False)
    assert not found.fallbacks and len(found.control) >= 3
    assert "if x.abs().mean() > 0.8" in " ".join(map(str, parts.explain(ids, use_cache=False).fallbacks))


def test_the_loss_of_a_language_model_never_holds_its_logits(device):
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**TINY | {"vocab_size": 999, "num_hidden_layers": 1})
    model = transformers.LlamaForCausalLM(config).to(device)
    ids = torch.randint(999, (2, 12), device=device)
    labels = ids.clone()
    labels[0, :5] = -100

    def loss(ids, labels):
        return model(ids, labels=labels, use_cache=False).loss

    fused = fusejit.jit(loss, backend="eager", fullgraph=True, chunk_bytes=8 * 999 * 4)
    results = []
    for fn in (loss, fused):
        model.zero_grad()
        value = fn(ids, labels)
        value.backward()
        results.append([value.detach(), *(p.grad.clone() for p in model.parameters())])
    assert_close(results[1], results[0])
    (line,) = fused.explain(ids, labels).rewrites
    assert line.startswith("mm.default of 24 x 999") and "in 3 parts of 8 rows" in line and "modeling_llama.py" in line


CACHING = {
    "llama": lambda t: t.LlamaModel(
        t.LlamaConfig(
            num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=50,
        )
    ),
    "gpt2": lambda t: t.GPT2Model(t.GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=50)),
}  # fmt: skip


@pytest.mark.parametrize("name", CACHING)
def test_a_model_that_returns_its_cache(name, fuse, device):
    """Models give a cache by default: an object that each call makes anew, of tensors that may have gradients."""
    import transformers

    model = CACHING[name](transformers).to(device).eval()
    fused = fuse(model)
    caches = []
    for _ in range(2):
        ids = torch.randint(0, 50, (2, 8), device=device)
        got, wanted = fused(ids), model(ids)
        assert_close(got.last_hidden_state, wanted.last_hidden_state, rtol=1e-4, atol=1e-4)
        ours, theirs = (
            torch.autograd.grad(
                out.past_key_values.layers[0].keys.square().sum() + out.last_hidden_state.sum(),
                [*model.parameters()],
                allow_unused=True,
            )
            for out in (got, wanted)
        )
        for one, other in zip(ours, theirs, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                assert_close(one, other, rtol=1e-3, atol=1e-3)
        following = torch.randint(0, 50, (2, 1), device=device)
        with torch.no_grad():
            after = [model(following, past_key_values=out.past_key_values).last_hidden_state for out in (got, wanted)]
        assert_close(*after, rtol=1e-4, atol=1e-4)
        caches.append(got.past_key_values)
    assert type(caches[0]) is type(wanted.past_key_values) and caches[0] is not caches[1]
    assert not fused.explain(ids).fallbacks and fused.cache_info()[:2] == (1, 1)
