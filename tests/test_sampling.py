"""Drafts that are chosen as the target chooses, and what cannot be chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import oracle
import pytest
import tiny
from checks import PROMPT, drafted, generation_differences, head_for, model_of
from hypothesis import example, given
from hypothesis import strategies as st
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import greedy_sampler, make_logits_processors, make_sampler
from scripted import Scripted
from test_statistics import Chain, Like

from mlx_lm_mtp import (
    Choices,
    DraftOptions,
    MTPDrafter,
    Proposal,
    Tally,
    coupling,
    draft_generate_step,
    random_state,
)
from mlx_lm_mtp import pure as mark
from mlx_lm_mtp.errors import DrafterError, InvalidOption, NothingToChoose

SPECS = (tiny.Spec("qwen3_5"), tiny.Spec("qwen3_next", weights="bf16"))


def by_temperature(logprobs: mx.array) -> mx.array:
    """A pure sampler of the user's."""
    return mx.random.categorical(logprobs / 0.8)


def by_gumbel(logprobs: mx.array) -> mx.array:
    return mx.argmax(logprobs + mx.random.gumbel(logprobs.shape), axis=-1)


def twice(logprobs: mx.array) -> mx.array:
    """Draws a different number of times from call to call."""
    hot = mx.random.uniform().item() > 0.5
    return by_gumbel(logprobs / 2) if hot else by_temperature(logprobs)


def warming() -> Any:
    """A sampler that keeps a state, and draws from `mx.random`."""
    calls: list[int] = []

    def sampler(logprobs: mx.array) -> mx.array:
        calls.append(1)
        return mx.random.categorical(logprobs / (1 + 0.1 * len(calls)))

    return sampler


def own_generator() -> Any:
    """A sampler that draws from another generator."""
    generator = np.random.default_rng(3)
    return lambda x: mx.array([int(generator.integers(tiny.VOCAB))], mx.uint32)


SAMPLERS: dict[str, Callable[[], Any]] = {
    "greedy": lambda: greedy_sampler,
    "temperature": lambda: make_sampler(1.0),
    "top_p": lambda: make_sampler(0.8, top_p=0.9),
    "min_p": lambda: make_sampler(0.8, min_p=0.05, min_tokens_to_keep=2),
    "top_k": lambda: make_sampler(1.3, top_k=5),
    "xtc": lambda: make_sampler(
        1.0, xtc_probability=0.5, xtc_threshold=0.1, xtc_special_tokens=[0, 1]
    ),
    "by_temperature": lambda: by_temperature,
    "by_gumbel": lambda: by_gumbel,
    "twice": lambda: twice,
    "warming": warming,
    "own_generator": own_generator,
}
PENALTIES: dict[str, Callable[[], list[Any]]] = {
    "none": list,
    "repetition": lambda: make_logits_processors(None, 1.3, 5),
    "presence": lambda: make_logits_processors(None, None, None, 0.7, 8),
    "frequency": lambda: make_logits_processors(
        frequency_penalty=0.5, frequency_context_size=30
    ),
    "bias": lambda: make_logits_processors({3: 2.0, 7: -100.0}),
    "all": lambda: make_logits_processors({3: 2.0}, 1.2, 20, 0.3, 20, 0.3, 20),
}
STRATEGIES = (
    {},
    {"draft_sampling": "greedy"},
    {"depth": "confidence", "tau": 0.02},
    {"rescue": 2},
    {"paths": 3},
    {"verify": "step", "probe": 3},
)


# --- the tokens stay those of stock ---------------------------------------------------


@given(
    spec=st.sampled_from(SPECS),
    sampler=st.sampled_from(sorted(SAMPLERS)),
    penalty=st.sampled_from(sorted(PENALTIES)),
    strategy=st.sampled_from(STRATEGIES),
    k=st.integers(1, 4),
    seed=st.integers(0, 9),
    stop=st.sampled_from([None, 1, 2, 5]),
    noted=st.booleans(),
)
@example(SPECS[0], "xtc", "all", {"paths": 3}, 3, 1, None, False)
@example(SPECS[0], "twice", "repetition", {}, 3, 1, 5, False)
@example(SPECS[1], "warming", "all", {"rescue": 2}, 3, 1, None, False)
def test_every_sampler_with_every_penalty(
    spec: tiny.Spec,
    sampler: str,
    penalty: str,
    strategy: dict[str, Any],
    k: int,
    seed: int,
    stop: int | None,
    noted: bool,
) -> None:
    """Tokens, log-probabilities, caches and random state; with `noted`, processors
    are not pure, and what they are shown is compared, too."""
    model = model_of(spec)
    made: dict[str, Any] = {"processors": PENALTIES[penalty]}
    if not noted:
        made = {"logits_processors": PENALTIES[penalty]()}
    differences = generation_differences(
        model,
        PROMPT,
        14,
        lambda truth: MTPDrafter(head_for(model)),
        options=DraftOptions(num_draft_tokens=k, **strategy),
        seed=seed,
        stop=stop,
        sampler=SAMPLERS[sampler],
        **made,
    )
    assert differences == []


# --- how drafts are chosen ------------------------------------------------------------


class Same(Like):
    """Drafts from the target's own table."""

    def __init__(self, target: Chain) -> None:
        super().__init__(target)
        self.table = target.table


def accepted(drafter: Any, n: int = 400, **how: Any) -> Tally:
    options = DraftOptions(draft_sampling=how.pop("draft_sampling", "shared"))
    stats, target = Tally(), Chain(3)
    mx.random.seed(1)
    steps = draft_generate_step(
        mx.array([0]),
        target,
        drafter(target),
        options=options,
        stats=stats,
        max_tokens=n,
        **how,
    )
    assert len(list(steps)) == n
    return stats


def test_a_drafter_that_is_the_target_is_always_right_under_gumbel_noise() -> None:
    stats = accepted(Same, sampler=by_gumbel)
    assert stats.acceptance_rate == 1.0 and not stats.unguided


@pytest.mark.parametrize("name", ["temperature", "top_k", "xtc", "by_gumbel"])
@pytest.mark.parametrize("drafter", [Same, Like])
def test_shared_noise_is_better_than_none(drafter: Any, name: str) -> None:
    shared, greedy = (
        accepted(drafter, sampler=SAMPLERS[name](), draft_sampling=how).acceptance_rate
        for how in ("shared", "greedy")
    )
    assert shared > 1.1 * greedy


@pytest.mark.parametrize("draft_sampling", ["shared", "greedy"])
@pytest.mark.parametrize("penalty", [p for p in PENALTIES if p != "none"])
def test_penalties_apply_to_drafts(penalty: str, draft_sampling: str) -> None:
    """The drafter is the target, so whatever is rejected was drafted without them."""
    how = {"logits_processors": PENALTIES[penalty](), "draft_sampling": draft_sampling}
    assert accepted(Same, **how).acceptance_rate == 1.0


def test_what_may_keep_a_state_is_told() -> None:
    stats = accepted(Like, sampler=warming())
    assert stats.unguided == {"the sampler may keep a state": stats.rounds - 1}
    assert "since the sampler may keep a state" in stats.summary()
    processor = make_logits_processors(None, 1.3)[0]
    seen: list[Any] = []

    def noting(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append(tokens)
        return processor(tokens, logits)

    stats = accepted(Like, logits_processors=[noting])
    assert set(stats.unguided) == {"a logits processor may keep a state"}
    assert len(seen) == 401


def test_a_drafter_without_log_probabilities_chooses_for_itself() -> None:
    model, sampler = model_of(SPECS[0]), make_sampler(1.0)
    stock = oracle.stock(model, PROMPT, 12, seed=4, sampler=sampler)
    stats = Tally()
    ours = drafted(
        model, PROMPT, 12, Scripted(stock.tokens), seed=4, sampler=sampler, stats=stats
    )
    assert ours.tokens == stock.tokens and stats.acceptance_rate == 1.0
    assert set(stats.unguided) == {"it gives no log-probabilities"}


def test_greedy_decoding_needs_no_guide() -> None:
    stats = accepted(Like)
    assert not stats.unguided and "since" not in stats.summary()


@pytest.mark.parametrize(
    ("logits", "drafted", "said"),
    [
        ((1, 2, 6), (1, 0), "logits of shape (1, 2, 6) behind drafts of shape (1, 0)"),
        ((1, 6), (1, 0), "(1, 1, 6) and (1, d) are needed"),
        ((1, 1, 6), (2,), "behind drafts of shape (2,)"),
        ((1, 1, 6), (1, 2), "behind 2 drafts before the choice behind 0 was made"),
    ],
)
def test_a_wrong_question_is_the_drafters_fault(
    logits: tuple[int, ...], drafted: tuple[int, ...], said: str
) -> None:
    class Asks(Like):
        def draft(self, token: mx.array, k: int, wanted: Any = None) -> Proposal:
            wanted.choose(mx.zeros(logits), mx.zeros(drafted, dtype=mx.uint32))
            raise AssertionError("was answered")

    with pytest.raises(DrafterError) as error:
        accepted(Asks, sampler=make_sampler(1.0))
    assert said in str(error.value) and "'like'" in str(error.value)


def test_a_drafter_that_fails_leaves_the_random_state() -> None:
    class Fails(Like):
        def draft(self, token: mx.array, k: int, wanted: Any = None) -> Proposal:
            wanted.choose(self.table[token], mx.zeros((1, 0), dtype=mx.uint32))
            raise RuntimeError("no more")

    model = Chain(3)
    stock = oracle.stock(model, [0], 0, seed=6, sampler=make_sampler(1.0))
    mx.random.seed(6)
    with pytest.raises(RuntimeError, match="no more"):
        list(
            draft_generate_step(
                mx.array([0]), model, Fails(model), sampler=make_sampler(1.0)
            )
        )
    assert oracle.random_state() == stock.random_state


def test_the_command_line_knows_the_option() -> None:
    assert DraftOptions.parse(["draft_sampling=greedy"]) == {"draft_sampling": "greedy"}
    with pytest.raises(InvalidOption, match="choose one of: shared, greedy"):
        DraftOptions(draft_sampling="argmax")


# --- what the noise tells -------------------------------------------------------------


def test_beliefs_are_those_of_a_dirichlet_distribution() -> None:
    """Beside a simulation: distributions drawn around q, each inverted at u."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=8)
    q = np.exp(logits) / np.exp(logits).sum()
    drawn = rng.dirichlet(10.0 * q, size=100_000).cumsum(axis=-1)
    for u in (0.05, 0.3, 0.62, 0.9):
        chosen = (drawn <= u).sum(axis=-1)
        simulated = np.bincount(chosen, minlength=8)[:8] / len(chosen)
        found = np.array(coupling.beliefs(mx.array(logits)[None], mx.array([u])))[0]
        assert abs(found - simulated).max() < 0.12  # normal in place of Beta
        assert found.argmax() == simulated.argmax()
        assert abs(found.sum() - 1) < 1e-5


def test_impossible_tokens_are_not_believed_in() -> None:
    logits = mx.array([[-mx.inf, 1.0, -mx.inf, -mx.inf, 0.5, -mx.inf]])
    for u in (0.0, 0.5, 0.999):
        found = coupling.beliefs(logits, mx.array([u]))[0].tolist()
        assert [i for i, p in enumerate(found) if p > 0] in ([1], [1, 4])


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "top_k", "xtc"])
def test_a_stock_sampler_is_taken_apart(name: str) -> None:
    """The beliefs draw what the sampler draws, and find its token where q is p."""
    sampler = SAMPLERS[name]()
    parts = coupling.taken_apart(sampler)
    assert parts is not None
    mx.random.seed(9)
    right = 0
    for seed in range(100):
        row = mx.random.normal((1, 32), key=mx.random.key(seed)) * 2
        row = row - mx.logsumexp(row, axis=-1, keepdims=True)
        before = random_state.current()
        token, after = sampler(row).item(), random_state.current()
        random_state.put_back(before)
        right += mx.argmax(parts.beliefs(row)).item() == token
        assert random_state.current().tolist() == after.tolist()
    assert right > (50 if name == "xtc" else 70)


def test_other_samplers_are_not_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    for sampler in (greedy_sampler, by_temperature, warming()):
        assert coupling.taken_apart(sampler) is None
    assert coupling.inverts()
    monkeypatch.setattr(coupling, "inverts", lambda: False)  # as an older MLX
    assert coupling.taken_apart(make_sampler(1.0)) is None
    assert accepted(Same, sampler=make_sampler(1.0)).acceptance_rate == 1.0


def test_a_random_state_is_put_back_without_waiting() -> None:
    mx.random.seed(5)
    first = random_state.current()
    drawn = mx.random.uniform(shape=(3,)).tolist()
    second = random_state.current()
    random_state.put_back(first)
    assert mx.random.uniform(shape=(3,)).tolist() == drawn
    assert mx.random.state[0].tolist() == second.tolist()
    random_state.put_back(second)
    assert first.tolist() != second.tolist() == mx.random.state[0].tolist()


# --- what the caller does between two tokens ------------------------------------------


def draws_between(steps: Any, when: set[int], what: str) -> tuple[list[int], list[Any]]:
    """Tokens, and what the caller draws itself before it goes on."""
    tokens, drawn = [], []
    for i, step in enumerate(steps):
        tokens.append(step[0])
        if i in when and what == "seeds":
            mx.random.seed(100 + i)
        elif i in when:
            drawn.append(mx.random.uniform().item())
        drawn.append(mx.random.state[0].tolist())
    return tokens, drawn


@pytest.mark.parametrize("what", ["seeds", "draws", "looks"])
@pytest.mark.parametrize("sampler", ["temperature", "xtc", "by_gumbel", "greedy"])
@pytest.mark.parametrize("paths", [1, 3])
def test_the_caller_may_use_the_random_state(
    paths: int, sampler: str, what: str
) -> None:
    """It finds the state that it would find in stock, and what it does there counts."""
    model, when = model_of(SPECS[0]), set() if what == "looks" else {0, 3, 4, 9}
    made, processors = SAMPLERS[sampler](), make_logits_processors(None, 1.2)
    how = {"sampler": made, "logits_processors": processors, "max_tokens": 14}
    mx.random.seed(8)
    stock = draws_between(generate_step(mx.array(PROMPT), model, **how), when, what)
    drafters = [MTPDrafter(head_for(model))]
    drafters += [Scripted(stock[0])] if paths == 1 else []
    for drafter in drafters:
        mx.random.seed(8)
        options = DraftOptions(paths=paths)
        steps = draft_generate_step(
            mx.array(PROMPT), model, drafter, options=options, **how
        )
        assert draws_between(steps, when, what) == stock


def test_two_generations_in_turn_share_the_random_state_as_in_stock() -> None:
    model, how = model_of(SPECS[0]), {"sampler": make_sampler(1.0), "max_tokens": 12}
    prompts = [mx.array(PROMPT), mx.array(PROMPT[::-1])]

    def tokens(start: Callable[[mx.array], Any]) -> list[tuple[int, int]]:
        mx.random.seed(5)
        pairs = zip(*map(start, prompts), strict=True)
        return [(a[0], b[0]) for a, b in pairs]

    stock, head = tokens(lambda p: generate_step(p, model, **how)), head_for(model)
    for k in (1, 3):
        ours = tokens(
            lambda prompt, k=k: draft_generate_step(
                prompt,
                model,
                MTPDrafter(head),
                options=DraftOptions(num_draft_tokens=k),
                **how,
            )
        )
        assert ours == stock


@pytest.mark.parametrize("sampler", ["greedy", "temperature"])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_processors_may_draw(strategy: dict[str, Any], sampler: str) -> None:
    def noisy(tokens: mx.array, logits: mx.array) -> mx.array:
        return logits + mx.random.gumbel(logits.shape)

    model = model_of(SPECS[0])
    for processor in (noisy, mark(lambda tokens, logits: noisy(tokens, logits))):
        differences = generation_differences(
            model,
            PROMPT,
            14,
            lambda truth: MTPDrafter(head_for(model)),
            options=DraftOptions(**strategy),
            seed=3,
            sampler=SAMPLERS[sampler],
            logits_processors=[processor],
        )
        assert differences == []


def test_a_temperature_may_be_changed_on_the_way() -> None:
    class Warm:
        temperature = 0.5

        def __call__(self, logprobs: mx.array) -> mx.array:
            return mx.random.categorical(logprobs / self.temperature)

    model = model_of(SPECS[0])

    def tokens(start: Any, **how: Any) -> list[int]:
        sampler, found = Warm(), []
        mx.random.seed(3)
        for token, *_ in start(
            mx.array(PROMPT), model, sampler=sampler, max_tokens=16, **how
        ):
            found.append(token)
            sampler.temperature = 0.2 if len(found) % 5 > 2 else 2.0
        return found

    stock = tokens(generate_step)
    assert tokens(draft_generate_step, drafter=Scripted(stock)) == stock


def test_an_interrupt_leaves_no_draft_in_the_caches() -> None:
    model, calls = model_of(SPECS[0]), []

    @mark
    def interrupts(logprobs: mx.array) -> mx.array:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return by_gumbel(logprobs)

    caches, emitted = model.make_cache(), 0
    with pytest.raises(KeyboardInterrupt):
        for _ in draft_generate_step(
            mx.array(PROMPT),
            model,
            Scripted([1, 2, 3, 4, 5]),
            sampler=interrupts,
            prompt_cache=caches,
        ):
            emitted += 1
    stock = oracle.stock(model, PROMPT, emitted)
    assert emitted == 0 and oracle.differences(caches, stock.caches) == []


# --- where nothing can be chosen ------------------------------------------------------


class Fault(RuntimeError):
    """What a processor raises here."""


def faulty(kind: str, at: int, pure: bool) -> Any:
    """A processor that fails at the token of this index in the output."""
    calls: list[int] = []

    def look(tokens: mx.array, logits: mx.array) -> mx.array:
        if len(tokens) < len(PROMPT) + at:
            return logits
        if kind == "raises":
            raise Fault("no")
        value = mx.nan if kind == "nan" else -mx.inf
        full = mx.full(logits.shape, value)
        return logits.at[:, 3].add(mx.nan) if kind == "one nan" else full

    def keeping(tokens: mx.array, logits: mx.array) -> mx.array:
        calls.append(1)
        return look(tokens, logits)

    return mark(look) if pure else keeping


@pytest.mark.parametrize("pure", [True, False])
@pytest.mark.parametrize("kind", ["raises", "nan", "one nan", "all -inf"])
@pytest.mark.parametrize("sampler", ["greedy", "temperature"])
@pytest.mark.parametrize("at", [0, 1, 2, 4, 7])
def test_an_error_comes_behind_the_last_good_token(
    at: int, sampler: str, kind: str, pure: bool
) -> None:
    """Caches and random state are those of a generation stopped at that token."""
    model, made = model_of(SPECS[0]), SAMPLERS[sampler]()
    # What is raised behind a token comes before it is yielded, as in stock.
    emitted = max(at - 1, 0) if kind == "raises" else at
    truth = oracle.stock(model, PROMPT, 20, seed=2, sampler=made).tokens
    stock = oracle.stock(model, PROMPT, emitted, seed=2, sampler=made)
    caches = model.make_cache()
    mx.random.seed(2)
    before = oracle.random_state()
    tokens = []
    with pytest.raises((Fault, NothingToChoose)) as error:
        for token, *_ in draft_generate_step(
            mx.array(PROMPT),
            model,
            Scripted(truth, lambda i: i % 5 != 3),
            sampler=made,
            logits_processors=[faulty(kind, at, pure)],
            prompt_cache=caches,
        ):
            tokens.append(token)
    assert tokens == truth[:emitted] == stock.tokens
    assert oracle.differences(caches, stock.caches) == []
    nothing = kind == "raises" and at == 0
    assert oracle.random_state() == (before if nothing else stock.random_state)
    where = f"token {at + 1} of the output (token {at + 1 + len(PROMPT)} with the"
    if kind == "raises":
        assert isinstance(error.value, Fault)
        assert where in error.value.__notes__[0]
    else:
        assert where in str(error.value) and "\n" not in str(error.value)


def test_stock_raises_at_the_same_token() -> None:
    model, tokens = model_of(SPECS[0]), []
    steps = generate_step(
        mx.array(PROMPT), model, logits_processors=[faulty("raises", 4, True)]
    )
    with pytest.raises(Fault):
        tokens += [token for token, _ in steps if tokens.append(token)]
    assert len(tokens) == 3


@pytest.mark.parametrize("at", [0, 1, 4])
def test_a_sampler_that_raises(at: int) -> None:
    model, calls = model_of(SPECS[0]), []

    def sampler(logprobs: mx.array) -> mx.array:
        calls.append(1)
        token = mx.random.categorical(logprobs)
        if len(calls) > at:
            raise Fault("no")
        return token

    stock = oracle.stock(model, PROMPT, max(at - 1, 0), seed=3, sampler=make_sampler(1))
    caches = model.make_cache()
    mx.random.seed(3)
    before = oracle.random_state()
    with pytest.raises(Fault) as error:
        list(
            draft_generate_step(
                mx.array(PROMPT),
                model,
                Scripted(stock.tokens),
                sampler=sampler,
                prompt_cache=caches,
            )
        )
    assert f"token {at + 1} of the output" in error.value.__notes__[0]
    assert oracle.differences(caches, stock.caches) == []
    assert oracle.random_state() == (stock.random_state if at else before)


@pytest.mark.parametrize("pure", [True, False])
def test_a_row_that_nobody_needs_may_be_broken(pure: bool) -> None:
    """Stock computes one row more than it needs, behind the end of a grammar, say."""
    model = model_of(SPECS[0])
    truth = oracle.stock(model, PROMPT, 20).tokens
    for how in ({"max_tokens": 9}, {"eos_token_ids": {truth[8]}}):
        processor = faulty("all -inf", 9, pure)
        steps = draft_generate_step(
            mx.array(PROMPT),
            model,
            Scripted(truth),
            logits_processors=[processor],
            **how,
        )
        assert [token for token, *_ in steps] == truth[:9]


@pytest.mark.parametrize("pure", [True, False])
@pytest.mark.parametrize("token", [0, 5])
def test_a_token_may_be_forced_by_infinity(token: int, pure: bool) -> None:
    """Normalising makes it NaN, which stock's choice takes for the largest."""

    def forces(tokens: mx.array, logits: mx.array) -> mx.array:
        return logits.at[:, token].add(mx.inf) if len(tokens) % 3 else logits

    model = model_of(SPECS[0])
    processor = mark(forces) if pure else forces
    stock = oracle.stock(model, PROMPT, 14, logits_processors=[processor])
    assert token in stock.tokens
    ours = drafted(
        model,
        PROMPT,
        14,
        MTPDrafter(head_for(model)),
        logits_processors=[processor],
    )
    assert ours.tokens == stock.tokens


def test_an_error_behind_a_rejected_draft_never_happens() -> None:
    """A pure processor is asked about drafts that plain decoding never reaches."""
    target = Chain(3)

    @mark
    def hates(tokens: mx.array, logits: mx.array) -> mx.array:
        if len(tokens) > 1 and tokens[-2].item() == tokens[-1].item():
            raise Fault("twice the same")
        return logits.at[:, tokens[-1]].add(-mx.inf)

    class Repeats(Like):
        def draft(self, token: mx.array, k: int, wanted: Any = None) -> Proposal:
            wanted.choose(self.table[token], mx.repeat(token, 1, axis=1)[:, :0])
            return Proposal(mx.repeat(token, k, axis=1).astype(mx.uint32))

    stats = Tally()
    made = [
        token
        for token, *_ in draft_generate_step(
            mx.array([0]),
            target,
            Repeats(target),
            logits_processors=[hates],
            max_tokens=30,
            stats=stats,
        )
    ]
    theirs = generate_step(
        mx.array([0]), target, logits_processors=[hates], max_tokens=30
    )
    assert made == [token for token, _ in theirs]
    assert stats.acceptance_rate == 0


def test_an_error_while_drafting_is_told_in_the_statistics() -> None:
    @mark
    def needs_an_even_length(tokens: mx.array, logits: mx.array) -> mx.array:
        if drafting and len(tokens) % 2:
            raise Fault("odd")
        return logits

    drafting: list[int] = []

    class Notes(Same):
        def draft(self, token: mx.array, k: int, wanted: Any = None) -> Proposal:
            drafting.append(1)
            try:
                return super().draft(token, k, wanted)
            finally:
                drafting.clear()

    stats = accepted(Notes, logits_processors=[needs_an_even_length])
    assert set(stats.unguided) == {"Fault was raised behind a draft"}
    assert stats.acceptance_rate == 1.0


def test_choices_are_of_the_same_type_everywhere() -> None:
    chosen = Choices.likeliest(mx.array([[[0.0, 2.0, 1.0]]]), 2)
    assert chosen.tokens.tolist() == [[[1, 2]]]
    assert chosen.confidence.item() == pytest.approx(0.6652, abs=1e-3)
