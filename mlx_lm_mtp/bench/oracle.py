"""A drafter that knows the answer: it shows the speed at a given acceptance.

It is told what the target will say, and says it with a given probability at each
position; a trunk of random weights can be measured with it, and a real one at an
acceptance that its own head does not reach. What drafting costs is another drafter's
business: that one is run as well, and what it drafts is thrown away.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import mlx.core as mx

from ..drafters.base import Drafter, Proposal, Rewinding, gives


class OracleDrafter:
    """Proposes the target's next tokens, each with probability `acceptance`.

    Whether a position is right is drawn once, so it does not depend on k. Positions are
    counted: should the target say something else than the truth, the oracle goes on
    from the same position of the truth.

    Args:
        truth: All tokens that the target will yield, in order.
        acceptance: Probability of the right token, at each position independently.
        vocabulary: Number of tokens, at least 2; a wrong one is any other of them.
        seed: Of the oracle's own random numbers.
        cost: A drafter that is run as well, for the time that it takes; None drafts
            in no time.
    """

    name = "oracle"

    def __init__(
        self,
        truth: Sequence[int],
        acceptance: float,
        *,
        vocabulary: int,
        seed: int = 0,
        cost: Drafter | None = None,
    ) -> None:
        others = frozenset({"rewind"}) if cost is None else gives(cost)
        self.gives = others & {"rewind"}
        self.hidden = getattr(cost, "hidden", "post_norm")
        self.needs_hidden = cost is not None and cost.needs_hidden
        draw = random.Random(seed)
        self._says = [
            token
            if draw.random() < acceptance
            else (token + draw.randrange(1, vocabulary)) % vocabulary
            for token in truth
        ]
        self._cost = cost
        self._seen = 0  # tokens of the truth; the pending one is the next

    def begin(self) -> None:
        """Start at the beginning of the truth."""
        self._seen = 0
        if self._cost is not None:
            self._cost.begin()

    def prefill(self, tokens: mx.array, hidden: mx.array | None) -> None:
        """The prompt is none of the truth: only the other drafter sees it."""
        if self._cost is not None:
            self._cost.prefill(tokens, hidden)

    def draft(self, token: mx.array, k: int) -> Proposal:
        """k tokens from behind the pending one, as far as the truth goes."""
        said = self._says[self._seen + 1 : self._seen + 1 + k]
        tokens = mx.array([said], dtype=mx.uint32).reshape(1, len(said))
        if self._cost is not None:
            # A dependency, or nobody would wait for what is thrown away.
            tokens = mx.depends(tokens, self._cost.draft(token, k).tokens)
        return Proposal(tokens)

    def observe(self, tokens: mx.array, hidden: mx.array | None) -> None:
        """Count the kept tokens."""
        self._seen += tokens.shape[1]
        if self._cost is not None:
            self._cost.observe(tokens, hidden)

    def rewind(self, tokens: int) -> None:
        """Go back by so many kept tokens."""
        self._seen -= tokens
        if isinstance(self._cost, Rewinding):
            self._cost.rewind(tokens)
