"""One drafter on one tiny model: generations with drafts, beside stock's."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.sample_utils import LogitsProcessor, Sampler

from .. import random_state
from ..drafters.base import DraftContext, Drafter, gives, hidden_for
from ..errors import DrafterError
from ..options import DraftOptions
from ..origin import path_of
from ..stats import Tally
from ..stock_api import resolve
from ..target import Target
from . import oracle
from .models import TinyModel
from .scripted import Branching, right_where
from .tokenizer import tiny_tokenizer
from .wrapped import Steered, Watched, Wrapped

# Tokens that were seen before follow one another otherwise than in the model `cycle`.
PROMPT = (12, 40, 13, 41, 14, 12, 40, 13, 41, 14, 12)
_CHUNK = 4  # prompt tokens in one forward, so that there are several
_CHAINS = {"num_draft_tokens": 3, "depth": "fixed", "paths": 1, "rescue": 0, "probe": 0}
Wrap = Callable[[Any], Wrapped]


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; both are made anew for every run, for they may keep state.

    Args:
        sampler: Makes the sampler.
        processors: Makes the logits processors.
    """

    sampler: Callable[[], Sampler | None] = lambda: None
    processors: Callable[[], list[LogitsProcessor]] = list

    def arguments(self) -> dict[str, Any]:
        """As `generate_step` takes them."""
        return {"sampler": self.sampler(), "logits_processors": self.processors()}


GREEDY = Sampling()


@dataclass(frozen=True)
class Maker:
    """What makes the drafter that is checked.

    Args:
        factory: The name of a drafter, or what builds one: with a `DraftContext`, or
            with nothing if it can be called so.
        options: Those that every generation has.
    """

    factory: Any
    options: DraftOptions

    def __call__(
        self, model: nn.Module, tokenizer: Any, options: DraftOptions
    ) -> Drafter:
        """A new drafter.

        Raises:
            DraftError: If what is made is no drafter.
        """
        made = self.factory
        if not isinstance(made, str):
            with random_state.untouched():
                if _needs_context(made):
                    context = DraftContext(model, tokenizer, options, path_of(model))
                    made = made(context)
                else:
                    made = made()
        drafter = resolve(made, model, tokenizer, options)
        assert drafter is not None  # for k is not 0
        return drafter


def _needs_context(factory: Callable[..., Any]) -> bool:
    """Whether a factory can be called with an argument only."""
    if not callable(factory):
        raise TypeError(
            f"a drafter cannot be made by {factory!r}; give what makes it: its "
            "factory, its class, or the name under which it is registered."
        )
    parameters = list(inspect.signature(factory).parameters.values())
    return bool(parameters) and (
        parameters[0].kind is inspect.Parameter.VAR_POSITIONAL
        or parameters[0].default is inspect.Parameter.empty
        and parameters[0].kind is not inspect.Parameter.KEYWORD_ONLY
        and parameters[0].kind is not inspect.Parameter.VAR_KEYWORD
    )


class Trial:
    """A drafter's generations on one model.

    Args:
        maker: What makes the drafter.
        tiny: The model.
        prompt: Token ids; those beyond the vocabulary are brought into it.

    Attributes:
        counts: Of all generations: tokens that were drafted, accepted and rescued,
            ``own`` those that were not steered.
    """

    def __init__(
        self, maker: Maker, tiny: TinyModel, prompt: Sequence[int] = PROMPT
    ) -> None:
        self.maker = maker
        self.tiny = tiny
        self.model = tiny.build()
        self._stocks_model = tiny.build()
        self.tokenizer = tiny.tokenizer or tiny_tokenizer()
        logits = self._stocks_model(mx.array([[0]]))
        self.vocabulary = logits.shape[-1]
        self.prompt = [token % self.vocabulary for token in prompt]
        self.counts: Counter[str] = Counter()
        self._greedy: dict[int, oracle.Result] = {}
        self.gives = gives(self.drafter())

    # --- what runs --------------------------------------------------------------------

    def options(self, **changes: Any) -> DraftOptions:
        """Those of the caller with chains of three drafts, and with changes."""
        return replace(self.maker.options, **{**_CHAINS, **changes})

    def drafter(self, options: DraftOptions | None = None) -> Watched:
        """A new drafter, watched; it is built for drafts even if k is 0."""
        options = options or self.options()
        if not options.num_draft_tokens:
            options = replace(options, num_draft_tokens=1)
        return Watched(self.maker(self.model, self.tokenizer, options))

    def unsuited(self) -> str:
        """Why the drafter cannot be used with this model, or ""."""
        try:
            Target(self._stocks_model, hidden_for(self.drafter(), "auto"))
        except DrafterError as error:
            return str(error)
        return ""

    def steered(self, watched: Watched, n: int, pattern: str) -> Steered:
        """The drafter made to say stock's n greedy tokens where the pattern has a 1."""
        return Steered(watched, self._script(self.stock(n).tokens, pattern))

    def _script(
        self, truth: Sequence[int], pattern: str, kinds: Sequence[str] = ("right",)
    ) -> Branching:
        right, sure = right_where(pattern), (1.0, 1.0, 0.1)
        return Branching(truth, right, kinds, sure, vocabulary=self.vocabulary)

    def stock(
        self,
        n: int,
        sampling: Sampling = GREEDY,
        *,
        prompt: Sequence[int] | None = None,
        caches: list[Any] | None = None,
        seed: int = 0,
    ) -> oracle.Result:
        """Stock's first n tokens, and the caches behind them."""
        usual = sampling is GREEDY and prompt is None and caches is None and seed == 0
        if usual and n in self._greedy:
            return self._greedy[n]
        made = oracle.stock(
            self._stocks_model,
            self.prompt if prompt is None else prompt,
            n,
            seed=seed,
            caches=self.tiny.caches(self._stocks_model) if caches is None else caches,
            **self._arguments(sampling),
        )
        if usual:
            self._greedy[n] = made
        return made

    def drafted(
        self,
        drafter: Drafter,
        n: int,
        sampling: Sampling = GREEDY,
        *,
        options: DraftOptions | None = None,
        prompt: Sequence[int] | None = None,
        caches: list[Any] | None = None,
        seed: int = 0,
        **kwargs: Any,
    ) -> oracle.Result:
        """The same with drafts; the drafts are counted."""
        stats = kwargs.pop("stats", None) or Tally()
        try:
            return oracle.drafted(
                self.model,
                self.prompt if prompt is None else prompt,
                n,
                drafter,
                options=options or self.options(),
                seed=seed,
                caches=self.tiny.caches(self.model) if caches is None else caches,
                stats=stats,
                **self._arguments(sampling),
                **kwargs,
            )
        finally:
            self._count(stats, own=isinstance(drafter, Watched))

    def hidden(self, tokens: Sequence[int]) -> list[mx.array | None]:
        """The `(H,)` hidden states that the drafter asks for, at each of the tokens,
        which are fed one by one; None each if it asks for none."""
        wanted = hidden_for(self.drafter(), self.options().hidden)
        target = Target(self._stocks_model, wanted)
        caches = self.tiny.caches(self._stocks_model)
        found: list[mx.array | None] = []
        for token in tokens:
            forward = target(mx.array([[token]]), caches)
            mx.eval(forward.logits, [cache.state for cache in caches])
            found.append(None if forward.hidden is None else forward.hidden[0, 0])
        return found

    def _arguments(self, sampling: Sampling) -> dict[str, Any]:
        return {
            "stream": mx.default_stream(mx.default_device()),
            "prefill_step_size": _CHUNK,
            **self.tiny.arguments,
            **sampling.arguments(),
        }

    def _count(self, stats: Tally, own: bool) -> None:
        drafted, accepted = stats.drafted.total(), stats.accepted.total()
        counts = Counter(
            drafted=drafted,
            accepted=accepted,
            rejected=drafted - accepted,
            rescued=stats.rescues.total(),
            probed=stats.probed.total(),
        )
        if own:
            counts += Counter({"own drafted": drafted, "own accepted": accepted})
        self.counts += counts

    # --- what must hold ---------------------------------------------------------------

    def differences(
        self,
        n: int,
        sampling: Sampling = GREEDY,
        *,
        steered: str = "",
        kinds: Sequence[str] = ("right",),
        options: DraftOptions | None = None,
        wrap: Wrap | None = None,
        stop: int | None = None,
        seed: int = 0,
        **kwargs: Any,
    ) -> Iterator[str]:
        """One generation of n tokens, in which everything must be as in stock's.

        Args:
            steered: Where drafts are right, see :func:`.scripted.right_where`; the
                drafter's own are verified if this is empty.
            kinds: Of the branches, see :class:`.scripted.Branching`.
            wrap: What is put around the drafter, steered or not.
            stop: Close the generator after so many tokens.
        """
        watched = self.drafter(options)
        drafter: Any = watched
        if steered:
            truth = self.stock(n, sampling, seed=seed).tokens
            drafter = Steered(drafter, self._script(truth, steered, kinds))
        if wrap is not None:
            drafter = wrap(drafter)
        ours = self.drafted(
            drafter, n, sampling, options=options, stop=stop, seed=seed, **kwargs
        )
        if kwargs.get("take_back"):  # where the last one was drafted
            stop = len(ours.tokens)
        theirs = self.stock(n if stop is None else stop, sampling, seed=seed)
        what = _described(n, steered, options, stop, kwargs)
        for difference in self.beside(watched, ours, theirs):
            yield f"{what}: {difference}"

    def beside(
        self, watched: Watched, ours: oracle.Result, theirs: oracle.Result
    ) -> Iterator[str]:
        """What differs from stock's, and what the drafter did or was shown wrongly."""
        yield from dict.fromkeys(watched.faults)  # first, for the rest may follow
        yield from oracle.result_differences(ours, theirs)
        wanted = [*self.prompt, *ours.tokens]
        if watched.shown != wanted:
            yield f"shown: {oracle.sequence_difference(watched.shown, wanted)}"


def _described(
    n: int,
    steered: str,
    options: DraftOptions | None,
    stop: int | None,
    more: dict[str, Any],
) -> str:
    """One generation in words, for the head of a finding."""
    parts = [f"{n} tokens"]
    if options is not None:
        parts += [f"k={options.num_draft_tokens}", *options.unusual]
    if steered:
        parts.append(f"drafts right where {steered} has a 1")
    if stop is not None:
        parts.append(f"closed after {stop}")
    if more.get("take_back"):
        parts.append("the last one taken back")
    return ", ".join(parts)
