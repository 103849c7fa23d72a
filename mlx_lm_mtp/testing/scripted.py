"""Drafters that follow a script, for those who decide what is accepted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from ..drafters.base import CHAIN, Branch, Proposal, Wanted
from .models import VOCAB


def right_where(pattern: str) -> Callable[[int], bool]:
    """Which drafts are right: ``110`` is two right, one wrong, over and over."""
    return lambda i: pattern[i % len(pattern)] == "1"


def fewest_rounds(right: Callable[[int], bool], k: int, n: int) -> int:
    """Rounds needed for n tokens when draft i is right(i): each yields the pending
    token and the right drafts up to the first wrong one."""
    done = rounds = 0
    while done < n:
        done, last, rounds = done + 1, min(done + k + 1, n), rounds + 1
        while done < last and right(done):
            done += 1
    return rounds


class Scripted:
    """Knows what the target will say, and errs where it is told to.

    Args:
        truth: All tokens that the target will yield, in order.
        right: Index of a token -> whether it is drafted correctly.
        excess: How many tokens more than asked for are proposed.
        vocabulary: The number of tokens that there are.

    Attributes:
        prompt, seen: The tokens that it was shown by `prefill` and by `observe`.
    """

    name = "scripted"
    needs_hidden = False

    def __init__(
        self,
        truth: Sequence[int],
        right: Callable[[int], bool] = lambda i: True,
        excess: int = 0,
        *,
        vocabulary: int = VOCAB,
    ) -> None:
        self.truth = list(truth)
        self.right = right
        self.excess = excess
        self.vocabulary = vocabulary
        self.begin()

    def begin(self) -> None:
        """Start at the beginning of the truth."""
        self.prompt: list[int] = []
        self.seen: list[int] = []

    def prefill(self, tokens: mx.array, hidden: mx.array | None) -> None:
        """Note `(1, T)` tokens of the prompt down."""
        assert hidden is None
        self.prompt += tokens[0].tolist()

    def draft(self, token: mx.array, k: int) -> Proposal:
        """What the script says behind the pending token."""
        start = len(self.seen) + 1
        return Proposal.of(
            [self._say(i) for i in range(start, start + k + self.excess)]
        )

    def observe(self, tokens: mx.array, hidden: mx.array | None) -> None:
        """Note the `(1, n)` tokens of a round down."""
        self.seen += tokens[0].tolist()

    def _say(self, i: int) -> int:
        if i < len(self.truth) and self.right(i):
            return self.truth[i]
        said = self.truth[i] if i < len(self.truth) else 0
        return (said + 1) % self.vocabulary


KINDS = ("right", "wrong", "same", "short", "astray")


class Branching(Scripted):
    """A scripted drafter that gives all that a strategy may want, and may lie.

    Args:
        truth, right: As for :class:`Scripted`, of the first path.
        kinds: What its branches are, in turn: ``right``, ``wrong``, the ``same`` as the
            first path, right but ``short``, with nothing behind their first token, or
            ``astray``, with nothing right behind it.
        confidences: What it says of its drafts, in turn.
        obeys: Whether it stops when it is told to.
        vocabulary: The number of tokens that there are.
    """

    gives = frozenset({"confidence", "candidates", "branches"})

    def __init__(
        self,
        truth: Sequence[int],
        right: Callable[[int], bool] = lambda i: True,
        kinds: Sequence[str] = ("right",),
        confidences: Sequence[float] = (1.0,),
        obeys: bool = True,
        *,
        vocabulary: int = VOCAB,
    ) -> None:
        self.kinds = kinds
        self.confidences = confidences
        self.obeys = obeys
        super().__init__(truth, right, vocabulary=vocabulary)

    def draft(self, token: mx.array, k: int, wanted: Wanted = CHAIN) -> Proposal:
        """What the script says, and what is wanted besides."""
        start = len(self.seen) + 1
        says = self._confidences(start, k)
        if wanted.go_on is not None and self.obeys:
            n = 1
            while n < k and wanted.go_on(says[:, n - 1 : n]):
                n += 1
            k = n
        tokens = [self._say(i) for i in range(start, start + k)]
        choices = [[t, self._truth(start + i), 0] for i, t in enumerate(tokens)]
        branches = [
            self._branch(tokens, start, position, self.kinds[j % len(self.kinds)])
            for j, position in enumerate(wanted.branches)
            if position < k
        ]
        return Proposal(
            mx.array([tokens], dtype=mx.uint32),
            confidence=says[:, :k] if wanted.confidence else None,
            candidates=mx.array([choices])[..., : wanted.candidates],
            branches=tuple(branches),
        )

    def _confidences(self, start: int, k: int) -> mx.array:
        n = len(self.confidences)
        return mx.array([[self.confidences[(start + i) % n] for i in range(k)]])

    def _branch(
        self, tokens: list[int], start: int, position: int, kind: str
    ) -> Branch:
        path = [self._truth(i) for i in range(start, start + len(tokens))]
        if kind == "wrong":
            path = [(token + 2) % self.vocabulary for token in path]
        if kind == "same":
            path = tokens
        token, rest = path[position], path[position + 1 :]
        if kind == "short":
            rest = []
        if kind == "astray":
            rest = [(token + 3) % self.vocabulary for token in rest]
        as_array = [mx.array([part], dtype=mx.uint32) for part in ([token], rest)]
        return Branch(position, *as_array)

    def _truth(self, i: int) -> int:
        return self.truth[i] if i < len(self.truth) else 0
