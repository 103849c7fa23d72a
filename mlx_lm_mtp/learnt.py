"""What `depth=throughput` has learnt, from one generation to the next.

Within a process it is kept by model. The next process finds it in the user's cache
directory, as a guess to begin with: it begins to draft at once then, where a first one
has to measure what a round costs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from . import store
from .anatomy import pipeline_ranks
from .certificate import fingerprint
from .depth import Depth, Fixed, Known, Throughput
from .drafters.base import Drafter
from .options import DraftOptions
from .origin import ByModel
from .target import Target

KIND = "depths"
_ROUNDS = 8  # of a generation from which on it is worth writing down


class Learnt:
    """What generations with one model, drafter and strategy have learnt.

    Args:
        name: Of the file.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._known = _read(name)
        self._generations = 0

    def depth(self) -> Throughput:
        """For a generation that begins now."""
        return Throughput(self._known)

    def keep(self, rounds: int) -> None:
        """Write it down for the next process, after the 1st, 2nd, 4th, 8th … of them.

        Args:
            rounds: That the generation had; a short one has not learnt much.
        """
        if rounds < _ROUNDS:
            return
        self._generations += 1
        if self._generations & (self._generations - 1) == 0:
            store.write(KIND, self._name, self._known.to_dict())


_learnt: ByModel[dict[str, Learnt]] = ByModel()


def learnt_of(
    target: Target, caches: Sequence[Any], drafter: Drafter, options: DraftOptions
) -> Learnt | None:
    """What is known where drafting is as deep as pays; None where it is not.

    In a pipeline every rank has a clock of its own, and all of them must draft as many
    tokens: it is always k there.
    """
    if options.depth != "throughput" or pipeline_ranks(target.model) > 1:
        return None
    known = _learnt.get(target.model)
    if known is None:
        known = _learnt[target.model] = {}
    strategy = drafter.name, repr(replace(options, num_draft_tokens=0))
    name = hashlib.sha256(
        repr((fingerprint(target, caches), strategy)).encode()
    ).hexdigest()[:32]
    if name not in known:
        known[name] = Learnt(name)
    return known[name]


def depth_of(learnt: Learnt | None) -> Depth:
    """What decides how many tokens a generation drafts."""
    return Fixed() if learnt is None else learnt.depth()


def _read(name: str) -> Known:
    """As it was written; one that has learnt nothing if that cannot be read."""
    try:
        known = Known.of(store.read(KIND, name))
    except (KeyError, TypeError, ValueError, AttributeError):
        return Known()
    known.costs.doubt()
    return known
