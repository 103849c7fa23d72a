"""Ask the drafter for what a strategy wants, check what comes, and cut it to depth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx

from . import tree
from .drafters.base import (
    CHAIN,
    OFFERS,
    Carrying,
    Choose,
    Continuing,
    Drafter,
    Proposal,
    Rewinding,
    Wanted,
    gives,
)
from .drafters.checked import checked, cut
from .errors import InvalidOption
from .noise import SharedNoise
from .options import DraftOptions

_METHODS = {
    "caches": (Carrying, "suspend() or resume()"),
    "rewind": (Rewinding, "rewind()"),
    "continues": (Continuing, "draft_behind()"),
}


class Proposer:
    """One drafter under one set of options.

    Args:
        drafter: What proposes tokens.
        options: Which strategy its proposals are for.
        noise: Chooses its drafts as the target will choose.

    Raises:
        InvalidOption: If the options need what the drafter does not give.
    """

    def __init__(
        self, drafter: Drafter, options: DraftOptions, noise: SharedNoise
    ) -> None:
        check_gives(drafter, options)
        self._noise = noise
        self._drafter = drafter
        self._options = options
        self._sure = 0  # drafts of this round that were asked after, and are sure

    def __call__(self, token: mx.array, k: int, vocabulary: int) -> Proposal:
        """Up to k >= 1 tokens after the pending `(1, 1)` token, ready to be verified.

        Raises:
            DrafterError: If the proposal is not what the contract says.
        """
        self._sure = 0
        with self._noise.round(token[0], vocabulary) as choose:
            wanted = self._wanted(k, choose)
            if wanted == CHAIN:
                proposal = self._drafter.draft(token, k)
            else:
                proposal = self._drafter.draft(token, k, wanted)  # type: ignore[call-arg]
        proposal = checked(proposal, self._drafter.name, vocabulary, k, wanted)
        undecided = self._sure < proposal.tokens.shape[1] - 1
        if self._options.depth == "confidence" and undecided:
            proposal = cut(proposal, confident(proposal.confidence, self._options.tau))
        if self._noise.looks_ahead:
            proposal = permitted(proposal, self._noise.permitted)
        return proposal

    def _wanted(self, k: int, choose: Choose | None) -> Wanted:
        options = self._options
        rescued = tuple(range(min(options.rescue, k)))
        by_confidence = options.depth == "confidence"
        return Wanted(
            confidence=by_confidence,
            candidates=options.probe,
            branches=tree.positions(options.paths, k) + rescued,
            go_on=self._go_on if by_confidence and options.reads == "each" else None,
            choose=choose,
        )

    def _go_on(self, confidence: mx.array) -> bool:
        sure = confidence.item() >= self._options.tau
        self._sure += sure
        return sure


def check_gives(drafter: Drafter, options: DraftOptions) -> None:
    """See that a drafter gives what the options need.

    Raises:
        InvalidOption: If it does not, or claims to give what there is not.
    """
    offered = gives(drafter)
    if unknown := offered - OFFERS:
        raise InvalidOption(
            f"drafter {drafter.name!r} says that it gives "
            f"{', '.join(sorted(unknown))}; there is: {', '.join(sorted(OFFERS))}."
        )
    for offer, (kind, methods) in _METHODS.items():
        if offer in offered and not isinstance(drafter, kind):
            raise InvalidOption(
                f"drafter {drafter.name!r} says that it gives {offer}; it lacks "
                f"{methods}."
            )
    for missing in sorted(options.needs - offered):
        raise InvalidOption(
            f"drafter {drafter.name!r} gives no {missing}, which draft option "
            f"{_asking(options, missing)} needs; leave that option out, or choose "
            "another drafter."
        )


def _asking(options: DraftOptions, what: str) -> str:
    """The option that needs this."""
    if what == "confidence":
        return f"depth={options.depth}"
    if what == "candidates":
        return f"probe={options.probe}"
    if what == "readout":
        bits = options.draft_head_bits
        return f"draft_head_bits={bits}" if bits else f"shortlist={options.shortlist}"
    if options.paths > 1:
        return f"paths={options.paths}"
    return f"rescue={options.rescue}"


def confident(confidence: mx.array, tau: float) -> int:
    """Drafts to keep: on while the one before has a confidence of at least tau.

    It waits for all of them.
    """
    n = 1
    for value in confidence[0, :-1].tolist():
        if not value >= tau:  # nor if it is no number
            break
        n += 1
    return n


def permitted(proposal: Proposal, allowed: Callable[[mx.array], int]) -> Proposal:
    """The proposal without the drafts that logits processors are known to forbid.

    Args:
        allowed: How many of the `(1, k')` tokens of a path are not forbidden.
    """
    first = proposal.tokens
    branches = []
    for branch in proposal.branches:
        path = tree.path(first, branch)
        n = allowed(path) - branch.position - 1
        if n >= 0:
            branches.append(replace(branch, rest=branch.rest[:, :n]))
    return cut(replace(proposal, branches=tuple(branches)), allowed(first))
