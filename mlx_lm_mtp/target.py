"""The target: one stock forward gives logits and, for drafters that ask, hidden states.

Stock's own `model(tokens, cache=...)` runs, whatever it does to its logits; the hidden
states are noted down as they pass through the final norm.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .anatomy import final_norm, text_model
from .errors import DrafterError
from .origin import ByModel
from .state.capture import see_through
from .state.forms import Form, computed
from .state.recurrence import Recurrence, current
from .state.rowwise import attentions_by_row, rowwise
from .wrapping import wrap

_by_row: ByModel[frozenset[type[nn.Module]]] = ByModel()
ONE_ROW = "MLX quantises activations on the CPU for one row only"


@dataclass
class Forward:
    """What one forward over `(1, S)` tokens gave.

    Args:
        logits: `(1, S, V)`, lazy: unused ones are never computed.
        hidden: `(1, S, H)`, or None when nobody asked.
    """

    logits: mx.array
    hidden: mx.array | None


class Target:
    """The model whose output counts.

    Args:
        model: A model of mlx-lm.
        hidden: ``post_norm``, ``pre_norm``, or None for no hidden states.
        recurrence: How its gated-delta layers are computed; by default as the thread
            does.

    Attributes:
        recurrence: As given.
        one_row: Why it can be fed one token at a time only; empty if it need not.

    Raises:
        DrafterError: If hidden states are wanted and no final norm is found.
    """

    def __init__(
        self,
        model: nn.Module,
        hidden: str | None = None,
        recurrence: Recurrence | None = None,
    ) -> None:
        self.model = model
        self.recurrence = recurrence or current()
        see_through()
        self._hidden = hidden
        self._norm = None if hidden is None else _final_norm(model)
        self._by_row = _by_row.get(model)
        if self._by_row is None:
            self._by_row = _by_row[model] = attentions_by_row(model)
        quantized = any(isinstance(m, nn.QQLinear) for m in model.modules())
        self.one_row = ONE_ROW if quantized and mx.default_device() == mx.cpu else ""

    def __call__(
        self, tokens: mx.array, caches: Sequence[Any], *, form: Form | None = None
    ) -> Forward:
        """Feed `(P, S)` tokens; with a form, in the arithmetic of decoding."""
        with ExitStack() as stack:
            if form is not None and tokens.size > 1:
                stack.enter_context(computed(form, *tokens.shape))
                if self._by_row and tokens.shape[1] > 1:
                    stack.enter_context(rowwise(self._by_row))
            stack.enter_context(self.recurrence())
            tap = stack.enter_context(_tapped(self._norm))
            logits = self.model(tokens, cache=caches)
            return Forward(logits, getattr(tap, self._hidden) if self._hidden else None)


class _Tap(threading.local):
    """What went through one norm in this thread."""

    norm: nn.Module | None = None
    pre_norm: mx.array | None = None
    post_norm: mx.array | None = None


_tap = _Tap()


@contextmanager
def _tapped(norm: nn.Module | None) -> Iterator[_Tap]:
    """Note down what goes through a norm, in this thread, while the context lasts."""
    if norm is not None:
        wrap(type(norm), "__call__", _noting)
    _tap.norm = norm
    try:
        yield _tap
    finally:
        _tap.norm = _tap.pre_norm = _tap.post_norm = None  # nothing is kept alive


def _noting(stock: Callable[..., mx.array]) -> Callable[..., mx.array]:
    @functools.wraps(stock)
    def call(self: nn.Module, x: mx.array) -> mx.array:
        y = stock(self, x)
        if _tap.norm is self:
            _tap.pre_norm, _tap.post_norm = x, y
        return y

    return call


def _final_norm(model: nn.Module) -> nn.Module:
    norm = final_norm(model)
    if norm is None:
        raise DrafterError(
            f"no final norm was found in {type(text_model(model)).__module__}, so its "
            "hidden states cannot be given to this drafter; use one that needs none."
        )
    return norm
