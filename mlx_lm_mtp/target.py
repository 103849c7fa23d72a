"""The target: one stock forward gives logits and, for drafters that ask, hidden states.

Stock's own `model(tokens, cache=...)` runs, whatever it does to its logits; the hidden
states are noted down as they pass through the final norm.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
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
from .wrapping import Meanwhile, wrap

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
        self._norm = None if hidden is None else _final_norm(model)
        self._pre_norm = hidden == "pre_norm"
        self._by_row = _by_row.get(model)
        if self._by_row is None:
            self._by_row = _by_row[model] = attentions_by_row(model)
        on_cpu = mx.default_device() == mx.cpu
        quantizes = on_cpu and any(isinstance(m, nn.QQLinear) for m in model.modules())
        self.one_row = ONE_ROW if quantizes else ""

    def __call__(
        self, tokens: mx.array, caches: Sequence[Any], *, form: Form | None = None
    ) -> Forward:
        """Feed `(P, S)` tokens; with a form, in the arithmetic of decoding."""
        if form is None or tokens.size == 1:
            return self._forward(tokens, caches)
        with computed(form, *tokens.shape), self._one_by_one(tokens.shape[1]):
            return self._forward(tokens, caches)

    def _one_by_one(self, width: int) -> AbstractContextManager[None]:
        """Where layers of the model need it, so many tokens run one after the other."""
        return rowwise(self._by_row) if self._by_row and width > 1 else nullcontext()

    def _forward(self, tokens: mx.array, caches: Sequence[Any]) -> Forward:
        if self._norm is None:
            with self.recurrence():
                return Forward(self.model(tokens, cache=caches), None)
        tap = _Tap(self._norm)
        wrap(type(self._norm), "__call__", _noting)
        with self.recurrence(), Meanwhile(_thread, "tap", tap):
            logits = self.model(tokens, cache=caches)
        return Forward(logits, tap.pre_norm if self._pre_norm else tap.post_norm)


class _Tap:
    """What has gone through one norm."""

    pre_norm: mx.array | None = None
    post_norm: mx.array | None = None

    def __init__(self, norm: nn.Module) -> None:
        self.norm = norm


class _PerThread(threading.local):
    tap: _Tap | None = None


_thread = _PerThread()


def _noting(stock: Callable[..., mx.array]) -> Callable[..., mx.array]:
    @functools.wraps(stock)
    def call(self: nn.Module, x: mx.array) -> mx.array:
        y = stock(self, x)
        tap = _thread.tap
        if tap is not None and tap.norm is self:
            tap.pre_norm, tap.post_norm = x, y
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
