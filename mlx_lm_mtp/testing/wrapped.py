"""Drafters around a drafter: one that watches it, and some that break it on purpose.

Each passes everything on, so that they can be put around one another, and the drafter
inside goes through all that it would go through alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import mlx.core as mx

from ..drafters.base import CHAIN, Choices, Drafter, Proposal, Wanted
from .oracle import random_state
from .scripted import Scripted


class Wrapped:
    """A drafter that does what another one does.

    Args:
        drafter: The other one.
    """

    def __new__(cls, drafter: Any, *args: Any, **kwargs: Any) -> Wrapped:
        """An object of a class of its own: protocols look for methods in the class."""
        methods = {
            name: _passed_on(name)
            for name in dir(drafter)
            if not name.startswith("_")
            and not hasattr(cls, name)
            and callable(getattr(drafter, name))
        }
        return super().__new__(type(cls.__name__, (cls,), methods))

    def __init__(self, drafter: Any) -> None:
        self.inner = drafter

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not set yet
            raise AttributeError(name)
        return getattr(self.inner, name)

    def draft(self, token: mx.array, k: int, wanted: Wanted = CHAIN) -> Proposal:
        """What the other one proposes; it is asked as the loop asks it."""
        if wanted == CHAIN:
            return self.inner.draft(token, k)
        return self.inner.draft(token, k, wanted)


def _passed_on(name: str) -> Callable[..., Any]:
    def method(self: Wrapped, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.inner, name)(*args, **kwargs)

    return method


class Watched(Wrapped):
    """Notes down what a drafter is shown and what it proposes, and finds faults.

    Attributes:
        shown: The tokens that it was shown since `begin`, those taken back left out.
        hidden_shown: The `(H,)` hidden states that came with them, or None each.
        proposals: What it proposed since `begin`, a list of tokens each.
        asked: How many drafts it was asked for each time.
        faults: What it did that its contract does not allow.
        resumed: How many tokens it said to have seen, when it last resumed; or None.
    """

    suspicion = None  # on random models drafts are wrong, and nobody is to blame

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter)
        self.faults: list[str] = []
        self.resumed: int | None = None
        self._forget()

    def _forget(self) -> None:
        self.shown: list[int] = []
        self.hidden_shown: list[mx.array | None] = []
        self.proposals: list[list[int]] = []
        self.asked: list[int] = []

    def begin(self) -> None:
        """Forget what was noted down, but for faults."""
        self._forget()
        with self._quiet("begin"):
            self.inner.begin()

    def prefill(self, tokens: mx.array, hidden: mx.array | None) -> None:
        """See `(1, T)` tokens of the prompt."""
        self._note(tokens, hidden)
        with self._quiet("prefill"):
            self.inner.prefill(tokens, hidden)

    def observe(self, tokens: mx.array, hidden: mx.array | None) -> None:
        """See the `(1, n)` tokens of a round."""
        self._note(tokens, hidden)
        with self._quiet("observe"):
            self.inner.observe(tokens, hidden)

    def draft(self, token: mx.array, k: int, wanted: Wanted = CHAIN) -> Proposal:
        """Its proposal, looked at."""
        self.asked.append(k)
        times = 0

        def choose(logits: mx.array, drafted: mx.array, n: int = 1) -> Choices:
            nonlocal times
            assert wanted.choose is not None
            times += 1
            return wanted.choose(logits, drafted, n)

        if wanted.choose is None:
            with self._quiet("draft"):
                proposal = super().draft(token, k, wanted)
        else:  # what is drawn in there is put back, whoever draws it
            proposal = super().draft(token, k, replace(wanted, choose=choose))
        if not well_formed(proposal):
            return proposal  # the loop says what is wrong
        self.proposals.append(proposal.tokens[0, :k].tolist())
        self.faults += _confidence_faults(proposal, wanted)
        self.faults += _candidate_faults(proposal, wanted)
        self.faults += _branch_faults(proposal, wanted)
        if wanted.choose is not None and self.proposals[-1] and not times:
            self.faults.append(
                "choose: the drafter gives logprobs, and proposed "
                f"{self.proposals[-1]} without asking Wanted.choose"
            )
        return proposal

    def suspend(self) -> list[Any]:
        """What it gives for the caller's prompt cache."""
        with self._quiet("suspend"):
            return self.inner.suspend()

    def resume(self, caches: Sequence[Any]) -> int:
        """What it says to have seen; nothing of it counts as shown."""
        with self._quiet("resume"):
            self.resumed = self.inner.resume(caches)
        return self.resumed

    def rewind(self, tokens: int) -> None:
        """Take tokens back."""
        left = len(self.shown) - tokens
        self.shown, self.hidden_shown = self.shown[:left], self.hidden_shown[:left]
        with self._quiet("rewind"):
            self.inner.rewind(tokens)

    def _note(self, tokens: mx.array, hidden: mx.array | None) -> None:
        self.shown += tokens[0].tolist()
        none = [None] * tokens.shape[1]
        self.hidden_shown += none if hidden is None else list(hidden[0])

    @contextmanager
    def _quiet(self, method: str) -> Iterator[None]:
        """The random state of `mx.random` stays as it is in here."""
        before = random_state()
        yield
        if random_state() != before:
            self.faults.append(
                f"random state: {method}() changed the state of mx.random, which "
                "belongs to the target's sampler; draw with a key of its own"
            )


def well_formed(proposal: Any) -> bool:
    """Whether a proposal has `(1, k')` integers as its tokens."""
    tokens = getattr(proposal, "tokens", None)
    return (
        isinstance(tokens, mx.array)
        and tokens.ndim == 2
        and tokens.shape[0] == 1
        and mx.issubdtype(tokens.dtype, mx.integer)
    )


def _confidence_faults(proposal: Proposal, wanted: Wanted) -> list[str]:
    if not wanted.confidence or not isinstance(proposal.confidence, mx.array):
        return []
    values = proposal.confidence.astype(mx.float32).flatten().tolist()
    # A little above 1 is rounding.
    wrong = [v for v in values if not (math.isfinite(v) and -1e-3 <= v <= 1 + 1e-3)]
    if not wrong:
        return []
    return [f"confidence: probabilities were expected, and {wrong} seen"]


def _candidate_faults(proposal: Proposal, wanted: Wanted) -> list[str]:
    given = proposal.candidates
    shape = (*proposal.tokens.shape, wanted.candidates)
    if not wanted.candidates or not isinstance(given, mx.array) or given.ndim != 3:
        return []
    if given.shape[2] > wanted.candidates:
        return [f"candidates: {shape} were expected, and {given.shape} seen"]
    tokens, best = proposal.tokens[0].tolist(), given[0, :, :1].flatten().tolist()
    if tokens == best:
        return []
    return [f"candidates: the best are {best}, and {tokens} was proposed"]


def _branch_faults(proposal: Proposal, wanted: Wanted) -> list[str]:
    if not wanted.branches or not isinstance(proposal.branches, tuple | list):
        return []
    if len(proposal.branches) > len(wanted.branches):
        return [f"branches: {wanted.branches} wanted, {len(proposal.branches)} given"]
    tokens = proposal.tokens[0].tolist()
    firsts = set(enumerate(tokens))
    for branch in proposal.branches:
        first = (branch.position, branch.token.item())
        if first in firsts:
            return [
                f"branches: token {first[1]} at position {first[0]} was proposed "
                f"before ({tokens}); another choice was expected"
            ]
        firsts.add(first)
    return []


class Steered(Wrapped):
    """Drafts as another drafter does, but says what a script says.

    So it can be decided what is accepted, whatever is inside; which is then shown
    tokens that it did not propose, as it is when a branch is kept.

    Args:
        drafter: The drafter that goes along.
        script: What is said.
    """

    def __init__(self, drafter: Any, script: Scripted) -> None:
        super().__init__(drafter)
        self.script = script

    def begin(self) -> None:
        """Both begin."""
        self.inner.begin()
        self.script.begin()

    def draft(self, token: mx.array, k: int, wanted: Wanted = CHAIN) -> Proposal:
        """What the script says; the other one's proposal is only computed."""
        made = super().draft(token, k, replace(wanted, go_on=None))
        if not well_formed(made):
            return made
        mx.eval(made.tokens)
        if wanted == CHAIN:
            return self.script.draft(token, k)
        return self.script.draft(token, k, wanted)  # type: ignore[call-arg]

    def observe(self, tokens: mx.array, hidden: mx.array | None) -> None:
        """Both see the tokens of a round."""
        self.inner.observe(tokens, hidden)
        self.script.observe(tokens, None)

    def rewind(self, tokens: int) -> None:
        """Both go back."""
        self.inner.rewind(tokens)
        seen = self.script.seen
        self.script.seen = seen[: len(seen) - tokens]


class Spoiled(Wrapped):
    """Spoils the proposals of another drafter.

    Args:
        drafter: The other one.
        spoil: Its proposal -> what is proposed.
    """

    def __init__(self, drafter: Any, spoil: Callable[[Proposal], Any]) -> None:
        super().__init__(drafter)
        self.spoil = spoil

    def draft(self, token: mx.array, k: int, wanted: Wanted = CHAIN) -> Any:
        """The spoilt proposal."""
        return self.spoil(super().draft(token, k, wanted))


class Raised(Exception):
    """What the kit raises on purpose."""


class Faulty(Wrapped):
    """Raises in one of its methods, after the other drafter has done its part.

    Args:
        drafter: The other one.
        method: Where.
        call: At which call of it, from 0.
    """

    def __init__(self, drafter: Any, method: str, call: int) -> None:
        super().__init__(drafter)
        self.method, self.left = method, call

    def prefill(self, tokens: mx.array, hidden: mx.array | None) -> None:
        """See `(1, T)` tokens of the prompt."""
        self.inner.prefill(tokens, hidden)
        self._count("prefill")

    def draft(self, token: mx.array, k: int, wanted: Wanted = CHAIN) -> Proposal:
        """The other one's proposal."""
        proposal = super().draft(token, k, wanted)
        self._count("draft")
        return proposal

    def observe(self, tokens: mx.array, hidden: mx.array | None) -> None:
        """See the `(1, n)` tokens of a round."""
        self.inner.observe(tokens, hidden)
        self._count("observe")

    def _count(self, method: str) -> None:
        if method == self.method:
            self.left -= 1
            if self.left == -1:
                raise Raised(f"in {method}()")
