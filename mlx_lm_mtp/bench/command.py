"""`mlx_lm_mtp bench`: its arguments, what they must be, and what it says in the end."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import arguments
from ..arguments import file, real, whole
from ..errors import DraftError, InvalidOption
from ..options import DraftOptions

if TYPE_CHECKING:
    from .drafting import Drafting
    from .figures import Results
    from .measure import Plan
    from .subject import Subject

DESCRIPTION = (
    "Decode prompts with stock mlx-lm and with drafts, in turn, and compare speeds and "
    "tokens. See docs/benchmarks.md."
)
_DEPTH = (
    "Every k is measured with depth=fixed, and depth=throughput, up to the largest k, "
    "beside them. --draft-option depth=... measures every k that way, and nothing "
    "beside them."
)
_PROMPT_TOKENS = 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give the parser of the subcommand its arguments."""
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="a directory or a repository")
    _add_runs(parser)
    _add_drafting(parser.add_argument_group("drafting", _DEPTH))
    _add_shape(parser.add_argument_group("instead of MODEL"))
    add("--json", type=file, metavar="FILE", help="write everything as JSON, too")
    add("--plot", type=_png, metavar="FILE.png", help="draw speed-up against k")


def _add_runs(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    arguments.add_prompts(parser, required=False)
    add(
        "--tokens",
        type=whole(2),
        default=128,
        metavar="N",
        help="of each run (default: 128)",
    )
    add(
        "--repeat",
        type=whole(1),
        default=3,
        metavar="N",
        help="times over (default: 3)",
    )
    arguments.add_sampling(parser)
    add(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="decode on behind the end of the text, so that all runs are as long",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--max-k",
        type=whole(0),
        default=4,
        metavar="N",
        help="measure every k from 0 to N (default: 4)",
    )
    which.add_argument(
        "--k", type=whole(0), nargs="+", metavar="N", help="measure these k"
    )


def _add_drafting(group: Any) -> None:
    arguments.add_drafter(group)
    group.add_argument(
        "--synthetic-acceptance",
        type=real(0, 1),
        metavar="P",
        help="draft with an oracle that is right with this probability",
    )
    group.add_argument(
        "--draft-cost",
        choices=("drafter", "random", "none"),
        help="the time of the oracle's drafts: that of the drafter (the default), of "
        "an MTP head with random weights, or none",
    )


def _add_shape(group: Any) -> None:
    group.add_argument(
        "--shape",
        metavar="NAME",
        help="random weights: qwen3.5-4b, qwen3.5-9b, qwen3-next-80b-a3b-4layers, tiny",
    )
    group.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        help="of these weights (default: bfloat16)",
    )
    group.add_argument("--bits", type=int, choices=(4, 8), help="quantise them")
    group.add_argument(
        "--prompt-tokens",
        type=whole(1),
        metavar="N",
        help=f"length of the random prompts (default: {_PROMPT_TOKENS})",
    )


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Measure and report; what was measured is reported whatever ends it.

    Raises:
        SystemExit: With 2 for an argument that cannot be, and for tokens that are not
            stock's on a CPU; with 130 after an interrupt.
    """
    try:
        _check(args)
        code = _bench(args, shlex.join([*parser.prog.split(), *sys.argv[2:]]))
    except DraftError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    sys.exit(code)


def _bench(args: argparse.Namespace, command: str) -> int:
    from ..install import install
    from . import report
    from .drafting import Drafting
    from .figures import Results
    from .measure import Plan

    install()
    # Unless it is asked for otherwise, every k is measured as such, and what chooses
    # among them beside.
    asked = DraftOptions.parse(args.draft_option)
    options = DraftOptions.of({"depth": "fixed", **asked})
    subject = _subject(args)
    ks = tuple(dict.fromkeys(args.k)) if args.k else tuple(range(args.max_k + 1))
    throughput = "depth" not in asked and any(ks)
    plan = Plan(ks, args.tokens, args.repeat, args.temp, args.seed, throughput)
    drafting = Drafting(
        subject,
        args.draft,
        options,
        acceptance=args.synthetic_acceptance,
        cost=args.draft_cost or "drafter",
        seed=args.seed,
    )
    results = Results(predictable=not _beyond_formula(options))
    head = report.header(command, subject, plan, drafting)
    try:
        return _measure(results, subject, plan, drafting)
    finally:
        _report(args, results, subject, head)


def _measure(results: Results, subject: Subject, plan: Plan, drafting: Drafting) -> int:
    """Fill in the results; returns the exit code."""
    import mlx.core as mx
    from tqdm import tqdm

    from .measure import measure, steps
    from .report import parted

    records = measure(subject, plan, drafting)
    try:
        # Without a terminal there is no bar.
        for record in tqdm(records, "bench", steps(subject, plan), disable=None):
            results.add(record)
    except KeyboardInterrupt:
        done = len(results.runs) + len(results.costs)
        _say(f"interrupted after {done} of {steps(subject, plan)} measurements.")
        return arguments.INTERRUPTED
    if (difference := parted(results, subject)) and mx.default_device() == mx.cpu:
        raise DraftError(
            f"{difference}; on a CPU they must be the same, so this is a fault: please "
            "report it with the command above."
        )
    return 0


def _report(
    args: argparse.Namespace, results: Results, subject: Subject, head: str
) -> None:
    """Say what was measured, and write it where it is wanted."""
    from . import plot
    from .report import body, environment, parted

    if not results.runs:
        return
    print(f"{head}\n\n{body(results, subject)}")
    if difference := parted(results, subject):
        print(f"\n{difference}.")
    if args.json:
        texts = [prompt.text for prompt in subject.prompts]
        known = {"arguments": _plain(args), "environment": environment()}
        known |= {"model": subject.name, "prompts": texts} | results.to_dict()
        _write(args.json, lambda path: path.write_text(json.dumps(known, indent=1)))
    if args.plot and len(results.ks) > 1:
        _write(args.plot, lambda path: plot.draw(results, subject.name, path))


def _write(path: Path, write: Callable[[Path], Any]) -> None:
    try:
        write(path)
    except OSError as error:
        _say(f"{path} cannot be written: {error.strerror}.")


def _say(what: str) -> None:
    print(f"mlx_lm_mtp bench: {what}", file=sys.stderr)


def _subject(args: argparse.Namespace) -> Subject:
    from . import prompts, subject

    if args.shape:
        length = args.prompt_tokens or _PROMPT_TOKENS
        found = subject.of_shape(
            args.shape, args.dtype or "bfloat16", args.bits, length
        )
    else:
        texts = prompts.read(args.prompts) if args.prompts else prompts.BUILT_IN
        chat = not args.ignore_chat_template
        found = subject.of_checkpoint(args.model, texts, chat=chat)
    if args.ignore_eos:
        found.tokenizer.eos_token_ids = set()
    return found


def _beyond_formula(options: DraftOptions) -> bool:
    """Whether rounds may be other than k drafts verified in one forward."""
    one_path = options.paths == 1 and options.rescue == 0
    return not one_path or options.depth != "fixed" or options.verify != "batch"


# --- what arguments must be -------------------------------------------------------


def _check(args: argparse.Namespace) -> None:
    """See that the arguments go together, before a model is loaded."""
    if bool(args.model) == bool(args.shape):
        raise InvalidOption(
            "MODEL and --shape are both given; choose one."
            if args.shape
            else "nothing to measure is given; name a MODEL, or a --shape."
        )
    _check_use(args)
    from ..plugins import drafters
    from .shapes import SHAPES

    if args.shape and args.shape not in SHAPES:
        raise InvalidOption(
            f"--shape is {args.shape!r}; choose one of: {', '.join(SHAPES)}."
        )
    drafters()[args.draft]
    DraftOptions.parse(args.draft_option)
    if args.plot:
        from .plot import check_available

        check_available()


def _check_use(args: argparse.Namespace) -> None:
    """See that no argument is without effect."""
    useless = {
        "--shape": (args.model, ("dtype", "bits", "prompt_tokens")),
        "MODEL": (args.shape, ("prompts", "ignore_chat_template")),
        "--synthetic-acceptance": (
            args.synthetic_acceptance is None,
            ("draft_cost",),
        ),
    }
    for without, (applies, names) in useless.items():
        for name in names:
            if applies and getattr(args, name):
                option = f"--{name.replace('_', '-')}"
                raise InvalidOption(
                    f"{option} is of no use without {without}; leave it out."
                )


def _plain(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments as JSON has them."""
    known = {n: v for n, v in vars(args).items() if not callable(v)}
    return {n: str(v) if isinstance(v, Path) else v for n, v in known.items()}


def _png(text: str) -> Path:
    if not text.endswith(".png"):
        raise argparse.ArgumentTypeError(f"{text!r} is given; name a file *.png.")
    return file(text)
