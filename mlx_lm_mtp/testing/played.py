"""Checks of a drafter without the loop: it is shown what the check decides.

What is kept of a round are the drafter's own drafts, as many as the check says: so a
drafter that draws no right conclusion from its own being right is found, although on
random models it may never be.
"""

from __future__ import annotations

import copy
import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, load_prompt_cache, save_prompt_cache

from ..drafters.base import hidden_for
from ..stats import Tally
from ..target import Target
from . import oracle
from .table import Check
from .trial import Trial
from .wrapped import Watched

_K = 3
_KEPT = (0, 1, 3, 0, 2, 3, 3, 1)  # drafts of each round, if it proposes so many
_SECOND = (13, 41, 14)  # the prompt of a second turn


class Play:
    """A target that says what the check decides, and its hidden states.

    Args:
        trial: The model whose hidden states they are.
        drafter: What is shown them.

    Attributes:
        tokens: What the drafter was shown.
        pending: The token that comes next.
    """

    def __init__(self, trial: Trial, drafter: Watched) -> None:
        self.drafter = drafter
        self.vocabulary = trial.vocabulary
        self._new_caches = lambda: trial.tiny.caches(trial.model)
        self._caches = self._new_caches()
        hidden = hidden_for(drafter, trial.options().hidden)
        self._target = Target(trial.model, hidden)
        self._next = itertools.cycle(trial.prompt)
        self.tokens: list[int] = []
        self.pending = 0

    def _fed(self, tokens: Sequence[int]) -> tuple[mx.array, mx.array | None]:
        self.tokens += tokens
        array = mx.array([list(tokens)], dtype=mx.uint32)
        hidden = self._target(array, self._caches).hidden
        mx.eval([cache.state for cache in self._caches])
        return array, hidden

    def prefill(self, tokens: Sequence[int], chunk: int = 2048) -> None:
        """Show a prompt, in chunks; the first token behind it is the next one's."""
        for i in range(0, len(tokens), chunk):
            self.drafter.prefill(*self._fed(tokens[i : i + chunk]))
        self.pending = (tokens[-1] + 1) % self.vocabulary

    def observe(self, tokens: Sequence[int]) -> None:
        """Show what a round has kept."""
        self.drafter.observe(*self._fed(tokens))

    def draft(self, k: int = _K) -> list[int]:
        """What it proposes behind the pending token."""
        token = mx.array([[self.pending]], dtype=mx.uint32)
        return self.drafter.draft(token, k).tokens[0, :k].tolist()

    def round(self, kept: int) -> list[int]:
        """Draft, and keep so many drafts; the next token is none that it proposed.

        Returns what was kept, the pending token first.
        """
        drafts = self.draft()
        kept = min(kept, len(drafts))
        tokens = [self.pending, *drafts[:kept]]
        self.observe(tokens)
        # One of the prompt, so that what was seen before comes again.
        wrong = drafts[kept] if kept < len(drafts) else tokens[-1]
        self.pending = next(token for token in self._next if token != wrong)
        return tokens

    def rewind(self, shown: list[int], back: int) -> None:
        """Have the last of the shown tokens taken back, and go on with the first."""
        self.draft()
        self.drafter.rewind(back)
        if back:
            self.pending = shown[-back]
            self._forget(back)

    def _forget(self, n: int) -> None:
        """The target has not said the last n tokens."""
        tokens, self.tokens = self.tokens[:-n], []
        self._caches = self._new_caches()
        self._fed(tokens)


def started(trial: Trial, chunk: int = 2048) -> Play:
    """A play of a new drafter that was shown the prompt."""
    play = Play(trial, trial.drafter())
    play.drafter.begin()
    play.prefill(trial.prompt, chunk)
    return play


def as_if_untouched(
    trial: Trial, play: Play, what: str, asked: Sequence[int] = ()
) -> Iterator[str]:
    """A finding if a drafter proposes otherwise than a new one which is shown the same
    tokens one by one, and has drafted nothing before.

    Args:
        what: What the drafter has been through.
        asked: Tokens behind which it has to propose, after the pending one.
    """
    other, prompt = started(trial), len(trial.prompt)
    for token in play.tokens[prompt:]:
        other.observe([token])
    for token in (play.pending, *(asked or play.tokens[-4:])):
        play.pending = other.pending = token
        seen, wanted = play.draft(), other.draft()
        if seen != wanted:
            yield (
                f"{what}, behind {token} it proposes {seen}; one that was shown the "
                f"same tokens, and has drafted nothing before, {wanted}"
            )
            return
        for each in (play, other):
            each.observe([token])
    yield from dict.fromkeys(play.drafter.faults)


def rounds_leave_no_trace(trial: Trial) -> Iterator[str]:
    """What is proposed depends on the tokens that were kept alone: not on the drafts
    that were rejected, nor on how many tokens came at once."""
    for chunk in (2048, 4, 1):
        play = started(trial, chunk)
        for kept in _KEPT:
            play.round(kept)
        what = f"after a prompt in chunks of {chunk} and {len(_KEPT)} rounds"
        yield from as_if_untouched(trial, play, what, trial.prompt[:4])


def _rewound(trial: Trial) -> Iterator[tuple[Play, list[int], str]]:
    """Drafters that were rewound by any number of tokens, what their last round had
    shown them, and that in words."""
    for kept in range(1, _K + 1):
        for back in range(kept + 1):
            play = started(trial)
            shown = play.round(kept)
            if back < len(shown):
                play.rewind(shown, back)
                yield play, shown, f"rewound by {back} of {len(shown)} tokens"


def rewinds(trial: Trial) -> Iterator[str]:
    """`rewind` takes back the last draft, and tokens that `observe` has shown."""
    for play, shown, what in _rewound(trial):
        yield from as_if_untouched(trial, play, what, shown[::-1])


def continues(trial: Trial) -> Iterator[str]:
    """`draft_behind` goes on behind a path as if all but its last token had been
    shown, and keeps nothing of it in mind."""
    there_and_back = (trial.prompt[1], started(trial).pending)
    for path_length in (1, 2, 3):
        play, other = started(trial), started(trial)
        path = [play.pending, *there_and_back][:path_length]
        behind = play.drafter.draft_behind(mx.array([path], dtype=mx.uint32), _K)
        seen = behind.tokens[0, :_K].tolist()
        for token in path[:-1]:
            other.observe([token])
        other.pending = path[-1]
        wanted = other.draft()
        if seen != wanted:
            yield (
                f"behind the path {path} it proposes {seen}; one that was shown all "
                f"but the last of them, {wanted}"
            )
        play.observe(path[:1])
        play.pending = trial.prompt[0]
        what = f"after a path of {path_length}, of which one token was kept"
        yield from as_if_untouched(trial, play, what, trial.prompt[:4])


# --- its memory in the caller's prompt cache --------------------------------------


def _saved(caches: list[Any]) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "cache.safetensors")
        save_prompt_cache(file, caches)
        loaded = load_prompt_cache(file)
        mx.eval([cache.state for cache in loaded])
        return loaded


_WAYS: dict[str, Callable[[list[Any]], list[Any]]] = {
    "kept": lambda caches: caches,
    "copied": copy.deepcopy,
    "saved and loaded": _saved,
}


def carried(trial: Trial) -> Iterator[str]:
    """What was seen goes from one call to the next in the prompt cache, kept, copied,
    or through stock's `save_prompt_cache` and `load_prompt_cache`."""
    for way, move in _WAYS.items():
        for n in (1, 7):
            for found in _second_turn(trial, move, n):
                yield f"a prompt cache that was {way} after {n} tokens: {found}"


def _second_turn(
    trial: Trial, move: Callable[[list[Any]], list[Any]], n: int
) -> Iterator[str]:
    caches, theirs = (trial.tiny.caches(trial.model) for _ in range(2))
    first = trial.drafted(trial.drafter(), n, caches=caches)
    if not first.entries:
        yield "suspend() gave no caches"
        return
    trial.stock(n, caches=theirs)
    moved = move([*first.caches, *first.entries])
    second = [token % trial.vocabulary for token in _SECOND]
    watched, stats = trial.drafter(), Tally()
    ours = trial.drafted(watched, 7, prompt=second, caches=moved, stats=stats)
    stock = trial.stock(7, prompt=second, caches=theirs)
    yield from oracle.result_differences(ours, stock)
    yield from watched.faults
    resident = len(trial.prompt) + n
    if watched.resumed is None or not 0 < watched.resumed <= resident:
        yield (
            f"resume() says that {watched.resumed} tokens were seen, of {resident} "
            "that it was shown"
        )
    elif watched.resumed == resident and watched.proposals:
        play = started(trial)
        for token in first.tokens:
            play.observe([token])
        play.prefill(second)
        play.pending = ours.tokens[0]
        wanted = play.draft()
        if watched.proposals[0] != wanted:
            yield (
                f"resumed, it proposes {watched.proposals[0]} first; one that was "
                f"shown all tokens, {wanted}"
            )


def foreign_entries(trial: Trial) -> Iterator[str]:
    """`resume` knows what is none of its own, and goes on without it."""
    for entries in ([], [KVCache()], [KVCache()] * 7):
        watched = trial.drafter()
        watched.begin()
        seen = watched.resume(entries)
        if seen != 0:
            yield f"{len(entries)} empty KVCaches: resume() says {seen}, not 0"
        play = Play(trial, watched)
        play.prefill(trial.prompt)
        yield from as_if_untouched(trial, play, "with foreign entries")


def suspended_after_rewinding(trial: Trial) -> Iterator[str]:
    """Who is rewound and suspended then has seen what was left, and no more."""
    for play, shown, what in _rewound(trial):
        entries = copy.deepcopy(play.drafter.suspend())
        play.drafter = trial.drafter()
        play.drafter.begin()
        seen = play.drafter.resume(entries)
        if not 0 < seen <= len(play.tokens):
            yield f"{what}: {seen} tokens are resumed, of {len(play.tokens)}"
        elif seen == len(play.tokens):
            yield from as_if_untouched(trial, play, f"{what} and resumed", shown[::-1])


_CACHES, _REWIND = frozenset({"caches"}), frozenset({"rewind"})
PLAYED = (
    Check(rounds_leave_no_trace),
    Check(rewinds, needs=_REWIND),
    Check(continues, needs=frozenset({"continues"})),
    Check(carried, needs=_CACHES),
    Check(foreign_entries, models=1, needs=_CACHES),
    Check(suspended_after_rewinding, needs=_CACHES | _REWIND),
)
