"""Drafters that follow a script, for tests that decide what is accepted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx
from tiny import VOCAB

from mlx_lm_mtp.drafters.base import Proposal


class Scripted:
    """Knows what the target will say, and errs where it is told to.

    Args:
        truth: All tokens that the target will yield, in order.
        right: Index of a token -> whether it is drafted correctly.
        excess: How many tokens more than asked for are proposed.
    """

    name = "scripted"
    needs_hidden = False

    def __init__(
        self,
        truth: Sequence[int],
        right: Callable[[int], bool] = lambda i: True,
        excess: int = 0,
    ) -> None:
        self.truth = list(truth)
        self.right = right
        self.excess = excess
        self.begin()

    def begin(self) -> None:
        self.prompt: list[int] = []
        self.seen: list[int] = []

    def prefill(self, tokens: mx.array, hidden: mx.array | None) -> None:
        assert hidden is None
        self.prompt += tokens[0].tolist()

    def draft(self, token: mx.array, k: int) -> Proposal:
        start = len(self.seen) + 1
        return Proposal.of(
            [self._say(i) for i in range(start, start + k + self.excess)]
        )

    def observe(self, tokens: mx.array, hidden: mx.array | None) -> None:
        self.seen += tokens[0].tolist()

    def _say(self, i: int) -> int:
        if i < len(self.truth) and self.right(i):
            return self.truth[i]
        said = self.truth[i] if i < len(self.truth) else 0
        return (said + 1) % VOCAB
