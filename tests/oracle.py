"""Stock mlx-lm as the oracle: its tokens, and the cache states that it leaves.

Everything is compared with stock decoding one token at a time, never with another path
of ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache


@dataclass
class Result:
    """What a generation gave, and what it left behind."""

    tokens: list[int]
    logprobs: list[mx.array]
    caches: list[Any]
    random_state: list[int] = field(default_factory=list)


def stock(
    model: nn.Module,
    prompt: Sequence[int],
    max_tokens: int,
    *,
    seed: int | None = None,
    caches: list[Any] | None = None,
    **kwargs: Any,
) -> Result:
    """Stock's `generate_step`, run to its end."""
    if caches is None:
        caches = make_prompt_cache(model, max_kv_size=kwargs.get("max_kv_size"))
    if seed is not None:
        mx.random.seed(seed)
    steps = list(
        generate_step(
            mx.array(prompt),
            model,
            max_tokens=max_tokens,
            prompt_cache=caches,
            **kwargs,
        )
    )
    return Result([t for t, _ in steps], [p for _, p in steps], caches, random_state())


def random_state() -> list[int]:
    """The state of `mx.random`, as integers."""
    return mx.random.state[0].tolist()


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


def differences(ours: Sequence[Any], theirs: Sequence[Any]) -> list[str]:
    """What differs between two lists of caches, bit for bit; empty if nothing."""
    found = []
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if type(a) is not type(b):
            found.append(f"cache {i}: {type(a).__name__} and {type(b).__name__}")
            continue
        left, right = contents(a), contents(b)
        if left.keys() != right.keys():
            found.append(f"cache {i}: {sorted(left)} and {sorted(right)}")
        found += [
            f"cache {i}, {name}: {left[name].shape} and {right[name].shape}"
            for name in left.keys() & right.keys()
            if not same_bits(left[name], right[name])
        ]
    return found


def same_bits(a: mx.array, b: mx.array) -> bool:
    """Whether two arrays have the same shape, dtype and bits."""
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and mx.array_equal(a, b, equal_nan=True).item()
    )
