"""Drafting changes nothing: tokens, log-probabilities, caches, random state."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import mlx.core as mx
import oracle
import pytest
import tiny
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from scripted import Scripted

from mlx_lm_mtp import DraftOptions, Tally, draft_generate_step

SPECS = [
    tiny.Spec(family, experts, tied=experts, weights=weights)
    for family in tiny.HYBRIDS
    for weights in ("fp32", "bf16", "4bit")
    for experts in (False, True)
    # Stock has no experts in olmo_hybrid, and MoE in bf16 does not run on a CPU.
    if not experts or (family in tiny.WITH_EXPERTS and weights != "bf16")
]
SPECS += [
    tiny.Spec(family, weights=weights)
    for family in ("qwen3", "mamba2", "falcon_h1", "lfm2")
    for weights in ("fp32", "bf16", "4bit")
]

built = functools.lru_cache(4 * len(SPECS))(tiny.Spec.build)


def drafted(
    model: Any,
    prompt: list[int],
    drafter: Any,
    max_tokens: int,
    *,
    seed: int | None = None,
    caches: list[Any] | None = None,
    options: DraftOptions | None = None,
    stats: Tally | None = None,
    **kwargs: Any,
) -> oracle.Result:
    """Our loop, run to its end."""
    if caches is None:
        caches = make_prompt_cache(model, max_kv_size=kwargs.get("max_kv_size"))
    if seed is not None:
        mx.random.seed(seed)
    steps = list(
        draft_generate_step(
            mx.array(prompt),
            model,
            drafter,
            options=options,
            stats=stats,
            max_tokens=max_tokens,
            prompt_cache=caches,
            **kwargs,
        )
    )
    return oracle.Result(
        [t for t, *_ in steps],
        [p for _, p, _ in steps],
        caches,
        oracle.random_state(),
    )


def assert_same(ours: oracle.Result, theirs: oracle.Result) -> None:
    assert ours.tokens == theirs.tokens
    assert oracle.differences(ours.caches, theirs.caches) == []
    assert ours.random_state == theirs.random_state
    for left, right in zip(ours.logprobs, theirs.logprobs, strict=True):
        assert oracle.same_bits(left, right)


PATTERNS = st.one_of(
    st.just("right"),
    st.just("wrong"),
    st.lists(st.booleans(), min_size=1, max_size=12),
)


def scripted(truth: list[int], pattern: Any, excess: int = 0) -> Scripted:
    if pattern == "right":
        return Scripted(truth, excess=excess)
    if pattern == "wrong":
        return Scripted(truth, lambda i: False, excess)
    return Scripted(truth, lambda i: pattern[i % len(pattern)], excess)


@settings(max_examples=4 * settings.default.max_examples)
@given(
    spec=st.builds(dataclasses.replace, st.sampled_from(SPECS), seed=st.integers(0, 3)),
    prompt=st.lists(st.integers(0, tiny.VOCAB - 1), min_size=1, max_size=14),
    k=st.integers(1, 5),
    budget=st.integers(1, 24),
    prefill_step=st.sampled_from([1, 3, 8, 2048]),
    pattern=PATTERNS,
    excess=st.sampled_from([0, 0, 3]),
    mode=st.sampled_from(["batch", "batch", "step"]),
    seed=st.one_of(st.none(), st.integers(0, 2**40)),
)
@example(SPECS[0], [7], 3, 12, 2048, [False], 0, "batch", None)
@example(SPECS[0], [7, 8], 3, 12, 1, "right", 0, "batch", None)
@example(SPECS[1], [1, 2, 3], 4, 2, 2, "right", 0, "batch", None)
@example(SPECS[2], [1, 2, 3, 4], 3, 1, 3, "right", 0, "batch", 5)
@example(SPECS[3], [1, 2, 3, 4], 3, 9, 3, [True, False], 2, "batch", 5)
def test_equals_stock(
    spec: tiny.Spec,
    prompt: list[int],
    k: int,
    budget: int,
    prefill_step: int,
    pattern: Any,
    excess: int,
    mode: str,
    seed: int | None,
) -> None:
    model = built(spec)
    kwargs: dict[str, Any] = {"prefill_step_size": prefill_step, "seed": seed or 0}
    if seed is not None:
        kwargs["sampler"] = make_sampler(0.9, top_p=0.95)
    stock = oracle.stock(model, prompt, budget, **kwargs)
    stats = Tally()
    ours = drafted(
        model,
        prompt,
        scripted(stock.tokens, pattern, excess),
        budget,
        options=DraftOptions(num_draft_tokens=k, verify=mode),
        stats=stats,
        **kwargs,
    )
    assert_same(ours, stock)
    assert stats.rounds + stats.accepted.total() == budget
    if pattern == "right":
        assert stats.acceptance_rate in (0.0, 1.0)  # 0.0: nothing was drafted


def test_the_reference_says_more_than_one_thing() -> None:
    for spec in SPECS:
        assert len(set(oracle.stock(built(spec), [3, 1, 4, 1, 5], 24).tokens)) > 3


SAMPLERS = {
    "temperature": make_sampler(1.0),
    "top_p": make_sampler(0.8, top_p=0.9),
    "min_p": make_sampler(0.8, min_p=0.05, min_tokens_to_keep=2),
    "top_k": make_sampler(1.3, top_k=5),
    "xtc": make_sampler(
        1.0, xtc_probability=0.5, xtc_threshold=0.1, xtc_special_tokens=[0, 1]
    ),
    "all": make_sampler(0.7, top_p=0.9, min_p=0.02, top_k=20, xtc_probability=0.2),
}


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3"])
def test_every_stock_sampler_gives_the_same_for_the_same_seed(
    family: str, name: str
) -> None:
    model = built(tiny.Spec(family))
    for seed in range(3):
        kwargs = {"seed": seed, "sampler": SAMPLERS[name]}
        stock = oracle.stock(model, [5, 3, 1], 20, **kwargs)
        drafter = Scripted(stock.tokens, lambda i: i % 3 != 0)
        assert_same(drafted(model, [5, 3, 1], drafter, 20, **kwargs), stock)


def test_a_second_call_goes_on_equal() -> None:
    """Same caches, same random state: so the next generation is the same as well."""
    model = built(tiny.Spec())
    sampler = make_sampler(1.0)
    first = oracle.stock(model, [9, 8], 11, seed=4, sampler=sampler)
    second = oracle.stock(
        model, [first.tokens[-1], 2], 11, caches=first.caches, sampler=sampler
    )
    ours = drafted(model, [9, 8], Scripted(first.tokens), 11, seed=4, sampler=sampler)
    again = drafted(
        model,
        [ours.tokens[-1], 2],
        Scripted(second.tokens),
        11,
        caches=ours.caches,
        sampler=sampler,
    )
    assert_same(again, second)


class Shown:
    """A logits processor that keeps a state, and a record of what it is shown."""

    def __init__(self) -> None:
        self.shown: list[tuple[str, list[int]]] = []

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        self.shown.append((str(tokens.dtype), tokens.tolist()))
        return logits.at[:, len(self.shown) % tiny.VOCAB].add(4.0)


@pytest.mark.parametrize("stop", [None, 1, 2, 5, 8])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_processors_see_what_stock_shows(temperature: float, stop: int | None) -> None:
    """As often, in order, with the same histories; never a rejected draft."""
    model = built(tiny.Spec())
    sampler = make_sampler(temperature)

    def run(generate: Any, **kwargs: Any) -> tuple[list[int], Shown, list[int]]:
        shown, tokens = Shown(), []
        mx.random.seed(1)
        steps = generate(
            mx.array([4, 5, 6]),
            model,
            logits_processors=[shown, *make_logits_processors(None, 1.3)],
            sampler=sampler,
            max_tokens=14,
            prefill_step_size=2,
            **kwargs,
        )
        for step in steps:
            tokens.append(step[0])
            if len(tokens) == stop:
                break
        steps.close()
        return tokens, shown, oracle.random_state()

    stock = run(generate_step)
    truth, *_ = run(generate_step)
    drafter = Scripted(truth, lambda i: i % 4 != 1)
    ours = run(functools.partial(draft_generate_step), drafter=drafter)
    assert ours[0] == stock[0]
    assert ours[1].shown == stock[1].shown
    assert ours[2] == stock[2]


class CountingSampler:
    """A sampler of the user's, with a state of its own."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, logprobs: mx.array) -> mx.array:
        assert logprobs.shape == (1, tiny.VOCAB)
        self.calls += 1
        return mx.argsort(-logprobs, axis=-1)[:, self.calls % 2]


def test_a_stateful_sampler_is_called_as_often_as_stock_calls_it() -> None:
    model = built(tiny.Spec())
    stock = oracle.stock(model, [1, 2], 15, sampler=(theirs := CountingSampler()))
    drafter = Scripted(stock.tokens, lambda i: i % 3 != 0)
    result = drafted(model, [1, 2], drafter, 15, sampler=(ours := CountingSampler()))
    assert_same(result, stock)
    assert ours.calls == theirs.calls


@pytest.mark.parametrize("start", [0, 3, 9, 12, 100])
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3"])
def test_kv_quantised_at_any_time(family: str, start: int) -> None:
    model = built(tiny.Spec(family))
    kwargs = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": start}
    stock = oracle.stock(model, [1, 2, 3, 4, 5], 20, **kwargs)
    ours = drafted(model, [1, 2, 3, 4, 5], Scripted(stock.tokens), 20, **kwargs)
    assert_same(ours, stock)


@pytest.mark.parametrize("size", [8, 9, 12, 16, 64])
@pytest.mark.parametrize("mode", ["batch", "step"])
@pytest.mark.parametrize("length", [1, 6, 20])
def test_rotating_cache_before_at_and_after_the_wrap(
    size: int, mode: str, length: int
) -> None:
    model = built(tiny.Spec("qwen3"))
    prompt = [i % 7 for i in range(length)]
    stock = oracle.stock(model, prompt, 24, max_kv_size=size)
    assert isinstance(stock.caches[0], RotatingKVCache)
    stats = Tally()
    ours = drafted(
        model,
        prompt,
        Scripted(stock.tokens, lambda i: i % 5 != 0),
        24,
        options=DraftOptions(verify=mode),
        stats=stats,
        max_kv_size=size,
    )
    assert_same(ours, stock)
    wraps = length + 24 >= size
    assert bool(stats.undrafted) == (wraps and mode == "batch")


def test_where_nothing_can_be_committed_the_prefix_is_replayed() -> None:
    model = built(tiny.Spec("lfm2"))
    stock = oracle.stock(model, [1, 2, 3], 20)
    stats = Tally()
    drafter = Scripted(stock.tokens, lambda i: i % 3 != 0)
    assert_same(drafted(model, [1, 2, 3], drafter, 20, stats=stats), stock)
    assert stats.replays > 0 and stats.replayed_tokens >= stats.replays


@pytest.mark.parametrize("family", [*tiny.HYBRIDS, "qwen3", "mamba2", "falcon_h1"])
def test_where_commit_is_possible_nothing_is_snapshot_or_replayed(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("a snapshot was taken")

    monkeypatch.setattr("mlx_lm_mtp.verify.light_snapshot", never)
    model = built(tiny.Spec(family))
    stock = oracle.stock(model, [1, 2, 3], 12)
    drafter = Scripted(stock.tokens, lambda i: i % 3 != 0)
    assert_same(drafted(model, [1, 2, 3], drafter, 12), stock)


def test_no_limit_when_max_tokens_is_minus_one() -> None:
    model = built(tiny.Spec())
    stock = oracle.stock(model, [1, 2], 40)
    steps = draft_generate_step(
        mx.array([1, 2]), model, Scripted(stock.tokens), max_tokens=-1
    )
    assert [next(steps)[0] for _ in range(40)] == stock.tokens
    steps.close()


def test_no_tokens_when_max_tokens_is_zero() -> None:
    model = built(tiny.Spec())
    stock = oracle.stock(model, [1, 2, 3], 0)
    assert_same(drafted(model, [1, 2, 3], Scripted([]), 0), stock)


def test_progress_is_reported_as_stock_reports_it() -> None:
    model, calls = built(tiny.Spec()), ([], [])
    for steps, seen in zip((generate_step, draft_generate_step), calls, strict=True):
        extra = {} if steps is generate_step else {"drafter": Scripted([])}
        list(
            steps(
                mx.array(list(range(10))),
                model,
                max_tokens=1,
                prefill_step_size=4,
                prompt_progress_callback=lambda *n, seen=seen: seen.append(n),
                **extra,
            )
        )
    assert calls[0] == calls[1]


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt is empty"):
        next(draft_generate_step(mx.array([]), built(tiny.Spec()), Scripted([])))
