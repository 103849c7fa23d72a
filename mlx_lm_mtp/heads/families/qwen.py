"""Qwen3-Next and Qwen3.5: `mtp.*`, a full-attention layer, experts where the trunk has.

The names of these heads are the ones that the package uses for all.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..family import Family, Plan, Renames, Tensors

_MLP = "layers.0.mlp"


def _names(args: Any) -> Renames:
    return (("mtp.", ""),)


def _layers(plan: Plan) -> list[nn.Module]:
    # The first layer of the trunk that has attention, and not a recurrence.
    return [plan.layer(plan.args, plan.args.full_attention_interval - 1)]


def stacked(trunk: Any, tensors: Tensors) -> dict[str, mx.array]:
    """Experts as stock keeps them (`switch_mlp`).

    They come one by one (`experts.{e}.up_proj.weight`, quantised or not), fused
    (`experts.gate_up_proj` of `(E, 2 I, H)` and `experts.down_proj`), or so already.
    """
    weights = dict(tensors)
    for suffix in ("", ".weight"):
        gate_up = weights.pop(f"{_MLP}.experts.gate_up_proj{suffix}", None)
        if gate_up is None:
            continue
        gate, up = mx.split(gate_up, 2, axis=-2)
        weights[f"{_MLP}.switch_mlp.gate_proj.weight"] = gate
        weights[f"{_MLP}.switch_mlp.up_proj.weight"] = up
        down = weights.pop(f"{_MLP}.experts.down_proj{suffix}", None)
        if down is not None:
            weights[f"{_MLP}.switch_mlp.down_proj.weight"] = down
    for name in ("gate_proj", "up_proj", "down_proj"):
        for part in ("weight", "scales", "biases"):
            _stack(weights, f"{name}.{part}")
    return weights


def _stack(weights: dict[str, mx.array], name: str) -> None:
    keys: list[str] = []
    while (key := f"{_MLP}.experts.{len(keys)}.{name}") in weights:
        keys.append(key)
    if len({weights[key].shape for key in keys}) == 1:  # else they cannot fit
        experts = [weights.pop(key) for key in keys]
        weights[f"{_MLP}.switch_mlp.{name}"] = mx.stack(experts)


QWEN = Family(
    models=("qwen3_5", "qwen3_5_moe", "qwen3_next"),
    names=_names,
    layers=_layers,
    sanitize=stacked,
    zero_centred=True,
    source="vLLM, models/qwen3_next_mtp.py",
)
