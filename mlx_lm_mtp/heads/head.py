"""The MTP head: stock's own layers between the trunk's embedding and its lm_head.

Whatever a family calls its parts, they are named here as in Qwen3-Next's checkpoints:
`pre_fc_norm_embedding`, `pre_fc_norm_hidden`, `fc`, `layers.{i}.*` and `norm`;
embedding and lm_head are the trunk's, unless the head brings its own.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask, create_causal_mask
from mlx_lm.models.cache import KVCache

from .. import anatomy
from .families import family_of
from .family import Plan


class MTPHead(nn.Module):
    """One head of one trunk.

    Args:
        model: The trunk, a stock model of a known family.
        names: The tensors that the head comes with, as they are called here: they tell
            whether it brings an embedding and an lm_head, and what its
            layers are. By default those of a plain head.
        config: The checkpoint's ``config.json``.

    Raises:
        HeadNotFound: If no head of such models is known.
        HeadMismatch: If the layers are not of a kind that is known.
    """

    def __init__(
        self,
        model: nn.Module,
        names: frozenset[str] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.family = family_of(model)
        self.provenance = "which was built by hand"
        trunk = anatomy.language_model(model)
        plan = Plan(trunk, config or {}, names or frozenset())
        norm = anatomy.final_norm(model)
        vocabulary, size = anatomy.embedding(model).weight.shape[0], norm.weight.size
        self.pre_fc_norm_embedding = nn.RMSNorm(size, eps=norm.eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(size, eps=norm.eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = self.family.layers(plan)
        if self.family.last_norm == "own":
            self.norm = nn.RMSNorm(size, eps=norm.eps)
        if "embed_tokens.weight" in plan.names:
            self.embed_tokens = nn.Embedding(vocabulary, size)
        if "lm_head.weight" in plan.names:
            self.lm_head = nn.Linear(size, vocabulary, bias=False)
        self._window = self.family.window(plan)
        self.follow(model)

    def follow(self, model: nn.Module) -> None:
        """Use the embedding and the lm_head that the model has now.

        An adapter that was applied since has replaced them.
        """
        # Methods, not modules: the trunk's modules are none of ours, and the trunk
        # itself is not held, for a head must not keep a discarded model alive.
        embedding, lm_head = anatomy.embedding(model), anatomy.lm_head(model)
        self._embed = embedding.__call__
        self._norm = anatomy.final_norm(model).__call__
        self._project = lm_head.__call__ if lm_head else embedding.as_linear

    def __call__(self, tokens: mx.array, hidden: mx.array, cache: Any) -> mx.array:
        """Hidden states `(1, T, H)` that predict the token after each of `tokens`.

        They also stand in for the target's hidden states at the next depth.

        Args:
            tokens: `(1, T)`, token j + 1 of each pair.
            hidden: `(1, T, H)`, the target's hidden state at token j, or the head's
                own output at the depth before.
            cache: The head's KV cache, extended by T entries.
        """
        embed = self.embed_tokens if "embed_tokens" in self else self._embed
        pair = [self.pre_fc_norm_embedding(embed(tokens))]
        pair.append(self.pre_fc_norm_hidden(hidden))
        if self.family.hidden_first:
            pair.reverse()
        x = self.fc(mx.concatenate(pair, axis=-1))
        mask = self._mask(x, cache)
        for layer in self.layers:
            x = layer(x, mask, cache)
        return x if self.family.recycles == "pre_norm" else self._normed(x)

    def logits(self, hidden: mx.array) -> mx.array:
        """`(1, T, V)` logits of `(1, T, H)` hidden states."""
        project = self.lm_head if "lm_head" in self else self._project
        return project(self.readable(hidden))

    def readable(self, hidden: mx.array) -> mx.array:
        """Hidden states `(1, T, H)` of the head as its lm_head reads them."""
        return self._normed(hidden) if self.family.recycles == "pre_norm" else hidden

    @property
    def lm_head_used(self) -> Any:
        """The module that :meth:`logits` goes through; an embedding if it is tied."""
        return self.lm_head if "lm_head" in self else self._project.__self__

    def new_cache(self) -> KVCache:
        """An empty cache for the one attention that the head has."""
        return KVCache()

    @property
    def size(self) -> int:
        """H, the numbers in a hidden state."""
        return self.pre_fc_norm_hidden.weight.size

    @functools.cached_property
    def cache_shape(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Heads and numbers a head of the keys and of the values in its cache."""
        cache, token = self.new_cache(), mx.zeros((1, 1), dtype=mx.uint32)
        self(token, mx.zeros((1, 1, self.size)), cache)  # lazy: shapes are enough
        return tuple((a.shape[1], a.shape[3]) for a in (cache.keys, cache.values))

    def _normed(self, x: mx.array) -> mx.array:
        return self.norm(x) if "norm" in self else self._norm(x)

    def _mask(self, x: mx.array, cache: Any) -> Any:
        if self._window is None:
            return create_attention_mask(x, cache, return_array=self.family.array_mask)
        # Stock has no window for a single token: its windowed caches forget instead,
        # and could not be trimmed.
        return create_causal_mask(x.shape[1], cache.offset, window_size=self._window)
