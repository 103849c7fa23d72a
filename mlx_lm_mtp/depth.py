"""How many tokens to draft in a round: what yields the most tokens a second.

Drafting k tokens yields, on average, ::

    E(k) = 1 + q1 + q1 q2 + … + q1 … qk    tokens in    T(k)    seconds

with qd the share of drafts accepted at position d among those whose predecessors were
(Leviathan et al. 2023, arXiv:2211.17192, section 3.4, where all qd are one), and T(k)
the seconds of a whole round, which drafting, verifying and what overlaps all go into.
Both are estimated while the text is written (:mod:`.acceptance`, :mod:`.costs`), and k
with the largest E(k) / T(k) is drafted; 0 is among them, so drafting is *parked* where
it does not pay.

A k that is not drafted is not measured. One that looks better than the present one
when doubts are read in its favour is *tried* for a few rounds. What a trial loses is
paid back before the next one begins: a fiftieth of a plain round each round, and half
as much after each trial that has changed nothing. So, after n rounds at the best k, the
loss to trials is at most n / 50 plain rounds, and the one trial that was begun on
credit; the rest of the regret is what the estimates themselves are wrong by.

Numbers in, numbers out: nothing here knows of a model, a device or a clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from .acceptance import Acceptance
from .costs import SILENT, Costs, finite
from .rounds import Round

PARKED = "a round with drafts costs more than it saves"
MEASURED = "plain decoding is measured"

_SHARE = 0.02  # of the time, for trials
_GRANT = 2.0  # rounds of plain decoding that trials may lose on credit
_FORGIVES = 50  # rounds, at least, between two texts that cancel its debts
_DARES = 4.0  # … of such rounds, that a trial may lose if all its drafts are wrong
_LEAST_SHARE = _SHARE / 4  # after many that have changed nothing
_TRIAL = 2  # rounds, and one more at a k that was never measured
_RESTS = 8  # rounds after which a parked one is thought over again
_MARGIN = 1.02  # by which another k must be better to be taken


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
        return cls(Costs.of(known["costs"]), acceptance, finite(known["credit"]))

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
        known: From an earlier generation.

    Attributes:
        known: The same, with what was learnt since, for a later one.
        rounds: So far, but for those that tell nothing.
    """

    def __init__(self, known: Known | None = None) -> None:
        self.known = Known() if known is None else known
        self.known.begin()
        self.rounds = 0
        self._now = 0  # the k in use
        self._trial: Trial | None = None
        self._tried: int | None = None  # k of the latest trial
        self._last: int | None = None  # k of the last verify
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
        made.known = Known.of(begun)
        made.known.costs.begin()
        return made

    def to_dict(self) -> dict[str, Any]:
        """What it begins with, as JSON has it; to be asked before the first choice."""
        return self.known.to_dict()

    def estimates(self, most: int) -> list[Estimate]:
        """For each k up to `most`, what it is chosen by; none before k = 0 is known."""
        costs, acceptance = self.known.costs, self.known.acceptance
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
        measured = self._trial is not None or not self.known.costs.measured(0)
        why = MEASURED if measured else PARKED
        self._parked = why if k == 0 < most else ""
        return k

    def _choose(self, most: int) -> int:
        if not self.known.costs.measured(0):
            return 0
        if self._trial is not None and self._goes_on(self._trial, most):
            return self._trial.k
        self._trial = None
        self._now = min(self._now, most)
        if self._now == 0 and self.known.credit < 0 and self.rounds % _RESTS:
            return 0
        self._now = self._best(most)
        k = self._promising(most)
        if k is None:
            return self._now
        costs = self.known.costs
        rounds = _TRIAL + (not costs.measured(k))
        wider = costs.rounds(k, hopeful=True) - costs.rounds(0)
        if self.known.credit < max(rounds * wider - _DARES, 0.0):
            return self._now
        self._trial, self._tried = Trial(k, rounds), k
        return k

    def _goes_on(self, trial: Trial, most: int) -> bool:
        """Whether a trial is still worth its next round."""
        if trial.k > most:
            return False
        hoped = self._rates(trial.k, hopeful=True)[-1]
        return self.known.credit >= 0 or hoped > _MARGIN * self._rates(self._now)[-1]

    def _best(self, most: int) -> int:
        """The k that yields most, of those between widths that were measured."""
        widest = max(self.known.costs.widest, self._now)
        rates = self._rates(max(min(most, widest), self._now))
        best = rates.index(max(rates))
        return best if rates[best] > _MARGIN * rates[self._now] else self._now

    def _promising(self, most: int) -> int | None:
        """The k that would be best if doubts are read in its favour; None if none."""
        rates = self._rates(min(most, self.known.costs.reach), hopeful=True)
        usual = rates[self._now] = self._rates(self._now)[-1]
        best = rates.index(max(rates))
        return best if rates[best] > _MARGIN * usual else None

    def _rates(self, most: int, *, hopeful: bool = False) -> list[float]:
        """For each k, tokens in the time of a round of plain decoding."""
        known = self.known
        expected = known.acceptance.expected(most, known.costs, hopeful=hopeful)
        return [tokens / rounds for tokens, rounds in expected]

    def take(self, verified: Round) -> None:
        """See :class:`Depth`; what was broken off tells nothing."""
        if verified.stopped or verified.rescue is not None or not verified.seconds:
            return
        self.rounds += 1
        steady = verified.k == self._last  # else it has work of the round before, too
        self._last = verified.k
        self._follow(verified.regime)
        known, drafted = self.known, verified.drafted
        known.acceptance.add(verified.k, drafted, verified.accepted)
        width = drafted if drafted or not verified.k else SILENT
        if steady:  # the first of a kind may compile
            known.costs.add(width, verified.seconds)
        if known.costs.measured(0):
            self._account(verified)

    def _account(self, verified: Round) -> None:
        """Charge a trial for what it loses; else let it be earned."""
        known, trial = self.known, self._trial
        if verified.k == self._now or verified.k != self._tried:
            known.credit = min(known.credit + self._share, _GRANT)
            return
        rate = self._rates(self._now)[-1]
        cost = known.acceptance.expected(verified.k, known.costs)[-1][1]
        known.credit -= cost - (1 + verified.accepted) / rate
        if trial is None:  # one more was drafted ahead before the trial was over
            return
        trial.rounds -= 1
        if trial.rounds == 0:
            changed = self._rates(trial.k)[-1] > _MARGIN * rate
            self._share = _SHARE if changed else max(self._share / 2, _LEAST_SHARE)
            known.credit = max(known.credit, 0.0) if changed else known.credit
            self._trial = None

    def _follow(self, regime: str) -> None:
        """Another regime: what was accepted before it says little, so try anew."""
        if self._regime and regime != self._regime:
            self.known.acceptance.doubt()
            self._try_anew()
        self._regime = regime

    def _try_anew(self) -> None:
        """Forgive what trials have lost, if that was not done of late."""
        if self.rounds >= self._forgives:
            self._share = _SHARE
            self.known.credit = max(self.known.credit, 0.0)
            self._forgives = self.rounds + _FORGIVES
