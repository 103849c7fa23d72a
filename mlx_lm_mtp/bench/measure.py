"""Runs stock and every way to draft in turn: a slow moment falls on all of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx_lm.sample_utils import make_sampler

from ..errors import InvalidOption
from ..install import uninstalled
from ..state.recurrence import Recurrence
from ..stats import DraftStats, Tally
from .costs import Costs, draft_seconds, verify_seconds
from .drafting import Drafting, Truth
from .subject import Subject

STOCK = None  # the k of a run without the plugin; k = 0 is plain decoding with it
_WARM = 8  # tokens of the runs that do not count


class Chosen(StrEnum):
    """The k of runs in which ``depth=throughput`` chooses it, round by round.

    It goes on from what it has learnt in the runs before, as it does in a process that
    decodes one text after the other. So its first repetition is another way to decode.
    """

    COLD = "throughput, cold"
    WARM = "throughput, warm"


Way = int | Chosen | None  # fixed drafts a round, or chosen ones, or `STOCK`


@dataclass(frozen=True)
class Plan:
    """What is run.

    Args:
        ks: Drafts a round, each a way to decode; at least one.
        tokens: Tokens of each run, at least 2.
        repeat: How often every prompt is decoded in each way.
        temp: Temperature; 0 is greedy.
        seed: Of `mx.random`, before each run.
        throughput: Whether ``depth=throughput``, up to the largest k, is one more way.
    """

    ks: tuple[int, ...]
    tokens: int
    repeat: int
    temp: float = 0.0
    seed: int = 0
    throughput: bool = False

    def ways(self, repetition: int) -> tuple[int | Chosen, ...]:
        """The ways to draft, in the order in which they are run."""
        chosen = Chosen.WARM if repetition else Chosen.COLD
        return (*self.ks, chosen) if self.throughput else self.ks


@dataclass(frozen=True)
class Run:
    """One prompt decoded once.

    Args:
        prompt, repetition: Which, from 0.
        k: Drafts a round, or who chooses them, or `STOCK`.
        prompt_tokens: Tokens that were prefilled.
        tokens: Tokens that were decoded.
        first_token: Seconds from the call to the first token.
        decoding: Seconds from the first token to the last.
        parted: The first index at which the tokens are not stock's; None if all are.
        stats: What drafting did; None for stock.
    """

    prompt: int
    repetition: int
    k: Way
    prompt_tokens: int
    tokens: int
    first_token: float
    decoding: float
    parted: int | None = None
    stats: DraftStats | None = None

    @property
    def speed(self) -> float:
        """Tokens per second of decoding: what came after the first token."""
        return (self.tokens - 1) / self.decoding


def steps(subject: Subject, plan: Plan) -> int:
    """How many records :func:`measure` gives."""
    return len(subject.prompts) * plan.repeat * (len(plan.ways(0)) + 2)


def measure(subject: Subject, plan: Plan, drafting: Drafting) -> Iterator[Run | Costs]:
    """Every prompt, again and again: stock, the costs of the parts, then each way.

    Raises:
        DraftError: If a drafter cannot be built, or a text ends at once.
    """
    bench = _Bench(subject, plan, drafting)
    bench.warm_up()
    for repetition in range(plan.repeat):
        for prompt in range(len(subject.prompts)):
            yield from bench.in_turn(prompt, repetition)


class _Bench:
    """Decodes the prompts of one subject as one plan says."""

    def __init__(self, subject: Subject, plan: Plan, drafting: Drafting) -> None:
        self.subject = subject
        self.plan = plan
        self.drafting = drafting

    def warm_up(self) -> None:
        """Build the drafters and compile what there is to compile.

        Chosen depths are left out, for they would learn from it, and not be cold.
        """
        tokens = min(_WARM, self.plan.tokens)
        _, truth = self.stock(0, 0, tokens)
        for k in self.plan.ks:
            self.drafted(k, truth, tokens)

    def in_turn(self, prompt: int, repetition: int) -> Iterator[Run | Costs]:
        """One prompt decoded in every way."""
        run, truth = self.stock(prompt, repetition, self.plan.tokens)
        yield run
        yield self.costs(truth)
        for way in self.plan.ways(repetition):
            yield self.drafted(way, truth, self.plan.tokens)

    def stock(self, prompt: int, repetition: int, tokens: int) -> tuple[Run, Truth]:
        """Stock without the plugin, and what it said."""
        with uninstalled():
            said, times, vocabulary = self._decode(prompt, tokens)
        run = Run(prompt, repetition, STOCK, self._length(prompt), len(said), *times)
        return run, Truth(prompt, repetition, said, vocabulary)

    def drafted(self, way: int | Chosen, truth: Truth, tokens: int) -> Run:
        """With drafts, compared with stock."""
        tally, k = Tally(), way
        # Those of drafters have gone into the drafter.
        options = replace(self.drafting.options, of_drafters=())
        if isinstance(k, Chosen):
            k, options = max(self.plan.ks), replace(options, depth="throughput")
        said, times, _ = self._decode(
            truth.prompt,
            tokens,
            draft=self.drafting.drafter(k, truth),
            num_draft_tokens=k,
            draft_options=options,
            draft_stats=tally,
        )
        length = self._length(truth.prompt)
        run = (truth.prompt, truth.repetition, way, length, len(said), *times)
        return Run(*run, parted=_parted(said, truth.tokens), stats=tally.stats)

    def costs(self, truth: Truth) -> Costs:
        """The costs of the parts, behind the prompt and half of the answer."""
        half, k = len(truth.tokens) // 2, max(self.plan.ks)
        context = self.subject.prompts[truth.prompt].tokens + truth.tokens[:half]
        # A short answer is gone round, for there must be k + 1 tokens.
        following = (truth.tokens[half:] * (k + 1))[: k + 1]
        widths = sorted({1, *(k + 1 for k in self.plan.ks)})
        options = self.drafting.options
        computing = Recurrence(options.capture, options.recurrence)
        model = self.subject.model
        verify = verify_seconds(model, context, following, widths, computing)
        draft = None if k == 0 else self._draft_seconds(k, truth, context, following[0])
        return Costs(truth.prompt, truth.repetition, len(context), verify, draft, k)

    def _draft_seconds(
        self, k: int, truth: Truth, context: list[int], token: int
    ) -> float:
        drafter, hidden = self.drafting.drafter(k, truth), self.drafting.options.hidden
        model = self.subject.model
        return draft_seconds(model, drafter, k, hidden, context, token) / k

    def _length(self, prompt: int) -> int:
        return len(self.subject.prompts[prompt].tokens)

    def _decode(
        self, prompt: int, tokens: int, **drafting: Any
    ) -> tuple[list[int], tuple[float, float], int]:
        """Tokens, seconds to the first and from it to the last, and the vocabulary."""
        mx.random.seed(self.plan.seed)
        sampler = make_sampler(self.plan.temp)
        said: list[int] = []
        start = first = last = time.perf_counter()
        for response in mlx_lm.stream_generate(
            self.subject.model,
            self.subject.tokenizer,
            self.subject.prompts[prompt].tokens,
            max_tokens=tokens,
            sampler=sampler,
            **drafting,
        ):
            last = time.perf_counter()
            first = last if not said else first
            said.append(response.token)
        if len(said) < 2:
            text = self.subject.prompts[prompt].text
            raise InvalidOption(
                f"prompt {text!r} ends after {len(said)} token, which cannot be timed; "
                "leave out --no-ignore-eos, or the prompt."
            )
        times = (first - start, last - first)
        return said, times, response.logprobs.shape[-1]


def _parted(said: list[int], truth: list[int]) -> int | None:
    if said == truth:
        return None
    pairs = enumerate(zip(said, truth, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(said), len(truth)))
