"""Whether the text is inside its thinking part, token by token.

Inside and outside `<think>` a model writes differently, and so do drafts succeed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

THINKING = "thinking"
ANSWER = "answer"


class Marks(NamedTuple):
    """The tokens that begin and end thinking, as a tokenizer of mlx-lm has them."""

    start: Sequence[int]
    end: Sequence[int]


class Regime:
    """Follows a text.

    Args:
        marks: Where thinking begins and ends; None for a model that does not think.
    """

    def __init__(self, marks: Marks | None) -> None:
        self._marks = marks
        self._last: list[int] = []  # the last tokens, as many as the longer mark has
        self._now = ANSWER

    @property
    def known(self) -> bool:
        """Whether there is more than one regime."""
        return self._marks is not None

    @property
    def now(self) -> str:
        """The regime behind the tokens so far: `THINKING`, `ANSWER`, or ``""``."""
        return self._now if self.known else ""

    def follow(self, tokens: Iterable[int]) -> None:
        """Go on by these tokens."""
        if self._marks is None:
            return
        longest = max(map(len, self._marks))
        for token in tokens:
            self._last = [*self._last, token][-longest:]
            if self._ends_with(self._marks.start):
                self._now = THINKING
            elif self._ends_with(self._marks.end):
                self._now = ANSWER

    def _ends_with(self, mark: Sequence[int]) -> bool:
        return bool(mark) and self._last[-len(mark) :] == list(mark)
