"""A draft model: what it holds is what the target keeps, whatever its caches are."""

from __future__ import annotations

import random
from typing import Any

import checks
import mlx.core as mx
import oracle
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.sample_utils import make_sampler

from mlx_lm_mtp import DraftOptions, Tally
from mlx_lm_mtp.drafters.draft_model import DraftModelDrafter
from mlx_lm_mtp.drafters.vocabulary import check_same_vocabulary
from mlx_lm_mtp.errors import InvalidOption

FAMILIES = ("qwen3", "qwen3_5")
PROMPT = [5, 9, 30, 2, 77]


def drafter_of(family: str, seed: int = 0) -> DraftModelDrafter:
    return DraftModelDrafter(checks.model_of(tiny.Spec(family, seed=seed)))


def array(tokens: list[int]) -> mx.array:
    return mx.array([tokens], dtype=mx.uint32)


def held(family: str, tokens: list[int]) -> list[Any]:
    """The caches of a draft model that was fed these tokens."""
    drafter = drafter_of(family)
    drafter.prefill(array(tokens), None)
    return drafter.suspend()


@given(
    family=st.sampled_from(FAMILIES),
    rounds=st.lists(
        st.tuples(
            st.integers(0, 4),  # drafts, 0 for none
            st.integers(1, 6),  # tokens kept
            st.integers(1, 3),  # tokens of the path
            st.integers(0, 3),  # of the kept ones, to be taken back
        ),
        max_size=8,
    ),
    seed=st.integers(0, 99),
)
def test_caches_hold_what_was_kept(
    family: str, rounds: list[tuple[int, int, int, int]], seed: int
) -> None:
    """Whatever was drafted, kept, and taken back."""
    draw = random.Random(seed)
    drafter, kept = drafter_of(family), list(PROMPT)
    drafter.prefill(array(PROMPT), None)
    for k, n, m, back in rounds:
        tokens = [draw.randrange(tiny.VOCAB) for _ in range(m)]
        if k:
            tokens += drafter.draft_behind(array(tokens), k).tokens.tolist()[0]
        else:
            n = 1  # nothing else can have been kept
        tokens = tokens[:n]
        drafter.observe(array(tokens), None)
        back = min(back, len(tokens) - 1)
        if back or draw.random() < 0.3:
            drafter.draft(array([3]), 2)
            drafter.rewind(back)
            tokens = tokens[: len(tokens) - back]
        kept += tokens
    assert oracle.differences(drafter.suspend(), held(family, kept)) == []


@pytest.mark.parametrize("draft", ["qwen3", "qwen3_5", "mamba2", "falcon_h1"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "kimi_linear"])
@pytest.mark.parametrize("sampled", [False, True])
def test_any_model_drafts_for_any(family: str, draft: str, sampled: bool) -> None:
    model = checks.model_of(tiny.Spec(family))
    found = checks.generation_differences(
        model,
        PROMPT,
        16,
        lambda truth: drafter_of(draft, seed=1),
        sampler=(lambda: make_sampler(0.8)) if sampled else None,
    )
    assert found == []


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_a_model_is_its_own_best_drafter(family: str) -> None:
    model, stats = checks.model_of(tiny.Spec(family)), Tally()
    checks.drafted(model, PROMPT, 24, DraftModelDrafter(model), stats=stats)
    assert stats.acceptance_rate == 1.0 and stats.drafted.total() == 18


def test_all_strategies_it_gives() -> None:
    model = checks.model_of(tiny.Spec("qwen3_5"))
    confident = {"depth": "confidence", "tau": 0.1}
    for how in (confident, confident | {"reads": "once"}, {"probe": 3}):
        found = checks.generation_differences(
            model,
            PROMPT,
            16,
            lambda truth: drafter_of("qwen3_5", seed=1),
            options=DraftOptions(**how),
        )
        assert found == []


class Shifted(DraftModelDrafter):
    """Negative control: caches are left one token behind where nothing was rejected."""

    def observe(self, tokens: mx.array, hidden: Any) -> None:
        super().observe(tokens[:, :-1] if tokens.shape[1] > 2 else tokens, hidden)


def test_a_lost_token_shows() -> None:
    model = checks.model_of(tiny.Spec("qwen3_5"))
    stats = Tally()
    checks.drafted(model, PROMPT, 24, Shifted(model), stats=stats)
    assert stats.acceptance_rate < 1.0


# --- stock's own argument ---------------------------------------------------------


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3"])
@pytest.mark.parametrize("draft", ["qwen3_5", "qwen3"])
def test_stocks_draft_model_works_whatever_the_caches(family: str, draft: str) -> None:
    """Stock refuses hybrids, and where the draft model is one it goes astray."""
    model = checks.model_of(tiny.Spec(family))
    other = checks.model_of(tiny.Spec(draft))
    caches = make_prompt_cache(model) + make_prompt_cache(other)
    steps = speculative_generate_step(
        mx.array(PROMPT), model, other, max_tokens=16, prompt_cache=caches
    )
    taken = list(steps)
    theirs = oracle.stock(model, PROMPT, 16)
    assert [token for token, *_ in taken] == theirs.tokens
    if family == draft:
        assert sum(drafted for *_, drafted in taken) >= 10
    if "qwen3_5" in (family, draft):
        n = len(make_prompt_cache(model))
        assert oracle.differences(caches[:n], theirs.caches) == []
        held_by = held(draft, PROMPT + theirs.tokens)
        assert oracle.differences(caches[n:], held_by) == []


@pytest.mark.usefixtures("plugin")
def test_where_stock_can_it_is_stock() -> None:
    model = checks.model_of(tiny.Spec("qwen3"))
    steps = speculative_generate_step(mx.array(PROMPT), model, model, max_tokens=8)
    assert steps.gi_code.co_filename.endswith("mlx_lm/generate.py")


@pytest.mark.usefixtures("plugin")
def test_a_second_turn_goes_on_from_its_caches() -> None:
    model = checks.model_of(tiny.Spec("qwen3_5"))
    caches = make_prompt_cache(model) + make_prompt_cache(model)

    def turn(prompt: list[int]) -> list[Any]:
        steps = speculative_generate_step(
            mx.array(prompt), model, model, max_tokens=9, prompt_cache=caches
        )
        return list(steps)

    theirs = make_prompt_cache(model)
    for prompt in (PROMPT, [41, 8, 3]):
        ours = turn(prompt)
        stock = generate_step(
            mx.array(prompt), model, max_tokens=9, prompt_cache=theirs
        )
        assert [token for token, *_ in ours] == [token for token, _ in stock]
        assert sum(drafted for *_, drafted in ours) >= 5


@pytest.mark.parametrize("family", FAMILIES)
def test_caches_of_another_model_are_not_taken_over(family: str) -> None:
    """Of as many layers of the same kinds, but of other sizes."""
    drafter, entries = drafter_of(family), held(family, PROMPT)
    drafter.begin()
    assert drafter.resume(entries) == len(PROMPT)
    for entry in entries:
        parts = [a for _, a in tree_flatten(entry.state) if isinstance(a, mx.array)]
        wide = [mx.concatenate([a, a], axis=-1) for a in parts]
        if isinstance(entry, KVCache):
            entry.keys, entry.values = wide
        else:
            entry.cache = wide
    drafter.begin()
    assert drafter.resume(entries) == 0
    assert drafter.resume(entries[:-1]) == 0
    assert drafter.caches[0] is not entries[0]
    assert drafter.resume(make_prompt_cache(drafter.model)) == 0


# --- vocabularies -----------------------------------------------------------------


class Vocabulary:
    def __init__(self, **tokens: int) -> None:
        self.tokens = tokens

    def get_vocab(self) -> dict[str, int]:
        return self.tokens


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        (Vocabulary(a=0, b=1), ""),
        (Vocabulary(a=0, b=1, c=2), ""),
        (Vocabulary(a=1, b=0), "'a' is token 1 there and 0 here"),
        (Vocabulary(x=0, y=1), "only 0 of 2 tokens"),
    ],
)
def test_vocabularies_are_compared(theirs: Vocabulary, said: str) -> None:
    ours = Vocabulary(a=0, b=1)
    if not said:
        check_same_vocabulary(ours, theirs, "some/model")
        return
    with pytest.raises(InvalidOption, match="draft model some/model") as error:
        check_same_vocabulary(ours, theirs, "some/model")
    assert said in str(error.value)


@pytest.mark.parametrize("rows", [80, 120])
@pytest.mark.parametrize("temp", [0.0, 1.0])
def test_one_vocabulary_may_have_more_rows(rows: int, temp: float) -> None:
    """As models of one family do: then the rest is never drafted, nor read."""
    model = checks.model_of(tiny.Spec("qwen3"))
    small = tiny.Spec("qwen3", seed=1).build()
    weight = small.model.embed_tokens.weight
    small.model.embed_tokens.weight = _rows(weight, rows)
    found = checks.generation_differences(
        model,
        PROMPT,
        12,
        lambda truth: DraftModelDrafter(small),
        sampler=(lambda: make_sampler(temp)) if temp else None,
    )
    assert found == []


def _rows(weight: mx.array, rows: int) -> mx.array:
    more = rows - weight.shape[0]
    return weight[:rows] if more < 0 else mx.concatenate([weight, weight[:more]])
