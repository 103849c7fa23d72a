"""Make caches hold exactly the accepted inputs of a verify, and nothing of the rest.

Attention caches are trimmed, gated-delta caches take the state that
:mod:`~mlx_lm_mtp.state.capture` recorded, and what can do neither is put back from a
snapshot, after which the accepted prefix is fed once more.

The functions with the long names are the public ones; the round loop uses the classes
below them, one for each way in which a verify can be taken back.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from mlx_lm.models.cache import (
    ChunkedKVCache,
    ConcatenateKVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from ..errors import CommitError
from . import capture
from .snapshot import Snapshot, restore, snapshot

# Per cache what was recorded of its layer; None for a cache that is trimmed.
Records = list[capture.LayerRecord | None]

_recordings: weakref.WeakKeyDictionary[Any, capture.Recording] = (
    weakref.WeakKeyDictionary()
)


# --- public functions on stock caches ---------------------------------------------


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
    records = _records(caches, recording, verified_len)
    if accepted_len == verified_len:
        _cut_fronts(caches)
        return True
    if records is None:
        return False
    _keep(caches, records, verified_len, accepted_len)
    _cut_fronts(caches)
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


# --- what the round loop uses -----------------------------------------------------


class Verified:
    """The caches after a verify of `width` inputs; `commit` keeps a prefix of them.

    This base keeps everything: it is what a single input in caches that cannot go back
    gets. (Stock, too, has fed one token more than it has yielded when its sampler
    raises.)
    """

    def __init__(self, caches: Sequence[Any], width: int) -> None:
        self.caches = caches
        self.kept = width

    def commit(self, n: int) -> None:
        """Make the caches hold the first n inputs, 0 <= n <= those kept now."""
        if n != self.kept:
            self._keep(n)
            self.kept = n
        _cut_fronts(self.caches)

    def _keep(self, n: int) -> None:
        """Go from `kept` inputs back to n."""


class Captured(Verified):
    """Every cache is trimmable or was recorded: no snapshot, no second forward."""

    def __init__(self, caches: Sequence[Any], width: int, records: Records) -> None:
        super().__init__(caches, width)
        self._records = records

    def _keep(self, n: int) -> None:
        _keep(self.caches, self._records, self.kept, n)


def captured(
    caches: Sequence[Any], width: int, recording: capture.Recording
) -> Verified:
    """What a recorded forward over `width` inputs left, ready to be committed.

    Raises:
        CommitError: If several inputs were fed and a cache can neither be trimmed nor
            committed, although it could when generation began.
    """
    records = _records(caches, recording, width)
    if records is not None:
        return Captured(caches, width, records)
    if width == 1:  # a rotating cache has wrapped since
        return Verified(caches, width)
    raise CommitError(
        "a cache could be committed when generation began, and no longer can: "
        f"{_names(caches)}. Please report it; the draft option verify=step avoids it."
    )


class Stepped(Verified):
    """Inputs were fed one by one, with a snapshot before each.

    Args:
        snapshots: For i in 0..width-1 what :func:`light_snapshot` gave before input i.
    """

    def __init__(
        self, caches: Sequence[Any], snapshots: list[list[Snapshot | None]]
    ) -> None:
        super().__init__(caches, len(snapshots))
        self._snapshots = snapshots

    def _keep(self, n: int) -> None:
        light_restore(self.caches, self._snapshots[n], self.kept - n)


class Replayable(Verified):
    """A snapshot was taken before; the kept prefix is fed again through the model."""

    def __init__(
        self,
        caches: Sequence[Any],
        width: int,
        before: list[Snapshot | None],
        replay: Callable[[int], None],
    ) -> None:
        super().__init__(caches, width)
        self._before = before
        self._replay = replay

    def _keep(self, n: int) -> None:
        light_restore(self.caches, self._before, self.kept)
        if n:
            self._replay(n)


def light_snapshot(caches: Sequence[Any]) -> list[Snapshot | None]:
    """A snapshot of what cannot be trimmed later, and None for what can.

    Copying a trimmable cache would cost a copy of the whole context at the next
    write; trimming it costs nothing. A rotating cache may stop being trimmable.
    """
    return [
        None if c.is_trimmable() and not _rings([c]) else snapshot([c])[0]
        for c in caches
    ]


def light_restore(
    caches: Sequence[Any], saved: Sequence[Snapshot | None], trim: int
) -> None:
    """Put back a :func:`light_snapshot` taken `trim` tokens ago."""
    for cache, before in zip(caches, saved, strict=True):
        if before is None:
            _trim(cache, trim)
        else:
            restore([cache], [before])


def can_commit(caches: Sequence[Any], recording: capture.Recording) -> bool:
    """Whether any prefix can be kept, judged by a forward that was just recorded."""
    return all(
        cache.is_trimmable() or recording.layer_of(cache) is not None
        for cache in flat(caches)
    )


def flat(caches: Sequence[Any]) -> list[Any]:
    """The caches with every `CacheList` replaced by the caches inside it."""
    return [
        inner
        for cache in caches
        for inner in (flat(cache.caches) if hasattr(cache, "caches") else (cache,))
    ]


# --- limits -----------------------------------------------------------------------

FULL_RING = "a rotating cache is full"
QUANTIZES = "the KV cache is about to be quantised"


def width_limit(
    caches: Sequence[Any], *, quantized_kv_start: int | None, one_forward: bool
) -> tuple[int | None, str]:
    """How many inputs a verify may feed, and why not more; None is no limit.

    A rotating cache that has wrapped holds its keys in another order than a forward
    of several tokens would read them in, so its sums, and then its tokens, could
    differ from stock's; and it cannot be trimmed. Fed one by one, tokens are no
    trouble. A KV cache is quantised by stock after the token that takes it to
    `quantized_kv_start`, so no round runs past it.
    """
    rings = _rings(caches) if one_forward else []
    limits = [(ring.max_size - ring.offset - 1, FULL_RING) for ring in rings]
    if quantized_kv_start is not None:
        limits += [
            (quantized_kv_start - c.offset, QUANTIZES)
            for c in caches
            if hasattr(c, "to_quantized") and not isinstance(c, QuantizedKVCache)
        ]
    limit, reason = min(limits, default=(None, ""))
    return (limit if limit is None else max(limit, 1)), reason


def _rings(caches: Sequence[Any]) -> list[RotatingKVCache]:
    return [c for c in flat(caches) if isinstance(c, RotatingKVCache)]


# --- shared -----------------------------------------------------------------------


def _records(
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


def _keep(caches: Sequence[Any], records: Records, kept: int, n: int) -> None:
    for cache, record in zip(flat(caches), records, strict=True):
        if record is None:
            _trim(cache, kept - n)
        else:
            capture.put(cache, record, n)
            cache.advance(n - kept)


def _trim(cache: Any, n: int) -> None:
    cache.trim(n)
    if isinstance(cache, ConcatenateKVCache):
        # Stock's trim moves the offset alone, and its next update appends to all rows.
        cache.keys = cache.keys[..., : cache.offset, :]
        cache.values = cache.values[..., : cache.offset, :]


def _cut_fronts(caches: Sequence[Any]) -> None:
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


def _names(caches: Sequence[Any]) -> str:
    return ", ".join(sorted({type(cache).__name__ for cache in caches}))
