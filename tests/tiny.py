"""The kit's tiny models, and heads for them."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path

from mlx_lm_mtp.heads.head import MTPHead
from mlx_lm_mtp.testing.models import (
    HYBRIDS,
    VOCAB,
    WITH_EXPERTS,
    WITH_HEAD,
    Spec,
    drawn,
)

__all__ = ["HYBRIDS", "VOCAB", "WITH_EXPERTS", "WITH_HEAD", "Spec", "drawn"]


def head_tensors(model: nn.Module, seed: int = 1) -> dict[str, mx.array]:
    """Random tensors of a head that fits, named as `MTPHead` has them."""
    mx.random.seed(seed)
    head = MTPHead(model)
    tensors = tree_map_with_path(drawn, head.parameters())
    return dict(tree_flatten(tensors))


def text_args(model: Any) -> Any:
    """The arguments that the text model was built from."""
    return getattr(model, "language_model", model).args
