"""What arrays and caches hold, compared bit for bit."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten


def same_bits(a: mx.array, b: mx.array) -> bool:
    """Whether two arrays have the same shape and dtype, and the same bits."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    bits = (mx.contiguous(x).reshape(-1).view(mx.uint8) for x in (a, b))
    return bool(mx.array_equal(*bits).item())


def contents(cache: Any) -> dict[str, mx.array]:
    """Every array of a cache that a forward could read, by name.

    Rows of a KV buffer beyond its offset are no contents: they are overwritten before
    they are read, and stock fills them differently depending on how the buffer grew.
    """
    if hasattr(cache, "caches"):
        nested = [contents(c) for c in cache.caches]
        return {f"{i}.{k}": v for i, n in enumerate(nested) for k, v in n.items()}
    if hasattr(cache, "keys_and_values") and cache.keys is not None:
        state: Any = cache.keys_and_values()
        numbers = {n: getattr(cache, n, None) for n in ("offset", "_idx", "bits")}
        state = [state, {n: mx.array(v) for n, v in numbers.items() if v is not None}]
    else:
        state = [a for a in getattr(cache, "cache", []) if a is not None]
    return dict(tree_flatten(state))
