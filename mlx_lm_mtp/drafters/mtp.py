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

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from ..heads import head_of
from ..heads.qwen import MTPHead
from ..hookspecs import hookimpl
from ..state.snapshot import restore, snapshot
from .base import (
    CHAIN,
    OFFERS,
    Branch,
    DraftContext,
    DrafterFactory,
    Proposal,
    Wanted,
)

_FEW = 3
_MANY = 32  # unfed pairs beyond which they are fed even though nothing is drafted


class Depth(NamedTuple):
    """The head's answer at one depth."""

    hidden: mx.array  # (1, 1, H), its output
    logits: mx.array  # (1, 1, V)
    choices: mx.array  # (1, 1, C), the best first


class MTPDrafter:
    """Drafts with an MTP head.

    Args:
        head: The head, as :func:`mlx_lm_mtp.load_head` gives it.
    """

    name = "mtp"
    needs_hidden = True
    gives = OFFERS

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

    def draft(self, token: mx.array, k: int, wanted: Wanted = CHAIN) -> Proposal:
        """k tokens, one after the other, each the head's first choice."""
        assert self._tokens is not None, "prefill comes before draft"
        self._tokens = mx.concatenate([self._tokens, token], axis=1)
        hidden = self._feed()[:, -1:]
        self._tokens = self._hidden = None
        chain = self._chain(hidden, k, wanted)
        branches = self._branches(chain, wanted.branches)
        self.cache.trim(len(chain) - 1)
        listed = max(wanted.candidates, 1)
        choices = mx.concatenate(
            [depth.choices[..., :listed] for depth in chain], axis=1
        )
        return Proposal(
            choices[..., 0],
            confidence=_confidence(chain) if wanted.confidence else None,
            candidates=choices if wanted.candidates else None,
            branches=branches,
        )

    def _chain(self, hidden: mx.array, k: int, wanted: Wanted) -> list[Depth]:
        """Depth after depth, on from the `(1, 1, H)` answer to the pending pair."""
        chain: list[Depth] = []
        while True:
            branches = wanted.branches.count(len(chain))
            chain.append(self._answer(hidden, max(1 + branches, wanted.candidates)))
            last = chain[-1]
            if len(chain) == k:
                return chain
            if wanted.go_on is not None and not wanted.go_on(_confidence([last])):
                return chain
            hidden = self.head(last.choices[..., 0], last.hidden, self.cache)

    def _branches(
        self, chain: list[Depth], positions: Sequence[int]
    ) -> tuple[Branch, ...]:
        """Paths that leave the chain, each computed only if it is looked at."""
        if not positions:
            return ()
        saved = snapshot([self.cache])
        found = []
        for i, position in enumerate(positions):
            choice = 1 + positions[:i].count(position)
            if position < len(chain) and choice < chain[position].choices.shape[-1]:
                found.append(self._branch(chain, position, choice))
                restore([self.cache], saved)
        return tuple(found)

    def _branch(self, chain: list[Depth], position: int, choice: int) -> Branch:
        self.cache.trim(len(chain) - 1 - position)
        token = chain[position].choices[..., choice]
        hidden, rest = chain[position].hidden, [token]
        for _ in range(len(chain) - 1 - position):
            hidden = self.head(rest[-1], hidden, self.cache)
            rest.append(mx.argmax(self.head.logits(hidden), axis=-1))
        tokens = mx.concatenate(rest, axis=1).astype(mx.uint32)
        return Branch(position, token, tokens[:, 1:])

    def _answer(self, hidden: mx.array, choices: int) -> Depth:
        """What `(1, 1, H)` hidden states of the head say, and its best choices."""
        logits = self.head.logits(hidden)
        return Depth(hidden, logits, _best(logits, choices).astype(mx.uint32))

    def resume(self, caches: Sequence[Any]) -> int:
        """Take over what :meth:`suspend` gave; see :class:`.base.Carrying`."""
        if not self._knows(caches):
            return 0
        self.cache, last = caches
        if last.offset != 1:  # trimmed away: one pair is lost
            return self.cache.offset
        self._hidden = last.keys[:, 0, :1]
        self._tokens = mx.zeros((1, 0), dtype=mx.uint32)
        return self.cache.offset + 1

    def _knows(self, caches: Sequence[Any]) -> bool:
        """Whether these may be what `suspend` gave, and not another drafter's."""
        if [type(cache) for cache in caches] != [KVCache, KVCache]:
            return False
        attention = self.head.layers[0].self_attn
        size = self.head.pre_fc_norm_hidden.weight.size
        shapes = [(attention.num_key_value_heads, attention.head_dim), (1, size)]
        return caches[1].offset <= 1 and all(
            cache.keys is None or (cache.keys.shape[1], cache.keys.shape[3]) == shape
            for cache, shape in zip(caches, shapes, strict=True)
        )

    def suspend(self) -> list[Any]:
        """The head's cache, and the hidden state that waits for the next token.

        The hidden state stands in a cache of its own, as if it were the keys of one
        token: trimming the list drops it, as it must.
        """
        if self._tokens is not None and self._tokens.shape[1]:
            self._feed()
        if self._hidden is None or self._hidden.shape[1] != 1:
            return [self.cache, KVCache()]
        waiting = self._hidden[:, None]
        return [self.cache, KVCache.from_state((waiting, waiting, 1))]

    def _feed(self) -> mx.array:
        """Feed all pairs whose token is known, `(1, T)`; gives `(1, T, H)`."""
        assert self._tokens is not None and self._hidden is not None
        tokens, pairs = self._tokens, self._tokens.shape[1]
        known = self._hidden[:, :pairs]
        # Contiguous, for a view would keep all of a long chunk alive.
        self._hidden = mx.contiguous(self._hidden[:, pairs:])
        self._tokens = tokens[:, pairs:]
        return self.head(tokens, known, self.cache)


def _best(logits: mx.array, n: int) -> mx.array:
    """The n likeliest tokens of `(1, 1, V)` logits, `(1, 1, n)`, in order."""
    n = min(n, logits.shape[-1])
    if n <= _FEW:
        return _best_in_turn(logits, n)
    best = mx.argpartition(-logits, n - 1, axis=-1)[..., :n]
    order = mx.argsort(-mx.take_along_axis(logits, best, axis=-1), axis=-1)
    return mx.take_along_axis(best, order, axis=-1)


def _best_in_turn(logits: mx.array, n: int) -> mx.array:
    """The same for a few: to look for the largest n times is quicker than to sort."""
    found = []
    for _ in range(n):
        if found:
            lowest = mx.array(-mx.inf, dtype=logits.dtype)
            logits = mx.put_along_axis(logits, found[-1], lowest, axis=-1)
        found.append(mx.argmax(logits, axis=-1, keepdims=True))
    return mx.concatenate(found, axis=-1) if n > 1 else found[0]


def _confidence(chain: Sequence[Depth]) -> mx.array:
    """The head's probability of each first choice, `(1, k')` in float32."""
    logits = mx.concatenate([depth.logits for depth in chain], axis=1)
    logits = logits.astype(mx.float32)
    return mx.exp(mx.max(logits, axis=-1) - mx.logsumexp(logits, axis=-1))


def _build(context: DraftContext) -> MTPDrafter:
    return MTPDrafter(head_of(context.model))


@hookimpl
def mlx_lm_mtp_register_drafters(
    register: Callable[[str, DrafterFactory], None],
) -> None:
    """Register the drafter that this package is named after."""
    register("mtp", _build)
