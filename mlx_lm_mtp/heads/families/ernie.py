"""ERNIE 4.5 with experts: a dense layer, and no norm behind it."""

from __future__ import annotations

import dataclasses
from typing import Any

import mlx.nn as nn

from ..family import Family, Plan, Renames


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


ERNIE = Family(
    models=("ernie4_5_moe",),
    names=_names,
    layers=_layers,
    last_norm=False,
    source="vLLM, models/ernie_mtp.py",
)
