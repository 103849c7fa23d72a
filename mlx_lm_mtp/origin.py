"""Remembers which directory a model was loaded from, and other facts by model.

Nothing is written on the model itself: facts are kept beside it and go when it goes.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class ByModel(Generic[T]):
    """A mapping from models to facts that does not keep the models alive.

    Modules are dicts and so cannot be keys of a `WeakKeyDictionary`.
    """

    def __init__(self) -> None:
        self._facts: dict[int, tuple[weakref.ref[Any], T]] = {}

    def __setitem__(self, model: Any, fact: T) -> None:
        key = id(model)
        gone = weakref.ref(model, lambda _: self._facts.pop(key, None))
        self._facts[key] = gone, fact

    def get(self, model: Any) -> T | None:
        """The fact about this model, or None."""
        ref, fact = self._facts.get(id(model), (None, None))
        return fact if ref is not None and ref() is model else None


_paths: ByModel[Path] = ByModel()


def path_of(model: Any) -> Path | None:
    """The directory that the model was loaded from, if that was seen."""
    return _paths.get(model)


def remembering(load_model: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap stock's `load_model` so that the directory is remembered."""

    @functools.wraps(load_model)
    def load(model_path: Path, *args: Any, **kwargs: Any) -> Any:
        model, config = load_model(model_path, *args, **kwargs)
        _paths[model] = Path(model_path).absolute()
        return model, config

    return load
