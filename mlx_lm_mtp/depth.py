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
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, Protocol

from .rounds import Round

PARKED = "a round with drafts costs more than it saves"
MEASURED = "plain decoding is measured"

_SHARE = 0.02  # of the time, for trials
_GRANT = 1.0  # rounds of plain decoding that trials may lose on credit
_FORGIVES = 50  # rounds, at least, between two texts that cancel its debts
_DARES = 4.0  # … of such rounds, that a trial may lose if all its drafts are wrong
_LEAST_SHARE = _SHARE / 4  # after many that have changed nothing
_TRIAL = 2  # rounds whose seconds count
_RESTS = 8  # rounds after which a parked one is thought over again
_MARGIN = 1.02  # by which another k must be better to be taken

_ENOUGH = 2  # rounds behind which the seconds are known at all …
_FEW = 15  # … and well
_CLIP = 2.0  # no round counts as more than so many usual ones, nor as less
_SPREAD = 0.1  # of the seconds of rounds of one kind, as a part of them
_AGES = 0.995  # what is left of a measurement with each round since
_SLOPE = 0.5  # of a width never tried, against the slope of those that were

_PRIOR = 1.5  # rounds that a guess counts as
_GUESS = 0.6  # of the first draft's acceptance; of a later one, that of the one before
_LATE = 0.88  # what is left of one of the last few cases with each further one
_TELLING = 6.0  # of them tell of a change, if they differ from those before by …
_SUDDEN = 2.5  # … so many of their standard deviations
_FADES = 0.98  # what is left of an acceptance with each round that drafts …
_FADES_PARKED = 0.97  # … and that does not
_OTHER_TEXT = 4.0  # cases that are left in another regime, or another generation
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


@dataclass
class Cost:
    """Seconds of a round of one width: the median of the last few, which no hiccup
    moves far.

    Attributes:
        samples: Seconds, the last ones at the end.
        rounds: What they are worth, the older the less.
    """

    samples: list[float] = field(default_factory=list)
    rounds: float = 0.0

    @classmethod
    def of(cls, known: Mapping[str, Any]) -> Cost:
        """As `asdict` has put it down."""
        samples = [float(seconds) for seconds in known["samples"]]
        return cls(samples, float(known["rounds"]))

    @property
    def seconds(self) -> float:
        """Of such a round, if there was one."""
        return statistics.median_low(self.samples)

    def add(self, seconds: float) -> None:
        """Add a round."""
        self.samples = [*self.samples[1 - _FEW :], seconds]
        self.rounds = min(self.rounds + 1, _FEW)

    def scale(self, factor: float) -> None:
        """All of them have become slower or faster."""
        self.samples = [factor * seconds for seconds in self.samples]


class Costs:
    """Seconds of a round, for each number of drafts that it verifies.

    They depend on the machine, the model and the strategy, not on the text, so they
    outlive a generation; what the context adds is taken for common to all widths.
    """

    def __init__(self) -> None:
        self._known: dict[int, Cost] = {}
        # Of this generation's rounds to those of the one before.
        self._factors: list[float] | None = None

    @classmethod
    def of(cls, known: Mapping[str, Mapping[str, Any]]) -> Costs:
        """As :meth:`to_dict` has put it down."""
        costs = cls()
        costs._known = {int(width): Cost.of(cost) for width, cost in known.items()}
        return costs

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """What is known, as JSON has it, but for the generation under way."""
        return {str(width): asdict(cost) for width, cost in self._known.items()}

    def begin(self) -> None:
        """Another generation begins, whose rounds may all be faster or slower."""
        self._factors = [] if self._known else None

    def measured(self, width: int) -> bool:
        """Whether rounds of this width are known."""
        return width in self._known and self._known[width].rounds >= _ENOUGH

    def meet(self, width: int) -> None:
        """A round whose seconds tell nothing; the first of a width compiles."""
        self._known.setdefault(width, Cost())

    def add(self, width: int, seconds: float, *, trial: bool) -> None:
        """Add a round; the first of a width is left out.

        Args:
            width: Drafts that were verified, or `SILENT`.
            seconds: Of the round.
            trial: Whether it tells how this width compares with the others. Otherwise
                it is the one that is in use, whose drift is common to all.
        """
        known = self._known.get(width)
        if known is None:
            self.meet(width)
            return
        if self._factors is not None and known.rounds >= _ENOUGH:
            self._factors.append(seconds / known.seconds)
            if len(self._factors) < 2:
                return
            self._scale(min(self._factors))
            self._factors = None
        settled = known.rounds >= _FEW and not trial
        usual = known.seconds if settled else 0.0
        known.add(seconds)
        for other in self._known.values():
            if other is not known and other.samples:
                other.scale(known.seconds / usual if settled else 1.0)
                other.rounds = min(other.rounds, max(_AGES * other.rounds, _ENOUGH))

    def _scale(self, factor: float) -> None:
        for known in self._known.values():
            known.scale(factor)

    @property
    def reach(self) -> int:
        """The widest that may be tried next: wide ones cost most where all is wrong."""
        return 2 * self.widest + 1

    @property
    def widest(self) -> int:
        """The most drafts whose seconds are known."""
        return max(self._widths, default=0)

    def seconds(self, width: int, *, hopeful: bool = False) -> float:
        """Of a round of this width.

        One that was never measured lies between those that were; beyond them it is
        taken to cost little, so that it is tried.

        Args:
            width: Drafts, or `SILENT`.
            hopeful: Whether doubts are read in its favour.
        """
        if self.measured(width):
            known = self._known[width]
            doubt = _SPREAD / math.sqrt(known.rounds) if hopeful else 0.0
            return known.seconds * (1 - doubt)
        return self._between(max(width, 0)) * (1 - _SPREAD if hopeful else 1)

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
        return self._known[width].seconds if self.measured(width) else 1.0


@dataclass
class Share:
    """How often something happened, of late; a sudden change is believed at once.

    Attributes:
        hits, of: Cases, the older the less they count.
        late_hits, late: The same of the last few.
    """

    hits: float = 0.0
    of: float = 0.0
    late_hits: float = 0.0
    late: float = 0.0

    def add(self, hit: bool) -> bool:
        """Add one case; returns whether it tells of a sudden change."""
        self.hits += hit
        self.of += 1
        self.late_hits = _LATE * self.late_hits + hit
        self.late = _LATE * self.late + 1
        sudden = self._sudden()
        if sudden:
            self.hits, self.of = self.late_hits, self.late
        return sudden

    def _sudden(self) -> bool:
        """Whether the last few cases are unlikely to be like those before."""
        if self.late < _TELLING or self.of < 2 * _TELLING:
            return False
        mean = self.hits / self.of
        variance = max(mean * (1 - mean), 0.05) * (1 - _LATE) / (1 + _LATE)
        return abs(self.late_hits / self.late - mean) > _SUDDEN * math.sqrt(variance)

    def fade(self, left: float) -> None:
        """Let what was seen count for less."""
        self.hits *= left
        self.of *= left

    def mean(self, guess: float) -> float:
        """The share, where a guess counts as some cases."""
        return (self.hits + _PRIOR * guess) / (self.of + _PRIOR)

    def hoped(self, guess: float, left: float) -> float:
        """The most that it may be, if so much is left of what was seen."""
        of = self.of * left + _PRIOR
        mean = (self.hits * left + _PRIOR * guess) / of
        return min(mean + 0.4 / math.sqrt(of), 1.0)


@dataclass
class Acceptance:
    """For each draft position, how often it is drafted, and how often accepted.

    Both among the rounds that came so far: whose drafts before it were drafted, or
    accepted.
    """

    drafted: list[Share] = field(default_factory=list)
    accepted: list[Share] = field(default_factory=list)
    left: float = 1.0  # of what was seen, since nothing was drafted any more

    def add(self, asked: int, drafted: int, accepted: int) -> bool:
        """Add a round; returns whether it tells of a sudden change."""
        if asked == 0:
            self.left *= _FADES_PARKED
            return False
        self._reach(asked)
        for share in (*self.drafted, *self.accepted):
            share.fade(self.left * _FADES)
        self.left = 1.0
        for d in range(min(asked, drafted + 1)):
            self.drafted[d].add(d < drafted)
        reached = range(min(drafted, accepted + 1))
        sudden = [self.accepted[d].add(d < accepted) for d in reached]
        return any(sudden)

    def doubt(self) -> None:
        """Another text begins; what was seen is all there is, and says little."""
        for share in (*self.drafted, *self.accepted):
            share.fade(min(1.0, _OTHER_TEXT / share.of) if share.of else 1.0)

    def expected(
        self, k: int, costs: Costs, *, hopeful: bool = False
    ) -> tuple[float, float]:
        """Tokens and seconds of a round that asks for k drafts."""
        if k == 0:
            return 1.0, costs.seconds(0, hopeful=hopeful)
        self._reach(k)
        accepted, drafted = _GUESS, 1.0
        tokens, likely = 1.0, 1.0  # the chance that the draft before is kept
        seconds, reached = 0.0, 1.0  # … and that it was drafted
        for d in range(k):
            drafted = self.drafted[d].mean(drafted)
            hoped = self.accepted[d].hoped(accepted, self.left)
            accepted = self.accepted[d].mean(accepted)
            likely *= drafted * (hoped if hopeful else accepted)
            tokens += likely
            ends = costs.seconds(d or SILENT, hopeful=hopeful)
            seconds += reached * (1 - drafted) * ends
            reached *= drafted
        return tokens, seconds + reached * costs.seconds(k, hopeful=hopeful)

    def _reach(self, k: int) -> None:
        for shares in (self.drafted, self.accepted):
            shares += [Share() for _ in range(k - len(shares))]


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
        acceptance = known["acceptance"]
        names = ("drafted", "accepted")
        shares = ([Share(**_floats(s)) for s in acceptance[name]] for name in names)
        return cls(
            Costs.of(known["costs"]),
            Acceptance(*shares, left=float(acceptance["left"])),
            float(known["credit"]),
        )

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "costs": self.costs.to_dict(),
            "acceptance": asdict(self.acceptance),
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
        seconds: That it takes, on average.
        measured: Whether rounds of k drafts were; else the seconds are a guess.
    """

    k: int
    tokens: float
    seconds: float
    measured: bool

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


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
        costs, expected = self._known.costs, self._known.acceptance.expected
        if not costs.measured(0):
            return []
        ks = range(most + 1)
        return [Estimate(k, *expected(k, costs), costs.measured(k)) for k in ks]

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
        if self._trial is not None and self._trial.k <= most:
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
        wider = costs.seconds(k, hopeful=True) / costs.seconds(0) - 1
        if self._known.credit < max(rounds * wider - _DARES, 0.0):
            return self._now
        self._trial = Trial(k, rounds)
        return k

    def _best(self, most: int) -> int:
        """The k that yields most, of those between widths that were measured."""
        widest = max(self._known.costs.widest, self._now)
        rates = [self._rate(k) for k in range(min(most, widest) + 1)]
        best = rates.index(max(rates))
        return best if rates[best] > _MARGIN * rates[self._now] else self._now

    def _promising(self, most: int) -> int | None:
        """The k that would be best if doubts are read in its favour; None if none."""
        most = min(most, self._known.costs.reach)
        rates = {k: self._rate(k, hopeful=True) for k in range(most + 1)}
        rates[self._now] = self._rate(self._now)
        best = max(rates, key=rates.__getitem__)
        return best if rates[best] > _MARGIN * rates[self._now] else None

    def _rate(self, k: int, *, hopeful: bool = False) -> float:
        """Tokens a second."""
        known = self._known
        tokens, seconds = known.acceptance.expected(k, known.costs, hopeful=hopeful)
        return tokens / seconds

    def take(self, verified: Round) -> None:
        """See :class:`Depth`; what was broken off tells nothing."""
        if verified.stopped or verified.rescue is not None:
            return
        self._rounds += 1
        steady = verified.k == self._last  # else it has work of the round before
        self._last = verified.k
        self._follow(verified.regime)
        known, drafted = self._known, verified.drafted
        if known.acceptance.add(verified.k, drafted, verified.accepted):
            self._try_anew()
        if verified.seconds is None:
            return
        width = drafted if drafted or not verified.k else SILENT
        trial = self._trial is not None and self._trial.k == verified.k
        if steady:
            known.costs.add(width, verified.seconds, trial=trial)
        else:
            known.costs.meet(width)
        if known.costs.measured(0):
            self._account(verified, verified.seconds, trial=trial)

    def _account(self, verified: Round, seconds: float, *, trial: bool) -> None:
        """Charge a trial for what it loses; else let it be earned."""
        if not trial or self._trial is None:
            self._known.credit = min(self._known.credit + self._share, _GRANT)
            return
        rate = self._rate(self._now)
        usual = self._known.acceptance.expected(verified.k, self._known.costs)[1]
        lost = min(seconds, _CLIP * usual) - (1 + verified.accepted) / rate
        self._known.credit -= lost / self._known.costs.seconds(0)
        self._trial.rounds -= 1
        if self._trial.rounds == 0:
            changed = self._rate(self._trial.k) > _MARGIN * rate
            self._share = _SHARE if changed else max(self._share / 2, _LEAST_SHARE)
            self._known.credit = (
                max(self._known.credit, 0.0) if changed else self._known.credit
            )
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
