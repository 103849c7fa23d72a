"""The distribution of what is sampled, beside the target's exact one.

That a seed gives stock's tokens is shown elsewhere. Here nothing of stock's is trusted:
a target with six tokens, whose next token depends on the last one alone, is sampled for
50,000 tokens in rounds of up to four, and counts are compared with probabilities that
NumPy computes. A sampler with the classic fault must be found out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mutants
import numpy as np
import pytest
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from mlx_lm_mtp import Choices, DraftOptions, Proposal, draft_generate_step, pure
from mlx_lm_mtp.stats import Tally

V = 6
DRAWS = 50_000
FEWER = 20_000  # where the sampler is not the one that most people use
BIAS = {1: 0.7, 4: -0.5}
Pairs = dict[int, Counter[tuple[int, ...]]]


class Chain(nn.Module):
    """A target whose next token depends on the last one alone; it has no cache."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.layers: list[nn.Module] = []
        self.table = mx.random.normal((V, V), key=mx.random.key(seed)) * 1.5

    def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
        return self.table[tokens]


class Like:
    """Drafts from a table that is like the target's, but not the same."""

    name = "like"
    needs_hidden = False
    gives = frozenset({"logprobs", "branches"})

    def __init__(self, target: Chain) -> None:
        noise = mx.random.normal((V, V), key=mx.random.key(77))
        self.table = target.table + 0.7 * noise

    def begin(self) -> None:
        pass

    def prefill(self, tokens: mx.array, hidden: mx.array | None) -> None:
        pass

    observe = prefill

    def draft(self, token: mx.array, k: int, wanted: Any = None) -> Proposal:
        choose = (wanted and wanted.choose) or self._likeliest
        path = mx.zeros((1, 0), dtype=mx.uint32)
        for _ in range(k):
            chosen = choose(self.table[token], path).tokens[..., 0]
            token = chosen.astype(mx.uint32)
            path = mx.concatenate([path, token], axis=1)
        return Proposal(path)

    @staticmethod
    def _likeliest(logits: mx.array, drafted: mx.array, n: int = 1) -> Choices:
        return Choices.likeliest(logits, n)


@pure
def gumbel(logprobs: mx.array) -> mx.array:
    """A sampler of the user's: the largest after Gumbel noise was added."""
    return mx.argmax(logprobs + mx.random.gumbel(logprobs.shape), axis=-1)


# --- what is expected -----------------------------------------------------------------


def softmax(table: np.ndarray) -> np.ndarray:
    weights = np.exp(table - table.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def plain(table: np.ndarray) -> np.ndarray:
    return softmax(table)


def cooler_nucleus(table: np.ndarray) -> np.ndarray:
    """Top-p of 0.9, then temperature 0.8; the bias comes before both."""
    table = table + np.array([BIAS.get(token, 0.0) for token in range(V)])
    kept = np.full_like(table, -np.inf)
    for row, probabilities in enumerate(softmax(table)):
        order = np.argsort(-probabilities)
        before = np.cumsum(probabilities[order]) - probabilities[order]
        chosen = order[before < 0.9]
        kept[row, chosen] = table[row, chosen]
    return softmax(kept / 0.8)


WAYS: dict[str, tuple[dict[str, Any], Callable[[np.ndarray], np.ndarray]]] = {
    "shared": ({"sampler": make_sampler(1.0)}, plain),
    "gumbel": ({"sampler": gumbel}, plain),
    "filtered": (
        {
            "sampler": make_sampler(0.8, top_p=0.9),
            "logits_processors": make_logits_processors(BIAS),
        },
        cooler_nucleus,
    ),
}

# --- what is drawn --------------------------------------------------------------------


def sample(way: str, draws: int = DRAWS) -> tuple[Chain, list[list[int]], Tally]:
    """The target, rounds of tokens, and the statistics."""
    target, rounds, stats = Chain(3), [], Tally()
    mx.random.seed(20)
    for _ in draft_generate_step(
        mx.array([0]),
        target,
        Like(target),
        options=DraftOptions(num_draft_tokens=3),
        max_tokens=draws,
        on_tokens=rounds.append,
        stats=stats,
        **WAYS[way][0],
    ):
        pass
    return target, rounds, stats


def surprise(counts: Counter[Any], expected: dict[Any, float]) -> float:
    """Pearson's chi-square as a standard normal deviate (Wilson and Hilferty 1931).

    Cells that are expected less than five times are put together.
    """
    total = sum(counts.values())
    assert all(expected[cell] > 0 for cell in counts), "an impossible token was drawn"
    rare = [cell for cell, p in expected.items() if total * p < 5]
    cells = [
        (counts[cell], total * p) for cell, p in expected.items() if cell not in rare
    ]
    few = total * sum(expected[cell] for cell in rare)
    if few >= 5:
        cells.append((sum(counts[cell] for cell in rare), few))
    chi_square = sum((seen - due) ** 2 / due for seen, due in cells)
    freedom = len(cells) - 1
    spread = 2 / (9 * freedom)
    return float(((chi_square / freedom) ** (1 / 3) - 1 + spread) / spread**0.5)


def surprises(way: str, draws: int = DRAWS) -> tuple[float, float, Tally]:
    """The largest deviate of single tokens, and of the two that begin a round.

    Both given the token before, so that rounds of every kind are looked at.
    """
    target, rounds, stats = sample(way, draws)
    p = WAYS[way][1](np.array(target.table, dtype=np.float64))
    tokens = [token for drawn in rounds for token in drawn]
    single: Pairs = {a: Counter() for a in range(V)}
    for before, token in pairwise(tokens):
        single[before][(token,)] += 1
    joint: Pairs = {a: Counter() for a in range(V)}
    start = 0
    for drawn in rounds[:-2]:
        before, *two = tokens[start : start + 3]
        joint[before][tuple(two)] += 1
        start += len(drawn)
    alone = {a: {(b,): p[a, b] for b in range(V)} for a in range(V)}
    both = {
        a: {(b, c): p[a, b] * p[b, c] for b in range(V) for c in range(V)}
        for a in range(V)
    }
    return (
        max(surprise(single[a], alone[a]) for a in range(V) if single[a]),
        max(surprise(joint[a], both[a]) for a in range(V) if joint[a]),
        stats,
    )


@pytest.mark.parametrize("way", WAYS)
def test_what_is_sampled_follows_the_target(way: str) -> None:
    draws = DRAWS if way == "shared" else FEWER
    single, joint, stats = surprises(way, draws)
    assert stats.tokens == draws and stats.rounds < 0.75 * draws
    assert single < 4 and joint < 4  # 4: once in 30,000 times


def test_a_sampler_that_draws_rejected_positions_anew_is_found_out() -> None:
    """Each token is a sample of the target's; only which of them count is wrong."""
    with mutants.rejected_positions_drawn_anew():
        single, joint, _ = surprises("shared", DRAWS // 5)
    assert single > 8 and joint > 8


def test_noise_that_is_used_twice_is_found_out() -> None:
    with mutants.same_noise_at_every_position():
        _, joint, _ = surprises("shared", DRAWS // 5)
    assert joint > 8
