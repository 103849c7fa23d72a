"""The comparisons, for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..bench.report import environment
from ..bench.subject import Subject
from .decode import Plan
from .verdict import NEAR_TIE, Comparison, Difference

_SHOWN = 32  # letters of a prompt


def header(subject: Subject, plan: Plan, temp: float) -> str:
    """What is compared, and on what."""
    where = environment()
    versions = ", ".join(f"{n} {where[n]}" for n in ("mlx", "mlx-lm", "mlx-lm-mtp"))
    how = f"temperature {temp:g}, seed {plan.seed}" if temp else "greedy"
    options = [f"k={plan.options.num_draft_tokens}", *plan.options.unusual]
    stock = "plain decoding by this package" if plan.plain else "stock mlx-lm"
    name = plan.draft if isinstance(plan.draft, str) else plan.draft.name
    rows = [
        ("model", subject.name),
        ("machine", f"{where['device_name']} ({where['device']}), {versions}"),
        ("compared", f"{stock} with {', '.join([name, *options])}; {how}"),
    ]
    return "\n".join(f"{name + ':':10}{text}" for name, text in rows)


def lines(subject: Subject, found: Comparison, temp: float) -> list[str]:
    """One prompt: a line, and what differs below it."""
    shown = " ".join(subject.prompts[found.prompt].text.split())
    if len(shown) > _SHOWN:
        shown = shown[: _SHOWN - 1] + "…"
    verdict = found.verdict
    difference = found.difference
    if difference is not None and verdict == NEAR_TIE:
        # What is sampled flips within what moved, however far the two are apart.
        x = difference.moved if temp else difference.gap
        verdict += f" at {'a movement of' if temp else 'gap'} {x:.3g}"
    elif found.moved == 0 and difference is None:
        verdict += ", log-probabilities bit for bit"
    row = (
        f"{found.prompt + 1:>3}  {shown:{_SHOWN}}  {found.tokens:>5} tokens  {verdict}"
    )
    below = [] if difference is None else _below(subject.tokenizer, difference)
    if found.reason:
        below.append(f"a bug, for {found.reason}")
    elif found.rounding is not None:
        below.append(
            f"log-probabilities differ by up to {found.moved:.3g}; rounding alone "
            f"moves them by up to {found.rounding:.3g} here"
        )
    return [row, *(f"     {line}" for line in below)]


def summary(comparisons: Sequence[Comparison]) -> str:
    """How many of each verdict."""
    verdicts = [found.verdict for found in comparisons]
    counts = {verdict: verdicts.count(verdict) for verdict in dict.fromkeys(verdicts)}
    return "verdict:  " + ", ".join(f"{n} {verdict}" for verdict, n in counts.items())


def _below(tokenizer: Any, found: Difference) -> list[str]:
    stock, ours, best, second = (
        f"{token} {tokenizer.decode([token])!r}"
        for token in (found.stock, found.ours, found.best.best, found.best.second)
    )
    return [
        f"token {found.position}: stock {stock}, ours {ours}, gap {found.gap:.3g}",
        f"stock's best there: {best} and {second}, gap {found.best.gap:.3g}",
    ]
