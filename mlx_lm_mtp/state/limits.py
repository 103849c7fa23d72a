"""How many inputs a verify may feed so that its arithmetic is that of decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_lm.models.cache import (
    ArraysCache,
    ChunkedKVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from .capture import Recording
from .commit import flat

FULL_RING = "a rotating cache is full"
QUANTIZES = "the KV cache is about to be quantised"
UNKNOWN = "a layer may compute several tokens otherwise than one"
_STOCK = ArraysCache.__module__.rpartition(".")[0]  # where its models are


def width_limit(
    caches: Sequence[Any],
    *,
    quantized_kv_start: int | None,
    one_forward: bool,
    taken_back: int = 0,
) -> tuple[int | None, str]:
    """How many inputs a verify may feed, and why not more; None is no limit.

    A rotating cache that has wrapped holds its keys in another order than a forward
    of several tokens would read them in, so its sums, and then its tokens, could
    differ from stock's; and it cannot be trimmed. Fed one by one, tokens are no
    trouble. A KV cache is quantised by stock after the token that takes it to
    `quantized_kv_start`, so no round runs past it.

    Args:
        caches: The target's.
        quantized_kv_start: See above; None for caches that stay as they are.
        one_forward: Whether all inputs are fed at once.
        taken_back: Inputs that the caches hold now, and will not hold then.
    """
    turning = rings(caches) if one_forward else []
    limits = [(ring.max_size - ring.offset - 1, FULL_RING) for ring in turning]
    if quantized_kv_start is not None:
        limits += [
            (quantized_kv_start - c.offset, QUANTIZES)
            for c in caches
            if hasattr(c, "to_quantized") and not isinstance(c, QuantizedKVCache)
        ]
    limit, reason = min(limits, default=(None, ""))
    return (None if limit is None else max(limit + taken_back, 1)), reason


def unknown_arithmetic(model: Any, caches: Sequence[Any], recording: Recording) -> str:
    """Why inputs are to be fed one by one; empty if it is known that they need not.

    What can neither be trimmed nor was recorded is put back, and the kept inputs are
    fed once more, several at once. The recurrences of stock's models are computed alike
    then, and a rotating cache has a limit of its own; of others nothing is known.
    """
    stock = type(model).__module__.rpartition(".")[0] == _STOCK
    known = (RotatingKVCache, ArraysCache) if stock else (RotatingKVCache,)
    left = [
        cache
        for cache in flat(caches)
        if not (isinstance(cache, known) or cache.is_trimmable())
    ]
    return UNKNOWN if any(recording.layer_of(c) is None for c in left) else ""


def rings(caches: Sequence[Any]) -> list[RotatingKVCache]:
    """The rotating caches among these, nested ones included."""
    return [c for c in flat(caches) if isinstance(c, RotatingKVCache)]


def forgets(cache: Any) -> bool:
    """Whether a cache may drop its oldest tokens for a new one."""
    return any(isinstance(c, (RotatingKVCache, ChunkedKVCache)) for c in flat([cache]))
