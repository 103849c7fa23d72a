"""ERNIE 4.5 with experts: a dense layer, then the trunk's own final norm.

So its authors have it; vLLM's file for this head has no norm there, and feeds the
hidden state behind the trunk's norm instead of before it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..family import Family, Plan, Renames, Tensors


def _names(args: Any) -> Renames:
    return (
        ("model.mtp_emb_norm.0.", "pre_fc_norm_embedding."),
        ("model.mtp_hidden_norm.0.", "pre_fc_norm_hidden."),
        ("model.mtp_linear_proj.0.", "fc."),
        ("model.mtp_block.0.", "layers.0."),
    )


def _layers(plan: Plan) -> list[nn.Module]:
    dense = dataclasses.replace(plan.args, moe_layer_start_index=1)
    return [plan.layer(dense, 0)]


def _sanitize(trunk: Any, tensors: Tensors) -> dict[str, mx.array]:
    weights = dict(tensors)
    fc = weights.get("fc.weight")
    if fc is not None and fc.ndim == 2 and fc.shape[0] == 2 * fc.shape[1]:
        weights["fc.weight"] = fc.T  # so it lies in the largest of the repositories
    return weights


ERNIE = Family(
    models=("ernie4_5_moe",),
    names=_names,
    layers=_layers,
    sanitize=_sanitize,
    last_norm="trunk",
    hidden="pre_norm",
    recycles="pre_norm",
    source="PaddleFormers, ernie4_5_moe/modeling.py; FastDeploy, ernie4_5_mtp.py",
)
