"""One drafter's proposal, continued by others.

An MTP head is sure of a token or two; where these lead into a text that was there
before, prompt lookup goes on for as long as it is repeated, and costs next to nothing.
Later drafters see what the earlier ones have drafted, so the device is waited for
before them, once a round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..declared import option
from ..errors import InvalidOption
from ..hookspecs import Register, hookimpl
from .base import CHAIN, CONTRACT, DraftContext, Drafter, Proposal, Wanted, gives
from .checked import checked

_ANY = 2**32 - 1  # tokens are checked against the vocabulary when all are put together


@dataclass(frozen=True)
class ChainOptions:
    """Who drafts.

    Args:
        drafters: Names separated by commas, in their turn; behind a colon the most
            tokens that one drafts.
    """

    drafters: str = option("mtp:3,ngram", help="who drafts, NAME or NAME:MOST, in turn")


class ChainDrafter:
    """Asks one drafter after the other, each behind what was drafted before it.

    Args:
        parts: The drafters, each with the most tokens that it drafts (None: all that
            are left). All but the first give ``continues``.

    Raises:
        InvalidOption: If there is none, or one cannot continue.
    """

    name = "chain"

    def __init__(self, parts: Sequence[tuple[Drafter, int | None]]) -> None:
        self.parts: list[tuple[Any, int | None]] = list(parts)
        drafters = [drafter for drafter, _ in self.parts]
        for drafter in drafters[1:]:
            if "continues" not in gives(drafter):
                raise InvalidOption(
                    f"drafter {drafter.name!r} cannot continue what another one has "
                    "drafted (it gives no continues); let it be the first."
                )
        self.first: Any = drafters[0]
        self.needs_hidden = any(drafter.needs_hidden for drafter in drafters)
        self.gives = gives(self.first) & {"logprobs", "caches", "head", "readout"}
        if all("rewind" in gives(drafter) for drafter in drafters):
            self.gives |= {"rewind"}
        self.hidden = getattr(self.first, "hidden", "post_norm")
        self.suspicion = getattr(self.first, "suspicion", None)

    def begin(self) -> None:
        """All start anew."""
        for drafter, _ in self.parts:
            drafter.begin()

    def prefill(self, tokens: mx.array, hidden: mx.array | None) -> None:
        """All see the prompt."""
        for drafter, _ in self.parts:
            drafter.prefill(tokens, hidden if drafter.needs_hidden else None)

    def observe(self, tokens: mx.array, hidden: mx.array | None) -> None:
        """All see what was kept."""
        for drafter, _ in self.parts:
            drafter.observe(tokens, hidden if drafter.needs_hidden else None)

    def rewind(self, tokens: int) -> None:
        """All go back."""
        for drafter, _ in self.parts:
            drafter.rewind(tokens)

    def suspend(self) -> list[Any]:
        """The caches of the first; the others start cold."""
        caches: list[Any] = self.first.suspend()
        return caches

    def resume(self, caches: Sequence[Any]) -> int:
        """Let the first take its caches over."""
        seen: int = self.first.resume(caches)
        return seen

    def draft(self, token: mx.array, k: int, wanted: Wanted = CHAIN) -> Proposal:
        """What the first proposes behind the pending token, and what continues it."""
        path, origins = token.astype(mx.uint32), []
        for drafter, most in self.parts:
            left = k - len(origins)
            n = left if most is None else min(most, left)
            if n > 0:
                tokens = self._ask(drafter, path, n, wanted)
                path = mx.concatenate([path, tokens], axis=1)
                origins += [drafter.name] * tokens.shape[1]
        return Proposal(path[:, 1:], origins=tuple(origins))

    def _ask(self, drafter: Any, path: mx.array, k: int, wanted: Wanted) -> mx.array:
        if drafter is not self.first:
            proposal = drafter.draft_behind(path, k)
        elif wanted == CHAIN:
            proposal = drafter.draft(path, k)
        else:
            proposal = drafter.draft(path, k, wanted)
        return checked(proposal, drafter.name, _ANY, k, CHAIN).tokens


def _build(context: DraftContext) -> ChainDrafter:
    parts = [_part(text) for text in context.own.drafters.split(",")]
    return ChainDrafter([(context.build(name), most) for name, most in parts])


def _part(text: str) -> tuple[str, int | None]:
    name, colon, most = (part.strip() for part in text.partition(":"))
    if not name or (colon and not (most.isdecimal() and int(most))):
        raise InvalidOption(
            f"draft option chain.drafters has the part {text!r}; give the name of a "
            "drafter, or name:most with the most tokens that it drafts."
        )
    return name, int(most) if colon else None


@hookimpl
def mlx_lm_mtp_register_drafters(register: Register) -> None:
    """Register the drafter that is made of others."""
    register("chain", _build, options=ChainOptions, contract=CONTRACT)
