"""What drafts in a benchmark: a drafter as it is, or the oracle in front of it."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from ..build import resolve
from ..drafters.base import Drafter
from ..drafters.mtp import MTPDrafter
from ..heads.head import MTPHead
from ..options import DraftOptions
from .oracle import OracleDrafter
from .shapes import random_head
from .subject import Subject

COSTS = ("drafter", "random", "none")


@dataclass(frozen=True)
class Truth:
    """What stock said to one prompt, in one repetition."""

    prompt: int
    repetition: int
    tokens: list[int]
    vocabulary: int


class Drafting:
    """Makes the drafters of a benchmark.

    Args:
        subject: What they draft for.
        name: The drafter, as `mlx_lm_mtp plugins` lists it.
        options: How to draft; k apart.
        acceptance: Of the oracle; None is the drafter itself, without an oracle.
        cost: What drafting by the oracle costs, one of `COSTS`: the time of the drafter
            of that name, of an MTP head with random weights, or none.
        seed: Of the oracle.
    """

    def __init__(
        self,
        subject: Subject,
        name: str,
        options: DraftOptions,
        *,
        acceptance: float | None = None,
        cost: str = "drafter",
        seed: int = 0,
    ) -> None:
        self.options = options
        self._subject = subject
        self._name = name
        self._acceptance = acceptance
        self._cost = cost
        self._seed = seed
        self._plain = functools.cache(self._build)

    def drafter(self, k: int, truth: Truth) -> Drafter:
        """What drafts k tokens a round for this prompt.

        Raises:
            DraftError: If it cannot be built.
        """
        if self._acceptance is None:
            return self._plain(k)
        return OracleDrafter(
            truth.tokens,
            self._acceptance,
            vocabulary=truth.vocabulary,
            seed=self._seed_of(truth),
            cost=None if self._cost == "none" else self._plain(k),
        )

    def _seed_of(self, truth: Truth) -> int:
        """Another one for each of stock's runs, the same for every k."""
        prompts = len(self._subject.prompts)
        return self._seed + truth.repetition * prompts + truth.prompt

    @property
    def description(self) -> str:
        """What drafts, and what its time is made of."""
        made_of = {
            "drafter": f"that of {self._own}",
            "random": "that of an MTP head with random weights",
            "none": "none at all",
        }
        if self._acceptance is None:
            return self._own
        return (
            f"an oracle that is right with probability {self._acceptance:g}; "
            f"time of a draft: {made_of[self._cost]}"
        )

    @property
    def _own(self) -> str:
        random = self._name == "mtp" and self._subject.head is not None
        return (
            f"{self._name}, an MTP head with random weights" if random else self._name
        )

    def _build(self, k: int) -> Drafter:
        """Once for each k, for a drafter may be built for its options."""
        if self._cost == "random" and self._acceptance is not None:
            return MTPDrafter(self._random_head)
        if self._name == "mtp" and self._subject.head is not None:
            return MTPDrafter(self._subject.head)
        subject = self._subject
        # Nothing is built for no drafts, but plain decoding is run with a drafter, too.
        options = replace(self.options, num_draft_tokens=max(k, 1))
        made = resolve(self._name, subject.model, subject.tokenizer, options)
        assert made is not None
        return made

    @functools.cached_property
    def _random_head(self) -> MTPHead:
        return self._subject.head or random_head(self._subject.model)
