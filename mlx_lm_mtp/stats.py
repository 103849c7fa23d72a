"""What drafting did in one generation: counts in, rates out."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

from . import gaps
from .gaps import Audited, Gap
from .rounds import Round

NONE = "none"  # in the place of a form, where none holds


@dataclass(frozen=True)
class DraftStats:
    """Counts of one generation at one moment; every rate is derived from them.

    `resident_tokens` and `seconds` are known at the end of a generation.

    A round feeds the pending token and up to k drafts, and keeps the pending token with
    the accepted drafts. A rescue adds a second verify to its round.

    Args:
        drafter: Name of the drafter.
        num_draft_tokens: k as asked for.
        strategy: The options that are not as usual, ``name=value`` each.
        verify: The verify mode, ``batch`` or ``step``.
        rounds: Rounds begun by drafting (or by drafting nothing).
        verifies: Verify forwards, those of rescues included.
        tokens: Tokens yielded.
        drafted: Draft position (from 0) -> rounds that drafted so far.
        accepted: Draft position -> rounds that accepted it.
        rounds_by_k: Drafts asked for -> rounds that asked for so many.
        parked: Reason -> rounds that drafted nothing, although they could.
        accept_histogram: Number of accepted drafts -> rounds that accepted so many.
        origin_drafted, origin_accepted: Drafter -> tokens, where several of them draft
            the tokens of a round.
        rescues: Draft position -> rounds that went on from a second choice there.
        rescue_drafted, rescue_accepted: Tokens that rescues verified and kept, not
            counting the second choices themselves.
        probed: Draft position -> rounds that were probed there.
        covered: (draft position, n) -> of those, how often the target's token was among
            the drafter's best n choices.
        replays: Verifies whose accepted tokens were fed once more, because a cache
            could be neither trimmed nor committed.
        replayed_tokens: Tokens fed in those replays.
        undrafted: Reason -> rounds that could not draft for it.
        unguided: Reason -> rounds whose drafts were the drafter's own first choices,
            although the target samples or processes its logits.
        regime_rounds, regime_drafted, regime_accepted: ``thinking`` or ``answer`` ->
            rounds, drafts and accepted drafts there (by the token that the round
            begins with); empty if the model does not think.
        gaps: Bin -> tokens whose two likeliest were so far apart (see :mod:`.gaps`);
            empty unless the option ``gaps`` is on, as with ``audit`` or a trace.
        smallest_gaps: The smallest of them, the smallest first.
        audited: Those of them that were decoded again by one-token forwards.
        exactness: ``exact`` if verifying had the bits of decoding, as was measured, or
            ``fast`` if near-ties may have been decided otherwise.
        forms: Inputs verified at once, ``4`` or ``2x4`` for two paths -> the form that
            has the bits of decoding, or ``none``; as far as they were asked for.
        recurrence: What computed the gated-delta layers, ``stock`` or ``CUDA kernel``;
            empty if there are none.
        capture: How their states were taken back in the latest verify of a new width,
            ``states`` or ``replay``; empty if nothing was verified.
        capture_fault: Why ``states`` could not be used, if they were wanted.
        resident_tokens: Tokens that the target's caches hold; where none of them
            counts (recurrent layers alone), those of this generation.
        unseen_tokens: Of those, how many from an earlier call the drafter never saw.
        seconds: From the first call of the generator to its end, prefill included
            (and whatever the caller does between two tokens).
        host_seconds: Stage -> seconds that the host was at it. What the device takes
            for all of them is in ``accept``, where the host waits for the tokens.
        profile: Stage -> seconds, if the option ``profile`` is on: each stage is then
            waited for, and ``host_seconds`` is empty.
    """

    drafter: str = ""
    num_draft_tokens: int = 0
    strategy: tuple[str, ...] = ()
    verify: str = "batch"
    rounds: int = 0
    verifies: int = 0
    tokens: int = 0
    drafted: Counter[int] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)
    rounds_by_k: Counter[int] = field(default_factory=Counter)
    parked: Counter[str] = field(default_factory=Counter)
    accept_histogram: Counter[int] = field(default_factory=Counter)
    origin_drafted: Counter[str] = field(default_factory=Counter)
    origin_accepted: Counter[str] = field(default_factory=Counter)
    rescues: Counter[int] = field(default_factory=Counter)
    rescue_drafted: int = 0
    rescue_accepted: int = 0
    probed: Counter[int] = field(default_factory=Counter)
    covered: Counter[tuple[int, int]] = field(default_factory=Counter)
    replays: int = 0
    replayed_tokens: int = 0
    undrafted: Counter[str] = field(default_factory=Counter)
    unguided: Counter[str] = field(default_factory=Counter)
    regime_rounds: Counter[str] = field(default_factory=Counter)
    regime_drafted: Counter[str] = field(default_factory=Counter)
    regime_accepted: Counter[str] = field(default_factory=Counter)
    gaps: Counter[int] = field(default_factory=Counter)
    smallest_gaps: tuple[Gap, ...] = ()
    audited: tuple[Audited, ...] = ()
    exactness: str = "exact"
    forms: dict[str, str] = field(default_factory=dict)
    recurrence: str = ""
    capture: str = ""
    capture_fault: str = ""
    resident_tokens: int = 0
    unseen_tokens: int = 0
    seconds: float = 0.0
    host_seconds: Counter[str] = field(default_factory=Counter)
    profile: Counter[str] = field(default_factory=Counter)

    # --- rates ------------------------------------------------------------------------

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
        """Tokens a round: accepted ones, and the bonus or recovered token; 1.0 at
        least."""
        return max(1.0, _ratio(self.tokens, self.rounds))

    @property
    def verifies_per_token(self) -> float:
        """Verify forwards / tokens; plain decoding needs 1.0."""
        return _ratio(self.verifies, self.tokens)

    @property
    def direct_commits(self) -> int:
        """Verifies that needed no second forward."""
        return self.verifies - self.replays

    @property
    def share_by_k(self) -> list[float]:
        """For each k from 0 on, the share of rounds that asked for so many drafts."""
        ks = range(1 + max(self.rounds_by_k, default=-1))
        return [_ratio(self.rounds_by_k[k], self.rounds) for k in ks]

    @property
    def acceptance_by_regime(self) -> dict[str, float]:
        """Accepted / drafted while thinking and while answering, where it did both
        or may have."""
        return {
            regime: _ratio(self.regime_accepted[regime], self.regime_drafted[regime])
            for regime in sorted(self.regime_rounds, reverse=True)
        }

    @property
    def acceptance_by_origin(self) -> dict[str, float]:
        """Accepted / drafted of each of the drafters that draft together."""
        return {
            origin: _ratio(self.origin_accepted[origin], drafted)
            for origin, drafted in self.origin_drafted.items()
        }

    @property
    def coverage(self) -> list[list[float]]:
        """For each draft position, how often the target's token was among the best 1,
        2, … choices, whether or not the drafts before were right."""
        best = range(1, 1 + max((n for _, n in self.covered), default=0))
        return [
            [_ratio(self.covered[d, n], self.probed[d]) for n in best]
            for d in sorted(self.probed)
        ]

    @property
    def audit_differences(self) -> int:
        """How many of the audited tokens plain decoding would have chosen otherwise."""
        return sum(found.differs for found in self.audited)

    @property
    def tokens_per_second(self) -> float:
        """Over the whole generation."""
        return _ratio(self.tokens, self.seconds)

    @property
    def tokens_per_second_without_replay(self) -> float:
        """What the speed would be if replays took no time; needs a profile."""
        return _ratio(self.tokens, self.seconds - self.profile["replay"])

    # --- for people and for programs --------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Counts and rates as JSON has them; a histogram is a list from 0 on."""
        counts = {f.name: _plain(getattr(self, f.name)) for f in fields(self)}
        named = {name: dict(getattr(self, name)) for name in _NAMED}
        rates = {name: getattr(self, name) for name in _RATES}
        del counts["covered"]  # is in the rates, as `coverage`
        counts["gaps"] = {gaps.bin_name(i): n for i, n in sorted(self.gaps.items())}
        return counts | named | rates

    def summary(self) -> str:
        """One line for people, as printed under the stock statistics."""
        head = ", ".join(
            [f"Draft: {self.drafter}", f"k={self.num_draft_tokens}", *self.strategy]
        )
        if not self.drafted:
            return f"{head}, nothing drafted{self._why()}"
        positions = " / ".join(f"{r:.1%}" for r in self.acceptance_per_position)
        return (
            f"{head}, {self.mean_acceptance_length:.2f} tokens a round, "
            f"{self.acceptance_rate:.1%} accepted (by position: {positions})"
            f"{self._depths()}{self._origins()}{self._regimes()}{self._rescues()}"
            f"{self._replays()}{self._why()}"
        )

    def tables(self) -> list[str]:
        """The probe, the gaps and the profile, for people, if there are any."""
        found = []
        if self.probed:
            found.append(table("position", self._probe_rows()))
        if self.gaps:
            found.append(table("gap", self._gap_rows()))
            found.append(table("smallest gaps", self._smallest_rows()))
        if self.profile:
            found.append(table("stage", self._profile_rows()))
        return found

    def _probe_rows(self) -> list[tuple[str, ...]]:
        rows = [("", *(f"top {n + 1}" for n in range(len(self.coverage[0]))), "rounds")]
        for d, rates in enumerate(self.coverage):
            rows.append((str(d + 1), *(f"{r:.1%}" for r in rates), str(self.probed[d])))
        return rows

    def _gap_rows(self) -> list[tuple[str, ...]]:
        rows, tokens = [("", "tokens", "share")], self.gaps.total()
        for i, n in sorted(self.gaps.items()):
            rows.append((gaps.bin_name(i), str(n), f"{_ratio(n, tokens):.1%}"))
        return [*rows]

    def _smallest_rows(self) -> list[tuple[str, ...]]:
        audited = {found.gap: found for found in self.audited}
        head = ("", "position", "best", "second")
        rows: list[tuple[str, ...]] = [(*head, "decoded again") if audited else head]
        for gap in self.smallest_gaps:
            row = (f"{gap.gap:.3g}", *map(str, gap[1:]))
            if audited:
                again = audited.get(gap)
                row += ("" if again is None else _again(again),)
            rows.append(row)
        return rows

    def _profile_rows(self) -> list[tuple[str, ...]]:
        rows = [("", "seconds", "share")]
        for stage, seconds in self.profile.items():
            rows.append(
                (stage, f"{seconds:.3f}", f"{_ratio(seconds, self.seconds):.1%}")
            )
        rows.append(("all, with prefill", f"{self.seconds:.3f}", "100.0%"))
        rows.append(("tokens per second", f"{self.tokens_per_second:.1f}", ""))
        without = self.tokens_per_second_without_replay
        rows.append(("… without replay", f"{without:.1f}", ""))
        return rows

    def _depths(self) -> str:
        """How many tokens were drafted, if it was not always k."""
        shares = {k: share for k, share in enumerate(self.share_by_k) if share}
        if len(shares) < 2 or not self.parked:
            return ""
        return ", k in rounds: " + ", ".join(f"{k} {s:.0%}" for k, s in shares.items())

    def _origins(self) -> str:
        rates = self.acceptance_by_origin.items()
        return "".join(
            f", {rate:.1%} of {self.origin_drafted[origin]} by {origin}"
            for origin, rate in rates
        )

    def _regimes(self) -> str:
        rates = self.acceptance_by_regime.items()
        return "".join(f", {rate:.1%} in its {regime}" for regime, rate in rates)

    def _rescues(self) -> str:
        if not self.rescues:
            return ""
        where = ", ".join(f"{n} at {d + 1}" for d, n in sorted(self.rescues.items()))
        return f", rescues by position: {where}"

    def _replays(self) -> str:
        if not self.replays:
            return ""
        return f", {self.replays} replays ({self.replayed_tokens} tokens)"

    def _why(self) -> str:
        reasons = [f"{n} rounds without drafts: {r}" for r, n in self.undrafted.items()]
        reasons += [f"{n} rounds parked: {r}" for r, n in self.parked.items()]
        for reason, n in self.unguided.items():
            reasons.append(
                f"{n} rounds drafted by its own first choices, since {reason}"
            )
        reasons += self._inexact()
        if self.capture_fault:
            reasons.append(f"states are replayed, for {self.capture_fault}")
        if self.unseen_tokens:
            reasons.append(
                f"the drafter has not seen {self.unseen_tokens} cached tokens"
            )
        return "".join(f"; {reason}" for reason in reasons)

    def _inexact(self) -> list[str]:
        """What is not plain about how verifying was computed."""
        if self.exactness == "fast":
            return ["verified fast, so near-ties may be decided otherwise"]
        unusual = {f for f in self.forms.values() if f not in ("batched", "none")}
        return [f"verified exactly, with {form}" for form in sorted(unusual)]


class Tally:
    """Counts while a generation runs; `stats` is what it has come to so far.

    Everything that can be read from :class:`DraftStats` can be read from a tally.

    Args:
        known: Fields of :class:`DraftStats` that are known beforehand.
    """

    def __init__(self, **known: Any) -> None:
        self._values: dict[str, Any] = vars(DraftStats(**known))
        self._stats: DraftStats | None = None  # of these values, if it was asked for

    @property
    def stats(self) -> DraftStats:
        """The counts now; they do not change any more."""
        if self._stats is None:
            values = {name: copy.copy(value) for name, value in self._values.items()}
            self._stats = DraftStats(**values)
        return self._stats

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # copying looks for these before there are values
            raise AttributeError(name)
        return getattr(self.stats, name)

    def note(self, **known: Any) -> None:
        """Put fields of :class:`DraftStats` to these values."""
        self._changed().update(vars(DraftStats(**(self._values | known))))

    def note_form(self, paths: int, width: int, form: str) -> None:
        """Put down the form in which so many inputs have the bits of decoding."""
        rows = f"{paths}x{width}" if paths > 1 else f"{width}"
        self._changed()["forms"][rows] = form

    def time(self, stage: str, seconds: float) -> None:
        """Add seconds to a stage of the profile."""
        self._changed()["profile"][stage] += seconds

    def time_host(self, stage: str, seconds: float) -> None:
        """Add seconds of the host to a stage."""
        self._changed()["host_seconds"][stage] += seconds

    def count(self, verified: Round, keep: int = gaps.SHOWN) -> None:
        """Add what one verify came to.

        Args:
            verified: That verify.
            keep: Smallest gaps to keep.
        """
        if found := gaps.gaps_of(verified, self._values["tokens"]):
            values = self._changed()
            values["gaps"].update(gaps.histogram(gap.gap for gap in found))
            known = values["smallest_gaps"]
            values["smallest_gaps"] = gaps.smallest([*known, *found], keep)
        if verified.rescue is None:
            self._count(verified)
        else:
            self._count_rescue(verified, verified.rescue)

    def _count(self, begun: Round) -> None:
        drafted, accepted = begun.drafted, begun.accepted
        self._add(rounds=1, verifies=1, tokens=1 + accepted)
        values = self._changed()
        if begun.regime:
            values["regime_rounds"][begun.regime] += 1
            values["regime_drafted"][begun.regime] += drafted
            values["regime_accepted"][begun.regime] += accepted
        if begun.undrafted:
            values["undrafted"][begun.undrafted] += 1
        if begun.parked:
            values["parked"][begun.parked] += 1
        values["rounds_by_k"][begun.k] += 1
        if begun.unguided:
            values["unguided"][begun.unguided] += 1
        if drafted:
            values["origin_drafted"].update(begun.origins[:drafted])
            values["origin_accepted"].update(begun.origins[:accepted])
            values["drafted"].update(range(drafted))
            values["accepted"].update(range(accepted))
        values["accept_histogram"][accepted] += 1
        for position, (choices, token) in enumerate(begun.probed):
            values["probed"][position] += 1
            for n in range(1, len(choices) + 1):
                values["covered"][position, n] += token in choices[:n]

    def _count_rescue(self, second: Round, position: int) -> None:
        self._add(verifies=1, tokens=1 + second.accepted)
        self._add(rescue_drafted=second.drafted, rescue_accepted=second.accepted)
        self._changed()["rescues"][position] += 1

    def count_replay(self, tokens: int) -> None:
        """Add a verify whose kept tokens were fed once more."""
        self._add(replays=1, replayed_tokens=tokens)

    def _add(self, **counts: int) -> None:
        for name, n in counts.items():
            self._changed()[name] += n

    def _changed(self) -> dict[str, Any]:
        """The values, about to be changed."""
        self._stats = None
        return self._values


_NAMED = (
    "undrafted",
    "parked",
    "unguided",
    "origin_drafted",
    "origin_accepted",
    "regime_rounds",
    "regime_drafted",
    "regime_accepted",
    "host_seconds",
    "profile",
)
_RATES = (
    "acceptance_rate",
    "acceptance_per_position",
    "acceptance_by_regime",
    "acceptance_by_origin",
    "mean_acceptance_length",
    "verifies_per_token",
    "direct_commits",
    "coverage",
    "audit_differences",
    "share_by_k",
    "tokens_per_second",
    "tokens_per_second_without_replay",
)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _plain(value: Any) -> Any:
    if isinstance(value, Gap | Audited):
        return {name: _plain(item) for name, item in value._asdict().items()}
    if isinstance(value, Counter):
        last = max((i for i in value if isinstance(i, int)), default=-1)
        return [value[i] for i in range(last + 1)]
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def _again(found: Audited) -> str:
    """What decoding a token again has shown, for people."""
    return f"{found.best}, gap {found.plain:.3g}{' (differs)' * found.differs}"


def table(corner: str, rows: list[tuple[str, ...]]) -> str:
    """Rows of cells, the first of them the head, in columns."""
    rows = [(corner, *rows[0][1:]), *rows[1:]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
