"""Drafts chosen as the target will choose: its processors, its sampler, its noise.

Above temperature 0 the target's token at a position is a function of its
log-probabilities and of a random state that is known in advance. From the drafter's
log-probabilities and the same state it can be guessed more often than by the drafter's
likeliest token (drafting with common noise: Daliri et al. 2024, arXiv:2408.07978). A
sampler that stock made is taken apart (:mod:`.coupling`); another pure one is run as it
is, which is best if it adds Gumbel noise and takes the largest.

The target still chooses for itself, from the state that plain decoding would have, so
nothing here can change a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import mlx.core as mx
from mlx_lm.sample_utils import LogitsProcessor, Sampler, greedy_sampler

from . import random_state
from .choices import best, in_turn, log_probabilities
from .coupling import taken_apart
from .drafters.base import Choices, Choose, Drafter, gives
from .errors import DrafterError
from .guides import Guides
from .history import History
from .purity import leaves_nothing


class SharedNoise:
    """Chooses drafts as the target will choose its tokens.

    Processors that cannot be asked about drafts are left out (:mod:`.guides`); for a
    sampler that is not pure, the likeliest token stands in.

    Args:
        drafter: Chooses for itself unless it gives log-probabilities.
        shared: Whether to sample drafts; else the likeliest token is taken.
        sampler, processors: The target's.
        history: The tokens fed so far.

    Attributes:
        unguided: Why drafts are chosen otherwise than the target's tokens, or "".
    """

    def __init__(
        self,
        drafter: Drafter,
        shared: bool,
        sampler: Sampler,
        processors: Sequence[LogitsProcessor],
        history: History,
    ) -> None:
        self._name = drafter.name
        self._asked = "logprobs" in gives(drafter)
        self._sampler = (
            sampler if shared and leaves_nothing(sampler) else greedy_sampler
        )
        self._stock = taken_apart(self._sampler)
        self._guides = Guides(processors, history)
        self._states: list[mx.array] = []  # before the choice at each position
        plain = sampler is greedy_sampler or not shared
        self._always = self._reason(plain, bool(processors))
        self.unguided = self._always

    def _reason(self, plain: bool, processed: bool) -> str:
        if not self._asked:
            return "" if plain and not processed else "it gives no log-probabilities"
        if not plain and self._sampler is greedy_sampler:
            return "the sampler may keep a state"
        if not self._guides.complete:
            return "a logits processor may keep a state"
        return ""

    @property
    def looks_ahead(self) -> bool:
        """Whether drafts can be forbidden, see :meth:`permitted`."""
        return self._guides.looks_ahead

    @contextmanager
    def round(self, pending: mx.array, vocabulary: int) -> Iterator[Choose | None]:
        """While a round is drafted, what chooses its tokens.

        It is None where the drafter's own first choice will do.

        Args:
            pending: `(1,)`, the token that the first draft follows.
            vocabulary: V.
        """
        self.unguided = self._always
        self._vocabulary = vocabulary
        self._guides.begin(pending, vocabulary)
        sampled = self._sampler is not greedy_sampler
        if not self._asked or not (sampled or self._guides):
            yield None
            return
        with random_state.untouched():
            self._states = [random_state.current()]
            yield self._choose

    def _choose(self, logits: mx.array, drafted: mx.array, n: int = 1) -> Choices:
        """See :class:`.base.Choose`."""
        logits = self._fitted(logits)
        self._check(logits, drafted)
        position = drafted.shape[1]
        if self.unguided == self._always:  # nothing was raised in this round
            self._check_order(position)
            try:
                with self._noise(position):
                    return self._chosen(logits[0], drafted[0], n)
            except Exception as error:  # the target's turn will tell
                self.unguided = _raised(error)
        return Choices.likeliest(logits, n)

    @contextmanager
    def _noise(self, position: int) -> Iterator[None]:
        """What is drawn in here is what the target will draw at this position."""
        random_state.put_back(self._states[position])
        yield
        if position + 1 == len(self._states):
            self._states.append(random_state.current())

    def _chosen(self, logits: mx.array, drafted: mx.array, n: int) -> Choices:
        """Choices of `(1, V)` logits behind `(d,)` drafted tokens."""
        logits = self._guides(logits, drafted)
        if self._sampler is greedy_sampler:
            return Choices.likeliest(logits[None], n)
        if self._stock is not None:
            beliefs = self._stock.beliefs(logits)[None]
            return Choices(best(beliefs, n), mx.max(beliefs, axis=-1))
        logprobs = log_probabilities(logits)
        before = random_state.current()

        def sampled(row: mx.array) -> mx.array:
            random_state.put_back(before)
            return self._sampler(row)

        tokens = in_turn(logprobs, n, sampled)
        return Choices(tokens[None], mx.exp(logprobs[:, tokens[0, 0]])[None])

    def _fitted(self, logits: mx.array) -> mx.array:
        """Logits over the target's vocabulary.

        A draft model of one family may have a few rows more or fewer.
        """
        beyond = self._vocabulary - logits.shape[-1]
        if beyond <= 0:
            return logits[..., : self._vocabulary]
        shape = (*logits.shape[:-1], beyond)
        none = mx.full(shape, -mx.inf, dtype=logits.dtype)
        return mx.concatenate([logits, none], axis=-1)

    def _check(self, logits: mx.array, drafted: mx.array) -> None:
        shapes = tuple(getattr(a, "shape", None) for a in (logits, drafted))
        if shapes[0] != (1, 1, self._vocabulary) or len(shapes[1] or ()) != 2:
            raise DrafterError(
                f"drafter {self._name!r} asked to choose from logits of shape "
                f"{shapes[0]} behind drafts of shape {shapes[1]}; "
                f"(1, 1, {self._vocabulary}) and (1, d) are needed."
            )

    def _check_order(self, position: int) -> None:
        if position >= len(self._states):
            raise DrafterError(
                f"drafter {self._name!r} asked to choose behind {position} drafts "
                f"before the choice behind {len(self._states) - 1} was made."
            )

    def permitted(self, tokens: mx.array) -> int:
        """How many of `(1, k)` drafts are not known to be forbidden."""
        try:
            with random_state.untouched():
                return self._guides.permitted(tokens)
        except Exception as error:
            self.unguided = _raised(error)
            return 0


def _raised(error: Exception) -> str:
    return f"{type(error).__name__} was raised behind a draft"
