"""What to choose from rows of logits: log-probabilities, the best few tokens."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

_FEW = 3


def log_probabilities(logits: mx.array) -> mx.array:
    """Normalised over the last axis, in the logits' own dtype as stock does.

    The subtraction rounds, and may make a tie that argmax then resolves: to choose
    from the logits instead would not be stock's choice.
    """
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def best(logits: mx.array, n: int) -> mx.array:
    """The n likeliest tokens of `(1, 1, V)` logits, `(1, 1, n)`, in order."""
    n = min(n, logits.shape[-1])
    if n <= _FEW:  # to look for the largest n times is quicker than to sort
        return in_turn(logits, n, lambda row: mx.argmax(row, axis=-1))
    found = mx.argpartition(-logits, n - 1, axis=-1)[..., :n]
    order = mx.argsort(-mx.take_along_axis(logits, found, axis=-1), axis=-1)
    return mx.take_along_axis(found, order, axis=-1)


def in_turn(
    logits: mx.array, n: int, choose: Callable[[mx.array], mx.array]
) -> mx.array:
    """What is chosen of `(..., V)` logits, then what is chosen without it, and so on.

    Args:
        choose: Gives `(...)` tokens of `(..., V)` logits.

    Returns:
        `(..., n)` tokens.
    """
    found: list[mx.array] = []
    for _ in range(n):
        if found:
            lowest = mx.array(-mx.inf, dtype=logits.dtype)
            logits = mx.put_along_axis(logits, found[-1], lowest, axis=-1)
        found.append(choose(logits)[..., None])
    return mx.concatenate(found, axis=-1) if n > 1 else found[0]


def two_best(logprobs: mx.array) -> tuple[mx.array, mx.array]:
    """The two likeliest tokens of `(..., V)` rows, and how far apart they are.

    Returns:
        `(..., 2)` tokens, the likelier first, of equal ones the lower id, as argmax
        has it; and the `(...)` gaps, in nats, float32.
    """
    tokens = in_turn(logprobs, 2, lambda rows: mx.argmax(rows, axis=-1))
    values = mx.take_along_axis(logprobs, tokens, axis=-1).astype(mx.float32)
    return tokens, values[..., 0] - values[..., 1]
