"""Trunks and heads of real shapes with random weights: speeds without a download.

The time of a forward does not depend on the values of the weights, as long as they are
finite. It does depend on which experts are chosen: the tokens of one verify may share
more of them in a trained trunk than in a random one, and so cost less there.

What a random trunk says hangs on near-ties, so that on a GPU every way to decode would
go a way of its own, and no oracle could foresee it. So embeddings are large, and
outweigh what the layers add: where the lm_head is the embedding, a token is followed by
itself; otherwise by the next id, for the lm_head's rows are the embedding's, one on.
"""

from __future__ import annotations

import importlib
import math
import zlib
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from .. import random_state
from ..anatomy import final_norm
from ..heads.head import MTPHead

GROUP_SIZE = 64
_AT_ONCE = 2**24  # numbers drawn at once
_LOUD = 8.0  # the largest number of an embedding
DTYPES = {name: getattr(mx, name) for name in ("bfloat16", "float16", "float32")}

# From the config.json of Qwen/Qwen3.5-4B, Qwen/Qwen3.5-9B and
# Qwen/Qwen3-Next-80B-A3B-Instruct, with the names that mlx-lm's ModelArgs give them.
_QWEN = {
    "full_attention_interval": 4,
    "num_attention_heads": 16,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144,
}
_QWEN3_5 = _QWEN | {
    "model_type": "qwen3_5",
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
    "vocab_size": 248320,
    "rope_parameters": {
        "type": "default",
        "mrope_section": [11, 11, 10],
        "rope_theta": 10_000_000,
        "partial_rotary_factor": 0.25,
    },
}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": _QWEN3_5
    | {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "vocab_size": 256,
        "tie_word_embeddings": True,
    },
    "qwen3.5-4b": _QWEN3_5
    | {"hidden_size": 2560, "intermediate_size": 9216, "tie_word_embeddings": True},
    "qwen3.5-9b": _QWEN3_5
    | {"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False},
    # 4 of its 48 layers: three gated-delta layers and one of attention.
    "qwen3-next-80b-a3b-4layers": _QWEN
    | {
        "model_type": "qwen3_next",
        "num_hidden_layers": 4,
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
        "rope_theta": 10_000_000,
        "partial_rotary_factor": 0.25,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    },
}


def build(name: str, dtype: mx.Dtype, bits: int | None = None) -> nn.Module:
    """A trunk of random weights.

    Args:
        name: One of `SHAPES`.
        dtype: Of the weights.
        bits: Quantise them so, in groups of `GROUP_SIZE`; None does not.
    """
    config = SHAPES[name]
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    with random_state.untouched():
        model = module.Model(module.ModelArgs.from_dict(dict(config)))
        return _filled(model, dtype, bits, model.quant_predicate)


def random_head(model: nn.Module) -> MTPHead:
    """An MTP head of random weights that fits the model, quantised as the model is.

    Raises:
        HeadNotFound: If models of this type have no head that is known.
    """
    dtype = final_norm(model).weight.dtype
    bits = next(
        (m.bits for m in model.modules() if isinstance(m, nn.QuantizedLinear)), None
    )
    with random_state.untouched():
        return _filled(MTPHead(model), dtype, bits, model.quant_predicate)


def _filled(module: Any, dtype: mx.Dtype, bits: int | None, predicate: Any) -> Any:
    """The module with weights of its own, one leaf after the other.

    What stock's classes begin with is lazy and never computed, and a leaf's weights go
    once they are quantised: no more than one leaf is there twice.
    """
    leaves = tree_flatten(module.leaf_modules(), is_leaf=nn.Module.is_module)
    while leaves:
        path, leaf = leaves.pop()
        _draw(leaf, path, dtype)
        if bits and hasattr(leaf, "to_quantized"):
            how = predicate(path, leaf) if predicate else True
            how = how if isinstance(how, dict) else {"bits": bits}
            leaf = leaf.to_quantized(**{"group_size": GROUP_SIZE} | how)
            module.update_modules(tree_unflatten([(path, leaf)]))
        mx.eval(leaf.parameters())
    for path, part in module.named_modules():
        if "A_log" in part:  # what is no leaf and has parameters all the same
            _draw(part, path, dtype, ("A_log", "dt_bias"))
    mx.eval(module.parameters())
    module.eval()
    return module


def _draw(
    module: nn.Module, path: str, dtype: mx.Dtype, names: tuple[str, ...] = ()
) -> None:
    for name, value in tree_flatten(module.parameters()):
        if not names or name in names:
            module[name] = _drawn(f"{path}.{name}", value.shape, dtype)


def _drawn(path: str, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """Weights that keep activations at about their size, and states finite."""
    if path.endswith("A_log"):  # float32, as stock keeps it; decays from fast to slow
        return mx.log(mx.linspace(1, 16, shape[0]))
    if path.endswith("dt_bias"):  # softplus makes steps of about 0.02 of it
        return mx.full(shape, -4.0, dtype=dtype)
    if len(shape) == 1:
        return mx.ones(shape, dtype=dtype)
    if path.endswith("embed_tokens.weight"):
        return _uniform("embedding", _LOUD, shape, dtype)
    if path.endswith("lm_head.weight"):
        return mx.roll(_uniform("embedding", 1, shape, dtype), 1, axis=0)
    fan_in = shape[1] if "conv1d" in path else shape[-1]
    return _uniform(path, math.sqrt(3 / fan_in), shape, dtype)


def _uniform(
    name: str, most: float, shape: tuple[int, ...], dtype: mx.Dtype
) -> mx.array:
    """Numbers from -most to most, the same for a name; drawn in place, for drawing
    takes a multiple of the memory."""
    mx.random.seed(zlib.crc32(name.encode()))
    rows = max(1, _AT_ONCE // math.prod(shape[1:]))
    drawn = mx.zeros(shape, dtype=dtype)
    for i in range(0, shape[0], rows):
        part = drawn[i : i + rows].shape
        drawn[i : i + rows] = mx.random.uniform(-most, most, part, dtype=dtype)
        mx.eval(drawn)
    return drawn
