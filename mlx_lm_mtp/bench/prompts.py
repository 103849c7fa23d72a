"""Prompts that a benchmark decodes: built in, or read from a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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


_FORMS = 'one prompt a line, JSON lines with a "prompt" each, or a JSON list of strings'


def read(path: Path) -> list[str]:
    """The prompts of a file.

    If every line is a JSON object, these are JSON lines, each with a ``prompt``; if the
    whole is a JSON list, it is one of strings; else every line is a prompt as it is.
    Empty lines do not count.

    Raises:
        InvalidOption: If the file cannot be read, or holds no prompts.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise InvalidOption(
            f"--prompts {path} cannot be read: {reason}; name a text file with "
            f"{_FORMS}."
        ) from None
    lines = [line for line in text.splitlines() if line.strip()]
    objects = [_parsed(line) for line in lines]
    if lines and all(isinstance(found, dict) for found in objects):
        found = [_prompt(path, i + 1, line) for i, line in enumerate(objects)]
    elif isinstance(whole := _parsed(text), list):
        found = _strings(path, whole)
    else:
        found = lines
    if not found:
        raise InvalidOption(f"--prompts {path} holds no prompts; write {_FORMS}.")
    return found


def _parsed(text: str) -> Any:
    """What this is as JSON; None if it is none."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None


def _prompt(path: Path, number: int, line: dict[str, Any]) -> str:
    prompt = line.get("prompt")
    if not isinstance(prompt, str) or not prompt:
        raise InvalidOption(
            f'--prompts {path} has no "prompt" in line {number}, where JSON lines need '
            "one that is a string and not empty; add it."
        )
    return prompt


def _strings(path: Path, found: list[Any]) -> list[str]:
    if not all(isinstance(prompt, str) and prompt for prompt in found):
        raise InvalidOption(
            f"--prompts {path} is a JSON list with something else than strings that "
            "are not empty; give strings alone."
        )
    return found
