"""Where the time of a generation goes, stage by stage.

The device works behind the host's back, so a stage that is timed must be waited for.
That costs some of the overlap that makes a round fast: a profile tells how the parts
compare, not how fast the whole is. Without waiting, the time is the host's: what the
device takes for all stages shows where the tokens are waited for, in ``accept``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import mlx.core as mx

STAGES = (
    "draft",
    "snapshot",
    "verify",
    "accept",
    "commit",
    "replay",
    "observe",
    "finalise",
)
Wait = Callable[..., None]


class Stopwatch:
    """Times stages, or does nothing at all.

    Args:
        add: Is told each stage and its seconds; None measures nothing.
        waits: Whether the device is waited for at the end of each stage.
    """

    def __init__(
        self, add: Callable[[str, float], None] | None = None, waits: bool = True
    ) -> None:
        self._add = add
        self._waits = waits
        for stage in STAGES if add else ():
            add(stage, 0.0)  # what never happens took no time
        self._inner = [0.0]  # seconds of the stages inside the current ones

    def __call__(self, stage: str) -> AbstractContextManager[Wait]:
        """Time what runs in the context; it hands over arrays that are waited for."""
        if self._add is None:
            return nullcontext(_wait_for_nothing)
        return self._timed(stage, self._add)

    @contextmanager
    def _timed(self, stage: str, add: Callable[[str, float], None]) -> Iterator[Wait]:
        waited: list[Any] = []
        start = time.perf_counter()
        self._inner.append(0.0)
        try:
            yield lambda *arrays: waited.extend(arrays)
            if self._waits:
                mx.eval(waited)
        finally:
            whole = time.perf_counter() - start
            add(stage, whole - self._inner.pop())
            self._inner[-1] += whole


def _wait_for_nothing(*arrays: Any) -> None:
    """What a stage that is not timed does with its arrays."""


class Lap:
    """Seconds of work from one moment to the next, without those of the caller."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._worked = 0.0
        self._since = now()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What runs in the context is not work."""
        self._worked += self._now() - self._since
        try:
            yield
        finally:
            self._since = self._now()

    def lap(self) -> float:
        """Seconds of work since the last call."""
        now = self._now()
        worked = self._worked + now - self._since
        self._worked, self._since = 0.0, now
        return worked
