"""How near the target's choices were to ties: a histogram of gaps, and the smallest.

The gap at a token is how far the target's two likeliest tokens are apart there, in
log-probability, before processors: 0 is a tie, which argmax gives to the lower id. A
forward that rounds otherwise can change a greedy token only where the gap is small.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from .rounds import Round

# A gap is in the first bin whose bound it does not pass; a last bin has no bound.
BOUNDS = (0.0, *(4.0**i for i in range(-5, 3)))
SHOWN = 5  # smallest gaps that are kept where nobody asks for more


class Gap(NamedTuple):
    """How near to a tie one token was; smaller ones compare as less.

    Args:
        gap: Of the two likeliest tokens' log-probabilities, in nats.
        position: Of the token in the output, from 0.
        best, second: The two tokens.
    """

    gap: float
    position: int
    best: int
    second: int


class Audited(NamedTuple):
    """One token that was decoded again, by itself.

    Args:
        gap: What it was found to be at first.
        best: The likeliest token of a one-token forward.
        plain: The gap there.
    """

    gap: Gap
    best: int
    plain: float

    @property
    def differs(self) -> bool:
        """Whether the likeliest token is another one."""
        return self.best != self.gap.best


def histogram(gaps: Iterable[float]) -> Counter[int]:
    """Bin -> how many gaps; those of broken rows, which are NaN, are left out."""
    return Counter(bisect.bisect_left(BOUNDS, gap) for gap in gaps if gap == gap)


def smallest(gaps: Iterable[Gap], n: int) -> tuple[Gap, ...]:
    """The n smallest, in order; of equal ones the earlier."""
    return tuple(sorted(found for found in gaps if found.gap == found.gap)[:n])


def bin_name(index: int) -> str:
    """A bin, for people."""
    if index == 0:
        return "tie"
    if index == len(BOUNDS):
        return f"> {BOUNDS[-1]:g}"
    return f"<= {BOUNDS[index]:.3g}"


def gaps_of(done: Round, position: int) -> list[Gap]:
    """The gaps of what a round has yielded, as far as they are known.

    Args:
        done: The round.
        position: Of its first token in the output.
    """
    return [
        Gap(found.gap, position + i, found.best, found.second)
        for i, found in enumerate(done.yielded)
        if found is not None
    ]
