"""Heads on the hub: only the files that hold one are fetched.

The hub's own client does the work, with its cache and its progress bars.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import HeadNotFound
from .find import SIDECARS
from .shards import INDEX, TRUNK, index

_FILES = ("config.json", INDEX, *SIDECARS)
HeadFiles = Callable[[Mapping[str, str]], set[str]]


def local(place: str | Path, head_files: HeadFiles) -> Path:
    """A path as it is, or the local copy of a repository's head.

    Args:
        place: A path, or ``owner/name``.
        head_files: Which files hold a head, of an index of tensor -> file.

    Raises:
        HeadNotFound: If there is neither such a path nor such a repository.
    """
    path = Path(place).expanduser()
    if path.exists() or isinstance(place, Path) or place.count("/") != 1:
        return path
    # Sidecars first: they are small, and count before what is in the shards.
    folder = _fetched(place, _FILES)
    if not any(any(folder.glob(pattern)) for pattern in SIDECARS):
        files = head_files(index(folder))
        _fetched(place, sorted(files) or (TRUNK,))
    return folder


def _fetched(repository: str, patterns: Any) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        found = snapshot_download(repository, allow_patterns=list(patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as e:
        reason = " ".join(str(e).split())
        raise HeadNotFound(
            f"there is no path {repository!r}, and no such repository could be read "
            f"from the hub ({reason}); name a folder, a file, or owner/name."
        ) from e
    return Path(found)
