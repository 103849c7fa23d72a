"""The drafters that come with the package, through the kit that is for everybody's."""

from __future__ import annotations

from typing import Any

import checks
import pytest
import tiny

from mlx_lm_mtp.drafters.base import DraftContext, Drafter
from mlx_lm_mtp.drafters.chain import ChainDrafter
from mlx_lm_mtp.drafters.draft_model import DraftModelDrafter
from mlx_lm_mtp.drafters.mtp import MTPDrafter
from mlx_lm_mtp.drafters.ngram import NGramDrafter, NGramOptions
from mlx_lm_mtp.testing import TinyModel, check_drafter, tiny_models

ONE = NGramOptions(shortest=1)
# Two models are enough where a drafter has little to do with the target's caches.
FEW = [m for m in tiny_models() if m.name in ("gated-delta", "cycle")]


def drafts(family: str) -> DraftModelDrafter:
    return DraftModelDrafter(checks.model_of(tiny.Spec(family, seed=1)))


def chained(context: DraftContext) -> Drafter:
    return ChainDrafter([(drafts("qwen3_5"), 2), (NGramDrafter(ONE), None)])


@pytest.mark.parametrize(
    ("factory", "how"),
    [
        ("ngram", {"options": {"ngram.shortest": 1}}),
        (lambda context: drafts("qwen3_5"), {"models": FEW}),
        (chained, {"models": FEW, "without": ["carried"]}),
    ],
    ids=["ngram", "draft-model", "chain"],
)
def test_contract(factory: Any, how: dict[str, Any]) -> None:
    report = check_drafter(factory, **how)
    assert report.drafted > 0


def test_the_contract_of_the_head() -> None:
    def factory(context: DraftContext) -> Drafter:
        return MTPDrafter(checks.head_for(context.model))

    models = [TinyModel("with a head", tiny.Spec("qwen3_5").build)]
    check_drafter(factory, models=models, without=["readout"])
