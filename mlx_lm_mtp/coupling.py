"""What the target is likely to sample, seen by one that knows its random number.

`mx.random.categorical` samples one row by inverting the distribution function: with u
uniform in [0, 1), the token t for which F(t - 1) <= u < F(t), where F(t) is the sum of
the probabilities of tokens 0 … t. So all the noise of a position is one number u, known
in advance.

To invert the drafter's distribution at the same u is not the best guess: it differs
from the target's a little everywhere, and where u falls near the border of two tokens,
the heavier one is the safer. Let the target's distribution be a Dirichlet one around
the drafter's q, with concentration K. Its F(t) is then a Beta variable with parameters
K F_q(t) and K (1 - F_q(t)), and::

    P(token t | u) = P(F(t) > u) - P(F(t - 1) > u)

follows exactly. (In place of Beta, asin √F is taken to be normal with the variance
1 / (4 (K + 1)), whatever F is, and a logistic function, which is quicker, stands in for
its distribution function: they differ by 0.01 at most.) K → ∞ inverts q at u, K → 0 is
the likeliest token, whatever u is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import mlx.core as mx
from mlx_lm.sample_utils import Sampler, make_sampler

from .choices import log_probabilities

_CONCENTRATION = 10.0  # from 5 to 30 makes no difference to speak of
_LOGISTIC = 1.702  # the slope at which it comes closest to the normal one


class StockSampler(NamedTuple):
    """What a sampler that stock made does: filter, then sample at a temperature."""

    filters: Sequence[Callable[[mx.array], mx.array]]
    temperature: float

    def beliefs(self, logits: mx.array) -> mx.array:
        """How likely the target's sample from a like row is each token, `(1, V)`.

        Draws from `mx.random` what the sampler would draw.

        Args:
            logits: `(1, V)`, the drafter's.
        """
        if self.filters:
            logits = log_probabilities(logits)
        for apply in self.filters:
            logits = apply(logits)
        return beliefs(logits * (1 / self.temperature), mx.random.uniform(shape=(1,)))


def taken_apart(sampler: Sampler) -> StockSampler | None:
    """The parts of a sampler of stock's; None if it is another, or samples otherwise.

    They are read from its closure, for stock makes nothing else of them.
    """
    made = make_sampler(1.0)
    if getattr(sampler, "__code__", None) is not made.__code__ or not inverts():
        return None
    names = sampler.__code__.co_freevars
    cells = dict(zip(names, sampler.__closure__ or (), strict=True))
    if set(names) != {"sampling_methods", "temp"}:
        return None
    filters = cells["sampling_methods"].cell_contents
    return StockSampler(filters, cells["temp"].cell_contents)


@functools.cache
def inverts() -> bool:
    """Whether this MLX samples a row by inverting its distribution function."""
    logits = mx.arange(64.0)[None] % 7
    cumulative = mx.cumsum(mx.softmax(logits, axis=-1), axis=-1)
    for seed in range(8):
        key = mx.random.key(seed)
        inverted = mx.sum(cumulative <= mx.random.uniform(shape=(1,), key=key))
        if inverted.item() != mx.random.categorical(logits, key=key).item():
            return False
    return True


@mx.compile
def beliefs(logits: mx.array, u: mx.array) -> mx.array:
    """P(token | u) for `(1, V)` logits and `(1,)` uniform numbers; `(1, V)` float32."""
    q = mx.softmax(logits.astype(mx.float32), axis=-1)
    below = mx.minimum(mx.cumsum(q, axis=-1), 1)
    below = mx.concatenate([mx.zeros_like(below[:, :1]), below], axis=-1)
    above_u = mx.sigmoid(_LOGISTIC * (_angle(below) - _angle(u)))
    found = above_u[:, 1:] - above_u[:, :-1]
    return found / (above_u[:, -1:] - above_u[:, :1])


def _angle(share: mx.array) -> mx.array:
    return 2 * math.sqrt(_CONCENTRATION + 1) * mx.arcsin(mx.sqrt(share))
