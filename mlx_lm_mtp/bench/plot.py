"""Speed-up against k as a picture: what was measured, and what was predicted."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from ..errors import InvalidOption
from .figures import Results
from .measure import STOCK

_REAL, _PREDICTED, _STOCK = "#1f5fa8", "#d9822b", "#555555"


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

    rows = [row for row in results.rows if row.k is not STOCK]
    ks = [row.k for row in rows]
    ratios = [row.ratio for row in rows]
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.add_subplot()
    axes.axhline(1, color=_STOCK, linewidth=1.2, label="stock")
    below = [row.ratio - row.ratios[0] for row in rows]
    above = [row.ratios[1] - row.ratio for row in rows]
    axes.errorbar(
        ks,
        ratios,
        yerr=[below, above],
        color=_REAL,
        marker="o",
        capsize=4,
        elinewidth=1,
        label="measured (bars: slowest and fastest run)",
        zorder=3,  # above what was predicted
    )
    hoped = [(row.k, row.predicted) for row in rows if row.predicted is not None]
    if hoped:
        axes.plot(
            *zip(*hoped, strict=True),
            color=_PREDICTED,
            linestyle="--",
            marker="s",
            markerfacecolor="white",
            label="predicted from the parts of a round",
        )
    axes.set_title(title, fontsize=11)
    axes.set_xlabel("drafts a round, k")
    axes.set_ylabel("decoding speed, stock = 1")
    axes.set_xticks(ks)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)
