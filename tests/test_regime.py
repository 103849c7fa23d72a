"""Thinking and answering: two regimes, told apart in the statistics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import checkpoints
import mlx.core as mx
import mlx_lm
import oracle
import pytest
from checks import PROMPT, drafted, generation_differences, head_for, model_of
from scripted import Scripted
from tiny import Spec

from mlx_lm_mtp import DraftOptions, MTPDrafter, Tally
from mlx_lm_mtp.regime import Marks, Regime

SPEC = Spec("qwen3_5")


def test_without_marks_there_is_one_regime() -> None:
    regime = Regime(None)
    regime.follow([1, 2, 3])
    assert not regime.known and regime.now == ""


def test_marks_of_one_token() -> None:
    regime, found = Regime(Marks((1,), (2,))), []
    for token in (5, 1, 5, 2, 5, 1):
        regime.follow([token])
        found.append(regime.now)
    thinking, answer = "thinking", "answer"
    assert found == [answer, thinking, thinking, answer, answer, thinking]


def test_marks_of_several_tokens_across_pieces() -> None:
    regime = Regime(Marks((1, 2, 3), (1, 4)))
    for piece, now in (
        ([9, 1], "answer"),
        ([2], "answer"),
        ([3], "thinking"),
        ([1], "thinking"),
        ([1, 4, 7], "answer"),
    ):
        regime.follow(piece)
        assert regime.now == now


def test_rounds_are_counted_where_they_begin() -> None:
    """The drafts are right while the model thinks, and wrong when it answers."""
    model = model_of(SPEC)
    truth = oracle.stock(model, PROMPT, 24).tokens
    end = truth[11]
    first = truth.index(end)
    stats = Tally()
    marks = Marks((PROMPT[2],), (end,))
    script = Scripted(truth, lambda i: i <= first)
    drafted(model, PROMPT, 24, script, stats=stats, thinking=marks)
    assert stats.acceptance_by_regime["answer"] == 0.0
    assert stats.acceptance_by_regime["thinking"] > 0.5
    assert stats.regime_rounds.total() == stats.rounds
    assert stats.regime_accepted.total() == stats.accepted.total()
    said = stats.summary()
    assert "in its thinking" in said and ", 0.0% in its answer" in said
    assert stats.to_dict()["regime_rounds"] == dict(stats.regime_rounds)


def test_a_model_that_does_not_think_is_said_nothing_of() -> None:
    stats = Tally()
    drafted(model_of(SPEC), PROMPT, 8, Scripted([]), stats=stats)
    assert stats.acceptance_by_regime == {} and "thinking" not in stats.summary()


def test_options_may_change_with_the_regime() -> None:
    """A processor that is hot while the model thinks, and cold when it answers."""
    model = model_of(SPEC)
    end = oracle.stock(model, PROMPT, 20).tokens[9]

    def by_regime(tokens: mx.array, logits: mx.array) -> mx.array:
        return mx.where(mx.any(tokens == end), logits * 4, logits / 2)

    for seed in range(3):
        differences = generation_differences(
            model,
            PROMPT,
            20,
            lambda truth: MTPDrafter(head_for(model)),
            options=DraftOptions(num_draft_tokens=3),
            seed=seed,
            sampler=lambda: lambda x: mx.random.categorical(x),
            ours={"thinking": Marks((PROMPT[0],), (end,))},
            logits_processors=[by_regime],
        )
        assert differences == []


@pytest.mark.usefixtures("plugin")
def test_the_tokenizer_knows_the_marks(tmp_path: Path) -> None:
    model, tokenizer = mlx_lm.load(str(checkpoints.write(tmp_path / "model").path))

    def last(prompt: str) -> Any:
        responses = mlx_lm.stream_generate(
            model, tokenizer, prompt, max_tokens=12, draft="mtp"
        )
        return list(responses)[-1].draft_stats

    assert last("ab").acceptance_by_regime == {}
    tokenizer._think_start_tokens = tuple(tokenizer.encode("<"))
    tokenizer._think_end_tokens = tuple(tokenizer.encode(">"))
    assert set(last("ab<c").regime_rounds) >= {"thinking"}
    assert "answer" in last("ab<c>d").regime_rounds
