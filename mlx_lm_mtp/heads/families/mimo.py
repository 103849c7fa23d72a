"""MiMo: the hidden state comes first, and is taken before the trunk's final norm."""

from __future__ import annotations

from typing import Any

import mlx.nn as nn

from ..family import Family, Plan, Renames


def _names(args: Any) -> Renames:
    layer = "model.mtp_layers.0."
    return (
        (f"{layer}token_layernorm.", "pre_fc_norm_embedding."),
        (f"{layer}hidden_layernorm.", "pre_fc_norm_hidden."),
        (f"{layer}input_proj.", "fc."),
        (f"{layer}final_layernorm.", "norm."),
        (layer, "layers.0."),
    )


def _layers(plan: Plan) -> list[nn.Module]:
    return [plan.layer(plan.args)]


MIMO = Family(
    models=("mimo",),
    names=_names,
    layers=_layers,
    hidden_first=True,
    hidden="pre_norm",
    source="vLLM, models/mimo_mtp.py and models/mimo.py",
)
