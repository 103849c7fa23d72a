"""Paths beside the first one: where they branch off, and what to do with them.

The first path takes the drafter's first choice everywhere. A branch takes another
choice at one position and goes on from there by first choices. The earlier it
branches off, the more it can save.
"""

from __future__ import annotations

import mlx.core as mx

from .drafters.base import Branch, Proposal


def positions(paths: int, k: int) -> tuple[int, ...]:
    """Where the branches of `paths` paths of k drafts leave the first one.

    The second choice at every position from the first on, then the third, and so on.
    """
    return tuple(i % k for i in range(paths - 1))


def rows(proposal: Proposal) -> mx.array:
    """All paths of a proposal as `(P, k')`, the first path first.

    A branch that is shorter is filled up with a copy of its end: any token may be
    verified, and only a right one is kept.
    """
    first = proposal.tokens
    return mx.concatenate([first, *(_row(first, b) for b in proposal.branches)])


def path(first: mx.array, branch: Branch) -> mx.array:
    """All drafts of a branch, those that it shares with the first path included."""
    shared = first[:, : branch.position]
    return mx.concatenate([shared, branch.token, branch.rest], axis=1)


def _row(first: mx.array, branch: Branch) -> mx.array:
    row = path(first, branch)
    lacking = first.shape[1] - row.shape[1]
    return mx.concatenate(
        [row, mx.repeat(row[:, -1:], max(lacking, 0), axis=1)], axis=1
    )


def rescue(proposal: Proposal, position: int, token: int) -> Branch | None:
    """The branch that takes this token at this position, if there is one."""
    for branch in proposal.branches:
        if branch.position == position and branch.token.item() == token:
            return branch
    return None
