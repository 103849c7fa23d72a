"""DeepSeek-V3, GLM-4.5 and GLM-4.7-Flash: the head is the layer behind the last.

The head brings an embedding and an lm_head of its own; else it uses the trunk's.
What stands in for the hidden state at the next depth was disputed: SGLang takes what
`shared_head.norm` gives, as vLLM has come to do for DeepSeek; vLLM's files for GLM take
what goes into that norm.
"""

from __future__ import annotations

import dataclasses
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
    source="vLLM, models/glm4_moe_mtp.py; SGLang, models/glm4_moe_nextn.py",
)

GLM_LITE = dataclasses.replace(
    GLM,
    models=("glm4_moe_lite",),
    array_mask=True,  # latent attention adds it to its scores
    source="vLLM, models/glm4_moe_lite_mtp.py",
)

DEEPSEEK = dataclasses.replace(
    GLM_LITE,
    models=("deepseek_v3",),
    source="vLLM, models/deepseek_mtp.py",
)
