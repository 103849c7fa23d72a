"""The verdict on one prompt: identical, near-tie, or bug. Numbers in, a word out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..gaps import Gap

IDENTICAL = "identical"
NEAR_TIE = "near-tie"
BUG = "bug"
# How far log-probabilities may be off, in units of the most that rounding was seen to
# move them. If positions are alike, the chance that one more of them passes the largest
# of n is 1 / (n + 1); twice the largest leaves room for those that are less alike.
ROOM = 2.0


@dataclass(frozen=True)
class Difference:
    """The first token that is not stock's.

    Args:
        position: Of that token in the output, from 0.
        stock, ours: The two tokens.
        best: Stock's two likeliest tokens there, and the gap between them.
        gap: Between stock's log-probabilities of its token and of ours.
        moved: The most that a log-probability there differs from stock's.
        drawn: Whether our token is what stock's sampler makes of our log-probabilities,
            with the random state that stock had there.
    """

    position: int
    stock: int
    ours: int
    best: Gap
    gap: float
    moved: float
    drawn: bool


@dataclass(frozen=True)
class Comparison:
    """One prompt, decoded twice.

    Args:
        prompt: Which, from 0.
        tokens: That were compared, the one that differs included.
        moved: The most that a log-probability differs from stock's, up to the first
            token that differs.
        rounding: The most that rounding was seen to move one: between one-token
            forwards and wider ones over stock's own text, without drafts; None if it
            was not looked at, since nothing moved.
        difference: None if all tokens are the same.
    """

    prompt: int
    tokens: int
    moved: float
    rounding: float | None = None
    difference: Difference | None = None

    @property
    def verdict(self) -> str:
        """`IDENTICAL`, `NEAR_TIE` or `BUG`."""
        rounding = self.rounding or 0.0
        if self.difference is None:
            # Where nothing rounds, nothing may move, whether it has shown or not.
            return IDENTICAL if self.moved == 0 or rounding > 0 else BUG
        explained = self.difference.moved <= ROOM * rounding
        return NEAR_TIE if self.difference.drawn and explained else BUG

    @property
    def reason(self) -> str:
        """Why it is no near-tie, for people; empty if it is one, or identical."""
        if self.verdict != BUG:
            return ""
        found = self.difference
        if found is not None and not found.drawn:
            return "our token is not the choice of our own log-probabilities"
        moved = self.moved if found is None else found.moved
        return (
            f"log-probabilities differ from stock's by {moved:.3g}, and rounding moves "
            f"them by at most {self.rounding or 0:.3g} here"
        )

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        found = self.difference
        difference = found and {**vars(found), "best": found.best._asdict()}
        return {**vars(self), "difference": difference, "verdict": self.verdict}


def exit_code(comparisons: list[Comparison], exact: bool) -> int:
    """0 if all is as promised, else 1.

    Args:
        comparisons: At least one.
        exact: Whether the same tokens are promised, near-ties included.
    """
    allowed = {IDENTICAL} if exact else {IDENTICAL, NEAR_TIE}
    return int(any(found.verdict not in allowed for found in comparisons))
