"""Heads of every family: what they compute, and that they change no token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import families
import mlx.core as mx
import mlx_lm.utils
import numpy as np
import pytest
import references
from checks import PROMPT, generation_differences, right_where, steered
from families import FAMILIES, trunk
from oracle import same_bits
from scripted import Branching

from mlx_lm_mtp import anatomy, load_head
from mlx_lm_mtp.drafters.base import hidden_for
from mlx_lm_mtp.drafters.mtp import MTPDrafter
from mlx_lm_mtp.errors import HeadMismatch
from mlx_lm_mtp.heads import head_of
from mlx_lm_mtp.heads.families import MODELS, family_of
from mlx_lm_mtp.heads.head import MTPHead
from mlx_lm_mtp.options import DraftOptions

LENGTH = 12  # longer than the window that one of them has
NEAR = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


def loaded(path: Path, family: str) -> MTPHead:
    path.mkdir(exist_ok=True)
    return load_head(trunk(family), families.write_wild(path, family))


def pairs(size: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """`(T,)` tokens and `(T, H)` hidden states."""
    random = np.random.default_rng(1)
    tokens = random.integers(0, 96, LENGTH)
    return tokens, random.standard_normal((LENGTH, size)).astype(np.float32)


def reference(
    family: str, tokens: np.ndarray, hidden: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The published formula, in NumPy."""
    model, config = trunk(family), families.config_of(family)
    embedding = np.array(anatomy.embedding(model).weight)
    lm_head = anatomy.lm_head(model)
    return references.head_forward(
        family,
        config,
        families.wild.head_tensors(family, config, 0)
        | {"model.norm.weight": np.array(anatomy.final_norm(model).weight)},
        embedding,
        embedding if lm_head is None else np.array(lm_head.weight),
        tokens,
        hidden,
    )


# --- what a head computes ---------------------------------------------------------


def test_every_family_that_is_known_is_tested() -> None:
    assert set(FAMILIES) == set(MODELS)


def test_the_head_computes_the_published_formula(tmp_path: Path, family: str) -> None:
    head, (tokens, hidden) = loaded(tmp_path, family), pairs()
    ours = head(mx.array(tokens)[None], mx.array(hidden)[None], head.new_cache())
    recycled, logits = reference(family, tokens, hidden)
    np.testing.assert_allclose(np.array(ours[0]), recycled, **NEAR)
    np.testing.assert_allclose(np.array(head.logits(ours)[0]), logits, **NEAR)


def test_pair_by_pair_is_the_same(tmp_path: Path, family: str) -> None:
    """Cached positions, the window of a windowed layer, and latent attention."""
    head, (tokens, hidden) = loaded(tmp_path, family), pairs()
    cache = head.new_cache()
    rows = [
        head(mx.array([[int(t)]]), mx.array(h)[None, None], cache)
        for t, h in zip(tokens, hidden, strict=True)
    ]
    recycled, _ = reference(family, tokens, hidden)
    np.testing.assert_allclose(np.array(mx.concatenate(rows, 1)[0]), recycled, **NEAR)


def test_a_chain_of_drafts_is_the_formula_repeated(tmp_path: Path, family: str) -> None:
    """Each depth is fed the token before and what stands in for the hidden state."""
    head, (tokens, hidden) = loaded(tmp_path, family), pairs()
    drafter = MTPDrafter(head)
    # The drafter pairs each hidden state with the token after it.
    drafter.prefill(mx.array([[0, *tokens[:-1].tolist()]]), mx.array(hidden)[None])
    proposal = drafter.draft(mx.array([[int(tokens[-1])]], dtype=mx.uint32), 3)
    drafts = []
    for _ in range(3):
        recycled, logits = reference(family, tokens, hidden)
        drafts.append(int(logits[-1].argmax()))
        tokens = np.append(tokens, drafts[-1])
        hidden = np.concatenate([hidden, recycled[-1:]])
    assert proposal.tokens.tolist() == [drafts]


def test_a_windowed_layer_looks_back_on_its_window(tmp_path: Path) -> None:
    """EXAONE's head may have one; this configuration says so."""
    path = families.write_wild(tmp_path, "exaone_moe")
    text = (path / "config.json").read_text()
    sliding = text.replace('["full_attention"]', '["sliding_attention"]')
    sliding = sliding.replace(
        '"mtp_sliding_windows": [0]', '"mtp_sliding_windows": [8]'
    )
    assert sliding != text
    (path / "config.json").write_text(sliding)
    head, (tokens, hidden) = load_head(trunk("exaone_moe"), path), pairs()
    whole = head(mx.array(tokens)[None], mx.array(hidden)[None], head.new_cache())
    window, cache = 8, head.new_cache()
    # What is further back than the window must not matter.
    tokens[: LENGTH - window] = 0
    ours = head(mx.array(tokens)[None], mx.array(hidden)[None], cache)
    np.testing.assert_allclose(np.array(ours[0, -1]), np.array(whole[0, -1]), **NEAR)
    assert not np.allclose(np.array(ours[0, -2]), np.array(whole[0, -2]), **NEAR)


def test_hidden_states_are_those_that_the_family_wants(
    tmp_path: Path, family: str
) -> None:
    drafter = MTPDrafter(loaded(tmp_path, family))
    wanted = "pre_norm" if family in ("mimo", "ernie4_5_moe") else "post_norm"
    assert hidden_for(drafter, "auto") == wanted
    assert hidden_for(drafter, "pre_norm") == "pre_norm"
    assert references.FACTS[family].hidden == wanted


def test_facts_are_those_of_the_family(family: str) -> None:
    facts, ours = references.FACTS[family], family_of(trunk(family))
    assert ours.hidden_first is (facts.order == ("hidden", "embedding"))
    assert ours.recycles == facts.recycles


def test_a_nemotron_head_of_other_layers_is_refused(tmp_path: Path) -> None:
    tensors = families.wild_head("nemotron_h")
    mixer = "mtp.layers.0.mixer."
    tensors = {
        k.replace(f"{mixer}q_proj", f"{mixer}in_proj"): v for k, v in tensors.items()
    }
    families.save(tmp_path / "model.safetensors", tensors, {"format": "pt"})
    with pytest.raises(HeadMismatch, match="kinds 'ME'"):
        load_head(trunk("nemotron_h"), tmp_path)


# --- drafting with it -------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["1", "0", "110", "10"])
def test_drafts_change_nothing(tmp_path: Path, family: str, pattern: str) -> None:
    """Tokens, log-probabilities and cache states are stock's, bit for bit."""
    model, head = trunk(family), loaded(tmp_path, family)

    def drafter(truth: list[int]) -> Any:
        assert len(set(truth)) > 1
        return steered(head, Branching(truth, right_where(pattern)))

    for k, prompt in ((3, PROMPT), (5, PROMPT[:1])):
        options = DraftOptions(num_draft_tokens=k)
        found = generation_differences(model, prompt, 20, drafter, options=options)
        assert found == []


def test_a_stop_leaves_what_stock_leaves(tmp_path: Path, family: str) -> None:
    model, head = trunk(family), loaded(tmp_path, family)
    for stop in (1, 2, 4, 7):
        found = generation_differences(
            model,
            PROMPT,
            20,
            lambda truth: steered(head, Branching(truth)),
            stop=stop,
        )
        assert found == []


@pytest.mark.parametrize("option", ["rescue", "paths", "depth", "head_bits", "temp"])
def test_every_strategy_drafts_with_it(
    tmp_path: Path, family: str, option: str
) -> None:
    from mlx_lm.sample_utils import make_sampler

    from mlx_lm_mtp.heads.readout import CheapReadout

    options: dict[str, Any] = {
        "rescue": {"rescue": 2},
        "paths": {"paths": 2},
        "depth": {"depth": "confidence", "tau": 0.02},
    }
    model, head = trunk(family), loaded(tmp_path, family)
    readout = CheapReadout(head, 8) if option == "head_bits" else None
    sampler = (lambda: make_sampler(0.8, top_p=0.9)) if option == "temp" else None
    found = generation_differences(
        model,
        PROMPT,
        16,
        lambda truth: MTPDrafter(head, readout),
        options=DraftOptions(**options.get(option, {})),
        sampler=sampler,
    )
    assert found == []


def test_what_a_head_has_seen_is_carried(tmp_path: Path, family: str) -> None:
    """Its cache may be of any shape: keys and values of latent attention differ."""
    drafter = MTPDrafter(loaded(tmp_path, family))
    tokens, hidden = pairs()
    drafter.prefill(mx.array(tokens)[None], mx.array(hidden)[None])
    caches = drafter.suspend()
    again = MTPDrafter(drafter.head)
    assert again.resume(caches) == LENGTH
    caches[0].keys = caches[0].keys[:, :, :, :-1]
    assert MTPDrafter(drafter.head).resume(caches) == 0


# --- from disk, as users have it --------------------------------------------------


def on_disk(path: Path, family: str, beside: str) -> Path:
    """A converted trunk, and the original head in a file beside it."""
    tensors = families.parameters(trunk(family))
    families.save(path / "model-1.safetensors", tensors, {"format": "mlx"})
    families.save(path / beside, families.wild_head(family), {"format": "pt"})
    (path / "config.json").write_text(json.dumps(families.config_of(family)))
    return path


@pytest.mark.usefixtures("plugin")
def test_a_model_from_disk_finds_its_head(tmp_path: Path, family: str) -> None:
    """Stock loads the trunk, sees nothing of the sidecar, and remembers the place."""
    path = on_disk(tmp_path, family, "mtp.safetensors")
    model, _ = mlx_lm.utils.load_model(path)
    assert (
        differing(families.parameters(model), families.parameters(trunk(family))) == []
    )
    ours = families.parameters(head_of(model))
    assert differing(ours, families.parameters(loaded(tmp_path / "raw", family))) == []


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize(
    "family", ["glm4_moe", "glm4_moe_lite", "mimo", "ernie4_5_moe", "exaone_moe"]
)
def test_a_head_in_the_shards_is_left_to_us(tmp_path: Path, family: str) -> None:
    """Where stock drops the head's tensors when it loads the trunk."""
    model, _ = mlx_lm.utils.load_model(on_disk(tmp_path, family, "model-2.safetensors"))
    ours = families.parameters(head_of(model))
    assert differing(ours, families.parameters(loaded(tmp_path / "raw", family))) == []


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_a_configuration_of_the_text_alone(tmp_path: Path, family: str) -> None:
    """Text-only conversions have no `text_config`; all is at the top."""
    path = on_disk(tmp_path, family, "mtp.safetensors")
    config = families.config_of(family)
    flat = {**config.pop("text_config"), "model_type": family}
    (path / "config.json").write_text(json.dumps(flat))
    model, _ = mlx_lm.utils.load_model(path)
    ours = families.parameters(head_of(model))
    assert differing(ours, families.parameters(loaded(tmp_path / "raw", family))) == []


def differing(ours: dict[str, mx.array], theirs: dict[str, mx.array]) -> list[str]:
    names = ours.keys() | theirs.keys()
    return sorted(
        n
        for n in names
        if n not in ours or n not in theirs or not same_bits(ours[n], theirs[n])
    )
