"""Heads as the original repositories have them: configurations, names and shapes.

One tiny configuration a family, written as its ``config.json`` is, and random tensors
of a head for it. Sizes differ from each other wherever a family allows it, so that a
transposed or misplaced tensor does not fit, and inner sizes are multiples of 32, so
that everything can be quantised in groups of 32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

Config = Mapping[str, Any]
Shapes = dict[str, tuple[int, ...]]

_SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
_QWEN = {
    **_SIZES,
    "num_hidden_layers": 4,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "full_attention_interval": 2,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "attention_bias": False,
}
_QWEN_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}
_QWEN3_5 = {
    **_QWEN,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "attn_output_gate": True,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [2, 1, 1],
    },
}
# The router of DeepSeek-V3, which GLM and others took over.
_ROUTER = {
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.8,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_intermediate_size": 32,
}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "moe_layer_freq": 1,
    "attention_bias": False,
    "rope_scaling": None,
}
_GLM_EXPERTS = {
    **_ROUTER,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_5": {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "tie_word_embeddings": False,
        "text_config": {"model_type": "qwen3_5_text", **_QWEN3_5},
    },
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe",
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "qwen3_5_moe_text",
            **_QWEN3_5,
            **_QWEN_EXPERTS,
        },
    },
    "qwen3_next": {
        "model_type": "qwen3_next",
        "architectures": ["Qwen3NextForCausalLM"],
        **_QWEN,
        **_QWEN_EXPERTS,
        "mlp_only_layers": [],
        "partial_rotary_factor": 0.25,
        "rope_scaling": None,
        "rope_theta": 10000000,
    },
    "glm4_moe": {
        "model_type": "glm4_moe",
        "architectures": ["Glm4MoeForCausalLM"],
        **_SIZES,
        **_GLM_EXPERTS,
        "num_hidden_layers": 3,
        "head_dim": 32,
        "partial_rotary_factor": 0.5,
        "use_qk_norm": True,
        "attention_bias": True,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 1000000,
    },
    "glm4_moe_lite": {
        "model_type": "glm4_moe_lite",
        "architectures": ["Glm4MoeLiteForCausalLM"],
        **_SIZES,
        **_GLM_EXPERTS,
        **_LATENT,
        "num_hidden_layers": 3,
        "partial_rotary_factor": 1.0,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        **_SIZES,
        **_GLM_EXPERTS,
        **_LATENT,
        "num_hidden_layers": 3,
        # Two groups of which one is kept: groups of two experts would leave no choice.
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
    },
    "mimo": {
        "model_type": "mimo",
        "architectures": ["MiMoForCausalLM"],
        **_SIZES,
        "num_hidden_layers": 3,
        "head_dim": 16,
        "attention_bias": True,
        "num_nextn_predict_layers": 1,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 640000,
    },
    "ernie4_5_moe": {
        "model_type": "ernie4_5_moe",
        "architectures": ["Ernie4_5_MoeForCausalLM"],
        **_SIZES,
        "num_hidden_layers": 3,
        "head_dim": 32,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 32,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 2,
        "moe_layer_interval": 1,
        "moe_use_aux_free": True,
        "num_nextn_predict_layers": 1,
        "tie_word_embeddings": True,
        "use_bias": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000,
    },
    "exaone_moe": {
        "model_type": "exaone_moe",
        "architectures": ["ExaoneMoEForCausalLM"],
        **_SIZES,
        **_ROUTER,
        "num_hidden_layers": 4,
        "head_dim": 32,
        "num_experts": 4,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "is_moe_layer": [False, True, True, True],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "layer_types": [*["sliding_attention"] * 3, "full_attention"],
        "sliding_window": 8,
        "sliding_window_pattern": "LLLG",
        "sliding_windows": [8, 8, 8, 0],
        "mtp_layer_types": ["full_attention"],
        "mtp_sliding_windows": [0],
        "num_nextn_predict_layers": 1,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
        "rope_theta": 1000000,
    },
    "nemotron_h": {
        "model_type": "nemotron_h",
        "architectures": ["NemotronHForCausalLM"],
        **_SIZES,
        **_ROUTER,
        "num_hidden_layers": 4,
        "hybrid_override_pattern": "ME*E",
        "mtp_hybrid_override_pattern": "*E",
        "num_nextn_predict_layers": 1,
        "head_dim": 32,
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "n_groups": 2,
        "ssm_state_size": 32,
        "conv_kernel": 4,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "moe_shared_expert_intermediate_size": 64,
        "moe_latent_size": 32,
        "mlp_hidden_act": "relu2",
        "attention_bias": False,
        "mamba_proj_bias": False,
        "mlp_bias": False,
        "use_bias": False,
        "use_conv_bias": True,
        "layer_norm_epsilon": 1e-5,
    },
}
# Families whose repositories store the weight of every norm less 1.
ZERO_CENTRED = frozenset({"qwen3_5", "qwen3_5_moe", "qwen3_next"})


def text_config(config: Config) -> Config:
    """The language model's part of a configuration."""
    return config.get("text_config", config)


def head_tensors(family: str, config: Config, seed: int) -> dict[str, np.ndarray]:
    """Random tensors of a head, named and shaped as the original repository has them.

    Args:
        family: A key of :data:`CONFIGS`.
        config: Its configuration, or one with other sizes.
        seed: Of the random numbers.

    Returns:
        Tensors of fp32, scaled so that activations keep a size of about 1.
    """
    random = np.random.default_rng(seed)
    centre = 0.0 if family in ZERO_CENTRED else 1.0
    shapes = _SHAPES[family](text_config(config))
    return {
        name: _draw(name, random.standard_normal(shape), centre).astype(np.float32)
        for name, shape in shapes.items()
    }


def _draw(name: str, normal: np.ndarray, centre: float) -> np.ndarray:
    """Normal numbers, moved and scaled to what a tensor of this name needs."""
    if "norm" in name:
        return centre + 0.2 * normal
    if name.endswith("bias"):
        return 0.1 * normal
    if name.endswith("embed_tokens.weight"):
        return normal
    return normal / np.sqrt(normal.shape[-1])


# --- parts ------------------------------------------------------------------------


def _under(prefix: str, shapes: Shapes) -> Shapes:
    return {f"{prefix}.{name}": shape for name, shape in shapes.items()}


def _norms(size: int, *names: str) -> Shapes:
    return {f"{name}.weight": (size,) for name in names}


def _mlp(size: int, inner: int) -> Shapes:
    return {
        "gate_proj.weight": (inner, size),
        "up_proj.weight": (inner, size),
        "down_proj.weight": (size, inner),
    }


def _ungated(size: int, inner: int) -> Shapes:
    return {"up_proj.weight": (inner, size), "down_proj.weight": (size, inner)}


def _attention(
    c: Config, *, gated: bool = False, normed: bool = False, biased: bool = False
) -> Shapes:
    """Queries, keys, values, output. Biases are on the first three only."""
    size, dim = c["hidden_size"], c["head_dim"]
    queries, keys = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim
    outputs = {"q_proj": queries * (2 if gated else 1), "k_proj": keys, "v_proj": keys}
    shapes: Shapes = {f"{name}.weight": (out, size) for name, out in outputs.items()}
    if biased:
        shapes |= {f"{name}.bias": (out,) for name, out in outputs.items()}
    if normed:
        shapes |= _norms(dim, "q_norm", "k_norm")
    return shapes | {"o_proj.weight": (size, queries)}


def _latent_attention(c: Config) -> Shapes:
    size, heads, nope = (
        c["hidden_size"],
        c["num_attention_heads"],
        c["qk_nope_head_dim"],
    )
    rank, value, rope = c["kv_lora_rank"], c["v_head_dim"], c["qk_rope_head_dim"]
    return {
        "q_a_proj.weight": (c["q_lora_rank"], size),
        **_norms(c["q_lora_rank"], "q_a_layernorm"),
        "q_b_proj.weight": (heads * (nope + rope), c["q_lora_rank"]),
        "kv_a_proj_with_mqa.weight": (rank + rope, size),
        **_norms(rank, "kv_a_layernorm"),
        "kv_b_proj.weight": (heads * (nope + value), rank),
        "o_proj.weight": (size, heads * value),
    }


def _qwen_experts(c: Config) -> Shapes:
    size = c["hidden_size"]
    shapes: Shapes = {
        "gate.weight": (c["num_experts"], size),
        "shared_expert_gate.weight": (1, size),
    }
    for e in range(c["num_experts"]):
        shapes |= _under(f"experts.{e}", _mlp(size, c["moe_intermediate_size"]))
    shared = _mlp(size, c["shared_expert_intermediate_size"])
    return shapes | _under("shared_expert", shared)


def _sigmoid_experts(c: Config) -> Shapes:
    size, inner, count = (
        c["hidden_size"],
        c["moe_intermediate_size"],
        c["n_routed_experts"],
    )
    shapes: Shapes = {
        "gate.weight": (count, size),
        "gate.e_score_correction_bias": (count,),
    }
    for e in range(count):
        shapes |= _under(f"experts.{e}", _mlp(size, inner))
    return shapes | _under("shared_experts", _mlp(size, inner * c["n_shared_experts"]))


def _latent_experts(c: Config) -> Shapes:
    """Nemotron-H's: the routed experts work in a smaller space of their own."""
    size, latent = c["hidden_size"], c["moe_latent_size"] or c["hidden_size"]
    shapes: Shapes = {
        "gate.weight": (c["n_routed_experts"], size),
        "gate.e_score_correction_bias": (c["n_routed_experts"],),
    }
    for e in range(c["n_routed_experts"]):
        shapes |= _under(f"experts.{e}", _ungated(latent, c["moe_intermediate_size"]))
    if c["moe_latent_size"]:
        shapes["fc1_latent_proj.weight"] = (latent, size)
        shapes["fc2_latent_proj.weight"] = (size, latent)
    shared = c["moe_shared_expert_intermediate_size"] * c["n_shared_experts"]
    return shapes | _under("shared_experts", _ungated(size, shared))


def _layer(c: Config, attention: Shapes, mlp: Shapes) -> Shapes:
    return {
        **_norms(c["hidden_size"], "input_layernorm", "post_attention_layernorm"),
        **_under("self_attn", attention),
        **_under("mlp", mlp),
    }


# --- families ---------------------------------------------------------------------


def _qwen(c: Config) -> Shapes:
    experts = c.get("num_experts", 0) > 0
    dense = _mlp(c["hidden_size"], c["intermediate_size"])
    attention = _attention(c, gated=True, normed=True)
    layer = _layer(c, attention, _qwen_experts(c) if experts else dense)
    return _under("mtp", _qwen_ends(c) | _under("layers.0", layer))


def _qwen_ends(c: Config) -> Shapes:
    size = c["hidden_size"]
    norms = _norms(size, "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    return {"fc.weight": (size, 2 * size), **norms}


def _exaone(c: Config) -> Shapes:
    dense = _mlp(c["hidden_size"], c["intermediate_size"])
    layer = _layer(c, _attention(c, normed=True), dense)
    return _under("mtp", _qwen_ends(c) | _under("layers.0", layer))


def _glm(c: Config) -> Shapes:
    attention = _attention(c, normed=c["use_qk_norm"], biased=c["attention_bias"])
    return _last_layer(c, _layer(c, attention, _sigmoid_experts(c)))


def _latent(c: Config) -> Shapes:
    return _last_layer(c, _layer(c, _latent_attention(c), _sigmoid_experts(c)))


def _last_layer(c: Config, layer: Shapes) -> Shapes:
    """The head is one layer more, with an embedding and an lm_head of its own."""
    size, vocab = c["hidden_size"], c["vocab_size"]
    ends = {
        "embed_tokens.weight": (vocab, size),
        **_norms(size, "enorm", "hnorm", "shared_head.norm"),
        "eh_proj.weight": (size, 2 * size),
        "shared_head.head.weight": (vocab, size),
    }
    return _under(f"model.layers.{c['num_hidden_layers']}", ends | layer)


def _mimo(c: Config) -> Shapes:
    size = c["hidden_size"]
    ends = {
        **_norms(size, "token_layernorm", "hidden_layernorm", "final_layernorm"),
        "input_proj.weight": (size, 2 * size),
    }
    dense = _mlp(size, c["intermediate_size"])
    layer = _layer(c, _attention(c, biased=True), dense)
    return _under("model.mtp_layers.0", ends | layer)


def _ernie(c: Config) -> Shapes:
    size = c["hidden_size"]
    ends = {
        **_norms(size, "mtp_emb_norm.0", "mtp_hidden_norm.0"),
        "mtp_linear_proj.0.weight": (size, 2 * size),
    }
    layer = _layer(c, _attention(c), _mlp(size, c["intermediate_size"]))
    return _under("model", ends | _under("mtp_block.0", layer))


def _nemotron(c: Config) -> Shapes:
    size, pattern = c["hidden_size"], c["mtp_hybrid_override_pattern"]
    shapes: Shapes = {
        **_norms(size, "layers.0.enorm", "layers.0.hnorm"),
        "layers.0.eh_proj.weight": (size, 2 * size),
        **_norms(size, f"layers.{len(pattern) - 1}.final_layernorm"),
    }
    for i, kind in enumerate(pattern):
        mixer = _attention(c) if kind == "*" else _latent_experts(c)
        shapes |= _norms(size, f"layers.{i}.norm")
        shapes |= _under(f"layers.{i}.mixer", mixer)
    return _under("mtp", shapes)


_SHAPES = {
    "qwen3_5": _qwen,
    "qwen3_5_moe": _qwen,
    "qwen3_next": _qwen,
    "glm4_moe": _glm,
    "glm4_moe_lite": _latent,
    "deepseek_v3": _latent,
    "mimo": _mimo,
    "ernie4_5_moe": _ernie,
    "exaone_moe": _exaone,
    "nemotron_h": _nemotron,
}
