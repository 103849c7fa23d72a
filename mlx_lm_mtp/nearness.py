"""How near to ties the choices of one verify were, computed along with them."""

from __future__ import annotations

import mlx.core as mx

from .choices import log_probabilities, two_best
from .rounds import Nearest


class Nearness:
    """The two likeliest tokens behind each input of a verify.

    Of the log-probabilities as stock normalises them, before processors: what argmax
    decides between, in the model's own precision.

    Args:
        logits: `(P, S, V)`, lazy.

    Attributes:
        arrays: To be evaluated with what is read anyway.
    """

    def __init__(self, logits: mx.array) -> None:
        self._tokens, self._gaps = self.arrays = two_best(log_probabilities(logits))

    def behind(self, row: int, i: int) -> Nearest:
        """At input i of one path."""
        return self.along(row)[i]

    def along(self, row: int) -> tuple[Nearest, ...]:
        """Behind each input of one path."""
        pairs = zip(self._gaps.tolist()[row], self._tokens.tolist()[row], strict=True)
        return tuple(Nearest(gap, *tokens) for gap, tokens in pairs)
