"""`mlx_lm_mtp compare`: identical, near-tie or bug, on a CPU that rounds nothing.

Where rounding is wanted, it is put into the logits of all forwards of several tokens.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mutants
import oracle
import pytest
from checks import PROMPT, model_of
from mlx_lm.sample_utils import make_sampler
from scripted import Scripted, right_where
from tiny import Spec

from mlx_lm_mtp import DraftOptions, cli
from mlx_lm_mtp.bench import prompts
from mlx_lm_mtp.bench.subject import Prompt, Subject
from mlx_lm_mtp.compare import report
from mlx_lm_mtp.compare.decode import Plan, compare
from mlx_lm_mtp.compare.rounding import _pieces, _ways
from mlx_lm_mtp.compare.verdict import (
    BUG,
    IDENTICAL,
    NEAR_TIE,
    ROOM,
    Comparison,
    Difference,
    exit_code,
)
from mlx_lm_mtp.gaps import Gap
from mlx_lm_mtp.testing.tokenizer import tiny_tokenizer

pytestmark = pytest.mark.usefixtures("plugin")

BUNDLED = Path(__file__).parents[1] / "examples" / "models" / "qwen3_5-tiny-mtp"
TOKENS = 24
SPEC = Spec("qwen3_5")
Compare = Callable[..., tuple[int, str, str]]

# --- the verdict ------------------------------------------------------------------


def differing(moved: float, drawn: bool = True) -> Difference:
    return Difference(3, 1, 2, Gap(0.1, 3, 1, 2), 0.1, moved, drawn)


@pytest.mark.parametrize(
    ("moved", "rounding", "difference", "verdict"),
    [
        (0.0, None, None, IDENTICAL),
        (0.3, 0.01, None, IDENTICAL),
        (1e-7, 0.0, None, BUG),  # where nothing rounds, nothing may move
        (0.1, 0.1, differing(0.1), NEAR_TIE),
        (0.2, 0.1, differing(0.1 * ROOM), NEAR_TIE),
        (0.3, 0.1, differing(0.101 * ROOM), BUG),
        (0.1, 0.1, differing(0.1, drawn=False), BUG),
        (0.0, 0.0, differing(0.0), NEAR_TIE),  # cannot be: equal rows, the same choice
        (0.1, 0.0, differing(1e-7), BUG),
        (float("nan"), 0.1, differing(float("nan")), BUG),
    ],
)
def test_verdicts(
    moved: float, rounding: float | None, difference: Difference | None, verdict: str
) -> None:
    found = Comparison(0, 4, moved, rounding, difference)
    assert found.verdict == verdict
    assert bool(found.reason) == (verdict == BUG)
    assert exit_code([found], exact=True) == (verdict != IDENTICAL)
    assert exit_code([found], exact=False) == (verdict == BUG)


def test_every_place_in_every_piece_is_seen() -> None:
    seen = {
        (position, end - start, position - start)
        for width, first in _ways(4)
        for start, end in _pieces(20, width, first)
        for position in range(start, end)
    }
    for position in range(4, 16):
        for width in (2, 3, 4):
            assert {(position, width, place) for place in range(width)} <= seen
    assert [*_pieces(2, 4, 3)] == [(0, 2)] and [*_pieces(1, 2, 1)] == [(0, 1)]


# --- models -----------------------------------------------------------------------


@contextmanager
def rounds_when_wide(model: Any, far: float) -> Iterator[None]:
    """Forwards of several tokens give other logits than single ones, as on a GPU."""
    call = type(model).__call__

    def rounded(self: Any, tokens: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        logits = call(self, tokens, *args, **kwargs)
        if tokens.shape[1] == 1:
            return logits
        noise = mx.random.uniform(-far, far, logits.shape, key=mx.random.key(7))
        return logits + noise.astype(logits.dtype)

    with patch.object(type(model), "__call__", rounded):
        yield


FAST = {"exactness": "fast"}  # else a form of verify is looked for that rounds nothing


def compared(
    spec: Spec,
    *planted: Any,
    temp: float = 0.0,
    pattern: str = "110",
    far: float = 0.0,
    eos: int | None = None,
    options: dict[str, Any] | None = None,
) -> Comparison:
    """One prompt of random tokens, with bugs planted.

    Args:
        pattern: Drafts are right where it has a 1.
        far: How far forwards of several tokens are off.
        eos: Index in stock's text of the token that ends it.
    """
    model, sampler = model_of(spec), make_sampler(temp)
    truth = oracle.stock(model, PROMPT, TOKENS + 8, sampler=sampler, seed=3).tokens
    tokenizer = copy.copy(tiny_tokenizer())
    tokenizer.eos_token_ids = set() if eos is None else {truth[eos]}
    subject = Subject("tiny", model, tokenizer, [Prompt("x", list(PROMPT))])
    drafter = Scripted(truth, right_where(pattern))
    how = DraftOptions(**options or (FAST if far else {}))
    plan = Plan(TOKENS, drafter, how, sampler, seed=3)
    with ExitStack() as stack:
        stack.enter_context(rounds_when_wide(model, far))
        for mutant in planted:
            stack.enter_context(mutant())
        (found,) = compare(subject, plan)
    report.lines(subject, found, temp)
    return found


@pytest.mark.parametrize("temp", [0.0, 1.0])
@pytest.mark.parametrize("weights", ["fp32", "bf16"])
def test_the_package_as_it_is_is_identical(weights: str, temp: float) -> None:
    found = compared(Spec("qwen3_5", weights=weights), temp=temp)
    assert found.verdict == IDENTICAL and found.moved == 0 and found.rounding is None
    assert found.tokens == TOKENS


def test_an_end_of_the_text_is_no_difference() -> None:
    found = compared(SPEC, eos=7)
    assert found.verdict == IDENTICAL and found.tokens == 8


GREEDY = {
    "state": mutants.recurrent_state_not_rolled_back,
    "window": mutants.conv_window_one_token_short,
    "keys": mutants.kv_not_trimmed,
    "token": mutants.wrong_drafts_accepted,
}


@pytest.mark.parametrize("far", [0.0, 0.02])
@pytest.mark.parametrize("mutant", GREEDY)
def test_planted_bugs_are_bugs(mutant: str, far: float) -> None:
    found = compared(SPEC, GREEDY[mutant], pattern="10", far=far)
    assert found.verdict == BUG and found.difference is not None


def test_a_bug_that_no_token_shows_is_one_where_nothing_rounds() -> None:
    found = compared(SPEC, mutants.recurrent_state_rounded_to_bf16, pattern="10")
    assert found.difference is None and found.rounding == 0
    assert 0 < found.moved < 0.1 and found.verdict == BUG


@pytest.mark.parametrize(
    "mutant",
    [
        mutants.rejected_positions_drawn_anew,
        mutants.same_noise_at_every_position,
        mutants.random_state_not_put_back,
    ],
)
def test_wrong_noise_is_a_bug(mutant: mutants.Mutant) -> None:
    found = compared(SPEC, mutant, pattern="10", temp=1.0)
    assert found.verdict == BUG and "not the choice" in found.reason


@pytest.mark.parametrize("far", [0.1, 0.5])
@pytest.mark.parametrize("weights", ["bf16", "fp32"])
def test_rounding_flips_near_ties(weights: str, far: float) -> None:
    found = compared(Spec("qwen3", weights=weights), pattern="10", far=far)
    difference = found.difference
    if difference is None:
        assert found.verdict == IDENTICAL and weights == "fp32"
        return
    assert found.verdict == NEAR_TIE and difference.best is not None
    assert 0 <= difference.gap <= 2 * difference.moved <= 2 * ROOM * found.rounding
    assert difference.position == difference.best.position == found.tokens - 1


def test_what_would_flip_does_not_in_exact_mode() -> None:
    spec, exact = Spec("qwen3", weights="bf16"), {"exactness": "exact"}
    found = compared(spec, pattern="10", far=0.5, options=exact)
    assert found.verdict == IDENTICAL and found.moved == 0


def test_rounding_flips_what_is_sampled() -> None:
    found = compared(SPEC, pattern="10", far=0.1, temp=1.0)
    assert found.verdict == NEAR_TIE and found.difference.moved > 0


# --- the command ------------------------------------------------------------------


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Compare:
    """`mlx_lm_mtp compare` with these arguments: exit code, standard output, error."""

    def command(*args: Any) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["mlx_lm_mtp", "compare", *map(str, args)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return stop.value.code, *capsys.readouterr()

    return command


@pytest.fixture
def three(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    texts = ["def main():\n", "class Node:\n    def __init__(self", "return"]
    file.write_text("\n".join(json.dumps({"id": 1, "prompt": t}) for t in texts) + "\n")
    return file


def test_the_bundled_checkpoint_is_identical(command: Compare, three: Path) -> None:
    file = three.with_suffix(".json")
    code, out, _ = command(
        BUNDLED, "--prompts", three, "--max-tokens", 40, "--json", file
    )
    assert code == 0
    assert out.count("identical, log-probabilities bit for bit") == 3
    assert out.splitlines()[-1] == "verdict:  3 identical"
    found = json.loads(file.read_text())
    assert [f["verdict"] for f in found] == [IDENTICAL] * 3
    assert [f["prompt"] for f in found] == [0, 1, 2]


def test_a_bug_is_told_and_ends_with_one(command: Compare, three: Path) -> None:
    with mutants.wrong_drafts_accepted():
        code, out, err = command(
            BUNDLED, "--prompts", three, "--max-tokens", 8, "--json", "-"
        )
    assert code == 1 and "a bug, for log-probabilities differ from stock's by" in err
    assert "stock's best there: " in err
    found = json.loads(out)
    assert BUG in [f["verdict"] for f in found]
    first = next(f for f in found if f["verdict"] == BUG)["difference"]
    assert first["stock"] != first["ours"] and len(first["best"]) == 4


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--prompts", "/no"), "--prompts /no cannot be read: No such file"),
        (("--json", "/no/x"), "--json: /no/x is in a folder that does not exist; make"),
        (("--max-tokens", 0), "--max-tokens: '0' is given; give an integer of at"),
        (("--draft", "medusa"), "unknown drafter 'medusa'; the known ones are:"),
        (("--draft-option", "verify=x"), "verify is 'x'; choose one of: batch"),
        ((), "MODEL /nowhere cannot be loaded ("),
    ],
)
def test_what_cannot_be_is_one_sentence(
    arguments: Any, said: str, command: Compare, three: Path
) -> None:
    code, _, err = command("/nowhere", "--prompts", three, *arguments)
    assert code == 2 and said in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"prompt": "a"}\n\n{"prompt": "b\\n", "id": 3}\n', ["a", "b\n"]),
        ('{"prompt": "a"}\nb', ['{"prompt": "a"}', "b"]),
    ],
)
def test_prompts_as_json_lines(text: str, found: list[str], tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text(text)
    assert prompts.read(file) == found


def test_a_line_without_a_prompt_is_named(command: Compare, tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    code, _, err = command("m", "--prompts", file)
    assert code == 2 and 'has no "prompt" in line 2' in err
