"""Blocks of models from transformers, from random configurations: nothing is downloaded.

In: a name of `MODELS` and sizes. Out: `(module, inputs)`: `module(*inputs)` is one tensor, every parameter is drawn
from a fixed seed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class First(nn.Module):
    """Calls `block(*inputs, **fixed)` and returns its hidden states alone; a pair of extra inputs becomes
    `position_embeddings`.
    """

    def __init__(self, block: nn.Module, **fixed: object) -> None:
        super().__init__()
        self.block, self.fixed = block, fixed

    def forward(self, x: Tensor, cos: Tensor | None = None, sin: Tensor | None = None) -> Tensor:
        rotary = {} if cos is None else {"position_embeddings": (cos, sin)}
        out = self.block(x, **rotary, **self.fixed)
        return out[0] if isinstance(out, tuple) else out


def _decoder(config_class, layer_class, rotary_class, width=32, inner=48, heads=2, length=6, batch=2, **more):
    config = config_class(
        hidden_size=width,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=width // heads,
        num_hidden_layers=1,
        use_cache=False,
        attn_implementation="sdpa",
        **more,
    )
    x = torch.randn(batch, length, width)
    cos, sin = rotary_class(config)(x, torch.arange(length)[None])
    return First(layer_class(config, 0), use_cache=False), (x, cos, sin)


def llama(**sizes):
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaDecoderLayer, LlamaRotaryEmbedding

    return _decoder(LlamaConfig, LlamaDecoderLayer, LlamaRotaryEmbedding, **sizes)


def qwen2(**sizes):
    from transformers.models.qwen2.modeling_qwen2 import Qwen2Config, Qwen2DecoderLayer, Qwen2RotaryEmbedding

    return _decoder(Qwen2Config, Qwen2DecoderLayer, Qwen2RotaryEmbedding, **sizes)


def gemma(**sizes):
    from transformers.models.gemma.modeling_gemma import GemmaConfig, GemmaDecoderLayer, GemmaRotaryEmbedding

    return _decoder(GemmaConfig, GemmaDecoderLayer, GemmaRotaryEmbedding, **sizes)


def gpt2(width=32, heads=2, length=6, batch=2):
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block, GPT2Config

    config = GPT2Config(n_embd=width, n_head=heads, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, use_cache=False,
                        attn_implementation="sdpa")  # fmt: skip
    return First(GPT2Block(config, layer_idx=0)), (torch.randn(batch, length, width),)


def bert(width=32, heads=2, inner=48, length=6, batch=2):
    from transformers.models.bert.modeling_bert import BertConfig, BertLayer

    config = BertConfig(hidden_size=width, num_attention_heads=heads, intermediate_size=inner, hidden_dropout_prob=0.0,
                        attention_probs_dropout_prob=0.0, attn_implementation="sdpa")  # fmt: skip
    return First(BertLayer(config)), (torch.randn(batch, length, width),)


def vit(width=32, heads=2, inner=48, length=7, batch=2):
    from transformers.models.vit.modeling_vit import ViTConfig, ViTLayer

    config = ViTConfig(
        hidden_size=width, num_attention_heads=heads, intermediate_size=inner, attn_implementation="sdpa"
    )
    return First(ViTLayer(config)), (torch.randn(batch, length, width),)


def convnext(width=8, side=8, batch=2):
    from transformers.models.convnext.modeling_convnext import ConvNextConfig, ConvNextLayer

    return First(ConvNextLayer(ConvNextConfig(), width)), (torch.randn(batch, width, side, side),)


def t5(width=32, heads=2, inner=48, length=6, batch=2):
    from transformers.models.t5.modeling_t5 import T5Block, T5Config

    config = T5Config(
        d_model=width, d_kv=width // heads, d_ff=inner, num_heads=heads, dropout_rate=0.0, use_cache=False
    )
    return First(T5Block(config, has_relative_attention_bias=True), use_cache=False), (
        torch.randn(batch, length, width),
    )


MODELS: dict[str, Callable] = {f.__name__: f for f in (llama, bert, gpt2, vit, convnext, t5, qwen2, gemma)}

# Sizes of the comparison with torch.compile (tests/laws/test_peer.py) and of the timings in perf/.
REAL = {
    "llama": {"width": 1024, "inner": 2816, "heads": 8, "length": 256},
    "gpt2": {"width": 768, "heads": 12, "length": 256},
    "convnext": {"width": 96, "side": 28},
    "vit": {"width": 384, "heads": 6, "inner": 1536, "length": 197},
}


def make(name: str, **sizes: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The module in training mode and its inputs; the first input requires grad."""
    torch.manual_seed(0)
    module, inputs = MODELS[name](**sizes)
    for parameter in module.parameters():  # some blocks start with zeros or ones, which hide mistakes
        nn.init.normal_(
            parameter, 1.0 if parameter.ndim < 2 else 0.0, 0.1 if parameter.ndim < 2 else parameter.shape[-1] ** -0.5
        )
    return module.train(), (inputs[0].requires_grad_(), *inputs[1:])


# Whole models of two layers.


def _small(**more) -> dict:
    return {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "attn_implementation": "sdpa",
        **more,
    }


def _whole_llama():
    from transformers import LlamaConfig, LlamaModel

    return LlamaModel(LlamaConfig(**_small(vocab_size=64, num_key_value_heads=2, use_cache=False)))


def _whole_bert():
    from transformers import BertConfig, BertModel

    config = _small(
        vocab_size=64, max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    return BertModel(BertConfig(**config))


def _whole_gpt2():
    from transformers import GPT2Config, GPT2Model

    return GPT2Model(
        GPT2Config(
            n_embd=32,
            n_head=2,
            n_layer=2,
            n_positions=16,
            vocab_size=64,
            attn_pdrop=0.0,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            use_cache=False,
            attn_implementation="sdpa",
        )
    )


def _whole_vit():
    from transformers import ViTConfig, ViTModel

    return ViTModel(
        ViTConfig(**_small(image_size=8, patch_size=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
    )


def _whole_convnext():
    from transformers import ConvNextConfig, ConvNextModel

    return ConvNextModel(ConvNextConfig(num_stages=2, hidden_sizes=[8, 16], depths=[1, 1], patch_size=2))


WHOLE: dict[str, Callable] = {
    "llama": _whole_llama,
    "bert": _whole_bert,
    "gpt2": _whole_gpt2,
    "vit": _whole_vit,
    "convnext": _whole_convnext,
}


def whole(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model of two layers in training mode, and the keyword arguments of one call."""
    torch.manual_seed(0)
    module = WHOLE[name]().train()
    if name in ("vit", "convnext"):
        return module, {"pixel_values": torch.randn(2, 3, 8, 8)}
    tokens = torch.randint(0, 64, (2, 6))
    return module, {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
