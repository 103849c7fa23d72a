"""Decode the smallest gaps again, one token at a time, as plain decoding does.

The whole text is fed once more up to the last of them, to copies of the caches behind
the prompt: what the caller has, and the random state, stay as they are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from .choices import log_probabilities, two_best
from .gaps import Audited, Gap
from .rounds import Round
from .target import Target


class Audit:
    """One generation's.

    Args:
        target: The model.
        caches: As they are before the last token of the prompt; they are copied.
        last: That token, `(1,)`.
        quantize: Quantises caches in place, as the generation does.
    """

    def __init__(
        self,
        target: Target,
        caches: Sequence[Any],
        last: mx.array,
        quantize: Callable[[list[Any]], None],
    ) -> None:
        self._target = target
        self._caches = copy.deepcopy(list(caches))
        self._fed = [last.item()]
        self._quantize = quantize

    def add(self, done: Round) -> None:
        """Note what a verify has yielded."""
        self._fed += done.tokens

    def run(self, gaps: Sequence[Gap], tokens: int) -> tuple[Audited, ...]:
        """What one-token forwards give where the gaps were small.

        The likeliest tokens are compared: with a greedy sampler and no processors, they
        are what is chosen.

        Args:
            gaps: Those to look at.
            tokens: That were yielded in all, so that their positions are known.
        """
        start = tokens + 1 - len(self._fed)
        wanted = {gap.position - start: gap for gap in gaps if gap.position >= start}
        found = []
        for i in range(max(wanted, default=-1) + 1):
            logits = self._target(mx.array([[self._fed[i]]]), self._caches).logits
            self._quantize(self._caches)
            mx.eval([cache.state for cache in self._caches])
            if (gap := wanted.get(i)) is not None:
                best, plain = two_best(log_probabilities(logits[0, -1:]))
                found.append(Audited(gap, best[0, 0].item(), plain.item()))
        return tuple(sorted(found))
