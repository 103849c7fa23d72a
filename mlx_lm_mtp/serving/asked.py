"""What one request asks for, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import InvalidOption
from ..options import DraftOptions
from ..stats import DraftStats, Tally

NONE = "none"
BATCHED = "several requests were active, which are decoded in one batch"
_SHOWN = (
    "drafter",
    "num_draft_tokens",
    "rounds",
    "mean_acceptance_length",
    "acceptance_rate",
    "acceptance_per_position",
    "rounds_by_k",
    "parked",
)


@dataclass
class Asked:
    """How the tokens of one request are to be drafted.

    Args:
        draft: The name of a drafter; None for plain decoding.
        options: How to draft, k included.
        explicit: Whether the request itself says so, and not the command line.
        tally: Filled while it is answered.
        reason: Why nothing is drafted, once that is known.
        drafter: What drafts, once it is built.
        told: Tokens that it was told, wherever they came from.
        batched: Those of them that came from stock's batch.
    """

    draft: str | None
    options: DraftOptions
    explicit: bool = False
    tally: Tally = field(default_factory=Tally)
    reason: str = ""
    drafter: Any = None
    told: int = 0
    batched: int = 0

    @property
    def stats(self) -> DraftStats:
        """The counts so far."""
        return self.tally.stats

    @property
    def why(self) -> str:
        """Why nothing was drafted, as far as is known: all rounds may be parked."""
        return self.reason or next(iter(self.stats.parked), "")

    def to_dict(self) -> dict[str, Any]:
        """For the usage of an answer."""
        stats = self.stats
        if not stats.drafted:
            return {"drafter": None, "reason": self.why or "nothing was drafted"}
        found = stats.to_dict()
        counts = {"drafted": stats.drafted.total(), "accepted": stats.accepted.total()}
        counts["batched"] = self.batched
        return {name: found[name] for name in _SHOWN} | counts


def read(
    body: Mapping[str, Any],
    default: Asked,
    num_draft_tokens: int,
    *,
    draft_model: str | None = None,
    ranks: int = 1,
) -> Asked:
    """What a request asks for: ``draft`` and ``draft_options`` of its body.

    Args:
        body: The request.
        default: What the command line asks for.
        num_draft_tokens: The request's, or the command line's.
        draft_model: The one of the command line.
        ranks: Processes that the server consists of.

    Raises:
        InvalidOption: If there is no such drafter, an option is none, or nobody can
            draft so here.
    """
    draft = body.get("draft", default.draft)
    if draft is not None and not isinstance(draft, str):
        raise InvalidOption(f"draft is {draft!r}; give the name of a drafter, or none.")
    options = body.get("draft_options")
    given = DraftOptions.of(default.options if options is None else options)
    given = DraftOptions.of(given, num_draft_tokens)
    if draft in (None, NONE):
        reason = "plain decoding was asked for" if draft == NONE else ""
        return Asked(None, given, "draft" in body, reason=reason)
    from ..plugins import drafters

    drafters()[draft]
    if "draft" in body:
        _check_here(draft, body.get("draft_model", draft_model), draft_model, ranks)
    reason = "" if num_draft_tokens else "num_draft_tokens is 0"
    return Asked(draft, given, "draft" in body, reason=reason)


def _check_here(
    draft: str, draft_model: str | None, of_server: str | None, ranks: int
) -> None:
    """See that a server can draft as a request asks for."""
    if draft_model == "default_model":  # stock's name for the server's own
        draft_model = of_server
    if draft_model is not None:
        raise InvalidOption(
            f"draft is {draft!r}, but the draft model {draft_model} drafts; give "
            "draft_model as null, or leave out draft."
        )
    if ranks > 1:
        raise InvalidOption(
            f"draft is {draft!r}, but this server is distributed over {ranks} ranks, "
            "which cannot agree on drafts; leave out draft."
        )
