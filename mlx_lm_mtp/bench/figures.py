"""What the measured runs come to: medians, ratios to stock, predicted speed-ups."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from .costs import Costs
from .measure import STOCK, Run


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
        k: Drafts a round, or `STOCK`.
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
        acceptance: Accepted / drafted.
        parted: Runs whose tokens were not stock's.
    """

    k: int | None
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
    def ks(self) -> list[int | None]:
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

    def of(self, k: int | None, prompt: int | None = None) -> list[Run]:
        """The runs with k drafts a round, of one prompt or of all."""
        prompts = self.prompts if prompt is None else [prompt]
        return [run for run in self.runs if run.k == k and run.prompt in prompts]

    def ratios(
        self, k: int | None, prompt: int, baseline: int | None = STOCK
    ) -> list[float]:
        """Speeds over the baseline's, repetition by repetition."""
        base = {run.repetition: run.speed for run in self.of(baseline, prompt)}
        runs = self.of(k, prompt)
        return [r.speed / base[r.repetition] for r in runs if r.repetition in base]

    def tokens_a_round(self, k: int, prompt: int | None = None) -> float:
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

    def predicted(self, k: int, prompt: int) -> float | None:
        """The speed-up of one prompt if a round were nothing but its parts."""
        verify, draft = self.parts(prompt)
        if not self.predictable or k == 0 or k + 1 not in verify:
            return None
        stock = statistics.median(run.speed for run in self.of(STOCK, prompt))
        drafts = k * (draft or 0.0)
        tokens = self.tokens_a_round(k, prompt)
        return predicted(tokens, 1 / stock, verify[k + 1], drafts)

    def row(self, k: int | None) -> Row:
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
            acceptance=_acceptance(runs) if k else None,
            parted=sum(run.parted is not None for run in runs),
        )

    @property
    def rows(self) -> list[Row]:
        """One row for each way to decode, stock first."""
        return [self.row(k) for k in self.ks]

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON has it."""
        verify, draft = self.parts()
        return {
            "summary": [asdict(row) | _spreads(row) for row in self.rows],
            "verify_seconds": verify,
            "draft_seconds": draft,
            "runs": [_run(run) for run in self.runs],
            "costs": [asdict(cost) for cost in self.costs],
        }


def _acceptance(runs: list[Run]) -> float:
    stats = [run.stats for run in runs if run.stats]
    drafted = sum(s.drafted.total() for s in stats)
    return sum(s.accepted.total() for s in stats) / drafted if drafted else 0.0


def _spreads(row: Row) -> dict[str, Any]:
    """Named, for a tuple has no names in JSON."""
    return {"speed": row.speed._asdict(), "first_token": row.first_token._asdict()}


def _run(run: Run) -> dict[str, Any]:
    stats = None if run.stats is None else run.stats.to_dict()
    return vars(run) | {"speed": run.speed, "stats": stats}
