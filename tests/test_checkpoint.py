"""The trained checkpoint of the repository, through stock's own entry points."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import oracle
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from mlx_lm_mtp import MTPDrafter, draft_generate_step, load_head

MODEL = Path(__file__).parents[1] / "examples" / "models" / "qwen3_5-tiny-mtp"
PROMPTS = [
    "def __init__(self, name):\n",
    "import os\nimport sys\n\ndef main(",
    "class TestCase(unittest.TestCase):\n",
    "def parse_args(argv=None):\n    parser = argparse.",
    "    try:\n        f = open(path)\n    except",
    "def is_prime(n):\n",
    "for i in range(",
    "class Node:\n    def __init__",
    "    return self._",
    "if __name__ == ",
    "from collections import",
    "def add(self, item):\n",
    "The assert statement",
    "Return a copy of the string with",
    "This module provides",
    "Augmented assignment is the combination of",
    "Note that the",
    "An exception is raised if",
    "x",
    "\n\n",
]
TOKENS = 40


@pytest.fixture(scope="module")
def loaded() -> Any:
    import mlx_lm_mtp

    mlx_lm_mtp.install()
    yield mlx_lm.load(str(MODEL))
    mlx_lm_mtp.uninstall()


def run(loaded: Any, prompt: str, seed: int = 0, **kwargs: Any) -> list[Any]:
    mx.random.seed(seed)
    return list(mlx_lm.stream_generate(*loaded, prompt, **kwargs))


def tokens(responses: list[Any]) -> list[int]:
    return [response.token for response in responses]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_tokens_are_stock_s(loaded: Any, prompt: str, temperature: float) -> None:
    kwargs = {"max_tokens": TOKENS, "sampler": make_sampler(temperature, top_p=0.95)}
    stock = run(loaded, prompt, seed=11, **kwargs)
    ours = run(loaded, prompt, seed=11, draft="mtp", num_draft_tokens=3, **kwargs)
    assert tokens(ours) == tokens(stock)
    assert "".join(r.text for r in ours) == "".join(r.text for r in stock)
    assert ours[-1].finish_reason == stock[-1].finish_reason


STRATEGIES: list[dict[str, Any]] = [
    {"depth": "confidence"},
    {"depth": "confidence", "reads": "once", "rescue": 2},
    {"rescue": 2, "probe": 3},
    {"paths": 3},
    {"verify": "step", "profile": True},
    {"hidden": "pre_norm", "prefill_step_size": 2},
]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("options", STRATEGIES, ids=str)
def test_under_every_strategy(
    loaded: Any, options: dict[str, Any], temperature: float
) -> None:
    sampler = make_sampler(temperature)
    for prompt in PROMPTS[6::5]:
        kwargs = {"max_tokens": TOKENS, "sampler": sampler, "seed": 3}
        step = options.get("prefill_step_size", 2048)
        stock = run(loaded, prompt, prefill_step_size=step, **kwargs)
        ours = run(loaded, prompt, draft="mtp", draft_options=options, **kwargs)
        assert tokens(ours) == tokens(stock)


def test_second_choices_lengthen_a_round(loaded: Any) -> None:
    def length(**options: Any) -> float:
        lengths = [
            run(loaded, prompt, max_tokens=60, draft="mtp", draft_options=options)
            for prompt in PROMPTS[12:17]
        ]
        return sum(r[-1].draft_stats.mean_acceptance_length for r in lengths)

    plain = length()
    assert length(rescue=2) > 1.03 * plain
    assert length(paths=3) > 1.03 * plain


def test_a_second_turn_is_drafted_as_well_as_an_unbroken_prompt(loaded: Any) -> None:
    """What the drafter has seen is in the list; without it, fewer drafts are right."""
    accepted: dict[str, list[int]] = {"carried": [], "unbroken": []}
    for first in PROMPTS[:8]:
        caches, second = make_prompt_cache(loaded[0]), "\n\ndef main("
        got = run(loaded, first, max_tokens=20, prompt_cache=caches, draft="mtp")
        ids = [loaded[1].encode(first), tokens(got), loaded[1].encode(second)]
        carried = run(loaded, ids[2], max_tokens=30, prompt_cache=caches, draft="mtp")
        unbroken = run(loaded, sum(ids, []), max_tokens=30, draft="mtp")
        for name, result in (("carried", carried), ("unbroken", unbroken)):
            accepted[name] += [result[-1].draft_stats.accepted.total()]
    carried, unbroken = map(sum, accepted.values())
    assert abs(carried - unbroken) <= 0.02 * unbroken


def test_drafts_are_accepted_as_often_as_the_card_says(loaded: Any) -> None:
    lengths = [
        run(loaded, p, max_tokens=100, draft="mtp", num_draft_tokens=2)[-1]
        for p in PROMPTS[:5]
    ]
    mean = sum(r.draft_stats.mean_acceptance_length for r in lengths) / len(lengths)
    assert mean > 2.5


@pytest.mark.parametrize("temperature", [0.3, 0.8])
def test_drafts_are_accepted_above_temperature_zero(
    loaded: Any, temperature: float
) -> None:
    ours = run(
        loaded,
        PROMPTS[0],
        max_tokens=60,
        draft="mtp",
        sampler=make_sampler(temperature),
    )
    assert ours[-1].draft_stats.acceptance_rate > 0.3


@pytest.mark.parametrize("k", [1, 2, 4])
def test_the_number_of_drafts_is_what_was_asked_for(loaded: Any, k: int) -> None:
    ours = run(loaded, PROMPTS[2], max_tokens=30, draft="mtp", num_draft_tokens=k)
    assert set(ours[-1].draft_stats.drafted) == set(range(k))


def test_a_penalty_is_not_dropped(loaded: Any) -> None:
    """The prompt makes the model repeat itself, unless it is told not to."""
    kwargs = {
        "max_tokens": TOKENS,
        "logits_processors": make_logits_processors(None, 1.5, 30),
    }
    stock = run(loaded, PROMPTS[2], **kwargs)
    assert tokens(stock) != tokens(run(loaded, PROMPTS[2], max_tokens=TOKENS))
    assert tokens(run(loaded, PROMPTS[2], draft="mtp", **kwargs)) == tokens(stock)


def test_the_same_prompt_three_times(loaded: Any) -> None:
    first, *others = (
        tokens(run(loaded, PROMPTS[3], max_tokens=TOKENS, draft="mtp"))
        for _ in range(3)
    )
    assert others == [first, first]


def test_a_cold_process_and_a_warm_one_agree(loaded: Any) -> None:
    """And the stock script, with the plugin found as users have it: by itself."""
    warm = run(loaded, PROMPTS[0], max_tokens=TOKENS, draft="mtp")
    command = [
        sys.executable,
        "-c",
        "import sys; from mlx_lm_mtp.cli import generate; sys.exit(generate())",
        *("--model", str(MODEL), "--prompt", PROMPTS[0], "--mtp"),
        *("--max-tokens", str(TOKENS), "--verbose", "F"),
    ]
    cold = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert cold == "".join(r.text for r in warm) + "\n"


def test_it_ends_by_itself(loaded: Any) -> None:
    """The EOS is fed, and nothing behind it, although more was drafted."""
    results = []
    for draft in ({}, {"draft": "mtp", "num_draft_tokens": 4}):
        caches = make_prompt_cache(loaded[0])
        prompt = "def is_prime(n):\n"
        got = run(loaded, prompt, max_tokens=200, prompt_cache=caches, **draft)
        assert got[-1].finish_reason == "stop" and got[-1].token == 0
        results.append((tokens(got), caches))
    assert results[0][0] == results[1][0]
    stock, ours = results[0][1], results[1][1]
    assert oracle.differences(ours[: len(stock)], stock) == []


def test_turns_of_a_conversation_on_one_cache(loaded: Any) -> None:
    """Different second turns: none is cut short, and prefix reuse is kept."""
    for second in ("def b(self):\n", "# then\n", "x = "):
        results = []
        for draft in ({}, {"draft": "mtp"}):
            caches = make_prompt_cache(loaded[0])
            turns = [
                run(loaded, turn, max_tokens=20, prompt_cache=caches, **draft)
                for turn in ("def a(self):\n", second)
            ]
            results.append([tokens(turn) for turn in turns])
        assert results[0] == results[1]


def test_the_head_does_not_drift_over_500_tokens(loaded: Any) -> None:
    """Its cache has an entry a committed pair, and it drafts as well late as early."""
    model, tokenizer = loaded
    drafter = MTPDrafter(load_head(model, MODEL))
    prompt = mx.array(tokenizer.encode(PROMPTS[2]))
    drafted = [
        from_draft
        for _, _, from_draft in draft_generate_step(
            prompt, model, drafter, max_tokens=500
        )
    ]
    assert prompt.size + 500 - 5 <= drafter.cache.offset < prompt.size + 500
    assert sum(drafted[250:]) > 0.8 * sum(drafted[:250])


def test_raw_norms_are_told_by_the_trunk(loaded: Any) -> None:
    from mlx_lm_mtp.heads.families.qwen import QWEN
    from mlx_lm_mtp.heads.find import find_head

    weights = find_head(MODEL, QWEN, None)
    assert weights.norms.raw and "conv1d" in weights.norms.evidence
    assert len(weights.tensors) == 15
