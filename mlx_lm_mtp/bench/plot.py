"""Speed-up against k as a picture: measured, predicted, and with chosen depths."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from ..errors import InvalidOption
from .figures import Results, Row
from .measure import Chosen

_REAL, _PREDICTED, _STOCK = "#1f5fa8", "#d9822b", "#555555"
_CHOSEN = {Chosen.COLD: "#7fb77e", Chosen.WARM: "#2c7a3f"}


def check_available() -> None:
    """See that there is matplotlib.

    Raises:
        InvalidOption: If there is not.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidOption(
            "--plot needs matplotlib, which is not installed; pip install "
            "'mlx-lm-mtp[bench]', or leave --plot out."
        )


def draw(results: Results, title: str, path: Path) -> None:
    """Write a PNG.

    Args:
        results: With at least one run that is not stock's.
        title: Above the picture.
        path: The file.
    """
    from matplotlib.figure import Figure  # without pyplot, which would want a display

    chosen = bool(results.choices)
    figure = Figure(figsize=(6.4, 5.6 if chosen else 4.2), layout="constrained")
    heights = [3, 1] if chosen else [1]
    speeds, *rounds = figure.subplots(
        len(heights), sharex=True, squeeze=False, height_ratios=heights
    )[:, 0]
    _draw_speeds(speeds, results.rows)
    speeds.set_title(title, fontsize=11)
    for axes in rounds:
        _draw_rounds(axes, results)
    for axes in (speeds, *rounds):
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=9)
    axes.set_xlabel("drafts a round, k")
    figure.savefig(path, dpi=150)


def _draw_speeds(axes: Any, rows: list[Row]) -> None:
    """Every fixed k is a point; what has no k of its own is a line across."""
    fixed = [row for row in rows if isinstance(row.k, int)]
    ks = [row.k for row in fixed]
    axes.axhline(1, color=_STOCK, linewidth=1.2, label="stock")
    below = [max(row.ratio - row.ratios[0], 0.0) for row in fixed]
    above = [max(row.ratios[1] - row.ratio, 0.0) for row in fixed]
    axes.errorbar(
        ks,
        [row.ratio for row in fixed],
        yerr=[below, above],
        color=_REAL,
        marker="o",
        capsize=4,
        elinewidth=1,
        label="measured (bars: slowest and fastest run)",
        zorder=3,  # above what was predicted
    )
    hoped = [(row.k, row.predicted) for row in fixed if row.predicted is not None]
    if hoped:
        axes.plot(
            *zip(*hoped, strict=True),
            color=_PREDICTED,
            linestyle="--",
            marker="s",
            markerfacecolor="white",
            label="predicted from the parts of a round",
        )
    for row in rows:
        if isinstance(row.k, Chosen):
            color, label = _CHOSEN[row.k], f"depth={row.k}"
            axes.axhline(row.ratio, color=color, linestyle=":", label=label)
    axes.set_ylabel("decoding speed, stock = 1")
    axes.set_xticks(ks)


def _draw_rounds(axes: Any, results: Results) -> None:
    """How many rounds asked for each k, side by side."""
    width = 0.4
    for i, choice in enumerate(results.choices):
        ks = [k + (i - 0.5) * width for k in range(len(choice.share_by_k))]
        color = _CHOSEN[choice.k]
        axes.bar(ks, choice.share_by_k, width, color=color, label=choice.k.value)
    axes.set_ylabel("share of rounds")
