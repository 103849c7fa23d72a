"""How many tokens to draft in a round: what yields the most tokens a second.

Drafting k tokens yields, on average, ::

    E(k) = 1 + q1 + q1 q2 + … + q1 … qk    tokens in    T(k)    seconds

with qd the share of drafts accepted at position d among those whose predecessors were
(Leviathan et al. 2023, arXiv:2211.17192, section 3.4, where all qd are one), and T(k)
the seconds of a whole round, which drafting, verifying and what overlaps all go into.
Both are estimated while the text is written, and k with the largest E(k) / T(k) is
drafted; 0 is among them, so drafting is *parked* where it does not pay.

A k that is not drafted is not measured. One that looks better than the present one
when doubts are read in its favour is *tried* for a few rounds. What a trial loses is
paid back before the next one begins: a fiftieth of a plain round each round, and half
as much after each trial that has changed nothing. So, after n rounds at the best k, the
loss to trials is at most n / 50 plain rounds, and the one trial that was begun on
credit; the rest of the regret is what the estimates themselves are wrong by.

Numbers in, numbers out: nothing here knows of a model, a device or a clock.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, Protocol

from .rounds import Round

PARKED = "a round with drafts costs more than it saves"
MEASURED = "plain decoding is measured"

_SHARE = 0.02  # of the time, for trials
_GRANT = 2.0  # rounds of plain decoding that trials may lose on credit
_FORGIVES = 50  # rounds, at least, between two texts that cancel its debts
_DARES = 4.0  # … of such rounds, that a trial may lose if all its drafts are wrong
_LEAST_SHARE = _SHARE / 4  # after many that have changed nothing
_TRIAL = 2  # rounds whose seconds count
_RESTS = 8  # rounds after which a parked one is thought over again
_MARGIN = 1.02  # by which another k must be better to be taken

_NEAR = 16  # rounds before one that it is compared with
_ENOUGH = 2  # comparisons behind which a cost is known at all …
_FEW = 25  # … and well
_SPREAD = 0.1  # of the seconds of rounds of one kind, as a part of them
_SLOPE = 0.5  # of a width never tried, against the slope of those that were

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
SILENT = -1  # the drafts of a round whose drafter was asked and had none


class Depth(Protocol):
    """Decides how many tokens are drafted; is told what each verify came to."""

    def choose(self, most: int) -> int:
        """Drafts to ask for, 0 to `most`; the last verify may not be known yet."""

    def take(self, verified: Round) -> None:
        """Learn from a verify."""

    @property
    def parked(self) -> str:
        """Why the last choice was 0, although more could be drafted; or ``""``."""


class Fixed:
    """Always as many as may be drafted."""

    parked = ""

    def choose(self, most: int) -> int:
        """See :class:`Depth`."""
        return most

    def take(self, verified: Round) -> None:
        """See :class:`Depth`."""


class Costs:
    """What a round costs, for each number of drafts that it verifies.

    In rounds of plain decoding, for seconds do not keep: a machine may be twice as fast
    a moment later. So a round is compared with those just before it, of other widths:
    the median of these, each divided by what its width costs, is what a plain round
    takes at present. And a width costs the median of its last few comparisons, which
    no hiccup moves far.

    That depends on the machine, the model and the strategy, not on the text, so it
    outlives a generation.
    """

    def __init__(self) -> None:
        self._known: dict[int, list[float]] = {}  # width -> its last comparisons
        self._recent: list[tuple[int, float]] = []  # widths and seconds
        self._told: dict[tuple[int, bool], float] = {}  # `rounds`, as long as they hold

    @classmethod
    def of(cls, known: Mapping[str, Sequence[float]]) -> Costs:
        """As :meth:`to_dict` has put it down."""
        costs = cls()
        costs._known = {int(w): list(map(float, of_w)) for w, of_w in known.items()}
        return costs

    def to_dict(self) -> dict[str, list[float]]:
        """What outlives a generation, as JSON has it."""
        return {str(width): list(compared) for width, compared in self._known.items()}

    def begin(self) -> None:
        """Another generation begins; its first rounds have none before them."""
        self._recent = []

    def doubt(self) -> None:
        """They were measured some time ago: they are a guess now, and no more."""
        for width in filter(self.measured, list(self._known)):
            self._known[width] = [self._at(width)] * _ENOUGH
        self._told = {}

    def measured(self, width: int) -> bool:
        """Whether rounds of this width are known."""
        return len(self._known.get(width, ())) >= _ENOUGH

    def add(self, width: int, seconds: float) -> None:
        """Add a round."""
        plain = self._plain_round(width)
        self._recent = [*self._recent[1 - _NEAR :], (width, seconds)]
        known = self._known.setdefault(width, [])
        if plain is not None:
            self._known[width] = [*known[1 - _FEW :], seconds / plain]
            self._told = {}
        elif not any(map(self.measured, self._known)):
            known.append(1.0)  # the first width of all, which others compare with
            self._told = {}

    def _plain_round(self, width: int) -> float | None:
        """Seconds, by the rounds before that had other widths; None if few had."""
        others = [
            seconds / self._at(other)
            for other, seconds in self._recent
            if other != width and self._known.get(other)
        ]
        most = 2 * len(others) > len(self._recent)
        return statistics.median(others) if most else None

    @property
    def reach(self) -> int:
        """The widest that may be tried next: wide ones cost most where all is wrong."""
        return 2 * self.widest + 1

    @property
    def widest(self) -> int:
        """The most drafts whose costs are known."""
        return max(self._widths, default=0)

    def rounds(self, width: int, *, hopeful: bool = False) -> float:
        """What a round of this width costs, in rounds of plain decoding.

        One that was never measured lies between those that were; beyond them it is
        taken to cost little, so that it is tried.

        Args:
            width: Drafts, or `SILENT`.
            hopeful: Whether doubts are read in its favour.
        """
        asked = width, hopeful
        if asked not in self._told:
            self._told[asked] = self._rounds(*asked)
        return self._told[asked]

    def _rounds(self, width: int, hopeful: bool) -> float:
        if self.measured(width):
            cost, seen = self._at(width), len(self._known[width])
        else:
            cost, seen = self._between(max(width, 0)), 1
        # A wider round is not cheaper, whatever a few comparisons say.
        narrower = [self._at(w) for w in self._widths if w < width]
        cost = max(cost, *narrower, self._at(0)) / self._at(0)
        return cost * (1 - _SPREAD / math.sqrt(seen) if hopeful else 1)

    def _between(self, width: int) -> float:
        below = max((w for w in self._widths if w <= width), default=0)
        above = min((w for w in self._widths if w > width), default=None)
        here = self._at(below)
        if above is None:
            rise = (here - self._at(0)) / below if below else here
            return here + _SLOPE * rise * (width - below)
        return here + (self._at(above) - here) * (width - below) / (above - below)

    @property
    def _widths(self) -> list[int]:
        return [w for w in self._known if self.measured(w) and w >= 0]

    def _at(self, width: int) -> float:
        known = self._known.get(width)
        return statistics.median_low(known) if known else 1.0


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

    def mean(self, guess: float) -> float:
        """The share, where a guess counts as one case."""
        return (self.hits + guess) / (self.of + 1)


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
        """As :meth:`to_dict` has put it down."""
        made = cls()
        made.drafted = [Share(**_floats(share)) for share in known["drafted"]]
        made.accepted = [
            Belief(*(list(map(float, b[name])) for name in ("now", "past", "usual")))
            for b in known["accepted"]
        ]
        made.parked = int(known["parked"])
        chances = (c for b in made.accepted for c in (b.now, b.past, b.usual) if c)
        if any(len(of_levels) != len(LEVELS) for of_levels in chances):
            raise ValueError(f"not a chance for each of {len(LEVELS)} levels")
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

    def expected(
        self, most: int, costs: Costs, *, hopeful: bool = False
    ) -> list[tuple[float, float]]:
        """For each k up to `most`, tokens of a round that asks for k drafts, and what
        it costs."""
        self._reach(most)
        made = [(1.0, costs.rounds(0, hopeful=hopeful))]
        tokens, likely = 1.0, 1.0  # the chance that the draft before is kept
        ended, reached, drafted = 0.0, 1.0, 1.0  # … and that it was drafted
        for d in range(most):
            drafted = self.drafted[d].mean(drafted)
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


@dataclass
class Known:
    """What one generation leaves to the next of the same model and strategy."""

    costs: Costs = field(default_factory=Costs)
    acceptance: Acceptance = field(default_factory=Acceptance)
    credit: float = _GRANT  # rounds of plain decoding that trials may lose

    @classmethod
    def of(cls, known: Mapping[str, Any]) -> Known:
        """As :meth:`to_dict` has put it down.

        Raises:
            KeyError, TypeError, ValueError: If it has not.
        """
        acceptance = Acceptance.of(known["acceptance"])
        return cls(Costs.of(known["costs"]), acceptance, float(known["credit"]))

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "costs": self.costs.to_dict(),
            "acceptance": self.acceptance.to_dict(),
            "credit": self.credit,
        }

    def begin(self) -> None:
        """Another generation begins, with another text."""
        self.costs.begin()
        self.acceptance.doubt()


class Estimate(NamedTuple):
    """What a round that asks for k drafts is taken to come to.

    Args:
        k: Drafts that are asked for.
        tokens: That it yields, on average.
        rounds: That it costs on average, in rounds of plain decoding.
        measured: Whether rounds of k drafts were; else the cost is a guess.
    """

    k: int
    tokens: float
    rounds: float
    measured: bool

    @property
    def rate(self) -> float:
        """Tokens in the time of a round of plain decoding."""
        return self.tokens / self.rounds


@dataclass
class Trial:
    """Rounds at a k that may be better than the present one."""

    k: int
    rounds: int  # that are still to come


class Throughput:
    """Drafts as many tokens as yield the most tokens a second.

    Args:
        known: From an earlier generation, and for later ones.
    """

    def __init__(self, known: Known | None = None) -> None:
        self._known = Known() if known is None else known
        self._known.begin()
        self._now = 0  # the k in use
        self._trial: Trial | None = None
        self._last: int | None = None  # k of the last verify
        self._rounds = 0  # so far
        self._forgives = 0  # from this round on
        self._regime = ""

        self._share = _SHARE
        self._parked = ""

    @classmethod
    def of(cls, begun: Mapping[str, Any]) -> Throughput:
        """One that has just begun, as :meth:`to_dict` has put it down.

        Raises:
            KeyError, TypeError, ValueError: If it has not.
        """
        made = cls()
        made._known = Known.of(begun)
        made._known.costs.begin()
        return made

    def to_dict(self) -> dict[str, Any]:
        """What it begins with, as JSON has it; to be asked before the first choice."""
        return self._known.to_dict()

    def estimates(self, most: int) -> list[Estimate]:
        """For each k up to `most`, what it is chosen by; none before k = 0 is known."""
        costs, acceptance = self._known.costs, self._known.acceptance
        if not costs.measured(0):
            return []
        expected = enumerate(acceptance.expected(most, costs))
        return [Estimate(k, *of_k, costs.measured(k)) for k, of_k in expected]

    @property
    def parked(self) -> str:
        """See :class:`Depth`."""
        return self._parked

    def choose(self, most: int) -> int:
        """See :class:`Depth`."""
        k = self._choose(most)
        measured = self._trial is not None or not self._known.costs.measured(0)
        why = MEASURED if measured else PARKED
        self._parked = why if k == 0 < most else ""
        return k

    def _choose(self, most: int) -> int:
        if not self._known.costs.measured(0):
            return 0
        if self._trial is not None and self._goes_on(self._trial, most):
            return self._trial.k
        self._trial = None
        if self._now > most:
            return most
        if self._now == 0 and self._known.credit < 0 and self._rounds % _RESTS:
            return 0
        self._now = self._best(most)
        k = self._promising(most)
        if k is None:
            return self._now
        costs = self._known.costs
        rounds = _TRIAL + (not costs.measured(k))
        wider = costs.rounds(k, hopeful=True) - costs.rounds(0)
        if self._known.credit < max(rounds * wider - _DARES, 0.0):
            return self._now
        self._trial = Trial(k, rounds)
        return k

    def _goes_on(self, trial: Trial, most: int) -> bool:
        """Whether a trial is still worth its next round."""
        if trial.k > most:
            return False
        hoped = self._rates(trial.k, hopeful=True)[-1]
        return self._known.credit >= 0 or hoped > _MARGIN * self._rates(self._now)[-1]

    def _best(self, most: int) -> int:
        """The k that yields most, of those between widths that were measured."""
        widest = max(self._known.costs.widest, self._now)
        rates = self._rates(max(min(most, widest), self._now))
        best = rates.index(max(rates))
        return best if rates[best] > _MARGIN * rates[self._now] else self._now

    def _promising(self, most: int) -> int | None:
        """The k that would be best if doubts are read in its favour; None if none."""
        rates = self._rates(min(most, self._known.costs.reach), hopeful=True)
        usual = rates[self._now] = self._rates(self._now)[-1]
        best = rates.index(max(rates))
        return best if rates[best] > _MARGIN * usual else None

    def _rates(self, most: int, *, hopeful: bool = False) -> list[float]:
        """For each k, tokens in the time of a round of plain decoding."""
        known = self._known
        expected = known.acceptance.expected(most, known.costs, hopeful=hopeful)
        return [tokens / rounds for tokens, rounds in expected]

    def take(self, verified: Round) -> None:
        """See :class:`Depth`; what was broken off tells nothing."""
        if verified.stopped or verified.rescue is not None:
            return
        self._rounds += 1
        steady = verified.k == self._last  # else it has work of the round before, too
        self._last = verified.k
        self._follow(verified.regime)
        known, drafted = self._known, verified.drafted
        known.acceptance.add(verified.k, drafted, verified.accepted)
        if verified.seconds is None:
            return
        width = drafted if drafted or not verified.k else SILENT
        if steady:  # the first of a kind may compile
            known.costs.add(width, verified.seconds)
        if known.costs.measured(0):
            self._account(verified)

    def _account(self, verified: Round) -> None:
        """Charge a trial for what it loses; else let it be earned."""
        known, trial = self._known, self._trial
        if trial is None or trial.k != verified.k:
            known.credit = min(known.credit + self._share, _GRANT)
            return
        rate = self._rates(self._now)[-1]
        cost = known.acceptance.expected(trial.k, known.costs)[-1][1]
        known.credit -= cost - (1 + verified.accepted) / rate
        trial.rounds -= 1
        if trial.rounds == 0:
            changed = self._rates(trial.k)[-1] > _MARGIN * rate
            self._share = _SHARE if changed else max(self._share / 2, _LEAST_SHARE)
            known.credit = max(known.credit, 0.0) if changed else known.credit
            self._trial = None

    def _follow(self, regime: str) -> None:
        """Another regime: what was accepted before it says little, so try anew."""
        if regime != self._regime and self._last is not None:
            self._known.acceptance.doubt()
            self._try_anew()
        self._regime = regime

    def _try_anew(self) -> None:
        """Forgive what trials have lost, if that was not done of late."""
        if self._rounds >= self._forgives:
            self._share = _SHARE
            self._known.credit = max(self._known.credit, 0.0)
            self._forgives = self._rounds + _FORGIVES


def _floats(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}
