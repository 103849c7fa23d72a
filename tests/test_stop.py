"""However generation stops, the caches hold the prompt and every yielded token."""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx
import oracle
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler
from scripted import Scripted

from mlx_lm_mtp import draft_generate_step
from mlx_lm_mtp.state import capture

PROMPT = [3, 1, 4, 1, 5]
built = functools.lru_cache(None)(tiny.Spec.build)


def assert_as_after(
    model: Any, tokens: list[int], caches: list[Any], truth: list[int]
) -> None:
    """The caches are stock's after these tokens, and nothing records any more."""
    assert tokens == truth[: len(tokens)]
    stock = oracle.stock(model, PROMPT, len(tokens))
    assert oracle.differences(caches, stock.caches) == []
    assert capture._thread.recording is None


@given(
    family=st.sampled_from([*tiny.HYBRIDS, "qwen3"]),
    stop=st.integers(1, 16),
    pattern=st.lists(st.booleans(), min_size=1, max_size=6),
    mode=st.sampled_from(["batch", "step"]),
    seed=st.one_of(st.none(), st.integers(0, 99)),
)
def test_closed_at_any_token(
    family: str, stop: int, pattern: list[bool], mode: str, seed: int | None
) -> None:
    from mlx_lm_mtp import DraftOptions

    model, caches = built(tiny.Spec(family)), None
    sampler = None if seed is None else make_sampler(1.0)
    stock = oracle.stock(model, PROMPT, stop, seed=seed or 0, sampler=sampler)
    longer = oracle.stock(model, PROMPT, stop + 6, seed=seed or 0, sampler=sampler)
    caches = make_prompt_cache(model)
    mx.random.seed(seed or 0)
    steps = draft_generate_step(
        mx.array(PROMPT),
        model,
        Scripted(longer.tokens, lambda i: pattern[i % len(pattern)]),
        prompt_cache=caches,
        max_tokens=-1,
        sampler=sampler,
        options=DraftOptions(verify=mode),
    )
    tokens = [next(steps)[0] for _ in range(stop)]
    steps.close()
    assert tokens == stock.tokens
    assert oracle.differences(caches, stock.caches) == []
    assert oracle.random_state() == stock.random_state


class Fault(Exception):
    """Thrown by the test."""


class FaultyAfter:
    """Sampler and processor in one: fails at its n-th call."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def __call__(self, *arguments: mx.array) -> mx.array:
        self.left -= 1
        if self.left < 0:
            raise Fault
        values = arguments[-1]
        return values if len(arguments) == 2 else mx.argmax(values, axis=-1)


def until_fault(steps: Any) -> list[int]:
    tokens = []
    with pytest.raises(Fault):
        for token, *_ in steps:
            tokens.append(token)
    return tokens


@pytest.mark.parametrize("where", ["sampler", "processor"])
@pytest.mark.parametrize("calls", range(9))
@pytest.mark.parametrize("family", ["qwen3_5", "kimi_linear"])
def test_an_exception_in_a_callable(family: str, calls: int, where: str) -> None:
    """The consumer sees the tokens that stock shows it, and the same exception."""
    from mlx_lm.generate import generate_step

    model = built(tiny.Spec(family))
    truth = oracle.stock(model, PROMPT, 20).tokens

    def callables() -> dict[str, Any]:
        faulty = FaultyAfter(calls)
        if where == "sampler":
            return {"sampler": faulty}
        return {"logits_processors": [faulty]}

    stock = until_fault(generate_step(mx.array(PROMPT), model, **callables()))
    caches = make_prompt_cache(model)
    steps = draft_generate_step(
        mx.array(PROMPT),
        model,
        Scripted(truth, lambda i: i % 4 != 0),
        prompt_cache=caches,
        **callables(),
    )
    tokens = until_fault(steps)
    assert tokens == stock
    assert_as_after(model, tokens, caches, truth)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3"])
@pytest.mark.parametrize("at", range(1, 7))
def test_an_exception_in_the_consumer(family: str, at: int) -> None:
    model, caches = built(tiny.Spec(family)), None
    truth = oracle.stock(model, PROMPT, 20).tokens
    caches = make_prompt_cache(model)
    tokens: list[int] = []

    def consume() -> None:
        steps = draft_generate_step(
            mx.array(PROMPT), model, Scripted(truth), prompt_cache=caches
        )
        for token, *_ in steps:
            tokens.append(token)
            if len(tokens) == at:
                raise Fault

    with pytest.raises(Fault):
        consume()
    assert_as_after(model, tokens, caches, truth)


class FaultyDrafter(Scripted):
    """Fails in one of its methods after a few rounds."""

    method = "draft"

    def draft(self, token: mx.array, k: int) -> Any:
        if self.method == "draft" and len(self.seen) > 4:
            raise Fault
        return super().draft(token, k)

    def observe(self, tokens: mx.array, hidden: mx.array | None) -> None:
        super().observe(tokens, hidden)
        if self.method == "observe" and len(self.seen) > 4:
            raise Fault


@pytest.mark.parametrize("method", ["draft", "observe"])
def test_an_exception_in_the_drafter(method: str) -> None:
    model = built(tiny.Spec())
    truth = oracle.stock(model, PROMPT, 20).tokens
    drafter, caches = FaultyDrafter(truth), make_prompt_cache(model)
    drafter.method = method
    steps = draft_generate_step(mx.array(PROMPT), model, drafter, prompt_cache=caches)
    assert_as_after(model, until_fault(steps), caches, truth)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("k", [1, 3, 5])
def test_a_budget_below_k_is_not_overshot(max_tokens: int, k: int) -> None:
    from mlx_lm_mtp import DraftOptions

    model, caches = built(tiny.Spec()), None
    truth = oracle.stock(model, PROMPT, 20).tokens
    caches = make_prompt_cache(model)
    steps = draft_generate_step(
        mx.array(PROMPT),
        model,
        Scripted(truth, excess=4),
        prompt_cache=caches,
        max_tokens=max_tokens,
        options=DraftOptions(k),
    )
    tokens = [token for token, *_ in steps]
    assert len(tokens) == max_tokens
    assert_as_after(model, tokens, caches, truth)
