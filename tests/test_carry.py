"""What the drafter has seen goes from one call to the next in the prompt cache."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import checks
import mlx.core as mx
import oracle
import pytest
import tiny
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import (
    KVCache,
    can_trim_prompt_cache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)
from scripted import Scripted

from mlx_lm_mtp import Tally, draft_generate_step
from mlx_lm_mtp.drafters.mtp import MTPDrafter
from mlx_lm_mtp.drafters.ngram import NGramDrafter

FIRST, SECOND = [5, 9, 30, 2, 77], [41, 8, 3]
SPEC = tiny.Spec()


def turn(
    caches: list[Any], prompt: list[int], n: int = 7, drafter: Any = None, **how: Any
) -> tuple[list[int], Tally]:
    model, stats = checks.model_of(SPEC), Tally()
    steps = draft_generate_step(
        mx.array(prompt),
        model,
        drafter or MTPDrafter(checks.head_for(model)),
        prompt_cache=caches,
        max_tokens=n,
        stats=stats,
        **how,
    )
    return [token for token, *_ in steps], stats


def new() -> list[Any]:
    return make_prompt_cache(checks.model_of(SPEC))


def unbroken(tokens: list[int]) -> list[Any]:
    """The drafter's entries if it sees all these tokens in one piece."""
    model = checks.model_of(SPEC)
    drafter = MTPDrafter(checks.head_for(model))
    hidden = checks.Target(model, "post_norm")(mx.array([tokens]), new()).hidden
    drafter.prefill(mx.array([tokens]), hidden)
    return drafter.suspend()


def same(caches: list[Any]) -> list[Any]:
    return caches


def saved(caches: list[Any], tmp_path: Path) -> list[Any]:
    save_prompt_cache(str(tmp_path / "cache.safetensors"), caches)
    return load_prompt_cache(str(tmp_path / "cache.safetensors"))


@pytest.mark.parametrize("way", ["kept", "copied", "saved"])
def test_a_second_turn_goes_on_as_if_unbroken(way: str, tmp_path: Path) -> None:
    caches = new()
    first, _ = turn(caches, FIRST)
    assert len(caches) == len(new()) + 2
    if way == "copied":
        caches = copy.deepcopy(caches)
    if way == "saved":
        caches = saved(caches, tmp_path)
    assert checks.cache_differences(caches[-2:], unbroken([*FIRST, *first])) == []
    second, stats = turn(caches, SECOND)
    assert stats.unseen_tokens == 0
    assert stats.resident_tokens == len(FIRST) + len(SECOND) + 14
    whole = [*FIRST, *first, *SECOND, *second]
    assert checks.cache_differences(caches[-2:], unbroken(whole)) == []
    # And the target's are stock's.
    stock = oracle.stock(checks.model_of(SPEC), FIRST, 7)
    stock = oracle.stock(checks.model_of(SPEC), SECOND, 7, caches=stock.caches)
    assert second == stock.tokens
    assert checks.cache_differences(caches[:-2], stock.caches) == []


@pytest.mark.parametrize("pattern", ["1", "0110", "0"])
@pytest.mark.parametrize("n", range(1, 10))
def test_a_turn_that_is_broken_off(n: int, pattern: str) -> None:
    assert checks.broken_off_differences(SPEC, FIRST, pattern, n) == []


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("left", [1, 2, 3])
def test_a_stop_shortly_before_the_end(n: int, left: int) -> None:
    """When nothing more would have been drafted there is no draft to take back."""
    found = checks.broken_off_differences(SPEC, FIRST, "1", n, max_tokens=n + left)
    assert found == []


def test_a_cache_of_stock_s_starts_the_drafter_cold_and_says_so() -> None:
    caches = oracle.stock(checks.model_of(SPEC), FIRST, 7).caches
    _, stats = turn(caches, SECOND)
    assert stats.unseen_tokens == len(FIRST) + 7
    assert "the drafter has not seen 12 cached tokens" in stats.summary()
    _, stats = turn(caches, SECOND)
    assert stats.unseen_tokens == len(FIRST) + 7


def test_stock_goes_on_with_a_list_that_carries_more() -> None:
    caches, model = new(), checks.model_of(SPEC)
    turn(caches, FIRST)
    theirs = [t for t, _ in generate_step(mx.array(SECOND), model, prompt_cache=caches,
                                          max_tokens=7)]  # fmt: skip
    stock = oracle.stock(model, FIRST, 7)
    stock = oracle.stock(model, SECOND, 7, caches=stock.caches)
    assert theirs == stock.tokens
    _, stats = turn(caches, [4, 4])
    assert stats.unseen_tokens == len(SECOND) + 7


def test_another_drafter_leaves_the_entries_alone() -> None:
    caches = new()
    turn(caches, FIRST)
    before = caches[-2:]
    _, stats = turn(caches, SECOND, drafter=Scripted([]))
    assert caches[-2:] == before
    assert stats.unseen_tokens == len(FIRST) + 7


class Remembering(Scripted):
    """A drafter of somebody else, which keeps something in the prompt cache."""

    name = "remembering"
    gives = frozenset({"caches"})

    def suspend(self) -> list[Any]:
        return list(self.entries)

    def resume(self, caches: Any) -> int:
        return 0

    def begin(self) -> None:
        super().begin()
        seen = mx.ones((1, 3, 5, 7))
        self.entries = [KVCache.from_state((seen, seen, 5))]


@pytest.mark.parametrize("draft", [None, "head", "lookup"])
def test_a_saved_cache_outlives_its_drafter(tmp_path: Path, draft: str | None) -> None:
    """Uninstalled, it leaves stock cache objects: they load, and nobody needs them."""
    caches, file = new(), str(tmp_path / "cache.safetensors")
    turn(caches, FIRST, drafter=Remembering([]))
    assert len(caches) == len(new()) + 1
    save_prompt_cache(file, caches)
    model, unbroken_caches = checks.model_of(SPEC), new()
    first = generate_step(
        mx.array(FIRST), model, max_tokens=7, prompt_cache=unbroken_caches
    )
    list(first)
    how = {"max_tokens": 7, "prompt_cache": unbroken_caches}
    truth = [token for token, _ in generate_step(mx.array(SECOND), model, **how)]
    loaded = load_prompt_cache(file)
    if draft is None:
        how["prompt_cache"] = loaded
        said = [token for token, _ in generate_step(mx.array(SECOND), model, **how)]
    else:
        drafter = NGramDrafter() if draft == "lookup" else None
        said, stats = turn(loaded, SECOND, drafter=drafter)
        assert stats.unseen_tokens == len(FIRST) + 7
    assert said == truth
    models = slice(0, len(new()))
    assert oracle.differences(loaded[models], unbroken_caches) == []


def test_entries_that_are_not_its_own_are_replaced() -> None:
    caches = [*new(), KVCache()]
    _, stats = turn(caches, FIRST)
    assert stats.unseen_tokens == 0 and len(caches) == len(new()) + 2


@pytest.mark.parametrize("n", [1, 2, 5])
def test_what_stock_trims_is_trimmed_here(n: int) -> None:
    """The drafter's entries are trimmable, and what waits is dropped with them."""
    model = checks.model_of(SPEC)
    drafter = MTPDrafter(checks.head_for(model))
    tokens = [*FIRST, *SECOND]
    entries = unbroken(tokens)
    assert can_trim_prompt_cache(entries)
    trim_prompt_cache(entries, n)
    drafter.begin()
    assert drafter.resume(entries) == len(tokens) - 1 - n
    hidden = checks.Target(model, "post_norm")(mx.array([SECOND]), new()).hidden
    drafter.prefill(mx.array([SECOND]), hidden)
    assert drafter.draft(mx.array([[3]]), 3).tokens.shape == (1, 3)
    assert drafter.cache.offset == len(tokens) - 1 - n + len(SECOND)


def test_quantised_on_the_way() -> None:
    """Stock quantises by putting other objects into the list."""
    how = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 8}
    caches, model = new(), checks.model_of(SPEC)
    first, _ = turn(caches, FIRST, **how)
    second, stats = turn(caches, SECOND, **how)
    stock = oracle.stock(model, FIRST, 7, **how)
    assert first == stock.tokens
    stock = oracle.stock(model, SECOND, 7, caches=stock.caches, **how)
    assert second == stock.tokens
    assert checks.cache_differences(caches[: len(new())], stock.caches) == []
    assert stats.unseen_tokens == 0


class Fault(Exception):
    """Thrown by the test."""


@pytest.mark.parametrize("where", ["callback", "processor", "thrown"])
def test_a_turn_that_fails_leaves_no_entries_and_the_next_says_so(where: str) -> None:
    caches = new()
    turn(caches, FIRST)
    calls: list[Any] = []

    def fail(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 3:
            raise Fault
        return arguments[-1] if len(arguments) == 2 else None

    how: dict[str, Any] = {
        "callback": {"on_tokens": fail},
        "processor": {"logits_processors": [fail]},
        "thrown": {},
    }[where]
    model = checks.model_of(SPEC)
    steps = draft_generate_step(
        mx.array(SECOND),
        model,
        MTPDrafter(checks.head_for(model)),
        prompt_cache=caches,
        **how,
    )
    with pytest.raises(Fault):
        tokens = [next(steps)[0] for _ in range(2)]
        if where == "thrown":
            steps.throw(Fault())
        tokens += [token for token, *_ in steps]
    assert len(caches) == len(new())
    resident = caches[1].offset
    _, stats = turn(caches, [4, 4])
    assert stats.unseen_tokens == resident > len(FIRST) + len(SECOND)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("size", [16, 32])
def test_a_draft_model_s_caches_are_not_taken_for_its_own(
    heads: int, size: int
) -> None:
    foreign = [KVCache(), KVCache()]
    for cache in foreign:
        cache.update_and_fetch(*(mx.zeros((1, heads, 3, size)) for _ in range(2)))
    caches = [*oracle.stock(checks.model_of(SPEC), FIRST, 7).caches, *foreign]
    _, stats = turn(caches, SECOND)
    assert stats.unseen_tokens == len(FIRST) + 7
    assert len(caches) == len(new()) + 2 and caches[-2] is not foreign[0]


def test_a_tuple_of_caches_carries_nothing() -> None:
    caches = tuple(new())
    first, _ = turn(caches, FIRST)  # type: ignore[arg-type]
    stock = oracle.stock(checks.model_of(SPEC), FIRST, 7)
    assert first == stock.tokens
    assert checks.cache_differences(caches, stock.caches) == []
