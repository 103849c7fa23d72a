"""Adapters as stock's training saves them."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load_model


def adapter(model_path: Path, folder: Path, kind: str) -> Path:
    """An adapter with weights that matter, as stock's training saves it."""
    model, _ = load_model(model_path)
    parameters = {"rank": 4, "scale": 20.0, "dropout": 0.0}
    mx.random.seed(7)
    if kind == "full":
        weights = dict(tree_flatten(model.layers[-1].mlp.parameters()))
        prefix = next(
            name.removesuffix("gate_proj.weight")
            for name, _ in reversed(tree_flatten(model.parameters()))
            if name.endswith("mlp.gate_proj.weight")
        )
        weights = {f"{prefix}{k}": v * 1.5 for k, v in weights.items()}
    else:
        linear_to_lora_layers(model, 4, parameters, use_dora=kind == "dora")
        weights = {
            name: mx.random.normal(value.shape) * 0.02
            for name, value in tree_flatten(model.parameters())
            if name.endswith(("lora_a", "lora_b"))
        }
    folder.mkdir()
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    config = {"fine_tune_type": kind, "num_layers": 4, "lora_parameters": parameters}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
