"""What a check is: a function, and what it needs and claims."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .trial import Trial

Run = Callable[[Trial], Iterator[str]]
FEW = 3  # models for a check that is about the drafter more than about caches


@dataclass(frozen=True)
class Check:
    """One contract.

    Args:
        run: Tries it on one model, and yields what is wrong, one sentence each.
        models: On how many of the models, from the first; 0 is all.
        claims: What must have happened on at least one of them for the check to mean
            anything: out of ``drafted``, ``accepted``, ``rejected``, ``rescued`` and
            ``probed``.
        needs: What a drafter must give, or the check is left out.
    """

    run: Run
    models: int = FEW
    claims: tuple[str, ...] = ()
    needs: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """That of the function."""
        return self.run.__name__

    @property
    def contract(self) -> str:
        """What is tested, in words."""
        return (self.run.__doc__ or "").strip()
