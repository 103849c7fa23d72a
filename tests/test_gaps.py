"""How near to ties tokens were, and what decoding them again finds."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import mutants
import numpy as np
import oracle
import pytest
from checks import PROMPT, drafted, generation_differences, model_of, scripted
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from scripted import Branching, right_where
from test_compare import rounds_when_wide
from tiny import Spec

from mlx_lm_mtp import DraftOptions, Tally, generate
from mlx_lm_mtp.choices import two_best
from mlx_lm_mtp.gaps import BOUNDS, Gap, bin_name, histogram, smallest
from mlx_lm_mtp.stats import DraftStats

SPEC = Spec("qwen3_5")
TOKENS = 16

# --- numbers ----------------------------------------------------------------------


@given(st.lists(st.floats(0, 100), max_size=20))
def test_each_gap_is_in_one_bin(gaps: list[float]) -> None:
    found = histogram(gaps)
    assert found.total() == len(gaps)
    below = [sum(gap <= bound for gap in gaps) for bound in BOUNDS]
    for i, n in enumerate(below):
        assert sum(found[j] for j in range(i + 1)) == n
    assert found[0] == gaps.count(0)


def test_bins_have_names() -> None:
    names = [bin_name(i) for i in range(len(BOUNDS) + 1)]
    assert names[0] == "tie" and names[-1] == "> 16" and len({*names}) == len(names)


def test_broken_rows_have_no_gap() -> None:
    gaps = [Gap(g, i, 1, 2) for i, g in enumerate([0.5, math.nan, 0.0, math.inf])]
    assert histogram(g.gap for g in gaps).total() == 3
    assert [g.position for g in smallest(gaps, 9)] == [2, 0, 3]


@given(st.integers(0, 2**16), st.sampled_from([mx.float32, mx.bfloat16]))
def test_the_two_best_are_those_of_a_sort(seed: int, dtype: Any) -> None:
    rows = mx.random.normal((2, 3, 7), key=mx.random.key(seed)).astype(dtype)
    tokens, gaps = two_best(rows)
    exact = np.array(rows.astype(mx.float32))
    order = np.argsort(-exact, axis=-1, kind="stable")[..., :2]  # of a tie, the first
    assert np.array_equal(np.array(tokens), order)
    best = np.take_along_axis(exact, order, axis=-1)
    assert np.array_equal(np.array(gaps), best[..., 0] - best[..., 1])


# --- generations ------------------------------------------------------------------


def run(pattern: str = "110", sampler: Any = None, **options: Any) -> tuple[Any, Any]:
    """Tokens with drafts, and the statistics."""
    model, tally = model_of(SPEC), Tally()
    sampled = {"sampler": sampler, "seed": 5}
    truth = oracle.stock(model, PROMPT, TOKENS + 8, **sampled).tokens
    drafter = Branching(truth, right_where(pattern))
    how = DraftOptions(exactness="fast", **options)
    made = drafted(model, PROMPT, TOKENS, drafter, options=how, stats=tally, **sampled)
    return made, tally.stats


def impure(logprobs: mx.array) -> mx.array:
    """A sampler that is called one by one."""
    return mx.random.categorical(logprobs)


@pytest.mark.parametrize("sampler", [None, make_sampler(1.0), impure])
@pytest.mark.parametrize(
    "options", [{}, {"paths": 2}, {"rescue": 2}, {"verify": "step"}], ids=str
)
def test_gaps_are_those_of_stock(options: dict[str, Any], sampler: Any) -> None:
    """All of them: as many are kept as there are tokens."""
    made, stats = run("10", sampler, audit=TOKENS, **options)
    stock = oracle.stock(model_of(SPEC), PROMPT, TOKENS, sampler=sampler, seed=5)
    assert made.tokens == stock.tokens
    wanted = []
    for position, row in enumerate(stock.logprobs):
        order = np.argsort(-np.array(row), kind="stable")[:2].tolist()
        gap = (row[order[0]] - row[order[1]]).item()
        wanted.append(Gap(gap, position, *order))
    assert list(stats.smallest_gaps) == sorted(wanted)
    assert stats.gaps == histogram(gap.gap for gap in wanted)


def test_nothing_is_computed_that_nobody_wants(monkeypatch: Any) -> None:
    monkeypatch.delattr(generate, "Nearness")
    monkeypatch.delattr(generate, "Audit")
    _, stats = run()
    assert not stats.gaps and stats.tables() == []


def test_they_are_told_to_people_and_programs() -> None:
    _, stats = run(audit=2)
    gaps, nearest = stats.tables()
    assert gaps.splitlines()[0].split() == ["gap", "tokens", "share"]
    assert sum(int(line.split()[-2]) for line in gaps.splitlines()[1:]) == TOKENS
    assert len(nearest.splitlines()) == 1 + 5 and nearest.count(", gap ") == 2
    found = stats.to_dict()
    assert sum(found["gaps"].values()) == TOKENS and found["audit_differences"] == 0
    assert found["audited"][0]["gap"] == found["smallest_gaps"][0]
    assert {*found["smallest_gaps"][0]} == {"gap", "position", "best", "second"}


# --- the audit --------------------------------------------------------------------


HOW: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"sampler": lambda: make_sampler(0.9)},
    "processed": {"processors": lambda: make_logits_processors(None, 1.3)},
    "stopped": {"stop": 6},
    "quantised": {"kv_bits": 4, "kv_group_size": 32, "quantized_kv_start": 11},
    "ring": {"max_kv_size": 12},
}


def reused(model: Any) -> list[Any]:
    """Caches that hold a text already."""
    caches = make_prompt_cache(model)
    model(mx.array([[7, 3, 9]]), cache=caches)
    mx.eval([cache.state for cache in caches])
    return caches


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3"])
def test_an_audit_changes_nothing(family: str, how: str) -> None:
    """Tokens, caches and the random state are stock's, in a caller's cache as well."""
    tally = Tally()
    more = {"options": DraftOptions(audit=6), "ours": {"stats": tally}}
    if how != "ring":
        more["caches"] = reused
    found = generation_differences(
        model_of(Spec(family)), PROMPT, TOKENS, scripted("110"), **HOW[how], **more
    )
    assert found == []
    assert 0 < len(tally.audited) <= 6 and tally.audit_differences == 0
    assert all(found.plain == found.gap.gap for found in tally.audited)


def again(tokens: list[int]) -> list[int]:
    """Stock's likeliest tokens behind the prompt and each of these, one by one."""
    model, caches = model_of(SPEC), make_prompt_cache(model_of(SPEC))
    model(mx.array([PROMPT[:-1]]), cache=caches)
    rows = [
        model(mx.array([[token]]), cache=caches)[0, -1]
        for token in (PROMPT[-1], *tokens[:-1])
    ]
    return [mx.argmax(row).item() for row in rows]


def audited(*planted: Any, far: float = 0.0) -> DraftStats:
    """The audit of a generation is made by one-token forwards, which are right."""
    with rounds_when_wide(model_of(SPEC), far):
        for mutant in planted:
            with mutant():
                made, stats = run("10", audit=TOKENS)
        if not planted:
            made, stats = run("10", audit=TOKENS)
    truth = again(made.tokens)
    assert [
        a.best for a in sorted(stats.audited, key=lambda a: a.gap.position)
    ] == truth
    differing = sum(a != b for a, b in zip(truth, made.tokens, strict=True))
    assert stats.audit_differences == differing
    return stats


def test_an_audit_finds_what_rounding_has_flipped() -> None:
    assert audited(far=0.0).audit_differences == 0
    assert 0 < audited(far=0.8).audit_differences < TOKENS


@pytest.mark.parametrize(
    "mutant",
    [mutants.recurrent_state_not_rolled_back, mutants.conv_window_one_token_short],
)
def test_an_audit_finds_planted_bugs(mutant: Any) -> None:
    assert audited(mutant).audit_differences > 0
