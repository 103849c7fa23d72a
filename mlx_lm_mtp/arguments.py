"""Arguments of our commands: those that several of them have, and kinds of values.

A kind makes something of a text, or says in a sentence why it cannot.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

INTERRUPTED = 130  # exit code, as a shell has it for Ctrl-C

# --- arguments ----------------------------------------------------------------------


def add_prompts(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Add what is decoded; if it is not required, there is something built in."""
    parser.add_argument(
        "--prompts",
        type=Path,
        required=required,
        metavar="FILE",
        help=("" if required else "instead of those built in: ")
        + 'one prompt a line, JSON lines with a "prompt" each, or a JSON list',
    )
    parser.add_argument(
        "--ignore-chat-template",
        action="store_true",
        help="give the model the prompts as they are",
    )


def add_drafter(group: argparse._ArgumentGroup) -> None:
    """Add what drafts, and how."""
    group.add_argument(
        "--draft", default="mtp", metavar="NAME", help="what drafts (default: mtp)"
    )
    group.add_argument(
        "--draft-option",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="as for mlx_lm.generate; may be repeated",
    )


def add_sampling(group: argparse._ActionsContainer) -> None:
    """Add how tokens are chosen."""
    group.add_argument(
        "--temp",
        type=real(0),
        default=0.0,
        metavar="T",
        help="temperature; 0, the default, is greedy",
    )
    group.add_argument(
        "--seed",
        type=whole(0),
        default=0,
        metavar="N",
        help="before each run (default: 0)",
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add where the JSON goes, for :func:`write_json`."""
    parser.add_argument(
        "--json",
        type=lambda text: text if text == "-" else file(text),
        metavar="FILE",
        help="write all of it as JSON, too; - is the terminal",
    )


def write_json(
    parser: argparse.ArgumentParser, place: Path | str | None, found: Any
) -> None:
    """Write what was found to where ``--json`` says, if it does.

    Raises:
        SystemExit: With 2 if it cannot be written.
    """
    if place is None:
        return
    text = json.dumps(found, indent=1, default=list)
    if place == "-":
        print(text)
        return
    try:
        Path(place).write_text(text + "\n")
    except OSError as error:
        # Python's own exit code for it, 1, is a verdict of some commands.
        told = f"--json {place} cannot be written ({error.strerror})"
        parser.exit(2, f"{parser.prog}: error: {told}; name another file.\n")


# --- kinds of values ----------------------------------------------------------------


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """Integers of at least this, and at most that."""
    bounds = f"of at least {least}" if most is None else f"from {least} to {most}"

    def parse(text: str) -> int:
        value = int(text) if text.isdecimal() else -1
        if not least <= value <= (value if most is None else most):
            raise argparse.ArgumentTypeError(
                f"{text!r} is given; give an integer {bounds}."
            )
        return value

    return parse


def real(least: float, most: float | None = None) -> Callable[[str], float]:
    """Numbers of at least this, and at most that."""
    bounds = f"of at least {least}" + ("" if most is None else f" and at most {most}")

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not least <= value <= (1e6 if most is None else most):
            raise argparse.ArgumentTypeError(
                f"{text!r} is given; give a number {bounds}."
            )
        return value

    return parse


def file(text: str) -> Path:
    """A file in a folder that exists."""
    path = Path(text)
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(
            f"{text} is in a folder that does not exist; make it, or name another file."
        )
    return path
