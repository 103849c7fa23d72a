"""What drafting did in one generation: counts in, rates out."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class DraftStats:
    """Counts of one generation; every rate is derived from them.

    A round feeds the pending token and up to k drafts, and keeps the pending
    token with the accepted drafts.

    Args:
        drafter: Name of the drafter.
        num_draft_tokens: k as asked for.
        verify: The verify mode, ``batch`` or ``step``.
        rounds: Verify forwards.
        drafted: Draft position (from 0) -> rounds that drafted so far.
        accepted: Draft position -> rounds that accepted it.
        replays: Rounds whose accepted tokens were fed once more, because a cache
            could be neither trimmed nor committed.
        replayed_tokens: Tokens fed in those replays.
        undrafted: Reason -> rounds that could not draft for it.
        accept_histogram: Number of accepted drafts -> rounds that accepted so many.
    """

    drafter: str = ""
    num_draft_tokens: int = 0
    verify: str = "batch"
    rounds: int = 0
    drafted: Counter[int] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)
    replays: int = 0
    replayed_tokens: int = 0
    undrafted: Counter[str] = field(default_factory=Counter)
    accept_histogram: Counter[int] = field(default_factory=Counter)

    def count(self, drafted: int, accepted: int) -> None:
        """Add one round that drafted and accepted so many tokens."""
        self.rounds += 1
        self.drafted.update(range(drafted))
        self.accepted.update(range(accepted))
        self.accept_histogram[accepted] += 1

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts / drafted tokens; 0.0 when nothing was drafted."""
        return _ratio(self.accepted.total(), self.drafted.total())

    @property
    def acceptance_per_position(self) -> list[float]:
        """For each draft position: accepted there / rounds that drafted it."""
        return [_ratio(self.accepted[d], self.drafted[d]) for d in sorted(self.drafted)]

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / rounds: tokens a round, with the bonus or recovered one."""
        return 1 + _ratio(self.accepted.total(), self.rounds)

    @property
    def direct_commits(self) -> int:
        """Rounds that needed no second forward."""
        return self.rounds - self.replays

    def to_dict(self) -> dict[str, Any]:
        """Counts and rates as JSON has them: histograms are lists from 0 on."""
        return {
            "drafter": self.drafter,
            "num_draft_tokens": self.num_draft_tokens,
            "verify": self.verify,
            "rounds": self.rounds,
            "drafted": self.drafted.total(),
            "accepted": self.accepted.total(),
            "drafted_per_position": _as_list(self.drafted),
            "accepted_per_position": _as_list(self.accepted),
            "accept_histogram": _as_list(self.accept_histogram),
            "acceptance_rate": self.acceptance_rate,
            "acceptance_per_position": self.acceptance_per_position,
            "mean_acceptance_length": self.mean_acceptance_length,
            "direct_commits": self.direct_commits,
            "replays": self.replays,
            "replayed_tokens": self.replayed_tokens,
            "undrafted": dict(self.undrafted),
        }

    def summary(self) -> str:
        """One line for people, as printed under the stock statistics."""
        head = f"Draft: {self.drafter}, k={self.num_draft_tokens}"
        if not self.drafted:
            return f"{head}, nothing drafted{self._why()}"
        positions = " / ".join(f"{r:.1%}" for r in self.acceptance_per_position)
        return (
            f"{head}, {self.mean_acceptance_length:.2f} tokens a round, "
            f"{self.acceptance_rate:.1%} accepted (by position: {positions})"
            f"{self._replays()}{self._why()}"
        )

    def _replays(self) -> str:
        if not self.replays:
            return ""
        return f", {self.replays} rounds replayed ({self.replayed_tokens} tokens)"

    def _why(self) -> str:
        reasons = [f"{n} rounds without drafts: {r}" for r, n in self.undrafted.items()]
        return "".join(f"; {reason}" for reason in reasons)


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _as_list(counts: Counter[int]) -> list[int]:
    return [counts[i] for i in range(max(counts, default=-1) + 1)]
