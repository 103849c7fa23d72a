"""Tells, once a generation, that nothing of what was drafted has been accepted.

A head whose norms are written otherwise than was thought, or which belongs to another
model, gives no error: all its drafts are wrong, and the text is right, only slowly.
"""

from __future__ import annotations

import warnings
from typing import Any

from .rounds import Round

_ENOUGH = 64  # drafted tokens; a head that fits has had dozens accepted by then


class FutileWatch:
    """Counts until the first draft is accepted.

    Args:
        drafter: What drafts. Its attribute `suspicion`, if it has one, says what is
            probably wrong; without one nothing is, for a drafter may have bad texts.
    """

    def __init__(self, drafter: Any) -> None:
        self._suspicion = getattr(drafter, "suspicion", None)
        self._drafted = 0

    def count(self, verified: Round) -> None:
        """Add a verify; warns with a RuntimeWarning when there have been too many."""
        if self._suspicion is None or verified.rescue is not None:
            return
        self._drafted += verified.drafted
        if verified.accepted:
            self._suspicion = None
        elif self._drafted >= _ENOUGH:
            warnings.warn(
                f"mlx-lm-mtp: none of the first {self._drafted} drafted tokens was "
                f"accepted; {self._suspicion}",
                RuntimeWarning,
                stacklevel=2,
            )
            self._suspicion = None
