"""A second, smaller model as a drafter.

It reads what the target keeps, and goes on by itself: token by token, one forward each.
Before every token that may be rejected its caches are noted down, as far as they cannot
be trimmed, so that models with recurrent layers can draft as well as be drafted for
(Leviathan et al. 2023, arXiv:2211.17192).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from ..anatomy import embedding
from ..declared import option
from ..errors import InvalidOption
from ..hookspecs import Register, hookimpl
from ..origin import ByModel
from ..state.commit import flat
from ..state.recurrence import Recurrence
from ..state.snapshot import Snapshot
from ..state.verified import light_restore, light_snapshot
from ..target import Target
from . import stepwise
from .base import CHAIN, CONTRACT, DraftContext, Proposal, Wanted
from .vocabulary import check_same_vocabulary

_MANY = 32  # unfed tokens beyond which they are fed even though nothing is drafted


@dataclass(frozen=True)
class DraftModelOptions:
    """Which model drafts.

    Args:
        model: A folder or a repository; by default the draft model that is given.
    """

    model: str = option("", help="folder or repository of the draft model")


@dataclass
class _Fed:
    """What drafting has fed, so that any part of it can be taken back.

    Args:
        unfed: `(1, u)`, tokens that were kept before, and fed with the path.
        path: `(1, m)`.
        inputs: What was fed, the path first, then each draft but the last.
        before: What :func:`light_snapshot` gave before each of them.
    """

    unfed: mx.array
    path: mx.array
    inputs: list[mx.array] = field(default_factory=list)
    before: list[list[Snapshot | None]] = field(default_factory=list)

    @property
    def width(self) -> int:
        """Tokens of the path and drafts behind it that were fed."""
        return self.path.shape[1] + len(self.inputs) - 1

    def same(self, tokens: mx.array) -> int:
        """How many of `(1, n)` tokens were fed.

        Drafts have been computed by now, and so nothing is waited for.
        """
        fed = [token for array in self.inputs for token in array.tolist()[0]]
        pairs = zip(fed, tokens.tolist()[0], strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


class DraftModelDrafter:
    """Drafts with a model of its own, which shares the target's vocabulary.

    Args:
        model: A model of mlx-lm.
    """

    name = "draft-model"
    needs_hidden = False
    gives = frozenset(
        {"confidence", "candidates", "logprobs", "caches", "continues", "rewind"}
    )

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        # On CUDA stock loops over ops where a kernel of ours computes the recurrence.
        self._forward = Target(model, recurrence=Recurrence())
        weight = getattr(embedding(model), "weight", None)
        self._rows = None if weight is None else weight.shape[0]
        self.begin()

    def begin(self) -> None:
        """Start with empty caches."""
        self.caches = make_prompt_cache(self.model)
        self._unfed = mx.zeros((1, 0), dtype=mx.uint32)
        self._fed: _Fed | None = None  # since `observe`
        self._observed: tuple[mx.array, _Fed | None] | None = None

    def prefill(self, tokens: mx.array, hidden: mx.array | None) -> None:
        """Feed `(1, T)` tokens of the prompt."""
        self._unfed = mx.concatenate([self._unfed, tokens], axis=1)
        self._feed_unfed()
        mx.eval([cache.state for cache in self.caches])

    def draft(self, token: mx.array, k: int, wanted: Wanted = CHAIN) -> Proposal:
        """k tokens behind the pending `(1, 1)` token, one after the other."""
        return self.draft_behind(token, k, wanted)

    def draft_behind(self, path: mx.array, k: int, wanted: Wanted = CHAIN) -> Proposal:
        """The same behind `(1, m)` tokens; see :class:`.base.Continuing`."""
        self._take_back()
        fed = self._fed = _Fed(self._unfed, path)
        self._unfed = self._unfed[:, :0]

        def following(tokens: mx.array) -> mx.array:
            fed.before.append(light_snapshot(self.caches))
            first = not fed.inputs
            fed.inputs.append(tokens)
            both = (fed.unfed, tokens.astype(mx.uint32))
            return self._feed(mx.concatenate(both, axis=1) if first else tokens)

        chosen = stepwise.chain(following(path), k, wanted, following)
        return stepwise.proposal(chosen, wanted)

    def observe(self, tokens: mx.array, hidden: mx.array | None) -> None:
        """Keep of what was fed the `(1, n)` tokens that the target has kept."""
        fed, self._fed = self._fed, None
        self._observed = tokens, fed
        if fed is not None:
            self._keep(fed, fed.width, tokens)
            return
        self._unfed = mx.concatenate([self._unfed, tokens], axis=1)
        if self._unfed.shape[1] > _MANY:
            self._feed_unfed()
            mx.async_eval([cache.state for cache in self.caches])

    def rewind(self, tokens: int) -> None:
        """Go back; see :class:`.base.Rewinding`."""
        assert self._observed is not None, "observe comes before rewind"
        self._take_back()
        observed, fed = self._observed
        left = observed[:, : observed.shape[1] - tokens]
        if fed is None or fed.same(observed) < fed.path.shape[1]:
            self._unfed = self._unfed[:, : self._unfed.shape[1] - tokens]
        else:
            self._keep(fed, fed.same(observed), left)

    def _take_back(self) -> None:
        """Undo a draft of which nothing was kept."""
        fed, self._fed = self._fed, None
        if fed is not None:
            self._keep(fed, fed.width, fed.path[:, :0])

    def _keep(self, fed: _Fed, held: int, tokens: mx.array) -> None:
        """Go from `held` fed inputs back to those that are among these tokens.

        The tokens that are not fed yet, or no longer, wait for the next draft.
        """
        n, m = min(fed.same(tokens), held), fed.path.shape[1]
        if n < m:  # all of what was fed together goes
            light_restore(self.caches, fed.before[0], held + fed.unfed.shape[1])
            self._unfed = mx.concatenate([fed.unfed, tokens], axis=1)
            return
        if n < held:
            light_restore(self.caches, fed.before[n - m + 1], held - n)
        self._unfed = tokens[:, n:]

    def suspend(self) -> list[Any]:
        """The model's caches, as stock keeps them behind the target's."""
        self._take_back()
        self._feed_unfed()
        return list(self.caches)

    def resume(self, caches: Sequence[Any]) -> int:
        """Take over what :meth:`suspend` gave; see :class:`.base.Carrying`."""
        if not self._knows(caches):
            return 0
        self.caches = list(caches)
        offsets = [getattr(cache, "offset", 0) for cache in flat(caches)]
        return max((n for n in offsets if isinstance(n, int)), default=0)

    def _knows(self, caches: Sequence[Any]) -> bool:
        """Whether these may be this model's, judged by what one token leaves there."""
        if list(map(type, caches)) != list(map(type, self.caches)):
            return False
        own = make_prompt_cache(self.model)
        self.model(mx.zeros((1, 1), dtype=mx.uint32), cache=own)  # never computed
        pairs = list(zip(flat(caches), flat(own), strict=True))
        return all(cache.empty() or _kind(cache) == _kind(o) for cache, o in pairs)

    def _feed_unfed(self) -> None:
        if self._unfed.shape[1]:
            self._feed(self._unfed)
            self._unfed = self._unfed[:, :0]

    def _feed(self, tokens: mx.array) -> mx.array:
        """Feed `(1, T)` tokens; gives the last logits, `(1, 1, V)`, lazily."""
        if self._rows is not None:  # the target may have a larger vocabulary
            tokens = mx.minimum(tokens, self._rows - 1)
        return self._forward(tokens, self.caches).logits[:, -1:]


def _kind(cache: Any) -> list[tuple[int, ...]]:
    """The shapes of what a cache holds, but for the number of tokens."""
    tokens = -2 if hasattr(cache, "keys") else None
    return [
        tuple(n for i, n in enumerate(array.shape, -array.ndim) if i != tokens)
        for _, array in tree_flatten(cache.state)
        if isinstance(array, mx.array)
    ]


_loaded: ByModel[dict[str, tuple[nn.Module, Any]]] = ByModel()


def _build(context: DraftContext) -> DraftModelDrafter:
    if not context.own.model:
        if context.draft_model is None:
            raise InvalidOption(
                "drafter 'draft-model' needs a model; name one with --draft-model "
                "(draft_model= in Python), or as draft option draft-model.model."
            )
        return DraftModelDrafter(context.draft_model)
    model, tokenizer = _load(context)
    check_same_vocabulary(context.tokenizer, tokenizer, context.own.model)
    return DraftModelDrafter(model)


def _load(context: DraftContext) -> tuple[nn.Module, Any]:
    """The model of that option, loaded once for a target."""
    from mlx_lm import load

    loaded = _loaded.get(context.model)
    if loaded is None:
        loaded = _loaded[context.model] = {}
    path = context.own.model
    if path not in loaded:
        loaded.clear()  # one at a time is kept
        model, tokenizer, *_ = load(path)
        loaded[path] = model, tokenizer
    return loaded[path]


@hookimpl
def mlx_lm_mtp_register_drafters(register: Register) -> None:
    """Register the drafter that is a model of its own."""
    register("draft-model", _build, options=DraftModelOptions, contract=CONTRACT)
