"""Checks of what a drafter gives beyond a chain of tokens, each with the draft options
that use it."""

from __future__ import annotations

from collections.abc import Iterator

from mlx_lm.sample_utils import make_logits_processors, make_sampler

from ..stats import Tally
from .table import Check
from .trial import Sampling, Trial

_N = 12


def confidence(trial: Trial) -> Iterator[str]:
    """`depth=confidence`: drafting stops where the drafter is not sure."""
    for reads in ("each", "once"):
        for tau in (0.0, 0.5):
            options = trial.options(
                num_draft_tokens=4, depth="confidence", tau=tau, reads=reads
            )
            yield from trial.differences(_N, options=options)
            yield from trial.differences(_N, options=options, steered="110")


def candidates(trial: Trial) -> Iterator[str]:
    """`probe`: its best choices at each position, the best first."""
    options = trial.options(probe=3)
    yield from trial.differences(_N, options=options)
    yield from trial.differences(_N, options=options, steered="110")


def branches(trial: Trial) -> Iterator[str]:
    """`rescue` and `paths`: further paths, of which the right one is kept."""
    for changes in ({"rescue": 1}, {"rescue": 2}, {"paths": 2}, {"paths": 4}):
        options = trial.options(**changes)
        yield from trial.differences(_N, options=options)
        for pattern, kinds in (("0", ("right",)), ("10", ("wrong", "right"))):
            yield from trial.differences(
                _N, options=options, steered=pattern, kinds=kinds
            )
    options = trial.options(rescue=1)
    yield from trial.differences(_N, options=options, steered="0", stop=6)
    stats = Tally()
    yield from trial.differences(
        _N, options=options, steered="0", kinds=("wrong",), stats=stats
    )
    if stats.rescues:
        yield f"rescues: by wrong branches there were {stats.rescues.total()}"


def logprobs(trial: Trial) -> Iterator[str]:
    """Asked to choose as the target will, it asks `Wanted.choose` for each choice."""
    tempered = Sampling(lambda: make_sampler(0.8))
    penalised = Sampling(processors=lambda: make_logits_processors({3: 1.5}, 1.3))
    for sampling in (tempered, penalised):
        yield from trial.differences(_N, sampling, seed=3)
        yield from trial.differences(_N, sampling, seed=3, steered="110")


def readout(trial: Trial) -> Iterator[str]:
    """`draft_head_bits` and `shortlist` are obeyed, and change no token."""
    yield from trial.differences(_N, options=trial.options(draft_head_bits=4))
    few = 8
    options = trial.options(shortlist=few)
    yield from trial.differences(_N, options=options)
    watched = trial.drafter(options)
    trial.drafted(watched, 3 * _N, options=options)
    used = {token for proposal in watched.proposals for token in proposal}
    special = set(getattr(trial.tokenizer, "all_special_ids", None) or ())
    most = few + len({*trial.prompt, *special})
    if len(used) > most:
        yield f"shortlist: {most} tokens at most were expected, and {len(used)} seen"


OFFERED = (
    Check(confidence, claims=("accepted", "rejected"), needs=frozenset({"confidence"})),
    Check(candidates, claims=("probed",), needs=frozenset({"candidates"})),
    Check(branches, claims=("rescued",), needs=frozenset({"branches"})),
    Check(logprobs, claims=("accepted",), needs=frozenset({"logprobs"})),
    Check(readout, needs=frozenset({"readout"})),
)
