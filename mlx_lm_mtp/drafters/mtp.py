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

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from ..hookspecs import Register, hookimpl
from ..state.snapshot import restore, snapshot
from . import stepwise
from .base import (
    CHAIN,
    CONTRACT,
    OFFERS,
    Branch,
    Choices,
    Choose,
    DraftContext,
    Proposal,
    Wanted,
)

if TYPE_CHECKING:
    from ..heads.head import MTPHead
    from ..heads.readout import Readout

_MANY = 32  # unfed pairs beyond which they are fed even though nothing is drafted


class Depth(NamedTuple):
    """The head's answer at one depth."""

    hidden: mx.array  # (1, 1, H), its output
    chosen: Choices


class MTPDrafter:
    """Drafts with an MTP head.

    Args:
        head: The head, as :func:`mlx_lm_mtp.load_head` gives it.
        readout: What makes logits of its output; by default its lm_head.
    """

    name = "mtp"
    needs_hidden = True
    gives = OFFERS - {"continues"}

    def __init__(self, head: MTPHead, readout: Readout | None = None) -> None:
        self.head = head
        self.hidden = head.family.hidden
        if readout is None:
            from ..heads.readout import Readout

            readout = Readout(head)
        self.readout = readout
        self.begin()

    @property
    def suspicion(self) -> str:
        """What is probably wrong if none of its drafts is ever accepted."""
        return (
            f"the MTP head, {self.head.provenance}, is probably another model's, or "
            "its norms are written otherwise; run `mlx_lm_mtp doctor` on the model."
        )

    def begin(self) -> None:
        """Start with an empty cache."""
        self.readout.begin()
        self.cache = self.head.new_cache()
        # Pairs not fed yet: `_hidden` may be one longer than `_tokens`, since the
        # last hidden state waits for the token that follows.
        self._tokens: mx.array | None = None
        self._hidden: mx.array | None = None
        self._observed: mx.array | None = None  # of the last round, `(1, n, H)`

    def prefill(self, tokens: mx.array, hidden: mx.array | None) -> None:
        """Feed every pair of this chunk, so that drafting knows the whole prompt."""
        self.readout.see(tokens)
        self._note(tokens, hidden)
        if self._tokens is not None and self._tokens.shape[1]:
            self._feed()
            mx.eval(self.cache.state, self._hidden)

    def observe(self, tokens: mx.array, hidden: mx.array | None) -> None:
        """Note the pairs down; the next draft feeds them in the same forward."""
        self._note(tokens, hidden)
        self._observed = hidden
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
        """k tokens, one after the other, each its first choice.

        Which is the likeliest one, unless ``wanted.choose`` takes another.
        """
        assert self._tokens is not None, "prefill comes before draft"
        self._tokens = mx.concatenate([self._tokens, token], axis=1)
        hidden = self._feed()[:, -1:]
        self._tokens = self._hidden = None
        outputs = [hidden]  # of the head, at each depth

        def following(draft: mx.array) -> mx.array:
            outputs.append(self.head(draft, outputs[-1], self.cache))
            return self.readout.logits(outputs[-1])

        chosen = stepwise.chain(self.readout.logits(hidden), k, wanted, following)
        branches = self._branches(list(map(Depth, outputs, chosen)), wanted)
        self.cache.trim(len(chosen) - 1)
        return stepwise.proposal(chosen, wanted, branches)

    def _branches(self, chain: list[Depth], wanted: Wanted) -> tuple[Branch, ...]:
        """Paths that leave the chain, each computed only if it is looked at."""
        positions = wanted.branches
        if not positions:
            return ()
        saved = snapshot([self.cache])
        found = []
        for i, position in enumerate(positions):
            choice = 1 + positions[:i].count(position)
            if (
                position < len(chain)
                and choice < chain[position].chosen.tokens.shape[-1]
            ):
                choose = wanted.choose or stepwise.likeliest
                found.append(self._branch(chain, position, choice, choose))
                restore([self.cache], saved)
        return tuple(found)

    def _branch(
        self, chain: list[Depth], position: int, choice: int, choose: Choose
    ) -> Branch:
        self.cache.trim(len(chain) - 1 - position)
        token = chain[position].chosen.tokens[..., choice]
        before = stepwise.drafted([depth.chosen for depth in chain[:position]])
        path = mx.concatenate([before, token], axis=1)
        hidden = chain[position].hidden
        for _ in range(len(chain) - 1 - position):
            hidden = self.head(path[:, -1:], hidden, self.cache)
            following = choose(self.readout.logits(hidden), path).tokens[..., 0]
            path = mx.concatenate([path, following.astype(mx.uint32)], axis=1)
        return Branch(position, token, path[:, position + 1 :])

    def rewind(self, tokens: int) -> None:
        """Go back; see :class:`.base.Rewinding`."""
        assert self._observed is not None, "observe comes before rewind"
        self.cache.trim(1 + tokens)  # with the pair of the pending token
        last = self._observed.shape[1] - tokens
        self._hidden = self._observed[:, last - 1 : last]
        self._tokens = mx.zeros((1, 0), dtype=mx.uint32)

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
        shapes = [*self.head.cache_shape, (1, self.head.size)]
        arrays = [caches[0].keys, caches[0].values, caches[1].keys]
        return caches[1].offset <= 1 and all(
            array is None or (array.shape[1], array.shape[3]) == shape
            for array, shape in zip(arrays, shapes, strict=True)
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


def _build(context: DraftContext) -> MTPDrafter:
    from ..heads import head_of
    from ..heads.readout import CheapReadout

    options = context.options
    head = head_of(context.model, options.head)
    if not (options.draft_head_bits or options.shortlist):
        return MTPDrafter(head)
    cheap = (options.draft_head_bits, options.shortlist, context.tokenizer)
    return MTPDrafter(head, CheapReadout(head, *cheap))


@hookimpl
def mlx_lm_mtp_register_drafters(register: Register) -> None:
    """Register the drafter that this package is named after."""
    register("mtp", _build, contract=CONTRACT)
