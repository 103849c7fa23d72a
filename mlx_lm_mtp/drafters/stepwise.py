"""Draft one token after the other, as a strategy wants it.

What an MTP head and a draft model have in common: logits, a choice, the next logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from .base import Branch, Choices, Proposal, Wanted


def likeliest(logits: mx.array, drafted: mx.array, n: int = 1) -> Choices:
    """The drafter's own choice, see :class:`.base.Choose`."""
    return Choices.likeliest(logits, n)


def chain(
    logits: mx.array, k: int, wanted: Wanted, following: Callable[[mx.array], mx.array]
) -> list[Choices]:
    """The choices at each position, the first of which are the drafts; k at most.

    Args:
        logits: `(1, 1, V)`, for the first draft.
        k, wanted: As given to `draft`.
        following: From a draft `(1, 1)` the logits for the next one.
    """
    choose = wanted.choose or likeliest
    chosen: list[Choices] = []
    while True:
        n = max(1 + wanted.branches.count(len(chosen)), wanted.candidates)
        tokens, confidence = choose(logits, drafted(chosen), n)
        chosen.append(Choices(tokens.astype(mx.uint32), confidence))
        if len(chosen) == k or (wanted.go_on and not wanted.go_on(confidence)):
            return chosen
        logits = following(chosen[-1].tokens[..., 0])


def drafted(chosen: Sequence[Choices]) -> mx.array:
    """The first choices so far, `(1, d)`."""
    firsts = [choices.tokens[..., 0] for choices in chosen]
    return mx.concatenate([mx.zeros((1, 0), dtype=mx.uint32), *firsts], axis=1)


def proposal(
    chosen: Sequence[Choices], wanted: Wanted, branches: tuple[Branch, ...] = ()
) -> Proposal:
    """What was wanted of these choices."""
    listed = max(wanted.candidates, 1)
    tokens = mx.concatenate([c.tokens[..., :listed] for c in chosen], axis=1)
    return Proposal(
        tokens[..., 0],
        confidence=mx.concatenate([c.confidence for c in chosen], axis=1),
        candidates=tokens if wanted.candidates else None,
        branches=branches,
    )
