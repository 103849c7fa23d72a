"""`mlx_lm.chat` and `mlx_lm.benchmark` with `--mtp` and its companions.

Both build a parser and generate by names of their modules, as `mlx_lm.generate` does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from . import stock_cli
from .wrapping import wrap


def chat(module: ModuleType) -> None:
    """Wrap the parts of ``mlx_lm.chat``; what drafting did is told after each turn."""
    _see_through(module, "\n  {}")


def benchmark(module: ModuleType) -> None:
    """Wrap the parts of ``mlx_lm.benchmark``; it is told after each run."""
    _see_through(module, "{}\n")


def _see_through(module: ModuleType, line: str) -> None:
    parser = functools.partial(stock_cli.setup_arg_parser, counts=True)
    wrap(module, "setup_arg_parser", parser)
    wrap(module, "main", stock_cli.main)
    wrap(module, "stream_generate", functools.partial(_as_asked, line=line))


def _as_asked(stock: Callable[..., Any], line: str) -> Callable[..., Any]:
    """Stock's function of that name, with the drafts of the running command line."""

    @functools.wraps(stock)
    def stream_generate(*args: Any, **kwargs: Any) -> Any:
        asked = stock_cli.requested() | kwargs
        if asked.get("draft") is None:
            return stock(*args, **kwargs)
        return _told(stock(*args, **asked), line)

    return stream_generate


def _told(responses: Any, line: str) -> Iterator[Any]:
    response = None
    for response in responses:
        yield response
    if response is not None:
        print(line.format(response.draft_stats.summary()), end="", flush=True)
        stock_cli.report(response.draft_stats)
