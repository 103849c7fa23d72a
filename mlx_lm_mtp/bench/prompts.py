"""Prompts that a benchmark decodes: built in, or read from a file."""

from __future__ import annotations

import json
from pathlib import Path

from ..errors import InvalidOption

# Each is a request and the beginning of an answer, so that base models can go on from
# it as well as models that are used with a chat template.
BUILT_IN = [
    "def __init__(self, name, parent=None):\n",
    "import argparse\nimport sys\n\n\ndef main(argv=None):\n"
    "    parser = argparse.ArgumentParser(",
    'class Queue:\n    """A first-in, first-out queue with a maximum size."""\n',
    "Explain in a few paragraphs what a compiler does.\n",
    "Write a short story about a lighthouse keeper who finds a letter.\n",
    "Return a copy of the string with",
]


def read(path: Path) -> list[str]:
    """The prompts of a file: a JSON list of strings, or one a line.

    Raises:
        InvalidOption: If the file cannot be read, or holds no prompts.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise InvalidOption(
            f"--prompts {path} cannot be read: {reason}; name a text file with one "
            "prompt a line, or a JSON list of strings."
        ) from None
    found = _of_json(path, text) if text.lstrip().startswith("[") else _lines(text)
    if not found:
        raise InvalidOption(
            f"--prompts {path} holds no prompts; write one a line, or a JSON list of "
            "strings."
        )
    return found


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


def _of_json(path: Path, text: str) -> list[str]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        return _lines(text)  # a line may begin with a bracket
    if not all(isinstance(prompt, str) and prompt for prompt in found):
        raise InvalidOption(
            f"--prompts {path} is a JSON list with something else than strings that "
            "are not empty; give strings alone."
        )
    return found
