"""`mlx_lm_mtp doctor`: its arguments, and what it says in the end."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import deque
from typing import TYPE_CHECKING

from .. import arguments
from ..arguments import whole
from ..errors import DraftError

if TYPE_CHECKING:
    from .examine import Plan
    from .findings import Findings

DESCRIPTION = (
    "Look at a model's MTP head: where it is, how it is written, how many of its "
    "drafts are accepted, what a round costs on this machine, and whether it pays. "
    "Exit code 0: it does; 1: it works, but does not pay; 2: broken. See "
    "docs/doctor.md."
)
_TOKENS = 64
_MAX_K = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give the parser of the subcommand its arguments."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="a directory or a repository")
    add(
        "--mtp-head",
        metavar="PATH_OR_REPO",
        default="",
        help="where the head is, if not with the model",
    )
    add(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="decode this, instead of what is built in; may be repeated",
    )
    add(
        "--tokens",
        type=whole(8, 4096),
        default=_TOKENS,
        metavar="N",
        help=f"decoded behind each prompt (default: {_TOKENS})",
    )
    add(
        "--max-k",
        type=whole(1, 7),
        default=_MAX_K,
        metavar="K",
        help=f"the most drafts a round (default: {_MAX_K})",
    )
    arguments.add_json(parser)


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Examine a model and say what was found.

    Raises:
        SystemExit: With the verdict's code; with 2 if it cannot be begun, or the JSON
            cannot be written; with 130 after an interrupt.
    """
    from ..bench.prompts import BUILT_IN
    from ..install import install
    from . import report
    from .examine import Plan
    from .verdict import BROKEN, judge

    try:
        install()
    except DraftError as error:
        parser.exit(BROKEN, f"{parser.prog}: error: {error}\n")
    texts = args.prompt or [BUILT_IN[0], BUILT_IN[2], BUILT_IN[3]]
    findings = _examine(Plan(args.model, args.mtp_head, texts, args.tokens, args.max_k))
    if findings is None:
        parser.exit(arguments.INTERRUPTED, f"{parser.prog}: interrupted.\n")
    verdict = judge(findings)
    if args.json != "-":
        print(report.report(findings, verdict))
    arguments.write_json(parser, args.json, report.to_dict(findings, verdict))
    sys.exit(verdict.code)


def _examine(plan: Plan) -> Findings | None:
    """The findings; None after an interrupt."""
    from tqdm import tqdm

    from .examine import examine

    try:
        with warnings.catch_warnings():
            # What they would warn of is what the report is about.
            warnings.simplefilter("ignore")
            # Without a terminal there is no bar.
            steps = tqdm(examine(plan), "doctor", plan.steps, disable=None)
            return deque(steps, maxlen=1).pop()
    except KeyboardInterrupt:
        return None
