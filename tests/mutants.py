"""Planted bugs, each a context manager that replaces one name of the package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import mlx.core as mx
from mlx_lm.sample_utils import greedy_sampler

import mlx_lm_mtp
from mlx_lm_mtp import random_state, tree, verify
from mlx_lm_mtp.accept import AtOnce, OneByOne, log_probabilities
from mlx_lm_mtp.drafters.mtp import MTPDrafter
from mlx_lm_mtp.drafting import Drafting
from mlx_lm_mtp.generate import _Loop
from mlx_lm_mtp.state import capture, commit, paths, snapshot, verified
from mlx_lm_mtp.state.capture import LayerRecord

Mutant = Callable[[], AbstractContextManager[Any]]


def replaced(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Mutant:
    """A mutant that puts `wrap(original)` in the place of a name."""
    original = vars(owner)[name] if isinstance(owner, type) else getattr(owner, name)
    return lambda: patch.object(owner, name, wrap(original))


# --- caches: what commit and rollback leave -------------------------------------------

recurrent_state_not_rolled_back = replaced(
    LayerRecord, "state", lambda stock: lambda self, n: self.final
)
recurrent_state_one_token_short = replaced(
    LayerRecord, "state", lambda stock: lambda self, n: stock(self, max(n - 1, 0))
)
recurrent_state_rounded_to_bf16 = replaced(
    LayerRecord,
    "state",
    lambda stock: lambda self, n: stock(self, n).astype(mx.bfloat16).astype(mx.float32),
)
conv_window_not_rolled_back = replaced(
    LayerRecord, "window", lambda stock: lambda self, i, n: stock(self, i, self.width)
)
conv_window_one_token_short = replaced(
    LayerRecord,
    "window",
    lambda stock: lambda self, i, n: stock(self, i, max(n - 1, 0)),
)


def _keep_untrimmed(stock: Any) -> Any:
    def keep(caches: Sequence[Any], records: Any, kept: int, n: int) -> None:
        for cache, record in zip(commit.flat(caches), records, strict=True):
            if record is not None:
                capture.put(cache, record, n)

    return keep


kv_not_trimmed = replaced(commit, "keep", _keep_untrimmed)
one_input_too_many_kept = replaced(
    commit,
    "keep",
    lambda stock: (
        lambda caches, records, kept, n: stock(caches, records, kept, min(n + 1, kept))
    ),
)
one_input_too_few_kept = replaced(
    commit,
    "keep",
    lambda stock: (
        lambda caches, records, kept, n: stock(caches, records, kept, max(n - 1, 0))
    ),
)
stepped_to_the_snapshot_before = replaced(
    verified.Stepped, "_keep", lambda stock: lambda self, n: stock(self, max(n - 1, 0))
)


def _replay_one_short(stock: Any) -> Any:
    def keep(self: Any, n: int) -> None:
        replay, self._replay = self._replay, lambda n: n > 1 and replay(n - 1)
        stock(self, n)

    return keep


replayed_one_input_short = replaced(verified.Replayable, "_keep", _replay_one_short)


def _by_reference(stock: Any) -> Any:
    return lambda value: value if isinstance(value, mx.array) else stock(value)


snapshot_by_reference = replaced(snapshot, "_copy", _by_reference)
restored_by_reference = replaced(snapshot, "_revive", _by_reference)


def _first_row(stock: Any) -> Any:
    def commit_tree_row(caches: Any, verified: int, accepted: int, row: int) -> bool:
        return stock(caches, verified, accepted, 0)

    return commit_tree_row


tree_keeps_the_first_row = replaced(mlx_lm_mtp, "commit_tree_row", _first_row)
no_limit_of_the_width = replaced(
    verify, "width_limit", lambda stock: lambda *args, **kwargs: (None, "")
)

# --- the drafter's own cache ----------------------------------------------------------


def _begin_untrimmable(stock: Any) -> Any:
    def begin(self: MTPDrafter) -> None:
        stock(self)
        self.cache.trim = lambda n: n  # type: ignore[method-assign]

    return begin


def _observe_losing_last(stock: Any) -> Any:
    def observe(self: MTPDrafter, tokens: mx.array, hidden: mx.array) -> None:
        if tokens.shape[1] > 1:
            tokens = tokens[:, :-1]
            hidden = mx.concatenate([hidden[:, :-2], hidden[:, -1:]], axis=1)
        stock(self, tokens, hidden)

    return observe


def _rewind_one_short(stock: Any) -> Any:
    return lambda self, tokens: stock(self, max(tokens - 1, 0))


drafter_rewound_one_token_short = replaced(MTPDrafter, "rewind", _rewind_one_short)
drafter_not_rewound = replaced(MTPDrafter, "rewind", lambda _: lambda self, n: None)
drafter_keeps_rejected_entries = replaced(MTPDrafter, "begin", _begin_untrimmable)
drafter_loses_the_last_pair = replaced(MTPDrafter, "observe", _observe_losing_last)

# --- acceptance -----------------------------------------------------------------------


def _accepts_any(stock: Any) -> Any:
    return lambda self, i: i < self.drafts.shape[-1]


wrong_drafts_accepted = replaced(AtOnce, "accepts", _accepts_any)
wrong_drafts_accepted_one_by_one = replaced(OneByOne, "accepts", _accepts_any)
last_draft_never_accepted = replaced(
    AtOnce,
    "accepts",
    lambda stock: lambda self, i: i + 1 < self.drafts.shape[-1] and stock(self, i),
)


def _chosen_without_bonus(stock: Any) -> Any:
    def chosen(self: _Loop, judge: Any, i: int) -> Any:
        bonus = 0 < i == judge.drafts.shape[-1]
        return stock(self, judge, i - bonus)

    return chosen


bonus_token_dropped = replaced(_Loop, "_chosen", _chosen_without_bonus)


def _commit_all_accepted(stock: Any) -> Any:
    def commit_(self: _Loop, verified: Any, kept: int, row: int) -> None:
        stock(self, verified, verified.kept, row)

    return commit_


stop_keeps_all_that_was_accepted = replaced(_Loop, "_commit", _commit_all_accepted)
log_probabilities_of_the_round_start = replaced(
    AtOnce, "logprobs", lambda stock: lambda self, i: stock(self, 0)
)

# --- sampling -------------------------------------------------------------------------

random_state_not_put_back = replaced(
    AtOnce, "_leave", lambda stock: lambda self, i: None
)


def _sample_in_one_draw(stock: Any) -> Any:
    def follow(self: AtOnce, start: int) -> None:
        before = random_state.current()
        stock(self, start)
        random_state.put_back(before)
        self._chosen = self._sampler(log_probabilities(self._logits[0]))
        self._states = [before] + [random_state.current()] * len(self._rows)
        self._evaluate()

    return follow


all_positions_sampled_in_one_draw = replaced(AtOnce, "_follow", _sample_in_one_draw)


def _draw_anew(stock: Any) -> Any:
    def choose(self: AtOnce, logits: mx.array, chosen: list[mx.array]) -> mx.array:
        token = stock(self, logits, chosen)
        if len(chosen) < self.drafts.shape[1]:
            draft, anew = self.drafts[0, len(chosen)], self._sampler(logits)
            token = mx.where(token == draft, token, anew)
        return token

    return choose


rejected_positions_drawn_anew = replaced(AtOnce, "_choose", _draw_anew)


def _same_noise(stock: Any) -> Any:
    def choose(self: AtOnce, logits: mx.array, chosen: list[mx.array]) -> Any:
        random_state.put_back(self._states[0])
        return stock(self, logits, chosen)

    return choose


same_noise_at_every_position = replaced(AtOnce, "_choose", _same_noise)


def _choose_from_logits(stock: Any) -> Any:
    def init(self: AtOnce, logits: mx.array, drafts: mx.array, *more: Any) -> None:
        stock(self, logits, drafts, *more)
        if self._sampler is greedy_sampler:
            self._chosen = self._sampler(logits[0])

    return init


greedy_choice_from_logits = replaced(AtOnce, "__init__", _choose_from_logits)


def _judge_all_at_once(stock: Any) -> Any:
    """Every position is judged before any draft is known to be right. The histories
    are right all the same; only processors and samplers are called too often."""

    def judge(self: OneByOne, i: int) -> None:
        if i == 0:
            self.histories = []  # type: ignore[attr-defined]
            for j in range(self._logits.shape[1]):
                _judge_draft(self, j)
        self._history.tokens = self.histories[i]  # type: ignore[attr-defined]

    def _judge_draft(self: OneByOne, j: int) -> None:
        chosen = self._fed[j]
        if j > 0:
            self._fed[j] = self.drafts[0, j - 1 : j]
        stock(self, j)
        self._fed[j] = chosen
        self.histories.append(self._history.tokens)  # type: ignore[attr-defined]

    return judge


rejected_positions_judged_too = replaced(OneByOne, "judge", _judge_all_at_once)


def _history_of_pending(stock: Any) -> Any:
    def judge(self: OneByOne, i: int) -> None:
        before = self._history.tokens
        stock(self, i)
        if i > 0:
            self._history.tokens = before

    return judge


accepted_drafts_not_in_the_history = replaced(OneByOne, "judge", _history_of_pending)


def _without_chosen(stock: Any) -> Any:
    def choose(self: AtOnce, logits: mx.array, chosen: list[mx.array]) -> Any:
        return stock(self, logits, [])

    return choose


history_of_pending_at_once = replaced(AtOnce, "_choose", _without_chosen)


def _settle_without_history(stock: Any) -> Any:
    def settle(self: AtOnce, kept: int) -> None:
        with patch.object(self._history, "add", lambda *parts: None):
            stock(self, kept)

    return settle


history_not_grown_at_once = replaced(AtOnce, "settle", _settle_without_history)

# --- strategies -----------------------------------------------------------------------

appended_from_the_first_path = replaced(
    paths.StandIns,
    "appended",
    lambda stock: (
        lambda self, made: (
            pair := stock(self, made),
            pair and tuple(mx.broadcast_to(x[:1], x.shape) for x in pair),
        )[1]
    ),
)


def _put_first(stock: Any) -> Any:
    return lambda cache, record, n, one: stock(cache, record, n, slice(0, 1))


recurrent_state_of_the_first_path = replaced(paths, "_put", _put_first)


def _put_whole(stock: Any) -> Any:
    return lambda cache, record, n, one: stock(cache, record, record.width, one)


recurrent_state_of_the_whole_path = replaced(paths, "_put", _put_whole)


def _follow_first(stock: Any) -> Any:
    def follow(self: AtOnce, start: int) -> None:
        self._logits = mx.broadcast_to(self._logits[:1], self._logits.shape)
        stock(self, start)

    return follow


chosen_from_the_first_path = replaced(AtOnce, "_follow", _follow_first)


def _row_of_first(stock: Any) -> Any:
    return lambda self, i: 0


first_path_kept_one_by_one = replaced(OneByOne, "row", _row_of_first)


def _any_branch(stock: Any) -> Any:
    def rescue(proposal: Any, position: int, token: int) -> Any:
        found = [b for b in proposal.branches if b.position == position]
        return found[0] if found else None

    return rescue


rescued_by_any_branch = replaced(tree, "rescue", _any_branch)


def _observe_last_leg(stock: Any) -> Any:
    def observe(self: Drafting) -> None:
        self._unobserved = self._unobserved[-1:]
        stock(self)

    return observe


drafter_sees_the_rescue_alone = replaced(Drafting, "observe", _observe_last_leg)
