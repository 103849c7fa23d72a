"""Attention whose formula depends on the number of tokens, run one token at a time.

Multi-head latent attention (MLA) computes in the latent space for one token and in
the expanded space for several, and block-sparse attention does not hide later tokens
of the same forward, so a verify of several tokens would not be the arithmetic of
decoding. Inside :func:`rowwise` such layers feed the tokens of a verify one by one;
everything around them still sees all tokens at once.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..wrapping import Meanwhile, wrap


class _PerThread(threading.local):
    active = False


_thread = _PerThread()


def attentions_by_row(model: nn.Module) -> frozenset[type[nn.Module]]:
    """The classes of a model's layers that are to run token by token.

    MLA is known by the projection that it absorbs, block-sparse attention by its flag.
    """
    return frozenset(
        type(m)
        for m in model.modules()
        if (hasattr(m, "kv_lora_rank") and "embed_q" in m) or hasattr(m, "block_sparse")
    )


def rowwise(attentions: Iterable[type[nn.Module]]) -> Meanwhile:
    """In the context, layers of these classes run token by token in this thread."""
    for attention in attentions:
        wrap(attention, "__call__", _by_rows)
    return Meanwhile(_thread, "active", True)


def _by_rows(stock: Callable[..., mx.array]) -> Callable[..., mx.array]:
    names = tuple(inspect.signature(stock).parameters)[2:]  # without self and x

    @functools.wraps(stock)
    def call(self: Any, x: mx.array, *given: Any, **named: Any) -> mx.array:
        if not _thread.active:
            return stock(self, x, *given, **named)
        # One token sees all that is cached, so it needs no mask.
        named = {**dict(zip(names, given, strict=False)), **named, "mask": None}
        width = x.shape[1]
        rows = [
            stock(self, x[:, t : t + 1], **_row_of(named, t, width))
            for t in range(width)
        ]
        return mx.concatenate(rows, axis=1)

    return call


def _row_of(named: dict[str, Any], t: int, width: int) -> dict[str, Any]:
    """A layer's other arguments for one token: `(…, S, 1)` factors of its queries."""
    return {
        name: value[..., t : t + 1, :] if _by_token(value, width) else value
        for name, value in named.items()
    }


def _by_token(value: Any, width: int) -> bool:
    return isinstance(value, mx.array) and value.ndim > 1 and value.shape[-2] == width
