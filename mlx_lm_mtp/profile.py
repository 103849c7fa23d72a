"""Where the time of a generation goes, stage by stage.

The device works behind the host's back, so a stage that is timed must be waited for.
That costs some of the overlap that makes a round fast: a profile tells how the parts
compare, not how fast the whole is. Without waiting, the time is the host's: what the
device takes for all stages shows where the tokens are waited for, in ``accept``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
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

    Attributes:
        waits: As given.
    """

    def __init__(
        self, add: Callable[[str, float], None] | None = None, waits: bool = True
    ) -> None:
        self._add = add
        self.waits = waits
        for stage in STAGES if add else ():
            add(stage, 0.0)  # what never happens took no time
        self._inner = [0.0]  # seconds of the stages inside the current ones

    def __call__(self, stage: str) -> AbstractContextManager[Wait]:
        """Time what runs in the context; it hands over arrays to be waited for."""
        if self._add is None:
            return nullcontext(_nothing)
        return _Timed(
            stage, self._add, self._inner, mx.eval if self.waits else _nothing
        )


class _Timed:
    """One stage under way. (A generator would take several times as long.)"""

    def __init__(
        self,
        stage: str,
        add: Callable[[str, float], None],
        inner: list[float],
        wait: Wait,
    ) -> None:
        self._stage = stage
        self._add = add
        self._inner = inner
        self._wait = wait

    def __enter__(self) -> Wait:
        self._inner.append(0.0)
        self._start = time.perf_counter()
        return self._wait

    def __exit__(self, *error: object) -> None:
        whole = time.perf_counter() - self._start
        self._add(self._stage, whole - self._inner.pop())
        self._inner[-1] += whole


def _nothing(*arrays: Any) -> None:
    """What a stage that is not waited for does with its arrays."""


class Lap:
    """Seconds of work from one moment to the next, without those of the caller."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._worked = 0.0
        self._since = now()

    def pause(self) -> None:
        """What comes now is not work."""
        self._worked += self._now() - self._since

    def go_on(self) -> None:
        """It is again."""
        self._since = self._now()

    def lap(self) -> float:
        """Seconds of work since the last call."""
        now = self._now()
        worked = self._worked + now - self._since
        self._worked, self._since = 0.0, now
        return worked
