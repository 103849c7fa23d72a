"""Copy and put back any cache: the way back that works for every architecture.

An `mx.array` is a handle to an immutable node: writing through one handle (as
caches do, in place) makes a new node and leaves every other handle as it was. A
snapshot therefore holds *handles of its own* and copies no data; a cache that then
writes in place pays for the copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

Snapshot = dict[str, Any]


def snapshot(caches: Sequence[Any]) -> list[Snapshot]:
    """Everything that the caches hold now; an empty cache is kept as empty.

    Args:
        caches: Stock prompt caches (of any class, nested `CacheList` included).

    Returns:
        One snapshot a cache, to be used with :func:`restore`, any number of times.
    """
    return [_copy(vars(cache)) for cache in caches]


def restore(caches: Sequence[Any], snapshots: Sequence[Snapshot]) -> None:
    """Put the caches back to what they held when :func:`snapshot` was called.

    Handles are copied again, so that the next forward cannot write into the
    snapshot: a snapshot may be restored twice.
    """
    for cache, saved in list(zip(caches, snapshots, strict=True)):
        _put_back(cache, saved)


def _is_cache(value: Any) -> bool:
    return hasattr(value, "state") and hasattr(value, "__dict__")


def _copy(value: Any) -> Any:
    if isinstance(value, mx.array):
        return mx.array(value)
    if isinstance(value, dict):
        return {name: _copy(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copy(item) for item in value)
    return (value, _copy(vars(value))) if _is_cache(value) else value


def _put_back(cache: Any, saved: Snapshot) -> None:
    attributes = {name: _revive(value) for name, value in saved.items()}
    vars(cache).clear()
    vars(cache).update(attributes)


def _revive(value: Any) -> Any:
    if isinstance(value, tuple) and len(value) == 2 and _is_cache(value[0]):
        _put_back(*value)
        return value[0]
    if isinstance(value, (list, tuple)):
        return type(value)(_revive(item) for item in value)
    return _copy(value)
