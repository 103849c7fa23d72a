"""Several candidate paths side by side: tile the caches, then keep one row.

The paths lie on the batch axis, one forward verifies them all, and the caches go back
to batch 1 with the prefix that won.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from . import commit

ArrayMap = Callable[[mx.array], mx.array]


def tile_caches(caches: Sequence[Any], paths: int) -> None:
    """Repeat every cache's state `paths` times along the batch axis, in place.

    Raises:
        ValueError: If a cache is not at batch 1.
    """
    for batch in map(_batch, caches):
        if batch not in (1, None):
            raise ValueError(f"caches are tiled from batch 1, got batch {batch}.")
    for cache in caches:
        _map_arrays(cache, lambda x: mx.repeat(x, paths, axis=0))


def commit_tree_row(
    caches: Sequence[Any], verified_len: int, accepted_len: int, row: int
) -> bool:
    """Keep the first `accepted_len` inputs of one path and go back to batch 1.

    All or nothing, like :func:`~mlx_lm_mtp.state.commit.commit_verified_prefix`, which
    see; the forward must have been recorded if a cache cannot be trimmed.

    Returns:
        Whether the caches now hold that prefix of that path.

    Raises:
        ValueError: If there is no such row, or `accepted_len` is out of range.
    """
    for batch in map(_batch, caches):
        if batch is not None and not 0 <= row < batch:
            raise ValueError(f"row is {row}, outside 0..{batch - 1} (the paths).")
    if not commit.commit_verified_prefix(caches, verified_len, accepted_len):
        return False
    for cache in caches:
        _map_arrays(cache, lambda x: mx.contiguous(x[row : row + 1]))
    return True


def _batch(cache: Any) -> int | None:
    """The batch size of a cache; None if it is empty."""
    arrays = [x for _, x in tree_flatten(cache.state) if isinstance(x, mx.array)]
    return max((x.shape[0] for x in arrays), default=None)


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
