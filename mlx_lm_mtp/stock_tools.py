"""Stock's smaller commands with `--mtp` and its companions.

`mlx_lm.chat` and `mlx_lm.benchmark` build a parser and generate by names of their
modules, as `mlx_lm.generate` does. `mlx_lm.cache_prompt` generates nothing: it lets the
drafter see the prompt, too, and saves what that leaves behind the model's caches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from . import stock_cli
from .errors import InvalidOption
from .options import DraftOptions
from .origin import ByModel
from .wrapping import wrap


def chat(module: ModuleType) -> None:
    """Wrap the parts of ``mlx_lm.chat``; what drafting did is told after each turn."""
    _see_through(module, "\n  {}")


def benchmark(module: ModuleType) -> None:
    """Wrap the parts of ``mlx_lm.benchmark``; it is told after each run."""
    _see_through(module, "{}\n")


def cache_prompt(module: ModuleType) -> None:
    """Wrap the parts of ``mlx_lm.cache_prompt``."""
    parser = functools.partial(
        stock_cli.setup_arg_parser, counts=None, statistics=False
    )
    wrap(module, "setup_arg_parser", parser)
    wrap(module, "main", stock_cli.main)
    wrap(module, "load", _remembering)
    wrap(module, "generate_step", _seen_by_the_drafter)


def _see_through(module: ModuleType, line: str) -> None:
    parser = functools.partial(stock_cli.setup_arg_parser, counts=True)
    wrap(module, "setup_arg_parser", parser)
    wrap(module, "main", stock_cli.main)
    wrap(module, "stream_generate", functools.partial(_as_asked, line=line))


_tokenizers: ByModel[Any] = ByModel()


def _remembering(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Stock's `load`; some drafters want the tokenizer, which prefilling lacks."""

    @functools.wraps(stock)
    def load(*args: Any, **kwargs: Any) -> Any:
        model, tokenizer, *rest = stock(*args, **kwargs)
        _tokenizers[model] = tokenizer
        return model, tokenizer, *rest

    return load


def _seen_by_the_drafter(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Stock's `generate_step`, which feeds the prompt and generates nothing."""

    @functools.wraps(stock)
    def generate_step(prompt: Any, model: Any, **kwargs: Any) -> Any:
        asked = stock_cli.requested()
        if not asked:
            return stock(prompt, model, **kwargs)
        from .build import resolve
        from .drafters.base import gives
        from .generate import draft_generate_step

        name = asked["draft"]
        options = DraftOptions.of(asked["draft_options"], asked["num_draft_tokens"])
        drafter = resolve(name, model, _tokenizers.get(model), options)
        assert drafter is not None
        if "caches" not in gives(drafter):
            raise InvalidOption(
                f"drafter {name!r} keeps nothing that could be saved with a prompt "
                "cache; leave it out: a cache without it works as well."
            )
        return draft_generate_step(prompt, model, drafter, options=options, **kwargs)

    return generate_step


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
