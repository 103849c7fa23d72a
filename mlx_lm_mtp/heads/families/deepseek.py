"""DeepSeek-V3, GLM-4.5 and GLM-4.7-Flash: the head is the layer behind the last one.

The head brings an embedding and an lm_head of its own. At the next depth its layer's
output stands in for the hidden state, before `shared_head.norm`.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..family import Family, Plan, Renames, Tensors, through_stock


def _names(args: Any) -> Renames:
    layer = f"model.layers.{args.num_hidden_layers}."
    return (
        (f"{layer}enorm.", "pre_fc_norm_embedding."),
        (f"{layer}hnorm.", "pre_fc_norm_hidden."),
        (f"{layer}eh_proj.", "fc."),
        (f"{layer}shared_head.norm.", "norm."),
        (f"{layer}shared_head.head.", "lm_head."),
        (f"{layer}embed_tokens.", "embed_tokens."),
        (layer, "layers.0."),
    )


def _layers(plan: Plan) -> list[nn.Module]:
    return [plan.layer(plan.args, plan.args.num_hidden_layers)]


def _sanitize(trunk: Any, tensors: Tensors) -> dict[str, mx.array]:
    return through_stock(trunk, tensors, "model.")


GLM = Family(
    models=("glm4_moe",),
    names=_names,
    layers=_layers,
    sanitize=_sanitize,
    recycles="pre_norm",
    source="vLLM, models/glm4_moe_mtp.py",
)

LATENT = Family(
    models=("glm4_moe_lite", "deepseek_v3"),
    names=_names,
    layers=_layers,
    sanitize=_sanitize,
    recycles="pre_norm",
    array_mask=True,  # latent attention adds it to its scores
    source="vLLM, models/deepseek_mtp.py and models/glm4_moe_lite_mtp.py",
)
