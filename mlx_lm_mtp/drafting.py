"""The drafter's side of a generation: it is asked, and shown what was kept.

What was kept is noted down and shown in one piece before the drafter is asked again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.sample_utils import LogitsProcessor, Sampler, greedy_sampler

from .drafters.base import Drafter, Proposal, Rewinding, gives
from .history import History
from .noise import SharedNoise
from .options import DraftOptions
from .profile import Stopwatch
from .propose import Proposer

# Verifies without drafts, whose hidden states are held until they are shown.
_MOST = 256


class Kept(NamedTuple):
    """What was kept of one verify."""

    inputs: Sequence[int]  # n of them
    all_hidden: mx.array | None  # (P, n', H), the target's at all inputs, kept or not
    row: int  # the path that was kept

    @property
    def hidden(self) -> mx.array | None:
        """`(1, n, H)`, the target's at each input that was kept."""
        if self.all_hidden is None:
            return None
        return self.all_hidden[self.row : self.row + 1, : len(self.inputs)]


class Ahead(NamedTuple):
    """A round that was drafted before the one before it was yielded to its end."""

    proposal: Proposal
    k: int  # drafts that were asked for
    kept: int  # inputs of the round before, as the drafter was shown them
    yielded: int = 0


class Drafting:
    """One drafter in one generation.

    Args:
        drafter: What proposes tokens.
        options: Which strategy its proposals are for.
        sampler, processors: The target's.
        history: The tokens fed so far.
        stream: What to compute on.
        timed: Times drafting and observing.

    Attributes:
        goes_ahead: Whether a round may be drafted while the tokens of the one before
            it are yielded.

    Raises:
        InvalidOption: If the options need what the drafter does not give.
    """

    def __init__(
        self,
        drafter: Drafter,
        options: DraftOptions,
        sampler: Sampler,
        processors: Sequence[LogitsProcessor],
        history: History,
        stream: Any,
        timed: Stopwatch,
    ) -> None:
        shared = options.draft_sampling == "shared"
        self._noise = SharedNoise(drafter, shared, sampler, processors, history)
        self._propose = Proposer(drafter, options, self._noise)
        self._drafter = drafter
        self._stream = stream
        self._timed = timed
        self._unobserved: list[Kept] = []
        self._ahead: Ahead | None = None
        # What is chosen greedily stays so, whatever the caller draws or seeds.
        self.goes_ahead = (
            sampler is greedy_sampler
            and not processors
            and not options.rescue
            and options.paths == 1
            and options.depth != "confidence"  # which drafting waits for
            and "rewind" in gives(drafter)
        )

    @property
    def unguided(self) -> str:
        """Why the latest drafts are chosen otherwise than the target's tokens."""
        return self._noise.unguided

    def prefill(self, tokens: mx.array, hidden: mx.array | None) -> None:
        """Show the drafter `(1, n)` tokens of the prompt."""
        self._drafter.prefill(tokens, hidden)

    def draft(self, token: int, vocabulary: int, k: int) -> Proposal:
        """Up to k drafts behind the pending token, and what goes with them.

        Args:
            token: Chosen and not fed yet.
            vocabulary: V.
            k: At least 1.

        Raises:
            DrafterError: If the proposal is not what the contract says.
        """
        self.observe()
        with mx.stream(self._stream), self._timed("draft") as wait:
            proposal = self._propose(_known([token]), k, vocabulary)
            # The device drafts while the verify graph is built.
            mx.async_eval(proposal.tokens, [b.token for b in proposal.branches])
            wait(proposal.tokens)
        return proposal

    def go_ahead(self, proposal: Proposal, k: int, kept: int) -> None:
        """Leave for `ahead` what was drafted before the kept inputs are yielded."""
        self._ahead = Ahead(proposal, k, kept)

    def ahead(self) -> Ahead | None:
        """The round that was drafted already, if one was; it can be taken once."""
        ahead, self._ahead = self._ahead, None
        return ahead

    def keep(self, tokens: Sequence[int], hidden: mx.array | None, row: int) -> None:
        """Note the inputs of one path that are kept down for the drafter.

        Args:
            tokens: The inputs.
            hidden: `(P, n', H)`, of all inputs of the verify, kept or not.
            row: The path.
        """
        n = len(tokens)
        if self._ahead is not None:  # the drafter knows them already
            self._ahead = self._ahead._replace(yielded=n)
            return
        self._unobserved.append(Kept(tuple(tokens), hidden, row))
        if len(self._unobserved) >= _MOST:
            self.observe()

    def observe(self) -> None:
        """Show the drafter the inputs that were kept."""
        legs, self._unobserved = self._unobserved, []
        if not legs:
            return
        with mx.stream(self._stream), self._timed("observe"):
            hidden = [kept for leg in legs if (kept := leg.hidden) is not None]
            self._drafter.observe(
                _known([token for leg in legs for token in leg.inputs]),
                mx.concatenate(hidden, axis=1) if hidden else None,
            )

    def rewind(self) -> None:
        """Take back what the drafter was shown and the caller has not been given."""
        ahead = self.ahead()
        if ahead is not None:
            assert isinstance(self._drafter, Rewinding)
            self._drafter.rewind(ahead.kept - ahead.yielded)


def _known(tokens: Sequence[int]) -> mx.array:
    """`(1, n)` tokens for the drafter, who can read them without waiting."""
    return mx.array([tokens], dtype=mx.uint32)
