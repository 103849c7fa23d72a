"""What a drafter has seen, carried from one generation to the next.

A caller who keeps a prompt cache feeds only what is new in the next call. The drafter's
caches then travel in the same list, behind the model's: they are stock caches, so that
stock saves, loads, copies and trims them with the others.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from .drafters.base import Drafter, gives
from .state.commit import flat


@dataclass(frozen=True)
class Around:
    """What a server knows around a prompt, which stock's `generate_step` never asks.

    Args:
        before: Tokens that the prompt cache holds, for logits processors to see as
            they see the prompt; stock's `generate_step` shows them the prompt alone,
            its batches show them all.
        begun: `(V,)`, the log-probabilities from which somebody else has chosen the
            last token of the prompt; it is then the first that is yielded.
        checkpoints: Length of a part of the prompt -> what is given that length and
            copies of all caches behind it.
    """

    before: Sequence[int] = ()
    begun: mx.array | None = None
    checkpoints: Mapping[int, Callable[[int, list[Any]], None]] = field(
        default_factory=dict
    )


class Carried:
    """A prompt cache taken apart: the model's entries, and the drafter's behind them.

    Args:
        prompt_cache: The caller's list, kept up to date; None if there is none.
        model: The target.
        drafter: Resumed from its entries, if it can be.
        max_kv_size: Of the caches that are made if there are none.
    """

    def __init__(
        self,
        prompt_cache: list[Any] | None,
        model: nn.Module,
        drafter: Drafter,
        max_kv_size: int | None = None,
    ) -> None:
        made = make_prompt_cache(model, max_kv_size=max_kv_size)
        self._list = made if prompt_cache is None else prompt_cache
        self._carries = isinstance(prompt_cache, list) and "caches" in gives(drafter)
        self._models = len(made)
        self._drafter: Any = drafter
        self.caches = self._list[: self._models]

    @property
    def resident(self) -> int:
        """Tokens that the model's caches hold; 0 if none of them counts."""
        offsets = [getattr(cache, "offset", 0) for cache in flat(self.caches)]
        return max((n for n in offsets if isinstance(n, int)), default=0)

    def begin(self) -> int:
        """Start the drafter; returns how many cached tokens it has not seen."""
        self._drafter.begin()
        entries = self._list[self._models :]
        seen = 0
        if entries and self._carries:
            # They come back at the end; a generation that fails leaves none behind.
            del self._list[self._models :]
            seen = self._drafter.resume(entries)
        return max(self.resident - seen, 0)

    def update(self) -> None:
        """The model's caches may have been replaced, as stock does to quantise them."""
        self._list[: self._models] = self.caches

    def copied(self) -> list[Any]:
        """Copies of all caches as they are now, the drafter's among them."""
        entries = self._drafter.suspend() if self._carries else ()
        return copy.deepcopy([*self.caches, *entries])

    def end(self) -> None:
        """Put what the drafter has seen behind the model's entries."""
        if self._carries:
            entries: Sequence[Any] = self._drafter.suspend()
            self._list[self._models :] = entries
            mx.async_eval([entry.state for entry in entries])
