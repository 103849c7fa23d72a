"""The round loop: a drop-in for the generators that stock's `stream_generate` reads.

::

    prompt -> prefill -> [ draft -> verify -> accept -> commit -> observe ] -> stop

A round feeds the pending token x and the drafts d1 … dk, and *yields exactly the inputs
that it keeps*: x, then each accepted draft. The token chosen behind the last of them is
the next round's x. So, as in stock, every token that was yielded has been fed, one more
has been sampled, and a stop leaves nothing to be fed.

Most rounds are one *leg*: one verify and what is kept of it. A rescue adds a second leg
to its round, which goes on from the drafter's second choice without drafting anew.

The device must not wait for the caller. While x is yielded, it verifies; and once it is
known what is kept, the next round is drafted before the accepted drafts are yielded, if
the drafter can go back should the caller stop among them.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import (
    DEFAULT_QUANTIZED_KV_START,
    generation_stream,
    maybe_quantize_kv_cache,
)
from mlx_lm.sample_utils import LogitsProcessor, Sampler, greedy_sampler

from . import tree
from .accept import AtOnce, Judge, OneByOne
from .audit import Audit
from .carry import Around, Carried
from .certificate import NO_FORM, Certificate
from .depth import Depth, Fixed
from .drafters.base import Branch, Drafter, Proposal, hidden_for
from .drafting import Drafting
from .errors import TakeBack
from .futile import FutileWatch
from .gaps import SHOWN
from .history import History
from .learnt import learnt_of
from .nearness import Nearness
from .options import DraftOptions
from .profile import Lap, Stopwatch
from .purity import is_pure
from .regime import Marks, Regime
from .rounds import Nearest, Round
from .state.recurrence import Recurrence
from .state.verified import Verified
from .stats import Tally
from .target import Forward, Target
from .trace import Trace
from .verify import Verifier

Step = tuple[int, mx.array, bool]
OnTokens = Callable[[list[int]], bool | None]
_CLEAR_EVERY = 256  # tokens between two clearings of MLX's buffer cache, as in stock
# Of numbers that Python has, so it is of no stream, and nothing is computed for it.
_NO_DRAFTS = Proposal(mx.array([[]], dtype=mx.uint32))


class Pending(NamedTuple):
    """A token that was chosen and not fed yet."""

    judge: Judge
    position: int  # of the input behind which it was chosen
    array: mx.array  # (1,)
    logprobs: mx.array  # (V,), what it was chosen from
    error: Exception | None  # why it cannot be fed
    nearness: Nearness | None  # of the verify that it was chosen in, if somebody looks

    @property
    def token(self) -> int:
        """The same on the host, which waits for it."""
        return self.judge.token(self.position)

    @property
    def nearest(self) -> Nearest | None:
        """How near to a tie it was."""
        if self.nearness is None:
            return None
        return self.nearness.behind(self.judge.row(self.position), self.position)


class Leg(NamedTuple):
    """What to verify behind the pending token."""

    drafts: mx.array  # (P, k')
    source: Proposal | Branch  # where they come from
    k: int  # drafts that were asked for
    undrafted: str = ""  # why none could be
    parked: str = ""  # why none were, although they could be


def draft_generate_step(
    prompt: mx.array,
    model: nn.Module,
    drafter: Drafter,
    stream: mx.Stream | mx.ThreadLocalStream = generation_stream,
    *,
    options: DraftOptions | None = None,
    stats: Tally | None = None,
    on_tokens: OnTokens | None = None,
    eos_token_ids: Collection[int] = (),
    thinking: Marks | None = None,
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
    around: Around | None = None,
    trace: Trace | None = None,
    depth: Depth | None = None,
) -> Generator[Step, None, None]:
    """Stock's `generate_step` with drafts: the same tokens, fewer forwards.

    Args:
        prompt: `(T,)` token ids, T >= 1.
        model: The target.
        drafter: What proposes tokens; it starts anew, or from what the prompt cache
            carries for it.
        stream: What to compute on.
        options: How to draft and verify.
        stats: Filled on the way.
        on_tokens: Called after each round with its tokens; True stops.
        eos_token_ids: Tokens behind which generation ends; they are yielded.
        thinking: The tokens around thinking, if the model thinks, for statistics.
        max_tokens: Tokens to yield; -1 for no limit.
        sampler, logits_processors, max_kv_size, prefill_step_size, kv_bits,
        kv_group_size, quantized_kv_start, prompt_progress_callback:
            As in stock's `generate_step`.
        around: What is known around the prompt.
        trace: Is told every verify.
        depth: Decides how many tokens each round drafts; by default as the option of
            that name says.
        prompt_cache: As in stock's; a drafter that has caches of its own puts them
            behind the model's, and finds them there the next time.

    Yields:
        A token, its log-probabilities `(V,)`, and whether it was drafted.

    Raises:
        ValueError: If the prompt is empty.
        InvalidOption: If the options need what the drafter does not give.
        DrafterError: If the drafter breaks its contract.
        NothingToChoose: If logits processors leave no token; caches and random state
            are then as behind the last token yielded, as when a processor raises.
    """
    if len(prompt) == 0:
        raise ValueError("prompt is empty; it must have at least one token.")
    options, stats = options or DraftOptions(), stats or Tally()
    loop = _Loop(
        Target(
            model,
            hidden_for(drafter, options.hidden),
            Recurrence(options.capture, options.recurrence, stats.note),
        ),
        drafter,
        Carried(prompt_cache, model, drafter, max_kv_size),
        stream=stream,
        options=options,
        stats=stats,
        on_tokens=on_tokens,
        eos_token_ids=eos_token_ids,
        regime=Regime(thinking),
        depth=depth,
        sampler=sampler or greedy_sampler,
        processors=logits_processors or (),
        quantize=(quantized_kv_start, kv_group_size, kv_bits),
        trace=trace,
    )
    step_size = options.prefill_step_size or prefill_step_size
    around = around or Around()
    yield from loop.run(prompt, max_tokens, step_size, prompt_progress_callback, around)


class _Loop:
    """One generation: the target, the drafter, the caches, and the pending token."""

    pending: Pending
    ended = finalised = False
    nearness: Nearness | None = None  # of the latest verify, if somebody looks
    certificate: Certificate | None = None
    audit: Audit | None = None

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        carried: Carried,
        *,
        stream: Any,
        options: DraftOptions,
        stats: Tally,
        on_tokens: OnTokens | None,
        eos_token_ids: Collection[int],
        regime: Regime,
        depth: Depth | None,
        sampler: Sampler,
        processors: Sequence[LogitsProcessor],
        quantize: tuple[int, int, int | None],
        trace: Trace | None,
    ) -> None:
        self.target = target
        self.history = History(kept=bool(processors))
        self.carried = carried
        self.caches = carried.caches
        self.stream = stream
        self.options = options
        self.stats = stats
        self.on_tokens = on_tokens
        self.eos_token_ids = frozenset(eos_token_ids)
        self.regime = regime
        self.sampler = sampler
        self.processors = processors
        self.judges_at_once = all(map(is_pure, (sampler, *processors)))
        self.quantize = quantize
        self.timed = Stopwatch(
            stats.time if options.profile else stats.time_host, waits=options.profile
        )
        self.verifier = self._verifier()
        self.drafting = Drafting(
            drafter, options, sampler, processors, self.history, stream, self.timed
        )
        learnt = None if depth else learnt_of(target, self.caches, drafter, options)
        self.learning = None if learnt is None else learnt.begin()
        self.depth = depth or self.learning or Fixed()
        self.looks = options.gaps or options.audit > 0 or trace is not None
        self.told: list[Callable[[Round], None]] = [
            functools.partial(stats.count, keep=max(SHOWN, options.audit)),
            FutileWatch(drafter).count,
            self.depth.take,
        ]
        self.trace = trace
        if trace is not None:
            trace.begin(self.depth)
            self.told.append(trace.add)
        self.work = Lap()

    def _verifier(self) -> Verifier:
        """What verifies as the options say, exactly with a certificate."""
        options, (start, _, bits) = self.options, self.quantize
        if options.exactness == "exact" and options.verify == "batch":
            note = self.stats.note_form
            self.certificate = Certificate(self.target, self.caches, note=note)
        form = (self.certificate.form,) if self.certificate else ()
        return Verifier(
            self.target,
            self.caches,
            options.verify,
            self.stats,
            self.timed,
            *form,
            quantized_kv_start=None if bits is None else start,
            raises=bool(self.processors) or not self.judges_at_once,
        )

    def run(
        self,
        prompt: mx.array,
        max_tokens: int,
        step_size: int,
        progress: Callable[[int, int], None] | None,
        around: Around,
    ) -> Generator[Step, None, None]:
        """All of it: prompt, rounds, and what is left to do when they end."""
        started = time.perf_counter()
        if around.before:
            self.history.add(mx.array(around.before, dtype=prompt.dtype))
        try:
            self.prefill(prompt, step_size, progress, around.checkpoints)
            if around.begun is not None and max_tokens:
                max_tokens -= 1
                yield from self._echo(prompt[-1].item(), around.begun)
            yield from self.rounds(max_tokens)
            self.finalise()
        except (GeneratorExit, TakeBack):
            self.finalise()
            raise
        finally:
            self.close(len(prompt), time.perf_counter() - started)

    # --- prefill ------------------------------------------------------------------

    def prefill(
        self,
        prompt: mx.array,
        step_size: int,
        progress: Callable[[int, int], None] | None,
        checkpoints: Mapping[int, Callable[[int, list[Any]], None]],
    ) -> None:
        """Feed the prompt in chunks, its last token alone, and choose the first x."""
        progress = progress or (lambda done, total: None)
        done, total = 0, len(prompt)
        self.stats.note(unseen_tokens=self.carried.begin())
        progress(done, total)
        if self.regime.known:
            self.regime.follow(prompt.tolist())
        while total - done > 1:
            ends = [done + step_size, total - 1, *(c for c in checkpoints if c > done)]
            chunk = prompt[done : min(ends)]
            self._prefill_chunk(chunk)
            done += len(chunk)
            if (tell := checkpoints.get(done)) is not None:
                tell(done, self.carried.copied())
            progress(done, total)
        self._prefill_last(prompt[done:])
        progress(total, total)

    def _prefill_chunk(self, chunk: mx.array) -> None:
        """The lm_head is never computed here: nobody reads these logits."""
        with mx.stream(self.stream):
            hidden = self.target(chunk[None], self.caches).hidden
            self._quantize()
            self.drafting.prefill(chunk[None], hidden)
            mx.eval([cache.state for cache in self.caches])
            self.history.add(chunk)
        mx.clear_cache()

    def _prefill_last(self, token: mx.array) -> None:
        with mx.stream(self.stream):
            if self.options.audit:
                self.audit = Audit(self.target, self.caches, token, self._quantized)
            forward = self.verifier.first(token[None])
            along = self._along(forward.logits, _NO_DRAFTS)
            judge = self._judge(forward.logits, _NO_DRAFTS.tokens, token, along)
            self._quantize()
            judge.judge(0)
            judge.settle(1)
            self.history.prompt = self.history.length
            self.drafting.prefill(token[None], forward.hidden)
            self.pending = self._chosen(judge, 0)
        mx.eval(self.pending.array)
        self.work.lap()

    def _echo(self, token: int, logprobs: mx.array) -> Generator[Step, None, None]:
        """Yield the last token of the prompt, as a round of its own."""
        self._tell(Round(regime=self.regime.now, token=token, paths=((),)))
        yield token, logprobs, False
        stopped = self.on_tokens is not None and self.on_tokens([token])
        self.ended = bool(stopped) or token in self.eos_token_ids
        self.work.lap()  # what the caller did meanwhile is no work

    # --- rounds -------------------------------------------------------------------

    def rounds(self, max_tokens: int) -> Generator[Step, None, None]:
        """Round after round until `max_tokens` are yielded (never, if negative)."""
        yielded = 0
        if self.audit is not None:
            self.told.append(self.audit.add)
        while yielded != max_tokens and not self.ended:
            before = yielded
            tokens = yield from self._round(max_tokens - yielded)
            yielded += len(tokens)
            if before // _CLEAR_EVERY != yielded // _CLEAR_EVERY:
                mx.clear_cache()
            if self.on_tokens is not None and self.on_tokens(tokens):
                return

    def _round(self, budget: int) -> Generator[Step, None, list[int]]:
        """Yield x and what is accepted behind it; returns these tokens."""
        if self.pending.error is not None:
            raise self.pending.error
        leg = self._drafted(budget)
        tokens = yield from self._leg(leg, budget)
        rest = budget - len(tokens)
        branch = self._rescue(leg.source, len(tokens), budget)
        if branch is not None:
            k, _ = self._most(rest)
            tokens += yield from self._leg(Leg(branch.rest[:, :k], branch, k), rest)
        return tokens

    def _drafted(self, budget: int) -> Leg:
        """What the round begins with."""
        reason, parked, ahead = "", "", self.drafting.ahead()
        if ahead is not None:
            proposal, k = ahead.proposal, ahead.k
        else:
            most, reason = self._most(budget)
            k, parked = self._chosen_depth(most)
            proposal = self._draft(k)
        side_by_side = self.options.paths > 1  # else branches wait for a rescue
        rows = tree.rows(proposal) if side_by_side else proposal.tokens
        return Leg(rows, proposal, k, reason, parked)

    def _leg(self, leg: Leg, budget: int) -> Generator[Step, None, list[int]]:
        """Verify x and the drafts; yield x and each accepted draft."""
        with mx.stream(self.stream), self.timed("verify") as wait:
            forward, verified = self.verifier(self._inputs(leg.drafts))
            wait(forward.logits)
        tokens: list[int] = []
        judge, more, seconds = None, True, None
        pending = self.pending
        try:
            with mx.stream(self.stream):
                along = self._along(forward.logits, leg.source)
                judge = self._judge(forward.logits, leg.drafts, pending.array, along)
            # Not before: what draws no drafts on it need not wait for it, as in stock.
            token, logprobs = self._read(), pending.logprobs
            while more:
                with mx.stream(self.stream):
                    judge.judge(len(tokens))
                tokens.append(token)
                self.work.pause()
                try:
                    yield token, logprobs, len(tokens) > 1
                except TakeBack:
                    tokens.pop()
                    raise
                finally:
                    self.work.go_on()
                with self.timed("accept"):
                    more = self._goes_on(judge, leg.drafts, tokens)
                if more:
                    token = judge.token(len(tokens) - 1)
                    logprobs = judge.logprobs(len(tokens) - 1)
                if more and len(tokens) == 1 and self.drafting.goes_ahead:
                    seconds = self.work.lap()
                    self._go_ahead(judge, tokens, forward, budget)
        finally:
            row = judge.row(len(tokens) - 1) if tokens else 0
            self._commit(verified, len(tokens), row)
            if tokens:
                seconds = self.work.lap() if seconds is None else seconds
                done = self._over(leg, judge, len(tokens), more, seconds)
                self._tell(self._detailed(done, leg, judge, pending))
                judge.settle(len(tokens))
                self.drafting.keep(tokens, forward.hidden, row)
                self.regime.follow(tokens)
        with mx.stream(self.stream):
            self.pending = self._chosen(judge, len(tokens) - 1)
        return tokens

    def _go_ahead(
        self, judge: Judge, tokens: Sequence[int], forward: Forward, budget: int
    ) -> None:
        """Let the device draft what follows the inputs that will be kept.

        The target's caches are committed once these are yielded; until then they hold
        rejected drafts, too.
        """
        kept = 2
        while judge.accepts(kept - 1):
            kept += 1
        accepted = judge.choices()[: kept - 1]
        ends = not self.eos_token_ids.isdisjoint(accepted)
        fed = forward.logits.shape[1]
        most, _ = self._most(budget - kept, taken_back=fed - kept)
        if ends or kept == budget or most == 0:  # there is nothing to draft
            return
        k, parked = self._chosen_depth(most)
        if parked:
            return
        self.drafting.keep([*tokens, *accepted], forward.hidden, 0)
        with mx.stream(self.stream):
            self.pending = self._chosen(judge, kept - 1)
        self.drafting.go_ahead(self._draft(k), k, kept)

    def _draft(self, k: int) -> Proposal:
        """Up to k drafts behind the pending token."""
        if k == 0:
            return _NO_DRAFTS
        return self.drafting.draft(self._read(), self.pending.logprobs.shape[-1], k)

    def _inputs(self, drafts: mx.array) -> mx.array:
        """`(P, 1 + k')`: the pending token and the drafts."""
        if not drafts.shape[1]:
            return self.pending.array[None]
        x = mx.repeat(self.pending.array[None], drafts.shape[0], axis=0)
        return mx.concatenate([x, drafts.astype(x.dtype)], axis=1)

    def _most(self, budget: int, *, taken_back: int = 0) -> tuple[int, str]:
        """Drafts of a leg, as many as may be kept; and why there are none."""
        k = self.options.num_draft_tokens
        if budget > 0:
            k = min(k, budget - 1)
        if k == 0:
            return 0, ""
        limit, reason = self.verifier.limit(taken_back)
        allowed = k if limit is None else min(k, limit - 1)
        if self.certificate is not None and allowed > 0:
            held = self.certificate.widest(self.options.paths, allowed + 1) - 1
            allowed, reason = held, reason if held == allowed else NO_FORM
        return allowed, "" if allowed else reason

    def _chosen_depth(self, most: int) -> tuple[int, str]:
        """Drafts of a round, of so many that it may have; and why it is parked."""
        if most == 0:
            return 0, ""
        k = self.depth.choose(most)
        if self.trace is not None:
            self.trace.asked(most, k)
        return k, "" if k else self.depth.parked

    def _judge(
        self,
        logits: mx.array,
        drafts: mx.array,
        x: mx.array,
        along: Sequence[mx.array],
    ) -> Judge:
        judge = AtOnce if self.judges_at_once else OneByOne
        chooses = (self.sampler, self.processors, self.history)
        return judge(logits, drafts, *chooses, x, along)

    def _goes_on(self, judge: Judge, drafts: mx.array, tokens: list[int]) -> bool:
        """Whether the next draft is accepted; notes an end of the text."""
        self.ended = tokens[-1] in self.eos_token_ids
        drafted = len(tokens) <= drafts.shape[1]
        return drafted and not self.ended and judge.accepts(len(tokens) - 1)

    def _commit(self, verified: Verified, kept: int, row: int) -> None:
        """Caches as plain decoding has them after `kept` inputs."""
        with mx.stream(self.stream), self.timed("commit") as wait:
            verified.commit(kept, row)
            self._quantize()
            if self.timed.waits:
                wait([cache.state for cache in self.caches])

    def _rescue(self, proposal: Proposal, kept: int, budget: int) -> Branch | None:
        """What to verify next in this round, if the first path was rejected early."""
        rejected = kept <= min(self.options.rescue, proposal.tokens.shape[1])
        if not rejected or self.ended or kept == budget:
            return None
        return tree.rescue(proposal, kept - 1, self.pending.token)

    def _chosen(self, judge: Judge, i: int) -> Pending:
        """What the judge chose behind input i: the next round begins with it."""
        error = self.history.nothing_to_choose() if judge.broken(i) else None
        logprobs = judge.logprobs(i)
        return Pending(judge, i, judge.chosen(i), logprobs, error, self.nearness)

    def _read(self) -> int:
        with self.timed("accept"):
            return self.pending.token

    def _over(
        self, leg: Leg, judge: Judge, kept: int, stopped: bool, seconds: float
    ) -> Round:
        """The record of a leg; of one that was stopped, only what was seen counts."""
        stopped = stopped or self.ended
        drafted = kept - 1 if stopped else leg.drafts.shape[1]
        known = (leg.k, drafted, kept - 1)
        if isinstance(leg.source, Branch):
            rescue = leg.source.position
            return Round(*known, rescue=rescue, stopped=stopped, seconds=seconds)
        return Round(
            *known,
            regime=self.regime.now,
            undrafted=leg.undrafted,
            parked=leg.parked,
            unguided=self.drafting.unguided if drafted else "",
            origins=leg.source.origins,
            probed=_probed(leg.source, judge, drafted),
            stopped=stopped,
            seconds=seconds,
        )

    def _along(self, logits: mx.array, source: Proposal | Branch) -> list[mx.array]:
        """What is to be read with the choices of a verify, if somebody looks."""
        if not self.looks:
            return []
        self.nearness = Nearness(logits)
        confidence = source.confidence if isinstance(source, Proposal) else None
        return [*self.nearness.arrays, *([] if confidence is None else [confidence])]

    def _detailed(self, done: Round, leg: Leg, judge: Judge, pending: Pending) -> Round:
        """The record with its tokens, if somebody looks."""
        if self.nearness is None:
            return done
        targets = tuple(judge.choices())  # waits; all else was computed along with it
        confidence = None if isinstance(leg.source, Branch) else leg.source.confidence
        return replace(
            done,
            token=pending.token,
            paths=tuple(map(tuple, leg.drafts.tolist())),
            confidences=() if confidence is None else tuple(confidence[0].tolist()),
            targets=targets,
            nearest=self.nearness.along(judge.row(done.accepted)),
            first=pending.nearest,
        )

    def _tell(self, record: Round) -> None:
        for consumer in self.told:
            consumer(record)

    def _quantize(self) -> None:
        self._quantized(self.caches)
        if self.quantize[2] is not None:
            self.carried.update()

    def _quantized(self, caches: list[Any]) -> None:
        start, group_size, bits = self.quantize
        if bits is not None:
            maybe_quantize_kv_cache(caches, start, group_size, bits)

    # --- stop ---------------------------------------------------------------------

    def finalise(self) -> None:
        """Show the drafter the rest, and carry what it has seen to the next call."""
        self.drafting.observe()
        with mx.stream(self.stream), self.timed("finalise"):
            self.drafting.rewind()
            self.carried.end()
        self.finalised = True

    def close(self, prompt: int, seconds: float) -> None:
        """Note what is known only at the end: after `prompt` tokens and `seconds`."""
        resident = self.carried.resident or prompt + self.stats.tokens
        self.stats.note(resident_tokens=resident, seconds=self.stats.seconds + seconds)
        if self.audit is not None and self.finalised:
            with mx.stream(self.stream):
                smallest = self.stats.smallest_gaps[: self.options.audit]
                audited = self.audit.run(smallest, self.stats.tokens)
            self.stats.note(audited=audited)
        if self.learning is not None:
            self.learning.end()
        if self.trace is not None:
            self.trace.end(self.stats.stats)


def _probed(
    proposal: Proposal, judge: Judge, drafted: int
) -> tuple[tuple[tuple[int, ...], int], ...]:
    """The drafter's choices at each position, and the target's token there."""
    if proposal.candidates is None:
        return ()
    choices = map(tuple, proposal.candidates[0].tolist())
    return tuple(zip(choices, judge.choices()[:drafted], strict=False))
