"""What is known of a verify once it is over: one plain record for all who ask."""

from __future__ import annotations

from dataclasses import dataclass


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
