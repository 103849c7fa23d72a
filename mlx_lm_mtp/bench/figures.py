"""What the measured runs come to: medians, ratios to stock, predicted speed-ups."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from .costs import Costs
from .measure import STOCK, Chosen, Run, Way


def geometric_mean(values: Iterable[float]) -> float:
    """The mean that ratios want."""
    return math.exp(statistics.fmean(map(math.log, values)))


def predicted(
    tokens_a_round: float, stock: float, verify: float, drafts: float
) -> float:
    """The speed-up over stock if a round were nothing but its parts.

    Args:
        tokens_a_round: Tokens that a round yields.
        stock: Seconds of one of stock's tokens.
        verify: Seconds of a verify, v(k + 1).
        drafts: Seconds of the drafts, k c.
    """
    return tokens_a_round * stock / (verify + drafts)


class Spread(NamedTuple):
    """The middle and the ends of what was measured."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """The spread of at least one value."""
        known = list(values)
        return cls(statistics.median(known), min(known), max(known))


@dataclass(frozen=True)
class Row:
    """One way to decode, over all prompts.

    Args:
        k: Drafts a round, or who chooses them, or `STOCK`.
        runs: How many there were.
        speed: Tokens per second of decoding.
        first_token: Seconds to the first token.
        ratio: Speed over stock's: the geometric mean of the prompts' medians.
        ratios: The least and the most of a single run, beside stock's run of the same
            repetition.
        plain: As `ratio`, beside k=0 instead of stock; None if that was not measured.
        predicted: What `ratio` would be if a round were nothing but its parts; None if
            that cannot be told.
        tokens_a_round: Tokens / rounds.
        acceptance: Accepted / drafted; None if nothing was drafted.
        parted: Runs whose tokens were not stock's.
    """

    k: Way
    runs: int
    speed: Spread
    first_token: Spread
    ratio: float = 1.0
    ratios: tuple[float, float] = (1.0, 1.0)
    plain: float | None = None
    predicted: float | None = None
    tokens_a_round: float = 1.0
    acceptance: float | None = None
    parted: int = 0


@dataclass(frozen=True)
class Beside:
    """Speeds over those of something else, prompt by prompt.

    Args:
        mean: The geometric mean of the prompts' medians.
        worst: The least of them.
    """

    mean: float
    worst: float

    @classmethod
    def of(cls, ratios: Iterable[list[float]]) -> Beside:
        """Of the ratios of each prompt."""
        medians = [statistics.median(several) for several in ratios]
        return cls(geometric_mean(medians), min(medians))


@dataclass(frozen=True)
class Choice:
    """What ``depth=throughput`` has chosen, and what that was worth.

    Args:
        k: Whether it was cold or warm.
        share_by_k: For each k from 0 on, the share of rounds that asked for so many.
        stock: Beside stock.
        best: Beside the fixed k that is the best for the prompt.
    """

    k: Chosen
    share_by_k: list[float]
    stock: Beside
    best: Beside


@dataclass
class Results:
    """Everything that was measured, and what is derived from it.

    Args:
        predictable: Whether every round drafts k tokens and verifies them in one
            forward, as the formula takes for granted.
        runs, costs: In the order in which they were measured.
    """

    predictable: bool = True
    runs: list[Run] = field(default_factory=list)
    costs: list[Costs] = field(default_factory=list)

    def add(self, record: Run | Costs) -> None:
        """Take in what was measured next."""
        known: list[Any] = self.runs if isinstance(record, Run) else self.costs
        known.append(record)

    @property
    def ks(self) -> list[Way]:
        """The ways to decode that were measured, stock first."""
        return list(dict.fromkeys(run.k for run in self.runs))

    @property
    def prompts(self) -> list[int]:
        """The prompts that were measured."""
        return sorted({run.prompt for run in self.runs})

    @property
    def parted(self) -> list[Run]:
        """The runs whose tokens are not stock's."""
        return [run for run in self.runs if run.parted is not None]

    @property
    def computed(self) -> str:
        """How gated-delta layers were computed and taken back; empty without any."""
        stats = [run.stats for run in self.runs if run.stats and run.stats.recurrence]
        ways = (f"{s.recurrence}, {s.capture}" for s in stats if s.capture)
        return "; ".join(dict.fromkeys(ways))

    def of(self, k: Way, prompt: int | None = None) -> list[Run]:
        """The runs that were decoded so, of one prompt or of all."""
        prompts = self.prompts if prompt is None else [prompt]
        return [run for run in self.runs if run.k == k and run.prompt in prompts]

    def ratios(self, k: Way, prompt: int, baseline: Way = STOCK) -> list[float]:
        """Speeds over the baseline's, repetition by repetition."""
        base = {run.repetition: run.speed for run in self.of(baseline, prompt)}
        runs = self.of(k, prompt)
        return [r.speed / base[r.repetition] for r in runs if r.repetition in base]

    def best(self, prompt: int) -> int:
        """The fixed k with which one prompt was decoded fastest."""
        ratios = {k: self.ratios(k, prompt) for k in self.ks if isinstance(k, int)}
        known = {
            k: statistics.median(several) for k, several in ratios.items() if several
        }
        return max(known, key=known.__getitem__)

    def tokens_a_round(self, k: Way, prompt: int | None = None) -> float:
        """Tokens / rounds, of one prompt or of all."""
        stats = [run.stats for run in self.of(k, prompt) if run.stats]
        return sum(s.tokens for s in stats) / sum(s.rounds for s in stats)

    def parts(self, prompt: int | None = None) -> tuple[dict[int, float], float | None]:
        """Median seconds v(w) of each w and c, of one prompt or of all."""
        costs = [c for c in self.costs if prompt in (None, c.prompt)]
        if not costs:
            return {}, None
        verify = {
            w: statistics.median(c.verify[w] for c in costs) for w in costs[0].verify
        }
        drafts = [c.draft for c in costs if c.draft is not None]
        return verify, statistics.median(drafts) if drafts else None

    def predicted(self, k: Way, prompt: int) -> float | None:
        """The speed-up of one prompt if a round were nothing but its parts."""
        verify, draft = self.parts(prompt)
        if not (self.predictable and isinstance(k, int) and k and k + 1 in verify):
            return None
        stock = statistics.median(run.speed for run in self.of(STOCK, prompt))
        drafts = k * (draft or 0.0)
        tokens = self.tokens_a_round(k, prompt)
        return predicted(tokens, 1 / stock, verify[k + 1], drafts)

    def row(self, k: Way) -> Row:
        """One way to decode, over the prompts of which it was measured."""
        runs = self.of(k)
        speed = Spread.of(run.speed for run in runs)
        first_token = Spread.of(run.first_token for run in runs)
        if k is STOCK:
            return Row(k, len(runs), speed, first_token)
        prompts = [prompt for prompt in self.prompts if self.of(k, prompt)]
        ratios = [self.ratios(k, prompt) for prompt in prompts]
        plain = [self.ratios(k, prompt, baseline=0) for prompt in prompts]
        every = [ratio for several in ratios for ratio in several]
        hoped = [self.predicted(k, prompt) for prompt in prompts]
        return Row(
            k,
            len(runs),
            speed,
            first_token,
            ratio=geometric_mean(map(statistics.median, ratios)),
            plain=geometric_mean(map(statistics.median, plain)) if all(plain) else None,
            ratios=(min(every), max(every)),
            predicted=None if None in hoped else geometric_mean(hoped),
            tokens_a_round=self.tokens_a_round(k),
            acceptance=_acceptance(runs),
            parted=sum(run.parted is not None for run in runs),
        )

    @property
    def rows(self) -> list[Row]:
        """One row for each way to decode, stock first."""
        return [self.row(k) for k in self.ks]

    @property
    def choices(self) -> list[Choice]:
        """What was chosen where ``depth=throughput`` was measured: cold, then warm."""
        return [self.choice(k) for k in self.ks if isinstance(k, Chosen)]

    def choice(self, k: Chosen) -> Choice:
        """What was chosen, over the prompts of which it was measured."""
        prompts = [prompt for prompt in self.prompts if self.of(k, prompt)]
        return Choice(
            k,
            _share_by_k(self.of(k)),
            Beside.of(self.ratios(k, prompt) for prompt in prompts),
            Beside.of(self.ratios(k, p, baseline=self.best(p)) for p in prompts),
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON has it."""
        verify, draft = self.parts()
        return {
            "summary": [asdict(row) | _spreads(row) for row in self.rows],
            "throughput": [asdict(choice) for choice in self.choices],
            "verify_seconds": verify,
            "draft_seconds": draft,
            "runs": [_run(run) for run in self.runs],
            "costs": [asdict(cost) for cost in self.costs],
        }


def _acceptance(runs: list[Run]) -> float | None:
    stats = [run.stats for run in runs if run.stats]
    drafted = sum(s.drafted.total() for s in stats)
    return sum(s.accepted.total() for s in stats) / drafted if drafted else None


def _share_by_k(runs: list[Run]) -> list[float]:
    """As the statistics have it, of several generations."""
    rounds: Counter[int] = Counter()
    for run in runs:
        rounds += run.stats.rounds_by_k if run.stats else Counter()
    return [rounds[k] / rounds.total() for k in range(1 + max(rounds))]


def _spreads(row: Row) -> dict[str, Any]:
    """Named, for a tuple has no names in JSON."""
    return {"speed": row.speed._asdict(), "first_token": row.first_token._asdict()}


def _run(run: Run) -> dict[str, Any]:
    stats = None if run.stats is None else run.stats.to_dict()
    return vars(run) | {"speed": run.speed, "stats": stats}
