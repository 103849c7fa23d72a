"""A head of which nothing is accepted is told once, and changes no token."""

from __future__ import annotations

import warnings
from pathlib import Path

import checks
import families
import mlx.core as mx
import pytest
from checks import PROMPT, THREE, drafted, model_of
from families import SIDECARS, save, trunk
from tiny import Spec

from mlx_lm_mtp import load_head
from mlx_lm_mtp.drafters.mtp import MTPDrafter
from mlx_lm_mtp.futile import FutileWatch
from mlx_lm_mtp.rounds import Round


class Suspected:
    suspicion = "it is not right."


def warned(rounds: list[tuple[int, int]], drafter: object = Suspected) -> list[str]:
    watch = FutileWatch(drafter)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for drafted, accepted in rounds:
            watch.count(Round(drafted=drafted, accepted=accepted))
    return [str(w.message) for w in caught]


def test_after_64_drafts_without_one_accepted_once() -> None:
    assert warned([(3, 0)] * 21) == []
    (said,) = warned([(3, 0)] * 22)
    assert said == (
        "mlx-lm-mtp: none of the first 66 drafted tokens was accepted; it is not right."
    )
    assert warned([(3, 0)] * 200) == [said]


def test_one_accepted_is_enough() -> None:
    assert warned([(3, 0)] * 20 + [(3, 1)] + [(3, 0)] * 100) == []


def test_a_drafter_without_a_suspicion_may_be_wrong() -> None:
    assert warned([(3, 0)] * 100, object()) == []


def test_a_generation_says_what_is_probably_wrong(tmp_path: Path) -> None:
    """A head of other weights than the model's: nothing of it can be right."""
    model = trunk("qwen3_5")
    head = load_head(model, families.write_wild(tmp_path, "qwen3_5"))
    wrong = {f"mtp.{k}": mx.zeros_like(v) for k, v in families.parameters(head).items()}
    file, _ = SIDECARS["root"]
    metadata = {"format": "mlx", "mtp_norms": "shifted"}
    save(tmp_path / "sidecar" / file, wrong, metadata)
    drafter = MTPDrafter(load_head(model, tmp_path / "sidecar"))
    stock = checks.oracle.stock(model, PROMPT, 60).tokens
    assert 0 not in stock  # the zeros' first choice
    with pytest.warns(RuntimeWarning, match="none of the first") as caught:
        made = drafted(model, PROMPT, 60, drafter, options=THREE)
    assert made.tokens == stock
    (message,) = (str(w.message) for w in caught)
    for part in (
        "the MTP head, in mtp.safetensors, whose norms are as stock multiplies them",
        "declared in the file: shifted",
        "another model's",
        "`mlx_lm_mtp doctor`",
    ):
        assert part in message


def test_a_good_head_says_nothing() -> None:
    model = model_of(Spec())
    truth = checks.oracle.stock(model, PROMPT, 60).tokens
    steered = checks.steered(checks.head_for(model), checks.Branching(truth))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drafted(model, PROMPT, 60, steered, options=THREE)
