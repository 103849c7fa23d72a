"""The round loop: a drop-in for the generators that stock's `stream_generate` reads.

::

    prompt -> prefill -> [ draft -> verify -> accept -> commit -> observe ] -> stop

A round feeds the pending token x and the drafts d1 … dk, and *yields exactly the inputs
that it keeps*: x, then each accepted draft. The token chosen behind the last of them is
the next round's x. So, as in stock, every token that was yielded has been fed, one more
has been sampled, and a stop leaves nothing to be fed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import (
    DEFAULT_QUANTIZED_KV_START,
    generation_stream,
    maybe_quantize_kv_cache,
)
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import LogitsProcessor, Sampler, greedy_sampler

from .accept import AtOnce, History, Judge, OneByOne, is_pure
from .drafters.base import Drafter, checked_tokens
from .options import DraftOptions
from .state.limits import width_limit
from .state.verified import Verified
from .stats import DraftStats
from .target import Target
from .verify import Verifier

Step = tuple[int, mx.array, bool]
_CLEAR_EVERY = 256  # tokens between two clearings of MLX's buffer cache, as in stock


class Pending(NamedTuple):
    """A token that was chosen and not fed yet."""

    token: int
    array: mx.array  # (1,), the same on the device
    logprobs: mx.array  # (V,), what it was chosen from


def draft_generate_step(
    prompt: mx.array,
    model: nn.Module,
    drafter: Drafter,
    stream: mx.Stream | mx.ThreadLocalStream = generation_stream,
    *,
    options: DraftOptions | None = None,
    stats: DraftStats | None = None,
    max_tokens: int = 256,
    sampler: Sampler | None = None,
    logits_processors: list[LogitsProcessor] | None = None,
    max_kv_size: int | None = None,
    prompt_cache: list[Any] | None = None,
    prefill_step_size: int = 2048,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    quantized_kv_start: int = DEFAULT_QUANTIZED_KV_START,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
) -> Generator[Step, None, None]:
    """Stock's `generate_step` with drafts: the same tokens, fewer forwards.

    Args:
        prompt: `(T,)` token ids, T >= 1.
        model: The target.
        drafter: What proposes tokens; it starts anew.
        stream: The stream to compute on.
        options: How to draft and verify.
        stats: Filled while generating.
        max_tokens: Tokens to yield; -1 for no limit.
        sampler, logits_processors, max_kv_size, prompt_cache, prefill_step_size,
        kv_bits, kv_group_size, quantized_kv_start, prompt_progress_callback:
            As in stock's `generate_step`.

    Yields:
        A token, its `(V,)` log-probabilities, and whether it was drafted.

    Raises:
        ValueError: If the prompt is empty.
        DrafterError: If the drafter breaks its contract.
    """
    if len(prompt) == 0:
        raise ValueError("prompt is empty; it must have at least one token.")
    if prompt_cache is None:
        prompt_cache = make_prompt_cache(model, max_kv_size=max_kv_size)
    options = options or DraftOptions()
    loop = _Loop(
        Target(model, options.hidden if drafter.needs_hidden else None),
        drafter,
        prompt_cache,
        stream=stream,
        options=options,
        stats=stats or DraftStats(),
        sampler=sampler or greedy_sampler,
        processors=logits_processors or (),
        quantize=(quantized_kv_start, kv_group_size, kv_bits),
    )
    loop.prefill(prompt, prefill_step_size, prompt_progress_callback)
    yield from loop.rounds(max_tokens)


class _Loop:
    """One generation: the target, the drafter, the caches, and the pending token."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        caches: list[Any],
        *,
        stream: Any,
        options: DraftOptions,
        stats: DraftStats,
        sampler: Sampler,
        processors: Sequence[LogitsProcessor],
        quantize: tuple[int, int, int | None],
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.caches = caches
        self.stream = stream
        self.options = options
        self.stats = stats
        self.sampler = sampler
        self.processors = processors
        self.quantize = quantize
        self.history = History()
        self.verifier = Verifier(target, caches, options.verify, stats)
        self.pending: Pending

    # --- prefill ------------------------------------------------------------------

    def prefill(
        self,
        prompt: mx.array,
        step_size: int,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        """Feed the prompt in chunks, its last token alone, and choose the first x."""
        progress = progress or (lambda done, total: None)
        done, total = 0, len(prompt)
        self.drafter.begin()
        progress(done, total)
        while total - done > 1:
            chunk = prompt[done : done + min(step_size, total - done - 1)]
            self._prefill_chunk(chunk)
            done += len(chunk)
            progress(done, total)
        self._prefill_last(prompt[done:])
        progress(total, total)

    def _prefill_chunk(self, chunk: mx.array) -> None:
        """The lm_head is never computed here: nobody reads these logits."""
        with mx.stream(self.stream):
            hidden = self.target(chunk[None], self.caches).hidden
            self._quantize()
            self.drafter.prefill(chunk[None], hidden)
            mx.eval([cache.state for cache in self.caches])
            if self.processors:
                self.history.add(chunk)
        mx.clear_cache()

    def _prefill_last(self, token: mx.array) -> None:
        with mx.stream(self.stream):
            forward = self.verifier.first(token[None])
            judge = self._judge(forward.logits, _no_drafts(), token)
            self._quantize()
            judge.judge(0)
            self.drafter.prefill(token[None], forward.hidden)
            self.pending = self._chosen(judge, 0)

    # --- rounds -------------------------------------------------------------------

    def rounds(self, max_tokens: int) -> Generator[Step, None, None]:
        """Round after round until `max_tokens` are yielded (never, if negative)."""
        yielded = 0
        while yielded != max_tokens:
            before = yielded
            yielded += yield from self._round(max_tokens - yielded)
            if before // _CLEAR_EVERY != yielded // _CLEAR_EVERY:
                mx.clear_cache()

    def _round(self, budget: int) -> Generator[Step, None, int]:
        """Yield x and each accepted draft; returns how many that were."""
        with mx.stream(self.stream):
            drafts = self._draft(self._width(budget) - 1)
            inputs = self._inputs(drafts)
            forward, verified = self.verifier(inputs)
            judge = self._judge(forward.logits, drafts, self.pending.array)
        kept, more = 0, True
        token, logprobs = self.pending.token, self.pending.logprobs
        try:
            while more:
                with mx.stream(self.stream):
                    judge.judge(kept)
                kept += 1
                yield token, logprobs, kept > 1
                more = judge.accepts(kept - 1)
                token, logprobs = judge.token(kept - 1), judge.logprobs(kept - 1)
        finally:
            with mx.stream(self.stream):
                self._commit(verified, judge, kept)
            if kept:  # of a round that was stopped, only what was seen counts
                self.stats.count(kept - 1 if more else drafts.shape[1], kept - 1)
        with mx.stream(self.stream):
            self._observe(inputs[:, :kept], forward.hidden)
            self.pending = self._chosen(judge, kept - 1)
        return kept

    def _draft(self, k: int) -> mx.array:
        """`(1, k')` drafts, k' <= k."""
        if k == 0:
            return _no_drafts()
        proposal = self.drafter.draft(self.pending.array[None], k)
        vocabulary = self.pending.logprobs.shape[-1]
        drafts = checked_tokens(proposal, self.drafter, k, vocabulary)
        mx.async_eval(drafts)  # the device drafts while the verify graph is built
        return drafts

    def _inputs(self, drafts: mx.array) -> mx.array:
        """`(1, 1 + k')`: the pending token and the drafts."""
        x = self.pending.array[None]
        return mx.concatenate([x, drafts.astype(x.dtype)], axis=1)

    def _width(self, budget: int) -> int:
        """Inputs of the next forward: x, and as many drafts as may be kept."""
        width = self.options.num_draft_tokens + 1
        if budget > 0:
            width = min(width, budget)
        start, _, bits = self.quantize
        limit, reason = width_limit(
            self.caches,
            quantized_kv_start=None if bits is None else start,
            one_forward=self.options.verify == "batch",
        )
        if limit == 1 < width:
            self.stats.undrafted[reason] += 1
        return width if limit is None else min(width, limit)

    def _judge(self, logits: mx.array, drafts: mx.array, x: mx.array) -> Judge:
        if is_pure(self.sampler) and not self.processors:
            return AtOnce(logits, drafts, self.sampler)
        return OneByOne(logits, drafts, self.sampler, self.processors, self.history, x)

    def _commit(self, verified: Verified, judge: Judge, kept: int) -> None:
        """Caches and random state as plain decoding has them after `kept` inputs."""
        verified.commit(kept)
        judge.settle(kept)
        self._quantize()

    def _observe(self, kept: mx.array, hidden: mx.array | None) -> None:
        """Show the drafter the `(1, n)` inputs that were kept."""
        if hidden is not None:
            hidden = hidden[:, : kept.shape[1]]
        self.drafter.observe(kept, hidden)

    def _chosen(self, judge: Judge, i: int) -> Pending:
        """What the judge chose behind input i: the next round begins with it."""
        return Pending(judge.token(i), judge.chosen(i), judge.logprobs(i))

    def _quantize(self) -> None:
        start, group_size, bits = self.quantize
        maybe_quantize_kv_cache(self.caches, start, group_size, bits)


def _no_drafts() -> mx.array:
    return mx.zeros((1, 0), dtype=mx.uint32)
