"""Tiny random models with every kind of cache, built from stock's own classes.

They decode a token in about a millisecond on the CPU, their next token is seldom in
doubt, and their recurrent states matter: a state that is not what it should be shows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path
from mlx_lm.models import (
    falcon_h1,
    kimi_linear,
    lfm2,
    mamba2,
    olmo_hybrid,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_next,
)
from mlx_lm.models.cache import ChunkedKVCache, make_prompt_cache

VOCAB = 96
# Multiples of 32, so that every projection can be quantised.
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1024,
    "head_dim": 32,
}
_LINEAR = {
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}


def _qwen3_5(tied: bool, experts: bool) -> nn.Module:
    module = qwen3_5_moe if experts else qwen3_5
    text = {
        "model_type": "qwen3_5_text",
        "tie_word_embeddings": tied,
        "full_attention_interval": 2,
        **_SIZES,
        **_LINEAR,
        **(_EXPERTS if experts else {}),
    }
    args = {"model_type": module.__name__.rpartition(".")[2], "text_config": text}
    return module.Model(module.ModelArgs.from_dict(args))


def _qwen3_next(tied: bool, experts: bool) -> nn.Module:
    args = {
        "model_type": "qwen3_next",
        "mlp_only_layers": [] if experts else list(range(8)),
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "tie_word_embeddings": tied,
        "full_attention_interval": 2,
        **_SIZES,
        **_LINEAR,
        **_EXPERTS,
    }
    return qwen3_next.Model(qwen3_next.ModelArgs.from_dict(args))


def _kimi_linear(tied: bool, experts: bool) -> nn.Module:
    args = {
        "model_type": "kimi_linear",
        "rope_theta": 10000.0,
        "linear_attn_config": {
            "kda_layers": [1, 3],
            "full_attn_layers": [2, 4],
            "num_heads": 2,
            "head_dim": 32,
            "short_conv_kernel_size": 4,
        },
        "model_max_length": 1024,
        "num_experts": 4 if experts else 0,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "moe_intermediate_size": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 32,
        "tie_word_embeddings": tied,
        **_SIZES,
    }
    return kimi_linear.Model(kimi_linear.ModelArgs.from_dict(args))


def _olmo_hybrid(tied: bool, experts: bool) -> nn.Module:
    args = {
        "model_type": "olmo_hybrid",
        "linear_allow_neg_eigval": True,
        "attention_bias": False,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "tie_word_embeddings": tied,
        **_SIZES,
        **_LINEAR,
        "linear_num_key_heads": 2,
    }
    return olmo_hybrid.Model(olmo_hybrid.ModelArgs.from_dict(args))


def _qwen3(tied: bool, experts: bool) -> nn.Module:
    args = {
        "model_type": "qwen3",
        "rope_theta": 10000.0,
        "tie_word_embeddings": tied,
        **_SIZES,
    }
    return qwen3.Model(qwen3.ModelArgs.from_dict(args))


def _mamba2(tied: bool, experts: bool) -> nn.Module:
    args = {
        "model_type": "mamba2",
        "num_heads": 4,
        "head_dim": 32,
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "state_size": 16,
        "num_hidden_layers": 2,
        "layer_norm_epsilon": 1e-5,
        "conv_kernel": 4,
        "n_groups": 1,
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": tied,
        "time_step_limit": (0.0, 100.0),
        "time_step_rank": "auto",
    }
    return mamba2.Model(mamba2.ModelArgs.from_dict(args))


def _falcon_h1(tied: bool, experts: bool) -> nn.Module:
    args = {
        "model_type": "falcon_h1",
        "tie_word_embeddings": tied,
        "mamba_d_conv": 4,
        "mamba_d_head": 32,
        "mamba_d_ssm": 64,
        "mamba_d_state": 16,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_n_heads": 2,
        **_SIZES,
        "num_hidden_layers": 2,
    }
    return falcon_h1.Model(falcon_h1.ModelArgs.from_dict(args))


def _lfm2(tied: bool, experts: bool) -> nn.Module:
    args = {
        "model_type": "lfm2",
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_ff_dim": 96,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "rope_theta": 10000.0,
        "full_attn_idxs": [1, 3],
        "tie_word_embeddings": tied,
        **_SIZES,
    }
    return lfm2.Model(lfm2.ModelArgs.from_dict(args))


_FAMILIES: dict[str, Callable[[bool, bool], nn.Module]] = {
    "qwen3_5": _qwen3_5,
    "qwen3_next": _qwen3_next,
    "kimi_linear": _kimi_linear,
    "olmo_hybrid": _olmo_hybrid,
    "qwen3": _qwen3,
    "mamba2": _mamba2,
    "falcon_h1": _falcon_h1,
    "lfm2": _lfm2,
}
HYBRIDS = ("qwen3_5", "qwen3_next", "kimi_linear", "olmo_hybrid")
WITH_EXPERTS = ("qwen3_5", "qwen3_next", "kimi_linear")
WITH_HEAD = ("qwen3_5", "qwen3_next")


@dataclass(frozen=True)
class Spec:
    """What a tiny model is made from; equal specs give equal models."""

    family: str = "qwen3_5"
    experts: bool = False
    tied: bool = True
    weights: str = "fp32"  # fp32, bf16, 4bit
    seed: int = 0

    def build(self) -> nn.Module:
        """The model, with weights that make its recurrent state matter."""
        mx.random.seed(self.seed)
        model = _FAMILIES[self.family](self.tied, self.experts)
        model.update(tree_map_with_path(drawn, model.parameters()))
        if self.weights == "bf16":
            model.set_dtype(mx.bfloat16)
        if self.weights == "4bit":
            nn.quantize(model, group_size=32, bits=4)
        model.eval()
        mx.eval(model.parameters())
        return model


def drawn(path: str, value: mx.array) -> mx.array:
    """Random weights that give varied tokens; the recurrent path is amplified.

    With default weights a recurrent state that is never rolled back shows in one
    generation of three; with these, practically always.
    """
    if "A_log" in path:
        return mx.full(value.shape, -4.0)
    if value.ndim < 2 or "dt_bias" in path:
        return value + 0.1 * mx.random.normal(value.shape)
    gain = 4.0 if path.endswith(("linear_attn.out_proj.weight",)) else 1.5
    return mx.random.normal(value.shape) * gain / value.shape[-1] ** 0.5


# --- what a drafter is checked with -------------------------------------------------


@dataclass(frozen=True)
class TinyModel:
    """A target to check a drafter with, and the caches that it decodes with.

    Args:
        name: Shown in reports.
        build: Makes the model, the same each time it is called. It is called twice:
            stock decodes with a copy that the drafter never gets hold of.
        caches: Makes an empty prompt cache for it.
        arguments: For stock's `generate_step` and ours alike, such as `kv_bits`.
        tokenizer: What a drafter's factory is given; None for the kit's own.
    """

    name: str
    build: Callable[[], nn.Module]
    caches: Callable[[nn.Module], list[Any]] = make_prompt_cache
    arguments: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: Any = None


_RING = 24  # tokens; full before most generations end
_QUANTIZED = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 15}


def tiny_models() -> tuple[TinyModel, ...]:
    """A tiny model for every kind of cache that stock has.

    The first three are what checks take that are not about caches; of these, ``cycle``
    repeats itself, so that its tokens can be foreseen.
    """
    qwen3 = Spec("qwen3", seed=3).build
    return (
        TinyModel("gated-delta", Spec("qwen3_5").build),
        TinyModel("kv", qwen3),
        TinyModel("cycle", cycle),
        TinyModel("rotating", qwen3, _rotating),
        TinyModel("chunked", qwen3, _chunked),
        TinyModel("quantized-kv", qwen3, arguments=_QUANTIZED),
        TinyModel("gated-delta-4bit", Spec("qwen3_next", weights="4bit", seed=1).build),
        TinyModel("latent", Spec("kimi_linear", seed=1).build),
        TinyModel("state-space", Spec("mamba2", seed=5).build),
        TinyModel("cache-list", Spec("falcon_h1", weights="bf16").build),
        TinyModel("convolution", Spec("lfm2").build),
    )


def _rotating(model: nn.Module) -> list[Any]:
    return make_prompt_cache(model, max_kv_size=_RING)


def _chunked(model: nn.Module) -> list[Any]:
    return [ChunkedKVCache(64) for _ in model.layers]


_PERIOD = 6


def after(token: int) -> int:
    """The token that follows in :func:`cycle`: six go round and round."""
    first = token - token % _PERIOD
    return first + (token + 1) % _PERIOD


def cycle() -> nn.Module:
    """A model that says :func:`after` its last token, whatever came before.

    Its layers add next to nothing, and its lm_head has at each token the embedding of
    the one before. Caches hold what other models' hold.
    """
    model = Spec("qwen3", tied=False).build()
    for layer in model.layers:
        for last in (layer.self_attn.o_proj, layer.mlp.down_proj):
            last.weight = last.weight * 0.01
    before = {after(token): token for token in range(VOCAB)}
    order = mx.array([before[token] for token in range(VOCAB)])
    model.lm_head.weight = model.model.embed_tokens.weight[order]
    mx.eval(model.parameters())
    return model
