"""What must hold, as functions that give a list of differences: empty if it holds.

Tests of the real package assert that a list is empty; tests with a planted bug assert
that it is not. Every difference begins with the aspect that differs: `tokens`,
`log-probabilities`, `caches`, `random state`, `calls` (of processors), `drafter`,
`rounds` or `result`.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import oracle
from mlx_lm.models.cache import make_prompt_cache
from scripted import Branching, Scripted, right_where
from tiny import Spec, head_tensors

import mlx_lm_mtp
from mlx_lm_mtp.drafters.base import Drafter, hidden_for
from mlx_lm_mtp.drafters.mtp import MTPDrafter
from mlx_lm_mtp.heads.head import MTPHead
from mlx_lm_mtp.options import DraftOptions
from mlx_lm_mtp.state.forms import BATCHED
from mlx_lm_mtp.stats import Tally
from mlx_lm_mtp.target import Target
from mlx_lm_mtp.testing.oracle import drafted, result_differences
from mlx_lm_mtp.testing.scripted import fewest_rounds
from mlx_lm_mtp.testing.wrapped import Steered

DrafterOf = Callable[[list[int]], Drafter]  # from the tokens that stock yields
CachesOf = Callable[[nn.Module], list[Any]]
Differences = list[str]

PROMPT = (5, 9, 30, 2, 77, 41, 8)
THREE = DraftOptions(num_draft_tokens=3)
INPUTS = (3, 8, 20, 11, 95, 60)


@functools.cache
def model_of(spec: Spec) -> nn.Module:
    """The model of a spec, built once; tests only read it."""
    return spec.build()


def aspects(found: Differences) -> set[str]:
    """What differs: the words before the colons."""
    return {difference.partition(":")[0] for difference in found}


def scripted(pattern: str) -> DrafterOf:
    """A drafter that is right where the pattern has a 1."""
    return lambda truth: Scripted(truth, right_where(pattern))


# --- generations ------------------------------------------------------------------


def generation_differences(
    model: nn.Module,
    prompt: Sequence[int],
    max_tokens: int,
    drafter: DrafterOf,
    *,
    options: DraftOptions | None = None,
    seed: int = 0,
    sampler: Callable[[], Any] | None = None,
    processors: Callable[[], list[Any]] | None = None,
    fresh_processors: Callable[[], list[Any]] | None = None,
    stop: int | None = None,
    caches: CachesOf = make_prompt_cache,
    ours: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Differences:
    """A generation with drafts beside stock's, bit for bit.

    Args:
        drafter: Makes the drafter, given all tokens that stock yields.
        options: How to draft.
        seed: Of `mx.random`, before either run.
        sampler, processors: Make them anew for each run, since they may keep a state.
            The histories that processors are shown are compared, too.
        fresh_processors: Made anew for each run as well, but left as they are.
        stop: Close the generator after so many tokens, at least one, as a stop string
            does; stock is then run to that length.
        caches: Makes the prompt caches.
        ours: For the run with drafts alone.
        kwargs: For both runs, as `generate_step` takes them.
    """

    def arguments(calls: list[Any]) -> dict[str, Any]:
        made = processors() if processors else []
        made = [_noted(p, calls) for p in made]
        made += fresh_processors() if fresh_processors else []
        noted = {"logits_processors": made}
        return {**noted, **kwargs, "sampler": sampler() if sampler else None}

    def stock(n: int, calls: list[Any]) -> oracle.Result:
        return oracle.stock(
            model, prompt, n, seed=seed, caches=caches(model), **arguments(calls)
        )

    truth = stock(max_tokens, []).tokens
    our_calls: list[Any] = []
    made = drafted(
        model,
        prompt,
        max_tokens,
        drafter(truth),
        options=options,
        seed=seed,
        stop=stop,
        caches=caches(model),
        **arguments(our_calls),
        **(ours or {}),
    )
    their_calls: list[Any] = []
    theirs = stock(max_tokens if stop is None else stop, their_calls)
    found = result_differences(made, theirs)
    if our_calls != their_calls:
        found.append(f"calls: {our_calls} and {their_calls}")
    return found


def cache_differences(ours: Sequence[Any], theirs: Sequence[Any]) -> Differences:
    """What differs between two lists of caches."""
    return [f"caches: {d}" for d in oracle.differences(ours, theirs)]


def _noted(processor: Any, calls: list[Any]) -> Any:
    """A logits processor that notes down the history it is shown."""

    def noted(tokens: mx.array, logits: mx.array) -> mx.array:
        calls.append(tokens.tolist())
        return processor(tokens, logits)

    return noted


def round_differences(model: nn.Module, pattern: str, k: int, n: int) -> Differences:
    """Rounds that n tokens took, beside what the drafts' being right allows."""
    truth = oracle.stock(model, PROMPT, n).tokens
    stats, options = Tally(), DraftOptions(num_draft_tokens=k)
    drafted(model, PROMPT, n, scripted(pattern)(truth), options=options, stats=stats)
    wanted = fewest_rounds(right_where(pattern), k, n)
    if stats.rounds == wanted:
        return []
    return [f"rounds: {stats.rounds} and {wanted}"]


# --- the MTP drafter ----------------------------------------------------------------


def steered(head: MTPHead, script: Scripted) -> Steered:
    """Drafts with its head, so that its cache is used, but says what a script says."""
    return Steered(MTPDrafter(head), script)


def head_for(model: nn.Module) -> MTPHead:
    """A random head that fits the model."""
    tensors = head_tensors(model)
    head = MTPHead(model)
    head.load_weights(list(tensors.items()))
    head.eval()
    return head


def drafter_differences(
    model: nn.Module,
    prompt: Sequence[int],
    max_tokens: int,
    pattern: str,
    options: DraftOptions = THREE,
) -> Differences:
    """The MTP drafter's cache after a generation, beside that of a drafter which was
    only ever shown the final tokens."""
    truth = oracle.stock(model, prompt, max_tokens).tokens
    head = head_for(model)
    ours = steered(head, Branching(truth, right_where(pattern)))
    made = drafted(model, prompt, max_tokens, ours, options=options).tokens
    fresh = MTPDrafter(head)
    tokens = mx.array([[*prompt, *made]])
    hidden = hidden_for(fresh, options.hidden)
    fresh.prefill(tokens, Target(model, hidden)(tokens, _new(model)).hidden)
    for drafter in (ours.inner, fresh):
        drafter.draft(mx.array([[1]], dtype=mx.uint32), 1)
    return [f"drafter: {d}" for d in oracle.differences([ours.cache], [fresh.cache])]


def broken_off_differences(
    spec: Spec,
    prompt: Sequence[int],
    pattern: str,
    n: int,
    *,
    take_back: bool = False,
    **kwargs: Any,
) -> Differences:
    """A generation that its caller ends after n tokens: the model's entries beside
    stock's, the drafter's beside those of one that saw no more.

    Args:
        take_back: End before the n-th token, if it was drafted.
    """
    model, caches = model_of(spec), _new(model_of(spec))
    truth = oracle.stock(model, prompt, n + 12).tokens
    drafter = steered(head_for(model), Scripted(truth, right_where(pattern)))
    ours = drafted(
        model,
        prompt,
        kwargs.pop("max_tokens", 256),
        drafter,
        stop=n,
        take_back=take_back,
        caches=caches,
        **kwargs,
    )
    made = ours.tokens
    stock = oracle.stock(model, prompt, len(made))
    found = cache_differences(ours.caches, stock.caches)
    if made != stock.tokens:
        found.append(f"tokens: {made} and {stock.tokens}")
    fresh = MTPDrafter(head_for(model))
    tokens = mx.array([[*prompt, *made]])
    fresh.prefill(tokens, Target(model, "post_norm")(tokens, _new(model)).hidden)
    drafters = oracle.differences(ours.entries, fresh.suspend())
    return found + [f"drafter: {d}" for d in drafters]


# --- cache functions ----------------------------------------------------------------


def _new(model: nn.Module) -> list[Any]:
    return make_prompt_cache(model)


def feed(model: nn.Module, tokens: Sequence[int], caches: list[Any]) -> mx.array:
    """One forward of the tokens; `(1, T, V)` logits."""
    return Target(model)(mx.array([list(tokens)]), caches, form=BATCHED).logits


@functools.lru_cache(maxsize=1024)
def stock_after(
    spec: Spec, tokens: tuple[int, ...], caches: CachesOf = make_prompt_cache
) -> list[Any]:
    """Stock's caches after these tokens, fed one by one. Read only: they are shared."""
    model = model_of(spec)
    if not tokens:
        return caches(model)
    made = copy.deepcopy(stock_after(spec, tokens[:-1], caches))
    model(mx.array([tokens[-1:]]), cache=made)
    mx.eval([cache.state for cache in made])
    return made


def after_prompt(spec: Spec, caches: CachesOf = make_prompt_cache) -> list[Any]:
    """Caches of one's own that hold the prompt."""
    return copy.deepcopy(stock_after(spec, PROMPT, caches))


def commit_differences(
    spec: Spec, n: int, caches: CachesOf = make_prompt_cache
) -> Differences:
    """A verify of all inputs cut to the first n, beside n inputs fed one by one."""
    ours = after_prompt(spec, caches)
    mlx_lm_mtp.begin_speculative_checkpoints(ours)
    feed(model_of(spec), INPUTS, ours)
    if not mlx_lm_mtp.commit_verified_prefix(ours, len(INPUTS), n):
        return ["result: not committed"]
    return cache_differences(ours, stock_after(spec, PROMPT + INPUTS[:n], caches))


def tree_differences(
    spec: Spec, paths: Sequence[Sequence[int]], n: int, row: int
) -> Differences:
    """One path of several that were verified side by side, beside that path alone."""
    ours = after_prompt(spec)
    mlx_lm_mtp.tile_caches(ours, len(paths))
    mlx_lm_mtp.begin_speculative_checkpoints(ours)
    Target(model_of(spec))(mx.array(paths), ours, form=BATCHED)
    if not mlx_lm_mtp.commit_tree_row(ours, len(paths[0]), n, row):
        return ["result: not committed"]
    return cache_differences(ours, stock_after(spec, PROMPT + tuple(paths[row][:n])))


def restore_differences(
    spec: Spec, times: int = 2, caches: CachesOf = make_prompt_cache
) -> Differences:
    """A snapshot restored again and again, with in-place writes in between."""
    ours = after_prompt(spec, caches)
    saved = mlx_lm_mtp.snapshot(ours)
    found = []
    for _ in range(times):
        for token in INPUTS:  # one by one, since a longer forward may copy
            feed(model_of(spec), [token], ours)
            mx.eval([cache.state for cache in ours])
        mlx_lm_mtp.restore(ours, saved)
        found += cache_differences(ours, stock_after(spec, PROMPT, caches))
    return found
