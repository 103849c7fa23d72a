"""The depth that yields the most tokens a second, in simulations; no model is run.

A simulated machine has a cost for each width (those of docs/benchmarks.md, or of
others' machines), a simulated drafter an acceptance for each position. Costs come with
noise, and one round in a hundred takes fifty times as long.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import checks
import mlx.core as mx
import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache
from scripted import Branching, Scripted, right_where
from tiny import Spec

from mlx_lm_mtp import (
    DraftOptions,
    Tally,
    acceptance,
    costs,
    draft_generate_step,
    learnt,
    store,
)
from mlx_lm_mtp import depth as rules
from mlx_lm_mtp.depth import MEASURED, PARKED, Known, Throughput
from mlx_lm_mtp.learnt import Learnt, learnt_of
from mlx_lm_mtp.origin import ByModel
from mlx_lm_mtp.rounds import Round
from mlx_lm_mtp.target import Target

pytestmark = pytest.mark.throughput

# Seconds of a round with 0, 1, 2 … drafts.
CURVES = {
    "H200 bf16": [1, 1.7, 1.7, 1.7],
    "H200 8-bit": [1, 1.16, 1.23, 1.43],
    "M5 Max 4-bit": [1, 1.06, 1.12, 1.27],
    "CPU bf16": [1, 1.4, 1.65, 1.87],
    "CPU float32": [1, 2, 3, 4],
}
Qs = Callable[[int], Sequence[float]]  # from the number of a round, its acceptances


@dataclass
class Text:
    """What a simulated generation came to."""

    tokens: int
    seconds: float
    ks: list[int]

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


def generated(
    curve: Sequence[float],
    acceptances: Qs,
    tokens: int,
    seed: int,
    *,
    known: Known | None = None,
    silent: float = 0.0,
    hiccups: float = 0.01,
    noise: float = 0.08,
) -> Text:
    """One text, drafted as deep as the controller says.

    It is told of a round of which something was accepted only after the next choice,
    as when drafting goes ahead.
    """
    drawn, controller = random.Random(seed), Throughput(known)
    text, told = Text(0, 0.0, []), list[Round]()
    while text.tokens < tokens:
        k = controller.choose(len(curve) - 1)
        for late in told:
            controller.take(late)
        drafted = 0 if drawn.random() < silent else k
        chances = acceptances(len(text.ks))
        accepted = 0
        while accepted < drafted and drawn.random() < chances[accepted]:
            accepted += 1
        seconds = curve[drafted] * math.exp(drawn.gauss(0, noise)) / 100
        seconds *= 50 if drawn.random() < hiccups else 1
        over = Round(k=k, drafted=drafted, accepted=accepted, seconds=seconds)
        told = [over] if accepted else []
        if not accepted:
            controller.take(over)
        text.tokens += 1 + accepted
        text.seconds += curve[drafted]
        text.ks.append(k)
    return text


def always(q: float) -> Qs:
    return lambda _: [q * 0.95**d for d in range(9)]


def fixed_speed(curve: Sequence[float], q: Sequence[float], k: int) -> float:
    return sum(math.prod(q[:d]) for d in range(k + 1)) / curve[k]


def best_k(curve: Sequence[float], q: Sequence[float]) -> int:
    return max(range(len(curve)), key=lambda k: fixed_speed(curve, q, k))


def compared(name: str, q: float, tokens: int, *, warm: bool, times: int = 12) -> float:
    """The mean speed, beside that of the k that is best for this text."""
    curve, speeds = CURVES[name], []
    best = max(fixed_speed(curve, always(q)(0), k) for k in range(len(curve)))
    for seed in range(times):
        known = Known()
        if warm:
            generated(curve, always(q), 300, 1000 + seed, known=known)
        text = generated(curve, always(q), tokens, seed, known=known)
        speeds.append(text.speed / best)
    return statistics.mean(speeds)


# --- how fast it is -----------------------------------------------------------------

QS = (0.0, 0.2, 0.4, 0.6, 0.8, 0.95)


@pytest.mark.parametrize("name", CURVES)
def test_a_text_of_200_tokens_with_all_that_has_to_be_measured(name: str) -> None:
    """Trials included. Three rounds measure plain decoding, three a first draft."""
    found = [compared(name, q, 200, warm=False) for q in QS]
    assert min(found) > 0.89 and statistics.mean(found) > 0.945


@pytest.mark.parametrize("name", CURVES)
def test_within_three_percent_of_the_best_k(name: str) -> None:
    """Once costs are known, or in a long text, on average over texts."""
    later = [compared(name, q, 200, warm=True) for q in QS]
    long = [compared(name, q, 1000, warm=False, times=6) for q in QS]
    assert min(later + long) > 0.9 and statistics.mean(later + long) > 0.97


@pytest.mark.parametrize("q", [0.0, 0.1])
@pytest.mark.parametrize("name", CURVES)
def test_what_is_always_wrong_costs_less_than_three_percent(
    name: str, q: float
) -> None:
    curve = CURVES[name]
    if best_k(curve, always(q)(0)) > 0:
        return
    cold = [generated(curve, always(q), 200, seed).speed for seed in range(20)]
    assert statistics.mean(cold) > 0.96 and statistics.median(cold) > 0.965


@given(
    st.sampled_from(sorted(CURVES)),
    st.floats(0, 0.95),
    st.floats(0, 0.15),
    st.integers(0, 2**32),
)
def test_the_regret_is_bounded(name: str, q: float, noise: float, seed: int) -> None:
    """Behind a thousand tokens no text is below 0.93 of plain decoding, whatever
    comes; the mean, which the promise is about, is checked above."""
    text = generated(CURVES[name], always(q), 1000, seed, noise=noise)
    assert text.speed > 0.93


def test_trials_lose_a_hundredth_of_the_time_and_one_on_credit() -> None:
    """With a drafter that is always wrong, all that is lost is lost to trials."""
    for curve in CURVES.values():
        for seed in range(5):
            text = generated(curve, always(0.0), 3000, seed, hiccups=0, noise=0)
            lost = text.seconds - text.tokens
            assert lost < 3000 * 0.021 + 6.0


# --- what it reacts to ---------------------------------------------------------------


def settles(ks: Sequence[int], since: int, wanted: Callable[[int], bool]) -> int:
    """Rounds from `since` on until four of five are as wanted."""
    ends = (i for i in range(since, len(ks) - 5) if sum(map(wanted, ks[i : i + 5])) > 3)
    return next(ends, len(ks)) - since


def reactions(name: str, before: float, after: float) -> list[int]:
    def q(number: int) -> Sequence[float]:
        return always(before if number < 120 else after)(0)

    best = best_k(CURVES[name], always(after)(0))
    found = []
    for seed in range(20):
        ks = generated(CURVES[name], q, 1200, seed).ks
        found.append(settles(ks, 120, lambda k: (k > 0) == (best > 0)))
    return sorted(found)


@pytest.mark.parametrize("name", ["H200 bf16", "CPU bf16"])
def test_it_parks_within_twenty_rounds(name: str) -> None:
    assert reactions(name, 0.9, 0.1)[10] <= 20


def test_it_drafts_deeper_within_twenty_rounds() -> None:
    def q(number: int) -> Sequence[float]:
        return always(0.3 if number < 120 else 0.95)(0)

    found = sorted(
        settles(generated(CURVES["H200 8-bit"], q, 900, seed).ks, 120, lambda k: k >= 2)
        for seed in range(20)
    )
    assert found[10] <= 20


@pytest.mark.parametrize(("name", "rounds"), [("M5 Max 4-bit", 60), ("CPU bf16", 350)])
def test_what_was_parked_is_tried_again(name: str, rounds: int) -> None:
    """The dearer a trial, the later."""
    assert reactions(name, 0.0, 0.9)[10] <= rounds


def test_texts_that_change_every_hundred_rounds() -> None:
    curve = CURVES["H200 8-bit"]
    kinds = (0.3, 0.95, 0.6, 0.8)

    def q(number: int) -> Sequence[float]:
        return always(kinds[number // 100 % 4])(0)

    speeds = [generated(curve, q, 3000, seed).speed for seed in range(6)]
    # The best k of each kind; more tokens come of the better ones.
    rates = [
        fixed_speed(curve, always(x)(0), best_k(curve, always(x)(0))) for x in kinds
    ]
    costs = [curve[best_k(curve, always(x)(0))] for x in kinds]
    ideal = sum(r * c for r, c in zip(rates, costs, strict=True)) / sum(costs)
    assert statistics.mean(speeds) > 0.93 * ideal


def test_another_regime_is_tried_at_once() -> None:
    controller, drawn = Throughput(), random.Random(0)

    def run(rounds: int, regime: str, q: float) -> Counter[int]:
        ks: Counter[int] = Counter()
        for _ in range(rounds):
            k = controller.choose(3)
            accepted = next((d for d in range(k) if drawn.random() > q), k)
            cost = CURVES["CPU bf16"][k] / 100
            controller.take(Round(k, k, accepted, regime, seconds=cost))
            ks[k] += 1
        return ks

    assert run(100, "thinking", 0.0)[0] > 90
    assert run(40, "answer", 0.95)[3] > 15
    assert run(40, "thinking", 0.0)[0] > 25


def test_a_drafter_that_is_often_silent() -> None:
    """A round in which it had nothing is no dearer than a plain one."""
    curve, q = CURVES["CPU bf16"], always(0.9)
    often = [generated(curve, q, 600, s, silent=0.7).speed for s in range(8)]
    fixed = (0.7 + 0.3 * fixed_speed(curve, q(0), 3) * curve[3]) / (
        0.7 + 0.3 * curve[3]
    )
    assert statistics.mean(often) > 0.96 * fixed


@pytest.mark.parametrize("silent", [1.05, 1.1])
def test_a_drafter_that_was_silent_for_long_is_asked_again(silent: float) -> None:
    """As one that looks for something to copy, and at last finds it."""
    controller, asked = Throughput(), []
    for number in range(900):
        k = controller.choose(3)
        drafted = k if number >= 100 else 0
        cost = 1 + 0.1 * k if drafted or not k else silent
        controller.take(Round(k, drafted, drafted, seconds=cost))
        asked.append(k > 0)
    assert sum(asked[100:]) > 400


def test_one_that_may_draft_less_is_parked_all_the_same() -> None:
    """From some context length on fewer tokens may be verified at once."""
    controller, ks = Throughput(), []
    for number in range(600):
        most = 4 if number < 200 else 1
        k = controller.choose(most)
        controller.take(Round(k, k, k if most == 4 else 0, seconds=1 + 0.5 * (k > 0)))
        ks.append(k)
    assert min(ks[100:200]) > 1 and sum(ks[250:]) < 35


def test_a_text_that_begins_in_a_regime_changes_none() -> None:
    controller = Throughput()
    controller.known.credit = -5.0
    controller.take(Round(0, regime="answer", seconds=1.0))
    controller.take(Round(0, regime="answer", seconds=1.0))
    assert controller.known.credit < -4
    controller.take(Round(0, regime="thinking", seconds=1.0))
    assert controller.known.credit >= 0


def test_a_clock_that_stands_still_tells_nothing() -> None:
    controller = Throughput()
    for _ in range(9):
        controller.take(Round(0, seconds=0.0))
    assert controller.to_dict() == Known().to_dict()


def test_a_hiccup_does_not_park_it() -> None:
    """Not one of fifty times the usual seconds, wherever it comes."""
    curve = CURVES["CPU bf16"]
    for at in range(40):
        controller, ks = Throughput(), []
        for number in range(60):
            k = controller.choose(3)
            seconds = curve[k] * (50 if number == at else 1)
            controller.take(Round(k, k, k, seconds=seconds))
            ks.append(k)
        assert 0 not in ks[-40:], at
        assert at < 20 or ks[-40:].count(3) > 30, at


def test_a_width_that_compiles_is_not_given_up() -> None:
    """And all rounds slow down together, as when others use the machine."""
    curve, seen = CURVES["CPU bf16"], set()
    controller, ks = Throughput(), []
    for number in range(120):
        k = controller.choose(3)
        seconds = curve[k] * (3 if number > 60 else 1) * (1 if k in seen else 200)
        seen.add(k)
        controller.take(Round(k, k, k, seconds=seconds))
        ks.append(k)
    assert ks[20:] == [3] * 100


def test_the_first_round_at_another_k_has_other_work() -> None:
    """It compiles, or was drafted for in the round before."""
    controller = Throughput()
    for k, seconds in ((0, 9), (0, 1), (0, 1), (1, 5), (1, 1.2), (1, 1.3), (0, 3)):
        controller.take(Round(k, k, 0, seconds=seconds))
    assert controller.to_dict()["costs"] == {"0": [1, 1], "1": [1.2, 1.3]}


# --- what it leaves behind, and what it says ------------------------------------------


def test_the_next_generation_begins_with_what_is_known() -> None:
    known = Known()
    generated(CURVES["CPU bf16"], always(0.9), 300, 0, known=known)
    again = generated(CURVES["CPU bf16"], always(0.9), 60, 1, known=known)
    assert min(again.ks) >= 2


def test_it_says_why_nothing_is_drafted() -> None:
    controller = Throughput()
    assert controller.choose(3) == 0 and controller.parked == MEASURED
    said: Counter[str] = Counter()
    for _ in range(100):
        k = controller.choose(3)
        said[controller.parked] += 1
        controller.take(Round(k, k, 0, seconds=CURVES["CPU bf16"][k]))
    assert said[PARKED] > 80 and said[""] > 2
    assert controller.choose(0) == 0 and controller.parked == ""


def test_no_more_is_asked_for_than_may_be() -> None:
    controller, drawn = Throughput(), random.Random(3)
    for _ in range(300):
        most = drawn.randint(0, 4)
        k = controller.choose(most)
        assert 0 <= k <= most
        accepted = drawn.randint(0, k)
        controller.take(Round(k, k, accepted, seconds=0.01 * (1 + 0.2 * k)))


def test_what_was_broken_off_tells_nothing() -> None:
    controller = Throughput()
    for _ in range(5):
        k = controller.choose(3)
        controller.take(Round(k, k, k, seconds=0.01 + 0.001 * k))

    def all_of_it() -> str:
        costs = controller.known.costs
        return repr((vars(controller), vars(costs), controller.to_dict()))

    before = all_of_it()
    controller.take(Round(3, 1, 1, seconds=5.0, stopped=True))
    controller.take(Round(3, 3, 3, seconds=5.0, rescue=0))
    assert all_of_it() == before
    controller.take(Round(3, 3, 3, seconds=5.0))
    assert all_of_it() != before


# --- planted bugs: each of these is found by one of the simulations -------------------


def dead_on_average() -> float:
    """Of plain decoding, with a drafter that is always wrong."""
    texts = [generated(CURVES["CPU bf16"], always(0.0), 200, s) for s in range(12)]
    return statistics.mean(text.speed for text in texts)


def test_one_that_never_parks_is_found() -> None:
    with patch.object(Throughput, "_choose", lambda self, most: most):
        assert dead_on_average() < 0.9


def test_one_that_tries_again_and_again_is_found() -> None:
    eager = patch.multiple(rules, _SHARE=1.0, _LEAST_SHARE=1.0)
    with eager, patch.object(acceptance, "_HOPES", 3.0):
        assert dead_on_average() < 0.96


def test_one_that_never_tries_again_is_found() -> None:
    with patch.object(rules, "_SHARE", 0.0), patch.object(rules, "_LEAST_SHARE", 0.0):
        assert reactions("CPU bf16", 0.0, 0.9)[10] > 250


def test_one_that_averages_hiccups_is_found() -> None:
    with (
        patch.object(costs.statistics, "median_low", statistics.mean),
        pytest.raises(AssertionError),
    ):
        test_a_hiccup_does_not_park_it()


def test_one_that_counts_the_first_round_at_another_k_is_found() -> None:
    take = Throughput.take

    def at_once(self: Throughput, verified: Round) -> None:
        self._last = verified.k
        take(self, verified)

    with patch.object(Throughput, "take", at_once), pytest.raises(AssertionError):
        test_the_first_round_at_another_k_has_other_work()


def test_one_that_takes_drafts_for_independent_is_found() -> None:
    """Acceptance is that of a position given that those before were accepted."""

    def add(
        self: acceptance.Acceptance, asked: int, drafted: int, accepted: int
    ) -> None:
        self._hopes = []
        self._reach(asked)
        for d in range(drafted):
            self.drafted[d].add(True)
            self.accepted[d].add(self._now(d), d < accepted)

    with patch.object(acceptance.Acceptance, "add", add):
        found = compared("H200 bf16", 0.7, 600, warm=True)
    assert found < compared("H200 bf16", 0.7, 600, warm=True)


# --- in generations: the depth changes no token ---------------------------------------

SPECS = (Spec(), Spec("qwen3_next"))
PROMPT = checks.PROMPT


class RandomSeconds(Throughput):
    """Is told that rounds took any time at all."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._drawn = random.Random(seed)

    def take(self, verified: Round) -> None:
        seconds = self._drawn.lognormvariate(-4, 2)
        super().take(replace(verified, seconds=seconds))


@pytest.mark.parametrize("spec", SPECS, ids=str)
@given(seed=st.integers(0, 2**32), pattern=st.sampled_from(["1", "110", "10", "0"]))
def test_whatever_rounds_take_tokens_and_caches_are_stock_s(
    spec: Spec, seed: int, pattern: str
) -> None:
    model, drawn = checks.model_of(spec), random.Random(seed)
    stop = drawn.choice([None, drawn.randint(1, 40)])
    found = checks.generation_differences(
        model,
        PROMPT,
        40,
        checks.scripted(pattern),
        stop=stop,
        ours={"depth": RandomSeconds(seed)},
        options=DraftOptions(num_draft_tokens=drawn.randint(1, 4)),
    )
    assert found == []


def test_the_same_prompt_three_times_cold_and_warm() -> None:
    """With the real clock; the drafter's head is carried, and what was measured is."""
    model = checks.model_of(SPECS[0])
    truth = oracle.stock(model, PROMPT, 50).tokens
    for _ in range(3):
        drafter = checks.steered(checks.head_for(model), Branching(truth))
        stats = Tally()
        made = checks.drafted(model, PROMPT, 50, drafter, stats=stats)
        assert made.tokens == truth
        assert sum(stats.rounds_by_k.values()) == stats.rounds
    drafter = Scripted(truth, right_where("0"))
    assert checks.drafted(model, PROMPT, 50, drafter).tokens == truth


def test_parked_rounds_are_counted_with_their_reason() -> None:
    model = checks.model_of(SPECS[0])
    truth = oracle.stock(model, PROMPT, 30).tokens
    controller, stats = Throughput(), Tally(drafter="x", num_draft_tokens=3)
    with patch.object(Throughput, "_promising", lambda self, most: None):
        made = checks.drafted(
            model,
            PROMPT,
            30,
            Scripted(truth, right_where("1")),
            stats=stats,
            depth=controller,
        )
    assert made.tokens == truth and stats.drafted.total() == 0
    assert stats.rounds_by_k == {0: 30} and stats.share_by_k == [1.0]
    assert set(stats.parked) == {MEASURED, PARKED}
    assert sum(stats.parked.values()) == 29  # for the last no draft could be kept
    assert f"nothing drafted; {stats.parked[MEASURED]} rounds parked" in stats.summary()
    assert stats.to_dict()["parked"] == dict(stats.parked)


def learnt_for(model: Any, options: DraftOptions) -> Learnt | None:
    caches = make_prompt_cache(model)
    return learnt_of(Target(model), caches, Scripted([]), options)


def test_the_option_turns_it_off() -> None:
    model = checks.model_of(SPECS[0])
    for option in ("fixed", "confidence"):
        options = DraftOptions(depth=option)
        assert learnt_for(model, options) is None
    assert learnt_for(model, DraftOptions()) is not None
    stats = Tally()
    for _ in draft_generate_step(
        mx.array(PROMPT),
        model,
        Scripted(oracle.stock(model, PROMPT, 24).tokens),
        options=DraftOptions(depth="fixed"),
        stats=stats,
        max_tokens=24,
    ):
        pass
    assert set(stats.rounds_by_k) == {3} and not stats.parked


def test_what_is_measured_is_known_to_the_next_generation_alone() -> None:
    model, other = checks.model_of(SPECS[0]), checks.model_of(SPECS[1])

    def known(model: object, **options: object) -> Learnt | None:
        return learnt_for(model, DraftOptions.of(options))

    assert known(model) is known(model) is known(model, num_draft_tokens=5)
    assert known(model) is not known(other)
    assert known(model) is not known(model, paths=2)


# --- what the next process finds ------------------------------------------------------


def learning(model: Any, options: DraftOptions) -> Learnt:
    """As another process has it: nothing is in memory."""
    with patch.object(learnt, "_learnt", ByModel()):
        found = learnt_for(model, options)
    assert found is not None
    return found


def test_the_next_process_begins_with_what_was_learnt() -> None:
    model, options = checks.model_of(SPECS[0]), DraftOptions()
    first = learning(model, options)
    controller = first.begin()
    assert controller.choose(3) == 0  # plain decoding has to be measured
    told = [(0, 1.0)] * 4 + [(3, 1.5)] * 4
    for k, seconds in told:
        controller.take(Round(k, k, k, seconds=seconds))
    controller.end()
    second = learning(model, options).begin()
    assert second.choose(3) > 1
    assert second.to_dict()["costs"] == {"0": [1.0, 1.0], "3": [1.5, 1.5]}
    assert learning(model, DraftOptions(paths=2)).begin().choose(3) == 0


def test_generations_at_the_same_time_do_not_disturb_each_other() -> None:
    learnt_so_far = learning(checks.model_of(SPECS[0]), DraftOptions())
    first, second = learnt_so_far.begin(), learnt_so_far.begin()
    for _ in range(9):
        first.take(Round(0, seconds=1.0))
    assert second.to_dict() == Known().to_dict()
    first.end()
    assert learnt_so_far.begin().choose(3) > 0


def ended(so_far: Learnt, rounds: int) -> None:
    generation = so_far.begin()
    for _ in range(rounds):
        generation.take(Round(0, seconds=1.0))
    generation.end()


def test_a_short_generation_is_not_worth_a_file() -> None:
    first = learning(checks.model_of(SPECS[0]), DraftOptions())
    with patch.object(store, "write") as write:
        ended(first, rounds=7)
        assert not write.called
        assert first.begin().to_dict()["costs"] == {"0": [1.0, 1.0]}
        for _ in range(20):
            ended(first, rounds=8)
        assert write.call_count == 5  # after 1, 2, 4, 8 and 16


NOTHING = Known().to_dict()["acceptance"]
EMPTY: dict[str, list[float]] = {"now": [], "past": [], "usual": []}
ZEROS = dict.fromkeys(EMPTY, [0.0] * len(acceptance.LEVELS))


@pytest.mark.parametrize(
    "found",
    [
        {"costs": 3},
        {"costs": {}, "acceptance": {}, "credit": 1},
        {"costs": {"0": [1]}, "acceptance": [], "credit": 1},
        Known().to_dict() | {"costs": {"none": [1]}},
        Known().to_dict() | {"credit": None},
        Known().to_dict() | {"credit": math.nan},
        Known().to_dict() | {"costs": {"0": [0.0, 0.0]}},
        Known().to_dict() | {"costs": {"3": [1.0, 1.0]}},
        Known().to_dict() | {"acceptance": NOTHING | {"parked": math.inf}},
        Known().to_dict() | {"acceptance": NOTHING | {"accepted": [EMPTY]}},
        Known().to_dict() | {"acceptance": NOTHING | {"accepted": [ZEROS]}},
    ],
)
def test_a_damaged_file_is_as_good_as_none(found: dict[str, Any]) -> None:
    with patch.object(store, "read", return_value=found):
        made = learning(checks.model_of(SPECS[0]), DraftOptions()).begin()
    assert made.to_dict() == Known().to_dict()


def test_generations_leave_it_and_find_it() -> None:
    model = checks.model_of(SPECS[0])
    truth = oracle.stock(model, PROMPT, 60).tokens

    def drafted() -> Tally:
        stats = Tally(drafter="x", num_draft_tokens=3)
        with patch.object(learnt, "_learnt", ByModel()):
            drafter = Scripted(truth, right_where("1"))
            made = checks.drafted(model, PROMPT, 60, drafter, stats=stats)
        assert made.tokens == truth
        return stats

    assert drafted().parked[MEASURED] == 3
    assert drafted().parked[MEASURED] == 0
