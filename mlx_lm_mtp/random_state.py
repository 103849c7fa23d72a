"""Read the state of `mx.random`, and put it back.

The state cannot be assigned, but seeding with its two halves gives the same state.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx


def current() -> mx.array:
    """The state now, `(2,)` uint32; may be lazy."""
    return mx.random.state[0]


def put_back(state: mx.array) -> None:
    """Make `mx.random` go on from a state that :func:`current` gave."""
    high, low = state.tolist()
    mx.random.seed(high << 32 | low)


@contextmanager
def untouched() -> Iterator[None]:
    """What draws numbers in here leaves the state as it was.

    Building a module draws its initial weights, even if others are loaded into it.
    """
    state = current()
    try:
        yield
    finally:
        put_back(state)
