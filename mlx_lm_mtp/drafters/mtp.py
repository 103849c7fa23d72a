"""The checkpoint's own MTP head as a drafter.

The head pairs the target's hidden state at a token with the *next* token, and predicts
the one after that (Qwen3-Next; DeepSeek-V3 report, arXiv:2412.19437, section 2.2)::

    x_j = fc([norm_e(embed(tok_{j+1})), norm_h(h_j)])  ->  layer  ->  norm  ->  lm_head

For the next depth its own output stands in for the hidden state. The head's KV cache
has one entry a pair. Entries of accepted pairs come from the target's hidden states;
those that drafting adds from the head's own are trimmed away again, so the cache never
holds a rejected token and never outgrows the context.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from ..heads import head_of
from ..heads.qwen import MTPHead
from ..hookspecs import hookimpl
from .base import DraftContext, DrafterFactory, Proposal

_MANY = 32  # unfed pairs beyond which they are fed even though nothing is drafted


class MTPDrafter:
    """Drafts with an MTP head.

    Args:
        head: The head, as :func:`mlx_lm_mtp.load_head` gives it.
    """

    name = "mtp"
    needs_hidden = True

    def __init__(self, head: MTPHead) -> None:
        self.head = head
        self.begin()

    def begin(self) -> None:
        """Start with an empty cache."""
        self.cache = KVCache()
        # Pairs not fed yet: `_hidden` may be one longer than `_tokens`, since the
        # last hidden state waits for the token that follows.
        self._tokens: mx.array | None = None
        self._hidden: mx.array | None = None

    def prefill(self, tokens: mx.array, hidden: mx.array | None) -> None:
        """Feed every pair of this chunk, so that drafting knows the whole prompt."""
        self._note(tokens, hidden)
        if self._tokens is not None and self._tokens.shape[1]:
            self._feed()
            mx.eval(self.cache.state, self._hidden)

    def observe(self, tokens: mx.array, hidden: mx.array | None) -> None:
        """Note the pairs down; the next draft feeds them in the same forward."""
        self._note(tokens, hidden)
        if self._tokens is not None and self._tokens.shape[1] > _MANY:
            self._feed()
            mx.async_eval(self.cache.state)

    def _note(self, tokens: mx.array, hidden: mx.array | None) -> None:
        assert hidden is not None, "this drafter asks for hidden states"
        if self._tokens is None or self._hidden is None:
            # The first token has nothing before it, or was fed when drafting.
            self._tokens, self._hidden = tokens[:, 1:], hidden
        else:
            self._tokens = mx.concatenate([self._tokens, tokens], axis=1)
            self._hidden = mx.concatenate([self._hidden, hidden], axis=1)

    def draft(self, token: mx.array, k: int) -> Proposal:
        """k tokens, one after the other, each the head's first choice."""
        assert self._tokens is not None, "prefill comes before draft"
        self._tokens = mx.concatenate([self._tokens, token], axis=1)
        hidden = self._feed()[:, -1:]
        self._tokens = self._hidden = None
        drafts = [self._choose(hidden)]
        for _ in range(k - 1):
            hidden = self.head(drafts[-1], hidden, self.cache)
            drafts.append(self._choose(hidden))
        self.cache.trim(k - 1)
        return Proposal(mx.concatenate(drafts, axis=1))

    def _feed(self) -> mx.array:
        """Feed all pairs whose token is known, `(1, T)`; gives `(1, T, H)`."""
        assert self._tokens is not None and self._hidden is not None
        tokens, pairs = self._tokens, self._tokens.shape[1]
        known = self._hidden[:, :pairs]
        # Contiguous, for a view would keep all of a long chunk alive.
        self._hidden = mx.contiguous(self._hidden[:, pairs:])
        self._tokens = tokens[:, pairs:]
        return self.head(tokens, known, self.cache)

    def _choose(self, hidden: mx.array) -> mx.array:
        return mx.argmax(self.head.logits(hidden), axis=-1).astype(mx.uint32)


def _build(context: DraftContext) -> MTPDrafter:
    return MTPDrafter(head_of(context.model))


@hookimpl
def mlx_lm_mtp_register_drafters(
    register: Callable[[str, DrafterFactory], None],
) -> None:
    """Register the drafter that this package is named after."""
    register("mtp", _build)
