"""Stock's batch in a server, which lets go of a request that has come to be alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator

from .answer import Answer, Left, Request
from .asked import BATCHED
from .serving import Serving

_PATIENCE = 4  # steps alone; the next request of a client follows at once, or late


class Batch(BatchGenerator):
    """Knows whose tokens it computes.

    Args:
        serving: The server's; its `batched` are the requests in here.
        draft: Serves a request in a thread that drafts for it.
    """

    def __init__(
        self,
        serving: Serving,
        draft: Callable[[Request], None],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._serving = serving
        self._draft = draft
        self._alone = 0  # steps with one request
        serving.batched.clear()

    def insert_segments(self, *args: Any, **kwargs: Any) -> list[int]:
        """Stock's; the request is the one whose prompt was looked at last."""
        uids = super().insert_segments(*args, **kwargs)
        for uid in uids:
            self._serving.batched[uid] = self._serving.joining
        return uids

    def next(self) -> Any:
        """Stock's; who is alone is let go of, once it has been told something."""
        found = super().next()
        for response in found[1]:
            self._serving.batched[response.uid].asked.batched += 1
            if response.finish_reason is not None:
                del self._serving.batched[response.uid]
        alone = self._serving.alone and len(self._serving.batched) == 1
        self._alone = self._alone + 1 if alone else 0
        if self._alone > _PATIENCE:
            ((uid, answer),) = self._serving.batched.items()
            begun = answer.said and uid in self._generation_batch.uids
            if begun and answer.asked.reason == BATCHED:
                answer.leave()
        return found

    def remove(self, uids: Any, *args: Any, **kwargs: Any) -> Any:
        """Stock's; who leaves so as to be drafted for takes the caches along."""
        for uid in set(uids) & set(self._serving.batched):
            answer = self._serving.batched.pop(uid)
            if answer.moving and not answer.cancelled:
                self._hand_over(uid, answer)
        return super().remove(uids, *args, **kwargs)

    def _hand_over(self, uid: int, answer: Answer) -> None:
        batch = self._generation_batch
        i = batch.uids.index(uid)
        with mx.stream(self.stream):
            caches = batch.extract_cache(i)
            chosen, logprobs = batch._next_tokens[i], batch._next_logprobs[i]
            # Another thread will read them.
            mx.eval(chosen, logprobs, [cache.state for cache in caches])
        answer.asked.reason = ""
        self._draft(answer.rest(Left(caches, chosen.item(), logprobs)))
