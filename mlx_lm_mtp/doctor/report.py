"""The findings and the verdict, for people."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from ..stats import NONE
from .findings import Findings, HeadFindings
from .verdict import Verdict

_WIDTH = 14  # of what stands before the colon
_WORDS = ("works", "works, but does not pay here", "broken")


def report(findings: Findings, verdict: Verdict) -> str:
    """All of it, a line each, with the table of costs."""
    lines = [_line("model", findings.model), _line("machine", _machine(findings))]
    if findings.head is not None:
        lines += [_line(*row) for row in _head(findings.head)]
    lines += [_line(*row) for row in _drafting(findings, verdict)]
    table = _table(findings, verdict)
    word = _WORDS[verdict.code]
    last = [_line("verdict", word), _line("what to do", verdict.advice)]
    return "\n".join([*lines, *([""] + table + [""] if table else []), *last])


def to_dict(findings: Findings, verdict: Verdict) -> dict[str, Any]:
    """The same as JSON has it."""
    return findings.to_dict() | {
        "verdict": _WORDS[verdict.code],
        "exit_code": verdict.code,
        "hidden": verdict.hidden,
        "expected_speed": verdict.speeds,
        "recommended_k": verdict.k,
        "what_to_do": verdict.advice,
    }


def _head(head: HeadFindings) -> Iterator[tuple[str, str]]:
    yield "head", f"{head.files} ({head.layout}) in {head.place}"
    yield "tensors", f"{head.tensors} ({_counts(head.types)})"
    yield "quantised", _counts(head.quantization) or "no"
    yield "norms", head.norms
    if head.passed_over:
        yield "passed over", f"another head in {', '.join(head.passed_over)}"


def _drafting(findings: Findings, verdict: Verdict) -> Iterator[tuple[str, str]]:
    for hidden, rates in (findings.acceptance or {}).items():
        used = ", used" if hidden == verdict.hidden else ""
        shown = f"{_rates(rates)} by position" if rates else "nothing was drafted"
        yield "accepted", f"{shown} ({hidden}{used})"
    for reason, rounds in (findings.undrafted or {}).items():
        yield "not drafted", f"{rounds} rounds, since {reason}"
    if findings.depth:
        shares = enumerate(findings.depth)
        told = ", ".join(f"k={k} in {share:.0%}" for k, share in shares if share)
        yield "depth", f"{told} of rounds, as pays best; kept for later runs"
    if findings.exact:
        yield "exact", _exact(findings)
    if findings.rollback:
        yield "caches", _counts(findings.rollback)
    if findings.recurrence:
        how = f", rolled back by {findings.capture}" if findings.capture else ""
        check = f"; self-check: {findings.self_check}" if findings.self_check else ""
        yield "gated delta", f"{findings.recurrence}{how}{check}"


def _exact(findings: Findings) -> str:
    """``batched for 1 to 4 tokens, …``: widths with the same form together."""
    made = [(w, f) for w, f in (findings.exact or {}).items() if f is not None]
    groups = (list(g) for _, g in itertools.groupby(made, key=lambda found: found[1]))
    told = [_of_widths(group[0][0], group[-1][0], group[0][1]) for group in groups]
    if len(made) < len(findings.exact or {}):
        told.append("drafting makes no wider ones here")
    return "; ".join(told)


def _of_widths(first: int, last: int, form: str | None) -> str:
    widths = f"{first} to {last} tokens" if last > first else f"{first} tokens"
    return f"no form for {widths}" if form == NONE else f"{form} for {widths}"


def _table(findings: Findings, verdict: Verdict) -> list[str]:
    """Widths beside drafts: what they cost, and what they are worth."""
    if not findings.verify or findings.draft is None:
        return []
    first = findings.verify[1]
    rows = [("tokens", "ms", "of one", "k", "expected speed")]
    for width, seconds in findings.verify.items():
        k = width - 1
        speed = (verdict.speeds or {}).get(k)
        worth = "" if speed is None else f"{speed:.2f}{' *' * (k == verdict.k)}"
        rows.append(
            (
                str(width),
                f"{seconds * 1e3:.2f}",
                f"{seconds / first:.2f}",
                str(k) if k else "",
                worth if k else "1",
            )
        )
    draft = findings.draft
    rows.append(("a draft", f"{draft * 1e3:.2f}", f"{draft / first:.2f}", "", ""))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _machine(findings: Findings) -> str:
    e = findings.environment
    versions = ", ".join(f"{n} {e[n]}" for n in ("mlx", "mlx-lm", "mlx-lm-mtp"))
    return f"{e['device_name']} ({e['device']}), {versions}"


def _line(name: str, text: str) -> str:
    return f"{name + ':':{_WIDTH}}{text}"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{n} of {name}" for name, n in counts.items())


def _rates(rates: tuple[float, ...]) -> str:
    return " / ".join(f"{rate:.0%}" for rate in rates)
