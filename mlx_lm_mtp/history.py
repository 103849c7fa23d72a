"""The tokens fed so far, as logits processors are shown them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import mlx.core as mx

from .errors import NothingToChoose


class History:
    """Grows as stock grows it.

    Args:
        kept: Whether there are processors; else tokens are only counted.

    Attributes:
        length: How many tokens there are.
        prompt: Of these, how many are the prompt's; 0 until it was fed.
        tokens: `(length,)`, if they are kept and there are any.
    """

    def __init__(self, kept: bool = True) -> None:
        self._kept = kept
        self.length = 0
        self.prompt = 0
        self.tokens: mx.array | None = None

    def add(self, *parts: mx.array) -> None:
        """Append `(n,)` tokens that were fed."""
        self.length += sum(map(len, parts))
        if self._kept:
            self.tokens = self.followed_by(*parts)

    def followed_by(self, *parts: mx.array) -> mx.array:
        """The tokens as they are once these `(n,)` ones are fed as well."""
        before = [] if self.tokens is None else [self.tokens]
        return mx.concatenate([*before, *parts])

    @contextmanager
    def choosing(self, fed: int) -> Iterator[None]:
        """What is raised in here is given a note of the token that was to be chosen.

        Args:
            fed: Tokens fed before it.
        """
        try:
            yield
        except Exception as error:
            with suppress(AttributeError):  # some take no notes
                error.add_note(f"while choosing {self._next(fed)}")
            raise

    def nothing_to_choose(self) -> NothingToChoose:
        """The error that processors have left no token to come next."""
        return NothingToChoose(
            f"the logits processors leave nothing for {self._next(self.length)}: "
            "their row is all -inf or holds NaN; let at least one token stay possible."
        )

    def _next(self, fed: int) -> str:
        number = fed + 1 - (self.prompt or fed)
        return f"token {number} of the output (token {fed + 1} with the prompt)"
