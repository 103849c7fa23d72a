"""Feed the pending token and its drafts, so that any prefix of them can be kept.

``batch`` feeds all in one forward; ``step`` feeds one by one with a snapshot before
each, the conservative form that needs nothing but one-token forwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from .profile import Stopwatch
from .state.capture import Recording
from .state.forms import BATCHED, Form
from .state.limits import unknown_arithmetic, width_limit
from .state.paths import SideBySide, StandIns
from .state.snapshot import Snapshot
from .state.verified import (
    Replayable,
    Stepped,
    Verified,
    can_commit,
    captured,
    light_snapshot,
)
from .stats import Tally
from .target import Forward, Target


class Verifier:
    """Verifies on one target and one list of caches.

    Args:
        target: The model.
        caches: Its prompt caches, written in place.
        mode: ``batch`` or ``step``.
        stats: Replays are counted here.
        timed: Times snapshots and replays.
        form: Gives the form in which P paths of S inputs are verified, or None if no
            form of one forward will do; by default everything is batched.
        quantized_kv_start: Tokens behind which the caches are quantised, if ever.
        raises: Whether choosing may raise, so that a single input, too, may have to be
            taken back.

    Attributes:
        one_row: Why inputs are to be fed one by one; empty if they need not.
    """

    def __init__(
        self,
        target: Target,
        caches: list[Any],
        mode: str,
        stats: Tally,
        timed: Stopwatch,
        form: Callable[[int, int], Form | None] = lambda paths, width: BATCHED,
        *,
        quantized_kv_start: int | None = None,
        raises: bool = True,
    ) -> None:
        self.target = target
        self.caches = caches
        self._mode = mode
        self._stats = stats
        self._timed = timed
        self._form = form
        self._quantized_kv_start = quantized_kv_start
        self._raises = raises
        self._committable = False
        self.one_row = target.one_row

    def first(self, tokens: mx.array) -> Forward:
        """Feed the last prompt token `(1, 1)`, and learn whether commits will work."""
        with Recording() as recording:
            forward = self.target(tokens, self.caches)
        self._committable = can_commit(self.caches, recording)
        self.one_row = self.target.one_row or unknown_arithmetic(
            self.target.model, self.caches, recording
        )
        return forward

    def limit(self, taken_back: int = 0) -> tuple[int | None, str]:
        """How many inputs may be fed, and why not more; None is no limit.

        Args:
            taken_back: Inputs that the caches hold now, and will not hold then.
        """
        if self._mode == "batch" and self.one_row:
            return 1, self.one_row
        return width_limit(
            self.caches,
            quantized_kv_start=self._quantized_kv_start,
            one_forward=self._mode == "batch",
            taken_back=taken_back,
        )

    def __call__(self, tokens: mx.array) -> tuple[Forward, Verified]:
        """Feed `(P, S)` tokens, P paths; a prefix of one can be kept after that."""
        if tokens.shape[0] > 1:
            return self._side_by_side(tokens)
        if tokens.shape[1] > 1 and self._mode == "step":
            return self._step(tokens)
        alone = tokens.shape[1] == 1
        if alone and not (self._committable and self._raises):
            return self.target(tokens, self.caches), Verified(self.caches, 1)
        if self._committable:
            return self._capture(tokens)
        return self._snapshot(tokens)

    def _fed(self, tokens: mx.array, caches: list[Any]) -> Forward:
        """One forward in the form for so many inputs."""
        return self.target(tokens, caches, form=self._form(*tokens.shape) or BATCHED)

    def _capture(self, tokens: mx.array) -> tuple[Forward, Verified]:
        with Recording() as recording:
            forward = self._fed(tokens, self.caches)
        return forward, captured(self.caches, tokens.shape[1], recording)

    def _snapshot(self, tokens: mx.array) -> tuple[Forward, Verified]:
        before = self._light_snapshot()
        forward = self._fed(tokens, self.caches)

        def replay(n: int) -> None:
            self._replay(tokens[:, :n])

        return forward, Replayable(self.caches, tokens.shape[1], before, replay)

    def _side_by_side(self, tokens: mx.array) -> tuple[Forward, Verified]:
        paths, width = tokens.shape
        stand_ins = StandIns(self.caches, paths)
        with Recording() as recording:
            forward = self._fed(tokens, stand_ins.caches)

        def feed(n: int, row: int) -> None:
            self._replay(tokens[row : row + 1, :n])

        return forward, SideBySide(self.caches, width, stand_ins, recording, feed)

    def _replay(self, tokens: mx.array) -> None:
        """Feed tokens once more; nobody reads the logits."""
        self._stats.count_replay(tokens.shape[1])
        with self._timed("replay") as wait:
            wait(self._fed(tokens, self.caches).logits)

    def _light_snapshot(self) -> list[Snapshot | None]:
        with self._timed("snapshot"):
            return light_snapshot(self.caches)

    def _step(self, tokens: mx.array) -> tuple[Forward, Verified]:
        snapshots, forwards = [], []
        for token in mx.split(tokens, tokens.shape[1], axis=1):
            snapshots.append(self._light_snapshot())
            forwards.append(self.target(token, self.caches))
        return _joined(forwards), Stepped(self.caches, snapshots)


def _joined(forwards: Sequence[Forward]) -> Forward:
    logits = mx.concatenate([f.logits for f in forwards], axis=1)
    hidden = [f.hidden for f in forwards if f.hidden is not None]
    return Forward(logits, mx.concatenate(hidden, axis=1) if hidden else None)
