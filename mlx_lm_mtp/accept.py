"""What is accepted: the target's own sampler decides, position after position.

A draft is kept when it equals the token that plain decoding would have sampled there,
so the sampler is run as stock runs it: on one `(1, V)` row of log-probabilities after
the other, from the random state that plain decoding would have. Both judges answer the
same questions about position i of a verify (the row that follows input i):

- :class:`AtOnce` samples all rows in one graph and reads them with one
  synchronisation. It serves samplers that are known to draw on nothing but the random
  state of `mx.random`, which is put back to where plain decoding would have left it.
- :class:`OneByOne` serves everything else: logits processors and samplers may keep a
  state of their own, so they are called exactly as often, and shown exactly the
  histories, as `generate_step` would.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx
from mlx_lm import sample_utils
from mlx_lm.sample_utils import LogitsProcessor, Sampler, greedy_sampler

from . import random_state


class Judge(Protocol):
    """The target's choice at each position of one verify of S inputs."""

    def judge(self, i: int) -> None:
        """Input i is kept: choose the token that follows it."""

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


def is_pure(sampler: Sampler) -> bool:
    """Whether a sampler depends on its input and `mx.random`'s state alone.

    True of the samplers that stock makes; a callable of the user's may keep any state.
    """
    # Its globals cannot be borrowed, as a name can.
    return getattr(sampler, "__globals__", None) is vars(sample_utils)


def log_probabilities(logits: mx.array) -> mx.array:
    """Normalised over the last axis, in the logits' own dtype as stock does.

    The subtraction rounds, and may make a tie that argmax then resolves: to choose
    from the logits instead would not be stock's choice.
    """
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


class AtOnce:
    """All positions sampled in one graph.

    Where there are several paths, the graph follows the first one that is right so far.

    Args:
        logits: `(P, S, V)`.
        drafts: `(P, S - 1)` drafted tokens.
        sampler: A pure sampler, see :func:`is_pure`.
    """

    def __init__(self, logits: mx.array, drafts: mx.array, sampler: Sampler) -> None:
        self._drafts = drafts
        self._thread = threading.get_ident()
        self._states: list[mx.array] = []
        self._read: tuple[list[int], list[list[int]]] | None = None
        if logits.shape[0] > 1:
            self._logprobs, self._chosen = self._walk(logits, sampler)
        else:
            self._logprobs = log_probabilities(logits[0])
            self._chosen = self._choose(sampler)
        self._rows = [self._logprobs[i] for i in range(logits.shape[1])]
        mx.async_eval(self._chosen, self._drafts, self._rows, self._states)

    def _choose(self, sampler: Sampler) -> mx.array:
        if sampler is greedy_sampler:
            return sampler(self._logprobs)
        return self._sample(sampler)

    def _sample(self, sampler: Sampler) -> mx.array:
        chosen = []
        self._states.append(random_state.current())
        for row in mx.split(self._logprobs, self._logprobs.shape[0]):
            chosen.append(sampler(row))
            self._states.append(random_state.current())
        return mx.concatenate(chosen)

    def _walk(self, logits: mx.array, sampler: Sampler) -> tuple[mx.array, mx.array]:
        right = mx.ones(logits.shape[0], dtype=mx.bool_)
        rows, chosen = [], []
        self._states.append(random_state.current())
        for i in range(logits.shape[1]):
            path = mx.argmax(right)  # the first one
            rows.append(log_probabilities(logits[path, i][None]))
            chosen.append(sampler(rows[-1]))
            self._states.append(random_state.current())
            if i < self._drafts.shape[1]:
                right = right & (self._drafts[:, i] == chosen[-1])
        return mx.concatenate(rows), mx.concatenate(chosen)

    def judge(self, i: int) -> None:
        """Nothing to do: all positions are on their way."""

    def token(self, i: int) -> int:
        """See :class:`Judge`."""
        return self._values()[0][i]

    def accepts(self, i: int) -> bool:
        """See :class:`Judge`."""
        chosen, drafts = self._values()
        return any(path[: i + 1] == chosen[: i + 1] for path in drafts if i < len(path))

    def row(self, i: int) -> int:
        """See :class:`Judge`."""
        if self._drafts.shape[0] == 1:
            return 0
        chosen, drafts = self._values()
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
        elsewhere = threading.get_ident() != self._thread  # it has a state of its own
        if kept + 1 < len(self._states) and not elsewhere:
            random_state.put_back(self._states[kept])

    def _values(self) -> tuple[list[int], list[list[int]]]:
        if self._read is None:
            mx.eval(self._chosen, self._drafts)
            self._read = self._chosen.tolist(), self._drafts.tolist()
        return self._read


class History:
    """The tokens that logits processors are shown, grown as stock grows them."""

    def __init__(self) -> None:
        self.tokens: mx.array | None = None

    def add(self, tokens: mx.array) -> None:
        """Append `(n,)` tokens that were fed."""
        if self.tokens is not None:
            tokens = mx.concatenate([self.tokens, tokens])
        self.tokens = tokens


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
        logits = self._logits[row : row + 1, i, :]
        if self._processors:
            self._history.add(self._fed[i])
            for processor in self._processors:
                logits = processor(self._history.tokens, logits)
        logprobs = logits - mx.logsumexp(logits, keepdims=True)
        chosen = self._sampler(logprobs)
        self._fed.append(chosen)
        self._logprobs.append(logprobs.squeeze(0))
        mx.async_eval(chosen, self._logprobs[-1], self._drafts)

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
