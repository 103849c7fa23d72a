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
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import mlx.core as mx
import mlx.nn as nn

from ..errors import DrafterError
from ..options import DraftOptions


@dataclass(frozen=True)
class Proposal:
    """The tokens drafted in one round, most likely first in time.

    Args:
        tokens: `(1, k')` integers, 0 <= k' <= k, lazy or not. Fewer than k is fine,
            more than k are cut off.
    """

    tokens: mx.array

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


@runtime_checkable
class Drafter(Protocol):
    """What proposes tokens.

    Attributes:
        name: Shown in statistics.
        needs_hidden: Whether `prefill` and `observe` are to be given hidden states.
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


@dataclass(frozen=True)
class DraftContext:
    """What a drafter is built from.

    Args:
        model: The target.
        tokenizer: Its tokenizer, as stock wraps it.
        options: The options of this generation.
        model_path: The directory that the target was loaded from, if known.
    """

    model: nn.Module
    tokenizer: Any
    options: DraftOptions
    model_path: Path | None = None


DrafterFactory = Callable[[DraftContext], Drafter]


def checked_tokens(
    proposal: Any, drafter: Drafter, k: int, vocabulary: int
) -> mx.array:
    """The drafted `(1, k')` tokens as uint32, at most k of them.

    A token beyond the vocabulary becomes its last one, without a look at the values:
    the embedding would be read out of bounds. Only a token that the target chooses is
    ever kept.

    Raises:
        DrafterError: If the proposal is not one, or not of integers in shape `(1, k')`.
    """
    tokens = getattr(proposal, "tokens", None)
    if not isinstance(tokens, mx.array):
        raise DrafterError(
            f"drafter {drafter.name!r} returned {type(proposal).__name__} from "
            "draft(); it must return a Proposal whose tokens are an mx.array."
        )
    integers = mx.issubdtype(tokens.dtype, mx.integer)
    if not integers or tokens.ndim != 2 or tokens.shape[0] != 1:
        raise DrafterError(
            f"drafter {drafter.name!r} proposed {tokens.dtype} tokens of shape "
            f"{tuple(tokens.shape)}; integers of shape (1, k') are needed."
        )
    return mx.minimum(tokens[:, :k].astype(mx.uint32), vocabulary - 1)
