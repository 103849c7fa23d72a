"""What is accepted: the target's own sampler decides, position after position.

A draft is kept when it equals the token that plain decoding would have sampled there,
so processors and sampler are run as stock runs them: on one `(1, V)` row after the
other, from the random state that plain decoding would have. Both judges answer the same
questions about position i of a verify (the row that follows input i):

- :class:`AtOnce` chooses at all positions in one graph and reads them with one
  synchronisation. It serves pure samplers and processors (:mod:`.purity`); the random
  state is put back to where plain decoding would have left it.
- :class:`OneByOne` serves everything else: logits processors and samplers may keep a
  state of their own, so they are called exactly as often, and shown exactly the
  histories, as `generate_step` would.

What a processor or the sampler raises comes before input i is yielded, as in stock. A
row of NaN, or one that allows no token, is an error only once its token is to be fed:
stock computes one row more than it needs. Either way caches and random state are then
those of a generation that was stopped at the last yielded token.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx
from mlx_lm.sample_utils import LogitsProcessor, Sampler, greedy_sampler

from . import random_state
from .choices import log_probabilities
from .history import History

_NONE = mx.array([], dtype=mx.uint32)  # of no stream: it is never computed


class Judge(Protocol):
    """The target's choice at each position of one verify of S inputs.

    Attributes:
        drafts: `(P, S - 1)` drafted tokens.
    """

    drafts: mx.array

    def judge(self, i: int) -> None:
        """Input i is kept: choose the token that follows it.

        The random state is then the one that plain decoding would have.

        Raises:
            Exception: Whatever a processor or the sampler raises.
        """

    def broken(self, i: int) -> bool:
        """Whether processors left nothing to choose after input i; may wait."""

    def token(self, i: int) -> int:
        """The token chosen after input i; may wait for the device."""

    def accepts(self, i: int) -> bool:
        """Whether draft i of a path that is right so far is the token chosen there."""

    def row(self, i: int) -> int:
        """The first path whose inputs up to input i are all kept."""

    def chosen(self, i: int) -> mx.array:
        """The token chosen after input i as a `(1,)` array."""

    def logprobs(self, i: int) -> mx.array:
        """The `(V,)` log-probabilities that the token was chosen from."""

    def choices(self) -> list[int]:
        """The tokens chosen after the first inputs, as far as they are known."""

    def settle(self, kept: int) -> None:
        """Note down that so many inputs were kept."""


def processed(
    logits: mx.array, processors: Sequence[LogitsProcessor], tokens: mx.array
) -> mx.array:
    """`(1, V)` logits as the processors leave them behind these `(n,)` tokens."""
    for processor in processors:
        logits = processor(tokens, logits)
    return logits


class AtOnce:
    """All positions chosen in one graph.

    Where there are several paths, the graph follows the first one that is right so far.

    Args:
        logits: `(P, S, V)`.
        drafts: `(P, S - 1)` drafted tokens.
        sampler: A pure sampler.
        processors: Pure logits processors.
        history: What was fed before; the inputs kept are added to it.
        pending: Input 0, as the `(1,)` array that was chosen for it.
        along: More arrays, evaluated with the choices: reading them then waits for
            nothing.
    """

    def __init__(
        self,
        logits: mx.array,
        drafts: mx.array,
        sampler: Sampler,
        processors: Sequence[LogitsProcessor],
        history: History,
        pending: mx.array,
        along: Sequence[mx.array] = (),
    ) -> None:
        self.drafts = drafts
        self._sampler = sampler
        self._processors = processors
        self._history = history
        self._pending = pending
        self._along = list(along)
        self._logits = logits
        self._thread = threading.get_ident()
        self._rows: list[mx.array] = []  # (V,) log-probabilities
        self._broken: list[mx.array] = []  # (), whether a row is, if it may be
        self._chosen = _NONE
        self._states: list[mx.array] = []  # before each choice, and behind the last
        self._left: mx.array | None = None  # the state as the caller has found it
        self._error: Exception | None = None  # raised behind the last chosen token
        if sampler is greedy_sampler and not processors and logits.shape[0] == 1:
            logprobs = log_probabilities(logits.squeeze(0))
            self._chosen = sampler(logprobs)
            positions = range(logits.shape[1])
            self._rows = [logprobs[i : i + 1].squeeze(0) for i in positions]
            self._evaluate()
        else:
            self._follow(0)

    def _evaluate(self) -> None:
        self._read: tuple[list[int], list[list[int]], list[bool]] | None = None
        mx.async_eval(
            self._chosen,
            self.drafts,
            self._rows,
            self._states,
            self._broken,
            self._along,
        )

    def _follow(self, start: int) -> None:
        """Choose at position `start` and all behind it, on the path that is right."""
        chosen = [self._chosen[i : i + 1] for i in range(start)]
        self._error = None
        for noted in (self._rows, self._broken, self._states):
            del noted[start:]
        try:
            for i in range(start, self._logits.shape[1]):
                self._states.append(random_state.current())
                logits = self._logits[self._path(chosen), i]
                chosen.append(self._choose(logits[None], chosen))
            self._states.append(random_state.current())
        except Exception as error:  # told if it comes to that position
            self._error = error
        except BaseException:  # of the user's, who wants to stop
            random_state.put_back(self._states[start])
            raise
        self._chosen = mx.concatenate([self._chosen[:0], *chosen])
        self._evaluate()

    def _path(self, chosen: list[mx.array]) -> int | mx.array:
        """The first path that is right so far."""
        if not chosen or self.drafts.shape[0] == 1:
            return 0
        right = self.drafts[:, : len(chosen)] == mx.concatenate(chosen)[None]
        return mx.argmax(mx.all(right, axis=1))

    def _choose(self, logits: mx.array, chosen: list[mx.array]) -> mx.array:
        """A `(1,)` token from `(1, V)` logits behind these drafts."""
        if self._processors:
            tokens = self._history.followed_by(self._pending, *chosen)
            logits = processed(logits, self._processors, tokens)
        logprobs = log_probabilities(logits)
        if self._processors:
            self._broken.append(is_broken(logprobs))
        token = self._sampler(logprobs)
        self._rows.append(logprobs.squeeze(0))
        return token

    def judge(self, i: int) -> None:
        """See :class:`Judge`; the choice was made, unless the caller drew since."""
        if self._left is not None and self._here() and self._drawn():
            self._follow(i)
        if self._error is not None and i == len(self._rows):
            self._leave(i)
            with self._history.choosing(self._history.length + i + 1):
                raise self._error
        self._leave(i + 1)

    def _leave(self, i: int) -> None:
        """Make the random state the one before the choice at position i."""
        if self._states and self._here():
            random_state.put_back(self._states[i])
            self._left = mx.random.state[0]

    def _here(self) -> bool:
        """Each thread has a random state of its own."""
        return threading.get_ident() == self._thread

    def _drawn(self) -> bool:
        """Whether the caller has drawn numbers, or seeded: the array is another one."""
        return self._left is not mx.random.state[0]

    def broken(self, i: int) -> bool:
        """See :class:`Judge`."""
        return bool(self._processors) and self._values()[2][i]

    def token(self, i: int) -> int:
        """See :class:`Judge`."""
        return self._values()[0][i]

    def accepts(self, i: int) -> bool:
        """See :class:`Judge`."""
        chosen, drafts, _ = self._values()
        return not self.broken(i) and any(
            path[: i + 1] == chosen[: i + 1] for path in drafts if i < len(path)
        )

    def row(self, i: int) -> int:
        """See :class:`Judge`."""
        if self.drafts.shape[0] == 1:
            return 0
        chosen, drafts, _ = self._values()
        return next(p for p, path in enumerate(drafts) if path[:i] == chosen[:i])

    def chosen(self, i: int) -> mx.array:
        """See :class:`Judge`."""
        return self._chosen[i : i + 1]

    def logprobs(self, i: int) -> mx.array:
        """See :class:`Judge`."""
        return self._rows[i]

    def choices(self) -> list[int]:
        """See :class:`Judge`."""
        return self._values()[0]

    def settle(self, kept: int) -> None:
        """See :class:`Judge`."""
        if kept:
            self._history.add(self._pending)
        if kept > 1:
            self._history.add(self._chosen[: kept - 1])

    def _values(self) -> tuple[list[int], list[list[int]], list[bool]]:
        if self._read is None:
            mx.eval(self._chosen, self.drafts, self._broken, self._along)
            broken = [flag.item() for flag in self._broken]
            self._read = self._chosen.tolist(), self.drafts.tolist(), broken
        return self._read


class OneByOne:
    """Positions sampled one after the other, each only once it is needed.

    Args:
        logits: `(P, S, V)`.
        drafts: `(P, S - 1)` drafted tokens.
        sampler: Any sampler.
        processors: Logits processors, called in order.
        history: What was fed before; the inputs kept are added to it.
        pending: Input 0, as the `(1,)` array that was chosen for it.
        along: More arrays, evaluated with the choices: reading them then waits for
            nothing.
    """

    def __init__(
        self,
        logits: mx.array,
        drafts: mx.array,
        sampler: Sampler,
        processors: Sequence[LogitsProcessor],
        history: History,
        pending: mx.array,
        along: Sequence[mx.array] = (),
    ) -> None:
        self._logits = logits
        self.drafts = drafts
        self._sampler = sampler
        self._processors = processors
        self._history = history
        self._fed = [pending]
        self._along = list(along)
        self._logprobs: list[mx.array] = []
        self._broken: list[mx.array] = []
        self._draft_ids: list[list[int]] | None = None

    def judge(self, i: int) -> None:
        """See :class:`Judge`."""
        row = self.row(i)
        before = random_state.current()
        self._history.add(self._fed[i])
        try:
            with self._history.choosing(self._history.length):
                self._choose(self._logits[row : row + 1, i, :])
        except Exception:
            random_state.put_back(before)
            raise

    def _choose(self, logits: mx.array) -> None:
        """Choose from `(1, V)` logits."""
        if self._processors:
            logits = processed(logits, self._processors, self._history.tokens)
        logprobs = logits - mx.logsumexp(logits, keepdims=True)
        broken = is_broken(logprobs)
        chosen = self._sampler(logprobs)
        mx.async_eval(chosen, logprobs, self.drafts, broken, self._along)
        self._broken.append(broken)
        self._fed.append(chosen)
        self._logprobs.append(logprobs.squeeze(0))

    def broken(self, i: int) -> bool:
        """See :class:`Judge`."""
        return bool(self._processors) and self._broken[i].item()

    def token(self, i: int) -> int:
        """See :class:`Judge`."""
        return self._fed[i + 1].item()

    def accepts(self, i: int) -> bool:
        """See :class:`Judge`."""
        if i >= self.drafts.shape[1] or self.broken(i):
            return False
        chosen = [self.token(j) for j in range(i + 1)]
        return any(path[: i + 1] == chosen for path in self._paths())

    def row(self, i: int) -> int:
        """See :class:`Judge`."""
        if self.drafts.shape[0] == 1:
            return 0
        chosen = [self.token(j) for j in range(i)]
        return next(p for p, path in enumerate(self._paths()) if path[:i] == chosen)

    def _paths(self) -> list[list[int]]:
        if self._draft_ids is None:
            self._draft_ids = self.drafts.tolist()
        return self._draft_ids

    def chosen(self, i: int) -> mx.array:
        """See :class:`Judge`."""
        return self._fed[i + 1]

    def logprobs(self, i: int) -> mx.array:
        """See :class:`Judge`."""
        return self._logprobs[i]

    def choices(self) -> list[int]:
        """See :class:`Judge`."""
        return [self.token(i) for i in range(len(self._fed) - 1)]

    def settle(self, kept: int) -> None:
        """Nothing to do: no position was sampled that plain decoding would not."""


def is_broken(logprobs: mx.array) -> mx.array:
    """Whether `(1, V)` log-probabilities leave nothing to choose.

    If one logit is NaN, or all are -inf, normalising has made all of them NaN.
    """
    return mx.all(mx.isnan(logprobs))
