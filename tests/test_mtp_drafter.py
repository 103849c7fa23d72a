"""The MTP drafter: what its head's cache holds, and what it proposes.

Most tests drive the drafter as the round loop does, with drafts that are accepted and
rejected as a script says, over hidden states that are drawn beforehand. The oracle is
a fresh drafter that sees the tokens that were kept in one piece.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import checkpoints
import mlx.core as mx
import mlx.nn as nn
import oracle
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache
from tiny import VOCAB, Spec, text_args

from mlx_lm_mtp import draft_generate_step
from mlx_lm_mtp.drafters import mtp
from mlx_lm_mtp.drafters.base import Drafter, Proposal
from mlx_lm_mtp.drafters.mtp import MTPDrafter
from mlx_lm_mtp.heads.head import MTPHead
from mlx_lm_mtp.options import DraftOptions

SPECS = {
    "qwen3_5": Spec(),
    "qwen3_5-moe": Spec(experts=True),
    "qwen3_next": Spec("qwen3_next", tied=False),
    "qwen3_5-bf16": Spec(weights="bf16"),
    "qwen3_5-4bit": Spec(weights="4bit"),
}
DENSE = SPECS["qwen3_5"]
by_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


@functools.cache
def parts(spec: Spec) -> tuple[nn.Module, MTPHead]:
    """A tiny model and a head that fits it."""
    model = checkpoints.trunk(spec)
    head = MTPHead(model)
    head.load_weights(list(checkpoints.head_for(spec).items()))
    mx.eval(head.parameters())
    return model, head


def new_drafter(spec: Spec = DENSE) -> MTPDrafter:
    return MTPDrafter(parts(spec)[1])


class Story:
    """A generation, told to a drafter token by token.

    Args:
        drafter: Who listens.
        spec: What the drafter's model was made from.
        seed: Of the tokens and the hidden states.
    """

    def __init__(self, drafter: MTPDrafter, spec: Spec = DENSE, seed: int = 0) -> None:
        mx.random.seed(seed)
        model, _ = parts(spec)
        self.drafter = drafter
        self.hidden = mx.random.normal((1, 640, text_args(model).hidden_size))
        if spec.weights != "fp32":
            self.hidden = self.hidden.astype(mx.bfloat16)
        self.words = mx.random.randint(0, VOCAB, (1, 640)).astype(mx.uint32)
        self.shown: list[int] = []

    @property
    def pending(self) -> mx.array:
        """The `(1, 1)` token that was chosen and not shown yet."""
        at = len(self.shown)
        return self.words[:, at : at + 1]

    def prefill(self, *chunks: int) -> Story:
        for size in chunks:
            start = len(self.shown)
            tokens = self.words[:, start : start + size]
            self.drafter.prefill(tokens, self.hidden[:, start : start + size])
            self.shown += tokens[0].tolist()
        return self

    def round(self, k: int, accepted: int) -> mx.array:
        """One round: k drafts, of which the first so many are kept."""
        kept = self.pending
        drafts = mx.zeros((1, 0), mx.uint32)
        if k:
            drafts = self.drafter.draft(self.pending, k).tokens
            mx.eval(drafts)
            kept = mx.concatenate([kept, drafts[:, :accepted]], axis=1)
        self.show(kept)
        return drafts

    def show(self, kept: mx.array) -> None:
        """Observe the tokens of a round."""
        start, end = len(self.shown), len(self.shown) + kept.shape[1]
        self.drafter.observe(kept, self.hidden[:, start:end])
        self.shown += kept[0].tolist()

    def told_at_once(self) -> MTPDrafter:
        """A fresh drafter that has seen the same tokens, in one piece."""
        fresh = MTPDrafter(self.drafter.head)
        fresh.prefill(mx.array([self.shown]), self.hidden[:, : len(self.shown)])
        return fresh


def check_same(story: Story) -> None:
    """The drafter drafts as one that is told the same at once."""
    check_alike(story.drafter, story.told_at_once(), story.pending)
    assert story.drafter.cache.offset == len(story.shown)


def check_alike(ours: MTPDrafter, theirs: MTPDrafter, pending: mx.array) -> None:
    """Two drafters draft the same from the same cache, bit for bit."""
    drafts = [d.draft(pending, 3).tokens.tolist() for d in (ours, theirs)]
    assert drafts[0] == drafts[1]
    assert oracle.differences([ours.cache], [theirs.cache]) == []


# --- what is proposed -------------------------------------------------------------


def by_hand(story: Story, k: int) -> list[int]:
    """k drafts of the plain head: everything is fed anew for each, nothing trimmed."""
    head = story.drafter.head
    known = mx.array([story.shown[1:]], dtype=mx.uint32)
    tokens = mx.concatenate([known, story.pending], axis=1)
    hidden = story.hidden[:, : len(story.shown)]
    drafts: list[int] = []
    for _ in range(k):
        last = head(tokens, hidden, KVCache())[:, -1:]
        drafts.append(mx.argmax(head.logits(last)[0, -1]).item())
        tokens = mx.concatenate([tokens, mx.array([[drafts[-1]]])], axis=1)
        hidden = mx.concatenate([hidden, last], axis=1)
    return drafts


@by_spec
@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_drafts_are_the_heads_first_choices(spec: Spec, k: int) -> None:
    story = Story(new_drafter(spec), spec).prefill(8, 1)
    proposal = story.drafter.draft(story.pending, k)
    assert isinstance(proposal, Proposal)
    assert proposal.tokens.shape == (1, k)
    assert proposal.tokens.dtype == mx.uint32
    assert proposal.tokens[0].tolist() == by_hand(story, k)


@by_spec
def test_drafts_after_rounds_are_the_heads_first_choices(spec: Spec) -> None:
    story = Story(new_drafter(spec), spec).prefill(5)
    for k, accepted in [(3, 1), (2, 2), (3, 0), (0, 0)]:
        story.round(k, accepted)
    tokens = story.drafter.draft(story.pending, 3).tokens
    assert tokens[0].tolist() == by_hand(story, 3)


def test_the_drafts_vary() -> None:
    """Else the tests above would say little."""
    story = Story(new_drafter()).prefill(5)
    drafts = [tuple(story.round(3, 0)[0].tolist()) for _ in range(8)]
    assert len(set(drafts)) > 4


def test_the_number_of_drafts_does_not_change_the_first() -> None:
    story = Story(new_drafter()).prefill(9)
    longest = story.told_at_once().draft(story.pending, 5).tokens
    for k in range(1, 5):
        drafts = story.told_at_once().draft(story.pending, k).tokens
        assert drafts.tolist() == longest[:, :k].tolist()


def test_a_prompt_of_one_token() -> None:
    story = Story(new_drafter()).prefill(1)
    assert story.drafter.cache.offset == 0
    assert story.drafter.draft(story.pending, 2).tokens[0].tolist() == by_hand(story, 2)


# --- what the cache holds ---------------------------------------------------------

rounds = st.lists(
    st.integers(0, 5).flatmap(lambda k: st.tuples(st.just(k), st.integers(0, k))),
    max_size=12,
)


@given(st.sampled_from(list(SPECS)), st.integers(1, 9), rounds, st.integers(0, 99))
@example("qwen3_5", 1, [(3, 0)], 0)  # reject at once, after a prompt of one token
@example("qwen3_5", 4, [(3, 3)] * 6, 0)  # accept all
@example("qwen3_5", 4, [(3, 0)] * 6, 0)  # accept none
@example("qwen3_5", 4, [(0, 0), (3, 1), (0, 0), (0, 0), (2, 2)], 0)  # pauses
def test_the_cache_holds_what_was_kept(
    name: str, prompt: int, script: Sequence[tuple[int, int]], seed: int
) -> None:
    story = Story(new_drafter(SPECS[name]), SPECS[name], seed).prefill(prompt)
    for k, accepted in script:
        story.round(k, accepted)
    check_same(story)


@pytest.mark.parametrize(
    "chunks",
    [(17,), (16, 1), (1,) * 17, (5, 5, 5, 2), (1, 15, 1), (2, 1, 13, 1)],
    ids=lambda chunks: "+".join(map(str, chunks)),
)
@by_spec
def test_prefill_in_chunks_is_prefill_in_one_piece(
    spec: Spec, chunks: tuple[int, ...]
) -> None:
    story = Story(new_drafter(spec), spec).prefill(*chunks)
    assert story.drafter.cache.offset == len(story.shown) - 1
    check_same(story)


def pattern(length: int) -> Iterator[tuple[int, int]]:
    """Rounds of up to three drafts, from none accepted to all."""
    for i in range(length):
        k = (3, 3, 1, 2)[i % 4]
        yield k, (i * 7 + i // 5) % (k + 1)


def test_no_drift_over_500_tokens() -> None:
    """After every draft there is one entry a shown token, and never one more."""
    story = Story(new_drafter()).prefill(12, 1)
    for k, accepted in pattern(300):
        before = len(story.shown)
        story.round(k, accepted)
        assert story.drafter.cache.offset == before
        if len(story.shown) > 513:
            break
    assert len(story.shown) > 513
    check_same(story)


@pytest.mark.parametrize("k", [1, 3, 5])
def test_entries_of_drafts_are_trimmed_at_once(k: int) -> None:
    story = Story(new_drafter()).prefill(6)
    story.drafter.draft(story.pending, k)
    assert story.drafter.cache.offset == 6


@by_spec
def test_rejected_drafts_leave_no_trace(spec: Spec) -> None:
    """Neither how many were drafted, nor what they were."""
    stories = [Story(new_drafter(spec), spec).prefill(4) for _ in range(2)]
    for story, k in zip(stories, (5, 1), strict=True):
        for _ in range(5):
            story.round(k, 0)
    assert stories[0].shown == stories[1].shown
    for story in stories:
        check_same(story)


def test_the_cache_is_no_longer_than_its_entries_ask_for() -> None:
    """Buffers grow by steps of stock's; five drafts a round must not add to that."""
    story = Story(new_drafter()).prefill(3)
    for _ in range(60):
        story.round(5, 0)
    assert story.drafter.cache.keys.shape[2] == KVCache.step


# --- rounds without drafts --------------------------------------------------------


@pytest.mark.parametrize("pauses", [1, 2, mtp._MANY, mtp._MANY + 1, 3 * mtp._MANY + 5])
def test_pairs_are_kept_while_nothing_is_drafted(pauses: int) -> None:
    story = Story(new_drafter()).prefill(6)
    for _ in range(pauses):
        story.round(0, 0)
    check_same(story)


def test_pairs_do_not_pile_up_for_ever() -> None:
    story = Story(new_drafter()).prefill(6)
    waiting = []
    for _ in range(4 * mtp._MANY):
        story.round(0, 0)
        waiting.append(len(story.shown) - 1 - story.drafter.cache.offset)
    assert max(waiting) == mtp._MANY
    assert story.drafter.cache.offset > 3 * mtp._MANY


def test_a_pause_after_a_draft_and_before_one() -> None:
    story = Story(new_drafter()).prefill(6)
    for k, accepted in [(3, 2), (0, 0), (0, 0), (3, 3), (0, 0), (1, 0)]:
        story.round(k, accepted)
    check_same(story)


@pytest.mark.parametrize("kept", [2, 5, mtp._MANY + 3])
def test_many_tokens_at_once_without_a_draft(kept: int) -> None:
    """As after a round whose drafts came from somebody else."""
    story = Story(new_drafter()).prefill(6)
    story.show(story.words[:, 6 : 6 + kept])
    check_same(story)


# --- beginning anew ---------------------------------------------------------------


@pytest.mark.parametrize("stop", ["prefilled", "drafted", "observed", "paused"])
def test_begin_forgets(stop: str) -> None:
    drafter = new_drafter()
    story = Story(drafter, seed=1).prefill(9)
    if stop == "drafted":
        drafter.draft(story.pending, 3)
    if stop in ("observed", "paused"):
        story.round(3 if stop == "observed" else 0, 0)
    drafter.begin()
    assert drafter.cache.empty()
    check_same(Story(drafter, seed=2).prefill(5))


def test_two_drafters_share_a_head_and_nothing_else() -> None:
    stories = [Story(new_drafter(), seed=seed).prefill(5) for seed in (1, 2)]
    for k, accepted in [(3, 1), (2, 0), (0, 0), (3, 3)]:
        for story in stories:
            story.round(k, accepted)
    for story in stories:
        check_same(story)


# --- laziness ---------------------------------------------------------------------


@pytest.fixture
def no_eval(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluating by name is an error."""

    def refuse(*arrays: object) -> None:
        raise AssertionError("evaluated")

    for name in ("eval", "async_eval"):
        monkeypatch.setattr(mx, name, refuse)


def test_drafting_and_observing_evaluate_nothing(
    request: pytest.FixtureRequest,
) -> None:
    story = Story(new_drafter()).prefill(6)
    request.getfixturevalue("no_eval")
    drafts = story.drafter.draft(story.pending, 3).tokens
    kept = mx.concatenate([story.pending, drafts], axis=1)
    story.drafter.observe(kept, story.hidden[:, 6:10])
    assert story.drafter.draft(story.pending, 3).tokens.shape == (1, 3)


def test_drafts_can_be_traced() -> None:
    """Reading a value, which no patch can see, is an error while tracing."""
    story = Story(new_drafter()).prefill(6)
    traced = mx.compile(lambda token: story.drafter.draft(token, 3).tokens)
    assert traced(story.pending).shape == (1, 3)
    with pytest.raises(ValueError, match="eval"):
        mx.compile(lambda token: token + token.item())(story.pending)


def test_prefill_evaluates_what_it_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The activations of a long prompt must not pile up."""
    evaluated = []
    monkeypatch.setattr(mx, "eval", lambda *arrays: evaluated.append(arrays))
    Story(new_drafter()).prefill(1, 3, 4)
    assert len(evaluated) == 2


# --- in the round loop ------------------------------------------------------------


class Watched(MTPDrafter):
    """Notes down what it is shown."""

    def begin(self) -> None:
        super().begin()
        self.tokens: list[int] = []
        self.hiddens: list[mx.array] = []

    def observe(self, tokens: mx.array, hidden: mx.array | None) -> None:
        super().observe(tokens, hidden)
        self._watch(tokens, hidden)

    def prefill(self, tokens: mx.array, hidden: mx.array | None) -> None:
        super().prefill(tokens, hidden)
        self._watch(tokens, hidden)

    def _watch(self, tokens: mx.array, hidden: mx.array | None) -> None:
        assert hidden is not None
        self.tokens += tokens[0].tolist()
        self.hiddens.append(hidden)


@by_spec
@pytest.mark.parametrize("k", [1, 3])
def test_in_a_generation(spec: Spec, k: int) -> None:
    """It is shown the prompt and every token, once, and drafts from just that."""
    model, head = parts(spec)
    drafter, prompt = Watched(head), [3, 1, 4, 1, 5, 9, 2, 6]
    options = DraftOptions(num_draft_tokens=k)
    steps = draft_generate_step(
        mx.array(prompt), model, drafter, options=options, max_tokens=40
    )
    tokens = [token for token, _, _ in steps]
    assert tokens == oracle.stock(model, prompt, 40).tokens
    assert len(set(tokens)) > 1
    assert drafter.tokens == [*prompt, *tokens]
    fresh = MTPDrafter(head)
    fresh.prefill(mx.array([drafter.tokens]), mx.concatenate(drafter.hiddens, axis=1))
    check_alike(drafter, fresh, mx.array([[7]]))


def test_it_is_a_drafter() -> None:
    drafter = new_drafter()
    assert isinstance(drafter, Drafter)
    assert (drafter.name, drafter.needs_hidden) == ("mtp", True)
