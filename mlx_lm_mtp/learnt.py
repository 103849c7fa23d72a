"""What `depth=throughput` has learnt, from one generation to the next.

Within a process it is kept by model. The next process finds it in the user's cache
directory, as a guess to begin with: it begins to draft at once then, where a first one
has to measure what a round costs.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from . import store
from .anatomy import pipeline_ranks
from .certificate import fingerprint
from .depth import Known, Throughput
from .drafters.base import Drafter
from .options import DraftOptions
from .origin import ByModel
from .target import Target

KIND = "depths"
_ROUNDS = 8  # of a generation from which on it is worth writing down


class Learnt:
    """What generations with one model, drafter and strategy have learnt.

    On disk models are known by their structure and drafters by their names, so it may
    be another's of the same kind: a guess, which is corrected as a text is written.

    Args:
        name: Of the file.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._known = _read(name)
        self._generations = 0

    def begin(self) -> Learning:
        """The depth of a generation that begins now, and may not be the only one."""
        return Learning(copy.deepcopy(self._known), self)

    def keep(self, known: Known, *, told: bool) -> None:
        """Go on from this, and write it down after the 1st, 2nd, 4th, 8th … text.

        Args:
            known: From now on.
            told: Whether it is worth a file.
        """
        self._known = known
        if not told:
            return
        self._generations += 1
        if self._generations & (self._generations - 1) == 0:
            store.write(KIND, self._name, known.to_dict())


class Learning(Throughput):
    """As deep as yields most, in one generation, which leaves what it has learnt.

    Args:
        known: To begin with; it is changed.
        learnt: Is told in the end.
    """

    def __init__(self, known: Known, learnt: Learnt) -> None:
        super().__init__(known)
        self._learnt = learnt

    def end(self) -> None:
        """The generation is over."""
        self._learnt.keep(self.known, told=self.rounds >= _ROUNDS)


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


def _read(name: str) -> Known:
    """As it was written; one that has learnt nothing if that cannot be read."""
    try:
        known = Known.of(store.read(KIND, name))
    except (KeyError, TypeError, ValueError, AttributeError):
        return Known()
    known.costs.doubt()
    return known
