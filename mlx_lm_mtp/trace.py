"""A trace: every verify of a generation as a line of JSON, to be replayed offline.

::

    {"trace": 1, "drafter": "mtp", "options": {…}, "versions": {…}}
    {"known": {"costs": {…}, "acceptance": {…}, "credit": 1.0}}
    {"k": 3, "token": 9, "paths": [[5, 1, 7]], …, "asked": [[3, 3], [3, 2]]}
    …
    {"stats": {…}}

The second line is what the depth that yields most begins with (:mod:`.depth`); it is
not there if depth is chosen otherwise. ``asked`` are the choices of a depth since the
line before: how many drafts there might be, and how many were chosen. The next round
may be drafted before this one is over, so its choice can be among them.

A file may hold several generations, each from its own header on. Lines are written as
they come about, so that a run which is killed leaves all of them but the last.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ._version import __version__
from .depth import Depth, Throughput
from .errors import InvalidOption
from .options import DraftOptions
from .rounds import Nearest, Round
from .stats import DraftStats

FORMAT = 1
_DAMAGES = (KeyError, TypeError, ValueError, AttributeError)


class Trace:
    """Writes the trace of one generation behind what a file holds.

    Args:
        file: Made if it does not exist.
        header: What is known beforehand.

    Raises:
        InvalidOption: If the file cannot be written.
    """

    def __init__(self, file: Path, header: Mapping[str, Any]) -> None:
        self._file: Path | None = file
        self._asked: list[tuple[int, int]] = []
        names = ("mlx", "mlx-lm")
        versions = {name: importlib.metadata.version(name) for name in names}
        versions["mlx-lm-mtp"] = __version__
        _append(file, {"trace": FORMAT, **header, "versions": versions})

    def begin(self, depth: Depth) -> None:
        """Write what the depth begins with, before it is asked."""
        if isinstance(depth, Throughput):
            self._write({"known": depth.to_dict()})

    def asked(self, most: int, k: int) -> None:
        """Note that of `most` drafts k were chosen, for the line of the next verify."""
        self._asked.append((most, k))

    def add(self, done: Round) -> None:
        """Write one verify."""
        self._write(asdict(done) | {"asked": self._asked})
        self._asked = []

    def end(self, stats: DraftStats) -> None:
        """Write the statistics: the last line."""
        self._write({"stats": stats.to_dict()})

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is None:
            return
        try:
            _append(self._file, line)
        except InvalidOption as error:  # the text goes on, whatever the disk does
            self._file = None
            warnings.warn(f"mlx-lm-mtp: {error}", RuntimeWarning, stacklevel=2)


def begin(file: Path) -> None:
    """Make an empty file, to which generations are appended.

    Raises:
        InvalidOption: If it cannot be written.
    """
    _put(file, "wb", b"")


def _append(file: Path, line: dict[str, Any]) -> None:
    """Write a line in one piece, so that a kill leaves none that is cut."""
    text = json.dumps(_finite(line), allow_nan=False) + "\n"
    _put(file, "ab", text.encode())


def _put(file: Path, mode: str, text: bytes) -> None:
    try:
        with file.open(mode, buffering=0) as opened:
            opened.write(text)
    except OSError as error:
        raise InvalidOption(
            f"draft trace {file} cannot be written ({error.strerror}); name a file in "
            "a folder that exists and is yours, on a disk that has room."
        ) from None


@dataclass
class Recorded:
    """One generation, read from a trace.

    Args:
        header: What was known beforehand.
        rounds: Its verifies.
        asked: For each verify the choices of a depth that came before it was over and
            after the one before was: how many drafts there might be, and k.
        known: What the depth that yields most began with; None if it did not choose.
        stats: What the statistics came to; None if the run was killed before.
    """

    header: dict[str, Any]
    rounds: list[Round] = field(default_factory=list)
    asked: list[tuple[tuple[int, int], ...]] = field(default_factory=list)
    known: dict[str, Any] | None = None
    stats: dict[str, Any] | None = None


def read(file: Path) -> list[Recorded]:
    """The generations of a trace.

    A last line that is cut short is left out.

    Raises:
        InvalidOption: If the file cannot be read, or is no trace of this format.
    """
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise InvalidOption(
            f"{file} cannot be read: {reason}; name a trace that was written with "
            "--draft-trace."
        ) from None
    found: list[Recorded] = []
    for number, line in _parsed(file, lines):
        if "trace" in line:
            _check_header(file, number, line)
            found.append(Recorded(line))
        elif not found:
            raise _unreadable(file, number)
        elif "known" in line:
            found[-1].known = _known(file, number, line)
        elif "stats" in line:
            found[-1].stats = line["stats"]
        else:
            done, asked = _round(file, number, line)
            found[-1].rounds.append(done)
            found[-1].asked.append(asked)
    if not found:
        raise InvalidOption(
            f"{file} holds no trace; name a file that was written with --draft-trace."
        )
    return found


def _parsed(file: Path, lines: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, text in enumerate(lines, 1):
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            line = None
        if isinstance(line, dict):
            yield number, line
        elif number < len(lines):
            raise _unreadable(file, number)


def _round(
    file: Path, number: int, line: dict[str, Any]
) -> tuple[Round, tuple[tuple[int, int], ...]]:
    try:
        values = {name: _tuples(value) for name, value in line.items()}
        asked = tuple((int(most), int(k)) for most, k in values.pop("asked"))
        values["nearest"] = tuple(map(_nearest, values["nearest"]))
        values["first"] = values["first"] and _nearest(values["first"])
        return Round(**values), asked
    except (TypeError, KeyError, ValueError):
        raise _unreadable(file, number) from None


def _nearest(values: Any) -> Nearest:
    gap, best, second = values
    return Nearest(math.nan if gap is None else gap, best, second)


def _known(file: Path, number: int, line: dict[str, Any]) -> dict[str, Any]:
    known: dict[str, Any] = line["known"]
    try:
        Throughput.of(known)
    except _DAMAGES as error:
        raise _damaged(file, number, error) from None
    return known


def _check_header(file: Path, number: int, header: dict[str, Any]) -> None:
    if header["trace"] != FORMAT:
        raise InvalidOption(
            f"{file} is a trace of format {header['trace']}, and this is for format "
            f"{FORMAT}; replay it with the mlx-lm-mtp that has written it."
        )
    try:
        DraftOptions.of(header["options"])
        header["drafter"], header["num_draft_tokens"]
    except _DAMAGES as error:
        raise _damaged(file, number, error) from None


def _damaged(file: Path, number: int, error: Exception) -> InvalidOption:
    return InvalidOption(
        f"{file} has a damaged header in line {number} ({type(error).__name__}: "
        f"{error}); name a file as --draft-trace has written it."
    )


def _unreadable(file: Path, number: int) -> InvalidOption:
    return InvalidOption(
        f"{file} is no trace: line {number} is neither a header nor a verify; name a "
        "file that was written with --draft-trace."
    )


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: a broken row's are null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    return [_finite(v) for v in value] if isinstance(value, list | tuple) else value
