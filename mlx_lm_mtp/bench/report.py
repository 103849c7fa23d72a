"""The results for people, as Markdown, with all that is needed to repeat them."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
from collections.abc import Iterable
from typing import Any

import mlx.core as mx

from .._version import __version__
from .drafting import Drafting
from .figures import Beside, Choice, Results, Row
from .measure import STOCK, Chosen, Plan, Way
from .subject import Subject

_SHOWN = 32  # letters of a prompt


def environment() -> dict[str, Any]:
    """The machine and the versions."""
    versions = {name: importlib.metadata.version(name) for name in ("mlx", "mlx-lm")}
    return {
        "machine": platform.machine(),
        "system": platform.system(),
        "device": "gpu" if mx.default_device() == mx.gpu else "cpu",
        "device_name": mx.device_info().get("device_name", "unknown"),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        **versions,
        "mlx-lm-mtp": __version__,
    }


def header(command: str, subject: Subject, plan: Plan, drafting: Drafting) -> str:
    """What was run, and on what."""
    where = environment()
    how = f"temperature {plan.temp:g}" if plan.temp else "greedy"
    versions = ", ".join(
        f"{name} {where[name]}" for name in ("mlx", "mlx-lm", "mlx-lm-mtp")
    )
    drafts = "; ".join([drafting.description, *drafting.options.unusual])
    ways = "stock and each k"
    if plan.throughput:
        ways = f"stock, each k, and depth=throughput up to k={max(plan.ks)},"
    lines = [
        f"    {command}",
        "",
        f"- Machine: {where['device_name']} ({where['device']}; {where['system']} "
        f"{where['machine']}, {where['cpus']} CPUs)",
        f"- Versions: Python {where['python']}, {versions}",
        f"- Model: {subject.name}",
        f"- Runs: {_many(len(subject.prompts), 'prompt')} × {plan.tokens} tokens, "
        f"{how}, seed {plan.seed}, {_many(plan.repeat, 'repetition')}; {ways} in turn",
        f"- Drafts: {drafts}",
    ]
    return "\n".join(lines)


def body(results: Results, subject: Subject) -> str:
    """The tables: all prompts, each prompt, chosen depths, the parts of a round."""
    tables = [_ways(results), _by_prompt(results, subject)]
    tables += [_choices(results), _parts(results)]
    if results.computed:
        tables.append(f"Gated-delta layers (recurrence, capture): {results.computed}.")
    return "\n\n".join(table for table in tables if table)


def _ways(results: Results) -> str:
    head = [
        "decoding",
        "tok/s, median (min – max)",
        "against stock (min – max)",
        "against k=0",
        "predicted",
        "tokens a round",
        "accepted",
        "first token, ms (min – max)",
        "parted from stock",
    ]
    return _table(head, map(_way, results.rows))


def _way(row: Row) -> list[str]:
    first = row.first_token
    drafted = row.k is not STOCK
    return [
        name(row.k),
        f"{row.speed.median:.1f} ({row.speed.least:.1f} – {row.speed.most:.1f})",
        f"**{row.ratio:.2f}** ({row.ratios[0]:.2f} – {row.ratios[1]:.2f})"
        if drafted
        else "1",
        "–" if row.plain is None else f"{row.plain:.2f}",
        "–" if row.predicted is None else f"{row.predicted:.2f}",
        f"{row.tokens_a_round:.2f}",
        "–" if row.acceptance is None else f"{row.acceptance:.1%}",
        f"{first.median * 1e3:.0f} ({first.least * 1e3:.0f} – {first.most * 1e3:.0f})",
        f"{row.parted} of {row.runs}" if drafted else "–",
    ]


def _by_prompt(results: Results, subject: Subject) -> str:
    """Ratios of each prompt: which gain, and which lose."""
    ks = [k for k in results.ks if k is not STOCK]
    if not ks:
        return ""
    rows = []
    for prompt in results.prompts:
        stock = statistics.median(run.speed for run in results.of(STOCK, prompt))
        ratios = [results.ratios(k, prompt) for k in ks]
        cells = [f"{statistics.median(r):.2f}" if r else "–" for r in ratios]
        rows.append([_shown(subject.prompts[prompt].text), f"{stock:.1f}", *cells])
    return _table(["prompt", "stock, tok/s", *map(name, ks)], rows)


def _choices(results: Results) -> str:
    """What ``depth=throughput`` has chosen, and how far it is behind a fixed k."""
    if not results.choices:
        return ""
    head = [
        "depth",
        "against stock (worst prompt)",
        "against the best k of each prompt (worst prompt)",
        "rounds at each k",
    ]
    return _table(head, map(_choice, results.choices))


def _choice(choice: Choice) -> list[str]:
    shares = {k: share for k, share in enumerate(choice.share_by_k) if share}
    told = ", ".join(f"k={k} {share:.0%}" for k, share in shares.items())
    return [name(choice.k), _beside(choice.stock), _beside(choice.best), told]


def _beside(found: Beside) -> str:
    return f"**{found.mean:.2f}** ({found.worst:.2f})"


def _parts(results: Results) -> str:
    verify, draft = results.parts()
    if not verify:
        return ""
    parts = {f"verify of {w}, v({w})": seconds for w, seconds in verify.items()}
    if draft is not None:
        parts["one draft, c"] = draft
    # Beside v(1), for stock works on while its forward runs, and chooses tokens.
    parts["(stock, a token)"] = 1 / results.row(STOCK).speed.median
    rows = [
        [part, f"{seconds * 1e3:.2f}", f"{seconds / verify[1]:.2f}"]
        for part, seconds in parts.items()
    ]
    return _table(["part of a round", "ms", "of v(1)"], rows)


def parted(results: Results, subject: Subject) -> str:
    """On the runs whose tokens are not stock's; empty if there are none."""
    if not results.parted:
        return ""
    first = results.parted[0]
    return (
        f"{len(results.parted)} of {sum(r.stats is not None for r in results.runs)} "
        f"runs parted from stock's tokens, the first at token {first.parted} of "
        f"{subject.prompts[first.prompt].text!r} with {name(first.k)}"
    )


def name(k: Way) -> str:
    """A way to decode, for people."""
    if k is STOCK:
        return "stock"
    if isinstance(k, Chosen):
        return k.value
    return f"k={k}" if k else "k=0, plain"


def _shown(text: str) -> str:
    """The beginning of a prompt, fit for a cell."""
    line = " ".join(text.split()).replace("|", r"\|").replace("`", "'")
    return f"`{line if len(line) <= _SHOWN else line[: _SHOWN - 1] + '…'}`"


def _many(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def _table(head: list[str], rows: Iterable[list[str]]) -> str:
    """Markdown whose columns are aligned, to be read as it is, too."""
    lines = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    ruled = [lines[0], ["-" * width for width in widths], *lines[1:]]
    return "\n".join(
        "| "
        + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True))
        + " |"
        for line in ruled
    )
