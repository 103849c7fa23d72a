"""What follows from the findings: expected speeds, a number of drafts, one thing to do.

With a(k) tokens a round, v(w) the time of a verify of w tokens and c that of a draft,
k drafts a round are expected to be ``a(k) v(1) / (v(k + 1) + k c)`` times as fast as
none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..stats import NONE
from .findings import Findings

WORKS, DOES_NOT_PAY, BROKEN = 0, 1, 2
OTHER = {"post_norm": "pre_norm", "pre_norm": "post_norm"}
_GAIN = 1.03  # below that, noise decides
_WRONG = 0.05  # of first drafts accepted: more than a wrong head has by chance
_CLEARLY = 0.05  # more first drafts accepted under the other hidden states


@dataclass(frozen=True)
class Verdict:
    """What is to be said.

    Args:
        code: `WORKS`, `DOES_NOT_PAY` or `BROKEN`; also the exit code.
        hidden: The hidden states under which drafts are accepted best.
        speeds: k -> expected speed against plain decoding.
        k: The number of drafts to use; 0 if none pays.
        advice: The one thing to do, a sentence.
    """

    code: int
    advice: str
    hidden: str = ""
    speeds: Mapping[int, float] | None = None
    k: int = 0


def judge(findings: Findings) -> Verdict:
    """The verdict on one model."""
    if findings.error:
        return Verdict(BROKEN, findings.error)
    assert findings.acceptance and findings.verify and findings.draft is not None
    hidden = best_hidden(findings.acceptance, findings.family_hidden)
    accepted = findings.acceptance[hidden]
    if not accepted:
        return Verdict(DOES_NOT_PAY, _undrafted(findings), hidden)
    if accepted[0] <= _WRONG:
        return Verdict(BROKEN, _wrong(findings), hidden)
    if (findings.exact or {}).get(2) == NONE:
        return Verdict(DOES_NOT_PAY, _inexact(), hidden)
    speeds = expected(accepted, findings.verify, findings.draft)
    k = max(speeds, key=speeds.__getitem__)
    if speeds[k] < _GAIN:
        return Verdict(DOES_NOT_PAY, _no_gain(findings, accepted), hidden, speeds)
    return Verdict(WORKS, _use(k, hidden, findings), hidden, speeds, k)


def best_hidden(acceptance: Mapping[str, tuple[float, ...]], family_hidden: str) -> str:
    """The hidden states to use: the family's, unless the others are clearly better."""
    other = OTHER[family_hidden]
    theirs, ours = acceptance[other], acceptance[family_hidden]
    better = bool(theirs and ours) and theirs[0] - ours[0] > _CLEARLY
    return other if better else family_hidden


def expected(
    accepted: tuple[float, ...], verify: Mapping[int, float], draft: float
) -> dict[int, float]:
    """k -> expected speed against plain decoding.

    Args:
        accepted: The share of rounds in which the draft at each position is accepted.
        verify: w -> seconds of a forward of w tokens, 1 to k + 1.
        draft: Seconds of one draft.
    """
    return {
        k: (1 + sum(accepted[:k])) * verify[1] / (verify[k + 1] + k * draft)
        for k in range(1, len(accepted) + 1)
        if k + 1 in verify
    }


def _use(k: int, hidden: str, findings: Findings) -> str:
    option = "" if hidden == findings.family_hidden else _option(hidden)
    return f"Use it: mlx_lm.generate --mtp --num-draft-tokens {k}{option}."


def _option(hidden: str) -> str:
    return f" --draft-option hidden={hidden}"


def _wrong(findings: Findings) -> str:
    norms = (
        ""
        if findings.head is None
        else f" (they are taken to be {findings.head.norms})"
    )
    return (
        "Take the head of the checkpoint that this model was made from: next to "
        "nothing of what this one drafts is accepted, so it is another model's, or its "
        f"norms are written otherwise than was told{norms}."
    )


def _inexact() -> str:
    return (
        "Decode without it, or with --draft-option exactness=fast if tokens may differ "
        "where two are nearly tied: no form of verify has the bits of decoding here."
    )


def _undrafted(findings: Findings) -> str:
    reasons = "; ".join(findings.undrafted or {})
    return f"Decode without it here: nothing could be drafted, since {reasons}."


def _no_gain(findings: Findings, accepted: tuple[float, ...]) -> str:
    assert findings.verify is not None and findings.draft is not None
    wide = findings.verify[2] / findings.verify[1]
    draft = findings.draft / findings.verify[1]
    return (
        "Decode without it on this machine: a verify of two tokens costs "
        f"{wide:.2f} of one and a draft {draft:.2f}, for {1 + accepted[0]:.2f} tokens "
        "a round."
    )
