"""Verify several paths at once, beside the caches instead of in them.

The paths lie on the batch axis. A forward reads *stand-ins* of the caches, copies whose
arrays are repeated once a path, and writes into those; the caches themselves are not
touched. What the winner fed is then appended to them: the keys and values that its
layers handed over, and the recurrent state after its last kept token.

So nothing needs to be restored when a forward fails, and the cost of a commit does not
grow with the context.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, KVCache

from . import capture
from .commit import flat
from .verified import Verified

Pair = tuple[mx.array, mx.array]


class StandIns:
    """Copies of caches at batch P, which note down what is appended to them.

    Args:
        caches: At batch 1; they stay as they are.
        paths: P.
    """

    def __init__(self, caches: Sequence[Any], paths: int) -> None:
        self._paths = paths
        self._appended: dict[int, list[Pair]] = {}
        self.caches = [self._stand_in(cache) for cache in caches]

    def appended(self, stand_in: Any) -> Pair | None:
        """The `(P, H, S, D)` keys and values that a layer appended, if any."""
        pairs = self._appended.get(id(stand_in))
        if not pairs:
            return None
        keys, values = (mx.concatenate(x, axis=2) for x in zip(*pairs, strict=True))
        if type(stand_in) is KVCache:
            # A layer may write over it, as an indexer does that needs no values.
            rows = slice(stand_in.offset - keys.shape[2], stand_in.offset)
            return stand_in.keys[..., rows, :], stand_in.values[..., rows, :]
        return keys, values

    def _stand_in(self, cache: Any) -> Any:
        made = copy.copy(cache)
        for name, value in vars(cache).items():
            setattr(made, name, self._repeated(value))
        if hasattr(made, "update_and_fetch"):
            made.update_and_fetch = self._noting(made)
        return made

    def _repeated(self, value: Any) -> Any:
        if isinstance(value, mx.array):
            return mx.repeat(value, self._paths, axis=0)
        if isinstance(value, (list, tuple)):
            return type(value)(map(self._repeated, value))
        return self._stand_in(value) if hasattr(value, "state") else value

    def _noting(self, stand_in: Any) -> Callable[[mx.array, mx.array], Any]:
        pairs = self._appended.setdefault(id(stand_in), [])
        stock = type(stand_in).update_and_fetch
        # Weakly, for the stand-in will hold this function: in a circle, its arrays
        # would live on until the garbage collector comes by.
        owner = weakref.ref(stand_in)

        def update_and_fetch(keys: mx.array, values: mx.array) -> Any:
            pairs.append((keys, values))
            return stock(owner(), keys, values)

        return update_and_fetch


class SideBySide(Verified):
    """The caches after paths were verified beside them; `commit` appends one of them.

    Args:
        caches: At batch 1, as they were before.
        width: Inputs of each path.
        stand_ins: What the forward wrote into.
        recording: Of that forward.
        feed: Feeds the first n inputs of a path to the caches, which is how one is
            kept that was neither appended to nor recorded.
    """

    def __init__(
        self,
        caches: Sequence[Any],
        width: int,
        stand_ins: StandIns,
        recording: capture.Recording,
        feed: Callable[[int, int], None],
    ) -> None:
        super().__init__(caches, width)
        self.kept = 0
        self._stand_ins = stand_ins
        self._recording = recording
        self._feed = feed
        self._width = width

    def _keep(self, n: int) -> None:
        pairs = zip(flat(self.caches), flat(self._stand_ins.caches), strict=True)
        appends = [self._append(cache, made, n) for cache, made in list(pairs)]
        if all(appends):
            for append in appends:
                append()  # type: ignore[misc]
        else:
            self._feed(n, self.row)

    def _append(self, cache: Any, made: Any, n: int) -> Callable[[], Any] | None:
        """What appends n inputs of a path to one cache; None if nothing can."""
        one = slice(self.row, self.row + 1)
        if isinstance(cache, ArraysCache):
            record = self._recording.layer_of(made)
            if record is None or record.width != self._width:
                return None
            return lambda: _put(cache, record, n, one)
        appended = self._stand_ins.appended(made)
        if appended is None or appended[0].shape[2] != self._width:
            return None
        keys, values = (mx.contiguous(x[one, :, :n]) for x in appended)
        return lambda: cache.update_and_fetch(keys, values)


def _put(cache: ArraysCache, record: capture.LayerRecord, n: int, one: slice) -> None:
    capture.put(cache, record, n)
    cache.cache = [mx.contiguous(x[one]) for x in cache.cache]
    cache.advance(n)
