"""EXAONE with experts: names as Qwen's, a dense layer, norms as stock multiplies them.

The configuration says in `mtp_layer_types` and `mtp_sliding_windows` whether the layer
looks back on a window only; where it does not, it looks back on everything.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import mlx.nn as nn

from ..family import Family, Plan, Renames

_SLIDING = "sliding_attention"


def _names(args: Any) -> Renames:
    return (("mtp.", ""),)


def _type(plan: Plan) -> str:
    return (plan.config.get("mtp_layer_types") or ["full_attention"])[0]


def _layers(plan: Plan) -> list[nn.Module]:
    # The trunk's types stay behind it: they tell whether all layers have positions.
    types = [_type(plan), *plan.args.layer_types]
    dense = dataclasses.replace(
        plan.args, layer_types=types, is_moe_layer=[False] * len(types)
    )
    return [plan.layer(dense, 0)]


def _window(plan: Plan) -> int | None:
    if _type(plan) != _SLIDING:
        return None
    return (plan.config.get("mtp_sliding_windows") or [plan.args.sliding_window])[0]


EXAONE = Family(
    models=("exaone_moe",),
    names=_names,
    layers=_layers,
    window=_window,
    source="vLLM, models/exaone_moe_mtp.py and models/exaone_moe.py",
)
