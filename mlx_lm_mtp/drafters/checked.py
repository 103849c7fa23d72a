"""Check what a drafter has proposed against the contract, and cut it to length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx

from ..errors import DrafterError
from .base import Branch, Proposal, Wanted


def checked(
    proposal: Any, name: str, vocabulary: int, k: int, wanted: Wanted
) -> Proposal:
    """What was wanted of a proposal, k drafts at most.

    Args:
        proposal: What `draft` returned.
        name: The drafter's.
        vocabulary: V of the target.
        k, wanted: As given to `draft`.

    Raises:
        DrafterError: If the proposal is not what the contract says.
    """
    return cut(_Check(name, vocabulary).proposal(proposal, wanted), k)


def cut(proposal: Proposal, n: int) -> Proposal:
    """The first n drafts of each path."""
    k = proposal.tokens.shape[1]
    if n >= k:
        return proposal
    candidates = proposal.candidates
    return replace(
        proposal,
        tokens=proposal.tokens[:, :n],
        candidates=None if candidates is None else candidates[:, :n],
        origins=proposal.origins[:n],
        branches=tuple(
            replace(b, rest=b.rest[:, : n - b.position - 1])
            for b in proposal.branches
            if b.position < n
        ),
    )


class _Check:
    """Checks proposals by shapes and dtypes; values stay unread.

    A token beyond the vocabulary becomes its last one: the embedding would be read out
    of bounds. Only a token that the target chooses is ever kept.
    """

    def __init__(self, name: str, vocabulary: int) -> None:
        self._name = name
        self._last = vocabulary - 1

    def proposal(self, proposal: Any, wanted: Wanted) -> Proposal:
        """What was wanted of the proposal."""
        given = isinstance(proposal, Proposal)
        if not given or not isinstance(proposal.tokens, mx.array):
            raise DrafterError(
                f"drafter {self._name!r} returned {type(proposal).__name__} from "
                "draft(); it must return a Proposal whose tokens are an mx.array."
            )
        tokens = self._tokens(proposal.tokens, "(1, k')", lambda s: s[0] == 1)
        return Proposal(
            tokens,
            confidence=self._confidence(proposal) if wanted.confidence else None,
            candidates=self._candidates(proposal) if wanted.candidates else None,
            branches=self._branches(proposal) if wanted.branches else (),
            origins=self._origins(proposal),
        )

    def _origins(self, proposal: Proposal) -> tuple[str, ...]:
        given, n = proposal.origins, proposal.tokens.shape[1]
        if given and (len(given) != n or not all(isinstance(o, str) for o in given)):
            raise DrafterError(
                f"drafter {self._name!r} proposed {n} tokens with origins {given!r}; "
                "one name for each token is needed, or none at all."
            )
        return tuple(given)

    def _confidence(self, proposal: Proposal) -> mx.array:
        given = proposal.confidence
        fits = isinstance(given, mx.array) and given.shape == proposal.tokens.shape
        if not fits or not mx.issubdtype(given.dtype, mx.floating):
            raise self._error("confidence", given, "real numbers of shape (1, k')")
        return given

    def _candidates(self, proposal: Proposal) -> mx.array:
        given, shape = proposal.candidates, proposal.tokens.shape
        fits = isinstance(given, mx.array) and given.shape[:2] == shape
        if not fits or given.ndim != 3 or not mx.issubdtype(given.dtype, mx.integer):
            raise self._error("candidates", given, "integers of shape (1, k', C)")
        return given

    def _branches(self, proposal: Proposal) -> tuple[Branch, ...]:
        length = proposal.tokens.shape[1]
        if not isinstance(proposal.branches, (list, tuple)):
            raise self._error("branches", proposal.branches, "a tuple of Branch")
        return tuple(self._branch(branch, length) for branch in proposal.branches)

    def _branch(self, branch: Any, length: int) -> Branch:
        at = getattr(branch, "position", None)
        if not isinstance(branch, Branch) or at not in range(length):
            raise DrafterError(
                f"drafter {self._name!r} proposed a {type(branch).__name__} at "
                f"position {at!r}; a Branch at 0 to {length - 1} is needed."
            )
        rest = self._tokens(branch.rest, "(1, m)", lambda shape: shape[0] == 1)
        return Branch(
            branch.position,
            self._tokens(branch.token, "(1, 1)", lambda shape: shape == (1, 1)),
            rest[:, : length - branch.position - 1],
        )

    def _tokens(
        self, tokens: Any, shape: str, fits: Callable[[tuple[int, ...]], bool]
    ) -> mx.array:
        if not isinstance(tokens, mx.array):
            raise self._error("tokens", tokens, f"integers of shape {shape}")
        integers = mx.issubdtype(tokens.dtype, mx.integer)
        if not integers or tokens.ndim != 2 or not fits(tokens.shape):
            raise self._error("tokens", tokens, f"integers of shape {shape}")
        return mx.minimum(tokens.astype(mx.uint32), self._last)

    def _error(self, what: str, given: Any, needed: str) -> DrafterError:
        if isinstance(given, mx.array):
            given = f"{given.dtype} {what} of shape {tuple(given.shape)}"
        else:
            given = f"{given!r} as {what}"
        return DrafterError(
            f"drafter {self._name!r} proposed {given}; {needed} are needed."
        )
