"""One server: its turns, the threads that draft, and how many requests are active."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .answer import Answer, Left
from .totals import Totals
from .turns import Turns


class Serving:
    """What drafting adds to one of stock's response generators.

    Args:
        requests: Stock's queue of requests.
        most: Threads that draft at a time; further requests wait.
        room: Requests that stock's batch decodes at a time.

    Attributes:
        batched: Sequence in stock's batch -> the request that it answers.
        joining: The request that is put there next.
        undraftable: What cannot be drafted for -> why.
    """

    def __init__(self, requests: Any, most: int, room: int) -> None:
        self.turns = Turns()
        self.totals = Totals()
        self.stopped = False
        self.batched: dict[int, Answer] = {}
        self.joining: Answer
        self.undraftable: dict[Any, str] = {}
        self._requests = requests
        self._most = most
        self._room = room
        # Threads are kept: MLX never gives back the streams of one that has ended.
        self._pool = ThreadPoolExecutor(most, thread_name_prefix="drafting")
        self._changed = threading.Condition()
        self._active = 0
        self._workers = 0

    def enter(self) -> None:
        """A request has come in."""
        with self._changed:
            self._active += 1

    def leave(self) -> None:
        """A request has been answered, or its client is gone."""
        with self._changed:
            self._active -= 1

    @property
    def alone(self) -> bool:
        """Whether the request that is looked at is the only one."""
        with self._changed:
            return self._active <= 1 and not self._workers

    @property
    def working(self) -> bool:
        """Whether a thread drafts."""
        with self._changed:
            return self._workers > 0

    @property
    def joinable(self) -> bool:
        """Whether there is a batch at work that has room for one more."""
        return 0 < len(self.batched) < self._room

    def move(self, answer: Answer, left: Left) -> None:
        """Leave a request to the batch, or to whom there is when its turn comes."""
        self._requests.put(answer.rest(left))

    def start(self, work: Callable[[], Any]) -> None:
        """Run in a thread of its own, in turns with this one, which has its turn."""
        self._wait_until(lambda: self._workers < self._most)
        with self._changed:
            self._workers += 1
        self._pool.submit(self._work, work)

    def _work(self, work: Callable[[], Any]) -> None:
        try:
            with self.turns.turn():
                work()
        finally:
            with self._changed:
                self._workers -= 1
                self._changed.notify_all()

    def finish(self) -> None:
        """Wait for all threads that draft; this one has its turn."""
        self._wait_until(lambda: not self._workers)

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        with self.turns.aside(), self._changed:
            self._changed.wait_for(condition)
