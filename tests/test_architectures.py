"""Every model file that mlx-lm ships: drafting changes nothing, whatever its layers.

The drafter is told what to say, so that each round is decided: with three drafts a
round, all are accepted, then the first, the second, the third is wrong, and so on.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import checks
import mlx.core as mx
import mlx.nn as nn
import mutants
import oracle
import pytest
from architectures import (
    CONFIGS,
    ONE_BY_ONE,
    REPLAYED,
    ROW_BY_ROW,
    Architecture,
    has_experts,
    shipped,
)
from mlx_lm.models.cache import (
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
)
from scripted import Branching

from mlx_lm_mtp import DraftOptions, Tally, target, verify
from mlx_lm_mtp.drafters.ngram import NGramDrafter, NGramOptions
from mlx_lm_mtp.state import commit, rowwise, verified
from mlx_lm_mtp.state.limits import UNKNOWN
from mlx_lm_mtp.state.rowwise import attentions_by_row

PATTERN = "0111101011"
TOKENS, STOP = 24, 13  # the stop is behind a draft, and another was accepted behind it
STEP = DraftOptions(num_draft_tokens=3, verify="step")
# A verify that has not the bits of decoding would be left out, and no bug be seen.
UNCERTIFIED = DraftOptions(num_draft_tokens=3, exactness="fast")
DRAFTERS: dict[str, checks.DrafterOf] = {
    "scripted": checks.scripted(PATTERN),
    "ngram": lambda truth: NGramDrafter(NGramOptions(shortest=1)),
}
# Why stock cannot run a file on a CPU, as its exception says.
CANNOT_RUN = {
    "bitnet": "metal_kernel",  # its linear layers are Metal kernels
    "muse_spark": "metal_kernel",  # so are its norms and its router
    "olmo": "inplace addition",  # it adds a mask to the scores, and the mask is a word
}
NAMES = sorted(set(CONFIGS) - set(CANNOT_RUN))
# One for each kind of cache and recurrence; experts are quantised everywhere.
QUANTISED = (
    *("llama", "gemma4", "baichuan_m1", "gpt2"),
    *("qwen3_5", "olmo_hybrid", "mamba", "mamba2", "falcon_h1", "rwkv7", "plamo2"),
    *("recurrent_gemma", "lfm2", "gear", "minicpm3", "phi3small"),
)


def second(name: str) -> str:
    """Weights besides fp32; MLX has no experts in bf16 on a CPU."""
    return "4bit" if has_experts(name) else "bf16"


CASES = [
    *((name, "fp32") for name in NAMES),
    *((name, second(name)) for name in NAMES),
    *((name, "4bit") for name in QUANTISED),
]


@pytest.fixture(autouse=True)
def olmo_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that one model file looks for, and does not use."""
    monkeypatch.setitem(sys.modules, "hf_olmo", ModuleType("hf_olmo"))


def differences(
    model: nn.Module,
    drafter: checks.DrafterOf,
    tally: Tally,
    options: DraftOptions = checks.THREE,
    **kwargs: Any,
) -> checks.Differences:
    """A whole generation and one that is stopped, beside stock's."""
    truth = oracle.stock(model, checks.PROMPT, TOKENS, **kwargs)
    assert len(set(truth.tokens)) > 5
    found = []
    for n, stop, theirs in [
        (TOKENS, None, truth),
        (TOKENS, STOP, oracle.stock(model, checks.PROMPT, STOP, **kwargs)),
    ]:
        ours = checks.drafted(
            model,
            checks.PROMPT,
            n,
            drafter(truth.tokens),
            options=options,
            stop=stop,
            stats=tally,
            **kwargs,
        )
        assert len(ours.tokens) == len(theirs.tokens)
        found += checks.result_differences(ours, theirs)
    return found


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize(("name", "weights"), CASES)
def test_drafting_changes_nothing(name: str, weights: str, drafter: str) -> None:
    model, tally = Architecture(name, weights).build(), Tally()
    assert differences(model, DRAFTERS[drafter], tally) == []
    assert (UNKNOWN in tally.undrafted) == (name in ONE_BY_ONE)
    assert bool(attentions_by_row(model)) == (name in ROW_BY_ROW)
    if drafter == "scripted":
        assert (tally.replays > 0) == (name in REPLAYED)
        assert (tally.accepted.total() > 0) == (name not in ONE_BY_ONE)


@pytest.mark.parametrize("name", [*ONE_BY_ONE, "llama", "llama4", "jamba", "rwkv7"])
def test_drafts_can_be_verified_one_by_one(name: str) -> None:
    """Also where a forward of several tokens is not known to do what decoding does."""
    model, tally = Architecture(name).build(), Tally()
    scripted = DRAFTERS["scripted"]
    assert differences(model, scripted, tally, STEP) == []
    assert tally.accepted.total() > 0


@pytest.mark.parametrize("strategy", [{"paths": 2}, {"rescue": 2}], ids=str)
@pytest.mark.parametrize(
    "name", ["bailing_hybrid", "deepseek_v32", "llama4", "mistral4", "rwkv7"]
)
def test_with_second_choices(name: str, strategy: dict[str, int]) -> None:
    model, tally = Architecture(name).build(), Tally()
    options = DraftOptions(num_draft_tokens=3, **strategy)
    kinds = ("right", "wrong", "short")
    right = checks.right_where(PATTERN)
    drafter = lambda truth: Branching(truth, right, kinds)  # noqa: E731
    assert differences(model, drafter, tally, options) == []
    assert tally.rescues or strategy == {"paths": 2}


@pytest.mark.parametrize("name", ["gemma", "granitemoehybrid", "hunyuan", "nanbeige"])
def test_with_a_quantised_kv_cache(name: str) -> None:
    model = Architecture(name).build()
    quantised = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 10}
    assert differences(model, DRAFTERS["scripted"], Tally(), **quantised) == []


def test_a_recurrence_that_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Metal, in one file: nothing can be recorded of it, so it is replayed."""
    module = importlib.import_module("mlx_lm.models.kimi_k3")
    metal = SimpleNamespace(is_available=lambda: True)
    monkeypatch.setattr(module, "mx", SimpleNamespace(**{**vars(mx), "metal": metal}))
    model, tally = Architecture("kimi_k3").build(), Tally()
    assert differences(model, DRAFTERS["scripted"], tally) == []
    assert tally.replays > 0


def test_a_recurrence_of_somebody_else_is_not_trusted() -> None:
    """Several tokens may be another formula, and it would be used to take back."""
    model = Architecture("rwkv7").build()
    foreign = type("Model", (type(model),), {"__module__": "somewhere"})
    model.__class__ = foreign
    tally = Tally()
    assert differences(model, DRAFTERS["scripted"], tally) == []
    assert tally.undrafted[UNKNOWN] and not tally.drafted
    assert UNKNOWN in tally.stats.summary()


# --- planted bugs ---------------------------------------------------------------------


def _not_trimmed(kind: type) -> mutants.Mutant:
    def wrap(stock: Any) -> Any:
        return lambda cache, n: None if type(cache) is kind else stock(cache, n)

    return mutants.replaced(commit, "trim", wrap)


def _first_of_each(stock: Any) -> Any:
    return lambda caches: [stock([cache])[0] for cache in caches]


def _never(answer: Any) -> Any:
    return lambda stock: lambda *_: answer


BUGS = {
    "kv_not_trimmed": (_not_trimmed(KVCache), "gpt2"),
    "rotating_not_trimmed": (_not_trimmed(RotatingKVCache), "llama"),
    "chunked_not_trimmed": (_not_trimmed(ChunkedKVCache), "llama4"),
    "fronts_not_cut": (mutants.replaced(commit, "cut_fronts", _never(None)), "llama4"),
    "second_of_a_list_not_trimmed": (
        mutants.replaced(commit, "flat", _first_of_each),
        "deepseek_v32",
    ),
    "lightning_state_not_rolled_back": (
        mutants.recurrent_state_not_rolled_back,
        "bailing_moe_linear",
    ),
    "replayed_one_short": (mutants.replayed_one_input_short, "lfm2"),
    "latent_attention_at_once": (
        mutants.replaced(target, "attentions_by_row", _never(frozenset())),
        "mistral4",
    ),
    "sparse_attention_at_once": (
        mutants.replaced(target, "attentions_by_row", _never(frozenset())),
        "phi3small",
    ),
    "factors_not_by_row": (
        mutants.replaced(rowwise, "_by_token", _never(False)),
        "mistral4",
    ),
    "unknown_arithmetic_trusted": (
        mutants.replaced(verify, "unknown_arithmetic", _never("")),
        "deepseek_v41",
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: str) -> None:
    mutant, name = BUGS[bug]
    model = Architecture(name).build()
    with mutant():
        try:
            found = differences(model, DRAFTERS["scripted"], Tally(), UNCERTIFIED)
        except ValueError as error:  # shapes that do not fit
            found = [str(error)]
    assert found != []


def test_a_front_that_is_not_put_back_is_found() -> None:
    model = Architecture("llama4").build()
    with mutants.replaced(verified, "forgets", _never(False))():
        scripted = DRAFTERS["scripted"]
        assert differences(model, scripted, Tally(), STEP) != []


# --- what there is, and what there is not ---------------------------------------------


def test_every_file_is_known() -> None:
    assert shipped() == set(CONFIGS)


def test_the_page_of_architectures_names_them() -> None:
    page = (Path(__file__).parents[1] / "docs" / "architectures.md").read_text()
    named = ROW_BY_ROW | REPLAYED | ONE_BY_ONE | set(CANNOT_RUN)
    assert {name for name in named if f"`{name}`" not in page} == set()
    assert f"in all {len(NAMES)} files" in page


@pytest.mark.parametrize("name", CANNOT_RUN)
def test_stock_cannot_run_it(name: str) -> None:
    model = Architecture(name).build()
    with pytest.raises((RuntimeError, ValueError), match=CANNOT_RUN[name]):
        mx.eval(model(mx.array([checks.PROMPT])))
