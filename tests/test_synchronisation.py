"""The host waits for the device once a round, and the device does not wait for it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checks
import mlx.core as mx
import oracle
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler
from scripted import Scripted
from tiny import VOCAB, Spec

from mlx_lm_mtp import DraftOptions, Tally, draft_generate_step
from mlx_lm_mtp.drafters.base import Proposal
from mlx_lm_mtp.drafters.mtp import MTPDrafter
from mlx_lm_mtp.trace import Trace

PROMPT = [5, 9, 30, 2, 77]
READS = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__")


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Counts what waits for the device: evaluations, and reads of anything else."""
    counts: Counter[str] = Counter()
    known: dict[int, mx.array] = {}

    def evaluated(*arrays: Any) -> None:
        counts["eval"] += 1
        for _, array in tree_flatten(arrays):
            known[id(array)] = array  # kept, so that no other gets its id
        evaluate(*arrays)

    def counted(name: str) -> Any:
        stock = getattr(mx.array, name)

        def read(self: mx.array) -> Any:
            counts[name] += id(self) not in known
            return stock(self)

        return read

    evaluate = mx.eval
    monkeypatch.setattr(mx, "eval", evaluated)
    for name in READS:
        monkeypatch.setattr(mx.array, name, counted(name))
    yield counts


class Knowing(MTPDrafter):
    """Drafts with its head, but says what is right, or wrong, by position alone.

    Unlike other drafters of the tests, it reads no token that it is shown.
    """

    def __init__(self, n: int, pattern: str = "1", **how: Any) -> None:
        self.model = checks.model_of(Spec())
        truth = oracle.stock(self.model, PROMPT, n + 8, **how).tokens
        right = checks.right_where(pattern)
        said = [t if right(i) else (t + 1) % VOCAB for i, t in enumerate(truth)]
        self.said = mx.array([said], dtype=mx.uint32)
        self.truth = truth
        self.calls: list[str] = []
        super().__init__(checks.head_for(self.model))

    def draft(self, *call: Any) -> Proposal:
        self.calls.append("draft")
        drafted = super().draft(*call)
        start = self.seen + 1
        end = start + drafted.tokens.shape[1]
        return dataclasses.replace(drafted, tokens=self.said[:, start:end])

    def prefill(self, tokens: mx.array, hidden: mx.array | None) -> None:
        super().prefill(tokens, hidden)
        self.seen = 0

    def observe(self, tokens: mx.array, hidden: mx.array | None) -> None:
        super().observe(tokens, hidden)
        self.seen += tokens.shape[1]

    def run(self, n: int, **how: Any) -> Iterator[Any]:
        return draft_generate_step(
            mx.array(PROMPT), self.model, self, max_tokens=n, **how
        )


def drafted(waits: Counter[str], pattern: str, **how: Any) -> tuple[int, Tally]:
    """What the rounds behind the prefill waited for, and their statistics."""
    sampled = {"seed": 0, "sampler": how["sampler"]} if "sampler" in how else {}
    drafter, stats = Knowing(24, pattern, **sampled), Tally()
    for _ in drafter.run(24, **how):  # kernels are checked when they are first used
        pass
    mx.random.seed(0)
    steps = drafter.run(24, stats=stats, **how)
    next(steps)  # comes before the first round is read
    waits.clear()
    for _ in steps:
        pass
    return waits.total(), stats


def test_the_counter_counts(waits: Counter[str]) -> None:
    x = mx.array([1, 2])
    x.tolist()
    assert waits.total() == 1
    mx.eval(x)
    x.tolist(), x.tolist()
    assert waits == {"tolist": 1, "eval": 1}
    assert bool(x[0] == 1) and waits.total() == 3


@pytest.mark.parametrize("pattern", ["1", "110", "0"])
@pytest.mark.parametrize("k", [0, 1, 3])
def test_greedy_rounds_wait_once(waits: Counter[str], pattern: str, k: int) -> None:
    options = DraftOptions(num_draft_tokens=k)
    waited, stats = drafted(waits, pattern, options=options)
    # What is chosen behind the last token is read only to accept drafts.
    assert 1 < stats.rounds - 1 <= waited <= stats.rounds


@pytest.mark.parametrize("pattern", ["1", "110", "0"])
def test_gaps_and_traces_wait_for_nothing_more(
    waits: Counter[str], pattern: str, tmp_path: Path
) -> None:
    options = DraftOptions(gaps=True)
    trace = Trace(tmp_path / "trace", {})
    waited, stats = drafted(waits, pattern, options=options, trace=trace)
    assert 1 < stats.rounds == waited and stats.gaps.total() == stats.tokens


def test_a_stock_sampler_waits_once_as_well(waits: Counter[str]) -> None:
    waited, stats = drafted(waits, "110", sampler=make_sampler(0.8, top_p=0.9))
    assert 1 < stats.rounds - 1 <= waited <= stats.rounds


def test_confidences_read_once_are_one_more(waits: Counter[str]) -> None:
    options = DraftOptions(depth="confidence", reads="once")
    waited, stats = drafted(waits, "110", options=options)
    assert stats.rounds < waited <= 2 * stats.rounds


# --- the device goes on ---------------------------------------------------------------


def order(**how: Any) -> list[str]:
    """Drafts and yields in the order in which they come."""
    drafter = Knowing(12)
    for _ in drafter.run(12, **how):
        drafter.calls.append("yield")
    return drafter.calls


@pytest.mark.parametrize("verify", ["batch", "step"])
def test_the_next_round_is_drafted_before_accepted_drafts_are_yielded(
    verify: str,
) -> None:
    rounds = ["yield", "draft", *["yield"] * 3]
    assert order(options=DraftOptions(verify=verify)) == [
        "draft",
        *rounds,
        *rounds,
        *["yield"] * 4,
    ]


@pytest.mark.parametrize(
    "how",
    [
        {"sampler": make_sampler(0.8)},
        {"logits_processors": [lambda tokens, logits: logits]},
        {"options": DraftOptions(depth="confidence")},
        {"options": DraftOptions(rescue=1)},
        {"options": DraftOptions(paths=2)},
    ],
    ids=["sampled", "processed", "asked", "rescued", "side by side"],
)
def test_where_it_could_not_be_undone_it_waits(how: dict[str, Any]) -> None:
    events = "".join(event[0] for event in order(**how))
    assert "d" in events[1:] and "yd" in events
    assert "yyd" in events or "sampler" in how  # behind the round's last yield


@pytest.mark.parametrize("ends", [True, False], ids=["end of text", "budget"])
def test_nothing_is_drafted_ahead_that_will_not_be_verified(ends: bool) -> None:
    drafter, stats = Knowing(8), Tally()
    eos = {drafter.truth[2]} if ends else ()
    steps = list(drafter.run(8 if ends else 4, stats=stats, eos_token_ids=eos))
    assert len(steps) == (3 if ends else 4)
    assert drafter.calls == ["draft"] and stats.rounds == 1


# --- drafting ahead, and stopping there ---------------------------------------------


class Rewinds(Scripted):
    """Says what a script says, and keeps the contract of who can go back."""

    gives = frozenset({"rewind"})

    def begin(self) -> None:
        super().begin()
        self.drafted = False

    def draft(self, token: mx.array, k: int) -> Proposal:
        self.drafted = True
        return super().draft(token, k)

    def observe(self, tokens: mx.array, hidden: mx.array | None) -> None:
        assert tokens.shape[1], "nothing was kept"
        self.last, self.drafted = tokens.shape[1], False
        super().observe(tokens, hidden)

    def rewind(self, tokens: int) -> None:
        assert self.drafted, "there is no draft to take back"
        assert tokens < self.last
        self.seen = self.seen[: len(self.seen) - tokens]


LIMITS: dict[str, dict[str, Any]] = {
    "none": {},
    "ring": {"max_kv_size": 20},
    "quantises": {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 18},
}


def stopped(kind: type[Scripted], pattern: str, stop: int, limit: str, n: int) -> Any:
    """A generation that its caller ends: its statistics, and what the drafter saw."""
    model = checks.model_of(Spec("qwen3"))
    more = LIMITS[limit]
    truth = oracle.stock(model, PROMPT, 60, **more).tokens
    caches = make_prompt_cache(model, max_kv_size=more.get("max_kv_size"))
    drafter, tally = kind(truth, checks.right_where(pattern)), Tally()
    made = checks.drafted(
        model,
        PROMPT,
        n,
        drafter,
        stop=stop,
        caches=caches,
        stats=tally,
        **{k: v for k, v in more.items() if k != "max_kv_size"},
    )
    theirs = oracle.stock(model, PROMPT, len(made.tokens), **more)
    assert checks.result_differences(made, theirs) == []
    assert drafter.seen == made.tokens
    return tally.stats.rounds, tally.stats.undrafted, tally.stats.drafted


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("pattern", ["1", "110", "11010", "0"])
def test_ahead_is_as_far_as_one_comes_without(limit: str, pattern: str) -> None:
    """Rounds, drafts, and rounds without drafts are those of who cannot go back."""
    for n in (3, 4, 5, 20):
        for stop in (*range(1, min(n, 16)), 99):
            plain = stopped(Scripted, pattern, stop, limit, n)
            assert stopped(Rewinds, pattern, stop, limit, n) == plain, (n, stop)
