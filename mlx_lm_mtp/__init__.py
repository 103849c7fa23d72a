"""Speculative decoding for stock mlx-lm that does not change a single token.

Installed, the package turns itself on when mlx_lm is imported::

    mlx_lm.generate --model PATH --mtp --prompt "..."
    mlx_lm.stream_generate(model, tokenizer, prompt, draft="mtp", num_draft_tokens=3)

What is needed only for drafting is imported at first use, since this module runs in
every process that imports mlx_lm.
"""

from __future__ import annotations

import importlib
from typing import Any

from ._version import __version__

# Not at first use: importing the submodule `install` binds that name to the module.
from .install import install, uninstall

_EXPORTS = {
    "hookimpl": "hookspecs",
    "hookspec": "hookspecs",
    "option": "declared",
    "CONTRACT": "drafters.base",
    "Drafter": "drafters.base",
    "Branch": "drafters.base",
    "Choices": "drafters.base",
    "DraftContext": "drafters.base",
    "Wanted": "drafters.base",
    "Proposal": "drafters.base",
    "MTPDrafter": "drafters.mtp",
    "LooksAhead": "guides",
    "pure": "purity",
    "DraftOptions": "options",
    "DraftStats": "stats",
    "Tally": "stats",
    "draft_generate_step": "generate",
    "load_head": "heads",
    "snapshot": "state.snapshot",
    "restore": "state.snapshot",
    "begin_speculative_checkpoints": "state.commit",
    "commit_verified_prefix": "state.commit",
    "commit_verified_snapshot": "state.commit",
    "tile_caches": "state.tree",
    "commit_tree_row": "state.tree",
    "DraftError": "errors",
}

__all__ = ["__version__", "install", "uninstall", *_EXPORTS]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_EXPORTS[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
