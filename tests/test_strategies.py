"""Depth by confidence, rescue and paths change nothing but the number of forwards."""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import math
from typing import Any

import checks
import mlx.core as mx
import oracle
import pytest
import tiny
from checks import PROMPT
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import ChunkedKVCache, RotatingKVCache
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from scripted import KINDS, Branching, Scripted

from mlx_lm_mtp import DraftOptions, DraftStats, Tally, draft_generate_step
from mlx_lm_mtp.drafters.base import Branch, Choices, Choose, Proposal, Wanted
from mlx_lm_mtp.drafters.mtp import MTPDrafter
from mlx_lm_mtp.errors import DrafterError, InvalidOption
from mlx_lm_mtp.rounds import Round

SPECS = [
    tiny.Spec("qwen3_5"),
    tiny.Spec("qwen3_5", weights="bf16"),
    tiny.Spec("qwen3_5", experts=True, weights="4bit"),
    tiny.Spec("qwen3_next"),
    tiny.Spec("kimi_linear", weights="bf16"),
    tiny.Spec("olmo_hybrid"),
    tiny.Spec("mamba2"),
    tiny.Spec("falcon_h1", weights="bf16"),
    tiny.Spec("qwen3", weights="4bit"),
    tiny.Spec("lfm2"),
]
CONFIDENCES = st.sampled_from([0.0, 0.3, 0.9, 1.0, 7.0, -1.0, math.nan, math.inf])


@st.composite
def strategies(draw: Any) -> DraftOptions:
    """Any options that can combine."""
    paths = draw(st.sampled_from([1, 1, 2, 3, 7]))
    alone = paths == 1
    return DraftOptions(
        num_draft_tokens=draw(st.integers(1, 5)),
        depth=draw(st.sampled_from(["fixed", "confidence"])),
        tau=draw(st.sampled_from([0.0, 0.5, 1.0])),
        reads=draw(st.sampled_from(["each", "once"])),
        paths=paths,
        rescue=draw(st.integers(0, 2)) if alone else 0,
        probe=draw(st.integers(0, 3)) if alone else 0,
        profile=draw(st.booleans()),
        verify=draw(st.sampled_from(["batch", "batch", "step"])) if alone else "batch",
        prefill_step_size=draw(st.sampled_from([0, 0, 3])),
    )


SAMPLING = {
    "greedy": {},
    "sampled": {"sampler": lambda: make_sampler(0.9, top_p=0.95)},
    "processed": {"processors": lambda: make_logits_processors(None, 1.3)},
    "own": {"sampler": lambda: lambda x: mx.random.categorical(x)},
}


@settings(max_examples=6 * settings.default.max_examples)
@given(
    spec=st.sampled_from(SPECS),
    options=strategies(),
    budget=st.integers(1, 16),
    stop=st.one_of(st.none(), st.integers(1, 16)),
    pattern=st.text("01", min_size=1, max_size=6),
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=4),
    confidences=st.lists(CONFIDENCES, min_size=1, max_size=4),
    obeys=st.booleans(),
    sampling=st.sampled_from(list(SAMPLING)),
)
@example(
    SPECS[0], DraftOptions(rescue=2), 12, None, "0", ["right"], [1.0], True, "greedy"
)
@example(
    SPECS[0], DraftOptions(rescue=2), 12, 5, "10", ["right"], [1.0], True, "sampled"
)
@example(
    SPECS[9], DraftOptions(rescue=1), 12, None, "0", ["right"], [1.0], True, "greedy"
)
@example(
    SPECS[9], DraftOptions(paths=3), 12, None, "0", ["right"], [1.0], True, "greedy"
)
@example(
    SPECS[3], DraftOptions(paths=3), 12, 6, "10", ["same", "right"], [1.0], True, "own"
)
def test_any_strategy_with_any_drafter(
    spec: tiny.Spec,
    options: DraftOptions,
    budget: int,
    stop: int | None,
    pattern: str,
    kinds: list[str],
    confidences: list[float],
    obeys: bool,
    sampling: str,
) -> None:
    right = checks.right_where(pattern)
    stats = Tally()
    if stop is not None and stop > budget:
        stop = None
    found = checks.generation_differences(
        checks.model_of(spec),
        PROMPT,
        budget,
        lambda truth: Branching(truth, right, kinds, confidences, obeys),
        options=options,
        seed=5,
        stop=stop,
        prefill_step_size=options.prefill_step_size or 2048,
        **SAMPLING[sampling],
        ours={"stats": stats},
    )
    assert found == []
    made = budget if stop is None else stop
    assert stats.tokens == made
    assert stats.verifies == stats.rounds + stats.rescues.total()
    rescued = stats.rescues.total() + stats.rescue_accepted
    assert stats.rounds + stats.accepted.total() + rescued == made
    json.dumps(stats.to_dict(), allow_nan=False)


@pytest.mark.parametrize("options", [{"rescue": 2}, {"paths": 3}], ids=str)
@pytest.mark.parametrize(
    "how",
    [
        {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0},
        {"kv_bits": 4, "kv_group_size": 32, "quantized_kv_start": 11},
        {"caches": lambda model: [RotatingKVCache(12, keep=4) for _ in model.layers]},
        {"caches": lambda model: [RotatingKVCache(64, keep=4) for _ in model.layers]},
        {"caches": lambda model: [ChunkedKVCache(64) for _ in model.layers]},
    ],
    ids=["8 bits", "4 bits later", "small ring", "large ring", "chunked"],
)
def test_other_caches(how: dict[str, Any], options: dict[str, Any]) -> None:
    found = checks.generation_differences(
        checks.model_of(tiny.Spec("qwen3")),
        PROMPT,
        20,
        lambda truth: Branching(truth, checks.right_where("0110"), KINDS[:2]),
        options=DraftOptions(**options),
        **how,
    )
    assert found == []


# --- how many forwards --------------------------------------------------------------


def run(
    drafter: Any, n: int = 12, spec: tiny.Spec = SPECS[0], **options: Any
) -> tuple[Tally, oracle.Result]:
    """A generation of n tokens, compared with stock's."""
    model, stats = checks.model_of(spec), Tally()
    options = DraftOptions(**options)
    ours = checks.drafted(model, PROMPT, n, drafter, options=options, stats=stats)
    assert checks.result_differences(ours, oracle.stock(model, PROMPT, n)) == []
    return stats, ours


@functools.cache
def truth(spec: tiny.Spec = SPECS[0]) -> list[int]:
    return oracle.stock(checks.model_of(spec), PROMPT, 24).tokens


def never(i: int) -> bool:
    return False


@pytest.mark.parametrize("verify", ["batch", "step"])
@pytest.mark.parametrize("spec", [SPECS[0], SPECS[9]], ids=["committed", "replayed"])
def test_a_rejected_first_draft_is_rescued(spec: tiny.Spec, verify: str) -> None:
    drafter = Branching(truth(spec), never)
    stats, _ = run(drafter, 12, spec, num_draft_tokens=3, rescue=1, verify=verify)
    # Each round keeps x, then the second choice and the two tokens behind it.
    assert (stats.rounds, stats.verifies, stats.rescues) == (3, 6, {0: 3})
    assert (stats.accepted.total(), stats.rescue_accepted) == (0, 6)
    assert stats.mean_acceptance_length == 4
    assert drafter.seen == truth(spec)[:12]


def test_a_rejected_second_draft_is_rescued_if_wanted() -> None:
    def first_alone(i: int) -> bool:
        return i % 5 == 1  # the round begins at a multiple of five, if rescued

    drafter = Branching(truth(), first_alone)
    stats, _ = run(drafter, 20, num_draft_tokens=4, rescue=2)
    assert (stats.rounds, stats.rescues) == (4, {1: 4})
    stats, _ = run(drafter, 20, num_draft_tokens=4, rescue=1)
    assert 1 not in stats.rescues and stats.rounds > 4


@pytest.mark.parametrize("kinds", [["wrong"], ["same"]])
def test_no_rescue_where_the_second_choice_is_wrong(kinds: list[str]) -> None:
    stats, _ = run(Branching(truth(), never, kinds), num_draft_tokens=3, rescue=2)
    assert not stats.rescues and stats.rounds == stats.verifies == 12


@pytest.mark.parametrize("kind", ["short", "astray"])
@pytest.mark.parametrize("spec", [SPECS[0], SPECS[9]], ids=["committed", "replayed"])
def test_a_rescue_that_goes_nowhere(spec: tiny.Spec, kind: str) -> None:
    """The second choice is the target's token all the same, so it is kept."""
    drafter = Branching(truth(spec), never, [kind])
    stats, _ = run(drafter, 12, spec, num_draft_tokens=3, rescue=1)
    assert (stats.rounds, stats.rescues[0], stats.rescue_accepted) == (6, 6, 0)
    # Two behind each, but for the last: the budget ends with it.
    assert stats.rescue_drafted == (2 * 5 if kind == "astray" else 0)


def test_a_rescue_within_the_budget() -> None:
    for n in range(1, 9):
        stats, ours = run(Branching(truth(), never), n, num_draft_tokens=3, rescue=1)
        assert len(ours.tokens) == stats.tokens == n


def test_paths_win_if_they_are_right() -> None:
    kinds = ["wrong", "right"]  # of the branches at positions 0 and 1
    right = Branching(truth(), lambda i: i % 4 == 1, kinds)
    stats, _ = run(right, num_draft_tokens=3, paths=3)
    assert (stats.rounds, stats.accepted.total()) == (3, 9)
    stats, _ = run(right, num_draft_tokens=3, paths=2)
    assert stats.rounds > 3


def test_of_equal_paths_the_earliest_wins() -> None:
    from mlx_lm_mtp.accept import AtOnce, OneByOne, greedy_sampler
    from mlx_lm_mtp.history import History

    logits = mx.zeros((3, 3, 8)).at[:, :, 5].add(1.0)
    drafts = mx.array([[1, 5], [5, 5], [5, 5]], dtype=mx.uint32)
    for kind in (AtOnce, OneByOne):
        judge = kind(logits, drafts, greedy_sampler, [], History(), mx.array([0]))
        for i in range(3):
            judge.judge(i)
        assert [judge.accepts(i) for i in range(3)] == [True, True, False]
        assert [judge.row(i) for i in range(3)] == [0, 1, 1]


def test_no_cache_is_written_before_a_path_has_won() -> None:
    """Paths are verified beside the caches: a forward that fails leaves no trace."""
    from mlx_lm_mtp.state.paths import StandIns

    for spec in SPECS:
        model, caches = checks.model_of(spec), checks.after_prompt(spec)
        stand_ins = StandIns(caches, 3)
        tokens = mx.array([[1, 2], [3, 4], [5, 6]])
        mx.eval(model(tokens, cache=stand_ins.caches))
        assert checks.cache_differences(caches, checks.after_prompt(spec)) == []


def test_paths_leave_nothing_behind() -> None:
    """Without the garbage collector: a circle would keep P copies of every cache."""
    gc.collect()
    gc.disable()
    try:
        run(Branching(truth()), 4, paths=4)
        before = mx.get_active_memory()
        run(Branching(truth()), 20, paths=4)
        assert mx.get_active_memory() <= before
    finally:
        gc.enable()


def test_confidence_ends_the_draft() -> None:
    # Of the drafts 1, 2, 3 … the third is the first that is doubted: it is the last.
    for reads in ("each", "once"):
        for obeys in (True, False):
            drafter = Branching(truth(), confidences=[1, 1, 1, 0.2], obeys=obeys)
            options = {"depth": "confidence", "tau": 0.5, "reads": reads}
            stats, _ = run(drafter, 16, num_draft_tokens=6, **options)
            assert (
                stats.rounds == 4 and stats.drafted[2] == 4 and 3 not in stats.drafted
            )


@pytest.mark.parametrize("says", [0.0, math.nan, -math.inf])
def test_one_token_is_always_drafted(says: float) -> None:
    drafter = Branching(truth(), confidences=[says])
    stats, _ = run(drafter, num_draft_tokens=6, depth="confidence")
    assert stats.rounds == 6 and set(stats.drafted) == {0}


def test_reading_each_confidence_drafts_no_more_than_is_verified() -> None:
    asked = []

    class Counting(Branching):
        def draft(self, token: mx.array, k: int, wanted: Any = None) -> Proposal:
            proposal = super().draft(token, k, wanted)
            asked.append(proposal.tokens.shape[1])
            return proposal

    drafter = Counting(truth(), confidences=[0.0])
    run(drafter, num_draft_tokens=6, depth="confidence", reads="each")
    assert set(asked) == {1}
    asked.clear()
    run(drafter, num_draft_tokens=6, depth="confidence", reads="once")
    assert max(asked) == 6


# --- the MTP head under every strategy ----------------------------------------------

ALL = [
    {"depth": "confidence", "tau": 0.0105, "num_draft_tokens": 6},
    {"depth": "confidence", "tau": 0.0105, "num_draft_tokens": 6, "reads": "once"},
    {"rescue": 1},
    {"rescue": 2},
    {"rescue": 2, "depth": "confidence", "tau": 0.0105},
    {"rescue": 2, "verify": "step"},
    {"paths": 2},
    {"paths": 3},
    {"paths": 3 * tiny.VOCAB},  # more than there are distinct ones
    {"paths": 4, "depth": "confidence", "tau": 0.0105},
    {"probe": 3},
    {"probe": 2 * tiny.VOCAB},
    {"profile": True},
    {"hidden": "pre_norm"},
]


@pytest.mark.parametrize("options", ALL, ids=str)
@pytest.mark.parametrize("family", sorted(tiny.WITH_HEAD))
def test_the_head_s_cache_holds_what_was_kept(
    family: str, options: dict[str, Any]
) -> None:
    """Whatever is drafted beside it: compared with a drafter that saw the end alone."""
    model = checks.model_of(tiny.Spec(family))
    head = checks.head_for(model)
    ours, caches = MTPDrafter(head), checks.make_prompt_cache(model)
    options = DraftOptions(**options)
    result = checks.drafted(model, PROMPT, 20, ours, options=options, caches=caches)
    assert checks.result_differences(result, oracle.stock(model, PROMPT, 20)) == []
    fresh = MTPDrafter(head)
    tokens = mx.array([[*PROMPT, *result.tokens]])
    target = checks.Target(model, checks.hidden_for(fresh, options.hidden))
    fresh.prefill(tokens, target(tokens, checks.make_prompt_cache(model)).hidden)
    theirs = fresh.suspend()
    assert checks.cache_differences(ours.suspend(), theirs) == []
    assert checks.cache_differences(caches[-2:], theirs) == []


def test_a_branch_is_the_chain_of_its_token() -> None:
    """What a branch says after its token is what the chain would say after it."""
    model = checks.model_of(tiny.Spec())
    drafter = MTPDrafter(checks.head_for(model))

    tokens = mx.array([PROMPT])
    hidden = checks.Target(model, "post_norm")(
        tokens, checks.make_prompt_cache(model)
    ).hidden

    def proposal() -> Proposal:
        drafter.begin()
        drafter.prefill(tokens, hidden)
        return drafter.draft(mx.array([[9]]), 4, Wanted(branches=(0, 1, 0, 3)))

    found = proposal()
    assert [b.position for b in found.branches] == [0, 1, 0, 3]
    for branch in found.branches:
        drafter.begin()
        drafter.prefill(tokens, hidden)
        wanted = Wanted(choose=_forced(branch, found.tokens[0].tolist()))
        again = drafter.draft(mx.array([[9]]), 4, wanted).tokens[0].tolist()
        path = [branch.token.item(), *branch.rest[0].tolist()]
        assert again[branch.position :] == path
        assert branch.token.item() != found.tokens[0, branch.position].item()


def _forced(branch: Branch, chain: list[int]) -> Choose:
    """What chooses a branch's token at its position, and the likeliest behind it."""
    forced = [*chain[: branch.position], branch.token.item()]

    def choose(logits: mx.array, drafted: mx.array, n: int = 1) -> Choices:
        chosen = Choices.likeliest(logits, n)
        if drafted.shape[1] < len(forced):
            chosen = chosen._replace(tokens=mx.array([[[forced[drafted.shape[1]]]]]))
        return chosen

    return choose


# --- what is refused ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"depth": "confidence"}, "no confidence, which draft option depth=confidence"),
        ({"rescue": 1}, "no branches, which draft option rescue=1 needs"),
        ({"paths": 3}, "no branches, which draft option paths=3 needs"),
        ({"probe": 2}, "no candidates, which draft option probe=2 needs"),
    ],
)
def test_a_drafter_that_lacks_something_is_refused(
    options: dict[str, Any], part: str
) -> None:
    steps = draft_generate_step(
        mx.array(PROMPT),
        checks.model_of(SPECS[0]),
        Scripted([]),
        options=DraftOptions(**options),
    )
    with pytest.raises(InvalidOption, match=part):
        next(steps)


@pytest.mark.parametrize("given", [None, "confidence"])
def test_one_thing_given_may_be_a_word(given: str | None) -> None:
    class Giving(Branching):
        gives = given

    options = {"depth": "confidence", "num_draft_tokens": 3}
    if given:
        assert run(Giving(truth()), **options)[0].rounds == 3
    else:
        with pytest.raises(InvalidOption, match="gives no confidence"):
            run(Giving(truth()), **options)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"paths": 2, "rescue": 1}, "paths=2 and rescue=1 cannot combine"),
        ({"paths": 2, "probe": 1}, "paths=2 and probe=1 cannot combine"),
        ({"paths": 2, "verify": "step"}, "paths=2 and verify=step cannot combine"),
        ({"paths": 0}, "paths is 0; give an integer of at least 1"),
        ({"tau": 1.5}, "tau is 1.5; give a number of at least 0 and at most 1"),
        ({"tau": "high"}, "tau is 'high'; give a number"),
        ({"rescue": 3}, "rescue is 3; give an integer of at least 0 and at most 2"),
        ({"profile": 1}, "profile is 1; give True or False"),
        ({"probe": True}, "probe is True; give an integer"),
        (
            {"depth": "deep"},
            "depth is 'deep'; choose one of: throughput, fixed, confidence",
        ),
    ],
)
def test_options_that_make_no_sense_are_refused(
    options: dict[str, Any], part: str
) -> None:
    with pytest.raises(InvalidOption, match=part):
        DraftOptions(**options)


X = mx.array([[1, 2]])
ONE = mx.array([[1]])
WRONG: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no confidence": ({"depth": "confidence"}, {}, "None as confidence"),
    "short confidence": (
        {"depth": "confidence"},
        {"confidence": mx.ones((1, 1))},
        r"float32 confidence of shape \(1, 1\)",
    ),
    "no candidates": ({"probe": 1}, {}, "None as candidates"),
    "flat candidates": (
        {"probe": 1},
        {"candidates": X},
        r"of shape \(1, 2\); integers",
    ),
    "float candidates": (
        {"probe": 1},
        {"candidates": mx.ones((1, 2, 3))},
        "float32 candidates",
    ),
    "no branch": ({"rescue": 1}, {"branches": (ONE,)}, "a array at position None"),
    "no branches": ({"rescue": 1}, {"branches": None}, "None as branches; a tuple of"),
    "a branch nowhere": (
        {"rescue": 1},
        {"branches": (Branch("0", ONE, ONE),)},
        "a Branch at position '0'",
    ),
    "a branch between": (
        {"rescue": 1},
        {"branches": (Branch(0.5, ONE, ONE),)},
        "a Branch at position 0.5",
    ),
    "complex confidence": (
        {"depth": "confidence"},
        {"confidence": mx.ones((1, 2), mx.complex64)},
        "complex64 confidence",
    ),
    "a branch too far": (
        {"rescue": 1},
        {"branches": (Branch(2, ONE, ONE),)},
        "a Branch at position 2; a Branch at 0 to 1 is needed",
    ),
    "a wide branch": (
        {"paths": 2},
        {"branches": (Branch(0, X, ONE),)},
        r"int32 tokens of shape \(1, 2\); integers of shape \(1, 1\)",
    ),
}


@pytest.mark.parametrize(("options", "fields", "part"), WRONG.values(), ids=WRONG)
def test_a_wrong_proposal_is_the_drafter_s_fault(
    options: dict[str, Any], fields: dict[str, Any], part: str
) -> None:
    class Proposing(Branching):
        def draft(self, token: mx.array, k: int, wanted: Any = None) -> Proposal:
            return Proposal(X, **fields)

    steps = draft_generate_step(
        mx.array(PROMPT),
        checks.model_of(SPECS[0]),
        Proposing([]),
        options=DraftOptions(**options),
    )
    with pytest.raises(DrafterError, match=part):
        list(steps)


def test_a_drafter_that_offers_what_there_is_not_is_refused() -> None:
    class Boasting(Scripted):
        gives = ("luck",)

    steps = draft_generate_step(
        mx.array(PROMPT), checks.model_of(SPECS[0]), Boasting([])
    )
    with pytest.raises(
        InvalidOption, match="says that it gives luck; there is: branch"
    ):
        next(steps)


def test_a_drafter_that_gives_caches_has_the_methods() -> None:
    class Boasting(Scripted):
        gives = ("caches",)

    steps = draft_generate_step(
        mx.array(PROMPT), checks.model_of(SPECS[0]), Boasting([])
    )
    with pytest.raises(InvalidOption, match=r"lacks suspend\(\) or resume\(\)"):
        next(steps)


# --- failures in the middle -----------------------------------------------------------


class Fault(Exception):
    """Thrown by the test."""


@pytest.mark.parametrize("at", range(1, 7))
@pytest.mark.parametrize("options", [{"rescue": 2}, {"paths": 3}], ids=str)
@pytest.mark.parametrize("spec", [SPECS[0], SPECS[9]], ids=["committed", "replayed"])
def test_a_verify_that_fails(
    spec: tiny.Spec,
    options: dict[str, Any],
    at: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also the second one of a round: the caches hold what was yielded before."""
    from mlx_lm_mtp.verify import Verifier

    model, caches = checks.model_of(spec), None
    stock, calls = Verifier.__call__, []

    def failing(self: Verifier, tokens: mx.array) -> Any:
        calls.append(tokens.shape)
        if len(calls) == at:
            raise Fault
        return stock(self, tokens)

    monkeypatch.setattr(Verifier, "__call__", failing)
    caches = checks.make_prompt_cache(model)
    tokens: list[int] = []
    with pytest.raises(Fault):
        for token, _, _ in draft_generate_step(
            mx.array(PROMPT),
            model,
            Branching(truth(spec), lambda i: i % 7 == 1),
            options=DraftOptions(num_draft_tokens=2, **options),
            prompt_cache=caches,
        ):
            tokens.append(token)
    stock_result = oracle.stock(model, PROMPT, len(tokens))
    assert tokens == stock_result.tokens
    assert checks.cache_differences(caches, stock_result.caches) == []


# --- statistics -----------------------------------------------------------------------


def test_the_probe_counts_past_a_rejection() -> None:
    # The first choice is always wrong, the second right: known for position 0 alone,
    # since later ones follow a wrong token.
    stats, _ = run(Branching(truth(), never), 8, num_draft_tokens=3, probe=2)
    assert stats.probed[0] == stats.probed[1] + 1 == stats.probed[2] + 2 == 7
    assert stats.coverage[0] == [0.0, 1.0]
    stats, _ = run(Branching(truth()), 8, num_draft_tokens=3, probe=3)
    assert stats.coverage == [[1.0, 1.0, 1.0]] * 3
    assert "top 3" in stats.tables()[0]


def test_the_profile_says_where_the_time_goes() -> None:
    stats, _ = run(Branching(truth(), never), profile=True, rescue=1)
    assert {"draft", "verify", "accept", "commit", "observe"} <= set(stats.profile)
    assert 0 < sum(stats.profile.values()) <= stats.seconds
    assert "tokens per second" in stats.tables()[0]
    stats, _ = run(Branching(truth(), never), spec=SPECS[9], profile=True)
    assert stats.profile["replay"] > 0 and stats.profile["snapshot"] > 0
    assert stats.tokens_per_second_without_replay > stats.tokens_per_second
    stats, _ = run(Branching(truth()))
    assert not stats.profile and stats.seconds > 0 and stats.tables() == []


def test_statistics_are_frozen_and_do_not_change_any_more() -> None:
    tally = Tally(drafter="x")
    before = tally.stats
    tally.count(Round(drafted=3, accepted=2, probed=(((1, 2), 2),)))
    assert before == DraftStats(drafter="x") != tally.stats
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.rounds = 1  # type: ignore[misc]
    assert tally.coverage == [[0.0, 1.0]]
    with pytest.raises(TypeError):
        tally.note(luck=1)


def test_resident_tokens() -> None:
    for spec in (SPECS[0], tiny.Spec("mamba2")):
        stats, _ = run(Branching(truth(spec)), 9, spec)
        assert stats.resident_tokens == len(PROMPT) + 9


def test_the_prompt_is_fed_in_pieces_of_the_option_s_size() -> None:
    calls: list[tuple[int, int]] = []
    steps = draft_generate_step(
        mx.array(PROMPT),
        checks.model_of(SPECS[0]),
        Scripted([]),
        options=DraftOptions(prefill_step_size=2),
        max_tokens=1,
        prompt_progress_callback=lambda *n: calls.append(n),
    )
    list(steps)
    assert [done for done, _ in calls] == [0, 2, 4, 6, 7]


# --- whole rounds at once -------------------------------------------------------------


def rounds_of(n: int, **how: Any) -> tuple[list[list[int]], list[int]]:
    rounds: list[list[int]] = []
    how.setdefault("on_tokens", rounds.append)
    steps = draft_generate_step(
        mx.array(PROMPT),
        checks.model_of(SPECS[0]),
        Scripted(truth(), lambda i: i % 3 != 0),
        max_tokens=n,
        **how,
    )
    return rounds, [token for token, _, _ in steps]


@pytest.mark.parametrize("n", range(8))
def test_rounds_are_called_back(n: int) -> None:
    rounds, tokens = rounds_of(n)
    assert [t for r in rounds for t in r] == tokens == truth()[:n]
    assert all(rounds)


def test_a_callback_may_stop() -> None:
    rounds: list[list[int]] = []

    def stop(tokens: list[int]) -> bool:
        rounds.append(tokens)
        return len(rounds) == 2

    _, tokens = rounds_of(20, on_tokens=stop)
    assert len(rounds) == 2 and [t for r in rounds for t in r] == tokens


def test_drafts_behind_an_end_do_not_count_as_rejected() -> None:
    stats = Tally()
    steps = draft_generate_step(
        mx.array(PROMPT),
        checks.model_of(SPECS[0]),
        Scripted(truth()),
        options=DraftOptions(6),
        stats=stats,
        eos_token_ids={truth()[2]},
    )
    assert len(list(steps)) == 3
    assert stats.drafted.total() == stats.accepted.total() == 2


def test_a_rescue_that_may_draft_nothing_is_no_round_without_drafts() -> None:
    for start in range(8, 20):
        stats = Tally()
        found = checks.generation_differences(
            checks.model_of(tiny.Spec("qwen3")),
            PROMPT,
            12,
            lambda truth: Branching(truth, never),
            options=DraftOptions(rescue=2),
            kv_bits=8,
            kv_group_size=32,
            quantized_kv_start=start,
            ours={"stats": stats},
        )
        assert found == []
        assert stats.undrafted.total() <= stats.rounds - stats.drafted[0]


@pytest.mark.parametrize("at", range(8))
def test_nothing_comes_behind_an_end_of_text(at: int) -> None:
    eos = truth()[at]
    rounds, tokens = rounds_of(20, eos_token_ids={eos})
    assert tokens == truth()[: truth().index(eos) + 1]
    assert [t for r in rounds for t in r] == tokens
