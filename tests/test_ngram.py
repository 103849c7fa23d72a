"""Prompt lookup: the match finder beside a search by hand, and the drafter in use."""

from __future__ import annotations

from typing import Any

import checks
import mlx.core as mx
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from mlx_lm_mtp import DraftOptions, Tally, draft_generate_step
from mlx_lm_mtp.drafters.matching import Match, Matcher
from mlx_lm_mtp.drafters.ngram import NGramDrafter, NGramOptions

few = st.integers(0, 2)  # so that texts repeat themselves
texts = st.lists(few, max_size=40)
paths = st.lists(few, min_size=1, max_size=5)
ALL = 10**6


def searched(text: list[int], path: list[int], shortest: int, longest: int) -> Any:
    """The longest match, the latest of equally long ones, by looking everywhere."""
    end = (text + path)[-longest:]
    found = None
    for place in range(len(text), 0, -1):
        length = 0
        while (
            length < min(place, len(end))
            and text[place - 1 - length] == end[-1 - length]
        ):
            length += 1
        if length >= shortest and (found is None or length > found.length):
            found = Match(place, length)
    return found


@given(text=texts, path=paths, shortest=st.integers(1, 4), more=st.integers(0, 6))
def test_the_longest_match_is_found(
    text: list[int], path: list[int], shortest: int, more: int
) -> None:
    matcher = Matcher(shortest, shortest + more, ALL)
    matcher.add(text)
    assert matcher.match(path) == searched(text, path, shortest, shortest + more)


@given(text=texts, more=texts, path=paths)
def test_what_is_dropped_was_never_there(
    text: list[int], more: list[int], path: list[int]
) -> None:
    matcher, fresh = Matcher(2, 8, ALL), Matcher(2, 8, ALL)
    matcher.add(text + more)
    matcher.drop(len(more))
    fresh.add(text)
    assert vars(matcher) == vars(fresh)
    assert matcher.match(path) == fresh.match(path)


@given(text=texts, path=paths, k=st.integers(1, 12))
def test_what_follows_may_run_into_itself(
    text: list[int], path: list[int], k: int
) -> None:
    matcher = Matcher(1, 8, ALL)
    matcher.add(text)
    match = matcher.match(path)
    if match is None:
        return
    written = text + path
    for i in range(k):
        written.append(written[match.end + i])
    assert matcher.following(match, path, k) == written[len(text + path) :]


def test_no_more_candidates_are_looked_at_than_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So a round does not take longer in a long text."""
    looked: list[int] = []
    stock = Matcher._length

    def counted(self: Matcher, place: int, end: Any) -> int:
        looked.append(place)
        return stock(self, place, end)

    monkeypatch.setattr(Matcher, "_length", counted)
    matcher = Matcher(1, 50, 4)
    matcher.add([7, *range(100, 110)] * 200)
    assert matcher.match([7]) is not None
    assert len(looked) <= 4
    assert looked[0] == max(looked)  # the latest first


# --- the drafter ------------------------------------------------------------------

REPEATING = (5, 9, 30, 2, 77, 5, 9, 30, 2, 77, 5, 9)
ONE = NGramOptions(shortest=1)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "mamba2"])
@pytest.mark.parametrize("stop", [None, 1, 5, 10])
def test_tokens_and_caches_are_stocks(family: str, stop: int | None) -> None:
    model = checks.model_of(tiny.Spec(family))
    found = checks.generation_differences(
        model, REPEATING, 40, lambda truth: NGramDrafter(ONE), stop=stop
    )
    assert found == []


def test_what_was_said_before_is_drafted() -> None:
    drafter = NGramDrafter(NGramOptions(shortest=2))
    drafter.prefill(mx.array([[1, 2, 3, 4, 5, 1]]), None)
    assert drafter.draft(mx.array([[2]]), 3).tokens.tolist() == [[3, 4, 5]]
    assert drafter.draft(mx.array([[3]]), 3).tokens.shape == (1, 0)
    assert drafter.draft_behind(mx.array([[9, 4, 5]]), 2).tokens.tolist() == [[1, 9]]
    drafter.observe(mx.array([[2, 9]]), None)
    drafter.rewind(1)
    assert drafter.draft(mx.array([[3]]), 1).tokens.tolist() == [[4]]
    drafter.begin()
    assert drafter.draft(mx.array([[2]]), 3).tokens.shape == (1, 0)


def test_drafts_are_accepted_where_a_text_repeats_itself() -> None:
    """A tiny random model soon runs in circles; prompt lookup sees that."""
    model, stats = checks.model_of(tiny.Spec("qwen3")), Tally()
    steps = draft_generate_step(
        mx.array(REPEATING), model, NGramDrafter(), max_tokens=300, stats=stats
    )
    assert len(list(steps)) == 300
    assert stats.accepted.total() > 50


def test_what_it_is_shown_can_be_read_without_waiting() -> None:
    """Every array that the loop shows was made from integers, not computed."""
    seen: list[mx.array] = []

    class Watching(NGramDrafter):
        def draft(self, token: mx.array, k: int) -> Any:
            seen.append(token)
            return super().draft(token, k)

        def observe(self, tokens: mx.array, hidden: Any) -> None:
            seen.append(tokens)
            super().observe(tokens, hidden)

    model = checks.model_of(tiny.Spec("qwen3"))
    computed: list[str] = []
    steps = draft_generate_step(
        mx.array(REPEATING), model, Watching(ONE), max_tokens=40
    )
    for _ in steps:
        while seen:
            computed += _operations(seen.pop())
    assert computed == []
    assert _operations(mx.array([1]) + 1)  # else nothing is tested


def _operations(array: mx.array) -> list[str]:
    import io

    file = io.StringIO()
    mx.export_to_dot(file, array)
    return [line for line in file.getvalue().splitlines() if "->" in line]


@pytest.mark.parametrize("name", ["shortest", "longest", "tries"])
def test_options_are_checked(name: str) -> None:
    options = DraftOptions.of({f"ngram.{name}": 0})
    from mlx_lm_mtp.errors import InvalidOption
    from mlx_lm_mtp.plugins import drafters

    with pytest.raises(InvalidOption, match=f"ngram.{name} is 0; give an integer"):
        drafters().check_options(options)
