"""The MTP head of Qwen3-Next and Qwen3.5, built from the trunk's own layer class.

Layout of the checkpoints (names below the ``mtp.`` prefix): `pre_fc_norm_embedding`,
`pre_fc_norm_hidden`, `fc`, `layers.0.*` (a full-attention decoder layer, with experts
where the trunk has them) and `norm`; embedding and lm_head are the trunk's, unless the
head brings its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask

MODULES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")


class MTPHead(nn.Module):
    """One decoder layer between the trunk's embedding and the trunk's lm_head.

    Args:
        model: The trunk, a stock Qwen3-Next or Qwen3.5 model.
        own: Which of ``embed_tokens`` and ``lm_head`` the head brings itself.
    """

    def __init__(self, model: nn.Module, own: frozenset[str] = frozenset()) -> None:
        super().__init__()
        trunk = getattr(model, "language_model", model)
        args = trunk.args
        size, eps = args.hidden_size, args.rms_norm_eps
        attention = args.full_attention_interval - 1
        self.pre_fc_norm_embedding = nn.RMSNorm(size, eps=eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(size, eps=eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = [type(trunk.model.layers[0])(args, attention)]
        self.norm = nn.RMSNorm(size, eps=eps)
        if "embed_tokens" in own:
            self.embed_tokens = nn.Embedding(args.vocab_size, size)
        if "lm_head" in own:
            self.lm_head = nn.Linear(size, args.vocab_size, bias=False)
        self.follow(model)

    def follow(self, model: nn.Module) -> None:
        """Use the embedding and the lm_head that the model has now.

        An adapter that was applied since has replaced them.
        """
        trunk = getattr(model, "language_model", model)
        # Methods, not modules: the trunk's modules are none of ours, and the trunk
        # itself is not held, for a head must not keep a discarded model alive.
        embedding = trunk.model.embed_tokens
        self._embed = embedding.__call__
        lm_head = trunk.lm_head if "lm_head" in trunk else None
        self._project = lm_head.__call__ if lm_head else embedding.as_linear

    def __call__(self, tokens: mx.array, hidden: mx.array, cache: Any) -> mx.array:
        """Hidden states `(1, T, H)` that predict the token after each of `tokens`.

        Args:
            tokens: `(1, T)`, token j + 1 of each pair.
            hidden: `(1, T, H)`, the target's hidden state at token j, or the head's
                own output at the depth before.
            cache: The head's KV cache, extended by T entries.
        """
        embed = self.embed_tokens if "embed_tokens" in self else self._embed
        pair = [self.pre_fc_norm_embedding(embed(tokens))]
        pair.append(self.pre_fc_norm_hidden(hidden))
        x = self.fc(mx.concatenate(pair, axis=-1))
        x = self.layers[0](x, create_attention_mask(x, cache), cache)
        return self.norm(x)

    @property
    def lm_head_used(self) -> Any:
        """The module that :meth:`logits` goes through; an embedding if it is tied."""
        return self.lm_head if "lm_head" in self else self._project.__self__

    def logits(self, hidden: mx.array) -> mx.array:
        """`(1, T, V)` logits of `(1, T, H)` hidden states."""
        project = self.lm_head if "lm_head" in self else self._project
        return project(hidden)


def renamed(tensors: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Checkpoint names as the stock layer has them: experts are stacked.

    Experts come one by one (`experts.{e}.up_proj.weight`), fused
    (`experts.gate_up_proj` of `(E, 2 I, H)` and `experts.down_proj`), or already as
    stock keeps them (`switch_mlp`).
    """
    weights = dict(tensors)
    mlp = "layers.0.mlp"
    for suffix in ("", ".weight"):
        if (
            gate_up := weights.pop(f"{mlp}.experts.gate_up_proj{suffix}", None)
        ) is None:
            continue
        gate, up = mx.split(gate_up, 2, axis=-2)
        weights[f"{mlp}.switch_mlp.gate_proj.weight"] = gate
        weights[f"{mlp}.switch_mlp.up_proj.weight"] = up
        down = weights.pop(f"{mlp}.experts.down_proj{suffix}", None)
        if down is not None:
            weights[f"{mlp}.switch_mlp.down_proj.weight"] = down
    for name in ("gate_proj", "up_proj", "down_proj"):
        keys = []
        while (key := f"{mlp}.experts.{len(keys)}.{name}.weight") in weights:
            keys.append(key)
        if len({weights[key].shape for key in keys}) == 1:  # else they cannot fit
            experts = [weights.pop(key) for key in keys]
            weights[f"{mlp}.switch_mlp.{name}.weight"] = mx.stack(experts)
    return weights
