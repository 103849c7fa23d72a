"""Where the end of a text has stood before: the match finder of an n-gram drafter.

Every position points back to the one before it that ends in the same few tokens, so
that a search walks from candidate to candidate, the latest first, as the match finders
of LZ77 compressors do (Ziv and Lempel 1977; the hash chains of RFC 1951, section 4).
To add a token, and to search, takes a bounded time, however long the text is.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import cycle, islice, takewhile
from typing import NamedTuple


class Match(NamedTuple):
    """An earlier place that reads like the end of the text.

    Args:
        end: Tokens up to and with that place.
        length: Tokens that are the same, counted backwards.
    """

    end: int
    length: int


class Matcher:
    """A growing text, and where the end of it, or of a path behind it, was before.

    Args:
        shortest: Tokens that must be the same, n >= 1.
        longest: Tokens that are compared; a match of so many is taken at once.
        tries: Candidates that are looked at.
    """

    def __init__(self, shortest: int, longest: int, tries: int) -> None:
        self._shortest = shortest
        self._longest = longest
        self._tries = tries
        self.tokens: list[int] = []
        self._latest: dict[tuple[int, ...], int] = {}  # n tokens -> their latest end
        self._before = array("q")  # end i -> the one before it, 0 for none

    def add(self, tokens: Iterable[int]) -> None:
        """Go on with these tokens."""
        for token in tokens:
            self.tokens.append(token)
            gram = tuple(self.tokens[-self._shortest :])
            self._before.append(self._latest.get(gram, 0))
            self._latest[gram] = len(self.tokens)

    def drop(self, n: int) -> None:
        """Take back the last n tokens."""
        for _ in range(n):
            gram = tuple(self.tokens[-self._shortest :])
            before = self._before.pop()
            if before:
                self._latest[gram] = before
            else:
                del self._latest[gram]
            self.tokens.pop()

    def match(self, path: Sequence[int]) -> Match | None:
        """The longest match, among the latest ones, of the text's end and a path.

        The latest wins among equally long ones.
        """
        end = [*self.tokens[-self._longest :], *path][-self._longest :]
        if len(end) < self._shortest:
            return None
        best: Match | None = None
        place = self._latest.get(tuple(end[-self._shortest :]), 0)
        for _ in range(self._tries):
            if not place:
                break
            length = self._length(place, end)
            if best is None or length > best.length:
                best = Match(place, length)
            if length == len(end):
                break
            place = self._before[place - 1]
        return best

    def _length(self, place: int, end: Sequence[int]) -> int:
        there = self.tokens[max(place - len(end), 0) : place]
        pairs = zip(reversed(there), reversed(end), strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def following(self, match: Match, path: Sequence[int], k: int) -> list[int]:
        """The k tokens behind a match, which may run into what they make themselves."""
        text = (*self.tokens[match.end : match.end + k], *path)
        return list(islice(cycle(text), k))
