"""One tiny random model for every model file that mlx-lm ships.

A config names what is special about a file: layers of several kinds, windows and chunks
short enough to be left within a test, few experts. The rest is shared. Stock's
`ModelArgs.from_dict` takes from a config what it knows.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path
from mlx_lm import models
from tiny import VOCAB, drawn

Config = dict[str, Any]

# --- what configs have in common ------------------------------------------------------

WINDOW = 24  # of sliding attention: the prompt fits, the answer does not
CHUNK = 12
_FULL, _SLIDING = "full_attention", "sliding_attention"
_MIXED = [_SLIDING, _FULL, _SLIDING, _FULL]

# Multiples of 32, so that every projection can be quantised.
_SHARED: Config = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    "sliding_window": WINDOW,
}
_EXPERTS: Config = {
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "n_group": 1,
    "topk_group": 1,
}
_LATENT: Config = {
    "num_key_value_heads": 2,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "rope_scaling": None,
}
_INDEXER: Config = {"index_head_dim": 64, "index_n_heads": 2, "index_topk": CHUNK}
_DELTA: Config = {
    "full_attention_interval": 2,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}
_LONGCAT: Config = {
    **_LATENT,
    "ffn_hidden_size": 64,
    "moe_topk": 2,
    "expert_ffn_hidden_size": 32,
    "n_routed_experts": 4,
    "zero_expert_num": 2,
    "num_layers": 2,
    "routed_scaling_factor": 1.5,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}
_GRANITE: Config = {
    "logits_scaling": 2.0,
    "attention_multiplier": 0.2,
    "embedding_multiplier": 4.0,
    "residual_multiplier": 0.7,
}
_ROPE: Config = {"rope_type": "default", "rope_theta": 10000.0}
_ROPES: Config = {_FULL: _ROPE, _SLIDING: _ROPE}
_SCALED_ROPE: Config = {
    **_ROPE,
    "llama_4_scaling_beta": 0.1,
    "original_max_position_embeddings": 8,
}
_SHORT_CONV: Config = {
    "conv_L_cache": 3,
    "block_dim": 64,
    "block_ff_dim": 96,
    "block_multiple_of": 32,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "full_attn_idxs": [1, 3],
}
_GPT: Config = {
    "n_embd": 64,
    "n_head": 2,
    "n_layer": 3,
    "n_inner": 96,
    "n_ctx": 256,
    "n_positions": 256,
    "num_key_value_heads": 2,
}
_KDA: Config = {
    "kda_layers": [1, 3],
    "full_attn_layers": [2, 4],
    "num_heads": 2,
    "head_dim": 32,
    "short_conv_kernel_size": 4,
}


def _text(**config: Any) -> Config:
    """The config of a multimodal wrapper around a text model."""
    return {"text_config": {**_SHARED, **config}}


# --- one config a file ----------------------------------------------------------------

CONFIGS: dict[str, Config] = {
    "Klear": {**_EXPERTS},
    "afm7": {
        "hidden_dim": 64,
        "num_layers": 4,
        "num_kv_reuse_layers": 2,
        "num_heads": 2,
        "num_kv_heads": 1,
    },
    "afmoe": {**_EXPERTS, "layer_types": _MIXED, "num_dense_layers": 1},
    "apertus": {"post_norm": False, "qk_norm": True},
    "baichuan_m1": {"sliding_window_layers": [0, 2], "conv_window": 2},
    "bailing_hybrid": {
        **_EXPERTS,
        **_LATENT,
        "layer_group_size": 2,
        "group_norm_size": 1,
        "head_dim": 32,
    },
    "bailing_moe": {**_EXPERTS},
    "bailing_moe_linear": {**_EXPERTS, "layer_group_size": 2, "group_norm_size": 1},
    "bailing_moe_v3": {**_EXPERTS, **_LATENT, "layer_group_size": 2},
    "bitnet": {},
    "cohere": {},
    "cohere2": {"sliding_window_pattern": 2},
    "dbrx": {
        "d_model": 64,
        "n_layers": 2,
        "n_heads": 2,
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 1, "clip_qkv": 8, "rope_theta": 10000.0},
    },
    "deepseek": {**_EXPERTS},
    "deepseek_v2": {
        **_EXPERTS,
        **_LATENT,
        "topk_method": "greedy",
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "mscale_all_dim": 0.7,
        },
    },
    "deepseek_v3": {**_EXPERTS, **_LATENT},
    "deepseek_v32": {**_EXPERTS, **_LATENT, **_INDEXER},
    "deepseek_v41": {
        **_EXPERTS,
        "head_dim": 64,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 32,
        "o_groups": 2,
        "o_lora_rank": 32,
        "compress_ratios": [0, 1, 4, 4],
        "kv_source_layer_ids": [1, 2],
        "index_source_layer_ids": [1, 2],
        "index_n_heads": 2,
        "index_head_dim": 32,
        "index_topk": 4,
        "hc_mult": 2,
    },
    "dots1": {**_EXPERTS, "scoring_func": "sigmoid"},
    "ernie4_5": {},
    "ernie4_5_moe": {
        "moe_num_experts": 4,
        "moe_layer_start_index": 1,
        "moe_intermediate_size": 32,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
    },
    "exaone": {"num_layers": 2},
    "exaone4": {"rope_scaling": None, "sliding_window_pattern": "LG"},
    "exaone_moe": {
        **_EXPERTS,
        "layer_types": _MIXED,
        "is_moe_layer": [False, True, True, True],
    },
    "falcon_h1": {
        "mamba_d_conv": 4,
        "mamba_d_head": 32,
        "mamba_d_ssm": 64,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
        "mamba_n_heads": 2,
        "num_hidden_layers": 2,
    },
    "gear": {"layer_types": [_SLIDING, "conv_mixer", _FULL, "conv_mixer"]},
    "gemma": {},
    "gemma2": {},
    "gemma3": _text(model_type="gemma3_text", sliding_window_pattern=2),
    "gemma3_text": {"sliding_window_pattern": 2},
    "gemma3n": _text(
        model_type="gemma3n_text",
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=VOCAB,
        rope_local_base_freq=10000.0,
        final_logit_softcapping=30.0,
        layer_types=_MIXED,
        activation_sparsity_pattern=[0.5, 0.5, 0.0, 0.0],
        hidden_size_per_layer_input=32,
        altup_num_inputs=2,
        altup_coef_clip=120.0,
        altup_correct_scale=True,
        altup_active_idx=0,
        laurel_rank=32,
        intermediate_size=[96] * 4,
    ),
    "gemma4": _text(
        model_type="gemma4_text",
        global_head_dim=64,
        vocab_size_per_layer_input=VOCAB,
        hidden_size_per_layer_input=32,
        num_kv_shared_layers=2,
        layer_types=_MIXED,
    ),
    "gemma4_text": {
        "global_head_dim": 64,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "layer_types": _MIXED,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
    "glm": {},
    "glm4": {"partial_rotary_factor": 0.5},
    "glm4_moe": {
        **_EXPERTS,
        "rope_scaling": None,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
    },
    "glm4_moe_lite": {**_EXPERTS, **_LATENT},
    "glm_moe_dsa": {
        **_EXPERTS,
        **_LATENT,
        **_INDEXER,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "gpt2": {**_GPT},
    "gpt_bigcode": {**_GPT, "num_key_value_heads": 1},
    "gpt_neox": {"rotary_emb_base": 10000, "rotary_pct": 0.5},
    "gpt_oss": {**_EXPERTS, "layer_types": _MIXED, "rope_scaling": None},
    "gptj": {**_GPT, "rotary_dim": 16},
    "granite": {**_GRANITE},
    "granitemoe": {**_EXPERTS, **_GRANITE},
    "granitemoehybrid": {
        **_EXPERTS,
        **_GRANITE,
        "layer_types": ["mamba", "attention"] * 2,
        "shared_intermediate_size": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_proj_bias": False,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_n_groups": 1,
        "mamba_conv_bias": True,
    },
    "helium": {},
    "hunyuan": {
        **_EXPERTS,
        "moe_topk": 2,
        "num_shared_expert": 1,
        "use_mixed_mlp_moe": True,
        "use_qk_norm": True,
        "use_cla": True,
        "cla_share_factor": 2,
        "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"},
    },
    "hunyuan_v1_dense": {
        "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"}
    },
    "internlm2": {},
    "internlm3": {},
    "iquestloopcoder": {"loop_num": 2, "loop_window_size": WINDOW},
    "jamba": {
        **_EXPERTS,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 16,
        "mamba_expand": 2,
        "mamba_dt_rank": 32,
    },
    "kimi_k25": _text(**_EXPERTS, **_LATENT),
    "kimi_k3": _text(
        **_EXPERTS,
        **_LATENT,
        linear_attn_config={**_KDA, "gate_lower_bound": -5.0},
        num_experts_per_token=2,
    ),
    "kimi_linear": {
        **_EXPERTS,
        **_LATENT,
        "linear_attn_config": _KDA,
        "model_max_length": 1024,
        "num_experts_per_token": 2,
    },
    "kimi_vl": _text(**_EXPERTS, **_LATENT),
    "laguna": {
        **_EXPERTS,
        "layer_types": _MIXED,
        "num_attention_heads_per_layer": [2, 4, 2, 4],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "rope_parameters": _ROPES,
    },
    "lfm2-vl": _text(model_type="lfm2", conv_bias=False, **_SHORT_CONV),
    "lfm2": {"conv_bias": True, **_SHORT_CONV},
    "lfm2_moe": {
        **_EXPERTS,
        "use_expert_bias": True,
        "num_dense_layers": 1,
        "conv_bias": False,
        **_SHORT_CONV,
    },
    "lille-130m": {**_GPT, "block_size": 256, "n_kv_heads": 1},
    "llama": {"layer_types": _MIXED},
    "llama4": _text(
        **{**_EXPERTS, "num_experts_per_tok": 1},
        model_type="llama4_text",
        attention_chunk_size=CHUNK,
        interleave_moe_layer_step=2,
        intermediate_size_mlp=96,
        rope_scaling=None,
        use_qk_norm=True,
    ),
    "llama4_text": {
        "intermediate_size_mlp": 96,
        "no_rope_layers": [1, 0, 1, 0],
        "use_qk_norm": True,
    },
    "longcat_flash": {
        **_LONGCAT,
        "attention_method": "MLA",
        "zero_expert_type": "identity",
    },
    "longcat_flash_ngram": {
        **_LONGCAT,
        "ngram_vocab_size_ratio": 3,
        "emb_neighbor_num": 3,
        "emb_split_num": 1,
    },
    "mamba": {
        "state_size": 16,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "conv_kernel": 4,
        "use_conv_bias": True,
        "time_step_rank": 32,
    },
    "mamba2": {
        "num_heads": 4,
        "intermediate_size": 128,
        "state_size": 16,
        "num_hidden_layers": 2,
        "conv_kernel": 4,
        "n_groups": 2,
        "use_conv_bias": True,
        "time_step_limit": (0.0, 100.0),
        "time_step_rank": "auto",
    },
    "mellum": {
        **_EXPERTS,
        "layer_types": _MIXED,
        "rope_parameters": _ROPES,
    },
    "mimo": {},
    "mimo_v2_flash": {
        **_EXPERTS,
        "hybrid_layer_pattern": [1, 0, 1, 0],
        "moe_layer_freq": [0, 1, 1, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": WINDOW,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "layernorm_epsilon": 1e-6,
        "swa_rope_theta": 10000.0,
        "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 1,
        "v_head_dim": 32,
        "swa_head_dim": 32,
        "swa_v_head_dim": 32,
        "partial_rotary_factor": 0.5,
    },
    "minicpm": {"dim_model_base": 32, "scale_depth": 1.4, "scale_emb": 2.0},
    "minicpm3": {
        **_LATENT,
        "dim_model_base": 32,
        "scale_depth": 1.4,
        "scale_emb": 2.0,
        "rope_scaling": {
            "original_max_position_embeddings": 512,
            "short_factor": [1.0] * 16,
            "long_factor": [2.0] * 16,
        },
    },
    "minimax": {**_EXPERTS, "shared_intermediate_size": 32, "rotary_dim": 16},
    "minimax_m3_vl": _text(
        **{**_EXPERTS, "moe_layer_freq": [0, 1, 1, 1]},
        dense_intermediate_size=96,
        shared_intermediate_size=32,
        sparse_attention_freq=[0, 1, 0, 1],
        index_n_heads=1,
        index_head_dim=32,
        index_block_size=4,
        index_topk_blocks=2,
    ),
    "ministral3": {
        "layer_types": _MIXED,
        "rope_parameters": _SCALED_ROPE,
    },
    "mistral3": _text(model_type="llama"),
    "mistral4": {
        **_EXPERTS,
        **_LATENT,
        "rope_parameters": _SCALED_ROPE,
    },
    "mixtral": {**_EXPERTS},
    "muse_glimmer": {"layer_types": _MIXED},
    "muse_spark": _text(
        **{**_EXPERTS, "num_shared_experts": 0},
        post_norm_eps=1e-6,
        rope_parameters={"rope_theta": 10000.0},
        layer_rope_theta=[10000.0, 0, 10000.0, 0],
        layer_types=_MIXED,
        final_logit_softcapping=20.0,
        output_multiplier=0.2,
        moe_hidden_size=32,
    ),
    "nanbeige": {"num_loops": 2},
    "nanochat": {"num_key_value_heads": 2},
    "nemotron-nas": {
        "block_configs": [
            {
                "attention": {"n_heads_in_group": 2},
                "ffn": {"ffn_mult": 1.5},
            },
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"replace_with_linear": True}, "ffn": {"no_op": True}},
            {
                "attention": {"n_heads_in_group": 1},
                "ffn": {"replace_with_linear": True},
            },
        ],
    },
    "nemotron": {"hidden_act": "relu2"},
    "nemotron_h": {
        **_EXPERTS,
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "mamba_proj_bias": False,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "n_groups": 2,
        "use_conv_bias": True,
        "hybrid_override_pattern": ["M", "*", "E", "M", "-"],
        "num_hidden_layers": 5,
    },
    "olmo": {
        "d_model": 64,
        "n_layers": 2,
        "mlp_hidden_size": 128,
        "n_heads": 2,
        "embedding_size": VOCAB,
    },
    "olmo2": {},
    "olmo3": {"layer_types": _MIXED},
    "olmo_hybrid": {
        **_DELTA,
        "linear_num_key_heads": 2,
        "linear_allow_neg_eigval": True,
        "layer_types": ["linear_attention", _FULL] * 2,
    },
    "olmoe": {**_EXPERTS},
    "openelm": {
        "num_transformer_layers": 2,
        "model_dim": 64,
        "ffn_dim_divisor": 32,
        "num_query_heads": [2, 4],
        "num_kv_heads": [1, 2],
        "ffn_multipliers": [1.0, 2.0],
    },
    "phi": {},
    "phi3": {},
    "phi3small": {
        "vocab_size": 100352,  # some of the last ones are masked by their number
        "hidden_size": 32,
        "num_key_value_heads": 2,
        "dense_attention_every_n_layers": 2,
        "ff_intermediate_size": 96,
        "gegelu_limit": 20.0,
        "num_hidden_layers": 2,
        "blocksparse_block_size": 32,
        "blocksparse_num_local_blocks": 1,
        "blocksparse_vert_stride": 2,
        "mup_embedding_multiplier": 0.3,
    },
    "phimoe": {
        **_EXPERTS,
        "rope_scaling": {
            "short_factor": [1.0] * 16,
            "long_factor": [2.0] * 16,
            "short_mscale": 1.0,
            "long_mscale": 1.2,
        },
    },
    "phixtral": {
        **_EXPERTS,
        "num_vocab": VOCAB,
        "model_dim": 64,
        "num_heads": 2,
        "num_layers": 2,
        "rotary_dim": 16,
    },
    "pixtral": _text(model_type="llama"),
    "plamo": {"n_shared_head": 2},
    "plamo2": {
        "hidden_size_per_head": 32,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_num_heads": 2,
        "mamba_step": 2,
    },
    "plamo3": {"window_size": WINDOW, "sliding_window_pattern": 2},
    "prism_hadamard_qwen35": {
        **_text(model_type="qwen3_5_text", hidden_size=128, **_DELTA),
        "tensor_namespace": "mlx-vlm-qwen3_5",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [
            {
                "path": "model.layers.0.mlp.gate_proj",
                "embedding": False,
                "dtype": "float16",
                "block": 0,
            },
        ],
    },
    "qwen": {"kv_channels": 32},
    "qwen2": {},
    "qwen2_moe": {**_EXPERTS},
    "qwen2_vl": _text(model_type="qwen2"),
    "qwen3": {},
    "qwen3_5": _text(model_type="qwen3_5_text", **_DELTA),
    "qwen3_5_moe": _text(model_type="qwen3_5_text", **_DELTA, **_EXPERTS),
    "qwen3_moe": {**_EXPERTS},
    "qwen3_next": {**_DELTA, **_EXPERTS, "partial_rotary_factor": 0.25},
    "qwen3_vl": _text(model_type="qwen3"),
    "qwen3_vl_moe": _text(model_type="qwen3_moe", **_EXPERTS),
    "recurrent_gemma": {
        "conv1d_width": 4,
        "num_hidden_layers": 3,
        "logits_soft_cap": 30.0,
        "attention_window_size": WINDOW,
        "block_types": ["recurrent", "recurrent", "attention"],
    },
    "rwkv7": {
        "num_hidden_layers": 2,
        "a_low_rank_dim": 32,
        "v_low_rank_dim": 32,
        "gate_low_rank_dim": 32,
        "decay_low_rank_dim": 32,
    },
    "seed_oss": {},
    "smollm3": {"no_rope_layer_interval": 2},
    "solar_open": {**_EXPERTS, "partial_rotary_factor": 1.0},
    "spark2_5": {
        "layer_types": _MIXED,
        "rope_parameters": _ROPES,
    },
    "stablelm": {"use_qkv_bias": True, "partial_rotary_factor": 0.25},
    "starcoder2": {},
    "step3p5": {
        **_EXPERTS,
        "num_attention_groups": 1,
        "layer_types": _MIXED,
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "share_expert_dim": 32,
        "moe_layers_enum": "2,3",
        "attention_other_setting": {
            "attention_type": _SLIDING,
            "num_attention_heads": 2,
            "num_attention_groups": 1,
        },
    },
    "talkie": {},
    "telechat3": {},
    "youtu_llm": {**_LATENT},
}


# --- how a verify is computed, and taken back -----------------------------------------

# Layers that run token by token: latent and block-sparse attention.
ROW_BY_ROW = {
    *("bailing_hybrid", "bailing_moe_v3", "deepseek_v3", "deepseek_v32"),
    *("glm4_moe_lite", "glm_moe_dsa", "kimi_k25", "kimi_k3", "kimi_linear", "kimi_vl"),
    *("longcat_flash", "longcat_flash_ngram", "mistral4", "phi3small"),
}
# Recurrences that nothing is recorded of: a snapshot, and the kept tokens fed again.
REPLAYED = {
    *("baichuan_m1", "gear", "jamba", "lfm2", "lfm2-vl", "lfm2_moe"),
    *("longcat_flash_ngram", "mamba", "recurrent_gemma", "rwkv7"),
}
# Caches of their own kind: one token at a time, without drafts unless `verify=step`.
ONE_BY_ONE = {"deepseek_v41"}


def has_experts(name: str) -> bool:
    """Whether a model has a mixture of experts."""
    return "expert" in str(CONFIGS[name])


def shipped() -> set[str]:
    """The names of the model files that mlx-lm ships: those that define `ModelArgs`."""
    return {
        path.stem
        for folder in models.__path__
        for path in Path(folder).glob("*.py")
        if "\nclass ModelArgs" in path.read_text()
    }


# With other weights these say one thing over and over.
_SEEDS = {
    **dict.fromkeys(("cohere2", "gear", "gemma3", "gemma3_text", "muse_glimmer"), 0),
    **dict.fromkeys(("gpt_neox", "openelm", "plamo", "plamo3"), 2),
    **{"afm7": 3, "gemma3n": 4, "gpt2": 6, "olmo3": 3},
}


def _divides(path: str, module: nn.Module) -> bool:
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0


def _drawn(path: str, value: mx.array) -> mx.array:
    if mx.issubdtype(value.dtype, mx.integer):  # packed already
        return mx.random.randint(0, 2**31 - 1, value.shape).astype(value.dtype)
    return drawn(path, value).astype(value.dtype)


@dataclass(frozen=True)
class Architecture:
    """A model file with weights of one kind; equal ones give equal models."""

    name: str
    weights: str = "fp32"  # fp32, bf16, 4bit

    def build(self) -> nn.Module:
        """The model, with random weights that give varied tokens."""
        module = importlib.import_module(f"mlx_lm.models.{self.name}")
        config = {"model_type": self.name, **_SHARED, **CONFIGS[self.name]}
        mx.random.seed(_SEEDS.get(self.name, 1))
        model = module.Model(module.ModelArgs.from_dict(config))
        model.update(tree_map_with_path(_drawn, model.parameters()))
        if self.weights == "bf16":
            model.set_dtype(mx.bfloat16)
        if self.weights == "4bit":
            nn.quantize(model, group_size=32, bits=4, class_predicate=_divides)
        model.eval()
        mx.eval(model.parameters())
        return model
