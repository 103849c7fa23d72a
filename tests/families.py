"""Tiny models of every family that ships a head, and their heads in every layout.

A head is drawn as the original repository has it (:mod:`wild`); what it loads to is
then written in the other layouts that are found, and must load to the same.
"""

from __future__ import annotations

import copy
import functools
import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import wild
from mlx.utils import tree_flatten, tree_map_with_path
from tiny import drawn

Tensors = dict[str, mx.array]

FAMILIES = tuple(wild.CONFIGS)
# Folders and names in which heads lie beside a model: file, and what is before a name.
SIDECARS = {
    "root": ("mtp.safetensors", "mtp."),
    "optiq": ("optiq/mtp.safetensors", "mtp."),
    "folder": ("mtp/weights.safetensors", "mtp."),
    "bare": ("mtp/model.safetensors", ""),
}
_NORMS = ("norm.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight")


def config_of(family: str) -> dict[str, Any]:
    """A configuration of its own for every caller."""
    return copy.deepcopy(wild.CONFIGS[family])


@functools.cache
def trunk(family: str) -> nn.Module:
    """A tiny random model of stock's; tests only read it."""
    module = importlib.import_module(f"mlx_lm.models.{family}")
    mx.random.seed(3)
    model = module.Model(module.ModelArgs.from_dict(config_of(family)))
    model.update(tree_map_with_path(drawn, model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return model


def wild_head(family: str, seed: int = 0) -> Tensors:
    """A head in its family's own names, fp32."""
    tensors = wild.head_tensors(family, config_of(family), seed)
    return {name: mx.array(value) for name, value in tensors.items()}


def write_wild(path: Path, family: str, root: str = "", seed: int = 0) -> Path:
    """A folder as an original repository has it, the trunk left out."""
    tensors = {root + k: v for k, v in wild_head(family, seed).items()}
    save(path / "model.safetensors", tensors, {"format": "pt"})
    (path / "config.json").write_text(json.dumps(config_of(family)))
    return path


def save(file: Path, tensors: Mapping[str, mx.array], metadata: dict[str, str]) -> None:
    """One file of weights, in a folder that is made if need be."""
    file.parent.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(file), dict(tensors), metadata=metadata)


def parameters(module: nn.Module) -> Tensors:
    """What a head or a trunk computes with, by name."""
    return dict(tree_flatten(module.parameters()))


def raw(tensors: Tensors) -> Tensors:
    """Norms less 1, as original Qwen repositories have them."""
    return {k: v - 1.0 if k.endswith("norm.weight") or k in _NORMS else v
            for k, v in tensors.items()}  # fmt: skip


def quantized(
    tensors: Tensors, bits: int, group: int, skipped: tuple[str, ...] = ()
) -> Tensors:
    """Every matrix packed, but for those of the skipped parts."""
    result: Tensors = {}
    for name, value in tensors.items():
        base = name.removesuffix(".weight")
        plain = value.ndim < 2 or base in skipped or base.endswith(".gate")
        if plain or not name.endswith(".weight") or value.shape[-1] % group:
            result[name] = value
            continue
        parts = mx.quantize(value, group_size=group, bits=bits)
        for part, array in zip(("weight", "scales", "biases"), parts, strict=True):
            result[f"{base}.{part}"] = array
    return result
