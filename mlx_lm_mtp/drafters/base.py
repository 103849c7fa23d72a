"""The contract between the round loop and whatever proposes tokens.

A drafter is an ordinary object with the methods of :class:`Drafter`. It is registered
by name through a plugin (:mod:`mlx_lm_mtp.hookspecs`), or handed over as it is:
``stream_generate(..., draft=my_drafter)``. The loop calls it in this order::

    begin()                          once a generation
    prefill(tokens, hidden)          once a prompt chunk, in order
    draft(token, k) -> Proposal      then, every round,
    observe(tokens, hidden)          once the round's accepted tokens are known

Together `prefill` and `observe` show the drafter every token that the target's caches
hold, once and in order; a rejected draft is never among them.

A drafter that needs random numbers draws them with a key of its own
(``mx.random.key``): the global state of `mx.random` belongs to the target's sampler.
To draft as that sampler will choose, it gives ``logprobs`` and asks `Wanted.choose`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import mlx.core as mx
import mlx.nn as nn

from ..choices import best
from ..errors import DrafterError
from ..options import DraftOptions

# Grows when drafters that were written before would no longer work, or would do
# something else; what is merely added leaves it as it is.
CONTRACT = 1


@dataclass(frozen=True)
class Branch:
    """A path that leaves the first one and goes on from another choice.

    Args:
        position: How many drafts of the first path it shares.
        token: `(1, 1)`, what it drafts at that position instead.
        rest: `(1, m)`, what it drafts after that. Keep it lazy if you can: it is
            evaluated only if the branch is verified.
    """

    position: int
    token: mx.array
    rest: mx.array


@dataclass(frozen=True)
class Proposal:
    """The tokens drafted in one round.

    Args:
        tokens: `(1, k')` integers, 0 <= k' <= k, lazy or not. Fewer than k is fine,
            more than k are cut off.
        confidence: `(1, k')`, the drafter's own probability of each token.
        candidates: `(1, k', C)` integers, its C best choices at each position, the
            best first.
        branches: Further paths, in the order in which they were wanted.
        origins: For each of the tokens who drafted it, for statistics; empty if it
            was always the same.
    """

    tokens: mx.array
    confidence: mx.array | None = None
    candidates: mx.array | None = None
    branches: tuple[Branch, ...] = ()
    origins: tuple[str, ...] = ()

    @classmethod
    def of(cls, tokens: Sequence[int]) -> Proposal:
        """A proposal from plain integers.

        Raises:
            DrafterError: If one is negative or beyond 32 bits.
        """
        for token in tokens:
            if not 0 <= token < 2**32:
                raise DrafterError(f"{token} was proposed, which is no token id.")
        return cls(mx.array(list(tokens), dtype=mx.uint32)[None])


class Choices(NamedTuple):
    """What to draft at one position.

    Args:
        tokens: `(1, 1, n)`, the best first.
        confidence: `(1, 1)` in float32, how likely the best is the target's token, as
            far as can be told; else the drafter's own probability of it.
    """

    tokens: mx.array
    confidence: mx.array

    @classmethod
    def likeliest(cls, logits: mx.array, n: int = 1) -> Choices:
        """The n likeliest tokens of `(1, 1, V)` logits."""
        exact = logits.astype(mx.float32)
        surest = mx.max(exact, axis=-1) - mx.logsumexp(exact, axis=-1)
        return cls(best(logits, n), mx.exp(surest))


class Choose(Protocol):
    """Chooses drafts as the target will choose its tokens, noise included."""

    def __call__(self, logits: mx.array, drafted: mx.array, n: int = 1) -> Choices:
        """The best n tokens to draft at one position of one path.

        What is kept from call to call is only which positions were reached: a position
        can be asked for once the one before it was, on whichever path.

        Args:
            logits: `(1, 1, V)`, the drafter's logits or log-probabilities.
            drafted: `(1, d)`, what this path drafts before that.
            n: How many.
        """


@dataclass(frozen=True)
class Wanted:
    """What a strategy wants of a proposal beyond a chain of tokens.

    A drafter names what it can give in its attribute `gives`, and is asked for
    nothing else.

    Args:
        confidence: Fill `Proposal.confidence`.
        candidates: How many choices a position `Proposal.candidates` is to list;
            0 for none.
        branches: A position for each branch. The first mention of a position asks
            for the second choice there, the next for the third, and so on.
        go_on: To be called, if not None, with the `(1, 1)` confidence of each draft
            but the k-th; when it returns False, no further token is needed. It may
            wait for the device. To draft k tokens all the same is correct.
        choose: To be asked for every choice, if not None, instead of taking the
            likeliest token.
    """

    confidence: bool = False
    candidates: int = 0
    branches: tuple[int, ...] = ()
    go_on: Callable[[mx.array], bool] | None = None
    choose: Choose | None = None


CHAIN = Wanted()


@runtime_checkable
class Drafter(Protocol):
    """What proposes tokens.

    Attributes:
        name: Shown in statistics.
        needs_hidden: Whether `prefill` and `observe` are to be given hidden states.
        hidden: Optional, which hidden states it wants if the caller does not say,
            ``post_norm`` (the default) or ``pre_norm``.
        gives: Optional, see :func:`gives`. What the drafter gives beyond a chain of
            tokens, out of `OFFERS`. Its `draft` then has a third parameter,
            ``wanted: Wanted``, whose default is `CHAIN`.
    """

    name: str
    needs_hidden: bool

    def begin(self) -> None:
        """Forget everything: a new generation starts."""

    def prefill(self, tokens: mx.array, hidden: mx.array | None) -> None:
        """See the next `(1, T)` prompt tokens and the target's `(1, T, H)` hidden.

        Evaluate what is kept, so that the activations of a long prompt do not pile up.
        """

    def draft(self, token: mx.array, k: int) -> Proposal:
        """Propose up to k tokens to follow the pending `(1, 1)` token.

        The pending token has not been shown by `observe` yet. Lazy arrays are
        welcome: the loop evaluates drafts and target together.
        """

    def observe(self, tokens: mx.array, hidden: mx.array | None) -> None:
        """See the `(1, n)` tokens that a round kept: the pending one and the accepted.

        `hidden` is `(1, n, H)`, the target's hidden state at each of them.
        """


@runtime_checkable
class Carrying(Protocol):
    """What a drafter that gives ``caches`` can do besides."""

    def suspend(self) -> list[Any]:
        """What it has seen, as stock cache objects, for the caller's prompt cache."""

    def resume(self, caches: Sequence[Any]) -> int:
        """After `begin`, take over what `suspend` gave in an earlier generation.

        Returns how many tokens these caches have seen; 0 if they are none of its own.
        """


@runtime_checkable
class Rewinding(Protocol):
    """What a drafter that gives ``rewind`` can do besides.

    It is then asked to draft as soon as it is known what a round keeps, while the
    caller is still given the tokens; a caller who stops among them has it go back.
    """

    def rewind(self, tokens: int) -> None:
        """Take back the last `draft`, and the last `tokens` that `observe` has shown.

        They are fewer than the last call of `observe` has shown.
        """


@runtime_checkable
class Continuing(Protocol):
    """What a drafter that gives ``continues`` can do besides.

    It then can take up where another drafter has stopped (:mod:`.chain`).
    """

    def draft_behind(self, path: mx.array, k: int) -> Proposal:
        """Propose up to k tokens to follow a path of `(1, m)` tokens, m >= 1.

        The path begins with the pending token; `observe` has shown none of it, and
        will show only as much of it as the target keeps.
        """


OFFERS = frozenset(
    {
        "confidence",
        "candidates",
        "branches",
        "caches",
        "logprobs",
        "rewind",
        "continues",
        "head",  # is an MTP head, which may lie elsewhere
        "readout",  # reads its drafts from an lm_head, as `DraftOptions` say
    }
)


def hidden_for(drafter: Drafter, wanted: str) -> str | None:
    """The hidden states that a drafter is given; None if it needs none.

    Args:
        drafter: Which, with an attribute `hidden` if it has a preference.
        wanted: The draft option of that name.
    """
    if not drafter.needs_hidden:
        return None
    return getattr(drafter, "hidden", "post_norm") if wanted == "auto" else wanted


def gives(drafter: Drafter) -> frozenset[str]:
    """What a drafter gives beyond a chain of tokens."""
    given = getattr(drafter, "gives", None) or ()
    return frozenset([given] if isinstance(given, str) else given)


@dataclass(frozen=True)
class DraftContext:
    """What a drafter is built from.

    Args:
        model: The target.
        tokenizer: Its tokenizer, as stock wraps it.
        options: The options of this generation.
        model_path: The directory that the target was loaded from, if known.
        own: The options that the drafter has declared, an instance of that class;
            None if it has declared none.
        draft_model: The draft model that the caller has given, if any.
        others: Builds the drafter of a name, see `build`.
    """

    model: nn.Module
    tokenizer: Any
    options: DraftOptions
    model_path: Path | None = None
    own: Any = None
    draft_model: nn.Module | None = None
    others: Callable[[str], Drafter] | None = None

    def build(self, name: str) -> Drafter:
        """Another drafter for the same generation, by its registered name.

        Raises:
            DraftError: If there is none of that name, or it cannot be built.
        """
        if self.others is None:
            raise DrafterError(f"drafter {name!r} cannot be built in this context.")
        return self.others(name)


DrafterFactory = Callable[[DraftContext], Drafter]
