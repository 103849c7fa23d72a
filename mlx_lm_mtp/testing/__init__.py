"""The kit for those who write drafters: everything that the loop promises them, and
everything that it asks of them, as checks.

::

    from mlx_lm_mtp.testing import check_drafter

    def test_my_drafter():
        check_drafter(lambda context: MyDrafter(context.tokenizer))

With pytest there is a fixture of that name. On the command line, for a drafter that is
installed: ``python -m mlx_lm_mtp.testing NAME``.

Everything is imported at first use, since pytest imports this package at its start.
"""

from __future__ import annotations

import importlib
from typing import Any

_EXPORTS = {
    "CHECKS": "suite",
    "check_drafter": "suite",
    "DrafterFault": "report",
    "Finding": "report",
    "Report": "report",
    "Spec": "models",
    "TinyModel": "models",
    "tiny_models": "models",
    "tiny_tokenizer": "tokenizer",
    "Scripted": "scripted",
    "Branching": "scripted",
    "right_where": "scripted",
}

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_EXPORTS[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
