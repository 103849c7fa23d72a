"""Where a stock model keeps its parts, whatever its family calls them."""

from __future__ import annotations

from typing import Any

import mlx.nn as nn

_INNER = ("model", "backbone", "transformer")
_EMBEDDINGS = ("embed_tokens", "embeddings", "wte")
_NORMS = ("norm", "final_layernorm", "norm_f", "ln_f", "out_norm")


def language_model(model: nn.Module) -> Any:
    """The model that gives logits; multimodal wrappers keep it behind a name."""
    return getattr(model, "language_model", model)


def text_model(model: nn.Module) -> Any:
    """The module that owns the embedding, the layers and the final norm."""
    outer = language_model(model)
    return _first(outer, _INNER) or outer


def embedding(model: nn.Module) -> Any:
    """The input embedding, or None."""
    return _first(text_model(model), _EMBEDDINGS)


def lm_head(model: nn.Module) -> Any:
    """The module of the logits, or None if the embedding is used for them as well."""
    outer = language_model(model)
    return outer.lm_head if "lm_head" in outer else None


def final_norm(model: nn.Module) -> Any:
    """The norm behind the last layer, or None."""
    return _first(text_model(model), _NORMS)


def family(model: nn.Module) -> str:
    """The name of the stock module that the model's class comes from."""
    return type(model).__module__.rpartition(".")[2]


def is_sharded(model: nn.Module) -> bool:
    """Whether layers of a model are divided among processes (tensor parallelism).

    A pipeline is another thing: whole layers, and all ranks get what the last one has.
    """
    attributes = (vars(module) for module in model.modules())
    groups = (
        found.get(name) for found in attributes for name in ("group", "sharding_group")
    )
    return any(group.size() > 1 for group in groups if hasattr(group, "size"))


def pipeline_ranks(model: nn.Module) -> int:
    """Among how many processes the layers of a model are divided, whole ones each."""
    return getattr(text_model(model), "pipeline_size", 1)


def _first(owner: Any, names: tuple[str, ...]) -> Any:
    found = (getattr(owner, name, None) for name in names)
    return next((m for m in found if isinstance(m, nn.Module)), None)
