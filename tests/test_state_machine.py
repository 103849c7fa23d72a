"""Caches under any sequence of operations, beside a plain list of tokens.

The list says which tokens the caches ought to hold; stock, fed that list token by
token into fresh caches, says what they then look like.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from checks import feed, model_of, stock_after
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from mlx_lm.models.cache import (
    ChunkedKVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from oracle import differences
from tiny import VOCAB, Spec

import mlx_lm_mtp
from mlx_lm_mtp.profile import Stopwatch
from mlx_lm_mtp.state.forms import BATCHED
from mlx_lm_mtp.state.verified import Verified
from mlx_lm_mtp.stats import Tally
from mlx_lm_mtp.target import Target
from mlx_lm_mtp.verify import Verifier

_LONGEST = 48  # tokens; a machine that has fed more only goes back
_WIDEST = 7
_OFF = Stopwatch()


def _quantized(model: Any) -> list[Any]:
    return [QuantizedKVCache(group_size=32, bits=8) for _ in model.layers]


def _rotating(model: Any) -> list[Any]:
    return [RotatingKVCache(max_size=2 * _LONGEST, keep=4) for _ in model.layers]


def _chunked(model: Any) -> list[Any]:
    return [ChunkedKVCache(chunk_size=2 * _LONGEST) for _ in model.layers]


SETUPS: list[tuple[Spec, Callable[[Any], list[Any]]]] = [
    (Spec("qwen3_5"), make_prompt_cache),
    (Spec("qwen3_5", weights="bf16"), make_prompt_cache),
    (Spec("qwen3_5", experts=True, weights="4bit"), make_prompt_cache),
    (Spec("qwen3_next"), make_prompt_cache),
    (Spec("kimi_linear", weights="bf16"), make_prompt_cache),
    (Spec("olmo_hybrid"), make_prompt_cache),
    (Spec("mamba2"), make_prompt_cache),
    (Spec("falcon_h1", weights="bf16"), make_prompt_cache),
    (Spec("qwen3"), _quantized),
    (Spec("qwen3"), _rotating),
    (Spec("qwen3", weights="bf16"), _chunked),
]
STATE_SPACE = ("mamba2", "falcon_h1")

token = st.integers(0, VOCAB - 1)
some_tokens = st.lists(token, min_size=1, max_size=_WIDEST)
ways = st.sampled_from(["batch", "step"])
share = st.floats(0, 1)  # of a length that is known only when the rule runs

some_paths = st.integers(1, _WIDEST - 2).flatmap(
    lambda n: st.lists(st.lists(token, min_size=n, max_size=n), min_size=1, max_size=3)
)


def _part(of: int, share: float) -> int:
    """A whole number in 0..of."""
    return min(int(share * (of + 1)), of)


class Caches(RuleBasedStateMachine):
    """Prompt caches, and the list of tokens that they ought to hold."""

    @initialize(setup=st.sampled_from(SETUPS), prompt=some_tokens)
    def begin(self, setup: Any, prompt: list[int]) -> None:
        self.spec, self.make = setup
        self.model = model_of(self.spec)
        self.caches = self.make(self.model)
        self.tokens: list[int] = []
        self.snapshots: list[tuple[Any, list[int]]] = []
        self.round: tuple[Verified, int] | None = None
        self._prefill(prompt)

    # --- rules ------------------------------------------------------------------

    @precondition(lambda self: self._room())
    @rule(tokens=some_tokens)
    def prefill(self, tokens: list[int]) -> None:
        self._prefill(tokens)

    @precondition(lambda self: self._room())
    @rule(token=token)
    def decode_one(self, token: int) -> None:
        self._feed([token])

    @precondition(lambda self: self._room())
    @rule(tokens=some_tokens, accepted=share)
    def verify_and_commit(self, tokens: list[int], accepted: float) -> None:
        n = _part(len(tokens), accepted)
        mlx_lm_mtp.begin_speculative_checkpoints(self.caches)
        self._feed(tokens)
        assert mlx_lm_mtp.commit_verified_prefix(self.caches, len(tokens), n)
        self._cut(len(tokens) - n)

    @precondition(lambda self: self._room())
    @rule(tokens=some_tokens, accepted=share, way=ways)
    def play_a_round(self, tokens: list[int], accepted: float, way: str) -> None:
        """With all that verify can do: a record, and snapshots input by input."""
        self._round(tokens, accepted, way=way, committable=True)

    @precondition(lambda self: self._room() and self._same_in_one_piece())
    @rule(tokens=some_tokens.filter(lambda t: len(t) > 1), accepted=share)
    def play_a_round_with_replay(self, tokens: list[int], accepted: float) -> None:
        """As with caches that cannot be committed: what is kept is fed once more."""
        self._round(tokens, accepted, way="batch", committable=False)

    @precondition(lambda self: self.round is not None)
    @rule(kept=share)
    def stop_in_the_middle_of_the_round(self, kept: float) -> None:
        """A second commit of the same round, to fewer inputs."""
        self._commit(*self.round, kept)

    @precondition(lambda self: self._room())
    @rule(paths=some_paths, row=share, accepted=share)
    def verify_a_tree(
        self, paths: list[list[int]], row: float, accepted: float
    ) -> None:
        best, width = _part(len(paths) - 1, row), len(paths[0])
        n = _part(width, accepted)
        mlx_lm_mtp.tile_caches(self.caches, len(paths))
        mlx_lm_mtp.begin_speculative_checkpoints(self.caches)
        Target(self.model)(mx.array(paths), self.caches, form=BATCHED)
        assert mlx_lm_mtp.commit_tree_row(self.caches, width, n, best)
        self.tokens += paths[best][:n]
        self.round = None

    @precondition(lambda self: self._room())
    @rule(paths=some_paths.filter(lambda p: len(p) > 1), row=share, accepted=share)
    def verify_paths_side_by_side(
        self, paths: list[list[int]], row: float, accepted: float
    ) -> None:
        verifier = Verifier(Target(self.model), self.caches, "batch", Tally(), _OFF)
        _, verified = verifier(mx.array(paths))
        best, n = _part(len(paths) - 1, row), _part(len(paths[0]), accepted)
        verified.commit(n, best)
        self.tokens += paths[best][:n]
        self.round = None

    @rule()
    def snapshot(self) -> None:
        self.snapshots.append((mlx_lm_mtp.snapshot(self.caches), list(self.tokens)))

    @precondition(lambda self: self.snapshots)
    @rule(which=share)
    def restore(self, which: float) -> None:
        saved, tokens = self.snapshots[_part(len(self.snapshots) - 1, which)]
        mlx_lm_mtp.restore(self.caches, saved)
        self.tokens = list(tokens)
        self.round = None

    # --- the oracle ---------------------------------------------------------------

    @invariant()
    def the_caches_are_those_of_stock(self) -> None:
        mx.eval([cache.state for cache in self.caches])
        theirs = stock_after(self.spec, tuple(self.tokens), self.make)
        assert differences(self.caches, theirs) == []

    # --- shared -------------------------------------------------------------------

    def _same_in_one_piece(self) -> bool:
        """State-space layers compute several tokens in another way than one."""
        return self.spec.family not in STATE_SPACE

    def _room(self) -> bool:
        return len(self.tokens) + _WIDEST <= _LONGEST

    def _prefill(self, tokens: list[int]) -> None:
        one_by_one = [[token] for token in tokens]
        for piece in [tokens] if self._same_in_one_piece() else one_by_one:
            self._feed(piece)

    def _feed(self, tokens: Sequence[int]) -> None:
        feed(self.model, tokens, self.caches)
        self.tokens += tokens
        self.round = None

    def _cut(self, n: int) -> None:
        del self.tokens[len(self.tokens) - n :]

    def _round(
        self, tokens: list[int], accepted: float, *, way: str, committable: bool
    ) -> None:
        verifier = Verifier(Target(self.model), self.caches, way, Tally(), Stopwatch())
        verifier._committable = committable
        _, verified = verifier(mx.array([tokens]))
        self.tokens += tokens
        self._commit(verified, len(tokens), accepted)

    def _commit(self, verified: Verified, of: int, kept: float) -> None:
        n = _part(of, kept)
        verified.commit(n)
        self._cut(of - n)
        self.round = verified, n


TestCaches = Caches.TestCase
TestCaches.settings = settings(
    max_examples=3 * settings().max_examples, stateful_step_count=20
)
