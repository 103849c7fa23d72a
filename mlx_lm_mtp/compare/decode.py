"""Decode prompts twice, by stock and with drafts, to the first token that differs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx_lm.sample_utils import Sampler

from ..bench.subject import Subject
from ..choices import two_best
from ..drafters.base import Drafter
from ..gaps import Gap
from ..install import uninstalled
from ..options import DraftOptions
from ..state.recurrence import Recurrence
from .rounding import moved, rounding
from .verdict import Comparison, Difference


@dataclass(frozen=True)
class Plan:
    """How prompts are decoded.

    Args:
        tokens: The most decoded behind each prompt.
        draft: What drafts.
        options: How to draft.
        sampler: One of stock's; the same for both.
        seed: Of `mx.random`, before each run.
        plain: Whether to compare with plain decoding as this package computes it
            (k = 0) instead of stock's own; the two differ where stock has no kernel
            for gated-delta layers.
    """

    tokens: int
    draft: str | Drafter
    options: DraftOptions
    sampler: Sampler
    seed: int = 0
    plain: bool = False


@dataclass
class _Text:
    """What one run has said."""

    tokens: list[int] = field(default_factory=list)
    rows: list[mx.array] = field(default_factory=list)  # (V,) log-probabilities

    def add(self, response: Any) -> None:
        """Take one of stock's responses."""
        mx.eval(response.logprobs)
        self.tokens.append(response.token)
        self.rows.append(response.logprobs)


def compare(subject: Subject, plan: Plan) -> Iterator[Comparison]:
    """Compare every prompt of a subject.

    Raises:
        DraftError: If the drafter cannot be built, or fails.
    """
    for i, prompt in enumerate(subject.prompts):
        yield _Prompt(subject, plan, i, prompt.tokens).compare()


@dataclass(frozen=True)
class _Prompt:
    """One prompt of a subject."""

    subject: Subject
    plan: Plan
    index: int
    tokens: Sequence[int]

    def compare(self) -> Comparison:
        """Decode it twice."""
        stock = self._stock()
        farthest, compared, difference = 0.0, 0, None
        options = {"draft_options": self.plan.options}
        with closing(self._decode(draft=self.plan.draft, **options)) as ours:
            for i, our in enumerate(ours):  # as many, for stock ends both
                compared = i + 1
                farthest = max(farthest, moved(our.logprobs, stock.rows[i]))
                if our.token != stock.tokens[i]:
                    difference = self._difference(stock, i, our)
                    break
        rounded = self._rounding(stock) if farthest or difference else None
        return Comparison(self.index, compared, farthest, rounded, difference)

    def _stock(self) -> _Text:
        """What stock says, or plain decoding by our arithmetic."""
        text = _Text()
        none = replace(self.plan.options, num_draft_tokens=0)
        plain = {"draft": self.plan.draft, "draft_options": none}
        with nullcontext() if self.plan.plain else uninstalled():
            for response in self._decode(**(plain if self.plan.plain else {})):
                text.add(response)
        return text

    def _decode(self, **drafting: Any) -> Any:
        mx.random.seed(self.plan.seed)
        return mlx_lm.stream_generate(
            self.subject.model,
            self.subject.tokenizer,
            list(self.tokens),
            max_tokens=self.plan.tokens,
            sampler=self.plan.sampler,
            **drafting,
        )

    def _difference(self, stock: _Text, i: int, our: Any) -> Difference:
        """What there is to know about position i, at which the tokens differ."""
        row, token = stock.rows[i], stock.tokens[i]
        best, gap = two_best(row)
        apart = row[token].astype(mx.float32) - row[our.token].astype(mx.float32)
        return Difference(
            i,
            token,
            our.token,
            Gap(gap.item(), i, *best.tolist()),
            apart.item(),
            moved(our.logprobs, row),
            self._drawn(stock.rows[:i], our.logprobs) == our.token,
        )

    def _drawn(self, before: Sequence[mx.array], row: mx.array) -> int:
        """What stock's sampler draws from a row behind the rows before it."""
        mx.random.seed(self.plan.seed)
        for earlier in before:
            self.plan.sampler(earlier[None])  # draws what it has drawn there
        return int(self.plan.sampler(row[None]).item())

    def _rounding(self, stock: _Text) -> float:
        options = self.plan.options
        return rounding(
            self.subject.model,
            self.tokens,
            stock.tokens,
            stock.rows,
            options.num_draft_tokens + 1,
            Recurrence(options.capture, options.recurrence),
        )
