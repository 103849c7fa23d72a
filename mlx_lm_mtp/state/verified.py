"""The caches after a verify, one class for each way in which it can be taken back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..errors import CommitError
from . import capture, commit
from .limits import forgets
from .snapshot import Snapshot, restore, snapshot


class Verified:
    """The caches after a verify of `width` inputs; `commit` keeps a prefix of them.

    This base keeps everything: it is what a single input in caches that cannot go back
    gets. (Stock, too, has fed one token more than it has yielded when its sampler
    raises.)
    """

    def __init__(self, caches: Sequence[Any], width: int) -> None:
        self.caches = caches
        self.kept = width
        self.row = 0

    def commit(self, n: int, row: int = 0) -> None:
        """Make the caches hold the first n inputs of one path, 0 <= n <= width."""
        self.row = row
        if n != self.kept:
            self._keep(n)
            self.kept = n
        commit.cut_fronts(self.caches)

    def _keep(self, n: int) -> None:
        """Go from `kept` inputs back to n."""


class Captured(Verified):
    """Every cache is trimmable or was recorded: no snapshot, no second forward."""

    def __init__(
        self, caches: Sequence[Any], width: int, records: commit.Records
    ) -> None:
        super().__init__(caches, width)
        self._records = records

    def _keep(self, n: int) -> None:
        commit.keep(self.caches, self._records, self.kept, n)


def captured(
    caches: Sequence[Any], width: int, recording: capture.Recording
) -> Verified:
    """What a recorded forward over `width` inputs left, ready to be committed.

    Raises:
        CommitError: If several inputs were fed and a cache can neither be trimmed nor
            committed, although it could when generation began.
    """
    records = commit.records_of(caches, recording, width)
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
    write; trimming it costs nothing. What forgets may lose more than was written.
    """
    return [
        None if c.is_trimmable() and not forgets(c) else snapshot([c])[0]
        for c in caches
    ]


def light_restore(
    caches: Sequence[Any], saved: Sequence[Snapshot | None], fed: int
) -> None:
    """Put back a :func:`light_snapshot` taken `fed` tokens ago."""
    for cache, before in zip(caches, saved, strict=True):
        if before is None:
            commit.trim(cache, fed)
        else:
            restore([cache], [before])


def can_commit(caches: Sequence[Any], recording: capture.Recording) -> bool:
    """Whether any prefix can be kept, judged by a forward that was just recorded."""
    return all(
        cache.is_trimmable() or recording.layer_of(cache) is not None
        for cache in commit.flat(caches)
    )


def _names(caches: Sequence[Any]) -> str:
    return ", ".join(sorted({type(cache).__name__ for cache in caches}))
