"""The checks of this suite find bugs that are planted in the package.

Each check passes on the package as it is, and fails with the planted bug in the way
that the table says. Equal tokens alone would miss much of it: most rows of the table
name the caches, the random state or the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
import mutants
import oracle
import pytest
from checks import (
    INPUTS,
    PROMPT,
    Differences,
    aspects,
    broken_off_differences,
    commit_differences,
    drafted,
    drafter_differences,
    generation_differences,
    model_of,
    restore_differences,
    right_where,
    round_differences,
    scripted,
    tree_differences,
)
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from mlx_lm.models.cache import RotatingKVCache
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from scripted import Branching
from test_state_machine import Caches
from tiny import Spec

from mlx_lm_mtp import verify
from mlx_lm_mtp.errors import CommitError
from mlx_lm_mtp.options import DraftOptions
from mlx_lm_mtp.stats import Tally

MODELS = (Spec("qwen3_5"), Spec("qwen3_next", weights="bf16"))
PATTERNS = ("110", "1", "0")
TOKENS = 12


# --- checks -------------------------------------------------------------------------


def _generations(patterns: tuple[str, ...] = PATTERNS, **how: Any) -> Differences:
    return [
        difference
        for spec in MODELS
        for pattern in patterns
        for difference in generation_differences(
            model_of(spec), PROMPT, TOKENS, scripted(pattern), **how
        )
    ]


def greedy() -> Differences:
    return _generations()


def stepwise() -> Differences:
    return _generations(options=DraftOptions(verify="step"))


def replayed() -> Differences:
    """As if the caches could be neither trimmed nor recorded."""
    with patch.object(verify, "can_commit", lambda caches, recording: False):
        return _generations()


def stopped() -> Differences:
    """In the middle of a round of four."""
    return _generations(("1",), stop=6)


def stopped_sampling() -> Differences:
    """The same, with random numbers drawn for tokens that nobody took."""
    return _generations(("1",), stop=6, seed=11, sampler=lambda: make_sampler(1.0))


def sampled() -> Differences:
    return _generations(seed=11, sampler=lambda: make_sampler(temp=1.0, top_p=0.9))


def processed() -> Differences:
    return _generations(processors=lambda: make_logits_processors(None, 1.3))


def own_sampler() -> Differences:
    """A sampler that keeps a state, and draws from `mx.random`."""

    def warming() -> Any:
        calls = []

        def sampler(logprobs: mx.array) -> mx.array:
            calls.append(logprobs)
            return mx.random.categorical(logprobs / (1 + 0.1 * len(calls)))

        return sampler

    return _generations(seed=11, sampler=warming)


def processed_at_once() -> Differences:
    """Stock's own processors, which may be called for drafts as well."""
    penalties = make_logits_processors({3: 1.5}, 1.3, 6, 0.4, 6, 0.3, 6)
    return _generations(
        ("110", "1"),
        seed=5,
        sampler=lambda: make_sampler(0.9),
        logits_processors=penalties,
    )


def own_ring() -> Differences:
    """A rotating cache that becomes full on the way."""
    return generation_differences(
        model_of(Spec("qwen3")),
        PROMPT,
        TOKENS,
        scripted("110"),
        caches=lambda model: [RotatingKVCache(12, keep=4) for _ in model.layers],
    )


def quantized() -> Differences:
    """A cache that is quantised on the way."""
    quantize = {"kv_bits": 4, "kv_group_size": 32, "quantized_kv_start": 11}
    return _generations(("110",), **quantize)


def tied() -> Differences:
    """Logits near zero in bf16: their log-probabilities, near -4.6, are often equal."""
    return generation_differences(_flat_model(), PROMPT, TOKENS, scripted("110"))


def _flat_model() -> nn.Module:
    model = Spec("qwen3_5", weights="bf16").build()
    norm = model.language_model.model.norm
    norm.weight = norm.weight * 0.02
    return model


def rounds() -> Differences:
    return [
        difference
        for pattern in PATTERNS
        for difference in round_differences(model_of(MODELS[0]), pattern, 3, TOKENS)
    ]


def broken_off() -> Differences:
    """By the caller, among kept drafts: the next round was drafted already."""
    return [
        difference
        for spec in MODELS
        for pattern in ("1", "0110")
        for n in (2, 5)
        for take_back in (False, True)
        for difference in broken_off_differences(
            spec, PROMPT, pattern, n, take_back=take_back
        )
    ]


def drafter() -> Differences:
    return [
        difference
        for spec in MODELS
        for difference in drafter_differences(model_of(spec), PROMPT, TOKENS, "110")
    ]


def side_by_side() -> Differences:
    """Three paths, of which the last is right; stopped in the middle, too."""
    return [d for stop in (None, 6) for d in _generations_of(THREE, stop=stop)]


def side_by_side_sampled() -> Differences:
    return _generations_of(THREE, seed=11, sampler=lambda: make_sampler(1.0))


def side_by_side_processed() -> Differences:
    return _generations_of(THREE, processors=lambda: make_logits_processors(None, 1.3))


def rescues() -> Differences:
    """What the drafter is shown, and how often it is rescued."""
    spec, found = MODELS[0], []
    truth = oracle.stock(model_of(spec), PROMPT, TOKENS).tokens
    for kinds, wanted in ((["right"], TOKENS // 4), (["wrong"], 0)):
        ours, stats = Branching(truth, right_where("0"), kinds), Tally()
        options = DraftOptions(rescue=1)
        drafted(model_of(spec), PROMPT, TOKENS, ours, options=options, stats=stats)
        if stats.rescues.total() != wanted:
            found.append(f"rounds: {stats.rescues} and {wanted} rescues")
        if ours.seen != truth:
            found.append(f"drafter: {ours.seen} and {truth}")
    return found


def drafter_with_branches() -> Differences:
    how = DraftOptions(num_draft_tokens=3, rescue=2)
    return drafter_differences(model_of(MODELS[0]), PROMPT, TOKENS, "110", how)


THREE = DraftOptions(num_draft_tokens=3, paths=3)


def _generations_of(options: DraftOptions, **how: Any) -> Differences:
    return [
        difference
        for spec in MODELS
        for difference in generation_differences(
            model_of(spec),
            PROMPT,
            TOKENS,
            lambda truth: Branching(truth, right_where("10"), ["wrong", "right"]),
            options=options,
            **how,
        )
    ]


def commits() -> Differences:
    return [
        difference
        for spec in MODELS
        for n in range(len(INPUTS) + 1)
        for difference in commit_differences(spec, n)
    ]


def trees() -> Differences:
    paths = (INPUTS, INPUTS[::-1])
    return [d for n in (1, 4) for d in tree_differences(MODELS[0], paths, n, row=1)]


def snapshots() -> Differences:
    """Of a ring that has wrapped: what is written in place was in the snapshot."""
    return restore_differences(
        Spec("qwen3"),
        caches=lambda model: [RotatingKVCache(6, keep=2) for _ in model.layers],
    )


CHECKS: dict[str, Callable[[], Differences]] = {
    check.__name__: check
    for check in (
        greedy,
        stepwise,
        replayed,
        stopped,
        stopped_sampling,
        sampled,
        processed,
        processed_at_once,
        own_sampler,
        own_ring,
        quantized,
        tied,
        rounds,
        drafter,
        broken_off,
        drafter_with_branches,
        side_by_side,
        side_by_side_sampled,
        side_by_side_processed,
        rescues,
        commits,
        trees,
        snapshots,
    )
}


@pytest.mark.parametrize("check", CHECKS)
def test_a_check_passes_without_a_planted_bug(check: str) -> None:
    assert CHECKS[check]() == []


# --- planted bugs -------------------------------------------------------------------

# Planted bug, check, and an aspect in which it must show.
TABLE = (
    ("recurrent_state_not_rolled_back", "greedy", "caches"),
    ("recurrent_state_not_rolled_back", "stopped", "caches"),
    ("recurrent_state_not_rolled_back", "commits", "caches"),
    ("recurrent_state_one_token_short", "greedy", "caches"),
    ("recurrent_state_one_token_short", "commits", "caches"),
    ("recurrent_state_rounded_to_bf16", "greedy", "caches"),
    ("recurrent_state_rounded_to_bf16", "commits", "caches"),
    ("conv_window_not_rolled_back", "greedy", "caches"),
    ("conv_window_not_rolled_back", "commits", "caches"),
    ("conv_window_one_token_short", "commits", "caches"),
    ("kv_not_trimmed", "greedy", "caches"),
    ("kv_not_trimmed", "commits", "caches"),
    ("one_input_too_many_kept", "greedy", "caches"),
    ("one_input_too_many_kept", "commits", "caches"),
    ("one_input_too_few_kept", "greedy", "caches"),
    ("one_input_too_few_kept", "commits", "caches"),
    ("stepped_to_the_snapshot_before", "stepwise", "caches"),
    ("replayed_one_input_short", "replayed", "caches"),
    ("snapshot_by_reference", "snapshots", "caches"),
    ("restored_by_reference", "snapshots", "caches"),
    ("tree_keeps_the_first_row", "trees", "caches"),
    ("no_limit_of_the_width", "quantized", "caches"),
    ("drafter_keeps_rejected_entries", "drafter", "drafter"),
    ("drafter_loses_the_last_pair", "drafter", "drafter"),
    ("drafter_rewound_one_token_short", "broken_off", "drafter"),
    ("drafter_not_rewound", "broken_off", "drafter"),
    ("one_input_too_many_kept", "broken_off", "caches"),
    ("wrong_drafts_accepted", "greedy", "tokens"),
    ("wrong_drafts_accepted", "sampled", "tokens"),
    ("wrong_drafts_accepted_one_by_one", "processed", "tokens"),
    ("last_draft_never_accepted", "rounds", "rounds"),
    ("bonus_token_dropped", "greedy", "tokens"),
    ("stop_keeps_all_that_was_accepted", "stopped", "caches"),
    ("log_probabilities_of_the_round_start", "greedy", "log-probabilities"),
    ("random_state_not_put_back", "sampled", "random state"),
    ("random_state_not_put_back", "stopped_sampling", "random state"),
    ("all_positions_sampled_in_one_draw", "sampled", "tokens"),
    ("greedy_choice_from_logits", "tied", "tokens"),
    ("rejected_positions_judged_too", "processed", "calls"),
    ("history_of_pending_at_once", "processed_at_once", "tokens"),
    ("history_not_grown_at_once", "processed_at_once", "tokens"),
    ("random_state_not_put_back", "processed_at_once", "random state"),
    ("rejected_positions_judged_too", "own_sampler", "random state"),
    ("accepted_drafts_not_in_the_history", "processed", "calls"),
    ("appended_from_the_first_path", "side_by_side", "caches"),
    ("recurrent_state_of_the_first_path", "side_by_side", "caches"),
    ("recurrent_state_of_the_whole_path", "side_by_side", "caches"),
    ("chosen_from_the_first_path", "side_by_side", "tokens"),
    ("chosen_from_the_first_path", "side_by_side_sampled", "tokens"),
    ("first_path_kept_one_by_one", "side_by_side_processed", "caches"),
    ("rescued_by_any_branch", "rescues", "rounds"),
    ("drafter_sees_the_rescue_alone", "rescues", "drafter"),
    ("drafter_keeps_rejected_entries", "drafter_with_branches", "drafter"),
)
# What comparing tokens, and even log-probabilities, would never show.
SHOWN_BY_ONE_ASPECT_ALONE = (
    ("recurrent_state_not_rolled_back", "stopped", "caches"),
    ("stop_keeps_all_that_was_accepted", "stopped", "caches"),
    ("random_state_not_put_back", "stopped_sampling", "random state"),
    ("rejected_positions_judged_too", "processed", "calls"),
)


@pytest.mark.parametrize(("bug", "check", "aspect"), TABLE)
def test_a_planted_bug_is_found(bug: str, check: str, aspect: str) -> None:
    with getattr(mutants, bug)():
        assert aspect in aspects(CHECKS[check]())


@pytest.mark.parametrize(("bug", "check", "aspect"), SHOWN_BY_ONE_ASPECT_ALONE)
def test_some_bugs_show_in_one_aspect_alone(bug: str, check: str, aspect: str) -> None:
    with getattr(mutants, bug)():
        assert aspects(CHECKS[check]()) == {aspect}


def _planted() -> Iterator[str]:
    for name, value in vars(mutants).items():
        if getattr(value, "__qualname__", "").startswith("replaced.<locals>"):
            yield name


def test_every_planted_bug_and_every_check_is_in_the_table() -> None:
    found_elsewhere = {"rejected_positions_drawn_anew", "same_noise_at_every_position"}
    assert {bug for bug, _, _ in TABLE} | found_elsewhere == set(_planted())
    assert {check for _, check, _ in TABLE} == set(CHECKS) - {"own_ring"}


def test_a_round_that_fills_a_ring_raises_instead_of_going_on() -> None:
    with mutants.no_limit_of_the_width(), pytest.raises(CommitError):
        own_ring()


# What the state machine has to find without being told where to look.
FOUND_BY_THE_STATE_MACHINE = (
    "recurrent_state_not_rolled_back",
    "recurrent_state_rounded_to_bf16",
    "conv_window_one_token_short",
    "kv_not_trimmed",
    "one_input_too_many_kept",
    "stepped_to_the_snapshot_before",
    "replayed_one_input_short",
    "tree_keeps_the_first_row",
    "appended_from_the_first_path",
    "recurrent_state_of_the_whole_path",
)


@pytest.mark.parametrize("bug", FOUND_BY_THE_STATE_MACHINE)
def test_the_state_machine_finds_a_planted_bug(bug: str) -> None:
    once = settings(
        max_examples=75,
        stateful_step_count=20,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
    )
    with getattr(mutants, bug)(), pytest.raises(AssertionError):
        run_state_machine_as_test(Caches, settings=once)
