"""Several threads and late readers: what stock allows, drafting allows."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import oracle
import pytest
import tiny
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from scripted import Scripted

from mlx_lm_mtp import MTPDrafter, draft_generate_step
from mlx_lm_mtp.heads.head import MTPHead

PROMPT = [3, 1, 4, 1, 5]
built = functools.lru_cache(None)(tiny.Spec.build)


def in_threads(*jobs: Callable[[], Any]) -> list[Any]:
    """What the jobs gave, each run in a thread of its own, switched often."""
    results: list[Any] = [None] * len(jobs)

    def run(i: int) -> None:
        try:
            results[i] = jobs[i]()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(jobs))]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    return results


@pytest.mark.parametrize("family", ["qwen3_5", "kimi_linear"])
def test_generations_in_two_threads(family: str) -> None:
    """One model, and a plain forward of it in a third thread."""
    model = built(tiny.Spec(family))
    truth = oracle.stock(model, PROMPT, 30).tokens
    plain = model(mx.array([PROMPT]))
    mx.eval(plain)

    def drafted() -> list[int]:
        if family in tiny.WITH_HEAD:
            drafter: Any = MTPDrafter(MTPHead(model))
        else:
            drafter = Scripted(truth, lambda i: i % 3 != 0)
        steps = draft_generate_step(mx.array(PROMPT), model, drafter, max_tokens=30)
        return [token for token, *_ in steps]

    def forwards() -> bool:
        return all(
            oracle.same_bits(model(mx.array([PROMPT])), plain) for _ in range(20)
        )

    results = in_threads(drafted, drafted, forwards)
    assert results == [truth, truth, True]
    assert type(model.layers[0].input_layernorm) is nn.RMSNorm


@pytest.mark.parametrize("processors", [None, make_logits_processors(None, 1.2)])
def test_log_probabilities_can_be_read_in_another_thread(processors: Any) -> None:
    model = built(tiny.Spec("qwen3"))
    truth = oracle.stock(model, PROMPT, 12, logits_processors=processors)

    def drafted() -> list[Any]:
        drafter = Scripted(truth.tokens, lambda i: i % 3 != 0)
        return list(
            draft_generate_step(
                mx.array(PROMPT),
                model,
                drafter,
                max_tokens=12,
                logits_processors=processors,
            )
        )

    (steps,) = in_threads(drafted)
    for (_, ours, _), theirs in zip(steps, truth.logprobs, strict=True):
        assert oracle.same_bits(ours, theirs)


def test_closing_elsewhere_leaves_that_threads_random_state() -> None:
    model = built(tiny.Spec())
    truth = oracle.stock(model, PROMPT, 20, seed=1, sampler=make_sampler(1.0)).tokens
    mx.random.seed(3)
    before = oracle.random_state()

    def begun() -> Any:
        mx.random.seed(1)
        steps = draft_generate_step(
            mx.array(PROMPT), model, Scripted(truth), sampler=make_sampler(1.0)
        )
        next(steps)
        return steps

    (steps,) = in_threads(begun)
    # Stock cannot be closed there at all, as its stream belongs to the other thread.
    try:
        steps.close()
    except RuntimeError as error:
        assert "tream" in str(error)
    assert oracle.random_state() == before


def test_a_sampler_that_borrows_a_name_is_not_taken_for_stock_s() -> None:
    calls = 0

    @functools.wraps(make_sampler(1.0))
    def sampler(logprobs: mx.array) -> mx.array:
        nonlocal calls
        calls += 1
        return mx.argsort(-logprobs, axis=-1)[:, calls % 2]

    model = built(tiny.Spec())
    truth = [
        token
        for token, _ in generate_step(
            mx.array(PROMPT), model, max_tokens=15, sampler=sampler
        )
    ]
    stock_calls, calls = calls, 0
    steps = draft_generate_step(
        mx.array(PROMPT),
        model,
        Scripted(truth, lambda i: i % 3 != 0),
        max_tokens=15,
        sampler=sampler,
    )
    assert [token for token, *_ in steps] == truth
    assert calls == stock_calls
