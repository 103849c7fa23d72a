"""Processors that keep a state and can look ahead, such as grammars."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import oracle
import pytest
from checks import PROMPT, generation_differences, head_for, model_of
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from scripted import Scripted
from test_sampling import SPECS, STRATEGIES
from tiny import VOCAB

from mlx_lm_mtp import (
    DraftOptions,
    LooksAhead,
    MTPDrafter,
    Proposal,
    Tally,
    draft_generate_step,
    verify,
)

EXAMPLE = Path(__file__).parents[1] / "examples" / "structured_output.py"


class Climbs:
    """A toy grammar: each token is larger than the last, until it starts again.

    It keeps the last token, must be called with every certain token, once, and with
    nothing else in between.
    """

    def __init__(self, step: int = 9) -> None:
        self.step = step
        self.last: int | None = None
        self.seen = 0

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        assert self.seen in (0, len(tokens) - 1), "a token was left out, or came twice"
        self.last = tokens[-1].item()
        self.seen = len(tokens)
        return self._masked(self.last, logits)

    def look_ahead(self, tokens: mx.array, logits: mx.array) -> mx.array:
        assert len(tokens) > self.seen and tokens[self.seen - 1].item() == self.last
        return self._masked(tokens[-1].item(), logits)

    def allows(self, before: int, token: int) -> bool:
        return before < token <= before + self.step or (
            before + self.step >= VOCAB and token < self.step
        )

    def _masked(self, last: int, logits: mx.array) -> mx.array:
        allowed = [self.allows(last, token) for token in range(VOCAB)]
        return mx.where(mx.array(allowed), logits, -mx.inf)


class Blind(Climbs):
    """The same, but it cannot look ahead."""

    look_ahead = None  # type: ignore[assignment]


@given(
    spec=st.sampled_from(SPECS),
    strategy=st.sampled_from(STRATEGIES),
    temperature=st.sampled_from([0.0, 1.0]),
    penalty=st.booleans(),
    kind=st.sampled_from([Climbs, Blind]),
    k=st.integers(1, 4),
    stop=st.sampled_from([None, 1, 4]),
    seed=st.integers(0, 5),
)
def test_the_tokens_are_stock_s(
    spec: Any,
    strategy: dict[str, Any],
    temperature: float,
    penalty: bool,
    kind: type[Climbs],
    k: int,
    stop: int | None,
    seed: int,
) -> None:
    model = model_of(spec)

    def processors() -> list[Any]:
        return [kind(), *(make_logits_processors(None, 1.2) if penalty else [])]

    differences = generation_differences(
        model,
        PROMPT,
        14,
        lambda truth: MTPDrafter(head_for(model)),
        options=DraftOptions(num_draft_tokens=k, **strategy),
        seed=seed,
        stop=stop,
        sampler=lambda: make_sampler(temperature),
        fresh_processors=processors,
    )
    assert differences == []


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[list[list[int]]]:
    """What is verified, in every round."""
    rounds = []
    stock = verify.Verifier.__call__

    def call(self: verify.Verifier, tokens: mx.array) -> Any:
        rounds.append(tokens.tolist())
        return stock(self, tokens)

    monkeypatch.setattr(verify.Verifier, "__call__", call)
    return rounds


def generated(drafter: Any, grammar: Climbs, **options: Any) -> Tally:
    model, stats = model_of(SPECS[0]), Tally()
    steps = draft_generate_step(
        mx.array(PROMPT),
        model,
        drafter,
        logits_processors=[grammar],
        options=DraftOptions(**options),
        stats=stats,
        max_tokens=24,
    )
    tokens = [token for token, *_ in steps]
    assert (
        tokens
        == oracle.stock(
            model, PROMPT, 24, logits_processors=[Climbs(grammar.step)]
        ).tokens
    )
    return stats


class Falls(Scripted):
    """Drafts two tokens that climb, and one that does not; it knows no grammar."""

    def draft(self, token: mx.array, k: int) -> Proposal:
        x = token.item()
        return Proposal.of([(x + d) % VOCAB for d in (3, 6, 1)[:k]])


def _drafters() -> list[Any]:
    return [MTPDrafter(head_for(model_of(SPECS[0]))), Falls([])]


@pytest.mark.parametrize(
    ("which", "options"), [(0, {}), (0, {"rescue": 2}), (0, {"paths": 3}), (1, {})]
)
def test_no_forbidden_draft_is_verified(
    verified: list[list[list[int]]], which: int, options: dict[str, Any]
) -> None:
    """Neither of a drafter that chooses under the grammar, nor of another one."""
    grammar, drafter = Climbs(), _drafters()[which]
    assert isinstance(grammar, LooksAhead)
    stats = generated(drafter, grammar, **options)
    pairs = [pair for rows in verified for row in rows for pair in _pairs(row)]
    assert len(pairs) > 20
    # Equal ones fill up a path that is shorter than another.
    assert all(grammar.allows(*pair) for pair in pairs if pair[0] != pair[1])
    assert bool(stats.unguided) == (which == 1)


def _pairs(row: list[int]) -> list[tuple[int, int]]:
    return list(zip(row, row[1:], strict=False))


def test_looking_ahead_is_worth_it() -> None:
    drafter = MTPDrafter(head_for(model_of(SPECS[0])))
    ahead, blind = generated(drafter, Climbs(2)), generated(drafter, Blind(2))
    assert ahead.acceptance_rate > blind.acceptance_rate
    assert set(blind.unguided) == {"a logits processor may keep a state"}


def test_a_look_ahead_that_fails_is_told() -> None:
    class Fails(Climbs):
        def look_ahead(self, tokens: mx.array, logits: mx.array) -> mx.array:
            raise RuntimeError("no")

    stats = generated(MTPDrafter(head_for(model_of(SPECS[0]))), Fails())
    assert stats.drafted.total() == 0
    stats = generated(Scripted([1, 2, 3]), Fails())
    assert stats.drafted.total() == 0


def test_where_nothing_may_follow_nothing_is_drafted() -> None:
    class Ends(Climbs):
        def look_ahead(self, tokens: mx.array, logits: mx.array) -> mx.array:
            return mx.full(logits.shape, -mx.inf)

    stats = generated(MTPDrafter(head_for(model_of(SPECS[0]))), Ends())
    assert stats.drafted.total() == 0 and stats.tokens == 24


# --- the example ----------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_the_example_writes_json_of_its_schema(temperature: float) -> None:
    pytest.importorskip("llguidance")
    command = [sys.executable, str(EXAMPLE), "--temp", str(temperature)]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    *text, told = out.splitlines()
    found = json.loads("\n".join(text))
    assert found["kind"] in ("module", "class", "function")
    assert set(found) == {"name", "kind", "arguments", "documented"}
    assert "tokens a round" in told and "since" not in told
