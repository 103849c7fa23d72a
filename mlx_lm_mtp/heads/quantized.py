"""How the tensors of a head are packed, by their shapes.

The layers are built before they are filled, so every dimension is known, and a packed
weight can have been made in one way only. What does not multiply out is an error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import infer_quant_config

from ..errors import HeadMismatch

_BITS = (2, 3, 4, 5, 6, 8)
_GROUPS = (16, 32, 64, 128)
_FP8 = "_scale_inv"
_BLOCK = 128  # rows and columns that share a scale, in every released checkpoint

Tensors = Mapping[str, mx.array]


def quantize(head: nn.Module, tensors: Tensors, declared: str | None) -> None:
    """Make the parts quantised whose tensors are.

    Args:
        head: Its layers, plain.
        tensors: What it will be filled with.
        declared: What the file says of it, a JSON text, if it does.

    Raises:
        HeadMismatch: If the shapes of a packed weight do not multiply out, or are not
            what was declared.
    """
    said = json.loads(declared) if declared else {}

    def how(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if not hasattr(module, "to_quantized") or f"{path}.scales" not in tensors:
            return False
        found = _packed(path, module, tensors)
        _check_declared(path, found, {**said, **said.get(path, {})})
        return found

    nn.quantize(head, class_predicate=how)


def _packed(path: str, module: Any, tensors: Tensors) -> dict[str, Any]:
    size = module.weight.shape[-1]
    weight, scales = tensors.get(f"{path}.weight"), tensors[f"{path}.scales"]
    if weight is None or weight.dtype != mx.uint32 or not scales.size:
        raise HeadMismatch(f"{path} has scales, but no packed weights of uint32.")
    columns, groups = weight.shape[-1] * 32, scales.shape[-1]
    whole = columns % size == 0 and size % groups == 0
    if not whole or columns // size not in _BITS or size // groups not in _GROUPS:
        raise HeadMismatch(
            f"{path} cannot be unpacked: weights of {weight.shape} and scales of "
            f"{scales.shape} do not make {size} columns in any number of bits."
        )
    return infer_quant_config(path, module, tensors)


def _check_declared(path: str, found: dict[str, Any], said: dict[str, Any]) -> None:
    for key in ("bits", "group_size", "mode"):
        if key in said and said[key] != found[key]:
            raise HeadMismatch(
                f"{path} is packed with {key} {found[key]}, but its file declares "
                f"{said[key]}."
            )


def plain(tensors: Tensors) -> dict[str, mx.array]:
    """FP8 weights with a scale for each block of 128 x 128, in bfloat16.

    Which is what stock makes of them (mlx-lm, models/deepseek_v3.py).

    Raises:
        HeadMismatch: If a weight has no scale for each of its blocks.
    """
    result = {k: v for k, v in tensors.items() if not k.endswith(_FP8)}
    for name in tensors.keys() - result.keys():
        weight = name.removesuffix(_FP8)
        result[weight] = _unscaled(weight, tensors.get(weight), tensors[name])
    return result


def _unscaled(name: str, weight: mx.array | None, scales: mx.array) -> mx.array:
    if weight is None or weight.dtype != mx.uint8 or weight.ndim != 2:
        raise HeadMismatch(f"{name} has scales of FP8, but no FP8 weights.")
    rows, columns = weight.shape
    if scales.shape != (-(-rows // _BLOCK), -(-columns // _BLOCK)):
        raise HeadMismatch(
            f"{name} is {weight.shape} in FP8 with scales of {scales.shape}; known is "
            f"one scale for each block of {_BLOCK} x {_BLOCK}."
        )
    wide = mx.repeat(mx.repeat(scales, _BLOCK, axis=0), _BLOCK, axis=1)
    exact = mx.from_fp8(weight, dtype=mx.bfloat16) * wide[:rows, :columns]
    return exact.astype(mx.bfloat16)
