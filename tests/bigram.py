"""A drafter that gives all that a drafter can give but a head, and broken ones like it.

Each broken one is broken in one way, and named after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from mlx_lm_mtp.drafters.base import (
    CHAIN,
    OFFERS,
    Branch,
    Choices,
    DraftContext,
    Proposal,
    Wanted,
)
from mlx_lm_mtp.testing.models import VOCAB


class Bigram:
    """Proposes what has followed a token last.

    Args:
        context: As its factory gets it.
    """

    name = "bigram"
    needs_hidden = False
    gives = OFFERS - {"head"}

    def __init__(self, context: DraftContext) -> None:
        self.shortlist = context.options.shortlist
        self.begin()

    def begin(self) -> None:
        self.tokens: list[int] = []
        self.prompt: set[int] = set()

    def prefill(self, tokens: mx.array, hidden: mx.array | None) -> None:
        self.tokens += tokens[0].tolist()
        self.prompt |= set(tokens[0].tolist())

    def observe(self, tokens: mx.array, hidden: mx.array | None) -> None:
        self.tokens += tokens[0].tolist()

    def draft(self, token: mx.array, k: int, wanted: Wanted = CHAIN) -> Proposal:
        chain: list[Choices] = []
        last, path = token.item(), mx.zeros((1, 0), dtype=mx.uint32)
        while len(chain) < k:
            n = max(1 + wanted.branches.count(len(chain)), wanted.candidates)
            chain.append(self.choices(last, path, n, wanted))
            first = chain[-1].tokens[..., 0].astype(mx.uint32)
            path = mx.concatenate([path, first], axis=1)
            last = first.item()
            goes_on = wanted.go_on is None or len(chain) == k
            if not goes_on and not wanted.go_on(chain[-1].confidence):
                break
        return self.proposal(path, chain, wanted)

    def draft_behind(self, path: mx.array, k: int) -> Proposal:
        *shown, last = path.tolist()[0]
        before, self.tokens = self.tokens, self.tokens + shown
        proposal = self.draft(mx.array([[last]]), k)
        self.tokens = before
        return proposal

    def choices(self, last: int, path: mx.array, n: int, wanted: Wanted) -> Choices:
        choose = wanted.choose or (lambda logits, _, n: Choices.likeliest(logits, n))
        return choose(self.logits(last), path, n)

    def proposal(
        self, path: mx.array, chain: list[Choices], wanted: Wanted
    ) -> Proposal:
        listed = [choice.tokens[..., : wanted.candidates] for choice in chain]
        return Proposal(
            path,
            confidence=mx.concatenate([choice.confidence for choice in chain], axis=1),
            candidates=mx.concatenate(listed, axis=1) if wanted.candidates else None,
            branches=self.branches(path, chain, wanted),
        )

    def branches(
        self, path: mx.array, chain: list[Choices], wanted: Wanted
    ) -> tuple[Branch, ...]:
        found = []
        for i, at in enumerate(wanted.branches):
            if at >= len(chain):
                continue
            other = 1 + wanted.branches[:i].count(at)
            token = chain[at].tokens[..., other].astype(mx.uint32)
            rest = path[:, at + 1 :]
            found.append(Branch(at, token, rest))
        return tuple(found)

    def logits(self, last: int) -> mx.array:
        counts = [0.0] * VOCAB
        for i, (one, other) in enumerate(
            zip(self.tokens, self.tokens[1:], strict=False)
        ):
            if one == last:
                counts[other] = 3 + 0.5 * i
        if self.shortlist:
            allowed = self.prompt | set(range(self.shortlist))
            counts = [c if t in allowed else -1e9 for t, c in enumerate(counts)]
        return mx.array([[counts]])

    def suspend(self) -> list[Any]:
        seen = mx.array(self.tokens, dtype=mx.float32)[None, None, :, None]
        return [KVCache.from_state((seen, seen, len(self.tokens)))]

    def resume(self, caches: Sequence[Any]) -> int:
        if [type(cache) for cache in caches] != [KVCache] or caches[0].keys is None:
            return 0
        seen = caches[0].keys[0, 0, : caches[0].offset, 0]
        self.tokens = [int(token) for token in seen.tolist()]
        return len(self.tokens)

    def rewind(self, tokens: int) -> None:
        self.tokens = self.tokens[: len(self.tokens) - tokens]


# --- broken ones --------------------------------------------------------------------


class Meddling(Bigram):
    """Halves a layer of the target."""

    def __init__(self, context: DraftContext) -> None:
        super().__init__(context)
        layer = context.model.layers[-1]
        layer.mlp.down_proj.weight = layer.mlp.down_proj.weight * 0.5


class Drawing(Bigram):
    """Draws from the target's random numbers."""

    def draft(self, token: mx.array, k: int, wanted: Wanted = CHAIN) -> Proposal:
        mx.eval(mx.random.uniform())
        return super().draft(token, k, wanted)


class Seeding(Bigram):
    """Seeds the target's random numbers, as if they were its own."""

    def observe(self, tokens: mx.array, hidden: mx.array | None) -> None:
        super().observe(tokens, hidden)
        mx.random.seed(7)


class Impatient(Bigram):
    """Will not draft a single token."""

    def draft(self, token: mx.array, k: int, wanted: Wanted = CHAIN) -> Proposal:
        if k < 2:
            raise ValueError("not worth it")
        return super().draft(token, k, wanted)


class Narrow(Bigram):
    """Has room for four drafts."""

    def draft(self, token: mx.array, k: int, wanted: Wanted = CHAIN) -> Proposal:
        if k > 4:
            raise IndexError("out of room")
        return super().draft(token, k, wanted)


class AllOrNothing(Bigram):
    """Believes that of its drafts all are kept, or none."""

    gives = Bigram.gives - {"rewind"}

    def observe(self, tokens: mx.array, hidden: mx.array | None) -> None:
        if tokens.shape[1] not in (1, 4):
            raise ValueError(f"{tokens.shape[1]} tokens")
        super().observe(tokens, hidden)


class NeverAlone(Bigram):
    """Believes that a round has drafts."""

    drafted = False

    def begin(self) -> None:
        super().begin()
        self.drafted = False

    def draft(self, token: mx.array, k: int, wanted: Wanted = CHAIN) -> Proposal:
        self.drafted = True
        return super().draft(token, k, wanted)

    def observe(self, tokens: mx.array, hidden: mx.array | None) -> None:
        assert self.drafted, "observe() without draft()"
        super().observe(tokens, hidden)
        self.drafted = False


class Unfinished(Bigram):
    """Cannot begin anew while a round is open."""

    open = False

    def begin(self) -> None:
        if self.open:
            raise RuntimeError("the last generation has not ended")
        super().begin()

    def draft(self, token: mx.array, k: int, wanted: Wanted = CHAIN) -> Proposal:
        self.open = True
        return super().draft(token, k, wanted)

    def observe(self, tokens: mx.array, hidden: mx.array | None) -> None:
        self.open = False
        super().observe(tokens, hidden)

    def rewind(self, tokens: int) -> None:
        self.open = False
        super().rewind(tokens)


class OnlyInt32(Bigram):
    """Believes to know the dtype of prompts."""

    def prefill(self, tokens: mx.array, hidden: mx.array | None) -> None:
        assert tokens.dtype == mx.int32, tokens.dtype
        super().prefill(tokens, hidden)


class Floating(Bigram):
    """Proposes real numbers."""

    def draft(self, token: mx.array, k: int, wanted: Wanted = CHAIN) -> Proposal:
        made = super().draft(token, k, wanted)
        return Proposal(made.tokens.astype(mx.float32))


class Reminiscent(Bigram):
    """Remembers the generation before."""

    def __init__(self, context: DraftContext) -> None:
        self.tokens = []
        super().__init__(context)

    def begin(self) -> None:
        self.prompt = set()


class Vain(Bigram):
    """Learns from what it said itself."""

    def draft(self, token: mx.array, k: int, wanted: Wanted = CHAIN) -> Proposal:
        made = super().draft(token, k, wanted)
        self.tokens += [token.item(), *made.tokens[0].tolist()]
        return made


class Headlong(Bigram):
    """Never goes back."""

    def rewind(self, tokens: int) -> None:
        pass


class OneShort(Bigram):
    """Goes back by one token less than it is told to."""

    def rewind(self, tokens: int) -> None:
        super().rewind(max(tokens - 1, 0))


class Shortsighted(Bigram):
    """Looks at the last token of a path alone."""

    def draft_behind(self, path: mx.array, k: int) -> Proposal:
        return super().draft_behind(path[:, -1:], k)


class Imaginative(Bigram):
    """Takes a path for what has been said."""

    def draft_behind(self, path: mx.array, k: int) -> Proposal:
        self.tokens += path.tolist()[0][:-1]
        return self.draft(path[:, -1:], k)


class Amnesiac(Bigram):
    """Suspends less than it has seen, and does not say so."""

    def resume(self, caches: Sequence[Any]) -> int:
        seen = super().resume(caches)
        self.tokens = self.tokens[-2:]
        return seen


class Boastful(Bigram):
    """Says to have seen more than it was shown."""

    def resume(self, caches: Sequence[Any]) -> int:
        seen = super().resume(caches)
        return seen + 1 if seen else 0


class Trusting(Bigram):
    """Believes that all caches are its own."""

    def resume(self, caches: Sequence[Any]) -> int:
        return super().resume(caches) or len(caches)


class Sure(Bigram):
    """Takes logits for probabilities."""

    def proposal(
        self, path: mx.array, chain: list[Choices], wanted: Wanted
    ) -> Proposal:
        chain = [c._replace(confidence=c.confidence * 9) for c in chain]
        return super().proposal(path, chain, wanted)


class WorstFirst(Bigram):
    """Lists its choices from the wrong end."""

    def proposal(
        self, path: mx.array, chain: list[Choices], wanted: Wanted
    ) -> Proposal:
        if wanted.candidates:
            chain = [c._replace(tokens=c.tokens[..., ::-1]) for c in chain]
        return super().proposal(path, chain, wanted)


class Repeating(Bigram):
    """Its branches begin as its first path goes on."""

    def branches(
        self, path: mx.array, chain: list[Choices], wanted: Wanted
    ) -> tuple[Branch, ...]:
        return tuple(
            Branch(at, path[:, at : at + 1], path[:, at + 1 :])
            for at in wanted.branches
            if at < len(chain)
        )


class Headstrong(Bigram):
    """Gives log-probabilities, it says, and asks nobody."""

    def choices(self, last: int, path: mx.array, n: int, wanted: Wanted) -> Choices:
        return super().choices(last, path, n, CHAIN)


class Longlist(Bigram):
    """Does not obey the option `shortlist`."""

    def logits(self, last: int) -> mx.array:
        row = mx.random.normal((1, 1, VOCAB), key=mx.random.key(len(self.tokens)))
        return row + super().logits(last) * 0
