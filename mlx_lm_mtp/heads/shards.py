"""Weight files, read lazily: names, arrays, and what the file says of itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import HeadUnreadable

TRUNK = "model*.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Shard:
    """One weight file, its arrays not read yet.

    Args:
        name: The file, below the folder it was looked for in.
        arrays: Name -> array, lazy.
        metadata: The file's own.
    """

    name: str
    arrays: Mapping[str, mx.array]
    metadata: Mapping[str, str]

    @property
    def format(self) -> str | None:
        """``mlx`` for files that MLX wrote, ``pt`` for most others."""
        return self.metadata.get("format")


def load(file: Path, root: Path | None = None) -> Shard:
    """Open one file.

    Args:
        file: Which.
        root: The folder that its name is told below of; by default its own.

    Raises:
        HeadUnreadable: If it is cut short or damaged.
    """
    try:
        arrays, metadata = mx.load(str(file), return_metadata=True)
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise HeadUnreadable(
            f"{file} is damaged or cut short ({reason}); download it again."
        ) from error
    name = file.relative_to(root).as_posix() if root else file.name
    return Shard(name, arrays, metadata)


def check_readable(path: Path) -> None:
    """Look into every weight file of a model.

    Raises:
        HeadUnreadable: Naming the first file that is cut short or damaged.
    """
    for file in sorted(path.glob(TRUNK)):
        load(file)


def index(path: Path) -> dict[str, str]:
    """Tensor -> file, as the folder's index has it; empty without one."""
    return read_json(path / INDEX).get("weight_map", {})


def config(path: Path) -> dict[str, Any]:
    """The folder's ``config.json``; empty without one."""
    return read_json(path / "config.json")


def read_json(file: Path) -> dict[str, Any]:
    """What a JSON file holds, or nothing.

    Raises:
        HeadUnreadable: If it is no JSON object.
    """
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text())
    except ValueError as error:
        found = error
    if not isinstance(found, dict):
        raise HeadUnreadable(f"{file} is damaged ({found}); download it again.")
    return found
