"""One thread computes at a time, and the others have their turn, in order.

Stock's server computes in one thread, request after request, or all of them in one
batch. A generation with drafts has a thread of its own here, and takes turns with that
one: a round of drafts, a step of the batch, a round of the next one. So nobody waits
for the end of somebody else's answer.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator


class Turns:
    """Hands the device from thread to thread; the first who asks is the next."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._tickets: deque[object] = deque()  # the first one is the holder's

    def take(self) -> None:
        """Wait until it is this thread's turn."""
        ticket = object()
        with self._changed:
            self._tickets.append(ticket)
            self._changed.wait_for(lambda: self._tickets[0] is ticket)

    def give(self) -> None:
        """End this thread's turn."""
        with self._changed:
            self._tickets.popleft()
            self._changed.notify_all()

    def pass_on(self) -> None:
        """Let everybody who waits have a turn before this thread goes on."""
        with self._changed:
            alone = len(self._tickets) == 1
        if not alone:
            self.give()
            self.take()

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """A turn of this thread, which may be passed on in between."""
        self.take()
        try:
            yield
        finally:
            self.give()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Wait for something else than the device, while others compute."""
        self.give()
        try:
            yield
        finally:
            self.take()
