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

Where nothing can be chosen, because a processor or the sampler raises or no token is
left, the error comes before input i is yielded, as in stock: caches and random state
are then those of a generation that was stopped at the last yielded token.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import mlx.core as mx
from mlx_lm.sample_utils import LogitsProcessor, Sampler, greedy_sampler

from . import random_state
from .errors import NothingToChoose


class Judge(Protocol):
    """The target's choice at each position of one verify of S inputs."""

    def judge(self, i: int) -> None:
        """Input i is kept: choose the token that follows it.

        Raises:
            NothingToChoose: If the logits processors leave no token.
            Exception: Whatever a processor or the sampler raises.
        """

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
        """Leave the random state as after choosing behind `kept` inputs."""


def log_probabilities(logits: mx.array) -> mx.array:
    """Normalised over the last axis, in the logits' own dtype as stock does.

    The subtraction rounds, and may make a tie that argmax then resolves: to choose
    from the logits instead would not be stock's choice.
    """
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


class History:
    """The tokens fed so far, grown as stock grows them for logits processors.

    Args:
        kept: Whether there are processors; else tokens are only counted.
    """

    def __init__(self, kept: bool = True) -> None:
        self._kept = kept
        self.length = 0
        self.prompt = 0  # of these, how many are the prompt's
        self.tokens: mx.array | None = None

    def add(self, tokens: mx.array) -> None:
        """Append `(n,)` tokens that were fed."""
        self.length += len(tokens)
        if self._kept:
            self.tokens = self.followed_by(tokens)

    def followed_by(self, tokens: mx.array) -> mx.array:
        """The history as it is once these `(n,)` tokens are fed as well."""
        if self.tokens is None:
            return tokens
        return mx.concatenate([self.tokens, tokens])

    @contextmanager
    def choosing(self, fed: int) -> Iterator[None]:
        """What is raised in here tells the token that was to be chosen.

        Args:
            fed: Tokens fed before it.
        """
        try:
            yield
        except NothingToChoose:
            raise  # tells it already
        except Exception as error:
            error.add_note(f"while choosing {self._next(fed)}")
            raise

    def nothing_to_choose(self, fed: int) -> NothingToChoose:
        """The error that processors have left no token to follow `fed` tokens."""
        return NothingToChoose(
            f"the logits processors leave nothing to choose from as {self._next(fed)}: "
            "their row is all -inf or holds NaN; let at least one token stay possible."
        )

    def _next(self, fed: int) -> str:
        number = fed + 1 - (self.prompt or fed)
        return f"token {number} of the output (token {fed + 1} with the prompt)"


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
    """

    def __init__(
        self,
        logits: mx.array,
        drafts: mx.array,
        sampler: Sampler,
        processors: Sequence[LogitsProcessor],
        history: History,
        pending: mx.array,
    ) -> None:
        self._drafts = drafts
        self._sampler = sampler
        self._processors = processors
        self._history = history
        self._pending = pending
        self._thread = threading.get_ident()
        self._states: list[mx.array] = []  # before each choice, if it draws
        self._broken = _nothing()  # for each position: nothing is left to choose
        self._error: Exception | None = None  # raised behind the last chosen one
        self._read: tuple[list[int], list[list[int]], list[bool]] | None = None
        if sampler is greedy_sampler and not processors and logits.shape[0] == 1:
            logprobs = log_probabilities(logits[0])
            self._chosen = sampler(logprobs)
            self._rows = [logprobs[i] for i in range(logits.shape[1])]
        else:
            self._rows, self._chosen = self._follow(logits)
        mx.async_eval(
            self._chosen, self._drafts, self._rows, self._states, self._broken
        )

    def _follow(self, logits: mx.array) -> tuple[list[mx.array], mx.array]:
        """Choose at one position after the other, on the path that is right."""
        rows: list[mx.array] = []
        chosen: list[mx.array] = []
        right = mx.ones(logits.shape[0], dtype=mx.bool_)
        try:
            for i in range(logits.shape[1]):
                path = mx.argmax(right) if len(right) > 1 else 0  # the first one
                self._note_state()
                row, token = self._choose(logits[path, i][None], chosen)
                rows.append(row)
                chosen.append(token)
                if i < self._drafts.shape[1] and len(right) > 1:
                    right = right & (self._drafts[:, i] == token)
            self._note_state()
        except Exception as error:  # told if it comes to that position
            self._error = error
        if self._processors and rows:
            self._broken = mx.concatenate([is_broken(row) for row in rows])
        return rows, mx.concatenate(chosen) if chosen else _nothing()

    def _note_state(self) -> None:
        if self._sampler is not greedy_sampler:
            self._states.append(random_state.current())

    def _choose(
        self, logits: mx.array, chosen: list[mx.array]
    ) -> tuple[mx.array, mx.array]:
        """`(V,)` log-probabilities and a `(1,)` token from `(1, V)` logits."""
        if self._processors:
            tokens = self._history.followed_by(mx.concatenate([self._pending, *chosen]))
            logits = processed(logits, self._processors, tokens)
        logprobs = log_probabilities(logits)
        token = self._sampler(logprobs)
        return logprobs.squeeze(0), token

    def judge(self, i: int) -> None:
        """See :class:`Judge`; the positions are all on their way."""
        fed = self._history.length + i + 1
        if self._error is not None and i == len(self._rows):
            with self._history.choosing(fed):
                raise self._error
        if self._processors and self._values()[2][i]:
            raise self._history.nothing_to_choose(fed)

    def token(self, i: int) -> int:
        """See :class:`Judge`."""
        return self._values()[0][i]

    def accepts(self, i: int) -> bool:
        """See :class:`Judge`."""
        chosen, drafts, _ = self._values()
        return any(path[: i + 1] == chosen[: i + 1] for path in drafts if i < len(path))

    def row(self, i: int) -> int:
        """See :class:`Judge`."""
        if self._drafts.shape[0] == 1:
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
        here = threading.get_ident() == self._thread  # others have another state
        drawn = kept + 1 < len(self._states) or (self._states and self._error)
        if drawn and here:  # beyond what plain decoding would have
            random_state.put_back(self._states[kept])
        if kept:
            self._history.add(mx.concatenate([self._pending, self._chosen[: kept - 1]]))

    def _values(self) -> tuple[list[int], list[list[int]], list[bool]]:
        if self._read is None:
            arrays = (self._chosen, self._drafts, self._broken)
            mx.eval(arrays)
            self._read = tuple(a.tolist() for a in arrays)  # type: ignore[assignment]
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
    """

    def __init__(
        self,
        logits: mx.array,
        drafts: mx.array,
        sampler: Sampler,
        processors: Sequence[LogitsProcessor],
        history: History,
        pending: mx.array,
    ) -> None:
        self._logits = logits
        self._drafts = drafts
        self._sampler = sampler
        self._processors = processors
        self._history = history
        self._fed = [pending]
        self._logprobs: list[mx.array] = []
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
        chosen, broken = self._sampler(logprobs), is_broken(logprobs[0])
        mx.async_eval(chosen, logprobs, self._drafts, broken)
        if self._processors and broken.item():
            raise self._history.nothing_to_choose(self._history.length)
        self._fed.append(chosen)
        self._logprobs.append(logprobs.squeeze(0))

    def token(self, i: int) -> int:
        """See :class:`Judge`."""
        return self._fed[i + 1].item()

    def accepts(self, i: int) -> bool:
        """See :class:`Judge`."""
        if i >= self._drafts.shape[1]:
            return False
        chosen = [self.token(j) for j in range(i + 1)]
        return any(path[: i + 1] == chosen for path in self._paths())

    def row(self, i: int) -> int:
        """See :class:`Judge`."""
        if self._drafts.shape[0] == 1:
            return 0
        chosen = [self.token(j) for j in range(i)]
        return next(p for p, path in enumerate(self._paths()) if path[:i] == chosen)

    def _paths(self) -> list[list[int]]:
        if self._draft_ids is None:
            self._draft_ids = self._drafts.tolist()
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
    """Whether `(V,)` log-probabilities leave nothing to choose, as a `(1,)` array.

    If one logit is NaN, or all are -inf, normalising has made all of them NaN.
    """
    return mx.isnan(logprobs[:1])


def _nothing() -> mx.array:
    return mx.zeros(0, dtype=mx.uint32)
