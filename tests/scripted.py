"""The kit's scripted drafters, and what asks a drafter."""

from __future__ import annotations

from mlx_lm.sample_utils import greedy_sampler

from mlx_lm_mtp.drafters.base import Drafter
from mlx_lm_mtp.history import History
from mlx_lm_mtp.noise import SharedNoise
from mlx_lm_mtp.options import DraftOptions
from mlx_lm_mtp.propose import Proposer
from mlx_lm_mtp.testing.scripted import KINDS, Branching, Scripted, right_where

__all__ = ["KINDS", "Branching", "Scripted", "right_where"]


def proposer(drafter: Drafter) -> Proposer:
    """What asks this drafter, for greedy decoding as usual."""
    noise = SharedNoise(drafter, True, greedy_sampler, (), History())
    return Proposer(drafter, DraftOptions(), noise)
