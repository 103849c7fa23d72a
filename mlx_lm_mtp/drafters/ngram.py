"""Prompt lookup: what followed the last tokens when they stood in the text before.

It needs no model. Code, quotations, and answers that repeat their prompt are guessed
well, other texts hardly at all; then nothing is drafted and a round is plain decoding.
(Saxena, "Prompt Lookup Decoding", 2023.)
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from ..declared import option
from ..hookspecs import Register, hookimpl
from .base import CONTRACT, DraftContext, Proposal
from .matching import Matcher


@dataclass(frozen=True)
class NGramOptions:
    """How places that read the same are looked for.

    Args:
        shortest: Tokens that must be the same before anything is drafted.
        longest: Tokens that are compared.
        tries: Earlier places that are compared, the latest first.
    """

    shortest: int = option(3, least=1, help="tokens that must match")
    longest: int = option(16, least=1, help="tokens that are compared")
    tries: int = option(16, least=1, help="earlier places that are compared")


class NGramDrafter:
    """Drafts what followed the longest earlier match of the last tokens.

    Args:
        options: How it is looked for.
    """

    name = "ngram"
    needs_hidden = False
    gives = frozenset({"continues", "rewind"})

    def __init__(self, options: NGramOptions | None = None) -> None:
        self.options = options or NGramOptions()
        self.begin()

    def begin(self) -> None:
        """Start with an empty text."""
        how = self.options
        self.text = Matcher(how.shortest, max(how.longest, how.shortest), how.tries)

    def prefill(self, tokens: mx.array, hidden: mx.array | None) -> None:
        """Add `(1, T)` tokens to the text."""
        self.text.add(tokens.tolist()[0])

    observe = prefill

    def draft(self, token: mx.array, k: int) -> Proposal:
        """What followed the pending `(1, 1)` token and those before it."""
        return self.draft_behind(token, k)

    def draft_behind(self, path: mx.array, k: int) -> Proposal:
        """The same behind `(1, m)` tokens; see :class:`.base.Continuing`."""
        tokens = path.tolist()[0]
        match = self.text.match(tokens)
        return Proposal.of(self.text.following(match, tokens, k) if match else [])

    def rewind(self, tokens: int) -> None:
        """Go back; see :class:`.base.Rewinding`."""
        self.text.drop(tokens)


def _build(context: DraftContext) -> NGramDrafter:
    return NGramDrafter(context.own)


@hookimpl
def mlx_lm_mtp_register_drafters(register: Register) -> None:
    """Register the drafter that needs no model."""
    register("ngram", _build, options=NGramOptions, contract=CONTRACT)
