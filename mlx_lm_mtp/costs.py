"""What a round costs for each number of drafts, measured beside plain decoding.

Numbers in, numbers out: nothing here knows of a model, a device or a clock.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

SILENT = -1  # the drafts of a round whose drafter was asked and had none

_NEAR = 16  # rounds before one that it is compared with
_ENOUGH = 2  # comparisons behind which a cost is known at all …
_FEW = 25  # … and well
_SPREAD = 0.1  # of the seconds of rounds of one kind, as a part of them
_SLOPE = 0.5  # of a width never tried, against the slope of those that were


class Costs:
    """What a round costs, for each number of drafts that it verifies.

    In rounds of plain decoding, for seconds do not keep: a machine may be twice as fast
    a moment later. So a round is compared with those just before it, of other widths:
    the median of these, each divided by what its width costs, is what a plain round
    takes at present. And a width costs the median of its last few comparisons, which
    no hiccup moves far.

    That depends on the machine, the model and the strategy, not on the text, so it
    outlives a generation.
    """

    def __init__(self) -> None:
        self._known: dict[int, list[float]] = {}  # width -> its last comparisons
        self._recent: list[tuple[int, float]] = []  # widths and seconds
        self._told: dict[tuple[int, bool], float] = {}  # `rounds`, as long as they hold

    @classmethod
    def of(cls, known: Mapping[str, Sequence[float]]) -> Costs:
        """As :meth:`to_dict` has put it down.

        Raises:
            AttributeError, TypeError, ValueError: If it has not.
        """
        costs = cls()
        costs._known = {int(w): list(map(finite, of_w)) for w, of_w in known.items()}
        compared = [cost for of_w in costs._known.values() for cost in of_w]
        if min(compared, default=1.0) <= 0 or (compared and not costs._known.get(0)):
            raise ValueError("costs that cannot be, or none of plain decoding")
        return costs

    def to_dict(self) -> dict[str, list[float]]:
        """What outlives a generation, as JSON has it."""
        return {str(width): list(compared) for width, compared in self._known.items()}

    def begin(self) -> None:
        """Another generation begins; its first rounds have none before them."""
        self._recent = []

    def doubt(self) -> None:
        """They were measured some time ago: they are a guess now, and no more."""
        for width in filter(self.measured, list(self._known)):
            self._known[width] = [self._at(width)] * _ENOUGH
        self._told = {}

    def measured(self, width: int) -> bool:
        """Whether rounds of this width are known."""
        return len(self._known.get(width, ())) >= _ENOUGH

    def add(self, width: int, seconds: float) -> None:
        """Add a round."""
        plain = self._plain_round(width)
        self._recent = [*self._recent[1 - _NEAR :], (width, seconds)]
        known = self._known.setdefault(width, [])
        if plain is not None:
            self._known[width] = [*known[1 - _FEW :], seconds / plain]
            self._told = {}
        elif not any(map(self.measured, self._known)):
            known.append(1.0)  # the first width of all, which others compare with
            self._told = {}

    def _plain_round(self, width: int) -> float | None:
        """Seconds, by the rounds before that had other widths; None if few had."""
        others = [
            seconds / self._at(other)
            for other, seconds in self._recent
            if other != width and self._known.get(other)
        ]
        most = 2 * len(others) > len(self._recent)
        return statistics.median(others) if most else None

    @property
    def reach(self) -> int:
        """The widest that may be tried next: wide ones cost most where all is wrong."""
        return 2 * self.widest + 1

    @property
    def widest(self) -> int:
        """The most drafts whose costs are known."""
        return max(self._widths, default=0)

    def rounds(self, width: int, *, hopeful: bool = False) -> float:
        """What a round of this width costs, in rounds of plain decoding.

        One that was never measured lies between those that were; beyond them it is
        taken to cost little, so that it is tried.

        Args:
            width: Drafts, or `SILENT`.
            hopeful: Whether doubts are read in its favour.
        """
        asked = width, hopeful
        if asked not in self._told:
            self._told[asked] = self._rounds(*asked)
        return self._told[asked]

    def _rounds(self, width: int, hopeful: bool) -> float:
        if self.measured(width):
            cost, seen = self._at(width), len(self._known[width])
        else:
            cost, seen = self._between(max(width, 0)), 1
        # A wider round is not cheaper, whatever a few comparisons say.
        narrower = [self._at(w) for w in self._widths if w < width]
        cost = max(cost, *narrower, self._at(0)) / self._at(0)
        return cost * (1 - _SPREAD / math.sqrt(seen) if hopeful else 1)

    def _between(self, width: int) -> float:
        below = max((w for w in self._widths if w <= width), default=0)
        above = min((w for w in self._widths if w > width), default=None)
        here = self._at(below)
        if above is None:
            rise = (here - self._at(0)) / below if below else here
            return here + _SLOPE * rise * (width - below)
        return here + (self._at(above) - here) * (width - below) / (above - below)

    @property
    def _widths(self) -> list[int]:
        return [w for w in self._known if self.measured(w) and w >= 0]

    def _at(self, width: int) -> float:
        known = self._known.get(width)
        return statistics.median_low(known) if known else 1.0


def finite(value: Any) -> float:
    """As a number.

    Raises:
        TypeError, ValueError: If it is none, or without bounds.
    """
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{number} is not finite")
    return number
