"""Drafts read from a cheaper copy of the lm_head; tokens and caches stay stock's."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import checks
import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import oracle
import pytest
from checkpoints import trunk
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from mlx_lm.tuner.lora import LoRALinear
from scripted import Scripted
from tiny import VOCAB, Spec
from tokenizers import Tokenizer, models

from mlx_lm_mtp import DraftOptions, MTPDrafter, Tally, draft_generate_step, heads
from mlx_lm_mtp.drafters import mtp
from mlx_lm_mtp.drafters.base import DraftContext
from mlx_lm_mtp.errors import InvalidOption
from mlx_lm_mtp.heads import readout
from mlx_lm_mtp.heads.head import MTPHead
from mlx_lm_mtp.heads.readout import CheapReadout, by_frequency
from mlx_lm_mtp.propose import check_gives

TRAINED = Path(__file__).parents[1] / "examples" / "models" / "qwen3_5-tiny-mtp"
PROMPT = [5, 9, 90, 2, 77]
SPECS = {
    "tied": Spec(),
    "untied": Spec("qwen3_next", tied=False),
    "bf16": Spec(weights="bf16"),
    "4-bit": Spec(weights="4bit"),
    "4-bit untied": Spec(weights="4bit", tied=False),
}
by_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
HIDDEN = mx.random.normal((1, 2, 64), key=mx.random.key(0))


def head_of(spec: Spec) -> MTPHead:
    return checks.head_for(checks.model_of(spec))


def weights(head: MTPHead) -> mx.array:
    """The rows of the lm_head that a head uses, as plain numbers."""
    used = head.lm_head_used
    if "scales" not in used:
        return used.weight
    how = {"group_size": used.group_size, "bits": used.bits}
    return mx.dequantize(used.weight, used.scales, used.biases, **how)


@by_spec
def test_without_options_it_is_the_lm_head(spec: Spec) -> None:
    head = head_of(spec)
    hidden = HIDDEN.astype(weights(head).dtype)
    cheap = CheapReadout(head)
    assert mx.allclose(cheap.logits(hidden), head.logits(hidden), atol=1e-2).item()


@by_spec
@pytest.mark.parametrize("bits", [3, 8])
def test_a_copy_in_fewer_bits(spec: Spec, bits: int) -> None:
    head = head_of(spec)
    dense = weights(head)
    hidden = HIDDEN.astype(dense.dtype)
    found = CheapReadout(head, bits).logits(hidden)
    if spec.weights == "4bit" and bits > 4:  # more bits would be of no use
        assert oracle.same_bits(found, head.logits(hidden))
        return
    copy = mx.quantize(dense, group_size=64, bits=bits)
    expected = mx.quantized_matmul(hidden, *copy, group_size=64, bits=bits)
    assert oracle.same_bits(found, expected)
    assert not mx.array_equal(found, head.logits(hidden)).item()


@by_spec
@pytest.mark.parametrize("bits", [0, 3])
def test_a_shortlist_leaves_the_rest_out(spec: Spec, bits: int) -> None:
    head = head_of(spec)
    hidden = HIDDEN.astype(weights(head).dtype)
    cheap = CheapReadout(head, bits, shortlist=10)
    cheap.see(mx.array([PROMPT]))
    found = cheap.logits(hidden)
    ids = sorted({*range(10), *PROMPT})
    whole = CheapReadout(head, bits).logits(hidden)
    expected = (
        mx.full(whole.shape, -mx.inf)
        .at[:, :, mx.array(ids)]
        .maximum(whole[:, :, mx.array(ids)].astype(mx.float32))
    )
    assert found.shape == (1, 2, VOCAB)
    assert mx.isinf(found).sum().item() == 2 * (VOCAB - len(ids))
    assert mx.allclose(found, expected, atol=1e-2).item()
    cheap.begin()  # the next prompt does not have them
    assert mx.isinf(cheap.logits(hidden)).sum().item() == 2 * (VOCAB - 10)


def test_a_shortlist_of_all_is_none() -> None:
    cheap = CheapReadout(head_of(Spec()), shortlist=VOCAB)
    assert not mx.any(mx.isinf(cheap.logits(HIDDEN))).item()


# --- the copy is made once ------------------------------------------------------------


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the copies that are made."""
    made: list[int] = []
    of = readout.Copy.of

    def counted(*call: Any) -> Any:
        copy = of(*call)
        made.append(copy.rows[0].shape[0])
        return copy

    monkeypatch.setattr(readout.Copy, "of", counted)
    return made


def test_a_copy_is_made_once_for_a_head(copies: list[int]) -> None:
    head = checks.head_for(Spec().build())
    for bits, shortlist in ((4, 0), (4, 0), (4, 10), (0, 10), (4, 10), (4, 0)):
        CheapReadout(head, bits, shortlist).logits(HIDDEN)
    assert copies == [VOCAB, 10, 10]


def test_of_a_prompt_only_what_is_new_is_copied(copies: list[int]) -> None:
    cheap = CheapReadout(checks.head_for(Spec().build()), shortlist=10)
    for chunk in ([5, 90, 91], [91, 3]):
        cheap.see(mx.array([chunk]))
    for _ in range(3):
        cheap.logits(HIDDEN)
    assert copies == [10, 2]


def test_another_lm_head_is_copied_anew(copies: list[int]) -> None:
    model = trunk(Spec(tied=False))
    head = checks.head_for(model)
    inner = model.language_model
    before = CheapReadout(head, 8).logits(HIDDEN)
    inner.lm_head = LoRALinear.from_base(inner.lm_head, r=4, scale=20.0)
    inner.lm_head.lora_b = mx.random.normal(inner.lm_head.lora_b.shape)
    head.follow(model)
    after = CheapReadout(head, 8).logits(HIDDEN)
    CheapReadout(head, 8)
    assert copies == [VOCAB, VOCAB]
    assert mx.allclose(after, inner.lm_head(HIDDEN), rtol=0.1, atol=0.5).item()
    assert not mx.allclose(after, before, rtol=0.1, atol=0.5).item()


def test_copies_go_with_the_head() -> None:
    head = checks.head_for(Spec().build())
    cheap = CheapReadout(head, 4)
    gone = weakref.ref(cheap._frequent.rows[0])
    del cheap
    gc.collect()
    assert gone() is not None
    del head
    gc.collect()
    assert gone() is None


# --- which tokens are frequent --------------------------------------------------------


class Fast:
    """As a tokenizer of transformers: it has a backend, and special tokens."""

    eos_token_ids = {7}
    all_special_ids = [8, 10**6]

    def __init__(self, model: Any) -> None:
        self.backend_tokenizer = Tokenizer(model)


def test_the_order_of_merges_is_that_of_frequency() -> None:
    vocabulary = {"ab": 0, "a": 4, "b": 2, "c": 3, "abc": 1, "bc": 5}
    merges = [("b", "c"), ("a", "b"), ("ab", "c")]
    tokenizer = Fast(models.BPE(vocabulary, merges))
    assert list(by_frequency(tokenizer)) == [2, 3, 4, 5, 0, 1]
    assert readout._likely(tokenizer, 5, 9) == [0, 2, 3, 4, 5, 7, 8]


@pytest.mark.parametrize("tokenizer", [None, object(), Fast(models.WordLevel({}))])
def test_without_merges_ids_are_taken_in_order(tokenizer: Any) -> None:
    assert list(by_frequency(tokenizer)) == []
    found = set(readout._likely(tokenizer, 3, 96))
    assert {0, 1, 2} <= found <= {0, 1, 2, 7, 8}


# --- in a generation ------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "bits": {"draft_head_bits": 4},
    "shortlist": {"shortlist": 40},
    "both": {"draft_head_bits": 4, "shortlist": 40, "depth": "confidence"},
}


class Steered(MTPDrafter):
    """Some drafts are right, whatever the head says; a random head's are not."""

    def __init__(self, head: MTPHead, cheap: CheapReadout, truth: list[int]) -> None:
        self.script = Scripted(truth, checks.right_where("1101"))
        super().__init__(head, cheap)
        self.gives = self.gives - {"rewind"}

    def draft(self, token: mx.array, k: int, *wanted: Any) -> Any:
        super().draft(token, k, *wanted)
        return self.script.draft(token, k)

    def observe(self, tokens: mx.array, hidden: mx.array | None) -> None:
        super().observe(tokens, hidden)
        self.script.observe(tokens, None)


@by_spec
@pytest.mark.parametrize("how", ["greedy", "sampled"])
def test_tokens_and_caches_are_stock_s(spec: Spec, how: str) -> None:
    model, head = checks.model_of(spec), head_of(spec)
    both = {} if how == "greedy" else {"sampler": make_sampler(0.9, top_p=0.9)}
    theirs = oracle.stock(model, PROMPT, 12, seed=1, **both)
    drafter = Steered(head, CheapReadout(head, 4, 40), theirs.tokens)
    ours = checks.drafted(model, PROMPT, 12, drafter, seed=1, **both)
    assert checks.result_differences(ours, theirs) == []


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("temp", [0.0, 0.8])
def test_on_the_bundled_checkpoint(
    options: dict[str, Any], temp: float, plugin: None
) -> None:
    model, tokenizer = mlx_lm.load(str(TRAINED))
    how = {
        "sampler": make_sampler(temp),
        "logits_processors": make_logits_processors(repetition_penalty=1.05),
        "max_tokens": 30,
    }

    def run(**drafting: Any) -> list[int]:
        mx.random.seed(3)
        prompt = "class Node:\n    def __init__(self, "
        steps = mlx_lm.stream_generate(model, tokenizer, prompt, **how, **drafting)
        return [step.token for step in steps]

    stats = Tally()
    if "shortlist" in options:
        options = options | {"shortlist": 1000}
    assert run() == run(draft="mtp", draft_options=options, draft_stats=stats)
    assert stats.acceptance_rate > 0.3
    assert f"shortlist={options.get('shortlist')}" in stats.summary() or (
        "shortlist" not in options
    )


def test_the_registered_drafter_does_as_the_options_say() -> None:
    model = trunk(Spec())
    head = checks.head_for(model)
    mtp_head, heads.head_of = heads.head_of, lambda model, source: head
    try:
        for options in ({}, {"draft_head_bits": 4}, {"shortlist": 9}):
            made = mtp._build(DraftContext(model, None, DraftOptions(**options)))
            assert isinstance(made.readout, CheapReadout) == bool(options)
    finally:
        heads.head_of = mtp_head


def test_a_second_turn_starts_from_its_own_prompt() -> None:
    model, head = checks.model_of(Spec()), head_of(Spec())
    drafter = MTPDrafter(head, CheapReadout(head, shortlist=4))
    caches = make_prompt_cache(model)
    for prompt in ([60, 61], [62]):
        steps = draft_generate_step(
            mx.array(prompt), model, drafter, prompt_cache=caches, max_tokens=5
        )
        list(steps)
        listed = set(drafter.readout._copy.ids.tolist())
        assert listed == {0, 1, 2, 3, *prompt}


# --- what is refused ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_head_bits": 7}, "draft_head_bits is 7; MLX quantises to 2, 3, 4"),
        ({"draft_head_bits": 9}, "draft_head_bits is 9; give an integer"),
        ({"draft_head_bits": "4"}, "draft_head_bits is '4'; give an integer"),
        ({"shortlist": -1}, "shortlist is -1; give an integer of at least 0"),
    ],
)
def test_values_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        DraftOptions(**options)


@pytest.mark.parametrize("option", [{"draft_head_bits": 4}, {"shortlist": 10}])
def test_a_drafter_without_an_lm_head(option: dict[str, int]) -> None:
    ((name, value),) = option.items()
    with pytest.raises(InvalidOption, match=f"no readout, which .* {name}={value}"):
        check_gives(Scripted([]), DraftOptions(**option))


def test_an_lm_head_that_cannot_be_copied() -> None:
    head = checks.head_for(trunk(Spec(tied=False)))
    head._project = nn.GELU().__call__
    with pytest.raises(InvalidOption, match="lm_head is GELU, which cannot be copied"):
        CheapReadout(head, 4)
    head._project = nn.Linear(40, VOCAB).__call__
    with pytest.raises(InvalidOption, match="of 40 numbers cannot be quantised"):
        CheapReadout(head, 4)


def test_options_of_the_command_line() -> None:
    parsed = DraftOptions.parse(["draft_head_bits=4", "shortlist=16384"])
    assert parsed == {"draft_head_bits": 4, "shortlist": 16384}
    assert json.dumps(parsed) in ('{"draft_head_bits": 4, "shortlist": 16384}',)
