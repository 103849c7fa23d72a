"""Attention whose formula depends on the number of tokens, run one token at a time.

Multi-head latent attention (MLA) computes in the latent space for one token and in
the expanded space for several, so a verify of several tokens would not be the
arithmetic of decoding. Inside :func:`rowwise` such layers feed the tokens of a verify
one by one; everything around them still sees all tokens at once.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..wrapping import wrap


class _PerThread(threading.local):
    active = False


_thread = _PerThread()


def latent_attentions(model: nn.Module) -> frozenset[type[nn.Module]]:
    """The classes of a model's MLA layers, known by the projection they absorb."""
    return frozenset(
        type(m)
        for m in model.modules()
        if hasattr(m, "kv_lora_rank") and "embed_q" in m
    )


@contextlib.contextmanager
def rowwise(attentions: Iterable[type[nn.Module]]) -> Iterator[None]:
    """Let layers of these classes run token by token, in this thread, for a while."""
    for attention in attentions:
        wrap(attention, "__call__", _by_rows)
    _thread.active = True
    try:
        yield
    finally:
        _thread.active = False


def _by_rows(stock: Callable[..., mx.array]) -> Callable[..., mx.array]:
    @functools.wraps(stock)
    def call(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if not _thread.active:
            return stock(self, x, mask, cache)
        # One token sees all that is cached, so it needs no mask.
        rows = mx.split(x, x.shape[1], axis=1)
        return mx.concatenate([stock(self, row, None, cache) for row in rows], axis=1)

    return call
