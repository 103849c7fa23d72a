"""Read the state of `mx.random`, and put it back, without waiting for the device.

The list of states takes no assignment, but the array in it can be written.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx


def current() -> mx.array:
    """The state now, `(2,)` uint32; may be lazy."""
    return mx.array(mx.random.state[0])  # a copy, for the array itself is written


def put_back(state: mx.array) -> None:
    """Make `mx.random` go on from a state that :func:`current` gave."""
    mx.random.seed(0)  # makes a new array, for somebody may hold the old one
    mx.random.state[0][:] = state


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
