"""How far rounding moves log-probabilities: forwards of several tokens beside one's.

No drafts are made and nothing is taken back here: stock's text is fed to the model once
more, in pieces. So whatever may be wrong with drafting cannot be in this measure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache

from ..choices import log_probabilities
from ..state.recurrence import Recurrence
from ..state.snapshot import restore, snapshot
from ..target import Target

_STEP = 2048  # tokens a forward, as stock prefills


def moved(ours: mx.array, stock: mx.array) -> float:
    """The largest difference of two arrays of log-probabilities of one shape."""
    apart = mx.abs(ours.astype(mx.float32) - stock.astype(mx.float32))
    return float(mx.max(mx.where(ours == stock, 0, apart)).item())


def rounding(
    model: nn.Module,
    prompt: Sequence[int],
    tokens: Sequence[int],
    rows: Sequence[mx.array],
    widest: int,
    recurrence: Recurrence,
) -> float:
    """The most that a forward of 2 to `widest` tokens moves a log-probability.

    Pieces of every width begin at every place, so that each position is computed at
    every place that it can have in a verify. That costs `widest - 1` times what
    decoding the tokens one by one does.

    Args:
        model: The target.
        prompt: Token ids, at least one.
        tokens: What stock has decoded behind it.
        rows: The `(V,)` log-probabilities that each was chosen from.
        widest: Tokens of a verify, k + 1.
        recurrence: How drafted generations compute gated-delta layers.
    """
    target, caches = Target(model, recurrence=recurrence), make_prompt_cache(model)
    fed = [prompt[-1], *tokens[:-1]]
    most = 0.0
    with mx.stream(generation_stream):
        for start in range(0, len(prompt) - 1, _STEP):
            chunk = prompt[start : min(start + _STEP, len(prompt) - 1)]
            target(mx.array([chunk]), caches)
            mx.eval([cache.state for cache in caches])
        before = snapshot(caches)
        for width, first in _ways(widest):
            restore(caches, before)
            for start, end in _pieces(len(fed), width, first):
                logits = target(mx.array([fed[start:end]]), caches).logits[0]
                stock = mx.stack(list(rows[start:end]))
                most = max(most, moved(log_probabilities(logits), stock))
    return most


def _ways(widest: int) -> Iterator[tuple[int, int]]:
    """Widths, with the length of the first piece."""
    for width in range(2, widest + 1):
        for first in range(1, width + 1):
            yield width, first


def _pieces(length: int, width: int, first: int) -> Iterator[tuple[int, int]]:
    """Where pieces start and end."""
    ends = [*range(min(first, length), length, width), length]
    yield from zip([0, *ends[:-1]], ends, strict=True)
