"""Wrap names of mlx and mlx-lm that drafting needs to see through, and put them back.

A wrapper stays in place once it is there and consults thread-local state, so that it
does nothing in a thread that is not drafting: swapping names or classes to and fro
would be seen by every thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

_stock: dict[tuple[Any, str], Any] = {}
_lock = threading.Lock()


def wrap(owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
    """Replace a name of a module or class by its wrapped self, unless it is already.

    A name that this version of stock does not have is left alone.
    """
    if isinstance(owner, type):  # where the class, or one that it inherits from, has it
        owner = next(cls for cls in owner.__mro__ if name in vars(cls))
    with _lock:
        if (owner, name) not in _stock and name in vars(owner):
            _stock[owner, name] = vars(owner)[name]
            setattr(owner, name, wrapper(vars(owner)[name]))


def unwrap_all() -> None:
    """Put every stock object back."""
    with _lock:
        while _stock:
            (owner, name), stock = _stock.popitem()
            setattr(owner, name, stock)
