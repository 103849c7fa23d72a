"""`mlx_lm_mtp compare`: its arguments, and what it says in the end."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .. import arguments
from ..arguments import real, whole
from ..errors import DraftError
from ..options import DraftOptions

if TYPE_CHECKING:
    from ..bench.subject import Subject
    from .decode import Plan
    from .verdict import Comparison

DESCRIPTION = (
    "Decode prompts with stock mlx-lm and with drafts, and say of the first token that "
    "differs whether it is a near-tie or a bug. Exit code 0: all as promised; 1: not; "
    "2: it could not be compared. See docs/checking.md."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give the parser of the subcommand its arguments."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="a directory or a repository")
    arguments.add_prompts(parser, required=True)
    add(
        "--max-tokens",
        type=whole(1),
        default=100,
        metavar="N",
        help="decoded behind each prompt, if it does not end before (default: 100)",
    )
    _add_drafting(parser.add_argument_group("drafting"))
    _add_sampling(parser.add_argument_group("sampling"))
    add(
        "--plain",
        action="store_true",
        help="compare with plain decoding as this package computes it, not with "
        "stock's own; they differ where stock has no kernel for gated-delta layers",
    )
    arguments.add_json(parser)


def _add_drafting(group: argparse._ArgumentGroup) -> None:
    arguments.add_drafter(group)
    group.add_argument(
        "--num-draft-tokens",
        type=whole(1),
        default=DraftOptions.num_draft_tokens,
        metavar="K",
        help=f"drafts a round (default: {DraftOptions.num_draft_tokens})",
    )


def _add_sampling(group: argparse._ArgumentGroup) -> None:
    arguments.add_sampling(group)
    add = group.add_argument
    add("--top-p", type=real(0, 1), default=0.0, metavar="P", help="as stock's")
    add("--min-p", type=real(0, 1), default=0.0, metavar="P", help="as stock's")
    add("--top-k", type=whole(0), default=0, metavar="K", help="as stock's")


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Compare and report; what was compared is reported whatever ends it.

    Raises:
        SystemExit: Always: 0 if all is as promised, 1 if not, 2 if it could not be
            compared, 130 after an interrupt.
    """
    from . import report
    from .decode import compare
    from .verdict import exit_code

    out = sys.stderr if args.json == "-" else sys.stdout
    found: list[Comparison] = []
    code = 0
    try:
        subject, plan = _prepared(args)
        print(report.header(subject, plan, args.temp), file=out)
        for one in _shown(compare(subject, plan), len(subject.prompts)):
            found.append(one)
            print("\n".join(report.lines(subject, one, args.temp)), file=out)
        code = exit_code(found, exact=plan.options.exactness == "exact")
    except DraftError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    except KeyboardInterrupt:
        code = arguments.INTERRUPTED
    if found:
        print(report.summary(found), file=out)
        arguments.write_json(parser, args.json, [one.to_dict() for one in found])
    sys.exit(code)


def _prepared(args: argparse.Namespace) -> tuple[Subject, Plan]:
    """The model with its prompts, and what to do with them."""
    from ..bench import prompts, subject
    from ..install import install
    from ..plugins import drafters
    from .decode import Plan

    texts = prompts.read(args.prompts)
    options = DraftOptions.of(
        DraftOptions.parse(args.draft_option), args.num_draft_tokens
    )
    drafters()[args.draft]
    drafters().check_options(options)
    install()
    from mlx_lm.sample_utils import make_sampler

    chat = not args.ignore_chat_template
    found = subject.of_checkpoint(args.model, texts, chat=chat)
    sampler = make_sampler(args.temp, args.top_p, args.min_p, top_k=args.top_k)
    plan = Plan(args.max_tokens, args.draft, options, sampler, args.seed, args.plain)
    return found, plan


def _shown(comparisons: Iterator[Comparison], n: int) -> Iterator[Comparison]:
    """With a bar, if there is a terminal."""
    from tqdm import tqdm

    yield from tqdm(comparisons, "compare", n, disable=None, leave=False)
