"""What the parts of a round cost: a verify forward of w tokens, v(w), and one draft, c.

Both are measured alone and waited for, with caches that hold the prompt and half of the
answer. A verify is timed as drafting runs it, what it records for the commit included;
v(1) is stock's own forward. Choosing tokens, the commit and the host's work between
forwards are in neither.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache

from ..certificate import Certificate
from ..drafters.base import Drafter, hidden_for
from ..state.capture import Recording
from ..state.forms import BATCHED, Form
from ..state.recurrence import Recurrence
from ..state.snapshot import restore, snapshot
from ..target import Target

_STEP = 2048  # tokens a forward, as stock prefills
_TIMES = 3  # each is timed so often, after once that does not count


@dataclass(frozen=True)
class Costs:
    """Seconds of the parts of a round, after one prompt.

    Args:
        prompt, repetition: Where in the benchmark this was measured.
        context: Tokens in the caches.
        verify: w -> seconds of a verify forward of w tokens, v(w).
        draft: Seconds of one draft, c: those of `drafts` in a row, divided by as many;
            None if nothing is drafted.
        drafts: The largest k.
    """

    prompt: int
    repetition: int
    context: int
    verify: dict[int, float]
    draft: float | None
    drafts: int


def verify_seconds(
    model: nn.Module,
    context: Sequence[int],
    following: Sequence[int],
    widths: Iterable[int],
    recurrence: Recurrence,
) -> dict[int, float]:
    """w -> median seconds of a verify of the first w tokens that follow a context.

    v(1) is computed as stock does, the others as `recurrence` says.
    """
    stock, drafted = Target(model), Target(model, recurrence=recurrence)
    target, caches = stock, make_prompt_cache(model)
    with mx.stream(generation_stream):
        for tokens in _chunks(context):
            target(tokens, caches)
            mx.eval([cache.state for cache in caches])
        certificate = Certificate(drafted, caches)
        before = snapshot(caches)
        taken: dict[int, list[float]] = {}
        for _ in range(1 + _TIMES):
            for w in widths:
                restore(caches, before)
                tokens = mx.array([following[:w]])
                target = stock if w == 1 else drafted
                form = certificate.form(1, w) or BATCHED
                taken.setdefault(w, []).append(_verify(target, tokens, caches, form))
    return {w: statistics.median(seconds[1:]) for w, seconds in taken.items()}


def _verify(target: Target, tokens: mx.array, caches: list[Any], form: Form) -> float:
    several = tokens.shape[1] > 1
    start = time.perf_counter()
    with Recording() if several else nullcontext():
        logits = target(tokens, caches, form=form).logits
    mx.eval(logits, [cache.state for cache in caches])
    return time.perf_counter() - start


def draft_seconds(
    model: nn.Module,
    drafter: Drafter,
    k: int,
    hidden: str,
    context: Sequence[int],
    token: int,
) -> float:
    """Median seconds of k drafts in a row behind `context` and `token`.

    Args:
        model: The target, which gives the hidden states.
        drafter: What drafts; it starts anew.
        k: How many.
        hidden: As the draft option of that name.
        context: What the drafter has seen.
        token: The pending token.
    """
    target = Target(model, hidden_for(drafter, hidden))
    caches, taken, last = make_prompt_cache(model), [], None
    drafter.begin()
    with mx.stream(generation_stream):
        for tokens in _chunks(context):
            states = target(tokens, caches).hidden
            drafter.prefill(tokens, states)
            mx.eval([cache.state for cache in caches])
            last = None if states is None else states[:, -1:]
        for _ in range(1 + _TIMES):
            pending = mx.array([[token]], dtype=mx.uint32)
            mx.eval(pending)
            start = time.perf_counter()
            mx.eval(drafter.draft(pending, k).tokens)
            taken.append(time.perf_counter() - start)
            drafter.observe(pending, last)  # as if every draft had been wrong
    return statistics.median(taken[1:])


def _chunks(tokens: Sequence[int]) -> Iterator[mx.array]:
    for i in range(0, len(tokens), _STEP):
        yield mx.array([tokens[i : i + _STEP]], dtype=mx.uint32)
