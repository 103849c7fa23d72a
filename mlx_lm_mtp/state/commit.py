"""Make caches hold exactly the accepted inputs of a verify, and nothing of the rest.

Attention caches are trimmed, gated-delta caches take the state that
:mod:`~mlx_lm_mtp.state.capture` recorded, and what can do neither is put back from a
snapshot, after which the accepted prefix is fed once more.

These functions work on stock caches, by themselves; the round loop goes through
:mod:`~mlx_lm_mtp.state.verified`, which is built on the same parts.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from mlx_lm.models.cache import ChunkedKVCache, ConcatenateKVCache

from . import capture
from .snapshot import Snapshot, restore

# Per cache what was recorded of its layer; None for a cache that is trimmed.
Records = list[capture.LayerRecord | None]

_recordings: weakref.WeakKeyDictionary[Any, capture.Recording] = (
    weakref.WeakKeyDictionary()
)


def begin_speculative_checkpoints(caches: Sequence[Any]) -> None:
    """Record, in the next forward of this thread, what rollback will need.

    Checkpoints of an earlier forward are dropped. Trimmable caches need none.
    """
    untrimmable = _untrimmable(caches)
    if untrimmable:
        recording = capture.Recording().__enter__()
        _recordings.update(dict.fromkeys(untrimmable, recording))


def commit_verified_prefix(
    caches: Sequence[Any], verified_len: int, accepted_len: int
) -> bool:
    """Keep the first `accepted_len` of the `verified_len` inputs fed last.

    All or nothing: if one cache can neither be trimmed nor committed, none is
    touched. Recording ends either way, but not by a ValueError.

    Returns:
        Whether the caches now hold the accepted prefix.

    Raises:
        ValueError: If `accepted_len` is not in 0..`verified_len`.
    """
    _check(verified_len, accepted_len)
    recording = _end_recording(caches)
    records = records_of(caches, recording, verified_len)
    if accepted_len == verified_len:
        cut_fronts(caches)
        return True
    if records is None:
        return False
    keep(caches, records, verified_len, accepted_len)
    cut_fronts(caches)
    return True


def commit_verified_snapshot(
    caches: Sequence[Any],
    snapshots: Sequence[Sequence[Snapshot]],
    accepted_len: int,
    verified_len: int,
) -> bool:
    """Put back the snapshot taken after token `accepted_len` of a stepwise verify.

    Args:
        snapshots: One :func:`snapshot` after each token but the last.

    Returns:
        Whether the caches now hold the accepted prefix; False when
        `accepted_len` is outside 1..`verified_len` or its snapshot is missing.
    """
    if accepted_len == verified_len:
        return True
    if not 1 <= accepted_len <= min(verified_len, len(snapshots)):
        return False
    restore(caches, snapshots[accepted_len - 1])
    return True


# --- the parts --------------------------------------------------------------------


def flat(caches: Sequence[Any]) -> list[Any]:
    """The caches with every `CacheList` replaced by the caches inside it."""
    return [
        inner
        for cache in caches
        for inner in (flat(cache.caches) if hasattr(cache, "caches") else (cache,))
    ]


def records_of(
    caches: Sequence[Any], recording: capture.Recording, width: int
) -> Records | None:
    """For each flat cache None if trimmable, else its record; None if it lacks both."""
    records: Records = []
    for cache in flat(caches):
        record = None if cache.is_trimmable() else recording.layer_of(cache)
        if record is None and not cache.is_trimmable():
            return None
        if record is not None and record.width != width:
            return None
        records.append(record)
    return records


def keep(caches: Sequence[Any], records: Records, kept: int, n: int) -> None:
    """Go from `kept` inputs of a recorded forward back to n."""
    for cache, record in zip(flat(caches), records, strict=True):
        if record is None:
            trim(cache, kept - n)
        else:
            capture.put(cache, record, n)
            cache.advance(n - kept)


def trim(cache: Any, n: int) -> None:
    """Drop the last n tokens of a trimmable cache."""
    cache.trim(n)
    if isinstance(cache, ConcatenateKVCache):
        # Stock's trim moves the offset alone, and its next update appends to all rows.
        cache.keys = cache.keys[..., : cache.offset, :]
        cache.values = cache.values[..., : cache.offset, :]


def cut_fronts(caches: Sequence[Any]) -> None:
    """Drop what stock drops from a chunked cache before it feeds each single token."""
    for cache in flat(caches):
        if isinstance(cache, ChunkedKVCache) and cache.keys is not None:
            beyond = cache.offset - 1 - cache.start_position - cache.chunk_size
            if beyond > 0:
                cache.start_position += beyond
                cache.keys = cache.keys[..., beyond:, :]
                cache.values = cache.values[..., beyond:, :]


def _untrimmable(caches: Sequence[Any]) -> list[Any]:
    return [cache for cache in flat(caches) if not cache.is_trimmable()]


def _end_recording(caches: Sequence[Any]) -> capture.Recording:
    found = [_recordings.pop(cache, None) for cache in _untrimmable(caches)]
    recording = next((r for r in found if r is not None), capture.Recording())
    recording.__exit__(None, None, None)
    return recording


def _check(verified_len: int, accepted_len: int) -> None:
    if not 0 <= accepted_len <= verified_len:
        raise ValueError(
            f"accepted_len is {accepted_len}, outside 0..{verified_len} (verified_len)."
        )
