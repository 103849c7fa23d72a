"""Attention whose formula depends on the number of tokens, run one token at a time.

Multi-head latent attention (MLA) computes in the latent space for one token and in
the expanded space for several, so a verify of several tokens would not be the
arithmetic of decoding. Inside :func:`rowwise` such layers feed the tokens of a verify
one by one; everything around them still sees all tokens at once.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn


def latent_attentions(model: nn.Module) -> list[nn.Module]:
    """The MLA layers of a model, known by the latent projection that they absorb."""
    return [m for m in model.modules() if hasattr(m, "kv_lora_rank") and "embed_q" in m]


@contextlib.contextmanager
def rowwise(attentions: Sequence[nn.Module]) -> Iterator[None]:
    """Let these layers run token by token while the context lasts."""
    stock = [type(attention) for attention in attentions]
    try:
        for attention, cls in zip(attentions, stock, strict=True):
            attention.__class__ = _by_rows(cls)
        yield
    finally:
        for attention, cls in zip(attentions, stock, strict=True):
            attention.__class__ = cls


@functools.cache
def _by_rows(cls: type[nn.Module]) -> type[nn.Module]:
    class ByRows(cls):  # type: ignore[misc,valid-type]
        def __call__(
            self, x: mx.array, mask: Any = None, cache: Any = None
        ) -> mx.array:
            # One token sees all that is cached, so it needs no mask.
            rows = mx.split(x, x.shape[1], axis=1)
            return mx.concatenate(
                [cls.__call__(self, row, None, cache) for row in rows], axis=1
            )

    return ByRows
