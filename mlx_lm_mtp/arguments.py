"""Kinds of arguments of our commands: what argparse makes of a text, or a sentence."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path


def whole(least: int) -> Callable[[str], int]:
    """Integers of at least this."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(
                f"{text!r} is given; give an integer of at least {least}."
            )
        return int(text)

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
