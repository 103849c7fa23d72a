"""Logits processors that can be asked about drafts, and the drafts that they forbid.

Penalties and grammars change what the target chooses, so a draft that is chosen without
them is likely to be wrong. Pure processors (:mod:`.purity`) can be asked at any time.
One that keeps a state is shown certain tokens alone; it can be asked nevertheless if it
can say what it *would* do, and be left as it was.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import mlx.core as mx
from mlx_lm.sample_utils import LogitsProcessor

from .accept import processed
from .history import History
from .purity import leaves_nothing


@runtime_checkable
class LooksAhead(Protocol):
    """A logits processor that keeps a state, and can tell what it would do next."""

    def look_ahead(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """What it would return if it were called with these arguments.

        It is left as if it had not been asked: in the state behind the tokens that it
        was last called with, which `tokens` goes on from by drafted ones.

        Args:
            tokens: `(n,)`, the history that it would be shown.
            logits: `(1, V)`; what it forbids becomes -inf.
        """


class Guides:
    """Those of the target's processors that can be asked about drafts, in order.

    Args:
        processors: All of the target's.
        history: The tokens fed so far.
    """

    def __init__(self, processors: Sequence[LogitsProcessor], history: History) -> None:
        asked = [(p, _asked(p)) for p in processors]
        self._all = [ask for _, ask in asked if ask is not None]
        self._forbid = [ask for p, ask in asked if not (ask is None or ask is p)]
        self.looks_ahead = bool(self._forbid)
        self.complete = len(self._all) == len(asked)
        self._history = history
        self._rows: dict[tuple[int, ...], mx.array] = {}

    def __bool__(self) -> bool:
        return bool(self._all)

    def begin(self, pending: mx.array, vocabulary: int) -> None:
        """A round begins: drafts follow the `(1,)` pending token."""
        self._vocabulary = vocabulary
        self._rows.clear()
        if self._all:
            self._tokens = self._history.followed_by(pending)

    def __call__(self, logits: mx.array, drafted: mx.array) -> mx.array:
        """`(1, V)` logits as the target's will be processed behind `(d,)` drafts."""
        if not self._all:
            return logits
        tokens = mx.concatenate([self._tokens, drafted])
        logits = processed(logits, self._all, tokens)
        if self.looks_ahead:
            self._rows[tuple(drafted.tolist())] = logits
        return logits

    def permitted(self, tokens: mx.array) -> int:
        """How many of `(1, k)` drafts the processors that look ahead allow."""
        drafts = tokens[0].tolist()
        mx.eval(list(self._rows.values()))  # one wait for all
        for i, token in enumerate(drafts):
            row = self._rows.get(tuple(drafts[:i]))
            if row is None:
                row = self._look(tokens[0, :i])
            if not row[0, token].item() > -math.inf:  # nor if it is NaN
                return i
        return len(drafts)

    def _look(self, drafted: mx.array) -> mx.array:
        tokens = mx.concatenate([self._tokens, drafted])
        return processed(mx.zeros((1, self._vocabulary)), self._forbid, tokens)


def _asked(processor: LogitsProcessor) -> LogitsProcessor | None:
    """What can be asked about drafts in the place of a processor."""
    if leaves_nothing(processor):
        return processor
    return processor.look_ahead if isinstance(processor, LooksAhead) else None
