"""Checks of whole generations: the tokens of stock, its caches, at every stop.

Each yields what is wrong, and yields nothing if nothing is.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from ..depth import Fixed
from ..drafters.base import Proposal
from ..errors import DrafterError
from ..stats import Tally
from .oracle import result_differences, same_bits
from .scripted import fewest_rounds, right_where
from .table import Check
from .trial import Sampling, Trial
from .wrapped import Faulty, Raised, Spoiled

_TOKENS = 16
_MANY = 500
_MIXED, _RIGHT, _WRONG = "110", "1", "0"


# --- the same as stock --------------------------------------------------------------


def greedy(trial: Trial) -> Iterator[str]:
    """Tokens, log-probabilities and caches of greedy decoding are stock's."""
    yield from trial.differences(_TOKENS)
    yield from trial.differences(_TOKENS, steered=_MIXED)


def extremes(trial: Trial) -> Iterator[str]:
    """The same if all drafts are right, and if all are wrong; k from 0 to 5."""
    for pattern in (_RIGHT, _WRONG):
        for k in (0, 1, 2, 5):
            options = trial.options(num_draft_tokens=k)
            yield from trial.differences(12, steered=pattern, options=options)


def changing_depth(trial: Trial) -> Iterator[str]:
    """Nothing hangs on how many drafts each round asks for, nor on rounds without."""
    for seed in range(3):
        for steered in (_RIGHT, _MIXED):
            depth = AnyDepth(seed)
            yield from trial.differences(_TOKENS, steered=steered, depth=depth)
        yield from trial.differences(_TOKENS, stop=9, depth=AnyDepth(seed))


class AnyDepth(Fixed):
    """Draws how many tokens are drafted, 0 included."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(self, most: int) -> int:
        """See :class:`.Depth`."""
        return self._random.randint(0, most)


def sampled(trial: Trial) -> Iterator[str]:
    """Sampled tokens are stock's with the same seed, and so is the random state."""
    own: Sampling = Sampling(lambda: lambda x: mx.random.categorical(1.1 * x))
    for sampling in (Sampling(lambda: make_sampler(0.9, top_p=0.95)), own):
        for steered in ("", _MIXED):
            yield from trial.differences(12, sampling, steered=steered, seed=11)
    yield from trial.differences(12, own, steered=_RIGHT, stop=6, seed=11)


def processed(trial: Trial) -> Iterator[str]:
    """Logits processors are shown what stock shows them, pure ones or not."""
    pure = Sampling(
        lambda: make_sampler(0.9), lambda: make_logits_processors(None, 1.3)
    )
    for steered in ("", _MIXED):
        yield from trial.differences(12, pure, steered=steered, seed=5)
    yield from trial.differences(12, Sampling(processors=_stepping), steered=_MIXED)


def _stepping() -> list[Any]:
    """A processor with a state: it lifts another token each time it is called."""
    calls: list[int] = []

    def lift(tokens: mx.array, logits: mx.array) -> mx.array:
        calls.append(len(tokens))
        return logits.at[:, (7 * len(calls) + len(tokens)) % logits.shape[-1]].add(3.0)

    return [lift]


def rounds(trial: Trial) -> Iterator[str]:
    """No right draft is lost: as few rounds as the right drafts allow."""
    for pattern in (_RIGHT, _MIXED, _WRONG):
        stats, options = Tally(), trial.options(num_draft_tokens=3)
        yield from trial.differences(12, steered=pattern, options=options, stats=stats)
        fewest = fewest_rounds(right_where(pattern), 3, 12)
        if stats.rounds != fewest:
            yield f"rounds: {fewest} were expected, and {stats.rounds} seen"


# --- stops --------------------------------------------------------------------------


def budgets(trial: Trial) -> Iterator[str]:
    """`max_tokens` ends a generation anywhere in a round; no more is asked for."""
    for n in range(7):
        yield from trial.differences(n, steered=_RIGHT)
        yield from trial.differences(n)
    watched, n = trial.drafter(), 6
    trial.drafted(watched, n)
    if any(k < 1 or k >= n for k in watched.asked):
        yield f"asked: for {watched.asked} drafts in a generation of {n} tokens"


def ends(trial: Trial) -> Iterator[str]:
    """Behind an EOS token a generation ends, even if more was accepted behind it."""
    truth = trial.stock(_TOKENS).tokens
    firsts = [i for i in range(8) if truth[i] not in truth[:i]]
    for at in firsts:
        eos = {truth[at]}
        watched = trial.drafter()
        ours = trial.drafted(
            trial.steered(watched, _TOKENS, _RIGHT), _TOKENS, eos_token_ids=eos
        )
        for difference in trial.beside(watched, ours, trial.stock(at + 1)):
            yield f"EOS {truth[at]} at position {at}: {difference}"


def closed(trial: Trial) -> Iterator[str]:
    """A consumer may close the generator after any token."""
    for stop in range(1, 7):
        yield from trial.differences(12, steered=_RIGHT, stop=stop)
    yield from trial.differences(12, steered=_MIXED, stop=5)
    yield from trial.differences(12, stop=5)


def taken_back(trial: Trial) -> Iterator[str]:
    """A token that was drafted may be taken back by who is given it."""
    for stop in range(2, 6):
        yield from trial.differences(12, steered=_RIGHT, stop=stop, take_back=True)


# --- exceptions ---------------------------------------------------------------------


def faulty_callables(trial: Trial) -> Iterator[str]:
    """A sampler or a processor raises: caches hold the prompt and what was yielded."""
    for where in ("sampler", "processor"):
        for calls in (0, 1, 3, 6):
            yield from _after_a_fault(
                trial, f"the {where} raised at call {calls}", _failing(where, calls)
            )


def _failing(where: str, calls: int) -> Sampling:
    def made() -> Any:
        left = [calls]

        def fail(*arguments: mx.array) -> mx.array:
            left[0] -= 1
            if left[0] < 0:
                raise Raised(f"in the {where}")
            last = arguments[-1]
            return last if where == "processor" else mx.argmax(last, axis=-1)

        return fail

    if where == "sampler":
        return Sampling(sampler=made)
    return Sampling(processors=lambda: [made()])


def _after_a_fault(
    trial: Trial, what: str, sampling: Sampling | None = None, **fault: Any
) -> Iterator[str]:
    """A generation that fails: its caches, and the same drafter's next generation.

    Args:
        what: How it fails, in words.
        sampling: With this one, if it is the target that fails.
        fault: How the drafter fails, as :class:`Faulty` takes it.
    """
    watched = trial.drafter()
    drafter: Any = trial.steered(watched, _TOKENS, _MIXED)
    if fault:
        drafter = Faulty(drafter, **fault)
    try:
        ours = trial.drafted(drafter, _TOKENS, sampling or Sampling(), raises=Raised)
    except Exception as error:
        yield f"{what}: {type(error).__name__} came of it: {error}"
        return
    if len(ours.tokens) == _TOKENS:
        yield f"{what}: the generation went on"
    stock = trial.stock(len(ours.tokens))
    # Within the prompt caches hold the chunks before; who draws has drawn once more.
    begun = fault.get("method") != "prefill"
    stock = replace(stock, random_state=ours.random_state)
    for difference in result_differences(ours, stock) if begun else ():
        yield f"{what}: {difference}"
    again = trial.drafted(watched, 6)
    for difference in trial.beside(watched, again, trial.stock(6)):
        yield f"{what}, then another generation: {difference}"


def faulty_drafter(trial: Trial) -> Iterator[str]:
    """The drafter raises: its error comes through, and caches are right."""
    for method in ("prefill", "draft", "observe"):
        for call in (0, 1):
            yield from _after_a_fault(
                trial, f"{method}() raised at call {call}", method=method, call=call
            )


# --- proposals ----------------------------------------------------------------------

_MALFORMED: dict[str, Any] = {
    "None": None,
    "a list": [1, 2],
    "an array": mx.array([[1, 2]]),
    "tokens in a list": Proposal([[1, 2]]),  # type: ignore[arg-type]
    "real numbers": Proposal(mx.array([[1.0, 2.0]])),
    "truth values": Proposal(mx.array([[True]])),
    "one number": Proposal(mx.array(1)),
    "tokens without a row": Proposal(mx.array([1, 2])),
    "two rows": Proposal(mx.array([[1], [2]])),
    "no row": Proposal(mx.zeros((0, 2), mx.int32)),
}


def malformed(trial: Trial) -> Iterator[str]:
    """Proposals of a wrong kind, dtype or shape are a DrafterError."""
    for what, proposal in _MALFORMED.items():
        watched = trial.drafter()
        spoiled = Spoiled(watched, lambda _, proposal=proposal: proposal)
        try:
            ours = trial.drafted(spoiled, _TOKENS, raises=DrafterError)
        except Exception as error:
            yield f"{what}: a DrafterError was expected; {error!r} was raised"
            continue
        if len(ours.tokens) == _TOKENS:
            yield f"{what}: a DrafterError was expected; the generation went on"
        stock = trial.stock(len(ours.tokens))
        for difference in result_differences(ours, stock):
            yield f"{what}: {difference}"


def any_length(trial: Trial) -> Iterator[str]:
    """Proposals may be empty, shorter than k, or longer, and of any integer dtype."""
    for length in (0, 1, 2, 7):
        stats = Tally()
        for found in trial.differences(
            12, steered=_RIGHT, wrap=_cut_to(length), stats=stats
        ):
            yield f"{length} drafts of 3: {found}"
        if max(stats.drafted, default=0) >= 3:
            yield f"{length} drafts of 3: {max(stats.drafted) + 1} were verified"
    for dtype in (mx.int32, mx.int64, mx.uint8):
        for found in trial.differences(12, steered=_MIXED, wrap=_as(dtype)):
            yield f"drafts in {dtype}: {found}"


def _cut_to(n: int) -> Any:
    def spoil(proposal: Proposal) -> Proposal:
        tokens = mx.tile(proposal.tokens, (1, 3))[:, :n]
        return Proposal(tokens if n > 3 else proposal.tokens[:, :n])

    return lambda drafter: Spoiled(drafter, spoil)


def _as(dtype: mx.Dtype) -> Any:
    return lambda drafter: Spoiled(drafter, lambda p: Proposal(p.tokens.astype(dtype)))


def beyond_the_vocabulary(trial: Trial) -> Iterator[str]:
    """A token that the target does not have is a wrong draft, and no more."""
    for token in (trial.vocabulary, 4_000_000_000):
        beyond = Proposal.of([token] * 3)
        wrap = _always(beyond)
        for found in trial.differences(8, wrap=wrap):
            yield f"token {token} drafted: {found}"


def _always(proposal: Proposal) -> Any:
    return lambda drafter: Spoiled(drafter, lambda _: proposal)


def lazy_and_evaluated(trial: Trial) -> Iterator[str]:
    """Nothing hangs on when arrays are evaluated, nor on the dtype of the prompt."""
    for how, what in {"evaluated": _evaluated, "lazy": _lazy}.items():
        wrap = lambda drafter, what=what: Spoiled(drafter, what)  # noqa: E731
        for found in trial.differences(12, steered=_MIXED, wrap=wrap):
            yield f"drafts {how}: {found}"
    for dtype in (mx.uint32, mx.int64):
        watched = trial.drafter()
        ours = trial.drafted(watched, 8, prompt=mx.array(trial.prompt, dtype))
        for found in trial.beside(watched, ours, trial.stock(8)):
            yield f"a prompt in {dtype}: {found}"


def _evaluated(proposal: Proposal) -> Proposal:
    return Proposal.of(proposal.tokens[0].tolist())


def _lazy(proposal: Proposal) -> Proposal:
    return Proposal((proposal.tokens + 1) - 1)


def hidden_states(trial: Trial) -> Iterator[str]:
    """With each token that is shown comes the target's hidden state there, if the
    drafter needs it, and else none."""
    for stop in (None, 6):
        watched = trial.drafter()
        ours = trial.drafted(trial.steered(watched, 12, _MIXED), 12, stop=stop)
        expected = trial.hidden([*trial.prompt, *ours.tokens])
        shown = watched.hidden_shown
        for i, (seen, wanted) in enumerate(zip(shown, expected, strict=False)):
            if (seen is None) != (wanted is None):
                given = "no hidden state" if seen is None else "a hidden state"
                yield f"{given} was shown with token {i}"
                break
            if seen is not None and not same_bits(seen, wanted):
                yield f"the hidden state shown with token {i} is not the target's there"
                break
        if len(shown) != len(expected):
            yield f"{len(shown)} tokens were shown, of {len(expected)}"


# --- the long run -------------------------------------------------------------------


def drift(trial: Trial) -> Iterator[str]:
    """After 500 tokens the drafter was shown what the caches hold; then, on the same
    object, a second generation is like the first."""
    watched = trial.drafter()
    ours = trial.drafted(watched, _MANY)
    yield from trial.beside(watched, ours, trial.stock(_MANY))
    first = watched.proposals
    again = trial.drafted(watched, 60)
    yield from trial.beside(watched, again, trial.stock(60))
    # The last rounds of the shorter one are asked for fewer drafts.
    for i, (one, other) in enumerate(zip(first, watched.proposals[:-4], strict=False)):
        if one != other:
            yield (
                f"begin: in a second generation, round {i} proposes {other}, which "
                f"was {one} in the first"
            )
            return


GENERATIONS = (
    Check(greedy, models=0, claims=("accepted", "rejected")),
    Check(extremes, claims=("accepted", "rejected")),
    Check(changing_depth, claims=("accepted", "rejected")),
    Check(sampled, claims=("accepted", "rejected")),
    Check(processed, claims=("accepted", "rejected")),
    Check(rounds, claims=("accepted", "rejected")),
    Check(budgets, claims=("accepted",)),
    Check(ends, claims=("accepted",)),
    Check(closed, claims=("accepted",)),
    Check(taken_back, claims=("accepted",)),
    Check(faulty_callables, claims=("accepted", "rejected")),
    Check(faulty_drafter, claims=("accepted",)),
    Check(malformed),
    Check(any_length, claims=("accepted", "rejected")),
    Check(beyond_the_vocabulary, claims=("rejected",)),
    Check(lazy_and_evaluated, claims=("accepted", "rejected")),
    Check(hidden_states, claims=("accepted", "rejected")),
    Check(drift, models=1),
)
