"""What was measured on this machine, kept in the user's cache directory as JSON.

Everything in it can be measured again, so a file that is missing, damaged or of another
version is as good as none.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any


def directory() -> Path:
    """Where it is kept: ``mlx-lm-mtp`` in ``$XDG_CACHE_HOME``, or in ``~/.cache``."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "mlx-lm-mtp"


def read(kind: str, name: str) -> dict[str, Any]:
    """What was written under a name; empty if there is nothing to be read."""
    try:
        found = json.loads(_path(kind, name).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write(kind: str, name: str, value: dict[str, Any]) -> None:
    """Keep JSON under a name; warns once a process and kind if that is not possible."""
    path = _path(kind, name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, suffix=".tmp", delete=False
        ) as file:
            json.dump(value, file)
        os.replace(file.name, path)  # whoever reads finds the old one or the new one
    except OSError as error:
        _warn(kind, path, error)


def _path(kind: str, name: str) -> Path:
    return directory() / kind / f"{name}.json"


_warned: set[str] = set()


def _warn(kind: str, path: Path, error: OSError) -> None:
    if kind in _warned:
        return
    _warned.add(kind)
    warnings.warn(
        f"mlx-lm-mtp: {path.parent} cannot be written ({error.strerror}), so {kind} "
        "are measured again in each process; set XDG_CACHE_HOME to one that can.",
        RuntimeWarning,
        stacklevel=3,
    )
