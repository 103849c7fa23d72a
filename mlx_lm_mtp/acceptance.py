"""How often a draft is accepted, position by position, as a text goes on.

Numbers in, numbers out: nothing here knows of a model, a device or a clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from .costs import SILENT, Costs, finite

# What the acceptance at a position may be, and how likely each is at first: it is for a
# drafter that was made for the model.
LEVELS = (0.01, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
_GUESS = [(1 + 0.2 * i) / 22 for i in range(len(LEVELS))]
_PRIOR = 20.0  # drafts that this counts as, when all texts so far are averaged
_FORGETS = 0.998  # what is left of one of these texts' drafts with each further one
_CHANGES = 0.005  # the chance, each round, that the text has changed …
_OTHER_TEXT = 0.5  # … and in another regime, or another generation
_HOPES = 0.3  # standard deviations that are read in favour of a k that may be tried
_FADES = 0.98  # what is left of a case in a plain share with each further one


@dataclass
class Share:
    """How often something happened, of late.

    Attributes:
        hits, of: Cases, the older the less they count.
    """

    hits: float = 0.0
    of: float = 0.0

    def add(self, hit: bool) -> None:
        """Add one case."""
        self.hits = _FADES * self.hits + hit
        self.of = _FADES * self.of + 1

    def fade(self, left: float) -> None:
        """Let what was seen count for less."""
        self.hits *= left
        self.of *= left

    def mean(self, guess: float, left: float = 1.0) -> float:
        """The share, where a guess counts as one case, and what was seen as it says."""
        return (left * self.hits + guess) / (left * self.of + 1)


@dataclass
class Belief:
    """How likely each of `LEVELS` is to be the acceptance at one draft position.

    The forward filter of a hidden Markov model (Rabiner 1989, section III): from one
    round to the next the level stays, or is drawn anew out of what was usual so far.
    So a few drafts tell that a text has changed, and many alike are believed firmly.

    Attributes:
        now: The chance of each level at present; empty where nothing was drafted yet.
        past: The sum of what it was, the older the less it counts.
        usual: Its average over the texts before this one.
    """

    now: list[float] = field(default_factory=list)
    past: list[float] = field(default_factory=lambda: [0.0] * len(LEVELS))
    usual: list[float] = field(default_factory=lambda: _GUESS)

    def add(self, before: Sequence[float], hit: bool) -> None:
        """See one draft, accepted or not, with these chances before."""
        told = [level if hit else 1 - level for level in LEVELS]
        seen = [chance * likely for chance, likely in zip(before, told, strict=True)]
        self.now = [chance / sum(seen) for chance in seen]
        self.past = [
            _FORGETS * before + chance
            for before, chance in zip(self.past, self.now, strict=True)
        ]

    def average(self, guess: Sequence[float]) -> None:
        """A text is over; where it tells little, a guess stands for more."""
        of = sum(self.past) + _PRIOR
        self.usual = [
            (_PRIOR * chance + past) / of
            for chance, past in zip(guess, self.past, strict=True)
        ]

    def mix(self, share: float) -> None:
        """Let the level be drawn anew with this chance."""
        if self.now:
            self.now = _mixed(self.now, self.usual, share)


class Hope(NamedTuple):
    """The acceptance at one position: on average, and if doubts are in its favour."""

    mean: float
    most: float


class Acceptance:
    """For each draft position, how often it is drafted, and how often accepted.

    Both among the rounds that came so far: whose drafts before it were drafted, or
    accepted. Of a position that was never drafted, what is believed of the one before.
    """

    def __init__(self) -> None:
        self.drafted: list[Share] = []
        self.accepted: list[Belief] = []
        self.parked = 0  # rounds since anything was drafted
        self._hopes: list[Hope] = []  # as far as they were asked for since

    @classmethod
    def of(cls, known: Mapping[str, Any]) -> Acceptance:
        """As :meth:`to_dict` has put it down.

        Raises:
            KeyError, TypeError, ValueError: If it has not.
        """
        made = cls()
        made.drafted = [Share(**_floats(share)) for share in known["drafted"]]
        made.accepted = [
            Belief(*(list(map(finite, b[name])) for name in ("now", "past", "usual")))
            for b in known["accepted"]
        ]
        made.parked = int(finite(known["parked"]))
        for belief in made.accepted:
            for chances in (belief.now or belief.usual, belief.past, belief.usual):
                if len(chances) != len(LEVELS) or min(chances) < 0:
                    raise ValueError(f"not a chance for each of {len(LEVELS)} levels")
            if min(sum(belief.now or belief.usual), sum(belief.usual)) <= 0:
                raise ValueError("chances of nothing")
        return made

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "drafted": list(map(asdict, self.drafted)),
            "accepted": list(map(asdict, self.accepted)),
            "parked": self.parked,
        }

    def add(self, asked: int, drafted: int, accepted: int) -> None:
        """Add a round."""
        self._hopes = []
        if asked == 0:
            self.parked += 1
            return
        self.parked = 0
        self._reach(asked)
        for belief in self.accepted:
            belief.mix(_CHANGES)
        for d in range(min(asked, drafted + 1)):
            self.drafted[d].add(d < drafted)
        for d in range(min(drafted, accepted + 1)):
            self.accepted[d].add(self._now(d), d < accepted)

    def doubt(self) -> None:
        """Another text begins, which may be like the last one or like any before."""
        self._hopes = []
        usual = _GUESS
        for belief in self.accepted:
            belief.average(usual)
            belief.mix(_OTHER_TEXT)
            usual = belief.usual
        for share in self.drafted:
            share.fade(_OTHER_TEXT)

    def expected(
        self, most: int, costs: Costs, *, hopeful: bool = False
    ) -> list[tuple[float, float]]:
        """For each k up to `most`, tokens of a round that asks for k drafts, and what
        it costs."""
        self._reach(most)
        made = [(1.0, costs.rounds(0, hopeful=hopeful))]
        tokens, likely = 1.0, 1.0  # the chance that the draft before is kept
        ended, reached, drafted = 0.0, 1.0, 1.0  # … and that it was drafted
        counts = (1 - _CHANGES) ** self.parked if hopeful else 1.0
        for d in range(most):
            drafted = self.drafted[d].mean(drafted, counts)
            likely *= drafted * self._hope(d)[hopeful]
            tokens += likely
            ends = costs.rounds(d or SILENT, hopeful=hopeful)
            ended += reached * (1 - drafted) * ends
            reached *= drafted
            whole = costs.rounds(d + 1, hopeful=hopeful)
            made.append((tokens, ended + reached * whole))
        return made

    def _reach(self, k: int) -> None:
        self.drafted += [Share() for _ in range(k - len(self.drafted))]
        self.accepted += [Belief() for _ in range(k - len(self.accepted))]

    def _now(self, d: int) -> list[float]:
        if d < 0:
            return _GUESS
        return self.accepted[d].now or self._now(d - 1)

    def _hope(self, d: int) -> Hope:
        for at in range(len(self._hopes), d + 1):
            mean, spread = _moments(now := self._now(at))
            later = mean
            if self.parked:  # as it may have become
                forgotten = 1 - (1 - _CHANGES) ** self.parked
                mixed = _mixed(now, self.accepted[at].usual, forgotten)
                later, spread = _moments(mixed)
            self._hopes.append(Hope(mean, min(later + _HOPES * spread, 1.0)))
        return self._hopes[d]


def _mixed(a: Sequence[float], b: Sequence[float], share: float) -> list[float]:
    return [(1 - share) * x + share * y for x, y in zip(a, b, strict=True)]


def _moments(chances: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation of the level."""
    pairs = list(zip(chances, LEVELS, strict=True))
    mean = sum(chance * level for chance, level in pairs)
    square = sum(chance * level * level for chance, level in pairs)
    return mean, math.sqrt(max(square - mean * mean, 0.0))


def _floats(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: finite(value) for name, value in values.items()}
