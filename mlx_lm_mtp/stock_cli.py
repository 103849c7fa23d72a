"""Stock's command line with `--mtp` and its companions.

Stock's `main()` builds its parser, loads the model and calls `generate`, all by names
of its module. The parser gets our arguments; what they ask for is kept for the duration
of `main()`, where :func:`requested` gives it to the wrapped `generate`.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from .errors import DraftError, HeadUnreadable, InvalidOption, UnknownDrafter
from .options import DraftOptions
from .stats import DraftStats

# Drafters that have no use for a draft model; others are asked once it is loaded.
_NO_MODEL = ("mtp", "ngram")
# What was parsed, while a `main()` runs.
_arguments: ContextVar[argparse.Namespace | None] = ContextVar(
    "_arguments", default=None
)


def requested() -> dict[str, Any]:
    """`draft` and `draft_options` as the running command line asks for them."""
    args = _arguments.get()
    if args is None or args.draft is None:
        return {}
    return {
        "draft": args.draft,
        "draft_options": options_of(args),
        "num_draft_tokens": args.num_draft_tokens,
        "draft_trace": getattr(args, "draft_trace", None),
    }


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """The draft options of a command line; `--mtp-head` is one of them."""
    options = DraftOptions.parse(args.draft_option)
    if args.mtp_head is None:
        return options
    if args.draft != "mtp":
        raise InvalidOption(
            f"--mtp-head {args.mtp_head} is of no use without --mtp; add it."
        )
    if not args.mtp_head:
        raise InvalidOption("--mtp-head is empty; name a folder, file or repository.")
    return options | {"head": args.mtp_head}


def report(stats: DraftStats) -> None:
    """Write the statistics to the file that the running command line names."""
    args = _arguments.get()
    if args is None or args.draft is None or args.draft_stats is None:
        return
    try:
        args.draft_stats.write_text(json.dumps(stats.to_dict(), indent=1) + "\n")
    except OSError as error:
        raise InvalidOption(
            f"--draft-stats {args.draft_stats} cannot be written: {error.strerror}; "
            "name a file in a folder that exists."
        ) from None


def setup_arg_parser(
    stock: Callable[[], Any], *, counts: bool | None = False, statistics: bool = True
) -> Callable[[], Any]:
    """Wrap stock's function of that name: its parser knows our arguments.

    Args:
        stock: The function.
        counts: Whether stock's parser lacks `--num-draft-tokens`; None if it lacks it
            rightly, since nothing is generated.
        statistics: Whether there are any that could be written to a file.
    """

    @functools.wraps(stock)
    def wrapper() -> argparse.ArgumentParser:
        parser = stock()
        # Should stock come to have the option itself, we stand back.
        if "--mtp" not in parser.format_usage():
            add_arguments(parser, counts=bool(counts), statistics=statistics)
            if counts is None:
                parser.set_defaults(num_draft_tokens=DraftOptions.num_draft_tokens)
            parser.parse_args = _noting(parser, parser.parse_args)  # type: ignore[method-assign]
        return parser

    return wrapper


def main(stock: Callable[[], None]) -> Callable[[], None]:
    """Wrap stock's `main`: an error of ours is one sentence and exit code 1."""

    @functools.wraps(stock)
    def wrapper() -> None:
        token = _arguments.set(argparse.Namespace(draft=None))
        try:
            stock()
        except DraftError as error:
            sys.exit(f"{stock.__module__}: error: {error}")
        except (RuntimeError, ValueError) as error:
            if requested() and (reason := _reason(error)):
                sys.exit(f"{stock.__module__}: error: {reason}")
            raise
        finally:
            _arguments.reset(token)

    return wrapper


def _reason(error: Exception) -> str | None:
    """Why stock could not load the model, if a head or a damaged file is the cause."""
    from .heads.shards import check_readable

    model = _arguments.get().model
    if "_mtp not supported" in str(error):
        return (
            f"{model} holds an MTP head alone ({error}); give --model the model that "
            "the head belongs to."
        )
    try:
        if model is not None and Path(model).is_dir():
            check_readable(Path(model))
    except HeadUnreadable as unreadable:
        return str(unreadable)
    return None


def add_arguments(
    parser: argparse.ArgumentParser, *, counts: bool = False, statistics: bool = True
) -> None:
    """Add `--mtp` and its companions.

    Args:
        parser: One of stock's.
        counts: Whether with the number of drafts, which not all of them have.
        statistics: Whether with a file for them, which one generation can fill.
    """
    group = parser.add_argument_group("drafting (mlx-lm-mtp)")
    parser.format_help = _helping(group, parser.format_help)  # type: ignore[method-assign]
    which = group.add_mutually_exclusive_group()
    which.add_argument(
        "--mtp",
        dest="draft",
        action="store_const",
        const="mtp",
        help="Draft with the checkpoint's own MTP head: same tokens, fewer forwards. "
        "--num-draft-tokens sets how many (0: none).",
    )
    which.add_argument(
        "--draft",
        metavar="NAME",
        help="Draft with another drafter (`mlx_lm_mtp plugins` lists them).",
    )
    group.add_argument(
        "--mtp-head",
        metavar="PATH_OR_REPO",
        help="Where the MTP head is, if not with the model: a folder, a file, or a "
        "repository, of which only the files with the head are fetched.",
    )
    if counts:
        group.add_argument(
            "--num-draft-tokens",
            metavar="K",
            type=int,
            default=DraftOptions.num_draft_tokens,
            help="Drafts a round (0: none).",
        )
    group.add_argument(
        "--draft-option",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help=f"An option of drafting, may be repeated. {DraftOptions.describe()}.",
    )
    if statistics:
        _add_files(group)


def _add_files(group: Any) -> None:
    """What one generation, or one conversation, can fill."""
    group.add_argument(
        "--draft-stats",
        metavar="FILE",
        type=Path,
        help="Write the statistics of drafting to this file, as JSON.",
    )
    group.add_argument(
        "--draft-trace",
        metavar="FILE",
        type=Path,
        help="Write every verify to this file, a line of JSON each, as it comes "
        "about; `mlx_lm_mtp replay` looks at it without the model.",
    )


def _helping(group: Any, format_help: Callable[[], str]) -> Callable[[], str]:
    """Drafters and their own options are looked up only for those who ask for help."""

    @functools.wraps(format_help)
    def wrapper() -> str:
        from .plugins import drafters

        found = drafters()
        options = [words for name in found for words in found[name].described()]
        group.description = (
            f"Drafters: {', '.join(found)}. Their own options, to be set with "
            f"--draft-option: {'; '.join(options)}."
        )
        return format_help()

    return wrapper


def _noting(
    parser: argparse.ArgumentParser, parse_args: Callable[..., Any]
) -> Callable[..., Any]:
    """Note what was asked for; what cannot work is told before a model is loaded."""

    @functools.wraps(parse_args)
    def wrapper(*args: Any, **kwargs: Any) -> argparse.Namespace:
        namespace = parse_args(*args, **kwargs)
        check(parser, namespace)
        if _arguments.get() is not None:  # else somebody borrows stock's parser
            _arguments.set(namespace)
        return namespace

    return wrapper


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """See that what was asked for can work; an exit with a sentence if not."""
    try:
        _check(args)
    except DraftError as error:
        parser.error(str(error))


def _check(args: argparse.Namespace) -> None:
    options = options_of(args)
    if args.draft is None:
        if args.draft_option:
            raise InvalidOption("--draft-option is of no use without --mtp or --draft.")
        for name in ("stats", "trace"):
            if getattr(args, f"draft_{name}", None):
                raise InvalidOption(
                    f"--draft-{name} is of no use without --mtp or --draft."
                )
        return
    file = getattr(args, "draft_stats", None)
    if file and not file.absolute().parent.is_dir():
        raise InvalidOption(
            f"--draft-stats {file} is in a folder that does not exist; "
            "make it, or name another file."
        )
    if getattr(args, "draft_trace", None):
        from .trace import begin

        begin(args.draft_trace)
    if getattr(args, "draft_model", None) is not None:
        _check_draft_model(args)
    if getattr(args, "batch_size", 1) > 1:
        raise InvalidOption(
            f"--batch-size {args.batch_size} cannot go with --mtp or --draft: one "
            "sequence at a time is drafted for; leave out one of them."
        )
    if getattr(args, "image", ()):
        raise InvalidOption(
            "--image cannot go with --mtp or --draft: prompts with images are not "
            "drafted for; leave out one of them."
        )
    from .plugins import drafters

    try:
        drafters()[args.draft]
    except UnknownDrafter as error:
        hint = "(A draft model is --draft-model.)"
        raise UnknownDrafter(f"{error} {hint}") from None
    drafters().check_options(DraftOptions.of(options, args.num_draft_tokens))


def _check_draft_model(args: argparse.Namespace) -> None:
    what = "--mtp" if args.draft == "mtp" else f"--draft {args.draft}"
    if args.draft in _NO_MODEL:
        raise InvalidOption(
            f"--draft-model {args.draft_model} cannot go with {what}; "
            "choose one way of drafting."
        )
    if hasattr(args, "decode_concurrency"):  # stock's server has a way of its own
        raise InvalidOption(
            f"--draft-model {args.draft_model} cannot go with {what} in a server; "
            f"name it with --draft-option draft-model.model={args.draft_model}."
        )
