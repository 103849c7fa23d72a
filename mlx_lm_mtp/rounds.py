"""What is known of a verify once it is over: one plain record for all who ask."""

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
    """One verify: what was asked for, what was fed, and what was kept of it.

    Most rounds are one of these. A rescue adds a second one to its round, which has a
    `rescue`.

    Args:
        k: Drafts that were asked for.
        drafted: Drafts that were fed. Of a verify among whose tokens the caller has
            stopped, those that were accepted until then.
        accepted: Of these, how many were kept: the tokens are one more.
        regime: Where in the text it began, as :mod:`.regime` has it.
        undrafted: Why nothing could be drafted, although it was wanted; or ``""``.
        parked: Why nothing was drafted, although it could be; or ``""``.
        unguided: Why drafts were chosen otherwise than the target's tokens, or ``""``.
        origins: For each draft who drafted it; empty if that is always the same.
        probed: For each draft position the drafter's choices there, the best first,
            and the target's token; empty without the option `probe`.
        rescue: The draft position that the round went on from by a second choice; None
            if it began here.
        stopped: Whether the caller stopped here, or the text ended.
        seconds: From when the choices before this verify were known until its own
            were, without what the caller did meanwhile; None where nothing was
            verified before.

    The rest is known only if somebody looks at tokens (a trace, or gaps):

    Args:
        token: The pending token, input 0.
        paths: The drafts, one or more paths.
        confidences: The drafter's, of the first path; empty if it gives none.
        targets: What the target chose behind each input, as far as it has.
        nearest: Behind each input, along the path that was kept.
        first: At the pending token, chosen in the verify before; None if not known.
    """

    k: int = 0
    drafted: int = 0
    accepted: int = 0
    regime: str = ""
    undrafted: str = ""
    parked: str = ""
    unguided: str = ""
    origins: tuple[str, ...] = ()
    probed: tuple[tuple[tuple[int, ...], int], ...] = ()
    rescue: int | None = None
    stopped: bool = False
    seconds: float | None = None

    token: int = 0
    paths: tuple[tuple[int, ...], ...] = ()
    confidences: tuple[float, ...] = ()
    targets: tuple[int, ...] = ()
    nearest: tuple[Nearest, ...] = ()
    first: Nearest | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        """What it yielded: the pending token, and the accepted drafts."""
        return (self.token, *self.targets[: self.accepted])

    @property
    def yielded(self) -> tuple[Nearest | None, ...]:
        """How near to a tie each of these was."""
        return (self.first, *self.nearest[: self.accepted])
