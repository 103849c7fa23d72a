"""What one verify has come to, as plain numbers: what all who look at rounds are told.

Most rounds are one verify; a rescue adds a second one. Statistics, gaps and traces take
the same record, so that a trace can be fed to them again without a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Nearest(NamedTuple):
    """The target's two likeliest tokens at one position.

    Args:
        gap: How far their log-probabilities are apart, in nats; 0 is a tie.
        best, second: The tokens, of a tie the lower id first.
    """

    gap: float
    best: int
    second: int


@dataclass(frozen=True)
class Round:
    """One verify, once it is known what was kept of it.

    The numbers of the first group are always there, the others only if somebody wants
    them (a trace, or gaps).

    Args:
        drafted: Drafts that were looked at: all, unless the caller stopped before.
        accepted: How many of them were kept.
        regime: ``thinking`` or ``answer`` at its first token; empty if there is none.
        origins: For each draft who drafted it, where that differs.
        rescue: The position from whose second choice it goes on; None for the first
            verify of a round.
        undrafted: Why nothing could be drafted, if something was to be.
        unguided: Why drafts were not chosen as the target chooses.
        choices: For each draft the drafter's best choices, if they are probed.
        targets: What the target chose behind each input, as far as it has.

        k: Drafts that were asked for.
        token: The pending token, input 0.
        paths: The drafts, one or more paths.
        confidences: The drafter's, of the first path; empty if it gives none.
        nearest: Behind each input, along the path that was kept.
        first: At the pending token, chosen in the verify before; None if not known.
        stopped: Whether it was broken off: by the caller, or the end of the text.
        seconds: Of the host, without the caller's; what the device takes is in it
            where the host waits.
    """

    drafted: int
    accepted: int
    regime: str = ""
    origins: tuple[str, ...] = ()
    rescue: int | None = None
    undrafted: str = ""
    unguided: str = ""
    choices: tuple[tuple[int, ...], ...] = ()
    targets: tuple[int, ...] = ()

    k: int = 0
    token: int = 0
    paths: tuple[tuple[int, ...], ...] = ()
    confidences: tuple[float, ...] = ()
    nearest: tuple[Nearest, ...] = ()
    first: Nearest | None = None
    stopped: bool = False
    seconds: float = 0.0

    @property
    def tokens(self) -> tuple[int, ...]:
        """What it yielded: the pending token, and the accepted drafts."""
        return (self.token, *self.targets[: self.accepted])

    @property
    def yielded(self) -> tuple[Nearest | None, ...]:
        """How near to a tie each of these was."""
        return (self.first, *self.nearest[: self.accepted])
