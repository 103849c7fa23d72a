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
        owner = next((cls for cls in owner.__mro__ if name in vars(cls)), owner)
    if (owner, name) in _stock:  # asked in every forward
        return
    with _lock:
        if (owner, name) not in _stock and name in vars(owner):
            stock = vars(owner)[name]
            setattr(owner, name, wrapper(stock))
            _stock[owner, name] = stock  # not before: who finds it here does not wait


class Meanwhile:
    """In a ``with``, one name in the state of this thread has another value.

    A class, for a generator would take several times as long, and every forward enters
    a few of these.

    Args:
        state: What wrappers consult.
        name: Of the attribute.
        value: The other value.
    """

    def __init__(self, state: threading.local, name: str, value: Any) -> None:
        self._state = state
        self._name = name
        self._value = value

    def __enter__(self) -> None:
        self._before = getattr(self._state, self._name)
        setattr(self._state, self._name, self._value)

    def __exit__(self, *error: object) -> None:
        setattr(self._state, self._name, self._before)


def unwrap_all() -> None:
    """Put every stock object back."""
    with _lock:
        while _stock:
            (owner, name), stock = _stock.popitem()
            setattr(owner, name, stock)
