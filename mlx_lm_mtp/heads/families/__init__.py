"""The families whose heads are known, one file each."""

from __future__ import annotations

import mlx.nn as nn

from ... import anatomy
from ...errors import HeadNotFound
from ..family import Family
from . import deepseek, ernie, exaone, mimo, nemotron, qwen

FAMILIES: tuple[Family, ...] = (
    qwen.QWEN,
    deepseek.GLM,
    deepseek.GLM_LITE,
    deepseek.DEEPSEEK,
    mimo.MIMO,
    ernie.ERNIE,
    exaone.EXAONE,
    nemotron.NEMOTRON,
)
MODELS: dict[str, Family] = {m: family for family in FAMILIES for m in family.models}


def family_of(model: nn.Module) -> Family:
    """The family of heads that fit a model.

    Raises:
        HeadNotFound: If none is known.
    """
    name = anatomy.family(model)
    if name not in MODELS:
        raise HeadNotFound(
            f"no MTP head is known for models of type {name!r}; known are: "
            f"{', '.join(MODELS)}. Use another drafter, or plain decoding."
        )
    return MODELS[name]
