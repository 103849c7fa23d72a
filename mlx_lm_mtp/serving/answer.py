"""What a request has been told so far, wherever its tokens come from.

A request may move between stock's batch and a thread that drafts for it. An
:class:`Answer` stands in the place of the queue through which stock tells it things,
and keeps what the other side needs so as to go on: the tokens, the caches, the state of
the text, and of the stop sequences.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx

if TYPE_CHECKING:
    from .asked import Asked


class Left(NamedTuple):
    """What one side leaves to the other.

    Args:
        caches: They hold all tokens but the last one.
        token: The last one, if it is yet to be told: the batch has chosen it.
        logprobs: `(V,)`, what it was chosen from.
    """

    caches: list[Any]
    token: int | None = None
    logprobs: mx.array | None = None


Request = tuple["Answer", Any, Any]
"""One of stock's server: what it listens to, the request, its arguments."""


class Answer:
    """A queue of stock's, and what went through it.

    Args:
        queue: What the request listens to.
        request, args: The request, as stock has it.

    Attributes:
        said: The tokens that it was told.
        prompt: Those of its prompt.
        batchable: Whether stock would decode it in its batch.
        moving: Whether the one who computes is about to leave it to the other.
        cancelled: Whether nobody listens any more.
        left: What the one before has left.
    """

    def __init__(self, queue: Any, request: Any, args: Any) -> None:
        self.queue = queue
        self.request = request
        self.args = args
        self.said: list[int] = []
        self.prompt: list[int] = []
        self.batchable = False
        self.moving = False
        self.cancelled = False
        self.left: Left | None = None
        self._context: Any = None  # of the one who computes now
        self._detokenizer: Any = None

    @property
    def asked(self) -> Asked:
        """How it is to be drafted for."""
        return self.args.asked

    @property
    def drafted(self) -> bool:
        """Whether drafts are wanted."""
        return self.asked.draft is not None and self.asked.options.num_draft_tokens > 0

    # --- what stock does with a queue ---------------------------------------------

    def put(self, item: Any) -> None:
        """Pass on what is news: a context, progress, a response, an error, the end."""
        if hasattr(item, "finish_reason"):
            self.queue.put(self._told(item))
        elif hasattr(item, "stop"):
            self._computed_by(item)
        elif item is None:
            if not self.moving:
                self.queue.put(None)
        elif isinstance(item, Exception) or not self.said:
            self.queue.put(item)

    def _computed_by(self, context: Any) -> None:
        """Whoever listens is shown the first context, and may stop the latest."""
        first, self._context = self._context is None, context
        if self.cancelled:
            context.stop()
        if first:
            context.stop = self._cancel
            self.queue.put(context)

    def _cancel(self) -> None:
        self.cancelled = True
        self._context._should_stop = True

    def _told(self, response: Any) -> Any:
        self.said.append(response.token)
        self.asked.told += 1
        if response.finish_reason is not None:
            self.moving = False
        if self._detokenizer is not None:
            response.text = self._text(response)
        return response

    def _text(self, response: Any) -> str:
        """As stock has it, with the tokens before the move taken into account."""
        if response.finish_reason != "stop":
            self._detokenizer.add_token(response.token)
        if response.finish_reason is not None:
            self._detokenizer.finalize()
        return self._detokenizer.last_segment

    # --- moving -------------------------------------------------------------------

    def leave(self) -> None:
        """Have stock's batch let go of it, as of one that was cancelled."""
        self.moving = True
        self._context._should_stop = True

    def rest(self, left: Left) -> Request:
        """The request that asks for what is still to be told."""
        self.left = left
        args = copy.copy(self.args)
        args.max_tokens -= len(self.said)
        return self, self.request, args

    def take(self) -> list[Any]:
        """The caches that were left; they are kept here no longer."""
        assert self.left is not None
        caches, self.left = self.left.caches, self.left._replace(caches=[])
        return caches

    def resume(self, tokenizer: Any) -> list[int]:
        """All tokens so far; the text goes on where it was."""
        self.moving = False
        if self._detokenizer is None:
            self._detokenizer = tokenizer.detokenizer
            for token in self.said:
                self._detokenizer.add_token(token)
            self._detokenizer.last_segment  # noqa: B018  # it was told
        assert self.left is not None
        more = [] if self.left.token is None else [self.left.token]
        return [*self.prompt, *self.said, *more]


class Resumed:
    """Stock's stop sequences, behind tokens that have been looked at.

    Args:
        stop_sequences: Stock's.
        said: These tokens.
    """

    def __init__(self, stop_sequences: Any, said: list[int]) -> None:
        self._stop_sequences = stop_sequences
        self._said = said

    def matcher(self) -> Any:
        """Stock's, in the state behind them."""
        matcher = self._stop_sequences.matcher()
        for token in self._said:
            matcher.advance(token)
        return matcher
