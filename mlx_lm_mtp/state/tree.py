"""Several candidate paths side by side: tile the caches, then keep one row.

The paths lie on the batch axis, one forward verifies them all, and the caches go back
to batch 1 with the prefix that won.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from . import commit

ArrayMap = Callable[[mx.array], mx.array]


def tile_caches(caches: Sequence[Any], paths: int) -> None:
    """Repeat every cache's state `paths` times along the batch axis, in place.

    Raises:
        ValueError: If a cache is not at batch 1.
    """
    for cache in caches:
        _map_arrays(cache, lambda x: _tile(x, paths))


def commit_tree_row(
    caches: Sequence[Any], verified_len: int, accepted_len: int, row: int
) -> bool:
    """Keep the first `accepted_len` inputs of one path and go back to batch 1.

    All or nothing, like :func:`~mlx_lm_mtp.state.commit.commit_verified_prefix`, which
    see; the forward must have been recorded if a cache cannot be trimmed.

    Returns:
        Whether the caches now hold that prefix of that path.
    """
    if not commit.commit_verified_prefix(caches, verified_len, accepted_len):
        return False
    for cache in caches:
        _map_arrays(cache, lambda x: mx.contiguous(x[row : row + 1]))
    return True


def _tile(x: mx.array, paths: int) -> mx.array:
    if x.shape[0] != 1:
        raise ValueError(f"caches are tiled from batch 1, got batch {x.shape[0]}.")
    return mx.repeat(x, paths, axis=0)


def _map_arrays(cache: Any, fn: ArrayMap) -> None:
    for name, value in vars(cache).items():
        setattr(cache, name, _mapped(value, fn))


def _mapped(value: Any, fn: ArrayMap) -> Any:
    if isinstance(value, mx.array):
        return fn(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(item, fn) for item in value)
    if hasattr(value, "state"):  # a cache inside a CacheList
        _map_arrays(value, fn)
    return value
